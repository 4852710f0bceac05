/* linear.cu - matrix products on a GPU: dense, and grouped by row counts only the device knows.
 * Floor: kernels.
 *
 * bf16: a block makes 128 by 128 of C, k in steps of 32 through four stages of cp.async (64 KB of
 * shared memory), 8 warps of 64 by 32, sums in fp32 by mma.m16n8k16; the sums leave through shared
 * memory, whole rows at a time. The tensor cores bound it: a step of 16 takes 16 mma and 6 ldmatrix
 * a warp. ptxas 13.0, no spills: 123 to 128 registers (two blocks a multiprocessor).
 * fp32: 64 by 64, 4 by 4 a thread, plain FMA, the next step of 16 waits in registers (8.5 KB of
 * shared memory, 72 to 96 registers); shared memory bounds it at about half of the FMA peak.
 * Not measured on a card yet. */
#include "kernels/cuda/stream.h"
#include "kernels/cuda/tile.cuh"
#include "kernels/makers.h"

/* One product C = beta C + op(A) op(B), as tr_gemm says. */
typedef struct {
    const void *a, *b;
    void *c;
    int64_t M, N, K, lda, ldb, ldc;
    bool vector_a, vector_b; /* their rows are whole chunks at multiples of 16 bytes */
    bool c_is_f32, add;
} product;

DEVFN int at_most(int64_t n, int most) {
    return n < most ? (int)n : most;
}

/* bf16. */

static const int TILE = 128, STEP = 32, STAGES = 4, THREADS = 256;
static const int WARP_ROWS = 64, WARP_COLUMNS = 32, STAGE = 2 * TILE * STEP /* elements */;
static const int SHARED_BYTES = STAGES * STAGE * 2;
static const int PLACE_ROW = TILE + 8; /* floats; 64 of these rows take the stages' place */

/* What a block still has to load: where op(A)'s rows and op(B)'s columns go on. */
typedef struct {
    const bf16 *a, *b;
    int rows, columns; /* of the tile that exist */
    int steps, last;   /* the last step has so many k */
} source;

/* Step i, the next one, goes on its way to its stage. */
template <bool TA, bool TB> DEVFN void load_step(bf16 *stages, const product *p, source *s, int i) {
    int depth = i + 1 < s->steps ? STEP : s->last;
    bf16 *stage = stages + i % STAGES * STAGE, *second = stage + STAGE / 2;
    if (TA)
        tile_load<STEP, TILE / 8, THREADS>(stage, s->a, p->lda, depth, s->rows, p->vector_a);
    else
        tile_load<TILE, STEP / 8, THREADS>(stage, s->a, p->lda, s->rows, depth, p->vector_a);
    if (TB)
        tile_load<TILE, STEP / 8, THREADS>(second, s->b, p->ldb, s->columns, depth, p->vector_b);
    else
        tile_load<STEP, TILE / 8, THREADS>(second, s->b, p->ldb, depth, s->columns, p->vector_b);
    s->a += TA ? STEP * p->lda : STEP;
    s->b += TB ? STEP : STEP * p->ldb;
}

/* A warp's sums += the step in `stage`, its rows from `row` and columns from `column` on. */
template <bool TA, bool TB>
DEVFN void multiply_stage(float sum[4][4][4], const bf16 *stage, int row, int column) {
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
        uint32_t a[4], b[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (TB)
                second_operand<STEP / 8>(b[j], stage + STAGE / 2, column + 16 * j, k);
            else
                second_operand_trans<TILE / 8>(b[j], stage + STAGE / 2, (column + 16 * j) / 8, k);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (TA)
                first_operand_trans<TILE / 8>(a, stage, (row + 16 * i) / 8, k);
            else
                first_operand<STEP / 8>(a, stage, row + 16 * i, k);
#pragma unroll
            for (int j = 0; j < 4; j++)
                mma_m16n8k16_bf16(sum[i][j], a, b[j / 2] + j % 2 * 2, sum[i][j]);
        }
    }
}

