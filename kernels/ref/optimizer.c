/* optimizer.c - AdamW and the sum of squares as their formulas. Floor: kernels. */
#include "kernels/makers.h"
#include "kernels/ref/scalar.h"

#include <math.h>

static void adamw(tr_stream *s, const tr_adamw *h, float *p, void *compute, tr_dtype compute_t,
                  float *m, float *v, const float *g, int64_t n) {
    (void)s;
    double beta1 = (double)h->beta1, beta2 = (double)h->beta2;
    double m_bias = 1 - pow(beta1, (double)h->t), v_bias = 1 - pow(beta2, (double)h->t);
    for (int64_t i = 0; i < n; i++) {
        double grad = (double)g[i] * (double)h->grad_scale;
        double m_new = beta1 * (double)m[i] + (1 - beta1) * grad;
        double v_new = beta2 * (double)v[i] + (1 - beta2) * grad * grad;
        double update = m_new / m_bias / (sqrt(v_new / v_bias) + (double)h->epsilon);
        update += (double)h->weight_decay * (double)p[i];
        m[i] = (float)m_new;
        v[i] = (float)v_new;
        p[i] = (float)((double)p[i] - (double)h->learning_rate * update);
        if (compute) tr_store(compute_t, compute, i, p[i]);
    }
}

static void sum_squares(tr_stream *s, double *sum, const float *x, int64_t n) {
    (void)s;
    double total = 0;
    for (int64_t i = 0; i < n; i++) total += (double)x[i] * (double)x[i];
    *sum += total;
}

void tr_ref_optimizer(tr_kernels *k) {
    k->adamw = adamw;
    k->sum_squares = sum_squares;
}
