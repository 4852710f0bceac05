/* step.h - one training step: from the next samples to reduced gradients, and from these to new
 * weights. Floor: train. Whoever trains (trainer.h) or proves a grid (verify.h) runs these two. */
#pragma once
#include "train/batch.h"
#include "train/job.h"

typedef struct {
    double loss; /* mean cross-entropy of the labelled tokens of the global batch; 0 without any */
    double aux_loss, z_loss, grad_norm;
    int64_t labels;            /* labelled tokens of the global batch */
    const double *expert_load; /* [MoE layers, experts] of the whole step; borrowed */
} tr_step_result;

typedef struct tr_step tr_step;

/* Local, after tr_job_open_pipeline and with job->train open. */
tr_step *tr_step_create(tr_job *job);
void tr_step_destroy(tr_step *step); /* NULL-safe */
/* The micro-batches it works on. */
const tr_batches *tr_step_batches(const tr_step *step);

/* Local. From now on `begins` is told of each micro-batch that is loaded, for showing progress. */
void tr_step_watch(tr_step *step, void (*begins)(void *self, int64_t micro_batch), void *self);

/* Collective on world. Forwards and backwards over the samples from job->at.samples; afterwards
 * each rank's shard of the gradients is the sum over all ranks. The same result everywhere.
 * TR_ERR_DATA or TR_ERR_IO when samples cannot be read. */
tr_status tr_step_gradients(tr_step *step, tr_step_result *result_p);

/* Collective on world. Clips and updates the weights, unless the gradient is not finite or there
 * was nothing to learn from (then it returns false); moves job->at to the next step. */
bool tr_step_update(tr_step *step, const tr_step_result *result, double learning_rate);
