/* layers_body.h - norms, rotary positions, gated activations, sums and casts, compiled once for
 * every instruction set by the small files that include it. Floor: kernels.
 *
 * All are bound by memory: each array is read once and written once, in rows that stay in the first
 * cache between two passes; bf16 is converted in registers. One core of a Zen 4 with AVX-512, 32 MB
 * arrays, beside a 32 MB last cache: add 46 GB/s, rmsnorm 28, its backward 19, SwiGLU 32, its
 * backward 39, rope 60 (bf16: 20 for rmsnorm, 14 for its backward, 12 for SwiGLU, 26 for rope).
 * Arrays of 4 MB: twice to three times that. */
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/threads.h"
#include "kernels/cpu/vec.h"
#include "kernels/makers.h"

#include <math.h>

/* --- norms: rmsnorm, and with `layer` layernorm --------------------------------------------- */

typedef struct {
    tr_dtype t;
    void *y;
    float *mean, *rstd; /* mean and b: layernorm's */
    const void *x, *w, *b;
    int64_t C, stride;
    float eps;
} norm_args;

VEC_FN float row_mean(tr_dtype t, const void *x, int64_t row, int64_t C) {
    vec sum[VEC_SUMS] = {0};
    for (int64_t c = 0; c < C; c += VEC_SUMS * VEC)
        for (int u = 0; u < VEC_SUMS; u++)
            sum[u] += vec_load_n(t, x, row + c + u * VEC, C - c - u * VEC);
    return vec_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)C;
}

VEC_FN void norm_rows(tr_dtype t, bool layer, const norm_args *a, int64_t begin, int64_t end) {
    int64_t C = a->C;
    for (int64_t n = begin; n < end; n++) {
        int64_t row = n * a->stride;
        float mean = layer ? row_mean(t, a->x, row, C) : 0;
        vec sum[VEC_SUMS] = {0};
        for (int64_t c = 0; c < C; c += VEC_SUMS * VEC)
            for (int u = 0; u < VEC_SUMS; u++) {
                int64_t at = c + u * VEC;
                vec x = vec_load_n(t, a->x, row + at, C - at);
                if (layer) x = vec_first(x - mean, C - at);
                sum[u] = vec_fma(x, x, sum[u]);
            }
        float total = vec_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
        float r = 1 / sqrtf(total / (float)C + a->eps);
        a->rstd[n] = r;
        if (layer) a->mean[n] = mean;
        for (int64_t c = 0; c < C; c += VEC) {
            vec x = vec_load_n(t, a->x, row + c, C - c), w = vec_load_n(t, a->w, c, C - c), y;
            if (layer)
                y = vec_fma((x - mean) * r, w, vec_load_n(t, a->b, c, C - c));
            else
                y = x * w * r;
            vec_store_n(t, a->y, row + c, C - c, y);
        }
    }
}

static void norm_range(const void *args, int64_t begin, int64_t end) {
    const norm_args *a = args;
    if (a->t == TR_BF16)
        norm_rows(TR_BF16, false, a, begin, end);
    else
        norm_rows(TR_F32, false, a, begin, end);
}

static void layer_norm_range(const void *args, int64_t begin, int64_t end) {
    const norm_args *a = args;
    if (a->t == TR_BF16)
        norm_rows(TR_BF16, true, a, begin, end);
    else
        norm_rows(TR_F32, true, a, begin, end);
}

static void rmsnorm_forward(tr_stream *s, tr_dtype t, void *y, float *rstd, const void *x,
                            const void *w, int64_t N, int64_t C, int64_t stride, float eps) {
    (void)s;
    norm_args a = {t, y, NULL, rstd, x, w, NULL, C, stride, eps};
    tr_for_range(norm_range, &a, N, 2 * N * C * tr_element_bytes(t));
}

static void layernorm_forward(tr_stream *s, tr_dtype t, void *y, float *mean, float *rstd,
                              const void *x, const void *w, const void *b, int64_t N, int64_t C,
                              int64_t stride, float eps) {
    (void)s;
    norm_args a = {t, y, mean, rstd, x, w, b, C, stride, eps};
    tr_for_range(layer_norm_range, &a, N, 2 * N * C * tr_element_bytes(t));
}

