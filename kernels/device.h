/* device.h - where activations and weights live, and the queue their work goes through.
 * Floor: kernels.
 *
 * Model code never dereferences device memory: it allocates through the device, moves bytes with
 * tr_copy, and calls kernels. On the CPU a stream runs everything at once and device memory is host
 * memory; on a GPU calls are enqueued. */
#pragma once
#include "base/arena.h"
#include "base/status.h"

typedef struct tr_stream tr_stream;
typedef struct tr_device tr_device;
typedef struct tr_kernels tr_kernels; /* kernels/kernels.h */

typedef enum { TR_TO_DEVICE, TR_TO_HOST, TR_ON_DEVICE } tr_copy_kind;

struct tr_device {
    const char *name; /* "cpu", and what the processor offers: "cpu avx512 bf16" */
    const tr_kernels *kernels;
    tr_allocator allocator; /* device memory */
    tr_stream *(*stream_create)(tr_device *device);
    void (*stream_destroy)(tr_stream *stream);
    void (*stream_wait)(tr_stream *stream); /* the host waits for all that was enqueued */
    void (*copy)(tr_stream *stream, void *to, const void *from, size_t bytes, tr_copy_kind kind);
    void (*zero)(tr_stream *stream, void *memory, size_t bytes);
    void (*trim)(tr_device *device); /* gives back work memory that kernels keep between calls */
};

/* Local. The CPU device with the fastest kernels this processor runs. `level` limits them for
 * tests: "ref", "portable", "avx2", "avx512", "avx512bf16", or NULL for the environment's
 * TRIREME_CPU_LEVEL and, without that, the best. NULL result, with a message, if the processor
 * lacks it or the name is unknown. Sets flush-to-zero in every OpenMP thread. Its kernels also take
 * a NULL stream. */
tr_device *tr_device_cpu(const char *level);
void tr_device_destroy(tr_device *device); /* NULL-safe */
