/* moe_body.h - the parts of a mixture of experts that compute or move rows, compiled once for every
 * instruction set by the small files that include it. Floor: kernels.
 *
 * Gathering and combining are bound by memory: each row is read and written once. One core of a Zen
 * 4 with AVX-512, rows of 2048, 32 MB: gather 50 GB/s, weighted 45, combine of 8 rows 26, its
 * weights' gradient 14. Routing 64 experts, 8 chosen, costs 0.16 us a token, its backward 0.1. */
#include "kernels/cpu/threads.h"
#include "kernels/cpu/vec.h"
#include "kernels/makers.h"

#include <math.h>

/* --- routing -------------------------------------------------------------------------------- */

typedef struct {
    const tr_routing *how;
    const float *logits;
    const uint8_t *valid;
    float *prob, *lse;
    int32_t *index;
    float *weight;
} route_args;

/* Offers x[first .. first + count) to the k largest found, `held` so far, largest first; ties go to
 * what was offered first. Returns how many are held then. */
static inline int64_t offer(int32_t *index /* [k] */, int64_t held, int64_t k, const float *x,
                            int64_t first, int64_t count) {
    for (int64_t e = first; e < first + count; e++) {
        if (held == k && !(x[e] > x[index[k - 1]])) continue;
        int64_t at = held < k ? held++ : k - 1;
        for (; at > 0 && x[e] > x[index[at - 1]]; at--) index[at] = index[at - 1];
        index[at] = (int32_t)e;
    }
    return held;
}

VEC_FN vec sigmoid(vec x) {
    return 1.0f / (1.0f + vec_exp(-x));
}

/* best[g] and next[g]: the two highest of the `size` logits of a group; next is -inf of one. */
static inline void best_two(float *best, float *next, const float *x, int64_t groups,
                            int64_t size) {
    for (int64_t g = 0; g < groups; g++, x += size) {
        float first = x[0], second = -INFINITY;
        for (int64_t i = 1; i < size; i++)
            if (x[i] > first)
                second = first, first = x[i];
            else if (x[i] > second)
                second = x[i];
        best[g] = first;
        next[g] = second;
    }
}

/* The chosen experts, the largest first: of all, or of the best groups. Returns the largest logit
 * of all. */
static float choose(const tr_routing *how, int32_t *index /* [k] */, const float *x /* [E] */) {
    int64_t groups = how->groups, size = how->E / groups, held = 0;
    if (how->kept == groups) {
        offer(index, 0, how->k, x, 0, how->E);
        return x[index[0]];
    }
    float worth[groups], next[groups];
    int32_t group[how->kept];
    bool kept[groups];
    best_two(worth, next, x, groups, size);
    float max = worth[0];
    for (int64_t g = 0; g < groups; g++) {
        if (worth[g] > max) max = worth[g];
        kept[g] = false;
    }
    for (int64_t g = 0; g < groups && how->score == TR_SIGMOID; g += VEC)
        vec_store_n(TR_F32, worth, g, groups - g,
                    sigmoid(vec_load_n(TR_F32, worth, g, groups - g)) +
                        sigmoid(vec_load_n(TR_F32, next, g, groups - g)));
    offer(group, 0, how->kept, worth, 0, groups);
    for (int64_t i = 0; i < how->kept; i++) kept[group[i]] = true;
    for (int64_t g = 0; g < groups; g++)
        if (kept[g]) held = offer(index, held, how->k, x, g * size, size);
    return max;
}

/* prob = softmax(x); returns log(sum(exp(x))). */
VEC_FN float softmax(float *prob, const float *x, float max, int64_t E) {
    vec total = {0};
    for (int64_t e = 0; e < E; e += VEC) {
        vec p = vec_exp(vec_load_n(TR_F32, x, e, E - e) - max);
        vec_store_n(TR_F32, prob, e, E - e, p);
        total += vec_first(p, E - e);
    }
    float sum = vec_sum(total);
    for (int64_t e = 0; e < E; e += VEC)
        vec_store_n(TR_F32, prob, e, E - e, vec_load_n(TR_F32, prob, e, E - e) / sum);
    return max + logf(sum);
}

