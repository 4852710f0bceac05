/* batch.h - the micro-batches of one step on this rank. Floor: train.
 *
 * Micro-batch i of a step holds its samples [i*size, (i+1)*size); data rank d takes the run of m
 * micro-batches from d*m; context rank c takes its part of every sequence (model/sequence.h), which
 * pipeline stages and tensor ranks share. */
#pragma once
#include "data/dataset.h"
#include "model/model.h"

typedef struct tr_batches tr_batches;

/* Local. Room for m micro-batches of training's size. */
tr_batches *tr_batches_create(const tr_grid *grid, const tr_config *config, int64_t m);
void tr_batches_destroy(tr_batches *batches); /* NULL-safe */

/* Local. Reads this rank's share of the samples [first, first + count); those beyond count
 * (evaluation of a count that does not divide) become pads. *labels_p: labelled tokens read; a sum
 * over the world counts each once. */
tr_status tr_batches_read(tr_batches *batches, const tr_dataset *dataset, int64_t first,
                          int64_t count, int64_t *labels_p);

/* A tr_load_micro_batch: self is the tr_batches. */
void tr_batches_load(void *self, int64_t i, tr_micro_batch *batch);
/* Local. Rows of a micro-batch between layers on this rank: its tensor group shares them. */
int64_t tr_batches_rows(const tr_batches *batches);
/* Local. Row n of these in the micro-batch loaded last: its place in the step's batch, sequence * S
 * + position. */
int64_t tr_batches_token(const tr_batches *batches, int64_t n);
