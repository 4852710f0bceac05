/* Property: each planted misuse of barriers, warp operations, asynchronous copies and launches is
 * reported with its source line, under every schedule, and the correct twin is not. */
#include "tests/simt/planted.h"

constexpr unsigned ALL = 0xffffffffu;

/* Barriers */

template <bool BUG> __global__ void divergent_barrier(int *out) {
    int i = (int)threadIdx.x;
    if (BUG && i < 32)
        SYNCTHREADS(); /* bug divergent_barrier */
    else
        SYNCTHREADS(); /* bug divergent_barrier */
    out[i] = i;
}
template <bool BUG> static void run_divergent_barrier() {
    int *out = device_array<int>(64);
    LAUNCH(divergent_barrier<BUG>, 1, 64, 0, 0)(out);
    simt_free(out);
}

/* One half of a warp waits for the block, the other for the whole warp. */
template <bool BUG> __global__ void deadlock(int *out) {
    int i = (int)threadIdx.x, v = i;
    if (!BUG || i % 32 < 16) v = __shfl_xor_sync(ALL, v, 1); /* bug deadlock */
    SYNCTHREADS();                                           /* bug deadlock */
    out[i] = v;
}
template <bool BUG> static void run_deadlock() {
    int *out = device_array<int>(64);
    LAUNCH(deadlock<BUG>, 1, 64, 0, 0)(out);
    simt_free(out);
}

/* Fewer rounds for some threads: the others meet nobody at the barrier of the loop. */
template <bool BUG> __global__ void uneven_rounds(int *out) {
    SIMT_SHARED(int, s, 64);
    int i = (int)threadIdx.x;
    for (int round = 0; round < (BUG && i >= 32 ? 1 : 2); round++) {
        s[i] = round;
        SYNCTHREADS(); /* bug uneven_rounds */
    }
    SYNCTHREADS(); /* bug uneven_rounds */
    out[i] = s[63 - i];
}
template <bool BUG> static void run_uneven_rounds() {
    int *out = device_array<int>(64);
    LAUNCH(uneven_rounds<BUG>, 1, 64, 0, 0)(out);
    simt_free(out);
}

/* Warp operations */

template <bool BUG> __global__ void inactive_lane(int *out) {
    int i = (int)threadIdx.x, v = 0;
    if (i < 16) v = __shfl_sync(0xffffu, i, i + BUG); /* bug inactive_lane */
    out[i] = v;
}
template <bool BUG> static void run_inactive_lane() {
    int *out = device_array<int>(32);
    LAUNCH(inactive_lane<BUG>, 1, 32, 0, 0)(out);
    simt_free(out);
}

template <bool BUG> __global__ void mismatched_operation(unsigned *out) {
    unsigned i = threadIdx.x, v = 0;
    if (BUG && i % 2)
        v = __ballot_sync(ALL, i > 3); /* bug mismatched_operation */
    else
        v = __shfl_xor_sync(ALL, i, 1); /* bug mismatched_operation */
    out[i] = v;
}
template <bool BUG> static void run_mismatched_operation() {
    unsigned *out = device_array<unsigned>(32);
    LAUNCH(mismatched_operation<BUG>, 1, 32, 0, 0)(out);
    simt_free(out);
}

template <bool BUG> __global__ void mismatched_mask(unsigned *out) {
    unsigned i = threadIdx.x, mask = i < 16 ? 0xffffu : 0xffff0000u;
    if (BUG && i == 20) mask = ALL;
    out[i] = __match_any_sync(mask, i % 4); /* bug mismatched_mask */
}
template <bool BUG> static void run_mismatched_mask() {
    unsigned *out = device_array<unsigned>(32);
    LAUNCH(mismatched_mask<BUG>, 1, 32, 0, 0)(out);
    simt_free(out);
}

template <bool BUG> __global__ void not_in_mask(int *out) {
    unsigned mask = BUG ? 0xfffffffeu : ALL;
    out[threadIdx.x] = __reduce_add_sync(mask, (int)threadIdx.x); /* bug not_in_mask */
}
template <bool BUG> static void run_not_in_mask() {
    int *out = device_array<int>(32);
    LAUNCH(not_in_mask<BUG>, 1, 32, 0, 0)(out);
    simt_free(out);
}

__global__ void shuffle_width(int *out, int width) {
    out[threadIdx.x] = __shfl_down_sync(ALL, (int)threadIdx.x, 1, width); /* bug shuffle_width */
}
template <bool BUG> static void run_shuffle_width() {
    int *out = device_array<int>(32);
    LAUNCH(shuffle_width, 1, 32, 0, 0)(out, BUG ? 12 : 8);
    simt_free(out);
}

