/* Property: what must hold exactly does: known numbers, bits that a mask, an offset or the number
 * of threads must not change, NaN that must stay hidden, rows and sizes that are empty. */
#include "problem.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

static void run(const maker *m, problem *p) {
    problem_poison(p);
    run_forward(m, &p->a);
    run_backward(m, &p->a);
}

/* Rows begin..end-1 of an output [B, S, width] agree bit for bit in sequence b. */
static bool same_rows(const problem *x, const problem *y, output o, int64_t b, int64_t S,
                      int64_t begin, int64_t end) {
    int64_t width = output_elems(x, o) / (x->a.B * S);
    for (int64_t i = (b * S + begin) * width; i < (b * S + end) * width; i++)
        if (output_value(x, o, i) != output_value(y, o, i)) return false;
    return true;
}

static bool same_outputs(const problem *x, const problem *y) {
    bool same = true;
    for (output o = OUT; o < OUTPUTS; o++) same &= output_same(x, y, o);
    return same;
}

static void one_key(void **state) {
    (void)state;
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (int64_t D = 16; D <= 128; D += 56)
            for (const maker *m = next_maker(NULL); m; m = next_maker(m)) {
                tr_dtype t = bf16 ? TR_BF16 : TR_F32;
                shape s = {.Sq = 1, .Dqk = D, .B = 3, .Hq = 2, .causal = true, .scale = 1};
                problem p = problem_make(&s, t, t, t);
                run(m, &p);
                for (int64_t i = 0; i < output_elems(&p, OUT); i++) {
                    assert_true(output_value(&p, OUT, i) == p.v[i]);
                    assert_true(output_value(&p, DV, i) == p.dout[i]);
                    assert_true(output_value(&p, DQ, i) == 0 && output_value(&p, DK, i) == 0);
                }
                problem_free(&p);
            }
}

static void wide_window_is_causal(void **state) {
    (void)state;
    const shape plain = {.Sq = 257, .Dqk = 64, .Hq = 2, .causal = true};
    for (const maker *m = next_maker(NULL); m; m = next_maker(m)) {
        problem x = problem_make(&plain, TR_F32, TR_F32, TR_F32);
        run(m, &x);
        for (int64_t W = 257; W < 1 << 20; W *= 40) {
            shape wide = plain;
            wide.window = W;
            problem y = problem_make(&wide, TR_F32, TR_F32, TR_F32);
            run(m, &y);
            assert_true(same_outputs(&x, &y));
            problem_free(&y);
        }
        problem_free(&x);
    }
}

static void positions_beyond_32_bits(void **state) {
    (void)state;
    const shape near = {.Sq = 70, .Sk = 90, .Dqk = 32, .causal = true, .q_start = 20, .window = 50};
    shape far = near;
    far.q_start += 5000000000, far.k_start += 5000000000;
    for (const maker *m = next_maker(NULL); m; m = next_maker(m)) {
        problem x = problem_make(&near, TR_F32, TR_F32, TR_F32);
        problem y = problem_make(&far, TR_F32, TR_F32, TR_F32);
        run(m, &x), run(m, &y);
        assert_true(same_outputs(&x, &y));
        problem_free(&x), problem_free(&y);
    }
}

/* Changing one document changes nothing of another, in values or gradients. */
static void documents_are_apart(void **state) {
    (void)state;
    const shape s = {.Sq = 200, .Dqk = 80, .Hq = 2, .causal = true, .docs = 2};
    const int64_t begin = 38, end = 57; /* the document that changes; 19 rows each */
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (const maker *m = next_maker(NULL); m; m = next_maker(m)) {
            tr_dtype t = bf16 ? TR_BF16 : TR_F32;
            problem x = problem_make(&s, t, t, t), y = problem_make(&s, t, t, t);
            for (int64_t i = begin * 160; i < end * 160; i++)
                y.q[i] *= -2, y.k[i] += 4, y.v[i] = -8, y.dout[i] = 16;
            problem_upload(&y);
            run(m, &x), run(m, &y);
            for (output o = OUT; o < DSINK; o++) {
                if (o == LSE) continue;
                assert_true(same_rows(&x, &y, o, 0, 200, 0, begin));
                assert_true(same_rows(&x, &y, o, 0, 200, end, 200));
                assert_false(same_rows(&x, &y, o, 0, 200, begin, end));
            }
            problem_free(&x), problem_free(&y);
        }
}

/* NaN and infinity in keys and values that nobody sees change no bit; rows that see them get NaN.
 */
