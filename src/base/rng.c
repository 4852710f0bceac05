/* rng.c - the draws that need more than a mixer. Floor: base. */
#include "base/rng.h"

#include <math.h>

float tr_random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    const double two_pi = 6.283185307179586476925286766559;
    double u1 = tr_random_uniform(seed, stream, 2 * index);
    double u2 = tr_random_uniform(seed, stream, 2 * index + 1);
    return (float)(sqrt(-2.0 * log1p(-u1)) * cos(two_pi * u2));
}

uint64_t tr_stream_of_name(const char *name) {
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (; *name; name++) h = (h ^ (unsigned char)*name) * UINT64_C(0x100000001b3);
    return tr_mix64(h);
}
