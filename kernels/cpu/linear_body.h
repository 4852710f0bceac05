/* linear_body.h - the rows of matrix products: how their work is shared between threads, over the
 * one-thread products of an instruction set. Floor: kernels, internal.
 *
 * Threads share C's rows and columns, never the sum over K. Dense fp32 is oneDNN's, which shares it
 * itself. oneDNN's bf16 primitives are no faster than ours and are made for one shape each, while
 * an expert's rows differ every time.
 *
 * The includer defines, before: tr_product *product_for(const tr_gemm *g), the fastest it has. */
#pragma once
#include "kernels/cpu/levels.h"
#include "kernels/cpu/product.h"
#include "kernels/cpu/stream.h"
#include "kernels/makers.h"

#include <omp.h>
#include <string.h>

/* beta*C alone, for a product of nothing. */
static void product_empty(const tr_gemm *g) {
    if (g->beta != 0) return;
    size_t width = tr_dtype_bytes(g->c);
    for (int64_t m = 0; m < g->M; m++)
        memset((char *)g->C + (size_t)(m * g->ldc) * width, 0, (size_t)g->N * width);
}

/* A thread's part of `parts` equal ones of n, cut at multiples of `step`. */
static int64_t cut(int64_t n, int64_t part, int64_t parts, int64_t step) {
    int64_t steps = (n + step - 1) / step;
    return tr_min(steps * part / parts * step, n);
}

/* How many of the threads share rows (the rest share columns): every row part reads all of B, every
 * column part all of A. */
static int64_t row_parts(int64_t threads, int64_t M, int64_t N) {
    int64_t best = 1;
    for (int64_t r = 2; r <= threads; r++)
        if (threads % r == 0 && r * N + threads / r * M < best * N + threads / best * M) best = r;
    return best;
}

enum { ROW_STEP = 12, COLUMN_STEP = 32, ALONE_PRODUCTS = 1 << 19 };
/* Of a slice of a long product: some 20 ms of one thread, and a multiple of what kernels block by.
 */
enum { SLICE_PRODUCTS = 1 << 30, SLICE_STEP = 384 };

/* The calling thread's part of a product that `threads` threads work on. */
static void product_share(tr_product *product, const tr_gemm *g, int64_t thread, int64_t threads) {
    int64_t rows = row_parts(threads, g->M, g->N), columns = threads / rows;
    int64_t r = thread % rows, c = thread / rows;
    int64_t m0 = cut(g->M, r, rows, ROW_STEP), m1 = cut(g->M, r + 1, rows, ROW_STEP);
    int64_t n0 = cut(g->N, c, columns, COLUMN_STEP), n1 = cut(g->N, c + 1, columns, COLUMN_STEP);
    if (m0 == m1 || n0 == n1) return;
    tr_gemm part = tr_product_part(g, m0, m1, n0, n1);
    product(&part);
}

static void whole(const tr_gemm *g) {
    tr_product *product = g->K == 0 ? product_empty : product_for(g);
    if (product == tr_product_sgemm) { /* oneDNN shares the work itself */
        product(g);
        return;
    }
    bool alone = omp_in_parallel() || g->M * g->N * g->K < ALONE_PRODUCTS;
#pragma omp parallel if (!alone)
    product_share(product, g, omp_get_thread_num(), omp_get_num_threads());
}

/* A product that is long for a stream that wants to breathe: slices of rows or, where most of it is
 * the sum, of K. */
static void in_slices(tr_stream *s, const tr_gemm *g, int64_t slices) {
    bool rows = g->M >= g->K || g->c != TR_F32;
    int64_t all = rows ? g->M : g->K, step = (all + slices - 1) / slices;
    step = (step + SLICE_STEP - 1) / SLICE_STEP * SLICE_STEP;
    for (int64_t at = 0; at < all; at += step) {
        int64_t n = tr_min(step, all - at);
        tr_gemm part = rows ? tr_product_part(g, at, at + n, 0, g->N) : *g;
        if (!rows) {
            part.K = n;
            part.A = tr_product_at(g->ab, g->A, g->trans_a ? at * g->lda : at);
            part.B = tr_product_at(g->ab, g->B, g->trans_b ? at : at * g->ldb);
            if (at > 0) part.beta = 1;
        }
        whole(&part);
        tr_stream_breathe(s);
    }
}

