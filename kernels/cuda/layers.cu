/* layers.cu - norms, rotary positions, gated activations, sums and casts. Floor: kernels.
 *
 * All are bound by memory. Bytes an element, b = bytes of the type: norms 2b (further passes
 * over a row hit the cache), their backward 3b, 4b with a residual, and 4 C for each of at most 432
 * blocks for dw, as much for db; rope 2b; glu 3b, backward 5b; add 3b; cast both types'. Not
 * measured on a card yet. */
#include "kernels/cuda/vec.h"

#include "kernels/makers.h"

/* --- norms: rmsnorm, and with LAYER layernorm ------------------------------------------------ */

/* mean and b: layernorm's. */
template <class T> struct norm_rows {
    T *y;
    float *mean, *rstd;
    const T *x, *w, *b;
    int64_t rows, C, stride;
    float eps;
};

template <class T, int N, bool LAYER> __global__ void norm_forward(norm_rows<T> a, int size) {
    SIMT_SHARED(float, red, WARPS);
    const int teams = THREADS / size, begin = (int)threadIdx.x % size * N, step = size * N;
    for (int64_t first = (int64_t)blockIdx.x * teams; first < a.rows;
         first += (int64_t)gridDim.x * teams) {
        const int64_t n = first + (int)threadIdx.x / size, width = n < a.rows ? a.C : 0;
        const T *from = a.x + n * a.stride;
        float sum = 0, mean = 0, v[N], g[N];
        if (LAYER) {
            for (int64_t c = begin; c < width; c += step) {
                load(v, from + c);
#pragma unroll
                for (int j = 0; j < N; j++) mean += v[j];
            }
            mean = team_sum(mean, size, red) / (float)a.C;
        }
        for (int64_t c = begin; c < width; c += step) {
            load(v, from + c);
#pragma unroll
            for (int j = 0; j < N; j++) sum += (v[j] - mean) * (v[j] - mean);
        }
        const float r = 1 / sqrtf(team_sum(sum, size, red) / (float)a.C + a.eps);
        if (width && begin == 0) {
            a.rstd[n] = r;
            if (LAYER) a.mean[n] = mean;
        }
        for (int64_t c = begin; c < width; c += step) {
            load(v, from + c);
            load(g, a.w + c);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] = (v[j] - mean) * (r * g[j]);
            if (LAYER) {
                load(g, a.b + c);
#pragma unroll
                for (int j = 0; j < N; j++) v[j] += g[j];
            }
            store(a.y + n * a.stride + c, v);
        }
    }
}

template <class T, bool LAYER> static void norm(tr_stream *s, const norm_rows<T> &a) {
    constexpr int W = WIDTH<T>;
    if (a.rows <= 0) return;
    const bool wide =
        is_wide(a.x, a.stride) && is_wide(a.y, a.stride) && is_wide(a.w, a.C) && is_wide(a.b, a.C);
    const int size = team_size(a.C, wide ? W : 1);
    const unsigned blocks = blocks_for(a.rows, THREADS / size);
    if (wide)
        LAUNCH((norm_forward<T, W, LAYER>), blocks, THREADS, 0, s->handle)(a, size);
    else
        LAUNCH((norm_forward<T, 1, LAYER>), blocks, THREADS, 0, s->handle)(a, size);
    tr_cuda_launched(s, LAYER ? "layernorm_forward" : "rmsnorm_forward");
}

static void rmsnorm_forward(tr_stream *s, tr_dtype t, void *y, float *rstd, const void *x,
                            const void *w, int64_t N, int64_t C, int64_t stride, float eps) {
    if (t == TR_BF16)
        norm<bf16, false>(
            s, {(bf16 *)y, NULL, rstd, (const bf16 *)x, (const bf16 *)w, NULL, N, C, stride, eps});
    else
        norm<float, false>(s, {(float *)y, NULL, rstd, (const float *)x, (const float *)w, NULL, N,
                               C, stride, eps});
}

