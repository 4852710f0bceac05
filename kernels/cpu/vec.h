/* vec.h - a vector of fp32 as wide as the instruction set its includer is compiled for. Loads and
 * stores convert from and to what memory holds; the last, partial vector of a row goes through the
 * *_n forms, so that every element is computed by the same instructions wherever it lies.
 * Floor: kernels, internal. */
#pragma once
#include "base/dtype.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { VEC = 16 };
#elif defined(__AVX2__)
enum { VEC = 8 };
#else
enum { VEC = 4 };
#endif

typedef float vec __attribute__((vector_size(4 * VEC)));
typedef int32_t vec_i32 __attribute__((vector_size(4 * VEC)));
typedef uint32_t vec_u32 __attribute__((vector_size(4 * VEC)));
typedef uint16_t vec_u16 __attribute__((vector_size(2 * VEC)));

/* Independent vectors a sum is kept in, to hide the latency of an addition. */
enum { VEC_SUMS = 4 };

#define VEC_FN static inline __attribute__((always_inline))

/* Scalars of vec_fma's rounding: a file's vector and scalar code agree. */
VEC_FN float scalar_fma(float a, float b, float c) {
#if defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

VEC_FN vec vec_fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

VEC_FN vec vec_set(float x) {
    return (vec){0} + x;
}

VEC_FN vec vec_select(vec_i32 mask, vec yes, vec no) {
    return (vec)((mask & (vec_i32)yes) | (~mask & (vec_i32)no));
}

/* limit where it is the smaller (larger) one, else x: NaN stays. */
VEC_FN vec vec_at_most(vec x, float limit) {
    vec l = vec_set(limit);
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps((__m512)l, (__m512)x);
#elif defined(__AVX2__)
    return (vec)_mm256_min_ps((__m256)l, (__m256)x);
#else
    return vec_select(x > l, l, x);
#endif
}
VEC_FN vec vec_at_least(vec x, float limit) {
    vec l = vec_set(limit);
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)l, (__m512)x);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)l, (__m256)x);
#else
    return vec_select(x < l, l, x);
#endif
}

