/* product_avx512.c - matrix products of fp32 with AVX-512. Floor: kernels. */
#include "kernels/cpu/product.h"

#if defined(__AVX512F__)
#include <immintrin.h>

#include "kernels/cpu/vec.h"

typedef float elem;
enum { WORD = 1 };

static inline __mmask16 first(int64_t n) {
    return (__mmask16)(n >= 16 ? ~0u : (1u << n) - 1u);
}

static inline __m512i load_words(const elem *x, int64_t n) {
    return _mm512_maskz_loadu_epi32(first(n), x);
}

static inline void pack_row(uint32_t *to, int64_t panel, const elem *x, const elem *next,
                            int64_t n) {
    (void)next;
    _mm512_mask_storeu_epi32(to, first(panel), load_words(x, n));
    if (panel > 16)
        _mm512_storeu_si512(to + 16, n > 16 ? load_words(x + 16, n - 16) : _mm512_setzero_si512());
}

static inline __m512 multiply(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

static inline __m256i narrow(__m512 x) {
    return (__m256i)vec_to_bf16((vec)x);
}

#include "kernels/cpu/product_body.h"

void tr_product_f32(const tr_gemm *g) {
    product(g);
}

#else
#include <stdlib.h>

/* Never chosen on a processor without AVX-512. */
void tr_product_f32(const tr_gemm *g) {
    (void)g;
    abort();
}
#endif