static void layernorm_forward(tr_stream *s, tr_dtype t, void *y, float *mean, float *rstd,
                              const void *x, const void *w, const void *b, int64_t N, int64_t C,
                              int64_t stride, float eps) {
    if (t == TR_BF16)
        norm<bf16, true>(s, {(bf16 *)y, mean, rstd, (const bf16 *)x, (const bf16 *)w,
                             (const bf16 *)b, N, C, stride, eps});
    else
        norm<float, true>(s, {(float *)y, mean, rstd, (const float *)x, (const float *)w,
                              (const float *)b, N, C, stride, eps});
}

/* Blocks whose sums of dw the second kernel adds: they fill a card, and their sums are a small part
 * of the traffic. Shared memory that a block takes for them at most. */
enum { NORM_BLOCKS = 432, NORM_SHARED = 96 * 1024 };

typedef struct {
    int64_t rows, C, stride, values; /* sums of dw a thread keeps, then as many of db */
    int size;                        /* threads that share a row */
    bool in_shared;
} norm_shape;

/* db and mean: layernorm's. */
template <class T> struct norm_gradients {
    T *dx;
    float *dw, *db;
    const T *dy, *x, *w;
    const float *mean, *rstd;
    const T *residual;
};

/* With xh = (x - mean) rstd and g = dy w: dx = rstd (g - mean_c(g) - xh mean_c(g xh)) + residual,
 * dw = sum_n dy xh, db = sum_n dy; rmsnorm without the means. Value i of a thread's sums lies at
 * i * THREADS, in shared memory, or for very long rows, which whole blocks share, in `partial`
 * itself. */
template <class T, int N, bool LAYER>
__global__ void __launch_bounds__(THREADS, 4)
    norm_backward(norm_gradients<T> a, float *partial /* [gridDim, sums, size] */, norm_shape p) {
    SIMT_DYN_SMEM(float, shared);
    SIMT_SHARED(float, red, WARPS);
    const int teams = THREADS / p.size, begin = (int)threadIdx.x % p.size * N, step = p.size * N;
    const int64_t sums = LAYER ? 2 * p.values : p.values;
    float *own = partial + blockIdx.x * (sums * p.size);
    float *sum = (p.in_shared ? shared : own) + threadIdx.x;
    for (int64_t i = 0; i < sums; i++) sum[i * THREADS] = 0;
    for (int64_t first = (int64_t)blockIdx.x * teams; first < p.rows;
         first += (int64_t)gridDim.x * teams) {
        const int64_t n = first + (int)threadIdx.x / p.size, width = n < p.rows ? p.C : 0;
        const int64_t row = n * p.stride;
        const float r = width ? a.rstd[n] : 0, mean = LAYER && width ? a.mean[n] : 0;
        float dot = 0, of_g = 0, d[N], v[N], g[N], *to = sum;
        for (int64_t c = begin; c < width; c += step) {
            load(d, a.dy + row + c);
            load(v, a.x + row + c);
            load(g, a.w + c);
#pragma unroll
            for (int j = 0; j < N; j++, to += THREADS) {
                dot += d[j] * g[j] * (v[j] - mean);
                *to += d[j] * ((v[j] - mean) * r);
                if (LAYER) {
                    of_g += d[j] * g[j];
                    to[p.values * THREADS] += d[j];
                }
            }
        }
        const float slope = team_sum(dot, p.size, red) / (float)p.C * r * r;
        if (LAYER) of_g = team_sum(of_g, p.size, red) / (float)p.C;
        for (int64_t c = begin; c < width; c += step) {
            load(d, a.dy + row + c);
            load(v, a.x + row + c);
            load(g, a.w + c);
#pragma unroll
            for (int j = 0; j < N; j++) d[j] = r * (d[j] * g[j] - of_g - (v[j] - mean) * slope);
            if (a.residual) {
                load(v, a.residual + row + c);
#pragma unroll
                for (int j = 0; j < N; j++) d[j] += v[j];
            }
            store(a.dx + row + c, d);
        }
    }
    if (!p.in_shared) return;
    SYNCTHREADS();
    for (int64_t i = threadIdx.x; i < sums * p.size; i += THREADS) {
        const float *from = shared + i / p.size * THREADS + i % p.size;
        float total = 0;
        for (int k = 0; k < teams; k++) total += from[k * p.size];
        own[i] = total;
    }
}

