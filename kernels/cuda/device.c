/* device.c - a GPU as a device: memory, streams, events and copies through the CUDA runtime, every
 * call checked. Floor: kernels, in the modules.
 *
 * What fails while the device opens comes back as a text. Memory that is not there is NULL. Any
 * other call that fails later ends the job through the program's `fatal`: an error of the CUDA
 * runtime is either a mistake of ours or sticks to the process. */
#include "kernels/cuda/stream.h"
#include "kernels/makers.h"
#include "kernels/module.h"
#ifdef TR_NCCL
#include "kernels/cuda/nccl_fabric.h"
#endif

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef TR_SIMT
int64_t tr_simt_findings(void); /* findings.cc */
#endif

enum { WORK_GRAIN = 2 << 20 }; /* work memory grows by multiples of this */

typedef struct {
    tr_device device; /* first: a tr_device is one */
    tr_kernels kernels;
    int ordinal;
    char name[300], identity[32];
    void (*fatal)(const char *text);
    tr_stream *streams; /* all that there are */
} cuda_device;

struct tr_event {
    tr_device *device; /* borrowed */
    cudaEvent_t handle;
};

static const cuda_device *self_of(const tr_device *device) {
    return (const cuda_device *)(const void *)device;
}

/* --- failures ----------------------------------------------------------------------------------
 */

void tr_cuda_fatal(const tr_device *device, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length >= 0 && (size_t)length < sizeof text)
        snprintf(text + length, sizeof text - (size_t)length, " (device %d, %s)",
                 self_of(device)->ordinal, device->name);
    self_of(device)->fatal(text);
    abort(); /* it does not return */
}

void tr_cuda_check(const tr_device *device, cudaError_t error, const char *call) {
    if (error == cudaSuccess) return;
    tr_cuda_fatal(device, "%s failed: %s", call, cudaGetErrorString(error));
}

void tr_cuda_launched(tr_stream *s, const char *kernel) {
    cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) return;
    tr_cuda_fatal(s->device, "kernel %s could not be launched: %s", kernel,
                  cudaGetErrorString(error));
}

static void print_and_exit(const char *text) {
    fprintf(stderr, "error: %s\n", text);
    exit(TR_ERR_INTERNAL);
}

/* An error that the caller takes care of is not to be found by a later cudaGetLastError. */
static void *forget_error(void) {
    (void)cudaGetLastError();
    return NULL;
}

static void stream_wait(tr_stream *s) {
    const tr_device *device = s->device;
    while (device->meanwhile && cudaStreamQuery(s->handle) == cudaErrorNotReady) {
        forget_error();
        device->meanwhile(device->meanwhile_self);
    }
    tr_cuda_check(s->device, cudaStreamSynchronize(s->handle), "cudaStreamSynchronize");
}

/* --- memory ------------------------------------------------------------------------------------
 */

static void *device_alloc(void *self, size_t bytes) {
    void *memory = NULL;
    cudaError_t error = cudaMalloc(&memory, bytes ? bytes : 1);
    if (error == cudaErrorMemoryAllocation) return forget_error();
    tr_cuda_check(self, error, "cudaMalloc");
    return memory;
}

static void device_free(void *self, void *memory, size_t bytes) {
    (void)bytes;
    tr_cuda_check(self, cudaFree(memory), "cudaFree");
}

static void *staging_alloc(void *self, size_t bytes) {
    void *memory = NULL;
    cudaError_t error = cudaHostAlloc(&memory, bytes ? bytes : 1, cudaHostAllocDefault);
    if (error == cudaErrorMemoryAllocation) return forget_error();
    tr_cuda_check(self, error, "cudaHostAlloc");
    return memory;
}

static void staging_free(void *self, void *memory, size_t bytes) {
    (void)bytes;
    tr_cuda_check(self, cudaFreeHost(memory), "cudaFreeHost");
}

