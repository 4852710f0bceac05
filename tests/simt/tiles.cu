/* Property: the fragments of mma.m16n8k16 and ldmatrix.x4, plain and transposed, lie as the PTX ISA
 * documents, and products are those of float64; bf16 rounds to nearest even at every kind of
 * value. */
#include "tests/simt/check.h"

/* PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type", restated. Lane l is in
 * group l >> 2 and is thread l & 3 of it. Element i of the lane's fragment is at: */
struct position {
    int row, column;
};

/* A (16 x 16), i = 0..7: rows of the group, but 8 lower for i = 2, 3, 6, 7; columns two per thread,
 * and 8 further right from i = 4. */
static position of_a(int lane, int i) {
    int group = lane >> 2, thread = lane & 3;
    bool upper = (0 <= i && i < 2) || (4 <= i && i < 6);
    int column = thread * 2 + (i & 1);
    return {upper ? group : group + 8, i < 4 ? column : column + 8};
}

/* B (16 x 8), i = 0..3: columns are groups; rows two per thread, and 8 further down from i = 2. */
static position of_b(int lane, int i) {
    int row = (lane & 3) * 2 + (i & 1);
    return {i < 2 ? row : row + 8, lane >> 2};
}

/* C and D (16 x 8), i = 0..3: rows of the group, 8 lower from i = 2; columns two per thread. */
static position of_c(int lane, int i) {
    int group = lane >> 2;
    return {i < 2 ? group : group + 8, (lane & 3) * 2 + (i & 1)};
}

__global__ void multiply(float *d, const uint32_t *a, const uint32_t *b, const float *c) {
    uint32_t ra[4], rb[2];
    float rc[4], rd[4];
    int lane = (int)threadIdx.x;
    for (int r = 0; r < 4; r++) ra[r] = a[lane * 4 + r];
    for (int r = 0; r < 2; r++) rb[r] = b[lane * 2 + r];
    for (int r = 0; r < 4; r++) rc[r] = c[lane * 4 + r];
    mma_m16n8k16_bf16(rd, ra, rb, rc);
    mma_m16n8k16_bf16(rc, ra, rb, rc); /* in place */
    for (int r = 0; r < 4; r++) d[lane * 4 + r] = rd[r];
    for (int r = 0; r < 4; r++) d[128 + lane * 4 + r] = rc[r];
}

static unsigned next_random(unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static uint32_t pair(bf16 low, bf16 high) {
    return low.x | (uint32_t)high.x << 16;
}

/* In `order`, matrix entries that tell their place; else random ones. */
static void check_mma(bool order) {
    bf16 A[16][16], B[16][8];
    float C[16][8];
    unsigned state = 7;
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            A[i][k] = f32_to_bf16(order ? (float)(i * 16 + k)
                                        : (float)((int)(next_random(&state) % 2001) - 1000) / 512);
    for (int k = 0; k < 16; k++)
        for (int j = 0; j < 8; j++)
            B[k][j] = f32_to_bf16(order ? (float)(k * 8 + j)
                                        : (float)((int)(next_random(&state) % 2001) - 1000) / 512);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) C[i][j] = (float)(i * 100 + j);
    std::vector<uint32_t> a(128), b(64);
    std::vector<float> c(128);
    for (int lane = 0; lane < 32; lane++) {
        for (int r = 0; r < 4; r++) {
            position low = of_a(lane, 2 * r), high = of_a(lane, 2 * r + 1);
            a[lane * 4 + r] = pair(A[low.row][low.column], A[high.row][high.column]);
        }
        for (int r = 0; r < 2; r++) {
            position low = of_b(lane, 2 * r), high = of_b(lane, 2 * r + 1);
            b[lane * 2 + r] = pair(B[low.row][low.column], B[high.row][high.column]);
        }
        for (int r = 0; r < 4; r++) c[lane * 4 + r] = C[of_c(lane, r).row][of_c(lane, r).column];
    }
    uint32_t *da = to_device(a), *db = to_device(b);
    float *dc = to_device(c), *dd = device_array<float>(256);
    LAUNCH(multiply, 1, 32, 0, 0)(dd, da, db, dc);
    std::vector<float> d = to_host(dd, 256);
    double worst = 0;
    for (int lane = 0; lane < 32; lane++)
        for (int r = 0; r < 4; r++) {
            position p = of_c(lane, r);
            double want = C[p.row][p.column], size = fabs(want);
            for (int k = 0; k < 16; k++) {
                double term = (double)bf16_to_f32(A[p.row][k]) * bf16_to_f32(B[k][p.column]);
                want += term;
                size += fabs(term);
            }
            for (int copy = 0; copy < 2; copy++) {
                double error = fabs(d[copy * 128 + lane * 4 + r] - want) / size;
                worst = error > worst ? error : worst;
            }
        }
    CHECK(worst <= 16 * 6e-8, "mma, order %d: error %g of the sum of sizes", order, worst);
    printf("mma, %s: error %.2g\n", order ? "entries that tell their place" : "random", worst);
    simt_free(da);
    simt_free(db);
    simt_free(dc);
    simt_free(dd);
}

