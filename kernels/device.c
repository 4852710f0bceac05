/* device.c - the CPU as a device: memory, a stream that runs everything at once, and the choice of
 * kernels by what the processor offers. Opens other devices by name. Floor: kernels. */
#include "kernels/device.h"

#include "base/heap.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/stream.h"
#include "kernels/makers.h"
#include "kernels/module.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

struct tr_event {
    tr_device *device; /* borrowed */
};

typedef struct {
    tr_device device;
    tr_kernels kernels;
} cpu_device;

enum { REF = -1 }; /* below every tr_cpu_level */

static const struct {
    int level;
    const char *level_name, *device_name;
} levels[] = {{REF, "ref", "cpu ref"},
              {TR_CPU_PORTABLE, "portable", "cpu portable"},
              {TR_CPU_AVX2, "avx2", "cpu avx2"},
              {TR_CPU_AVX512, "avx512", "cpu avx512"},
              {TR_CPU_AVX512_BF16, "avx512bf16", "cpu avx512 bf16"}};

tr_cpu_level tr_cpu_best_level(void) {
#if defined(__x86_64__)
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return TR_CPU_AVX512_BF16;
    if (avx512) return TR_CPU_AVX512;
    if (avx2) return TR_CPU_AVX2;
#endif
    return TR_CPU_PORTABLE;
}

tr_cpu_level tr_cpu_fastest_level(void) {
    tr_cpu_level best = tr_cpu_best_level();
#if defined(__x86_64__)
    if (best == TR_CPU_AVX512_BF16 && __builtin_cpu_is("intel")) return TR_CPU_AVX512;
#endif
    return best;
}

/* Denormals cost up to a hundred cycles each: results round to zero and inputs read as zero.
 * Threads made later inherit this from the one that makes them. */
static void flush_denormals(void) {
#pragma omp parallel
    {
#if defined(__x86_64__)
        _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
        uint64_t fpcr;
        __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
        __asm__ volatile("msr fpcr, %0" : : "r"(fpcr | UINT64_C(1) << 24));
#endif
    }
}

static tr_stream *stream_create(tr_device *device) {
    tr_stream *s = tr_heap_alloc(1, sizeof *s);
    *s = (tr_stream){.device = device};
    return s;
}

static void stream_destroy(tr_stream *stream) {
    free(stream);
}
static void stream_wait(tr_stream *stream) {
    (void)stream;
}

static void stream_drive(tr_stream *stream, void (*drive)(void *context), void *context) {
    stream->drive = drive;
    stream->context = context;
}

static void copy(tr_stream *stream, void *to, const void *from, size_t bytes, tr_copy_kind kind) {
    (void)stream, (void)kind;
    if (bytes) memmove(to, from, bytes);
}

static void zero(tr_stream *stream, void *memory, size_t bytes) {
    (void)stream;
    if (bytes) memset(memory, 0, bytes);
}

static void fill_table(tr_kernels *k, int level) {
    tr_kernels_ref(k);
    if (level == REF) return;
    tr_cpu_linear(k, (tr_cpu_level)level);
    tr_cpu_layers(k, (tr_cpu_level)level);
    tr_cpu_loss(k, (tr_cpu_level)level);
    tr_cpu_moe(k, (tr_cpu_level)level);
    tr_cpu_attention(k, (tr_cpu_level)level);
    tr_cpu_optimizer(k, (tr_cpu_level)level);
}

/* The row of `levels` asked for, or -1 with a message. */
static int find_level(const char *level) {
    int best = (int)tr_cpu_best_level(), fastest = (int)tr_cpu_fastest_level();
    int count = (int)(sizeof levels / sizeof *levels);
    for (int i = 0; i < count; i++) {
        if (level ? strcmp(level, levels[i].level_name) != 0 : levels[i].level != fastest) continue;
        if (levels[i].level <= best) return i;
        tr_fail(TR_ERR_USAGE, "this processor has no %s; its best level is %s", level,
                levels[best - REF].level_name);
        return -1;
    }
    tr_fail(TR_ERR_USAGE,
            "CPU level '%s' is not known; use ref, portable, avx2, avx512 or avx512bf16", level);
    return -1;
}

static tr_event *event_create(tr_device *device) {
    tr_event *e = tr_heap_alloc(1, sizeof *e);
    e->device = device;
    return e;
}

static void event_destroy(tr_event *event) {
    free(event);
}
static void event_record(tr_event *event, tr_stream *stream) {
    (void)event, (void)stream;
}
static bool event_done(tr_event *event) {
    (void)event;
    return true;
}
static void stream_wait_event(tr_stream *stream, tr_event *event) {
    (void)stream, (void)event;
}

static void trim(tr_device *device) {
    (void)device;
    tr_scratch_free();
}

static void destroy(tr_device *device) {
    stream_destroy(device->stream);
    free(device);
}

tr_device *tr_device_cpu(const char *level) {
    const char *wish = getenv("TRIREME_CPU_LEVEL");
    int i = find_level(level || !wish || !*wish ? level : wish);
    if (i < 0) {
        if (!level) tr_context(TR_ERR_USAGE, "the environment variable TRIREME_CPU_LEVEL");
        return NULL;
    }
    cpu_device *d = tr_heap_alloc(1, sizeof *d);
    flush_denormals();
    fill_table(&d->kernels, levels[i].level);
    d->device = (tr_device){.name = levels[i].device_name,
                            .identity = "",
                            .kernels = &d->kernels,
                            .host_memory = true,
                            .allocator = *tr_host_allocator(),
                            .staging = *tr_host_allocator(),
                            .stream_create = stream_create,
                            .stream_destroy = stream_destroy,
                            .stream_wait = stream_wait,
                            .stream_drive = stream_drive,
                            .copy = copy,
                            .zero = zero,
                            .event_create = event_create,
                            .event_destroy = event_destroy,
                            .event_record = event_record,
                            .event_done = event_done,
                            .stream_wait_event = stream_wait_event,
                            .trim = trim,
                            .destroy = destroy};
    d->device.stream = stream_create(&d->device);
    return &d->device;
}

tr_device *tr_device_open(const tr_device_wish *wish) {
    if (strcmp(wish->name, "cpu") == 0) return tr_device_cpu(wish->level);
    return tr_module_device(wish);
}

void tr_device_destroy(tr_device *device) {
    if (device) device->destroy(device);
}
