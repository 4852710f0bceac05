/* product.c - matrix products through oneDNN, and of bf16 without bf16 instructions. Floor:
 * kernels. */
#include "kernels/cpu/product.h"

#include "base/log.h"
#include "kernels/cpu/scratch.h"

#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <stdlib.h>

tr_gemm tr_product_part(const tr_gemm *g, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
    tr_gemm part = *g;
    part.M = m1 - m0;
    part.N = n1 - n0;
    part.A = tr_product_at(g->ab, g->A, g->trans_a ? m0 : m0 * g->lda);
    part.B = tr_product_at(g->ab, g->B, g->trans_b ? n0 * g->ldb : n0);
    part.C = (char *)g->C + (m0 * g->ldc + n0) * (int64_t)tr_dtype_bytes(g->c);
    return part;
}

void tr_product_sgemm(const tr_gemm *g) {
    dnnl_status_t status =
        dnnl_sgemm(g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', g->M, g->N, g->K, 1.0f, g->A,
                   g->lda, g->B, g->ldb, g->beta, g->C, g->ldc);
    if (status == dnnl_success) return;
    char text[160];
    snprintf(text, sizeof text, "oneDNN refused an sgemm of M %lld N %lld K %lld with status %d",
             (long long)g->M, (long long)g->N, (long long)g->K, (int)status);
    tr_print_error(text);
    abort();
}

/* --- bf16 without bf16 instructions ------------------------------------------------------------
 */

enum { WIDE_ROWS = 512, WIDE_COLUMNS = 512, WIDE_DEPTH = 1024 };

static void widen(float *to, const tr_bf16 *from, int64_t rows, int64_t columns, int64_t ld) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++)
            to[r * columns + c] = tr_bf16_to_f32(from[r * ld + c]);
}

/* A part of A, or of B, as stored: [rows, columns] when not transposed. */
static void widen_part(float *to, const void *from, int64_t ld, bool trans, int64_t row,
                       int64_t rows, int64_t column, int64_t columns) {
    const tr_bf16 *x = from;
    if (trans)
        widen(to, x + column * ld + row, columns, rows, ld);
    else
        widen(to, x + row * ld + column, rows, columns, ld);
}

/* The finished part of C: rounded, or added and rounded, into bf16. */
static void narrow(const tr_gemm *g, const float *sum) {
    for (int64_t m = 0; m < g->M; m++) {
        tr_bf16 *c = (tr_bf16 *)g->C + m * g->ldc;
        for (int64_t n = 0; n < g->N; n++)
            c[n] = tr_f32_to_bf16(sum[m * g->N + n] + (g->beta != 0 ? tr_bf16_to_f32(c[n]) : 0.0f));
    }
}

/* One block of C, small enough that its operands fit in scratch piece by piece. */
static void widened_block(const tr_gemm *g) {
    float *a = tr_scratch(sizeof(float) * ((WIDE_ROWS + WIDE_COLUMNS) * (int64_t)WIDE_DEPTH +
                                           WIDE_ROWS * WIDE_COLUMNS));
    float *b = a + WIDE_ROWS * WIDE_DEPTH, *sum = b + WIDE_COLUMNS * WIDE_DEPTH;
    for (int64_t k = 0; k < g->K; k += WIDE_DEPTH) {
        int64_t depth = tr_min(g->K - k, WIDE_DEPTH);
        widen_part(a, g->A, g->lda, g->trans_a, 0, g->M, k, depth);
        widen_part(b, g->B, g->ldb, g->trans_b, k, depth, 0, g->N);
        tr_gemm f = {.M = g->M, .N = g->N, .K = depth, .A = a, .B = b, .C = sum, .ldc = g->N};
        f.trans_a = g->trans_a;
        f.trans_b = g->trans_b;
        f.lda = g->trans_a ? g->M : depth;
        f.ldb = g->trans_b ? depth : g->N;
        f.beta = k > 0 ? 1 : 0;
        if (g->c == TR_F32) {
            f.C = g->C;
            f.ldc = g->ldc;
            f.beta = k > 0 ? 1 : g->beta;
        }
        tr_product_sgemm(&f);
    }
    if (g->c == TR_BF16) narrow(g, sum);
}

void tr_product_widened(const tr_gemm *g) {
    for (int64_t m = 0; m < g->M; m += WIDE_ROWS)
        for (int64_t n = 0; n < g->N; n += WIDE_COLUMNS) {
            tr_gemm part = tr_product_part(g, m, tr_min(m + WIDE_ROWS, g->M), n,
                                           tr_min(n + WIDE_COLUMNS, g->N));
            widened_block(&part);
        }
}
