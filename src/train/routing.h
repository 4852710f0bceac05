/* routing.h - log.routing: which experts each token chose, for comparing grids. Floor: train.
 * Each rank writes runs/NAME/routing-RANK.jsonl, one object for each training forward of a MoE
 * layer: step, layer (among the MoE layers), token [N_loc] (its place in the step's batch: sequence
 * * S + position), expert [N_loc*k], gap [N_loc] (probability of the last chosen less that of the
 * best not chosen)
 */
#pragma once
#include "train/batch.h"
#include "train/job.h"

typedef struct tr_routing_log tr_routing_log;

/* Local. Starts an empty file and watches job's model. `batches` says which micro-batch is at work.
 */
tr_status tr_routing_log_open(tr_job *job, const tr_batches *batches, tr_routing_log **log_p);
void tr_routing_log_close(tr_routing_log *log); /* NULL-safe */

/* Local. Probability of the last of the k chosen experts less that of the best one left; 1 when all
 * E are chosen. */
double tr_routing_gap(const float *prob, int64_t E, const int32_t *index, int64_t k);
