/* attention_f32.cu - attention in fp32 with plain FMA. Floor: kernels.
 *
 * Tiles of 32 queries by 32 keys, 256 threads as 16 by 16. A thread has 2 rows: 2 columns of the
 * scores and D/16 of each output. Scores pass through shared memory, where a pair that the mask
 * hides has the score -1: it adds nothing, whatever stands in the hidden row. Dot products run in
 * the order of the head dimension, as delta's do (attention.cu). Shared memory bounds it: 4 loads
 * of 16 bytes for 16 FMA in the scores. For checking and for models that must have fp32; bf16 has
 * the fast kernels. Shared memory at D = 64, 128, 256: 31, 56, 105 KB forward, 45, 78, 143 KB
 * backward. ptxas 13.0, no spills: 112 to 128 registers (two blocks a multiprocessor), backward at
 * D = 256, of which shared memory lets one block in, 152 to 186. Without a number of blocks in the
 * launch bounds ptxas aims at more of them, and spills for it.
 * Not measured on a card yet. */
#include "kernels/cuda/attention.cuh"

#include "kernels/cuda/tile.cuh"

static const int SIDE = 32, THREADS_F32 = 256, PAIR_ROW = SIDE + 8;

/* Rows of a tile are D + 4 floats: 8 lanes reading 16 bytes of 8 rows are in 32 banks. */
template <int D>
DEVFN void load_rows(float *tile, const void *x, int64_t at, int64_t row, int rows, int64_t width) {
    const float *from = (const float *)x + at;
    for (int e = (int)threadIdx.x; e < SIDE * D; e += THREADS_F32) {
        int r = e / D, d = e % D;
        tile[r * (D + 4) + d] = r < rows && d < width ? from[r * row + d] : 0;
    }
}

DEVFN int rows_left(int64_t all, int first) {
    int64_t n = all - first;
    return n < SIDE ? (int)n : SIDE;
}

/* dots[r][c] = <x row, y row> of this thread's rows and columns. */
template <int D> DEVFN void dots_of(float dots[2][2], const float *x, const float *y) {
    int row = (int)threadIdx.x / 16 * 2, column = (int)threadIdx.x % 16;
    dots[0][0] = dots[0][1] = dots[1][0] = dots[1][1] = 0;
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        float u[2][4], w[2][4];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            load4(u[e], x + (row + e) * (D + 4) + d);
            load4(w[e], y + (column + 16 * e) * (D + 4) + d);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) dots[e / 2][e % 2] += u[e / 2][i] * w[e % 2][i];
    }
}

/* sum[r][c] += sum over columns j of pairs[row][j] values[j][column]; nothing where `seen` is -1.
 * seen may be pairs. */
template <int D>
DEVFN void add_rows(float (*sum)[D / 16], const float *pairs, const float *seen,
                    const float *values) {
    int row = (int)threadIdx.x / 16 * 2, column = (int)threadIdx.x % 16;
    for (int j = 0; j < SIDE; j++) {
        float p[2] = {pairs[row * PAIR_ROW + j], pairs[(row + 1) * PAIR_ROW + j]};
        bool hidden[2] = {seen[row * PAIR_ROW + j] < 0, seen[(row + 1) * PAIR_ROW + j] < 0};
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            float v = values[j * (D + 4) + column + 16 * c];
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (!hidden[r]) sum[r][c] += p[r] * v;
        }
    }
}

/* Which of this thread's pairs see each other, from row and column on: bit 2 r + c. The rows are
 * queries, or the keys. One after the other: a remainder of 64 bits (dilation) is a call. */
template <bool ROWS_ARE_KEYS>
DEVFN unsigned seen_pairs(const tr_attention *a, int b, int row, int column) {
    unsigned seen = 0;
#pragma unroll 1
    for (int bit = 0; bit < 4; bit++) {
        int r = row + bit / 2, c = column + bit % 2 * 16;
        int query = ROWS_ARE_KEYS ? c : r, key = ROWS_ARE_KEYS ? r : c;
        if (sees(a, keys_of(a, b, query), place_of(a, query), key)) seen |= 1u << bit;
    }
    return seen;
}

