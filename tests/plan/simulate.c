/* Property: the idle time of every kind of schedule is what its paper says, for every number of
 * ranks, micro-batches and chunks, and messages and uneven stages cost what they must.
 * F, B, W: forward, gradient of the input, of the weights, of one chunk. */
#include "plan/simulate.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

static const tr_costs COSTS[] = {{1, 1, 1, 0, 0, NULL},
                                 {2, 3, 2, 0, 0, NULL},
                                 {3, 4, 3, 0, 0, NULL},
                                 {10, 11, 9, 0, 0, NULL},
                                 {2, 2, 1, 0, 0, NULL}};

static tr_schedule_shape shape_of(tr_schedule_kind kind, int64_t p, int64_t v, int64_t m) {
    bool folded = kind == TR_SCHEDULE_ZB_V || kind == TR_SCHEDULE_DUALPIPE_V;
    return (tr_schedule_shape){kind, {p, v, folded}, m, false};
}

static void expect_idle(tr_schedule_kind kind, int64_t p, int64_t v, int64_t m, const tr_costs *c,
                        double idle, bool gap) {
    tr_schedule_shape shape = shape_of(kind, p, v, m);
    tr_schedule *all = tr_schedules_create(&shape);
    tr_timeline t = tr_simulate(all, &shape, c);
    for (int64_t r = 0; r < p; r++) {
        double is = gap ? t.gap[r] : t.idle[r];
        if (fabs(is - idle) > 1e-9)
            fail_msg("kind %d p %d v %d m %d rank %d: idle %g, not %g", (int)kind, (int)p, (int)v,
                     (int)m, (int)r, is, idle);
        assert_true(fabs(t.work[r] - (double)(v * m) * (c->forward + c->input + c->weight)) < 1e-9);
    }
    tr_timeline_free(&t);
    tr_schedules_free(all, p);
}

static void idle_is_as_published(void **state) {
    (void)state;
    for (int64_t p = 1; p <= 16; p++)
        for (int64_t m = 2 * p; m <= 2 * p + 19; m++)
            for (size_t k = 0; k < sizeof COSTS / sizeof *COSTS; k++) {
                const tr_costs *c = &COSTS[k];
                double F = c->forward, B = c->input, W = c->weight, n = (double)(p - 1);
                expect_idle(TR_SCHEDULE_GPIPE, p, 1, m, c, n * (F + B + W), false);
                expect_idle(TR_SCHEDULE_1F1B, p, 1, m, c, n * (F + B + W), false);
                expect_idle(TR_SCHEDULE_ZB_H1, p, 1, m, c, n * (F + B - W), false);
            }
}

/* With the costs of a whole rank F, B, W a chunk costs 1/v of them, and so does the idle time. */
static void interleaving_divides_it(void **state) {
    (void)state;
    for (int64_t p = 1; p <= 16; p++)
        for (int64_t v = 2; v <= 4; v++)
            for (int64_t m = 2 * p; m <= 4 * p; m += p)
                for (size_t k = 0; k < sizeof COSTS / sizeof *COSTS; k++) {
                    const tr_costs *c = &COSTS[k];
                    double F = c->forward, B = c->input, W = c->weight;
                    expect_idle(TR_SCHEDULE_INTERLEAVED, p, v, m, c, (double)(p - 1) * (F + B + W),
                                false);
                }
}

static void zb_v_never_waits(void **state) {
    (void)state;
    for (int64_t p = 1; p <= 16; p++)
        for (int64_t m = 2 * p; m <= 2 * p + 31; m++)
            expect_idle(TR_SCHEDULE_ZB_V, p, 2, m, &COSTS[0], 0, true);
}

static void dualpipe_v_is_as_published(void **state) {
    (void)state;
    for (int64_t p = 1; p <= 16; p++)
        for (int64_t m = 2 * p; m <= 2 * p + 19; m++) {
            expect_idle(TR_SCHEDULE_DUALPIPE_V, p, 2, m, &COSTS[0], (double)(p - 1) * (3 + 1 - 2),
                        false);
            expect_idle(TR_SCHEDULE_DUALPIPE_V, p, 2, m, &COSTS[4], (double)(p - 1) * (5 + 2 - 2),
                        false);
        }
}

/* One micro-batch over p stages: a message each way at p - 1 boundaries, and none on one rank. */
static void messages_take_time(void **state) {
    (void)state;
    for (int64_t p = 1; p <= 8; p++) {
        tr_costs c = COSTS[0];
        c.message = 0.25;
        tr_schedule_shape shape = shape_of(TR_SCHEDULE_1F1B, p, 1, 1);
        tr_schedule *all = tr_schedules_create(&shape);
        tr_timeline t = tr_simulate(all, &shape, &c);
        assert_true(fabs(t.end - t.start - 3.0 * (double)p - 0.5 * (double)(p - 1)) < 1e-9);
        tr_timeline_free(&t);
        tr_schedules_free(all, p);
    }
}

/* A stage with double work makes the others wait: GPipe's time is m times the slowest stage, and
 * once through the others. */
static void uneven_stages_wait(void **state) {
    (void)state;
    const double share[] = {1, 2, 1};
    tr_costs c = COSTS[0];
    c.share = share;
    tr_schedule_shape shape = shape_of(TR_SCHEDULE_GPIPE, 3, 1, 5);
    tr_schedule *all = tr_schedules_create(&shape);
    tr_timeline t = tr_simulate(all, &shape, &c);
    assert_true(fabs(t.end - t.start - (5 * 6 + 2 * 3)) < 1e-9);
    assert_true(fabs(tr_timeline_idle(&t) - (1 - 60.0 / 108.0)) < 1e-9);
    tr_timeline_free(&t);
    tr_schedules_free(all, 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(idle_is_as_published), cmocka_unit_test(interleaving_divides_it),
        cmocka_unit_test(zb_v_never_waits),     cmocka_unit_test(dualpipe_v_is_as_published),
        cmocka_unit_test(messages_take_time),   cmocka_unit_test(uneven_stages_wait)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
