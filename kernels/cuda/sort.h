/* sort.h - pairs of a key and a number, sorted stably on the device. Floor: kernels, internal to
 * the modules. */
#pragma once
#include "kernels/cuda/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    uint32_t *key;
    int32_t *value;
} tr_cuda_pairs;

typedef struct {
    int64_t n;           /* below 2^31 */
    tr_cuda_pairs pairs; /* the caller fills them; sorted afterwards, in memory of either half */
    /* state */
    tr_cuda_pairs other;
    int32_t *counts, *totals;
} tr_cuda_sorter;

/* Bytes of work memory for sorting n pairs, a multiple of 256; and a sorter in such memory. */
size_t tr_cuda_sort_bytes(int64_t n);
tr_cuda_sorter tr_cuda_sorter_in(void *work, int64_t n);

/* Enqueues. Sorts the pairs by the lower `bits` bits of their keys; equal keys keep their order. */
void tr_cuda_sort(tr_stream *s, tr_cuda_sorter *sorter, int bits);

/* Bits of the numbers 0 to keys - 1. */
int tr_cuda_key_bits(int64_t keys);

#ifdef __cplusplus
}
#endif
