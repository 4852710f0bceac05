/* attention_simd.h - what attention needs beyond vec.h: transposes, masks by bits, an exponential
 * for scores, and dot products over words. Floor: kernels, internal.
 *
 * A word is 32 bits of an operand along the contraction: one fp32 (TR_PAIRS 0) or two bf16
 * (TR_PAIRS 1, the lower half first). Words travel in vec lanes bit for bit. */
#pragma once
#include "kernels/cpu/vec.h"

#include <math.h>
#include <stdbool.h>

#define UNROLL _Pragma("GCC unroll 16")

enum {
    KW = TR_PAIRS ? 2 : 1,  /* elements in a word */
    MR = VEC == 16 ? 8 : 4, /* rows of a register tile */
    NR = 2 * VEC,           /* columns of a register tile, and the width of a panel */
    KP = NR / KW            /* words of a panel's row where rows lie along the contraction */
};

/* x in every lane, bit for bit (vec_set adds it to zero). */
VEC_FN vec vec_all(float x) {
#if defined(__AVX512F__)
    return (vec)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (vec)_mm256_set1_ps(x);
#else
    return (vec){x, x, x, x};
#endif
}

/* The larger; y where either is NaN. */
VEC_FN vec vec_max(vec x, vec y) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return vec_select(x > y, x, y);
#endif
}

