/* layers.c - norms, rotary positions, gated activations, sums and casts as their formulas, in fp64.
 * Floor: kernels. */
#include "kernels/makers.h"
#include "kernels/ref/scalar.h"

#include <math.h>

static void rmsnorm_forward(tr_stream *s, tr_dtype t, void *y, float *rstd, const void *x,
                            const void *w, int64_t N, int64_t C, int64_t stride, float eps) {
    (void)s;
    for (int64_t n = 0; n < N; n++) {
        double sum = 0;
        for (int64_t c = 0; c < C; c++) {
            double v = (double)tr_load(t, x, n * stride + c);
            sum += v * v;
        }
        double r = 1 / sqrt(sum / (double)C + (double)eps);
        rstd[n] = (float)r;
        for (int64_t c = 0; c < C; c++) {
            double v = (double)tr_load(t, x, n * stride + c) * (double)tr_load(t, w, c);
            tr_store(t, y, n * stride + c, (float)(v * r));
        }
    }
}

/* With xh = x rstd: dw = dy xh, dx = rstd (dy w - xh mean_c(dy w xh)). */
static void rmsnorm_backward(tr_stream *s, tr_dtype t, void *dx, float *dw, const void *dy,
                             const void *x, const void *w, const float *rstd, const void *residual,
                             int64_t N, int64_t C, int64_t stride) {
    (void)s;
    for (int64_t c = 0; c < C; c++) {
        double sum = 0;
        for (int64_t n = 0; n < N; n++)
            sum += (double)tr_load(t, dy, n * stride + c) * (double)tr_load(t, x, n * stride + c) *
                   (double)rstd[n];
        dw[c] += (float)sum;
    }
    for (int64_t n = 0; n < N; n++) {
        double r = (double)rstd[n], dot = 0;
        for (int64_t c = 0; c < C; c++)
            dot += (double)tr_load(t, dy, n * stride + c) * (double)tr_load(t, w, c) *
                   (double)tr_load(t, x, n * stride + c);
        for (int64_t c = 0; c < C; c++) {
            int64_t i = n * stride + c;
            double g = (double)tr_load(t, dy, i) * (double)tr_load(t, w, c);
            double d = r * (g - (double)tr_load(t, x, i) * r * r * dot / (double)C);
            if (residual) d += (double)tr_load(t, residual, i);
            tr_store(t, dx, i, (float)d);
        }
    }
}

static void layernorm_forward(tr_stream *s, tr_dtype t, void *y, float *mean, float *rstd,
                              const void *x, const void *w, const void *b, int64_t N, int64_t C,
                              int64_t stride, float eps) {
    (void)s;
    for (int64_t n = 0; n < N; n++) {
        double sum = 0, squares = 0;
        for (int64_t c = 0; c < C; c++) sum += (double)tr_load(t, x, n * stride + c);
        double m = sum / (double)C;
        for (int64_t c = 0; c < C; c++) {
            double v = (double)tr_load(t, x, n * stride + c) - m;
            squares += v * v;
        }
        double r = 1 / sqrt(squares / (double)C + (double)eps);
        mean[n] = (float)m;
        rstd[n] = (float)r;
        for (int64_t c = 0; c < C; c++) {
            double v = ((double)tr_load(t, x, n * stride + c) - m) * r;
            tr_store(t, y, n * stride + c,
                     (float)(v * (double)tr_load(t, w, c) + (double)tr_load(t, b, c)));
        }
    }
}

/* With xh = (x - mean) rstd and g = dy w: dw = dy xh, db = dy,
 * dx = rstd (g - mean_c(g) - xh mean_c(g xh)). */
static void layernorm_backward(tr_stream *s, tr_dtype t, void *dx, float *dw, float *db,
                               const void *dy, const void *x, const void *w, const float *mean,
                               const float *rstd, const void *residual, int64_t N, int64_t C,
                               int64_t stride) {
    (void)s;
    for (int64_t c = 0; c < C; c++) {
        double of_w = 0, of_b = 0;
        for (int64_t n = 0; n < N; n++) {
            double d = (double)tr_load(t, dy, n * stride + c);
            double v = (double)tr_load(t, x, n * stride + c) - (double)mean[n];
            of_w += d * v * (double)rstd[n];
            of_b += d;
        }
        dw[c] += (float)of_w;
        db[c] += (float)of_b;
    }
    for (int64_t n = 0; n < N; n++) {
        double m = (double)mean[n], r = (double)rstd[n], sum = 0, dot = 0;
        for (int64_t c = 0; c < C; c++) {
            double g = (double)tr_load(t, dy, n * stride + c) * (double)tr_load(t, w, c);
            sum += g;
            dot += g * ((double)tr_load(t, x, n * stride + c) - m) * r;
        }
        for (int64_t c = 0; c < C; c++) {
            int64_t i = n * stride + c;
            double g = (double)tr_load(t, dy, i) * (double)tr_load(t, w, c);
            double xh = ((double)tr_load(t, x, i) - m) * r;
            double d = r * (g - sum / (double)C - xh * dot / (double)C);
            if (residual) d += (double)tr_load(t, residual, i);
            tr_store(t, dx, i, (float)d);
        }
    }
}

