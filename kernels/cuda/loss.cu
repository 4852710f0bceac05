/* loss.cu - embedding and cross-entropy. Floor: kernels.
 *
 * All are bound by memory. Bytes an element, b = bytes of the type: embedding 2b, and its backward
 * b an element of dy and 8 an element of each row of the table that occurs. Its tokens are sorted
 * first (sort.cu); then a warp sums a segment of up to 128 equal tokens over 32 neighbouring groups
 * of columns in row order, and a second kernel adds the segments after a token's first. So a token
 * that fills the batch is 128 + N/128 rows one after another, and moves 8/128 bytes an element
 * more. Cross-entropy reads each logit once for the loss (4), and again for the gradient (4 + b): a
 * row of a large vocabulary does not fit on a multiprocessor. Not measured on a card yet. */
#include "kernels/cuda/sort.h"
#include "kernels/cuda/vec.h"

#include "kernels/makers.h"

#include <math.h>

/* --- embedding ------------------------------------------------------------------------------- */

/* Rows of `units` units, a team each. */
template <class U>
__global__ void embed(U *y, const int32_t *token, const U *table, int64_t first, int64_t V,
                      int64_t N, int64_t units, int size) {
    const int teams = THREADS / size, lane = (int)threadIdx.x % size;
    for (int64_t n = (int64_t)blockIdx.x * teams + (int)threadIdx.x / size; n < N;
         n += (int64_t)gridDim.x * teams) {
        const int64_t row = token[n] - first;
        const U *from = row >= 0 && row < V ? table + row * units : NULL;
        for (int64_t i = lane; i < units; i += size)
            copy_unit(y + n * units + i, from ? from + i : NULL);
    }
}

template <class U>
static void launch_embed(tr_stream *s, void *y, const int32_t *token, const void *table,
                         int64_t first, int64_t V, int64_t N, int64_t units) {
    const int size = team_size(units, 1);
    LAUNCH((embed<U>), blocks_for(N, THREADS / size), THREADS, 0, s->handle)
    ((U *)y, token, (const U *)table, first, V, N, units, size);
    tr_cuda_launched(s, "embedding_forward");
}

static void embedding_forward(tr_stream *s, tr_dtype t, void *y, const int32_t *token,
                              const void *table, int64_t first, int64_t V, int64_t N, int64_t H) {
    const int64_t bytes = H * (int64_t)tr_dtype_bytes(t);
    if (N * H <= 0) return;
    if (is_wide((char *)y, bytes) && is_wide((const char *)table, bytes))
        launch_embed<uint4>(s, y, token, table, first, V, N, bytes / 16);
    else if (t == TR_BF16)
        launch_embed<uint16_t>(s, y, token, table, first, V, N, H);
    else
        launch_embed<uint32_t>(s, y, token, table, first, V, N, H);
}

/* Pairs of a row of the table and a row of dy; V for tokens that it has not. */
__global__ void embed_pairs(tr_cuda_pairs to, const int32_t *token, int64_t first, int64_t V,
                            int64_t N) {
    for (int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x; n < N;
         n += (int64_t)gridDim.x * THREADS) {
        const int64_t row = token[n] - first;
        to.key[n] = (uint32_t)(row >= 0 && row < V ? row : V);
        to.value[n] = (int32_t)n;
    }
}

enum {
    AHEAD = 8,    /* rows on their way at a time */
    SEGMENT = 128 /* rows that are summed one after another; whole warps */
};

/* How many of 32 pairs, `step` apart from p on, are of `row`, up to the first that is not. By whole
 * warps. */
DEVFN int count_same(const uint32_t *key, uint32_t row, int64_t p, int64_t step, int64_t rows) {
    const int64_t at = p + (int)threadIdx.x % WARP * step;
    const unsigned same = __ballot_sync(0xffffffffu, at < rows && key[at] == row);
    return same == ~0u ? (int)WARP : __ffs((int)~same) - 1;
}

/* Adds to sum[] columns c.. of `count` rows of x; lane i holds the number of the i-th. By whole
 * warps. */
template <int N, class T>
DEVFN void add_rows(float (&sum)[N], int number, int count, const T *x, int64_t H, int64_t c) {
    for (int first = 0; first < count; first += AHEAD) {
        float v[AHEAD][N];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int from = __shfl_sync(0xffffffffu, number, (first + i) % WARP);
            if (first + i < count && c < H) load(v[i], x + from * H + c);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int j = 0; j < N; j++)
                if (first + i < count && c < H) sum[j] += v[i][j];
    }
}

