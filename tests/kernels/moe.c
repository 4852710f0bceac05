/* moe.c - routing, sorting and moving the rows of a mixture of experts, of every maker: against
 * float64 or exactly, gradients against finite differences. Floor: tests. */
#include "harness.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const tr_dtype types[] = {TR_F32, TR_BF16};
enum { TYPES = sizeof types / sizeof *types };

static const char *type_name(tr_dtype t) {
    return t == TR_BF16 ? "bf16" : "f32";
}

static double *doubles(int64_t n) {
    double *x = calloc((size_t)n + 1, sizeof *x);
    assert_non_null(x);
    return x;
}

static double *copy_of(const kt_tensor *x) {
    double *y = doubles(x->n);
    memcpy(y, x->value, (size_t)x->n * sizeof *y);
    return y;
}

/* --- routing -------------------------------------------------------------------------------- */

typedef struct {
    int64_t N, E, k, G;
    bool renormalise;
    kt_tensor *logits, *valid, *prob, *lse, *index, *weight;
    kt_tensor *dweight, *prob_grad, *z_grad; /* the gradients that come from behind */
} route;

static void route_buffers(kt_maker *m, route *r) {
    r->prob = kt_filled(m, TR_F32, r->N * r->E, NAN);
    r->lse = kt_filled(m, TR_F32, r->N, NAN);
    r->index = kt_filled(m, TR_I32, r->N * r->k, 77);
    r->weight = kt_filled(m, TR_F32, r->N * r->k, NAN);
}

static void route_forward(kt_maker *m, route *r) {
    m->k->router_forward(m->s, r->logits->data, r->valid ? r->valid->data : NULL, r->prob->data,
                         r->lse->data, r->index->data, r->weight->data, r->N, r->E, r->k,
                         r->renormalise);
}

static bool is_valid(const route *r, int64_t n) {
    return !r->valid || r->valid->value[n] != 0;
}

/* Softmax, lse, the k largest by repeated search, their weights, of row n. */
static void want_route(const route *r, int64_t n, double *prob, double *lse, double *index,
                       double *weight) {
    const double *x = r->logits->value + n * r->E;
    double max = -INFINITY, sum = 0, chosen = 0;
    for (int64_t e = 0; e < r->E; e++) max = fmax(max, x[e]);
    for (int64_t e = 0; e < r->E; e++) sum += exp(x[e] - max);
    for (int64_t e = 0; e < r->E; e++) prob[e] = exp(x[e] - max) / sum;
    *lse = max + log(sum);
    for (int64_t j = 0; j < r->k; j++) {
        int64_t best = -1;
        for (int64_t e = 0; e < r->E; e++) {
            bool taken = false;
            for (int64_t i = 0; i < j; i++) taken |= index[i] == (double)e;
            if (!taken && (best < 0 || x[e] > x[best])) best = e;
        }
        index[j] = (double)best;
        chosen += prob[best];
    }
    for (int64_t j = 0; j < r->k; j++) {
        double p = prob[(int64_t)index[j]];
        weight[j] = !is_valid(r, n) ? 0 : r->renormalise ? p / chosen : p;
    }
    for (int64_t j = 0; j < r->k && !is_valid(r, n); j++) index[j] = -1;
}

static void check_forward(kt_maker *m, route *r) {
    double *prob = doubles(r->N * r->E), *lse = doubles(r->N), *index = doubles(r->N * r->k),
           *weight = doubles(r->N * r->k);
    for (int64_t n = 0; n < r->N; n++)
        want_route(r, n, prob + n * r->E, lse + n, index + n * r->k, weight + n * r->k);
    route_buffers(m, r);
    route_forward(m, r);
    kt_check(m, r->index, index, 0, "router index %lldx%lld k %lld%s", (long long)r->N,
             (long long)r->E, (long long)r->k, r->renormalise ? " renormalised" : "");
    kt_check(m, r->prob, prob, 2e-6, "router prob");
    kt_check(m, r->lse, lse, 1e-6, "router lse");
    kt_check(m, r->weight, weight, 2e-6, "router weight");
    free(prob), free(lse), free(index), free(weight);
}

/* Sets up shapes: N, E, k; every third token invalid in odd shapes; few distinct values in some, so
 * that ties are met. */
static const int64_t route_shapes[][3] = {{0, 4, 2},    {1, 1, 1},    {5, 2, 2},   {33, 7, 3},
                                          {64, 8, 2},   {31, 16, 16}, {40, 17, 4}, {100, 64, 8},
                                          {13, 130, 9}, {300, 257, 8}};
