/* moe.c - routing, sorting rows by expert and moving them, as plain loops. Floor: kernels. */
#include "kernels/makers.h"
#include "kernels/ref/scalar.h"

#include <math.h>

/* Offers x[first .. first + count) to the k largest found, `held` so far, largest first; ties go to
 * what was offered first. Returns how many are held then. */
static int64_t offer(int32_t *index /* [k] */, int64_t held, int64_t k, const float *x,
                     int64_t first, int64_t count) {
    for (int64_t e = first; e < first + count; e++) {
        int64_t at = held;
        while (at > 0 && x[e] > x[index[at - 1]]) at--;
        if (held < k) held++;
        for (int64_t j = held - 1; j > at; j--) index[j] = index[j - 1];
        if (at < k) index[at] = (int32_t)e;
    }
    return held;
}

/* How good group g is: its best logit or, of sigmoids, the sum of its two best scores. */
static float worth_of(const tr_routing *how, const float *x, const float *prob, int64_t g) {
    int64_t size = how->E / how->groups;
    float best = -INFINITY, first = 0, second = 0;
    for (int64_t e = g * size; e < (g + 1) * size; e++) {
        best = fmaxf(best, x[e]);
        second = fmaxf(second, fminf(first, prob[e]));
        first = fmaxf(first, prob[e]);
    }
    return how->score == TR_SIGMOID ? first + second : best;
}

/* Whether group g is among the best: fewer than `kept` are better, or as good and before it. */
static bool is_kept(const tr_routing *how, const float *x, const float *prob, int64_t g) {
    int64_t better = 0;
    float mine = worth_of(how, x, prob, g);
    for (int64_t other = 0; other < how->groups; other++) {
        float there = worth_of(how, x, prob, other);
        better += there > mine || (there == mine && other < g);
    }
    return better < how->kept;
}

static void choose(const tr_routing *how, int32_t *index, const float *x, const float *prob) {
    int64_t size = how->E / how->groups, held = 0;
    for (int64_t g = 0; g < how->groups; g++)
        if (is_kept(how, x, prob, g)) held = offer(index, held, how->k, x, g * size, size);
}

/* What is added to a sum of the scores that divides. */
static double floor_of(const tr_routing *how) {
    return how->score == TR_SIGMOID ? (double)TR_SIGMOID_FLOOR : 0;
}

static void router_forward(tr_stream *s, const tr_routing *how, const float *logits,
                           const uint8_t *valid, float *prob, float *lse, int32_t *index,
                           float *weight, int64_t N) {
    (void)s;
    int64_t E = how->E, k = how->k;
    for (int64_t n = 0; n < N; n++) {
        const float *x = logits + n * E;
        double max = -INFINITY, sum = 0, chosen = 0;
        for (int64_t e = 0; e < E; e++) max = fmax(max, (double)x[e]);
        for (int64_t e = 0; e < E; e++) sum += exp((double)x[e] - max);
        for (int64_t e = 0; e < E; e++)
            prob[n * E + e] = (float)(how->score == TR_SIGMOID ? 1 / (1 + exp(-(double)x[e]))
                                                               : exp((double)x[e] - max) / sum);
        lse[n] = (float)(max + log(sum));
        bool used = !valid || valid[n];
        int32_t *at = index + n * k;
        if (used) choose(how, at, x, prob + n * E); /* scores rise with logits */
        for (int64_t j = 0; j < k && used; j++) chosen += (double)prob[n * E + at[j]];
        for (int64_t j = 0; j < k; j++) {
            if (!used) at[j] = -1;
            double p = used ? (double)prob[n * E + at[j]] : 0;
            weight[n * k + j] =
                (float)(used && how->renormalise ? p / (chosen + floor_of(how)) : p);
        }
    }
}

/* The sum of a token's scores, if its shares are parts of that, else 1. */
static double whole_of(const tr_routing *how, const float *prob) {
    double sum = floor_of(how);
    if (how->score == TR_SOFTMAX) return 1;
    for (int64_t e = 0; e < how->E; e++) sum += (double)prob[e];
    return sum;
}

