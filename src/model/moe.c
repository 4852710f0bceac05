/* moe.c - a mixture-of-experts layer: route, permute, experts, un-permute, weighted sum.
 * Floor: model.
 *
 * Tensor ranks route their own rows, each among the experts of its own expert group. Experts are
 * split over the expert group. With one rank there, rows go straight to the experts and
 * nobody but the device knows how many each gets; with more, counts then rows cross by all-to-all,
 * while the shared expert computes. */
#include "model/layers.h"

#include <stdio.h>
#include <string.h>

static int64_t declare_experts(tr_registry *r, int64_t layer, const char *what, int64_t E,
                               int64_t out, int64_t in, double std, int stage) {
    tr_param_decl d = {.ndim = 3,
                       .shape = {E, out, in},
                       .split = TR_SPLIT_EXPERT,
                       .init = TR_INIT_NORMAL,
                       .init_std = (float)std,
                       .decay = true,
                       .stage = stage,
                       .copy_stage = -1};
    snprintf(d.name, sizeof d.name, "model.layers.%lld.mlp.experts.%s_proj.weight",
             (long long)layer, what);
    return tr_registry_add(r, &d);
}

void tr_moe_declare(tr_moe_layer *l, tr_registry *r, const tr_model_config *m, int64_t index,
                    int64_t moe_index, int stage) {
    int64_t E = m->num_experts, H = m->hidden_size, I = m->moe_intermediate_size;
    double std = m->initializer_range, out_std = tr_residual_std(m);
    char shared[64];
    snprintf(shared, sizeof shared, "model.layers.%lld.mlp.shared_experts", (long long)index);
    l->moe_index = moe_index;
    l->router = tr_linear_declare(r, E, H, TR_SPLIT_NONE, std, stage,
                                  "model.layers.%lld.mlp.gate.weight", (long long)index);
    l->gate = declare_experts(r, index, "gate", E, I, H, std, stage);
    l->up = declare_experts(r, index, "up", E, I, H, std, stage);
    l->down = declare_experts(r, index, "down", E, H, I, out_std, stage);
    tr_mlp_declare(&l->shared, r, m, shared, m->shared_expert_intermediate_size, stage);
}

/* --- crossing the expert group ---------------------------------------------------------------- */

/* How many rows each expert rank sends and receives; LOCAL, FROM, TO on the device. */
static void plan_exchange(const tr_pass *pass, tr_saved *saved) {
    tr_env *c = pass->c;
    tr_comm *comm = c->grid->comm[TR_GROUP_EXPERT];
    int64_t ep = tr_comm_size(comm), E = c->config->num_experts, El = E / ep;
    int64_t one[ep], offset[E + 1], sent[E], received[E];
    c->device->copy(c->stream, offset, saved->t[TR_SAVED_OFFSET], (size_t)(E + 1) * 8, TR_TO_HOST);
    c->device->stream_wait(c->stream);
    for (int64_t e = 0; e < E; e++) sent[e] = offset[e + 1] - offset[e];
    for (int64_t r = 0; r < ep; r++) one[r] = 1;
    tr_end(tr_all_to_all_begin(comm, NULL, sent, one, received, one, El * 8));
    saved->rows_sent = offset[E];
    saved->rows_here = 0;
    for (int64_t r = 0; r < ep; r++) {
        saved->send_rows[r] = offset[(r + 1) * El] - offset[r * El];
        saved->recv_rows[r] = 0;
        for (int64_t e = 0; e < El; e++) saved->recv_rows[r] += received[r * El + e];
        saved->rows_here += saved->recv_rows[r];
    }
    int64_t *local = tr_save(pass, saved, TR_SAVED_LOCAL);
    int32_t *from = tr_save(pass, saved, TR_SAVED_FROM);
    int32_t *to = tr_save(pass, saved, TR_SAVED_TO);
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    int64_t *counts = tr_scratch(c, E, TR_I64);
    c->device->copy(c->stream, counts, received, (size_t)E * 8, TR_TO_DEVICE);
    c->kernels->moe_regroup(c->stream, local, from, to, counts, ep, El);
    c->device->stream_wait(c->stream);
    tr_arena_release(c->scratch, mark);
}

