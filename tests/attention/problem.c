/* problem.c - attention calls, and attention in plain float64 loops. Floor: tests. */
#include "problem.h"

#include "kernels/cpu/scratch.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { WORK_BYTES = 4 << 20 };

const char *const output_name[OUTPUTS] = {"out", "lse", "dq", "dk", "dv", "dsink"};

/* Making. */

static double noise(uint64_t *state) { /* uniform in [-1, 1) */
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) * 0x1p-52 - 1;
}

static double rounded(tr_dtype t, double x) {
    return t == TR_BF16 ? (double)tr_bf16_to_f32(tr_f32_to_bf16((float)x)) : (double)(float)x;
}

static void *buffer(int64_t n, size_t bytes) {
    void *p = aligned_alloc(64, ((size_t)(n > 0 ? n : 1) * bytes + 63) / 64 * 64);
    assert_non_null(p);
    return p;
}

/* Dense [B, S, H, D] numbers: `common` times one vector per head dimension, plus noise. */
static double *tensor(const tr_attention *a, int64_t rows, int64_t width, double common,
                      uint64_t seed, tr_dtype t) {
    int64_t n = a->B * rows * width;
    double *x = buffer(n, sizeof *x);
    uint64_t state = seed;
    for (int64_t i = 0; i < n; i++)
        x[i] = rounded(t, common * sin(0.7 * (double)(i % width)) + noise(&state));
    return x;
}

static void upload(void *to, tr_dtype t, const double *x, int64_t B, int64_t S, int64_t width,
                   int64_t batch, int64_t row) {
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < S; i++)
            for (int64_t c = 0; c < width; c++) {
                float f = (float)x[(b * S + i) * width + c];
                if (t == TR_BF16)
                    ((tr_bf16 *)to)[b * batch + i * row + c] = tr_f32_to_bf16(f);
                else
                    ((float *)to)[b * batch + i * row + c] = f;
            }
}

void problem_upload(problem *p) {
    tr_attention *a = &p->a;
    upload((void *)(uintptr_t)a->q, a->t, p->q, a->B, a->Sq, a->Hq * a->Dqk, a->q_batch, a->q_row);
    upload((void *)(uintptr_t)a->k, a->t, p->k, a->B, a->Sk, a->Hkv * a->Dqk, a->k_batch, a->k_row);
    upload((void *)(uintptr_t)a->v, a->t, p->v, a->B, a->Sk, a->Hkv * a->Dv, a->v_batch, a->v_row);
    upload((void *)(uintptr_t)a->dout, a->t, p->dout, a->B, a->Sq, a->Hq * a->Dv, a->dout_batch,
           a->dout_row);
}

void problem_poison(problem *p) {
    tr_attention *a = &p->a;
    size_t out = tr_dtype_bytes(a->out_t), grad = tr_dtype_bytes(a->grad_t);
    memset(a->out, 255, (size_t)(a->B * a->out_batch) * out);
    memset(a->lse, 255, (size_t)(a->B * a->lse_batch) * sizeof(float));
    memset(a->dq, 255, (size_t)(a->B * a->q_batch) * grad);
    memset(a->dk, 255, (size_t)(a->B * a->k_batch) * grad);
    memset(a->dv, 255, (size_t)(a->B * a->v_batch) * grad);
    for (int64_t h = 0; h < a->Hq && a->dsink; h++) a->dsink[h] = 0;
    memset(tr_scratch(WORK_BYTES), 255, WORK_BYTES);
}

/* Documents of uneven length; the last rows see nothing where ends are given. */
static void make_documents(problem *p, int docs) {
    tr_attention *a = &p->a;
    p->doc_begin = buffer(a->B * a->Sq, sizeof(int32_t));
    p->doc_end = buffer(a->B * a->Sq, sizeof(int32_t));
    for (int64_t b = 0; b < a->B; b++)
        for (int64_t i = 0; i < a->Sq; i++) {
            int64_t length = 19 + 22 * b, s = a->mask.q_start + i;
            int64_t begin = s / length * length, end = begin + length;
            if (docs == 2 && i >= a->Sq - 3) end = begin;
            p->doc_begin[b * a->Sq + i] = (int32_t)begin;
            p->doc_end[b * a->Sq + i] = (int32_t)end;
        }
    a->mask.doc_begin = p->doc_begin;
    a->mask.doc_end = docs == 2 ? p->doc_end : NULL;
}

