/* product_avx512bf16.c - matrix products of bf16 by the dot-product instruction. Floor: kernels. */
#include "kernels/cpu/product.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

typedef tr_bf16 elem;
enum { WORD = 2 };

static inline __mmask32 first32(int64_t n) {
    return n >= 32 ? ~0u : (1u << n) - 1u;
}

static inline __m512i load_words(const elem *x, int64_t n) {
    return _mm512_maskz_loadu_epi16(first32(n), x);
}

/* The order that zips two vectors: 0, 32, 1, 33, ... 63. */
static const uint16_t zip[64] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                 8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
                                 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};

/* Element w of x and of next make word w. */
static inline void pack_row(uint32_t *to, int64_t panel, const elem *x, const elem *next,
                            int64_t n) {
    __m512i low = _mm512_loadu_si512(zip), high = _mm512_loadu_si512(zip + 32);
    __m512i a = load_words(x, n), b = next ? load_words(next, n) : _mm512_setzero_si512();
    __mmask16 keep = (__mmask16)first32(panel);
    _mm512_mask_storeu_epi32(to, keep, _mm512_permutex2var_epi16(a, low, b));
    if (panel > 16) _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(a, high, b));
}

static inline __m512 multiply(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

static inline __m256i narrow(__m512 x) {
    return (__m256i)_mm512_cvtneps_pbh(x);
}

#include "kernels/cpu/product_body.h"

void tr_product_bf16(const tr_gemm *g) {
    product(g);
}

#else
#include <stdlib.h>

/* Never chosen on a processor without the instruction. */
void tr_product_bf16(const tr_gemm *g) {
    (void)g;
    abort();
}
#endif