enum { ROUTE_SHAPES = sizeof route_shapes / sizeof *route_shapes };

static route make_route(kt_maker *m, int shape, bool renormalise) {
    const int64_t *s = route_shapes[shape];
    route r = {.N = s[0], .E = s[1], .k = s[2], .renormalise = renormalise};
    r.logits = shape % 3 == 2 ? kt_integers(m, TR_F32, r.N * r.E, -2, 3)
                              : kt_normal(m, TR_F32, r.N * r.E, 3);
    if (shape % 2) r.valid = kt_integers(m, TR_U8, r.N, 0, 2);
    return r;
}

/* Property: probabilities, choices and weights by the formula; the lowest expert wins ties. */
static void test_forward(kt_maker *m) {
    for (int shape = 0; shape < ROUTE_SHAPES; shape++)
        for (int renormalise = 0; renormalise < 2; renormalise++) {
            route r = make_route(m, shape, renormalise);
            check_forward(m, &r);
            kt_release(m);
        }
}

/* Property: the numbers of the contract, extreme logits, ties. */
static void test_forward_numbers(kt_maker *m) {
    route r = {.N = 6, .E = 4, .k = 2};
    r.logits = kt_from(m, TR_F32, 24,
                       (double[]){2,         1,       0, -1, /* */ 8.00, 8.01, 8.00,      8.01,
                                  /* */ 1,   1,       1, 1,  -INFINITY,  3,    -INFINITY, -INFINITY,
                                  /* */ 1e4, 1e4 - 1, 0, 0,  -1e5,       -1e5, -1e5,      -1e5});
    static const double index[] = {0, 1, 1, 3, 0, 1, 1, 0, 0, 1, 0, 1};
    static const double plain[] = {.6439143, .2368828}, renormalised[] = {.7310586, .2689414};
    for (int i = 0; i < 2; i++) {
        r.renormalise = i;
        check_forward(m, &r);
        kt_check(m, r.index, index, 0, "router choices of ties, 8.00 against 8.01, extremes");
        for (int j = 0; j < 2; j++)
            kt_check_number(m, r.weight->value[j], (i ? renormalised : plain)[j], 1e-6,
                            "weight %d of [2,1,0,-1]", j);
    }
}

static void add_gradients(kt_maker *m, route *r, int64_t G) {
    r->G = G;
    r->dweight = kt_normal(m, TR_F32, r->N * r->k, 1);
    r->prob_grad = kt_normal(m, TR_F32, G * r->E, 1);
    r->z_grad = kt_normal(m, TR_F32, G, 0.3);
}

static kt_tensor *route_backward(kt_maker *m, const route *r, bool with_weight) {
    kt_tensor *dlogits = kt_filled(m, TR_F32, r->N * r->E, NAN);
    m->k->router_backward(m->s, dlogits->data, with_weight ? r->dweight->data : NULL, r->prob->data,
                          r->lse->data, r->index->data, r->weight->data,
                          r->valid ? r->valid->data : NULL, r->prob_grad->data, r->z_grad->data,
                          r->N, r->E, r->k, r->G, r->renormalise);
    return dlogits;
}

/* Property: the backward equals the chain rule written out over the full Jacobian of softmax. */
static void test_backward(kt_maker *m) {
    for (int shape = 0; shape < ROUTE_SHAPES; shape++)
        for (int renormalise = 0; renormalise < 2; renormalise++) {
            route r = make_route(m, shape, renormalise);
            add_gradients(m, &r, r.N % 5 == 0 && r.N ? 5 : 1);
            route_buffers(m, &r);
            route_forward(m, &r);
            kt_read(m, r.prob), kt_read(m, r.lse), kt_read(m, r.index);
            double *want = doubles(r.N * r.E), *dp = doubles(r.E);
            for (int64_t n = 0; n < r.N; n++) {
                if (!is_valid(&r, n)) continue;
                const double *p = r.prob->value + n * r.E, *index = r.index->value + n * r.k;
                const double *dw = r.dweight->value + n * r.k;
                int64_t g = n / (r.N / r.G);
                double sum = 0, dot = 0, mean = 0;
                for (int64_t j = 0; j < r.k; j++) sum += p[(int64_t)index[j]];
                for (int64_t j = 0; j < r.k; j++) dot += dw[j] * p[(int64_t)index[j]] / sum;
                for (int64_t e = 0; e < r.E; e++) dp[e] = r.prob_grad->value[g * r.E + e];
                for (int64_t j = 0; j < r.k; j++)
                    dp[(int64_t)index[j]] += r.renormalise ? (dw[j] - dot) / sum : dw[j];
                for (int64_t e = 0; e < r.E; e++) mean += p[e] * dp[e];
                for (int64_t e = 0; e < r.E; e++)
                    want[n * r.E + e] =
                        p[e] * (dp[e] - mean + r.z_grad->value[g] * r.lse->value[n]);
            }
            kt_check(m, route_backward(m, &r, true), want, 1e-5, "router backward %lldx%lld k %lld",
                     (long long)r.N, (long long)r.E, (long long)r.k);
            free(want), free(dp);
            kt_release(m);
        }
}

