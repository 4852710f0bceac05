/* attention_bf16.cuh - the matrix products of attention on tensor cores. Floor: kernels, internal
 * to kernels/cuda.
 *
 * A warp has 16 rows of scores. Its scores of a tile, in the layout that mma leaves them in, are
 * what the next mma takes as its first operand once packed to bf16. Score e of block n of a lane
 * has bit 4 n + e in `seen`, a word that says which pairs the mask shows; tiles have at most 64
 * columns.
 *
 * A hidden pair has probability 0, but 0 times NaN is NaN: where a tile has hidden pairs, it is
 * searched for numbers that are not finite. If there are any, a product of ones finds which sums
 * have seen one, and makes them NaN; then zeros take their place in the tile. */
#pragma once
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/tile.cuh"

/* Rows of a matrix from x[at] on, of which `left` exist, go on their way to a tile [N, D]. */
template <int N, int D, int THREADS>
DEVFN void load_rows(bf16 *tile, const void *x, int64_t at, int64_t row, int64_t left,
                     int64_t width, bool vector) {
    tile_load<N, D / 8, THREADS>(tile, (const bf16 *)x + at, row, left < N ? (int)left : N,
                                 (int)width, vector);
}

/* Keys j.. and their values. */
template <int N, int DQ, int DV, int THREADS>
DEVFN void load_keys(bf16 *k, bf16 *v, const attention_call *c, int b, int hk, int j) {
    const tr_attention *a = &c->a;
    load_rows<N, DQ, THREADS>(k, a->k, k_at(a, b, j, hk), a->k_row, a->Sk - j, a->Dqk, c->vector_k);
    load_rows<N, DV, THREADS>(v, a->v, v_at(a, b, j, hk), a->v_row, a->Sk - j, a->Dv, c->vector_v);
}

/* Queries i.. and the gradients of their outputs. */
template <int N, int DQ, int DV, int THREADS>
DEVFN void load_queries(bf16 *q, bf16 *dout, const attention_call *c, int b, int h, int i) {
    const tr_attention *a = &c->a;
    load_rows<N, DQ, THREADS>(q, a->q, q_at(a, b, i, h), a->q_row, a->Sq - i, a->Dqk, c->vector_q);
    load_rows<N, DV, THREADS>(dout, a->dout, dout_at(a, b, i, h), a->dout_row, a->Sq - i, a->Dv,
                              c->vector_dout);
}

/* scores[n] = rows r.. of x times rows of y, K steps of 16 along both. N: 8 rows of y each. */
template <int N, int K, int C>
DEVFN void scores_of(float (*scores)[4], const bf16 *x, int r, const bf16 *y) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) scores[n][e] = 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
        uint32_t first[4], second[4];
        first_operand<C>(first, x, r, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            second_operand<C>(second, y, 8 * n, k);
            mma_m16n8k16_bf16(scores[n], first, second, scores[n]);
            mma_m16n8k16_bf16(scores[n + 1], first, second + 2, scores[n + 1]);
        }
    }
}

/* cap tanh(x / cap). The error is 1e-7 of cap; tanhf has branches, and N of them take registers. */
DEVFN float capped(float x, float cap) {
    return cap - __fdividef(2 * cap, 1 + exp2f(x * (2 * LOG2_E / cap)));
}

/* Scores from sums of products. */
template <int N> DEVFN void scale_scores(const tr_attention *a, float (*s)[4]) {
#pragma unroll
    for (int e = 0; e < 4 * N; e++) s[e / 4][e % 4] *= a->scale;
    if (!(a->soft_cap > 0)) return;
#pragma unroll
    for (int e = 0; e < 4 * N; e++) s[e / 4][e % 4] = capped(s[e / 4][e % 4], a->soft_cap);
}

/* x times the derivatives of such scores by the plain ones. */
template <int N>
DEVFN void slope_scores(const tr_attention *a, float (*x)[4], const float (*s)[4]) {
    if (!(a->soft_cap > 0)) return;
    float inverse = 1 / a->soft_cap;
#pragma unroll
    for (int e = 0; e < 4 * N; e++) {
        float t = s[e / 4][e % 4] * inverse;
        x[e / 4][e % 4] *= 1 - t * t;
    }
}

/* Scores 16 k.. as a first operand. */
DEVFN void pack_scores(uint32_t first[4], const float (*scores)[4], int k) {
    first[0] = pack_bf16x2(scores[2 * k][0], scores[2 * k][1]);
    first[1] = pack_bf16x2(scores[2 * k][2], scores[2 * k][3]);
    first[2] = pack_bf16x2(scores[2 * k + 1][0], scores[2 * k + 1][1]);
    first[3] = pack_bf16x2(scores[2 * k + 1][2], scores[2 * k + 1][3]);
}

/* sum[n] += scores times the tile's columns 8 (chunk + n).., K steps of 16 rows. */
template <int N, int K, int C>
DEVFN void add_product(float (*sum)[4], const float (*scores)[4], const bf16 *tile, int chunk) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        uint32_t first[4], second[4];
        pack_scores(first, scores, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            second_operand_trans<C>(second, tile, chunk + n, k);
            mma_m16n8k16_bf16(sum[n], first, second, sum[n]);
            mma_m16n8k16_bf16(sum[n + 1], first, second + 2, sum[n + 1]);
        }
    }
}

