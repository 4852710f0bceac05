/* Property: attention and its gradients are those of the formula, for every maker of the table, for
 * every mask, length, head dimension and type; checked against float64 loops, whose gradients are
 * checked by finite differences. Run with `bench` it measures speed instead. */
#include "problem.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const shape cases[] = {
    /* lengths off every block size */
    {.Sq = 1, .Dqk = 64, .causal = true},
    {.Sq = 31, .Dqk = 64, .causal = true},
    {.Sq = 33, .Dqk = 64, .causal = true, .B = 2},
    {.Sq = 63, .Dqk = 64, .causal = true},
    {.Sq = 65, .Dqk = 64, .causal = true, .B = 2, .Hq = 6, .Hkv = 2},
    {.Sq = 127, .Dqk = 64, .causal = true},
    {.Sq = 129, .Dqk = 64, .causal = true, .B = 2},
    {.Sq = 257, .Dqk = 64, .causal = true, .Hq = 2, .Hkv = 1},
    /* head dimensions */
    {.Sq = 65, .Dqk = 16, .causal = true, .B = 2, .Hq = 6, .Hkv = 2},
    {.Sq = 129, .Dqk = 80, .causal = true, .B = 2},
    {.Sq = 129, .Dqk = 96, .causal = true, .Hq = 3, .Hkv = 1},
    {.Sq = 257, .Dqk = 128, .causal = true, .B = 2, .Hq = 2},
    {.Sq = 129, .Dqk = 256, .causal = true},
    {.Sq = 70, .Dqk = 1, .causal = true, .B = 2, .Hq = 2},
    {.Sq = 70, .Dqk = 7, .causal = true, .Dv = 21, .Hq = 6, .Hkv = 2},
    {.Sq = 129, .Dqk = 192, .Dv = 128, .causal = true, .Hq = 2},
    {.Sq = 129, .Dqk = 24, .Dv = 40, .B = 2},
    /* no mask, and lengths that differ, aligned by positions */
    {.Sq = 129, .Dqk = 64, .B = 2, .Hq = 6, .Hkv = 2},
    {.Sq = 5, .Sk = 300, .Dqk = 64, .causal = true, .q_start = 295},
    {.Sq = 300, .Sk = 5, .Dqk = 64, .causal = true, .q_start = -295},
    {.Sq = 100, .Sk = 100, .Dqk = 64, .causal = true, .q_start = 100, .Hq = 2},
    {.Sq = 100, .Sk = 100, .Dqk = 64, .causal = true, .k_start = 100, .Hq = 2},
    {.Sq = 100, .Sk = 170, .Dqk = 64, .causal = true, .q_start = 131, .k_start = 77, .Hq = 2},
    {.Sq = 1, .Sk = 513, .Dqk = 128, .Hq = 6, .Hkv = 2},
    /* so many tiles of queries that GPU kernels look for the next one several times */
    {.Sq = 2100, .Sk = 40, .Dqk = 16, .causal = true, .k_start = 2070},
    /* windows, documents, sparse masks */
    {.Sq = 257, .Dqk = 64, .causal = true, .window = 1},
    {.Sq = 257, .Dqk = 64, .causal = true, .window = 33, .Hq = 2},
    {.Sq = 700, .Dqk = 16, .causal = true, .window = 100},
    {.Sq = 257, .Dqk = 64, .window = 40, .B = 2},
    {.Sq = 257, .Dqk = 64, .causal = true, .docs = 1, .B = 2, .Hq = 6, .Hkv = 2},
    {.Sq = 257, .Dqk = 64, .causal = true, .docs = 2, .B = 2},
    {.Sq = 257, .Dqk = 64, .docs = 2, .B = 2, .window = 13},
    {.Sq = 100, .Sk = 120, .Dqk = 64, .docs = 2, .q_start = 50, .k_start = 30, .B = 2},
    {.Sq = 257, .Dqk = 64, .causal = true, .dilation = 3},
    {.Sq = 300, .Dqk = 32, .dilation = 64, .local = 5, .B = 2},
    {.Sq = 300, .Dqk = 32, .causal = true, .dilation = 50, .local = 9, .docs = 1, .B = 2},
    {.Sq = 90, .Sk = 200, .Dqk = 32, .causal = true, .dilation = 7, .q_start = 60, .window = 90},
    {.Sq = 40, .Sk = 40, .Dqk = 32, .causal = true, .dilation = 90, .q_start = 45},
    /* caps and sinks */
    {.Sq = 129, .Dqk = 64, .causal = true, .cap = 3, .scale = 0.5f, .Hq = 2},
    {.Sq = 129, .Dqk = 64, .causal = true, .cap = 30, .window = 50},
    {.Sq = 129, .Dqk = 64, .causal = true, .sink = true, .B = 2, .Hq = 6, .Hkv = 2},
    {.Sq = 129, .Dqk = 80, .causal = true, .sink = true, .docs = 2, .cap = 5, .B = 2, .Hq = 2},
    {.Sq = 257, .Dqk = 64, .causal = true, .scale = 1}, /* a sharp softmax */
    {.Sq = 65, .Dqk = 64, .causal = true, .scale = -0.2f},
};