/* Adds the segment whose pairs begin at p: the rows of dy of the pairs of `row` there. */
template <int N, class T>
DEVFN void add_segment(float (&sum)[N], tr_cuda_pairs pairs, uint32_t row, int64_t p, int64_t rows,
                       const T *dy, int64_t H, int64_t c) {
    const int lane = (int)threadIdx.x % WARP;
    for (int64_t at = p, count = WARP; at < p + SEGMENT && count == WARP; at += WARP) {
        count = count_same(pairs.key, row, at, 1, rows);
        add_rows(sum, lane < count ? pairs.value[at + lane] : 0, (int)count, dy, H, c);
    }
}

/* The first pair of `row`, of those up to p, which is of it. */
DEVFN int64_t run_begin(const uint32_t *key, uint32_t row, int64_t p) {
    int64_t below = -1, at = p;
    while (at - below > 1) {
        const int64_t middle = below + (at - below) / 2;
        if (key[middle] == row)
            at = middle;
        else
            below = middle;
    }
    return at;
}

/* Where a segment after the first of its token begins, in the tile of SEGMENT pairs that p begins:
 * there is at most one, as segments are counted from their token's first pair. -1: there is none.
 */
DEVFN int64_t later_segment(const uint32_t *key, int64_t p, int64_t V, int64_t rows,
                            int64_t *begin_p) {
    const uint32_t row = key[p];
    if (row == (uint32_t)V || p == 0 || key[p - 1] != row) return -1;
    *begin_p = run_begin(key, row, p - 1);
    const int64_t at = *begin_p + (p - *begin_p + SEGMENT - 1) / SEGMENT * SEGMENT;
    return at < rows && key[at] == row ? at : -1;
}

/* An item is a pair and 32 N columns. The first pair of a token adds its first segment to the
 * table; the first of a tile leaves the later segment that begins there in rest[tile]. */
template <class T, int N>
__global__ void embed_sum(float *dtable, float *rest /* [tiles, H] */, tr_cuda_pairs pairs,
                          const T *dy, int64_t V, int64_t rows, int64_t H) {
    const int64_t chunks = (H + WARP * N - 1) / (WARP * N);
    for (int64_t item = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP; item < rows * chunks;
         item += (int64_t)gridDim.x * WARPS) {
        const int64_t p = item / chunks, c = (item % chunks * WARP + threadIdx.x % WARP) * N;
        const uint32_t row = pairs.key[p];
        float sum[N] = {0}, *to = dtable + row * H + c;
        if (row != (uint32_t)V && (p == 0 || pairs.key[p - 1] != row)) {
            if (c < H) load(sum, to);
            add_segment(sum, pairs, row, p, rows, dy, H, c);
            if (c < H) store(to, sum);
        } else if (p % SEGMENT == 0) {
            int64_t begin = 0;
            const int64_t at = later_segment(pairs.key, p, V, rows, &begin);
            if (at < 0) continue;
            add_segment(sum, pairs, row, at, rows, dy, H, c);
            if (c < H) store(rest + p / SEGMENT * H + c, sum);
        }
    }
}

/* An item is a tile and 32 N columns; the one with a token's second segment adds all its later
 * ones, which lie in tile after tile. */
template <int N>
__global__ void embed_rest(float *dtable, const float *rest, const uint32_t *key, int64_t V,
                           int64_t rows, int64_t H) {
    const int64_t chunks = (H + WARP * N - 1) / (WARP * N);
    const int64_t tiles = (rows + SEGMENT - 1) / SEGMENT;
    for (int64_t item = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP; item < tiles * chunks;
         item += (int64_t)gridDim.x * WARPS) {
        const int64_t c = (item % chunks * WARP + threadIdx.x % WARP) * N;
        int64_t tile = item / chunks, begin = 0;
        int64_t at = later_segment(key, tile * SEGMENT, V, rows, &begin);
        if (at < 0 || at - begin != SEGMENT) continue;
        const uint32_t row = key[at];
        float sum[N] = {0}, *to = dtable + row * H + c;
        if (c < H) load(sum, to);
        for (int count = WARP; count == WARP; at += WARP * SEGMENT, tile += WARP) {
            count = count_same(key, row, at, SEGMENT, rows);
            add_rows(sum, (int)tile + (int)threadIdx.x % WARP, count, rest, H, c);
        }
        if (c < H) store(to, sum);
    }
}

