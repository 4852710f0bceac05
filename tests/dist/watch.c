/* Property: the watch blames ranks that do not run before those that are busy, and those before
 * ranks that wait; its text fits any buffer; marks cost nanoseconds and outlive the watch. */
#include "dist/watching.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static tr_witness doing(const char *action, int64_t micro_batch, bool runs, bool waits) {
    tr_witness w = {
        .runs = runs,
        .known = true,
        .idle = 600.4,
        .mark = {.place = "data 1", .step = 17, .micro_batch = micro_batch, .waits = waits}};
    snprintf(w.mark.action, sizeof w.mark.action, "%s", action);
    return w;
}

static const char *verdict(const tr_witness *ranks, int n) {
    static char text[3000];
    tr_watch_verdict(text, sizeof text, ranks, n, 600);
    return text;
}

static void who_is_blamed(void **state) {
    (void)state;
    tr_witness waits = doing("wait for input", 3, true, true);
    tr_witness busy = doing("backward", 2, true, false);
    tr_witness stopped = doing("update of weights", -1, false, false);
    tr_witness unknown = {.idle = INFINITY,
                          .mark = {.place = "data 2", .step = -1, .micro_batch = -1}};
    assert_string_equal(verdict((tr_witness[]){waits, busy, stopped}, 3),
                        "rank 2 (data 1) has been in `update of weights` of step 17 for 600 s: its "
                        "process is stopped or gone");
    assert_string_equal(verdict((tr_witness[]){unknown, busy, waits}, 3),
                        "rank 0 (data 2) does not answer: its machine is down or cut off, or its "
                        "process is stopped");
    assert_string_equal(verdict((tr_witness[]){waits, busy, waits}, 3),
                        "rank 1 (data 1) has been in `backward of micro-batch 2` of step 17 for "
                        "600 s without waiting for others: it computes, reads or writes without an "
                        "end");
    assert_string_equal(verdict((tr_witness[]){waits, waits}, 2),
                        "all ranks have waited for each other for 600 s: rank 0 (data 1) in "
                        "`wait for input of micro-batch 3` of step 17, rank 1 (data 1) in "
                        "`wait for input of micro-batch 3` of step 17");
}

static void many_ranks_and_small_buffers(void **state) {
    (void)state;
    enum { N = 20 };
    tr_witness silent[N], waiting[N];
    for (int r = 0; r < N; r++) {
        silent[r] = doing("update", -1, false, false);
        waiting[r] = doing("update", -1, true, true);
    }
    assert_non_null(strstr(verdict(silent, N), "rank 3 "));
    assert_null(strstr(verdict(silent, N), "rank 4 "));
    assert_non_null(strstr(verdict(silent, N), "; and 16 ranks more"));
    assert_non_null(strstr(verdict(waiting, N), ", and 12 ranks more"));
    char whole[3000];
    snprintf(whole, sizeof whole, "%s", verdict(waiting, N));
    for (size_t bytes = 1; bytes < 200; bytes++) {
        char text[201];
        memset(text, '#', sizeof text);
        tr_watch_verdict(text, bytes, waiting, N, 600);
        assert_int_equal(strlen(text), bytes - 1);
        assert_memory_equal(text, whole, bytes - 1);
        assert_int_equal(text[bytes], '#');
    }
}

static void marks(void **state) {
    (void)state;
    char text[512];
    tr_watch_here(text, sizeof text);
    assert_string_equal(text, " (rank 0)");
    tr_watch_step(4);
    tr_watch_here(text, sizeof text);
    assert_string_equal(text, " (rank 0, in step 4)");
    tr_watch_place("pipeline 1, data 0");
    tr_watch_action("backward", 7);
    tr_watch_here(text, sizeof text);
    assert_string_equal(text,
                        " (rank 0, pipeline 1, data 0, in `backward of micro-batch 7` of step 4)");
    char longest[200];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    tr_watch_action(longest, -1);
    tr_watch_place(longest);
    tr_watch_here(text, sizeof text);
    assert_true(strlen(text) < 200);

    enum { TIMES = 1000000 };
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < TIMES; i++) tr_watch_action("wait for input", i);
    clock_gettime(CLOCK_MONOTONIC, &b);
    double ns = (double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec);
    printf("a mark: %.1f ns\n", ns / TIMES);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(who_is_blamed),
                                       cmocka_unit_test(many_ranks_and_small_buffers),
                                       cmocka_unit_test(marks)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
