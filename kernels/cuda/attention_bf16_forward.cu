/* attention_bf16_forward.cu - attention on tensor cores. Floor: kernels.
 *
 * Dao 2023, "FlashAttention-2". A block has 64 queries of a head, 4 warps of 16; keys and values
 * come in tiles of 64 (32 at head dimension 256), the next pair under way by cp.async while one is
 * computed. Shared memory bounds it, about as much as the tensor cores do: 16 rows a warp make two
 * mma of each ldmatrix of k and v.
 *
 * ptxas 13.0, no spills:   64   80   96  128  192/128  256
 *     shared memory, KB    40   50   60   80    104     96
 *     registers, sm_80    147  190  197  185    206    243
 *                sm_90a   146  185  194  180    204    245
 *                sm_100   172  172  185  205    213    245
 * Not measured on a card yet. */
#include "kernels/cuda/attention_bf16.cuh"

static const int QUERIES = 64, THREADS = 128;

template <int DQ> struct keys_of_tile { static const int N = DQ > 192 ? 32 : 64; };

/* Scores of a tile become probabilities relative to the rows' new maxima; hidden ones 0. */
template <int N, int D>
DEVFN void soften(const tr_attention *a, float (*s)[4], bool all, uint32_t seen, float m[2],
                  float l[2], float (*o)[4]) {
    float top[2] = {m[0], m[1]};
    scale_scores<N>(a, s);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (!all && !(seen >> (4 * n + e) & 1)) s[n][e] = -INFINITY;
            top[e / 2] = fmaxf(top[e / 2], s[n][e]);
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        float base = top[r] == -INFINITY ? 0 : top[r], shrink = exp2f((m[r] - base) * LOG2_E);
        m[r] = top[r];
        l[r] *= shrink;
#pragma unroll
        for (int n = 0; n < D / 8; n++) o[n][2 * r] *= shrink, o[n][2 * r + 1] *= shrink;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                s[n][e] = exp2f((s[n][e] - base) * LOG2_E);
                l[r] += s[n][e];
            }
    }
}

/* A warp's rows i + g and i + g + 8 are complete. */
template <int DV>
DEVFN void end_rows(const attention_call *c, int b, int h, int i, const float m[2],
                    const float l[2], const float (*o)[4]) {
    const tr_attention *a = &c->a;
    int t = (int)threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = l[r] + __shfl_xor_sync(~0u, l[r], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        int row = i + 8 * r;
        bool there = row < a->Sq;
        int64_t at = there ? lse_at(a, b, row, h) : 0;
        float old = there && a->merge ? a->lse[at] : -INFINITY;
        row_end end = end_row(a, h, m[r], sum, old);
        SYNCWARP(~0u); /* all have read the old one */
        if (!there || !end.write) continue;
        if (t == 0) a->lse[at] = end.lse;
        at = out_at(a, b, row, h) + 2 * t;
#pragma unroll
        for (int n = 0; n < DV / 8; n++) {
            float x = o[n][2 * r], y = o[n][2 * r + 1];
            int d = 8 * n + 2 * t;
            if (d < a->Dv && c->pair_out && end.kept == 0) {
                *(uint32_t *)((bf16 *)a->out + at + 8 * n) =
                    pack_bf16x2(x * end.factor, y * end.factor);
                continue;
            }
            if (d < a->Dv) store_out(a, at + 8 * n, &end, x);
            if (d + 1 < a->Dv) store_out(a, at + 8 * n + 1, &end, y);
        }
    }
}

/* Block x: query tile; y: query head; z: sequence. */
template <int DQ, int DV>
__global__ void __launch_bounds__(128, DV > 128 ? 1 : 2) forward_kernel(attention_call c) {
    const int KEYS = keys_of_tile<DQ>::N, PAIR = KEYS * (DQ + DV);
    SIMT_DYN_SMEM(bf16, q);
    bf16 *tiles = q + QUERIES * DQ;
    const tr_attention *a = &c.a;
    int b = (int)blockIdx.z, h = (int)blockIdx.y, hk = h / (int)(a->Hq / a->Hkv);
    int i = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES; /* causal: the longest rows first */
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, row = i + 16 * warp + lane / 4;
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, o[DV / 8][4];
#pragma unroll
    for (int n = 0; n < DV / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) o[n][e] = 0;

    interval span = span_of<QUERIES>(a, b, i);
    int view, next, next_view, side = 0;
    int j = next_keys<QUERIES>(a, b, i, span.begin / KEYS * KEYS, span.end, KEYS, &view);
    if (j < span.end) {
        load_rows<QUERIES, DQ, THREADS>(q, a->q, q_at(a, b, i, h), a->q_row, a->Sq - i, a->Dqk,
                                        c.vector_q);
        load_keys<KEYS, DQ, DV, THREADS>(tiles, tiles + KEYS * DQ, &c, b, hk, j);
        cp_async_commit();
    }
    for (; j < span.end; j = next, view = next_view, side ^= 1) {
        next = next_keys<QUERIES>(a, b, i, j + KEYS, span.end, KEYS, &next_view);
        bf16 *k = tiles + side * PAIR, *v = k + KEYS * DQ, *other = tiles + (side ^ 1) * PAIR;
        if (next < span.end)
            load_keys<KEYS, DQ, DV, THREADS>(other, other + KEYS * DQ, &c, b, hk, next);
        cp_async_commit();
        cp_async_wait<1>();
        SYNCTHREADS();
        float s[KEYS / 8][4];
        scores_of<KEYS / 8, DQ / 16, DQ / 8>(s, q, 16 * warp, k);
        if (view == SEEN_BY_ALL) {
            soften<KEYS / 8, DV>(a, s, true, 0, m, l, o);
        } else {
            interval keys[2] = {keys_of(a, b, row), keys_of(a, b, row + 8)};
            uint32_t seen = seen_keys<KEYS / 8>(a, keys, row, j + lane % 4 * 2);
            soften<KEYS / 8, DV>(a, s, false, seen, m, l, o);
            hide_not_finite<DV / 8, KEYS / 16, DV / 8, THREADS>(o, seen, v, 0);
        }
        add_product<DV / 8, KEYS / 16, DV / 8>(o, s, v, 0);
        SYNCTHREADS(); /* before the tile after next takes this one's place */
    }
    end_rows<DV>(&c, b, h, row, m, l, o);
}

template <int DQ, int DV> static void launch(tr_stream *s, const attention_call *c) {
    const size_t elements = QUERIES * DQ + 2 * keys_of_tile<DQ>::N * (DQ + DV);
    dim3 grid((unsigned)((c->a.Sq + QUERIES - 1) / QUERIES), (unsigned)c->a.Hq, (unsigned)c->a.B);
    SIMT_MAX_SMEM((forward_kernel<DQ, DV>), elements * 2);
    LAUNCH((forward_kernel<DQ, DV>), grid, THREADS, elements * 2, s->handle)(*c);
    tr_cuda_launched(s, "attention_forward bf16");
}

void tr_attention_bf16_forward(tr_stream *s, const attention_call *c) {
    TR_ATTENTION_BY_WIDTH(launch, s, c);
}
