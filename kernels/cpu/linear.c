/* linear.c - matrix products on the CPU: which product for which type, and the sharing between
 * threads. Floor: kernels.
 *
 * fp32 goes to oneDNN's sgemm (95 % of a Zen 4's FMA peak). bf16 goes to our own kernel where the
 * processor multiplies bf16 (product_avx512bf16.c), and is widened to fp32 elsewhere. oneDNN's bf16
 * primitives are as fast, but are made for one shape each: an expert's rows differ every time.
 * Threads share C's rows and columns, never the sum over K, so sums do not depend on threads. */
#include "kernels/cpu/product.h"
#include "kernels/cpu/scratch.h"
#include "kernels/makers.h"

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

typedef void product_fn(const tr_gemm *g);

static int64_t min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static const void *at(tr_dtype t, const void *x, int64_t i) {
    return (const char *)x + i * (int64_t)tr_dtype_bytes(t);
}

tr_gemm tr_product_part(const tr_gemm *g, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
    tr_gemm part = *g;
    part.M = m1 - m0;
    part.N = n1 - n0;
    part.A = at(g->ab, g->A, g->trans_a ? m0 : m0 * g->lda);
    part.B = at(g->ab, g->B, g->trans_b ? n0 * g->ldb : n0);
    part.C = (char *)g->C + (m0 * g->ldc + n0) * (int64_t)tr_dtype_bytes(g->c);
    return part;
}

/* --- fp32 ----------------------------------------------------------------------------------- */

/* By all threads, or by one inside a parallel region. */
static void product_f32(const tr_gemm *g) {
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
        int64_t depth = min(g->K - k, WIDE_DEPTH);
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
        product_f32(&f);
    }
    if (g->c == TR_BF16) narrow(g, sum);
}

static void product_widened(const tr_gemm *g) {
    for (int64_t m = 0; m < g->M; m += WIDE_ROWS)
        for (int64_t n = 0; n < g->N; n += WIDE_COLUMNS) {
            tr_gemm part =
                tr_product_part(g, m, min(m + WIDE_ROWS, g->M), n, min(n + WIDE_COLUMNS, g->N));
            widened_block(&part);
        }
}

/* --- sharing between threads ------------------------------------------------------------------ */

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
    return min(steps * part / parts * step, n);
}

/* How many of the threads share rows (the rest share columns): every row part reads all of B, every
 * column part all of A. */
static int64_t row_parts(int64_t threads, int64_t M, int64_t N) {
    int64_t best = 1;
    for (int64_t r = 2; r <= threads; r++)
        if (threads % r == 0 && r * N + threads / r * M < best * N + threads / best * M) best = r;
    return best;
}

enum { ROW_STEP = 12, COLUMN_STEP = 32, ALONE_FLOPS = 1 << 20 };

/* The calling thread's part of a product that `threads` threads work on. */
static void product_share(product_fn *product, const tr_gemm *g, int64_t thread, int64_t threads) {
    int64_t rows = row_parts(threads, g->M, g->N), columns = threads / rows;
    int64_t r = thread % rows, c = thread / rows;
    int64_t m0 = cut(g->M, r, rows, ROW_STEP), m1 = cut(g->M, r + 1, rows, ROW_STEP);
    int64_t n0 = cut(g->N, c, columns, COLUMN_STEP), n1 = cut(g->N, c + 1, columns, COLUMN_STEP);
    if (m0 == m1 || n0 == n1) return;
    tr_gemm part = tr_product_part(g, m0, m1, n0, n1);
    if (g->K == 0)
        product_empty(&part);
    else
        product(&part);
}

static void product_shared(product_fn *product, const tr_gemm *g) {
    if (g->M == 0 || g->N == 0) return;
    bool alone = omp_in_parallel() || g->M * g->N * g->K < ALONE_FLOPS / 2;
#pragma omp parallel if (!alone)
    product_share(product, g, omp_get_thread_num(), omp_get_num_threads());
}

static product_fn *bf16_product(bool native) {
    return native ? tr_product_bf16 : product_widened;
}

