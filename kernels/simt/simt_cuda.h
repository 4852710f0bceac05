/* simt_cuda.h - the primitives of simt.h for nvcc: thin macros and the only inline PTX.
 * Floor: kernels.
 *
 * Source of the instructions: PTX ISA 8.x, "mma", "ldmatrix", "cp.async", "cvt". */
#pragma once
#include <cuda_runtime.h>

#define DEVFN __device__ __forceinline__
#define LAUNCH(kernel, grid, block, dynamic_bytes, stream)                                         \
    kernel<<<(grid), (block), (dynamic_bytes), (stream)>>>
#define SIMT_SHARED(T, name, n) __shared__ __align__(16) T name[n]
#define SIMT_DYN_SMEM(T, name)                                                                     \
    extern __shared__ __align__(128) unsigned char simt_dynamic_[];                                \
    T *name = reinterpret_cast<T *>(simt_dynamic_)
#define SIMT_MAX_SMEM(kernel, bytes)                                                               \
    cudaFuncSetAttribute((const void *)(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,      \
                         (int)(bytes))
#define SYNCTHREADS()  __syncthreads()
#define SYNCWARP(mask) __syncwarp(mask)

DEVFN float bf16_to_f32(bf16 v) {
    return __uint_as_float((uint32_t)v.x << 16);
}

DEVFN bf16 f32_to_bf16(float f) {
    bf16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.x) : "f"(f));
    return r;
}

DEVFN uint32_t pack_bf16x2(float low, float high) { /* low in bits 0..15 */
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

DEVFN uint4 ld128(const void *p) {
    return *(const uint4 *)p;
}

DEVFN void st128(void *p, uint4 v) {
    *(uint4 *)p = v;
}

DEVFN uint32_t simt_shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

DEVFN void mma_m16n8k16_bf16(float d[4], const uint32_t a[4], const uint32_t b[2],
                             const float c[4]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]),
                   "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

DEVFN void ldmatrix_x4(uint32_t r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(simt_shared_address(row))
                 : "memory");
}

DEVFN void ldmatrix_x4_trans(uint32_t r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(simt_shared_address(row))
                 : "memory");
}

DEVFN void cp_async16(void *shared, const void *global, bool filled) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(simt_shared_address(shared)),
                 "l"(global), "r"(filled ? 16 : 0)
                 : "memory");
}

DEVFN void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> DEVFN void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
