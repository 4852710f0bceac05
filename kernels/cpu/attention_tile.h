/* attention_tile.h - operands of attention in panels, and products of them by register tiles.
 * Floor: kernels, internal.
 *
 * Everything a product reads lies in panels NR wide, so that no stride is a large power of two and
 * a panel streams through L1. Three forms of n rows of D elements (KW elements are a word): rows
 * [D/NR][n][KP words]     read by broadcast: the contraction runs along D cols  [D/NR][n/KW][NR
 * words]  read by vectors: the contraction runs along the rows trans [n/NR][D/KW][NR words]  read
 * by vectors: the contraction runs along D With fp32 words rows and cols are the same. Rows are
 * also read by broadcast along the columns (multiply_cols): the transpose of a probability tile is
 * never formed. */
#pragma once
#include "kernels/cpu/attention_plan.h"
#include "kernels/ref/scalar.h"

enum { AHEAD = 16 }; /* rows between the one in work and the one asked for */

typedef struct {    /* the rows of one head */
    const void *at; /* element 0 of row 0 */
    int64_t row;    /* elements between rows */
    int64_t n, D;   /* zeros beyond */
    tr_dtype t;
    float scale;         /* multiplied in (fp32 words only) */
    const uint8_t *dead; /* [row - dead_from]: rows with 1 are zeros; nullable */
    int64_t dead_from;
} head;

static head head_of(const tr_attention *a, const void *x, int64_t at, int64_t row, int64_t n,
                    int64_t D, float scale) {
    return (head){tr_at(a->t, x, at), row, n, D, a->t, scale, NULL, 0};
}

/* kv head `index` of B*Hkv, query head h of sequence b. */
static head key_head(const tr_attention *a, int64_t index) {
    int64_t b = index / a->Hkv, h = index % a->Hkv;
    return head_of(a, a->k, b * a->k_batch + h * a->Dqk, a->k_row, a->Sk, a->Dqk, 1);
}

static head value_head(const tr_attention *a, int64_t index) {
    int64_t b = index / a->Hkv, h = index % a->Hkv;
    return head_of(a, a->v, b * a->v_batch + h * a->Dv, a->v_row, a->Sk, a->Dv, 1);
}

static head query_head(const tr_attention *a, int64_t b, int64_t h) {
    return head_of(a, a->q, b * a->q_batch + h * a->Dqk, a->q_row, a->Sq, a->Dqk, a->scale);
}

static inline bool head_lacks(const head *x, int64_t r) {
    return r >= x->n || (x->dead && x->dead[r - x->dead_from]);
}

/* VEC fp32 of row r from d on. */
VEC_FN vec head_values(const head *x, tr_dtype t, int64_t r, int64_t d) {
    if (head_lacks(x, r)) return (vec){0};
    return vec_load_n(t, x->at, r * x->row + d, x->D - d);
}

/* VEC words of row r from element d on. */
VEC_FN vec head_words(const head *x, tr_dtype t, int64_t r, int64_t d) {
#if TR_PAIRS
    (void)t;
    int64_t left = x->D - d;
    if (head_lacks(x, r) || left <= 0) return (vec){0};
    uint32_t mask = left >= 2 * VEC ? ~0u : (1u << left) - 1;
    return (vec)_mm512_maskz_loadu_epi16(mask, (const tr_bf16 *)x->at + r * x->row + d);
#else
    return head_values(x, t, r, d) * x->scale;
#endif
}

/* Words of a trans panel's column, with room for whole vectors. */
static int64_t trans_words(int64_t D) {
    return up(parts(D, KW), VEC);
}

/* Asks for a row that will be needed soon: rows of one head are often pages apart. */
VEC_FN void prefetch_row(tr_dtype t, const void *x, int64_t at, int64_t D) {
    const char *line = tr_at(t, x, at);
    for (int64_t i = 0; i < D * (int64_t)tr_dtype_bytes(t); i += 64) __builtin_prefetch(line + i);
}

VEC_FN void prefetch_head(const head *x, tr_dtype t, int64_t r) {
    if (r < x->n) prefetch_row(t, x->at, r * x->row, x->D);
}

VEC_FN void pack_rows_t(const head *x, tr_dtype t, int64_t r0, int64_t n, int64_t room, float *to) {
    for (int64_t r = 0; r < n; r++) {
        prefetch_head(x, t, r0 + r + AHEAD);
        for (int64_t d = 0; d < x->D; d += NR)
            for (int64_t w = 0; w < KP; w += VEC)
                vec_keep(to + (d / NR * room + r) * KP + w, head_words(x, t, r0 + r, d + w * KW));
    }
}

/* Rows r0..r0+n-1 in rows form; panels hold `room` rows. */
static void pack_rows(const head *x, int64_t r0, int64_t n, int64_t room, float *to) {
    if (x->t == TR_BF16)
        pack_rows_t(x, TR_BF16, r0, n, room, to);
    else
        pack_rows_t(x, TR_F32, r0, n, room, to);
}

