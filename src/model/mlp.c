/* mlp.c - the gated feed-forward layer: down(silu(gate x) * up x). Floor: model. */
#include "model/layers.h"

#include <math.h>
#include <stdio.h>

static int64_t declare(tr_registry *r, const char *prefix, const char *what, int64_t out,
                       int64_t in, double std, int stage) {
    tr_param_decl d = {.ndim = 2,
                       .shape = {out, in},
                       .init = TR_INIT_NORMAL,
                       .init_std = (float)std,
                       .decay = true,
                       .stage = stage,
                       .copy_stage = -1};
    snprintf(d.name, sizeof d.name, "%s.%s_proj.weight", prefix, what);
    return tr_registry_add(r, &d);
}

void tr_mlp_declare(tr_mlp_layer *l, tr_registry *r, const tr_model_config *m, const char *prefix,
                    int64_t width, int stage) {
    double std = m->initializer_range, out_std = std / sqrt(2.0 * (double)m->num_hidden_layers);
    l->width = width;
    if (width == 0) return;
    l->gate = declare(r, prefix, "gate", width, m->hidden_size, std, stage);
    l->up = declare(r, prefix, "up", width, m->hidden_size, std, stage);
    l->down = declare(r, prefix, "down", m->hidden_size, width, out_std, stage);
}

static void activate(const tr_mlp_layer *l, const tr_pass *pass, tr_saved *saved) {
    const tr_env *c = pass->c;
    void *act = tr_save(pass, saved, TR_SAVED_ACT);
    c->kernels->swiglu_forward(c->stream, c->t, act, saved->t[TR_SAVED_GATE], saved->t[TR_SAVED_UP],
                               (tr_rows){c->N, NULL}, l->width);
}

void tr_mlp_forward(const tr_mlp_layer *l, const tr_pass *pass, tr_saved *saved, const void *x,
                    void *y) {
    const tr_env *c = pass->c;
    void *gate = tr_save(pass, saved, TR_SAVED_GATE);
    void *up = tr_save(pass, saved, TR_SAVED_UP);
    tr_linear(c, gate, c->t, x, tr_param_at(c, l->gate), c->N, 0);
    tr_linear(c, up, c->t, x, tr_param_at(c, l->up), c->N, 0);
    activate(l, pass, saved);
    if (pass->recomputing) return; /* nobody reads the output again */
    tr_linear(c, y, c->t, saved->t[TR_SAVED_ACT], tr_param_at(c, l->down), c->N, 1);
}

void tr_mlp_backward(const tr_mlp_layer *l, const tr_pass *pass, tr_saved *saved, const void *x,
                     const void *dy, void *dx) {
    const tr_env *c = pass->c;
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    if (tr_lost(saved, TR_SAVED_ACT)) activate(l, pass, saved); /* selective recomputation */
    void *dgate = tr_scratch(c, c->N * l->width, c->t), *dup = tr_scratch(c, c->N * l->width, c->t);
    tr_linear_weight(c, tr_param_at(c, l->down), dy, saved->t[TR_SAVED_ACT], c->N);
    tr_linear_input(c, dgate, dy, tr_param_at(c, l->down), c->N, 0); /* d act, then in place */
    c->kernels->swiglu_backward(c->stream, c->t, dgate, dup, dgate, saved->t[TR_SAVED_GATE],
                                saved->t[TR_SAVED_UP], (tr_rows){c->N, NULL}, l->width);
    tr_linear_input(c, dx, dgate, tr_param_at(c, l->gate), c->N, 0);
    tr_linear_input(c, dx, dup, tr_param_at(c, l->up), c->N, 1);
    tr_linear_weight(c, tr_param_at(c, l->gate), dgate, x, c->N);
    tr_linear_weight(c, tr_param_at(c, l->up), dup, x, c->N);
    tr_arena_release(c->scratch, mark);
}