template <bool BUG> __global__ void part_of_mma(float *out) {
    uint32_t a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
    float c[4] = {1, 2, 3, 4};
    if (BUG && threadIdx.x == 9) return;
    mma_m16n8k16_bf16(c, a, b, c); /* bug part_of_mma */
    out[threadIdx.x] = c[3];
}
template <bool BUG> static void run_part_of_mma() {
    float *out = device_array<float>(32);
    LAUNCH(part_of_mma<BUG>, 1, 32, 0, 0)(out);
    simt_free(out);
}

template <int BUG> __global__ void ldmatrix_row(uint32_t *out, const bf16 *global) {
    SIMT_DYN_SMEM(bf16, s);
    uint32_t r[4];
    for (int i = (int)threadIdx.x; i < 512; i += 32) s[i] = f32_to_bf16(1);
    SYNCWARP(ALL);
    const bf16 *row = s + 8 * threadIdx.x;
    if (BUG == 1) row += 2;
    if (BUG == 2) row = global;
    if (BUG == 3) row += 512;
    ldmatrix_x4(r, row); /* bug ldmatrix_row */
    out[threadIdx.x] = r[3];
}
template <int BUG> static void run_ldmatrix_row() {
    bf16 *global = to_device(std::vector<bf16>(8));
    uint32_t *out = device_array<uint32_t>(32);
    LAUNCH(ldmatrix_row<BUG>, 1, 32, 1024, 0)(out, global);
    simt_free(out);
    simt_free(global);
}

/* Asynchronous copies */

/* Three tiles through two buffers; thread i copies 16 bytes and reads its neighbour's. */
enum pipeline_bug { NONE, SHORT_WAIT, NO_BARRIER, EARLY_REFILL, NO_WAIT };
template <int BUG> __global__ void pipeline(float *out, const float *in) {
    SIMT_DYN_SMEM(float, s);
    int i = (int)threadIdx.x;
    float sum = 0;
    cp_async16(s + 4 * i, in + 4 * i, true); /* bug short_wait no_wait */
    cp_async_commit();
    for (int tile = 0; tile < 3; tile++) {
        float *now = s + tile % 2 * 256, *next = s + (tile + 1) % 2 * 256;
        if (tile < 2) {
            const float *from = in + (tile + 1) * 256 + 4 * i;
            cp_async16(next + 4 * i, from, true); /* bug early_refill short_wait no_wait */
            cp_async_commit();
            if (BUG == SHORT_WAIT)
                cp_async_wait<2>();
            else if (BUG != NO_WAIT)
                cp_async_wait<1>(); /* bug no_barrier */
        } else if (BUG != NO_WAIT) {
            cp_async_wait<0>(); /* bug no_barrier */
        }
        if (BUG != NO_BARRIER) SYNCTHREADS();
        int k = 4 * ((i + 40) % 64);
        sum += now[k]; /* bug short_wait no_barrier early_refill no_wait */
        if (BUG != EARLY_REFILL) SYNCTHREADS();
    }
    out[i] = sum;
}
template <int BUG> static void run_pipeline() {
    std::vector<float> host(768);
    for (int i = 0; i < 768; i++) host[i] = (float)i;
    float *in = to_device(host), *out = device_array<float>(64);
    LAUNCH(pipeline<BUG>, 1, 64, 2048, 0)(out, in);
    if (BUG == NONE) {
        std::vector<float> got = to_host(out, 64);
        for (int i = 0; i < 64; i++) {
            float want = (float)(3 * (4 * ((i + 40) % 64)) + 256 + 512);
            CHECK(got[i] == want, "pipeline, thread %d: %g, not %g", i, got[i], want);
        }
    }
    simt_free(in);
    simt_free(out);
}

template <bool BUG> __global__ void exits_in_flight(const float *in) {
    SIMT_DYN_SMEM(float, s);
    cp_async16(s + 4 * threadIdx.x, in + 4 * threadIdx.x, threadIdx.x % 2);
    cp_async_commit();
    if (!BUG) cp_async_wait<0>();
}
template <bool BUG> static void run_exits_in_flight() {
    float *in = to_device(std::vector<float>(128));
    LAUNCH(exits_in_flight<BUG>, 1, 32, 512, 0)(in);
    simt_free(in);
}

template <bool BUG> __global__ void copy_alignment(const float *in) {
    SIMT_DYN_SMEM(float, s);
    cp_async16(s + 4 * threadIdx.x, in + 4 * threadIdx.x + BUG, true); /* bug copy_alignment */
    cp_async_commit();
    cp_async_wait<0>();
}
template <bool BUG> static void run_copy_alignment() {
    float *in = to_device(std::vector<float>(132));
    LAUNCH(copy_alignment<BUG>, 1, 32, 512, 0)(in);
    simt_free(in);
}

/* Launches */

