/* moe.cu - sorting pairs of token and expert, and moving their rows. Floor: kernels.
 *
 * Rows are moved at the pace of memory. Bytes an element, b = bytes of the types: gather b + b,
 * combine (k + 1) b, its weight's gradient (1 + k) b while k is at most 4. Sorting takes three
 * kernels of N k pairs (sort.cu) and three small ones more, all without the host. Not measured on a
 * card yet. */
#include "kernels/cuda/sort.h"
#include "kernels/cuda/vec.h"

#include "kernels/makers.h"

/* --- sorting --------------------------------------------------------------------------------- */

/* The place of pair j of a row; P if it has none, or an earlier pair has the same. */
DEVFN int64_t place_of(const int32_t *index, const int32_t *place, int64_t j, int64_t P) {
    if (index[j] < 0) return P;
    const int64_t at = place ? place[index[j]] : index[j];
    if (at < 0) return P;
    for (int64_t i = 0; i < j && place; i++)
        if (index[i] >= 0 && place[index[i]] == at) return P;
    return at;
}

__global__ void sort_pairs(tr_cuda_pairs to, const int32_t *index, const int32_t *place, int64_t n,
                           int64_t P, int64_t k) {
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * THREADS) {
        to.key[i] = (uint32_t)place_of(index + i / k * k, place, i % k, P);
        to.value[i] = (int32_t)i;
    }
}

/* offsets[p] = how many keys are below p. */
__global__ void sort_offsets(int64_t *offsets, const uint32_t *key, int64_t n, int64_t P) {
    for (int64_t p = (int64_t)blockIdx.x * THREADS + threadIdx.x; p <= P;
         p += (int64_t)gridDim.x * THREADS) {
        int64_t low = 0, high = n;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (key[middle] < (uint32_t)p)
                low = middle + 1;
            else
                high = middle;
        }
        offsets[p] = low;
    }
}

__global__ void sort_rows(int32_t *row_of, int32_t *pair_of, tr_cuda_pairs sorted, int64_t n,
                          int64_t P) {
    for (int64_t r = (int64_t)blockIdx.x * THREADS + threadIdx.x; r < n;
         r += (int64_t)gridDim.x * THREADS) {
        const int32_t pair = sorted.value[r];
        const bool has_place = sorted.key[r] < (uint32_t)P;
        row_of[pair] = has_place ? (int32_t)r : -1;
        if (has_place) pair_of[r] = pair;
    }
}

static void moe_sort(tr_stream *s, int64_t *offsets, int32_t *row_of, int32_t *pair_of,
                     const int32_t *index, const int32_t *place, int64_t N, int64_t P, int64_t k) {
    const int64_t n = N * k;
    tr_cuda_sorter sorter = tr_cuda_sorter_in(tr_cuda_work(s, tr_cuda_sort_bytes(n)), n);
    if (n > 0) {
        LAUNCH(sort_pairs, blocks_for(n, THREADS), THREADS, 0, s->handle)
        (sorter.pairs, index, place, n, P, k);
        tr_cuda_launched(s, "moe_sort's pairs");
        tr_cuda_sort(s, &sorter, tr_cuda_key_bits(P + 1));
        LAUNCH(sort_rows, blocks_for(n, THREADS), THREADS, 0, s->handle)
        (row_of, pair_of, sorter.pairs, n, P);
        tr_cuda_launched(s, "moe_sort's rows");
    }
    LAUNCH(sort_offsets, blocks_for(P + 1, THREADS), THREADS, 0, s->handle)
    (offsets, sorter.pairs.key, n, P);
    tr_cuda_launched(s, "moe_sort's offsets");
}

/* --- moving rows ----------------------------------------------------------------------------- */

/* Units of 16 bytes, or elements; a team a row. */
template <class U>
__global__ void copy_rows(U *y, const U *x, const int32_t *from, int64_t divisor, tr_rows rows,
                          int64_t units, int size) {
    const int teams = THREADS / size, lane = (int)threadIdx.x % size;
    const int64_t used = used_rows(rows);
    for (int64_t r = (int64_t)blockIdx.x * teams + (int)threadIdx.x / size; r < used;
         r += (int64_t)gridDim.x * teams) {
        const U *row = x + from[r] / divisor * units;
        for (int64_t i = lane; i < units; i += size) copy_unit(y + r * units + i, row + i);
    }
}

template <class U>
static void launch_copy(tr_stream *s, void *y, const void *x, const int32_t *from, int64_t divisor,
                        tr_rows rows, int64_t units) {
    const int size = team_size(units, 1);
    LAUNCH((copy_rows<U>), blocks_for(rows.max, THREADS / size), THREADS, 0, s->handle)
    ((U *)y, (const U *)x, from, divisor, rows, units, size);
    tr_cuda_launched(s, "gather_rows");
}

