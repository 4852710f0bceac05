/* Property: embedding and cross-entropy, over a whole vocabulary and over one in parts, equal plain
 * float64 loops and finite differences, stay finite for extreme logits, skip rows without a label,
 * and may write their gradient over the logits. */
#include "harness.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *name(tr_dtype t) {
    return t == TR_F32 ? "f32" : "bf16";
}

/* How many rows of a token a maker adds one after another: on the host all of them. */
static int64_t segment_of(const kt_maker *m) {
    return m->device->host_memory ? INT64_MAX : 128;
}

/* d[V, H] += the rows of dy of each token, in the contract's order, every sum rounded: the same
 * bits. */
static void add_in_order(double *d, const double *token, const double *dy, int64_t first, int64_t V,
                         int64_t N, int64_t H, int64_t segment) {
    double *part = calloc((size_t)(V * H) + 1, sizeof *part);
    int64_t *seen = calloc((size_t)V, sizeof *seen);
    for (int64_t n = 0; n < N; n++) {
        int64_t row = (int64_t)token[n] - first;
        if (row < 0 || row >= V) continue;
        int64_t k = seen[row]++;
        for (int64_t c = 0; c < H; c++) {
            double *sum = d + row * H + c, *later = part + row * H + c, x = dy[n * H + c];
            if (k % segment == 0) *sum = kt_round(TR_F32, *sum + *later), *later = 0;
            double *to = k < segment ? sum : later;
            *to = kt_round(TR_F32, *to + x);
        }
    }
    for (int64_t i = 0; i < V * H; i++) d[i] = kt_round(TR_F32, d[i] + part[i]);
    free(part);
    free(seen);
}

static void embedding_equals_loops(kt_maker *m) {
    static const int64_t sizes[][3] = {
        /* N, H, V */ {0, 5, 3}, {1, 1, 1},      {7, 33, 4},       {40, 17, 5},
        {300, 96, 11},           {64, 768, 100}, {4500, 24, 5000}, {2100, 9, 2}};
    for (int i = 0; i < 8; i++)
        for (int h = 0; h < 2; h++) {
            tr_dtype t = h ? TR_BF16 : TR_F32;
            int64_t N = sizes[i][0], H = sizes[i][1], V = sizes[i][2];
            int64_t first = i % 2 ? 2 : 0; /* the table may lack tokens on both sides */
            kt_tensor *token = kt_integers(m, TR_I32, N, 0, V + 2 * first),
                      *table = kt_normal(m, t, V * H, 1);
            kt_tensor *y = kt_filled(m, t, N * H, NAN), *dy = kt_normal(m, t, N * H, 1);
            kt_tensor *d = kt_normal(m, TR_F32, V * H, 1);
            double *want = malloc((size_t)(N * H + 1) * sizeof *want);
            double *want_d = malloc((size_t)(V * H + 1) * sizeof *want_d);
            memcpy(want_d, d->value, (size_t)(V * H) * sizeof *want_d);
            for (int64_t n = 0; n < N; n++)
                for (int64_t c = 0; c < H; c++) {
                    int64_t row = (int64_t)token->value[n] - first;
                    want[n * H + c] = row >= 0 && row < V ? table->value[row * H + c] : 0;
                }
            add_in_order(want_d, token->value, dy->value, first, V, N, H, segment_of(m));
            m->k->embedding_forward(m->s, t, y->data, token->data, table->data, first, V, N, H);
            m->k->embedding_backward(m->s, t, d->data, token->data, dy->data, first, V, N, H);
            kt_check(m, y, want, 0, "embedding N %lld H %lld %s", (long long)N, (long long)H,
                     name(t));
            kt_check(m, d, want_d, 0, "its gradient");
            free(want);
            free(want_d);
            kt_release(m);
        }
}

/* Tokens 0 to V-1: one of them alone, each once, or as words in a text, where P(token <= x) is
 * ln(x + 1) / ln V (Zipf). */
typedef enum { ONE, DIFFERENT, ZIPF } spread_of_tokens;

static kt_tensor *tokens_spread(kt_maker *m, spread_of_tokens how, int64_t N, int64_t V) {
    kt_tensor *u = kt_integers(m, TR_F64, N, 0, 1 << 20);
    double *token = malloc((size_t)N * sizeof *token);
    for (int64_t n = 0; n < N; n++) {
        if (how == ONE) token[n] = (double)(V / 2);
        if (how == DIFFERENT) token[n] = (double)(n * 5 % V); /* V has no factor 5 */
        if (how == ZIPF) token[n] = floor(pow((double)V, u->value[n] / (1 << 20))) - 1;
    }
    kt_tensor *x = kt_from(m, TR_I32, N, token);
    free(token);
    return x;
}

