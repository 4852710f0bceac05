/* moe.c - capacity, sorting by expert and moving rows, of every maker: exactly, or against float64.
 * Floor: tests. */
#include "values.h"

#include <math.h>
#include <omp.h>

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
    kt_tensor *taken = kt_filled(m, TR_I32, pairs, 9);
    double *want = doubles(pairs);
    for (int64_t i = 0; i < pairs; i++) {
        int64_t begin = i / (S * k) * S * k;
        int64_t rank = rank_of(index->value, score->value, i, begin, begin + S * k, k, by_score);
        want[i] = rank < capacity ? index->value[i] : -1;
    }
    m->k->router_capacity(m->s, taken->data, index->data, score->data, B, S, E, k, capacity,
                          by_score);
    kt_check(m, taken, want, 0, "capacity %lld of B %lld S %lld E %lld k %lld by %s",
             (long long)capacity, (long long)B, (long long)S, (long long)E, (long long)k,
             by_score ? "score" : "position");
    free(want);
}

/* Property: exactly the pairs that a plain ranking of each expert's pairs would keep. */
static void test_capacity(kt_maker *m) {
    static const int64_t shapes[][5] = {
        /* B, S, E, k, capacity */
        {0, 5, 4, 2, 3},     {1, 0, 4, 2, 3},     {1, 1, 1, 1, 1},    {1, 1, 1, 1, 0},
        {2, 33, 4, 2, 7},    {3, 40, 8, 8, 11},   {1, 64, 3, 1, 0},   {1, 64, 3, 2, 1000},
        {2, 300, 300, 2, 2}, {1, 500, 600, 3, 4}, {2, 600, 4, 2, 100}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int by_score = 0; by_score < 2; by_score++)
            for (int narrow = 0; narrow < 2; narrow++) {
                capacity_one(m, shapes[i], by_score, narrow);
                kt_release(m);
            }
    kt_tensor *index = kt_filled(m, TR_I32, 4, 0), *taken = kt_filled(m, TR_I32, 4, 9);
    kt_tensor *score = kt_from(m, TR_F32, 4, (double[]){.2, .5, .5, .5});
    m->k->router_capacity(m->s, taken->data, index->data, score->data, 1, 4, 1, 1, 2, false);
    kt_check(m, taken, (double[]){0, 0, -1, -1}, 0, "capacity 2 of 4 keeps positions 0 and 1");
    m->k->router_capacity(m->s, taken->data, index->data, score->data, 1, 4, 1, 1, 2, true);
    kt_check(m, taken, (double[]){-1, 0, 0, -1}, 0, "capacity 2 of 4 keeps the best, lowest rows");
}

/* The place of pair p, or -1: by the table, and then for the first of a row's pairs there alone. */
static double place_of(const double *index, const double *place, int64_t p, int64_t k) {
    if (index[p] < 0 || !place) return index[p];
    double at = place[(int64_t)index[p]];
    for (int64_t q = p / k * k; q < p; q++)
        if (index[q] >= 0 && place[(int64_t)index[q]] == at) return -1;
    return at;
}

/* Property: pairs in order of place, then row, a row once to each place; rows and pairs are
 * inverses of each other. */
static void test_sort(kt_maker *m) {
    static const int64_t shapes[][4] = {/* N, E, k, P */ {0, 3, 2, 2},
                                        {1, 1, 1, 1},
                                        {7, 4, 4, 2},
                                        {50, 8, 2, 3},
                                        {333, 64, 6, 8},
                                        {20, 9, 1, 4},
                                        {100, 8, 8, 1},
                                        {40, 10, 4, 10},
                                        {30, 6, 3, 0},
                                        {1000, 300, 3, 40},
                                        {100, 1500, 2, 1200}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int variant = 0; variant < 4; variant++) { /* bit 0: with places, bit 1: narrow */
            int64_t N = shapes[i][0], E = shapes[i][1], k = shapes[i][2], rows = 0;
            int64_t P = variant & 1 ? shapes[i][3] : E;
            kt_tensor *index = make_index(m, N, E, k, variant & 2);
            kt_tensor *place = variant & 1 ? kt_integers(m, TR_I32, E, -1, P) : NULL;
            kt_tensor *offsets = kt_filled(m, TR_I64, P + 1, -9);
            kt_tensor *row_of = kt_filled(m, TR_I32, N * k, -9);
            kt_tensor *pair_of = kt_filled(m, TR_I32, N * k, -9);
            double *want_offsets = doubles(P + 1), *want_row = doubles(N * k);
            double *want_pair = copy_of(pair_of);
            for (int64_t p = 0; p < N * k; p++) want_row[p] = -1;
            for (int64_t at = 0; at < P; at++) {
                for (int64_t p = 0; p < N * k; p++)
                    if (place_of(index->value, place ? place->value : NULL, p, k) == (double)at) {
                        want_row[p] = (double)rows;
                        want_pair[rows++] = (double)p;
                    }
                want_offsets[at + 1] = (double)rows;
            }
            m->k->moe_sort(m->s, offsets->data, row_of->data, pair_of->data, index->data,
                           place ? place->data : NULL, N, P, k);
            kt_check(m, offsets, want_offsets, 0,
                     "sort %lldx%lld k %lld to %lld places, variant %d", (long long)N, (long long)E,
                     (long long)k, (long long)P, variant);
            kt_check(m, row_of, want_row, 0, "sort rows");
            kt_check(m, pair_of, want_pair, 0, "sort pairs");
            free(want_offsets), free(want_row), free(want_pair);
            kt_release(m);
        }
}

