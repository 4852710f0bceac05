/* simt_host.h - the primitives of simt.h for a host compiler, over the runtime of runtime.h.
 * Floor: kernels.
 *
 * __SANITIZE_THREAD__ means a checked kernel: -fsanitize=thread makes the compiler call a hook per
 * access, and the hooks are the runtime's (hooks.cc), not libtsan's. */
#pragma once
#include "kernels/simt/runtime.h"

#include <algorithm>
#include <tuple>
#include <type_traits>

#define SIMT_TEXT_(x) #x
#define SIMT_TEXT(x)  SIMT_TEXT_(x)
#define SIMT_SITE     __FILE__ ":" SIMT_TEXT(__LINE__)

#define threadIdx (simt_self->index)
#define blockIdx  simt_block_index
#define blockDim  simt_block_dim
#define gridDim   simt_grid_dim
static const int warpSize = 32;

/* Launch */

template <class... P> struct simt_launcher {
    void (*kernel)(P...);
    const char *name;
    dim3 grid, block;
    size_t dynamic_bytes;
    cudaStream_t stream;

    struct pack {
        void (*kernel)(P...);
        std::tuple<P...> arguments;
    };

    void operator()(P... arguments) const {
        simt_call call;
        call.name = name;
        call.kernel = reinterpret_cast<const void *>(kernel);
        call.grid = grid;
        call.block = block;
        call.dynamic_bytes = dynamic_bytes;
        call.body = [](void *p) {
            std::apply(static_cast<pack *>(p)->kernel, static_cast<pack *>(p)->arguments);
        };
        call.arguments = new pack{kernel, std::tuple<P...>(arguments...)};
        call.arguments_bytes = sizeof(pack);
        call.release = [](void *p) { delete static_cast<pack *>(p); };
        simt_launch(call, stream);
    }
};

template <class... P>
static inline simt_launcher<P...> simt_make_launcher(void (*kernel)(P...), const char *name,
                                                     dim3 grid, dim3 block, size_t dynamic_bytes,
                                                     cudaStream_t stream) {
    return simt_launcher<P...>{kernel, name, grid, block, dynamic_bytes, stream};
}

