/* gradient.h - the gradients of a step: added up on each rank, then over the ranks that hold the
 * same weights. Floor: model.
 *
 * Nobody clears them: the first contribution to each overwrites it. Where each rank keeps all of
 * them (ZeRO 1) a unit is reduced once a step, beginning as soon as its last micro-batch is
 * complete, while the backward of earlier layers goes on. From stage 2 on a rank keeps the sum of
 * its part alone: a unit is reduced in every micro-batch (so often the traffic), out of berths that
 * the next units then use. Reductions begin in the order in which units are completed, which is the
 * same on all ranks of a stage, for they run the same actions. */
#pragma once
#include "model/param.h"

/* Local. Before the first backward of a step; micro_batches: of this rank. */
void tr_gradients_begin(tr_registry *registry, int64_t micro_batches);

/* Where a contribution, which covers all of a parameter, goes: at = beta * at + contribution. */
typedef struct {
    float *at;
    float beta;
} tr_gradient;
/* Collective on the space's group from ZeRO 2 on, else local, as is tr_gradient_sum: that one is
 * for kernels that only add, and is cleared if nothing is there. */
tr_gradient tr_gradient_take(tr_registry *registry, tr_param *param);
float *tr_gradient_sum(tr_registry *registry, tr_stream *stream, tr_param *param);

/* Collective on the unit's groups. A micro-batch has contributed all it has to a unit's gradients,
 * but for vectors. Called tr_unit.completions times a micro-batch. */
void tr_gradients_made(tr_registry *registry, tr_stream *stream, int64_t unit);

/* Collective on the groups (and first with last stage for a tied embedding). After the last
 * backward: ends all reductions, begins those that have not. Then this rank's parts of the
 * gradients are the sums over their groups. *sum_squares_p: of the parts this rank counts; a sum
 * over the world counts every parameter once. */
void tr_gradients_reduce(tr_registry *registry, const tr_grid *grid, double *sum_squares_p);
