/* loss.c - embedding and cross-entropy as their formulas, sums in fp64. Floor: kernels. */
#include "kernels/makers.h"
#include "kernels/ref/scalar.h"

#include <math.h>
#include <string.h>

static void embedding_forward(tr_stream *s, tr_dtype t, void *y, const int32_t *token,
                              const void *table, int64_t N, int64_t H) {
    (void)s;
    for (int64_t n = 0; n < N; n++)
        memcpy(tr_at_mutable(t, y, n * H), tr_at(t, table, token[n] * H),
               (size_t)H * tr_dtype_bytes(t));
}

static void embedding_backward(tr_stream *s, tr_dtype t, float *dtable, const int32_t *token,
                               const void *dy, int64_t N, int64_t H) {
    (void)s;
    for (int64_t n = 0; n < N; n++)
        for (int64_t h = 0; h < H; h++) dtable[token[n] * H + h] += tr_load(t, dy, n * H + h);
}

/* log sum_v exp(x[v]) with the largest taken out first. */
static double log_sum_exp(const float *x, int64_t V) {
    double max = -INFINITY, sum = 0;
    for (int64_t v = 0; v < V; v++) max = fmax(max, (double)x[v]);
    for (int64_t v = 0; v < V; v++) sum += exp((double)x[v] - max);
    return max + log(sum);
}

static void cross_entropy(tr_stream *s, tr_dtype t, const float *logits, int64_t ld,
                          const int32_t *label, float *loss, double *loss_sum, void *dlogits,
                          int64_t dlogits_ld, float scale, int64_t N, int64_t V) {
    (void)s;
    for (int64_t n = 0; n < N; n++) {
        const float *x = logits + n * ld;
        bool counts = label[n] >= 0;
        double lse = counts ? log_sum_exp(x, V) : 0;
        double value = counts ? lse - (double)x[label[n]] : 0;
        if (loss) loss[n] = (float)value;
        *loss_sum += value;
        if (!dlogits) continue;
        for (int64_t v = 0; v < V; v++) { /* in place: element v is read before it is written */
            double p = counts ? exp((double)x[v] - lse) - (v == label[n] ? 1 : 0) : 0;
            tr_store(t, dlogits, n * dlogits_ld + v, (float)((double)scale * p));
        }
    }
}

void tr_ref_loss(tr_kernels *k) {
    k->embedding_forward = embedding_forward;
    k->embedding_backward = embedding_backward;
    k->cross_entropy = cross_entropy;
}