/* prob = sigmoid(x); returns log(sum(exp(x))). */
VEC_FN float sigmoids(float *prob, const float *x, float max, int64_t E) {
    vec total = {0};
    for (int64_t e = 0; e < E; e += VEC) {
        vec v = vec_load_n(TR_F32, x, e, E - e);
        vec_store_n(TR_F32, prob, e, E - e, sigmoid(v));
        total += vec_first(vec_exp(v - max), E - e);
    }
    return max + logf(vec_sum(total));
}

/* What is added to a sum of the scores that divides. */
static inline float floor_of(tr_score score) {
    return score == TR_SIGMOID ? TR_SIGMOID_FLOOR : 0;
}

static void route_range(const void *args, int64_t begin, int64_t end) {
    const route_args *a = args;
    int64_t E = a->how->E, k = a->how->k;
    for (int64_t n = begin; n < end; n++) {
        const float *x = a->logits + n * E;
        float *prob = a->prob + n * E, *weight = a->weight + n * k;
        float chosen = floor_of(a->how->score);
        int32_t *index = a->index + n * k;
        float max = choose(a->how, index, x); /* scores rise with logits */
        a->lse[n] =
            a->how->score == TR_SIGMOID ? sigmoids(prob, x, max, E) : softmax(prob, x, max, E);
        bool valid = !a->valid || a->valid[n];
        for (int64_t j = 0; j < k; j++) chosen += prob[index[j]];
        float divisor = a->how->renormalise ? chosen : 1;
        for (int64_t j = 0; j < k; j++) {
            weight[j] = valid ? prob[index[j]] / divisor : 0;
            if (!valid) index[j] = -1;
        }
    }
}

static void router_forward(tr_stream *s, const tr_routing *how, const float *logits,
                           const uint8_t *valid, float *prob, float *lse, int32_t *index,
                           float *weight, int64_t N) {
    (void)s;
    route_args a = {how, logits, valid, prob, lse, index, weight};
    tr_for_range(route_range, &a, N, N * how->E * 16); /* comparing weighs as much as moving */
}

typedef struct {
    float *dlogits;
    const float *dweight, *logits, *prob, *lse;
    const int32_t *index;
    const float *weight;
    const uint8_t *valid;
    const float *prob_grad, *z_grad;
    int64_t first, rows, E, k;
    tr_score score;
    bool renormalise;
} route_grad_args;

/* Gradient of the chosen prob number j of token n. With w_j = p_j / sum p:
 * (dw_j - sum_i dw_i w_i) / sum p. */
static float chosen_grad(const route_grad_args *a, int64_t n, int64_t j) {
    const float *dw = a->dweight + n * a->k, *w = a->weight + n * a->k;
    if (!a->renormalise) return dw[j];
    float dot = 0, sum = floor_of(a->score);
    for (int64_t i = 0; i < a->k; i++) {
        dot += dw[i] * w[i];
        sum += a->prob[n * a->E + a->index[n * a->k + i]];
    }
    return (dw[j] - dot) / sum;
}