/* The largest, or the sum, of a row's 16 threads. */
DEVFN float row_max(float x) {
    for (int step = 8; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
DEVFN float row_sum(float x) {
    for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

/* A row's scores of one tile become probabilities relative to the new maximum. */
DEVFN void soften(float s[2], unsigned seen, float *m, float *l, float *shrink_p) {
    float top = *m;
#pragma unroll
    for (int c = 0; c < 2; c++)
        if (seen >> c & 1) top = fmaxf(top, s[c]);
    top = row_max(top);
    float base = top == -INFINITY ? 0 : top, sum = 0;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        s[c] = seen >> c & 1 ? exp2f((s[c] - base) * LOG2_E) : -1;
        if (seen >> c & 1) sum += s[c];
    }
    *shrink_p = exp2f((*m - base) * LOG2_E);
    *l = *l * *shrink_p + row_sum(sum);
    *m = top;
}

/* Block x: query tile; y: query head; z: sequence. */
template <int D> __global__ void __launch_bounds__(256, 2) forward_kernel(attention_call call) {
    SIMT_DYN_SMEM(float, q);
    float *k = q + SIDE * (D + 4), *v = k + SIDE * (D + 4), *pairs = v + SIDE * (D + 4);
    const tr_attention *a = &call.a;
    int b = (int)blockIdx.z, h = (int)blockIdx.y, hk = h / (int)(a->Hq / a->Hkv), view;
    int i = (int)(gridDim.x - 1 - blockIdx.x) * SIDE; /* the longest rows of a causal mask first */
    int row = (int)threadIdx.x / 16 * 2, column = (int)threadIdx.x % 16;
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, o[2][D / 16];
#pragma unroll
    for (int c = 0; c < D / 16; c++) o[0][c] = o[1][c] = 0;
    interval span = span_of<SIDE>(a, b, i);
    int j = span.begin / SIDE * SIDE - SIDE;
    load_rows<D>(q, a->q, q_at(a, b, i, h), a->q_row, rows_left(a->Sq, i), a->Dqk);
    while ((j = next_keys<SIDE>(a, b, i, j + SIDE, span.end, SIDE, &view)) < span.end) {
        int rows = rows_left(a->Sk, j);
        load_rows<D>(k, a->k, k_at(a, b, j, hk), a->k_row, rows, a->Dqk);
        load_rows<D>(v, a->v, v_at(a, b, j, hk), a->v_row, rows, a->Dv);
        SYNCTHREADS();
        float s[2][2], slope, shrink;
        unsigned seen = seen_pairs<false>(a, b, i + row, j + column);
        dots_of<D>(s, q, k);
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int c = 0; c < 2; c++) s[r][c] = score_of(a, s[r][c], &slope);
            soften(s[r], seen >> 2 * r, &m[r], &l[r], &shrink);
#pragma unroll
            for (int c = 0; c < D / 16; c++) o[r][c] *= shrink;
#pragma unroll
            for (int c = 0; c < 2; c++) pairs[(row + r) * PAIR_ROW + column + 16 * c] = s[r][c];
        }
        SYNCWARP(~0u); /* a warp reads its own rows */
        add_rows<D>(o, pairs, pairs, v);
        SYNCTHREADS(); /* before the next tile takes their place */
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        bool there = i + row + r < a->Sq;
        int64_t at = there ? lse_at(a, b, i + row + r, h) : 0;
        float old = there && a->merge ? a->lse[at] : -INFINITY;
        row_end end = end_row(a, h, m[r], l[r], old);
        SYNCWARP(~0u); /* all have read the old one */
        if (!there || !end.write) continue;
        if (column == 0) a->lse[at] = end.lse;
        at = out_at(a, b, i + row + r, h);
#pragma unroll
        for (int c = 0; c < D / 16; c++)
            if (column + 16 * c < a->Dv) store_out(a, at + column + 16 * c, &end, o[r][c]);
    }
}

/* p and ds of one pair: hidden ones -1 and 0. */
DEVFN void gradient_of(const tr_attention *a, bool seen, float sum, float dp, float lse,
                       float delta, float *p, float *ds) {
    float slope, s = score_of(a, sum, &slope);
    *p = seen ? exp2f((s - lse) * LOG2_E) : -1;
    *ds = seen ? *p * (dp - delta) * slope : 0;
}