static bool crosses(const tr_env *c) {
    return c->grid->at.shape.expert > 1;
}

/* Rows an expert kernel works on: exact when they crossed, else known to the device alone. */
static tr_rows expert_rows(const tr_env *c, const tr_saved *saved) {
    if (crosses(c)) return (tr_rows){saved->rows_here, NULL};
    const int64_t *offset = saved->t[TR_SAVED_OFFSET];
    return (tr_rows){c->N_loc * c->config->num_experts_per_tok, offset + c->config->num_experts};
}

static const int64_t *expert_offsets(const tr_env *c, const tr_saved *saved) {
    return saved->t[crosses(c) ? TR_SAVED_LOCAL : TR_SAVED_OFFSET];
}

/* Source to experts: `rows` [rows_sent,H] in expert order begin to travel. */
static void go_begin(const tr_env *c, const tr_saved *saved, void *rows, tr_moe_flight *f) {
    int64_t H = c->config->hidden_size;
    f->arriving = tr_scratch(c, saved->rows_here * H, c->t);
    f->request =
        tr_all_to_all_begin(c->grid->comm[TR_GROUP_EXPERT], c->stream, rows, saved->send_rows,
                            f->arriving, saved->recv_rows, H * (int64_t)tr_dtype_bytes(c->t));
}

static void land(tr_moe_flight *f) {
    tr_end(f->request);
    f->request = NULL;
}

/* They have arrived: into order by local expert, out [rows_here,H]. */
static void go_end(const tr_env *c, const tr_saved *saved, tr_moe_flight *f, void *out) {
    land(f);
    c->kernels->gather_rows(c->stream, c->t, out, f->arriving, saved->t[TR_SAVED_FROM], 1, NULL,
                            (tr_rows){saved->rows_here, NULL}, c->config->hidden_size);
}

/* Experts back to the source: rows [rows_here,H] -> out [rows_sent,H]. */
static void back_begin(const tr_env *c, const tr_saved *saved, const void *rows, void *out,
                       tr_moe_flight *f) {
    int64_t H = c->config->hidden_size;
    void *sent = tr_scratch(c, saved->rows_here * H, c->t);
    c->kernels->gather_rows(c->stream, c->t, sent, rows, saved->t[TR_SAVED_TO], 1, NULL,
                            (tr_rows){saved->rows_here, NULL}, H);
    f->request =
        tr_all_to_all_begin(c->grid->comm[TR_GROUP_EXPERT], c->stream, sent, saved->recv_rows, out,
                            saved->send_rows, H * (int64_t)tr_dtype_bytes(c->t));
}

/* --- the experts ------------------------------------------------------------------------------ */

static void activate(const tr_pass *pass, tr_saved *saved, tr_rows rows) {
    const tr_env *c = pass->c;
    int64_t I = c->config->moe_intermediate_size;
    void *act = tr_save(pass, saved, TR_SAVED_ACT_E);
    c->kernels->swiglu_forward(c->stream, c->t, act, saved->t[TR_SAVED_GATE_E],
                               saved->t[TR_SAVED_UP_E], rows, I);
}

/* y[R,out] = beta*y + x[R,in] op(W[expert of the row]) */
static void grouped(const tr_env *c, const tr_saved *saved, void *y, const void *x, int64_t weight,
                    bool forward, tr_rows rows, float beta) {
    const tr_param *w = tr_param_at(c, weight);
    int64_t out = w->decl.shape[1], in = w->decl.shape[2];
    c->kernels->grouped_gemm(c->stream, c->t, c->t, w->box.extent[0], expert_offsets(c, saved),
                             rows.max, x, w->weight, forward, y, forward ? out : in,
                             forward ? in : out, beta);
}

static void run_grouped_weight(const tr_env *c, const tr_weight_job *job) {
    tr_param *w = job->w;
    c->kernels->grouped_gemm_weight(c->stream, c->t, w->box.extent[0], job->offset, job->rows,
                                    job->dy, job->x, w->grad, w->decl.shape[1], w->decl.shape[2],
                                    tr_gradient_beta(w));
}

