/* Property: the fragments of mma.m16n8k16 and ldmatrix.x4, plain and transposed, lie as the PTX ISA
 * documents, and products are those of float64; bf16 rounds to nearest even at every kind of
 * value. */
#include "tests/simt/check.h"
#include "tests/simt/documented.h"

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

static void check_ldmatrix(int transposed) {
    uint32_t *dout = device_array<uint32_t>(128);
    LAUNCH(load, 1, 32, 32 * STRIDE * sizeof(bf16), 0)(dout, transposed);
    std::vector<uint32_t> out = to_host(dout, 128);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            uint32_t want = 0;
            for (int half = 0; half < 2; half++) {
                position p = of_ldmatrix(lane, half, transposed);
                int provider = 8 * i + p.row; /* the lane that points to this row */
                want |= (uint32_t)(1000 + provider * 5 % 32 * STRIDE + p.column) << (16 * half);
            }
            CHECK(out[lane * 4 + i] == want, "ldmatrix, transposed %d, lane %d, matrix %d: %x, %x",
                  transposed, lane, i, out[lane * 4 + i], want);
        }
    simt_free(dout);
}

static void check_bf16() {
    for (uint32_t bits : special_floats) {
        float f = from_bits(bits);
        CHECK(f32_to_bf16(f).x == rounded_bf16(f), "%08x: %04x, not %04x", bits, f32_to_bf16(f).x,
              rounded_bf16(f));
    }
    unsigned state = 3;
    for (int i = 0; i < 1000000; i++) {
        uint32_t bits = next_random(&state) ^ next_random(&state) << 16;
        if (i % 4 == 0) bits = (bits & 0xffff0000u) | 0x8000u; /* a tie */
        float f = from_bits(bits);
        if (f32_to_bf16(f).x != rounded_bf16(f))
            CHECK(false, "%08x: %04x, not %04x", bits, f32_to_bf16(f).x, rounded_bf16(f));
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
