/* Property: every schedule, for every number of ranks, chunks and micro-batches, is complete, in
 * order, free of deadlock when sends wait for their receives, and holds no more micro-batches than
 * published; and the proof refuses lists that are not. Floor: tests. */
#include "train/schedule.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { MOST_RANKS = 16, MOST_CHUNKS = 4, MOST_MICRO_BATCHES = 64 };

static bool folded(tr_schedule_kind kind) {
    return kind == TR_SCHEDULE_ZB_V || kind == TR_SCHEDULE_DUALPIPE_V;
}

static tr_schedule_shape shape_of(tr_schedule_kind kind, int64_t p, int64_t v, int64_t m) {
    return (tr_schedule_shape){kind, {p, v, folded(kind)}, m, false};
}

/* The most chunks of this kind. */
static int64_t chunks_of(tr_schedule_kind kind) {
    return folded(kind) ? 2 : kind == TR_SCHEDULE_INTERLEAVED ? MOST_CHUNKS : 1;
}

/* Every virtual stage has one place, and every layer one stage, in order. */
static void stages_cover_the_layers(void **state) {
    (void)state;
    for (int64_t p = 1; p <= MOST_RANKS; p++)
        for (int64_t v = 1; v <= MOST_CHUNKS; v++)
            for (int fold = 0; fold <= (v == 2); fold++) {
                tr_stages st = {p, v, fold};
                int64_t layers = p * v + 5, next = 0;
                for (int64_t s = 0; s < tr_stages_count(&st); s++) {
                    int64_t rank = tr_stage_rank(&st, s), chunk = tr_stage_chunk(&st, s);
                    assert_true(rank >= 0 && rank < p && chunk >= 0 && chunk < v);
                    assert_int_equal(tr_stage_of(&st, rank, chunk), s);
                    tr_range r = tr_stage_layers(&st, layers, s);
                    assert_int_equal(r.first, next);
                    for (next = r.first; next < r.first + r.count; next++)
                        assert_int_equal(tr_stage_of_layer(&st, layers, next), s);
                }
                assert_int_equal(next, layers);
                if (fold) assert_int_equal(tr_stage_rank(&st, 2 * p - 1), 0);
            }
}

static void every_schedule_is_sound(void **state) {
    (void)state;
    int64_t proved = 0;
    for (int k = TR_SCHEDULE_1F1B; k <= TR_SCHEDULE_DUALPIPE_V; k++)
        for (int64_t v = folded((tr_schedule_kind)k) ? 2 : 1; v <= chunks_of((tr_schedule_kind)k);
             v++)
            for (int64_t p = 1; p <= MOST_RANKS; p++)
                for (int64_t m = 1; m <= MOST_MICRO_BATCHES; m++)
                    for (int forward = 0; forward < 2; forward++) {
                        tr_schedule_shape shape = shape_of((tr_schedule_kind)k, p, v, m);
                        shape.forward_only = forward;
                        tr_schedule *all = tr_schedules_create(&shape);
                        if (tr_schedules_prove(all, &shape) != TR_OK)
                            fail_msg("kind %d p %d v %d m %d: %s", k, (int)p, (int)v, (int)m,
                                     tr_error_message());
                        tr_schedules_free(all, p);
                        proved++;
                    }
    printf("%d schedules proved\n", (int)proved);
}

/* The most micro-batches at once, counted over chunks: from forward to the gradient of the input
 * (activations), and to those of the weights. */
static void peaks(const tr_schedule *s, int64_t *to_input_p, int64_t *to_weight_p) {
    int64_t input = 0, weight = 0;
    *to_input_p = *to_weight_p = 0;
    for (int64_t i = 0; i < s->count; i++) {
        tr_parts p = tr_action_parts(&s->actions[i]);
        input += p.forward != NULL;
        weight += p.forward != NULL;
        if (input > *to_input_p) *to_input_p = input;
        if (weight > *to_weight_p) *to_weight_p = weight;
        input -= p.input != NULL;
        weight -= p.weight != NULL;
    }
}

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* In flight on rank r: 1F1B min(m, p - r), ZB-H1 the same until the gradient of the input and
 * min(m, p) until those of the weights, GPipe m, interleaved 2(p - r - 1) + (v - 1)p + 1 of its
 * chunks, ZB-V 2p half chunks as 1F1B's first rank, DualPipe-V 2p + 1. */
static void in_flight_is_as_published(void **state) {
    (void)state;
    for (int k = TR_SCHEDULE_1F1B; k <= TR_SCHEDULE_DUALPIPE_V; k++)
        for (int64_t v = chunks_of((tr_schedule_kind)k) > 1 ? 2 : 1;
             v <= chunks_of((tr_schedule_kind)k); v++)
            for (int64_t p = 1; p <= MOST_RANKS; p++)
                for (int64_t m = 1; m <= MOST_MICRO_BATCHES; m += p > 8 ? 5 : 1) {
                    tr_schedule_shape shape = shape_of((tr_schedule_kind)k, p, v, m);
                    tr_schedule *all = tr_schedules_create(&shape);
                    for (int64_t r = 0; r < p; r++) {
                        int64_t input, weight;
                        peaks(&all[r], &input, &weight);
                        assert_int_equal(all[r].slots, weight);
                        if (k == TR_SCHEDULE_1F1B) assert_int_equal(weight, least(m, p - r));
                        if (k == TR_SCHEDULE_GPIPE) assert_int_equal(weight, m);
                        if (k == TR_SCHEDULE_ZB_H1) {
                            assert_int_equal(input, least(m, p - r));
                            assert_int_equal(weight, least(m, p));
                        }
                        if (k == TR_SCHEDULE_INTERLEAVED)
                            assert_true(weight <= least(v * m, 2 * (p - r - 1) + (v - 1) * p + 1));
                        if (k == TR_SCHEDULE_ZB_V) assert_true(weight <= least(2 * m, 2 * p));
                        if (k == TR_SCHEDULE_DUALPIPE_V)
                            assert_true(weight <= least(2 * m, 2 * p + 1));
                    }
                    tr_schedules_free(all, p);
                }
}

