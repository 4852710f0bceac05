/* problem.h - an attention call with its inputs, and what float64 loops say of it. Floor: tests. */
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/makers.h"

typedef struct { /* zeros: B 1, Sk as Sq, Hq 1, Hkv as Hq, Dv as Dqk */
    int64_t B, Sq, Sk, Hq, Hkv, Dqk, Dv;
    bool causal;
    int64_t q_start, k_start, window, dilation, local;
    int docs;  /* 0 none, 1 begins only, 2 begins and ends */
    float cap; /* soft cap, 0 none */
    bool sink;
    float scale; /* 0: 1/sqrt(Dqk) */
    bool dense;  /* rows lie end to end; else a few elements apart */
} shape;

typedef struct {
    tr_attention a; /* forward and backward */
    int32_t *doc_begin, *doc_end;
    /* inputs as the kernel sees them, dense [B, S, H, D] */
    double *q, *k, *v, *dout, *sink;
    /* the oracle's results, dense [B, S, H, D]; lse [B, Hq, Sq] */
    double *out, *lse, *dq, *dk, *dv, *dsink;
} problem;

/* A maker under test. */
typedef struct {
    const char *name;
    tr_kernels k;
    bool here;         /* this machine runs it */
    tr_device *device; /* of a module, with memory of its own; NULL: the host's */
} maker;

enum { CPU_MAKERS = 5, MAKERS = CPU_MAKERS + 3 };
extern maker makers[MAKERS]; /* ref, portable, avx2, avx512, avx512 bf16; simt, simt-check, cuda */
/* All of the CPU, or those that the environment's TRIREME_TEST_MAKERS lists. */
void makers_init(void);
void makers_fini(void);
/* The makers this processor runs, one after the other; the first after NULL, NULL after the last.
 */
const maker *next_maker(const maker *m);

/* The call on a maker. A device gets copies of all that the call names, each between guards, and
 * its results are copied back. A finding of a device that checks fails the test. */
void run_forward(const maker *m, const tr_attention *a);
void run_backward(const maker *m, const tr_attention *a);

/* Inputs are correlated: q, k, v and dout share a common part. t is F32 or BF16; out_t and grad_t
 * likewise. All outputs hold NaN bytes. */
problem problem_make(const shape *s, tr_dtype t, tr_dtype out_t, tr_dtype grad_t);
void problem_free(problem *p);
/* Fills a tensor of the call again from its doubles (after a test changed some). */
void problem_upload(problem *p);
/* NaN bytes into every output but dsink (zeros), and into the kernels' work memory. */
void problem_poison(problem *p);

void oracle_forward(problem *p);
void oracle_backward(problem *p); /* after oracle_forward */

/* Which output: its place in the call. */
typedef enum { OUT, LSE, DQ, DK, DV, DSINK, OUTPUTS } output;
extern const char *const output_name[OUTPUTS];
int64_t output_elems(const problem *p, output o);
double output_value(const problem *p, output o, int64_t i); /* i: dense, as the oracle's arrays */
const double *output_want(const problem *p, output o);
/* max |got - want| / max |want| (at least 1e-3; -inf must agree); 1e30 where got is not finite. */
double output_residual(const problem *p, output o);
/* The outputs as bytes are the same in both. */
bool output_same(const problem *x, const problem *y, output o);

/* bench.c: speed of every maker here in GFLOP/s and as a share of the FMA peak. */
int bench(int threads);
/* exact.c: the properties that hold exactly. */
extern const struct CMUnitTest exact_tests[];
extern const int exact_tests_n;
