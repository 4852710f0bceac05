/* peak_avx512.c - multiply-adds for processors with AVX-512. Floor: kernels. */
#include "kernels/cpu/peak_body.h"

double tr_peak_avx512(int64_t rounds) {
    return run(rounds);
}