static void describe(char *text, size_t n, const problem *p) {
    const tr_attention *a = &p->a;
    const tr_mask *m = &a->mask;
    snprintf(text, n, "B%d S%dx%d H%d/%d D%d/%d%s%s", (int)a->B, (int)a->Sq, (int)a->Sk, (int)a->Hq,
             (int)a->Hkv, (int)a->Dqk, (int)a->Dv, m->causal ? " causal" : "",
             m->window         ? " window"
             : m->doc_begin    ? " docs"
             : m->dilation     ? " sparse"
             : a->soft_cap > 0 ? " cap"
             : a->sink         ? " sink"
                               : "");
}

/* Runs both directions and compares every output; prints the residuals. */
static bool compare(problem *p, const maker *m, double tolerance) {
    char text[96];
    bool good = true;
    describe(text, sizeof text, p);
    problem_poison(p);
    run_forward(m, &p->a);
    run_backward(m, &p->a);
    printf("%-11s%s %-40s", m->name, p->a.t == TR_BF16 ? " bf16" : " fp32", text);
    for (output o = OUT; o < OUTPUTS; o++) {
        double residual = output_residual(p, o);
        printf(" %s %.1e", output_name[o], residual);
        good &= residual <= tolerance;
    }
    puts(good ? "" : "  BAD");
    return good;
}

static void agrees_with_float64(void **state) {
    (void)state;
    int bad = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            tr_dtype t = bf16 ? TR_BF16 : TR_F32, wide = i % 2 ? t : TR_F32;
            problem p = problem_make(&cases[i], t, wide, wide);
            oracle_forward(&p);
            oracle_backward(&p);
            for (const maker *m = next_maker(NULL); m; m = next_maker(m))
                bad += !compare(&p, m, bf16 ? 4e-2 : 3e-5);
            problem_free(&p);
        }
    assert_int_equal(bad, 0);
}

/* Scores that climb along the keys, by less and by more than what kernels let pass before they take
 * probabilities relative to a new maximum, and that fall again; some query heads alone. Few queries
 * suffice: each meets them. */
static void scores_may_climb(void **state) {
    (void)state;
    const double steps[] = {0.02, 0.2, 1.0, 8.0, -0.3};
    int bad = 0;
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        /* inputs rounded to bf16 give large scores another value */
        for (int bf16 = 0; bf16 < (steps[i] > 1 ? 1 : 2); bf16++) {
            const shape s = {.Sq = 60,
                             .Sk = 700,
                             .Dqk = 64,
                             .Hq = 2,
                             .causal = true,
                             .q_start = 640,
                             .scale = 0.02f};
            tr_dtype t = bf16 ? TR_BF16 : TR_F32;
            problem p = problem_make(&s, t, t, t);
            for (int64_t j = 0; j < s.Sk; j++)
                for (int64_t d = 0; d < s.Dqk; d++) /* head 1 */
                    p.k[(j * 2 + 1) * s.Dqk + d] *= 1 + steps[i] * (double)(j % 600) / 10;
            problem_upload(&p);
            oracle_forward(&p);
            oracle_backward(&p);
            for (const maker *m = next_maker(NULL); m; m = next_maker(m))
                bad += !compare(&p, m, bf16 ? 4e-2 : 3e-5);
            problem_free(&p);
        }
    assert_int_equal(bad, 0);
}

/* The oracle's gradients are derivatives of sum(out * dout). */
static double loss(problem *p) {
    double sum = 0;
    oracle_forward(p);
    for (int64_t i = 0; i < output_elems(p, OUT); i++) sum += p->out[i] * p->dout[i];
    return sum;
}

static double slope_at(problem *p, double *x) {
    const double step = 1e-5, was = *x;
    *x = was + step;
    double up = loss(p);
    *x = was - step;
    double down = loss(p);
    *x = was;
    return (up - down) / (2 * step);
}

