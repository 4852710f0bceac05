/* Property: AdamW and the sum of squares equal plain float64 loops and the figures of the formulas'
 * page; the compute copy is the parameter rounded; sums do not depend on the number of threads. */
#include "harness.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>

static const tr_adamw usual = {.learning_rate = 1e-3f,
                               .beta1 = 0.9f,
                               .beta2 = 0.95f,
                               .epsilon = 1e-8f,
                               .weight_decay = 0.1f,
                               .grad_scale = 0.5f,
                               .t = 3};

static void check_adamw(kt_maker *m, int64_t n, tr_dtype compute_t) {
    kt_tensor *p = kt_normal(m, TR_F32, n, 1), *g = kt_normal(m, TR_F32, n, 1e-2);
    kt_tensor *mean = kt_normal(m, TR_F32, n, 1e-2), *var = kt_normal(m, TR_F32, n, 1e-2);
    for (int64_t i = 0; i < n; i++) var->value[i] *= var->value[i];
    var = kt_from(m, TR_F32, n, var->value);
    kt_tensor *compute = kt_filled(m, compute_t, n, NAN);
    double *want[3];
    for (int j = 0; j < 3; j++) want[j] = malloc((size_t)(n + 1) * sizeof(double));
    double b1 = (double)usual.beta1, b2 = (double)usual.beta2;
    for (int64_t i = 0; i < n; i++) {
        double grad = g->value[i] * 0.5;
        want[1][i] = b1 * mean->value[i] + (1 - b1) * grad;
        want[2][i] = b2 * var->value[i] + (1 - b2) * grad * grad;
        double step = want[1][i] / (1 - pow(b1, 3)) /
                      (sqrt(want[2][i] / (1 - pow(b2, 3))) + (double)usual.epsilon);
        want[0][i] = p->value[i] - (double)usual.learning_rate *
                                       (step + (double)usual.weight_decay * p->value[i]);
    }
    m->k->adamw(m->s, &usual, p->data, compute_t == TR_U8 ? NULL : compute->data, compute_t,
                mean->data, var->data, g->data, n);
    kt_check(m, p, want[0], 1e-6, "adamw parameter, %lld elements", (long long)n);
    kt_check(m, mean, want[1], 1e-6, "adamw first moment");
    kt_check(m, var, want[2], 1e-6, "adamw second moment");
    if (compute_t != TR_U8) {
        for (int64_t i = 0; i < n; i++) want[0][i] = kt_round(compute_t, p->value[i]);
        kt_check(m, compute, want[0], 0, "compute copy %s", compute_t == TR_F32 ? "f32" : "bf16");
    }
    for (int j = 0; j < 3; j++) free(want[j]);
    kt_release(m);
}

static void adamw_equals_loops(kt_maker *m) {
    static const int64_t sizes[] = {0, 1, 15, 16, 33, 1023, 1025, 70001};
    for (int i = 0; i < 8; i++) {
        check_adamw(m, sizes[i], TR_BF16);
        check_adamw(m, sizes[i], TR_F32);
        check_adamw(m, sizes[i], TR_U8); /* stands for: no compute copy */
    }
}

/* One parameter's first update. */
static double first_update(kt_maker *m, tr_adamw h, double p, double g) {
    kt_tensor *P = kt_from(m, TR_F32, 1, &p), *G = kt_from(m, TR_F32, 1, &g);
    kt_tensor *mean = kt_filled(m, TR_F32, 1, 0), *var = kt_filled(m, TR_F32, 1, 0);
    h.t = 1;
    m->k->adamw(m->s, &h, P->data, NULL, TR_F32, mean->data, var->data, G->data, 1);
    return kt_read(m, P)[0];
}

static void known_updates(kt_maker *m) {
    tr_adamw h = {.learning_rate = 0.1f,
                  .beta1 = 0.9f,
                  .beta2 = 0.95f,
                  .epsilon = 1e-8f,
                  .weight_decay = 0.1f,
                  .grad_scale = 1};
    kt_check_number(m, first_update(m, h, 1, 1), 0.89, 1e-6, "lr wd .1, p g 1: .89");
    h.learning_rate = 1;
    h.weight_decay = 0;
    kt_check_number(m, -first_update(m, h, 0, 1e-9), 0.090909, 1e-6, "g 1e-9: update .090909");
    h.learning_rate = 1e-3f;
    kt_check_number(m, first_update(m, h, 1, 0.1), 0.999, 1e-6, "no decay: .999");
    h.weight_decay = 0.1f;
    kt_check_number(m, first_update(m, h, 1, 0.1), 0.9989, 1e-6, "decay: .9989");
}

