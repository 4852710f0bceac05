/* layers.c - norms, rotary positions, gated activations, sums and casts of every maker against
 * float64, their gradients against finite differences. Floor: tests. */
#include "values.h"

#include <math.h>
#include <omp.h>

/* --- norms --------------------------------------------------------------------------------- */

static const int64_t norm_shapes[][3] = {/* N, C, stride */
                                         {0, 8, 8},
                                         {1, 1, 1},
                                         {3, 5, 7},
                                         {4, 64, 64},
                                         {2, 129, 200},
                                         {37, 48, 48},
                                         {65, 257, 260},
                                         {300, 1000, 1000},
                                         {40, 1031, 1040},
                                         /* a block's sums are 48 KB, of layer- or rmsnorm */
                                         {2, 6144, 6144},
                                         {2, 12288, 12288},
                                         {3, 25001, 25001}};
enum { NORM_SHAPES = sizeof norm_shapes / sizeof *norm_shapes, NORM_TYPES = 2 };
static const tr_norm_type norm_types[] = {TR_RMS_NORM, TR_LAYER_NORM};
static const char *const norm_names[] = {[TR_RMS_NORM] = "rmsnorm", [TR_LAYER_NORM] = "layernorm"};

static int64_t extent(int64_t N, int64_t C, int64_t stride) {
    return N ? (N - 1) * stride + C : 0;
}

/* A norm of either type, on tensors of the maker; b, db and mean are layernorm's. */
typedef struct {
    tr_norm_type type;
    tr_dtype t;
    int64_t N, C, stride;
    float eps;
    kt_tensor *x, *w, *b, *y, *mean, *rstd;
    kt_tensor *dy, *dx, *dw, *db, *residual; /* residual may be NULL */
} norm_run;

static void run_forward(kt_maker *m, const norm_run *a) {
    if (a->type == TR_LAYER_NORM)
        m->k->layernorm_forward(m->s, a->t, a->y->data, a->mean->data, a->rstd->data, a->x->data,
                                a->w->data, a->b->data, a->N, a->C, a->stride, a->eps);
    else
        m->k->rmsnorm_forward(m->s, a->t, a->y->data, a->rstd->data, a->x->data, a->w->data, a->N,
                              a->C, a->stride, a->eps);
}

static void run_backward(kt_maker *m, const norm_run *a) {
    const void *residual = a->residual ? a->residual->data : NULL;
    if (a->type == TR_LAYER_NORM)
        m->k->layernorm_backward(m->s, a->t, a->dx->data, a->dw->data, a->db->data, a->dy->data,
                                 a->x->data, a->w->data, a->mean->data, a->rstd->data, residual,
                                 a->N, a->C, a->stride);
    else
        m->k->rmsnorm_backward(m->s, a->t, a->dx->data, a->dw->data, a->dy->data, a->x->data,
                               a->w->data, a->rstd->data, residual, a->N, a->C, a->stride);
}

/* x, w, b at random (layernorm's x around 1, so that its mean counts), statistics and y to be
 * written. */
static norm_run make_norm(kt_maker *m, tr_norm_type type, tr_dtype t, const int64_t *shape,
                          float eps) {
    norm_run a = {
        .type = type, .t = t, .N = shape[0], .C = shape[1], .stride = shape[2], .eps = eps};
    int64_t n = extent(a.N, a.C, a.stride);
    a.x = kt_normal(m, t, n, 2), a.w = kt_normal(m, t, a.C, 1), a.b = kt_normal(m, t, a.C, 1);
    for (int64_t i = 0; i < n; i++) a.x->value[i] += type == TR_LAYER_NORM;
    a.x = kt_from(m, t, n, a.x->value);
    a.y = kt_filled(m, t, n, 7);
    a.mean = kt_filled(m, TR_F32, a.N, NAN), a.rstd = kt_filled(m, TR_F32, a.N, NAN);
    return a;
}

