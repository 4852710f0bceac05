/* Property: each planted misuse of memory is reported with its source line, under every schedule,
 * and the correct twin is not. */
#include "tests/simt/planted.h"

constexpr unsigned ALL = 0xffffffffu;

/* Races in a block */

template <bool BUG> __global__ void missing_barrier(int *out) {
    SIMT_DYN_SMEM(int, s);
    int i = (int)threadIdx.x, n = (int)blockDim.x;
    s[i] = i;                /* bug missing_barrier */
    if (!BUG) SYNCTHREADS(); /* writes before reads */
    out[i] = s[n - 1 - i];   /* bug missing_barrier */
}
template <bool BUG> static void run_missing_barrier() {
    int *out = device_array<int>(128);
    LAUNCH(missing_barrier<BUG>, 1, 128, 512, 0)(out);
    simt_free(out);
}

template <bool BUG> __global__ void missing_syncwarp(int *out) {
    SIMT_SHARED(int, s, 32);
    int i = (int)threadIdx.x;
    s[i] = i;                           /* bug missing_syncwarp */
    int v = __shfl_xor_sync(ALL, i, 1); /* orders no memory */
    if (!BUG) SYNCWARP(ALL);            /* does */
    out[i] = s[31 - i] + v;             /* bug missing_syncwarp */
}
template <bool BUG> static void run_missing_syncwarp() {
    int *out = device_array<int>(32);
    LAUNCH(missing_syncwarp<BUG>, 1, 32, 0, 0)(out);
    simt_free(out);
}

/* The next round overwrites what others still read. */
template <bool BUG> __global__ void missing_loop_barrier(int *out) {
    SIMT_SHARED(int, s, 64);
    int i = (int)threadIdx.x, sum = 0;
    for (int round = 0; round < 3; round++) {
        s[i] = i + round; /* bug missing_loop_barrier */
        SYNCTHREADS();
        sum += s[(i + 32) % 64]; /* bug missing_loop_barrier */
        if (!BUG) SYNCTHREADS();
    }
    out[i] = sum;
}
template <bool BUG> static void run_missing_loop_barrier() {
    int *out = device_array<int>(64);
    LAUNCH(missing_loop_barrier<BUG>, 1, 64, 0, 0)(out);
    simt_free(out);
}

template <bool BUG> __global__ void not_atomic(int *out) {
    SIMT_SHARED(int, count, 4);
    int i = (int)threadIdx.x;
    if (i < 4) count[i] = 0;
    SYNCTHREADS();
    if (BUG)
        count[i % 4] += 1; /* bug not_atomic */
    else
        atomicAdd(&count[i % 4], 1);
    SYNCTHREADS();
    if (i < 4) out[i] = count[i];
}
template <bool BUG> static void run_not_atomic() {
    int *out = device_array<int>(4);
    LAUNCH(not_atomic<BUG>, 1, 96, 0, 0)(out);
    if (!BUG) CHECK(to_host(out, 4)[3] == 24, "atomics count");
    simt_free(out);
}

/* Races between blocks */

template <bool BUG> __global__ void between_blocks(unsigned *sum) {
    if (threadIdx.x) return;
    if (BUG)
        sum[0] += blockIdx.x; /* bug between_blocks */
    else
        atomicAdd(&sum[0], blockIdx.x);
}
template <bool BUG> static void run_between_blocks() {
    unsigned *sum = to_device(std::vector<unsigned>(1));
    LAUNCH(between_blocks<BUG>, 5, 32, 0, 0)(sum);
    if (!BUG) CHECK(to_host(sum, 1)[0] == 10, "atomics between blocks");
    simt_free(sum);
}