/* A warp's sums of 64 rows go to shared memory. Lanes of rows 4..7 of an 8 by 8 block put their
 * second column first, so that the 32 lanes are in 32 banks. */
DEVFN void place_sums(float *place, const float sum[4][4][4], int column) {
    int lane = (int)threadIdx.x & 31, late = lane >> 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int r = 16 * i + e / 2 * 8 + lane / 4, odd = e % 2 ^ late;
                place[r * PLACE_ROW + column + 8 * j + lane % 4 * 2 + odd] =
                    odd ? sum[i][j][e | 1] : sum[i][j][e & 2];
            }
}

/* The first `rows` of 64 rows of sums in shared memory go to C's row m, column n on. By all threads
 * of the block. */
DEVFN void store_sums(const product *p, const float *place, int64_t m, int64_t n, int rows,
                      int columns) {
    int c = (int)threadIdx.x % TILE;
    if (c >= columns) return;
    for (int r = (int)threadIdx.x / TILE; r < rows && r < WARP_ROWS; r += THREADS / TILE) {
        int64_t at = (m + r) * p->ldc + n + c;
        float x = place[r * PLACE_ROW + c];
        if (p->c_is_f32)
            ((float *)p->c)[at] = p->add ? ((float *)p->c)[at] + x : x;
        else
            ((bf16 *)p->c)[at] = f32_to_bf16(p->add ? bf16_to_f32(((bf16 *)p->c)[at]) + x : x);
    }
}

/* Tile `down`, `across` of C. By all threads of the block. */
template <bool TA, bool TB> DEVFN void product_bf16(const product *p, int down, int across) {
    SIMT_DYN_SMEM(bf16, stages);
    int64_t m = (int64_t)down * TILE, n = (int64_t)across * TILE;
    int warp = (int)threadIdx.x >> 5;
    int row = warp / 4 * WARP_ROWS, column = warp % 4 * WARP_COLUMNS;
    int steps = (int)((p->K + STEP - 1) / STEP);
    source from = {(const bf16 *)p->a + (TA ? m : m * p->lda),
                   (const bf16 *)p->b + (TB ? n * p->ldb : n),
                   at_most(p->M - m, TILE),
                   at_most(p->N - n, TILE),
                   steps,
                   (int)(p->K - (steps - 1) * (int64_t)STEP)};
    float sum[4][4][4];
#pragma unroll
    for (int i = 0; i < 64; i++) sum[i / 16][i / 4 % 4][i % 4] = 0;
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) load_step<TA, TB>(stages, p, &from, s);
        cp_async_commit();
    }
    for (int s = 0; s < steps; s++) {
        cp_async_wait<STAGES - 2>();
        SYNCTHREADS(); /* step s is there for all, and all are done with step s - 1 */
        int next = s + STAGES - 1;
        if (next < steps) load_step<TA, TB>(stages, p, &from, next);
        cp_async_commit();
        multiply_stage<TA, TB>(sum, stages + s % STAGES * STAGE, row, column);
    }
    float *place = (float *)stages;
    for (int half = 0; half < TILE; half += WARP_ROWS) {
        SYNCTHREADS(); /* the stages, or the first half, are no longer needed */
        if (row == half) place_sums(place, sum, column);
        SYNCTHREADS();
        store_sums(p, place, m + half, n, from.rows - half, from.columns);
    }
}

/* fp32. */

static const int F32_TILE = 64, F32_STEP = 16, F32_ROW = F32_TILE + 4;

/* Element e of four that this thread moves from step k, columns m.. of the matrix x: [k][m] if
 * `wide`, else [m][k]. Where it goes in shared memory, and its value (0 beyond the ends). */
