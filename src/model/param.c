/* param.c - the registry of weights and its flat storage. Floor: model. */
#include "model/gradient.h"
#include "model/unit.h"

#include "base/heap.h"
#include "base/rng.h"
#include "dist/watch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN_ELEMS = 64 };

tr_registry *tr_registry_create(tr_dtype compute) {
    tr_registry *r = tr_heap_alloc(1, sizeof *r);
    r->t = compute;
    return r;
}

tr_dtype tr_master_type(const tr_registry *r) {
    return r->options.read_only ? r->t : TR_F32;
}

static size_t squares_bytes(const tr_registry *r) {
    return (size_t)(r->nstretches + 1) * sizeof *r->squares;
}

static int64_t weight_bytes(const tr_registry *r, const tr_space *s) {
    int64_t elems = s->zero >= 3 ? s->weight_berths.elems : s->elems;
    return elems * (int64_t)tr_dtype_bytes(r->t);
}
static int64_t grad_bytes(const tr_space *s) {
    int64_t elems = s->zero >= 2 ? s->grad_berths.elems : s->elems;
    return elems * (int64_t)sizeof(float);
}
static size_t master_bytes(const tr_registry *r, const tr_space *s) {
    return (size_t)s->shard_elems * tr_dtype_bytes(tr_master_type(r));
}
static size_t shard_bytes(const tr_space *s) {
    return (size_t)s->shard_elems * sizeof(float);
}

static void space_free(tr_registry *r, tr_space *s) {
    if (r->device) {
        tr_comm_free_on(s->comm, r->device, s->weights, weight_bytes(r, s));
        tr_comm_free_on(s->comm, r->device, s->grads, grad_bytes(s));
        tr_allocator_give(&r->device->allocator, s->master, master_bytes(r, s));
        float *shards[] = {s->sums, s->m, s->v};
        for (int i = 0; i < 3; i++)
            tr_allocator_give(&r->device->allocator, shards[i], shard_bytes(s));
    }
    free(s->segments);
    tr_berths_free(&s->weight_berths);
    tr_berths_free(&s->grad_berths);
}

void tr_registry_destroy(tr_registry *r) {
    if (!r) return;
    tr_units_settle(r);
    for (int i = 0; i < TR_SPACES; i++) space_free(r, &r->space[i]);
    for (int64_t i = 0; i < r->nstretches; i++) free(r->stretches[i].gathering); /* and reducing */
    if (r->device) tr_allocator_give(&r->device->allocator, r->squares, squares_bytes(r));
    free(r->stretches);
    free(r->units);
    free(r->params);
    free(r);
}

int64_t tr_registry_unit(tr_registry *r, bool layer, int64_t completions) {
    r->units = tr_heap_grow(r->units, r->nunits, &r->units_capacity, sizeof *r->units);
    r->units[r->nunits] =
        (tr_unit){.first_param = r->count, .layer = layer, .completions = completions};
    return r->nunits++;
}

int64_t tr_registry_add(tr_registry *r, const tr_param_decl *decl) {
    if (r->nunits == 0) tr_registry_unit(r, true, 1);
    r->params = tr_heap_grow(r->params, r->count, &r->capacity, sizeof *r->params);
    r->params[r->count] = (tr_param){.decl = *decl, .unit = r->nunits - 1, .stretch = -1};
    r->units[r->nunits - 1].params++;
    return r->count++;
}

/* --- layout ------------------------------------------------------------------------------------
 */

