/* verify.h - proves that this grid computes what one rank computes. Floor: train.
 *
 * Two training steps run on the grid and, by the same code, on rank 0 alone without any sharding.
 * Compared are: the initial weights; of each step loss, auxiliary loss, z-loss and the norm of the
 * gradient; and of each parameter gradient and new weight, as ||grid - one|| / ||one|| (of
 * gradients far smaller than others see comparison.c).
 *
 * Both sides begin each step with the same weights, and one rank updates with the grid's gradients
 * (once they are compared): so the limits of one step from the same weights hold for both steps,
 * and a weight's difference tells of the update alone (clipping, AdamW, shards, gathering). Left to
 * its own gradients Adam would magnify rounding without bound where a gradient is next to nothing.
 */
#pragma once
#include "train/job.h"

typedef struct {
    bool full; /* the config itself, with its data if they can be read; else its twin (twin.h) */
    bool all;  /* print every parameter, not only the worst */
} tr_verify_options;

/* Collective on world. Refuses what tr_train would refuse. Prints the comparison on rank 0;
 * TR_ERR_INTERNAL when something is off by more than its limit. Writes no file.
 * For tests of this command, a fault on one rank of the grid, which must be found:
 * TRIREME_VERIFY_BREAK=NAME doubles a part of that parameter's gradient,
 * TRIREME_VERIFY_BREAK=update lets the last rank update by a learning rate that is 1 % too high. */
tr_status tr_verify(const tr_config *config, tr_comm *world, const tr_verify_options *options);