static double route_value(kt_maker *m, void *context) {
    route *r = context;
    route_forward(m, r);
    const double *w = kt_read(m, r->weight), *p = kt_read(m, r->prob), *lse = kt_read(m, r->lse);
    double sum = 0;
    for (int64_t i = 0; i < r->N * r->k && r->dweight; i++) sum += r->dweight->value[i] * w[i];
    for (int64_t n = 0; n < r->N; n++) {
        int64_t g = n / (r->N / r->G);
        if (!is_valid(r, n)) continue;
        for (int64_t e = 0; e < r->E; e++)
            sum += r->prob_grad->value[g * r->E + e] * p[n * r->E + e];
        sum += r->z_grad->value[g] * lse[n] * lse[n] / 2;
    }
    return sum;
}

/* Property: the backward is the derivative of weights, aux and z terms, with and without
 * renormalising, with and without a gradient of the weights. */
static void test_differences(kt_maker *m) {
    for (int renormalise = 0; renormalise < 2; renormalise++)
        for (int with_weight = 0; with_weight < 2; with_weight++) {
            route r = {.N = 4, .E = 9, .k = 3, .renormalise = renormalise};
            r.logits = kt_normal(m, TR_F32, r.N * r.E, 1);
            for (int64_t i = 0; i < r.N * r.E; i++) /* far from ties */
                r.logits->value[i] = (double)(i * 7 % 9) * 0.4 + 0.05 * r.logits->value[i];
            r.logits = kt_from(m, TR_F32, r.N * r.E, r.logits->value);
            r.valid = kt_from(m, TR_U8, r.N, (double[]){1, 1, 0, 1});
            add_gradients(m, &r, 2);
            if (!with_weight) r.dweight = NULL;
            route_buffers(m, &r);
            double want[36];
            for (int64_t i = 0; i < r.N * r.E; i++)
                want[i] = kt_difference(m, r.logits, i, 1e-2, route_value, &r);
            route_forward(m, &r);
            kt_check(m, route_backward(m, &r, with_weight), want, 1e-3,
                     "router against differences%s%s", renormalise ? ", renormalised" : "",
                     with_weight ? "" : ", aux and z alone");
        }
}

/* Property: statistics are the plain sums over valid tokens, group by group. */
static void test_stats(kt_maker *m) {
    for (int shape = 0; shape < ROUTE_SHAPES; shape++) {
        route r = make_route(m, shape, false);
        int64_t G = r.N % 5 == 0 ? 5 : 1, width = 2 + 2 * r.E;
        route_buffers(m, &r);
        route_forward(m, &r);
        kt_read(m, r.prob), kt_read(m, r.lse), kt_read(m, r.index);
        double *want = doubles(G * width);
        for (int64_t n = 0; n < r.N; n++) {
            if (!is_valid(&r, n)) continue;
            double *to = want + n / (r.N / G) * width;
            to[0] += 1;
            to[1] += r.lse->value[n] * r.lse->value[n];
            for (int64_t j = 0; j < r.k; j++) to[2 + (int64_t)r.index->value[n * r.k + j]] += 1;
            for (int64_t e = 0; e < r.E; e++) to[2 + r.E + e] += r.prob->value[n * r.E + e];
        }
        kt_tensor *stats = kt_filled(m, TR_F64, G * width, NAN);
        m->k->router_stats(m->s, r.prob->data, r.lse->data, r.index->data,
                           r.valid ? r.valid->data : NULL, stats->data, r.N, r.E, r.k, G);
        kt_check(m, stats, want, 1e-13, "router stats %lldx%lld groups %lld", (long long)r.N,
                 (long long)r.E, (long long)G);
        free(want);
        kt_release(m);
    }
}

