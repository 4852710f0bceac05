/* device_memory.h - buffers on a late device for tests of operations on them. */
#pragma once
#include "tests/dist/late_device.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    late_device *late;
    tr_device *device;
    tr_stream *stream;
    char *at; /* on the device */
    size_t bytes;
} device_memory;

static inline device_memory device_memory_of(late_device *late, tr_stream *stream, int64_t bytes) {
    tr_device *device = late_device_of(late);
    return (device_memory){.late = late,
                           .device = device,
                           .stream = stream,
                           .at = device->allocator.alloc(device->allocator.self, (size_t)bytes),
                           .bytes = (size_t)bytes};
}

typedef struct {
    void *to;
    size_t bytes;
    int delay; /* steps of the stream until it happens */
    unsigned char data[];
} device_write;

static inline bool device_write_step(void *self) {
    device_write *w = (device_write *)self;
    if (w->delay-- > 0) return false;
    memcpy(w->to, w->data, w->bytes);
    return true;
}

/* Enqueues that the memory becomes `data`, after a delay: a computation. */
static inline void device_memory_write(const device_memory *m, const void *data, int64_t bytes,
                                       int delay) {
    device_write *w = (device_write *)malloc(sizeof *w + (size_t)bytes);
    if (!w) abort();
    *w = (device_write){
        .to = late_inside(m->late, m->at, (size_t)bytes), .bytes = (size_t)bytes, .delay = delay};
    if (bytes > 0) memcpy(w->data, data, (size_t)bytes);
    late_enqueue(m->stream, device_write_step, w);
}

typedef struct {
    const void *from;
    void *to;
    size_t bytes;
} device_read;

static inline bool device_read_step(void *self) {
    device_read *r = (device_read *)self;
    memcpy(r->to, r->from, r->bytes);
    return true;
}

/* Enqueues a copy to host memory, which is valid after stream_wait. */
static inline void device_memory_read(const device_memory *m, void *to, int64_t bytes) {
    device_read *r = (device_read *)malloc(sizeof *r);
    if (!r) abort();
    *r = (device_read){
        .from = late_inside(m->late, m->at, (size_t)bytes), .to = to, .bytes = (size_t)bytes};
    late_enqueue(m->stream, device_read_step, r);
}

static inline void device_memory_free(const device_memory *m) {
    m->device->stream_wait(m->stream);
    m->device->allocator.free(m->device->allocator.self, m->at, m->bytes);
}