/* Block x: query tile; y: query head; z: sequence. */
template <int D>
__global__ void __launch_bounds__(256, D > 128 ? 1 : 2) dq_kernel(attention_call call) {
    SIMT_DYN_SMEM(float, q);
    float *dout = q + SIDE * (D + 4), *k = dout + SIDE * (D + 4), *v = k + SIDE * (D + 4);
    float *p = v + SIDE * (D + 4), *ds = p + SIDE * PAIR_ROW;
    const tr_attention *a = &call.a;
    int b = (int)blockIdx.z, h = (int)blockIdx.y, hk = h / (int)(a->Hq / a->Hkv), view;
    int i = (int)(gridDim.x - 1 - blockIdx.x) * SIDE;
    int row = (int)threadIdx.x / 16 * 2, column = (int)threadIdx.x % 16;
    float dq[2][D / 16], lse[2] = {0, 0}, delta[2] = {0, 0};
#pragma unroll
    for (int c = 0; c < D / 16; c++) dq[0][c] = dq[1][c] = 0;
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (i + row + r < a->Sq) {
            lse[r] = a->lse[lse_at(a, b, i + row + r, h)];
            delta[r] = call.delta[((int64_t)b * a->Hq + h) * a->Sq + i + row + r];
        }
    interval span = span_of<SIDE>(a, b, i);
    int j = span.begin / SIDE * SIDE - SIDE;
    load_rows<D>(q, a->q, q_at(a, b, i, h), a->q_row, rows_left(a->Sq, i), a->Dqk);
    load_rows<D>(dout, a->dout, dout_at(a, b, i, h), a->dout_row, rows_left(a->Sq, i), a->Dv);
    while ((j = next_keys<SIDE>(a, b, i, j + SIDE, span.end, SIDE, &view)) < span.end) {
        int rows = rows_left(a->Sk, j);
        load_rows<D>(k, a->k, k_at(a, b, j, hk), a->k_row, rows, a->Dqk);
        load_rows<D>(v, a->v, v_at(a, b, j, hk), a->v_row, rows, a->Dv);
        SYNCTHREADS();
        float s[2][2], dp[2][2];
        unsigned seen = seen_pairs<false>(a, b, i + row, j + column);
        dots_of<D>(s, q, k);
        dots_of<D>(dp, dout, v);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int r = e / 2, c = e % 2, at = (row + r) * PAIR_ROW + column + 16 * c;
            gradient_of(a, seen >> e & 1, s[r][c], dp[r][c], lse[r], delta[r], p + at, ds + at);
        }
        SYNCWARP(~0u); /* a warp reads its own rows */
        add_rows<D>(dq, ds, p, k);
        SYNCTHREADS();
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int c = 0; c < D / 16 && i + row + r < a->Sq; c++)
            if (column + 16 * c < a->Dqk)
                store_grad(a, a->dq, q_at(a, b, i + row + r, h) + column + 16 * c, a->add_dq,
                           dq[r][c] * a->scale);
}

