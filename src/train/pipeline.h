/* pipeline.h - runs the action list of this stage. Floor: train.
 * Receives are begun before the compute that precedes them, sends are ended when their buffer is
 * needed again, so transfers overlap compute. */
#pragma once
#include "model/model.h"
#include "train/schedule.h"

typedef struct tr_pipeline tr_pipeline;

/* Gives micro-batch i (of this data rank's, 0-based) as host arrays valid until the next call. */
typedef void (*tr_load_micro_batch)(void *self, int64_t i, tr_micro_batch *batch);

/* Local. Lists for m micro-batches a rank and step; proves them. Shapes the model's slots. `config`
 * is borrowed. */
tr_status tr_pipeline_create(tr_model *model, const tr_grid *grid, const tr_config *config,
                             int64_t m, int64_t B, int64_t S, tr_pipeline **pipeline_p);
void tr_pipeline_destroy(tr_pipeline *pipeline); /* NULL-safe */

/* Told of each action when it is done: when it began and ended, in seconds of CLOCK_MONOTONIC. */
typedef void (*tr_pipeline_watcher)(void *self, const tr_action *action, double begin, double end);
/* Local. From now on `watch` sees every action; NULL ends it. */
void tr_pipeline_watch(tr_pipeline *pipeline, tr_pipeline_watcher watch, void *self);

/* Collective on the pipeline group, and within each stage on its replica group. One step's forwards
 * and backwards; gradients and sums are left in the model. */
void tr_pipeline_train(tr_pipeline *pipeline, tr_load_micro_batch load, void *self);
/* Likewise. Forwards of m micro-batches without training. */
void tr_pipeline_evaluate(tr_pipeline *pipeline, int64_t m, tr_load_micro_batch load, void *self);