/* The gradients of the weight and of the bias are summed in chunks of rows whose number depends on
 * N alone, each into its own row of `partial`; the chunks are then added in order: the same bits
 * for every number of threads. */
enum { NORM_CHUNKS = 64, NORM_CHUNK_MIN_ROWS = 16 };

typedef struct {
    tr_dtype t;
    void *dx;
    float *dw, *db; /* db and mean: layernorm's */
    const void *dy, *x, *w;
    const float *mean, *rstd;
    const void *residual;
    int64_t N, C, stride, chunk_rows, chunks;
    int64_t sums;   /* of a chunk: C, or 2 C */
    float *partial; /* [chunks, sums] */
} norm_grad_args;

/* One row: dw_sum += dy x rstd, and dx = residual + rstd (dy w - x rstd^2 mean(dy w x)). */
VEC_FN void norm_grad_row(tr_dtype t, const norm_grad_args *a, int64_t n, float *dw_sum) {
    int64_t C = a->C, row = n * a->stride;
    float r = a->rstd[n];
    vec sum[2] = {0};
    for (int64_t c = 0; c < C; c += 2 * VEC)
        for (int u = 0; u < 2; u++) {
            int64_t at = c + u * VEC;
            vec dy = vec_load_n(t, a->dy, row + at, C - at);
            vec x = vec_load_n(t, a->x, row + at, C - at);
            vec w = vec_load_n(t, a->w, at, C - at), dw = vec_load_n(TR_F32, dw_sum, at, C - at);
            vec product = dy * x;
            sum[u] = vec_fma(product, w, sum[u]);
            vec_store_n(TR_F32, dw_sum, at, C - at, vec_fma(product, vec_set(r), dw));
        }
    vec slope = vec_set(-r * r * r * (vec_sum(sum[0] + sum[1]) / (float)C));
    for (int64_t c = 0; c < C; c += VEC) {
        vec dy = vec_load_n(t, a->dy, row + c, C - c), w = vec_load_n(t, a->w, c, C - c);
        vec x = vec_load_n(t, a->x, row + c, C - c), base = {0};
        if (a->residual) base = vec_load_n(t, a->residual, row + c, C - c);
        vec_store_n(t, a->dx, row + c, C - c, base + vec_fma(dy * w, vec_set(r), x * slope));
    }
}

/* One row, with xh = (x - mean) rstd and g = dy w: dw_sum += dy xh, db_sum += dy, and
 * dx = residual + rstd (g - mean(g) - xh mean(g xh)). */
VEC_FN void layer_grad_row(tr_dtype t, const norm_grad_args *a, int64_t n, float *dw_sum) {
    int64_t C = a->C, row = n * a->stride;
    float mean = a->mean[n], r = a->rstd[n], *db_sum = dw_sum + C;
    vec sum = {0}, dot = {0};
    for (int64_t c = 0; c < C; c += VEC) {
        int64_t left = C - c;
        vec dy = vec_load_n(t, a->dy, row + c, left), w = vec_load_n(t, a->w, c, left);
        vec xh = (vec_load_n(t, a->x, row + c, left) - mean) * r;
        vec dw = vec_load_n(TR_F32, dw_sum, c, left), db = vec_load_n(TR_F32, db_sum, c, left);
        sum += dy * w;
        dot = vec_fma(dy * w, xh, dot);
        vec_store_n(TR_F32, dw_sum, c, left, vec_fma(dy, xh, dw));
        vec_store_n(TR_F32, db_sum, c, left, db + dy);
    }
    float mean_g = vec_sum(sum) / (float)C, mean_gx = vec_sum(dot) / (float)C;
    for (int64_t c = 0; c < C; c += VEC) {
        int64_t left = C - c;
        vec dy = vec_load_n(t, a->dy, row + c, left), w = vec_load_n(t, a->w, c, left);
        vec xh = (vec_load_n(t, a->x, row + c, left) - mean) * r, base = {0};
        if (a->residual) base = vec_load_n(t, a->residual, row + c, left);
        vec inner = vec_fma(xh, vec_set(-mean_gx), dy * w - mean_g);
        vec_store_n(t, a->dx, row + c, left, vec_fma(inner, vec_set(r), base));
    }
}