template <class T, int W>
static void launch_embed_sums(tr_stream *s, float *dtable, float *rest, tr_cuda_pairs pairs,
                              const T *dy, int64_t V, int64_t N, int64_t H) {
    const int64_t chunks = (H + WARP * W - 1) / (WARP * W);
    LAUNCH((embed_sum<T, W>), blocks_for(N * chunks, WARPS), THREADS, 0, s->handle)
    (dtable, rest, pairs, dy, V, N, H);
    tr_cuda_launched(s, "embedding_backward");
    if (N <= SEGMENT) return;
    LAUNCH((embed_rest<W>), blocks_for((N + SEGMENT - 1) / SEGMENT * chunks, WARPS), THREADS, 0,
           s->handle)
    (dtable, rest, pairs.key, V, N, H);
    tr_cuda_launched(s, "embedding_backward's later segments");
}

template <class T>
static void embed_backward(tr_stream *s, float *dtable, const int32_t *token, const T *dy,
                           int64_t first, int64_t V, int64_t N, int64_t H) {
    if (N * H <= 0 || V <= 0) return;
    const size_t sort_bytes = tr_cuda_sort_bytes(N);
    const size_t rest_bytes = (size_t)((N + SEGMENT - 1) / SEGMENT * H) * sizeof(float);
    char *work = (char *)tr_cuda_work(s, sort_bytes + rest_bytes);
    float *rest = (float *)(work + sort_bytes);
    tr_cuda_sorter sorter = tr_cuda_sorter_in(work, N);
    LAUNCH(embed_pairs, blocks_for(N, THREADS), THREADS, 0, s->handle)
    (sorter.pairs, token, first, V, N);
    tr_cuda_launched(s, "embedding_backward's pairs");
    tr_cuda_sort(s, &sorter, tr_cuda_key_bits(V + 1));
    if (is_wide(dy, H) && is_wide(dtable, H))
        launch_embed_sums<T, MIXED<T, float>>(s, dtable, rest, sorter.pairs, dy, V, N, H);
    else
        launch_embed_sums<T, 1>(s, dtable, rest, sorter.pairs, dy, V, N, H);
}

static void embedding_backward(tr_stream *s, tr_dtype t, float *dtable, const int32_t *token,
                               const void *dy, int64_t first, int64_t V, int64_t N, int64_t H) {
    if (t == TR_BF16)
        embed_backward(s, dtable, token, (const bf16 *)dy, first, V, N, H);
    else
        embed_backward(s, dtable, token, (const float *)dy, first, V, N, H);
}

/* --- cross-entropy --------------------------------------------------------------------------- */

typedef struct {
    float max, sum; /* of exp(x - max) */
} softmax_sum;

/* Takes N more logits. Of nothing, and of logits that are all -inf, max is -inf and sum 0; a NaN
 * stays in the sum. */
template <int N> DEVFN void take_logits(softmax_sum *s, const float (&x)[N]) {
    float max = s->max;
#pragma unroll
    for (int j = 0; j < N; j++) max = fmaxf(max, x[j]);
    const float base = max == -INFINITY ? 0 : max;
    if (max > s->max) s->sum *= expf(s->max - base);
#pragma unroll
    for (int j = 0; j < N; j++) s->sum += expf(x[j] - base);
    s->max = max;
}

/* Of x[V], by the whole block. */
template <int N> DEVFN softmax_sum sum_logits(const float *x, int64_t V, float *red) {
    softmax_sum s = {-INFINITY, 0};
    float v[N], one[1];
    const int64_t whole = V / N * N;
    for (int64_t c = (int64_t)threadIdx.x * N; c < whole; c += THREADS * N) {
        load(v, x + c);
        take_logits(&s, v);
    }
    if (whole + threadIdx.x < V) {
        load(one, x + whole + threadIdx.x);
        take_logits(&s, one);
    }
    float max = s.max;
    for (int o = WARP / 2; o > 0; o /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, o));
    if (threadIdx.x % WARP == 0) red[threadIdx.x / WARP] = max;
    SYNCTHREADS();
    for (int w = 0; w < WARPS; w++) max = fmaxf(max, red[w]);
    SYNCTHREADS();
    s.sum = block_sum(s.max == max ? s.sum : s.sum * expf(s.max - max), red);
    s.max = max;
    return s;
}