static void rope(tr_stream *s, tr_dtype t, void *x, const int32_t *position, const float *freq,
                 int64_t N, int64_t heads, int64_t D, int64_t F, int64_t row, bool interleaved,
                 float factor, int direction) {
    (void)s;
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0; i < F; i++) {
            double angle = direction * (double)position[n] * (double)freq[i];
            double c = (double)factor * cos(angle), d = (double)factor * sin(angle);
            for (int64_t h = 0; h < heads; h++) {
                int64_t at = n * row + h * D;
                int64_t first = at + (interleaved ? 2 * i : i);
                int64_t second = at + (interleaved ? 2 * i + 1 : i + F);
                double a = (double)tr_load(t, x, first), b = (double)tr_load(t, x, second);
                tr_store(t, x, first, (float)(a * c - b * d));
                tr_store(t, x, second, (float)(a * d + b * c));
            }
        }
}

static int64_t used_rows(tr_rows rows) {
    return rows.used && *rows.used < rows.max ? *rows.used : rows.max;
}

/* Both activations are x sigmoid(z), for (1 + tanh(z/2)) / 2 is sigmoid(z): z = x, or with GELU
 * 2 sqrt(2/pi) (x + 0.044715 x^3). The slope is sig (1 + x z' (1 - sig)), sig = sigmoid(z). */
typedef struct {
    double sig, bend; /* of the slope sig * bend */
} activated;

static activated activate(tr_activation f, double x) {
    double z = x, dz = 1;
    if (f == TR_GELU_TANH) {
        double c = 2 * sqrt(2 / acos(-1)), near = fmin(fmax(x, -16), 16); /* sig is 0, 1 beyond */
        z = c * (near + 0.044715 * near * near * near);
        dz = c * (1 + 3 * 0.044715 * near * near);
    }
    double sig = 1 / (1 + exp(-z));
    return (activated){sig, 1 + x * dz * (1 - sig)};
}

static void glu_forward(tr_stream *s, tr_dtype t, tr_activation f, void *h, const void *gate,
                        const void *up, tr_rows rows, int64_t C) {
    (void)s;
    int64_t n = used_rows(rows) * C;
    for (int64_t i = 0; i < n; i++) {
        double g = (double)tr_load(t, gate, i), u = (double)tr_load(t, up, i);
        tr_store(t, h, i, (float)(g * activate(f, g).sig * u));
    }
}

static void glu_backward(tr_stream *s, tr_dtype t, tr_activation f, void *dgate, void *dup,
                         const void *dh, const void *gate, const void *up, tr_rows rows,
                         int64_t C) {
    (void)s;
    int64_t n = used_rows(rows) * C;
    for (int64_t i = 0; i < n; i++) {
        double g = (double)tr_load(t, gate, i), u = (double)tr_load(t, up, i);
        double d = (double)tr_load(t, dh, i);
        activated a = activate(f, g);
        tr_store(t, dgate, i, (float)(d * u * a.sig * a.bend));
        tr_store(t, dup, i, (float)(d * g * a.sig));
    }
}

static void add(tr_stream *s, tr_dtype t, void *y, tr_dtype x_t, const void *x, int64_t n) {
    (void)s;
    for (int64_t i = 0; i < n; i++) tr_store(t, y, i, tr_load(t, y, i) + tr_load(x_t, x, i));
}

static void cast(tr_stream *s, tr_dtype to_t, void *to, tr_dtype from_t, const void *from,
                 int64_t n) {
    (void)s;
    for (int64_t i = 0; i < n; i++) tr_store(to_t, to, i, tr_load(from_t, from, i));
}

void tr_ref_layers(tr_kernels *k) {
    k->rmsnorm_forward = rmsnorm_forward;
    k->rmsnorm_backward = rmsnorm_backward;
    k->layernorm_forward = layernorm_forward;
    k->layernorm_backward = layernorm_backward;
    k->rope = rope;
    k->glu_forward = glu_forward;
    k->glu_backward = glu_backward;
    k->add = add;
    k->cast = cast;
}