/* However often a token comes, its gradient is the float64 sum of its rows, and has the bits of the
 * contract's order. The sizes take more segments of a token than a warp counts at once, columns of
 * several warps, and rows that are no multiple of 16 bytes. */
static void embedding_of_repeated_tokens(kt_maker *m) {
    static const char *const names[] = {"one token", "all different", "Zipf"};
    static const int64_t sizes[][3] = {/* N, V, H */ {4300, 3, 132},
                                       {129, 2, 40},
                                       {4350, 4351, 12},
                                       {4350, 4352, 7},
                                       {9000, 999, 36}};
    static const spread_of_tokens spreads[] = {ONE, ONE, DIFFERENT, DIFFERENT, ZIPF};
    for (int i = 0; i < 5; i++)
        for (int h = 0; h < 2; h++) {
            tr_dtype t = h ? TR_BF16 : TR_F32;
            int64_t N = sizes[i][0], V = sizes[i][1], H = sizes[i][2];
            kt_tensor *token = tokens_spread(m, spreads[i], N, V);
            kt_tensor *dy = kt_normal(m, t, N * H, 1), *d = kt_normal(m, TR_F32, V * H, 1);
            double *sum = malloc((size_t)(V * H) * sizeof *sum);
            double *bits = malloc((size_t)(V * H) * sizeof *bits);
            memcpy(sum, d->value, (size_t)(V * H) * sizeof *sum);
            memcpy(bits, d->value, (size_t)(V * H) * sizeof *bits);
            for (int64_t j = 0; j < N * H; j++)
                sum[(int64_t)token->value[j / H] * H + j % H] += dy->value[j];
            add_in_order(bits, token->value, dy->value, 0, V, N, H, segment_of(m));
            m->k->embedding_backward(m->s, t, d->data, token->data, dy->data, 0, V, N, H);
            kt_check(m, d, sum, kt_tolerance(TR_F32), "embedding gradient, %s, N %lld H %lld %s",
                     names[spreads[i]], (long long)N, (long long)H, name(t));
            kt_check(m, d, bits, 0, "its bits");
            free(sum);
            free(bits);
            kt_release(m);
        }
}

typedef struct {
    double *loss, *gradient, sum;
} answer;

/* The formula over logits x[N, ld]; the gradient has rows of width V. */
static answer expected(const double *x, int64_t ld, const double *label, int64_t N, int64_t V,
                       double scale) {
    answer a = {calloc((size_t)N + 1, sizeof(double)), calloc((size_t)(N * V) + 1, sizeof(double)),
                0};
    for (int64_t n = 0; n < N; n++) {
        if (label[n] < 0) continue;
        double max = -INFINITY, sum = 0;
        for (int64_t v = 0; v < V; v++) max = fmax(max, x[n * ld + v]);
        for (int64_t v = 0; v < V; v++) sum += exp(x[n * ld + v] - max);
        for (int64_t v = 0; v < V; v++)
            a.gradient[n * V + v] =
                scale * (exp(x[n * ld + v] - max) / sum - (v == (int64_t)label[n] ? 1 : 0));
        a.loss[n] = max + log(sum) - x[n * ld + (int64_t)label[n]];
        a.sum += a.loss[n];
    }
    return a;
}

static void free_answer(answer a) {
    free(a.loss);
    free(a.gradient);
}

/* Rows of `width` taken out of x[N, ld]. */
static void take_rows(double *rows, const double *x, int64_t N, int64_t ld, int64_t width) {
    for (int64_t n = 0; n < N; n++)
        for (int64_t v = 0; v < width; v++) rows[n * width + v] = x[n * ld + v];
}