static void gemm(tr_stream *s, const tr_gemm *g) {
    if (g->M == 0 || g->N == 0) return;
    bool breathes = s && s->drive && !omp_in_parallel();
    int64_t slice = (int64_t)SLICE_PRODUCTS * omp_get_max_threads();
    int64_t slices = breathes ? g->M * g->N * g->K / slice : 0;
    if (slices > 1) {
        in_slices(s, g, slices);
    } else {
        whole(g);
        if (breathes) tr_stream_breathe(s);
    }
}

/* Row at which the work of `part` of `parts` begins: groups cost their rows and a few for packing
 * their weights. Inside a group the cut falls on a multiple of ROW_STEP from its start. */
static int64_t group_cut(const int64_t *offsets, int64_t G, int64_t part, int64_t parts) {
    enum { PACKING_ROWS = 8 };
    int64_t busy = 0;
    for (int64_t i = 0; i < G; i++) busy += offsets[i + 1] > offsets[i];
    int64_t first = offsets[0], last = offsets[G];
    int64_t goal = (last - first + busy * PACKING_ROWS) * part / parts;
    for (int64_t i = 0; i < G; i++) {
        int64_t rows = offsets[i + 1] - offsets[i];
        if (rows == 0) continue;
        if (goal < rows + PACKING_ROWS) {
            int64_t inside = goal > PACKING_ROWS ? (goal - PACKING_ROWS) / ROW_STEP * ROW_STEP : 0;
            return offsets[i] + inside;
        }
        goal -= rows + PACKING_ROWS;
    }
    return last;
}

static void grouped_gemm(tr_stream *s, tr_dtype ab, tr_dtype c, int64_t G, const int64_t *offsets,
                         int64_t max_rows, const void *X, const void *W, bool trans_w, void *Y,
                         int64_t N, int64_t K, float beta) {
    tr_gemm all = {.M = max_rows,
                   .N = N,
                   .K = K,
                   .A = X,
                   .B = W,
                   .C = Y,
                   .lda = K,
                   .ldb = trans_w ? K : N,
                   .ldc = N,
                   .trans_b = trans_w,
                   .ab = ab,
                   .c = c,
                   .beta = beta};
    if (G == 0 || N == 0 || offsets[G] == offsets[0]) return;
#pragma omp parallel
    {
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t begin = group_cut(offsets, G, thread, threads);
        int64_t end = group_cut(offsets, G, thread + 1, threads);
        for (int64_t i = 0; i < G; i++) {
            int64_t m0 = offsets[i] > begin ? offsets[i] : begin;
            int64_t m1 = tr_min(offsets[i + 1], end);
            if (m0 >= m1) continue;
            tr_gemm part = tr_product_part(&all, m0, m1, 0, N);
            part.B = tr_product_at(ab, W, i * N * K);
            tr_product *product = K == 0 ? product_empty : product_for(&part);
            product(&part);
            if (thread == 0) tr_stream_breathe(s);
        }
    }
}

static void grouped_gemm_weight(tr_stream *s, tr_dtype ab, int64_t G, const int64_t *offsets,
                                int64_t max_rows, const void *dY, const void *X, float *dW,
                                int64_t N, int64_t K, float beta) {
    (void)max_rows;
    if (N == 0 || K == 0) return;
#pragma omp parallel
    for (int64_t i = 0; i < G; i++) {
        tr_gemm g = {.M = N,
                     .N = K,
                     .K = offsets[i + 1] - offsets[i],
                     .A = tr_product_at(ab, dY, offsets[i] * N),
                     .B = tr_product_at(ab, X, offsets[i] * K),
                     .C = dW + i * N * K,
                     .lda = N,
                     .ldb = K,
                     .ldc = K,
                     .trans_a = true,
                     .ab = ab,
                     .c = TR_F32,
                     .beta = beta};
        tr_product *product = g.K == 0 ? product_empty : product_for(&g);
        if (g.K > 0 || beta == 0)
            product_share(product, &g, omp_get_thread_num(), omp_get_num_threads());
        if (omp_get_thread_num() == 0) tr_stream_breathe(s);
    }
}

static void fill_rows(tr_kernels *k) {
    k->gemm = gemm;
    k->grouped_gemm = grouped_gemm;
    k->grouped_gemm_weight = grouped_gemm_weight;
}