/* Mean (0 in rmsnorm) and rstd of each row. */
static void want_statistics(const norm_run *a, double *mean, double *rstd) {
    for (int64_t i = 0; i < a->N; i++) {
        const double *x = a->x->value + i * a->stride;
        double squares = 0;
        for (int64_t c = 0; c < a->C && a->type == TR_LAYER_NORM; c++)
            mean[i] += x[c] / (double)a->C;
        for (int64_t c = 0; c < a->C; c++) squares += pow(x[c] - mean[i], 2);
        rstd[i] = 1 / sqrt(squares / (double)a->C + (double)a->eps);
    }
}

/* Property: forward equals the formula, also in place; what lies between rows stays. */
static void norm_forward(kt_maker *m, tr_norm_type type, tr_dtype t, const int64_t *shape,
                         bool in_place) {
    norm_run a = make_norm(m, type, t, shape, type == TR_LAYER_NORM ? 1e-2f : 1e-5f);
    if (in_place) a.y = a.x;
    double *want = copy_of(a.y), *mean = doubles(a.N), *rstd = doubles(a.N);
    want_statistics(&a, mean, rstd);
    for (int64_t i = 0; i < a.N; i++)
        for (int64_t c = 0; c < a.C; c++) {
            double *to = &want[i * a.stride + c];
            *to = (a.x->value[i * a.stride + c] - mean[i]) * rstd[i] * a.w->value[c];
            if (type == TR_LAYER_NORM) *to += a.b->value[c];
        }
    run_forward(m, &a);
    const char *how = in_place ? "in place" : "", *name = norm_names[type];
    kt_check(m, a.y, want, kt_tolerance(t), "%s %s %lldx%lld/%lld %s", name, type_name(t),
             (long long)a.N, (long long)a.C, (long long)a.stride, how);
    kt_check(m, a.rstd, rstd, 1e-6, "%s %s rstd", name, type_name(t));
    if (type == TR_LAYER_NORM) kt_check(m, a.mean, mean, 2e-6, "%s %s mean", name, type_name(t));
    free(want), free(mean), free(rstd);
}

static void test_norm_forward(kt_maker *m) {
    for (int i = 0; i < TYPES; i++)
        for (int j = 0; j < NORM_SHAPES; j++)
            for (int in_place = 0; in_place < 2; in_place++)
                for (int type = 0; type < NORM_TYPES; type++) {
                    norm_forward(m, norm_types[type], types[i], norm_shapes[j], in_place);
                    kt_release(m);
                }
}

/* Where dx of the backward goes, and whether a residual is added. */
typedef enum { APART, ON_DY, ON_RESIDUAL } placement;

/* dx, dw and db by the formula, from the statistics that the forward gave: with g = dy w and xh the
 * normed row, dx = rstd (g - mean(g) - xh mean(g xh)), rmsnorm without the first mean. */
static void want_backward(const norm_run *a, double *dx, double *dw, double *db) {
    bool layer = a->type == TR_LAYER_NORM;
    for (int64_t i = 0; i < a->N; i++) {
        const double *x = a->x->value + i * a->stride, *d = a->dy->value + i * a->stride;
        double r = a->rstd->value[i], mean = layer ? a->mean->value[i] : 0, sum = 0, dot = 0;
        for (int64_t c = 0; c < a->C; c++) {
            double g = d[c] * a->w->value[c];
            if (layer) sum += g;
            dot += g * (x[c] - mean) * r;
            dw[c] += d[c] * (x[c] - mean) * r;
            db[c] += d[c];
        }
        for (int64_t c = 0; c < a->C; c++) {
            double inner = d[c] * a->w->value[c] - (sum + (x[c] - mean) * r * dot) / (double)a->C;
            double base = a->residual ? a->residual->value[i * a->stride + c] : 0;
            dx[i * a->stride + c] = base + r * inner;
        }
    }
}

/* Property: dx is residual plus the derivative, wherever it goes; dw and db are added to what was
 * there. The large eps keeps rows of one element from cancelling. */
