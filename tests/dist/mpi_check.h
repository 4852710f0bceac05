/* mpi_check.h - cmocka under mpirun. A cmocka assertion leaves the test on one rank while the
 * others wait in a collective, and a rank whose output is dropped fails unheard. So checks here
 * note the failure, print it with the rank and go on; at the end of each case the failures of all
 * ranks are summed and the case fails on every rank. Only rank 0 runs under cmocka. */
#pragma once
#include "dist/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

typedef struct {
    const char *name;
    void (*body)(tr_comm *world);
} mpi_case;

static int64_t mpi_check_failures;
static int mpi_check_rank;
static tr_comm *mpi_check_world;

/* TR_CHECK(condition, "text", ...): notes a failure of this rank; the first few are printed. */
#define TR_CHECK(condition, ...)                                                                   \
    ((condition) ? (void)0 : mpi_check_failed(__FILE__, __LINE__, #condition, __VA_ARGS__))

__attribute__((format(printf, 4, 5))) static inline void
mpi_check_failed(const char *file, int line, const char *condition, const char *format, ...) {
    if (++mpi_check_failures > 5) return;
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "rank %d: %s:%d: %s: %s\n", mpi_check_rank, file, line, condition, text);
}

/* Collective. The failures of all ranks in one case. */
static inline int64_t mpi_check_case(const mpi_case *one) {
    mpi_check_failures = 0;
    one->body(mpi_check_world);
    int64_t failures = mpi_check_failures;
    tr_end(tr_all_reduce_begin(mpi_check_world, NULL, TR_SUM, TR_I64, &failures, 1));
    return failures;
}

static inline void mpi_check_on_rank_0(void **state) {
    const mpi_case *one = *state;
    assert_int_equal(mpi_check_case(one), 0);
}

/* Collective. Runs all cases, at most 64, and returns how many failed. */
static inline int mpi_check_all(tr_comm *world, const mpi_case *cases, size_t count) {
    mpi_check_world = world;
    mpi_check_rank = tr_comm_rank(world);
    int failed = 0;
    if (mpi_check_rank != 0) {
        for (size_t i = 0; i < count; i++) failed += mpi_check_case(&cases[i]) != 0;
        return failed;
    }
    struct CMUnitTest tests[64];
    for (size_t i = 0; i < count; i++)
        tests[i] = (struct CMUnitTest){.name = cases[i].name,
                                       .test_func = mpi_check_on_rank_0,
                                       .initial_state = (void *)(uintptr_t)&cases[i]};
    return _cmocka_run_group_tests("mpi", tests, count, NULL, NULL);
}
