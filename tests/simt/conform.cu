/* Property: warp operations, tile operations, bf16 and asynchronous copies give what the vendor
 * documents (documented.h). One program for g++ and nvcc: on both it prints a hash per section and
 * compares all words with the documented ones, so equal lines mean equal behaviour.
 * Exit codes: 0 all as documented, 1 not, 77 no GPU. */
#include "kernels/simt/simt.h"
#include "tests/simt/documented.h"

#include <stdio.h>
#include <stdlib.h>
#include <vector>

constexpr unsigned ALL = 0xffffffffu;
constexpr int WORDS = 8;            /* per lane and section */
constexpr int SECTION = 32 * WORDS; /* words */
enum { LDMATRIX, MMA, SHUFFLE, VOTE, ROUND, COPY, SECTIONS };
static const char *const section_names[SECTIONS] = {"ldmatrix", "mma",  "shuffle",
                                                    "vote",     "bf16", "cp.async"};

/* Small integers: products and sums are exact in any order. */
__host__ __device__ static inline int a_entry(int row, int column) {
    return (row * 5 + column * 3) % 15 - 7;
}
__host__ __device__ static inline int b_entry(int row, int column) {
    return (row * 7 + column * 11) % 13 - 6;
}
__host__ __device__ static inline int c_entry(int row, int column) {
    return row * 100 - column;
}

/* Lane l gives row 31 - l: matrices and rows in reversed order, with gaps between rows. */
constexpr int STRIDE = 24;
__global__ void ldmatrix_section(uint32_t *out) {
    SIMT_DYN_SMEM(bf16, s);
    int lane = (int)threadIdx.x;
    for (int i = lane; i < 32 * STRIDE; i += 32) s[i].x = (uint16_t)(i * 7 + 3);
    SYNCWARP(ALL);
    const bf16 *row = s + (31 - lane) * STRIDE;
    uint32_t plain[4], transposed[4];
    ldmatrix_x4(plain, row);
    ldmatrix_x4_trans(transposed, row);
    for (int i = 0; i < 4; i++) out[lane * WORDS + i] = plain[i];
    for (int i = 0; i < 4; i++) out[lane * WORDS + 4 + i] = transposed[i];
}
static void ldmatrix_documented(int lane, uint32_t *out) {
    for (int i = 0; i < 8; i++) {
        out[i] = 0;
        for (int half = 0; half < 2; half++) {
            position p = of_ldmatrix(lane, half, i >= 4);
            int row = 31 - (8 * (i % 4) + p.row);
            uint16_t element = (uint16_t)((row * STRIDE + p.column) * 7 + 3);
            out[i] |= (uint32_t)element << (16 * half);
        }
    }
}

/* Fragments come from the host, so that this section tests the operation alone. */
__global__ void mma_section(uint32_t *out, const uint32_t *a, const uint32_t *b, const float *c) {
    int lane = (int)threadIdx.x;
    uint32_t ra[4], rb[2];
    float rc[4], rd[4];
    for (int i = 0; i < 4; i++) ra[i] = a[lane * 4 + i];
    for (int i = 0; i < 2; i++) rb[i] = b[lane * 2 + i];
    for (int i = 0; i < 4; i++) rc[i] = c[lane * 4 + i];
    mma_m16n8k16_bf16(rd, ra, rb, rc);
    mma_m16n8k16_bf16(rc, ra, rb, rc);
    for (int i = 0; i < 4; i++) out[lane * WORDS + i] = (uint32_t)(int)rd[i];
    for (int i = 0; i < 4; i++) out[lane * WORDS + 4 + i] = (uint32_t)(int)rc[i];
}
static uint32_t pair_of(int low, int high) {
    return (uint32_t)rounded_bf16((float)low) | (uint32_t)rounded_bf16((float)high) << 16;
}
static void mma_fragments(uint32_t *a, uint32_t *b, float *c) {
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 4; i++) {
            position p = of_a(lane, 2 * i), q = of_a(lane, 2 * i + 1), r = of_c(lane, i);
            a[lane * 4 + i] = pair_of(a_entry(p.row, p.column), a_entry(q.row, q.column));
            c[lane * 4 + i] = (float)c_entry(r.row, r.column);
        }
        for (int i = 0; i < 2; i++) {
            position p = of_b(lane, 2 * i), q = of_b(lane, 2 * i + 1);
            b[lane * 2 + i] = pair_of(b_entry(p.row, p.column), b_entry(q.row, q.column));
        }
    }
}
static void mma_documented(int lane, uint32_t *out) {
    for (int i = 0; i < 4; i++) {
        position p = of_c(lane, i);
        int sum = c_entry(p.row, p.column);
        for (int k = 0; k < 16; k++) sum += a_entry(p.row, k) * b_entry(k, p.column);
        out[i] = out[4 + i] = (uint32_t)sum;
    }
}