static void norm_backward(kt_maker *m, tr_norm_type type, tr_dtype t, const int64_t *shape,
                          placement place) {
    norm_run a = make_norm(m, type, t, shape, 0.1f);
    int64_t n = a.x->n;
    a.dy = kt_normal(m, t, n, 1);
    bool alone = place == APART && (a.C > 1 || type == TR_RMS_NORM); /* else dx is 0 */
    a.residual = alone ? NULL : kt_normal(m, t, n, 1);
    a.dw = kt_normal(m, TR_F32, a.C, 1), a.db = kt_normal(m, TR_F32, a.C, 1);
    run_forward(m, &a);
    kt_read(m, a.rstd), kt_read(m, a.mean);
    a.dx = place == ON_DY ? a.dy : place == ON_RESIDUAL ? a.residual : kt_filled(m, t, n, 7);
    double *dx = copy_of(a.dx), *dw = copy_of(a.dw), *db = copy_of(a.db);
    want_backward(&a, dx, dw, db);
    run_backward(m, &a);
    const char *name = norm_names[type];
    kt_check(m, a.dx, dx, kt_tolerance(t), "%s backward dx %s %lldx%lld/%lld place %d", name,
             type_name(t), (long long)a.N, (long long)a.C, (long long)a.stride, place);
    kt_check(m, a.dw, dw, 1e-5, "%s backward dw %s", name, type_name(t));
    if (type == TR_LAYER_NORM) kt_check(m, a.db, db, 1e-5, "%s backward db %s", name, type_name(t));
    free(dx), free(dw), free(db);
}

static void test_norm_backward(kt_maker *m) {
    for (int i = 0; i < TYPES; i++)
        for (int j = 0; j < NORM_SHAPES; j++)
            for (placement place = APART; place <= ON_RESIDUAL; place++)
                for (int type = 0; type < NORM_TYPES; type++) {
                    norm_backward(m, norm_types[type], types[i], norm_shapes[j], place);
                    kt_release(m);
                }
}

/* Property: the weight gradient of 4096 rows in bf16 is the fp64 sum to fp32 accuracy (sums kept in
 * bf16 stick), and the same bits for every number of threads. */
static void test_norm_many_rows(kt_maker *m) {
    const int64_t shape[] = {4096, 96, 96}, C = shape[1];
    int threads_before = omp_get_max_threads(), most = kt_threads(m, 5);
    for (int type = 0; type < NORM_TYPES; type++) {
        norm_run a = make_norm(m, norm_types[type], TR_BF16, shape, 1e-5f);
        kt_tensor *first = NULL, *first_b = NULL;
        a.dx = a.y, a.dy = kt_filled(m, TR_BF16, a.x->n, 1);
        run_forward(m, &a);
        kt_read(m, a.rstd), kt_read(m, a.mean);
        double *dx = doubles(a.x->n), *dw = doubles(C), *db = doubles(C);
        want_backward(&a, dx, dw, db);
        for (int threads = 1; threads <= most; threads++) {
            omp_set_num_threads(threads);
            a.dw = kt_filled(m, TR_F32, C, 0), a.db = kt_filled(m, TR_F32, C, 0);
            run_backward(m, &a);
            if (!first) first = a.dw, first_b = a.db;
            const char *name = norm_names[a.type];
            kt_check(m, a.dw, dw, 2e-6, "%s dw, 4096 bf16 rows, %d threads", name, threads);
            kt_check(m, a.dw, kt_read(m, first), 0, "%s dw, %d threads against 1", name, threads);
            if (a.type == TR_RMS_NORM) continue;
            kt_check(m, a.db, db, 2e-6, "%s db, 4096 bf16 rows, %d threads", name, threads);
            kt_check(m, a.db, kt_read(m, first_b), 0, "%s db, %d threads against 1", name, threads);
        }
        free(dx), free(dw), free(db);
    }
    omp_set_num_threads(threads_before);
}

static double norm_value(kt_maker *m, void *context) {
    norm_run *a = context;
    run_forward(m, a);
    const double *y = kt_read(m, a->y);
    double sum = 0;
    for (int64_t i = 0; i < a->x->n; i++) sum += y[i] * a->dy->value[i];
    return sum;
}

static void check_differences(kt_maker *m, norm_run *a, kt_tensor *got, kt_tensor *of,
                              const char *what) {
    double *want = doubles(of->n);
    for (int64_t i = 0; i < of->n; i++) want[i] = kt_difference(m, of, i, 1e-2, norm_value, a);
    kt_check(m, got, want, 1e-3, "%s %s against differences", norm_names[a->type], what);
    free(want);
}