/* --- capacity and sorting -------------------------------------------------------------------- */

/* Distinct experts a token, some tokens without; `narrow` sends every first choice to expert 0. */
static kt_tensor *make_index(kt_maker *m, int64_t N, int64_t E, int64_t k, bool narrow) {
    kt_tensor *first = kt_integers(m, TR_I32, N, 0, E), *skip = kt_integers(m, TR_I32, N, 0, 7);
    double *index = doubles(N * k);
    for (int64_t i = 0; i < N * k; i++) {
        int64_t start = narrow ? 0 : (int64_t)first->value[i / k];
        index[i] = skip->value[i / k] == 3 ? -1 : (double)((start + i % k) % E);
    }
    kt_tensor *x = kt_from(m, TR_I32, N * k, index);
    free(index);
    return x;
}

/* Pairs of the same sequence and expert that come before pair i. */
static int64_t rank_of(const double *index, const double *score, int64_t i, int64_t begin,
                       int64_t end, int64_t k, bool by_score) {
    int64_t before = 0;
    for (int64_t o = begin; o < end; o++) {
        if (index[o] != index[i]) continue;
        before += by_score && score[o] != score[i] ? score[o] > score[i] : o / k < i / k;
    }
    return before;
}

static void capacity_one(kt_maker *m, const int64_t *s, bool by_score, bool narrow) {
    int64_t B = s[0], S = s[1], E = s[2], k = s[3], capacity = s[4], pairs = B * S * k;
    kt_tensor *index = make_index(m, B * S, E, k, narrow);
    kt_tensor *score = kt_integers(m, TR_F32, pairs, -3, 6); /* ties */
    for (int64_t i = 0; i < pairs / 2; i++)
        score->value[i] = score->value[i] / 7 + 1e-3 * (double)i;
    score = kt_from(m, TR_F32, pairs, score->value);
    kt_tensor *keep = kt_filled(m, TR_U8, pairs, 9);
    double *want = doubles(pairs);
    for (int64_t i = 0; i < pairs; i++) {
        int64_t begin = i / (S * k) * S * k;
        want[i] = index->value[i] >= 0 && rank_of(index->value, score->value, i, begin,
                                                  begin + S * k, k, by_score) < capacity;
    }
    m->k->router_capacity(m->s, keep->data, index->data, score->data, B, S, E, k, capacity,
                          by_score);
    kt_check(m, keep, want, 0, "capacity %lld of B %lld S %lld E %lld k %lld by %s",
             (long long)capacity, (long long)B, (long long)S, (long long)E, (long long)k,
             by_score ? "score" : "position");
    free(want);
}

/* Property: exactly the pairs that a plain ranking of each expert's pairs would keep. */
static void test_capacity(kt_maker *m) {
    static const int64_t shapes[][5] = {
        /* B, S, E, k, capacity */
        {0, 5, 4, 2, 3},     {1, 0, 4, 2, 3},    {1, 1, 1, 1, 1},  {1, 1, 1, 1, 0},
        {2, 33, 4, 2, 7},    {3, 40, 8, 8, 11},  {1, 64, 3, 1, 0}, {1, 64, 3, 2, 1000},
        {2, 300, 300, 2, 2}, {1, 500, 600, 3, 4}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int by_score = 0; by_score < 2; by_score++)
            for (int narrow = 0; narrow < 2; narrow++) {
                capacity_one(m, shapes[i], by_score, narrow);
                kt_release(m);
            }
    kt_tensor *index = kt_filled(m, TR_I32, 4, 0), *keep = kt_filled(m, TR_U8, 4, 9);
    kt_tensor *score = kt_from(m, TR_F32, 4, (double[]){.2, .5, .5, .5});
    m->k->router_capacity(m->s, keep->data, index->data, score->data, 1, 4, 1, 1, 2, false);
    kt_check(m, keep, (double[]){1, 1, 0, 0}, 0, "capacity 2 of 4 keeps positions 0 and 1");
    m->k->router_capacity(m->s, keep->data, index->data, score->data, 1, 4, 1, 1, 2, true);
    kt_check(m, keep, (double[]){0, 1, 1, 0}, 0, "capacity 2 of 4 keeps the best, lowest rows");
}