/* --- moving rows ----------------------------------------------------------------------------- */

static const int64_t move_shapes[][4] = {/* N, E, k, H */
                                         {0, 2, 1, 8},     {1, 1, 1, 1},    {3, 4, 4, 5},
                                         {9, 3, 2, 64},    {50, 8, 2, 129}, {40, 300, 5, 48},
                                         {200, 8, 2, 333}, {70, 5, 2, 1032}};
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
              *place = kt_integers(m, TR_I32, v.E, -1, v.E);
    kt_tensor *offsets = kt_filled(m, TR_I64, v.E + 1, 0);
    v.row_of = kt_filled(m, TR_I32, v.pairs, -1), v.pair_of = kt_filled(m, TR_I32, v.pairs, -1);
    m->k->moe_sort(m->s, offsets->data, v.row_of->data, v.pair_of->data, index->data, place->data,
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
static void check_gather(kt_maker *m, const moves *v, tr_dtype y_t, tr_dtype x_t, bool weighted) {
    kt_tensor *x = kt_normal(m, x_t, v->N * v->H, 1), *y = kt_filled(m, y_t, v->pairs * v->H, 7);
    double *want = copy_of(y);
    for (int64_t i = 0; i < v->used * v->H; i++) {
        int64_t pair = (int64_t)v->pair_of->value[i / v->H];
        double w = weighted ? v->weight->value[pair] : 1;
        want[i] = kt_round(y_t, w * x->value[pair / v->k * v->H + i % v->H]);
    }
    m->k->gather_rows(m->s, y_t, y->data, x_t, x->data, v->pair_of->data, v->k,
                      weighted ? v->weight->data : NULL, (tr_rows){v->pairs, v->count->data}, v->H);
    kt_check(m, y, want, 0, "gather %s from %s%s %lld of %lld rows of %lld", type_name(y_t),
             type_name(x_t), weighted ? " weighted" : "", (long long)v->used, (long long)v->pairs,
             (long long)v->H);
    free(want);
}

/* Property: combining sums each token's rows; beta 0 does not read y. */
static void check_combine(kt_maker *m, const moves *v, tr_dtype y_t, tr_dtype x_t, bool weighted,
                          float beta) {
    int64_t n = v->N * v->H;
    kt_tensor *x = expert_rows(m, v, x_t);
    kt_tensor *y = beta != 0 ? kt_normal(m, y_t, n, 1) : kt_filled(m, y_t, n, NAN);
    double *want = doubles(y->n);
    for (int64_t i = 0; i < y->n; i++) {
        if (beta != 0) want[i] = (double)beta * y->value[i];
        for (int64_t p = i / v->H * v->k; p < (i / v->H + 1) * v->k; p++) {
            int64_t row = (int64_t)v->row_of->value[p];
            if (row < 0) continue;
            want[i] += (weighted ? v->weight->value[p] : 1) * x->value[row * v->H + i % v->H];
        }
    }
    m->k->combine_rows(m->s, y_t, y->data, x_t, x->data, v->row_of->data,
                       weighted ? v->weight->data : NULL, beta, v->N, v->k, v->H);
    kt_check(m, y, want, kt_tolerance(y_t), "combine %s from %s%s beta %.1f %lldx%lld k %lld",
             type_name(y_t), type_name(x_t), weighted ? " weighted" : "", (double)beta,
             (long long)v->N, (long long)v->H, (long long)v->k);
    free(want);
}

/* Property: the weights' gradient is the product of the token's gradient and its row. */
static void check_combine_weight(kt_maker *m, const moves *v, tr_dtype dy_t, tr_dtype x_t) {
    kt_tensor *x = expert_rows(m, v, x_t), *dy = kt_normal(m, dy_t, v->N * v->H, 1);
    kt_tensor *dweight = kt_filled(m, TR_F32, v->pairs, NAN);
    double *want = doubles(v->pairs);
    for (int64_t p = 0; p < v->pairs; p++) {
        int64_t row = (int64_t)v->row_of->value[p];
        for (int64_t h = 0; h < v->H && row >= 0; h++)
            want[p] += dy->value[p / v->k * v->H + h] * x->value[row * v->H + h];
    }
    m->k->combine_rows_weight(m->s, dweight->data, dy_t, dy->data, x_t, x->data, v->row_of->data,
                              v->N, v->k, v->H);
    kt_check(m, dweight, want, 1e-5, "combine dweight %s, %s", type_name(dy_t), type_name(x_t));
    free(want);
}

static void test_moves(kt_maker *m) {
    for (int pair = 0; pair < TYPES * TYPES; pair++)
        for (int j = 0; j < MOVE_SHAPES; j++) {
            tr_dtype y_t = types[pair / TYPES], x_t = types[pair % TYPES];
            moves v = make_moves(m, move_shapes[j]);
            for (int weighted = 0; weighted < 2; weighted++) {
                check_gather(m, &v, y_t, x_t, weighted);
                for (int b = 0; b < 3; b++)
                    check_combine(m, &v, y_t, x_t, weighted, 0.5f * (float)b);
            }
            check_combine_weight(m, &v, y_t, x_t);
            kt_release(m);
        }
}

/* Property: route, sort, gather, experts that multiply by their number, combine: each token becomes
 * itself times the weighted sum of its experts' numbers. The same bits for every number of threads.
 */
static void test_whole_way(kt_maker *m) {
    enum { N = 211, E = 16, K = 3, H = 200, PAIRS = N * K };
    int threads_before = omp_get_max_threads(), most = kt_threads(m, 4);
    kt_tensor *x = kt_normal(m, TR_F32, N * H, 1), *first = NULL;
    kt_tensor *logits = kt_normal(m, TR_F32, N * E, 2);
    for (int threads = 1; threads <= most; threads++) {
        omp_set_num_threads(threads);
        kt_tensor *prob = kt_filled(m, TR_F32, N * E, NAN), *lse = kt_filled(m, TR_F32, N, NAN);
        kt_tensor *index = kt_filled(m, TR_I32, PAIRS, 0), *weight = kt_filled(m, TR_F32, PAIRS, 0);
        tr_routing how = {.E = E, .k = K, .groups = 1, .kept = 1, .renormalise = true};
        m->k->router_forward(m->s, &how, logits->data, NULL, prob->data, lse->data, index->data,
                             weight->data, N);
        kt_tensor *offsets = kt_filled(m, TR_I64, E + 1, 0),
                  *row_of = kt_filled(m, TR_I32, PAIRS, 0);
        kt_tensor *pair_of = kt_filled(m, TR_I32, PAIRS, 0), *y = kt_filled(m, TR_F32, N * H, NAN);
        kt_tensor *rows = kt_filled(m, TR_F32, PAIRS * H, NAN),
                  *scale = kt_filled(m, TR_F32, PAIRS, 0);
        m->k->moe_sort(m->s, offsets->data, row_of->data, pair_of->data, index->data, NULL, N, E,
                       K);
        kt_read(m, index), kt_read(m, weight);
        for (int64_t i = 0; i < PAIRS; i++) scale->value[i] = index->value[i] + 1;
        scale = kt_from(m, TR_F32, PAIRS, scale->value);
        m->k->gather_rows(m->s, TR_F32, rows->data, TR_F32, x->data, pair_of->data, K, scale->data,
                          (tr_rows){PAIRS, (const int64_t *)offsets->data + E}, H);
        m->k->combine_rows(m->s, TR_F32, y->data, TR_F32, rows->data, row_of->data, weight->data, 0,
                           N, K, H);
        double *want = doubles(N * H);
        for (int64_t i = 0; i < N * H; i++)
            for (int64_t p = i / H * K; p < (i / H + 1) * K; p++)
                want[i] += x->value[i] * weight->value[p] * (index->value[p] + 1);
        kt_check(m, y, want, 2e-6, "tokens through all experts, %d threads", threads);
        if (!first) first = y;
        kt_check(m, y, kt_read(m, first), 0, "the same bits, %d threads against 1", threads);
        free(want);
    }
    omp_set_num_threads(threads_before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        KT_TEST(test_capacity),
        KT_TEST(test_sort),
        KT_TEST(test_moves),
        KT_TEST(test_whole_way),
    };
    return cmocka_run_group_tests_name("moe", tests, NULL, NULL);
}