/* Property: the backward is the derivative of the forward. */
static void test_norm_differences(kt_maker *m) {
    const int64_t shape[] = {3, 21, 21};
    for (int type = 0; type < NORM_TYPES; type++) {
        norm_run a = make_norm(m, norm_types[type], TR_F32, shape, 1e-3f);
        a.dy = kt_normal(m, TR_F32, a.x->n, 1), a.dx = kt_filled(m, TR_F32, a.x->n, NAN);
        a.dw = kt_filled(m, TR_F32, a.C, 0), a.db = kt_filled(m, TR_F32, a.C, 0);
        run_forward(m, &a);
        run_backward(m, &a);
        check_differences(m, &a, a.dx, a.x, "dx");
        check_differences(m, &a, a.dw, a.w, "dw");
        if (a.type == TR_LAYER_NORM) check_differences(m, &a, a.db, a.b, "db");
    }
}

/* --- rope ---------------------------------------------------------------------------------- */

typedef struct {
    int64_t N, heads, D, F, gap; /* row = heads*D + gap */
    int64_t last_position;
    double base, factor;
} rope_case;

static const rope_case rope_cases[] = {
    {0, 2, 8, 4, 0, 10, 1e4, 1},           {1, 1, 2, 1, 0, 1, 1e4, 1},
    {3, 2, 10, 3, 5, 64, 1e4, 1},          {17, 3, 64, 32, 0, 4096, 1e4, 1},
    {9, 2, 100, 32, 7, 1 << 20, 5e5, 1.2}, {5, 1, 600, 300, 0, 1 << 20, 1e6, 1},
    {129, 4, 128, 64, 0, 1 << 20, 1e4, 1}, {6, 19, 96, 32, 16, 1 << 20, 1e4, 1}};
enum { ROPE_CASES = sizeof rope_cases / sizeof *rope_cases };

/* x rotated by the formula, on doubles. */
static void rotate(double *x, const rope_case *r, const double *position, const double *freq,
                   bool interleaved, int direction) {
    int64_t row = r->heads * r->D + r->gap;
    for (int64_t n = 0; n < r->N; n++)
        for (int64_t h = 0; h < r->heads; h++)
            for (int64_t i = 0; i < r->F; i++) {
                double *at = x + n * row + h * r->D, angle = direction * position[n] * freq[i];
                double *p = at + (interleaved ? 2 * i : i);
                double *q = at + (interleaved ? 2 * i + 1 : i + r->F), a = *p, b = *q;
                *p = (a * cos(angle) - b * sin(angle)) * r->factor;
                *q = (a * sin(angle) + b * cos(angle)) * r->factor;
            }
}

static void rope_one(kt_maker *m, tr_dtype t, const rope_case *r, bool interleaved, int direction) {
    int64_t row = r->heads * r->D + r->gap, n = r->N ? r->N * row - r->gap : 0;
    double *f = doubles(r->F);
    for (int64_t i = 0; i < r->F; i++) f[i] = pow(r->base, -(double)i / (double)r->F);
    kt_tensor *freq = kt_from(m, TR_F32, r->F, f), *x = kt_normal(m, t, n, 1);
    kt_tensor *position = kt_integers(m, TR_I32, r->N, 0, r->last_position);
    if (r->N) position->value[r->N - 1] = (double)r->last_position;
    position = kt_from(m, TR_I32, r->N, position->value);
    double *want = copy_of(x);
    rotate(want, r, position->value, freq->value, interleaved, direction);
    m->k->rope(m->s, t, x->data, position->data, freq->data, r->N, r->heads, r->D, r->F, row,
               interleaved, (float)r->factor, direction);
    kt_check(m, x, want, t == TR_F32 ? 5e-7 : 8e-3, "rope %s %lldx%lldx%lld %s to %lld dir %d",
             type_name(t), (long long)r->N, (long long)r->heads, (long long)r->D,
             interleaved ? "pairs" : "halves", (long long)r->last_position, direction);
    free(f);
    free(want);
}

