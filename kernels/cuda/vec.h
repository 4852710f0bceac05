/* vec.h - what the kernels over rows share: elements as floats, teams of threads that share a row,
 * sums in a fixed order. Floor: kernels.
 *
 * Kernels are written for N elements at a time: with 16-byte accesses where addresses, strides and
 * lengths allow it, else with N = 1. A thread of a row meets the same elements in every pass over
 * it: kernels may write a row over the one they read. */
#pragma once
#include "kernels/cuda/stream.h"
#include "kernels/kernels.h"
#include "kernels/simt/simt.h"

enum { THREADS = 256, WARP = 32, WARPS = THREADS / WARP };
/* Fills every card of today several times over; a kernel walks what is left in a loop. Few on the
 * host, so that tests meet the loop. */
#if defined(__CUDACC__)
constexpr int64_t MAX_BLOCKS = 4096;
#else
constexpr int64_t MAX_BLOCKS = 32;
#endif

/* Elements of one 16-byte access. */
template <class T> constexpr int WIDTH = 16 / (int)sizeof(T);

/* Blocks for so many items, `per_block` in each. */
static inline unsigned blocks_for(int64_t items, int64_t per_block) {
    int64_t blocks = (items + per_block - 1) / per_block;
    return (unsigned)(blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS);
}

/* Whether an array whose rows are `stride` elements apart can be read 16 bytes at a time. NULL can.
 */
template <class T> static inline bool is_wide(const T *p, int64_t stride) {
    return (uintptr_t)p % 16 == 0 && stride * (int64_t)sizeof(T) % 16 == 0;
}

/* --- elements ------------------------------------------------------------------------------ */

DEVFN float to_f32(float x) {
    return x;
}
DEVFN float to_f32(bf16 x) {
    return bf16_to_f32(x);
}
DEVFN void put(float *to, float x) {
    *to = x;
}
DEVFN void put(bf16 *to, float x) {
    *to = f32_to_bf16(x);
}

/* The four floats, or eight bf16, of 16 bytes. */
DEVFN void unpack(float *v, uint4 u, const float *) {
    v[0] = __int_as_float((int)u.x), v[1] = __int_as_float((int)u.y);
    v[2] = __int_as_float((int)u.z), v[3] = __int_as_float((int)u.w);
}
DEVFN void unpack(float *v, uint4 u, const bf16 *) {
    const uint32_t word[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        v[2 * j] = __int_as_float((int)(word[j] << 16));
        v[2 * j + 1] = __int_as_float((int)(word[j] & 0xffff0000u));
    }
}
DEVFN uint4 pack(const float *v, const float *) {
    return make_uint4((unsigned)__float_as_int(v[0]), (unsigned)__float_as_int(v[1]),
                      (unsigned)__float_as_int(v[2]), (unsigned)__float_as_int(v[3]));
}
DEVFN uint4 pack(const float *v, const bf16 *) {
    return make_uint4(pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]),
                      pack_bf16x2(v[6], v[7]));
}

/* N neighbours: one element, or whole aligned units of 16 bytes. */
template <int N, class T> DEVFN void load(float (&v)[N], const T *from) {
    if (N == 1) v[0] = to_f32(*from);
#pragma unroll
    for (int i = 0; N > 1 && i < N; i += WIDTH<T>) unpack(v + i, ld128(from + i), from);
}

template <int N, class T> DEVFN void store(T *to, const float (&v)[N]) {
    if (N == 1) put(to, v[0]);
#pragma unroll
    for (int i = 0; N > 1 && i < N; i += WIDTH<T>) st128(to + i, pack(v + i, to));
}

/* Copies one unit of a row bit by bit, or writes zeros if `from` is NULL. */
DEVFN void copy_unit(uint4 *to, const uint4 *from) {
    st128(to, from ? ld128(from) : make_uint4(0, 0, 0, 0));
}
DEVFN void copy_unit(uint32_t *to, const uint32_t *from) {
    *to = from ? *from : 0;
}
DEVFN void copy_unit(uint16_t *to, const uint16_t *from) {
    *to = from ? *from : (uint16_t)0;
}

/* --- teams --------------------------------------------------------------------------------- */

/* Threads that share a row of C elements, N at a time: the fewest that take it at once, but the
 * whole block for rows that take a warp more than four times. */
static inline int team_size(int64_t C, int N) {
    int size = 1;
    while (size < WARP && (int64_t)size * N < C) size *= 2;
    return C > 4 * WARP * N ? (int)THREADS : size;
}

/* Sum over `size` neighbouring lanes; all get the same bits. */
template <class R> DEVFN R warp_sum(R v, int size) {
    for (int o = size / 2; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}

/* Sum over the block. red: WARPS values of shared memory. */
template <class R> DEVFN R block_sum(R v, R *red) {
    const int lane = (int)threadIdx.x % WARP;
    v = warp_sum(v, WARP);
    if (lane == 0) red[threadIdx.x / WARP] = v;
    SYNCTHREADS();
    v = warp_sum(lane < WARPS ? red[lane] : (R)0, WARP);
    SYNCTHREADS();
    return v;
}

/* Sum over a team, up to a warp or the block. All threads of the block come here. */
template <class R> DEVFN R team_sum(R v, int size, R *red) {
    return size > WARP ? block_sum(v, red) : warp_sum(v, size);
}

/* *sum += the parts, in an order that their number fixes. One block. */
template <class R> __global__ void add_parts(R *sum, const R *part, int64_t parts) {
    SIMT_SHARED(R, red, WARPS);
    R total = 0;
    for (int64_t i = threadIdx.x; i < parts; i += THREADS) total += part[i];
    total = block_sum(total, red);
    if (threadIdx.x == 0) *sum += total;
}

DEVFN int64_t used_rows(tr_rows rows) {
    return rows.used && *rows.used < rows.max ? *rows.used : rows.max;
}