static void check_loss(kt_maker *m, int64_t N, int64_t V, double spread, tr_dtype t) {
    int64_t ld = V + 5;
    kt_tensor *x = kt_normal(m, TR_F32, N * ld, spread);
    kt_tensor *label = kt_integers(m, TR_I32, N, -1, V);
    kt_tensor *loss = kt_filled(m, TR_F32, N, NAN), *d = kt_filled(m, t, N * (V + 2), NAN);
    double start = 1.5;
    kt_tensor *sum = kt_from(m, TR_F64, 1, &start);
    answer a = expected(x->value, ld, label->value, N, V, 0.25);
    m->k->cross_entropy(m->s, t, x->data, ld, label->data, loss->data, sum->data, d->data, V + 2,
                        0.25f, N, V);
    double tolerance = 1e-6, want_sum = start + a.sum;
    kt_read(m, loss);
    for (int64_t n = 0; n < N; n++) { /* fp32 of logits is absolute: measured beside their spread */
        loss->value[n] += spread;
        a.loss[n] += spread;
    }
    loss = kt_from(m, TR_F32, N, loss->value);
    kt_check(m, loss, a.loss, tolerance, "loss N %lld V %lld spread %g", (long long)N, (long long)V,
             spread);
    kt_check(m, sum, &want_sum, tolerance, "its sum");
    kt_read(m, d);
    for (int64_t n = 0; n < N; n++)
        for (int64_t v = V; v < V + 2; v++) assert_true(isnan(d->value[n * (V + 2) + v]));
    double *rows = malloc((size_t)(N * V + 1) * sizeof *rows);
    take_rows(rows, d->value, N, V + 2, V);
    double beside = spread > 1 ? 0.25 : 0; /* a label almost certain: 1 - p is fp32's of 1 */
    for (int64_t i = 0; i < N * V; i++) {
        rows[i] += beside;
        a.gradient[i] += beside;
    }
    kt_tensor *got = kt_from(m, TR_F32, N * V, rows);
    kt_check(m, got, a.gradient, kt_tolerance(t), "its gradient %s", name(t));
    free(rows);
    free_answer(a);
    kt_release(m);
}

static void loss_equals_loops(kt_maker *m) {
    static const int64_t sizes[][2] = {{0, 7},    {1, 1},    {3, 2},
                                       {5, 31},   {4, 33},   {9, 257},
                                       {2, 1024}, {3, 1025}, {2, 2 * 1024 + 70},
                                       {70, 33}};
    for (int i = 0; i < 10; i++)
        for (int h = 0; h < 2; h++)
            for (double spread = 1; spread < 200; spread *= 12)
                check_loss(m, sizes[i][0], sizes[i][1], spread, h ? TR_BF16 : TR_F32);
}

/* Rows of `width` elements of type t that lie `ld` apart in the memory of x. */
static kt_tensor *rows_within(kt_maker *m, kt_tensor *x, tr_dtype t, int64_t N, int64_t ld,
                              int64_t width) {
    kt_tensor view = *x;
    view.t = t, view.n = N * ld;
    view.value = malloc((size_t)(view.n + 1) * sizeof(double));
    kt_read(m, &view);
    double *rows = malloc((size_t)(N * width + 1) * sizeof *rows);
    take_rows(rows, view.value, N, ld, width);
    kt_tensor *y = kt_from(m, t, N * width, rows);
    free(view.value);
    free(rows);
    return y;
}

/* The gradient written where the logits lie: f32 in their place, bf16 in the first half of a row.
 */
static void gradient_in_place(kt_maker *m) {
    static const int64_t widths[] = {1, 2, 15, 64, 97, 1500, 5003};
    for (int i = 0; i < 7; i++)
        for (int h = 0; h < 2; h++) {
            tr_dtype t = h ? TR_BF16 : TR_F32;
            int64_t N = 6, V = widths[i], ld = V + 1, d_ld = h ? 2 * ld : ld;
            kt_tensor *x = kt_normal(m, TR_F32, N * ld, 3),
                      *label = kt_integers(m, TR_I32, N, -1, V);
            kt_tensor *sum = kt_filled(m, TR_F64, 1, 0);
            answer a = expected(x->value, ld, label->value, N, V, 1);
            m->k->cross_entropy(m->s, t, x->data, ld, label->data, NULL, sum->data, x->data, d_ld,
                                1, N, V);
            kt_tensor *got = rows_within(m, x, t, N, d_ld, V);
            kt_check(m, got, a.gradient, kt_tolerance(t), "gradient in place V %lld %s",
                     (long long)V, name(t));
            free_answer(a);
            kt_release(m);
        }
}

/* The vocabulary cut at `cut`: parts of logits[N, V] as P ranks hold them, each with its own copy.
 */