/* Property: rotation by exact angles at positions up to 2^20, both pairings and directions; what is
 * not rotated stays. */
static void test_rope(kt_maker *m) {
    for (int i = 0; i < TYPES; i++)
        for (int j = 0; j < ROPE_CASES; j++)
            for (int interleaved = 0; interleaved < 2; interleaved++)
                for (int direction = -1; direction <= 1; direction += 2) {
                    rope_one(m, types[i], &rope_cases[j], interleaved, direction);
                    kt_release(m);
                }
}

typedef struct {
    kt_tensor *x, *r, *position, *freq;
    bool interleaved;
} rope_context;

enum { RN = 3, RH = 2, RD = 8, RF = 3, ROPE_N = RN * RH * RD };

static double rope_value(kt_maker *m, void *context) {
    rope_context *c = context;
    kt_tensor *y = kt_from(m, TR_F32, ROPE_N, c->x->value);
    m->k->rope(m->s, TR_F32, y->data, c->position->data, c->freq->data, RN, RH, RD, RF, RH * RD,
               c->interleaved, 1.5f, 1);
    const double *v = kt_read(m, y);
    double sum = 0;
    for (int64_t i = 0; i < ROPE_N; i++) sum += v[i] * c->r->value[i];
    return sum;
}

/* Property: rotating a gradient back (direction -1) is the derivative of rotating forward. */
static void test_rope_differences(kt_maker *m) {
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        rope_context c = {.interleaved = interleaved};
        c.x = kt_normal(m, TR_F32, ROPE_N, 1), c.r = kt_normal(m, TR_F32, ROPE_N, 1);
        c.position = kt_integers(m, TR_I32, RN, 0, 100);
        c.freq = kt_from(m, TR_F32, RF, (double[]){1, 0.1, 0.01});
        double want[ROPE_N];
        for (int64_t i = 0; i < ROPE_N; i++)
            want[i] = kt_difference(m, c.x, i, 0.1, rope_value, &c);
        m->k->rope(m->s, TR_F32, c.r->data, c.position->data, c.freq->data, RN, RH, RD, RF, RH * RD,
                   c.interleaved, 1.5f, -1);
        kt_check(m, c.r, want, 1e-4, "rope against differences, %s",
                 interleaved ? "pairs" : "halves");
    }
}

/* --- gated activations ---------------------------------------------------------------------- */

static const tr_activation activations[] = {TR_SILU, TR_GELU_TANH};
static const char *const activation_names[] = {[TR_SILU] = "swiglu", [TR_GELU_TANH] = "geglu"};
enum { ACTIVATIONS = sizeof activations / sizeof *activations };

static double silu(double x) {
    return x / (1 + exp(-x));
}
static double activate(tr_activation f, double x) {
    if (f == TR_SILU) return silu(x);
    return x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x))) / 2;
}
static double slope(tr_activation f, double x) {
    double s = 1 / (1 + exp(-x));
    if (f == TR_SILU) return s * (1 + x * (1 - s));
    double c = sqrt(2 / acos(-1)), t = tanh(c * (x + 0.044715 * x * x * x));
    return (1 + t) / 2 + x / 2 * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
}

