/* inventory.c - pieces of a checkpoint, where device memory is not the host's by way of copies.
 * Floor: train.
 *
 * The copies of a space lie one after another: masters, first and second moments, each laid out
 * like its shard, so that runs that go on in the next bucket are whole in memory too. */
#include "train/inventory.h"

#include "dist/watch.h"

#include <stdlib.h>
#include <string.h>

enum { ARRAYS = 3 };

static bool copied(const tr_inventory *v) {
    return !v->registry->device->host_memory;
}

/* Where the segment's three arrays are: in device memory. */
static void arrays_of(const tr_registry *r, const tr_segment *g, float *at[ARRAYS]) {
    const tr_space *s = &r->space[g->param->space];
    at[0] = tr_segment_master(r, g);
    at[1] = s->m + g->shard;
    at[2] = s->v + g->shard;
}

/* And their copies; `space_at` is where those of the space begin. */
static void copies_of(const tr_space *s, const tr_segment *g, float *space_at, float *at[ARRAYS]) {
    for (int i = 0; i < ARRAYS; i++) at[i] = space_at + i * s->shard_elems + g->shard;
}

static void allocate_copies(tr_inventory *v) {
    for (int i = 0; i < TR_SPACES; i++)
        v->copies_bytes += (size_t)(ARRAYS * v->registry->space[i].shard_elems) * sizeof(float);
    v->copies = tr_allocator_take(tr_host_allocator(), v->copies_bytes, "a checkpoint's host copy");
    if (!v->copies) tr_abort("%s", tr_error_message());
}

static void list_tensors(tr_inventory *v) {
    const tr_registry *r = v->registry;
    v->ntensors = r->count;
    for (int64_t i = 0; i < r->count; i++) {
        const tr_param_decl *d = &r->params[i].decl;
        v->tensors[i] = (tr_tensor_info){.name = d->name, .ndim = d->ndim};
        memcpy(v->tensors[i].shape, d->shape, sizeof d->shape);
    }
}

static void list_pieces(tr_inventory *v, const tr_space *s, float *space_at, bool moments) {
    const tr_registry *r = v->registry;
    for (int64_t k = 0; k < s->nsegments; k++) {
        const tr_segment *g = &s->segments[k];
        float *at[ARRAYS];
        if (!g->param->primary) continue;
        if (copied(v))
            copies_of(s, g, space_at, at);
        else
            arrays_of(r, g, at);
        v->pieces[v->npieces++] = (tr_piece){.tensor = g->param - r->params,
                                             .box = g->param->box,
                                             .first = g->first,
                                             .count = g->count,
                                             .master = at[0],
                                             .m = moments ? at[1] : NULL,
                                             .v = moments ? at[2] : NULL};
    }
}

tr_inventory tr_inventory_take(const tr_registry *r, bool moments) {
    tr_inventory v = {.registry = r};
    int64_t most = 0;
    for (int i = 0; i < TR_SPACES; i++) most += r->space[i].nsegments;
    v.tensors = calloc((size_t)r->count + 1, sizeof *v.tensors);
    v.pieces = calloc((size_t)most + 1, sizeof *v.pieces);
    if (!v.tensors || !v.pieces) abort();
    if (copied(&v)) allocate_copies(&v);
    list_tensors(&v);
    float *space_at = v.copies;
    for (int i = 0; i < TR_SPACES; i++) {
        list_pieces(&v, &r->space[i], space_at, moments);
        if (space_at) space_at += ARRAYS * r->space[i].shard_elems;
    }
    return v;
}

void tr_inventory_free(tr_inventory *v) {
    tr_allocator_give(tr_host_allocator(), v->copies, v->copies_bytes);
    free(v->tensors);
    free(v->pieces);
}

static void copy_piece(tr_device *device, float *on_host, float *on_device, int64_t count,
                       bool down) {
    size_t bytes = (size_t)count * sizeof(float);
    if (!on_host) return;
    if (down)
        device->copy(device->stream, on_host, on_device, bytes, TR_TO_HOST);
    else
        device->copy(device->stream, on_device, on_host, bytes, TR_TO_DEVICE);
}

static void copy_pieces(const tr_inventory *v, bool down) {
    const tr_registry *r = v->registry;
    int64_t p = 0;
    for (int i = 0; i < TR_SPACES; i++)
        for (int64_t k = 0; k < r->space[i].nsegments; k++) {
            const tr_segment *g = &r->space[i].segments[k];
            float *at[ARRAYS];
            if (!g->param->primary) continue;
            const tr_piece *piece = &v->pieces[p++];
            arrays_of(r, g, at);
            tr_watch_progress();
            copy_piece(r->device, piece->master, at[0], g->count, down);
            copy_piece(r->device, piece->m, at[1], g->count, down);
            copy_piece(r->device, piece->v, at[2], g->count, down);
        }
    r->device->stream_wait(r->device->stream);
}

void tr_inventory_download(const tr_inventory *v) {
    if (copied(v)) copy_pieces(v, true);
}

void tr_inventory_upload(const tr_inventory *v) {
    if (copied(v)) copy_pieces(v, false);
}
