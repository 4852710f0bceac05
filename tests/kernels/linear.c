/* Property: every maker's matrix products equal plain float64 loops, for all transposes, types,
 * edges, group sizes and thread counts, and neither read C when beta is 0 nor touch what lies
 * beside it. */
#include "harness.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    int64_t M, N, K;
} size;

/* want[m, n] += sum_k a[m, k] b[k, n] over strides; the double loops everything is held against. */
static void multiply(double *want, int64_t ldc, const double *a, int64_t a_row, int64_t a_column,
                     const double *b, int64_t b_row, int64_t b_column, size s) {
    for (int64_t m = 0; m < s.M; m++)
        for (int64_t k = 0; k < s.K; k++) {
            double x = a[m * a_row + k * a_column];
            for (int64_t n = 0; n < s.N; n++) want[m * ldc + n] += x * b[k * b_row + n * b_column];
        }
}

static void check_gemm(kt_maker *m, size s, bool ta, bool tb, tr_dtype ab, tr_dtype c, float beta,
                       int64_t gap) {
    int64_t lda = (ta ? s.M : s.K) + gap, ldb = (tb ? s.K : s.N) + gap, ldc = s.N + gap;
    kt_tensor *A = kt_normal(m, ab, (ta ? s.K : s.M) * lda, 1);
    kt_tensor *B = kt_normal(m, ab, (tb ? s.N : s.K) * ldb, 1);
    kt_tensor *C = kt_normal(m, c, s.M * ldc, 1);
    double *want = malloc((size_t)(C->n + 1) * sizeof *want);
    memcpy(want, C->value, (size_t)C->n * sizeof *want);
    if (beta == 0) {
        for (int64_t i = 0; i < s.M; i++)
            for (int64_t j = 0; j < s.N; j++) {
                want[i * ldc + j] = 0;
                C->value[i * ldc + j] = NAN;
            }
        C = kt_from(m, c, C->n, C->value);
    }
    multiply(want, ldc, A->value, ta ? 1 : lda, ta ? lda : 1, B->value, tb ? 1 : ldb, tb ? ldb : 1,
             s);
    tr_gemm g = {s.M, s.N, s.K, A->data, B->data, C->data, lda, ldb, ldc, ta, tb, ab, c, beta};
    m->k->gemm(m->s, &g);
    kt_check(m, C, want, kt_tolerance(c), "gemm %lldx%lldx%lld %c%c %s>%s beta %g ld +%lld",
             (long long)s.M, (long long)s.N, (long long)s.K, ta ? 'T' : 'N', tb ? 'T' : 'N',
             ab == TR_F32 ? "f32" : "bf16", c == TR_F32 ? "f32" : "bf16", (double)beta,
             (long long)gap);
    free(want);
    kt_release(m);
}

static const struct {
    tr_dtype ab, c;
} types[] = {{TR_F32, TR_F32}, {TR_BF16, TR_F32}, {TR_BF16, TR_BF16}};

static void gemm_equals_loops(kt_maker *m) {
    static const size sizes[] = {{1, 1, 1},    {3, 5, 7},      {13, 33, 31},
                                 {12, 32, 64}, {65, 100, 127}, {130, 65, 300},
                                 {0, 5, 3},    {5, 0, 3},      {5, 3, 0}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int t = 0; t < 3; t++)
            for (int flags = 0; flags < 16; flags++) {
                if (i == 5 && (flags & 12)) continue; /* the large one in fewer forms */
                check_gemm(m, sizes[i], flags & 1, flags & 2, types[t].ab, types[t].c,
                           flags & 4 ? 1.0f : 0.0f, flags & 8 ? 3 : 0);
            }
}

/* Longer than a kernel's slab of k, taller than its block, wider than its panel of columns. */
static void gemm_in_pieces(kt_maker *m) {
    static const size sizes[] = {{25, 40, 2111}, {1043, 7, 2300}, {7, 1100, 2055}, {290, 9, 700}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int t = 0; t < 3; t++)
            for (int flags = 0; flags < 4; flags++) {
                if (i > 0 && flags != (int)i) continue; /* the large ones in one form each */
                check_gemm(m, sizes[i], flags == 2, flags == 1, types[t].ab, types[t].c,
                           flags == 3 ? 1.0f : 0.0f, 0);
            }
}

/* Row counts of groups, ended by -1. */
static const int64_t groupings[][10] = {{-1},
                                        {0, -1},
                                        {5, -1},
                                        {0, 0, 0, -1},
                                        {1, 1, 1, 1, -1},
                                        {0, 30, 0, 1, 13, 0, -1},
                                        {200, 1, 2, 0, 3, -1},
                                        {3, 12, 24, 7, 36, 65, 0, 31, -1}};

static kt_tensor *offsets_of(kt_maker *m, const int64_t *rows, int64_t *G) {
    double at[16] = {0};
    int64_t n = 0;
    for (; rows[n] >= 0; n++) at[n + 1] = at[n] + (double)rows[n];
    *G = n;
    return kt_from(m, TR_I64, n + 1, at);
}