/* A block reads what another one writes: only a second launch may. */
__global__ void write_own(int *a) {
    if (threadIdx.x == 0) a[blockIdx.x] = 1;
}
template <bool BUG> __global__ void read_neighbour(int *a, int *out) {
    if (threadIdx.x) return;
    if (BUG) a[blockIdx.x] = 1;                        /* bug read_neighbour */
    out[blockIdx.x] = a[(blockIdx.x + 1) % gridDim.x]; /* bug read_neighbour */
}
template <bool BUG> static void run_read_neighbour() {
    int *a = to_device(std::vector<int>(6)), *out = device_array<int>(6);
    if (!BUG) LAUNCH(write_own, 6, 32, 0, 0)(a);
    LAUNCH(read_neighbour<BUG>, 6, 32, 0, 0)(a, out);
    simt_free(a);
    simt_free(out);
}

/* An atomic against a plain read */
template <bool BUG> __global__ void atomic_and_plain(int *count, int *out) {
    atomicAdd(count, 1);                                      /* bug atomic_and_plain */
    if (BUG && threadIdx.x == 40) out[blockIdx.x] = count[0]; /* bug atomic_and_plain */
    if (!BUG && threadIdx.x == 40) out[blockIdx.x] = atomicAdd(count, 0);
}
template <bool BUG> static void run_atomic_and_plain() {
    int *count = to_device(std::vector<int>(1)), *out = device_array<int>(1);
    LAUNCH(atomic_and_plain<BUG>, 1, 64, 0, 0)(count, out);
    simt_free(count);
    simt_free(out);
}

/* Bytes: neighbours share a granule of the shadow but not an address. */
template <bool BUG> __global__ void bytes(uint8_t *a) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    a[BUG ? i / 2 : i] = (uint8_t)i; /* bug bytes */
}
template <bool BUG> static void run_bytes() {
    uint8_t *a = device_array<uint8_t>(128);
    LAUNCH(bytes<BUG>, 2, 64, 0, 0)(a);
    simt_free(a);
}

/* Of 16 bytes read at once the last four alone are written by another warp. */
template <bool BUG> __global__ void end_of_vector(float *out) {
    SIMT_DYN_SMEM(float, s);
    int i = (int)threadIdx.x;
    for (int k = 0; k < 4; k++) s[4 * i + k] = 1;
    SYNCTHREADS();
    s[4 * i + 3] = 2; /* bug end_of_vector */
    if (!BUG) SYNCTHREADS();
    uint4 v = ld128(s + 4 * ((i + 32) % 64)); /* bug end_of_vector */
    out[i] = __int_as_float((int)v.w);
}
template <bool BUG> static void run_end_of_vector() {
    float *out = device_array<float>(64);
    LAUNCH(end_of_vector<BUG>, 1, 64, 1024, 0)(out);
    simt_free(out);
}

/* Memory that nobody wrote */

template <bool BUG> __global__ void unwritten_shared(float *out) {
    SIMT_DYN_SMEM(float, s);
    int i = (int)threadIdx.x;
    if (!BUG || i < 60) s[i] = 1;
    SYNCTHREADS();
    out[i] = s[63 - i]; /* bug unwritten_shared */
}
template <bool BUG> static void run_unwritten_shared() {
    float *out = device_array<float>(64);
    LAUNCH(unwritten_shared<BUG>, 1, 64, 256, 0)(out);
    simt_free(out);
}

__global__ void read_all(const bf16 *a, float *out) {
    out[threadIdx.x] = bf16_to_f32(a[threadIdx.x]); /* bug unwritten_global */
}
template <bool BUG> static void run_unwritten_global() {
    bf16 *a = device_array<bf16>(64);
    float *out = device_array<float>(64);
    simt_memset(a, 0, BUG ? 126 : 128);
    LAUNCH(read_all, 1, 64, 0, 0)(a, out);
    simt_free(a);
    simt_free(out);
}

/* The same of the last two of 16 bytes read at once. */
__global__ void read_vectors(const bf16 *a, float *out) {
    uint4 v = ld128(a + 8 * threadIdx.x); /* bug unwritten_vector */
    out[threadIdx.x] = __int_as_float((int)v.x);
}
template <bool BUG> static void run_unwritten_vector() {
    bf16 *a = device_array<bf16>(64);
    float *out = device_array<float>(8);
    simt_memset(a, 0, BUG ? 126 : 128);
    LAUNCH(read_vectors, 1, 8, 0, 0)(a, out);
    simt_free(a);
    simt_free(out);
}

