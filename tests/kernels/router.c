/* router.c - choosing experts, the statistics of the choice and its gradient, of every maker:
 * against float64 and finite differences. Floor: tests. */
#include "values.h"

#include <math.h>

typedef struct {
    int64_t N, E, k, G;
    int64_t first, rows;  /* row n is row first + n of groups of `rows` */
    int64_t groups, kept; /* of experts; 0: one */
    bool renormalise;
    tr_score score;
    kt_tensor *logits, *valid, *prob, *lse, *index, *weight;
    kt_tensor *dweight, *prob_grad, *z_grad; /* the gradients that come from behind */
} route;

static void route_buffers(kt_maker *m, route *r) {
    r->prob = kt_filled(m, TR_F32, r->N * r->E, NAN);
    r->lse = kt_filled(m, TR_F32, r->N, NAN);
    r->index = kt_filled(m, TR_I32, r->N * r->k, 77);
    r->weight = kt_filled(m, TR_F32, r->N * r->k, NAN);
}

static tr_routing how(const route *r) {
    return (tr_routing){.E = r->E,
                        .k = r->k,
                        .groups = r->groups ? r->groups : 1,
                        .kept = r->groups ? r->kept : 1,
                        .score = r->score,
                        .renormalise = r->renormalise};
}

/* Joins sums of sigmoids that divide. */
static double floor_of(const route *r) {
    return r->score == TR_SIGMOID ? 1e-20 : 0;
}

/* Of the two scores and two ways to weigh: */
enum { WAYS = 4 };
static void set_way(route *r, int way) {
    r->score = way / 2 ? TR_SIGMOID : TR_SOFTMAX;
    r->renormalise = way % 2;
}
static const char *way_name(const route *r) {
    static const char *const names[] = {"softmax", "softmax renormalised", "sigmoid",
                                        "sigmoid renormalised"};
    return names[2 * (r->score == TR_SIGMOID) + r->renormalise];
}

static void route_forward(kt_maker *m, route *r) {
    tr_routing routing = how(r);
    m->k->router_forward(m->s, &routing, r->logits->data, r->valid ? r->valid->data : NULL,
                         r->prob->data, r->lse->data, r->index->data, r->weight->data, r->N);
}

static bool is_valid(const route *r, int64_t n) {
    return !r->valid || r->valid->value[n] != 0;
}

/* The best of experts [first, first + count), or -1: the lowest of equals, of those not in `taken`.
 */
static int64_t best_left(const double *x, int64_t first, int64_t count, const double *taken,
                         int64_t ntaken) {
    int64_t best = -1;
    for (int64_t e = first; e < first + count; e++) {
        bool left = true;
        for (int64_t i = 0; i < ntaken; i++) left = left && taken[i] != (double)e;
        if (left && (best < 0 || x[e] > x[best])) best = e;
    }
    return best;
}

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

/* How good the group of experts [first, first + count) is, from a token's logits: by its best, or
 * by the sum of its two best sigmoids. */
static double worth_of(const route *r, const double *x, int64_t first, int64_t count) {
    double best = (double)best_left(x, first, count, NULL, 0);
    int64_t next = best_left(x, first, count, &best, 1);
    if (r->score == TR_SOFTMAX) return x[(int64_t)best];
    return sigmoid(x[(int64_t)best]) + (next < 0 ? 0 : sigmoid(x[next]));
}

/* Logits of row n with all but the best groups' out of reach; allocated. */
static double *reachable(const route *r, int64_t n) {
    tr_routing routing = how(r);
    int64_t size = r->E / routing.groups;
    double *worth = doubles(routing.groups), *taken = doubles(routing.kept), *x = doubles(r->E);
    for (int64_t g = 0; g < routing.groups; g++)
        worth[g] = worth_of(r, r->logits->value + n * r->E, g * size, size);
    for (int64_t e = 0; e < r->E; e++) x[e] = NAN;
    for (int64_t i = 0; i < routing.kept; i++) {
        int64_t g = best_left(worth, 0, routing.groups, taken, i);
        taken[i] = (double)g;
        for (int64_t e = g * size; e < (g + 1) * size; e++) x[e] = r->logits->value[n * r->E + e];
    }
    free(worth), free(taken);
    return x;
}

