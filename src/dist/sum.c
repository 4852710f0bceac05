/* sum.c - the arithmetic of reductions on the host. Floor: dist.
 * Bound by memory: one pass over every input, partial sums stay in a tile of the first cache. */
#include "dist/backend.h"

#include <string.h>

enum { TILE = 2048, THREADED_ELEMS = 1 << 15, COPY_BYTES = 1 << 18 };

static void add(float *out, const float *a, const float *b, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

static void sum_tile(float *out, const float *const *in, int count, int64_t first, int64_t n) {
    if (count == 2) {
        add(out + first, in[0] + first, in[1] + first, n);
        return;
    }
    float part[TILE];
    add(part, in[0] + first, in[1] + first, n);
    for (int k = 2; k < count - 1; k++) add(part, part, in[k] + first, n);
    add(out + first, part, in[count - 1] + first, n);
}

void tr_sum_in_order(float *out, const float *const *in, int count, int64_t n) {
    if (count == 1) {
        if (out != in[0]) memcpy(out, in[0], (size_t)n * sizeof *out);
        return;
    }
#pragma omp parallel for schedule(static) if (n >= THREADED_ELEMS)
    for (int64_t first = 0; first < n; first += TILE)
        sum_tile(out, in, count, first, n - first < TILE ? n - first : TILE);
}

void tr_copy_threaded(void *out, const void *in, int64_t bytes) {
    if (bytes == 0) return;
#pragma omp parallel for schedule(static) if (bytes > COPY_BYTES)
    for (int64_t first = 0; first < bytes; first += COPY_BYTES)
        memcpy((char *)out + first, (const char *)in + first,
               (size_t)(bytes - first < COPY_BYTES ? bytes - first : COPY_BYTES));
}
