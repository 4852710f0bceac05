/* optimizer_body.h - AdamW and the sum of squares, compiled once for each instruction set by the
 * optimizer*.c that include it. Floor: kernels, internal.
 *
 * Both are bound by memory: AdamW reads 16 bytes an element and writes 12, and the compute copy in
 * the same pass. */
#pragma once
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/threads.h"
#include "kernels/cpu/vec.h"
#include "kernels/makers.h"

#include <math.h>

enum { SUM_BLOCK = 4096, ADAM_BLOCK = 1024 }; /* elements; multiples of VEC */

VEC_FN vec vec_sqrt(vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (vec)_mm256_sqrt_ps((__m256)x);
#else
    for (int l = 0; l < VEC; l++) x[l] = sqrtf(x[l]);
    return x;
#endif
}

typedef struct {
    float *p, *m, *v;
    const float *g;
    void *compute;
    tr_dtype compute_t;
    int64_t n;
    /* derived */
    float grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, m_scale, v_scale, epsilon;
    float learning_rate, weight_decay;
} adam_args;

/* Elements i..i+VEC-1, of the n that are left. */
VEC_FN void adam_step(const adam_args *a, tr_dtype compute_t, int64_t i, int64_t n) {
    vec g = vec_load_n(TR_F32, a->g, i, n) * a->grad_scale;
    vec p = vec_load_n(TR_F32, a->p, i, n);
    vec m = vec_load_n(TR_F32, a->m, i, n), v = vec_load_n(TR_F32, a->v, i, n);
    m = vec_fma(m, vec_set(a->beta1), g * a->one_minus_beta1);
    v = vec_fma(v, vec_set(a->beta2), g * g * a->one_minus_beta2);
    vec update = m * a->m_scale / (vec_sqrt(v * a->v_scale) + a->epsilon);
    update = vec_fma(p, vec_set(a->weight_decay), update);
    p = vec_fma(update, vec_set(-a->learning_rate), p);
    vec_store_n(TR_F32, a->m, i, n, m);
    vec_store_n(TR_F32, a->v, i, n, v);
    vec_store_n(TR_F32, a->p, i, n, p);
    if (a->compute) vec_store_n(compute_t, a->compute, i, n, p);
}

/* Items are blocks of ADAM_BLOCK elements. */
static void adam_blocks(const void *args, int64_t begin, int64_t end) {
    const adam_args *a = args;
    int64_t stop = end * ADAM_BLOCK < a->n ? end * ADAM_BLOCK : a->n, i = begin * ADAM_BLOCK;
    if (a->compute_t == TR_BF16)
        for (; i < stop; i += VEC) adam_step(a, TR_BF16, i, stop - i);
    else
        for (; i < stop; i += VEC) adam_step(a, TR_F32, i, stop - i);
}

static void adamw(tr_stream *s, const tr_adamw *h, float *p, void *compute, tr_dtype compute_t,
                  float *m, float *v, const float *g, int64_t n) {
    (void)s;
    double beta1 = (double)h->beta1, beta2 = (double)h->beta2;
    adam_args a = {.p = p,
                   .m = m,
                   .v = v,
                   .g = g,
                   .compute = compute,
                   .compute_t = compute_t,
                   .n = n,
                   .grad_scale = h->grad_scale,
                   .beta1 = h->beta1,
                   .beta2 = h->beta2,
                   .one_minus_beta1 = (float)(1 - beta1),
                   .one_minus_beta2 = (float)(1 - beta2),
                   .m_scale = (float)(1 / (1 - pow(beta1, (double)h->t))),
                   .v_scale = (float)(1 / (1 - pow(beta2, (double)h->t))),
                   .epsilon = h->epsilon,
                   .learning_rate = h->learning_rate,
                   .weight_decay = h->weight_decay};
    tr_for_range(adam_blocks, &a, (n + ADAM_BLOCK - 1) / ADAM_BLOCK, 28 * n);
}

typedef struct {
    const float *x;
    double *sum; /* one a block */
    int64_t n;
} square_args;

typedef double vec_f64 __attribute__((vector_size(8 * VEC)));

/* Items are blocks of SUM_BLOCK elements, each summed alone: the order never depends on threads. */
static void square_blocks(const void *args, int64_t begin, int64_t end) {
    const square_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t stop = (b + 1) * SUM_BLOCK < a->n ? (b + 1) * SUM_BLOCK : a->n;
        vec_f64 sum[2] = {{0}, {0}};
        for (int64_t i = b * SUM_BLOCK; i < stop; i += 2 * VEC)
            for (int u = 0; u < 2; u++) {
                vec x = vec_load_n(TR_F32, a->x, i + u * VEC, stop - i - u * VEC);
                vec_f64 wide = __builtin_convertvector(x, vec_f64);
                sum[u] += wide * wide;
            }
        sum[0] += sum[1];
        double total = 0;
        for (int l = 0; l < VEC; l++) total += sum[0][l];
        a->sum[b] = total;
    }
}

static void sum_squares(tr_stream *s, double *sum, const float *x, int64_t n) {
    (void)s;
    int64_t blocks = (n + SUM_BLOCK - 1) / SUM_BLOCK;
    square_args a = {x, tr_scratch((size_t)blocks * sizeof(double)), n};
    tr_for_range(square_blocks, &a, blocks, 4 * n);
    double total = 0;
    for (int64_t b = 0; b < blocks; b++) total += a.sum[b];
    *sum += total;
}

static void fill_rows(tr_kernels *k) {
    k->adamw = adamw;
    k->sum_squares = sum_squares;
}