problem problem_make(const shape *s, tr_dtype t, tr_dtype out_t, tr_dtype grad_t) {
    problem p = {0};
    tr_attention *a = &p.a;
    a->B = s->B ? s->B : 1, a->Sq = s->Sq, a->Sk = s->Sk ? s->Sk : s->Sq;
    a->Hq = s->Hq ? s->Hq : 1, a->Hkv = s->Hkv ? s->Hkv : a->Hq;
    a->Dqk = s->Dqk, a->Dv = s->Dv ? s->Dv : s->Dqk;
    if (a->Sk < 0) a->Sk = 0;
    a->scale = s->scale != 0 ? s->scale : 1 / sqrtf((float)a->Dqk);
    a->soft_cap = s->cap;
    a->mask = (tr_mask){.causal = s->causal,
                        .q_start = s->q_start,
                        .k_start = s->k_start,
                        .window = s->window,
                        .dilation = s->dilation,
                        .local = s->local};
    if (s->docs) make_documents(&p, s->docs);
    a->t = t, a->out_t = out_t, a->grad_t = grad_t;
    int64_t gap = s->dense ? 0 : 1;
    a->q_row = a->Hq * a->Dqk + 3 * gap, a->q_batch = a->Sq * a->q_row + 5 * gap;
    a->k_row = a->Hkv * a->Dqk + gap, a->k_batch = a->Sk * a->k_row + 2 * gap;
    a->v_row = a->Hkv * a->Dv + 2 * gap, a->v_batch = a->Sk * a->v_row + gap;
    a->out_row = a->Hq * a->Dv + 4 * gap, a->out_batch = a->Sq * a->out_row + 3 * gap;
    a->dout_row = a->Hq * a->Dv + gap, a->dout_batch = a->Sq * a->dout_row + 7 * gap;
    a->lse_head = a->Sq + 2 * gap, a->lse_batch = a->Hq * a->lse_head + gap;
    p.q = tensor(a, a->Sq, a->Hq * a->Dqk, 0.5, 1, t);
    p.k = tensor(a, a->Sk, a->Hkv * a->Dqk, 0.5, 2, t);
    p.v = tensor(a, a->Sk, a->Hkv * a->Dv, 1, 3, t);
    p.dout = tensor(a, a->Sq, a->Hq * a->Dv, 1, 4, t);
    size_t in = tr_dtype_bytes(t), grad = tr_dtype_bytes(grad_t);
    a->q = buffer(a->B * a->q_batch, in), a->k = buffer(a->B * a->k_batch, in);
    a->v = buffer(a->B * a->v_batch, in), a->dout = buffer(a->B * a->dout_batch, in);
    a->out = buffer(a->B * a->out_batch, tr_dtype_bytes(out_t));
    a->lse = buffer(a->B * a->lse_batch, sizeof(float));
    a->dq = buffer(a->B * a->q_batch, grad), a->dk = buffer(a->B * a->k_batch, grad);
    a->dv = buffer(a->B * a->v_batch, grad);
    p.sink = buffer(a->Hq, sizeof(double)), p.dsink = buffer(a->Hq, sizeof(double));
    if (s->sink) {
        float *sink = buffer(a->Hq, sizeof(float));
        for (int64_t h = 0; h < a->Hq; h++) p.sink[h] = (double)(sink[h] = 0.5f * (float)h - 0.3f);
        a->sink = sink;
        a->dsink = buffer(a->Hq, sizeof(float));
    }
    int64_t q = a->B * a->Sq * a->Hq, k = a->B * a->Sk * a->Hkv;
    p.out = buffer(q * a->Dv, sizeof(double)), p.lse = buffer(q, sizeof(double));
    p.dq = buffer(q * a->Dqk, sizeof(double)), p.dk = buffer(k * a->Dqk, sizeof(double));
    p.dv = buffer(k * a->Dv, sizeof(double));
    problem_upload(&p);
    problem_poison(&p);
    return p;
}

void problem_free(problem *p) {
    tr_attention *a = &p->a;
    const void *all[] = {a->q,  a->k,  a->v,    a->dout,  a->out,       a->lse,
                         a->dq, a->dk, a->dv,   a->sink,  a->dsink,     p->q,
                         p->k,  p->v,  p->dout, p->sink,  p->out,       p->lse,
                         p->dq, p->dk, p->dv,   p->dsink, p->doc_begin, p->doc_end};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free((void *)(uintptr_t)all[i]);
}

