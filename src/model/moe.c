/* moe.c - a mixture-of-experts layer: route, permute, experts, un-permute, weighted sum.
 * Floor: model.
 *
 * Tensor ranks route their own rows, each among the experts of its own expert group, over which
 * experts are split. With one rank there, rows go straight to the experts and nobody but the device
 * knows how many each gets; with more, rows travel (exchange.h): there under the first part of the
 * shared expert, back under its second and, in a backward, the experts' weight gradients. What
 * returns are sums over the experts of a rank. */
#include "model/gradient.h"
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

/* Rows an expert kernel works on: exact when they crossed, else known to the device alone. */
static tr_rows expert_rows(const tr_env *c, const tr_saved *saved) {
    const tr_stop *s = tr_stop_of_experts(saved);
    bool exact = tr_exchange_crosses(c->exchange);
    return (tr_rows){s->sorted, exact ? NULL : s->offset + c->config->num_experts};
}

/* --- the experts ------------------------------------------------------------------------------ */

static void activate(const tr_pass *pass, tr_saved *saved, tr_rows rows) {
    const tr_env *c = pass->c;
    int64_t I = c->config->moe_intermediate_size;
    void *act = tr_save(pass, saved, TR_SAVED_ACT_E);
    c->kernels->glu_forward(c->stream, c->t, c->config->hidden_act, act, saved->t[TR_SAVED_GATE_E],
                            saved->t[TR_SAVED_UP_E], rows, I);
}

/* y[R,out] = beta*y + x[R,in] op(W[expert of the row]) */
static void grouped(const tr_env *c, const tr_saved *saved, void *y, const void *x, int64_t weight,
                    bool forward, tr_rows rows, float beta) {
    const tr_param *w = tr_param_at(c, weight);
    int64_t out = w->decl.shape[1], in = w->decl.shape[2];
    c->kernels->grouped_gemm(c->stream, c->t, c->t, w->box.extent[0],
                             tr_stop_of_experts(saved)->offset, rows.max, x, w->weight, forward, y,
                             forward ? out : in, forward ? in : out, beta);
}

static void run_grouped_weight(const tr_env *c, const tr_weight_job *job) {
    tr_param *w = job->w;
    tr_gradient dw = tr_gradient_take(c->registry, w);
    c->kernels->grouped_gemm_weight(c->stream, c->t, w->box.extent[0], job->offset, job->rows,
                                    job->dy, job->x, dw.at, w->decl.shape[1], w->decl.shape[2],
                                    dw.beta);
}

