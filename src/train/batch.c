/* batch.c - reads samples and cuts them for this rank. Floor: train. */
#include "train/batch.h"

#include "dist/watch.h"
#include "model/layers.h"

#include <stdlib.h>
#include <string.h>

struct tr_batches {
    const tr_grid *grid;
    int64_t m, B, S, S_loc;
    int32_t *token, *label; /* [m, B, S_loc] */
    uint8_t *valid;
    int32_t *input, *target; /* [S] one whole sample */
    uint8_t *real;
    int64_t now; /* loaded last */
};

tr_batches *tr_batches_create(const tr_grid *grid, int64_t m, int64_t B, int64_t S) {
    tr_batches *b = calloc(1, sizeof *b);
    if (!b) abort();
    *b = (tr_batches){.grid = grid, .m = m, .B = B, .S = S, .S_loc = S / grid->at.shape.context};
    size_t n = (size_t)(m * B * b->S_loc), s = (size_t)S;
    b->token = malloc(n * sizeof *b->token + 1);
    b->label = malloc(n * sizeof *b->label + 1);
    b->valid = malloc(n + 1);
    b->input = malloc(s * sizeof *b->input + 1);
    b->target = malloc(s * sizeof *b->target + 1);
    b->real = malloc(s + 1);
    if (!b->token || !b->label || !b->valid || !b->input || !b->target || !b->real) abort();
    return b;
}

void tr_batches_destroy(tr_batches *b) {
    if (!b) return;
    free(b->token);
    free(b->label);
    free(b->valid);
    free(b->input);
    free(b->target);
    free(b->real);
    free(b);
}

/* Sequence j of this rank's m*B: this context rank's positions of the sample just read. */
static int64_t place(tr_batches *b, int64_t j, bool pad) {
    int64_t labels = 0, at = j * b->S_loc;
    for (int64_t i = 0; i < b->S_loc; i++) {
        int64_t from = tr_ring_position(b->S, b->grid->at.shape.context, b->grid->at.c, i);
        b->token[at + i] = pad ? 0 : b->input[from];
        b->label[at + i] = pad ? -1 : b->target[from];
        b->valid[at + i] = pad ? 0 : b->real[from];
        labels += b->label[at + i] >= 0;
    }
    return labels;
}

tr_status tr_batches_read(tr_batches *b, const tr_dataset *dataset, int64_t first, int64_t count,
                          int64_t *labels_p) {
    int64_t labels = 0, mine = b->grid->at.d * b->m * b->B;
    for (int64_t j = 0; j < b->m * b->B; j++) {
        bool pad = mine + j >= count;
        tr_watch_progress();
        if (!pad)
            TR_TRY(
                tr_dataset_sample(dataset, first + mine + j, b->input, b->target, b->real, NULL));
        labels += place(b, j, pad);
    }
    /* all stages and tensor ranks have read the same */
    *labels_p = b->grid->at.p == 0 && b->grid->at.t == 0 ? labels : 0;
    return TR_OK;
}

void tr_batches_load(void *self, int64_t i, tr_micro_batch *batch) {
    tr_batches *b = self;
    int64_t at = i * b->B * b->S_loc;
    b->now = i;
    *batch = (tr_micro_batch){b->token + at, b->label + at, b->valid + at};
}

int64_t tr_batches_rows(const tr_batches *b) {
    return b->B * b->S_loc / b->grid->at.shape.tensor;
}

int64_t tr_batches_token(const tr_batches *b, int64_t n) {
    const tr_grid_place *at = &b->grid->at;
    int64_t row = at->t * tr_batches_rows(b) + n;
    int64_t sequence = (at->d * b->m + b->now) * b->B + row / b->S_loc;
    return sequence * b->S + tr_ring_position(b->S, at->shape.context, at->c, row % b->S_loc);
}
