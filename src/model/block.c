/* block.c - a pre-norm decoder block. Floor: model. */
#include "model/layers.h"

#include <stdio.h>

static int64_t declare_norm(tr_registry *r, const tr_model_config *m, int64_t index,
                            const char *what, int stage) {
    tr_param_decl d = {.ndim = 1,
                       .shape = {m->hidden_size},
                       .init = TR_INIT_ONES,
                       .stage = stage,
                       .copy_stage = -1};
    snprintf(d.name, sizeof d.name, "model.layers.%lld.%s_layernorm.weight", (long long)index,
             what);
    return tr_registry_add(r, &d);
}

void tr_block_declare(tr_block_layer *b, tr_registry *r, const tr_model_config *m, int64_t index,
                      int64_t moe_index, int stage) {
    char mlp[64];
    snprintf(mlp, sizeof mlp, "model.layers.%lld.mlp", (long long)index);
    b->norm1 = declare_norm(r, m, index, "input", stage);
    tr_attention_declare(&b->attention, r, m, index, stage);
    b->norm2 = declare_norm(r, m, index, "post_attention", stage);
    b->is_moe = tr_config_layer_is_moe(m, index);
    if (b->is_moe)
        tr_moe_declare(&b->moe, r, m, index, moe_index, stage);
    else
        tr_mlp_declare(&b->mlp, r, m, mlp, m->intermediate_size, stage);
}

static void norm_forward(const tr_pass *pass, tr_saved *saved, const void *x, int64_t weight,
                         tr_saved_id y_id, tr_saved_id rstd_id) {
    const tr_env *c = pass->c;
    int64_t H = c->config->hidden_size;
    void *y = tr_save(pass, saved, y_id);
    float *rstd = saved->t[rstd_id]; /* kept when only y is computed again */
    if (!rstd) rstd = tr_save(pass, saved, rstd_id);
    c->kernels->rmsnorm_forward(c->stream, c->t, y, rstd, x, tr_param_at(c, weight)->weight,
                                c->N_loc, H, H, (float)c->config->rms_norm_eps);
}

/* d += the gradient through the norm of dy. */
static void norm_backward(const tr_env *c, void *d, const void *dy, const void *x, int64_t weight,
                          const float *rstd) {
    tr_param *w = tr_param_at(c, weight);
    int64_t H = c->config->hidden_size;
    c->kernels->rmsnorm_backward(c->stream, c->t, d, tr_gradient_sum(c->registry, c->stream, w), dy,
                                 x, w->weight, rstd, d, c->N_loc, H, H);
}

static void copy(const tr_env *c, void *to, const void *from) {
    c->device->copy(c->stream, to, from,
                    (size_t)(c->N_loc * c->config->hidden_size) * tr_dtype_bytes(c->t),
                    TR_ON_DEVICE);
}

void tr_block_forward(const tr_block_layer *b, const tr_pass *pass, tr_saved *saved, void *y) {
    const tr_env *c = pass->c;
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    const void *x = saved->t[TR_SAVED_X];
    norm_forward(pass, saved, x, b->norm1, TR_SAVED_NORM1, TR_SAVED_RSTD1);
    void *mid = tr_save(pass, saved, TR_SAVED_MID);
    copy(c, mid, x);
    tr_attention_layer_forward(&b->attention, pass, saved, saved->t[TR_SAVED_NORM1], mid);
    norm_forward(pass, saved, mid, b->norm2, TR_SAVED_NORM2, TR_SAVED_RSTD2);
    const void *normed = saved->t[TR_SAVED_NORM2];
    copy(c, y, mid);
    if (b->is_moe)
        tr_moe_forward(&b->moe, pass, saved, normed, y);
    else
        tr_mlp_forward(&b->mlp, pass, saved, normed, y);
    if (pass->recomputing) return; /* the backward reads it and releases */
    tr_saved_forget(pass, saved);
    tr_arena_release(c->scratch, mark);
}

void tr_block_backward(const tr_block_layer *b, const tr_pass *pass, tr_saved *saved, void *d) {
    const tr_env *c = pass->c;
    int64_t elems = c->N_loc * c->config->hidden_size;
    tr_pass again = *pass;
    again.recomputing = true;
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    if (tr_lost(saved, TR_SAVED_Q)) /* full recomputation */
        tr_block_forward(b, &again, saved, tr_scratch(c, elems, c->t));
    if (tr_lost(saved, TR_SAVED_NORM1))
        norm_forward(&again, saved, saved->t[TR_SAVED_X], b->norm1, TR_SAVED_NORM1, TR_SAVED_RSTD1);
    if (tr_lost(saved, TR_SAVED_NORM2))
        norm_forward(&again, saved, saved->t[TR_SAVED_MID], b->norm2, TR_SAVED_NORM2,
                     TR_SAVED_RSTD2);
    void *dnormed = tr_scratch(c, elems, c->t);
    tr_arena_mark inner = tr_arena_get_mark(c->scratch);
    if (b->is_moe)
        tr_moe_backward(&b->moe, &again, saved, d, dnormed);
    else
        tr_mlp_backward(&b->mlp, &again, saved, saved->t[TR_SAVED_NORM2], d, dnormed);
    norm_backward(c, d, dnormed, saved->t[TR_SAVED_MID], b->norm2, saved->t[TR_SAVED_RSTD2]);
    tr_arena_release(c->scratch, inner);
    tr_attention_layer_backward(&b->attention, &again, saved, d, dnormed);
    norm_backward(c, d, dnormed, saved->t[TR_SAVED_X], b->norm1, saved->t[TR_SAVED_RSTD1]);
    tr_arena_release(c->scratch, mark);
}