/* Rows r0..r0+n-1 in cols form; panels hold `room` rows. n and room are multiples of KW. */
static void pack_cols(const head *x, int64_t r0, int64_t n, int64_t room, float *to) {
#if TR_PAIRS
    /* words 0..15 and 16..31 of (element of the even row, element of the odd row) */
    __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39,
                                   7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t r = 0; r < n; r += 2) {
        prefetch_head(x, TR_BF16, r0 + r + AHEAD);
        prefetch_head(x, TR_BF16, r0 + r + AHEAD + 1);
        for (int64_t d = 0; d < x->D; d += NR) {
            __m512i even = (__m512i)head_words(x, TR_BF16, r0 + r, d);
            __m512i odd = (__m512i)head_words(x, TR_BF16, r0 + r + 1, d);
            float *at = to + (d / NR * room + r) / 2 * NR;
            vec_keep(at, (vec)_mm512_permutex2var_epi16(even, low, odd));
            vec_keep(at + VEC, (vec)_mm512_permutex2var_epi16(even, high, odd));
        }
    }
#else
    pack_rows(x, r0, n, room, to);
#endif
}

VEC_FN void pack_trans_t(const head *x, tr_dtype t, int64_t r0, int64_t n, float *to) {
    int64_t words = trans_words(x->D);
    for (int64_t r = 0; r < n; r += VEC) {
        for (int i = 0; i < VEC; i++) prefetch_head(x, t, r0 + r + VEC + i);
        for (int64_t w = 0; w < words; w += VEC) {
            vec square[VEC];
            UNROLL for (int i = 0; i < VEC; i++) {
                square[i] = head_words(x, t, r0 + r + i, w * KW);
            }
            vec_transpose(square);
            float *at = to + (r / NR * words + w) * NR + r % NR;
            UNROLL for (int i = 0; i < VEC; i++) {
                vec_keep(at + i * NR, square[i]);
            }
        }
    }
}

/* Rows r0..r0+n-1 in trans form; n is a multiple of NR. */
static void pack_trans(const head *x, int64_t r0, int64_t n, float *to) {
    if (x->t == TR_BF16)
        pack_trans_t(x, TR_BF16, r0, n, to);
    else
        pack_trans_t(x, TR_F32, r0, n, to);
}

/* A row of panels (room rows each, at `from` its first element) times scale: = or += x[at..]. */
static void unpack_row(tr_dtype t, void *x, int64_t at, int64_t D, const float *from, int64_t room,
                       float scale, bool add) {
    for (int64_t d = 0; d < D; d += VEC) {
        vec y = vec_words(from + d / NR * room * NR + d % NR) * scale;
        if (add) y += vec_load_n(t, x, at + d, D - d);
        vec_store_n(t, x, at + d, D - d, y);
    }
}

/* n rows of panels, `row` elements apart in x. */
static void unpack_rows(tr_dtype t, void *x, int64_t at, int64_t row, int64_t n, int64_t D,
                        const float *from, int64_t room, float scale, bool add) {
    for (int64_t r = 0; r < n; r++) {
        if (r + AHEAD < n) prefetch_row(t, x, at + (r + AHEAD) * row, D);
        unpack_row(t, x, at + r * row, D, from + r * NR, room, scale, add);
    }
}

/* Whether n packed rows in cols form (panels of `room` rows) are finite. */
static bool cols_finite(const float *cols, int64_t D, int64_t n, int64_t room) {
    vec sum[4] = {{0}, {0}, {0}, {0}};
    for (int64_t d = 0; d < D; d += NR)
        for (int64_t w = 0; w < n / KW * NR; w += 2 * VEC)
            for (int v = 0; v < 2; v++) {
                vec x = vec_words(cols + d * room / KW + w + v * VEC);
                vec lower = (vec)((vec_i32)x << 16);
                sum[v] = vec_fma(x, vec_all(0), sum[v]);
                if (TR_PAIRS) sum[2 + v] = vec_fma(lower, vec_all(0), sum[2 + v]);
            }
    return vec_sum_lanes(sum[0] + sum[1]) == 0 && vec_sum_lanes(sum[2] + sum[3]) == 0;
}

/* dead[r] = 1 for the rows r0..r0+n-1 that hold NaN or infinity. */
static void find_dead(const head *x, int64_t r0, int64_t n, uint8_t *dead) {
    for (int64_t r = 0; r < n; r++) {
        vec sum = {0};
        for (int64_t d = 0; d < x->D; d += VEC)
            sum = vec_fma(head_values(x, x->t, r0 + r, d), vec_all(0), sum);
        dead[r] = vec_sum_lanes(sum) != 0;
    }
}

