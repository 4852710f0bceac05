/* Properties: into a pipe, plain lines at the asked steps; on a terminal, one line that rewrites
 * itself and never wraps; the slow first step does not spoil the time left; a reader that has
 * stopped reading holds nobody up. */
#include "observe/metrics.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <pty.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char printed[1 << 16];
static int saved_stdout, reading_end;

/* Standard output goes to fd until read_back. */
static void redirect(int fd, int reading) {
    fflush(stdout);
    saved_stdout = dup(STDOUT_FILENO);
    dup2(fd, STDOUT_FILENO);
    close(fd);
    reading_end = reading;
}

static void read_back(void) {
    fflush(stdout);
    size_t used = 0;
    struct pollfd ready = {.fd = reading_end, .events = POLLIN};
    while (used < sizeof printed - 1 && poll(&ready, 1, 50) > 0) {
        ssize_t n = read(reading_end, printed + used, sizeof printed - 1 - used);
        if (n <= 0) break;
        used += (size_t)n;
    }
    printed[used] = 0;
    dup2(saved_stdout, STDOUT_FILENO);
    close(saved_stdout);
    close(reading_end);
}

static void to_pipe(void) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    redirect(ends[1], ends[0]);
}

static void to_terminal(unsigned short columns) {
    struct winsize size = {.ws_row = 24, .ws_col = columns};
    int reading, writing;
    if (openpty(&reading, &writing, NULL, NULL, &size) != 0) {
        print_message("skipped: this system gives out no terminals: %s\n", strerror(errno));
        skip();
    }
    redirect(writing, reading);
}

static tr_step_record record_of(int64_t step) {
    return (tr_step_record){.step = step,
                            .loss = 2.34561,
                            .grad_norm = 0.5118,
                            .tokens_per_second = 12345.4,
                            .mfu = 0.451};
}

static void wait_ms(long ms) {
    struct timespec t = {.tv_sec = 0, .tv_nsec = ms * 1000000};
    nanosleep(&t, NULL);
}

static void run(int64_t first, int64_t last, int64_t every, int64_t stop) {
    tr_progress *progress = tr_progress_start(first - 1, last, every);
    for (int64_t step = first; step <= stop; step++) {
        tr_step_record record = record_of(step);
        tr_progress_step(progress, &record);
    }
    tr_progress_finish(progress);
}

static void plain_lines_at_the_asked_steps(void **state) {
    (void)state;
    to_pipe();
    run(8, 25, 10, 25);
    read_back();
    assert_string_equal(
        printed, "step  8/25 | loss 2.3456 | grad norm 0.512 | 12345 tok/s | MFU 45.1 % | 1s left\n"
                 "step 10/25 | loss 2.3456 | grad norm 0.512 | 12345 tok/s | MFU 45.1 % | 1s left\n"
                 "step 20/25 | loss 2.3456 | grad norm 0.512 | 12345 tok/s | MFU 45.1 % | 1s left\n"
                 "step 25/25 | loss 2.3456 | grad norm 0.512 | 12345 tok/s | MFU 45.1 %\n");
}

static void odd_numbers_are_said(void **state) {
    (void)state;
    tr_step_record record = record_of(1);
    record.loss = -(double)NAN;
    record.grad_norm = INFINITY;
    record.skipped = record.evaluated = true;
    record.mfu = (double)NAN;
    record.validation_loss = 1.5;
    record.validation_bits_per_byte = 2.25;
    to_pipe();
    tr_progress *progress = tr_progress_start(0, 1, 1);
    tr_progress_step(progress, &record);
    record = record_of(1);
    record.grad_norm = 123456;
    tr_progress_step(progress, &record);
    tr_progress_finish(progress);
    read_back();
    assert_string_equal(printed, "step 1/1 | loss nan | not finite: skipped | 12345 tok/s\n"
                                 "step 1/1 | validation loss 1.5000 | 2.2500 bits per byte\n"
                                 "step 1/1 | loss 2.3456 | grad norm 1.23e+05 | 12345 tok/s | "
                                 "MFU 45.1 %\n");
}

/* The number before "left" in the line of a step, which must be of the given unit. */
static long left_after(const char *step, char unit) {
    const char *line = strstr(printed, step);
    assert_non_null(line);
    const char *left = strstr(line, "% | ");
    assert_non_null(left);
    char *end;
    long value = strtol(left + 4, &end, 10);
    print_message("%s %ld %c left\n", step, value, *end);
    assert_int_equal(*end, unit);
    return value;
}

/* 600 ms, then steps of 5 ms: of 1000 steps 5 s are left, not 10 min. Before the second step the
 * first is all there is to go by. */
