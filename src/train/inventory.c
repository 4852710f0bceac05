/* inventory.c - pieces of a checkpoint, where device memory is not the host's by way of copies.
 * Floor: train.
 *
 * The copies of a space lie one after another: masters, first and second moments, each laid out
 * like its shard, so that runs that go on in the next bucket are whole in memory too. */
#include "train/inventory.h"

#include "base/heap.h"
#include "dist/watch.h"

#include <stdlib.h>
#include <string.h>

enum { ARRAYS = 3 };

static bool copied(const tr_inventory *v) {
    return !v->registry->device->host_memory;
}

/* All three, with moments, are fp32. */
static size_t elem_bytes(const tr_inventory *v) {
    return tr_dtype_bytes(tr_master_type(v->registry));
}

/* Where the segment's arrays are: in device memory. */
static void arrays_of(const tr_inventory *v, const tr_segment *g, void *at[ARRAYS]) {
    const tr_space *s = &v->registry->space[g->param->space];
    at[0] = tr_segment_master(v->registry, g);
    at[1] = v->arrays > 1 ? s->m + g->shard : NULL;
    at[2] = v->arrays > 1 ? s->v + g->shard : NULL;
}

/* And their copies; `space_at` is where those of the space begin. */
static void copies_of(const tr_inventory *v, const tr_segment *g, char *space_at,
                      void *at[ARRAYS]) {
    int64_t elems = v->registry->space[g->param->space].shard_elems;
    for (int i = 0; i < ARRAYS; i++)
        at[i] = i < v->arrays ? space_at + (size_t)(i * elems + g->shard) * elem_bytes(v) : NULL;
}

static size_t copies_bytes(const tr_inventory *v, const tr_space *s) {
    return (size_t)(v->arrays * s->shard_elems) * elem_bytes(v);
}

static void allocate_copies(tr_inventory *v) {
    for (int i = 0; i < TR_SPACES; i++) v->copies_bytes += copies_bytes(v, &v->registry->space[i]);
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

static void list_pieces(tr_inventory *v, const tr_space *s, char *space_at) {
    const tr_registry *r = v->registry;
    for (int64_t k = 0; k < s->nsegments; k++) {
        const tr_segment *g = &s->segments[k];
        void *at[ARRAYS];
        if (!g->param->primary) continue;
        if (copied(v))
            copies_of(v, g, space_at, at);
        else
            arrays_of(v, g, at);
        v->pieces[v->npieces++] = (tr_piece){.tensor = g->param - r->params,
                                             .box = g->param->box,
                                             .first = g->first,
                                             .count = g->count,
                                             .master_type = tr_master_type(r),
                                             .master = at[0],
                                             .m = at[1],
                                             .v = at[2]};
    }
}

tr_inventory tr_inventory_take(const tr_registry *r, bool moments) {
    tr_inventory v = {.registry = r, .arrays = moments ? ARRAYS : 1};
    int64_t most = 0;
    for (int i = 0; i < TR_SPACES; i++) most += r->space[i].nsegments;
    v.tensors = tr_heap_alloc(r->count, sizeof *v.tensors);
    v.pieces = tr_heap_alloc(most, sizeof *v.pieces);
    if (copied(&v)) allocate_copies(&v);
    list_tensors(&v);
    char *space_at = v.copies;
    for (int i = 0; i < TR_SPACES; i++) {
        list_pieces(&v, &r->space[i], space_at);
        if (space_at) space_at += copies_bytes(&v, &r->space[i]);
    }
    return v;
}

void tr_inventory_free(tr_inventory *v) {
    tr_allocator_give(tr_host_allocator(), v->copies, v->copies_bytes);
    free(v->tensors);
    free(v->pieces);
}

static void copy_piece(tr_device *device, void *on_host, void *on_device, size_t bytes, bool down) {
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
            size_t bytes = (size_t)g->count * elem_bytes(v);
            void *at[ARRAYS];
            if (!g->param->primary) continue;
            const tr_piece *piece = &v->pieces[p++];
            arrays_of(v, g, at);
            tr_watch_progress();
            copy_piece(r->device, piece->master, at[0], bytes, down);
            copy_piece(r->device, piece->m, at[1], bytes, down);
            copy_piece(r->device, piece->v, at[2], bytes, down);
        }
    r->device->stream_wait(r->device->stream);
}

void tr_inventory_download(const tr_inventory *v) {
    if (copied(v)) copy_pieces(v, true);
}

void tr_inventory_upload(const tr_inventory *v) {
    if (copied(v)) copy_pieces(v, false);
}
