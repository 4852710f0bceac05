/* peak_portable.c - multiply-adds for any processor. Floor: kernels. */
#include "kernels/cpu/peak_body.h"

double tr_peak_portable(int64_t rounds) {
    return run(rounds);
}
