/* loss_body.h - embedding and cross-entropy, compiled once for each instruction set by the loss*.c
 * that include it. Floor: kernels, internal.
 *
 * Cross-entropy is bound by memory: a row of logits (200 KB for 50257 tokens) comes in once, in
 * blocks that find their maximum and their sum of exponentials while they lie in L1; the gradient
 * reads the row again from L2 and writes it. */
#pragma once
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/threads.h"
#include "kernels/cpu/vec.h"
#include "kernels/makers.h"

#include <math.h>

enum { BLOCK = 1024 }; /* elements; a multiple of VEC */

typedef struct {
    float max;
    double sum; /* of exp(x - max) */
} row_sums;

static float block_max(const float *x, int64_t n) {
    vec m[4];
    for (int u = 0; u < 4; u++) m[u] = vec_set(-INFINITY);
    int64_t i = 0;
    for (; i + 4 * VEC <= n; i += 4 * VEC)
        for (int u = 0; u < 4; u++) {
            vec a = vec_load(TR_F32, x, i + u * VEC);
            m[u] = vec_select(a > m[u], a, m[u]);
        }
    for (int u = 1; u < 4; u++) m[0] = vec_select(m[u] > m[0], m[u], m[0]);
    float max = -INFINITY;
    for (int l = 0; l < VEC; l++) max = m[0][l] > max ? m[0][l] : max;
    for (; i < n; i++) max = x[i] > max ? x[i] : max;
    return max;
}

static double block_sum(const float *x, int64_t n, float max) {
    vec s[2] = {vec_set(0), vec_set(0)};
    int64_t i = 0;
    for (; i + 2 * VEC <= n; i += 2 * VEC)
        for (int u = 0; u < 2; u++) s[u] += vec_exp(vec_load(TR_F32, x, i + u * VEC) - max);
    for (; i < n; i += VEC)
        s[0] += vec_first(vec_exp(vec_load_n(TR_F32, x, i, n - i) - max), n - i);
    return (double)vec_sum(s[0] + s[1]);
}

/* Online over blocks: a larger maximum rescales the sum so far. */
static row_sums sum_row(const float *x, int64_t V) {
    row_sums r = {-INFINITY, 0};
    for (int64_t v = 0; v < V; v += BLOCK) {
        int64_t n = V - v < BLOCK ? V - v : BLOCK;
        float max = block_max(x + v, n);
        if (max > r.max) {
            r.sum *= exp((double)r.max - (double)max);
            r.max = max;
        }
        r.sum += block_sum(x + v, n, r.max > -INFINITY ? r.max : 0); /* so far all were -inf */
    }
    return r;
}

/* g[v] = factor exp(x[v] - max). Each block is finished before it is written and lies ahead of
 * everything written, so g may start where x does. */
static void write_gradient(tr_dtype t, void *g, const float *x, int64_t V, float max,
                           float factor) {
    int64_t v = 0;
    for (; v + 4 * VEC <= V; v += 4 * VEC) {
        vec p[4];
        for (int u = 0; u < 4; u++) p[u] = vec_exp(vec_load(TR_F32, x, v + u * VEC) - max) * factor;
        for (int u = 0; u < 4; u++) vec_store(t, g, v + u * VEC, p[u]);
    }
    for (; v < V; v += VEC)
        vec_store_n(t, g, v, V - v, vec_exp(vec_load_n(TR_F32, x, v, V - v) - max) * factor);
}

typedef struct {
    tr_dtype t;
    const float *logits;
    int64_t ld, V;
    const int32_t *label;
    double *loss; /* [N] */
    void *dlogits;
    int64_t dlogits_ld;
    float scale;
} ce_args;

/* Loss and gradient of row n from the sums of its logits. The label is column `label` here, if it
 * is one of them; its logit is `own` above the maximum. Nothing is asked of a row without label. */
