/* linear.c - matrix products as their formula, sums in fp64. Floor: kernels. */
#include "kernels/makers.h"
#include "kernels/ref/scalar.h"

static void gemm(tr_stream *s, const tr_gemm *g) {
    (void)s;
    int64_t a_row = g->trans_a ? 1 : g->lda, a_col = g->trans_a ? g->lda : 1;
    int64_t b_row = g->trans_b ? 1 : g->ldb, b_col = g->trans_b ? g->ldb : 1;
    for (int64_t i = 0; i < g->M; i++)
        for (int64_t j = 0; j < g->N; j++) {
            double sum = 0;
            for (int64_t k = 0; k < g->K; k++)
                sum += (double)tr_load(g->ab, g->A, i * a_row + k * a_col) *
                       (double)tr_load(g->ab, g->B, k * b_row + j * b_col);
            if (g->beta != 0) sum += (double)tr_load(g->c, g->C, i * g->ldc + j);
            tr_store(g->c, g->C, i * g->ldc + j, (float)sum);
        }
}

static void grouped_gemm(tr_stream *s, tr_dtype ab, tr_dtype c, int64_t G, const int64_t *offsets,
                         int64_t max_rows, const void *X, const void *W, bool trans_w, void *Y,
                         int64_t N, int64_t K, float beta) {
    (void)max_rows;
    for (int64_t i = 0; i < G; i++) {
        tr_gemm g = {.M = offsets[i + 1] - offsets[i],
                     .N = N,
                     .K = K,
                     .A = tr_at(ab, X, offsets[i] * K),
                     .B = tr_at(ab, W, i * N * K),
                     .C = tr_at_mutable(c, Y, offsets[i] * N),
                     .lda = K,
                     .ldb = trans_w ? K : N,
                     .ldc = N,
                     .trans_b = trans_w,
                     .ab = ab,
                     .c = c,
                     .beta = beta};
        gemm(s, &g);
    }
}

static void grouped_gemm_weight(tr_stream *s, tr_dtype ab, int64_t G, const int64_t *offsets,
                                int64_t max_rows, const void *dY, const void *X, float *dW,
                                int64_t N, int64_t K, float beta) {
    (void)max_rows;
    for (int64_t i = 0; i < G; i++) {
        tr_gemm g = {.M = N,
                     .N = K,
                     .K = offsets[i + 1] - offsets[i],
                     .A = tr_at(ab, dY, offsets[i] * N),
                     .B = tr_at(ab, X, offsets[i] * K),
                     .C = dW + i * N * K,
                     .lda = N,
                     .ldb = K,
                     .ldc = K,
                     .trans_a = true,
                     .ab = ab,
                     .c = TR_F32,
                     .beta = beta};
        gemm(s, &g);
    }
}

void tr_ref_linear(tr_kernels *k) {
    k->gemm = gemm;
    k->grouped_gemm = grouped_gemm;
    k->grouped_gemm_weight = grouped_gemm_weight;
}