static void explain_device(void *self, char *text, size_t text_bytes) {
    const tr_device *device = self;
    size_t free_bytes = 0, total_bytes = 0;
    cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes);
    if (error != cudaSuccess) {
        snprintf(text, text_bytes, "how much is left on device %d (%s) is not known: %s",
                 self_of(device)->ordinal, device->name, cudaGetErrorString(error));
        forget_error();
        return;
    }
    snprintf(text, text_bytes, "%zu of %zu MiB are free on device %d (%s)", free_bytes >> 20,
             total_bytes >> 20, self_of(device)->ordinal, device->name);
}

static void explain_staging(void *self, char *text, size_t text_bytes) {
    (void)self;
    snprintf(text, text_bytes, "of host memory that is locked for copies (see `ulimit -l`)");
}

void *tr_cuda_work(tr_stream *s, size_t bytes) {
    if (bytes <= s->work_bytes) return s->work;
    /* by stream_wait: what is before us may wait for what this process has begun and not issued */
    if (s->work) stream_wait(s);
    if (s->work) device_free(s->device, s->work, s->work_bytes);
    s->work_bytes = (bytes + WORK_GRAIN - 1) / WORK_GRAIN * WORK_GRAIN;
    s->work = device_alloc(s->device, s->work_bytes);
    if (s->work) return s->work;
    char where[400];
    explain_device(s->device, where, sizeof where);
    tr_cuda_fatal(s->device,
                  "out of memory: %zu bytes wanted as a kernel's work memory, %s; use more ranks, "
                  "a smaller micro_batch_size or parallel.recompute",
                  s->work_bytes, where);
}

static void free_work(tr_stream *s) {
    if (!s->work) return;
    tr_cuda_check(s->device, cudaStreamSynchronize(s->handle), "cudaStreamSynchronize");
    device_free(s->device, s->work, s->work_bytes);
    s->work = NULL;
    s->work_bytes = 0;
}

static void trim(tr_device *device) {
    for (tr_stream *s = self_of(device)->streams; s; s = s->next) free_work(s);
}

/* --- streams and copies ------------------------------------------------------------------------
 */

static tr_stream *add_stream(cuda_device *d, cudaStream_t handle) {
    tr_stream *s = malloc(sizeof *s);
    if (!s) abort();
    *s = (tr_stream){.device = &d->device, .handle = handle, .next = d->streams};
    d->streams = s;
    return s;
}

static tr_stream *stream_create(tr_device *device) {
    cudaStream_t handle;
    tr_cuda_check(device, cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking),
                  "cudaStreamCreateWithFlags");
    return add_stream((cuda_device *)(void *)device, handle);
}

static void stream_destroy(tr_stream *s) {
    cuda_device *d = (cuda_device *)(void *)s->device;
    tr_stream **link = &d->streams;
    while (*link != s) link = &(*link)->next;
    *link = s->next;
    tr_cuda_check(s->device, cudaStreamSynchronize(s->handle), "cudaStreamSynchronize");
    free_work(s);
    if (s->blas_end) s->blas_end(s);
    tr_cuda_check(s->device, cudaStreamDestroy(s->handle), "cudaStreamDestroy");
    free(s);
}

static void copy(tr_stream *s, void *to, const void *from, size_t bytes, tr_copy_kind kind) {
    static const enum cudaMemcpyKind kinds[] = {[TR_TO_DEVICE] = cudaMemcpyHostToDevice,
                                                [TR_TO_HOST] = cudaMemcpyDeviceToHost,
                                                [TR_ON_DEVICE] = cudaMemcpyDeviceToDevice};
    static const char *const calls[] = {[TR_TO_DEVICE] = "cudaMemcpyAsync to the device",
                                        [TR_TO_HOST] = "cudaMemcpyAsync to the host",
                                        [TR_ON_DEVICE] = "cudaMemcpyAsync on the device"};
    if (bytes == 0) return;
    tr_cuda_check(s->device, cudaMemcpyAsync(to, from, bytes, kinds[kind], s->handle), calls[kind]);
}

static void zero(tr_stream *s, void *memory, size_t bytes) {
    if (bytes == 0) return;
    tr_cuda_check(s->device, cudaMemsetAsync(memory, 0, bytes, s->handle), "cudaMemsetAsync");
}

/* --- events ------------------------------------------------------------------------------------
 */

