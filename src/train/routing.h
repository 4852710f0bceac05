/* routing.h - log.routing: which experts each token chose, for comparing grids. Floor: train.
 * Each rank writes runs/NAME/routing-RANK.jsonl, one object for each training forward of a MoE
 * layer: step, layer (among the MoE layers), token [N_loc] (its place in the step's batch: sequence
 * * S + position), expert [N_loc*k], gap [N_loc] (tr_routing_gap). */
#pragma once
#include "train/batch.h"
#include "train/job.h"

typedef struct tr_routing_log tr_routing_log;

/* Local. Starts an empty file and watches job's model. `batches` says which micro-batch is at work.
 */
tr_status tr_routing_log_open(tr_job *job, const tr_batches *batches, tr_routing_log **log_p);
void tr_routing_log_close(tr_routing_log *log); /* NULL-safe */

/* Local. How near a token's choice index [k] was to another: probability of the last chosen expert
 * less that of the best one left in its groups, or of the last of its groups' best expert less that
 * of the best in another group, whichever is less; 1 when there was nothing to choose. */
double tr_routing_gap(const tr_model_config *config, const float *prob /* [E] */,
                      const int32_t *index);