static void grouped_weight(const tr_pass *pass, const tr_saved *saved, int64_t weight,
                           const void *dy, const void *x, tr_rows rows) {
    tr_weight_add(pass, &(tr_weight_job){.run = run_grouped_weight,
                                         .w = tr_param_at(pass->c, weight),
                                         .dy = dy,
                                         .x = x,
                                         .rows = rows.max,
                                         .offset = tr_stop_of_experts(saved)->offset});
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

/* The gradient of what they were given, from which those of the weights follow. */
static tr_mlp_flight experts_backward(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved,
                                      const void *dy, void *dx) {
    const tr_env *c = pass->c;
    tr_rows rows = expert_rows(c, saved);
    int64_t I = c->config->moe_intermediate_size;
    void *dgate = tr_operand(pass, rows.max * I), *dup = tr_operand(pass, rows.max * I);
    grouped(c, saved, dgate, dy, l->down, false, rows, 0); /* d act, then in place */
    c->kernels->glu_backward(c->stream, c->t, c->config->hidden_act, dgate, dup, dgate,
                             saved->t[TR_SAVED_GATE_E], saved->t[TR_SAVED_UP_E], rows, I);
    grouped(c, saved, dx, dgate, l->gate, false, rows, 0);
    grouped(c, saved, dx, dup, l->up, false, rows, 1);
    return (tr_mlp_flight){dgate, dup};
}

static void experts_weights(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved,
                            const void *dy, const tr_mlp_flight *f) {
    tr_rows rows = expert_rows(pass->c, saved);
    if (tr_lost(saved, TR_SAVED_ACT_E)) activate(pass, saved, rows);
    grouped_weight(pass, saved, l->down, dy, saved->t[TR_SAVED_ACT_E], rows);
    grouped_weight(pass, saved, l->gate, f->dgate, saved->t[TR_SAVED_XE], rows);
    grouped_weight(pass, saved, l->up, f->dup, saved->t[TR_SAVED_XE], rows);
}

/* --- the layer -------------------------------------------------------------------------------- */

/* Rows of experts become, weighted or not, rows of tokens at hand, which begin to return. Without a
 * hop they are added to y at once. */
static void back_begin(const tr_env *c, const tr_saved *saved, const void *rows,
                       const float *weight, void *y, tr_journey *back) {
    const tr_stop *s = tr_stop_of_experts(saved);
    int64_t H = c->config->hidden_size, k = c->config->num_experts_per_tok;
    bool crosses = tr_exchange_crosses(c->exchange);
    tr_dtype t = crosses ? tr_exchange_wire(c->exchange) : c->t;
    void *sum = crosses ? tr_scratch(c, s->rows * H, t) : y;
    c->kernels->combine_rows(c->stream, t, sum, c->t, rows, s->row_of, weight, crosses ? 0 : 1,
                             s->rows, k, H);
    if (crosses) *back = tr_return_begin(c, saved, sum, H, t);
}

/* y[N_loc,H] += what returns. */
static void back_end(const tr_env *c, const tr_saved *saved, void *y, tr_journey *back) {
    if (tr_exchange_crosses(c->exchange)) tr_return_end(c, saved, back, c->t, y, 1);
}

void tr_moe_forward_begin(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved,
                          const void *x, tr_moe_flight *f) {
    const tr_env *c = pass->c;
    if (!pass->recomputing) tr_router_forward(l, pass, saved, x); /* else routing is reused */
    tr_save(pass, saved, TR_SAVED_XE);
    tr_save(pass, saved, TR_SAVED_YE);
    *f = (tr_moe_flight){.mark = tr_arena_get_mark(c->scratch)};
    f->rows = tr_go_begin(c, saved, x);
}

void tr_moe_forward_middle(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved,
                           const void *x, void *y, tr_moe_flight *f) {
    const tr_env *c = pass->c;
    const tr_stop *s = tr_stop_of_experts(saved);
    void *ye = saved->t[TR_SAVED_YE];
    if (l->shared.width) tr_mlp_forward_begin(&l->shared, pass, saved, x);
    const void *at_hand = tr_go_end(c, saved, &f->rows);
    c->kernels->gather_rows(c->stream, c->t, saved->t[TR_SAVED_XE], f->rows.t, at_hand, s->pair_of,
                            c->config->num_experts_per_tok, NULL, expert_rows(c, saved),
                            c->config->hidden_size);
    experts_forward(l, pass, saved, ye);
    if (!pass->recomputing) back_begin(c, saved, ye, s->weight, y, &f->rows);
}

void tr_moe_forward_end(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved, void *y,
                        tr_moe_flight *f) {
    const tr_env *c = pass->c;
    if (pass->recomputing) return; /* nobody reads the output again */
    if (l->shared.width) tr_mlp_forward_end(&l->shared, pass, saved, y);
    back_end(c, saved, y, &f->rows);
    /* under recomputation tensors of the experts stay in scratch until the block is done */
    if (c->recompute == TR_RECOMPUTE_NONE) tr_arena_release(c->scratch, f->mark);
}

void tr_moe_forward(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved, const void *x,
                    void *y) {
    tr_moe_flight f;
    tr_moe_forward_begin(l, pass, saved, x, &f);
    tr_moe_forward_middle(l, pass, saved, x, y, &f);
    tr_moe_forward_end(l, pass, saved, y, &f);
}

void tr_moe_backward_begin(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved,
                           const void *dy, void *dx, tr_moe_flight *f) {
    const tr_env *c = pass->c;
    *f = (tr_moe_flight){.rows = tr_go_begin(c, saved, dy), .dx = dx};
    if (l->shared.width) f->shared = tr_mlp_backward_begin(&l->shared, pass, saved, dy);
    c->device->zero(c->stream, dx,
                    (size_t)(c->N_loc * c->config->hidden_size) * tr_dtype_bytes(c->t));
}

/* The gradient of the routing weights is a product of what arrives at the experts and what they
 * gave; it returns while they compute. */
void tr_moe_backward_middle(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved,
                            tr_moe_flight *f) {
    const tr_env *c = pass->c;
    const tr_stop *s = tr_stop_of_experts(saved);
    int64_t H = c->config->hidden_size, k = c->config->num_experts_per_tok;
    tr_rows rows = expert_rows(c, saved);
    const void *at_hand = tr_go_end(c, saved, &f->rows);
    void *dye = tr_operand(pass, rows.max * H), *dxe = tr_scratch(c, rows.max * H, c->t);
    float *dweight_here = tr_scratch(c, s->rows * k, TR_F32), *dweight = dweight_here;
    c->kernels->gather_rows(c->stream, c->t, dye, f->rows.t, at_hand, s->pair_of, k, s->weight,
                            rows, H);
    c->kernels->combine_rows_weight(c->stream, dweight_here, f->rows.t, at_hand, c->t,
                                    saved->t[TR_SAVED_YE], s->row_of, s->rows, k, H);
    bool crosses = tr_exchange_crosses(c->exchange);
    tr_journey weights = {0};
    if (crosses) weights = tr_return_begin(c, saved, dweight_here, k, TR_F32);
    tr_mlp_flight experts = experts_backward(l, pass, saved, dye, dxe);
    back_begin(c, saved, dxe, NULL, f->dx, &f->rows);
    experts_weights(l, pass, saved, dye, &experts);
    if (crosses) {
        dweight = tr_scratch(c, c->N_loc * k, TR_F32);
        tr_return_end(c, saved, &weights, TR_F32, dweight, 0);
    }
    tr_router_backward(l, pass, saved, saved->t[TR_SAVED_NORM2], dweight, f->dx);
}

void tr_moe_backward_end(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved, void *dx,
                         tr_moe_flight *f) {
    if (l->shared.width)
        tr_mlp_backward_end(&l->shared, pass, &f->shared, saved->t[TR_SAVED_NORM2], dx, true);
    back_end(pass->c, saved, dx, &f->rows);
}

void tr_moe_backward(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved, const void *dy,
                     void *dx) {
    tr_moe_flight f;
    tr_moe_backward_begin(l, pass, saved, dy, dx, &f);
    tr_moe_backward_middle(l, pass, saved, &f);
    tr_moe_backward_end(l, pass, saved, dx, &f);
}