VEC_FN float vec_max_lane(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lane[VEC];
    memcpy(lane, &x, sizeof x);
    for (int half = VEC / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
#endif
}

VEC_FN float vec_sum_lanes(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    return vec_sum(x);
#endif
}

VEC_FN vec vec_words(const float *p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}

VEC_FN void vec_keep(float *p, vec x) {
    memcpy(p, &x, sizeof x);
}

/* The larger of each lane's bits as integers: orders positive numbers, NaN above them, and puts
 * what is negative below. */
VEC_FN vec_i32 bits_max(vec_i32 x, vec_i32 y) {
#if defined(__AVX512F__)
    return (vec_i32)_mm512_max_epi32((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
    return (vec_i32)_mm256_max_epi32((__m256i)x, (__m256i)y);
#else
    return (vec_i32)vec_select(x > y, (vec)x, (vec)y);
#endif
}

/* Whether a lane exceeds limit. */
VEC_FN bool bits_above(vec_i32 x, int32_t limit) {
    int32_t lane[VEC], most = INT32_MIN;
    memcpy(lane, &x, sizeof x);
    for (int i = 0; i < VEC; i++) most = lane[i] > most ? lane[i] : most;
    return most > limit;
}

/* Lane i of x where bit i is set, else of y. */
VEC_FN vec vec_by_bits(uint32_t bits, vec x, vec y) {
#if defined(__AVX512F__)
    return (vec)_mm512_mask_mov_ps((__m512)y, (__mmask16)bits, (__m512)x);
#else
    vec_i32 lane;
    for (int i = 0; i < VEC; i++) lane[i] = 1 << i;
    return vec_select((lane & (int32_t)bits) != 0, x, y);
#endif
}

/* e^x for x <= 0 (a little more does no harm) to 2e-7 relative: 1 for 0, 0 below -87.3, NaN for
 * NaN. 2^n is made by its bits (the magic number rounds and adds the exponent's bias) and
 * multiplied in: adding bits to a NaN could make a number of it. */
VEC_FN vec vec_exp_score(vec x) {
    const vec log2e = vec_all(0x1.715476p+0f), magic = vec_all(0x1.8p23f + 127);
    vec shifted = vec_fma(x, log2e, magic);
    vec f = vec_fma(x, log2e, magic - shifted);
    vec p = vec_fma(vec_all(0x1.5bba14p-10f), f, vec_all(0x1.3cea88p-7f));
    p = vec_fma(p, f, vec_all(0x1.c6b752p-5f));
    p = vec_fma(p, f, vec_all(0x1.ebf9bcp-3f));
    p = vec_fma(p, f, vec_all(0x1.62e42ap-1f));
    p = vec_fma(p, f, vec_all(1));
    vec power = (vec)((vec_i32)shifted << 23);
#if defined(__AVX512F__)
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
    return (vec)_mm512_maskz_mul_ps(normal, (__m512)p, (__m512)power);
#else
    return (vec)(~(x < -87.3f) & (vec_i32)(p * power));
#endif
}

/* tanh to 2e-7: through e^(-2|x|), and by its series where that would cancel. */
VEC_FN vec vec_tanh(vec x) {
    vec_i32 sign = (vec_i32)x & INT32_MIN;
    vec size = (vec)((vec_i32)x ^ sign), e = vec_exp_score(size * -2.0f);
    vec far = (1.0f - e) / (1.0f + e), square = x * x;
    vec p = vec_fma(vec_all(62.0f / 2835), square, vec_all(-17.0f / 315));
    p = vec_fma(p, square, vec_all(2.0f / 15));
    p = vec_fma(p, square, vec_all(-1.0f / 3));
    vec near = vec_fma(p * square, size, size);
    return (vec)((vec_i32)vec_select(size < 0.25f, near, far) | sign);
}

/* Lane l of row i becomes lane i of row l, by log2(VEC) rounds of exchanged halves. */
#define LOW_(l, h)  ((l) & (h) ? VEC + (l) - (h) : (l))
#define HIGH_(l, h) ((l) & (h) ? VEC + (l) : (l) + (h))
#if defined(__AVX512F__)
#define LANES_(f, h)                                                                               \
    f(0, h), f(1, h), f(2, h), f(3, h), f(4, h), f(5, h), f(6, h), f(7, h), f(8, h), f(9, h),      \
        f(10, h), f(11, h), f(12, h), f(13, h), f(14, h), f(15, h)
#elif defined(__AVX2__)
#define LANES_(f, h) f(0, h), f(1, h), f(2, h), f(3, h), f(4, h), f(5, h), f(6, h), f(7, h)
#else
#define LANES_(f, h) f(0, h), f(1, h), f(2, h), f(3, h)
#endif
#define EXCHANGE_(h)                                                                               \
    UNROLL for (int i = 0; i < VEC; i++) {                                                         \
        if (i & (h)) continue;                                                                     \
        vec x = r[i], y = r[i + (h)];                                                              \
        r[i] = __builtin_shuffle(x, y, (vec_i32){LANES_(LOW_, h)});                                \
        r[i + (h)] = __builtin_shuffle(x, y, (vec_i32){LANES_(HIGH_, h)});                         \
    }
VEC_FN void vec_transpose(vec r[VEC]) {
    EXCHANGE_(1)
    EXCHANGE_(2)
#if defined(__AVX2__)
    EXCHANGE_(4)
#endif
#if defined(__AVX512F__)
    EXCHANGE_(8)
#endif
}
#undef LOW_
#undef HIGH_
#undef LANES_
#undef EXCHANGE_

#if TR_PAIRS
/* c + a.b of each word: the upper products first, then the lower, each rounded as by fma. */
VEC_FN vec word_fma(vec a, vec b, vec c) {
    return (vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}

/* 2*VEC bf16 in a row: lo's lanes, then hi's. */
VEC_FN vec word_row(vec lo, vec hi) {
    return (vec)_mm512_cvtne2ps_pbh((__m512)hi, (__m512)lo);
}

/* Words of neighbouring rows: lane i is (x_i, y_i), rounded to bf16. */
VEC_FN vec word_column(vec x, vec y) {
    __m512i lower = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x));
    __m512i upper = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)y));
    return (vec)_mm512_or_si512(lower, _mm512_slli_epi32(upper, 16));
}
#else
VEC_FN vec word_fma(vec a, vec b, vec c) {
    return vec_fma(a, b, c);
}
#endif
