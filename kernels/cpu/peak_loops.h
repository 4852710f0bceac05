/* peak_loops.h - loops of independent multiply-adds in registers. Floor: kernels, internal. */
#pragma once
#include <stdint.h>

/* Runs `rounds` rounds and returns the operations done (a multiply-add counts 2). */
typedef double tr_peak_loop(int64_t rounds);

tr_peak_loop tr_peak_portable, tr_peak_avx2, tr_peak_avx512, tr_peak_avx512bf16;