static void check_parts(kt_maker *m, int64_t N, const int64_t *cut, int64_t P, tr_dtype t) {
    int64_t V = cut[P];
    kt_tensor *x = kt_normal(m, TR_F32, N * V, 30), *label = kt_integers(m, TR_I32, N, -1, V);
    kt_tensor *parts = kt_filled(m, TR_F64, P * N * 3, NAN), *logits[8];
    answer a = expected(x->value, V, label->value, N, V, 0.5);
    double *rows = malloc((size_t)(N * V + 1) * sizeof *rows);
    for (int64_t p = 0; p < P; p++) {
        int64_t width = cut[p + 1] - cut[p];
        take_rows(rows, x->value + cut[p], N, V, width);
        logits[p] = kt_from(m, TR_F32, N * width, rows);
        m->k->cross_entropy_part(m->s, logits[p]->data, width, label->data, cut[p],
                                 (double *)parts->data + p * N * 3, N, width);
    }
    for (int64_t p = 0; p < P; p++) {
        int64_t width = cut[p + 1] - cut[p];
        bool in_place = p == 0; /* as cross_entropy's */
        int64_t ld = in_place && t == TR_BF16 ? 2 * width : width;
        kt_tensor *loss = kt_filled(m, TR_F32, N, NAN), *sum = kt_filled(m, TR_F64, 1, 0);
        kt_tensor *d = kt_filled(m, t, N * width, NAN);
        void *to = in_place ? logits[p]->data : d->data;
        m->k->cross_entropy_whole(m->s, t, parts->data, P, logits[p]->data, width, label->data,
                                  cut[p], p ? NULL : loss->data, p ? NULL : sum->data, to, ld, 0.5f,
                                  N, width);
        if (p == 0) kt_check(m, loss, a.loss, 1e-6, "loss over %lld parts", (long long)P);
        if (p == 0) kt_check(m, sum, &a.sum, 1e-6, "its sum");
        if (in_place) d = rows_within(m, logits[p], t, N, ld, width);
        kt_read(m, d);
        for (int64_t i = 0; i < N * width; i++) d->value[i] += 0.25; /* see check_loss */
        kt_tensor *got = kt_from(m, t == TR_F32 ? TR_F32 : TR_F64, N * width, d->value);
        take_rows(rows, a.gradient + cut[p], N, V, width);
        for (int64_t i = 0; i < N * width; i++) rows[i] += 0.25;
        kt_check(m, got, rows, kt_tolerance(t), "its gradient, %lld columns %s", (long long)width,
                 name(t));
    }
    free(rows);
    free_answer(a);
    kt_release(m);
}

static void parts_make_the_whole(kt_maker *m) {
    static const int64_t cuts[][9] = {{0, 7}, {0, 3, 5}, {0, 1, 1, 2}, {0, 40, 40, 99, 1300}};
    for (int64_t P = 1; P <= 4; P++)
        for (int64_t N = 0; N <= 9; N += 3)
            for (int h = 0; h < 2; h++) check_parts(m, N, cuts[P - 1], P, h ? TR_BF16 : TR_F32);
    check_parts(m, 5, (int64_t[]){0, 0, 1, 257, 257, 514, 771, 1028, 2085}, 8, TR_F32);
}

/* Parts of a row without a label, and of no columns. */
static void parts_say_nothing(kt_maker *m) {
    kt_tensor *x = kt_filled(m, TR_F32, 3, NAN), *part = kt_filled(m, TR_F64, 6, NAN);
    kt_tensor *label = kt_from(m, TR_I32, 2, (double[]){-1, 4});
    double nothing[6] = {-INFINITY, 0, 0, -INFINITY, 0, 0};
    m->k->cross_entropy_part(m->s, x->data, 3, label->data, 0, part->data, 1, 3);
    m->k->cross_entropy_part(m->s, x->data, 3, (int32_t *)label->data + 1, 9,
                             (double *)part->data + 3, 1, 0);
    kt_check(m, part, nothing, 0, "parts that have nothing to say");
}

typedef struct {
    kt_tensor *x, *label;
    int64_t N, V;
} problem;

static double loss_of(kt_maker *m, void *context) {
    problem *p = context;
    kt_tensor *sum = kt_filled(m, TR_F64, 1, 0);
    m->k->cross_entropy(m->s, TR_F32, p->x->data, p->V, p->label->data, NULL, sum->data, NULL, 0, 1,
                        p->N, p->V);
    return kt_read(m, sum)[0];
}

static void gradient_is_the_derivative(kt_maker *m) {
    int64_t N = 4, V = 37;
    kt_tensor *x = kt_normal(m, TR_F32, N * V, 1), *label = kt_integers(m, TR_I32, N, -1, V);
    kt_tensor *d = kt_filled(m, TR_F32, N * V, NAN), *sum = kt_filled(m, TR_F64, 1, 0);
    m->k->cross_entropy(m->s, TR_F32, x->data, V, label->data, NULL, sum->data, d->data, V, 1, N,
                        V);
    problem p = {x, label, N, V};
    double want[4 * 37];
    for (int64_t i = 0; i < N * V; i++) want[i] = kt_difference(m, x, i, 1e-2, loss_of, &p);
    kt_check(m, d, want, 1e-3, "gradient against finite differences");
}