/* Property: kept pairs in order of expert, then row; places and pairs are inverses of each other.
 */
static void test_sort(kt_maker *m) {
    static const int64_t shapes[][3] = {/* N, E, k */ {0, 3, 2},
                                        {1, 1, 1},
                                        {7, 4, 4},
                                        {50, 8, 2},
                                        {333, 64, 6},
                                        {20, 9, 1},
                                        {1000, 300, 3}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int variant = 0; variant < 4; variant++) { /* bit 0: with keep, bit 1: narrow */
            int64_t N = shapes[i][0], E = shapes[i][1], k = shapes[i][2], rows = 0;
            kt_tensor *index = make_index(m, N, E, k, variant & 2);
            kt_tensor *keep = variant & 1 ? kt_integers(m, TR_U8, N * k, 0, 2) : NULL;
            kt_tensor *offsets = kt_filled(m, TR_I64, E + 1, -9);
            kt_tensor *row_of = kt_filled(m, TR_I32, N * k, -9);
            kt_tensor *pair_of = kt_filled(m, TR_I32, N * k, -9);
            double *want_offsets = doubles(E + 1), *want_row = doubles(N * k);
            double *want_pair = copy_of(pair_of);
            for (int64_t p = 0; p < N * k; p++) want_row[p] = -1;
            for (int64_t e = 0; e < E; e++) {
                for (int64_t p = 0; p < N * k; p++)
                    if (index->value[p] == (double)e && (!keep || keep->value[p] != 0)) {
                        want_row[p] = (double)rows;
                        want_pair[rows++] = (double)p;
                    }
                want_offsets[e + 1] = (double)rows;
            }
            m->k->moe_sort(m->s, offsets->data, row_of->data, pair_of->data, index->data,
                           keep ? keep->data : NULL, N, E, k);
            kt_check(m, offsets, want_offsets, 0, "sort offsets %lldx%lld k %lld variant %d",
                     (long long)N, (long long)E, (long long)k, variant);
            kt_check(m, row_of, want_row, 0, "sort places");
            kt_check(m, pair_of, want_pair, 0, "sort pairs");
            free(want_offsets), free(want_row), free(want_pair);
            kt_release(m);
        }
}

/* Property: arrivals by source and expert become rows by expert and source, each once. */
static void test_regroup(kt_maker *m) {
    static const int64_t shapes[][3] = {/* P, El, largest count */ {1, 1, 5},
                                        {1, 4, 9},
                                        {4, 1, 9},
                                        {3, 5, 1},
                                        {3, 5, 2},
                                        {8, 16, 40}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int64_t P = shapes[i][0], El = shapes[i][1], rows = 0, place = 0;
        kt_tensor *counts = kt_integers(m, TR_I64, P * El, 0, shapes[i][2]);
        for (int64_t c = 0; c < P * El; c++) rows += (int64_t)counts->value[c];
        kt_tensor *offsets = kt_filled(m, TR_I64, El + 1, -9);
        kt_tensor *from = kt_filled(m, TR_I32, rows, -9), *to = kt_filled(m, TR_I32, rows, -9);
        double *want_offsets = doubles(El + 1), *want_from = doubles(rows),
               *want_to = doubles(rows);
        for (int64_t e = 0; e < El; want_offsets[++e] = (double)place) {
            int64_t arrival = 0;
            for (int64_t c = 0; c < P * El; arrival += (int64_t)counts->value[c++])
                for (int64_t j = 0; c % El == e && j < (int64_t)counts->value[c]; j++) {
                    want_to[arrival + j] = (double)place;
                    want_from[place++] = (double)(arrival + j);
                }
        }
        m->k->moe_regroup(m->s, offsets->data, from->data, to->data, counts->data, P, El);
        kt_check(m, offsets, want_offsets, 0, "regroup offsets %lldx%lld rows %lld", (long long)P,
                 (long long)El, (long long)rows);
        kt_check(m, from, want_from, 0, "regroup from");
        kt_check(m, to, want_to, 0, "regroup to");
        free(want_offsets), free(want_from), free(want_to);
        kt_release(m);
    }
}

/* --- moving rows ----------------------------------------------------------------------------- */

static const int64_t move_shapes[][4] = {/* N, E, k, H */
                                         {0, 2, 1, 8},    {1, 1, 1, 1},    {3, 4, 4, 5},
                                         {9, 3, 2, 64},   {50, 8, 2, 129}, {40, 300, 5, 48},
                                         {200, 8, 2, 333}};