VEC_FN void norm_grad_chunks(tr_dtype t, bool layer, const norm_grad_args *a, int64_t begin,
                             int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        float *sums = a->partial + i * a->sums;
        memset(sums, 0, (size_t)a->sums * sizeof *sums);
        int64_t last = tr_min_i64((i + 1) * a->chunk_rows, a->N);
        for (int64_t n = i * a->chunk_rows; n < last; n++)
            if (layer)
                layer_grad_row(t, a, n, sums);
            else
                norm_grad_row(t, a, n, sums);
    }
}

static void norm_grad_range(const void *args, int64_t begin, int64_t end) {
    const norm_grad_args *a = args;
    if (a->t == TR_BF16 && a->db)
        norm_grad_chunks(TR_BF16, true, a, begin, end);
    else if (a->t == TR_BF16)
        norm_grad_chunks(TR_BF16, false, a, begin, end);
    else if (a->db)
        norm_grad_chunks(TR_F32, true, a, begin, end);
    else
        norm_grad_chunks(TR_F32, false, a, begin, end);
}

/* Columns begin..end-1 of the chunks, summed in fp64. */
static void norm_sum_range(const void *args, int64_t begin, int64_t end) {
    const norm_grad_args *a = args;
    enum { COLUMNS = 64 };
    for (int64_t c = begin; c < end; c += COLUMNS) {
        int64_t n = tr_min_i64(COLUMNS, end - c);
        double sum[COLUMNS] = {0};
        for (int64_t i = 0; i < a->chunks; i++)
            for (int64_t j = 0; j < n; j++) sum[j] += (double)a->partial[i * a->sums + c + j];
        for (int64_t j = 0; j < n; j++)
            *(c + j < a->C ? &a->dw[c + j] : &a->db[c + j - a->C]) += (float)sum[j];
    }
}

static void norm_backward(norm_grad_args *a) {
    if (a->N <= 0) return;
    int64_t rows = (a->N + NORM_CHUNKS - 1) / NORM_CHUNKS;
    if (rows < NORM_CHUNK_MIN_ROWS) rows = NORM_CHUNK_MIN_ROWS;
    a->chunk_rows = rows;
    a->chunks = (a->N + rows - 1) / rows;
    a->sums = a->db ? 2 * a->C : a->C;
    a->partial = tr_scratch((size_t)(a->chunks * a->sums) * sizeof(float));
    int64_t arrays = a->residual ? 4 : 3;
    tr_for_range(norm_grad_range, a, a->chunks, arrays * a->N * a->C * tr_element_bytes(a->t));
    tr_for_range(norm_sum_range, a, a->sums, a->chunks * a->sums * (int64_t)sizeof(float));
}

static void rmsnorm_backward(tr_stream *s, tr_dtype t, void *dx, float *dw, const void *dy,
                             const void *x, const void *w, const float *rstd, const void *residual,
                             int64_t N, int64_t C, int64_t stride) {
    (void)s;
    norm_backward(&(norm_grad_args){.t = t,
                                    .dx = dx,
                                    .dw = dw,
                                    .dy = dy,
                                    .x = x,
                                    .w = w,
                                    .rstd = rstd,
                                    .residual = residual,
                                    .N = N,
                                    .C = C,
                                    .stride = stride});
}

static void layernorm_backward(tr_stream *s, tr_dtype t, void *dx, float *dw, float *db,
                               const void *dy, const void *x, const void *w, const float *mean,
                               const float *rstd, const void *residual, int64_t N, int64_t C,
                               int64_t stride) {
    (void)s;
    norm_backward(&(norm_grad_args){.t = t,
                                    .dx = dx,
                                    .dw = dw,
                                    .db = db,
                                    .dy = dy,
                                    .x = x,
                                    .w = w,
                                    .mean = mean,
                                    .rstd = rstd,
                                    .residual = residual,
                                    .N = N,
                                    .C = C,
                                    .stride = stride});
}

/* --- rope ---------------------------------------------------------------------------------- */

enum { ROPE_PAIRS = 128 }; /* pairs whose sine and cosine are held at a time */

