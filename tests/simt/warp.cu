/* Property: shuffles of every mode and width, votes, matches, sums and atomics give what CUDA
 * documents, for full and partial masks, in warps that diverge and in a block's short last warp. */
#include "tests/simt/check.h"
#include "tests/simt/documented.h"

constexpr unsigned ALL = 0xffffffffu;

/* Shuffles: every mode, width and delta, against the documented source lane. */

__global__ void shuffles(int *out, int mode, int width, int delta) {
    int lane = (int)threadIdx.x, v = 100 + lane, got = 0;
    if (mode == 0) got = __shfl_sync(ALL, v, delta, width);
    if (mode == 1) got = __shfl_up_sync(ALL, v, delta, width);
    if (mode == 2) got = __shfl_down_sync(ALL, v, delta, width);
    if (mode == 3) got = __shfl_xor_sync(ALL, v, delta, width);
    out[lane] = got;
}

static void check_shuffles() {
    int *d_out = device_array<int>(32);
    for (int mode = 0; mode < 4; mode++)
        for (int width = 1; width <= 32; width *= 2)
            for (int delta = 0; delta < 32; delta++) {
                LAUNCH(shuffles, 1, 32, 0, 0)(d_out, mode, width, delta);
                std::vector<int> out = to_host(d_out, 32);
                for (int lane = 0; lane < 32; lane++) {
                    int want = 100 + shuffle_source(mode, lane, width, delta);
                    if (out[lane] != want)
                        CHECK(false, "mode %d, width %d, delta %d, lane %d: %d, not %d", mode,
                              width, delta, lane, out[lane], want);
                }
            }
    simt_free(d_out);
}

/* 8-byte values and floats */
__global__ void wide(double *d, unsigned long long *u, float *f) {
    int lane = (int)threadIdx.x;
    d[lane] = __shfl_xor_sync(ALL, 1.0 / (1 + lane), 31);
    u[lane] = __shfl_down_sync(ALL, (unsigned long long)lane << 40, 1);
    f[lane] = __shfl_sync(ALL, (float)lane / 3, 7);
}
static void check_wide() {
    double *d = device_array<double>(32);
    unsigned long long *u = device_array<unsigned long long>(32);
    float *f = device_array<float>(32);
    LAUNCH(wide, 1, 32, 0, 0)(d, u, f);
    for (int lane = 0; lane < 32; lane++) {
        CHECK(to_host(d, 32)[lane] == 1.0 / (1 + (lane ^ 31)), "double, lane %d", lane);
        unsigned long long want = (unsigned long long)(lane == 31 ? 31 : lane + 1) << 40;
        CHECK(to_host(u, 32)[lane] == want, "64 bits, lane %d", lane);
        CHECK(to_host(f, 32)[lane] == 7.0f / 3, "float, lane %d", lane);
    }
    simt_free(d);
    simt_free(u);
    simt_free(f);
}

/* Votes, matches and sums of the lanes of `mask`, in a branch that only they take. */

enum {
    BALLOT,
    ANY,
    ANY_NONE,
    EVERY,
    NOT_EVERY,
    MATCH,
    SAME,
    MATCH_ALL,
    ADD,
    MIN,
    MAX,
    UMIN,
    UMAX,
    AND,
    OR,
    XOR,
    SHFL,
    OPS
};

__global__ void partial(unsigned *out, unsigned mask) {
    unsigned lane = threadIdx.x % 32, *o = out + threadIdx.x * OPS;
    for (int i = 0; i < OPS; i++) o[i] = 0;
    if (!(mask >> lane & 1)) return;
    int v = (int)(lane * 7 % 11) - 5, same = -1;
    unsigned u = (unsigned)v, first = (unsigned)__ffs((int)mask) - 1;
    o[BALLOT] = __ballot_sync(mask, lane % 3 == 0);
    o[ANY] = (unsigned)__any_sync(mask, lane == first);
    o[ANY_NONE] = (unsigned)__any_sync(mask, lane > 31);
    o[EVERY] = (unsigned)__all_sync(mask, lane < 32);
    o[NOT_EVERY] = (unsigned)__all_sync(mask, lane != first);
    o[MATCH] = __match_any_sync(mask, v);
    o[MATCH_ALL] = __match_all_sync(mask, (int)(mask % 5), &same);
    o[SAME] = (unsigned)same;
    o[ADD] = (unsigned)__reduce_add_sync(mask, v);
    o[MIN] = (unsigned)__reduce_min_sync(mask, v);
    o[MAX] = (unsigned)__reduce_max_sync(mask, v);
    o[UMIN] = __reduce_min_sync(mask, u);
    o[UMAX] = __reduce_max_sync(mask, u);
    o[AND] = __reduce_and_sync(mask, u | 16);
    o[OR] = __reduce_or_sync(mask, 1u << lane);
    o[XOR] = __reduce_xor_sync(mask, u * 77);
    o[SHFL] = __shfl_sync(mask, lane * 3, (int)first);
}

