/* loss.c - embedding and cross-entropy as their formulas, sums in fp64. Floor: kernels. */
#include "kernels/makers.h"
#include "kernels/ref/scalar.h"

#include <math.h>
#include <string.h>

static void embedding_forward(tr_stream *s, tr_dtype t, void *y, const int32_t *token,
                              const void *table, int64_t first, int64_t V, int64_t N, int64_t H) {
    (void)s;
    for (int64_t n = 0; n < N; n++) {
        int64_t row = token[n] - first;
        if (row >= 0 && row < V)
            memcpy(tr_at_mutable(t, y, n * H), tr_at(t, table, row * H),
                   (size_t)H * tr_dtype_bytes(t));
        else
            memset(tr_at_mutable(t, y, n * H), 0, (size_t)H * tr_dtype_bytes(t));
    }
}

static void embedding_backward(tr_stream *s, tr_dtype t, float *dtable, const int32_t *token,
                               const void *dy, int64_t first, int64_t V, int64_t N, int64_t H) {
    (void)s;
    for (int64_t n = 0; n < N; n++) {
        int64_t row = token[n] - first;
        for (int64_t h = 0; h < H && row >= 0 && row < V; h++)
            dtable[row * H + h] += tr_load(t, dy, n * H + h);
    }
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

static void cross_entropy_part(tr_stream *s, const float *logits, int64_t ld, const int32_t *label,
                               int64_t first, double *part, int64_t N, int64_t V) {
    (void)s;
    for (int64_t n = 0; n < N; n++) {
        const float *x = logits + n * ld;
        double *p = part + 3 * n;
        int64_t own = label[n] - first;
        p[0] = -INFINITY;
        p[1] = p[2] = 0;
        if (label[n] < 0) continue;
        for (int64_t v = 0; v < V; v++) p[0] = fmax(p[0], (double)x[v]);
        for (int64_t v = 0; v < V; v++) p[1] += exp((double)x[v] - p[0]);
        if (own >= 0 && own < V) p[2] = (double)x[own];
    }
}

static void cross_entropy_whole(tr_stream *s, tr_dtype t, const double *parts, int64_t P,
                                const float *logits, int64_t ld, const int32_t *label,
                                int64_t first, float *loss, double *loss_sum, void *dlogits,
                                int64_t dlogits_ld, float scale, int64_t N, int64_t V) {
    (void)s;
    for (int64_t n = 0; n < N; n++) {
        bool counts = label[n] >= 0;
        double max = -INFINITY, sum = 0, own = 0;
        for (int64_t p = 0; p < P; p++) max = fmax(max, parts[(p * N + n) * 3]);
        for (int64_t p = 0; p < P; p++) {
            const double *part = parts + (p * N + n) * 3;
            sum += part[1] * exp(part[0] - max);
            own += part[2];
        }
        double lse = counts ? max + log(sum) : 0, value = counts ? lse - own : 0;
        if (loss) loss[n] = (float)value;
        if (loss_sum) *loss_sum += value;
        for (int64_t v = 0; v < V && dlogits; v++) {
            double x = (double)logits[n * ld + v];
            double p = counts ? exp(x - lse) - (first + v == label[n] ? 1 : 0) : 0;
            tr_store(t, dlogits, n * dlogits_ld + v, (float)((double)scale * p));
        }
    }
}

void tr_ref_loss(tr_kernels *k) {
    k->embedding_forward = embedding_forward;
    k->embedding_backward = embedding_backward;
    k->cross_entropy = cross_entropy;
    k->cross_entropy_part = cross_entropy_part;
    k->cross_entropy_whole = cross_entropy_whole;
}