__global__ void nothing() {}
__global__ void nothing_else() {}
template <bool BUG> static void run_shared_opt_in() {
    if (!BUG) SIMT_MAX_SMEM(nothing, 100 * 1024);
    LAUNCH(nothing, 1, 32, 100 * 1024, 0)();
}
static void run_shared_opt_in_other() { /* the opt-in is per kernel */
    SIMT_MAX_SMEM(nothing, 100 * 1024);
    LAUNCH(nothing_else, 1, 32, 100 * 1024, 0)();
}
static void run_shared_too_much() {
    SIMT_MAX_SMEM(nothing, 164 * 1024);
}

template <bool BUG> __global__ void static_too_much() {
    SIMT_SHARED(float, a, 8192);
    SIMT_SHARED(float, b, BUG ? 4097 : 4096);
    a[threadIdx.x] = b[threadIdx.x] = 0;
}
template <bool BUG> static void run_static_too_much() {
    LAUNCH(static_too_much<BUG>, 1, 32, 0, 0)();
}

/* Together they pass 48 KB, which neither does alone. */
template <bool BUG> __global__ void both_shared() {
    SIMT_DYN_SMEM(float, a);
    SIMT_SHARED(float, b, 32);
    a[threadIdx.x] = b[threadIdx.x] = 0;
}
template <bool BUG> static void run_shared_together() {
    if (!BUG) SIMT_MAX_SMEM(both_shared<BUG>, 48 * 1024);
    LAUNCH(both_shared<BUG>, 1, 32, 48 * 1024, 0)();
}

template <bool BUG> static void run_block_size() {
    LAUNCH(nothing, 1, BUG ? 1025 : 1024, 0, 0)();
}
template <bool BUG> static void run_empty_grid() {
    LAUNCH(nothing, BUG ? 0 : 1, 32, 0, 0)();
}
template <bool BUG> static void run_grid_size() {
    LAUNCH(nothing, dim3(1, BUG ? 65536 : 65, 1), 32, 0, 0)();
}

static int recurse(int n, volatile char *above) {             /* bug stack */
    volatile char here[512];                                  /* bug stack */
    here[0] = above[0];                                       /* bug stack */
    return n == 0 ? here[0] : recurse(n - 1, here) + here[0]; /* bug stack */
}
template <bool BUG> __global__ void deep(int *out, int n) {
    volatile char zero[1] = {0};
    out[threadIdx.x] = recurse(n, zero);
}
template <bool BUG> static void run_stack() {
    int *out = device_array<int>(32);
    LAUNCH(deep<BUG>, 1, 32, 0, 0)(out, BUG ? 1000 : 50);
    simt_free(out);
}

#define PAIR(f) f<true>, f<false>

int main() {
    const planted_case cases[] = {
        {"divergent_barrier", "divergent barrier", PAIR(run_divergent_barrier)},
        {"deadlock", "deadlock", PAIR(run_deadlock)},
        {"uneven_rounds", "divergent barrier", PAIR(run_uneven_rounds)},
        {"inactive_lane", "inactive lane", PAIR(run_inactive_lane)},
        {"mismatched_operation", "divergent warp operation", PAIR(run_mismatched_operation)},
        {"mismatched_mask", "deadlock", PAIR(run_mismatched_mask)},
        {"not_in_mask", "mask", PAIR(run_not_in_mask)},
        {"shuffle_width", "shuffle width", PAIR(run_shuffle_width)},
        {"part_of_mma", "mma", PAIR(run_part_of_mma)},
        {"ldmatrix_row", "ldmatrix", run_ldmatrix_row<1>, run_ldmatrix_row<0>},
        {"ldmatrix_row", "ldmatrix", run_ldmatrix_row<2>, nullptr},
        {"ldmatrix_row", "out of bounds", run_ldmatrix_row<3>, nullptr},
        {"short_wait", "cp.async", run_pipeline<SHORT_WAIT>, run_pipeline<NONE>},
        {"no_wait", "cp.async", run_pipeline<NO_WAIT>, nullptr},
        {"no_barrier", "race", run_pipeline<NO_BARRIER>, nullptr},
        {"early_refill", "race", run_pipeline<EARLY_REFILL>, nullptr},
        {"exits_in_flight", "copies at exit", PAIR(run_exits_in_flight)},
        {"copy_alignment", "alignment", PAIR(run_copy_alignment)},
        {"shared_opt_in", "shared memory", run_shared_opt_in_other, nullptr},
        {"static_too_much", "shared memory", PAIR(run_static_too_much)},
        {"shared_too_much", "shared memory", run_shared_too_much, nullptr},
        {"shared_together", "shared memory", PAIR(run_shared_together)},
        {"block_size", "launch", PAIR(run_block_size)},
        {"empty_grid", "launch", PAIR(run_empty_grid)},
        {"grid_size", "launch", PAIR(run_grid_size)},
        {"stack", "stack", PAIR(run_stack)},
    };
    run_case({"shared_opt_in", "shared memory", PAIR(run_shared_opt_in)}, __FILE__); /* first */
    for (const planted_case &c : cases) run_case(c, __FILE__);
    return check_result("planted bugs of synchronisation");
}