/* Sum of the lanes, by halves. */
VEC_FN float vec_sum(vec x) {
    float lane[VEC];
    memcpy(lane, &x, sizeof x);
    for (int half = VEC / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

/* Lanes 0..n-1 of x, zeros behind. n >= 0. */
VEC_FN vec vec_first(vec x, int64_t n) {
    vec_i32 lane;
    for (int i = 0; i < VEC; i++) lane[i] = i;
    int32_t limit = n < VEC ? (int32_t)n : VEC;
    return (vec)((vec_i32)x & (lane < limit));
}

/* Neighbouring lanes change places: 1 0 3 2 ... */
VEC_FN vec vec_swap_pairs(vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_permute_ps((__m512)x, 0xb1);
#elif defined(__AVX2__)
    return (vec)_mm256_permute_ps((__m256)x, 0xb1);
#else
    return (vec){x[1], x[0], x[3], x[2]};
#endif
}

VEC_FN vec vec_from_bf16(vec_u16 h) {
#if defined(__AVX512F__)
    vec_u32 u = (vec_u32)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
    vec_u32 u = (vec_u32)_mm256_cvtepu16_epi32((__m128i)h);
#else
    vec_u32 u = __builtin_convertvector(h, vec_u32);
#endif
    return (vec)(u << 16);
}

/* Round to nearest, ties to even; NaN stays NaN: tr_f32_to_bf16 for every lane. */
VEC_FN vec_u16 vec_to_bf16(vec x) {
    vec_u32 u = (vec_u32)x, high = u >> 16;
    vec_u32 rounded = (u + ((high & 1u) + 0x7fffu)) >> 16;
#if defined(__AVX512F__)
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    __m512i out =
        _mm512_mask_or_epi32((__m512i)rounded, nan, (__m512i)high, _mm512_set1_epi32(0x40));
    return (vec_u16)_mm512_cvtepi32_epi16(out);
#else
    vec_u32 out = (vec_u32)vec_select(x != x, (vec)(high | 0x40u), (vec)rounded);
#if defined(__AVX2__)
    __m256i o = (__m256i)out;
    return (vec_u16)_mm_packus_epi32(_mm256_castsi256_si128(o), _mm256_extracti128_si256(o, 1));
#else
    return __builtin_convertvector(out, vec_u16);
#endif
#endif
}

/* VEC elements from p[i] on. */
VEC_FN vec vec_load(tr_dtype t, const void *p, int64_t i) {
    if (t == TR_BF16) {
        vec_u16 h;
        memcpy(&h, (const tr_bf16 *)p + i, sizeof h);
        return vec_from_bf16(h);
    }
    vec x;
    memcpy(&x, (const float *)p + i, sizeof x);
    return x;
}

VEC_FN void vec_store(tr_dtype t, void *p, int64_t i, vec x) {
    if (t == TR_BF16) {
        vec_u16 h = vec_to_bf16(x);
        memcpy((tr_bf16 *)p + i, &h, sizeof h);
    } else {
        memcpy((float *)p + i, &x, sizeof x);
    }
}

/* At most VEC elements from p[i] on, of the n that are left (n may be more, or <= 0); zeros behind.
 */
VEC_FN vec vec_load_n(tr_dtype t, const void *p, int64_t i, int64_t n) {
    if (n >= VEC) return vec_load(t, p, i);
    vec x = {0};
#if defined(__AVX512F__)
    if (n <= 0) return x;
    uint32_t mask = (1u << n) - 1;
    if (t == TR_BF16)
        return vec_from_bf16(
            (vec_u16)_mm256_maskz_loadu_epi16((__mmask16)mask, (const tr_bf16 *)p + i));
    return (vec)_mm512_maskz_loadu_ps((__mmask16)mask, (const float *)p + i);
#else
    for (int64_t l = 0; l < n; l++)
        x[l] =
            t == TR_BF16 ? tr_bf16_to_f32(((const tr_bf16 *)p)[i + l]) : ((const float *)p)[i + l];
    return x;
#endif
}

VEC_FN void vec_store_n(tr_dtype t, void *p, int64_t i, int64_t n, vec x) {
    if (n >= VEC) {
        vec_store(t, p, i, x);
        return;
    }
#if defined(__AVX512F__)
    if (n <= 0) return;
    uint32_t mask = (1u << n) - 1;
    if (t == TR_BF16)
        _mm256_mask_storeu_epi16((tr_bf16 *)p + i, (__mmask16)mask, (__m256i)vec_to_bf16(x));
    else
        _mm512_mask_storeu_ps((float *)p + i, (__mmask16)mask, (__m512)x);
#else
    for (int64_t l = 0; l < n; l++)
        if (t == TR_BF16)
            ((tr_bf16 *)p)[i + l] = tr_f32_to_bf16(x[l]);
        else
            ((float *)p)[i + l] = x[l];
#endif
}

/* e^x to 1.5e-7 relative; 0 and infinity beyond fp32's range, NaN for NaN.
 * x = n ln2 + r with |r| <= ln2/2, Taylor to r^7 (the rest is below 6e-9). */
VEC_FN vec vec_exp(vec x) {
    const float magic = 0x1.8p23f; /* adding it rounds to an integer, left in the low bits */
    x = vec_at_most(vec_at_least(x, -104.0f), 104.0f);
    vec shifted = vec_fma(x, vec_set(0x1.715476p+0f), vec_set(magic));
    vec n = shifted - magic;
    /* ln2 in two parts; the first has 9 bits, so that n times it is exact without fma too */
    vec r = vec_fma(n, vec_set(-0x1.63p-1f), x);
    r = vec_fma(n, vec_set(0x1.bd0106p-13f), r);
    vec p = vec_set(1.0f / 5040);
    p = vec_fma(p, r, vec_set(1.0f / 720));
    p = vec_fma(p, r, vec_set(1.0f / 120));
    p = vec_fma(p, r, vec_set(1.0f / 24));
    p = vec_fma(p, r, vec_set(1.0f / 6));
    p = vec_fma(p, r, vec_set(0.5f));
    p = vec_fma(p, r, vec_set(1.0f));
    p = vec_fma(p, r, vec_set(1.0f));
#if defined(__AVX512F__)
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    /* 2^n in two steps: n reaches 150, beyond a normal number's exponent on either side */
    vec_i32 whole = (vec_i32)shifted - (vec_i32)vec_set(magic), half = whole >> 1;
    return p * (vec)((half + 127) << 23) * (vec)((whole - half + 127) << 23);
#endif
}