/* Rows r0..r0+n-1 in cols form, of which those that hold NaN or infinity are zeros: 0 times NaN is
 * NaN, they are added one by one where they are seen. True when there are any: dead[0..n-1] then
 * says which. */
static bool pack_cols_finite(const head *x, int64_t r0, int64_t n, int64_t room, float *to,
                             uint8_t *dead) {
    pack_cols(x, r0, n, room, to);
    if (cols_finite(to, x->D, n, room)) return false;
    head clean = *x;
    find_dead(x, r0, n, dead);
    clean.dead = dead, clean.dead_from = r0;
    pack_cols(&clean, r0, n, room, to);
    return true;
}

/* to (a row of panels of `room` rows) += factor * row r of x. */
static void add_row(const head *x, int64_t r, float factor, float *to, int64_t room) {
    for (int64_t d = 0; d < x->D; d += VEC) {
        float *at = to + d / NR * room * NR + d % NR;
        vec_keep(at, vec_fma(vec_all(factor), head_values(x, x->t, r, d), vec_words(at)));
    }
}

/* The probability (or its gradient) of row r and column c in rows form. */
static float rows_element(const float *rows, int64_t room, int64_t r, int64_t c) {
    return tr_load(TR_PAIRS ? TR_BF16 : TR_F32, rows, (c / NR * room + r) * NR + c % NR);
}

/* --- register tiles: MR rows of nv vectors ------------------------------------------------------
 */

VEC_FN void tile_clear(vec c[MR][2]) {
    UNROLL for (int i = 0; i < MR; i++) {
        c[i][0] = c[i][1] = (vec){0};
    }
}

VEC_FN void tile_load(vec c[MR][2], int nv, const float *from) {
    UNROLL for (int i = 0; i < MR; i++) {
        UNROLL for (int v = 0; v < nv; v++) {
            c[i][v] = vec_words(from + i * NR + v * VEC);
        }
    }
}

VEC_FN void tile_store(vec c[MR][2], int nv, float *to) {
    UNROLL for (int i = 0; i < MR; i++) {
        UNROLL for (int v = 0; v < nv; v++) {
            vec_keep(to + i * NR + v * VEC, c[i][v]);
        }
    }
}

/* Elements hidden by bits (a row each) become `hidden`. */
VEC_FN void tile_hide(vec c[MR][2], const uint32_t bits[MR], float hidden) {
    UNROLL for (int i = 0; i < MR; i++) {
        c[i][0] = vec_by_bits(bits[i], c[i][0], vec_all(hidden));
        c[i][1] = vec_by_bits(bits[i] >> VEC, c[i][1], vec_all(hidden));
    }
}

/* Row i of a tile is multiplied by factor[i]. */
VEC_FN void tile_scale(vec c[MR][2], int nv, const float *factor) {
    UNROLL for (int i = 0; i < MR; i++) {
        UNROLL for (int v = 0; v < nv; v++) {
            c[i][v] *= factor[i];
        }
    }
}

/* c += A B over words begin..end-1: A in rows form (its first row at A, panels of `room` rows), B a
 * panel of cols or trans form. */
VEC_FN void multiply_rows(vec c[MR][2], int nv, int64_t begin, int64_t end, const float *A,
                          int64_t room, const float *B) {
    for (int64_t w = begin; w < end;) {
        int64_t stop = least(end, (w / KP + 1) * KP);
        const float *a = A + w / KP * room * KP + w % KP;
        for (; w < stop; w++, a++) {
            vec b[2];
            UNROLL for (int v = 0; v < nv; v++) {
                b[v] = vec_words(B + w * NR + v * VEC);
            }
            UNROLL for (int i = 0; i < MR; i++) {
                vec x = vec_all(a[i * KP]);
                UNROLL for (int v = 0; v < nv; v++) {
                    c[i][v] = word_fma(x, b[v], c[i][v]);
                }
            }
        }
    }
}

/* c += A^T B over words begin..end-1 of MR columns (the first at A) of a panel, B a panel. */
VEC_FN void multiply_cols(vec c[MR][2], int nv, int64_t begin, int64_t end, const float *A,
                          const float *B) {
    for (int64_t w = begin; w < end; w++) {
        vec b[2];
        UNROLL for (int v = 0; v < nv; v++) {
            b[v] = vec_words(B + w * NR + v * VEC);
        }
        UNROLL for (int i = 0; i < MR; i++) {
            vec x = vec_all(A[w * NR + i]);
            UNROLL for (int v = 0; v < nv; v++) {
                c[i][v] = word_fma(x, b[v], c[i][v]);
            }
        }
    }
}

/* Vectors of the panel at column d of D that hold anything. */
static inline int panel_vectors(int64_t D, int64_t d) {
    return D - d > VEC ? 2 : 1;
}
