/* attention_bf16_backward.cu - gradients of attention on tensor cores. Floor: kernels.
 *
 * Scores are computed again from q, k and lse (Dao 2023, "FlashAttention-2"), twice: one kernel
 * keeps 64 queries and goes over the keys for dq, one keeps 64 keys and goes over the queries, head
 * after head of its group, for dk and dv. So every sum has one owner and one order: no atomics, and
 * results repeat. That is 7 products where atomics would need 5 (9 from head dimension 192 on,
 * where two warps share the columns of dk and dv of 16 keys, and both compute their scores). The
 * tile of the moving side is 64 rows, where registers run out 32. Shared memory bounds both.
 *
 * ptxas 13.0, no spills:         64   80   96  128  192/128  256
 *     dq:  shared memory, KB     48   60   72   64     80    128
 *          registers, sm_80     208  244  246  183    249    245
 *                     sm_90a    210  246  248  186    246    251
 *                     sm_100    222  226  238  202    243    254
 *     dkv: shared memory, KB     49   61   49   65     81    129
 *          registers, sm_80     238  255  247  246    245    250
 *                     sm_90a    229  254  246  246    245    255
 *                     sm_100    240  242  223  244    240    250
 * Not measured on a card yet. */
#include "kernels/cuda/attention_bf16.cuh"

static const int ROWS = 64, DQ_THREADS = 128;

/* How many rows the moving side has in a tile, and how many warps share the columns of dk and dv:
 * what the registers of a thread allow. */
template <int D> struct shape_of {
    static const int KEYS = D >= 128 ? 32 : 64, QUERIES = D >= 96 ? 32 : 64;
    static const int SHARES = D >= 192 ? 2 : 1, DKV_THREADS = 128 * SHARES;
};

/* A score becomes its probability, and (dp - delta) slope becomes ds; both are 0 where hidden. */
DEVFN void gradient_of(bool seen, float lse, float *s, float *ds) {
    float p = exp2f((*s - lse) * LOG2_E);
    *s = seen ? p : 0;
    *ds = seen ? p * *ds : 0;
}

/* A lane's row r of sums, columns first.. of a gradient's row at `at`. */
template <int N>
DEVFN void store_grads(const tr_attention *a, void *grad, int64_t at, int first, int64_t width,
                       bool add, const float (*sum)[4], int r, float factor) {
    int lane_first = first + ((int)threadIdx.x & 3) * 2;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int d = lane_first + 8 * n + e;
            if (d < width) store_grad(a, grad, at + d, add, sum[n][2 * r + e] * factor);
        }
}

/* dq. */