/* dlogits = p (dp - <p, dp> + z lse): first for the gradient all experts have, then the chosen. */
static void route_grad_token(const route_grad_args *a, int64_t n) {
    int64_t E = a->E, k = a->dweight ? a->k : 0, g = (a->first + n) / a->rows;
    const float *p = a->prob + n * E, *dp = a->prob_grad ? a->prob_grad + g * E : NULL;
    const int32_t *index = a->index + n * a->k;
    float *d = a->dlogits + n * E;
    vec dot = {0}, none = {0};
    for (int64_t e = 0; dp && e < E; e += VEC)
        dot = vec_fma(vec_load_n(TR_F32, p, e, E - e), vec_load_n(TR_F32, dp, e, E - e), dot);
    float mean = vec_sum(dot);
    for (int64_t j = 0; j < k; j++) mean += p[index[j]] * chosen_grad(a, n, j);
    float all = (a->z_grad ? a->z_grad[g] * a->lse[n] : 0) - mean;
    for (int64_t e = 0; e < E; e += VEC) {
        vec gradient = dp ? vec_load_n(TR_F32, dp, e, E - e) : none;
        vec_store_n(TR_F32, d, e, E - e, vec_load_n(TR_F32, p, e, E - e) * (gradient + all));
    }
    for (int64_t j = 0; j < k; j++) d[index[j]] += p[index[j]] * chosen_grad(a, n, j);
}

/* With share_e = p_e / sum p: p has the gradient (dp - <share, dp>) / sum p and, of the chosen,
 * that of the weight; dlogits = p (1 - p) of it + z lse softmax. */
static void sigmoid_grad_token(const route_grad_args *a, int64_t n) {
    int64_t E = a->E, k = a->dweight ? a->k : 0, g = (a->first + n) / a->rows;
    const float *p = a->prob + n * E, *dp = a->prob_grad ? a->prob_grad + g * E : NULL;
    const float *x = a->logits + n * E;
    const int32_t *index = a->index + n * a->k;
    float *d = a->dlogits + n * E, z = a->z_grad ? a->z_grad[g] * a->lse[n] : 0;
    vec dot = {0}, sum = {0};
    for (int64_t e = 0; dp && e < E; e += VEC) {
        vec score = vec_load_n(TR_F32, p, e, E - e);
        dot = vec_fma(score, vec_load_n(TR_F32, dp, e, E - e), dot);
        sum += score;
    }
    float whole = vec_sum(sum) + TR_SIGMOID_FLOOR, mean = vec_sum(dot) / whole;
    for (int64_t e = 0; e < E; e += VEC) {
        vec score = vec_load_n(TR_F32, p, e, E - e), gradient = {0}, of_lse = {0};
        if (dp) gradient = (vec_load_n(TR_F32, dp, e, E - e) - mean) / whole;
        if (a->z_grad) of_lse = vec_exp(vec_load_n(TR_F32, x, e, E - e) - a->lse[n]) * z;
        vec_store_n(TR_F32, d, e, E - e, score * (1.0f - score) * gradient + of_lse);
    }
    for (int64_t j = 0; j < k; j++) {
        float score = p[index[j]];
        d[index[j]] += score * (1 - score) * chosen_grad(a, n, j);
    }
}

static void route_grad_range(const void *args, int64_t begin, int64_t end) {
    const route_grad_args *a = args;
    for (int64_t n = begin; n < end; n++)
        if ((!a->valid || a->valid[n]) && a->score == TR_SIGMOID)
            sigmoid_grad_token(a, n);
        else if (!a->valid || a->valid[n])
            route_grad_token(a, n);
        else
            memset(a->dlogits + n * a->E, 0, (size_t)a->E * sizeof *a->dlogits);
}

static void router_backward(tr_stream *s, const tr_routing *how, float *dlogits,
                            const float *dweight, const float *logits, const float *prob,
                            const float *lse, const int32_t *index, const float *weight,
                            const uint8_t *valid, const float *prob_grad, const float *z_grad,
                            int64_t first, int64_t rows, int64_t N) {
    (void)s;
    route_grad_args a = {.dlogits = dlogits,
                         .dweight = dweight,
                         .logits = logits,
                         .prob = prob,
                         .lse = lse,
                         .index = index,
                         .weight = weight,
                         .valid = valid,
                         .prob_grad = prob_grad,
                         .z_grad = z_grad,
                         .first = first,
                         .rows = rows,
                         .E = how->E,
                         .k = how->k,
                         .score = how->score,
                         .renormalise = how->renormalise};
    tr_for_range(route_grad_range, &a, N, N * how->E * 8);
}

