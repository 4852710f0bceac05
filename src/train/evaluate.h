/* evaluate.h - the loss on the validation data. Floor: train. */
#pragma once
#include "train/job.h"

typedef struct {
    double loss;          /* mean cross-entropy, nats a labelled token */
    double bits_per_byte; /* loss / ln 2 / data.bytes_per_token */
    int64_t tokens;       /* labelled tokens it is the mean of */
} tr_evaluation;

/* Collective on world. evaluate_batches * global_batch_size sequences from the start of the
 * validation data (all of them, if there are fewer): the same on every grid. Changes no weight and
 * no progress. */
tr_status tr_evaluate(tr_job *job, tr_evaluation *evaluation_p);
