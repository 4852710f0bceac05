/* experts.c - a mixture-of-experts layer against a dense layer that does as many operations a
 * token. Floor: bench. */
#include "bench/groups.h"
#include "bench/rig.h"
#include "model/unit.h"

enum { EXPERTS = 8, CHOSEN = 2 };

typedef struct {
    tr_rig rig;
    tr_mlp_layer dense;
    tr_moe_layer moe;
    void *x, *dy, *y, *dx;
} layers;

static void open(layers *l, tr_lab *lab, tr_dtype t) {
    l->rig.config = lab->config->model;
    tr_model_config *m = &l->rig.config;
    m->num_experts = EXPERTS;
    m->num_experts_per_tok = CHOSEN;
    m->moe_intermediate_size = m->intermediate_size / CHOSEN;
    m->shared_expert_intermediate_size = 0;
    tr_rig_open(&l->rig, lab, lab->alone, t, lab->B, lab->T);
    tr_env *c = &l->rig.env;
    tr_mlp_declare(&l->dense, c->registry, m, "dense", m->intermediate_size, 0);
    tr_moe_declare(&l->moe, c->registry, m, 0, 0, 0);
    tr_registry_options options = {.zero = 1, .bucket_elems = lab->config->parallel.bucket_elems};
    if (tr_registry_seal(c->registry, l->rig.grid, &options, lab->device) != TR_OK)
        tr_abort("%s", tr_error_message());
    tr_registry_init(c->registry, 1);
    tr_registry_publish(c->registry);
    tr_arena_reset(lab->memory);
    l->x = tr_lab_random(lab, c->N * m->hidden_size, t);
    l->y = tr_lab_random(lab, c->N * m->hidden_size, t);
    l->dx = tr_lab_random(lab, c->N * m->hidden_size, t);
    l->dy = tr_lab_random(lab, c->N * m->hidden_size, t);
}

static void dense_step(void *self) {
    layers *l = self;
    tr_rig_restart(&l->rig);
    tr_mlp_forward(&l->dense, &l->rig.pass, &l->rig.saved, l->x, l->y);
    tr_mlp_backward(&l->dense, &l->rig.pass, &l->rig.saved, l->x, l->dy, l->dx);
}

static void moe_step(void *self) {
    layers *l = self;
    tr_rig_restart(&l->rig);
    l->rig.saved.t[TR_SAVED_NORM2] = l->x;
    tr_moe_forward(&l->moe, &l->rig.pass, &l->rig.saved, l->x, l->y);
    tr_arena_mark mark = tr_arena_get_mark(l->rig.env.scratch);
    tr_moe_backward(&l->moe, &l->rig.pass, &l->rig.saved, l->dy, l->dx);
    tr_arena_release(l->rig.env.scratch, mark);
}

/* Each rank has the layers by itself. */
void tr_bench_experts(tr_lab *lab) {
    for (tr_dtype t = TR_F32; t <= TR_BF16; t++) {
        layers l = {0};
        double peak = tr_lab_peak(lab, t), seconds = 0.3 * (double)lab->repeats;
        open(&l, lab, t);
        const tr_model_config *m = &l.rig.config;
        double work = 1e-9 * 18.0 * /* three matrices, forward and backward */
                      (double)(l.rig.env.N * m->hidden_size * m->intermediate_size * lab->ranks);
        tr_row_begin(&lab->table, "dense layer %s, forward and backward", tr_lab_dtype(t));
        double dense = work / tr_lab_time(lab, lab->world, seconds, dense_step, &l);
        tr_row_end(&lab->table,
                   &(tr_row){.unit = "GFLOP/s", .measured = dense, .base = peak, .kind = TR_SHARE});
        tr_row_begin(&lab->table, "MoE layer %s, %d of %d; base dense", tr_lab_dtype(t), CHOSEN,
                     EXPERTS);
        double moe = work / tr_lab_time(lab, lab->world, seconds, moe_step, &l);
        tr_row_end(&lab->table, &(tr_row){.unit = "GFLOP/s",
                                          .measured = moe,
                                          .base = dense,
                                          .kind = TR_SHARE,
                                          .target = 0.85});
        tr_rig_close(&l.rig);
    }
    tr_arena_reset(lab->memory);
}