DEVFN int step_at(int e, bool wide, int *m, int *k) {
    int i = (int)threadIdx.x;
    *m = wide ? i & 63 : (i >> 3) + 32 * (e >> 1);
    *k = wide ? (i >> 6) + 4 * e : (i & 7) + 8 * (e & 1);
    return *k * F32_ROW + *m;
}

DEVFN void step_fetch(float value[4], const void *x, int64_t ld, bool wide, int64_t m0, int64_t k0,
                      int64_t M, int64_t K) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int m, k;
        step_at(e, wide, &m, &k);
        int64_t at = wide ? (k0 + k) * ld + m0 + m : (m0 + m) * ld + k0 + k;
        value[e] = m0 + m < M && k0 + k < K ? ((const float *)x)[at] : 0;
    }
}

DEVFN void step_store(float *to, const float value[4], bool wide) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int m, k, at = step_at(e, wide, &m, &k);
        to[at] = value[e];
    }
}

template <bool TA, bool TB> DEVFN void product_f32(const product *p, int down, int across) {
    SIMT_SHARED(float, as, F32_STEP *F32_ROW); /* [k][m] */
    SIMT_SHARED(float, bs, F32_STEP *F32_ROW); /* [k][n] */
    int64_t m = (int64_t)down * F32_TILE, n = (int64_t)across * F32_TILE;
    int row = (int)threadIdx.x / 16 * 4, column = (int)threadIdx.x % 16 * 4;
    float sum[4][4], a[4], b[4];
#pragma unroll
    for (int i = 0; i < 16; i++) sum[i / 4][i % 4] = 0;
    step_fetch(a, p->a, p->lda, TA, m, 0, p->M, p->K);
    step_fetch(b, p->b, p->ldb, !TB, n, 0, p->N, p->K);
    for (int64_t k = 0; k < p->K; k += F32_STEP) {
        step_store(as, a, TA);
        step_store(bs, b, !TB);
        SYNCTHREADS();
        if (k + F32_STEP < p->K) {
            step_fetch(a, p->a, p->lda, TA, m, k + F32_STEP, p->M, p->K);
            step_fetch(b, p->b, p->ldb, !TB, n, k + F32_STEP, p->N, p->K);
        }
#pragma unroll
        for (int i = 0; i < F32_STEP; i++) {
            float x[4], y[4];
            load4(x, as + i * F32_ROW + row);
            load4(y, bs + i * F32_ROW + column);
#pragma unroll
            for (int e = 0; e < 16; e++) sum[e / 4][e % 4] += x[e / 4] * y[e % 4];
        }
        SYNCTHREADS(); /* before the next step takes their place */
    }
    for (int e = 0; e < 4 && m + row + e < p->M; e++)
        for (int f = 0; f < 4 && n + column + f < p->N; f++) {
            float *c = (float *)p->c + (m + row + e) * p->ldc + n + column + f;
            *c = p->add ? *c + sum[e][f] : sum[e][f];
        }
}

/* A type's tile. */
template <bool F32, bool TA, bool TB>
DEVFN void product_tile(const product *p, int down, int across) {
    if (F32)
        product_f32<TA, TB>(p, down, across);
    else
        product_bf16<TA, TB>(p, down, across);
}

/* Kernels. */

/* Blocks in the order of bands of 8 row tiles, down the rows first: neighbours share operands. */
template <bool F32, bool TA, bool TB>
__global__ void __launch_bounds__(256, 2) gemm_kernel(product p) {
    const int64_t tile = F32 ? F32_TILE : TILE;
    unsigned down = (unsigned)((p.M + tile - 1) / tile);
    unsigned across = (unsigned)((p.N + tile - 1) / tile);
    unsigned band = down < 8 ? down : 8, i = blockIdx.x % (band * across);
    unsigned first = blockIdx.x / (band * across) * band;
    unsigned high = down - first < band ? down - first : band;
    product_tile<F32, TA, TB>(&p, (int)(first + i % high), (int)(i / high));
}