static void gather_copies(tr_stream *s, tr_dtype t, void *y, const void *x, const int32_t *from,
                          int64_t divisor, tr_rows rows, int64_t H) {
    const int64_t bytes = H * (int64_t)tr_dtype_bytes(t);
    if (is_wide((char *)y, bytes) && is_wide((const char *)x, bytes))
        launch_copy<uint4>(s, y, x, from, divisor, rows, bytes / 16);
    else if (t == TR_BF16)
        launch_copy<uint16_t>(s, y, x, from, divisor, rows, H);
    else
        launch_copy<uint32_t>(s, y, x, from, divisor, rows, H);
}

template <class Y, class X, int N>
__global__ void gather(Y *y, const X *x, const int32_t *from, int64_t divisor, const float *weight,
                       tr_rows rows, int64_t H, int size) {
    const int teams = THREADS / size, lane = (int)threadIdx.x % size;
    const int64_t used = used_rows(rows);
    for (int64_t r = (int64_t)blockIdx.x * teams + (int)threadIdx.x / size; r < used;
         r += (int64_t)gridDim.x * teams) {
        const X *row = x + from[r] / divisor * H;
        const float w = weight ? weight[from[r]] : 1;
        for (int64_t h = lane * N; h < H; h += size * N) {
            float v[N];
            load(v, row + h);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] *= w;
            store(y + r * H + h, v);
        }
    }
}

template <class Y, class X, int N>
static void launch_gather(tr_stream *s, Y *y, const X *x, const int32_t *from, int64_t divisor,
                          const float *weight, tr_rows rows, int64_t H) {
    const int size = team_size(H, N);
    LAUNCH((gather<Y, X, N>), blocks_for(rows.max, THREADS / size), THREADS, 0, s->handle)
    (y, x, from, divisor, weight, rows, H, size);
    tr_cuda_launched(s, "gather_rows");
}

template <class Y, class X>
static void gather_typed(tr_stream *s, void *to, const void *of, const int32_t *from,
                         int64_t divisor, const float *weight, tr_rows rows, int64_t H) {
    Y *y = (Y *)to;
    const X *x = (const X *)of;
    if (is_wide(y, H) && is_wide(x, H))
        launch_gather<Y, X, MIXED<Y, X>>(s, y, x, from, divisor, weight, rows, H);
    else
        launch_gather<Y, X, 1>(s, y, x, from, divisor, weight, rows, H);
}

static void gather_rows(tr_stream *s, tr_dtype y_t, void *y, tr_dtype x_t, const void *x,
                        const int32_t *from, int64_t divisor, const float *weight, tr_rows rows,
                        int64_t H) {
    if (rows.max * H <= 0) return;
    if (y_t == x_t && !weight)
        gather_copies(s, y_t, y, x, from, divisor, rows, H);
    else if (y_t == TR_BF16 && x_t == TR_BF16)
        gather_typed<bf16, bf16>(s, y, x, from, divisor, weight, rows, H);
    else if (y_t == TR_BF16)
        gather_typed<bf16, float>(s, y, x, from, divisor, weight, rows, H);
    else if (x_t == TR_BF16)
        gather_typed<float, bf16>(s, y, x, from, divisor, weight, rows, H);
    else
        gather_typed<float, float>(s, y, x, from, divisor, weight, rows, H);
}

/* A team a token: each thread sums its elements of the token's rows. */
template <class Y, class X, int N>
__global__ void combine(Y *y, const X *x, const int32_t *row_of, const float *weight, float beta,
                        int64_t rows, int64_t k, int64_t H, int size) {
    const int teams = THREADS / size, lane = (int)threadIdx.x % size;
    for (int64_t n = (int64_t)blockIdx.x * teams + (int)threadIdx.x / size; n < rows;
         n += (int64_t)gridDim.x * teams)
        for (int64_t h = lane * N; h < H; h += size * N) {
            float sum[N] = {0}, v[N];
            if (beta != 0) {
                load(sum, y + n * H + h);
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] *= beta;
            }
            for (int64_t i = n * k; i < (n + 1) * k; i++) {
                const int64_t row = row_of[i];
                if (row < 0) continue;
                const float w = weight ? weight[i] : 1;
                load(v, x + row * H + h);
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] += w * v[j];
            }
            store(y + n * H + h, sum);
        }
}

template <class Y, class X, int N>
static void launch_combine(tr_stream *s, Y *y, const X *x, const int32_t *row_of,
                           const float *weight, float beta, int64_t rows, int64_t k, int64_t H) {
    const int size = team_size(H, N);
    LAUNCH((combine<Y, X, N>), blocks_for(rows, THREADS / size), THREADS, 0, s->handle)
    (y, x, row_of, weight, beta, rows, k, H, size);
    tr_cuda_launched(s, "combine_rows");
}

