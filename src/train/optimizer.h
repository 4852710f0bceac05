/* optimizer.h - from local gradients to new weights on every rank: reduce, clip, AdamW, publish.
 * Floor: train. ZeRO stage 1 over the buckets of model/param.h. */
#pragma once
#include "model/param.h"

typedef struct {
    double learning_rate, beta1, beta2, epsilon, weight_decay;
    int64_t update; /* 1-based: this update's number, skipped steps not counted */
} tr_optimizer_step;

/* Collective on the replica groups (and first with last stage for a tied embedding). Afterwards
 * this rank's shard of the gradients is the sum over its group. *sum_squares_p: of the parts this
 * rank counts; a sum over the world counts every parameter once. */
void tr_gradients_reduce(tr_registry *registry, const tr_grid *grid, double *sum_squares_p);

/* Collective likewise. AdamW on this rank's shard with gradients times grad_scale; then every rank
 * gets all weights of its spaces. */
void tr_optimizer_update(tr_registry *registry, const tr_optimizer_step *step, double grad_scale);