/* The figures of the formulas' page: equal logits lose ln V; a label alone loses nothing. */
static void known_losses(kt_maker *m) {
    double zero = 0, all = log(50257.0);
    int64_t V = 50257;
    kt_tensor *x = kt_filled(m, TR_F32, V, -3), *label = kt_from(m, TR_I32, 1, &zero);
    kt_tensor *loss = kt_filled(m, TR_F32, 1, NAN), *sum = kt_filled(m, TR_F64, 1, 0);
    m->k->cross_entropy(m->s, TR_F32, x->data, V, label->data, loss->data, sum->data, NULL, 0, 1, 1,
                        V);
    kt_check(m, loss, &all, 2e-7, "50257 equal logits: 10.824905");
    kt_check_number(m, all, 10.824905, 1e-7, "ln 50257");
    double far[3] = {1e4, 1e4 - 1, -1e30}, want = log1p(exp(-1.0));
    x = kt_from(m, TR_F32, 3, far);
    m->k->cross_entropy(m->s, TR_F32, x->data, 3, label->data, loss->data, sum->data, NULL, 0, 1, 1,
                        3);
    kt_check(m, loss, &want, 1e-6, "logits of 1e4, 1e4 - 1 and -1e30");
    double sparse[2000], two = log1p(exp(-1.0));
    for (int v = 0; v < 2000; v++) sparse[v] = v == 1300 ? -2 : v == 1301 ? -3 : -INFINITY;
    x = kt_from(m, TR_F32, 2000, sparse);
    label = kt_from(m, TR_I32, 1, (double[]){1300});
    m->k->cross_entropy(m->s, TR_F32, x->data, 2000, label->data, loss->data, sum->data, x->data,
                        2000, 1, 1, 2000);
    kt_check(m, loss, &two, 1e-6, "all but two logits -inf");
    double p = exp(-two), slope[2000] = {[1300] = p - 1, [1301] = 1 - p};
    kt_check(m, x, slope, 1e-5, "its gradient");
    label = kt_from(m, TR_I32, 1, &zero);
    double nan[3] = {0, NAN, 1}, lost = NAN;
    x = kt_from(m, TR_F32, 3, nan);
    m->k->cross_entropy(m->s, TR_F32, x->data, 3, label->data, loss->data, sum->data, NULL, 0, 1, 1,
                        3);
    kt_check(m, loss, &lost, 0, "a NaN among the logits is seen");
}

/* No label in any row: loss 0, gradient 0, whatever the logits are. */
static void unlabelled_rows_are_silent(kt_maker *m) {
    int64_t N = 3, V = 50;
    kt_tensor *x = kt_filled(m, TR_F32, N * V, NAN), *label = kt_filled(m, TR_I32, N, -100);
    kt_tensor *loss = kt_filled(m, TR_F32, N, NAN), *d = kt_filled(m, TR_BF16, N * V, NAN);
    kt_tensor *sum = kt_filled(m, TR_F64, 1, 0);
    double zeros[150] = {0};
    m->k->cross_entropy(m->s, TR_BF16, x->data, V, label->data, loss->data, sum->data, d->data, V,
                        1, N, V);
    kt_check(m, loss, zeros, 0, "loss without labels");
    kt_check(m, d, zeros, 0, "gradient without labels");
    kt_check(m, sum, zeros, 0, "sum without labels");
}

/* Sums are in row order whatever the number of threads: the same bits. */
static void threads_change_nothing(kt_maker *m) {
    int before = omp_get_max_threads(), most = kt_threads(m, 5);
    int64_t N = 70, V = 1201;
    kt_tensor *x = kt_normal(m, TR_F32, N * V, 2), *label = kt_integers(m, TR_I32, N, 0, V);
    double first = 0;
    for (int threads = 1; threads <= most; threads++) {
        omp_set_num_threads(threads);
        kt_tensor *sum = kt_filled(m, TR_F64, 1, 0);
        m->k->cross_entropy(m->s, TR_F32, x->data, V, label->data, NULL, sum->data, NULL, 0, 1, N,
                            V);
        double got = kt_read(m, sum)[0];
        if (threads == 1) first = got;
        assert_true(got == first);
    }
    omp_set_num_threads(before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        KT_TEST(embedding_equals_loops), KT_TEST(embedding_of_repeated_tokens),
        KT_TEST(loss_equals_loops),      KT_TEST(gradient_in_place),
        KT_TEST(known_losses),           KT_TEST(gradient_is_the_derivative),
        KT_TEST(threads_change_nothing), KT_TEST(unlabelled_rows_are_silent),
        KT_TEST(parts_say_nothing),      KT_TEST(parts_make_the_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
