/* attention.c - attention as its formula: each pair of a query and a key in plain loops, sums in
 * fp64. Floor: kernels. */
#include "kernels/cpu/scratch.h"
#include "kernels/makers.h"
#include "kernels/ref/scalar.h"

#include <math.h>

/* Query i of sequence b sees key j: the rules of tr_mask. */
static bool sees(const tr_attention *a, int64_t b, int64_t i, int64_t j) {
    const tr_mask *m = &a->mask;
    int64_t p = m->q_start + i, s = m->k_start + j, apart = p > s ? p - s : s - p;
    if (m->causal && s > p) return false;
    if (m->window > 0 && apart >= m->window) return false;
    if (m->doc_begin && s < m->doc_begin[b * a->Sq + i]) return false;
    if (m->doc_begin && m->doc_end && s >= m->doc_end[b * a->Sq + i]) return false;
    return m->dilation <= 1 || apart % m->dilation == 0 || apart < m->local;
}

/* Where element 0 of row i of a head lies in q, k, ... */
static int64_t q_at(const tr_attention *a, int64_t b, int64_t i, int64_t h) {
    return b * a->q_batch + i * a->q_row + h * a->Dqk;
}
static int64_t k_at(const tr_attention *a, int64_t b, int64_t j, int64_t h) {
    return b * a->k_batch + j * a->k_row + h * a->Dqk;
}
static int64_t v_at(const tr_attention *a, int64_t b, int64_t j, int64_t h) {
    return b * a->v_batch + j * a->v_row + h * a->Dv;
}
static int64_t out_at(const tr_attention *a, int64_t b, int64_t i, int64_t h) {
    return b * a->out_batch + i * a->out_row + h * a->Dv;
}
static int64_t dout_at(const tr_attention *a, int64_t b, int64_t i, int64_t h) {
    return b * a->dout_batch + i * a->dout_row + h * a->Dv;
}
static int64_t lse_at(const tr_attention *a, int64_t b, int64_t i, int64_t h) {
    return b * a->lse_batch + h * a->lse_head + i;
}

static double dot(tr_dtype xt, const void *x, int64_t xi, tr_dtype yt, const void *y, int64_t yi,
                  int64_t n) {
    double sum = 0;
    for (int64_t d = 0; d < n; d++)
        sum += (double)tr_load(xt, x, xi + d) * (double)tr_load(yt, y, yi + d);
    return sum;
}

/* The capped score of a query (element q of a->q) and a key, rounded to fp32: so that p is exactly
 * 1 where a row sees one key, whose score its fp32 lse is. *slope_p: the derivative by the plain
 * score. */
static double score(const tr_attention *a, int64_t q, int64_t k, double *slope_p) {
    double s = dot(a->t, a->q, q, a->t, a->k, k, a->Dqk) * (double)a->scale;
    *slope_p = 1;
    if (!(a->soft_cap > 0)) return (double)(float)s;
    double t = tanh(s / (double)a->soft_cap);
    *slope_p = 1 - t * t;
    return (double)(float)((double)a->soft_cap * t);
}

/* Writes a row of out and its lse from the sum of p v (o), or merges it into what is there. */
static void finish_row(const tr_attention *a, int64_t at, float *lse, const double *o, double m,
                       double l) {
    double block = m + log(l), old = (double)*lse;
    if (a->merge && l == 0) return;
    if (a->merge && old != -INFINITY) {
        double top = fmax(old, block);
        double merged = top + log1p(exp(-fabs(old - block))), share = exp(block - merged);
        for (int64_t d = 0; d < a->Dv; d++) {
            double x = (double)tr_load(a->out_t, a->out, at + d);
            tr_store(a->out_t, a->out, at + d, (float)(x - share * (x - o[d] / l)));
        }
        *lse = (float)merged;
        return;
    }
    for (int64_t d = 0; d < a->Dv; d++)
        tr_store(a->out_t, a->out, at + d, l == 0 ? 0.0f : (float)(o[d] / l));
    *lse = l == 0 ? -INFINITY : (float)block;
}