/* What a row's gradient is made of: scale (exp(x - max) inverse - onehot), or zeros. */
typedef struct {
    float max, inverse, scale;
    int64_t own; /* the label's column, if here */
    bool counts, in_place;
} gradient_row;

template <int N, class T>
DEVFN void write_logits(T *d, const float (&x)[N], int64_t c, const gradient_row &g) {
    float v[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float p = expf(x[j] - g.max) * g.inverse - (c + j == g.own ? 1 : 0);
        v[j] = g.counts ? g.scale * p : 0;
    }
    store(d + c, v);
}

/* d[V] may lie over x[V] when it is bf16: then a barrier stands between the reads of a strip and
 * its writes, which reach no further than what was read. */
template <int N, class T>
DEVFN void write_gradient(T *d, const float *x, int64_t V, const gradient_row &g) {
    for (int64_t at = 0; at < V; at += THREADS * N) {
        const int64_t c = at + (int64_t)threadIdx.x * N;
        const int here = V - c >= N ? N : V > c ? (int)(V - c) : 0;
        float v[N];
        if (here == N) {
            load(v, x + c);
        } else {
#pragma unroll
            for (int j = 0; j < N; j++) v[j] = j < here ? x[c + j] : 0;
        }
        if (g.in_place) SYNCTHREADS();
        if (here == N) write_logits(d, v, c, g);
#pragma unroll
        for (int j = 0; j < N && here < N; j++) {
            const float one[1] = {v[j]};
            if (j < here) write_logits(d, one, c + j, g);
        }
    }
}

typedef struct {
    const float *logits;
    int64_t ld;
    const int32_t *label;
    int64_t first, N, V, P; /* first and P, the parts, for a vocabulary in parts */
    const double *parts;
    float *loss;
    double *losses; /* work: of each row, to be added up */
    int64_t dlogits_ld;
    float scale;
    bool in_place;
} entropy_args;

/* The softmax over all parts of row n, with the label's logit. */
typedef struct {
    double max, sum, own;
} whole_row;

DEVFN whole_row sum_parts(const entropy_args &a, int64_t n) {
    whole_row r = {-INFINITY, 0, 0};
    for (int64_t p = 0; p < a.P; p++) r.max = fmax(r.max, a.parts[(p * a.N + n) * 3]);
    for (int64_t p = 0; p < a.P; p++) {
        const double *part = a.parts + (p * a.N + n) * 3;
        r.sum += part[1] * exp(part[0] - r.max);
        r.own += part[2];
    }
    return r;
}

/* A block a row: its sums from the logits themselves, or from the parts, the loss, the gradient. */
template <class T, bool WIDE, bool PARTS> __global__ void entropy(T *dlogits, entropy_args a) {
    SIMT_SHARED(float, red, WARPS);
    SIMT_SHARED(float, found, 2);
    constexpr int READ = WIDE ? 4 : 1, WRITE = WIDE ? MIXED<T, float> : 1;
    for (int64_t n = blockIdx.x; n < a.N; n += gridDim.x) {
        const float *x = a.logits + n * a.ld;
        const int64_t own = a.label[n] - a.first;
        const bool counts = a.label[n] >= 0;
        softmax_sum sum = {0, 1};
        if (counts && !PARTS) sum = sum_logits<READ>(x, a.V, red);
        if (threadIdx.x == 0) {
            whole_row r = {sum.max, sum.sum, 0};
            if (counts && PARTS) r = sum_parts(a, n);
            if (counts && !PARTS) r.own = (double)x[own];
            const double value = counts ? r.max + log(r.sum) - r.own : 0;
            if (a.loss) a.loss[n] = (float)value;
            if (a.losses) a.losses[n] = value;
            found[0] = (float)r.max;
            found[1] = (float)(1 / r.sum);
        }
        if (!dlogits) continue;
        SYNCTHREADS();
        const gradient_row g = {found[0], found[1], a.scale, own, counts, a.in_place};
        write_gradient<WRITE>(dlogits + n * a.dlogits_ld, x, a.V, g);
        SYNCTHREADS();
    }
}