/* Row tile `i` counted through all groups: its group, and which tile of it. False when the
 * groups have fewer. By whole warps. */
DEVFN bool find_row_tile(const int64_t *offsets, int G, int i, int tile, int *group_p,
                         int *within_p) {
    int lane = (int)threadIdx.x & 31;
    for (int first = 0; first < G; first += 32) {
        int g = first + lane;
        int own = g < G ? (int)((offsets[g + 1] - offsets[g] + tile - 1) / tile) : 0, sum = own;
        for (int step = 1; step < 32; step *= 2) {
            int below = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += below;
        }
        unsigned beyond = __ballot_sync(~0u, i < sum);
        if (beyond) {
            int lowest = __ffs((int)beyond) - 1;
            *group_p = first + lowest;
            *within_p = i - __shfl_sync(~0u, sum - own, lowest);
            return true;
        }
        i -= __shfl_sync(~0u, sum, 31);
    }
    return false;
}

/* p: all groups as one product, B that of group 0 and M unknown. */
template <bool F32, bool TB>
__global__ void __launch_bounds__(256, 2) grouped_kernel(product p, int G, const int64_t *offsets) {
    const int tile = F32 ? F32_TILE : TILE;
    const int64_t width = F32 ? 4 : 2;
    const unsigned across = (unsigned)((p.N + tile - 1) / tile);
    int group, within;
    if (!find_row_tile(offsets, G, (int)(blockIdx.x / across), tile, &group, &within)) return;
    int64_t begin = offsets[group];
    p.M = offsets[group + 1] - begin;
    p.a = (const char *)p.a + begin * p.lda * width;
    p.b = (const char *)p.b + group * p.N * p.K * width;
    p.c = (char *)p.c + begin * p.ldc * (p.c_is_f32 ? 4 : 2);
    product_tile<F32, false, TB>(&p, within, (int)(blockIdx.x % across));
}

/* p: group 0's product, K unknown; group = blockIdx.y. */
template <bool F32>
__global__ void __launch_bounds__(256, 2) weight_kernel(product p, const int64_t *offsets) {
    const int64_t tile = F32 ? F32_TILE : TILE, width = F32 ? 4 : 2;
    unsigned across = (unsigned)((p.N + tile - 1) / tile);
    int64_t begin = offsets[blockIdx.y];
    p.K = offsets[blockIdx.y + 1] - begin;
    p.a = (const char *)p.a + begin * p.lda * width;
    p.b = (const char *)p.b + begin * p.ldb * width;
    p.c = (float *)p.c + blockIdx.y * p.M * p.N;
    product_tile<F32, true, false>(&p, (int)(blockIdx.x / across), (int)(blockIdx.x % across));
}

/* Launchers. */

static int64_t tiles(int64_t n, bool f32) {
    int64_t tile = f32 ? F32_TILE : TILE;
    return (n + tile - 1) / tile;
}

template <bool F32, bool TA, bool TB> static void launch_gemm(tr_stream *s, const product *p) {
    int64_t blocks = tiles(p->M, F32) * tiles(p->N, F32);
    size_t shared = F32 ? 0 : SHARED_BYTES;
    if (!F32) SIMT_MAX_SMEM((gemm_kernel<F32, TA, TB>), SHARED_BYTES);
    LAUNCH((gemm_kernel<F32, TA, TB>), (unsigned)blocks, 256, shared, s->handle)(*p);
    tr_cuda_launched(s, "gemm");
}

template <bool F32> static void launch_gemm_by(tr_stream *s, const product *p, bool ta, bool tb) {
    if (ta && tb)
        launch_gemm<F32, true, true>(s, p);
    else if (ta)
        launch_gemm<F32, true, false>(s, p);
    else if (tb)
        launch_gemm<F32, false, true>(s, p);
    else
        launch_gemm<F32, false, false>(s, p);
}

