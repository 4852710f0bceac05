/* product.h - one matrix product, in the ways this machine may have. Floor: kernels, internal.
 * All take what tr_gemm describes with M, N, K >= 1, and the thread's scratch memory. */
#pragma once
#include "kernels/kernels.h"

typedef void tr_product(const tr_gemm *g);

/* fp32 by oneDNN: by all threads, or by the calling one inside a parallel region. */
void tr_product_sgemm(const tr_gemm *g);
/* A and B are bf16: widened piece by piece to fp32 for the above. By the calling thread. */
void tr_product_widened(const tr_gemm *g);
/* Our own, by the calling thread: all of fp32 with AVX-512; A and B of bf16 with AVX512-BF16. */
void tr_product_f32(const tr_gemm *g);
void tr_product_bf16(const tr_gemm *g);

/* Whether the first of these is faster than oneDNN, with AVX-512: where rows are few for the
 * weights that oneDNN packs before it multiplies (Zen 4, X W^T of 32 rows: 93 against 72 GFLOP/s at
 * K 768, 90 against 53 at K 2048; as fast from 128 and 512 rows on), and in weight gradients of few
 * rows, which wait for C (32 rows: 78 against 66). */
static inline bool tr_product_f32_pays(const tr_gemm *g) {
    if (g->trans_a) return g->K <= 48;
    return g->M <= (!g->trans_b ? 48 : g->K > 1024 ? 512 : 128);
}

/* The part of g's C with rows m0..m1-1 and columns n0..n1-1 as a product of its own. */
tr_gemm tr_product_part(const tr_gemm *g, int64_t m0, int64_t m1, int64_t n0, int64_t n1);

static inline int64_t tr_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Element i of an array of type t. */
static inline const void *tr_product_at(tr_dtype t, const void *x, int64_t i) {
    return (const char *)x + i * (int64_t)tr_dtype_bytes(t);
}