/* All bits of those halves of a pair that are no finite numbers. */
DEVFN uint32_t not_finite(uint32_t pair) {
    uint32_t low = (pair & 0x7f80u) == 0x7f80u ? 0xffffu : 0;
    return low | ((pair & 0x7f800000u) == 0x7f800000u ? 0xffff0000u : 0);
}

/* Which sums have seen a number that is not finite, of up to 8 blocks of columns: bit 4 n + e.
 * Seldom run, and kept out of the registers of what is. */
template <int K, int C>
DEVFN uint32_t met_not_finite(uint32_t seen, const bf16 *tile, int chunk, int blocks) {
    const uint32_t ones = 0x3f803f80u;
    uint32_t met = 0, first[4], second[4];
#pragma unroll 1
    for (int n = 0; n < blocks; n += 2) {
        float count[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll 1
        for (int k = 0; k < K; k++) {
            second_operand_trans<C>(second, tile, chunk + n, k);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                uint32_t bits = seen >> (8 * k + 2 * e);
                first[e] = ((bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0)) & ones;
                second[e] = not_finite(second[e]) & ones;
            }
            mma_m16n8k16_bf16(count[0], first, second, count[0]);
            mma_m16n8k16_bf16(count[1], first, second + 2, count[1]);
        }
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (count[e / 4][e % 4] > 0) met |= 1u << (4 * n + e);
    }
    return met;
}

/* Before add_product on a tile with hidden pairs: numbers that are not finite leave the tile, and
 * sums that have seen one are NaN. By all threads of the block. N, K, chunk as in add_product. */
template <int N, int K, int C, int THREADS>
DEVFN void hide_not_finite(float (*sum)[4], uint32_t seen, bf16 *tile, int chunk) {
    uint32_t any = 0;
#pragma unroll 2
    for (int i = (int)threadIdx.x; i < 16 * K * C; i += THREADS) {
        uint4 v = ld128(tile + 8 * i);
        any |= not_finite(v.x) | not_finite(v.y) | not_finite(v.z) | not_finite(v.w);
    }
    if (!__syncthreads_or(any != 0)) return;
#pragma unroll
    for (int n = 0; n < N; n += 8) {
        uint32_t met = met_not_finite<K, C>(seen, tile, chunk + n, N - n < 8 ? N - n : 8);
#pragma unroll
        for (int e = 0; e < 32 && n + e / 4 < N; e++)
            if (met >> e & 1) sum[n + e / 4][e % 4] = NAN;
    }
    SYNCTHREADS(); /* all have looked */
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < 16 * K * C; i += THREADS) {
        uint4 v = ld128(tile + 8 * i);
        v.x &= ~not_finite(v.x), v.y &= ~not_finite(v.y);
        v.z &= ~not_finite(v.z), v.w &= ~not_finite(v.w);
        st128(tile + 8 * i, v);
    }
    SYNCTHREADS();
}

/* Bit 4n + 2r + e: a lane's query i + 8r sees the key j + 8n + e. */
template <int N>
DEVFN uint32_t seen_keys(const tr_attention *a, const interval keys[2], int i, int j) {
    uint32_t seen = 0;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int key = j + 8 * n + e % 2;
            if (key >= keys[e / 2].begin && key < keys[e / 2].end) seen |= 1u << (4 * n + e);
        }
    if (a->mask.dilation <= 1) return seen;
#pragma unroll 1
    for (int bit = 0; bit < 4 * N; bit++) {
        int64_t apart = place_of(a, i + bit / 2 % 2 * 8) - (j + bit / 4 * 8 + bit % 2);
        if (!sees_apart(&a->mask, apart)) seen &= ~(1u << bit);
    }
    return seen;
}

/* The same where a lane's rows are the keys j + 8r, and its columns the queries i + 8n + e. */
template <int N> DEVFN uint32_t seen_queries(const tr_attention *a, int b, int i, int j) {
    uint32_t seen = 0;
#pragma unroll 1
    for (int bit = 0; bit < 4 * N; bit++) {
        int query = i + bit / 4 * 8 + bit % 2, key = j + bit / 2 % 2 * 8;
        if (sees(a, keys_of(a, b, query), place_of(a, query), key)) seen |= 1u << bit;
    }
    return seen;
}

/* Head dimensions that kernels exist for: the next above what a call has. */
#define TR_ATTENTION_BY_WIDTH(launch, s, c)                                                        \
    do {                                                                                           \
        int64_t qk_ = (c)->a.Dqk, v_ = (c)->a.Dv, widest_ = qk_ > v_ ? qk_ : v_;                   \
        if (widest_ <= 64)                                                                         \
            launch<64, 64>(s, c);                                                                  \
        else if (widest_ <= 80)                                                                    \
            launch<80, 80>(s, c);                                                                  \
        else if (widest_ <= 96)                                                                    \
            launch<96, 96>(s, c);                                                                  \
        else if (widest_ <= 128)                                                                   \
            launch<128, 128>(s, c);                                                                \
        else if (qk_ <= 192 && v_ <= 128)                                                          \
            launch<192, 128>(s, c);                                                                \
        else                                                                                       \
            launch<256, 256>(s, c);                                                                \
    } while (0)