static void hidden_nan_stays_hidden(void **state) {
    (void)state;
    const shape s = {.Sq = 150, .Dqk = 40, .Dv = 24, .Hq = 4, .Hkv = 2, .causal = true, .docs = 2};
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (const maker *m = next_maker(NULL); m; m = next_maker(m)) {
            tr_dtype t = bf16 ? TR_BF16 : TR_F32;
            problem x = problem_make(&s, t, t, t), y = problem_make(&s, t, t, t);
            for (problem *p = &x; p; p = p == &x ? &y : NULL)
                for (int64_t i = 0; i < 150; i++) { /* keys 40..59: before their document begins */
                    if (i >= 40 && i < 60) p->doc_end[i] = p->doc_begin[i];
                    if (i >= 60) p->doc_begin[i] = 60, p->doc_end[i] = 150;
                    if (i < 40) p->doc_begin[i] = 0, p->doc_end[i] = 40;
                }
            for (int64_t i = 40 * 80; i < 60 * 80; i++) y.k[i] = i % 3 ? NAN : INFINITY;
            for (int64_t i = 40 * 48; i < 60 * 48; i++) y.v[i] = i % 3 ? NAN : -INFINITY;
            problem_upload(&y);
            run(m, &x), run(m, &y);
            assert_true(same_outputs(&x, &y));
            /* causal: a NaN value at 70 is seen from row 70 on, one at 130 from 130 on */
            for (int64_t i = 70 * 48; i < 70 * 48 + 5; i++) y.v[i] = NAN;
            y.k[130 * 80] = NAN;
            problem_upload(&y);
            run(m, &y);
            for (output o = OUT; o <= DQ; o++)
                if (o != LSE) assert_true(same_rows(&x, &y, o, 0, 150, 0, 70));
            for (int64_t i = 70; i < 150; i++) { /* values 0..4 of kv head 0: query heads 0 and 1 */
                assert_true(isnan(output_value(&y, OUT, i * 96 + 4)));
                assert_true(isnan(output_value(&y, OUT, i * 96 + 5)) == (i >= 130));
                assert_true(isnan(output_value(&y, OUT, i * 96 + 24)));
                assert_true(isnan(output_value(&y, OUT, i * 96 + 95)) == false);
            }
            problem_free(&x), problem_free(&y);
        }
}

/* Rows that see nothing: out 0, lse -inf, gradient 0 whatever dout holds, nobody else's change. */
static void rows_that_see_nothing(void **state) {
    (void)state;
    const shape s = {.Sq = 100, .Dqk = 64, .Hq = 2, .causal = true, .docs = 2, .sink = true};
    for (const maker *m = next_maker(NULL); m; m = next_maker(m)) {
        problem x = problem_make(&s, TR_F32, TR_F32, TR_F32);
        problem y = problem_make(&s, TR_F32, TR_F32, TR_F32);
        for (int64_t i = 97 * 128; i < 100 * 128; i++) y.dout[i] = y.q[i] = NAN;
        problem_upload(&y);
        run(m, &x), run(m, &y);
        assert_true(same_outputs(&x, &y));
        for (int64_t i = 97 * 128; i < 100 * 128; i++)
            assert_true(output_value(&x, OUT, i) == 0 && output_value(&x, DQ, i) == 0);
        for (int64_t i = 97; i < 100; i++) assert_true(output_value(&x, LSE, i) == -INFINITY);
        problem_free(&x), problem_free(&y);
    }
}

/* out of row i, dimension d of a one-headed problem. */
static double out_of(const problem *p, int64_t i, int64_t d) {
    return output_value(p, OUT, i * p->a.Dv + d);
}

/* Zero scores, v = 0, 1, 2, ...: out is the mean of the visible positions. */
static problem counting(const shape *s) {
    problem p = problem_make(s, TR_F32, TR_F32, TR_F32);
    for (int64_t i = 0; i < p.a.Sq * p.a.Dqk; i++) p.q[i] = 0;
    for (int64_t i = 0; i < p.a.Sk; i++) p.v[i] = (double)i;
    problem_upload(&p);
    return p;
}