static void finish_row(const ce_args *a, int64_t n, int64_t label, row_sums r, double own) {
    size_t width = tr_dtype_bytes(a->t);
    char *g = a->dlogits ? (char *)a->dlogits + (size_t)(n * a->dlogits_ld) * width : NULL;
    if (a->label[n] < 0) {
        a->loss[n] = 0;
        if (g) memset(g, 0, (size_t)a->V * width);
        return;
    }
    const float *x = a->logits + n * a->ld;
    a->loss[n] = log(r.sum) - own;
    if (!g) return;
    if (a->t == TR_F32)
        write_gradient(TR_F32, g, x, a->V, r.max, (float)((double)a->scale / r.sum));
    else
        write_gradient(TR_BF16, g, x, a->V, r.max, (float)((double)a->scale / r.sum));
    if (label < 0 || label >= a->V) return;
    float d = (float)((double)a->scale * (exp(own) / r.sum - 1));
    if (a->t == TR_F32)
        ((float *)(void *)g)[label] = d;
    else
        ((tr_bf16 *)(void *)g)[label] = tr_f32_to_bf16(d);
}

static void cross_entropy_rows(const void *args, int64_t begin, int64_t end) {
    const ce_args *a = args;
    for (int64_t n = begin; n < end; n++) {
        int64_t label = a->label[n];
        const float *x = a->logits + n * a->ld;
        row_sums r = {0, 0};
        if (label >= 0) r = sum_row(x, a->V);
        finish_row(a, n, label, r, label >= 0 ? (double)x[label] - (double)r.max : 0);
    }
}

static void add_losses(const double *each, float *loss, double *loss_sum, int64_t N) {
    for (int64_t n = 0; n < N; n++) {
        if (loss) loss[n] = (float)each[n];
        if (loss_sum) *loss_sum += each[n];
    }
}

static void cross_entropy(tr_stream *s, tr_dtype t, const float *logits, int64_t ld,
                          const int32_t *label, float *loss, double *loss_sum, void *dlogits,
                          int64_t dlogits_ld, float scale, int64_t N, int64_t V) {
    (void)s;
    double *each = tr_scratch((size_t)N * sizeof *each);
    ce_args a = {t, logits, ld, V, label, each, dlogits, dlogits_ld, scale};
    tr_for_range(cross_entropy_rows, &a, N, N * V * (dlogits ? 8 : 4));
    add_losses(each, loss, loss_sum, N);
}

/* --- over a vocabulary in parts --------------------------------------------------------------- */

typedef struct {
    ce_args ce;
    int64_t first, N, P;
    double *part;
    const double *parts;
} part_args;

static void part_rows(const void *args, int64_t begin, int64_t end) {
    const part_args *a = args;
    for (int64_t n = begin; n < end; n++) {
        const float *x = a->ce.logits + n * a->ce.ld;
        int64_t own = a->ce.label[n] - a->first;
        row_sums r = {-INFINITY, 0};
        if (a->ce.label[n] >= 0) r = sum_row(x, a->ce.V);
        a->part[3 * n] = (double)r.max;
        a->part[3 * n + 1] = r.sum;
        a->part[3 * n + 2] = a->ce.label[n] >= 0 && own >= 0 && own < a->ce.V ? (double)x[own] : 0;
    }
}

static void cross_entropy_part(tr_stream *s, const float *logits, int64_t ld, const int32_t *label,
                               int64_t first, double *part, int64_t N, int64_t V) {
    (void)s;
    part_args a = {
        .ce = {.logits = logits, .ld = ld, .V = V, .label = label}, .first = first, .part = part};
    tr_for_range(part_rows, &a, N, N * V * 4);
}

