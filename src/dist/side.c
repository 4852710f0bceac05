/* side.c - what operations on device memory keep of a device: streams for copies, events, staging
 * memory. Floor: dist.
 *
 * Events and memory are taken when an operation needs them and come back, so a step allocates
 * nothing once the largest has been seen. */
#include "dist/backend.h"

#include "base/heap.h"

#include <stdlib.h>

/* What a stream waits for may wait for what this process has begun and not issued. */
static void poll(void *runtime) {
    tr_comm_poll(((tr_runtime *)runtime)->comms);
}

tr_side *tr_side_of(tr_runtime *runtime, tr_device *device) {
    tr_side *side = runtime->sides;
    while (side && side->device != device) side = side->next;
    if (side) return side;
    side = tr_heap_alloc(1, sizeof *side);
    *side = (tr_side){.next = runtime->sides,
                      .device = device,
                      .out = device->stream_create(device),
                      .in = device->stream_create(device)};
    runtime->sides = side;
    device->meanwhile = poll;
    device->meanwhile_self = runtime;
    return side;
}

/* Room for one more than `count` things of that size. */
tr_event *tr_side_take_event(tr_side *side) {
    if (side->event_count > 0) return side->events[--side->event_count];
    return side->device->event_create(side->device);
}

void tr_side_give_event(tr_side *side, tr_event *event) {
    side->events =
        tr_heap_grow(side->events, side->event_count, &side->event_room, sizeof(tr_event *));
    side->events[side->event_count++] = event;
}

/* Few sizes, so that a piece fits again: steps of an eighth of a power of two. */
static size_t rounded(size_t bytes) {
    size_t step = 1 << 13;
    while (bytes > 16 * step) step *= 2;
    return (bytes + step - 1) / step * step;
}

tr_staging tr_side_take_staging(tr_side *side, size_t bytes) {
    int64_t best = -1;
    for (int64_t i = 0; i < side->staging_count; i++)
        if (side->staging[i].bytes >= bytes &&
            (best < 0 || side->staging[i].bytes < side->staging[best].bytes))
            best = i;
    if (best >= 0) {
        tr_staging found = side->staging[best];
        side->staging[best] = side->staging[--side->staging_count];
        return found;
    }
    const tr_allocator *a = &side->device->staging;
    tr_staging staging = {.bytes = rounded(bytes)};
    staging.at = a->alloc(a->self, staging.bytes);
    if (!staging.at)
        tr_abort("no host memory to carry %lld bytes of device memory to other ranks: use fewer "
                 "ranks on this machine, or a smaller model or micro-batch",
                 (long long)bytes);
    return staging;
}

void tr_side_give_staging(tr_side *side, tr_staging staging) {
    side->staging =
        tr_heap_grow(side->staging, side->staging_count, &side->staging_room, sizeof(tr_staging));
    side->staging[side->staging_count++] = staging;
}

void tr_side_free(tr_runtime *runtime, tr_device *device) {
    tr_side **link = &runtime->sides;
    while (*link && (*link)->device != device) link = &(*link)->next;
    tr_side *side = *link;
    if (!side) return;
    *link = side->next;
    device->meanwhile = NULL;
    const tr_allocator *a = &device->staging;
    for (int64_t i = 0; i < side->staging_count; i++)
        a->free(a->self, side->staging[i].at, side->staging[i].bytes);
    for (int64_t i = 0; i < side->event_count; i++) device->event_destroy(side->events[i]);
    device->stream_destroy(side->out);
    device->stream_destroy(side->in);
    free(side->events);
    free(side->staging);
    free(side);
}