/* dw += the blocks' sums, which lie `stride` apart. A block takes 32 of their values, each warp
 * those of every eighth. */
template <int N>
__global__ void norm_weight(float *dw, const float *partial, int64_t stride, int blocks,
                            norm_shape p) {
    SIMT_SHARED(float, part, THREADS);
    const int lane = (int)threadIdx.x % WARP;
    const int64_t slot = (int64_t)blockIdx.x * WARP + lane, slots = p.values * p.size;
    float sum = 0;
    for (int b = (int)threadIdx.x / WARP; b < blocks && slot < slots; b += WARPS)
        sum += partial[b * stride + slot];
    part[threadIdx.x] = sum;
    SYNCTHREADS();
    const int64_t value = slot / p.size, strip = value / N * N * p.size;
    const int64_t c = strip + slot % p.size * N + value % N;
    if (threadIdx.x >= WARP || slot >= slots || c >= p.C) return;
    for (int i = 1; i < WARPS; i++) sum += part[i * WARP + lane];
    dw[c] += sum;
}

template <class T, int N, bool LAYER>
static void launch_norm_backward(tr_stream *s, const norm_gradients<T> &a, int64_t rows, int64_t C,
                                 int64_t stride) {
    const int size = team_size(C, N);
    norm_shape p = {rows, C, stride, (C + size * N - 1) / (size * N) * N, size, false};
    const int64_t sums = LAYER ? 2 * p.values : p.values, slots = p.values * size;
    const int64_t bytes = sums * THREADS * (int64_t)sizeof(float);
    p.in_shared = bytes <= NORM_SHARED;
    const unsigned wanted = blocks_for(rows, THREADS / size);
    const unsigned blocks = wanted < NORM_BLOCKS ? wanted : (unsigned)NORM_BLOCKS;
    float *partial = (float *)tr_cuda_work(s, blocks * (size_t)(sums * size) * sizeof(float));
    if (p.in_shared) SIMT_MAX_SMEM((norm_backward<T, N, LAYER>), NORM_SHARED);
    LAUNCH((norm_backward<T, N, LAYER>), blocks, THREADS, p.in_shared ? (size_t)bytes : 0,
           s->handle)
    (a, partial, p);
    tr_cuda_launched(s, LAYER ? "layernorm_backward" : "rmsnorm_backward");
    const unsigned parts = (unsigned)((slots + WARP - 1) / WARP);
    LAUNCH((norm_weight<N>), parts, THREADS, 0, s->handle)
    (a.dw, partial, sums * size, (int)blocks, p);
    tr_cuda_launched(s, LAYER ? "layernorm_backward's dw" : "rmsnorm_backward's dw");
    if (!LAYER) return;
    LAUNCH((norm_weight<N>), parts, THREADS, 0, s->handle)
    (a.db, partial + slots, sums * size, (int)blocks, p);
    tr_cuda_launched(s, "layernorm_backward's db");
}

template <class T, bool LAYER>
static void norm_back(tr_stream *s, const norm_gradients<T> &a, int64_t rows, int64_t C,
                      int64_t stride) {
    if (rows <= 0) return;
    if (is_wide(a.x, stride) && is_wide(a.dx, stride) && is_wide(a.dy, stride) &&
        is_wide(a.residual, stride) && is_wide(a.w, C))
        launch_norm_backward<T, WIDTH<T>, LAYER>(s, a, rows, C, stride);
    else
        launch_norm_backward<T, 1, LAYER>(s, a, rows, C, stride);
}