/* A copy of unwritten memory is unwritten. */
template <bool BUG> static void run_unwritten_copy() {
    bf16 *a = device_array<bf16>(64), *b = device_array<bf16>(64);
    float *out = device_array<float>(64);
    if (!BUG) simt_memset(a, 0, 128);
    simt_memset(b, 0, 128);
    simt_d2d(b, a, 128);
    LAUNCH(read_all, 1, 64, 0, 0)(b, out);
    simt_free(a);
    simt_free(b);
    simt_free(out);
}

/* Bounds */

__global__ void fill(bf16 *a, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) a[i] = f32_to_bf16(1); /* bug beyond_global use_after_free */
}
template <bool BUG> static void run_beyond_global() {
    bf16 *a = device_array<bf16>(101), *b = device_array<bf16>(101);
    LAUNCH(fill, 4, 32, 0, 0)(a, BUG ? 102 : 101);
    simt_free(a);
    simt_free(b);
}
template <bool BUG> __global__ void before_global(float *a) {
    a[(int)threadIdx.x - BUG] = 0; /* bug before_global */
}
template <bool BUG> static void run_before_global() {
    float *a = device_array<float>(32);
    LAUNCH(before_global<BUG>, 1, 32, 0, 0)(a);
    simt_free(a);
}
template <bool BUG> __global__ void beyond_dynamic() {
    SIMT_DYN_SMEM(float, s);
    s[threadIdx.x + BUG] = 0; /* bug beyond_dynamic */
}
template <bool BUG> static void run_beyond_dynamic() {
    LAUNCH(beyond_dynamic<BUG>, 1, 32, 128, 0)();
}
template <bool BUG> __global__ void beyond_static() {
    SIMT_SHARED(float, s, 32);
    float *p = s;
    p[threadIdx.x + BUG] = 0; /* bug beyond_static */
}
template <bool BUG> static void run_beyond_static() {
    LAUNCH(beyond_static<BUG>, 1, 32, 0, 0)();
}
template <bool BUG> __global__ void beyond_array(float *out) {
    SIMT_SHARED(float, s, 32);
    s[threadIdx.x + BUG] = 1; /* bug beyond_array */
    out[threadIdx.x] = s[threadIdx.x];
}
template <bool BUG> static void run_beyond_array() {
    float *out = device_array<float>(32);
    LAUNCH(beyond_array<BUG>, 1, 32, 0, 0)(out);
    simt_free(out);
}
template <bool BUG> __global__ void beyond_registers(float *out, int n) {
    float r[4] = {1, 2, 3, 4}, sum = 0;
    for (int i = 0; i < n + BUG; i++) sum += r[i]; /* bug beyond_registers */
    out[threadIdx.x] = sum;
}
template <bool BUG> static void run_beyond_registers() {
    float *out = device_array<float>(32);
    LAUNCH(beyond_registers<BUG>, 1, 32, 0, 0)(out, 4);
    simt_free(out);
}

/* Freed memory stays unused while there is other room. */
template <bool BUG> static void run_use_after_free() {
    bf16 *a = device_array<bf16>(64);
    if (BUG) simt_free(a);
    bf16 *b = device_array<bf16>(64);
    LAUNCH(fill, 1, 64, 0, 0)(a, 64);
    if (!BUG) simt_free(a);
    simt_free(b);
}
static void run_double_free() {
    bf16 *a = device_array<bf16>(64);
    simt_free(a);
    simt_free(a);
}
template <bool BUG> static void run_copy_beyond() {
    std::vector<char> host(101);
    char *a = device_array<char>(100);
    simt_h2d(a, host.data(), 100 + BUG);
    simt_free(a);
}
static void run_copy_from_freed() {
    std::vector<char> host(100);
    char *a = device_array<char>(100);
    simt_free(a);
    simt_d2h(host.data(), a, 100);
}

