/* tile.cuh - tiles of bf16 in shared memory, and the fragments tensor cores take from them.
 * Floor: kernels.
 *
 * A tile has rows of C chunks, a chunk being 8 elements (16 bytes). Chunks lie swizzled, so that
 * the 8 rows which one phase of ldmatrix reads at the same chunk are in 8 different bank groups;
 * that needs C even. Fragments are those of mma.m16n8k16: lane = 4 g + t holds rows g and g + 8,
 * columns 2t and 2t + 1 of each 8 by 8 block. */
#pragma once
#include "kernels/simt/simt.h"

/* Where chunk c of row r lies, in elements. */
template <int C> DEVFN int tile_at(int r, int c) {
    static_assert(C % 2 == 0, "an odd number of chunks needs no swizzle, but is not used either");
    if (C % 8 == 0) return (r * C + (c ^ (r & 7))) * 8;
    if (C % 4 == 0) return (r * C + (c ^ ((r >> 1) & 3))) * 8;
    return (r * C + (c ^ ((r >> 2) & 1))) * 8;
}

/* The chunk x[0..7] of which the first n exist (any n; zeros for the rest). */
DEVFN uint4 partial_chunk(const bf16 *x, int n) {
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t low = 2 * i < n ? x[2 * i].x : 0u, high = 2 * i + 1 < n ? x[2 * i + 1].x : 0u;
        pair[i] = low | high << 16;
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

/* Fills a tile of ROWS by 8C from the matrix x, whose rows are `row` elements apart; it has `rows`
 * rows and `columns` columns from x on, beyond them are zeros. By cp.async if x and `row` are whole
 * chunks (`vector`) and so is what exists of a row. By all threads of the block; the caller
 * commits, waits and synchronises. */
template <int ROWS, int C, int THREADS>
DEVFN void tile_load(bf16 *tile, const bf16 *x, int64_t row, int rows, int columns, bool vector) {
    if (vector && columns % 8 == 0) {
#pragma unroll 4
        for (unsigned i = threadIdx.x; i < ROWS * C; i += THREADS) {
            int r = (int)(i / C), c = (int)(i % C);
            bool there = r < rows && c * 8 < columns;
            cp_async16(tile + tile_at<C>(r, c), there ? x + r * row + c * 8 : x, there);
        }
        return;
    }
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < ROWS * C; i += THREADS) {
        int r = i / C, c = i % C;
        st128(tile + tile_at<C>(r, c),
              partial_chunk(x + r * row + c * 8, r < rows ? columns - c * 8 : 0));
    }
}

/* Rows of the matrix start at multiples of 16 bytes. */
static inline bool tile_is_vector(const void *x, int64_t row) {
    return (uintptr_t)x % 16 == 0 && row % 8 == 0;
}

/* Chunk c + lane_c of row r + lane_r, where r is a multiple of 8 and c an even constant or alike:
 * tile_at split into what depends on the lane, computed once, and one exclusive or. */
template <int C>
DEVFN const bf16 *tile_lane(const bf16 *tile, int r, int c, int lane_r, int lane_c) {
    const int group = C % 8 == 0 ? 8 : C % 4 == 0 ? 4 : 2;
    return tile + (r * C + c / group * group) * 8 + (tile_at<C>(lane_r, lane_c) ^ c % group * 8);
}

/* First operand, rows r.., columns 16 k.. of a tile stored [row][k]. */
template <int C> DEVFN void first_operand(uint32_t f[4], const bf16 *tile, int r, int k) {
    int lane = (int)threadIdx.x & 31;
    ldmatrix_x4(f, tile_lane<C>(tile, r, 2 * k, lane & 15, lane >> 4));
}

/* The same of a tile stored [k][row], rows from chunk c on. */
template <int C> DEVFN void first_operand_trans(uint32_t f[4], const bf16 *tile, int c, int k) {
    int lane = (int)threadIdx.x & 31, r = (lane & 7) + (lane >> 4 << 3);
    ldmatrix_x4_trans(f, tile_lane<C>(tile, 16 * k, c, r, lane >> 3 & 1));
}

/* Second operand for 16 columns n.. (f[0], f[1] the first 8), k from 16 k on; stored [column][k].
 */
template <int C> DEVFN void second_operand(uint32_t f[4], const bf16 *tile, int n, int k) {
    int lane = (int)threadIdx.x & 31, r = (lane & 7) + (lane >> 4 << 3);
    ldmatrix_x4(f, tile_lane<C>(tile, n, 2 * k, r, lane >> 3 & 1));
}

/* The same of a tile stored [k][column], columns from chunk c on. */
template <int C> DEVFN void second_operand_trans(uint32_t f[4], const bf16 *tile, int c, int k) {
    int lane = (int)threadIdx.x & 31;
    ldmatrix_x4_trans(f, tile_lane<C>(tile, 16 * k, c, lane & 15, lane >> 4));
}

/* Four floats at a multiple of 16 bytes. */
DEVFN void load4(float x[4], const float *from) {
    uint4 v = ld128(from);
    x[0] = __int_as_float((int)v.x), x[1] = __int_as_float((int)v.y);
    x[2] = __int_as_float((int)v.z), x[3] = __int_as_float((int)v.w);
}
