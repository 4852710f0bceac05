/* product_avx512bf16.c - a matrix product of bf16 by one thread, with the dot-product instruction.
 * Floor: kernels.
 *
 * C is cut as in Goto, van de Geijn 2008 ("Anatomy of high-performance matrix multiplication"): a
 * slab of B (DEPTH by up to SLAB/DEPTH columns) and a block of A (up to BLOCK/DEPTH rows) are
 * packed, the first to be read from L3, the second from L2, and tiles of 12 by 32 sums stay in
 * registers. The instruction multiplies pairs along k: packed operands are words of two bf16, word
 * (k/2, w) of a panel of W rows of A or W columns of B at [k/2][W], zeros beyond the edges. Tiles
 * at C's edge go through masks and fewer rows, not through other code. Sums are fp32 over all of K:
 * where C is bf16 and K is longer than a slab, they wait in scratch.
 *
 * Measured on a Zen 4 core with a peak of 235 GFLOP/s: see tests/kernels/linear.c. */
#include "kernels/cpu/product.h"
#include "kernels/cpu/scratch.h"

#include <stdlib.h>

#if defined(__AVX512BF16__)
#include <immintrin.h>

enum {
    ROWS = 12,          /* of a tile */
    COLUMNS = 32,       /* of a tile: two vectors */
    DEPTH = 2048,       /* k of a slab, at most */
    BLOCK = 192 * 1024, /* elements of A packed at once */
    SLAB = 2048 * 1024, /* elements of B packed at once */
    STAGED_ROWS = 1024, /* of C, when its sums wait in scratch */
    STAGED_COLUMNS = 1024
};

static int64_t min(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static int64_t round_up(int64_t n, int64_t step) {
    return (n + step - 1) / step * step;
}
/* Masks of the first n elements, for any n. */
static __mmask32 first32(int64_t n) {
    return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1u;
}
static __mmask16 first16(int64_t n) {
    return (__mmask16)first32(n < 16 ? n : 16);
}

/* Transposes 16 vectors of 16 words. */
static inline __attribute__((always_inline)) void transpose(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* 128-bit lanes: rows i, i+4 and i+8, i+12 */
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* Up to 16 lines of `panel` whose elements lie along k: element (w, k) at from[w*ld + k]. */
static void pack_along_k(uint32_t *to, int64_t panel, const tr_bf16 *from, int64_t ld,
                         int64_t lines, int64_t depth) {
    __mmask16 keep = first16(panel);
    for (int64_t k = 0; k < depth; k += 32) {
        __mmask32 mask = first32(depth - k);
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            r[i] = i < lines ? _mm512_maskz_loadu_epi16(mask, from + i * ld + k)
                             : _mm512_setzero_si512();
        transpose(r);
        int64_t words = min((depth - k + 1) / 2, 16);
        uint32_t *out = to + k / 2 * panel;
        if (words == 16) {
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) _mm512_mask_storeu_epi32(out + i * panel, keep, r[i]);
        } else {
            for (int i = 0; i < words; i++) _mm512_mask_storeu_epi32(out + i * panel, keep, r[i]);
        }
    }
}

/* A panel whose elements lie across k: element (k, w) at from[k*ld + w]. */
static void pack_across_k(uint32_t *to, int64_t panel, const tr_bf16 *from, int64_t ld,
                          int64_t lines, int64_t depth) {
    static const uint16_t order[64] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    __m512i low = _mm512_loadu_si512(order), high = _mm512_loadu_si512(order + 32);
    __mmask32 mask = first32(lines);
    __mmask16 keep = first16(panel);
    for (int64_t k = 0; k < depth; k += 2) {
        __m512i a = _mm512_maskz_loadu_epi16(mask, from + k * ld);
        __m512i b = _mm512_maskz_loadu_epi16(k + 1 < depth ? mask : 0, from + (k + 1) * ld);
        uint32_t *out = to + k / 2 * panel;
        _mm512_mask_storeu_epi32(out, keep, _mm512_permutex2var_epi16(a, low, b));
        if (panel > 16) _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi16(a, high, b));
    }
}

/* `count` lines of an operand in panels; words is the distance between panels. along: elements lie
 * along k. `from` is the first line's element of the slab's first k. */
static void pack(uint32_t *to, int64_t panel, int64_t words, const tr_bf16 *from, int64_t ld,
                 bool along, int64_t count, int64_t depth) {
    for (int64_t w = 0; w < count; w += panel, to += words) {
        int64_t lines = min(panel, count - w);
        if (!along) {
            pack_across_k(to, panel, from + w, ld, lines, depth);
            continue;
        }
        for (int64_t h = 0; h < panel; h += 16)
            pack_along_k(to + h, panel, from + (w + h) * ld, ld, lines - h, depth);
    }
}

/* Where the sums of a tile go: added to `sum` when `add`; then, if `out` is not NULL, rounded into
 * it (with its old values when add_out) instead of stored. */
typedef struct {
    float *sum;
    tr_bf16 *out;
    int64_t ld_sum, ld_out;
    bool add, add_out;
} target;

static inline __attribute__((always_inline)) void put(const target *to, int64_t row, int64_t column,
                                                      __mmask16 mask, __m512 x) {
    float *sum = to->sum + row * to->ld_sum + column;
    if (to->add) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, sum));
    if (!to->out) {
        _mm512_mask_storeu_ps(sum, mask, x);
        return;
    }
    tr_bf16 *out = to->out + row * to->ld_out + column;
    if (to->add_out) {
        __m512i old = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, out));
        x = _mm512_add_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(old, 16)));
    }
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