static void attention_forward(tr_stream *stream, const tr_attention *a) {
    (void)stream;
    double *s = tr_scratch((size_t)(a->Sk + a->Dv) * sizeof *s), *o = s + a->Sk, slope;
    for (int64_t b = 0; b < a->B; b++)
        for (int64_t h = 0; h < a->Hq; h++)
            for (int64_t i = 0; i < a->Sq; i++) {
                int64_t hk = h / (a->Hq / a->Hkv);
                double m = -INFINITY, l = 0;
                for (int64_t j = 0; j < a->Sk; j++) {
                    if (!sees(a, b, i, j)) continue;
                    s[j] = score(a, q_at(a, b, i, h), k_at(a, b, j, hk), &slope);
                    if (!(s[j] <= m)) m = s[j];
                }
                bool nothing = m == -INFINITY;
                double sink = a->sink ? (double)a->sink[h] : -INFINITY;
                if (sink > m && !nothing) m = sink;
                for (int64_t d = 0; d < a->Dv; d++) o[d] = 0;
                for (int64_t j = 0; j < a->Sk; j++) {
                    if (!sees(a, b, i, j)) continue;
                    double p = exp(s[j] - m);
                    l += p;
                    for (int64_t d = 0; d < a->Dv; d++)
                        o[d] += p * (double)tr_load(a->t, a->v, v_at(a, b, j, hk) + d);
                }
                if (!nothing) l += exp(sink - m);
                finish_row(a, out_at(a, b, i, h), a->lse + lse_at(a, b, i, h), o, m, l);
            }
}

/* One row's part of the gradients: dq is written, dk and dv (fp64 [Sk, D] of the head) added to. */
static void backward_row(const tr_attention *a, int64_t b, int64_t h, int64_t i, double *dq,
                         double *dk, double *dv) {
    int64_t hk = h / (a->Hq / a->Hkv), dout = dout_at(a, b, i, h), q = q_at(a, b, i, h);
    double lse = (double)a->lse[lse_at(a, b, i, h)], slope;
    double delta = dot(a->t, a->dout, dout, a->out_t, a->out, out_at(a, b, i, h), a->Dv);
    for (int64_t d = 0; d < a->Dqk; d++) dq[d] = 0;
    if (lse == -INFINITY) return;
    if (a->dsink) a->dsink[h] -= (float)(exp((double)a->sink[h] - lse) * delta);
    for (int64_t j = 0; j < a->Sk; j++) {
        if (!sees(a, b, i, j)) continue;
        int64_t k = k_at(a, b, j, hk), v = v_at(a, b, j, hk);
        double p = exp(score(a, q, k, &slope) - lse);
        double dp = dot(a->t, a->dout, dout, a->t, a->v, v, a->Dv);
        double ds = p * (dp - delta) * slope * (double)a->scale;
        for (int64_t d = 0; d < a->Dqk; d++) {
            dq[d] += ds * (double)tr_load(a->t, a->k, k + d);
            dk[j * a->Dqk + d] += ds * (double)tr_load(a->t, a->q, q + d);
        }
        for (int64_t d = 0; d < a->Dv; d++)
            dv[j * a->Dv + d] += p * (double)tr_load(a->t, a->dout, dout + d);
    }
}

/* Elements at.. of a gradient tensor = or += x[n]. */
static void write_row(const tr_attention *a, void *grad, int64_t at, const double *x, int64_t n,
                      bool add) {
    for (int64_t d = 0; d < n; d++) {
        double old = add ? (double)tr_load(a->grad_t, grad, at + d) : 0;
        tr_store(a->grad_t, grad, at + d, (float)(old + x[d]));
    }
}

static void attention_backward(tr_stream *stream, const tr_attention *a) {
    (void)stream;
    int64_t Dqk = a->Dqk, Dv = a->Dv, group = a->Hkv > 0 ? a->Hq / a->Hkv : 0;
    double *dk = tr_scratch((size_t)(a->Sk * (Dqk + Dv) + Dqk) * sizeof *dk);
    double *dv = dk + a->Sk * Dqk, *dq = dv + a->Sk * Dv;
    for (int64_t b = 0; b < a->B; b++)
        for (int64_t hk = 0; hk < a->Hkv; hk++) {
            for (int64_t x = 0; x < a->Sk * (Dqk + Dv); x++) dk[x] = 0;
            for (int64_t h = hk * group; h < (hk + 1) * group; h++)
                for (int64_t i = 0; i < a->Sq; i++) {
                    backward_row(a, b, h, i, dq, dk, dv);
                    write_row(a, a->dq, q_at(a, b, i, h), dq, Dqk, a->add_dq);
                }
            for (int64_t j = 0; j < a->Sk; j++) {
                write_row(a, a->dk, k_at(a, b, j, hk), dk + j * Dqk, Dqk, a->add_dkv);
                write_row(a, a->dv, v_at(a, b, j, hk), dv + j * Dv, Dv, a->add_dkv);
            }
        }
}

void tr_ref_attention(tr_kernels *k) {
    k->attention_forward = attention_forward;
    k->attention_backward = attention_backward;
}
