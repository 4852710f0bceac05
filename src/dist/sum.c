/* sum.c - sums and copies of reductions on the host. Floor: dist.
 * Bound by memory: one pass over every input, partial sums in a tile of the first cache; what this
 * rank will not read soon is stored past the caches, which saves reading the lines it overwrites.
 */
#include "dist/backend.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { TILE = 2048, THREADED_ELEMS = 1 << 15, COPY_BYTES = 1 << 18, STREAM_BYTES = 1 << 20 };

/* Copies past the caches where the processor can. Not ordered with other ranks' reads until
 * stream_fence. */
static void stream_copy(char *out, const char *in, int64_t bytes) {
#ifdef __SSE2__
    int64_t head = (int64_t)(-(uintptr_t)out & 15);
    if (head > bytes) head = bytes;
    memcpy(out, in, (size_t)head);
    int64_t i = head;
    for (; i + 16 <= bytes; i += 16)
        _mm_stream_si128((__m128i *)(void *)(out + i),
                         _mm_loadu_si128((const __m128i *)(const void *)(in + i)));
    memcpy(out + i, in + i, (size_t)(bytes - i));
#else
    memcpy(out, in, (size_t)bytes);
#endif
}

static void stream_fence(void) {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

static void add(float *out, const float *a, const float *b, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

/* Two ranks, in place on both: one pass, nothing in between. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static void
add_to_both(float *x, float *y, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float sum = x[i] + y[i];
        x[i] = sum;
        y[i] = sum;
    }
}

static void sum_tile(float *const *out, int outs, const float *const *in, int count, int64_t first,
                     int64_t n) {
    float part[TILE];
    if (count == 2 && outs == 2 && (out[0] == in[0] || out[0] == in[1])) {
        add_to_both(out[0] + first, out[1] + first, n);
        return;
    }
    add(part, in[0] + first, in[1] + first, n);
    for (int k = 2; k < count; k++) add(part, part, in[k] + first, n);
    memcpy(out[0] + first, part, (size_t)n * sizeof(float));
    for (int k = 1; k < outs; k++) /* in place: these lines have just been read */
        memcpy(out[k] + first, part, (size_t)n * sizeof(float));
}

void tr_sum_in_order(float *const *out, int outs, const float *const *in, int count, int64_t n) {
#pragma omp parallel if (n >= THREADED_ELEMS)
    {
#pragma omp for schedule(static)
        for (int64_t first = 0; first < n; first += TILE)
            sum_tile(out, outs, in, count, first, n - first < TILE ? n - first : TILE);
    }
}

void tr_copy_threaded(void *out, const void *in, int64_t bytes) {
    char *to = out;
    const char *from = in;
#pragma omp parallel if (bytes > COPY_BYTES)
    {
#pragma omp for schedule(static)
        for (int64_t first = 0; first < bytes; first += COPY_BYTES) {
            int64_t part = bytes - first < COPY_BYTES ? bytes - first : COPY_BYTES;
            if (bytes >= STREAM_BYTES)
                stream_copy(to + first, from + first, part);
            else
                memcpy(to + first, from + first, (size_t)part);
        }
        stream_fence();
    }
}
