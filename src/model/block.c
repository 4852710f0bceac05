/* block.c - a pre-norm decoder block. Floor: model. */
#include "model/layers.h"

#include <stdio.h>

void tr_block_declare(tr_block_layer *b, tr_registry *r, const tr_model_config *m, int64_t index,
                      int64_t moe_index, int stage) {
    char mlp[64], norm1[64], norm2[64];
    snprintf(mlp, sizeof mlp, "model.layers.%lld.mlp", (long long)index);
    snprintf(norm1, sizeof norm1, "model.layers.%lld.input_layernorm", (long long)index);
    snprintf(norm2, sizeof norm2, "model.layers.%lld.post_attention_layernorm", (long long)index);
    tr_norm_declare(&b->norm1, r, m, norm1, stage);
    tr_attention_declare(&b->attention, r, m, index, stage);
    tr_norm_declare(&b->norm2, r, m, norm2, stage);
    b->is_moe = tr_config_layer_is_moe(m, index);
    if (b->is_moe)
        tr_moe_declare(&b->moe, r, m, index, moe_index, stage);
    else
        tr_mlp_declare(&b->mlp, r, m, mlp, m->intermediate_size, stage);
}

static void norm_forward(const tr_pass *pass, tr_saved *saved, const void *x,
                         const tr_norm_layer *norm, tr_saved_id y_id, tr_saved_id statistics_id) {
    void *y = tr_save(pass, saved, y_id);
    float *statistics = saved->t[statistics_id]; /* kept when only y is computed again */
    if (!statistics) statistics = tr_save(pass, saved, statistics_id);
    tr_norm_forward(norm, pass->c, y, statistics, x, pass->c->N_loc);
}

/* d += the gradient through the norm of dy. */
static void norm_backward(const tr_env *c, void *d, const void *dy, const void *x,
                          const tr_norm_layer *norm, const float *statistics) {
    tr_norm_backward(norm, c, d, dy, x, statistics, d, c->N_loc);
}

static void copy(const tr_env *c, void *to, const void *from) {
    c->device->copy(c->stream, to, from,
                    (size_t)(c->N_loc * c->config->hidden_size) * tr_dtype_bytes(c->t),
                    TR_ON_DEVICE);
}

void tr_block_forward_begin(tr_block_flight *f, const tr_block_layer *b, const tr_pass *pass,
                            tr_saved *saved, void *y) {
    const tr_env *c = pass->c;
    *f = (tr_block_flight){b, *pass, saved, .out = y, .mark = tr_arena_get_mark(c->scratch)};
    const void *x = saved->t[TR_SAVED_X];
    norm_forward(pass, saved, x, &b->norm1, TR_SAVED_NORM1, TR_SAVED_STAT1);
    void *mid = tr_save(pass, saved, TR_SAVED_MID);
    copy(c, mid, x);
    tr_attention_layer_forward(&b->attention, pass, saved, saved->t[TR_SAVED_NORM1], mid);
    norm_forward(pass, saved, mid, &b->norm2, TR_SAVED_NORM2, TR_SAVED_STAT2);
    copy(c, y, mid);
    if (b->is_moe) tr_moe_forward_begin(&b->moe, pass, saved, saved->t[TR_SAVED_NORM2], &f->moe);
}

void tr_block_forward_middle(tr_block_flight *f) {
    const void *normed = f->saved->t[TR_SAVED_NORM2];
    if (f->block->is_moe)
        tr_moe_forward_middle(&f->block->moe, &f->pass, f->saved, normed, f->out, &f->moe);
    else
        tr_mlp_forward(&f->block->mlp, &f->pass, f->saved, normed, f->out);
}

void tr_block_forward_end(tr_block_flight *f) {
    if (f->block->is_moe) tr_moe_forward_end(&f->block->moe, &f->pass, f->saved, f->out, &f->moe);
    if (f->pass.recomputing) return; /* the backward reads it and releases */
    tr_saved_forget(&f->pass, f->saved);
    tr_arena_release(f->pass.c->scratch, f->mark);
}

void tr_block_forward(const tr_block_layer *b, const tr_pass *pass, tr_saved *saved, void *y) {
    tr_block_flight f;
    tr_block_forward_begin(&f, b, pass, saved, y);
    tr_block_forward_middle(&f);
    tr_block_forward_end(&f);
}

void tr_block_backward_begin(tr_block_flight *f, const tr_block_layer *b, const tr_pass *pass,
                             tr_saved *saved, void *d) {
    const tr_env *c = pass->c;
    int64_t elems = c->N_loc * c->config->hidden_size;
    *f = (tr_block_flight){b, *pass, saved, .out = d, .mark = tr_arena_get_mark(c->scratch)};
    f->pass.recomputing = true;
    if (tr_lost(saved, TR_SAVED_Q)) /* full recomputation */
        tr_block_forward(b, &f->pass, saved, tr_scratch(c, elems, c->t));
    if (tr_lost(saved, TR_SAVED_NORM1))
        norm_forward(&f->pass, saved, saved->t[TR_SAVED_X], &b->norm1, TR_SAVED_NORM1,
                     TR_SAVED_STAT1);
    if (tr_lost(saved, TR_SAVED_NORM2))
        norm_forward(&f->pass, saved, saved->t[TR_SAVED_MID], &b->norm2, TR_SAVED_NORM2,
                     TR_SAVED_STAT2);
    f->dnormed = tr_scratch(c, elems, c->t);
    f->inner = tr_arena_get_mark(c->scratch);
    if (b->is_moe)
        tr_moe_backward_begin(&b->moe, &f->pass, saved, d, f->dnormed, &f->moe);
    else
        tr_mlp_backward(&b->mlp, &f->pass, saved, saved->t[TR_SAVED_NORM2], d, f->dnormed);
}

void tr_block_backward_middle(tr_block_flight *f) {
    if (f->block->is_moe) tr_moe_backward_middle(&f->block->moe, &f->pass, f->saved, &f->moe);
}

void tr_block_backward_end(tr_block_flight *f) {
    const tr_block_layer *b = f->block;
    const tr_env *c = f->pass.c;
    tr_saved *saved = f->saved;
    void *d = f->out;
    if (b->is_moe) tr_moe_backward_end(&b->moe, &f->pass, saved, f->dnormed, &f->moe);
    norm_backward(c, d, f->dnormed, saved->t[TR_SAVED_MID], &b->norm2, saved->t[TR_SAVED_STAT2]);
    tr_arena_release(c->scratch, f->inner);
    tr_attention_layer_backward(&b->attention, &f->pass, saved, d, f->dnormed);
    norm_backward(c, d, f->dnormed, saved->t[TR_SAVED_X], &b->norm1, saved->t[TR_SAVED_STAT1]);
    tr_arena_release(c->scratch, f->mark);
}

void tr_block_backward(const tr_block_layer *b, const tr_pass *pass, tr_saved *saved, void *d) {
    tr_block_flight f;
    tr_block_backward_begin(&f, b, pass, saved, d);
    tr_block_backward_middle(&f);
    tr_block_backward_end(&f);
}
