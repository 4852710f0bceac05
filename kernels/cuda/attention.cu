/* attention.cu - attention's rows of the table: by type, and what the backward needs first.
 * Floor: kernels.
 *
 * Before the gradients one kernel sums delta = dout * out of each row, in the very order in which
 * the gradient kernels sum dout * v: where a row sees one key the two are equal to the bit, and
 * their difference is 0. It also notes which keys each tile of queries is between. Memory bounds
 * it. The sinks' gradient is one block a head, sums in fp64 in a fixed order.
 * Not measured on a card yet. */
#include "kernels/cuda/attention.cuh"

#include "kernels/cuda/tile.cuh"
#include "kernels/makers.h"

static const int SINK_THREADS = 256;

/* One thread a row. */
DEVFN void delta_f32(const attention_call *c, int b, int h, int i) {
    const tr_attention *a = &c->a;
    const float *dout = (const float *)a->dout + dout_at(a, b, i, h);
    const float *out = (const float *)a->out + out_at(a, b, i, h);
    float sum = 0;
    for (int d = 0; d < a->Dv; d++) sum += dout[d] * out[d];
    c->delta[((int64_t)b * a->Hq + h) * a->Sq + i] = sum;
}

/* Two neighbours x[d], x[d + 1] as bf16; what an fp32 x leaves unsaid if `rest`. */
DEVFN uint32_t pair_at(const void *x, bool f32, int64_t at, int d, int64_t D, bool rest) {
    uint32_t pair = 0;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        if (d + e >= D) continue;
        bf16 half;
        if (f32) {
            float value = ((const float *)x)[at + d + e];
            half = f32_to_bf16(value);
            if (rest) half = f32_to_bf16(value - bf16_to_f32(half));
        } else {
            half = ((const bf16 *)x)[at + d + e];
        }
        pair |= (uint32_t)half.x << 16 * e;
    }
    return pair;
}

