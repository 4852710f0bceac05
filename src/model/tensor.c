/* tensor.c - rows across the tensor group: gathered before products with column-split weights,
 * summed and scattered after row-split ones. Floor: model.
 *
 * Both go through memory that the ranks of a node map, so a gather copies each block once and a sum
 * reads every rank's partial where it was computed. One of each is under way at a time. */
#include "model/layers.h"

static tr_comm *group(const tr_env *c) {
    return c->grid->comm[TR_GROUP_TENSOR];
}

static bool alone(const tr_env *c) {
    return c->grid->at.shape.tensor == 1;
}

void tr_env_shape(tr_env *c, int64_t B, int64_t S) {
    const tr_model_config *m = c->config;
    const tr_grid_place *at = &c->grid->at;
    int64_t tp = at->shape.tensor;
    c->B = B;
    c->S = S;
    c->cut = tr_sequence_of(&at->shape, S);
    c->S_loc = c->cut.S_loc;
    c->N = B * c->S_loc;
    c->N_loc = c->N / tp;
    c->first_row = at->t * c->N_loc;
    c->Hq = m->num_attention_heads / tp;
    c->Hkv = m->num_key_value_heads > tp ? m->num_key_value_heads / tp : 1;
    int64_t heads = c->cut.heads;
    c->Aq = c->Hq / heads;
    c->Akv = c->Hkv > heads ? c->Hkv / heads : 1;
}

static int64_t buffer_bytes(const tr_env *c, tr_dtype t) {
    return c->N * c->config->hidden_size * (int64_t)tr_dtype_bytes(t);
}

int64_t tr_tensor_bytes(const tr_env *c) {
    return alone(c) ? 0 : buffer_bytes(c, c->t) + buffer_bytes(c, TR_F32);
}

void tr_tensor_open(tr_env *c) {
    if (alone(c)) return;
    c->tensor.rows = tr_comm_alloc_on(group(c), c->device, buffer_bytes(c, c->t));
    c->tensor.partial = tr_comm_alloc_on(group(c), c->device, buffer_bytes(c, TR_F32));
    tr_comm_expect_blocks(group(c), c->device);
}

void tr_tensor_close(tr_env *c) {
    tr_comm_free_on(group(c), c->device, c->tensor.rows, buffer_bytes(c, c->t));
    tr_comm_free_on(group(c), c->device, c->tensor.partial, buffer_bytes(c, TR_F32));
    c->tensor = (tr_tensor_buffers){0};
}

/* This rank's rows of a buffer [N,H]. */
static void *own_rows(const tr_env *c, void *buffer, tr_dtype t) {
    int64_t first = c->first_row * c->config->hidden_size;
    return (char *)buffer + (size_t)first * tr_dtype_bytes(t);
}

const void *tr_rows_gather(const tr_env *c, const void *x) {
    if (alone(c)) return x;
    int64_t elems = c->N_loc * c->config->hidden_size;
    c->device->copy(c->stream, own_rows(c, c->tensor.rows, c->t), x,
                    (size_t)elems * tr_dtype_bytes(c->t), TR_ON_DEVICE);
    tr_end(tr_all_gather_begin(group(c), c->stream, c->t, c->tensor.rows, elems));
    return c->tensor.rows;
}

tr_partial tr_partial_begin(const tr_env *c, void *out, bool add) {
    if (alone(c))
        return (tr_partial){.at = out, .t = c->t, .beta = add ? 1 : 0, .out = out, .add = add};
    return (tr_partial){.at = c->tensor.partial, .t = TR_F32, .out = out, .add = add};
}

void tr_partial_end(const tr_env *c, const tr_partial *p) {
    if (alone(c)) return;
    int64_t elems = c->N_loc * c->config->hidden_size;
    tr_end(tr_reduce_scatter_begin(group(c), c->stream, TR_F32, p->at, elems));
    const void *sum = own_rows(c, p->at, TR_F32);
    if (p->add)
        c->kernels->add(c->stream, c->t, p->out, TR_F32, sum, elems);
    else
        c->kernels->cast(c->stream, c->t, p->out, TR_F32, sum, elems);
}