static void glu_one(kt_maker *m, tr_dtype t, tr_activation f, const int64_t *shape, int place) {
    int64_t rows = shape[0], used = shape[1], C = shape[2], n = rows * C;
    kt_tensor *gate = kt_normal(m, t, n, 3), *up = kt_normal(m, t, n, 1);
    kt_tensor *dh = kt_normal(m, t, n, 1), *count = kt_from(m, TR_I64, 1, &(double){(double)used});
    for (int64_t i = used * C; i < n; i++) gate->value[i] = up->value[i] = dh->value[i] = NAN;
    gate = kt_from(m, t, n, gate->value), up = kt_from(m, t, n, up->value);
    dh = kt_from(m, t, n, dh->value);
    kt_tensor *gate2 = kt_from(m, t, n, gate->value), *up2 = kt_from(m, t, n, up->value);
    kt_tensor *h = place == 0 ? kt_filled(m, t, n, 7) : place == 1 ? gate2 : up2;
    kt_tensor *dgate = place == 0 ? kt_filled(m, t, n, 7) : place == 1 ? gate : dh;
    kt_tensor *dup = place == 0 ? kt_filled(m, t, n, 7) : place == 1 ? dh : up;
    double *want_h = copy_of(h), *want_dgate = copy_of(dgate), *want_dup = copy_of(dup);
    for (int64_t i = 0; i < used * C; i++) {
        double g = gate->value[i], u = up->value[i], d = dh->value[i];
        want_h[i] = activate(f, g) * u;
        want_dgate[i] = d * u * slope(f, g);
        want_dup[i] = d * activate(f, g);
    }
    tr_rows bound = {.max = rows, .used = used == rows && place == 0 ? NULL : count->data};
    m->k->glu_forward(m->s, t, f, h->data, gate2->data, up2->data, bound, C);
    m->k->glu_backward(m->s, t, f, dgate->data, dup->data, dh->data, gate->data, up->data, bound,
                       C);
    const char *name = activation_names[f];
    kt_check(m, h, want_h, kt_tolerance(t), "%s %s %lld of %lldx%lld place %d", name, type_name(t),
             (long long)used, (long long)rows, (long long)C, place);
    kt_check(m, dgate, want_dgate, kt_tolerance(t), "%s dgate %s", name, type_name(t));
    kt_check(m, dup, want_dup, kt_tolerance(t), "%s dup %s", name, type_name(t));
    free(want_h);
    free(want_dgate);
    free(want_dup);
}

/* Property: forward and backward equal the formula, on top of their inputs too; rows beyond the
 * used ones (NaN here) are neither read into results nor written. */
static void test_glu(kt_maker *m) {
    static const int64_t shapes[][3] = {/* rows, used, C */
                                        {0, 0, 3},  {1, 1, 1},    {5, 5, 7},     {9, 4, 33},
                                        {6, 0, 16}, {40, 40, 64}, {70, 51, 129}, {300, 299, 517}};
    for (int i = 0; i < TYPES; i++)
        for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++)
            for (int place = 0; place < 3; place++)
                for (int f = 0; f < ACTIVATIONS; f++) {
                    glu_one(m, types[i], activations[f], shapes[j], place);
                    kt_release(m);
                }
}

/* Property: activations keep their relative accuracy over the whole range, go to 0 and to x at
 * their ends, where the slope is 0 and 1, and let NaN through. */
static void test_activation_range(kt_maker *m) {
    enum { POINTS = 20000, ENDS = 7 };
    /* from where the value is a normal number; of GELU the exponent, near 87, is rounded first */
    static const double first[] = {[TR_SILU] = -85, [TR_GELU_TANH] = -9.9};
    static const double most[] = {[TR_SILU] = 3e-7, [TR_GELU_TANH] = 3e-5};
    double *x = doubles(POINTS);
    for (int i = 0; i < ACTIVATIONS; i++) {
        tr_activation f = activations[i];
        double worst = 0;
        for (int j = 0; j < POINTS; j++) x[j] = first[f] + 2 * -first[f] * j / POINTS;
        kt_tensor *gate = kt_from(m, TR_F32, POINTS, x), *up = kt_filled(m, TR_F32, POINTS, 1);
        m->k->glu_forward(m->s, TR_F32, f, up->data, gate->data, up->data, (tr_rows){POINTS, NULL},
                          1);
        const double *h = kt_read(m, up);
        for (int j = 0; j < POINTS; j++) {
            double g = gate->value[j];
            /* 1 + tanh cancels below 0, and 1 / (1 + e^-2u) does not */
            double u = f == TR_SILU ? g : 2 * sqrt(2 / acos(-1)) * (g + 0.044715 * g * g * g);
            double want = g / (1 + exp(-u));
            if (want != 0) worst = fmax(worst, fabs(h[j] / want - 1));
        }
        kt_check_number(m, worst, 0, most[f], "%s, largest relative error on [%g, %g]",
                        activation_names[f], first[f], -first[f]);
        double ends[] = {-1e4, -1e38, -120, 0, 120, 1e38, NAN};
        double want[] = {0, 0, 0, 0, 120, (double)1e38f, NAN};
        double slopes[] = {0, 0, 0, 0.5, 1, 1, NAN};
        kt_tensor *e = kt_from(m, TR_F32, ENDS, ends), *one = kt_filled(m, TR_F32, ENDS, 1);
        kt_tensor *dup = kt_filled(m, TR_F32, ENDS, 7);
        m->k->glu_backward(m->s, TR_F32, f, one->data, dup->data, one->data, e->data, one->data,
                           (tr_rows){ENDS, NULL}, 1);
        kt_check(m, one, slopes, 1e-6, "slope of %s at its ends", activation_names[f]);
        kt_check(m, dup, want, 1e-6, "dup of %s at its ends", activation_names[f]);
        one = kt_filled(m, TR_F32, ENDS, 1);
        m->k->glu_forward(m->s, TR_F32, f, e->data, e->data, one->data, (tr_rows){ENDS, NULL}, 1);
        kt_check(m, e, want, 1e-6, "%s at its ends", activation_names[f]);
    }
    free(x);
}