enum { MOVE_SHAPES = sizeof move_shapes / sizeof *move_shapes };

/* Tokens sorted by expert, some dropped. Row r of the sorted order has r < used, NaN lies beyond.
 */
typedef struct {
    int64_t N, E, k, H, pairs, used;
    kt_tensor *row_of, *pair_of, *weight, *count;
} moves;

static moves make_moves(kt_maker *m, const int64_t *shape) {
    moves v = {.N = shape[0], .E = shape[1], .k = shape[2], .H = shape[3]};
    v.pairs = v.N * v.k;
    kt_tensor *index = make_index(m, v.N, v.E, v.k, false),
              *keep = kt_integers(m, TR_U8, v.pairs, 0, 4);
    kt_tensor *offsets = kt_filled(m, TR_I64, v.E + 1, 0);
    v.row_of = kt_filled(m, TR_I32, v.pairs, -1), v.pair_of = kt_filled(m, TR_I32, v.pairs, -1);
    m->k->moe_sort(m->s, offsets->data, v.row_of->data, v.pair_of->data, index->data, keep->data,
                   v.N, v.E, v.k);
    kt_read(m, v.row_of), kt_read(m, v.pair_of);
    v.used = (int64_t)kt_read(m, offsets)[v.E];
    v.weight = kt_normal(m, TR_F32, v.pairs, 1);
    v.count = kt_from(m, TR_I64, 1, &(double){(double)v.used});
    return v;
}

/* Rows of expert order: numbers up to `used`, NaN beyond. */
static kt_tensor *expert_rows(kt_maker *m, const moves *v, tr_dtype t) {
    kt_tensor *x = kt_normal(m, t, v->pairs * v->H, 1);
    for (int64_t i = v->used * v->H; i < x->n; i++) x->value[i] = NAN;
    return kt_from(m, t, x->n, x->value);
}

/* Property: gathered rows are the tokens' (exactly, or once rounded when weighted); rows beyond the
 * used ones are not written. */
static void check_gather(kt_maker *m, const moves *v, tr_dtype t, bool weighted) {
    kt_tensor *x = kt_normal(m, t, v->N * v->H, 1), *y = kt_filled(m, t, v->pairs * v->H, 7);
    double *want = copy_of(y);
    for (int64_t i = 0; i < v->used * v->H; i++) {
        int64_t pair = (int64_t)v->pair_of->value[i / v->H];
        double w = weighted ? v->weight->value[pair] : 1;
        want[i] = kt_round(t, w * x->value[pair / v->k * v->H + i % v->H]);
    }
    m->k->gather_rows(m->s, t, y->data, x->data, v->pair_of->data, v->k,
                      weighted ? v->weight->data : NULL, (tr_rows){v->pairs, v->count->data}, v->H);
    kt_check(m, y, want, 0, "gather %s%s %lld of %lld rows of %lld", type_name(t),
             weighted ? " weighted" : "", (long long)v->used, (long long)v->pairs, (long long)v->H);
    free(want);
}

/* Property: combining sums each token's rows; beta 0 does not read y. */
static void check_combine(kt_maker *m, const moves *v, tr_dtype t, bool weighted, float beta) {
    kt_tensor *x = expert_rows(m, v, t);
    kt_tensor *y = beta != 0 ? kt_normal(m, t, v->N * v->H, 1) : kt_filled(m, t, v->N * v->H, NAN);
    double *want = doubles(y->n);
    for (int64_t i = 0; i < y->n; i++) {
        if (beta != 0) want[i] = (double)beta * y->value[i];
        for (int64_t p = i / v->H * v->k; p < (i / v->H + 1) * v->k; p++) {
            int64_t row = (int64_t)v->row_of->value[p];
            if (row < 0) continue;
            want[i] += (weighted ? v->weight->value[p] : 1) * x->value[row * v->H + i % v->H];
        }
    }
    m->k->combine_rows(m->s, t, y->data, x->data, v->row_of->data,
                       weighted ? v->weight->data : NULL, beta, v->N, v->k, v->H);
    kt_check(m, y, want, kt_tolerance(t), "combine %s%s beta %.1f %lldx%lld k %lld", type_name(t),
             weighted ? " weighted" : "", (double)beta, (long long)v->N, (long long)v->H,
             (long long)v->k);
    free(want);
}

