/* documented.h - what the vendor documents of warp and tile operations, restated as plain host
 * code: the truth that the host runtime and a GPU are both compared with. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline unsigned next_random(unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type". Lane l is in group l >> 2
 * and is thread l & 3 of it. Element i of the lane's fragment is at: */
struct position {
    int row, column;
};

/* A (16 x 16), i = 0..7: rows of the group, but 8 lower for i = 2, 3, 6, 7; columns two per thread,
 * and 8 further right from i = 4. */
static inline position of_a(int lane, int i) {
    int group = lane >> 2, thread = lane & 3;
    bool upper = (0 <= i && i < 2) || (4 <= i && i < 6);
    int column = thread * 2 + (i & 1);
    return {upper ? group : group + 8, i < 4 ? column : column + 8};
}

/* B (16 x 8), i = 0..3: columns are groups; rows two per thread, and 8 further down from i = 2. */
static inline position of_b(int lane, int i) {
    int row = (lane & 3) * 2 + (i & 1);
    return {i < 2 ? row : row + 8, lane >> 2};
}

/* C and D (16 x 8), i = 0..3: rows of the group, 8 lower from i = 2; columns two per thread. */
static inline position of_c(int lane, int i) {
    int group = lane >> 2;
    return {i < 2 ? group : group + 8, (lane & 3) * 2 + (i & 1)};
}

/* PTX ISA, ldmatrix: of each 8 x 8 matrix a thread receives elements 2 (l & 3) and the next of row
 * l >> 2; with .trans of that column. Half 0 is in the lower bits. */
static inline position of_ldmatrix(int lane, int half, bool transposed) {
    int along = 2 * (lane & 3) + half, across = lane >> 2;
    if (transposed) return {along, across};
    return {across, along};
}

/* CUDA C++ Programming Guide, "Warp Shuffle Functions": sections of `width` lanes; the index is
 * modulo width; up and down leave lanes at the edge unchanged; xor may reach into lower sections
 * but not into higher ones. Modes: by index, up, down, xor. */
static inline int shuffle_source(int mode, int lane, int width, int delta) {
    int section = lane / width, first = section * width, last = first + width - 1;
    if (mode == 0) return first + delta % width;
    if (mode == 1) return lane - delta < first ? lane : lane - delta;
    if (mode == 2) return lane + delta > last ? lane : lane + delta;
    return (lane ^ delta) > last ? lane : lane ^ delta;
}

static inline float from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* A float as bf16: PTX ISA, cvt.rn: to nearest, ties to even, every NaN 0x7fff. By comparison in
 * float64 with the two neighbours. */
static inline uint16_t rounded_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint16_t down = (uint16_t)(bits >> 16);
    if (isnan(f)) return 0x7fff;
    if (isinf(f) || (bits & 0xffff) == 0) return down;
    uint16_t up = (uint16_t)(down + 1); /* away from zero */
    double a = from_bits((uint32_t)down << 16), b = from_bits((uint32_t)up << 16);
    if (isinf(b)) b = copysign(ldexp(1.0, 128), b); /* where the next value would be */
    double to_a = fabs((double)f - a), to_b = fabs(b - (double)f);
    if (to_a != to_b) return to_a < to_b ? down : up;
    return down & 1 ? up : down;
}

/* Floats of every kind for conversions. */
static const uint32_t special_floats[] = {
    0x00000000, 0x80000000, 0x7f800000, 0xff800000, /* zeros, infinities */
    0x7fc00000, 0x7f800001, 0xffc12345, 0xffffffff, /* NaNs, one that truncates to infinity */
    0x00000001, 0x00007fff, 0x00008000, 0x00008001, /* denormals around the first tie */
    0x00017fff, 0x00018000, 0x00018001, 0x007fffff, /* ... and up to the first normal */
    0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001, /* ties to even, both ways */
    0x7f7fffff, 0x7f7f8000, 0x7f7f7fff, 0xff7f8000, /* to infinity, and not quite */
};
constexpr int SPECIAL_FLOATS = sizeof special_floats / sizeof *special_floats;
