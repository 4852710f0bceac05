/* optimizer.cu - AdamW and the sum of squares. Floor: kernels.
 *
 * Both are bound by memory: AdamW moves 28 bytes an element (p, m, v both ways, g) and those of the
 * compute copy, the sum of squares 4. Not measured on a card yet. */
#include "kernels/cuda/vec.h"

#include "kernels/makers.h"

#include <math.h>

typedef struct {
    float learning_rate, beta1, beta2, rest1, rest2; /* rest = 1 - beta */
    float m_scale, v_scale;                          /* 1 / (1 - beta^t) */
    float epsilon, weight_decay, grad_scale;
} adamw_step;

template <int N, class T>
DEVFN void adamw_at(adamw_step h, float *p, T *compute, float *m, float *v, const float *g,
                    int64_t i) {
    float value[N], mean[N], square[N], grad[N];
    load(grad, g + i);
    load(mean, m + i);
    load(square, v + i);
    load(value, p + i);
#pragma unroll
    for (int j = 0; j < N; j++) {
        grad[j] *= h.grad_scale;
        mean[j] = h.beta1 * mean[j] + h.rest1 * grad[j];
        square[j] = h.beta2 * square[j] + h.rest2 * grad[j] * grad[j];
        const float update = mean[j] * h.m_scale / (sqrtf(square[j] * h.v_scale) + h.epsilon);
        value[j] -= h.learning_rate * (update + h.weight_decay * value[j]);
    }
    store(m + i, mean);
    store(v + i, square);
    store(p + i, value);
    if (compute) store(compute + i, value);
}

/* Groups of N elements, and the last few one by one. */
template <class T, int N>
__global__ void adamw_all(adamw_step h, float *p, T *compute, float *m, float *v, const float *g,
                          int64_t n) {
    const int64_t whole = n / N * N;
    const int64_t me = (int64_t)blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
    for (int64_t i = me * N; i < whole; i += all * N) adamw_at<N>(h, p, compute, m, v, g, i);
    if (whole + me < n) adamw_at<1>(h, p, compute, m, v, g, whole + me);
}

template <class T>
static void launch_adamw(tr_stream *s, const adamw_step &h, float *p, T *compute, float *m,
                         float *v, const float *g, int64_t n) {
    const bool wide = is_wide(p, 0) && is_wide(m, 0) && is_wide(v, 0) && is_wide(g, 0) &&
                      (uintptr_t)compute % (4 * sizeof(T)) == 0;
    if (n <= 0) return;
    if (wide) LAUNCH((adamw_all<T, 4>), blocks_for(n, THREADS * 4), THREADS, 0, s->handle)
    (h, p, compute, m, v, g, n);
    else LAUNCH((adamw_all<T, 1>), blocks_for(n, THREADS), THREADS, 0, s->handle)(h, p, compute, m,
                                                                                  v, g, n);
    tr_cuda_launched(s, "adamw");
}

static void adamw(tr_stream *s, const tr_adamw *h, float *p, void *compute, tr_dtype compute_t,
                  float *m, float *v, const float *g, int64_t n) {
    const double beta1 = h->beta1, beta2 = h->beta2, t = (double)h->t;
    const adamw_step step = {h->learning_rate,
                             h->beta1,
                             h->beta2,
                             (float)(1 - beta1),
                             (float)(1 - beta2),
                             (float)(1 / (1 - pow(beta1, t))),
                             (float)(1 / (1 - pow(beta2, t))),
                             h->epsilon,
                             h->weight_decay,
                             h->grad_scale};
    if (compute_t == TR_BF16)
        launch_adamw(s, step, p, (bf16 *)compute, m, v, g, n);
    else
        launch_adamw(s, step, p, (float *)compute, m, v, g, n);
}

/* --- sum of squares ------------------------------------------------------------------------- */

enum { SQUARE_BLOCKS = 1024 }; /* what the last block adds up */

/* Sums that depend on n alone, whatever the address of x. */
template <int N> __global__ void squares(double *part, const float *x, int64_t n) {
    SIMT_SHARED(double, red, WARPS);
    const int64_t me = (int64_t)blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
    double sum = 0;
    for (int64_t i = me * 4; i < n; i += all * 4) {
        float v[4] = {0, 0, 0, 0};
        if (N == 4 && i + 4 <= n)
            load(v, x + i);
        else
            for (int j = 0; j < 4; j++) v[j] = i + j < n ? x[i + j] : 0;
#pragma unroll
        for (int j = 0; j < 4; j++) sum += (double)v[j] * (double)v[j];
    }
    sum = block_sum(sum, red);
    if (threadIdx.x == 0) part[blockIdx.x] = sum;
}

static void sum_squares(tr_stream *s, double *sum, const float *x, int64_t n) {
    if (n <= 0) return;
    const unsigned wanted = blocks_for(n, THREADS * 4);
    const unsigned blocks = wanted < SQUARE_BLOCKS ? wanted : (unsigned)SQUARE_BLOCKS;
    double *part = (double *)tr_cuda_work(s, SQUARE_BLOCKS * sizeof(double));
    if (is_wide(x, 0))
        LAUNCH((squares<4>), blocks, THREADS, 0, s->handle)(part, x, n);
    else
        LAUNCH((squares<1>), blocks, THREADS, 0, s->handle)(part, x, n);
    tr_cuda_launched(s, "sum_squares");
    LAUNCH((add_parts<double>), 1, THREADS, 0, s->handle)(sum, part, (int64_t)blocks);
    tr_cuda_launched(s, "sum_squares' last sum");
}

extern "C" void tr_cuda_optimizer(tr_kernels *k) {
    k->adamw = adamw;
    k->sum_squares = sum_squares;
}