static void check_grouped(kt_maker *m, const int64_t *rows, int64_t N, int64_t K, bool trans,
                          tr_dtype ab, tr_dtype c, float beta) {
    int64_t G;
    kt_tensor *offsets = offsets_of(m, rows, &G);
    int64_t R = (int64_t)offsets->value[G], spare = 2;
    kt_tensor *X = kt_normal(m, ab, R * K, 1), *W = kt_normal(m, ab, G * N * K, 1);
    kt_tensor *Y = kt_normal(m, c, (R + spare) * N, 1);
    double *want = malloc((size_t)(Y->n + 1) * sizeof *want);
    for (int64_t i = 0; i < Y->n; i++) {
        want[i] = i < R * N && beta == 0 ? 0 : Y->value[i];
        if (i < R * N && beta == 0) Y->value[i] = NAN;
    }
    Y = kt_from(m, c, Y->n, Y->value);
    for (int64_t g = 0; g < G; g++) {
        int64_t r = (int64_t)offsets->value[g];
        multiply(want + r * N, N, X->value + r * K, K, 1, W->value + g * N * K, trans ? 1 : N,
                 trans ? K : 1, (size){rows[g], N, K});
    }
    m->k->grouped_gemm(m->s, ab, c, G, offsets->data, R + spare, X->data, W->data, trans, Y->data,
                       N, K, beta);
    kt_check(m, Y, want, kt_tolerance(c), "grouped G %lld R %lld N %lld K %lld %s %s>%s beta %g",
             (long long)G, (long long)R, (long long)N, (long long)K, trans ? "[N,K]" : "[K,N]",
             ab == TR_F32 ? "f32" : "bf16", c == TR_F32 ? "f32" : "bf16", (double)beta);
    free(want);
    kt_release(m);
}

static void check_grouped_weight(kt_maker *m, const int64_t *rows, int64_t N, int64_t K,
                                 tr_dtype ab, float beta) {
    int64_t G;
    kt_tensor *offsets = offsets_of(m, rows, &G);
    int64_t R = (int64_t)offsets->value[G];
    kt_tensor *dY = kt_normal(m, ab, R * N, 1), *X = kt_normal(m, ab, R * K, 1);
    kt_tensor *dW = kt_normal(m, TR_F32, G * N * K, 1);
    double *want = malloc((size_t)(dW->n + 1) * sizeof *want);
    for (int64_t i = 0; i < dW->n; i++) {
        want[i] = beta == 0 ? 0 : dW->value[i];
        if (beta == 0) dW->value[i] = NAN;
    }
    dW = kt_from(m, TR_F32, dW->n, dW->value);
    for (int64_t g = 0; g < G; g++) {
        int64_t r = (int64_t)offsets->value[g];
        multiply(want + g * N * K, K, dY->value + r * N, 1, N, X->value + r * K, K, 1,
                 (size){N, K, rows[g]});
    }
    m->k->grouped_gemm_weight(m->s, ab, G, offsets->data, R, dY->data, X->data, dW->data, N, K,
                              beta);
    kt_check(m, dW, want, kt_tolerance(TR_F32),
             "grouped weight G %lld R %lld N %lld K %lld %s beta %g", (long long)G, (long long)R,
             (long long)N, (long long)K, ab == TR_F32 ? "f32" : "bf16", (double)beta);
    free(want);
    kt_release(m);
}

static void grouped_equals_loops(kt_maker *m) {
    for (size_t i = 0; i < sizeof groupings / sizeof *groupings; i++)
        for (int t = 0; t < 3; t++) {
            for (int flags = 0; flags < 4; flags++)
                check_grouped(m, groupings[i], 45, 38, flags & 1, types[t].ab, types[t].c,
                              flags & 2 ? 1.0f : 0.0f);
            check_grouped(m, groupings[i], 5, 0, true, types[t].ab, types[t].c, 0);
            check_grouped(m, groupings[i], 0, 5, true, types[t].ab, types[t].c, 0);
            for (int beta = 0; beta < 2 && types[t].c == TR_F32; beta++)
                check_grouped_weight(m, groupings[i], 45, 38, types[t].ab, (float)beta);
        }
}

/* More threads than processors, and counts that divide nothing. */
static void any_number_of_threads(kt_maker *m) {
    int before = omp_get_max_threads(), most = kt_threads(m, 6);
    for (int threads = 2; threads <= most; threads++) {
        omp_set_num_threads(threads);
        for (int t = 0; t < 3; t++) {
            check_gemm(m, (size){150, 130, 70}, false, true, types[t].ab, types[t].c, 1, 0);
            check_grouped(m, groupings[7], 45, 38, true, types[t].ab, types[t].c, 0);
        }
        check_grouped_weight(m, groupings[7], 45, 38, TR_BF16, 0);
    }
    omp_set_num_threads(before);
}