static void grouped_weight(const tr_pass *pass, const tr_saved *saved, int64_t weight,
                           const void *dy, const void *x, tr_rows rows) {
    tr_weight_add(pass, &(tr_weight_job){.run = run_grouped_weight,
                                         .w = tr_param_at(pass->c, weight),
                                         .dy = dy,
                                         .x = x,
                                         .rows = rows.max,
                                         .offset = expert_offsets(pass->c, saved)});
}

static void experts_forward(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved, void *y) {
    const tr_env *c = pass->c;
    tr_rows rows = expert_rows(c, saved);
    void *gate = tr_save(pass, saved, TR_SAVED_GATE_E);
    void *up = tr_save(pass, saved, TR_SAVED_UP_E);
    grouped(c, saved, gate, saved->t[TR_SAVED_XE], l->gate, true, rows, 0);
    grouped(c, saved, up, saved->t[TR_SAVED_XE], l->up, true, rows, 0);
    activate(pass, saved, rows);
    grouped(c, saved, y, saved->t[TR_SAVED_ACT_E], l->down, true, rows, 0);
}

static void experts_backward(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved,
                             const void *dy, void *dx) {
    const tr_env *c = pass->c;
    tr_rows rows = expert_rows(c, saved);
    int64_t I = c->config->moe_intermediate_size;
    if (tr_lost(saved, TR_SAVED_ACT_E)) activate(pass, saved, rows);
    void *dgate = tr_operand(pass, rows.max * I), *dup = tr_operand(pass, rows.max * I);
    grouped_weight(pass, saved, l->down, dy, saved->t[TR_SAVED_ACT_E], rows);
    grouped(c, saved, dgate, dy, l->down, false, rows, 0); /* d act, then in place */
    c->kernels->swiglu_backward(c->stream, c->t, dgate, dup, dgate, saved->t[TR_SAVED_GATE_E],
                                saved->t[TR_SAVED_UP_E], rows, I);
    grouped(c, saved, dx, dgate, l->gate, false, rows, 0);
    grouped(c, saved, dx, dup, l->up, false, rows, 1);
    grouped_weight(pass, saved, l->gate, dgate, saved->t[TR_SAVED_XE], rows);
    grouped_weight(pass, saved, l->up, dup, saved->t[TR_SAVED_XE], rows);
}

/* --- the layer -------------------------------------------------------------------------------- */

/* Rows in expert order at the source, at most N*k. */
static tr_rows source_rows(const tr_env *c, const tr_saved *saved) {
    if (crosses(c)) return (tr_rows){saved->rows_sent, NULL};
    return expert_rows(c, saved);
}

void tr_moe_forward_begin(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved,
                          const void *x, tr_moe_flight *f) {
    tr_env *c = pass->c;
    int64_t H = c->config->hidden_size, k = c->config->num_experts_per_tok;
    if (!pass->recomputing) { /* recomputation reuses the routing */
        tr_router_forward(l, pass, saved, x);
        if (crosses(c)) plan_exchange(pass, saved);
    }
    tr_rows sent = source_rows(c, saved);
    void *xe = tr_save(pass, saved, TR_SAVED_XE);
    tr_save(pass, saved, TR_SAVED_YE);
    *f = (tr_moe_flight){.mark = tr_arena_get_mark(c->scratch)};
    void *rows = crosses(c) ? tr_scratch(c, sent.max * H, c->t) : xe;
    c->kernels->gather_rows(c->stream, c->t, rows, x, saved->t[TR_SAVED_PAIR_OF], k, NULL, sent, H);
    if (crosses(c)) go_begin(c, saved, rows, f);
}

void tr_moe_forward_middle(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved,
                           const void *x, void *y, tr_moe_flight *f) {
    const tr_env *c = pass->c;
    int64_t here = expert_rows(c, saved).max;
    void *ye = saved->t[TR_SAVED_YE];
    if (l->shared.width) tr_mlp_forward(&l->shared, pass, saved, x, y);
    if (crosses(c)) go_end(c, saved, f, saved->t[TR_SAVED_XE]);
    void *out = crosses(c) ? tr_scratch(c, here * c->config->hidden_size, c->t) : ye;
    experts_forward(l, pass, saved, out);
    if (crosses(c)) back_begin(c, saved, out, ye, f);
}

