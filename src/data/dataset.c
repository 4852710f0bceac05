/* dataset.c - from a position to a sample. Floor: data. */
#include "data/dataset.h"

#include "base/heap.h"
#include "base/log.h"
#include "base/rng.h"
#include "data/mixture.h"
#include "data/permute.h"
#include "data/synthetic.h"
#include "data/tokens.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum {
    READ_TOKENS = 512, /* widened at a time, on the stack */
    HASH_BLOCK_BYTES = 65536,
    HASH_BLOCKS = 1024,
    LARGE_BYTES = HASH_BLOCKS * HASH_BLOCK_BYTES /* from here on hashed by evenly spaced blocks */
};

typedef struct {
    tr_tokens tokens;
    tr_file_map mask; /* bytes NULL: none */
    int64_t samples;
    int64_t first; /* number of its first sample in the set */
} data_file;

struct tr_dataset {
    /* declared */
    int64_t sequence_length, vocab_size, pad_id, end_of_document;
    bool shuffle, synthetic, documents;
    uint64_t seed;
    double *weights; /* [count]; NULL: none */
    /* derived */
    int64_t count, samples, tokens;
    data_file *files; /* [count] */
    tr_mixture mixture;
    uint64_t order_stream;
};

static tr_status check_options(const tr_dataset_options *o) {
    if (!o->synthetic && o->files->count < 1)
        return tr_fail(TR_ERR_USAGE, "the list of data files is empty; name at least one");
    if (o->sequence_length < 1)
        return tr_fail(TR_ERR_USAGE, "sequence_length is %" PRId64 "; it must be at least 1",
                       o->sequence_length);
    if (o->vocab_size < 1 || o->vocab_size > INT32_MAX)
        return tr_fail(TR_ERR_USAGE, "vocab_size is %" PRId64 "; it must be from 1 to %d",
                       o->vocab_size, INT32_MAX);
    if (o->pad_id < -1 || o->pad_id >= o->vocab_size)
        return tr_fail(TR_ERR_USAGE,
                       "pad_id is %" PRId64 "; it must be below vocab_size %" PRId64
                       ", or -1 for none",
                       o->pad_id, o->vocab_size);
    return TR_OK;
}

/* Weights: for all files or for none, and none so small that its file would never be read. */
static tr_status check_weights(const tr_data_list *list, bool *weighted_p) {
    double sum = 0;
    int64_t given = 0;
    for (int64_t f = 0; f < list->count; f++) {
        const tr_data_entry *e = &list->entries[f];
        if (e->weight < 0) continue;
        given++;
        sum += e->weight;
        if (!isfinite(e->weight) || e->weight == 0)
            return tr_fail(TR_ERR_USAGE,
                           "%s: weight %g; it must be above 0 and finite (leave out a file that is "
                           "not to be read)",
                           e->path, e->weight);
    }
    for (int64_t f = 0; f < list->count && given > 0; f++) {
        const tr_data_entry *e = &list->entries[f];
        if (!(e->weight >= 0))
            return tr_fail(TR_ERR_USAGE,
                           "%s has no weight while other files have one; give a weight to all or "
                           "to none",
                           e->path);
        if (e->weight / sum * TR_MIXTURE_MAX_PERIOD < 1)
            return tr_fail(TR_ERR_USAGE,
                           "%s: weight %g is less than 1/%d of all weights; raise it or leave the "
                           "file out",
                           e->path, e->weight, TR_MIXTURE_MAX_PERIOD);
    }
    *weighted_p = given > 0;
    return TR_OK;
}

static tr_status open_file(const tr_dataset_options *o, const char *path, data_file *file) {
    tr_tokens *t = &file->tokens;
    TR_TRY(tr_tokens_open(path, t));
    if (t->format == TR_TOKENS_BYTES && o->vocab_size < 256)
        return tr_fail(TR_ERR_USAGE,
                       "%s: read as raw bytes, which needs vocab_size 256 or more, not %" PRId64,
                       path, o->vocab_size);
    if (t->count <= o->sequence_length)
        return tr_fail(TR_ERR_DATA,
                       "%s: %" PRId64 " tokens, but a sample of sequence_length %" PRId64
                       " needs %" PRId64 "; give more text or a shorter sequence_length",
                       path, t->count, o->sequence_length, o->sequence_length + 1);
    if (t->type == TR_TOKEN_U16 && o->vocab_size > 65536)
        tr_warn("%s: ids of 16 bits cannot reach all of vocab_size %" PRId64
                "; make sure that none were cut when it was written",
                path, o->vocab_size);
    if (o->mask) TR_TRY(tr_tokens_open_mask(t, &file->mask));
    if (o->documents && o->end_of_document < 0 && t->documents < 0)
        return tr_fail(
            TR_ERR_USAGE,
            "%s: its format (%s) does not say where documents end; set data.end_of_document to "
            "the token that ends them, or build Megatron files",
            path, tr_tokens_format_name(t->format));
    if (t->map.size > LARGE_BYTES) tr_file_map_expect_jumps(&t->map);
    file->samples = (t->count - 1) / o->sequence_length;
    return TR_OK;
}