static void router_stats(tr_stream *s, const tr_routing *how, const float *prob, const float *lse,
                         const int32_t *index, const uint8_t *valid, double *stats, int64_t first,
                         int64_t rows, int64_t N, int64_t G) {
    (void)s;
    int64_t E = how->E, k = how->k;
    for (int64_t i = 0; i < G * (2 + 2 * E); i++) stats[i] = 0;
    for (int64_t n = 0; n < N; n++) {
        if (valid && !valid[n]) continue;
        double *to = stats + (first + n) / rows * (2 + 2 * E);
        to[0] += 1;
        to[1] += (double)lse[n] * (double)lse[n];
        for (int64_t j = 0; j < k; j++) to[2 + index[n * k + j]] += 1;
        double whole = whole_of(how, prob + n * E);
        for (int64_t e = 0; e < E; e++) to[2 + E + e] += (double)prob[n * E + e] / whole;
    }
}

/* Gradient of the chosen prob number j: w_j = p_j / s gives (dw_j - sum_i dw_i w_i) / s. */
static double chosen_grad(const float *dweight, const float *weight, double chosen, int64_t j,
                          int64_t k, bool renormalise) {
    if (!renormalise) return (double)dweight[j];
    double dot = 0;
    for (int64_t i = 0; i < k; i++) dot += (double)dweight[i] * (double)weight[i];
    return ((double)dweight[j] - dot) / chosen;
}

/* One token: with share_e = p_e / whole, p_e has the gradient (aux_e - sum_i aux_i share_i) / whole
 * and that of its weight, its logit p (1 - p) of that; lse has z, and each logit its softmax. */
static void sigmoid_backward(const tr_routing *how, float *d, const float *dweight,
                             const float *logits, const float *p, double lse, const int32_t *at,
                             const float *weight, const float *aux, double z) {
    double chosen = floor_of(how), whole = whole_of(how, p), mean = 0;
    for (int64_t j = 0; j < how->k; j++) chosen += (double)p[at[j]];
    for (int64_t e = 0; e < how->E && aux; e++) mean += (double)aux[e] * (double)p[e] / whole;
    for (int64_t e = 0; e < how->E; e++) {
        double dp = aux ? ((double)aux[e] - mean) / whole : 0;
        for (int64_t j = 0; j < how->k && dweight; j++)
            if (at[j] == e) dp += chosen_grad(dweight, weight, chosen, j, how->k, how->renormalise);
        double softmax = z != 0 ? exp((double)logits[e] - lse) : 0;
        d[e] = (float)((double)p[e] * (1 - (double)p[e]) * dp + z * softmax);
    }
}

static void router_backward(tr_stream *s, const tr_routing *how, float *dlogits,
                            const float *dweight, const float *logits, const float *prob,
                            const float *lse, const int32_t *index, const float *weight,
                            const uint8_t *valid, const float *prob_grad, const float *z_grad,
                            int64_t first, int64_t rows, int64_t N) {
    (void)s;
    int64_t E = how->E, k = how->k;
    for (int64_t n = 0; n < N; n++) {
        const float *p = prob + n * E;
        const int32_t *at = index + n * k;
        float *d = dlogits + n * E;
        int64_t g = (first + n) / rows;
        if (valid && !valid[n]) {
            for (int64_t e = 0; e < E; e++) d[e] = 0;
            continue;
        }
        if (how->score == TR_SIGMOID) {
            sigmoid_backward(how, d, dweight ? dweight + n * k : NULL, logits + n * E, p,
                             (double)lse[n], at, weight + n * k,
                             prob_grad ? prob_grad + g * E : NULL,
                             z_grad ? (double)z_grad[g] * (double)lse[n] : 0);
            continue;
        }
        double chosen = 0, mean = 0;
        for (int64_t j = 0; j < k; j++) chosen += (double)p[at[j]];
        for (int64_t pass = 0; pass < 2; pass++) /* the mean of the gradient, then the result */
            for (int64_t e = 0; e < E; e++) {
                double dp = prob_grad ? (double)prob_grad[g * E + e] : 0;
                for (int64_t j = 0; j < k && dweight; j++)
                    if (at[j] == e)
                        dp += chosen_grad(dweight + n * k, weight + n * k, chosen, j, k,
                                          how->renormalise);
                if (pass == 0) mean += (double)p[e] * dp;
                if (pass == 0) continue;
                double z = z_grad ? (double)z_grad[g] * (double)lse[n] : 0;
                d[e] = (float)((double)p[e] * (dp - mean + z));
            }
    }
}