static void known_numbers(void **state) {
    (void)state;
    for (const maker *m = next_maker(NULL); m; m = next_maker(m)) {
        shape s = {.Sq = 2, .Sk = 5, .Dqk = 16, .Dv = 1, .causal = true, .q_start = 3};
        problem p = counting(&s);
        run(m, &p);
        assert_true(fabs(out_of(&p, 0, 0) - 1.5) < 1e-6 && fabs(out_of(&p, 1, 0) - 2) < 1e-6);
        problem_free(&p);

        s = (shape){.Sq = 5, .Sk = 2, .Dqk = 16, .Dv = 1, .causal = true, .q_start = -3};
        p = counting(&s);
        run(m, &p);
        for (int64_t i = 0; i < 3; i++) assert_true(out_of(&p, i, 0) == 0);
        assert_true(out_of(&p, 3, 0) == 0 && fabs(out_of(&p, 4, 0) - 0.5) < 1e-6);
        problem_free(&p);

        /* causal, S 8, window 3: 21 pairs; lse of zero scores is ln of how many are seen */
        s = (shape){.Sq = 8, .Dqk = 16, .Dv = 1, .causal = true, .window = 3};
        p = counting(&s);
        run(m, &p);
        double seen = 0;
        for (int64_t i = 0; i < 8; i++) seen += exp(output_value(&p, LSE, i));
        assert_true(fabs(seen - 21) < 1e-4);
        problem_free(&p);

        /* scores 1e4 and 1e4 - 1 */
        s = (shape){.Sq = 1, .Sk = 2, .Dqk = 1, .Dv = 1, .scale = 1};
        p = problem_make(&s, TR_F32, TR_F32, TR_F32);
        p.q[0] = 1, p.k[0] = 1e4, p.k[1] = 9999, p.v[0] = 1, p.v[1] = 0;
        problem_upload(&p);
        run(m, &p);
        assert_true(fabs(out_of(&p, 0, 0) - .731059) < 1e-6);
        assert_true(fabs(output_value(&p, LSE, 0) - 10000.3133) < 1e-3);
        problem_free(&p);

        /* cap 30, score 60 */
        s = (shape){.Sq = 1, .Dqk = 1, .scale = 1, .cap = 30};
        p = problem_make(&s, TR_F32, TR_F32, TR_F32);
        p.q[0] = 6, p.k[0] = 10;
        problem_upload(&p);
        run(m, &p);
        assert_true(fabs(output_value(&p, LSE, 0) - 28.9208) < 1e-4);
        problem_free(&p);

        /* all logits -1e5: the mean of V */
        s = (shape){.Sq = 40, .Sk = 300, .Dqk = 1, .Dv = 1, .scale = 1};
        p = counting(&s);
        for (int64_t i = 0; i < 40; i++) p.q[i] = -1e5;
        for (int64_t i = 0; i < 300; i++) p.k[i] = 1;
        problem_upload(&p);
        run(m, &p);
        for (int64_t i = 0; i < 40; i++) assert_true(fabs(out_of(&p, i, 0) - 149.5) < 1e-4);
        problem_free(&p);
    }
}

/* Whether a maker has nothing to do with the number of threads, which is printed. */
static bool threads_are_not_its(const maker *m) {
    const char *why = m == makers ? "it runs on one thread" : "the host's threads are not its";
    if (m != makers && !m->device) return false;
    printf("%-11s threads_change_no_bit skipped: %s\n", m->name, why);
    return true;
}

static void threads_change_no_bit(void **state) {
    (void)state;
    const shape some[] = {
        {.Sq = 700, .Dqk = 32, .Hq = 3, .Hkv = 1, .causal = true, .sink = true},
        {.Sq = 300, .Dqk = 64, .B = 3, .Hq = 2, .window = 200},
    };
    int most = omp_get_max_threads();
    for (const maker *m = next_maker(NULL); m; m = next_maker(m)) {
        if (threads_are_not_its(m)) continue;
        for (size_t c = 0; c < sizeof some / sizeof *some; c++)
            for (int bf16 = 0; bf16 < 2; bf16++) {
                tr_dtype t = bf16 ? TR_BF16 : TR_F32;
                problem one = problem_make(&some[c], t, t, TR_F32);
                omp_set_num_threads(1);
                run(m, &one);
                for (int threads = 2; threads < 6; threads++) {
                    problem more = problem_make(&some[c], t, t, TR_F32);
                    omp_set_num_threads(threads);
                    run(m, &more);
                    assert_true(same_outputs(&one, &more));
                    problem_free(&more);
                }
                problem_free(&one);
            }
    }
    omp_set_num_threads(most);
}

