/* optimizer.h - from reduced gradients to new weights: AdamW, bucket by bucket. Floor: train. */
#pragma once
#include "model/param.h"

typedef struct {
    double learning_rate, beta1, beta2, epsilon, weight_decay;
    int64_t update; /* 1-based: this update's number, skipped steps not counted */
} tr_optimizer_step;

/* Collective on the groups of the registry's spaces, after tr_gradients_reduce. AdamW on this
 * rank's shard with gradients times grad_scale; then the new weights begin to travel to all ranks.
 */
void tr_optimizer_update(tr_registry *registry, const tr_optimizer_step *step, double grad_scale);