static void rmsnorm_backward(tr_stream *s, tr_dtype t, void *dx, float *dw, const void *dy,
                             const void *x, const void *w, const float *rstd, const void *residual,
                             int64_t N, int64_t C, int64_t stride) {
    if (t == TR_BF16)
        norm_back<bf16, false>(s,
                               {(bf16 *)dx, dw, NULL, (const bf16 *)dy, (const bf16 *)x,
                                (const bf16 *)w, NULL, rstd, (const bf16 *)residual},
                               N, C, stride);
    else
        norm_back<float, false>(s,
                                {(float *)dx, dw, NULL, (const float *)dy, (const float *)x,
                                 (const float *)w, NULL, rstd, (const float *)residual},
                                N, C, stride);
}

static void layernorm_backward(tr_stream *s, tr_dtype t, void *dx, float *dw, float *db,
                               const void *dy, const void *x, const void *w, const float *mean,
                               const float *rstd, const void *residual, int64_t N, int64_t C,
                               int64_t stride) {
    if (t == TR_BF16)
        norm_back<bf16, true>(s,
                              {(bf16 *)dx, dw, db, (const bf16 *)dy, (const bf16 *)x,
                               (const bf16 *)w, mean, rstd, (const bf16 *)residual},
                              N, C, stride);
    else
        norm_back<float, true>(s,
                               {(float *)dx, dw, db, (const float *)dy, (const float *)x,
                                (const float *)w, mean, rstd, (const float *)residual},
                               N, C, stride);
}

/* --- rope ---------------------------------------------------------------------------------- */

/* Heads a thread turns by the sines and cosines it has computed. */
enum { ROPE_HEADS = 8 };

typedef struct {
    int64_t N, heads, D, F, row;
    bool interleaved;
    float factor;
    int direction;
} rope_shape;

/* Cosine and sine of position * freq, times factor: in turns, less whole turns, in fp64; then the
 * nearest quarter turn is taken off and Taylor's series used up to pi/4 (rest below 2e-9). */
DEVFN void rope_angle(float *cosine, float *sine, int position, float freq, float factor) {
    double turns = position * (freq * 0.15915494309189533577);
    turns -= rint(turns);
    const double nearest = rint(4 * turns);
    const float r = (float)((turns - nearest / 4) * 6.2831853071795864769), q = r * r;
    float s = fmaf(q, 1.0f / 362880, -1.0f / 5040);
    s = fmaf(s, q, 1.0f / 120);
    s = fmaf(s, q, -1.0f / 6);
    s = fmaf(s * q, r, r);
    float c = fmaf(q, -1.0f / 3628800, 1.0f / 40320);
    c = fmaf(c, q, -1.0f / 720);
    c = fmaf(c, q, 1.0f / 24);
    c = fmaf(c, q, -0.5f);
    c = fmaf(c, q, 1.0f);
    const int quarter = (int)nearest & 3;
    const float x = quarter & 1 ? s : c, y = quarter & 1 ? c : s;
    *cosine = (quarter + 1) & 2 ? -x * factor : x * factor;
    *sine = quarter & 2 ? -y * factor : y * factor;
}

DEVFN void turn(float *a, float *b, float cosine, float sine) {
    const float x = *a, y = *b;
    *a = x * cosine - y * sine;
    *b = x * sine + y * cosine;
}

