/* param.c - the registry of weights and its flat storage. Floor: model. */
#include "model/param.h"

#include "base/rng.h"
#include "dist/watch.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGN_ELEMS = 64 };

tr_registry *tr_registry_create(tr_dtype compute) {
    tr_registry *r = calloc(1, sizeof *r);
    if (!r) abort();
    r->t = compute;
    return r;
}

void tr_registry_destroy(tr_registry *r) {
    if (!r) return;
    for (int i = 0; i < TR_SPACES; i++) {
        tr_space *s = &r->space[i];
        free(s->segments);
        free(s->requests);
        if (!r->device) continue;
        tr_allocator *a = &r->device->allocator;
        size_t bytes = (size_t)s->shard_elems * sizeof(float);
        tr_comm_free_memory(s->comm, s->weights);
        tr_comm_free_memory(s->comm, s->grads);
        if (s->master) a->free(a->self, s->master, bytes);
        if (s->m) a->free(a->self, s->m, bytes);
        if (s->v) a->free(a->self, s->v, bytes);
    }
    if (r->sum) r->device->allocator.free(r->device->allocator.self, r->sum, sizeof *r->sum);
    free(r->params);
    free(r);
}

int64_t tr_registry_add(tr_registry *r, const tr_param_decl *decl) {
    if (r->count == r->capacity) {
        r->capacity = r->capacity ? 2 * r->capacity : 64;
        r->params = realloc(r->params, (size_t)r->capacity * sizeof *r->params);
        if (!r->params) abort();
    }
    r->params[r->count] = (tr_param){.decl = *decl};
    return r->count++;
}

static tr_space_id space_of(const tr_param_decl *d, const tr_grid_shape *shape) {
    if (d->copy_stage >= 0) return TR_SPACE_TIED;
    if (d->split == TR_SPLIT_EXPERT) return TR_SPACE_EXPERT;
    if (d->split == TR_SPLIT_NONE || shape->tensor == 1) return TR_SPACE_WHOLE;
    return d->split == TR_SPLIT_HEADS && shape->head_copies > 1 ? TR_SPACE_HEADS : TR_SPACE_SPLIT;
}

/* The part of dimension `along` that a rank at this place holds. */
static tr_range part_of(const tr_param_decl *d, const tr_grid_place *at, int along) {
    int copies =
        d->split == TR_SPLIT_HEADS && at->shape.head_copies > 1 ? at->shape.head_copies : 1;
    if (d->split == TR_SPLIT_NONE) return (tr_range){0, d->shape[along]};
    if (d->split == TR_SPLIT_EXPERT)
        return tr_block_of(d->shape[along], at->shape.expert, at->expert_rank);
    return tr_block_of(d->shape[along], at->shape.tensor / copies, at->t / copies);
}

/* This rank's part of a parameter and the space it lies in. */
static void place(tr_param *p, const tr_grid *grid) {
    const tr_param_decl *d = &p->decl;
    int along = d->split == TR_SPLIT_COLUMNS ? 1 : 0;
    tr_range mine = part_of(d, &grid->at, along);
    p->box.ndim = d->ndim;
    for (int i = 0; i < d->ndim; i++) p->box.extent[i] = d->shape[i];
    p->elems = tr_box_elems(&p->box);
    p->box.offset[along] = mine.first;
    p->box.extent[along] = mine.count;
    p->space = space_of(d, &grid->at.shape);
    p->primary = d->stage == grid->at.p;
    bool here = p->primary || d->copy_stage == grid->at.p;
    p->elems_loc = here ? tr_box_elems(&p->box) : 0;
}

int64_t tr_space_piece(const tr_space *s, int64_t bucket) {
    int64_t part = s->bucket_elems / tr_comm_size(s->comm);
    return bucket * s->bucket_elems + tr_comm_rank(s->comm) * part;
}

/* Cuts the parameters of a space by the pieces this rank owns. */
static void list_segments(tr_registry *r, tr_space *s, tr_space_id id) {
    int64_t part = s->bucket_elems / tr_comm_size(s->comm), capacity = 0;
    for (int64_t b = 0, i = 0; b < s->buckets; b++) {
        int64_t first = tr_space_piece(s, b), last = first + part;
        for (; i < r->count; i++) {
            const tr_param *p = &r->params[i];
            if (p->space != id || p->elems_loc == 0) continue;
            if (p->offset >= (b + 1) * s->bucket_elems) break;
            int64_t from = p->offset > first ? p->offset : first;
            int64_t end = p->offset + p->elems_loc, to = end < last ? end : last;
            if (from < to) {
                if (s->nsegments == capacity) {
                    capacity = capacity ? 2 * capacity : 64;
                    s->segments = realloc(s->segments, (size_t)capacity * sizeof *s->segments);
                    if (!s->segments) abort();
                }
                s->segments[s->nsegments++] =
                    (tr_segment){p, from - p->offset, to - from, from, b * part + (from - first)};
            }
            if (end > (b + 1) * s->bucket_elems) break; /* goes on in the next bucket */
        }
    }
}

static void allocate(tr_registry *r, tr_space *s) {
    tr_allocator *a = &r->device->allocator;
    size_t bytes = (size_t)s->shard_elems * sizeof(float);
    s->weights = tr_comm_alloc(s->comm, s->elems * (int64_t)tr_dtype_bytes(r->t));
    s->grads = tr_comm_alloc(s->comm, s->elems * (int64_t)sizeof(float));
    s->requests = calloc((size_t)s->buckets, sizeof *s->requests);
    if (!s->requests) abort();
    float **arrays[] = {&s->m, &s->v, &s->master};
    for (int i = 0; i < (r->t == TR_F32 ? 2 : 3); i++) {
        *arrays[i] = a->alloc(a->self, bytes);
        if (!*arrays[i]) tr_abort("out of memory: %zu bytes of optimizer state", bytes);
        r->device->zero(NULL, *arrays[i], bytes);
    }
}