/* Block x: query tile; y: query head; z: sequence. */
template <int DQ, int DV>
__global__ void __launch_bounds__(128, DQ > 128 ? 1 : 2) dq_kernel(attention_call c) {
    const int KEYS = shape_of<DQ>::KEYS, PAIR = KEYS * (DQ + DV);
    SIMT_DYN_SMEM(bf16, q);
    bf16 *dout = q + ROWS * DQ, *tiles = dout + ROWS * DV;
    const tr_attention *a = &c.a;
    int b = (int)blockIdx.z, h = (int)blockIdx.y, hk = h / (int)(a->Hq / a->Hkv);
    int i = (int)(gridDim.x - 1 - blockIdx.x) * ROWS; /* causal: the longest rows first */
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, row = i + 16 * warp + lane / 4;
    float dq[DQ / 8][4], lse[2] = {0, 0}, delta[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < DQ / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) dq[n][e] = 0;
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (row + 8 * r < a->Sq) {
            lse[r] = a->lse[lse_at(a, b, row + 8 * r, h)];
            delta[r] = c.delta[((int64_t)b * a->Hq + h) * a->Sq + row + 8 * r];
        }

    interval span = span_of<ROWS>(a, b, i);
    int view, next, next_view, side = 0;
    int j = next_keys<ROWS>(a, b, i, span.begin / KEYS * KEYS, span.end, KEYS, &view);
    if (j < span.end) {
        load_queries<ROWS, DQ, DV, DQ_THREADS>(q, dout, &c, b, h, i);
        load_keys<KEYS, DQ, DV, DQ_THREADS>(tiles, tiles + KEYS * DQ, &c, b, hk, j);
        cp_async_commit();
    }
    for (; j < span.end; j = next, view = next_view, side ^= 1) {
        next = next_keys<ROWS>(a, b, i, j + KEYS, span.end, KEYS, &next_view);
        bf16 *k = tiles + side * PAIR, *v = k + KEYS * DQ, *other = tiles + (side ^ 1) * PAIR;
        if (next < span.end)
            load_keys<KEYS, DQ, DV, DQ_THREADS>(other, other + KEYS * DQ, &c, b, hk, next);
        cp_async_commit();
        cp_async_wait<1>();
        SYNCTHREADS();
        float s[KEYS / 8][4], ds[KEYS / 8][4];
        scores_of<KEYS / 8, DQ / 16, DQ / 8>(s, q, 16 * warp, k);
        scores_of<KEYS / 8, DV / 16, DV / 8>(ds, dout, 16 * warp, v);
        scale_scores<KEYS / 8>(a, s);
#pragma unroll
        for (int e = 0; e < KEYS / 2; e++) ds[e / 4][e % 4] -= delta[e % 4 / 2];
        slope_scores<KEYS / 8>(a, ds, s);
        uint32_t seen = ~0u;
        if (view != SEEN_BY_ALL) {
            interval keys[2] = {keys_of(a, b, row), keys_of(a, b, row + 8)};
            seen = seen_keys<KEYS / 8>(a, keys, row, j + lane % 4 * 2);
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                gradient_of(seen >> (4 * n + e) & 1, lse[e / 2], &s[n][e], &ds[n][e]);
        if (view != SEEN_BY_ALL)
            hide_not_finite<DQ / 8, KEYS / 16, DQ / 8, DQ_THREADS>(dq, seen, k, 0);
        add_product<DQ / 8, KEYS / 16, DQ / 8>(dq, ds, k, 0);
        SYNCTHREADS(); /* before the tile after next takes this one's place */
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (row + 8 * r < a->Sq)
            store_grads<DQ / 8>(a, a->dq, q_at(a, b, row + 8 * r, h), 0, a->Dqk, a->add_dq, dq, r,
                                a->scale);
}

/* dk, dv. */

/* lse and delta of the queries i..; zeros for rows past the end. */
template <int N, int THREADS>
DEVFN void load_stats(float *stats, const attention_call *c, int b, int h, int i) {
    const tr_attention *a = &c->a;
    for (int e = (int)threadIdx.x; e < 2 * N; e += THREADS) {
        int row = i + e % N;
        float x = 0;
        if (row < a->Sq)
            x = e < N ? a->lse[lse_at(a, b, row, h)]
                      : c->delta[((int64_t)b * a->Hq + h) * a->Sq + row];
        stats[e] = x;
    }
}

/* The next tile of queries that sees the keys, of head *h or one after it below `heads`. */
template <int N>
DEVFN void next_tile(const attention_call *c, int b, int j, int heads, int *h, int *i,
                     int *view_p) {
    *i = next_queries<N, BF16_QUERIES>(c, b, *i, j, ROWS, view_p);
    if (*i < c->a.Sq || *h + 1 >= heads) return;
    ++*h;
    *i = next_queries<N, BF16_QUERIES>(c, b, 0, j, ROWS, view_p);
}

/* Block x: key tile; y: key head; z: sequence. Query heads one after the other. */
template <int DQ, int DV>
__global__ void __launch_bounds__(shape_of<DQ>::DKV_THREADS, 1) dkv_kernel(attention_call c) {
    typedef shape_of<DQ> shape;
    const int N = shape::QUERIES, THREADS = shape::DKV_THREADS, PAIR = N * (DQ + DV);
    const int QK = DQ / 8 / shape::SHARES, VO = DV / 8 / shape::SHARES; /* columns' chunks */
    SIMT_DYN_SMEM(bf16, k);
    bf16 *v = k + ROWS * DQ, *tiles = v + ROWS * DV;
    float *stats = (float *)(tiles + 2 * PAIR);
    const tr_attention *a = &c.a;
    int b = (int)blockIdx.z, hk = (int)blockIdx.y, heads = (hk + 1) * (int)(a->Hq / a->Hkv);
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, share = warp / 4;
    int j = (int)blockIdx.x * ROWS, first = warp % 4 * 16, key = j + first + lane / 4;
    float dk[QK][4], dv[VO][4];
#pragma unroll
    for (int e = 0; e < 4 * QK; e++) dk[e / 4][e % 4] = 0;
#pragma unroll
    for (int e = 0; e < 4 * VO; e++) dv[e / 4][e % 4] = 0;

    int h = heads - (int)(a->Hq / a->Hkv), i = 0, view, side = 0;
    next_tile<N>(&c, b, j, heads, &h, &i, &view);
    if (i < a->Sq) {
        load_keys<ROWS, DQ, DV, THREADS>(k, v, &c, b, hk, j);
        load_queries<N, DQ, DV, THREADS>(tiles, tiles + N * DQ, &c, b, h, i);
        load_stats<N, THREADS>(stats, &c, b, h, i);
        cp_async_commit();
    }
    while (i < a->Sq) {
        int next_h = h, next_i = i + N, next_view, query = i + lane % 4 * 2;
        next_tile<N>(&c, b, j, heads, &next_h, &next_i, &next_view);
        bf16 *q = tiles + side * PAIR, *dout = q + N * DQ, *other = tiles + (side ^ 1) * PAIR;
        const float *lse = stats + side * 2 * N + lane % 4 * 2, *delta = lse + N;
        if (next_i < a->Sq) {
            load_queries<N, DQ, DV, THREADS>(other, other + N * DQ, &c, b, next_h, next_i);
            load_stats<N, THREADS>(stats + (side ^ 1) * 2 * N, &c, b, next_h, next_i);
        }
        cp_async_commit();
        cp_async_wait<1>();
        SYNCTHREADS();
        float p[N / 8][4], ds[N / 8][4];
        scores_of<N / 8, DQ / 16, DQ / 8>(p, k, first, q);
        scores_of<N / 8, DV / 16, DV / 8>(ds, v, first, dout);
        scale_scores<N / 8>(a, p);
#pragma unroll
        for (int e = 0; e < N / 2; e++) ds[e / 4][e % 4] -= delta[e / 4 * 8 + e % 2];
        slope_scores<N / 8>(a, ds, p);
        uint32_t seen = view == SEEN_BY_ALL ? ~0u : seen_queries<N / 8>(a, b, query, key);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                gradient_of(seen >> (4 * n + e) & 1, lse[8 * n + e % 2], &p[n][e], &ds[n][e]);
        if (view != SEEN_BY_ALL) {
            hide_not_finite<VO, N / 16, DV / 8, THREADS>(dv, seen, dout, share * VO);
            hide_not_finite<QK, N / 16, DQ / 8, THREADS>(dk, seen, q, share * QK);
        }
        add_product<VO, N / 16, DV / 8>(dv, p, dout, share * VO);
        add_product<QK, N / 16, DQ / 8>(dk, ds, q, share * QK);
        SYNCTHREADS(); /* before the tile after next takes this one's place */
        h = next_h, i = next_i, view = next_view, side ^= 1;
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (key + 8 * r < a->Sk) {
            store_grads<QK>(a, a->dk, k_at(a, b, key + 8 * r, hk), share * QK * 8, a->Dqk,
                            a->add_dkv, dk, r, a->scale);
            store_grads<VO>(a, a->dv, v_at(a, b, key + 8 * r, hk), share * VO * 8, a->Dv,
                            a->add_dkv, dv, r, 1);
        }
}

template <int DQ, int DV> static void launch(tr_stream *s, const attention_call *c) {
    typedef shape_of<DQ> shape;
    const tr_attention *a = &c->a;
    const size_t dq_elements = (ROWS + 2 * shape::KEYS) * (DQ + DV);
    const size_t dkv_elements = (ROWS + 2 * shape::QUERIES) * (DQ + DV);
    const size_t dkv_bytes = dkv_elements * 2 + 4 * shape::QUERIES * sizeof(float);
    SIMT_MAX_SMEM((dq_kernel<DQ, DV>), dq_elements * 2);
    SIMT_MAX_SMEM((dkv_kernel<DQ, DV>), dkv_bytes);
    if (a->Sq > 0) {
        dim3 grid((unsigned)((a->Sq + ROWS - 1) / ROWS), (unsigned)a->Hq, (unsigned)a->B);
        LAUNCH((dq_kernel<DQ, DV>), grid, DQ_THREADS, dq_elements * 2, s->handle)(*c);
        tr_cuda_launched(s, "attention_backward bf16, dq");
    }
    if (a->Sk > 0) {
        dim3 grid((unsigned)((a->Sk + ROWS - 1) / ROWS), (unsigned)a->Hkv, (unsigned)a->B);
        LAUNCH((dkv_kernel<DQ, DV>), grid, shape::DKV_THREADS, dkv_bytes, s->handle)(*c);
        tr_cuda_launched(s, "attention_backward bf16, dk and dv");
    }
}

void tr_attention_bf16_backward(tr_stream *s, const attention_call *c) {
    TR_ATTENTION_BY_WIDTH(launch, s, c);
}
