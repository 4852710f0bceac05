/* peak_avx512bf16.c - dot products of bf16 pairs. Floor: kernels. */
#include "kernels/cpu/peak_loops.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

double tr_peak_avx512bf16(int64_t rounds) {
    enum { CHAINS = 12, LANES = 16 };
    volatile int32_t source = 0x3f003f00; /* two halves; not known to the compiler */
    __m512 sum[CHAINS];
    __m512bh x = (__m512bh)_mm512_set1_epi32(source), y = (__m512bh)_mm512_set1_epi32(source);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_set1_ps((float)i); /* else one would do */
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_dpbf16_ps(sum[i], x, y);
    }
#pragma GCC unroll 12
    for (int i = 1; i < CHAINS; i++) sum[0] = _mm512_add_ps(sum[0], sum[i]);
    source = (int32_t)_mm512_reduce_add_ps(sum[0]) & 0xffff;
    return 4.0 * LANES * CHAINS * (double)rounds;
}
#else
/* Never chosen on a processor without the instruction. */
double tr_peak_avx512bf16(int64_t rounds) {
    return tr_peak_portable(rounds);
}
#endif