static void adding_adds(void **state) {
    (void)state;
    const shape s = {.Sq = 140, .Dqk = 80, .Hq = 2, .causal = true};
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (const maker *m = next_maker(NULL); m; m = next_maker(m)) {
            problem x = problem_make(&s, bf16 ? TR_BF16 : TR_F32, TR_F32, TR_F32);
            problem y = problem_make(&s, bf16 ? TR_BF16 : TR_F32, TR_F32, TR_F32);
            run(m, &x);
            problem_poison(&y);
            run_forward(m, &y.a);
            for (int64_t i = 0; i < y.a.q_batch; i++) ((float *)y.a.dq)[i] = 3;
            for (int64_t i = 0; i < y.a.k_batch; i++) ((float *)y.a.dk)[i] = 3;
            for (int64_t i = 0; i < y.a.v_batch; i++) ((float *)y.a.dv)[i] = 3;
            y.a.add_dq = y.a.add_dkv = true;
            run_backward(m, &y.a);
            for (output o = DQ; o <= DV; o++)
                for (int64_t i = 0; i < output_elems(&x, o); i++)
                    assert_true(fabs(output_value(&y, o, i) - 3 - output_value(&x, o, i)) < 5e-7);
            problem_free(&x), problem_free(&y);
        }
}

/* What lies between the rows of an output is not written. */
static bool gaps_kept(const void *x, size_t bytes, int64_t rows, int64_t width, int64_t row) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = width * (int64_t)bytes; c < row * (int64_t)bytes; c++)
            if (((const unsigned char *)x)[i * row * (int64_t)bytes + c] != 255) return false;
    return true;
}

static void gaps_between_rows_are_kept(void **state) {
    (void)state;
    const shape s = {.Sq = 70, .Dqk = 20, .Dv = 36, .Hq = 4, .Hkv = 2, .causal = true};
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (const maker *m = next_maker(NULL); m; m = next_maker(m)) {
            tr_dtype t = bf16 ? TR_BF16 : TR_F32;
            size_t bytes = tr_dtype_bytes(t);
            problem p = problem_make(&s, t, t, t);
            run(m, &p);
            assert_true(gaps_kept(p.a.out, bytes, 70, 4 * 36, p.a.out_row));
            assert_true(gaps_kept(p.a.dq, bytes, 70, 4 * 20, p.a.q_row));
            assert_true(gaps_kept(p.a.dk, bytes, 70, 2 * 20, p.a.k_row));
            assert_true(gaps_kept(p.a.dv, bytes, 70, 2 * 36, p.a.v_row));
            problem_free(&p);
        }
}

static void empty_sizes(void **state) {
    (void)state;
    for (const maker *m = next_maker(NULL); m; m = next_maker(m)) {
        shape s = {.Sq = 5, .Sk = 7, .Dqk = 8, .Hq = 2};
        problem p = problem_make(&s, TR_F32, TR_F32, TR_F32);
        tr_attention none = p.a;
        none.B = 0;
        run_forward(m, &none), run_backward(m, &none);
        assert_true(isnan(output_value(&p, OUT, 0)) && isnan(output_value(&p, DK, 0)));
        none = p.a, none.Hq = none.Hkv = 0;
        run_forward(m, &none), run_backward(m, &none);
        assert_true(isnan(output_value(&p, OUT, 0)) && isnan(output_value(&p, DK, 0)));
        none = p.a, none.Sk = 0;
        run_forward(m, &none), run_backward(m, &none);
        for (int64_t i = 0; i < output_elems(&p, OUT); i++)
            assert_true(output_value(&p, OUT, i) == 0 && output_value(&p, DQ, i) == 0);
        for (int64_t i = 0; i < 10; i++) assert_true(output_value(&p, LSE, i) == -INFINITY);
        none = p.a, none.Sq = 0;
        run_forward(m, &none), run_backward(m, &none);
        for (int64_t i = 0; i < output_elems(&p, DK); i++)
            assert_true(output_value(&p, DK, i) == 0 && output_value(&p, DV, i) == 0);
        problem_free(&p);
    }
}

const struct CMUnitTest exact_tests[] = {
    cmocka_unit_test(one_key),
    cmocka_unit_test(wide_window_is_causal),
    cmocka_unit_test(positions_beyond_32_bits),
    cmocka_unit_test(documents_are_apart),
    cmocka_unit_test(hidden_nan_stays_hidden),
    cmocka_unit_test(rows_that_see_nothing),
    cmocka_unit_test(known_numbers),
    cmocka_unit_test(threads_change_no_bit),
    cmocka_unit_test(adding_adds),
    cmocka_unit_test(gaps_between_rows_are_kept),
    cmocka_unit_test(empty_sizes),
};
const int exact_tests_n = sizeof exact_tests / sizeof *exact_tests;