/* The oracle. */

static bool visible(const problem *p, int64_t b, int64_t i, int64_t j) {
    const tr_mask *m = &p->a.mask;
    int64_t query = m->q_start + i, key = m->k_start + j;
    if (m->causal && key > query) return false;
    if (m->window > 0 && key <= query - m->window) return false;
    if (m->window > 0 && key >= query + m->window) return false;
    if (m->doc_begin && key < m->doc_begin[b * p->a.Sq + i]) return false;
    if (m->doc_end && key >= m->doc_end[b * p->a.Sq + i]) return false;
    if (m->dilation > 1)
        return (query - key) % m->dilation == 0 || llabs((long long)(query - key)) < m->local;
    return true;
}

static double *row_of(double *x, int64_t b, int64_t S, int64_t i, int64_t H, int64_t h, int64_t D) {
    return x + ((b * S + i) * H + h) * D;
}

static double inner(const double *x, const double *y, int64_t n) {
    double sum = 0;
    for (int64_t d = 0; d < n; d++) sum += x[d] * y[d];
    return sum;
}

static double capped(const tr_attention *a, double s) {
    return a->soft_cap > 0 ? (double)a->soft_cap * tanh(s / (double)a->soft_cap) : s;
}

static double score(problem *p, int64_t b, int64_t h, int64_t i, int64_t j) {
    const tr_attention *a = &p->a;
    return (double)a->scale * inner(row_of(p->q, b, a->Sq, i, a->Hq, h, a->Dqk),
                                    row_of(p->k, b, a->Sk, j, a->Hkv, h * a->Hkv / a->Hq, a->Dqk),
                                    a->Dqk);
}

void oracle_forward(problem *p) {
    const tr_attention *a = &p->a;
    for (int64_t b = 0; b < a->B; b++)
        for (int64_t h = 0; h < a->Hq; h++)
            for (int64_t i = 0; i < a->Sq; i++) {
                double top = -INFINITY, sum = 0, *o = row_of(p->out, b, a->Sq, i, a->Hq, h, a->Dv);
                double *lse = p->lse + (b * a->Hq + h) * a->Sq + i;
                for (int64_t j = 0; j < a->Sk; j++)
                    if (visible(p, b, i, j)) top = fmax(top, capped(a, score(p, b, h, i, j)));
                for (int64_t d = 0; d < a->Dv; d++) o[d] = 0;
                *lse = -INFINITY;
                if (top == -INFINITY) continue;
                if (a->sink) sum = exp(p->sink[h] - top);
                for (int64_t j = 0; j < a->Sk; j++) {
                    if (!visible(p, b, i, j)) continue;
                    double e = exp(capped(a, score(p, b, h, i, j)) - top);
                    const double *v = row_of(p->v, b, a->Sk, j, a->Hkv, h * a->Hkv / a->Hq, a->Dv);
                    sum += e;
                    for (int64_t d = 0; d < a->Dv; d++) o[d] += e * v[d];
                }
                for (int64_t d = 0; d < a->Dv; d++) o[d] /= sum;
                *lse = top + log(sum);
            }
}

static void oracle_row(problem *p, int64_t b, int64_t h, int64_t i, double lse) {
    const tr_attention *a = &p->a;
    int64_t hk = h * a->Hkv / a->Hq;
    const double *q = row_of(p->q, b, a->Sq, i, a->Hq, h, a->Dqk);
    const double *dout = row_of(p->dout, b, a->Sq, i, a->Hq, h, a->Dv);
    double *dq = row_of(p->dq, b, a->Sq, i, a->Hq, h, a->Dqk);
    double delta = inner(dout, row_of(p->out, b, a->Sq, i, a->Hq, h, a->Dv), a->Dv);
    if (a->sink) p->dsink[h] -= exp(p->sink[h] - lse) * delta;
    for (int64_t j = 0; j < a->Sk; j++) {
        if (!visible(p, b, i, j)) continue;
        const double *k = row_of(p->k, b, a->Sk, j, a->Hkv, hk, a->Dqk);
        double *dk = row_of(p->dk, b, a->Sk, j, a->Hkv, hk, a->Dqk);
        double *dv = row_of(p->dv, b, a->Sk, j, a->Hkv, hk, a->Dv);
        double plain = score(p, b, h, i, j), s = capped(a, plain), prob = exp(s - lse);
        double slope = a->soft_cap > 0 ? 1 - pow(s / (double)a->soft_cap, 2) : 1;
        double dp = inner(dout, row_of(p->v, b, a->Sk, j, a->Hkv, hk, a->Dv), a->Dv);
        double ds = prob * (dp - delta) * slope * (double)a->scale;
        for (int64_t d = 0; d < a->Dqk; d++) dq[d] += ds * k[d], dk[d] += ds * q[d];
        for (int64_t d = 0; d < a->Dv; d++) dv[d] += prob * dout[d];
    }
}