template <class T, bool PARTS>
static void launch_entropy(tr_stream *s, T *dlogits, entropy_args a, double *loss_sum) {
    if (a.N <= 0) return;
    a.in_place = (const void *)dlogits == (const void *)a.logits && sizeof(T) < sizeof(float);
    a.losses = loss_sum ? (double *)tr_cuda_work(s, (size_t)a.N * sizeof(double)) : NULL;
    if (is_wide(a.logits, a.ld) && is_wide(dlogits, dlogits ? a.dlogits_ld : 0))
        LAUNCH((entropy<T, true, PARTS>), blocks_for(a.N, 1), THREADS, 0, s->handle)(dlogits, a);
    else
        LAUNCH((entropy<T, false, PARTS>), blocks_for(a.N, 1), THREADS, 0, s->handle)(dlogits, a);
    tr_cuda_launched(s, "cross_entropy");
    if (!loss_sum) return;
    LAUNCH((add_parts<double>), 1, THREADS, 0, s->handle)(loss_sum, a.losses, a.N);
    tr_cuda_launched(s, "cross_entropy's sum");
}

static void cross_entropy(tr_stream *s, tr_dtype t, const float *logits, int64_t ld,
                          const int32_t *label, float *loss, double *loss_sum, void *dlogits,
                          int64_t dlogits_ld, float scale, int64_t N, int64_t V) {
    const entropy_args a = {logits, ld,   label, 0,          N,     V,    0,
                            NULL,   loss, NULL,  dlogits_ld, scale, false};
    if (t == TR_BF16)
        launch_entropy<bf16, false>(s, (bf16 *)dlogits, a, loss_sum);
    else
        launch_entropy<float, false>(s, (float *)dlogits, a, loss_sum);
}

static void cross_entropy_whole(tr_stream *s, tr_dtype t, const double *parts, int64_t P,
                                const float *logits, int64_t ld, const int32_t *label,
                                int64_t first, float *loss, double *loss_sum, void *dlogits,
                                int64_t dlogits_ld, float scale, int64_t N, int64_t V) {
    const entropy_args a = {logits, ld,   label, first,      N,     V,    P,
                            parts,  loss, NULL,  dlogits_ld, scale, false};
    if (t == TR_BF16)
        launch_entropy<bf16, true>(s, (bf16 *)dlogits, a, loss_sum);
    else
        launch_entropy<float, true>(s, (float *)dlogits, a, loss_sum);
}

template <int N>
__global__ void entropy_part(double *part, const float *logits, int64_t ld, const int32_t *label,
                             int64_t first, int64_t rows, int64_t V) {
    SIMT_SHARED(float, red, WARPS);
    for (int64_t n = blockIdx.x; n < rows; n += gridDim.x) {
        const float *x = logits + n * ld;
        const int64_t own = label[n] - first;
        softmax_sum sum = {-INFINITY, 0};
        if (label[n] >= 0) sum = sum_logits<N>(x, V, red);
        if (threadIdx.x > 0) continue;
        part[3 * n] = (double)sum.max;
        part[3 * n + 1] = (double)sum.sum;
        part[3 * n + 2] = label[n] >= 0 && own >= 0 && own < V ? (double)x[own] : 0;
    }
}

static void cross_entropy_part(tr_stream *s, const float *logits, int64_t ld, const int32_t *label,
                               int64_t first, double *part, int64_t N, int64_t V) {
    if (N <= 0) return;
    if (is_wide(logits, ld)) LAUNCH((entropy_part<4>), blocks_for(N, 1), THREADS, 0, s->handle)
    (part, logits, ld, label, first, N, V);
    else LAUNCH((entropy_part<1>), blocks_for(N, 1), THREADS, 0, s->handle)(part, logits, ld, label,
                                                                            first, N, V);
    tr_cuda_launched(s, "cross_entropy_part");
}

extern "C" void tr_cuda_loss(tr_kernels *k) {
    k->embedding_forward = embedding_forward;
    k->embedding_backward = embedding_backward;
    k->cross_entropy = cross_entropy;
    k->cross_entropy_part = cross_entropy_part;
    k->cross_entropy_whole = cross_entropy_whole;
}
