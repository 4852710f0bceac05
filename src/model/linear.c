/* linear.c - linear layers without bias. Floor: model. */
#include "model/gradient.h"
#include "model/pass.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

int64_t tr_linear_declare(tr_registry *r, int64_t out, int64_t in, tr_split split, double std,
                          int stage, const char *format, ...) {
    tr_param_decl d = {.ndim = 2,
                       .shape = {out, in},
                       .split = split,
                       .init = TR_INIT_NORMAL,
                       .init_std = (float)std,
                       .decay = true,
                       .stage = stage,
                       .copy_stage = -1};
    va_list args;
    va_start(args, format);
    vsnprintf(d.name, sizeof d.name, format, args);
    va_end(args);
    return tr_registry_add(r, &d);
}

double tr_residual_std(const tr_model_config *m) {
    return m->initializer_range / sqrt(2.0 * (double)m->num_hidden_layers);
}

void tr_linear(const tr_env *c, void *y, tr_dtype y_t, const void *x, const tr_param *w, int64_t N,
               float beta) {
    int64_t out = w->box.extent[0], in = w->box.extent[1];
    c->kernels->gemm(c->stream, &(tr_gemm){.M = N,
                                           .N = out,
                                           .K = in,
                                           .A = x,
                                           .lda = in,
                                           .B = w->weight,
                                           .ldb = in,
                                           .trans_b = true,
                                           .C = y,
                                           .ldc = out,
                                           .ab = c->t,
                                           .c = y_t,
                                           .beta = beta});
}

void tr_linear_input(const tr_env *c, void *dx, tr_dtype dx_t, const void *dy, const tr_param *w,
                     int64_t N, float beta) {
    int64_t out = w->box.extent[0], in = w->box.extent[1];
    c->kernels->gemm(c->stream, &(tr_gemm){.M = N,
                                           .N = in,
                                           .K = out,
                                           .A = dy,
                                           .lda = out,
                                           .B = w->weight,
                                           .ldb = in,
                                           .C = dx,
                                           .ldc = in,
                                           .ab = c->t,
                                           .c = dx_t,
                                           .beta = beta});
}

static void run_weight(const tr_env *c, const tr_weight_job *job) {
    int64_t out = job->w->box.extent[0], in = job->w->box.extent[1];
    tr_gradient dw = tr_gradient_take(c->registry, job->w);
    c->kernels->gemm(c->stream, &(tr_gemm){.M = out,
                                           .N = in,
                                           .K = job->rows,
                                           .A = job->dy,
                                           .lda = out,
                                           .trans_a = true,
                                           .B = job->x,
                                           .ldb = in,
                                           .C = dw.at,
                                           .ldc = in,
                                           .ab = c->t,
                                           .c = TR_F32,
                                           .beta = dw.beta});
}

void tr_linear_weight(const tr_pass *pass, tr_param *w, const void *dy, const void *x, int64_t N) {
    tr_weight_add(pass, &(tr_weight_job){.run = run_weight, .w = w, .dy = dy, .x = x, .rows = N});
}