#define LAUNCH(kernel, grid, block, dynamic_bytes, stream)                                         \
    simt_make_launcher(kernel, #kernel, (grid), (block), (dynamic_bytes), (stream))
#define SIMT_MAX_SMEM(kernel, bytes)                                                               \
    simt_allow_shared(reinterpret_cast<const void *>(kernel), (size_t)(bytes))

/* Shared memory */

#define SIMT_DYN_SMEM(T, name) T *name = reinterpret_cast<T *>(simt_dynamic)
#define SIMT_SHARED(T, name, n)                                                                    \
    static const char name##_key_ = 0;                                                             \
    T(&name)[n] = simt_shared_array<T, n>(&name##_key_)

template <class T, size_t N> static inline T (&simt_shared_array(const void *key))[N] {
    return *reinterpret_cast<T(*)[N]>(simt_shared(key, sizeof(T) * N));
}

/* Barriers */

#define SYNCTHREADS()          ((void)simt_syncthreads(SIMT_SITE, SIMT_NO_VOTE, 0))
#define SYNCWARP(mask)         simt_syncwarp((mask), SIMT_SITE)
#define __syncthreads_or(p)    simt_syncthreads(SIMT_SITE, SIMT_VOTE_OR, (p) != 0)
#define __syncthreads_and(p)   simt_syncthreads(SIMT_SITE, SIMT_VOTE_AND, (p) != 0)
#define __syncthreads_count(p) simt_syncthreads(SIMT_SITE, SIMT_VOTE_COUNT, (p) != 0)
static inline void __threadfence() {} /* blocks run one after another */
static inline void __threadfence_block() {}

/* Warp collectives */

template <class T> static inline uint64_t simt_bits(T v) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "warp operations and atomics: 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    return bits;
}
template <class T> static inline T simt_value(uint64_t bits) {
    T v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

template <class T>
static inline T simt_lanes(unsigned mask, T v, simt_shfl_mode mode, const char *site, int argument,
                           int width = 32) {
    static_assert(std::is_arithmetic<T>::value, "shuffles take numbers");
    return simt_value<T>(simt_shfl(mask, simt_bits(v), mode, site, argument, width));
}
template <class T>
static inline unsigned simt_match_all(unsigned mask, T v, int *same, const char *site) {
    *same = simt_match(mask, simt_bits(v), site) == mask;
    return *same ? mask : 0;
}
static inline unsigned simt_reduce_min(unsigned mask, unsigned v, const char *site) {
    return simt_reduce(mask, v, SIMT_REDUCE_MIN_UNSIGNED, site);
}
static inline int simt_reduce_min(unsigned mask, int v, const char *site) {
    return (int)simt_reduce(mask, (unsigned)v, SIMT_REDUCE_MIN_SIGNED, site);
}
static inline unsigned simt_reduce_max(unsigned mask, unsigned v, const char *site) {
    return simt_reduce(mask, v, SIMT_REDUCE_MAX_UNSIGNED, site);
}
static inline int simt_reduce_max(unsigned mask, int v, const char *site) {
    return (int)simt_reduce(mask, (unsigned)v, SIMT_REDUCE_MAX_SIGNED, site);
}
template <class T> static inline T simt_reduce_add(unsigned mask, T v, const char *site) {
    static_assert(std::is_integral<T>::value && sizeof(T) == 4, "__reduce_add_sync: 32-bit");
    return (T)simt_reduce(mask, (unsigned)v, SIMT_REDUCE_ADD, site);
}

#define __shfl_sync(m, v, ...)          simt_lanes((m), (v), SIMT_SHFL_IDX, SIMT_SITE, __VA_ARGS__)
#define __shfl_up_sync(m, v, ...)       simt_lanes((m), (v), SIMT_SHFL_UP, SIMT_SITE, __VA_ARGS__)
#define __shfl_down_sync(m, v, ...)     simt_lanes((m), (v), SIMT_SHFL_DOWN, SIMT_SITE, __VA_ARGS__)
#define __shfl_xor_sync(m, v, ...)      simt_lanes((m), (v), SIMT_SHFL_XOR, SIMT_SITE, __VA_ARGS__)
#define __ballot_sync(mask, p)          simt_ballot((mask), (p) != 0, SIMT_SITE)
#define __any_sync(mask, p)             ((int)(simt_ballot((mask), (p) != 0, SIMT_SITE) != 0))
#define __all_sync(mask, p)             ((int)(simt_ballot((mask), (p) == 0, SIMT_SITE) == 0))
#define __match_any_sync(mask, v)       simt_match((mask), simt_bits(v), SIMT_SITE)
#define __match_all_sync(mask, v, same) simt_match_all((mask), (v), (same), SIMT_SITE)
#define __reduce_add_sync(mask, v)      simt_reduce_add((mask), (v), SIMT_SITE)
#define __reduce_min_sync(mask, v)      simt_reduce_min((mask), (v), SIMT_SITE)
#define __reduce_max_sync(mask, v)      simt_reduce_max((mask), (v), SIMT_SITE)
#define __reduce_and_sync(mask, v)      simt_reduce((mask), (v), SIMT_REDUCE_AND, SIMT_SITE)
#define __reduce_or_sync(mask, v)       simt_reduce((mask), (v), SIMT_REDUCE_OR, SIMT_SITE)
#define __reduce_xor_sync(mask, v)      simt_reduce((mask), (v), SIMT_REDUCE_XOR, SIMT_SITE)

/* Vector accesses and atomics. Threads give way only where they wait, so in fast mode a plain
 * read, change and write is atomic. */

#ifdef __SANITIZE_THREAD__
#define ld128(p)    simt_ld128(p)
#define st128(p, v) simt_st128((p), (v))
#else
DEVFN uint4 ld128(const void *p) {
    return *static_cast<const uint4 *>(p);
}
DEVFN void st128(void *p, uint4 v) {
    *static_cast<uint4 *>(p) = v;
}
#endif

template <class T> struct simt_same {
    typedef T type; /* no deduction from this argument: atomicAdd(&unsigned, 1) */
};
template <class T> using simt_same_t = typename simt_same<T>::type;

template <class T, class F> static inline T simt_atomic(T *p, F change) {
    static_assert(std::is_same<T, int>::value || std::is_same<T, unsigned>::value ||
                      std::is_same<T, unsigned long long>::value,
                  "atomics: int, unsigned or unsigned long long; sums of floats in two stages");
#ifdef __SANITIZE_THREAD__
    T old = simt_value<T>(simt_atomic_load(p, sizeof(T)));
    simt_atomic_store(p, simt_bits(change(old)), sizeof(T));
#else
    T old = *p;
    *p = change(old);
#endif
    return old;
}
template <class T> static inline T atomicAdd(T *p, simt_same_t<T> v) {
    return simt_atomic(p, [=](T o) -> T { return o + v; });
}
template <class T> static inline T atomicSub(T *p, simt_same_t<T> v) {
    return simt_atomic(p, [=](T o) -> T { return o - v; });
}
template <class T> static inline T atomicMax(T *p, simt_same_t<T> v) {
    return simt_atomic(p, [=](T o) -> T { return o > v ? o : v; });
}
template <class T> static inline T atomicMin(T *p, simt_same_t<T> v) {
    return simt_atomic(p, [=](T o) -> T { return o < v ? o : v; });
}
template <class T> static inline T atomicAnd(T *p, simt_same_t<T> v) {
    return simt_atomic(p, [=](T o) -> T { return o & v; });
}
template <class T> static inline T atomicOr(T *p, simt_same_t<T> v) {
    return simt_atomic(p, [=](T o) -> T { return o | v; });
}
template <class T> static inline T atomicXor(T *p, simt_same_t<T> v) {
    return simt_atomic(p, [=](T o) -> T { return o ^ v; });
}
template <class T> static inline T atomicExch(T *p, simt_same_t<T> v) {
    return simt_atomic(p, [=](T) -> T { return v; });
}
template <class T> static inline T atomicCAS(T *p, simt_same_t<T> old, simt_same_t<T> v) {
    return simt_atomic(p, [=](T o) -> T { return o == old ? v : o; });
}

/* bf16 */

DEVFN float bf16_to_f32(bf16 v) {
    uint32_t bits = (uint32_t)v.x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* PTX ISA, cvt: to nearest even, and every NaN becomes 0x7fff. */
DEVFN bf16 f32_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    bf16 r;
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        r.x = 0x7fff;
    else
        r.x = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    return r;
}

DEVFN uint32_t pack_bf16x2(float low, float high) {
    return (uint32_t)f32_to_bf16(low).x | (uint32_t)f32_to_bf16(high).x << 16;
}

/* Tiles and copies */

#define mma_m16n8k16_bf16(d, a, b, c)      simt_mma_m16n8k16((d), (a), (b), (c), SIMT_SITE)
#define ldmatrix_x4(r, row)                simt_ldmatrix((r), (row), false, SIMT_SITE)
#define ldmatrix_x4_trans(r, row)          simt_ldmatrix((r), (row), true, SIMT_SITE)
#define cp_async16(shared, global, filled) simt_cp_async16((shared), (global), (filled))
#define cp_async_commit()                  simt_cp_async_commit()
template <int N> DEVFN void cp_async_wait() {
    static_assert(N >= 0, "a count of groups");
    simt_cp_async_wait(N);
}

/* Functions of CUDA's headers that <math.h> lacks */

/* glibc has these names as its own, unusable */
#define __expf(x)    expf(x)
#define __logf(x)    logf(x)
#define __log2f(x)   log2f(x)
#define __powf(x, y) powf((x), (y))
#define __sinf(x)    sinf(x)
#define __cosf(x)    cosf(x)

using std::max;
using std::min;
template <class T> static inline T __ldg(const T *p) {
    return *p;
}
static inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
static inline float __fdividef(float a, float b) {
    return a / b;
}
static inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
static inline int __ffs(int x) {
    return __builtin_ffs(x);
}
static inline int __clz(int x) {
    return x ? __builtin_clz((unsigned)x) : 32;
}
static inline unsigned __float_as_uint(float f) {
    return (unsigned)simt_bits(f);
}
static inline int __float_as_int(float f) {
    return (int)simt_bits(f);
}
static inline float __uint_as_float(unsigned bits) {
    return simt_value<float>(bits);
}
static inline float __int_as_float(int bits) {
    return simt_value<float>((unsigned)bits);
}