typedef struct {
    tr_dtype t;
    void *x;
    const int32_t *position;
    const uint64_t *turns; /* [pairs] freq/2pi in 2^-64 turns, whole turns dropped */
    int64_t heads, D, F, row, first_pair, pairs;
    bool interleaved;
    float factor;
    int direction;
} rope_args;

/* cosine[i], sine[i] of position*freq[i], times factor. Angles are 64-bit fractions of a turn: the
 * product drops whole turns by itself and is exact to 2^-36 of a turn at position 2^20. Then the
 * nearest quarter turn is taken off and Taylor's series used up to pi/4 (rest below 2e-9). */
VEC_FN void rope_angles(const rope_args *a, int32_t position, float *cosine, float *sine) {
#pragma omp simd
    for (int64_t i = 0; i < a->pairs; i++) {
        uint32_t turn = (uint32_t)((a->turns[i] * (uint64_t)(int64_t)position) >> 32);
        uint32_t quarter = (turn + 0x20000000u) >> 30;
        float r = (float)(int32_t)(turn - (quarter << 30)) * 0x1.921fb6p-30f;
        float q = r * r;
        float s = scalar_fma(q, 1.0f / 362880, -1.0f / 5040);
        s = scalar_fma(s, q, 1.0f / 120);
        s = scalar_fma(s, q, -1.0f / 6);
        s = scalar_fma(s * q, r, r);
        float c = scalar_fma(q, -1.0f / 3628800, 1.0f / 40320);
        c = scalar_fma(c, q, -1.0f / 720);
        c = scalar_fma(c, q, 1.0f / 24);
        c = scalar_fma(c, q, -0.5f);
        c = scalar_fma(c, q, 1.0f);
        float x = quarter & 1 ? s : c, y = quarter & 1 ? c : s;
        cosine[i] = (quarter + 1) & 2 ? -x * a->factor : x * a->factor;
        sine[i] = quarter & 2 ? -y * a->factor : y * a->factor;
    }
}

VEC_FN void rope_halves(tr_dtype t, const rope_args *a, int64_t at, const float *cosine,
                        const float *sine) {
    for (int64_t h = 0; h < a->heads; h++)
        for (int64_t i = 0; i < a->pairs; i += VEC) {
            int64_t left = a->pairs - i, low = at + h * a->D + i, high = low + a->F;
            vec c = vec_load_n(TR_F32, cosine, i, left), s = vec_load_n(TR_F32, sine, i, left);
            vec x = vec_load_n(t, a->x, low, left), y = vec_load_n(t, a->x, high, left);
            vec_store_n(t, a->x, low, left, vec_fma(x, c, -(y * s)));
            vec_store_n(t, a->x, high, left, vec_fma(x, s, y * c));
        }
}

/* Cosine c c, sine -s s for every pair, times x and x with neighbours swapped. */
VEC_FN void rope_neighbours(tr_dtype t, const rope_args *a, int64_t at, const float *cosine,
                            const float *sine) {
    float c2[2 * ROPE_PAIRS], s2[2 * ROPE_PAIRS];
    int64_t width = 2 * a->pairs;
    for (int64_t i = 0; i < a->pairs; i++) {
        c2[2 * i] = c2[2 * i + 1] = cosine[i];
        s2[2 * i] = -sine[i];
        s2[2 * i + 1] = sine[i];
    }
    for (int64_t h = 0; h < a->heads; h++)
        for (int64_t i = 0; i < width; i += VEC) {
            int64_t left = width - i, where = at + h * a->D + i;
            vec c = vec_load_n(TR_F32, c2, i, left), s = vec_load_n(TR_F32, s2, i, left);
            vec x = vec_load_n(t, a->x, where, left);
            vec_store_n(t, a->x, where, left, vec_fma(x, c, vec_swap_pairs(x) * s));
        }
}

VEC_FN void rope_rows(tr_dtype t, const rope_args *a, int64_t begin, int64_t end) {
    float cosine[ROPE_PAIRS], sine[ROPE_PAIRS];
    for (int64_t n = begin; n < end; n++) {
        rope_angles(a, a->position[n] * a->direction, cosine, sine);
        int64_t row = n * a->row;
        if (a->interleaved)
            rope_neighbours(t, a, row + 2 * a->first_pair, cosine, sine);
        else
            rope_halves(t, a, row + a->first_pair, cosine, sine);
    }
}

