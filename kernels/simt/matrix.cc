/* matrix.cc - mma.m16n8k16 and ldmatrix.x4 on the host.
 * Floor: kernels.
 *
 * Fragments as in PTX ISA, "Matrix Fragments for mma.m16n8k16": with g = lane / 4, t = lane % 4,
 * register r of A holds row g + 8 (r % 2), columns 2 t + 8 (r / 2) and the next; register r of B
 * rows 2 t + 8 r and the next of column g; value r of C and D row g + 8 (r / 2), column
 * 2 t + r % 2. Sums go in fp32 by rising k; tensor cores round in their own way. */
#include "kernels/simt/internal.h"

namespace simt {

namespace {

constexpr int M = 16, N = 8, K = 16;

struct mma_operands {
    float *d;
    const uint32_t *a, *b;
    const float *c;
};

struct ldmatrix_operands {
    uint32_t *r;
    const void *row;
    bool transposed;
    const void *pc;
};

/* Where g and t of a lane's fragments are. */
constexpr int row_of(int lane) {
    return lane / 4;
}
constexpr int column_of(int lane) {
    return 2 * (lane % 4);
}

/* The two bf16 of a register as floats, the lower first. */
void unpack(float *to, uint32_t pair) {
    uint64_t bits = (uint64_t)(pair & 0xffff0000u) << 32 | pair << 16;
    memcpy(to, &bits, sizeof bits);
}

typedef float float_row __attribute__((vector_size(N * sizeof(float))));

/* d += a b. No product is fused with its sum: the bits are the same on every processor. */
__attribute__((always_inline)) inline void multiply(float (*d)[N], const float (*a)[K],
                                                    const float (*b)[N]) {
    for (int i = 0; i < M; i += 4) {
        float_row sum[4], of_b;
        memcpy(sum, d[i], sizeof sum);
        for (int k = 0; k < K; k++) {
            memcpy(&of_b, b[k], sizeof of_b);
            for (int r = 0; r < 4; r++) sum[r] += a[i + r][k] * of_b;
        }
        memcpy(d[i], sum, sizeof sum);
    }
}

__attribute__((target("avx2"))) void multiply_avx2(float (*d)[N], const float (*a)[K],
                                                   const float (*b)[N]) {
    multiply(d, a, b);
}

void multiply_anywhere(float (*d)[N], const float (*a)[K], const float (*b)[N]) {
    multiply(d, a, b);
}

void compute_mma(warp &w, collective &c) {
    static const auto best = __builtin_cpu_supports("avx2") ? multiply_avx2 : multiply_anywhere;
    if (c.arrived != ~0u) {
        report("mma", nullptr, nullptr, "warp %d has exited lanes at %s: an mma takes all 32",
               w.index, c.site);
        return;
    }
    float a[M][K], b[K][N], d[M][N], pair[2];
    for (int lane = 0; lane < LANES; lane++) {
        const mma_operands &o = *static_cast<mma_operands *>(c.payload[lane]);
        int g = row_of(lane), t = column_of(lane);
        for (int r = 0; r < 4; r++) unpack(a[g + 8 * (r % 2)] + t + 8 * (r / 2), o.a[r]);
        for (int r = 0; r < 2; r++) {
            unpack(pair, o.b[r]);
            b[t + 8 * r][g] = pair[0];
            b[t + 8 * r + 1][g] = pair[1];
        }
        for (int r = 0; r < 2; r++) memcpy(d[g + 8 * r] + t, o.c + 2 * r, 2 * sizeof(float));
    }
    best(d, a, b);
    for (int lane = 0; lane < LANES; lane++) {
        const mma_operands &o = *static_cast<mma_operands *>(c.payload[lane]);
        int g = row_of(lane), t = column_of(lane);
        for (int r = 0; r < 2; r++) memcpy(o.d + 2 * r, d[g + 8 * r] + t, 2 * sizeof(float));
    }
}

/* Register i of lane l is the pair of elements 2 (l % 4) of row l / 4 of matrix i, or, transposed,
 * of column l / 4. The rows of matrix i are those that lanes 8 i to 8 i + 7 point to. */
void compute_ldmatrix(warp &w, collective &c) {
    if (c.arrived != ~0u) {
        report("ldmatrix", nullptr, nullptr, "warp %d has exited lanes at %s: it takes all 32",
               w.index, c.site);
        return;
    }
    const uint16_t *row[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        const ldmatrix_operands &o = *static_cast<ldmatrix_operands *>(c.payload[lane]);
        row[lane] = static_cast<const uint16_t *>(o.row);
        if ((uintptr_t)o.row % 16 || arena_offset(o.row) >= SHARED_WINDOW) {
            report("ldmatrix", o.pc, nullptr, "lane %d: the row at %p is not %s", lane, o.row,
                   (uintptr_t)o.row % 16 ? "16-byte aligned" : "in shared memory");
            return;
        }
        if (checked) access(o.row, 16, READ, o.pc, now.thread_at[w.index * LANES + lane]);
    }
    for (int lane = 0; lane < LANES; lane++) {
        const ldmatrix_operands &o = *static_cast<ldmatrix_operands *>(c.payload[lane]);
        int g = row_of(lane), t = column_of(lane);
        for (int i = 0; i < 4; i++) {
            uint32_t low = o.transposed ? row[8 * i + t][g] : row[8 * i + g][t];
            uint32_t high = o.transposed ? row[8 * i + t + 1][g] : row[8 * i + g][t + 1];
            o.r[i] = low | high << 16;
        }
    }
}

} // namespace

} // namespace simt

using namespace simt;

void simt_mma_m16n8k16(float *d, const uint32_t *a, const uint32_t *b, const float *c,
                       const char *site) {
    mma_operands o = {d, a, b, c};
    join(OP_MMA, ~0u, &o, site, compute_mma);
}

void simt_ldmatrix(uint32_t *r, const void *row, bool transposed, const char *site) {
    ldmatrix_operands o = {r, row, transposed, __builtin_return_address(0)};
    join(OP_LDMATRIX, ~0u, &o, site, compute_ldmatrix);
}
