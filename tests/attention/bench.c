/* bench.c - `test_attention bench [threads]`: speed of attention as a share of the peak of the
 * instruction it is made of, measured in the same run (each row: its best of several runs, and the
 * peak measured around it). One thread is timed by its own CPU time, more by the clock.
 * Floor: tests. */
#include "problem.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(int threads) {
    struct timespec t;
    clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#if defined(__x86_64__)
#define SIXTEEN(X)                                                                                 \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define ZMM(i)  "vfmadd231ps %%zmm16, %%zmm16, %%zmm" #i "\n"
#define PAIR(i) "vdpbf16ps %%zmm16, %%zmm16, %%zmm" #i "\n"
#define YMM(i)  "vfmadd231ps %%ymm0, %%ymm0, %%ymm" #i "\n"
#define CLOBBERS                                                                                   \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",       \
        "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"

/* The AVX2 form has 15 registers to add to and one to read. */
#define FIFTEEN(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)

/* FLOP of one loop of the maker's multiply-add, run n times. */
static double spin(int m, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (m == 4)
            __asm__ volatile(SIXTEEN(PAIR)::: CLOBBERS);
        else if (m == 3)
            __asm__ volatile(SIXTEEN(ZMM)::: CLOBBERS);
        else
            __asm__ volatile(FIFTEEN(YMM)::: CLOBBERS);
    }
    return (double)n * (m == 4 ? 16 * 64 : m == 3 ? 16 * 32 : 15 * 16);
}
#else
static double spin(int m, int64_t n) {
    return m < 0 ? (double)n : 0;
}
#endif

/* Peak of maker m's instructions on all threads, FLOP/s. */
static double peak(int m, int threads) {
    const int64_t n = 400000;
    double best = 0;
    for (int r = 0; r < 5; r++) {
        double start = now(threads), flop = 0;
#pragma omp parallel num_threads(threads) reduction(+ : flop)
        flop += spin(m, n);
        double rate = flop / (now(threads) - start);
        if (rate > best) best = rate;
    }
    return best;
}

typedef struct {
    const char *what;
    shape s;
    bool merge; /* fp32 out and gradients, merged and added */
} bench_case;

static double pairs(const problem *p) {
    const tr_mask *m = &p->a.mask;
    double n = 0;
    for (int64_t i = 0; i < p->a.Sq; i++) {
        int64_t at = m->q_start + i - m->k_start, end = p->a.Sk, begin = 0;
        if (m->causal && at + 1 < end) end = at + 1;
        if (m->window && at - m->window + 1 > begin) begin = at - m->window + 1;
        if (end > begin) n += (double)(end - begin);
    }
    return n * (double)(p->a.B * p->a.Hq);
}

static double best_time(void (*call)(tr_stream *, const tr_attention *), const tr_attention *a,
                        int threads) {
    double best = 1e9, spent = 0;
    for (int r = 0; r < 40 && (r < 4 || spent < 1.5); r++) {
        double start = now(threads);
        call(NULL, a);
        double t = now(threads) - start;
        spent += t;
        if (t < best) best = t;
    }
    return best;
}

static void bench_row(const bench_case *c, int m, bool bf16, int threads) {
    tr_dtype t = bf16 ? TR_BF16 : TR_F32, wide = c->merge ? TR_F32 : t;
    problem p = problem_make(&c->s, t, wide, wide);
    tr_attention *a = &p.a;
    double n = pairs(&p), top = peak(m, threads);
    makers[m].k.attention_forward(NULL, a);
    makers[m].k.attention_backward(NULL, a);
    a->merge = a->add_dq = a->add_dkv = c->merge;
    double forward =
        2 * n * (double)(a->Dqk + a->Dv) / best_time(makers[m].k.attention_forward, a, threads);
    double again = peak(m, threads);
    if (again > top) top = again;
    a->merge = false;
    makers[m].k.attention_forward(NULL, a);
    double backward = n * (double)(6 * a->Dqk + 4 * a->Dv) /
                      best_time(makers[m].k.attention_backward, a, threads);
    again = peak(m, threads);
    if (again > top) top = again;
    printf("%-10s %s %d threads %-18s D%-3d peak %6.1f  forward %6.1f GFLOP/s %5.1f %%  backward "
           "%6.1f GFLOP/s %5.1f %%\n",
           makers[m].name, bf16 ? "bf16" : "fp32", threads, c->what, (int)a->Dqk, top / 1e9,
           forward / 1e9, 100 * forward / top, backward / 1e9, 100 * backward / top);
    fflush(stdout);
    problem_free(&p);
}

int bench(int threads) {
    const bench_case list[] = {
        {"S4096 causal", {.Sq = 4096, .Dqk = 64, .Hq = 4, .causal = true, .dense = true}, false},
        {"S4096 causal", {.Sq = 4096, .Dqk = 128, .Hq = 4, .causal = true, .dense = true}, false},
        {"S1024 causal",
         {.Sq = 1024, .Dqk = 64, .Hq = 8, .Hkv = 4, .B = 2, .causal = true, .dense = true},
         false},
        {"S256 causal",
         {.Sq = 256, .Dqk = 64, .Hq = 16, .B = 4, .causal = true, .dense = true},
         false},
        {"S64 causal",
         {.Sq = 64, .Dqk = 64, .Hq = 16, .B = 16, .causal = true, .dense = true},
         false},
        {"S2048 ring pair",
         {.Sq = 2048,
          .Dqk = 128,
          .Hq = 4,
          .causal = true,
          .dense = true,
          .q_start = 4096,
          .k_start = 2048},
         true},
        {"S4096 window 512",
         {.Sq = 4096, .Dqk = 64, .Hq = 4, .causal = true, .dense = true, .window = 512},
         false},
    };
    omp_set_num_threads(threads);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        for (int m = 2; m < MAKERS; m++)
            if (makers[m].here && !makers[m].device && (m > 2 || i < 2))
                bench_row(&list[i], m, m == 4, threads);
    return 0;
}
