/* norm.c - the norms of blocks and head, of the type that the model has. Floor: model. */
#include "model/gradient.h"
#include "model/layers.h"

#include <stdio.h>

static int64_t declare(tr_registry *r, const tr_model_config *m, const char *prefix,
                       const char *what, tr_init init, int stage) {
    tr_param_decl d = {
        .ndim = 1, .shape = {m->hidden_size}, .init = init, .stage = stage, .copy_stage = -1};
    snprintf(d.name, sizeof d.name, "%s.%s", prefix, what);
    return tr_registry_add(r, &d);
}

void tr_norm_declare(tr_norm_layer *l, tr_registry *r, const tr_model_config *m, const char *prefix,
                     int stage) {
    l->weight = declare(r, m, prefix, "weight", TR_INIT_ONES, stage);
    l->bias =
        m->norm_type == TR_LAYER_NORM ? declare(r, m, prefix, "bias", TR_INIT_ZEROS, stage) : -1;
}

int64_t tr_norm_statistics(const tr_model_config *m) {
    return m->norm_type == TR_LAYER_NORM ? 2 : 1;
}

void tr_norm_forward(const tr_norm_layer *l, const tr_env *c, void *y, float *statistics,
                     const void *x, int64_t rows) {
    const tr_model_config *m = c->config;
    const void *w = tr_param_at(c, l->weight)->weight;
    int64_t H = m->hidden_size;
    if (m->norm_type == TR_LAYER_NORM)
        c->kernels->layernorm_forward(c->stream, c->t, y, statistics + rows, statistics, x, w,
                                      tr_param_at(c, l->bias)->weight, rows, H, H,
                                      (float)m->layer_norm_eps);
    else
        c->kernels->rmsnorm_forward(c->stream, c->t, y, statistics, x, w, rows, H, H,
                                    (float)m->rms_norm_eps);
}

void tr_norm_backward(const tr_norm_layer *l, const tr_env *c, void *dx, const void *dy,
                      const void *x, const float *statistics, const void *residual, int64_t rows) {
    tr_param *w = tr_param_at(c, l->weight);
    int64_t H = c->config->hidden_size;
    float *dw = tr_gradient_sum(c->registry, c->stream, w);
    if (c->config->norm_type == TR_LAYER_NORM) {
        float *db = tr_gradient_sum(c->registry, c->stream, tr_param_at(c, l->bias));
        c->kernels->layernorm_backward(c->stream, c->t, dx, dw, db, dy, x, w->weight,
                                       statistics + rows, statistics, residual, rows, H, H);
    } else {
        c->kernels->rmsnorm_backward(c->stream, c->t, dx, dw, dy, x, w->weight, statistics,
                                     residual, rows, H, H);
    }
}
