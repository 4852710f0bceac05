/* batch.c - reads samples and cuts them for this rank. Floor: train. */
#include "train/batch.h"

#include "base/heap.h"
#include "dist/watch.h"
#include "model/sequence.h"

#include <stdlib.h>
#include <string.h>

struct tr_batches {
    const tr_grid *grid;
    tr_sequence cut;
    int64_t m, B, S, S_loc;
    bool documents, reset_positions;
    int32_t *token, *label, *position; /* [m, B, S_loc] */
    uint8_t *valid;
    int32_t *begin;     /* [m, chunks, B, chunk] */
    int64_t *first_key; /* [m, all chunks] */
    /* one whole sample [S] */
    int32_t *input, *target, *document;
    uint8_t *real;
    int64_t now; /* loaded last */
};

/* Chunks of a whole sequence. */
static int64_t chunks_of(const tr_batches *b) {
    return b->cut.rings * b->cut.chunks;
}

tr_batches *tr_batches_create(const tr_grid *grid, const tr_config *config, int64_t m) {
    tr_batches *b = tr_heap_alloc(1, sizeof *b);
    *b = (tr_batches){.grid = grid,
                      .m = m,
                      .B = config->training.micro_batch_size,
                      .S = config->data.sequence_length,
                      .documents = config->data.document_mask,
                      .reset_positions = config->data.reset_position_ids};
    b->cut = tr_sequence_of(&grid->at.shape, b->S);
    b->S_loc = b->cut.S_loc;
    int64_t n = m * b->B * b->S_loc;
    b->token = tr_heap_alloc(n, sizeof *b->token);
    b->label = tr_heap_alloc(n, sizeof *b->label);
    b->position = tr_heap_alloc(n, sizeof *b->position);
    b->valid = tr_heap_alloc(n, sizeof *b->valid);
    b->begin = tr_heap_alloc(m * b->B * b->cut.S_ring, sizeof *b->begin);
    b->first_key = tr_heap_alloc(m * chunks_of(b), sizeof *b->first_key);
    b->input = tr_heap_alloc(b->S, sizeof *b->input);
    b->target = tr_heap_alloc(b->S, sizeof *b->target);
    b->document = tr_heap_alloc(b->S, sizeof *b->document);
    b->real = tr_heap_alloc(b->S, sizeof *b->real);
    return b;
}

void tr_batches_destroy(tr_batches *b) {
    if (!b) return;
    free(b->token);
    free(b->label);
    free(b->position);
    free(b->valid);
    free(b->begin);
    free(b->first_key);
    free(b->input);
    free(b->target);
    free(b->document);
    free(b->real);
    free(b);
}

/* Sequence j of this rank's m*B: this context rank's positions of the sample just read. */
static int64_t place(tr_batches *b, int64_t j, bool pad) {
    int64_t labels = 0, at = j * b->S_loc;
    for (int64_t i = 0; i < b->S_loc; i++) {
        int64_t from = tr_sequence_position(&b->cut, b->grid->at.c, i);
        b->token[at + i] = pad ? 0 : b->input[from];
        b->label[at + i] = pad ? -1 : b->target[from];
        b->valid[at + i] = pad ? 0 : b->real[from];
        b->position[at + i] = (int32_t)from - (b->reset_positions ? b->document[from] : 0);
        labels += b->label[at + i] >= 0;
    }
    return labels;
}

/* Its documents, of the positions of this ring place, and what they let chunks see. */
static void place_documents(tr_batches *b, int64_t j) {
    const tr_sequence *x = &b->cut;
    int64_t i = j / b->B, row = j % b->B, ring = b->grid->at.c / x->heads;
    int32_t *begin = b->begin + i * b->B * x->S_ring;
    int64_t *first_key = b->first_key + i * chunks_of(b);
    for (int64_t k = 0; k < x->S_ring; k++)
        begin[(k / x->chunk * b->B + row) * x->chunk + k % x->chunk] =
            b->document[tr_sequence_ring_position(x, (int)ring, k)];
    for (int64_t k = 0; k < chunks_of(b); k++) {
        int64_t first = b->document[k * x->chunk];
        if (row == 0 || first < first_key[k]) first_key[k] = first;
    }
}

tr_status tr_batches_read(tr_batches *b, const tr_dataset *dataset, int64_t first, int64_t count,
                          int64_t *labels_p) {
    int64_t labels = 0, mine = b->grid->at.d * b->m * b->B;
    for (int64_t j = 0; j < b->m * b->B; j++) {
        bool pad = mine + j >= count;
        int64_t at = first + mine + j;
        tr_watch_progress();
        if (!pad) TR_TRY(tr_dataset_sample(dataset, at, b->input, b->target, b->real, NULL));
        if (b->documents && pad) memset(b->document, 0, (size_t)b->S * sizeof *b->document);
        if (b->documents && !pad) tr_dataset_documents(dataset, at, b->input, b->document);
        labels += place(b, j, pad);
        if (b->documents) place_documents(b, j);
    }
    /* all stages and tensor ranks have read the same */
    *labels_p = b->grid->at.p == 0 && b->grid->at.t == 0 ? labels : 0;
    return TR_OK;
}

void tr_batches_load(void *self, int64_t i, tr_micro_batch *batch) {
    tr_batches *b = self;
    int64_t at = i * b->B * b->S_loc;
    b->now = i;
    *batch =
        (tr_micro_batch){.token = b->token + at, .label = b->label + at, .valid = b->valid + at};
    if (b->reset_positions) batch->position = b->position + at;
    if (!b->documents) return;
    batch->begin = b->begin + i * b->B * b->cut.S_ring;
    batch->first_key = b->first_key + i * chunks_of(b);
}

int64_t tr_batches_rows(const tr_batches *b) {
    return b->B * b->S_loc / b->grid->at.shape.tensor;
}

int64_t tr_batches_token(const tr_batches *b, int64_t n) {
    const tr_grid_place *at = &b->grid->at;
    int64_t row = at->t * tr_batches_rows(b) + n;
    int64_t sequence = (at->d * b->m + b->now) * b->B + row / b->S_loc;
    return sequence * b->S + tr_sequence_position(&b->cut, at->c, row % b->S_loc);
}
