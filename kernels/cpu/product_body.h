/* product_body.h - a matrix product by one thread in AVX-512, compiled once for fp32 and once for
 * bf16. Floor: kernels, internal.
 *
 * C is cut as in Goto, van de Geijn 2008 ("Anatomy of high-performance matrix multiplication"): a
 * slab of B and a block of A are packed, the first to be read from L3, the second from L2, and
 * tiles of 12 by 32 sums stay in registers. Packed operands are made of words along k, one fp32 or
 * two bf16: word (k, w) of a panel of W rows of A or W columns of B lies at [k][W], zeros beyond
 * the edges. Tiles at C's edge go through masks and fewer rows, not through other code. Sums are
 * fp32 over all of K: where C is bf16 and K is longer than a slab, they wait in scratch.
 *
 * Few rows (an expert's share) make one block: then B goes through by panels of 32 columns that
 * stay in L1 and L2, and the tiles of one panel fetch the next, so that weights stream from memory
 * behind the arithmetic.
 *
 * Measured on one Zen 4 core with peaks of 118 (fp32) and 236 GFLOP/s (bf16), the machine being
 * busy: bf16 205-226 from 256 rows on, weight gradients 190-215; groups of 64-100 rows 195-210, of
 * 32 rows 175-185, their weight gradients 150-180 and 100 (bound by C in memory).
 *
 * The includer defines, before: the type `elem`; WORD, its elements in a word; and
 *     __m512i load_words(const elem *x, int64_t n)  the first n elements of 16 words, zeros behind
 *     void pack_row(uint32_t *to, int64_t panel, const elem *x, const elem *next, int64_t n)
 *         a panel's words of one k from its n lines' elements x (and, if WORD is 2, those of k + 1
 *         in `next`, NULL behind the end)
 *     __m512 multiply(__m512 sum, __m512i a, __m512i b)  sum + a b, word by word
 *     __m256i narrow(__m512 x)  16 bf16 */
#pragma once
#include "kernels/cpu/product.h"
#include "kernels/cpu/scratch.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

enum {
    ROWS = 12,               /* of a tile */
    COLUMNS = 32,            /* of a tile: two vectors */
    DEPTH = 1024,            /* words of a slab along k, at most */
    BLOCK = 96 * 1024,       /* words of A packed at once */
    LONE_BLOCK = 160 * 1024, /* the same, when that is all of A */
    SLAB = 1024 * 1024,      /* words of B packed at once */
    STAGED_ROWS = 1024,      /* of C, when its sums wait in scratch */
    STAGED_COLUMNS = 1024,   /* of those */
    LINE = 16                /* words of a cache line */
};

static int64_t round_up(int64_t n, int64_t step) {
    return (n + step - 1) / step * step;
}
static int64_t words_of(int64_t k) {
    return (k + WORD - 1) / WORD;
}

/* The first n of 16, for any n. */
INLINE __mmask16 first16(int64_t n) {
    return (__mmask16)(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1);
}