static void first_step_is_not_extrapolated(void **state) {
    (void)state;
    to_pipe();
    tr_progress *progress = tr_progress_start(0, 1000, 1);
    for (int64_t step = 1; step <= 20; step++) {
        wait_ms(step == 1 ? 600 : 5);
        tr_step_record record = record_of(step);
        tr_progress_step(progress, &record);
    }
    tr_progress_finish(progress);
    read_back();
    assert_in_range(left_after("step    1/1000", 'm'), 9, 59);
    assert_in_range(left_after("step   20/1000", 's'), 4, 25);
}

/* Returns how many times the line was drawn; checks that none reaches the last column. */
static int check_drawings(int columns) {
    int drawings = 0, longest = columns <= 100 ? columns - 1 : 100;
    for (char *at = strtok(printed, "\r\n"); at; at = strtok(NULL, "\r\n")) {
        assert_true((int)strlen(at) <= longest);
        drawings++;
    }
    return drawings;
}

static void a_terminal_line_rewrites_itself(void **state) {
    (void)state;
    to_terminal(80);
    run(1, 40, 1, 40);
    read_back();
    assert_true(printed[0] == '\r');
    assert_non_null(strstr(printed, "\r[=========="));
    assert_non_null(strstr(printed, "==========] step 40/40 | loss 2.3456 |"));
    assert_non_null(strstr(printed, "\r[          "));
    assert_non_null(strstr(printed, "          ] step  1/40 |"));
    assert_null(strchr(printed, 27)); /* no escape sequences */
    char *newline = strchr(printed, '\n');
    assert_non_null(newline);
    assert_true(newline[1] == 0);
    assert_int_equal(check_drawings(80), 2); /* the first and the last: all within 0.1 s */
}

static void no_width_breaks_the_line(void **state) {
    (void)state;
    for (unsigned short columns = 1; columns < 200;
         columns = (unsigned short)(columns * 3 / 2 + 1)) {
        to_terminal(columns);
        run(1, 1000000, 1, 3);
        read_back();
        if (columns > 1) assert_true(check_drawings(columns) >= 1);
    }
}

/* Too narrow for a bar: a shorter line leaves nothing of a longer one. */
static void a_shorter_line_erases_a_longer_one(void **state) {
    (void)state;
    to_terminal(30);
    tr_progress *progress = tr_progress_start(0, 2, 1);
    tr_step_record record = record_of(1);
    record.loss = 123.4;
    tr_progress_step(progress, &record);
    record = record_of(2);
    tr_progress_step(progress, &record);
    tr_progress_finish(progress);
    read_back();
    assert_string_equal(printed, "\rstep 1/2 | loss 123.4000\rstep 2/2 | loss 2.3456  \r\n");
}

/* mpirun gives its ranks a terminal without a width when it writes to a file itself. */
static void a_terminal_without_width_gets_plain_lines(void **state) {
    (void)state;
    to_terminal(0);
    run(1, 3, 1, 3);
    read_back();
    assert_true(strncmp(printed, "step 1/3 | ", 11) == 0);
    assert_null(strchr(printed, '['));
}

static void a_validation_keeps_its_line(void **state) {
    (void)state;
    to_terminal(90);
    tr_progress *progress = tr_progress_start(0, 9, 1);
    for (int64_t step = 1; step <= 3; step++) {
        tr_step_record record = record_of(step);
        record.evaluated = step == 2;
        record.validation_loss = 2;
        tr_progress_step(progress, &record);
    }
    tr_progress_finish(progress);
    read_back();
    assert_non_null(
        strstr(printed, "\r\nstep 2/9 | validation loss 2.0000 | 0.0000 bits per byte"));
}

/* mpirun that is told to end stops reading, and the ranks must still get to their save. */
static void nobody_reads(void **state) {
    (void)state;
    for (int terminal = 0; terminal <= 1; terminal++) {
        struct timespec start, end;
        if (terminal)
            to_terminal(0);
        else
            to_pipe();
        clock_gettime(CLOCK_MONOTONIC, &start);
        run(1, 5000, 1, 5000);
        clock_gettime(CLOCK_MONOTONIC, &end);
        read_back();
        assert_memory_equal(printed, "step    1/5000 | loss", 21);
        assert_true(end.tv_sec - start.tv_sec <= 10); /* one wait of a second, not 4000 */
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_lines_at_the_asked_steps),
        cmocka_unit_test(odd_numbers_are_said),
        cmocka_unit_test(first_step_is_not_extrapolated),
        cmocka_unit_test(a_terminal_line_rewrites_itself),
        cmocka_unit_test(a_shorter_line_erases_a_longer_one),
        cmocka_unit_test(no_width_breaks_the_line),
        cmocka_unit_test(a_terminal_without_width_gets_plain_lines),
        cmocka_unit_test(a_validation_keeps_its_line),
        cmocka_unit_test(nobody_reads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
