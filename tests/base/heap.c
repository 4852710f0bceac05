/* Properties: tables come zeroed, of one element at least, and keep what they hold when they grow;
 * texts are what was written; where memory is out, the job's own end is called with a text that
 * names the bytes, or else the process says it and ends with exit code 70. */
#include "base/heap.h"
#include "base/arena.h"

#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#ifdef __SANITIZE_ADDRESS__
/* Want of memory is NULL, as without it; a process that it ends gives nothing back. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) {
    return "allocator_may_return_null=1:detect_leaks=0";
}
#endif

static void tables_are_zeroed(void **state) {
    (void)state;
    for (int64_t count = 0; count < 300; count += 7) {
        unsigned char *used = malloc((size_t)count * 8 + 8);
        assert_non_null(used);
        memset(used, 0xff, (size_t)count * 8 + 8);
        free(used); /* to be had again */
        int64_t *table = tr_heap_alloc(count, sizeof *table);
        assert_int_equal(table[0], 0);
        for (int64_t i = 0; i < count; i++) assert_int_equal(table[i], 0);
        free(table);
    }
}

static void growth_keeps_content(void **state) {
    (void)state;
    int64_t *table = NULL, capacity = 0;
    for (int64_t i = 0; i < 10000; i++) {
        table = tr_heap_grow(table, i, &capacity, sizeof *table);
        assert_true(capacity > i);
        table[i] = 3 * i;
    }
    assert_true(capacity < 20000);
    table = tr_heap_resize(table, 20000, sizeof *table);
    for (int64_t i = 0; i < 10000; i++) assert_int_equal(table[i], 3 * i);
    table = tr_heap_resize(table, 0, sizeof *table); /* of one */
    assert_int_equal(table[0], 0);
    free(table);
}

static void texts_are_what_was_written(void **state) {
    (void)state;
    char *copy = tr_heap_copy("as it is"), *none = tr_heap_copy("");
    char *made = tr_heap_format("%s/%03d%200s", "a", 7, "b");
    assert_string_equal(copy, "as it is");
    assert_string_equal(none, "");
    assert_int_equal(strlen(made), 205);
    assert_memory_equal(made, "a/007 ", 6);
    tr_heap_text written;
    tr_heap_text_begin(&written);
    for (int i = 0; i < 5000; i++) fprintf(written.to, "%04d", i);
    char *text = tr_heap_text_end(&written);
    assert_int_equal(strlen(text), 20000);
    assert_string_equal(text + 19992, "49984999");
    free(copy);
    free(none);
    free(made);
    free(text);
}

/* --- without memory ----------------------------------------------------------------------------
 */

static void own_end(const char *text) {
    fprintf(stderr, "the job's end: %s\n", text);
    _exit(33);
}

static void want_table(void) {
    tr_heap_alloc(INT64_MAX / 8, 8);
}
static void want_resized(void) {
    tr_heap_resize(tr_heap_alloc(1, 8), INT64_MAX / 8, 8);
}
static void want_product(void) { /* more than a size_t holds */
    tr_heap_alloc(INT64_MAX, 1 << 20);
}
static void want_arena(void) {
    tr_arena_alloc(tr_arena_create(tr_host_allocator(), 4096), (size_t)1 << 60);
}

/* What `want` says on standard error in a process of its own, and how that ends. */
static int end_of(void (*want)(void), bool owned, char *said, size_t said_bytes) {
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        if (owned) tr_out_of_memory_ends(own_end);
        want();
        _exit(0);
    }
    close(ends[1]);
    size_t length = 0;
    for (ssize_t got; length < said_bytes - 1; length += (size_t)got)
        if ((got = read(ends[0], said + length, said_bytes - 1 - length)) <= 0) break;
    said[length] = 0;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void expect_end(void (*want)(void), const char *bytes) {
    char said[8192], wanted[80];
    snprintf(wanted, sizeof wanted, "out of memory: %s", bytes);
    assert_int_equal(end_of(want, false, said, sizeof said), 70);
    if (!strstr(said, "error: ") || !strstr(said, wanted) || !strstr(said, "; use "))
        fail_msg("\"%s\" was expected, and it said: %s", wanted, said);
    assert_int_equal(end_of(want, true, said, sizeof said), 33);
    if (!strstr(said, "the job's end: out of memory: ") || strstr(said, "error: "))
        fail_msg("the job's end was expected, and it said: %s", said);
}

static void want_of_memory_ends_the_job(void **state) {
    (void)state;
    expect_end(want_table, "9223372036854775808 bytes wanted");
    expect_end(want_resized, "9223372036854775808 bytes wanted");
    expect_end(want_product, "9671406556917033397649408 bytes wanted");
    expect_end(want_arena, "1152921504606846976 more bytes wanted");
}

#ifndef __SANITIZE_ADDRESS__ /* which needs terabytes of addresses */
enum { LONG_BYTES = 96 << 20, MOST_BYTES = 128 << 20 };

/* A text of LONG_BYTES, where no second one fits into memory. */
static char *long_text(void) {
    char *text = malloc(LONG_BYTES);
    memset(text, 'a', LONG_BYTES);
    text[LONG_BYTES - 1] = 0;
    setrlimit(RLIMIT_AS, &(struct rlimit){MOST_BYTES, MOST_BYTES});
    return text;
}
static void want_copy(void) {
    tr_heap_copy(long_text());
}
static void want_format(void) {
    tr_heap_format("%s.", long_text());
}
static void want_written(void) {
    const char *words = long_text();
    tr_heap_text text;
    tr_heap_text_begin(&text);
    fputs(words, text.to);
    tr_heap_text_end(&text);
}

static void texts_want_memory_too(void **state) {
    (void)state;
    expect_end(want_copy, "100663296 bytes wanted");
    expect_end(want_format, "100663297 bytes wanted");
    expect_end(want_written, "");
}
#else
static void texts_want_memory_too(void **state) {
    (void)state;
    print_message("skipped: AddressSanitizer runs under no limit of addresses\n");
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_are_zeroed),          cmocka_unit_test(growth_keeps_content),
        cmocka_unit_test(texts_are_what_was_written), cmocka_unit_test(want_of_memory_ends_the_job),
        cmocka_unit_test(texts_want_memory_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