/* Transposes 16 vectors of 16 words. */
INLINE void transpose(__m512i r[16]) {
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
static void pack_along_k(uint32_t *to, int64_t panel, const elem *from, int64_t ld, int64_t lines,
                         int64_t depth) {
    __mmask16 keep = first16(panel);
    for (int64_t k = 0; k < depth; k += LINE * WORD, to += LINE * panel) {
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            r[i] = i < lines ? load_words(from + i * ld + k, depth - k) : _mm512_setzero_si512();
        transpose(r);
        int64_t words = words_of(depth - k);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (i < words) _mm512_mask_storeu_epi32(to + i * panel, keep, r[i]);
    }
}

/* `count` lines of an operand in panels, from its element at the first line and k. along: elements
 * lie along k. Otherwise element (w, k) is at from[k*ld + w]. */
INLINE void pack(uint32_t *to, int64_t panel, const elem *from, int64_t ld, bool along,
                 int64_t count, int64_t depth) {
    for (int64_t w = 0; w < count; w += panel, to += words_of(depth) * panel) {
        int64_t lines = tr_min(panel, count - w);
        if (along) {
            for (int64_t h = 0; h < panel; h += 16)
                pack_along_k(to + h, panel, from + (w + h) * ld, ld, lines - h, depth);
            continue;
        }
        uint32_t *out = to;
        for (int64_t k = 0; k < depth; k += WORD, out += panel) {
            const elem *x = from + w + k * ld;
            pack_row(out, panel, x, k + 1 < depth ? x + ld : NULL, lines);
        }
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

INLINE void put(const target *to, int64_t row, int64_t column, __mmask16 mask, __m512 x) {
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
    _mm256_mask_storeu_epi16(out, mask, narrow(x));
}

/* The sums of a tile two further on: at little depth it would wait for them. (Not inlined, it would
 * be dropped as a function without effect.) */
INLINE void fetch_sums(const target *to, int64_t row, int64_t rows, int64_t column,
                       int64_t columns) {
    if (!to->add) return;
    if (row >= rows) { /* at the top of the next panel */
        row -= rows;
        column += COLUMNS;
    }
    if (column >= columns) return;
    const float *sum = to->sum + row * to->ld_sum + column;
    for (int64_t i = row; i < tr_min(row + ROWS, rows); i++, sum += to->ld_sum) {
        __builtin_prefetch(sum, 1);
        __builtin_prefetch(sum + 16, 1);
    }
}

/* Memory that will be packed next, fetched by the tiles a line for each word of depth: LINE lines
 * `step` bytes apart, then `jump` bytes from the last of them, and so on. */
typedef struct {
    const char *at;
    int64_t step, jump;
} upcoming;

/* A tile: `rows` packed rows, of which the first `valid` exist in C, by `columns` at most. */
INLINE void tile(int rows, int64_t valid, int64_t columns, int64_t words, const uint32_t *a,
                 const uint32_t *b, const target *to, int64_t row, int64_t column, upcoming u) {
    __m512 sum[ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < words; k++, a += ROWS, b += COLUMNS) {
        __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 16);
        _mm_prefetch(u.at, _MM_HINT_T1);
        u.at += (k & (LINE - 1)) == LINE - 1 ? u.jump : u.step;
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            __m512i x = _mm512_set1_epi32((int32_t)a[i]);
            sum[i][0] = multiply(sum[i][0], x, b0);
            sum[i][1] = multiply(sum[i][1], x, b1);
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

/* All tiles of a packed block of A and packed columns of B. Tile i of a panel fetches from
 * u.at + i*stride on. */
static void multiply_block(const uint32_t *a, const uint32_t *b, int64_t rows, int64_t columns,
                           int64_t words, const target *to, upcoming u, int64_t stride) {
    const char *first = u.at;
    for (int64_t n = 0; n < columns; n += COLUMNS, b += words * COLUMNS) {
        const uint32_t *panel = a;
        u.at = first;
        for (int64_t m = 0; m < rows; m += ROWS, panel += words * ROWS, u.at += stride) {
            int64_t valid = tr_min(rows - m, ROWS), width = columns - n;
            fetch_sums(to, m + 2 * ROWS, rows, n, columns);
            if (valid > 8)
                tile(12, valid, width, words, panel, b, to, m, n, u);
            else if (valid > 4)
                tile(8, valid, width, words, panel, b, to, m, n, u);
            else
                tile(4, valid, width, words, panel, b, to, m, n, u);
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
    int64_t slabs = (words_of(g->K) + DEPTH - 1) / DEPTH;
    int64_t words = round_up((words_of(g->K) + slabs - 1) / slabs, LINE);
    plan p = {.depth = words * WORD, .staged = g->c == TR_BF16 && slabs > 1};
    p.columns = SLAB / words / COLUMNS * COLUMNS;
    if (p.staged) p.columns = tr_min(p.columns, STAGED_COLUMNS);
    p.columns = tr_min(p.columns, round_up(g->N, COLUMNS));
    p.outer = p.staged ? tr_min(STAGED_ROWS, g->M) : g->M;
    bool lone = p.outer * words <= LONE_BLOCK;
    p.rows = lone ? round_up(p.outer, ROWS) : BLOCK / words / ROWS * ROWS;
    int64_t a_words = p.rows * words, b_words = p.columns * words;
    int64_t stage = p.staged ? p.outer * p.columns : 0;
    p.b = tr_scratch((size_t)(a_words + b_words + stage) * sizeof(uint32_t));
    p.a = p.b + b_words;
    p.stage = (float *)(p.a + a_words);
    return p;
}

/* Where the sums of C at (m, n) go after the slab at k; the stage begins at (m0, n0). */
static target make_target(const tr_gemm *g, const plan *p, int64_t m0, int64_t n0, int64_t m,
                          int64_t n, int64_t k) {
    if (g->c == TR_F32)
        return (target){
            .sum = (float *)g->C + m * g->ldc + n, .ld_sum = g->ldc, .add = k > 0 || g->beta != 0};
    target to = {.ld_sum = p->columns, .ld_out = g->ldc, .add = k > 0, .add_out = g->beta != 0};
    if (p->staged) to.sum = p->stage + (m - m0) * p->columns + (n - n0);
    if (k + p->depth >= g->K) to.out = (tr_bf16 *)g->C + m * g->ldc + n;
    return to;
}

static const elem *a_at(const tr_gemm *g, int64_t m, int64_t k) {
    return (const elem *)g->A + (g->trans_a ? k * g->lda + m : m * g->lda + k);
}

static const elem *b_at(const tr_gemm *g, int64_t k, int64_t n) {
    return (const elem *)g->B + (g->trans_b ? n * g->ldb + k : k * g->ldb + n);
}

/* C of p.outer rows from m0 and p.columns columns from n0 on, += the slab at k. When all these rows
 * are one block, it is packed once and B goes by panels. */
static void multiply_slab(const tr_gemm *g, const plan *p, int64_t m0, int64_t n0, int64_t k) {
    int64_t depth = tr_min(p->depth, g->K - k), m1 = tr_min(m0 + p->outer, g->M);
    int64_t n1 = tr_min(n0 + p->columns, g->N), line = g->ldb * (int64_t)sizeof(elem);
    bool one_block = m1 - m0 <= p->rows;
    int64_t width = one_block ? COLUMNS : p->columns;
    upcoming across = {.step = line, .jump = line};
    upcoming along = {.step = line, .jump = 64 - (LINE - 1) * line};
    if (one_block) pack(p->a, ROWS, a_at(g, m0, k), g->lda, !g->trans_a, m1 - m0, depth);
    for (int64_t n = n0; n < n1; n += width) {
        int64_t columns = tr_min(width, n1 - n);
        upcoming u = {.at = (const char *)p->a};
        int64_t stride = 0;
        pack(p->b, COLUMNS, b_at(g, k, n), g->ldb, g->trans_b, columns, depth);
        if (one_block && n + width < n1) {
            u = g->trans_b ? along : across;
            u.at = (const char *)b_at(g, k, n + width);
            stride = g->trans_b ? LINE * line : WORD == 2 ? words_of(depth) * line : 64;
        }
        for (int64_t m = m0; m < m1; m += p->rows) {
            int64_t rows = tr_min(p->rows, m1 - m);
            if (!one_block) pack(p->a, ROWS, a_at(g, m, k), g->lda, !g->trans_a, rows, depth);
            target to = make_target(g, p, m0, n0, m, n, k);
            multiply_block(p->a, p->b, rows, columns, words_of(depth), &to, u, stride);
        }
    }
}

static void product(const tr_gemm *g) {
    plan p = make_plan(g);
    for (int64_t m = 0; m < g->M; m += p.outer)
        for (int64_t n = 0; n < g->N; n += p.columns)
            for (int64_t k = 0; k < g->K; k += p.depth) multiply_slab(g, &p, m, n, k);
}