/* --- lists that are wrong -----------------------------------------------------------------------
 */

static void expect_refusal(tr_schedule *all, const tr_schedule_shape *shape, const char *what) {
    if (tr_schedules_prove(all, shape) == TR_OK) fail_msg("not refused: %s", what);
    printf("refused: %-32s %s\n", what, tr_error_message());
    tr_schedules_free(all, shape->stages.ranks);
}

static void swap(tr_schedule *s, int64_t i, int64_t j) {
    tr_action a = s->actions[i];
    s->actions[i] = s->actions[j];
    s->actions[j] = a;
}

static int64_t find(const tr_schedule *s, tr_action_kind kind, int64_t chunk, int64_t micro_batch) {
    for (int64_t i = 0; i < s->count; i++) {
        const tr_action *a = &s->actions[i];
        if (a->kind == kind && a->task.chunk == chunk && a->task.micro_batch == micro_batch)
            return i;
    }
    fail_msg("no action of kind %d", (int)kind);
    return -1;
}

static void drop(tr_schedule *s, int64_t i) {
    for (s->count--; i < s->count; i++) s->actions[i] = s->actions[i + 1];
}

static void broken_schedules_are_refused(void **state) {
    (void)state;
    tr_schedule_shape shape = shape_of(TR_SCHEDULE_1F1B, 4, 1, 6);
    tr_schedule *all = tr_schedules_create(&shape);
    all[1].count--;
    expect_refusal(all, &shape, "a last send missing");

    all = tr_schedules_create(&shape);
    all[2].slots--;
    expect_refusal(all, &shape, "a slot too few");

    all = tr_schedules_create(&shape);
    for (int64_t i = 0; i < all[0].count; i++) all[0].actions[i].task.slot = 0;
    expect_refusal(all, &shape, "one slot for all");

    all = tr_schedules_create(&shape);
    swap(&all[0], 0, 1); /* the send before the forward */
    expect_refusal(all, &shape, "an output sent too early");

    all = tr_schedules_create(&shape);
    int64_t back = find(&all[3], TR_BACKWARD, 0, 0);
    swap(&all[3], back, back + 1);
    expect_refusal(all, &shape, "a gradient sent too early");

    all = tr_schedules_create(&shape);
    tr_schedule_shape fewer = shape_of(TR_SCHEDULE_1F1B, 4, 1, 5);
    tr_schedule_free(&all[3]);
    all[3] = tr_schedule_create(&fewer, 3);
    expect_refusal(all, &shape, "a micro-batch forgotten");

    all = tr_schedules_create(&shape);
    all[1].actions[0].peer = 3;
    expect_refusal(all, &shape, "a message from the wrong rank");

    all = tr_schedules_create(&shape);
    swap(&all[0], find(&all[0], TR_FORWARD, 0, 1), find(&all[0], TR_FORWARD, 0, 0));
    expect_refusal(all, &shape, "micro-batches in another order");

    shape = shape_of(TR_SCHEDULE_ZB_V, 3, 2, 6);
    all = tr_schedules_create(&shape);
    drop(&all[1], find(&all[1], TR_WEIGHT, 1, 5));
    expect_refusal(all, &shape, "weight gradients forgotten");

    all = tr_schedules_create(&shape);
    swap(&all[1], find(&all[1], TR_WEIGHT, 1, 2), find(&all[1], TR_BACKWARD_INPUT, 1, 2));
    expect_refusal(all, &shape, "weight gradients too early");

    all = tr_schedules_create(&shape);
    int64_t copy = find(&all[2], TR_RECV_FORWARD, 1, 4);
    all[2].actions[copy].other.slot ^= 1;
    expect_refusal(all, &shape, "a copy from another slot");
}

/* A receive of the gradient placed before the forward it belongs to can never be met. */
static void deadlock_is_found(void **state) {
    (void)state;
    tr_schedule_shape shape = shape_of(TR_SCHEDULE_1F1B, 2, 1, 1);
    tr_schedule *all = tr_schedules_create(&shape);
    swap(&all[0], 0, 2); /* forward, send, receive back, backward -> receive back first */
    expect_refusal(all, &shape, "both ranks wait");

    shape = shape_of(TR_SCHEDULE_INTERLEAVED, 2, 2, 4);
    all = tr_schedules_create(&shape);
    swap(&all[0], find(&all[0], TR_RECV_FORWARD, 1, 0), find(&all[0], TR_FORWARD, 0, 0));
    expect_refusal(all, &shape, "the second chunk first");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_cover_the_layers), cmocka_unit_test(every_schedule_is_sound),
        cmocka_unit_test(in_flight_is_as_published), cmocka_unit_test(broken_schedules_are_refused),
        cmocka_unit_test(deadlock_is_found)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