/* Property: the weights' gradient is the product of the token's gradient and its row. */
static void check_combine_weight(kt_maker *m, const moves *v, tr_dtype t) {
    kt_tensor *x = expert_rows(m, v, t), *dy = kt_normal(m, t, v->N * v->H, 1);
    kt_tensor *dweight = kt_filled(m, TR_F32, v->pairs, NAN);
    double *want = doubles(v->pairs);
    for (int64_t p = 0; p < v->pairs; p++) {
        int64_t row = (int64_t)v->row_of->value[p];
        for (int64_t h = 0; h < v->H && row >= 0; h++)
            want[p] += dy->value[p / v->k * v->H + h] * x->value[row * v->H + h];
    }
    m->k->combine_rows_weight(m->s, t, dweight->data, dy->data, x->data, v->row_of->data, v->N,
                              v->k, v->H);
    kt_check(m, dweight, want, 1e-5, "combine dweight %s", type_name(t));
    free(want);
}

static void test_moves(kt_maker *m) {
    for (int i = 0; i < TYPES; i++)
        for (int j = 0; j < MOVE_SHAPES; j++) {
            moves v = make_moves(m, move_shapes[j]);
            for (int weighted = 0; weighted < 2; weighted++) {
                check_gather(m, &v, types[i], weighted);
                for (int b = 0; b < 3; b++)
                    check_combine(m, &v, types[i], weighted, 0.5f * (float)b);
            }
            check_combine_weight(m, &v, types[i]);
            kt_release(m);
        }
}

/* Property: route, sort, gather, experts that multiply by their number, combine: each token becomes
 * itself times the weighted sum of its experts' numbers. The same bits for every number of threads.
 */
static void test_whole_way(kt_maker *m) {
    enum { N = 211, E = 16, K = 3, H = 200, PAIRS = N * K };
    int threads_before = omp_get_max_threads();
    kt_tensor *x = kt_normal(m, TR_F32, N * H, 1), *first = NULL;
    route r = {
        .N = N, .E = E, .k = K, .renormalise = true, .logits = kt_normal(m, TR_F32, N * E, 2)};
    for (int threads = 1; threads <= 4; threads++) {
        omp_set_num_threads(threads);
        route_buffers(m, &r);
        route_forward(m, &r);
        kt_tensor *offsets = kt_filled(m, TR_I64, E + 1, 0),
                  *row_of = kt_filled(m, TR_I32, PAIRS, 0);
        kt_tensor *pair_of = kt_filled(m, TR_I32, PAIRS, 0), *y = kt_filled(m, TR_F32, N * H, NAN);
        kt_tensor *rows = kt_filled(m, TR_F32, PAIRS * H, NAN),
                  *scale = kt_filled(m, TR_F32, PAIRS, 0);
        m->k->moe_sort(m->s, offsets->data, row_of->data, pair_of->data, r.index->data, NULL, N, E,
                       K);
        kt_read(m, r.index), kt_read(m, r.weight);
        for (int64_t i = 0; i < PAIRS; i++) scale->value[i] = r.index->value[i] + 1;
        scale = kt_from(m, TR_F32, PAIRS, scale->value);
        m->k->gather_rows(m->s, TR_F32, rows->data, x->data, pair_of->data, K, scale->data,
                          (tr_rows){PAIRS, (const int64_t *)offsets->data + E}, H);
        m->k->combine_rows(m->s, TR_F32, y->data, rows->data, row_of->data, r.weight->data, 0, N, K,
                           H);
        double *want = doubles(N * H);
        for (int64_t i = 0; i < N * H; i++)
            for (int64_t p = i / H * K; p < (i / H + 1) * K; p++)
                want[i] += x->value[i] * r.weight->value[p] * (r.index->value[p] + 1);
        kt_check(m, y, want, 2e-6, "tokens through all experts, %d threads", threads);
        if (!first) first = y;
        kt_check(m, y, kt_read(m, first), 0, "the same bits, %d threads against 1", threads);
        free(want);
    }
    omp_set_num_threads(threads_before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        KT_TEST(test_forward),     KT_TEST(test_forward_numbers), KT_TEST(test_backward),
        KT_TEST(test_differences), KT_TEST(test_stats),           KT_TEST(test_capacity),
        KT_TEST(test_sort),        KT_TEST(test_regroup),         KT_TEST(test_moves),
        KT_TEST(test_whole_way),
    };
    return cmocka_run_group_tests_name("moe", tests, NULL, NULL);
}
