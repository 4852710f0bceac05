/* peak_body.h - the loop of fp32 multiply-adds, compiled once for each instruction set by the
 * peak*.c that include it. Floor: kernels, internal. */
#pragma once
#include "kernels/cpu/peak_loops.h"
#include "kernels/cpu/vec.h"

enum { CHAINS = 12 }; /* enough to hide the latency of two units, few enough for 16 registers */

static double run(int64_t rounds) {
    volatile float source = 0.5f; /* not known to the compiler */
    vec sum[CHAINS], x = vec_set(source), y = vec_set(source);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) sum[i] = vec_set((float)i);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sum[i] = vec_fma(sum[i], x, y);
    }
#pragma GCC unroll 12
    for (int i = 1; i < CHAINS; i++) sum[0] += sum[i];
    source = vec_sum(sum[0]);
    return 2.0 * VEC * CHAINS * (double)rounds;
}