/* bf16 holds no 257: a sum kept in bf16 sticks at 256. */
static void ones_sum_exactly(kt_maker *m) {
    for (int64_t K = 512; K <= 8192; K *= 4) {
        kt_tensor *A = kt_filled(m, TR_BF16, K, 1), *B = kt_filled(m, TR_BF16, K, 1);
        for (int t = 1; t < 3; t++) {
            kt_tensor *C = kt_filled(m, types[t].c, 1, NAN);
            tr_gemm g = {1, 1, K,     A->data, B->data, C->data,    K,
                         1, 1, false, false,   TR_BF16, types[t].c, 0};
            m->k->gemm(m->s, &g);
            double want = (double)K;
            kt_check(m, C, &want, 0, "%lld ones", (long long)K);
        }
    }
}

/* The pattern of 2 or 4 bytes in every element: denormals would not survive arithmetic here. */
static kt_tensor *patterned(kt_maker *m, tr_dtype t, int64_t n, uint32_t bits) {
    kt_tensor *x = kt_filled(m, t, n, 0);
    size_t width = tr_dtype_bytes(t);
    char *host = malloc((size_t)n * width);
    for (int64_t i = 0; i < n; i++) memcpy(host + (size_t)i * width, &bits, width);
    m->device->copy(m->s, x->data, host, (size_t)n * width, TR_TO_DEVICE);
    m->device->stream_wait(m->s);
    free(host);
    return x;
}

static double seconds_of_gemm(kt_maker *m, tr_dtype t, uint32_t bits) {
    enum { SIDE = 192 };
    kt_tensor *A = patterned(m, t, SIDE * SIDE, bits), *B = patterned(m, t, SIDE * SIDE, bits);
    kt_tensor *C = kt_filled(m, TR_F32, SIDE * SIDE, 0);
    tr_gemm g = {SIDE, SIDE, SIDE,  A->data, B->data, C->data, SIDE,
                 SIDE, SIDE, false, true,    t,       TR_F32,  0};
    double best = INFINITY;
    for (int i = 0; i < 8; i++) {
        clock_t start = clock(); /* of this process: others on the machine do not count */
        for (int j = 0; j < 8; j++) m->k->gemm(m->s, &g);
        best = fmin(best, (double)(clock() - start) / CLOCKS_PER_SEC);
    }
    kt_release(m);
    return best;
}

/* By one thread, whose time does not depend on who else wants the processor; that every thread
 * reads denormals as zero is seen in a product that would not vanish otherwise. */
static void denormals_cost_nothing(kt_maker *m) {
    const char *why = strcmp(m->name, "ref") == 0 ? "it promises the formula only"
                      : !m->device->host_memory   ? "a GPU keeps them, and takes no longer"
                                                  : NULL;
    if (why) {
        printf("  %-10s denormals_cost_nothing skipped: %s\n", m->name, why);
        return;
    }
    enum { SIDE = 256 };
    kt_tensor *A = patterned(m, TR_F32, SIDE * SIDE, 0x000116c2);
    kt_tensor *B = kt_filled(m, TR_F32, SIDE * SIDE, 1e30);
    kt_tensor *C = kt_filled(m, TR_F32, SIDE * SIDE, NAN);
    tr_gemm g = {SIDE, SIDE, SIDE,  A->data, B->data, C->data, SIDE,
                 SIDE, SIDE, false, false,   TR_F32,  TR_F32,  0};
    m->k->gemm(m->s, &g);
    kt_tensor *zeros = kt_filled(m, TR_F32, SIDE * SIDE, 0);
    kt_check(m, C, zeros->value, 0, "denormals read as zero in every thread");
    int before = omp_get_max_threads();
    omp_set_num_threads(1);
    for (int t = 0; t < 2; t++) {
        tr_dtype ab = types[t].ab;
        double usual = seconds_of_gemm(m, ab, ab == TR_F32 ? 0x3f800000 : 0x3f80);
        double denormal = seconds_of_gemm(m, ab, ab == TR_F32 ? 0x000116c2 : 0x0001);
        printf("  %-10s %s denormal inputs take %.2f of the usual time\n", m->name,
               t ? "bf16" : "f32", denormal / usual);
        assert_true(denormal < 2 * usual + 1e-3);
    }
    omp_set_num_threads(before);
}

static void repeats_bit_for_bit(kt_maker *m) {
    kt_tensor *A = kt_normal(m, TR_BF16, 70 * 300, 1), *B = kt_normal(m, TR_BF16, 300 * 90, 1);
    double first[70 * 90];
    for (int i = 0; i < 3; i++) {
        kt_tensor *C = kt_filled(m, TR_F32, 70 * 90, 0);
        tr_gemm g = {70, 90, 300,   A->data, B->data, C->data, 300,
                     90, 90, false, false,   TR_BF16, TR_F32,  1};
        m->k->gemm(m->s, &g);
        kt_read(m, C);
        if (i == 0) memcpy(first, C->value, sizeof first);
        assert_memory_equal(first, C->value, sizeof first);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        KT_TEST(gemm_equals_loops),     KT_TEST(gemm_in_pieces),   KT_TEST(grouped_equals_loops),
        KT_TEST(any_number_of_threads), KT_TEST(ones_sum_exactly), KT_TEST(denormals_cost_nothing),
        KT_TEST(repeats_bit_for_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