/* --- moving rows ----------------------------------------------------------------------------- */

typedef struct {
    tr_dtype y_t, x_t; /* y_t is dy's in combine_rows_weight */
    void *y;           /* dweight of combine_rows_weight */
    const void *x, *dy;
    const int32_t *map; /* from or row_of */
    const float *weight;
    int64_t divisor, k, H;
    float beta;
} move_args;

VEC_FN void gather_row(tr_dtype y_t, tr_dtype x_t, const move_args *a, int64_t r) {
    int64_t H = a->H, source = a->map[r] / a->divisor;
    if (!a->weight) {
        for (int64_t h = 0; h < H; h += VEC)
            vec_store_n(y_t, a->y, r * H + h, H - h, vec_load_n(x_t, a->x, source * H + h, H - h));
        return;
    }
    float weight = a->weight[a->map[r]];
    for (int64_t h = 0; h < H; h += VEC)
        vec_store_n(y_t, a->y, r * H + h, H - h,
                    vec_load_n(x_t, a->x, source * H + h, H - h) * weight);
}
static void gather_typed(const move_args *a, int64_t r) {
    if (a->y_t == TR_F32 && a->x_t == TR_F32)
        gather_row(TR_F32, TR_F32, a, r);
    else if (a->y_t == TR_F32)
        gather_row(TR_F32, TR_BF16, a, r);
    else if (a->x_t == TR_F32)
        gather_row(TR_BF16, TR_F32, a, r);
    else
        gather_row(TR_BF16, TR_BF16, a, r);
}

static void gather_range(const void *args, int64_t begin, int64_t end) {
    const move_args *a = args;
    int64_t row = a->H * tr_element_bytes(a->x_t);
    for (int64_t r = begin; r < end; r++)
        if (!a->weight && a->y_t == a->x_t)
            memcpy((char *)a->y + r * row, (const char *)a->x + a->map[r] / a->divisor * row,
                   (size_t)row);
        else
            gather_typed(a, r);
}

static void gather_rows(tr_stream *s, tr_dtype y_t, void *y, tr_dtype x_t, const void *x,
                        const int32_t *from, int64_t divisor, const float *weight, tr_rows rows,
                        int64_t H) {
    (void)s;
    int64_t R = tr_rows_used(rows);
    move_args a = {.y_t = y_t,
                   .x_t = x_t,
                   .y = y,
                   .x = x,
                   .map = from,
                   .weight = weight,
                   .divisor = divisor,
                   .H = H};
    tr_for_range(gather_range, &a, R, R * H * (tr_element_bytes(y_t) + tr_element_bytes(x_t)));
}

/* Four vectors of a row stay in registers while its k sources are added, in their order. */
VEC_FN void combine_row(tr_dtype y_t, tr_dtype x_t, const move_args *a, int64_t n) {
    int64_t H = a->H, k = a->k;
    for (int64_t h = 0; h < H; h += VEC_SUMS * VEC) {
        vec sum[VEC_SUMS] = {0};
        for (int u = 0; a->beta != 0 && u < VEC_SUMS; u++)
            sum[u] = vec_load_n(y_t, a->y, n * H + h + u * VEC, H - h - u * VEC) * a->beta;
        for (int64_t i = n * k; i < (n + 1) * k; i++) {
            if (a->map[i] < 0) continue;
            int64_t source = a->map[i] * H + h;
            vec weight = vec_set(a->weight ? a->weight[i] : 1);
            for (int u = 0; u < VEC_SUMS; u++)
                sum[u] = vec_fma(vec_load_n(x_t, a->x, source + u * VEC, H - h - u * VEC), weight,
                                 sum[u]);
        }
        for (int u = 0; u < VEC_SUMS; u++)
            vec_store_n(y_t, a->y, n * H + h + u * VEC, H - h - u * VEC, sum[u]);
    }
}
static void combine_typed(const move_args *a, int64_t n) {
    if (a->y_t == TR_F32 && a->x_t == TR_F32)
        combine_row(TR_F32, TR_F32, a, n);
    else if (a->y_t == TR_F32)
        combine_row(TR_F32, TR_BF16, a, n);
    else if (a->x_t == TR_F32)
        combine_row(TR_BF16, TR_F32, a, n);
    else
        combine_row(TR_BF16, TR_BF16, a, n);
}