static double score_of(const route *r, double x, double lse) {
    return r->score == TR_SIGMOID ? sigmoid(x) : exp(x - lse);
}

/* Scores, lse, the k largest by repeated search, their weights, of row n. */
static void want_route(const route *r, int64_t n, double *prob, double *lse, double *index,
                       double *weight) {
    const double *x = r->logits->value + n * r->E;
    double max = -INFINITY, sum = 0, chosen = 0;
    for (int64_t e = 0; e < r->E; e++) max = fmax(max, x[e]);
    for (int64_t e = 0; e < r->E; e++) sum += exp(x[e] - max);
    *lse = max + log(sum);
    for (int64_t e = 0; e < r->E; e++) prob[e] = score_of(r, x[e], *lse);
    double *near = reachable(r, n);
    for (int64_t j = 0; j < r->k; j++) {
        int64_t best = -1;
        for (int64_t e = 0; e < r->E; e++) {
            bool taken = isnan(near[e]);
            for (int64_t i = 0; i < j; i++) taken |= index[i] == (double)e;
            if (!taken && (best < 0 || near[e] > near[best])) best = e;
        }
        index[j] = (double)best;
        chosen += prob[best];
    }
    free(near);
    for (int64_t j = 0; j < r->k; j++) {
        double p = prob[(int64_t)index[j]];
        weight[j] = !is_valid(r, n) ? 0 : r->renormalise ? p / (chosen + floor_of(r)) : p;
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
    kt_check(m, r->index, index, 0, "router index %lldx%lld k %lld %s", (long long)r->N,
             (long long)r->E, (long long)r->k, way_name(r));
    kt_check(m, r->prob, prob, 2e-6, "router prob");
    kt_check(m, r->lse, lse, 1e-6, "router lse");
    kt_check(m, r->weight, weight, 2e-6, "router weight");
    free(prob), free(lse), free(index), free(weight);
}

/* Sets up shapes: N, E, k; every third token invalid in odd shapes; few distinct values in some, so
 * that ties are met. */
static const int64_t route_shapes[][5] = {
    /* N, E, k, groups, kept */
    {0, 4, 2},          {1, 1, 1},          {5, 2, 2},
    {33, 7, 3},         {64, 8, 2},         {31, 16, 16},
    {40, 17, 4},        {100, 64, 8},       {13, 130, 9},
    {300, 257, 8},      {50, 8, 2, 4, 2},   {51, 12, 4, 3, 1},
    {200, 64, 6, 8, 3}, {40, 10, 3, 10, 3}, {17, 130, 20, 13, 2},
    {20, 6, 6, 2, 2}};
enum { ROUTE_SHAPES = sizeof route_shapes / sizeof *route_shapes };

static route make_route(kt_maker *m, int shape, int way) {
    const int64_t *s = route_shapes[shape];
    route r = {.N = s[0], .E = s[1], .k = s[2], .groups = s[3], .kept = s[4]};
    set_way(&r, way);
    int64_t low = r.groups ? 0 : -2; /* sums of two sigmoids of 0 to 4 are the same or far apart */
    r.logits = shape % 3 == 2 ? kt_integers(m, TR_F32, r.N * r.E, low, low + 5)
                              : kt_normal(m, TR_F32, r.N * r.E, 3);
    if (shape % 2) r.valid = kt_integers(m, TR_U8, r.N, 0, 2);
    return r;
}

/* Property: probabilities, choices and weights by the formula; the lowest expert wins ties. */
static void test_forward(kt_maker *m) {
    for (int shape = 0; shape < ROUTE_SHAPES; shape++)
        for (int way = 0; way < WAYS; way++) {
            route r = make_route(m, shape, way);
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
    static const double weight[WAYS][2] = {
        {.6439143, .2368828}, {.7310586, .2689414}, {.8807971, .7310586}, {0.5464491, 0.4535509}};
    for (int i = 0; i < WAYS; i++) {
        set_way(&r, i);
        check_forward(m, &r);
        kt_check(m, r.index, index, 0, "router choices of ties, 8.00 against 8.01, extremes");
        for (int j = 0; j < 2; j++)
            kt_check_number(m, r.weight->value[j], weight[i][j], 1e-6, "%s weight %d of [2,1,0,-1]",
                            way_name(&r), j);
    }
}

/* Property: whatever the logits are, NaN too, the choices are distinct experts: kernels that move
 * rows by them stay inside their memory until the bad step is found and left out. */
static void test_not_numbers(kt_maker *m) {
    for (int i = 0; i < 4; i++) {
        route r = {.N = 4, .E = 40, .k = 5, .groups = i % 2 ? 4 : 1, .kept = i % 2 ? 2 : 1};
        r.score = i / 2 ? TR_SIGMOID : TR_SOFTMAX;
        double *x = doubles(r.N * r.E);
        for (int64_t j = 0; j < r.N * r.E; j++) {
            int64_t n = j / r.E, e = j % r.E;
            x[j] = n == 0 || (n == 1 && e % 3) || (n == 2 && e > 1) ? NAN : (double)(e * 7 % 40);
        }
        r.logits = kt_from(m, TR_F32, r.N * r.E, x);
        route_buffers(m, &r);
        route_forward(m, &r);
        const double *index = kt_read(m, r.index);
        for (int64_t j = 0; j < r.N * r.k; j++) {
            assert_true(index[j] >= 0 && index[j] < (double)r.E);
            for (int64_t l = j / r.k * r.k; l < j; l++) assert_true(index[l] != index[j]);
        }
        free(x);
    }
}

/* Property: groups by hand, one of two: with the best expert or, of sigmoids, with the best two
 * (the largest logit may then be in the other); a tie goes to the lower. */
static void test_groups(kt_maker *m) {
    static const double index[2][8] = {{0, 1, 2, 3, 0, 1, 3, 2}, {2, 3, 1, 0, 0, 1, 3, 2}};
    route r = {.N = 4, .E = 4, .k = 2, .groups = 2, .kept = 1, .renormalise = true};
    r.logits = kt_from(m, TR_F32, 16,
                       (double[]){2, -5, 1.5, 1.4, 0, 1, 3, -9, /* */
                                  4, 4, 4, 4, -1e5, -1e5, -37, -36});
    for (int sigmoids = 0; sigmoids < 2; sigmoids++) {
        r.score = sigmoids ? TR_SIGMOID : TR_SOFTMAX;
        check_forward(m, &r);
        kt_check(m, r.index, index[sigmoids], 0, "choices in one of two groups, %s", way_name(&r));
    }
}

/* One group, even groups, or uneven parts of groups: the last one may have no row. */
static void set_groups(route *r, int shape) {
    r->G = shape % 3 == 0 ? 1 : shape % 3 == 1 ? 5 : 3;
    r->rows = r->G == 5 ? r->N / 5 + 1 : r->N + 1;
    r->first = r->G == 3 ? r->N / 2 + 1 : 0;
}

static int64_t group_of(const route *r, int64_t n) {
    return (r->first + n) / r->rows;
}

static void add_gradients(kt_maker *m, route *r) {
    int64_t G = r->G;
    r->dweight = kt_normal(m, TR_F32, r->N * r->k, 1);
    r->prob_grad = kt_normal(m, TR_F32, G * r->E, 1);
    r->z_grad = kt_normal(m, TR_F32, G, 0.3);
}

static void *data_of(const kt_tensor *x) {
    return x ? x->data : NULL;
}

static kt_tensor *route_backward(kt_maker *m, const route *r) {
    kt_tensor *dlogits = kt_filled(m, TR_F32, r->N * r->E, NAN);
    tr_routing routing = how(r);
    m->k->router_backward(m->s, &routing, dlogits->data, data_of(r->dweight), r->logits->data,
                          r->prob->data, r->lse->data, r->index->data, r->weight->data,
                          data_of(r->valid), data_of(r->prob_grad), data_of(r->z_grad), r->first,
                          r->rows, r->N);
    return dlogits;
}

/* Sum of a token's sigmoids, which divides its shares; 1 for softmax. */
static double whole_of(const route *r, const double *prob) {
    double sum = floor_of(r);
    for (int64_t e = 0; e < r->E; e++) sum += prob[e];
    return r->score == TR_SIGMOID ? sum : 1;
}

/* dlogits of token n by the chain rule: the Jacobians of weights and shares give the gradient dp of
 * each score, that of the scores what comes of it. */
static void want_backward(const route *r, int64_t n, double *d) {
    const double *p = r->prob->value + n * r->E, *index = r->index->value + n * r->k;
    const double *dw = r->dweight->value + n * r->k, *x = r->logits->value + n * r->E;
    const double *aux = r->prob_grad->value + group_of(r, n) * r->E;
    double sum = floor_of(r), dot = 0, mean = 0, *dp = doubles(r->E), lse = r->lse->value[n];
    double whole = whole_of(r, p), z = r->z_grad->value[group_of(r, n)] * lse;
    for (int64_t j = 0; j < r->k; j++) sum += p[(int64_t)index[j]];
    for (int64_t j = 0; j < r->k; j++) dot += dw[j] * p[(int64_t)index[j]] / sum;
    for (int64_t e = 0; e < r->E; e++)
        for (int64_t i = 0; i < r->E; i++) {
            double slope = i == e ? 1 / whole : 0; /* of share i by score e */
            if (r->score == TR_SIGMOID) slope -= p[i] / (whole * whole);
            dp[e] += aux[i] * slope;
        }
    for (int64_t j = 0; j < r->k; j++)
        dp[(int64_t)index[j]] += r->renormalise ? (dw[j] - dot) / sum : dw[j];
    for (int64_t e = 0; e < r->E; e++) mean += p[e] * dp[e];
    for (int64_t e = 0; e < r->E; e++) {
        double own = r->score == TR_SIGMOID ? p[e] * (1 - p[e]) * dp[e] : p[e] * (dp[e] - mean);
        d[e] = own + z * exp(x[e] - lse);
    }
    free(dp);
}

/* Property: the backward equals the chain rule written out. */
static void test_backward(kt_maker *m) {
    for (int shape = 0; shape < ROUTE_SHAPES; shape++)
        for (int way = 0; way < WAYS; way++) {
            route r = make_route(m, shape, way);
            set_groups(&r, shape);
            add_gradients(m, &r);
            route_buffers(m, &r);
            route_forward(m, &r);
            kt_read(m, r.prob), kt_read(m, r.lse), kt_read(m, r.index);
            double *want = doubles(r.N * r.E);
            for (int64_t n = 0; n < r.N; n++)
                if (is_valid(&r, n)) want_backward(&r, n, want + n * r.E);
            kt_check(m, route_backward(m, &r), want, 1e-5, "router backward %lldx%lld k %lld %s",
                     (long long)r.N, (long long)r.E, (long long)r.k, way_name(&r));
            free(want);
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
        int64_t g = group_of(r, n);
        if (!is_valid(r, n)) continue;
        for (int64_t e = 0; e < r->E && r->prob_grad; e++)
            sum += r->prob_grad->value[g * r->E + e] * p[n * r->E + e] / whole_of(r, p + n * r->E);
        if (r->z_grad) sum += r->z_grad->value[g] * lse[n] * lse[n] / 2;
    }
    return sum;
}

/* Property: the backward is the derivative of weights, aux and z terms, all together and without
 * one of them. */
static void test_differences(kt_maker *m) {
    static const char *const missing[] = {"", ", no weights", ", no aux", ", no z"};
    for (int way = 0; way < WAYS; way++)
        for (int without = 0; without < 4; without++) {
            route r = {.N = 4, .E = 9, .k = 3};
            set_way(&r, way);
            r.logits = kt_normal(m, TR_F32, r.N * r.E, 1);
            for (int64_t i = 0; i < r.N * r.E; i++) /* far from ties */
                r.logits->value[i] = (double)(i * 7 % 9) * 0.4 + 0.05 * r.logits->value[i];
            r.logits = kt_from(m, TR_F32, r.N * r.E, r.logits->value);
            r.valid = kt_from(m, TR_U8, r.N, (double[]){1, 1, 0, 1});
            r.G = 2, r.first = 1, r.rows = 3;
            add_gradients(m, &r);
            if (without == 1) r.dweight = NULL;
            if (without == 2) r.prob_grad = NULL;
            if (without == 3) r.z_grad = NULL;
            route_buffers(m, &r);
            double want[36];
            for (int64_t i = 0; i < r.N * r.E; i++)
                want[i] = kt_difference(m, r.logits, i, 1e-2, route_value, &r);
            route_forward(m, &r);
            kt_check(m, route_backward(m, &r), want, 1e-3, "router against differences, %s%s",
                     way_name(&r), missing[without]);
        }
}

/* Property: scores that are all 0, or 1, in fp32 leave weights, shares and gradients finite. */
static void test_saturated_sigmoids(kt_maker *m) {
    route r = {.N = 3, .E = 4, .k = 2, .score = TR_SIGMOID, .renormalise = true};
    r.logits =
        kt_from(m, TR_F32, 12,
                (double[]){-1e5, -1e5, -1e5, -1e5, 1e4, 1e4 - 1, 1e4, 0, -98, -97, -99, -96});
    r.G = 1, r.rows = r.N;
    add_gradients(m, &r);
    check_forward(m, &r);
    const double *d = kt_read(m, route_backward(m, &r));
    for (int64_t i = 0; i < r.N * r.E; i++) assert_true(isfinite(d[i]));
}

/* Property: statistics are the plain sums over valid tokens, group by group. */
static void test_stats(kt_maker *m) {
    for (int i = 0; i < ROUTE_SHAPES * 2; i++) {
        int shape = i / 2;
        route r = make_route(m, shape, i % 2 * 2);
        tr_routing routing = how(&r);
        set_groups(&r, shape);
        int64_t G = r.G, width = 2 + 2 * r.E;
        route_buffers(m, &r);
        route_forward(m, &r);
        kt_read(m, r.prob), kt_read(m, r.lse), kt_read(m, r.index);
        double *want = doubles(G * width);
        for (int64_t n = 0; n < r.N; n++) {
            if (!is_valid(&r, n)) continue;
            double *to = want + group_of(&r, n) * width;
            to[0] += 1;
            to[1] += r.lse->value[n] * r.lse->value[n];
            for (int64_t j = 0; j < r.k; j++) to[2 + (int64_t)r.index->value[n * r.k + j]] += 1;
            double whole = whole_of(&r, r.prob->value + n * r.E);
            for (int64_t e = 0; e < r.E; e++) to[2 + r.E + e] += r.prob->value[n * r.E + e] / whole;
        }
        kt_tensor *stats = kt_filled(m, TR_F64, G * width, NAN);
        m->k->router_stats(m->s, &routing, r.prob->data, r.lse->data, r.index->data,
                           data_of(r.valid), stats->data, r.first, r.rows, r.N, G);
        kt_check(m, stats, want, r.score == TR_SIGMOID ? 1e-6 : 1e-13,
                 "router stats %s %lldx%lld groups %lld", way_name(&r), (long long)r.N,
                 (long long)r.E, (long long)G);
        free(want);
        kt_release(m);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        KT_TEST(test_forward), KT_TEST(test_forward_numbers),    KT_TEST(test_not_numbers),
        KT_TEST(test_groups),  KT_TEST(test_backward),           KT_TEST(test_differences),
        KT_TEST(test_stats),   KT_TEST(test_saturated_sigmoids),
    };
    return cmocka_run_group_tests_name("router", tests, NULL, NULL);
}