__global__ void shuffle_section(uint32_t *out) {
    unsigned lane = threadIdx.x, v = lane * 3 + 1, *o = out + lane * WORDS;
    o[0] = __shfl_sync(ALL, v, (int)(lane * 7 % 32));
    o[1] = __shfl_up_sync(ALL, v, 5);
    o[2] = __shfl_down_sync(ALL, v, 6);
    o[3] = __shfl_xor_sync(ALL, v, 11);
    o[4] = __shfl_sync(ALL, v, 13, 8);
    o[5] = __shfl_up_sync(ALL, v, 3, 4);
    o[6] = __shfl_down_sync(ALL, v, 9, 16);
    o[7] = __shfl_xor_sync(ALL, v, 12, 8);
}
static void shuffle_documented(int lane, uint32_t *out) {
    const int mode[] = {0, 1, 2, 3, 0, 1, 2, 3}, width[] = {32, 32, 32, 32, 8, 4, 16, 8};
    const int delta[] = {lane * 7 % 32, 5, 6, 11, 13, 3, 9, 12};
    for (int i = 0; i < 8; i++)
        out[i] = (uint32_t)shuffle_source(mode[i], lane, width[i], delta[i]) * 3 + 1;
}

__global__ void vote_section(uint32_t *out) {
    unsigned lane = threadIdx.x, *o = out + lane * WORDS;
    unsigned mask = lane % 2 ? 0xaaaaaaaau : 0x55555555u; /* two halves, interleaved */
    int same = 0;
    o[0] = __ballot_sync(mask, lane % 3 == 1);
    o[1] = __match_any_sync(mask, lane % 5);
    o[2] = (unsigned)__reduce_add_sync(mask, (int)(lane * lane));
    o[3] = (unsigned)__reduce_min_sync(mask, 10 - (int)lane);
    o[4] = __reduce_max_sync(mask, 10 - lane);
    o[5] = __reduce_xor_sync(mask, lane * 77);
    o[6] = (unsigned)__any_sync(mask, lane == 4) + 2 * (unsigned)__all_sync(mask, lane != 4);
    o[7] = __match_all_sync(mask, lane % 2, &same) + (unsigned)same;
}
static void vote_documented(int lane, uint32_t *out) {
    for (int i = 0; i < 8; i++) out[i] = 0;
    out[3] = 0x7fffffffu;
    bool has_4 = false;
    for (int l = lane % 2; l < 32; l += 2) {
        out[0] |= (uint32_t)(l % 3 == 1) << l;
        out[1] |= (uint32_t)(l % 5 == lane % 5) << l;
        out[2] += (uint32_t)(l * l);
        if (10 - l < (int)out[3]) out[3] = (uint32_t)(10 - l);
        if (10u - (uint32_t)l > out[4]) out[4] = 10u - (uint32_t)l;
        out[5] ^= (uint32_t)l * 77;
        has_4 = has_4 || l == 4;
    }
    out[6] = has_4 ? 1 : 2;
    out[7] = (lane % 2 ? 0xaaaaaaaau : 0x55555555u) + 1;
}

/* 8 conversions per lane: the special values, then random bits; the last two as a pair. */
static uint32_t float_bits(int i) {
    unsigned state = (unsigned)i;
    uint32_t low = next_random(&state), high = next_random(&state);
    return i < SPECIAL_FLOATS ? special_floats[i] : low ^ high << 13;
}
__global__ void round_section(uint32_t *out, const float *in) {
    int lane = (int)threadIdx.x;
    const float *f = in + lane * WORDS;
    for (int i = 0; i < 6; i++) out[lane * WORDS + i] = f32_to_bf16(f[i]).x;
    out[lane * WORDS + 6] = pack_bf16x2(f[6], f[7]);
    float back = bf16_to_f32(f32_to_bf16(f[7]));
    out[lane * WORDS + 7] = (uint32_t)__float_as_int(back);
}
static void round_documented(int lane, uint32_t *out) {
    uint32_t h[8];
    for (int i = 0; i < 8; i++) h[i] = rounded_bf16(from_bits(float_bits(lane * WORDS + i)));
    for (int i = 0; i < 6; i++) out[i] = h[i];
    out[6] = h[6] | h[7] << 16;
    out[7] = h[7] << 16;
}

