/* mlp.c - the gated feed-forward layer: down(f(gate x) * up x), f = hidden_act. Floor: model. */
#include "model/layers.h"

void tr_mlp_declare(tr_mlp_layer *l, tr_registry *r, const tr_model_config *m, const char *prefix,
                    int64_t width, int stage) {
    int64_t H = m->hidden_size;
    double std = m->initializer_range;
    l->width = width;
    if (width == 0) return;
    l->gate =
        tr_linear_declare(r, width, H, TR_SPLIT_ROWS, std, stage, "%s.gate_proj.weight", prefix);
    l->up = tr_linear_declare(r, width, H, TR_SPLIT_ROWS, std, stage, "%s.up_proj.weight", prefix);
    l->down = tr_linear_declare(r, H, width, TR_SPLIT_COLUMNS, tr_residual_std(m), stage,
                                "%s.down_proj.weight", prefix);
}

static void activate(const tr_pass *pass, tr_saved *saved) {
    const tr_env *c = pass->c;
    void *act = tr_save(pass, saved, TR_SAVED_ACT);
    c->kernels->glu_forward(c->stream, c->t, c->config->hidden_act, act, saved->t[TR_SAVED_GATE],
                            saved->t[TR_SAVED_UP], (tr_rows){c->N, NULL}, saved->width);
}

void tr_mlp_forward_begin(const tr_mlp_layer *l, const tr_pass *pass, tr_saved *saved,
                          const void *x_loc) {
    const tr_env *c = pass->c;
    const void *x = tr_rows_gather(c, x_loc);
    void *gate = tr_save(pass, saved, TR_SAVED_GATE);
    void *up = tr_save(pass, saved, TR_SAVED_UP);
    tr_linear(c, gate, c->t, x, tr_param_at(c, l->gate), c->N, 0);
    tr_linear(c, up, c->t, x, tr_param_at(c, l->up), c->N, 0);
    activate(pass, saved);
}

void tr_mlp_forward_end(const tr_mlp_layer *l, const tr_pass *pass, const tr_saved *saved,
                        void *y) {
    const tr_env *c = pass->c;
    if (pass->recomputing) return; /* nobody reads the output again */
    tr_partial sum = tr_partial_begin(c, y, true);
    tr_linear(c, sum.at, sum.t, saved->t[TR_SAVED_ACT], tr_param_at(c, l->down), c->N, sum.beta);
    tr_partial_end(c, &sum);
}

void tr_mlp_forward(const tr_mlp_layer *l, const tr_pass *pass, tr_saved *saved, const void *x,
                    void *y) {
    tr_mlp_forward_begin(l, pass, saved, x);
    tr_mlp_forward_end(l, pass, saved, y);
}

tr_mlp_flight tr_mlp_backward_begin(const tr_mlp_layer *l, const tr_pass *pass, tr_saved *saved,
                                    const void *dy_loc) {
    const tr_env *c = pass->c;
    int64_t I = saved->width;
    if (tr_lost(saved, TR_SAVED_ACT)) activate(pass, saved); /* selective recomputation */
    void *dgate = tr_operand(pass, c->N * I), *dup = tr_operand(pass, c->N * I);
    const void *dy = tr_rows_gather(c, dy_loc);
    dy = tr_operand_copy(pass, dy, c->N * c->config->hidden_size);
    tr_linear_weight(pass, tr_param_at(c, l->down), dy, saved->t[TR_SAVED_ACT], c->N);
    tr_linear_input(c, dgate, c->t, dy, tr_param_at(c, l->down), c->N, 0); /* d act, in place */
    c->kernels->glu_backward(c->stream, c->t, c->config->hidden_act, dgate, dup, dgate,
                             saved->t[TR_SAVED_GATE], saved->t[TR_SAVED_UP], (tr_rows){c->N, NULL},
                             I);
    return (tr_mlp_flight){dgate, dup};
}

void tr_mlp_backward_end(const tr_mlp_layer *l, const tr_pass *pass, const tr_mlp_flight *f,
                         const void *x_loc, void *dx, bool add) {
    const tr_env *c = pass->c;
    tr_partial sum = tr_partial_begin(c, dx, add);
    tr_linear_input(c, sum.at, sum.t, f->dgate, tr_param_at(c, l->gate), c->N, sum.beta);
    tr_linear_input(c, sum.at, sum.t, f->dup, tr_param_at(c, l->up), c->N, 1);
    tr_partial_end(c, &sum);
    const void *x = tr_operand_rows(pass, x_loc);
    tr_linear_weight(pass, tr_param_at(c, l->gate), f->dgate, x, c->N);
    tr_linear_weight(pass, tr_param_at(c, l->up), f->dup, x, c->N);
}

void tr_mlp_backward(const tr_mlp_layer *l, const tr_pass *pass, tr_saved *saved, const void *x,
                     const void *dy, void *dx) {
    tr_arena_mark mark = tr_arena_get_mark(pass->c->scratch);
    tr_mlp_flight f = tr_mlp_backward_begin(l, pass, saved, dy);
    tr_mlp_backward_end(l, pass, &f, x, dx, false);
    tr_arena_release(pass->c->scratch, mark);
}
