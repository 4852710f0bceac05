/* head.c - final norm, language-model head and cross-entropy, a chunk of rows at a time.
 * Floor: model. */
#include "model/layers.h"

enum { CHUNK_BYTES = 1 << 27 }; /* fp32 logits held at once */

static void *rows_at(const tr_env *c, const void *x, int64_t row) {
    return (char *)x + (size_t)(row * c->config->hidden_size) * tr_dtype_bytes(c->t);
}

static void *normed(const tr_head_layer *h, const tr_env *c, const void *x, float *rstd,
                    int64_t rows) {
    int64_t H = c->config->hidden_size;
    void *y = tr_scratch(c, rows * H, c->t);
    c->kernels->rmsnorm_forward(c->stream, c->t, y, rstd, x, tr_param_at(c, h->norm)->weight, rows,
                                H, H, (float)c->config->rms_norm_eps);
    return y;
}

/* The gradients of one chunk: dnorm = dlogits W, dW += dlogits^T y. */
static void chunk_backward(const tr_head_layer *h, const tr_env *c, const void *dlogits, int64_t ld,
                           const void *y, void *dnorm, int64_t rows) {
    const tr_param *w = tr_param_at(c, h->weight);
    int64_t V = c->config->vocab_size, H = c->config->hidden_size;
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
                                           .c = c->t});
    c->kernels->gemm(c->stream, &(tr_gemm){.M = V,
                                           .N = H,
                                           .K = rows,
                                           .A = dlogits,
                                           .lda = ld,
                                           .trans_a = true,
                                           .B = y,
                                           .ldb = H,
                                           .C = w->grad,
                                           .ldc = H,
                                           .ab = c->t,
                                           .c = TR_F32,
                                           .beta = 1});
}

/* Pieces the rows are cut into. */
static int64_t chunks_of(const tr_env *c) {
    int64_t rows = CHUNK_BYTES / 4 / c->config->vocab_size;
    int64_t chunks = tr_ceil_div(c->N, rows > 1 ? rows : 1);
    return chunks > 1 ? chunks : 1;
}

int64_t tr_head_scratch_bytes(const tr_env *c) {
    return c->N * c->config->hidden_size * (int64_t)tr_dtype_bytes(c->t) +
           tr_ceil_div(c->N, chunks_of(c)) * c->config->vocab_size * 4;
}

void tr_head_forward(const tr_head_layer *h, const tr_pass *pass, tr_head_saved *saved,
                     const void *x, const int32_t *label) {
    const tr_env *c = pass->c;
    int64_t V = c->config->vocab_size, H = c->config->hidden_size;
    if (pass->training) {
        saved->rstd = tr_arena_alloc(pass->kept, (size_t)c->N * sizeof(float));
        saved->dnorm = tr_arena_alloc(pass->kept, (size_t)(c->N * H) * tr_dtype_bytes(c->t));
    }
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    float *rstd = pass->training ? saved->rstd : tr_scratch(c, c->N, TR_F32);
    void *y = normed(h, c, x, rstd, c->N);
    int64_t chunks = chunks_of(c);
    float *logits = tr_scratch(c, tr_ceil_div(c->N, chunks) * V, TR_F32);
    /* gradients take the place of the logits they come from */
    void *dlogits = pass->training ? logits : NULL;
    int64_t ld = c->t == TR_F32 ? V : 2 * V;
    for (int64_t i = 0; i < chunks; i++) {
        tr_range r = tr_block_of(c->N, chunks, i);
        const void *y_rows = rows_at(c, y, r.first);
        tr_linear(c, logits, TR_F32, y_rows, tr_param_at(c, h->weight), r.count, 0);
        c->kernels->cross_entropy(c->stream, c->t, logits, V, label + r.first, NULL, c->loss_sum,
                                  dlogits, ld, c->loss_scale, r.count, V);
        if (pass->training)
            chunk_backward(h, c, dlogits, ld, y_rows, rows_at(c, saved->dnorm, r.first), r.count);
    }
    tr_arena_release(c->scratch, mark);
}

void tr_head_backward(const tr_head_layer *h, const tr_pass *pass, const tr_head_saved *saved,
                      const void *x, void *dx) {
    const tr_env *c = pass->c;
    const tr_param *w = tr_param_at(c, h->norm);
    int64_t H = c->config->hidden_size;
    c->kernels->rmsnorm_backward(c->stream, c->t, dx, w->grad, saved->dnorm, x, w->weight,
                                 saved->rstd, NULL, c->N, H, H);
}

float *tr_head_logits(const tr_head_layer *h, const tr_pass *pass, const void *x, int64_t n) {
    const tr_env *c = pass->c;
    float *rstd = tr_scratch(c, 1, TR_F32);
    void *y = normed(h, c, rows_at(c, x, n), rstd, 1);
    float *logits = tr_scratch(c, c->config->vocab_size, TR_F32);
    tr_linear(c, logits, TR_F32, y, tr_param_at(c, h->weight), 1, 0);
    return logits;
}