typedef struct {
    tr_activation f;
    kt_tensor *gate, *up, *h, *r;
} glu_context;

static double glu_value(kt_maker *m, void *context) {
    glu_context *c = context;
    m->k->glu_forward(m->s, TR_F32, c->f, c->h->data, c->gate->data, c->up->data,
                      (tr_rows){c->h->n, NULL}, 1);
    const double *h = kt_read(m, c->h);
    double sum = 0;
    for (int64_t i = 0; i < c->h->n; i++) sum += h[i] * c->r->value[i];
    return sum;
}

/* Property: the backward is the derivative of the forward. */
static void test_glu_differences(kt_maker *m) {
    enum { N = 37 };
    for (int j = 0; j < ACTIVATIONS; j++) {
        glu_context c = {activations[j], kt_normal(m, TR_F32, N, 2), kt_normal(m, TR_F32, N, 1),
                         kt_filled(m, TR_F32, N, 0), kt_normal(m, TR_F32, N, 1)};
        kt_tensor *dgate = kt_filled(m, TR_F32, N, NAN), *dup = kt_filled(m, TR_F32, N, NAN);
        double want_gate[N], want_up[N];
        m->k->glu_backward(m->s, TR_F32, c.f, dgate->data, dup->data, c.r->data, c.gate->data,
                           c.up->data, (tr_rows){N, NULL}, 1);
        for (int64_t i = 0; i < N; i++) {
            want_gate[i] = kt_difference(m, c.gate, i, 1e-2, glu_value, &c);
            want_up[i] = kt_difference(m, c.up, i, 1e-2, glu_value, &c);
        }
        kt_check(m, dgate, want_gate, 1e-3, "%s dgate against differences", activation_names[c.f]);
        kt_check(m, dup, want_up, 1e-3, "%s dup against differences", activation_names[c.f]);
    }
}

/* --- add and cast ---------------------------------------------------------------------------- */

/* Property: y += x rounds once, whatever the type of x. */
static void test_add(kt_maker *m) {
    for (int i = 0; i < 3; i++)
        for (int64_t n = 0; n < 200000; n = n * 3 + 1) {
            tr_dtype t = i == 0 ? TR_F32 : TR_BF16, x_t = i == 1 ? TR_BF16 : TR_F32;
            kt_tensor *x = kt_normal(m, x_t, n, 1), *y = kt_normal(m, t, n, 1);
            double *want = copy_of(y);
            for (int64_t j = 0; j < n; j++) {
                double sum = kt_round(TR_F32, want[j] + x->value[j]);
                want[j] = kt_round(t, sum);
            }
            m->k->add(m->s, t, y->data, x_t, x->data, n);
            kt_check(m, y, want, 0, "add %s to %s %lld", type_name(x_t), type_name(t),
                     (long long)n);
            free(want);
            kt_release(m);
        }
}

/* Property: casts round to the nearest even, keep infinities and NaN, and a bf16 survives the way
 * to f32 and back. */
