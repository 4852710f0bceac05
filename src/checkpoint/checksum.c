/* checksum.c - the tensor checksum. Floor: checkpoint. One core of a 2023 server: 16 GB/s with
 * AVX-512, 5 with AVX2, 3 without. */
#include "checkpoint/checksum.h"

#include <string.h>

#include "base/rng.h"

#if defined(__x86_64__) && defined(__gnu_linux__)
#define TR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TR_CLONES
#endif

static const uint64_t K = UINT64_C(0x9e3779b97f4a7c15);
enum { TR_SLICE = 1 << 16 }; /* elements one thread takes at a time */

TR_CLONES static uint64_t sum_words(uint64_t first, const char *words, int64_t n) {
    uint64_t sum = 0, key = (first + 1) * K;
    for (int64_t i = 0; i < n; i++) {
        uint32_t w;
        memcpy(&w, words + 4 * i, 4);
        sum += tr_mix64(key ^ w);
        key += K;
    }
    return sum;
}

uint64_t tr_checksum(int64_t first, const void *words, int64_t n) {
    const char *bytes = words;
    uint64_t sum = 0;
    int64_t slices = tr_ceil_div(n, TR_SLICE);
#pragma omp parallel for schedule(static) reduction(+ : sum) if (slices > 16)
    for (int64_t s = 0; s < slices; s++) {
        int64_t at = s * TR_SLICE, count = n - at < TR_SLICE ? n - at : TR_SLICE;
        sum += sum_words((uint64_t)(first + at), bytes + 4 * at, count);
    }
    return sum;
}

uint64_t tr_checksum_cover(int64_t first, int64_t n) {
    return tr_mix64((uint64_t)first + K) - tr_mix64((uint64_t)(first + n) + K);
}

/* One box of a run: `data` holds it row-major. Trailing dimensions that the box fills make one
 * stretch of consecutive elements; an odometer walks the dimensions before them. */
static void sum_box(const tr_tensor_info *info, const tr_box *box, const float *data, uint64_t *sum,
                    uint64_t *cover) {
    int inner = box->ndim - 1;
    int64_t stretch = box->extent[inner];
    while (inner > 0 && box->extent[inner] == info->shape[inner]) stretch *= box->extent[--inner];
    int64_t stretches = tr_box_elems(box) / stretch, place[TR_MAX_DIM] = {0};
    for (int64_t s = 0; s < stretches; s++) {
        int64_t index = 0;
        for (int d = 0; d < box->ndim; d++)
            index = index * info->shape[d] + box->offset[d] + place[d];
        *sum += tr_checksum(index, data + s * stretch, stretch);
        *cover += tr_checksum_cover(index, stretch);
        for (int d = inner - 1; d >= 0 && ++place[d] == box->extent[d]; d--) place[d] = 0;
    }
}

void tr_checksum_run(const tr_tensor_info *info, const tr_box *box, int64_t first, int64_t n,
                     const float *data, uint64_t *sum, uint64_t *cover) {
    tr_box cut[2 * TR_MAX_DIM - 1];
    int cuts = n > 0 ? tr_box_cut(box, first, n, cut) : 0;
    for (int c = 0; c < cuts; c++) {
        sum_box(info, &cut[c], data, sum, cover);
        data += tr_box_elems(&cut[c]);
    }
}

uint64_t tr_checksum_state(const tr_progress_state *state) {
    int64_t text = (int64_t)strlen(state->config);
    uint64_t numbers[] = {(uint64_t)state->step,
                          (uint64_t)state->samples,
                          (uint64_t)state->tokens,
                          (uint64_t)state->updates,
                          (uint64_t)state->skipped_in_row,
                          state->data_fingerprint,
                          (uint64_t)text};
    int64_t words = (int64_t)(sizeof numbers / 4);
    uint64_t sum = tr_checksum(0, numbers, words);
    sum += tr_checksum(words, state->config, text / 4);
    uint32_t tail = 0; /* the last bytes of the text, filled up with zeros */
    memcpy(&tail, state->config + text / 4 * 4, (size_t)(text % 4));
    return sum + tr_checksum(words + text / 4, &tail, 1);
}
