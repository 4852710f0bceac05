/* simt.h - the only primitives that kernels use. One source, two worlds: nvcc builds it for GPUs,
 * a C++ compiler builds it for the host, where kernels/simt/ runs and checks every thread.
 * Floor: kernels.
 *
 * Launch     LAUNCH(kernel, grid, block, dynamic_bytes, stream)(arguments...)
 *            A kernel with template arguments stands in parentheses: LAUNCH((f<64, 32>), ...).
 *            SIMT_MAX_SMEM(kernel, bytes of the dynamic part) before a launch with more than 48 KB
 *            of shared memory, both parts together.
 * Shared     SIMT_SHARED(T, name, n)    T name[n], 16-byte aligned; n is a constant
 *            SIMT_DYN_SMEM(T, name)     T *name: the launch's dynamic shared memory
 * Barriers   SYNCTHREADS()   SYNCWARP(mask)   __syncthreads_or|and|count(predicate)
 * Warp       __shfl_sync, __shfl_up_sync, __shfl_down_sync, __shfl_xor_sync, __ballot_sync,
 *            __any_sync, __all_sync, __match_any_sync, __match_all_sync,
 *            __reduce_add|min|max|and|or|xor_sync (32-bit integers). None of them orders memory:
 *            that takes SYNCWARP.
 * Atomics    atomicAdd, Sub, Max, Min, And, Or, Xor, Exch, CAS on integers. Sums of floats by
 *            atomics would differ from run to run: sum in two stages.
 * bf16       bf16, bf16_to_f32, f32_to_bf16, pack_bf16x2(low, high): nearest even, NaN is 0x7fff
 * Vectors    uint4 ld128(p), st128(p, v): 16 aligned bytes in one request. Structs are not copied
 *            in any other way: on the host such a copy would not be checked.
 * Tiles      mma_m16n8k16_bf16(d, a, b, c)   D = A B + C, float accumulators; d may be c
 *            ldmatrix_x4(r, row), ldmatrix_x4_trans(r, row)   lane l gives row l % 8 of matrix l /
 * 8 Copies     cp_async16(shared, global, filled)   16 bytes, zeros unless filled cp_async_commit()
 * cp_async_wait<N>(): all but the N newest groups have arrived, for the calling thread; the others
 * see them after a barrier. Functions  DEVFN marks a function that kernels call.
 *
 * Blocks never wait for each other: no spinning, no grid barrier. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    uint16_t x; /* the upper half of a float's bits */
} bf16;

#ifdef __CUDACC__
#include "kernels/simt/simt_cuda.h"
#else
#include "kernels/simt/simt_host.h"
#endif