static tr_space_id space_of(const tr_param_decl *d, const tr_grid_shape *shape) {
    if (d->copy_stage >= 0) return TR_SPACE_TIED;
    if (d->ndim == 1 && d->split == TR_SPLIT_NONE) return TR_SPACE_VECTORS;
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

int64_t tr_stretch_piece(const tr_registry *r, const tr_stretch *t, int64_t b) {
    return b * t->bucket_elems + tr_comm_rank(r->space[t->space].comm) * t->part;
}

static void add_segment(tr_space *s, int64_t *capacity, tr_segment segment) {
    s->segments = tr_heap_grow(s->segments, s->nsegments, capacity, sizeof *s->segments);
    s->segments[s->nsegments++] = segment;
}

/* Cuts the parameters of a stretch by the pieces this rank owns. */
static void list_segments(tr_registry *r, tr_stretch *t, int64_t *capacity) {
    tr_space *s = &r->space[t->space];
    const tr_unit *u = &r->units[t->unit];
    t->segment = s->nsegments;
    for (int64_t b = 0, i = u->first_param; b < t->buckets; b++) {
        int64_t first = t->offset + tr_stretch_piece(r, t, b), last = first + t->part;
        int64_t bucket_end = t->offset + (b + 1) * t->bucket_elems;
        for (; i < u->first_param + u->params; i++) {
            const tr_param *p = &r->params[i];
            if (p->stretch != t - r->stretches) continue;
            if (p->offset >= bucket_end) break;
            int64_t from = p->offset > first ? p->offset : first;
            int64_t end = p->offset + p->elems_loc, to = end < last ? end : last;
            if (from < to)
                add_segment(s, capacity,
                            (tr_segment){p, from - p->offset, to - from, from,
                                         t->shard + b * t->part + (from - first)});
            if (end > bucket_end) break; /* goes on in the next bucket */
        }
    }
    t->nsegments = s->nsegments - t->segment;
}

/* What the unit has in the space, behind what is there already; false: nothing. */
static bool lay_out(tr_registry *r, int64_t unit, tr_space_id id) {
    const tr_unit *u = &r->units[unit];
    tr_space *s = &r->space[id];
    int64_t elems = 0, size = tr_comm_size(s->comm);
    tr_stretch *t = &r->stretches[r->nstretches];
    *t = (tr_stretch){.space = id,
                      .unit = unit,
                      .offset = s->elems,
                      .shard = s->shard_elems,
                      .weight_berth = -1,
                      .grad_berth = -1};
    for (int64_t i = u->first_param; i < u->first_param + u->params; i++) {
        tr_param *p = &r->params[i];
        if (p->space != id || p->elems_loc == 0) continue;
        p->stretch = r->nstretches;
        p->offset = s->elems + elems;
        elems += tr_round_up(p->elems_loc, ALIGN_ELEMS);
    }
    if (elems == 0) return false;
    t->buckets = tr_ceil_div(elems, r->options.bucket_elems);
    t->bucket_elems = tr_round_up(tr_ceil_div(elems, t->buckets), ALIGN_ELEMS * size);
    t->part = t->bucket_elems / size;
    t->gathering = tr_heap_alloc(2 * t->buckets, sizeof(tr_request *));
    t->reducing = t->gathering + t->buckets;
    s->elems += t->buckets * t->bucket_elems;
    s->shard_elems += t->buckets * t->part;
    r->nstretches++;
    return true;
}

static void lay_out_all(tr_registry *r) {
    int64_t capacity[TR_SPACES] = {0};
    r->stretches = tr_heap_alloc(r->nunits * TR_SPACES, sizeof *r->stretches);
    for (int64_t k = 0; k < r->nunits; k++) {
        tr_unit *u = &r->units[k];
        u->first_stretch = r->nstretches;
        for (int id = 0; id < TR_SPACES; id++) u->stretches += lay_out(r, k, (tr_space_id)id);
    }
    for (int64_t i = 0; i < r->nstretches; i++)
        list_segments(r, &r->stretches[i], &capacity[r->stretches[i].space]);
}

/* Slots for a space's stretches: one for each that is worked on, and one for each under way. */
static void plan_berths(const tr_registry *r, tr_space *s) {
    int64_t layers = 0, layer = 0, other = 0;
    for (int64_t i = 0; i < r->nstretches; i++) {
        const tr_stretch *t = &r->stretches[i];
        int64_t elems = t->buckets * t->bucket_elems;
        if (&r->space[t->space] != s) continue;
        layers += r->units[t->unit].layer;
        int64_t *most = r->units[t->unit].layer ? &layer : &other;
        if (elems > *most) *most = elems;
    }
    int way = r->options.overlap ? 2 : 1;
    if (layers == 0) layers = other > 0; /* no layer, but a berth for all there is */
    if (layer == 0) layer = other;
    if (s->zero >= 2) tr_berths_plan(&s->grad_berths, way, layers, layer, other);
    if (s->zero >= 3)
        tr_berths_plan(&s->weight_berths, r->options.two_at_once ? 2 * way : way, layers, layer,
                       other);
}

/* --- storage -----------------------------------------------------------------------------------
 */

static bool has_masters(const tr_registry *r, const tr_space *s) {
    return r->t != tr_master_type(r) || s->zero >= 3;
}

/* Whether there are ranks among which parallel.zero 3 would share out more than now. */
static bool zero_would_help(const tr_registry *r) {
    for (int i = 0; i < TR_SPACES && r->options.zero < 3; i++)
        if (i != TR_SPACE_VECTORS && r->space[i].elems > 0 && tr_comm_size(r->space[i].comm) > 1)
            return true;
    return false;
}

/* Local. Whether this rank has room for all of its storage. */
static tr_status check_room(const tr_registry *r, const tr_grid *grid) {
    const tr_allocator *a = &r->device->allocator;
    size_t bytes = (size_t)tr_registry_bytes(r);
    if (tr_allocator_has(a, bytes)) return TR_OK;
    char zero[64] = "", where[256];
    tr_allocator_explain(a, where, sizeof where);
    if (zero_would_help(r))
        snprintf(zero, sizeof zero, "parallel.zero 3 (now %d), ", r->options.zero);
    return tr_fail(TR_ERR_INTERNAL,
                   "out of memory: rank %d of %d asks for %.1f MiB for weights%s%s; use %smore "
                   "ranks (parallel.pipeline, tensor or expert), or fewer or narrower layers",
                   tr_comm_rank(grid->comm[TR_GROUP_WORLD]), grid->at.world, (double)bytes / 0x1p20,
                   r->options.read_only ? "" : ", gradients and optimizer states", where, zero);
}

static void *zeroed(tr_registry *r, size_t bytes) {
    void *array = tr_allocator_take(&r->device->allocator, bytes, "masters, gradients or moments");
    if (!array) tr_abort("%s", tr_error_message());
    r->device->zero(r->device->stream, array, bytes);
    return array;
}

static void allocate(tr_registry *r, tr_space *s) {
    s->weights = tr_comm_alloc_on(s->comm, r->device, weight_bytes(r, s));
    if (has_masters(r, s)) s->master = zeroed(r, master_bytes(r, s));
    if (r->options.read_only) return;
    s->grads = tr_comm_alloc_on(s->comm, r->device, grad_bytes(s));
    s->m = zeroed(r, shard_bytes(s));
    s->v = zeroed(r, shard_bytes(s));
    if (s->zero >= 2) s->sums = zeroed(r, shard_bytes(s));
}

/* Where a parameter that is always there lies. */
static void point(const tr_registry *r, tr_param *p) {
    const tr_space *s = &r->space[p->space];
    if (p->elems_loc == 0) return;
    if (s->zero < 3) p->weight = (char *)s->weights + (size_t)p->offset * tr_dtype_bytes(r->t);
    if (s->zero < 2 && s->grads) p->grad = s->grads + p->offset;
}

tr_status tr_registry_seal(tr_registry *r, const tr_grid *grid, const tr_registry_options *options,
                           tr_device *device) {
    static const tr_group group[TR_SPACES] = {
        [TR_SPACE_VECTORS] = TR_GROUP_STAGE,         [TR_SPACE_WHOLE] = TR_GROUP_STAGE,
        [TR_SPACE_SPLIT] = TR_GROUP_REPLICA,         [TR_SPACE_HEADS] = TR_GROUP_HEAD_REPLICA,
        [TR_SPACE_EXPERT] = TR_GROUP_EXPERT_REPLICA, [TR_SPACE_TIED] = TR_GROUP_REPLICA};
    r->options = *options;
    for (int i = 0; i < TR_SPACES; i++) {
        tr_space *s = &r->space[i];
        s->comm = grid->comm[group[i]];
        bool alone = tr_comm_size(s->comm) == 1 || i == TR_SPACE_VECTORS;
        s->zero = alone ? 1 : options->zero;
    }
    for (int64_t i = 0; i < r->count; i++) place(&r->params[i], grid);
    lay_out_all(r);
    for (int i = 0; i < TR_SPACES; i++) plan_berths(r, &r->space[i]);
    if (!device) return TR_OK;
    r->device = device;
    TR_TRY(tr_agree(grid->comm[TR_GROUP_WORLD], check_room(r, grid)));
    for (int i = 0; i < TR_SPACES; i++) {
        if (r->space[i].elems == 0) continue;
        allocate(r, &r->space[i]);
        tr_comm_expect_blocks(r->space[i].comm, device);
    }
    if (r->space[TR_SPACE_TIED].elems > 0)
        tr_comm_expect_blocks(grid->comm[TR_GROUP_EMBEDDING], device);
    for (int64_t i = 0; i < r->count; i++) point(r, &r->params[i]);
    r->squares = tr_allocator_take(&device->allocator, squares_bytes(r), "norms of gradients");
    if (!r->squares) tr_abort("%s", tr_error_message());
    return TR_OK;
}

void *tr_segment_master(const tr_registry *r, const tr_segment *g) {
    const tr_space *s = &r->space[g->param->space];
    size_t size = tr_dtype_bytes(tr_master_type(r));
    return s->master ? (char *)s->master + (size_t)g->shard * size
                     : (char *)s->weights + (size_t)g->offset * size;
}

float *tr_segment_gradient(const tr_registry *r, const tr_segment *g) {
    const tr_space *s = &r->space[g->param->space];
    return s->sums ? s->sums + g->shard : s->grads + g->offset;
}

float *tr_stretch_gradient(const tr_registry *r, const tr_stretch *t, int64_t b) {
    const tr_space *s = &r->space[t->space];
    if (s->sums) return s->sums + t->shard + b * t->part;
    return s->grads + t->offset + tr_stretch_piece(r, t, b);
}

/* The first values of a segment, in host memory. */
static void draw_segment(float *w, const tr_segment *g, uint64_t seed) {
    const tr_param_decl *d = &g->param->decl;
    uint64_t stream = tr_stream_of_name(d->name);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < g->count; i++) {
        int64_t place = tr_box_place(&g->param->box, d->shape, g->first + i);
        if (d->init == TR_INIT_NORMAL)
            w[i] = d->init_std * tr_random_normal(seed, stream, (uint64_t)place);
        else
            w[i] = d->init == TR_INIT_ONES ? 1.0f : 0.0f;
    }
}