static void rope_range(const void *args, int64_t begin, int64_t end) {
    const rope_args *a = args;
    if (a->t == TR_BF16)
        rope_rows(TR_BF16, a, begin, end);
    else
        rope_rows(TR_F32, a, begin, end);
}

static void rope(tr_stream *s, tr_dtype t, void *x, const int32_t *position, const float *freq,
                 int64_t N, int64_t heads, int64_t D, int64_t F, int64_t row, bool interleaved,
                 float factor, int direction) {
    (void)s;
    uint64_t turns[ROPE_PAIRS];
    rope_args a = {.t = t,
                   .x = x,
                   .position = position,
                   .turns = turns,
                   .heads = heads,
                   .D = D,
                   .F = F,
                   .row = row,
                   .interleaved = interleaved,
                   .factor = factor,
                   .direction = direction};
    for (a.first_pair = 0; a.first_pair < F; a.first_pair += ROPE_PAIRS) {
        a.pairs = tr_min_i64(ROPE_PAIRS, F - a.first_pair);
        for (int64_t i = 0; i < a.pairs; i++) {
            double turn = (double)freq[a.first_pair + i] * 0x1.45f306dc9c883p-3; /* / 2pi */
            turns[i] = (uint64_t)((turn - floor(turn)) * 0x1p64);
        }
        tr_for_range(rope_range, &a, N, 4 * N * heads * a.pairs * tr_element_bytes(t));
    }
}

/* --- element by element --------------------------------------------------------------------- */

typedef struct {
    tr_dtype t, from_t; /* from_t: only the source of cast and add */
    tr_activation f;
    void *out, *out2;
    const void *a, *b, *c;
} map_args;

/* Both activations are x sigmoid(z), for (1 + tanh(z/2)) / 2 is sigmoid(z): z = x, or with GELU
 * 2 sqrt(2/pi) (x + 0.044715 x^3), cut off where its sigmoid is 0 or 1. dz: the slope of z. */
typedef struct {
    vec z, dz;
} glu_inner;

VEC_FN glu_inner inner_of(tr_activation f, vec x) {
    if (f == TR_SILU) return (glu_inner){x, vec_set(1)};
    const float linear = 1.5957691216f, cubic = 0.0713548163f; /* linear * 0.044715 */
    vec near = vec_at_most(vec_at_least(x, -16.0f), 16.0f), square = near * near;
    return (glu_inner){near * vec_fma(square, vec_set(cubic), vec_set(linear)),
                       vec_fma(square, vec_set(3 * cubic), vec_set(linear))};
}

VEC_FN void glu_elements(tr_dtype t, tr_activation f, const map_args *m, int64_t begin,
                         int64_t end) {
    for (int64_t i = begin; i < end; i += VEC) {
        vec gate = vec_load_n(t, m->a, i, end - i), up = vec_load_n(t, m->b, i, end - i);
        vec z = inner_of(f, gate).z;
        vec_store_n(t, m->out, i, end - i, gate / (1.0f + vec_exp(-z)) * up);
    }
}

/* The slope of x sig is sig + x sig z' (1 - sig), sig = sigmoid(z). */
VEC_FN void glu_grad_elements(tr_dtype t, tr_activation f, const map_args *m, int64_t begin,
                              int64_t end) {
    for (int64_t i = begin; i < end; i += VEC) {
        int64_t left = end - i;
        vec dh = vec_load_n(t, m->a, i, left), gate = vec_load_n(t, m->b, i, left);
        glu_inner inner = inner_of(f, gate);
        vec up = vec_load_n(t, m->c, i, left), sig = 1.0f / (1.0f + vec_exp(-inner.z));
        vec value = gate * sig, slope = vec_fma(value, (1.0f - sig) * inner.dz, sig);
        vec_store_n(t, m->out, i, left, dh * up * slope);
        vec_store_n(t, m->out2, i, left, dh * value);
    }
}

VEC_FN void add_elements(tr_dtype t, tr_dtype x_t, const map_args *m, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += VEC) {
        vec y = vec_load_n(t, m->out, i, end - i), x = vec_load_n(x_t, m->a, i, end - i);
        vec_store_n(t, m->out, i, end - i, y + x);
    }
}