static void want_partial(unsigned *o, unsigned lane, unsigned mask) {
    auto value = [](unsigned l) { return (int)(l * 7 % 11) - 5; };
    unsigned first = 0;
    while (!(mask >> first & 1)) first++;
    for (int i = 0; i < OPS; i++) o[i] = 0;
    if (!(mask >> lane & 1)) return;
    long sum = 0, low = 100, high = -100;
    unsigned ulow = ~0u, uhigh = 0, all_and = ~0u, all_xor = 0;
    for (unsigned l = 0; l < 32; l++) {
        if (!(mask >> l & 1)) continue;
        unsigned u = (unsigned)value(l);
        if (l % 3 == 0) o[BALLOT] |= 1u << l;
        if (value(l) == value(lane)) o[MATCH] |= 1u << l;
        sum += value(l);
        low = std::min(low, (long)value(l));
        high = std::max(high, (long)value(l));
        ulow = std::min(ulow, u);
        uhigh = std::max(uhigh, u);
        all_and &= u | 16;
        all_xor ^= u * 77;
    }
    o[ANY] = o[EVERY] = o[SAME] = 1;
    o[MATCH_ALL] = o[OR] = mask;
    o[ADD] = (unsigned)sum;
    o[MIN] = (unsigned)low;
    o[MAX] = (unsigned)high;
    o[UMIN] = ulow;
    o[UMAX] = uhigh;
    o[AND] = all_and;
    o[XOR] = all_xor;
    o[SHFL] = first * 3;
}

static void check_partial(unsigned mask) {
    constexpr size_t N = 96 * OPS;
    unsigned *d_out = device_array<unsigned>(N), want[OPS];
    LAUNCH(partial, 1, 96, 0, 0)(d_out, mask);
    std::vector<unsigned> out = to_host(d_out, N);
    for (unsigned t = 0; t < 96; t++) {
        want_partial(want, t % 32, mask);
        for (int i = 0; i < OPS; i++)
            CHECK(out[t * OPS + i] == want[i], "mask %08x, thread %u, operation %d: %x, not %x",
                  mask, t, i, out[t * OPS + i], want[i]);
    }
    simt_free(d_out);
}

/* Two halves of a warp shuffle apart, then together; the last warp of the block is short. */
__global__ void diverge(int *out) {
    int i = (int)threadIdx.x, lane = i % 32, v = i;
    unsigned all = i < 64 ? ALL : 0xfu;
    if (lane < 16 && i < 64)
        v += __shfl_xor_sync(0xffffu, v, 3);
    else if (i < 64)
        v += __shfl_xor_sync(0xffff0000u, v, 5);
    SYNCWARP(all);
    out[i] = v + __shfl_sync(all, v, 2);
}
static void check_diverge() {
    int *d_out = device_array<int>(68);
    LAUNCH(diverge, 1, 68, 0, 0)(d_out);
    auto first = [](int i) { return i >= 64 ? i : i + (i % 32 < 16 ? i ^ 3 : i ^ 5); };
    for (int i = 0; i < 68; i++) {
        int want = first(i) + first(i / 32 * 32 + 2);
        CHECK(to_host(d_out, 68)[i] == want, "thread %d", i);
    }
    simt_free(d_out);
}

/* Atomics: results that no order changes, and the values returned. */
__global__ void atomics(unsigned *u, int *s, unsigned long long *l, unsigned *returned) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    returned[i] = atomicAdd(&u[0], 1);
    atomicSub(&u[1], 2u);
    atomicMax(&s[0], (int)i - 50);
    atomicMin(&s[1], 50 - (int)i);
    atomicOr(&u[2], 1u << i % 32);
    atomicAnd(&u[3], ~(1u << i % 7));
    atomicXor(&u[4], i);
    atomicAdd(&l[0], 1ull << 33);
    atomicCAS(&u[5], 0, i + 1); /* the first wins */
    atomicExch(&u[6], i);       /* the last wins */
}
static void check_atomics() {
    constexpr unsigned N = 3 * 40;
    unsigned *u = to_device(std::vector<unsigned>{0, 0, 0, ~0u, 0, 0, N});
    int *s = to_device(std::vector<int>{-1000, 1000});
    unsigned long long *l = to_device(std::vector<unsigned long long>{5});
    unsigned *d_returned = device_array<unsigned>(N);
    LAUNCH(atomics, 3, 40, 0, 0)(u, s, l, d_returned);
    std::vector<unsigned> got = to_host(u, 7), returned = to_host(d_returned, N);
    unsigned all_xor = 0;
    std::vector<bool> seen(N);
    for (unsigned i = 0; i < N; i++) {
        all_xor ^= i;
        CHECK(returned[i] < N && !seen[returned[i]], "each count once: %u", returned[i]);
        seen[returned[i] % N] = true;
    }
    CHECK(got[0] == N && got[1] == 0u - 2 * N && got[2] == ~0u, "%u %u %x", got[0], got[1], got[2]);
    CHECK(got[3] == ~127u && got[4] == all_xor, "%x %x", got[3], got[4]);
    CHECK(got[5] >= 1 && got[5] <= N && got[6] < N, "%u %u", got[5], got[6]);
    std::vector<int> signs = to_host(s, 2);
    CHECK(signs[0] == (int)N - 51 && signs[1] == 51 - (int)N, "%d %d", signs[0], signs[1]);
    CHECK(to_host(l, 1)[0] == 5 + ((unsigned long long)N << 33), "64 bits");
    simt_free(u);
    simt_free(s);
    simt_free(l);
    simt_free(d_returned);
}

int main() {
    check_shuffles();
    check_wide();
    for (unsigned mask : {ALL, 1u, 0x80000000u, 0xffffu, 0x55555555u, 0x00f0a001u, 0xfffffffeu})
        check_partial(mask);
    check_diverge();
    check_atomics();
    CHECK(simt_errors() == 0, "reports of correct kernels");
    return check_result("warp operations and atomics");
}
