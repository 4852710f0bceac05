/* device.h - where activations and weights live, and the queue their work goes through.
 * Floor: base.
 *
 * Nobody but kernels dereferences device memory: it is allocated through the device, bytes are
 * moved with `copy`, and kernels do the rest. On the CPU a stream runs everything at once and
 * device memory is host memory; on a GPU calls are enqueued, and what the host has prepared or
 * reads it must wait for. kernels/device.h opens devices. */
#pragma once
#include "base/arena.h"

typedef struct tr_device tr_device;
typedef struct tr_stream tr_stream;   /* its first member is `tr_device *device` on every device */
typedef struct tr_event tr_event;     /* a point in a stream's work */
typedef struct tr_fabric tr_fabric;   /* collectives on device memory */
typedef struct tr_kernels tr_kernels; /* kernels/kernels.h */

typedef enum { TR_TO_DEVICE, TR_TO_HOST, TR_ON_DEVICE } tr_copy_kind;

struct tr_device {
    const char *name;     /* "cpu avx512 bf16": the kind, and what it is in particular */
    const char *identity; /* processes of a node that use one device say the same; CPU: "" */
    const tr_kernels *kernels;
    bool host_memory;        /* the host may read and write device memory (the CPU) */
    bool emulated;           /* a GPU's kernels on the host: how long they take means nothing */
    tr_allocator allocator;  /* device memory, contents undefined */
    tr_allocator staging;    /* host memory that copies to and from the device are fast with */
    const tr_fabric *fabric; /* NULL: none */
    tr_stream *stream;       /* owned: of the model, and of all that has no stream of its own */

    tr_stream *(*stream_create)(tr_device *device);
    void (*stream_destroy)(tr_stream *stream); /* after its work is done */
    void (*stream_wait)(tr_stream *stream);    /* the host waits for all that was enqueued */
    /* Where kernels run in the call itself (NULL elsewhere): long ones call drive(context) on the
     * calling thread every few milliseconds, so that transfers make progress under compute. */
    void (*stream_drive)(tr_stream *stream, void (*drive)(void *context), void *context);
    /* Nullable, set by who needs it: called again and again while stream_wait waits. */
    void (*meanwhile)(void *self);
    void *meanwhile_self;

    /* Host memory given to `copy` is the caller's again after stream_wait, or an event recorded
     * behind the copy; only memory of `staging` is copied while the host goes on. */
    void (*copy)(tr_stream *stream, void *to, const void *from, size_t bytes, tr_copy_kind kind);
    void (*zero)(tr_stream *stream, void *memory, size_t bytes);

    /* An event that was never recorded is done. */
    tr_event *(*event_create)(tr_device *device);
    void (*event_destroy)(tr_event *event); /* NULL-safe */
    void (*event_record)(tr_event *event, tr_stream *stream);
    bool (*event_done)(tr_event *event);                           /* never waits */
    void (*stream_wait_event)(tr_stream *stream, tr_event *event); /* the host does not wait */

    void (*trim)(tr_device *device); /* gives back work memory that kernels keep between calls */
    /* What a device that checks kernels has found so far, also printed; NULL: it does not check. */
    int64_t (*findings)(tr_device *device);
    void (*destroy)(tr_device *device);
};

static inline tr_device *tr_stream_device(const tr_stream *stream) {
    return *(tr_device *const *)(const void *)stream;
}