template <class Y, class X>
static void combine_typed(tr_stream *s, void *to, const void *from, const int32_t *row_of,
                          const float *weight, float beta, int64_t rows, int64_t k, int64_t H) {
    Y *y = (Y *)to;
    const X *x = (const X *)from;
    if (rows * H <= 0) return;
    if (is_wide(y, H) && is_wide(x, H))
        launch_combine<Y, X, MIXED<Y, X>>(s, y, x, row_of, weight, beta, rows, k, H);
    else
        launch_combine<Y, X, 1>(s, y, x, row_of, weight, beta, rows, k, H);
}

static void combine_rows(tr_stream *s, tr_dtype y_t, void *y, tr_dtype x_t, const void *x,
                         const int32_t *row_of, const float *weight, float beta, int64_t N,
                         int64_t k, int64_t H) {
    if (y_t == TR_BF16 && x_t == TR_BF16)
        combine_typed<bf16, bf16>(s, y, x, row_of, weight, beta, N, k, H);
    else if (y_t == TR_BF16)
        combine_typed<bf16, float>(s, y, x, row_of, weight, beta, N, k, H);
    else if (x_t == TR_BF16)
        combine_typed<float, bf16>(s, y, x, row_of, weight, beta, N, k, H);
    else
        combine_typed<float, float>(s, y, x, row_of, weight, beta, N, k, H);
}

enum { TOGETHER = 4 }; /* products of a token taken in one pass over its row */

/* A warp a token. */
template <class Y, class X, int N>
__global__ void combine_products(float *dweight, const Y *dy, const X *x, const int32_t *row_of,
                                 int64_t rows, int64_t k, int64_t H) {
    const int lane = (int)threadIdx.x % WARP;
    for (int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP; n < rows;
         n += (int64_t)gridDim.x * WARPS)
        for (int64_t first = 0; first < k; first += TOGETHER) {
            int64_t row[TOGETHER];
            float dot[TOGETHER] = {0}, d[N], v[N];
#pragma unroll
            for (int i = 0; i < TOGETHER; i++)
                row[i] = first + i < k ? row_of[n * k + first + i] : -1;
            for (int64_t h = lane * N; h < H; h += WARP * N) {
                load(d, dy + n * H + h);
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) {
                    if (row[i] < 0) continue;
                    load(v, x + row[i] * H + h);
#pragma unroll
                    for (int j = 0; j < N; j++) dot[i] += d[j] * v[j];
                }
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                const float sum = warp_sum(dot[i], WARP);
                if (lane == 0 && first + i < k) dweight[n * k + first + i] = sum;
            }
        }
}

template <class Y, class X>
static void products_typed(tr_stream *s, float *dweight, const void *gradient, const void *from,
                           const int32_t *row_of, int64_t rows, int64_t k, int64_t H) {
    const Y *dy = (const Y *)gradient;
    const X *x = (const X *)from;
    if (rows * k <= 0) return;
    if (is_wide(dy, H) && is_wide(x, H))
        LAUNCH((combine_products<Y, X, MIXED<Y, X>>), blocks_for(rows, WARPS), THREADS, 0,
               s->handle)
    (dweight, dy, x, row_of, rows, k, H);
    else LAUNCH((combine_products<Y, X, 1>), blocks_for(rows, WARPS), THREADS, 0,
                s->handle)(dweight, dy, x, row_of, rows, k, H);
    tr_cuda_launched(s, "combine_rows_weight");
}

static void combine_rows_weight(tr_stream *s, float *dweight, tr_dtype dy_t, const void *dy,
                                tr_dtype x_t, const void *x, const int32_t *row_of, int64_t N,
                                int64_t k, int64_t H) {
    if (dy_t == TR_BF16 && x_t == TR_BF16)
        products_typed<bf16, bf16>(s, dweight, dy, x, row_of, N, k, H);
    else if (dy_t == TR_BF16)
        products_typed<bf16, float>(s, dweight, dy, x, row_of, N, k, H);
    else if (x_t == TR_BF16)
        products_typed<float, bf16>(s, dweight, dy, x, row_of, N, k, H);
    else
        products_typed<float, float>(s, dweight, dy, x, row_of, N, k, H);
}

extern "C" void tr_cuda_moe(tr_kernels *k) {
    k->moe_sort = moe_sort;
    k->gather_rows = gather_rows;
    k->combine_rows = combine_rows;
    k->combine_rows_weight = combine_rows_weight;
    tr_cuda_router(k);
}
