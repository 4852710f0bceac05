/* peak_avx2.c - multiply-adds for processors with AVX2. Floor: kernels. */
#include "kernels/cpu/peak_body.h"

double tr_peak_avx2(int64_t rounds) {
    return run(rounds);
}