static tr_status open_files(const tr_dataset_options *o, tr_dataset *d) {
    bool weighted = false;
    TR_TRY(check_options(o));
    if (d->synthetic) return TR_OK;
    TR_TRY(check_weights(o->files, &weighted));
    for (int64_t f = 0; f < d->count; f++) {
        data_file *file = &d->files[f];
        TR_TRY(open_file(o, o->files->entries[f].path, file));
        file->first = d->samples;
        d->samples += file->samples;
        d->tokens += file->tokens.count;
    }
    if (weighted) {
        d->weights = tr_heap_alloc(d->count, sizeof *d->weights);
        for (int64_t f = 0; f < d->count; f++) d->weights[f] = o->files->entries[f].weight;
        tr_mixture_init(d->weights, d->count, d->seed, &d->mixture);
    }
    return TR_OK;
}

tr_status tr_dataset_open(const tr_dataset_options *options, tr_dataset **dataset_p) {
    tr_dataset *d = tr_heap_alloc(1, sizeof *d);
    *d = (tr_dataset){.sequence_length = options->sequence_length,
                      .vocab_size = options->vocab_size,
                      .pad_id = options->pad_id,
                      .documents = options->documents,
                      .end_of_document = options->end_of_document,
                      .shuffle = options->shuffle,
                      .synthetic = options->synthetic,
                      .samples = options->synthetic ? INT64_MAX : 0,
                      .seed = options->seed,
                      .count = options->synthetic ? 0 : options->files->count,
                      .order_stream = tr_stream_of_name("data.order")};
    d->files = tr_heap_alloc(d->count, sizeof *d->files);
    tr_status status = open_files(options, d);
    if (status == TR_OK)
        *dataset_p = d;
    else
        tr_dataset_close(d);
    return status;
}

void tr_dataset_close(tr_dataset *dataset) {
    if (!dataset) return;
    for (int64_t f = 0; f < dataset->count; f++) {
        tr_tokens_close(&dataset->files[f].tokens);
        tr_file_map_close(&dataset->files[f].mask);
    }
    tr_mixture_fini(&dataset->mixture);
    free(dataset->weights);
    free(dataset->files);
    free(dataset);
}

int64_t tr_dataset_samples(const tr_dataset *dataset) {
    return dataset->samples;
}
int64_t tr_dataset_tokens(const tr_dataset *dataset) {
    return dataset->tokens;
}

static uint64_t hash_bytes(const uint8_t *bytes, int64_t size, uint64_t seed) {
    if (size <= LARGE_BYTES) return XXH3_64bits_withSeed(bytes, (size_t)size, seed);
    for (int64_t i = 0; i < HASH_BLOCKS; i++) {
        int64_t at = (size - HASH_BLOCK_BYTES) / (HASH_BLOCKS - 1) * i;
        if (i == HASH_BLOCKS - 1) at = size - HASH_BLOCK_BYTES;
        seed = XXH3_64bits_withSeed(bytes + at, HASH_BLOCK_BYTES, seed);
    }
    return tr_mix64(seed ^ (uint64_t)size);
}

uint64_t tr_dataset_fingerprint(const tr_dataset *dataset) {
    uint64_t h = tr_stream_of_name("data.fingerprint");
    for (int64_t f = 0; f < dataset->count; f++) {
        const data_file *file = &dataset->files[f];
        const tr_tokens *t = &file->tokens;
        h = tr_mix64(h ^ (uint64_t)t->type);
        h = hash_bytes((const uint8_t *)t->runs, (t->nruns + 1) * (int64_t)sizeof *t->runs, h);
        h = hash_bytes(t->map.bytes, t->map.size, h);
        if (file->mask.bytes) h = hash_bytes(file->mask.bytes, file->mask.size, ~h);
        if (dataset->documents && dataset->end_of_document < 0)
            h = hash_bytes(t->index.bytes, t->index.size, h + 1);
    }
    if (dataset->weights)
        h = hash_bytes((const uint8_t *)dataset->weights,
                       dataset->count * (int64_t)sizeof *dataset->weights, h);
    return h;
}

