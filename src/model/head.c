/* head.c - final norm, language-model head and cross-entropy, a chunk of rows at a time.
 * Floor: model.
 *
 * Tensor ranks norm their own rows, gather all of them, and make the logits of their part of the
 * vocabulary; three numbers a row cross (kernels.h: cross_entropy_part), never logits. */
#include "model/gradient.h"
#include "model/layers.h"

enum { CHUNK_BYTES = 1 << 27 }; /* fp32 logits held at once */
enum { PART = 3 };              /* numbers of a row that cross */

static void *rows_at(const tr_env *c, tr_dtype t, const void *x, int64_t row) {
    return (char *)x + (size_t)(row * c->config->hidden_size) * tr_dtype_bytes(t);
}

static void *normed(const tr_head_layer *h, const tr_env *c, const void *x, float *statistics,
                    int64_t rows) {
    void *y = tr_scratch(c, rows * c->config->hidden_size, c->t);
    tr_norm_forward(&h->norm, c, y, statistics, x, rows);
    return y;
}

/* The gradients of one chunk: dnorm = dlogits W, dW += dlogits^T y. */
static void chunk_backward(const tr_head_layer *h, const tr_env *c, const void *dlogits, int64_t ld,
                           const void *y, void *dnorm, tr_dtype dnorm_t, int64_t rows) {
    tr_param *w = tr_param_at(c, h->weight);
    int64_t V = w->box.extent[0], H = c->config->hidden_size;
    c->kernels->gemm(c->stream, &(tr_gemm){.M = rows,
                                           .N = H,
                                           .K = V,
                                           .A = dlogits,
                                           .lda = ld,
                                           .B = w->weight,
                                           .ldb = H,
                                           .C = dnorm,
                                           .ldc = H,
                                           .ab = c->t,
                                           .c = dnorm_t});
    tr_gradient dw = tr_gradient_take(c->registry, w);
    c->kernels->gemm(c->stream, &(tr_gemm){.M = V,
                                           .N = H,
                                           .K = rows,
                                           .A = dlogits,
                                           .lda = ld,
                                           .trans_a = true,
                                           .B = y,
                                           .ldb = H,
                                           .C = dw.at,
                                           .ldc = H,
                                           .ab = c->t,
                                           .c = TR_F32,
                                           .beta = dw.beta});
}

/* Tokens of the largest part of the vocabulary. */
static int64_t widest(const tr_env *c) {
    return tr_block_of(c->config->vocab_size, c->grid->at.shape.tensor, 0).count;
}

/* Pieces the rows are cut into, the same on every tensor rank. */
static int64_t chunks_of(const tr_env *c) {
    int64_t rows = CHUNK_BYTES / 4 / widest(c);
    int64_t chunks = tr_ceil_div(c->N, rows > 1 ? rows : 1);
    return chunks > 1 ? chunks : 1;
}

int64_t tr_head_scratch_bytes(const tr_env *c) {
    int64_t tp = c->grid->at.shape.tensor, rows = tr_ceil_div(c->N, chunks_of(c));
    int64_t parts = tp > 1 ? tp * rows * PART * 8 : 0;
    return c->N_loc * c->config->hidden_size * (int64_t)tr_dtype_bytes(c->t) +
           rows * widest(c) * 4 + parts;
}

/* Adds the loss of some rows to loss_sum, on one tensor rank; their logits become gradients where
 * these are wanted. */
static void chunk_loss(const tr_env *c, const tr_param *w, const float *logits,
                       const int32_t *label, void *dlogits, int64_t ld, int64_t rows) {
    int64_t V = w->box.extent[0], first = w->box.offset[0], tp = c->grid->at.shape.tensor;
    if (tp == 1) {
        c->kernels->cross_entropy(c->stream, c->t, logits, V, label, NULL, c->loss_sum, dlogits, ld,
                                  c->loss_scale, rows, V);
        return;
    }
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    double *parts = tr_scratch(c, tp * rows * PART, TR_F64);
    c->kernels->cross_entropy_part(c->stream, logits, V, label, first,
                                   parts + c->grid->at.t * rows * PART, rows, V);
    tr_end(
        tr_all_gather_begin(c->grid->comm[TR_GROUP_TENSOR], c->stream, TR_F64, parts, rows * PART));
    c->kernels->cross_entropy_whole(c->stream, c->t, parts, tp, logits, V, label, first, NULL,
                                    c->grid->at.t == 0 ? c->loss_sum : NULL, dlogits, ld,
                                    c->loss_scale, rows, V);
    tr_arena_release(c->scratch, mark);
}

void tr_head_forward(const tr_head_layer *h, const tr_pass *pass, tr_head_saved *saved,
                     const void *x, const int32_t *label) {
    const tr_env *c = pass->c;
    const tr_param *w = tr_param_at(c, h->weight);
    int64_t V = w->box.extent[0], elems = c->N_loc * c->config->hidden_size;
    int64_t stats = c->N_loc * tr_norm_statistics(c->config);
    if (pass->training) {
        saved->statistics = tr_arena_alloc(pass->kept, (size_t)stats * sizeof(float));
        saved->dnorm = tr_arena_alloc(pass->kept, (size_t)elems * tr_dtype_bytes(c->t));
    }
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    float *statistics = pass->training ? saved->statistics : tr_scratch(c, stats, TR_F32);
    const void *y = tr_rows_gather(c, normed(h, c, x, statistics, c->N_loc));
    tr_partial dnorm = tr_partial_begin(c, saved->dnorm, false);
    int64_t chunks = chunks_of(c);
    float *logits = tr_scratch(c, tr_ceil_div(c->N, chunks) * V, TR_F32);
    /* gradients take the place of the logits they come from */
    void *dlogits = pass->training ? logits : NULL;
    int64_t ld = c->t == TR_F32 ? V : 2 * V;
    for (int64_t i = 0; i < chunks; i++) {
        tr_range r = tr_block_of(c->N, chunks, i);
        const void *y_rows = rows_at(c, c->t, y, r.first);
        tr_linear(c, logits, TR_F32, y_rows, w, r.count, 0);
        chunk_loss(c, w, logits, label + r.first, dlogits, ld, r.count);
        if (pass->training)
            chunk_backward(h, c, dlogits, ld, y_rows, rows_at(c, dnorm.t, dnorm.at, r.first),
                           dnorm.t, r.count);
    }
    if (pass->training) tr_partial_end(c, &dnorm);
    tr_arena_release(c->scratch, mark);
}

void tr_head_backward(const tr_head_layer *h, const tr_pass *pass, const tr_head_saved *saved,
                      const void *x, void *dx) {
    const tr_env *c = pass->c;
    tr_norm_backward(&h->norm, c, dx, saved->dnorm, x, saved->statistics, NULL, c->N_loc);
}

float *tr_head_logits(const tr_head_layer *h, const tr_pass *pass, const void *x, int64_t n) {
    const tr_env *c = pass->c;
    float *statistics = tr_scratch(c, tr_norm_statistics(c->config), TR_F32);
    void *y = normed(h, c, rows_at(c, c->t, x, n), statistics, 1);
    float *logits = tr_scratch(c, c->config->vocab_size, TR_F32);
    tr_linear(c, logits, TR_F32, y, tr_param_at(c, h->weight), 1, 0);
    return logits;
}