static tr_event *event_create(tr_device *device) {
    tr_event *e = malloc(sizeof *e);
    if (!e) abort();
    e->device = device;
    tr_cuda_check(device, cudaEventCreateWithFlags(&e->handle, cudaEventDisableTiming),
                  "cudaEventCreateWithFlags");
    return e;
}

static void event_destroy(tr_event *e) {
    if (!e) return;
    tr_cuda_check(e->device, cudaEventDestroy(e->handle), "cudaEventDestroy");
    free(e);
}

static void event_record(tr_event *e, tr_stream *s) {
    tr_cuda_check(e->device, cudaEventRecord(e->handle, s->handle), "cudaEventRecord");
}

static bool event_done(tr_event *e) {
    cudaError_t error = cudaEventQuery(e->handle);
    if (error == cudaErrorNotReady) {
        forget_error();
        return false;
    }
    tr_cuda_check(e->device, error, "cudaEventQuery");
    return true;
}

static void stream_wait_event(tr_stream *s, tr_event *e) {
    tr_cuda_check(s->device, cudaStreamWaitEvent(s->handle, e->handle, 0), "cudaStreamWaitEvent");
}

/* --- opening -----------------------------------------------------------------------------------
 */

static bool refuse(tr_module_call *call, tr_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static bool refuse(tr_module_call *call, tr_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(call->text, call->text_bytes, format, arguments);
    va_end(arguments);
    call->status = status;
    return false;
}

static bool failed(tr_module_call *call, cudaError_t error, const char *what) {
    return error != cudaSuccess &&
           !refuse(call, TR_ERR_INTERNAL, "%s failed: %s", what, cudaGetErrorString(error));
}

/* Why there is not a device. */
static bool refuse_count(tr_module_call *call, cudaError_t error) {
    int driver = 0, runtime = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (error == cudaErrorInsufficientDriver) {
        if (failed(call, cudaDriverGetVersion(&driver), "cudaDriverGetVersion")) return false;
        if (failed(call, cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion")) return false;
        if (driver == 0)
            return refuse(call, TR_ERR_USAGE,
                          "there is no NVIDIA driver here (libcuda.so.1 is not found; a container "
                          "needs `--gpus all`); use run.device cpu");
        return refuse(call, TR_ERR_USAGE,
                      "the NVIDIA driver is too old: it serves CUDA %d.%d, and this program was "
                      "built with CUDA %d.%d; update the driver, build with an older toolkit, or "
                      "use run.device cpu",
                      driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    }
    if (error == cudaSuccess || error == cudaErrorNoDevice)
        return refuse(call, TR_ERR_USAGE,
                      "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES is %s%s%s); make one "
                      "visible or use run.device cpu",
                      visible ? "'" : "not set", visible ? visible : "", visible ? "'" : "");
    failed(call, error, "cudaGetDeviceCount");
    return false;
}

#ifdef TR_CUDA_MAJORS /* major compute capabilities that the kernels are compiled for */
static bool has_kernels(tr_module_call *call, const struct cudaDeviceProp *p) {
    static const int majors[] = {TR_CUDA_MAJORS};
    for (size_t i = 0; i < sizeof majors / sizeof *majors; i++)
        if (p->major == majors[i]) return true;
    return refuse(call, TR_ERR_USAGE,
                  "%s has compute capability %d.%d, for which this program has no kernels; add it "
                  "to TRIREME_CUDA_ARCHITECTURES and build again, or use run.device cpu",
                  p->name, p->major, p->minor);
}
#else
static bool has_kernels(tr_module_call *call, const struct cudaDeviceProp *p) {
    (void)call, (void)p;
    return true;
}
#endif

/* One device is visible: that one, as launchers show each rank its own. Several: by local rank. */
static bool choose(tr_module_call *call, cuda_device *d) {
    int count = 0;
    struct cudaDeviceProp p;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count < 1) return refuse_count(call, error);
    d->ordinal = call->wish->local_rank % count;
    if (failed(call, cudaSetDevice(d->ordinal), "cudaSetDevice")) return false;
    if (failed(call, cudaGetDeviceProperties(&p, d->ordinal), "cudaGetDeviceProperties"))
        return false;
    if (failed(call, cudaDeviceGetPCIBusId(d->identity, sizeof d->identity, d->ordinal),
               "cudaDeviceGetPCIBusId"))
        return false;
    snprintf(d->name, sizeof d->name, "%s %s", call->wish->name, p.name);
    return has_kernels(call, &p);
}

static void fill_table(tr_kernels *k) {
    tr_cuda_linear(k);
    tr_cuda_layers(k);
    tr_cuda_loss(k);
    tr_cuda_moe(k);
    tr_cuda_attention(k);
    tr_cuda_optimizer(k);
#ifdef TR_CUBLAS
    tr_cuda_blas(k);
#endif
}

#ifdef TR_SIMT
static int64_t findings(tr_device *device) {
    (void)device;
    return tr_simt_findings();
}
#endif

static void destroy(tr_device *device) {
    cuda_device *d = (cuda_device *)(void *)device;
    while (d->streams) stream_destroy(d->streams);
#ifdef TR_NCCL
    tr_nccl_close((tr_fabric *)(uintptr_t)device->fabric);
#endif
    free(d);
}

static void fill(cuda_device *d) {
    d->device = (tr_device){.name = d->name,
                            .identity = d->identity,
                            .kernels = &d->kernels,
                            .allocator = {.alloc = device_alloc,
                                          .free = device_free,
                                          .self = d,
                                          .explain = explain_device},
                            .staging = {.alloc = staging_alloc,
                                        .free = staging_free,
                                        .self = d,
                                        .explain = explain_staging},
                            .stream_create = stream_create,
                            .stream_destroy = stream_destroy,
                            .stream_wait = stream_wait,
                            .copy = copy,
                            .zero = zero,
                            .event_create = event_create,
                            .event_destroy = event_destroy,
                            .event_record = event_record,
                            .event_done = event_done,
                            .stream_wait_event = stream_wait_event,
                            .trim = trim,
                            .destroy = destroy};
#ifdef TR_SIMT
    d->device.emulated = true;
    d->device.findings = findings;
#endif
    fill_table(&d->kernels);
}

#ifdef TR_NCCL
static bool open_fabric(tr_module_call *call, cuda_device *d) {
    tr_nccl_wish wish = {
        .ordinal = d->ordinal, .limit_seconds = call->wish->limit_seconds, .look_seconds = 1};
    char text[512];
    d->device.fabric = tr_nccl_open(&d->device, &wish, text, sizeof text);
    return d->device.fabric ||
           refuse(call, TR_ERR_INTERNAL, "%s; run.collectives mpi does without", text);
}
#else
static bool open_fabric(tr_module_call *call, const cuda_device *d) {
    (void)d;
    return refuse(call, TR_ERR_USAGE,
                  "the program was built without NCCL; use run.collectives mpi, or install NCCL "
                  "with its header and build again");
}
#endif

static bool same_layout(tr_module_call *call) {
    return memcmp(&call->layout, &tr_module_layout_here, sizeof call->layout) == 0 ||
           refuse(call, TR_ERR_USAGE,
                  "its module was built from other sources than the program; build both again");
}

tr_device *tr_module_open(tr_module_call *call) {
    if (!same_layout(call)) return NULL;
    cuda_device *d = calloc(1, sizeof *d);
    if (!d) abort();
    /* Before the runtime starts. A group of the fabric has a stream; streams that share one of the
     * 8 queues which CUDA makes by itself wait for each other, and then ranks in a circle. */
    if (call->wish->fabric) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    d->fatal = call->wish->fatal ? call->wish->fatal : print_and_exit;
    cudaStream_t handle;
    if (!choose(call, d) || failed(call, cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking),
                                   "cudaStreamCreateWithFlags")) {
        free(d);
        return NULL;
    }
    fill(d);
    d->device.stream = add_stream(d, handle);
    if (call->wish->fabric && !open_fabric(call, d)) {
        destroy(&d->device);
        return NULL;
    }
    return &d->device;
}