/* A tile of the target: `rows` packed rows, of which the first `valid` exist in C; `words` of
 * depth. */
static inline __attribute__((always_inline)) void tile(int rows, int64_t valid, int64_t words,
                                                       const uint32_t *a, const uint32_t *b,
                                                       const target *to, int64_t row,
                                                       int64_t column, int64_t columns) {
    __m512 sum[ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < words; k++, a += ROWS, b += COLUMNS) {
        __m512bh b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + 16);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32((int32_t)a[i]);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], x, b0);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], x, b1);
        }
    }
    __mmask16 left = first16(columns), right = first16(columns - 16);
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        if (i < valid) {
            put(to, row + i, column, left, sum[i][0]);
            put(to, row + i, column + 16, right, sum[i][1]);
        }
}

/* All tiles of a packed block of A and a packed slab of B. */
static void block_times_slab(const uint32_t *a, const uint32_t *b, int64_t rows, int64_t columns,
                             int64_t words, const target *to) {
    for (int64_t n = 0; n < columns; n += COLUMNS, b += words * COLUMNS) {
        const uint32_t *panel = a;
        for (int64_t m = 0; m < rows; m += ROWS, panel += words * ROWS) {
            int64_t valid = min(rows - m, ROWS);
            if (valid > 8)
                tile(12, valid, words, panel, b, to, m, n, columns - n);
            else if (valid > 4)
                tile(8, valid, words, panel, b, to, m, n, columns - n);
            else
                tile(4, valid, words, panel, b, to, m, n, columns - n);
        }
    }
}

/* How a product is cut: k of a slab, its columns, rows of a block, rows whose sums are staged. */
typedef struct {
    int64_t depth, columns, rows, outer;
    bool staged;
    uint32_t *a, *b;
    float *stage;
} plan;

static plan make_plan(const tr_gemm *g) {
    int64_t slabs = (g->K + DEPTH - 1) / DEPTH;
    plan p = {.depth = round_up((g->K + slabs - 1) / slabs, 32)};
    p.staged = g->c == TR_BF16 && slabs > 1;
    p.columns = SLAB / p.depth / COLUMNS * COLUMNS;
    if (p.staged) p.columns = min(p.columns, STAGED_COLUMNS);
    p.columns = min(p.columns, round_up(g->N, COLUMNS));
    p.outer = p.staged ? min(STAGED_ROWS, g->M) : g->M;
    p.rows = min(BLOCK / p.depth / ROWS * ROWS, round_up(p.outer, ROWS));
    int64_t a_words = p.rows * p.depth / 2, b_words = p.columns * p.depth / 2;
    int64_t stage = p.staged ? p.outer * p.columns : 0;
    p.b = tr_scratch((size_t)(a_words + b_words + stage) * sizeof(uint32_t));
    p.a = p.b + b_words;
    p.stage = (float *)(p.a + a_words);
    return p;
}

/* Where the sums of C's block at (m, n) go after the slab at k; the stage begins at (m_outer, n).
 */
static target make_target(const tr_gemm *g, const plan *p, int64_t m_outer, int64_t m, int64_t n,
                          int64_t k) {
    if (g->c == TR_F32)
        return (target){
            .sum = (float *)g->C + m * g->ldc + n, .ld_sum = g->ldc, .add = k > 0 || g->beta != 0};
    target to = {.ld_sum = p->columns, .ld_out = g->ldc, .add = k > 0, .add_out = g->beta != 0};
    if (p->staged) to.sum = p->stage + (m - m_outer) * p->columns;
    if (k + p->depth >= g->K) to.out = (tr_bf16 *)g->C + m * g->ldc + n;
    return to;
}

static void pack_a(const tr_gemm *g, const plan *p, int64_t m, int64_t rows, int64_t k,
                   int64_t depth) {
    const tr_bf16 *from = (const tr_bf16 *)g->A + (g->trans_a ? k * g->lda + m : m * g->lda + k);
    pack(p->a, ROWS, (depth + 1) / 2 * ROWS, from, g->lda, !g->trans_a, rows, depth);
}

static void pack_b(const tr_gemm *g, const plan *p, int64_t n, int64_t columns, int64_t k,
                   int64_t depth) {
    const tr_bf16 *from = (const tr_bf16 *)g->B + (g->trans_b ? n * g->ldb + k : k * g->ldb + n);
    pack(p->b, COLUMNS, (depth + 1) / 2 * COLUMNS, from, g->ldb, g->trans_b, columns, depth);
}

void tr_product_bf16(const tr_gemm *g) {
    plan p = make_plan(g);
    for (int64_t m0 = 0; m0 < g->M; m0 += p.outer)
        for (int64_t n = 0; n < g->N; n += p.columns)
            for (int64_t k = 0; k < g->K; k += p.depth) {
                int64_t columns = min(p.columns, g->N - n), depth = min(p.depth, g->K - k);
                int64_t end = min(m0 + p.outer, g->M);
                pack_b(g, &p, n, columns, k, depth);
                for (int64_t m = m0; m < end; m += p.rows) {
                    int64_t rows = min(p.rows, end - m);
                    target to = make_target(g, &p, m0, m, n, k);
                    pack_a(g, &p, m, rows, k, depth);
                    block_times_slab(p.a, p.b, rows, columns, (depth + 1) / 2, &to);
                }
            }
}

#else

void tr_product_bf16(const tr_gemm *g) {
    (void)g;
    abort(); /* never chosen on a processor without the instruction */
}

#endif