static void gemm(const tr_gemm *g, bool native) {
    if (g->ab == TR_F32 && g->K > 0 && g->M > 0 && g->N > 0)
        product_f32(g); /* oneDNN shares the work itself */
    else
        product_shared(bf16_product(native), g);
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

static void grouped_gemm(const tr_gemm *all, int64_t G, const int64_t *offsets, bool native) {
    if (G == 0 || all->N == 0 || offsets[G] == offsets[0]) return;
    product_fn *product = all->ab == TR_F32 ? product_f32 : bf16_product(native);
    if (all->K == 0) product = product_empty;
#pragma omp parallel
    {
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t begin = group_cut(offsets, G, thread, threads);
        int64_t end =
            thread + 1 == threads ? offsets[G] : group_cut(offsets, G, thread + 1, threads);
        for (int64_t i = 0; i < G; i++) {
            int64_t m0 = offsets[i] > begin ? offsets[i] : begin;
            int64_t m1 = min(offsets[i + 1], end);
            if (m0 >= m1) continue;
            tr_gemm part = tr_product_part(all, m0, m1, 0, all->N);
            part.B = at(all->ab, all->B, i * all->N * all->K);
            product(&part);
        }
    }
}

static void grouped_gemm_weight(const tr_gemm *all, int64_t G, const int64_t *offsets,
                                bool native) {
    if (G == 0 || all->M == 0 || all->N == 0) return;
    product_fn *product = all->ab == TR_F32 ? product_f32 : bf16_product(native);
#pragma omp parallel
    for (int64_t i = 0; i < G; i++) {
        tr_gemm g = *all;
        g.K = offsets[i + 1] - offsets[i];
        if (g.K == 0) continue;
        g.A = at(g.ab, g.A, offsets[i] * g.lda);
        g.B = at(g.ab, g.B, offsets[i] * g.ldb);
        g.C = (float *)g.C + i * g.M * g.N;
        product_share(product, &g, omp_get_thread_num(), omp_get_num_threads());
    }
}

/* --- rows of the table ------------------------------------------------------------------------ */

static tr_gemm forward(tr_dtype ab, tr_dtype c, int64_t rows, const void *X, const void *W,
                       bool trans_w, void *Y, int64_t N, int64_t K, float beta) {
    return (tr_gemm){.M = rows,
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
}

static tr_gemm weight(tr_dtype ab, const void *dY, const void *X, float *dW, int64_t N, int64_t K) {
    return (tr_gemm){.M = N,
                     .N = K,
                     .A = dY,
                     .B = X,
                     .C = dW,
                     .lda = N,
                     .ldb = K,
                     .ldc = K,
                     .trans_a = true,
                     .ab = ab,
                     .c = TR_F32,
                     .beta = 1};
}

static void gemm_any(tr_stream *s, const tr_gemm *g) {
    (void)s;
    gemm(g, false);
}

static void gemm_native(tr_stream *s, const tr_gemm *g) {
    (void)s;
    gemm(g, true);
}

static void grouped_any(tr_stream *s, tr_dtype ab, tr_dtype c, int64_t G, const int64_t *offsets,
                        int64_t max_rows, const void *X, const void *W, bool trans_w, void *Y,
                        int64_t N, int64_t K, float beta) {
    (void)s;
    tr_gemm all = forward(ab, c, max_rows, X, W, trans_w, Y, N, K, beta);
    grouped_gemm(&all, G, offsets, false);
}

static void grouped_native(tr_stream *s, tr_dtype ab, tr_dtype c, int64_t G, const int64_t *offsets,
                           int64_t max_rows, const void *X, const void *W, bool trans_w, void *Y,
                           int64_t N, int64_t K, float beta) {
    (void)s;
    tr_gemm all = forward(ab, c, max_rows, X, W, trans_w, Y, N, K, beta);
    grouped_gemm(&all, G, offsets, true);
}

static void weight_any(tr_stream *s, tr_dtype ab, int64_t G, const int64_t *offsets,
                       int64_t max_rows, const void *dY, const void *X, float *dW, int64_t N,
                       int64_t K) {
    (void)s, (void)max_rows;
    tr_gemm all = weight(ab, dY, X, dW, N, K);
    grouped_gemm_weight(&all, G, offsets, false);
}

static void weight_native(tr_stream *s, tr_dtype ab, int64_t G, const int64_t *offsets,
                          int64_t max_rows, const void *dY, const void *X, float *dW, int64_t N,
                          int64_t K) {
    (void)s, (void)max_rows;
    tr_gemm all = weight(ab, dY, X, dW, N, K);
    grouped_gemm_weight(&all, G, offsets, true);
}

void tr_cpu_linear(tr_kernels *k, tr_cpu_level level) {
    bool native = level >= TR_CPU_AVX512_BF16;
    k->gemm = native ? gemm_native : gemm_any;
    k->grouped_gemm = native ? grouped_native : grouped_any;
    k->grouped_gemm_weight = native ? weight_native : weight_any;
}
