/* Property: every schedule, for every number of stages and micro-batches, is complete, in order,
 * free of deadlock when sends wait for their receives, and holds no more micro-batches than its
 * slots; and the checker refuses lists that are not. Floor: tests. */
#include "train/schedule.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { MOST_STAGES = 16, MOST_MICRO_BATCHES = 64 };

static void make_all(tr_schedule *all, tr_schedule_kind kind, int64_t p, int64_t m, bool forward) {
    for (int64_t r = 0; r < p; r++) all[r] = tr_schedule_create(kind, p, r, m, forward);
}

static void free_all(tr_schedule *all, int64_t p) {
    for (int64_t r = 0; r < p; r++) tr_schedule_free(&all[r]);
}

static void every_schedule_is_sound(void **state) {
    (void)state;
    tr_schedule all[MOST_STAGES];
    int64_t checked = 0;
    for (int kind = TR_SCHEDULE_1F1B; kind <= TR_SCHEDULE_GPIPE; kind++)
        for (int64_t p = 1; p <= MOST_STAGES; p++)
            for (int64_t m = 1; m <= MOST_MICRO_BATCHES; m++)
                for (int forward = 0; forward < 2; forward++) {
                    make_all(all, (tr_schedule_kind)kind, p, m, forward);
                    if (tr_schedule_check(all, p, m, forward) != TR_OK)
                        fail_msg("kind %d p %d m %d: %s", kind, (int)p, (int)m, tr_error_message());
                    free_all(all, p);
                    checked++;
                }
    printf("%d schedules proved\n", (int)checked);
}

/* In flight on stage r: min(m, p - r) for 1F1B, m for GPipe (FORMULAS). */
static void slots_are_as_published(void **state) {
    (void)state;
    for (int64_t p = 1; p <= MOST_STAGES; p++)
        for (int64_t m = 1; m <= MOST_MICRO_BATCHES; m++)
            for (int64_t r = 0; r < p; r++) {
                tr_schedule a = tr_schedule_create(TR_SCHEDULE_1F1B, p, r, m, false);
                tr_schedule b = tr_schedule_create(TR_SCHEDULE_GPIPE, p, r, m, false);
                assert_int_equal(a.slots, m < p - r ? m : p - r);
                assert_int_equal(b.slots, m);
                tr_schedule_free(&a);
                tr_schedule_free(&b);
            }
}

static void expect_refusal(tr_schedule *all, int64_t p, int64_t m, const char *what) {
    if (tr_schedule_check(all, p, m, false) == TR_OK) fail_msg("not refused: %s", what);
    printf("refused: %-28s %s\n", what, tr_error_message());
}

static void swap(tr_schedule *s, int64_t i, int64_t j) {
    tr_action a = s->actions[i];
    s->actions[i] = s->actions[j];
    s->actions[j] = a;
}

static void broken_schedules_are_refused(void **state) {
    (void)state;
    tr_schedule all[4];
    const int64_t p = 4, m = 6;
    make_all(all, TR_SCHEDULE_1F1B, p, m, false);
    all[1].count--;
    expect_refusal(all, p, m, "a last send missing");
    free_all(all, p);

    make_all(all, TR_SCHEDULE_1F1B, p, m, false);
    all[2].slots--;
    expect_refusal(all, p, m, "a slot too few");
    free_all(all, p);

    make_all(all, TR_SCHEDULE_1F1B, p, m, false);
    swap(&all[0], 0, 1); /* the send before the forward */
    expect_refusal(all, p, m, "an output sent too early");
    free_all(all, p);

    make_all(all, TR_SCHEDULE_1F1B, p, m, false);
    for (int64_t i = 0; i < all[3].count; i++) /* the last stage waits for two before one back */
        if (all[3].actions[i].kind == TR_BACKWARD && all[3].actions[i].micro_batch == 0)
            swap(&all[3], i, i + 1);
    expect_refusal(all, p, m, "a gradient sent too early");
    free_all(all, p);

    make_all(all, TR_SCHEDULE_GPIPE, p, m, false);
    tr_schedule_free(&all[3]);
    all[3] = tr_schedule_create(TR_SCHEDULE_GPIPE, p, 3, m - 1, false);
    expect_refusal(all, p, m, "a micro-batch forgotten");
    free_all(all, p);
}

/* A receive of the gradient placed before the forward it belongs to can never be met. */
static void deadlock_is_found(void **state) {
    (void)state;
    tr_schedule all[2];
    make_all(all, TR_SCHEDULE_1F1B, 2, 1, false);
    /* stage 0: forward, send, receive back, backward -> receive back first */
    swap(&all[0], 0, 2);
    expect_refusal(all, 2, 1, "both stages wait");
    free_all(all, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_schedule_is_sound), cmocka_unit_test(slots_are_as_published),
        cmocka_unit_test(broken_schedules_are_refused), cmocka_unit_test(deadlock_is_found)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