/* Whether the pair (m, i) takes its expert's place before the pair (n, j). */
static bool goes_first(const float *score, int64_t m, int64_t i, int64_t n, int64_t j, int64_t k,
                       bool by_score) {
    float a = score[m * k + i], b = score[n * k + j];
    return by_score && a != b ? a > b : m < n;
}

static void router_capacity(tr_stream *s, int32_t *taken, const int32_t *index, const float *score,
                            int64_t B, int64_t S, int64_t E, int64_t k, int64_t capacity,
                            bool by_score) {
    (void)s, (void)E;
    for (int64_t n = 0; n < B * S; n++)
        for (int64_t j = 0; j < k; j++) {
            int64_t before = 0, begin = n / S * S;
            for (int64_t m = begin; m < begin + S; m++)
                for (int64_t i = 0; i < k; i++)
                    if (index[m * k + i] == index[n * k + j])
                        before += goes_first(score, m, i, n, j, k, by_score);
            taken[n * k + j] = before < capacity ? index[n * k + j] : -1;
        }
}

/* The place of pair j of a row; -1 if it has none, or an earlier pair has the same. */
static int64_t place_of(const int32_t *index, const int32_t *place, int64_t j) {
    if (index[j] < 0 || !place) return index[j];
    for (int64_t i = 0; i < j; i++)
        if (index[i] >= 0 && place[index[i]] == place[index[j]]) return -1;
    return place[index[j]];
}

static void moe_sort(tr_stream *s, int64_t *offsets, int32_t *row_of, int32_t *pair_of,
                     const int32_t *index, const int32_t *place, int64_t N, int64_t P, int64_t k) {
    (void)s;
    int64_t rows = 0;
    for (int64_t i = 0; i < N * k; i++) row_of[i] = -1;
    for (int64_t p = 0; p < P; p++) {
        offsets[p] = rows;
        for (int64_t i = 0; i < N * k; i++) {
            if (place_of(index + i / k * k, place, i % k) != p) continue;
            row_of[i] = (int32_t)rows;
            pair_of[rows++] = (int32_t)i;
        }
    }
    offsets[P] = rows;
}

static void gather_rows(tr_stream *s, tr_dtype y_t, void *y, tr_dtype x_t, const void *x,
                        const int32_t *from, int64_t divisor, const float *weight, tr_rows rows,
                        int64_t H) {
    (void)s;
    int64_t R = rows.used && *rows.used < rows.max ? *rows.used : rows.max;
    for (int64_t r = 0; r < R; r++)
        for (int64_t h = 0; h < H; h++) {
            float v = tr_load(x_t, x, from[r] / divisor * H + h);
            tr_store(y_t, y, r * H + h, weight ? weight[from[r]] * v : v);
        }
}

static void combine_rows(tr_stream *s, tr_dtype y_t, void *y, tr_dtype x_t, const void *x,
                         const int32_t *row_of, const float *weight, float beta, int64_t N,
                         int64_t k, int64_t H) {
    (void)s;
    for (int64_t n = 0; n < N; n++)
        for (int64_t h = 0; h < H; h++) {
            double sum = beta != 0 ? (double)beta * (double)tr_load(y_t, y, n * H + h) : 0;
            for (int64_t i = n * k; i < (n + 1) * k; i++)
                if (row_of[i] >= 0)
                    sum += (weight ? (double)weight[i] : 1) *
                           (double)tr_load(x_t, x, row_of[i] * H + h);
            tr_store(y_t, y, n * H + h, (float)sum);
        }
}

static void combine_rows_weight(tr_stream *s, float *dweight, tr_dtype dy_t, const void *dy,
                                tr_dtype x_t, const void *x, const int32_t *row_of, int64_t N,
                                int64_t k, int64_t H) {
    (void)s;
    for (int64_t i = 0; i < N * k; i++) {
        double dot = 0;
        for (int64_t h = 0; h < H && row_of[i] >= 0; h++)
            dot += (double)tr_load(dy_t, dy, i / k * H + h) *
                   (double)tr_load(x_t, x, row_of[i] * H + h);
        dweight[i] = (float)dot;
    }
}

void tr_ref_moe(tr_kernels *k) {
    k->router_forward = router_forward;
    k->router_stats = router_stats;
    k->router_backward = router_backward;
    k->router_capacity = router_capacity;
    k->moe_sort = moe_sort;
    k->gather_rows = gather_rows;
    k->combine_rows = combine_rows;
    k->combine_rows_weight = combine_rows_weight;
}
