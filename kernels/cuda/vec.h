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

/* Elements of one 16-byte access; where two types meet, as many of each as 16 bytes of the wider
 * one hold, so that neighbouring threads meet neighbouring bytes of both. */
template <class T> constexpr int WIDTH = 16 / (int)sizeof(T);
template <class A, class B> constexpr int MIXED = WIDTH<A> < WIDTH<B> ? WIDTH<A> : WIDTH<B>;

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

/* Four bf16, to be read and written as one number. */
typedef uint64_t __attribute__((may_alias)) bf16_four;

/* N neighbours: one element, four bf16, or units of 16 bytes; all but one must be aligned. */
template <int N> DEVFN void load(float (&v)[N], const float *from) {
    if (N == 1) v[0] = *from;
#pragma unroll
    for (int i = 0; i + 4 <= N; i += 4) unpack(v + i, ld128(from + i), from);
}
template <int N> DEVFN void load(float (&v)[N], const bf16 *from) {
    if (N == 1) v[0] = bf16_to_f32(*from);
    if (N == 4) {
        const uint64_t four = *(const bf16_four *)from;
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] = __int_as_float((int)((uint32_t)(four >> 16 * j & 0xffff) << 16));
    }
#pragma unroll
    for (int i = 0; i + 8 <= N; i += 8) unpack(v + i, ld128(from + i), from);
}

template <int N> DEVFN void store(float *to, const float (&v)[N]) {
    if (N == 1) *to = v[0];
#pragma unroll
    for (int i = 0; i + 4 <= N; i += 4) st128(to + i, pack(v + i, to));
}
template <int N> DEVFN void store(bf16 *to, const float (&v)[N]) {
    if (N == 1) *to = f32_to_bf16(v[0]);
    if (N == 4)
        *(bf16_four *)to =
            (uint64_t)pack_bf16x2(v[N / 2], v[N - 1]) << 32 | pack_bf16x2(v[0], v[N / 4]);
#pragma unroll
    for (int i = 0; i + 8 <= N; i += 8) st128(to + i, pack(v + i, to));
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