/* Block x: key tile; y: key head; z: sequence. Query heads one after the other. */
template <int D>
__global__ void __launch_bounds__(256, D > 128 ? 1 : 2) dkv_kernel(attention_call call) {
    SIMT_DYN_SMEM(float, k);
    float *v = k + SIDE * (D + 4), *q = v + SIDE * (D + 4), *dout = q + SIDE * (D + 4);
    float *p = dout + SIDE * (D + 4), *ds = p + SIDE * PAIR_ROW;
    const tr_attention *a = &call.a;
    int b = (int)blockIdx.z, hk = (int)blockIdx.y, group = (int)(a->Hq / a->Hkv), view;
    int j = (int)blockIdx.x * SIDE, rows = rows_left(a->Sk, j);
    int row = (int)threadIdx.x / 16 * 2, column = (int)threadIdx.x % 16;
    float dk[2][D / 16], dv[2][D / 16];
#pragma unroll
    for (int c = 0; c < D / 16; c++) dk[0][c] = dk[1][c] = dv[0][c] = dv[1][c] = 0;
    load_rows<D>(k, a->k, k_at(a, b, j, hk), a->k_row, rows, a->Dqk);
    load_rows<D>(v, a->v, v_at(a, b, j, hk), a->v_row, rows, a->Dv);
    for (int h = hk * group; h < (hk + 1) * group; h++) {
        int i = -SIDE;
        while ((i = next_queries<SIDE, F32_QUERIES>(&call, b, i + SIDE, j, SIDE, &view)) < a->Sq) {
            int left = rows_left(a->Sq, i);
            load_rows<D>(q, a->q, q_at(a, b, i, h), a->q_row, left, a->Dqk);
            load_rows<D>(dout, a->dout, dout_at(a, b, i, h), a->dout_row, left, a->Dv);
            SYNCTHREADS();
            float s[2][2], dp[2][2];
            unsigned seen = seen_pairs<true>(a, b, j + row, i + column);
            dots_of<D>(s, k, q);
            dots_of<D>(dp, v, dout);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int query = i + column + 16 * c;
                float lse = query < a->Sq ? a->lse[lse_at(a, b, query, h)] : 0;
                float delta =
                    query < a->Sq ? call.delta[((int64_t)b * a->Hq + h) * a->Sq + query] : 0;
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    int at = (row + r) * PAIR_ROW + column + 16 * c;
                    gradient_of(a, seen >> (2 * r + c) & 1, s[r][c], dp[r][c], lse, delta, p + at,
                                ds + at);
                }
            }
            SYNCWARP(~0u); /* a warp reads its own rows */
            add_rows<D>(dk, ds, p, q);
            add_rows<D>(dv, p, p, dout);
            SYNCTHREADS();
        }
    }
#pragma unroll
    for (int r = 0; r < 2 && row + r < rows; r++)
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            int d = column + 16 * c;
            if (d < a->Dqk)
                store_grad(a, a->dk, k_at(a, b, j + row + r, hk) + d, a->add_dkv,
                           dk[r][c] * a->scale);
            if (d < a->Dv)
                store_grad(a, a->dv, v_at(a, b, j + row + r, hk) + d, a->add_dkv, dv[r][c]);
        }
}

/* Launchers. */

static unsigned sides(int64_t n) {
    return (unsigned)((n + SIDE - 1) / SIDE);
}

template <int D> static void forward(tr_stream *s, const attention_call *c) {
    const size_t bytes = (3 * SIDE * (D + 4) + SIDE * PAIR_ROW) * sizeof(float);
    dim3 grid(sides(c->a.Sq), (unsigned)c->a.Hq, (unsigned)c->a.B);
    SIMT_MAX_SMEM((forward_kernel<D>), bytes);
    LAUNCH((forward_kernel<D>), grid, THREADS_F32, bytes, s->handle)(*c);
    tr_cuda_launched(s, "attention_forward fp32");
}

template <int D> static void backward(tr_stream *s, const attention_call *c) {
    const tr_attention *a = &c->a;
    const size_t bytes = (4 * SIDE * (D + 4) + 2 * SIDE * PAIR_ROW) * sizeof(float);
    SIMT_MAX_SMEM((dq_kernel<D>), bytes);
    SIMT_MAX_SMEM((dkv_kernel<D>), bytes);
    if (a->Sq > 0) {
        dim3 grid(sides(a->Sq), (unsigned)a->Hq, (unsigned)a->B);
        LAUNCH((dq_kernel<D>), grid, THREADS_F32, bytes, s->handle)(*c);
        tr_cuda_launched(s, "attention_backward fp32, dq");
    }
    if (a->Sk > 0) {
        dim3 grid(sides(a->Sk), (unsigned)a->Hkv, (unsigned)a->B);
        LAUNCH((dkv_kernel<D>), grid, THREADS_F32, bytes, s->handle)(*c);
        tr_cuda_launched(s, "attention_backward fp32, dk and dv");
    }
}

static int64_t widest(const tr_attention *a) {
    return a->Dqk > a->Dv ? a->Dqk : a->Dv;
}

void tr_attention_f32_forward(tr_stream *s, const attention_call *c) {
    if (widest(&c->a) <= 64)
        forward<64>(s, c);
    else if (widest(&c->a) <= 128)
        forward<128>(s, c);
    else
        forward<256>(s, c);
}

void tr_attention_f32_backward(tr_stream *s, const attention_call *c) {
    if (widest(&c->a) <= 64)
        backward<64>(s, c);
    else if (widest(&c->a) <= 128)
        backward<128>(s, c);
    else
        backward<256>(s, c);
}