void tr_moe_forward_end(const tr_pass *pass, tr_saved *saved, void *y, tr_moe_flight *f) {
    const tr_env *c = pass->c;
    land(f);
    c->kernels->combine_rows(c->stream, c->t, y, saved->t[TR_SAVED_YE], saved->t[TR_SAVED_ROW_OF],
                             saved->t[TR_SAVED_WEIGHT], 1, c->N_loc, c->config->num_experts_per_tok,
                             c->config->hidden_size);
    /* under recomputation tensors of the experts stay in scratch until the block is done */
    if (!pass->recomputing && c->recompute == TR_RECOMPUTE_NONE)
        tr_arena_release(c->scratch, f->mark);
}

void tr_moe_forward(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved, const void *x,
                    void *y) {
    tr_moe_flight f;
    tr_moe_forward_begin(l, pass, saved, x, &f);
    tr_moe_forward_middle(l, pass, saved, x, y, &f);
    tr_moe_forward_end(pass, saved, y, &f);
}

void tr_moe_backward_begin(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved,
                           const void *dy, void *dx, tr_moe_flight *f) {
    const tr_env *c = pass->c;
    const void *x = saved->t[TR_SAVED_NORM2];
    int64_t H = c->config->hidden_size, k = c->config->num_experts_per_tok;
    tr_rows sent = source_rows(c, saved);
    float *dweight = tr_scratch(c, c->N_loc * k, TR_F32);
    void *dye = crosses(c) ? tr_scratch(c, sent.max * H, c->t) : tr_operand(pass, sent.max * H);
    *f = (tr_moe_flight){.gradient = dye};
    c->kernels->gather_rows(c->stream, c->t, dye, dy, saved->t[TR_SAVED_PAIR_OF], k,
                            saved->t[TR_SAVED_WEIGHT], sent, H);
    if (crosses(c)) go_begin(c, saved, dye, f);
    c->kernels->combine_rows_weight(c->stream, c->t, dweight, dy, saved->t[TR_SAVED_YE],
                                    saved->t[TR_SAVED_ROW_OF], c->N_loc, k, H);
    if (l->shared.width)
        tr_mlp_backward(&l->shared, pass, saved, x, dy, dx);
    else
        c->device->zero(c->stream, dx, (size_t)(c->N_loc * H) * tr_dtype_bytes(c->t));
    tr_router_backward(l, pass, saved, x, dweight, dx);
}

void tr_moe_backward_middle(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved,
                            tr_moe_flight *f) {
    const tr_env *c = pass->c;
    int64_t H = c->config->hidden_size, here = expert_rows(c, saved).max;
    void *dye = f->gradient, *dxe = tr_scratch(c, here * H, c->t);
    if (crosses(c)) {
        dye = tr_operand(pass, here * H);
        go_end(c, saved, f, dye);
    }
    experts_backward(l, pass, saved, dye, dxe);
    f->gradient = crosses(c) ? tr_scratch(c, source_rows(c, saved).max * H, c->t) : dxe;
    if (crosses(c)) back_begin(c, saved, dxe, f->gradient, f);
}

void tr_moe_backward_end(const tr_pass *pass, tr_saved *saved, void *dx, tr_moe_flight *f) {
    const tr_env *c = pass->c;
    land(f);
    c->kernels->combine_rows(c->stream, c->t, dx, f->gradient, saved->t[TR_SAVED_ROW_OF], NULL, 1,
                             c->N_loc, c->config->num_experts_per_tok, c->config->hidden_size);
}

void tr_moe_backward(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved, const void *dy,
                     void *dx) {
    tr_moe_flight f;
    tr_moe_backward_begin(l, pass, saved, dy, dx, &f);
    tr_moe_backward_middle(l, pass, saved, &f);
    tr_moe_backward_end(pass, saved, dx, &f);
}