VEC_FN void cast_elements(tr_dtype to, tr_dtype from, const map_args *m, int64_t begin,
                          int64_t end) {
    for (int64_t i = begin; i < end; i += VEC)
        vec_store_n(to, m->out, i, end - i, vec_load_n(from, m->a, i, end - i));
}

static void glu_range(const void *args, int64_t begin, int64_t end) {
    const map_args *m = args;
    bool is_silu = m->f == TR_SILU;
    if (m->t == TR_BF16 && is_silu)
        glu_elements(TR_BF16, TR_SILU, m, begin, end);
    else if (m->t == TR_BF16)
        glu_elements(TR_BF16, TR_GELU_TANH, m, begin, end);
    else if (is_silu)
        glu_elements(TR_F32, TR_SILU, m, begin, end);
    else
        glu_elements(TR_F32, TR_GELU_TANH, m, begin, end);
}

static void glu_grad_range(const void *args, int64_t begin, int64_t end) {
    const map_args *m = args;
    bool is_silu = m->f == TR_SILU;
    if (m->t == TR_BF16 && is_silu)
        glu_grad_elements(TR_BF16, TR_SILU, m, begin, end);
    else if (m->t == TR_BF16)
        glu_grad_elements(TR_BF16, TR_GELU_TANH, m, begin, end);
    else if (is_silu)
        glu_grad_elements(TR_F32, TR_SILU, m, begin, end);
    else
        glu_grad_elements(TR_F32, TR_GELU_TANH, m, begin, end);
}

static void add_range(const void *args, int64_t begin, int64_t end) {
    const map_args *m = args;
    if (m->t == TR_F32)
        add_elements(TR_F32, TR_F32, m, begin, end);
    else if (m->from_t == TR_F32)
        add_elements(TR_BF16, TR_F32, m, begin, end);
    else
        add_elements(TR_BF16, TR_BF16, m, begin, end);
}

static void cast_range(const void *args, int64_t begin, int64_t end) {
    const map_args *m = args;
    if (m->t == m->from_t) {
        int64_t bytes = tr_element_bytes(m->t);
        memcpy((char *)m->out + begin * bytes, (const char *)m->a + begin * bytes,
               (size_t)((end - begin) * bytes));
    } else if (m->t == TR_BF16) {
        cast_elements(TR_BF16, TR_F32, m, begin, end);
    } else {
        cast_elements(TR_F32, TR_BF16, m, begin, end);
    }
}

static void glu_forward(tr_stream *s, tr_dtype t, tr_activation f, void *h, const void *gate,
                        const void *up, tr_rows rows, int64_t C) {
    (void)s;
    map_args m = {.t = t, .f = f, .out = h, .a = gate, .b = up};
    int64_t n = tr_rows_used(rows) * C;
    tr_for_range(glu_range, &m, n, 3 * n * tr_element_bytes(t));
}

static void glu_backward(tr_stream *s, tr_dtype t, tr_activation f, void *dgate, void *dup,
                         const void *dh, const void *gate, const void *up, tr_rows rows,
                         int64_t C) {
    (void)s;
    map_args m = {.t = t, .f = f, .out = dgate, .out2 = dup, .a = dh, .b = gate, .c = up};
    int64_t n = tr_rows_used(rows) * C;
    tr_for_range(glu_grad_range, &m, n, 5 * n * tr_element_bytes(t));
}

static void add(tr_stream *s, tr_dtype t, void *y, tr_dtype x_t, const void *x, int64_t n) {
    (void)s;
    map_args m = {.t = t, .from_t = x_t, .out = y, .a = x};
    tr_for_range(add_range, &m, n, n * (2 * tr_element_bytes(t) + tr_element_bytes(x_t)));
}

static void cast(tr_stream *s, tr_dtype to_t, void *to, tr_dtype from_t, const void *from,
                 int64_t n) {
    (void)s;
    map_args m = {.t = to_t, .from_t = from_t, .out = to, .a = from};
    tr_for_range(cast_range, &m, n, n * (tr_element_bytes(to_t) + tr_element_bytes(from_t)));
}

static void fill_rows(tr_kernels *k) {
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