static void whole_rows(const void *args, int64_t begin, int64_t end) {
    const part_args *a = args;
    for (int64_t n = begin; n < end; n++) {
        double max = -INFINITY, sum = 0, label = 0;
        for (int64_t p = 0; p < a->P; p++) max = fmax(max, a->parts[(p * a->N + n) * 3]);
        for (int64_t p = 0; p < a->P; p++) {
            const double *part = a->parts + (p * a->N + n) * 3;
            sum += part[1] * exp(part[0] - max);
            label += part[2];
        }
        finish_row(&a->ce, n, a->ce.label[n] - a->first, (row_sums){(float)max, sum}, label - max);
    }
}

static void cross_entropy_whole(tr_stream *s, tr_dtype t, const double *parts, int64_t P,
                                const float *logits, int64_t ld, const int32_t *label,
                                int64_t first, float *loss, double *loss_sum, void *dlogits,
                                int64_t dlogits_ld, float scale, int64_t N, int64_t V) {
    (void)s;
    double *each = tr_scratch((size_t)N * sizeof *each);
    part_args a = {.ce = {t, logits, ld, V, label, each, dlogits, dlogits_ld, scale},
                   .first = first,
                   .N = N,
                   .P = P,
                   .parts = parts};
    tr_for_range(whole_rows, &a, N, N * V * (dlogits ? 8 : 4));
    add_losses(each, loss, loss_sum, N);
}

/* --- embedding -------------------------------------------------------------------------------- */

typedef struct {
    tr_dtype t;
    const int32_t *token;
    const void *from;
    void *to;
    int64_t first, V, N, H;
} embedding_args;

/* Of token n in the table; -1: another part of the vocabulary has it. */
static int64_t embedding_row(const embedding_args *a, int64_t n) {
    int64_t row = a->token[n] - a->first;
    return row >= 0 && row < a->V ? row : -1;
}

static void embedding_rows(const void *args, int64_t begin, int64_t end) {
    const embedding_args *a = args;
    size_t row = (size_t)a->H * tr_dtype_bytes(a->t);
    for (int64_t n = begin; n < end; n++) {
        int64_t at = embedding_row(a, n);
        if (at < 0)
            memset((char *)a->to + (size_t)n * row, 0, row);
        else
            memcpy((char *)a->to + (size_t)n * row, (const char *)a->from + (size_t)at * row, row);
    }
}

static void embedding_forward(tr_stream *s, tr_dtype t, void *y, const int32_t *token,
                              const void *table, int64_t first, int64_t V, int64_t N, int64_t H) {
    (void)s;
    embedding_args a = {t, token, table, y, first, V, N, H};
    tr_for_range(embedding_rows, &a, N, 2 * N * H * (int64_t)tr_dtype_bytes(t));
}

/* Threads share the columns, so that a token met twice is added to in row order. An item is a
 * vector of columns. */
static void embedding_columns(const void *args, int64_t begin, int64_t end) {
    const embedding_args *a = args;
    int64_t stop = end * VEC < a->H ? end * VEC : a->H;
    for (int64_t n = 0; n < a->N; n++) {
        int64_t row = embedding_row(a, n);
        if (row < 0) continue;
        float *to = (float *)a->to + row * a->H;
        for (int64_t h = begin * VEC; h < stop; h += VEC) {
            vec sum = vec_load_n(TR_F32, to, h, stop - h) +
                      vec_load_n(a->t, a->from, n * a->H + h, stop - h);
            vec_store_n(TR_F32, to, h, stop - h, sum);
        }
    }
}

static void embedding_backward(tr_stream *s, tr_dtype t, float *dtable, const int32_t *token,
                               const void *dy, int64_t first, int64_t V, int64_t N, int64_t H) {
    (void)s;
    embedding_args a = {t, token, dy, dtable, first, V, N, H};
    tr_for_range(embedding_columns, &a, (H + VEC - 1) / VEC, 12 * N * H);
}

static void fill_rows(tr_kernels *k) {
    k->embedding_forward = embedding_forward;
    k->embedding_backward = embedding_backward;
    k->cross_entropy = cross_entropy;
    k->cross_entropy_part = cross_entropy_part;
    k->cross_entropy_whole = cross_entropy_whole;
}