static void combine_range(const void *args, int64_t begin, int64_t end) {
    const move_args *a = args;
    for (int64_t n = begin; n < end; n++) combine_typed(a, n);
}

static void combine_rows(tr_stream *s, tr_dtype y_t, void *y, tr_dtype x_t, const void *x,
                         const int32_t *row_of, const float *weight, float beta, int64_t N,
                         int64_t k, int64_t H) {
    (void)s;
    move_args a = {.y_t = y_t,
                   .x_t = x_t,
                   .y = y,
                   .x = x,
                   .map = row_of,
                   .weight = weight,
                   .beta = beta,
                   .k = k,
                   .H = H};
    tr_for_range(combine_range, &a, N, N * H * (k * tr_element_bytes(x_t) + tr_element_bytes(y_t)));
}

VEC_FN float dot_rows(tr_dtype x_t, const void *x, int64_t x_at, tr_dtype y_t, const void *y,
                      int64_t y_at, int64_t H) {
    vec sum[VEC_SUMS] = {0};
    for (int64_t h = 0; h < H; h += VEC_SUMS * VEC)
        for (int u = 0; u < VEC_SUMS; u++) {
            int64_t at = h + u * VEC;
            sum[u] = vec_fma(vec_load_n(x_t, x, x_at + at, H - at),
                             vec_load_n(y_t, y, y_at + at, H - at), sum[u]);
        }
    return vec_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}
VEC_FN void dot_row(tr_dtype dy_t, tr_dtype x_t, const move_args *a, int64_t n) {
    float *dweight = a->y;
    for (int64_t i = n * a->k; i < (n + 1) * a->k; i++)
        dweight[i] =
            a->map[i] < 0 ? 0 : dot_rows(x_t, a->x, a->map[i] * a->H, dy_t, a->dy, n * a->H, a->H);
}
static void dot_typed(const move_args *a, int64_t n) {
    if (a->y_t == TR_F32 && a->x_t == TR_F32)
        dot_row(TR_F32, TR_F32, a, n);
    else if (a->y_t == TR_F32)
        dot_row(TR_F32, TR_BF16, a, n);
    else if (a->x_t == TR_F32)
        dot_row(TR_BF16, TR_F32, a, n);
    else
        dot_row(TR_BF16, TR_BF16, a, n);
}

static void combine_weight_range(const void *args, int64_t begin, int64_t end) {
    const move_args *a = args;
    for (int64_t n = begin; n < end; n++) dot_typed(a, n);
}

static void combine_rows_weight(tr_stream *s, float *dweight, tr_dtype dy_t, const void *dy,
                                tr_dtype x_t, const void *x, const int32_t *row_of, int64_t N,
                                int64_t k, int64_t H) {
    (void)s;
    move_args a = {
        .y_t = dy_t, .x_t = x_t, .y = dweight, .x = x, .dy = dy, .map = row_of, .k = k, .H = H};
    tr_for_range(combine_weight_range, &a, N,
                 N * H * (k * tr_element_bytes(x_t) + tr_element_bytes(dy_t)));
}

static void fill_rows(tr_kernels *k) {
    k->router_forward = router_forward;
    k->router_backward = router_backward;
    k->gather_rows = gather_rows;
    k->combine_rows = combine_rows;
    k->combine_rows_weight = combine_rows_weight;
}