/* Alignment */

template <bool BUG> __global__ void misaligned(float *a) {
    st128(a + 4 * threadIdx.x + 2 * BUG, make_uint4(0, 0, 0, 0)); /* bug misaligned */
}
template <bool BUG> static void run_misaligned() {
    float *a = device_array<float>(32 * 4 + 4);
    LAUNCH(misaligned<BUG>, 1, 32, 0, 0)(a);
    simt_free(a);
}

/* Host and device */

static void host_access_broken() {
    int *a = to_device(std::vector<int>(4));
    int v = a[1]; /* bug host_access */
    CHECK(v == 0, "%d", v);
    simt_free(a);
}
static void host_access_correct() {
    int *a = to_device(std::vector<int>(4));
    CHECK(to_host(a, 4)[1] == 0, "copied");
    simt_free(a);
}

__constant__ float table[4] = {1, 2, 3, 4};
__global__ void from_anywhere(float *out, const float *in) {
    out[threadIdx.x] = in[0] + table[threadIdx.x % 4]; /* bug host_memory */
}
template <bool BUG> static void run_host_memory() {
    std::vector<float> host(1);
    float *out = device_array<float>(32), *in = to_device(host);
    LAUNCH(from_anywhere, 1, 32, 0, 0)(out, BUG ? host.data() : in);
    simt_free(out);
    simt_free(in);
}
static void run_null() {
    float *out = device_array<float>(32);
    LAUNCH(from_anywhere, 1, 32, 0, 0)(out, nullptr);
    simt_free(out);
}

#define PAIR(f) f<true>, f<false>

int main() {
    const planted_case cases[] = {
        {"missing_barrier", "race", PAIR(run_missing_barrier)},
        {"missing_syncwarp", "race", PAIR(run_missing_syncwarp)},
        {"missing_loop_barrier", "race", PAIR(run_missing_loop_barrier)},
        {"not_atomic", "race", PAIR(run_not_atomic)},
        {"between_blocks", "race", PAIR(run_between_blocks)},
        {"read_neighbour", "race", PAIR(run_read_neighbour)},
        {"atomic_and_plain", "race", PAIR(run_atomic_and_plain)},
        {"bytes", "race", PAIR(run_bytes)},
        {"end_of_vector", "race", PAIR(run_end_of_vector)},
        {"unwritten_shared", "uninitialised read", PAIR(run_unwritten_shared)},
        {"unwritten_global", "uninitialised read", PAIR(run_unwritten_global)},
        {"unwritten_vector", "uninitialised read", PAIR(run_unwritten_vector)},
        {"unwritten_global", "uninitialised read", PAIR(run_unwritten_copy)},
        {"beyond_global", "out of bounds", PAIR(run_beyond_global)},
        {"before_global", "out of bounds", PAIR(run_before_global)},
        {"beyond_dynamic", "out of bounds", PAIR(run_beyond_dynamic)},
        {"beyond_static", "out of bounds", PAIR(run_beyond_static)},
        {"beyond_array", "array bounds", PAIR(run_beyond_array)},
        {"beyond_registers", "array bounds", PAIR(run_beyond_registers)},
        {"use_after_free", "use after free", PAIR(run_use_after_free)},
        {"double_free", "free", run_double_free, nullptr},
        {"copy_beyond", "out of bounds", PAIR(run_copy_beyond)},
        {"copy_from_freed", "out of bounds", run_copy_from_freed, nullptr},
        {"misaligned", "alignment", PAIR(run_misaligned)},
        {"host_access", "host access", host_access_broken, host_access_correct},
        {"host_memory", "host memory", PAIR(run_host_memory)},
        {"host_memory", "wild address", run_null, nullptr},
    };
    for (const planted_case &c : cases) run_case(c, __FILE__);
    return check_result("planted bugs of memory");
}