/* Rows of the four matrices lie scattered; lane l points to row l % 8 of matrix l / 8. */
constexpr int STRIDE = 24; /* elements: 16-byte aligned rows with gaps */
__global__ void load(uint32_t *out, int transposed) {
    SIMT_DYN_SMEM(bf16, s);
    int lane = (int)threadIdx.x;
    for (int i = lane; i < 32 * STRIDE; i += 32) s[i].x = (uint16_t)(1000 + i);
    SYNCWARP(0xffffffffu);
    uint32_t r[4];
    const bf16 *row = s + (lane * 5 % 32) * STRIDE;
    if (transposed)
        ldmatrix_x4_trans(r, row);
    else
        ldmatrix_x4(r, row);
    for (int i = 0; i < 4; i++) out[lane * 4 + i] = r[i];
}

/* PTX ISA, ldmatrix: thread l receives elements 2 (l & 3) and the next of row l >> 2 of each 8 x 8
 * matrix; with .trans of its column. */
static void check_ldmatrix(int transposed) {
    uint32_t *dout = device_array<uint32_t>(128);
    LAUNCH(load, 1, 32, 32 * STRIDE * sizeof(bf16), 0)(dout, transposed);
    std::vector<uint32_t> out = to_host(dout, 128);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            uint32_t want = 0;
            for (int half = 0; half < 2; half++) {
                int along = 2 * (lane & 3) + half, across = lane >> 2;
                int row = transposed ? along : across, column = transposed ? across : along;
                int provider = 8 * i + row; /* the lane that points to this row */
                want |= (uint32_t)(1000 + provider * 5 % 32 * STRIDE + column) << (16 * half);
            }
            CHECK(out[lane * 4 + i] == want, "ldmatrix, transposed %d, lane %d, matrix %d: %x, %x",
                  transposed, lane, i, out[lane * 4 + i], want);
        }
    simt_free(dout);
}

/* Nearest even by comparison in float64 with both neighbours. */
static uint16_t rounded(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t down = (uint16_t)(bits >> 16);
    if (isnan(f)) return 0x7fff;
    if (isinf(f) || (bits & 0xffff) == 0) return down;
    uint16_t up = (uint16_t)(down + 1); /* away from zero */
    double a = bf16_to_f32(bf16{down}), b = bf16_to_f32(bf16{up});
    if (isinf(b)) b = copysign(ldexp(1.0, 128), b); /* where the next value would be */
    double to_a = fabs((double)f - a), to_b = fabs(b - (double)f);
    if (to_a != to_b) return to_a < to_b ? down : up;
    return down & 1 ? up : down;
}

static void check_bf16() {
    const uint32_t special[] = {
        0x00000000, 0x80000000, 0x7f800000, 0xff800000, /* zeros, infinities */
        0x7fc00000, 0x7f800001, 0xffc12345, 0xffffffff, /* NaNs, one that truncates to inf */
        0x00000001, 0x00007fff, 0x00008000, 0x00008001, /* denormals around the first tie */
        0x00017fff, 0x00018000, 0x00018001, 0x007fffff, /* ... and up to the first normal */
        0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001, /* ties to even, both ways */
        0x7f7fffff, 0x7f7f8000, 0x7f7f7fff, 0xff7f8000, /* to infinity, and not quite */
    };
    for (uint32_t bits : special) {
        float f;
        memcpy(&f, &bits, 4);
        CHECK(f32_to_bf16(f).x == rounded(f), "%08x: %04x, not %04x", bits, f32_to_bf16(f).x,
              rounded(f));
    }
    unsigned state = 3;
    for (int i = 0; i < 1000000; i++) {
        uint32_t bits = next_random(&state) ^ next_random(&state) << 16;
        if (i % 4 == 0) bits = (bits & 0xffff0000u) | 0x8000u; /* a tie */
        float f;
        memcpy(&f, &bits, 4);
        if (f32_to_bf16(f).x != rounded(f))
            CHECK(false, "%08x: %04x, not %04x", bits, f32_to_bf16(f).x, rounded(f));
    }
    for (uint32_t h = 0; h < 65536; h++) { /* exact values keep their bits, NaNs become one */
        float f = bf16_to_f32(bf16{(uint16_t)h});
        CHECK(f32_to_bf16(f).x == (isnan(f) ? 0x7fff : h), "%04x", h);
    }
    CHECK(pack_bf16x2(1.0f, -2.0f) == 0xc0003f80u, "%08x", pack_bf16x2(1.0f, -2.0f));
}

int main() {
    check_mma(true);
    check_mma(false);
    check_ldmatrix(0);
    check_ldmatrix(1);
    check_bf16();
    CHECK(simt_errors() == 0, "reports of correct kernels");
    return check_result("tiles and bf16");
}
