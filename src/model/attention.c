/* attention.c - grouped-query attention with rotary positions. Floor: model. */
#include "model/layers.h"

static int64_t declare(tr_registry *r, int64_t layer, const char *what, int64_t out, int64_t in,
                       tr_split split, double std, int stage) {
    return tr_linear_declare(r, out, in, split, std, stage,
                             "model.layers.%lld.self_attn.%s_proj.weight", (long long)layer, what);
}

void tr_attention_declare(tr_attention_layer *l, tr_registry *r, const tr_model_config *m,
                          int64_t index, int stage) {
    int64_t H = m->hidden_size, q = m->num_attention_heads * m->head_dim,
            kv = m->num_key_value_heads * m->head_dim;
    l->q = declare(r, index, "q", q, H, TR_SPLIT_ROWS, m->initializer_range, stage);
    l->k = declare(r, index, "k", kv, H, TR_SPLIT_HEADS, m->initializer_range, stage);
    l->v = declare(r, index, "v", kv, H, TR_SPLIT_HEADS, m->initializer_range, stage);
    l->o = declare(r, index, "o", H, q, TR_SPLIT_COLUMNS, tr_residual_std(m), stage);
}

static void rotate(const tr_pass *pass, void *x, int64_t heads, int direction) {
    const tr_env *c = pass->c;
    int64_t D = c->config->head_dim;
    c->kernels->rope(c->stream, c->t, x, pass->position, c->freq, c->N, heads, D, D / 2, heads * D,
                     false, 1.0f, direction);
}

void tr_attention_layer_forward(const tr_attention_layer *l, const tr_pass *pass, tr_saved *saved,
                                const void *x_loc, void *y) {
    const tr_env *c = pass->c;
    int64_t kv_elems = c->N * c->Hkv * c->config->head_dim;
    const void *x = tr_rows_gather(c, x_loc);
    char *k = tr_attend_room(pass, saved, TR_SAVED_KV);
    char *v = k + (size_t)kv_elems * tr_dtype_bytes(c->t);
    tr_linear(c, k, c->t, x, tr_param_at(c, l->k), c->N, 0);
    tr_linear(c, v, c->t, x, tr_param_at(c, l->v), c->N, 0);
    rotate(pass, k, c->Hkv, +1);
    tr_request *keys = tr_attend_share(pass, saved, TR_SAVED_KV, k);
    void *q = tr_attend_room(pass, saved, TR_SAVED_Q);
    tr_linear(c, q, c->t, x, tr_param_at(c, l->q), c->N, 0);
    rotate(pass, q, c->Hq, +1);
    tr_request *queries = tr_attend_share(pass, saved, TR_SAVED_Q, q);
    tr_end(keys);
    tr_end(queries);
    tr_attend(pass, saved);
    tr_partial sum = tr_partial_begin(c, y, true);
    tr_linear(c, sum.at, sum.t, saved->t[TR_SAVED_ATTN], tr_param_at(c, l->o), c->N, sum.beta);
    tr_partial_end(c, &sum);
}

void tr_attention_layer_backward(const tr_attention_layer *l, const tr_pass *pass, tr_saved *saved,
                                 const void *dy_loc, void *dx) {
    const tr_env *c = pass->c;
    int64_t D = c->config->head_dim, q_elems = c->N * c->Hq * D, kv_elems = c->N * c->Hkv * D;
    if (tr_lost(saved, TR_SAVED_ATTN)) tr_attend(pass, saved); /* selective recomputation */
    void *dout = tr_scratch(c, q_elems, c->t), *dq = tr_operand(pass, q_elems);
    char *dk = tr_operand(pass, 2 * kv_elems);
    char *dv = dk + (size_t)kv_elems * tr_dtype_bytes(c->t);
    const void *dy = tr_rows_gather(c, dy_loc);
    dy = tr_operand_copy(pass, dy, c->N * c->config->hidden_size);
    tr_linear_input(c, dout, c->t, dy, tr_param_at(c, l->o), c->N, 0);
    void *dout_all = tr_heads_room(c, TR_SAVED_Q, dout);
    tr_request *spreading = tr_heads_spread(c, TR_SAVED_Q, dout, dout_all);
    tr_linear_weight(pass, tr_param_at(c, l->o), dy, saved->t[TR_SAVED_ATTN], c->N);
    tr_end(spreading);
    void *dq_all = tr_heads_room(c, TR_SAVED_Q, dq), *dkv_all = tr_heads_room(c, TR_SAVED_KV, dk);
    tr_ring_backward(pass, saved, dout_all, dq_all, dkv_all);
    tr_return queries = tr_heads_return_begin(c, TR_SAVED_Q, dq_all);
    tr_return keys = tr_heads_return_begin(c, TR_SAVED_KV, dkv_all);
    tr_heads_return_end(c, &queries, dq);
    rotate(pass, dq, c->Hq, -1);
    tr_partial sum = tr_partial_begin(c, dx, false);
    tr_linear_input(c, sum.at, sum.t, dq, tr_param_at(c, l->q), c->N, sum.beta);
    tr_heads_return_end(c, &keys, dk);
    rotate(pass, dk, c->Hkv, -1);
    tr_linear_input(c, sum.at, sum.t, dk, tr_param_at(c, l->k), c->N, 1);
    tr_linear_input(c, sum.at, sum.t, dv, tr_param_at(c, l->v), c->N, 1);
    tr_partial_end(c, &sum);
    const void *x = tr_operand_rows(pass, saved->t[TR_SAVED_NORM1]);
    tr_linear_weight(pass, tr_param_at(c, l->q), dq, x, c->N);
    tr_linear_weight(pass, tr_param_at(c, l->k), dk, x, c->N);
    tr_linear_weight(pass, tr_param_at(c, l->v), dv, x, c->N);
}