/* A warp takes 16 rows: the diagonal of dout out^T. An fp32 out counts as two bf16. */
DEVFN void delta_bf16(const attention_call *c, int b, int h, int i) {
    const tr_attention *a = &c->a;
    int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4, Dv = (int)a->Dv;
    bool f32 = a->out_t == TR_F32;
    int64_t dout[2], out[2], none = 0; /* of this lane's rows */
    int width[2];
    for (int r = 0; r < 2; r++) {
        int row = i + g + 8 * r;
        width[r] = row < a->Sq ? Dv : 0;
        dout[r] = row < a->Sq ? dout_at(a, b, row, h) : none;
        out[r] = row < a->Sq ? out_at(a, b, row, h) : none;
    }
    float sum[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    for (int rest = 0; rest <= (f32 ? 1 : 0); rest++)
        for (int d = 2 * t; d < (Dv + 15) / 16 * 16; d += 16) {
            uint32_t x[4], y[2][2];
            for (int e = 0; e < 4; e++) {
                int r = e & 1, column = d + e / 2 * 8;
                x[e] = pair_at(a->dout, false, dout[r], column, width[r], false);
                y[r][e / 2] = pair_at(a->out, f32, out[r], column, width[r], rest);
            }
            mma_m16n8k16_bf16(sum[0], x, y[0], sum[0]);
            mma_m16n8k16_bf16(sum[1], x, y[1], sum[1]);
        }
    for (int r = 0; r < 2; r++)
        if (g / 2 == t && width[r] > 0)
            c->delta[((int64_t)b * a->Hq + h) * a->Sq + i + g + 8 * r] =
                g % 2 ? sum[r][2 * r + 1] : sum[r][2 * r];
}

/* Block x: rows of one tile; y: head; z: sequence. */
template <bool F32> __global__ void __launch_bounds__(128) prepare_kernel(attention_call c) {
    const int rows = F32 ? F32_QUERIES : BF16_QUERIES;
    int b = (int)blockIdx.z, h = (int)blockIdx.y, i = (int)blockIdx.x * rows;
    int thread = (int)threadIdx.x;
    if (h == 0 && thread < 32) {
        interval span = span_of<rows>(&c.a, b, i);
        if (thread == 0) c.spans[(int64_t)b * gridDim.x + blockIdx.x] = span;
    }
    if (!F32)
        delta_bf16(&c, b, h, i + thread / 32 * 16);
    else if (i + thread < c.a.Sq)
        delta_f32(&c, b, h, i + thread);
}

/* dsink[h] -= sum over rows that see something of exp(sink - lse) delta. */
__global__ void __launch_bounds__(256) sink_kernel(attention_call c) {
    SIMT_SHARED(double, part, SINK_THREADS);
    const tr_attention *a = &c.a;
    int h = (int)blockIdx.x, thread = (int)threadIdx.x;
    double sum = 0;
    for (int b = 0; b < a->B; b++)
        for (int i = thread; i < a->Sq; i += SINK_THREADS) {
            float lse = a->lse[lse_at(a, b, i, h)];
            if (lse == -INFINITY) continue;
            float p = exp2f((a->sink[h] - lse) * LOG2_E);
            sum += (double)p * c.delta[((int64_t)b * a->Hq + h) * a->Sq + i];
        }
    part[thread] = sum;
    for (int half = SINK_THREADS / 2; half > 0; half /= 2) {
        SYNCTHREADS();
        if (thread < half) part[thread] += part[thread + half];
    }
    if (thread == 0) a->dsink[h] -= (float)part[0];
}

static attention_call call_of(const tr_attention *a) {
    attention_call c = {};
    bool whole_qk = a->Dqk % 8 == 0, whole_v = a->Dv % 8 == 0;
    c.a = *a;
    c.vector_q = whole_qk && tile_is_vector(a->q, a->q_row) && a->q_batch % 8 == 0;
    c.vector_k = whole_qk && tile_is_vector(a->k, a->k_row) && a->k_batch % 8 == 0;
    c.vector_v = whole_v && tile_is_vector(a->v, a->v_row) && a->v_batch % 8 == 0;
    c.vector_dout = whole_v && tile_is_vector(a->dout, a->dout_row) && a->dout_batch % 8 == 0;
    c.pair_out = a->out_t == TR_BF16 && (uintptr_t)a->out % 4 == 0 && a->Dv % 2 == 0 &&
                 a->out_row % 2 == 0 && a->out_batch % 2 == 0;
    return c;
}

static void attention_forward(tr_stream *s, const tr_attention *a) {
    if (a->B == 0 || a->Hq == 0 || a->Sq == 0) return;
    attention_call c = call_of(a);
    if (a->t == TR_F32)
        tr_attention_f32_forward(s, &c);
    else
        tr_attention_bf16_forward(s, &c);
}

static void attention_backward(tr_stream *s, const tr_attention *a) {
    if (a->B == 0 || a->Hq == 0) return;
    attention_call c = call_of(a);
    bool f32 = a->t == TR_F32;
    int rows = f32 ? F32_QUERIES : BF16_QUERIES;
    int64_t tiles = (a->Sq + rows - 1) / rows;
    size_t delta_bytes = ((size_t)(a->B * a->Hq * a->Sq) * sizeof(float) + 255) / 256 * 256;
    char *work = (char *)tr_cuda_work(s, delta_bytes + (size_t)(a->B * tiles) * sizeof(interval));
    c.delta = (float *)work;
    c.spans = (interval *)(work + delta_bytes);
    dim3 grid((unsigned)tiles, (unsigned)a->Hq, (unsigned)a->B);
    if (tiles > 0 && f32)
        LAUNCH((prepare_kernel<true>), grid, F32_QUERIES, 0, s->handle)(c);
    else if (tiles > 0)
        LAUNCH((prepare_kernel<false>), grid, 128, 0, s->handle)(c);
    tr_cuda_launched(s, "attention's delta");
    if (a->dsink && tiles > 0) {
        LAUNCH(sink_kernel, (unsigned)a->Hq, SINK_THREADS, 0, s->handle)(c);
        tr_cuda_launched(s, "attention's sinks");
    }
    if (f32)
        tr_attention_f32_backward(s, &c);
    else
        tr_attention_bf16_backward(s, &c);
}

extern "C" void tr_cuda_attention(tr_kernels *k) {
    k->attention_forward = attention_forward;
    k->attention_backward = attention_backward;
}