static void test_cast(kt_maker *m) {
    double odd[] = {0,           1 + 0x1p-8,
                    1 + 0x3p-8,  1 + 0x1.01p-8,
                    -1 - 0x1p-8, INFINITY,
                    -INFINITY,   3.4e38,
                    0x1p-100,    1e-3,
                    -0.0,        65504,
                    NAN,         nan("0xfffffffffffff")}; /* all bits set */
    enum { ODD = sizeof odd / sizeof *odd };
    for (int i = 0; i < TYPES; i++)
        for (int j = 0; j < TYPES; j++)
            for (int64_t n = 0; n < 200000; n = n * 3 + 1) {
                kt_tensor *from = kt_normal(m, types[i], n, 1);
                for (int64_t l = 0; l < n && l < ODD; l++) from->value[l] = odd[l];
                from = kt_from(m, types[i], n, from->value);
                kt_tensor *to = kt_filled(m, types[j], n, 7);
                double *want = copy_of(from);
                for (int64_t l = 0; l < n; l++) want[l] = kt_round(types[j], want[l]);
                m->k->cast(m->s, types[j], to->data, types[i], from->data, n);
                kt_check(m, to, want, 0, "cast %s to %s %lld", type_name(types[i]),
                         type_name(types[j]), (long long)n);
                free(want);
                kt_release(m);
            }
}

/* --- odd addresses --------------------------------------------------------------------------- */

/* Element `first` of x on. */
static void *part(const kt_tensor *x, int64_t first) {
    return (char *)x->data + first * (int64_t)tr_dtype_bytes(x->t);
}

/* Property: arrays may begin at any element, and what lies before them stays. */
static void test_odd_addresses(kt_maker *m) {
    enum { N = 5003 };
    for (int i = 0; i < TYPES; i++)
        for (int64_t at = 1; at < 8; at += 3) {
            tr_dtype t = types[i];
            kt_tensor *x = kt_normal(m, t, N, 1), *y = kt_normal(m, t, N, 1);
            kt_tensor *h = kt_filled(m, t, N, 7), *c = kt_filled(m, TR_F32, N, 7);
            kt_tensor *rstd = kt_filled(m, TR_F32, 1, 0), *norm = kt_filled(m, t, N, 7);
            double *sum = copy_of(y), *want = copy_of(h), *same = copy_of(c), square = 0;
            double *normed = copy_of(norm);
            for (int64_t j = at; j < N; j++) {
                sum[j] = kt_round(t, kt_round(TR_F32, sum[j] + x->value[j]));
                same[j] = sum[j];
                want[j] = silu(x->value[j]) * sum[j];
                square += x->value[j] * x->value[j];
            }
            for (int64_t j = at; j < N; j++)
                normed[j] = x->value[j] * sum[j] / sqrt(square / (double)(N - at));
            m->k->add(m->s, t, part(y, at), t, part(x, at), N - at);
            m->k->cast(m->s, TR_F32, part(c, at), t, part(y, at), N - at);
            m->k->glu_forward(m->s, t, TR_SILU, part(h, at), part(x, at), part(y, at),
                              (tr_rows){1, NULL}, N - at);
            m->k->rmsnorm_forward(m->s, t, part(norm, at), rstd->data, part(x, at), part(y, at), 1,
                                  N - at, N - at, 0);
            kt_check(m, y, sum, 0, "add %s from element %lld", type_name(t), (long long)at);
            kt_check(m, c, same, 0, "cast from there");
            kt_check(m, h, want, kt_tolerance(t), "swiglu from there");
            kt_check(m, norm, normed, kt_tolerance(t), "rmsnorm from there");
            free(sum), free(want), free(same), free(normed);
            kt_release(m);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        KT_TEST(test_norm_forward),
        KT_TEST(test_norm_backward),
        KT_TEST(test_norm_many_rows),
        KT_TEST(test_norm_differences),
        KT_TEST(test_rope),
        KT_TEST(test_rope_differences),
        KT_TEST(test_glu),
        KT_TEST(test_activation_range),
        KT_TEST(test_glu_differences),
        KT_TEST(test_add),
        KT_TEST(test_cast),
        KT_TEST(test_odd_addresses),
    };
    return cmocka_run_group_tests_name("layers", tests, NULL, NULL);
}