/* Two groups of copies; every third of the lanes gets zeros. */
__global__ void copy_section(uint32_t *out, const uint32_t *in) {
    SIMT_DYN_SMEM(uint32_t, s);
    int lane = (int)threadIdx.x;
    cp_async16(s + lane * 4, in + (lane * 5 % 32) * 4, lane % 3 != 0);
    cp_async_commit();
    cp_async16(s + 128 + lane * 4, in + 128 + lane * 4, true);
    cp_async_commit();
    cp_async_wait<1>();
    SYNCTHREADS();
    int from = (lane + 1) % 32;
    for (int i = 0; i < 4; i++) out[lane * WORDS + i] = s[from * 4 + i];
    cp_async_wait<0>();
    SYNCTHREADS();
    uint4 v = ld128(s + 128 + from * 4);
    st128(out + lane * WORDS + 4, v);
}
static uint32_t copied_word(int i) {
    return (uint32_t)i * 2654435761u;
}
static void copy_documented(int lane, uint32_t *out) {
    int from = (lane + 1) % 32;
    for (int i = 0; i < 4; i++) {
        out[i] = from % 3 ? copied_word(from * 5 % 32 * 4 + i) : 0;
        out[4 + i] = copied_word(128 + from * 4 + i);
    }
}

static void must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    printf("conform: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

static void *device_copy(const void *host, size_t bytes) {
    void *device;
    must(cudaMalloc(&device, bytes), "cudaMalloc");
    must(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    return device;
}

static void run(uint32_t *words) {
    std::vector<uint32_t> a(128), b(64), copied(256);
    std::vector<float> c(128), floats(SECTION);
    mma_fragments(a.data(), b.data(), c.data());
    for (int i = 0; i < SECTION; i++) floats[i] = from_bits(float_bits(i));
    for (int i = 0; i < 256; i++) copied[i] = copied_word(i);
    std::vector<uint32_t> zeros(SECTIONS * SECTION);
    uint32_t *out = (uint32_t *)device_copy(zeros.data(), zeros.size() * 4);
    uint32_t *d_a = (uint32_t *)device_copy(a.data(), 512);
    uint32_t *d_b = (uint32_t *)device_copy(b.data(), 256);
    float *d_c = (float *)device_copy(c.data(), 512);
    float *d_floats = (float *)device_copy(floats.data(), SECTION * 4);
    uint32_t *d_copied = (uint32_t *)device_copy(copied.data(), 1024);
    LAUNCH(ldmatrix_section, 1, 32, 32 * STRIDE * 2, 0)(out + LDMATRIX * SECTION);
    LAUNCH(mma_section, 1, 32, 0, 0)(out + MMA * SECTION, d_a, d_b, d_c);
    LAUNCH(shuffle_section, 1, 32, 0, 0)(out + SHUFFLE * SECTION);
    LAUNCH(vote_section, 1, 32, 0, 0)(out + VOTE * SECTION);
    LAUNCH(round_section, 1, 32, 0, 0)(out + ROUND * SECTION, d_floats);
    LAUNCH(copy_section, 1, 32, 1024, 0)(out + COPY * SECTION, d_copied);
    must(cudaGetLastError(), "launch");
    must(cudaMemcpy(words, out, zeros.size() * 4, cudaMemcpyDeviceToHost), "kernels");
    for (void *p :
         {(void *)out, (void *)d_a, (void *)d_b, (void *)d_c, (void *)d_floats, (void *)d_copied})
        must(cudaFree(p), "cudaFree");
}

static uint64_t fnv1a(const uint32_t *words, int n) {
    uint64_t hash = 14695981039346656037ull;
    for (int i = 0; i < n; i++) hash = (hash ^ words[i]) * 1099511628211ull;
    return hash;
}

int main() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        printf("conform: skipped: no GPU\n");
        return 77;
    }
    cudaDeviceProp device;
    must(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    printf("conform on %s\n", device.name);
    static void (*const documented[SECTIONS])(int lane, uint32_t *out) = {
        ldmatrix_documented, mma_documented,   shuffle_documented,
        vote_documented,     round_documented, copy_documented};
    std::vector<uint32_t> words(SECTIONS * SECTION);
    run(words.data());
    int differing = 0;
    for (int s = 0; s < SECTIONS; s++) {
        int wrong = 0;
        for (int lane = 0; lane < 32; lane++) {
            uint32_t want[WORDS];
            documented[s](lane, want);
            for (int i = 0; i < WORDS; i++) {
                uint32_t got = words[s * SECTION + lane * WORDS + i];
                if (got == want[i]) continue;
                if (!wrong++) printf("lane %d, word %d: %08x, not %08x\n", lane, i, got, want[i]);
            }
        }
        printf("%-9s %016llx %s\n", section_names[s],
               (unsigned long long)fnv1a(words.data() + s * SECTION, SECTION),
               wrong ? "NOT as documented" : "as documented");
        differing += wrong > 0;
    }
    return differing ? 1 : 0;
}
