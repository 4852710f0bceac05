/* optimizer.c - sharded AdamW. Floor: train. */
#include "train/optimizer.h"

#include "model/unit.h"

static void update_segment(tr_registry *r, const tr_segment *g, tr_adamw h) {
    const tr_space *s = &r->space[g->param->space];
    size_t size = tr_dtype_bytes(r->t);
    bool writes = s->master && s->zero < 3; /* else weights are the masters, or made from them */
    void *compute = writes ? (char *)s->weights + (size_t)g->offset * size : NULL;
    if (!g->param->decl.decay) h.weight_decay = 0;
    r->device->kernels->adamw(r->device->stream, &h, tr_segment_master(r, g), compute, r->t,
                              s->m + g->shard, s->v + g->shard, tr_segment_gradient(r, g),
                              g->count);
}

/* In the order in which the next forward needs them. */
static void update_stretch(tr_registry *r, const tr_stretch *t, tr_adamw h) {
    const tr_segment *segments = r->space[t->space].segments + t->segment;
    for (int64_t b = 0, k = 0; b < t->buckets; b++) {
        for (; k < t->nsegments && segments[k].shard < t->shard + (b + 1) * t->part; k++)
            update_segment(r, &segments[k], h);
        tr_stretch_share(r, t, b);
    }
}

void tr_optimizer_update(tr_registry *r, const tr_optimizer_step *step, double grad_scale) {
    tr_adamw h = {.learning_rate = (float)step->learning_rate,
                  .beta1 = (float)step->beta1,
                  .beta2 = (float)step->beta2,
                  .epsilon = (float)step->epsilon,
                  .weight_decay = (float)step->weight_decay,
                  .grad_scale = (float)grad_scale,
                  .t = step->update};
    tr_units_settle(r);
    for (int64_t i = 0; i < r->nstretches; i++) update_stretch(r, &r->stretches[i], h);
}
