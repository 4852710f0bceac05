/* harness.h - the shared part of the kernel tests. Floor: tests.
 *
 * A case is a function of one maker: the CPU's levels (ref, portable, avx2, ...) or those that the
 * environment's TRIREME_TEST_MAKERS lists ("simt,simt-check"; also cuda). KT_TEST makes it a cmocka
 * test that runs it on every maker this machine has and prints which were skipped. In simt-check a
 * finding of the runtime fails the case as a wrong number does. A case uploads tensors,
 * calls kernels through m->k and compares with float64 values it computed in plain loops. Tensors
 * lie between guards of NaN bytes: reading past an end poisons results, writing past one is found.
 * Values go through tr_device.copy, so a maker with memory of its own needs no other tests. */
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/kernels.h"

typedef struct kt_tensor {
    tr_dtype t;
    int64_t n;
    void *data;    /* [n] in the maker's memory */
    double *value; /* [n] what was uploaded, rounded to t; kt_read refreshes it */
    /* derived */
    char *block;
    size_t bytes;
    struct kt_tensor *next;
} kt_tensor;

typedef struct {
    const char *name; /* "ref", "portable", "avx2", "avx512", "avx512bf16", "simt", ... */
    tr_device *device;
    const tr_kernels *k;
    tr_stream *s;
    /* state */
    kt_tensor *tensors;
    uint64_t streams; /* random streams used so far: every tensor gets its own */
} kt_maker;

typedef struct {
    void (*run)(kt_maker *m);
} kt_case;

/* A cmocka test (struct CMUnitTest) that runs the case on every maker; tensors are freed after. */
#define KT_TEST(function)                                                                          \
    {                                                                                              \
#function, kt_run, NULL, NULL, &(kt_case) {                                                \
            function                                                                               \
        }                                                                                          \
    }
void kt_run(void **state);

/* Tensors of n elements: normal numbers times scale, uniform integers in [low, high), one value
 * (NaN to find what a kernel reads but must not), or given values. They live until the case ends or
 * kt_release, which frees all of the maker's. */
kt_tensor *kt_normal(kt_maker *m, tr_dtype t, int64_t n, double scale);
kt_tensor *kt_integers(kt_maker *m, tr_dtype t, int64_t n, int64_t low, int64_t high);
kt_tensor *kt_filled(kt_maker *m, tr_dtype t, int64_t n, double value);
kt_tensor *kt_from(kt_maker *m, tr_dtype t, int64_t n, const double *value);
void kt_release(kt_maker *m);

/* Waits for the stream, downloads, checks the guards; returns x->value, now the present content. */
const double *kt_read(kt_maker *m, kt_tensor *x);

/* How many threads, of up to `most`, concern the maker: all on the host; elsewhere 2, which is one
 * repetition, and that the others are skipped is printed. */
int kt_threads(const kt_maker *m, int most);

/* Rounds to what t stores. */
double kt_round(tr_dtype t, double x);
/* A tolerance for a result stored as t that a kernel computes in fp32: 1e-5, or 8e-3 for bf16. */
double kt_tolerance(tr_dtype t);

/* Reads `got`, prints a row "maker what residual tolerance" and fails the test beyond it. The
 * residual is max |got - want| / (|want| + rms(want)); non-finite values must agree exactly. */
void kt_check(kt_maker *m, kt_tensor *got, const double *want, double tolerance, const char *what,
              ...) __attribute__((format(printf, 5, 6)));
/* The same for one number: residual |got - want| / max(|want|, 1). */
void kt_check_number(kt_maker *m, double got, double want, double tolerance, const char *what, ...)
    __attribute__((format(printf, 5, 6)));

/* d f / d x[i] by central differences: f(context) is evaluated with x->value[i] +- step uploaded
 * (x must be F32, and is restored). */
double kt_difference(kt_maker *m, kt_tensor *x, int64_t i, double step,
                     double (*f)(kt_maker *m, void *context), void *context);
