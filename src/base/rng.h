/* rng.h - random numbers by index: no state, so any rank draws any element of any stream alone.
 * Floor: base. The mixer is splitmix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable
 * pseudorandom number generators"), applied twice over (seed, stream, index). */
#pragma once
#include <stdint.h>

/* A bijection of 64 bits with full avalanche. */
static inline uint64_t tr_mix64(uint64_t z) {
    z ^= z >> 30;
    z *= UINT64_C(0xbf58476d1ce4e5b9);
    z ^= z >> 27;
    z *= UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Uniform 64 bits of element `index` of `stream`. */
static inline uint64_t tr_random_u64(uint64_t seed, uint64_t stream, uint64_t index) {
    uint64_t key = tr_mix64(tr_mix64(seed + UINT64_C(0x9e3779b97f4a7c15)) ^ stream);
    return tr_mix64(key + UINT64_C(0x9e3779b97f4a7c15) * (index + 1));
}

/* Uniform in [0, 1), 53 bits. */
static inline double tr_random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    return (double)(tr_random_u64(seed, stream, index) >> 11) * 0x1p-53;
}

/* Standard normal (Box and Muller 1958), one draw an index. */
float tr_random_normal(uint64_t seed, uint64_t stream, uint64_t index);

/* A stream number from a name (FNV-1a, mixed). */
uint64_t tr_stream_of_name(const char *name);