static void oracle_has_finite_differences(void **state) {
    (void)state;
    const shape some[] = {
        {.Sq = 9, .Dqk = 5, .causal = true, .B = 2, .Hq = 6, .Hkv = 2},
        {.Sq = 9, .Sk = 14, .Dqk = 5, .Dv = 3, .window = 4, .q_start = 3, .cap = 2, .scale = 1},
        {.Sq = 12, .Dqk = 4, .causal = true, .docs = 2, .sink = true, .Hq = 2, .dilation = 3},
    };
    for (size_t c = 0; c < sizeof some / sizeof *some; c++) {
        problem p = problem_make(&some[c], TR_F32, TR_F32, TR_F32);
        double *const input[OUTPUTS] = {[DQ] = p.q, [DK] = p.k, [DV] = p.v, [DSINK] = p.sink};
        oracle_forward(&p);
        oracle_backward(&p);
        for (output o = DQ; o < OUTPUTS; o++) {
            double worst = 0;
            for (int64_t i = 0; i < output_elems(&p, o); i++)
                worst = fmax(worst, fabs(slope_at(&p, input[o] + i) - output_want(&p, o)[i]));
            printf("finite differences %zu %s: %.1e\n", c, output_name[o], worst);
            assert_true(worst < 1e-7);
        }
        problem_free(&p);
    }
}

/* Merge: chunks of keys, one after the other, equal the whole. */

/* `a` for the queries q0.. and keys k0.. only. */
static tr_attention piece(const tr_attention *a, int64_t q0, int64_t Sq, int64_t k0, int64_t Sk) {
    tr_attention c = *a;
    size_t in = tr_dtype_bytes(a->t), out = tr_dtype_bytes(a->out_t), g = tr_dtype_bytes(a->grad_t);
    c.Sq = Sq, c.Sk = Sk;
    c.mask.q_start += q0, c.mask.k_start += k0;
    c.q = (const char *)a->q + (size_t)(q0 * a->q_row) * in;
    c.k = (const char *)a->k + (size_t)(k0 * a->k_row) * in;
    c.v = (const char *)a->v + (size_t)(k0 * a->v_row) * in;
    c.dout = (const char *)a->dout + (size_t)(q0 * a->dout_row) * in;
    c.out = (char *)a->out + (size_t)(q0 * a->out_row) * out;
    c.lse = a->lse + q0;
    c.dq = (char *)a->dq + (size_t)(q0 * a->q_row) * g;
    c.dk = (char *)a->dk + (size_t)(k0 * a->k_row) * g;
    c.dv = (char *)a->dv + (size_t)(k0 * a->v_row) * g;
    return c;
}

static void merged_chunks_equal_the_whole(void **state) {
    (void)state;
    const shape some[] = {
        {.Sq = 264, .Dqk = 64, .causal = true, .B = 2, .Hq = 6, .Hkv = 2},
        {.Sq = 264, .Dqk = 80, .causal = true, .window = 70},
        {.Sq = 264, .Dqk = 64, .scale = 2},
    };
    const int64_t chunks = 4, n = 66;
    for (size_t c = 0; c < sizeof some / sizeof *some; c++)
        for (const maker *m = next_maker(NULL); m; m = next_maker(m))
            for (int bf16 = 0; bf16 < 2; bf16++) {
                problem p = problem_make(&some[c], bf16 ? TR_BF16 : TR_F32, TR_F32, TR_F32);
                double worst = 0;
                oracle_forward(&p);
                oracle_backward(&p);
                /* chunks of keys in an order in which some rows see nothing at first */
                for (int64_t i = 0; i < chunks; i++)
                    for (int64_t j = chunks - 1; j >= 0; j--) {
                        tr_attention a = piece(&p.a, i * n, n, j * n, n);
                        a.merge = j < chunks - 1;
                        run_forward(m, &a);
                    }
                for (int64_t i = 0; i < chunks; i++)
                    for (int64_t j = chunks - 1; j >= 0; j--) {
                        tr_attention a = piece(&p.a, i * n, n, j * n, n);
                        a.add_dq = j<chunks - 1, a.add_dkv = i> 0;
                        run_backward(m, &a);
                    }
                for (output o = OUT; o < DSINK; o++) worst = fmax(worst, output_residual(&p, o));
                printf("merge %zu %-11s%s %.1e\n", c, m->name, bf16 ? " bf16" : " fp32", worst);
                assert_true(worst < (bf16 ? 4e-2 : 3e-5));
                problem_free(&p);
            }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(oracle_has_finite_differences),
        cmocka_unit_test(agrees_with_float64),
        cmocka_unit_test(scores_may_climb),
        cmocka_unit_test(merged_chunks_equal_the_whole),
    };
    makers_init();
    if (argc > 1 && !strcmp(argv[1], "bench")) return bench(argc > 2 ? atoi(argv[2]) : 1);
    int failed = cmocka_run_group_tests_name("attention", tests, NULL, NULL);
    failed += _cmocka_run_group_tests("exact", exact_tests, (size_t)exact_tests_n, NULL, NULL);
    makers_fini();
    return failed;
}