/* N pairs of one head, of which N elements lie at `first` and N at `second`. */
template <class T, int N>
DEVFN void turn_pairs(T *first, T *second, bool interleaved, const float (&cosine)[N],
                      const float (&sine)[N]) {
    float a[N], b[N];
    load(a, first);
    load(b, second);
    if (N > 1 && interleaved) {
#pragma unroll
        for (int j = 0; j + 1 < N; j += 2) {
            turn(a + j, a + j + 1, cosine[j / 2], sine[j / 2]);
            turn(b + j, b + j + 1, cosine[(N + j) / 2], sine[(N + j) / 2]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) turn(a + j, b + j, cosine[j], sine[j]);
    }
    store(first, a);
    store(second, b);
}

/* Pair j of the N whose elements begin at element `at` of either half: (i, i+F), or neighbours. */
template <int N> DEVFN int64_t pair_of(const rope_shape &p, int64_t at, int j) {
    if (N == 1 || !p.interleaved) return at + j;
    return j < N / 2 ? at / 2 + j : (p.F + at - N) / 2 + j;
}

/* A thread takes N pairs of one row in up to ROPE_HEADS heads. */
template <class T, int N>
__global__ void __launch_bounds__(THREADS, 4)
    rope_turn(T *x, const int32_t *position, const float *freq, rope_shape p) {
    const int64_t groups = p.F / N, chunks = (p.heads + ROPE_HEADS - 1) / ROPE_HEADS;
    for (int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x; item < p.N * chunks * groups;
         item += (int64_t)gridDim.x * THREADS) {
        const int64_t i = item % groups * N, n = item / groups / chunks;
        const int64_t h = item / groups % chunks * ROPE_HEADS;
        const int64_t end = h + ROPE_HEADS < p.heads ? h + ROPE_HEADS : p.heads;
        const int at = position[n] * p.direction;
        float cosine[N], sine[N];
#pragma unroll
        for (int j = 0; j < N; j++)
            rope_angle(cosine + j, sine + j, at, freq[pair_of<N>(p, i, j)], p.factor);
        const bool one = N == 1 && p.interleaved;
        T *first = x + n * p.row + h * p.D + (one ? 2 * i : i), *second = first + (one ? 1 : p.F);
        for (int64_t head = h; head < end; head++, first += p.D, second += p.D)
            turn_pairs(first, second, p.interleaved, cosine, sine);
    }
}

template <class T, int N>
static void launch_rope(tr_stream *s, T *x, const int32_t *position, const float *freq,
                        rope_shape p) {
    const int64_t items = p.N * ((p.heads + ROPE_HEADS - 1) / ROPE_HEADS) * (p.F / N);
    if (items <= 0) return;
    LAUNCH((rope_turn<T, N>), blocks_for(items, THREADS), THREADS, 0, s->handle)
    (x, position, freq, p);
    tr_cuda_launched(s, "rope");
}

template <class T>
static void turn_heads(tr_stream *s, T *x, const int32_t *position, const float *freq,
                       rope_shape p) {
    if (is_wide(x, p.row) && is_wide(x, p.D) && is_wide(x, p.F))
        launch_rope<T, WIDTH<T>>(s, x, position, freq, p);
    else
        launch_rope<T, 1>(s, x, position, freq, p);
}

static void rope(tr_stream *s, tr_dtype t, void *x, const int32_t *position, const float *freq,
                 int64_t N, int64_t heads, int64_t D, int64_t F, int64_t row, bool interleaved,
                 float factor, int direction) {
    const rope_shape p = {N, heads, D, F, row, interleaved, factor, direction};
    if (t == TR_BF16)
        turn_heads(s, (bf16 *)x, position, freq, p);
    else
        turn_heads(s, (float *)x, position, freq, p);
}

/* --- gated activations ---------------------------------------------------------------------- */

/* Both are x sigmoid(z), for (1 + tanh(z/2)) / 2 is sigmoid(z): z = x, or with GELU
 * 2 sqrt(2/pi) (x + 0.044715 x^3), cut off where its sigmoid is 0 or 1. dz: the slope of z. */
typedef struct {
    float sig, dz;
} activated;

template <tr_activation F> DEVFN activated activate(float x) {
    if (F == TR_SILU) return activated{1 / (1 + expf(-x)), 1};
    const float linear = 1.5957691216f, cubic = 0.0713548163f; /* linear * 0.044715 */
    const float near = fminf(fmaxf(x, -16.0f), 16.0f), square = near * near;
    const float z = near * fmaf(square, cubic, linear);
    return activated{1 / (1 + expf(-z)), fmaf(square, 3 * cubic, linear)};
}

template <tr_activation F, int N, class T> DEVFN void gate_times(T *h, const T *gate, const T *up) {
    float g[N], u[N];
    load(g, gate);
    load(u, up);
#pragma unroll
    for (int j = 0; j < N; j++) u[j] *= g[j] * activate<F>(g[j]).sig;
    store(h, u);
}

/* Groups of N elements, and the last few one by one. */
template <tr_activation F, class T, int N>
__global__ void gate_forward(T *h, const T *gate, const T *up, tr_rows rows, int64_t C) {
    const int64_t n = used_rows(rows) * C, whole = n / N * N;
    const int64_t me = (int64_t)blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
    for (int64_t i = me * N; i < whole; i += all * N) gate_times<F, N>(h + i, gate + i, up + i);
    const int64_t rest = whole + me;
    if (rest < n) gate_times<F, 1>(h + rest, gate + rest, up + rest);
}

template <tr_activation F, class T>
static void glu(tr_stream *s, void *h, const void *gate, const void *up, tr_rows rows, int64_t C) {
    constexpr int W = WIDTH<T>;
    T *to = (T *)h;
    const T *g = (const T *)gate, *u = (const T *)up;
    if (rows.max * C <= 0) return;
    if (is_wide(to, 0) && is_wide(g, 0) && is_wide(u, 0))
        LAUNCH((gate_forward<F, T, W>), blocks_for(rows.max * C, THREADS * W), THREADS, 0,
               s->handle)
    (to, g, u, rows, C);
    else LAUNCH((gate_forward<F, T, 1>), blocks_for(rows.max * C, THREADS), THREADS, 0,
                s->handle)(to, g, u, rows, C);
    tr_cuda_launched(s, "glu_forward");
}

static void glu_forward(tr_stream *s, tr_dtype t, tr_activation f, void *h, const void *gate,
                        const void *up, tr_rows rows, int64_t C) {
    const bool is_silu = f == TR_SILU;
    if (t == TR_BF16 && is_silu)
        glu<TR_SILU, bf16>(s, h, gate, up, rows, C);
    else if (t == TR_BF16)
        glu<TR_GELU_TANH, bf16>(s, h, gate, up, rows, C);
    else if (is_silu)
        glu<TR_SILU, float>(s, h, gate, up, rows, C);
    else
        glu<TR_GELU_TANH, float>(s, h, gate, up, rows, C);
}

/* The slope of x sig is sig + x sig z' (1 - sig). */
template <tr_activation F, int N, class T>
DEVFN void gate_gradient(T *dgate, T *dup, const T *dh, const T *gate, const T *up) {
    float d[N], g[N], u[N];
    load(d, dh);
    load(g, gate);
    load(u, up);
#pragma unroll
    for (int j = 0; j < N; j++) {
        const activated a = activate<F>(g[j]);
        u[j] *= d[j] * fmaf(g[j] * a.sig, (1 - a.sig) * a.dz, a.sig);
        d[j] *= g[j] * a.sig;
    }
    store(dgate, u);
    store(dup, d);
}

template <tr_activation F, class T, int N>
__global__ void gate_backward(T *dgate, T *dup, const T *dh, const T *gate, const T *up,
                              tr_rows rows, int64_t C) {
    const int64_t n = used_rows(rows) * C, whole = n / N * N;
    const int64_t me = (int64_t)blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
    for (int64_t i = me * N; i < whole; i += all * N)
        gate_gradient<F, N>(dgate + i, dup + i, dh + i, gate + i, up + i);
    const int64_t rest = whole + me;
    if (rest < n) gate_gradient<F, 1>(dgate + rest, dup + rest, dh + rest, gate + rest, up + rest);
}

template <tr_activation F, class T>
static void glu_back(tr_stream *s, void *dgate, void *dup, const void *dh, const void *gate,
                     const void *up, tr_rows rows, int64_t C) {
    constexpr int W = WIDTH<T>;
    T *dg = (T *)dgate, *du = (T *)dup;
    const T *d = (const T *)dh, *g = (const T *)gate, *u = (const T *)up;
    if (rows.max * C <= 0) return;
    if (is_wide(dg, 0) && is_wide(du, 0) && is_wide(d, 0) && is_wide(g, 0) && is_wide(u, 0))
        LAUNCH((gate_backward<F, T, W>), blocks_for(rows.max * C, THREADS * W), THREADS, 0,
               s->handle)
    (dg, du, d, g, u, rows, C);
    else LAUNCH((gate_backward<F, T, 1>), blocks_for(rows.max * C, THREADS), THREADS, 0,
                s->handle)(dg, du, d, g, u, rows, C);
    tr_cuda_launched(s, "glu_backward");
}

static void glu_backward(tr_stream *s, tr_dtype t, tr_activation f, void *dgate, void *dup,
                         const void *dh, const void *gate, const void *up, tr_rows rows,
                         int64_t C) {
    const bool is_silu = f == TR_SILU;
    if (t == TR_BF16 && is_silu)
        glu_back<TR_SILU, bf16>(s, dgate, dup, dh, gate, up, rows, C);
    else if (t == TR_BF16)
        glu_back<TR_GELU_TANH, bf16>(s, dgate, dup, dh, gate, up, rows, C);
    else if (is_silu)
        glu_back<TR_SILU, float>(s, dgate, dup, dh, gate, up, rows, C);
    else
        glu_back<TR_GELU_TANH, float>(s, dgate, dup, dh, gate, up, rows, C);
}

/* --- add and cast ---------------------------------------------------------------------------- */

/* y = x, or y += x. */
template <int N, bool ADD, class Y, class X> DEVFN void take(Y *y, const X *x) {
    float v[N], old[N];
    load(v, x);
    if (ADD) {
        load(old, y);
#pragma unroll
        for (int j = 0; j < N; j++) v[j] += old[j];
    }
    store(y, v);
}

template <class Y, class X, bool ADD, int N> __global__ void take_all(Y *y, const X *x, int64_t n) {
    const int64_t whole = n / N * N;
    const int64_t me = (int64_t)blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
    for (int64_t i = me * N; i < whole; i += all * N) take<N, ADD>(y + i, x + i);
    if (whole + me < n) take<1, ADD>(y + whole + me, x + whole + me);
}

template <class Y, class X, bool ADD>
static void launch_take(tr_stream *s, void *to, const void *from, int64_t n) {
    constexpr int W = MIXED<X, Y>;
    Y *y = (Y *)to;
    const X *x = (const X *)from;
    if (n <= 0) return;
    if (is_wide(y, 0) && is_wide(x, 0))
        LAUNCH((take_all<Y, X, ADD, W>), blocks_for(n, THREADS * W), THREADS, 0, s->handle)
    (y, x, n);
    else LAUNCH((take_all<Y, X, ADD, 1>), blocks_for(n, THREADS), THREADS, 0, s->handle)(y, x, n);
    tr_cuda_launched(s, ADD ? "add" : "cast");
}

static void add(tr_stream *s, tr_dtype t, void *y, tr_dtype x_t, const void *x, int64_t n) {
    if (t == TR_F32)
        launch_take<float, float, true>(s, y, x, n);
    else if (x_t == TR_F32)
        launch_take<bf16, float, true>(s, y, x, n);
    else
        launch_take<bf16, bf16, true>(s, y, x, n);
}

static void cast(tr_stream *s, tr_dtype to_t, void *to, tr_dtype from_t, const void *from,
                 int64_t n) {
    if (to_t == TR_F32 && from_t == TR_F32)
        launch_take<float, float, false>(s, to, from, n);
    else if (to_t == TR_F32)
        launch_take<float, bf16, false>(s, to, from, n);
    else if (from_t == TR_F32)
        launch_take<bf16, float, false>(s, to, from, n);
    else
        launch_take<bf16, bf16, false>(s, to, from, n);
}

extern "C" void tr_cuda_layers(tr_kernels *k) {
    k->rmsnorm_forward = rmsnorm_forward;
    k->rmsnorm_backward = rmsnorm_backward;
    k->layernorm_forward = layernorm_forward;
    k->layernorm_backward = layernorm_backward;
    k->rope = rope;
    k->glu_forward = glu_forward;
    k->glu_backward = glu_backward;
    k->add = add;
    k->cast = cast;
}