static void gemm(tr_stream *s, const tr_gemm *g) {
    if (g->M == 0 || g->N == 0) return;
    product p = {g->A,
                 g->B,
                 g->C,
                 g->M,
                 g->N,
                 g->K,
                 g->lda,
                 g->ldb,
                 g->ldc,
                 tile_is_vector(g->A, g->lda),
                 tile_is_vector(g->B, g->ldb),
                 g->c == TR_F32,
                 g->beta != 0};
    if (g->ab == TR_F32)
        launch_gemm_by<true>(s, &p, g->trans_a, g->trans_b);
    else
        launch_gemm_by<false>(s, &p, g->trans_a, g->trans_b);
}

template <bool F32, bool TB>
static void launch_grouped(tr_stream *s, const product *p, int64_t G, const int64_t *offsets) {
    /* groups end inside a tile: each may take one tile more than its share of rows */
    int64_t blocks = (p->M / (F32 ? F32_TILE : TILE) + G) * tiles(p->N, F32);
    size_t shared = F32 ? 0 : SHARED_BYTES;
    if (!F32) SIMT_MAX_SMEM((grouped_kernel<F32, TB>), SHARED_BYTES);
    LAUNCH((grouped_kernel<F32, TB>), (unsigned)blocks, 256, shared, s->handle)
    (*p, (int)G, offsets);
    tr_cuda_launched(s, "grouped_gemm");
}

static void grouped_gemm(tr_stream *s, tr_dtype ab, tr_dtype c, int64_t G, const int64_t *offsets,
                         int64_t max_rows, const void *X, const void *W, bool trans_w, void *Y,
                         int64_t N, int64_t K, float beta) {
    if (G == 0 || N == 0 || max_rows == 0) return;
    int64_t ldb = trans_w ? K : N;
    bool whole = N * K % 8 == 0; /* every group's W starts at a multiple of 16 bytes */
    product p = {X,
                 W,
                 Y,
                 max_rows,
                 N,
                 K,
                 K,
                 ldb,
                 N,
                 tile_is_vector(X, K),
                 whole && tile_is_vector(W, ldb),
                 c == TR_F32,
                 beta != 0};
    if (ab == TR_F32 && trans_w)
        launch_grouped<true, true>(s, &p, G, offsets);
    else if (ab == TR_F32)
        launch_grouped<true, false>(s, &p, G, offsets);
    else if (trans_w)
        launch_grouped<false, true>(s, &p, G, offsets);
    else
        launch_grouped<false, false>(s, &p, G, offsets);
}

template <bool F32>
static void launch_weight(tr_stream *s, const product *p, int64_t G, const int64_t *offsets) {
    dim3 grid((unsigned)(tiles(p->M, F32) * tiles(p->N, F32)), (unsigned)G);
    size_t shared = F32 ? 0 : SHARED_BYTES;
    if (!F32) SIMT_MAX_SMEM((weight_kernel<F32>), SHARED_BYTES);
    LAUNCH((weight_kernel<F32>), grid, 256, shared, s->handle)(*p, offsets);
    tr_cuda_launched(s, "grouped_gemm_weight");
}

static void grouped_gemm_weight(tr_stream *s, tr_dtype ab, int64_t G, const int64_t *offsets,
                                int64_t max_rows, const void *dY, const void *X, float *dW,
                                int64_t N, int64_t K, float beta) {
    (void)max_rows;
    if (G == 0 || N == 0 || K == 0) return;
    product p = {dY,   X,        dW, N, K, 0, N, K, K, tile_is_vector(dY, N), tile_is_vector(X, K),
                 true, beta != 0};
    if (ab == TR_F32)
        launch_weight<true>(s, &p, G, offsets);
    else
        launch_weight<false>(s, &p, G, offsets);
}

extern "C" void tr_cuda_linear(tr_kernels *k) {
    k->gemm = gemm;
    k->grouped_gemm = grouped_gemm;
    k->grouped_gemm_weight = grouped_gemm_weight;
}