void oracle_backward(problem *p) {
    const tr_attention *a = &p->a;
    int64_t q = a->B * a->Sq * a->Hq, k = a->B * a->Sk * a->Hkv;
    memset(p->dq, 0, sizeof(double) * (size_t)(q * a->Dqk));
    memset(p->dk, 0, sizeof(double) * (size_t)(k * a->Dqk));
    memset(p->dv, 0, sizeof(double) * (size_t)(k * a->Dv));
    memset(p->dsink, 0, sizeof(double) * (size_t)a->Hq);
    for (int64_t b = 0; b < a->B; b++)
        for (int64_t h = 0; h < a->Hq; h++)
            for (int64_t i = 0; i < a->Sq; i++) {
                double lse = p->lse[(b * a->Hq + h) * a->Sq + i];
                if (lse != -INFINITY) oracle_row(p, b, h, i, lse);
            }
}

/* Comparing. */

int64_t output_elems(const problem *p, output o) {
    const tr_attention *a = &p->a;
    switch (o) {
    case OUT:
        return a->B * a->Sq * a->Hq * a->Dv;
    case LSE:
        return a->B * a->Sq * a->Hq;
    case DQ:
        return a->B * a->Sq * a->Hq * a->Dqk;
    case DK:
        return a->B * a->Sk * a->Hkv * a->Dqk;
    case DV:
        return a->B * a->Sk * a->Hkv * a->Dv;
    case DSINK:
        return a->dsink ? a->Hq : 0;
    case OUTPUTS:
        break;
    }
    return 0;
}

static double strided(tr_dtype t, const void *x, int64_t i, int64_t S, int64_t width, int64_t batch,
                      int64_t row) {
    int64_t at = i / width / S * batch + i / width % S * row + i % width;
    return (double)(t == TR_BF16 ? tr_bf16_to_f32(((const tr_bf16 *)x)[at])
                                 : ((const float *)x)[at]);
}

double output_value(const problem *p, output o, int64_t i) {
    const tr_attention *a = &p->a;
    switch (o) {
    case OUT:
        return strided(a->out_t, a->out, i, a->Sq, a->Hq * a->Dv, a->out_batch, a->out_row);
    case LSE:
        return strided(TR_F32, a->lse, i, a->Hq, a->Sq, a->lse_batch, a->lse_head);
    case DQ:
        return strided(a->grad_t, a->dq, i, a->Sq, a->Hq * a->Dqk, a->q_batch, a->q_row);
    case DK:
        return strided(a->grad_t, a->dk, i, a->Sk, a->Hkv * a->Dqk, a->k_batch, a->k_row);
    case DV:
        return strided(a->grad_t, a->dv, i, a->Sk, a->Hkv * a->Dv, a->v_batch, a->v_row);
    case DSINK:
        return (double)a->dsink[i];
    case OUTPUTS:
        break;
    }
    return NAN;
}

const double *output_want(const problem *p, output o) {
    const double *const want[OUTPUTS] = {p->out, p->lse, p->dq, p->dk, p->dv, p->dsink};
    return want[o];
}

double output_residual(const problem *p, output o) {
    double worst = 0, largest = 1e-3;
    const double *want = output_want(p, o);
    for (int64_t i = 0; i < output_elems(p, o); i++) {
        double got = output_value(p, o, i);
        if (got == want[i]) continue;
        if (!isfinite(got) || !isfinite(want[i])) return 1e30;
        worst = fmax(worst, fabs(got - want[i]));
        largest = fmax(largest, fabs(want[i]));
    }
    return worst / largest;
}

bool output_same(const problem *x, const problem *y, output o) {
    for (int64_t i = 0; i < output_elems(x, o); i++) {
        double u = output_value(x, o, i), w = output_value(y, o, i);
        if (memcmp(&u, &w, sizeof u)) return false;
    }
    return true;
}