static void init_segment(const tr_registry *r, const tr_segment *g, uint64_t seed) {
    tr_device *device = r->device;
    float *master = tr_segment_master(r, g);
    tr_watch_progress();
    if (device->host_memory) {
        draw_segment(master, g, seed);
        return;
    }
    size_t bytes = (size_t)g->count * sizeof *master;
    float *drawn = tr_allocator_take(tr_host_allocator(), bytes, "initial weights");
    if (!drawn) tr_abort("%s", tr_error_message());
    draw_segment(drawn, g, seed);
    device->copy(device->stream, master, drawn, bytes, TR_TO_DEVICE);
    device->stream_wait(device->stream);
    tr_allocator_give(tr_host_allocator(), drawn, bytes);
}

void tr_registry_init(tr_registry *r, uint64_t seed) {
    for (int i = 0; i < TR_SPACES; i++)
        for (int64_t k = 0; k < r->space[i].nsegments; k++)
            init_segment(r, &r->space[i].segments[k], seed);
}

int64_t tr_registry_total(const tr_registry *r) {
    int64_t total = 0;
    for (int64_t i = 0; i < r->count; i++) total += r->params[i].elems;
    return total;
}

int64_t tr_registry_bytes(const tr_registry *r) {
    int64_t bytes = (int64_t)squares_bytes(r);
    for (int i = 0; i < TR_SPACES; i++) {
        const tr_space *s = &r->space[i];
        if (s->elems == 0) continue;
        bytes += tr_comm_memory_bytes(weight_bytes(r, s));
        if (has_masters(r, s)) bytes += (int64_t)master_bytes(r, s);
        if (r->options.read_only) continue;
        bytes +=
            tr_comm_memory_bytes(grad_bytes(s)) + (2 + (s->zero >= 2)) * (int64_t)shard_bytes(s);
    }
    return bytes;
}
