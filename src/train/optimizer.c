/* optimizer.c - bucketed reduce-scatter, sharded AdamW, all-gather. Floor: train. */
#include "train/optimizer.h"

static int64_t part_of(const tr_space *s) {
    return s->bucket_elems / tr_comm_size(s->comm);
}

/* Several buckets travel at once. */
static void begin_reduce(const tr_space *s) {
    for (int64_t b = 0; b < s->buckets; b++)
        s->requests[b] = tr_reduce_scatter_begin(s->comm, NULL, TR_F32,
                                                 s->grads + b * s->bucket_elems, part_of(s));
}

/* The embedding's two copies, on the first and the last stage, share one gradient. */
static void add_copies(const tr_grid *grid, const tr_space *s) {
    for (int64_t b = 0; b < s->buckets; b++)
        tr_end(tr_all_reduce_begin(grid->comm[TR_GROUP_EMBEDDING], NULL, TR_SUM, TR_F32,
                                   s->grads + tr_space_piece(s, b), part_of(s)));
}

void tr_gradients_reduce(tr_registry *r, const tr_grid *grid, double *sum_squares_p) {
    tr_device *device = r->device;
    tr_gradients_end(r, NULL);
    device->zero(NULL, r->sum, sizeof *r->sum);
    for (int i = 0; i < TR_SPACES; i++) begin_reduce(&r->space[i]);
    for (int i = 0; i < TR_SPACES; i++) {
        const tr_space *s = &r->space[i];
        for (int64_t b = 0; b < s->buckets; b++) tr_end(s->requests[b]);
        if (i == TR_SPACE_TIED) add_copies(grid, s);
        if (i == TR_SPACE_TIED && !tr_grid_first_stage(grid)) continue; /* counted there */
        for (int64_t b = 0; b < s->buckets; b++)
            device->kernels->sum_squares(NULL, r->sum, s->grads + tr_space_piece(s, b), part_of(s));
    }
    device->copy(NULL, sum_squares_p, r->sum, sizeof *r->sum, TR_TO_HOST);
}

static void update_segment(tr_registry *r, tr_space *s, const tr_segment *g, tr_adamw h) {
    size_t size = tr_dtype_bytes(r->t);
    void *compute = s->master ? (char *)s->weights + (size_t)g->offset * size : NULL;
    if (!g->param->decl.decay) h.weight_decay = 0;
    r->device->kernels->adamw(NULL, &h, tr_segment_master(r, g), compute, r->t, s->m + g->shard,
                              s->v + g->shard, tr_segment_gradient(r, g), g->count);
}

void tr_optimizer_update(tr_registry *r, const tr_optimizer_step *step, double grad_scale) {
    tr_adamw h = {.learning_rate = (float)step->learning_rate,
                  .beta1 = (float)step->beta1,
                  .beta2 = (float)step->beta2,
                  .epsilon = (float)step->epsilon,
                  .weight_decay = (float)step->weight_decay,
                  .grad_scale = (float)grad_scale,
                  .t = step->update};
    size_t size = tr_dtype_bytes(r->t);
    for (int i = 0; i < TR_SPACES; i++) {
        tr_space *s = &r->space[i];
        for (int64_t b = 0, k = 0; b < s->buckets; b++) {
            for (; k < s->nsegments && s->segments[k].shard < (b + 1) * part_of(s); k++)
                update_segment(r, s, &s->segments[k], h);
            char *bucket = (char *)s->weights + (size_t)(b * s->bucket_elems) * size;
            s->requests[b] = tr_all_gather_begin(s->comm, NULL, r->t, bucket, part_of(s));
        }
        for (int64_t b = 0; b < s->buckets; b++) tr_end(s->requests[b]);
    }
}