static void sum_squares_equals_loops(kt_maker *m) {
    static const int64_t sizes[] = {0, 1, 31, 33, 4096, 4097, 123457};
    int before = omp_get_max_threads(), most = kt_threads(m, 4);
    for (int i = 0; i < 7; i++) {
        kt_tensor *x = kt_normal(m, TR_F32, sizes[i], 3);
        double want = 2, first = 0;
        for (int64_t j = 0; j < sizes[i]; j++) want += x->value[j] * x->value[j];
        for (int threads = 1; threads <= most; threads++) {
            omp_set_num_threads(threads);
            kt_tensor *sum = kt_filled(m, TR_F64, 1, 2);
            m->k->sum_squares(m->s, sum->data, x->data, sizes[i]);
            if (threads == 1) {
                kt_check(m, sum, &want, 1e-12, "sum of %lld squares", (long long)sizes[i]);
                first = sum->value[0];
            }
            assert_true(kt_read(m, sum)[0] == first);
        }
    }
    omp_set_num_threads(before);
}

/* Shards begin anywhere: the same values at any element, and the same sum. */
static void odd_addresses(kt_maker *m) {
    enum { N = 3001 };
    kt_tensor *g = kt_normal(m, TR_F32, N, 1);
    double first[2] = {0, 0};
    for (int64_t at = 0; at < 7; at++) {
        double *moved = calloc(N + 8, sizeof *moved);
        for (int64_t i = 0; i < N; i++) moved[i + at] = g->value[i];
        kt_tensor *x = kt_from(m, TR_F32, N + 8, moved), *p = kt_from(m, TR_F32, N + 8, moved);
        kt_tensor *mean = kt_filled(m, TR_F32, N + 8, 0), *var = kt_filled(m, TR_F32, N + 8, 0);
        kt_tensor *copy = kt_filled(m, TR_BF16, N + 8, 7), *sum = kt_filled(m, TR_F64, 1, 0);
        m->k->sum_squares(m->s, sum->data, (float *)x->data + at, N);
        m->k->adamw(m->s, &usual, (float *)p->data + at, (tr_bf16 *)copy->data + at, TR_BF16,
                    (float *)mean->data + at, (float *)var->data + at, (float *)x->data + at, N);
        kt_read(m, p), kt_read(m, copy);
        double got[2] = {kt_read(m, sum)[0], 0};
        for (int64_t i = 0; i < N + 8; i++) {
            bool inside = i >= at && i < at + N;
            got[1] += p->value[i] * p->value[i];
            assert_true(copy->value[i] == (inside ? kt_round(TR_BF16, p->value[i]) : 7));
        }
        for (int j = 0; j < 2 && at == 0; j++) first[j] = got[j];
        kt_check_number(m, got[0], first[0], 1e-12, "squares from element %lld", (long long)at);
        kt_check_number(m, got[1], first[1], 1e-6, "adamw from there");
        free(moved);
    }
}

static void non_finite_is_seen(kt_maker *m) {
    double bad[2] = {INFINITY, NAN};
    for (int i = 0; i < 2; i++) {
        kt_tensor *x = kt_filled(m, TR_F32, 5001, 1);
        x->value[4999] = bad[i];
        x = kt_from(m, TR_F32, 5001, x->value);
        kt_tensor *sum = kt_filled(m, TR_F64, 1, 0);
        m->k->sum_squares(m->s, sum->data, x->data, 5001);
        assert_true(!isfinite(kt_read(m, sum)[0]));
    }
    /* squares beyond fp32's range are not infinite */
    kt_tensor *x = kt_filled(m, TR_F32, 2, 1e30), *sum = kt_filled(m, TR_F64, 1, 0);
    m->k->sum_squares(m->s, sum->data, x->data, 2);
    kt_check_number(m, kt_read(m, sum)[0] * 1e-60, 2, 1e-6, "squares of 1e30");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        KT_TEST(adamw_equals_loops), KT_TEST(known_updates),      KT_TEST(sum_squares_equals_loops),
        KT_TEST(odd_addresses),      KT_TEST(non_finite_is_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
