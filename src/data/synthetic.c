/* synthetic.c - draws samples. Floor: data. */
#include "data/synthetic.h"

#include "base/rng.h"

#include <stdbool.h>

static int64_t draw_token(uint64_t seed, uint64_t stream, int64_t i, int64_t V, int64_t pad_id) {
    double u = tr_random_uniform(seed, stream, (uint64_t)i);
    int64_t token = (int64_t)(u * u * (double)V);
    return token == pad_id ? (token + 1) % V : token;
}

void tr_synthetic_sample(uint64_t seed, int64_t position, int64_t S, int64_t vocab_size,
                         int64_t pad_id, int32_t *input, int32_t *label, uint8_t *valid) {
    uint64_t stream = tr_stream_of_name("data.synthetic") + 2 * (uint64_t)position;
    int64_t length = S + 1; /* tokens before the pads */
    if (pad_id >= 0 && position % 3 == 2) length -= S / 4;
    double hidden = 0.1 * (double)(position % 4);
    for (int64_t i = 0; i <= S; i++) {
        int64_t token = i < length ? draw_token(seed, stream, i, vocab_size, pad_id) : pad_id;
        bool pad = token == pad_id;
        if (i > 0)
            label[i - 1] = pad || tr_random_uniform(seed, stream + 1, (uint64_t)i) < hidden
                               ? -1
                               : (int32_t)token;
        if (i == S) break;
        input[i] = (int32_t)token;
        valid[i] = !pad;
    }
}

void tr_synthetic_documents(uint64_t seed, int64_t position, int64_t S, int32_t *begin) {
    uint64_t stream = tr_stream_of_name("data.synthetic.documents") + (uint64_t)position;
    double rate = 2.0 * (double)(position % 4) / (double)S; /* 0, 2, 4 or 6 ends in a sample */
    int32_t here = 0;
    for (int64_t i = 0; i < S; i++) {
        if (i > 0 && tr_random_uniform(seed, stream, (uint64_t)i) < rate) here = (int32_t)i;
        begin[i] = here;
    }
}
