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

float half_of(uint32_t pair, int upper) {
    uint32_t bits = upper ? pair & 0xffff0000u : pair << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

void multiply(float (*__restrict__ d)[N], const float (*__restrict__ a)[K],
              const float (*__restrict__ b)[N]) {
    for (int i = 0; i < M; i++)
        for (int k = 0; k < K; k++)
            for (int j = 0; j < N; j++) d[i][j] += a[i][k] * b[k][j];
}

void compute_mma(warp &w, collective &c) {
    if (c.arrived != ~0u) {
        report("mma", nullptr, nullptr, "warp %d has exited lanes at %s: an mma takes all 32",
               w.index, c.site);
        return;
    }
    float a[M][K], b[K][N], d[M][N];
    for (int lane = 0; lane < LANES; lane++) {
        const mma_operands &o = *static_cast<mma_operands *>(c.payload[lane]);
        int g = lane / 4, t = 2 * (lane % 4);
        for (int h = 0; h < 2; h++) {
            for (int r = 0; r < 4; r++)
                a[g + 8 * (r % 2)][t + 8 * (r / 2) + h] = half_of(o.a[r], h);
            for (int r = 0; r < 2; r++) b[t + 8 * r + h][g] = half_of(o.b[r], h);
        }
        for (int r = 0; r < 4; r++) d[g + 8 * (r / 2)][t + r % 2] = o.c[r];
    }
    multiply(d, a, b);
    for (int lane = 0; lane < LANES; lane++) {
        const mma_operands &o = *static_cast<mma_operands *>(c.payload[lane]);
        int g = lane / 4, t = 2 * (lane % 4);
        for (int r = 0; r < 4; r++) o.d[r] = d[g + 8 * (r / 2)][t + r % 2];
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
        int g = lane / 4, t = 2 * (lane % 4);
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
