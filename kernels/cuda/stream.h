/* stream.h - what the files of kernels/cuda share: streams, work memory, checked calls.
 * Floor: kernels, internal to the modules.
 *
 * A row of the table only enqueues: kernels on s->handle, copies and zeroes by cudaMemcpyAsync and
 * cudaMemsetAsync there. It never waits, and allocates nothing but by tr_cuda_work. */
#pragma once
#include "kernels/device.h"

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tr_stream {
    tr_device *device; /* borrowed */
    cudaStream_t handle;
    /* state: work memory of calls on this stream */
    void *work;
    size_t work_bytes;
    void *blas, *blas_workspace;           /* blas.c's, */
    void (*blas_end)(struct tr_stream *s); /* which gives them back; NULL: there are none */
    struct tr_stream *next;                /* of the device's streams */
};

/* Local. Device memory for the kernels that one call of a row enqueues on s, 256-byte aligned,
 * contents undefined (what earlier calls left). There is one block a stream: ask once a call, for
 * all that it needs, and carve it up. The next call on s gets the same block in stream order. It
 * grows when a call needs more than those before; then the host waits for the stream. */
void *tr_cuda_work(tr_stream *s, size_t bytes);

/* Local. After every launch: a launch that failed ends the job, naming the kernel. */
void tr_cuda_launched(tr_stream *s, const char *kernel);

/* Local. Ends the job with the call, the device and the error's text if it failed:
 *     tr_cuda_check(device, cudaEventRecord(e, s->handle), "cudaEventRecord"); */
void tr_cuda_check(const tr_device *device, cudaError_t error, const char *call);

/* Local. Ends the job through the program, with the text and the device's name. */
void tr_cuda_fatal(const tr_device *device, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));

#ifdef __cplusplus
}
#endif