/* Place `i` of `epoch` in the order numbered `order` over n samples. */
static int64_t shuffled(const tr_dataset *d, int64_t order, int64_t epoch, int64_t n, int64_t i) {
    if (!d->shuffle) return i;
    uint64_t key = tr_random_u64(d->seed, d->order_stream + (uint64_t)order, (uint64_t)epoch);
    return tr_permute(key, n, i);
}

/* The file that holds sample `id` of the set. */
static int64_t find_file(const tr_dataset *d, int64_t id) {
    int64_t low = 0, high = d->count - 1;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (d->files[middle].first <= id)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Without weights one order runs over the samples of all files; with weights each file has its own.
 */
static const data_file *locate(const tr_dataset *d, int64_t position, int64_t *id_p) {
    int64_t f, own;
    if (d->synthetic) {
        *id_p = position;
        return NULL;
    }
    if (d->weights) {
        tr_mixture_locate(&d->mixture, position, &f, &own);
        int64_t n = d->files[f].samples;
        *id_p = d->files[f].first + shuffled(d, f + 1, own / n, n, own % n);
    } else {
        *id_p = shuffled(d, 0, position / d->samples, d->samples, position % d->samples);
        f = find_file(d, *id_p);
    }
    return &d->files[f];
}

int64_t tr_dataset_id(const tr_dataset *dataset, int64_t position) {
    int64_t id;
    locate(dataset, position, &id);
    return id;
}

tr_status tr_dataset_sample(const tr_dataset *dataset, int64_t position, int32_t *input,
                            int32_t *label, uint8_t *valid, int64_t *id_p) {
    if (position < 0)
        return tr_fail(TR_ERR_INTERNAL, "sample at position %" PRId64 " asked for", position);
    int64_t S = dataset->sequence_length, id, ids[READ_TOKENS];
    const data_file *file = locate(dataset, position, &id);
    if (id_p) *id_p = id;
    if (dataset->synthetic) {
        tr_synthetic_sample(dataset->seed, position, S, dataset->vocab_size, dataset->pad_id, input,
                            label, valid);
        return TR_OK;
    }
    const tr_tokens *t = &file->tokens;
    int64_t start = (id - file->first) * S;
    for (int64_t done = 0; done <= S; done += READ_TOKENS) {
        int64_t n = S + 1 - done < READ_TOKENS ? S + 1 - done : READ_TOKENS;
        tr_tokens_read(t, start + done, n, ids);
        for (int64_t j = 0; j < n; j++) {
            int64_t i = done + j;
            if (ids[j] < 0 || ids[j] >= dataset->vocab_size)
                return tr_fail(TR_ERR_DATA,
                               "%s: token %" PRId64 " at position %" PRId64
                               " is not in a vocabulary of %" PRId64
                               "; set model.vocab_size to what the file was made with",
                               t->path, ids[j], start + i, dataset->vocab_size);
            bool pad = ids[j] == dataset->pad_id;
            bool hidden = pad || (file->mask.bytes && !file->mask.bytes[start + i]);
            if (i > 0) label[i - 1] = hidden || !valid[i - 1] ? -1 : (int32_t)ids[j];
            if (i < S) {
                input[i] = (int32_t)ids[j];
                valid[i] = !pad;
            }
        }
    }
    return TR_OK;
}

void tr_dataset_documents(const tr_dataset *dataset, int64_t position, const int32_t *input,
                          int32_t *begin) {
    int64_t S = dataset->sequence_length, id;
    const data_file *file = locate(dataset, position, &id);
    if (dataset->synthetic) {
        tr_synthetic_documents(dataset->seed, position, S, begin);
    } else if (dataset->end_of_document < 0) {
        tr_tokens_documents(&file->tokens, (id - file->first) * S, S, begin);
    } else {
        int32_t here = 0;
        for (int64_t i = 0; i < S; i++) {
            begin[i] = here;
            if (input[i] == dataset->end_of_document) here = (int32_t)i + 1;
        }
    }
}