void tr_registry_seal(tr_registry *r, const tr_grid *grid, int64_t bucket_elems,
                      tr_device *device) {
    static const tr_group group[TR_SPACES] = {[TR_SPACE_WHOLE] = TR_GROUP_STAGE,
                                              [TR_SPACE_SPLIT] = TR_GROUP_REPLICA,
                                              [TR_SPACE_HEADS] = TR_GROUP_HEAD_REPLICA,
                                              [TR_SPACE_EXPERT] = TR_GROUP_EXPERT_REPLICA,
                                              [TR_SPACE_TIED] = TR_GROUP_REPLICA};
    r->device = device;
    if (device) r->sum = device->allocator.alloc(device->allocator.self, sizeof *r->sum);
    for (int i = 0; i < TR_SPACES; i++) r->space[i].comm = grid->comm[group[i]];
    for (int64_t i = 0; i < r->count; i++) {
        tr_param *p = &r->params[i];
        place(p, grid);
        p->offset = r->space[p->space].elems;
        r->space[p->space].elems += tr_round_up(p->elems_loc, ALIGN_ELEMS);
    }
    for (int i = 0; i < TR_SPACES; i++) {
        tr_space *s = &r->space[i];
        if (s->elems == 0) continue;
        int64_t unit = ALIGN_ELEMS * (int64_t)tr_comm_size(s->comm);
        s->buckets = tr_ceil_div(s->elems, bucket_elems);
        s->bucket_elems = tr_round_up(tr_ceil_div(s->elems, s->buckets), unit);
        s->elems = s->buckets * s->bucket_elems;
        s->shard_elems = s->elems / tr_comm_size(s->comm);
        list_segments(r, s, (tr_space_id)i);
        if (device) allocate(r, s);
    }
    for (int64_t i = 0; device && i < r->count; i++) {
        tr_param *p = &r->params[i];
        if (p->elems_loc == 0) continue;
        tr_space *s = &r->space[p->space];
        p->weight = (char *)s->weights + (size_t)p->offset * tr_dtype_bytes(r->t);
        p->grad = s->grads + p->offset;
    }
}

float *tr_segment_master(const tr_registry *r, const tr_segment *g) {
    const tr_space *s = &r->space[g->param->space];
    return s->master ? s->master + g->shard : (float *)s->weights + g->offset;
}

float *tr_segment_gradient(const tr_registry *r, const tr_segment *g) {
    return r->space[g->param->space].grads + g->offset;
}

static void init_segment(const tr_registry *r, const tr_segment *g, uint64_t seed) {
    const tr_param_decl *d = &g->param->decl;
    float *w = tr_segment_master(r, g);
    tr_watch_progress();
    uint64_t stream = tr_stream_of_name(d->name);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < g->count; i++) {
        int64_t place = tr_box_place(&g->param->box, d->shape, g->first + i);
        w[i] = d->init == TR_INIT_ONES
                   ? 1.0f
                   : d->init_std * tr_random_normal(seed, stream, (uint64_t)place);
    }
}

void tr_registry_init(tr_registry *r, uint64_t seed) {
    for (int i = 0; i < TR_SPACES; i++)
        for (int64_t k = 0; k < r->space[i].nsegments; k++)
            init_segment(r, &r->space[i].segments[k], seed);
}

void tr_registry_publish(tr_registry *r) {
    for (int i = 0; i < TR_SPACES; i++) {
        tr_space *s = &r->space[i];
        int64_t part = s->buckets ? s->bucket_elems / tr_comm_size(s->comm) : 0;
        size_t size = tr_dtype_bytes(r->t);
        for (int64_t b = 0; b < s->buckets; b++) {
            char *bucket = (char *)s->weights + (size_t)(b * s->bucket_elems) * size;
            if (s->master)
                r->device->kernels->cast(NULL, r->t,
                                         (char *)s->weights + (size_t)tr_space_piece(s, b) * size,
                                         TR_F32, s->master + b * part, part);
            tr_end(tr_all_gather_begin(s->comm, NULL, r->t, bucket, part));
        }
    }
}

void tr_gradients_begin(tr_registry *r) {
    for (int64_t i = 0; i < r->count; i++) r->params[i].fresh = r->params[i].elems_loc > 0;
}

float tr_gradient_beta(tr_param *p) {
    float beta = p->fresh ? 0 : 1;
    p->fresh = false;
    return beta;
}

float *tr_gradient_sum(const tr_registry *r, tr_stream *stream, tr_param *p) {
    if (tr_gradient_beta(p) == 0)
        r->device->zero(stream, p->grad, (size_t)p->elems_loc * sizeof *p->grad);
    return p->grad;
}

void tr_gradients_end(tr_registry *r, tr_stream *stream) {
    for (int64_t i = 0; i < r->count; i++)
        if (r->params[i].fresh) tr_gradient_sum(r, stream, &r->params[i]);
}

int64_t tr_registry_total(const tr_registry *r) {
    int64_t total = 0;
    for (int64_t i = 0; i < r->count; i++) total += r->params[i].elems;
    return total;
}

int64_t tr_registry_bytes(const tr_registry *r) {
    int64_t bytes = 0, weight = (int64_t)tr_dtype_bytes(r->t);
    for (int i = 0; i < TR_SPACES; i++)
        bytes +=
            r->space[i].elems * (weight + 4) + r->space[i].shard_elems * (r->t == TR_F32 ? 8 : 12);
    return bytes;
}
