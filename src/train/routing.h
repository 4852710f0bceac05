/* routing.h - log.routing: which experts each token chose, for comparing grids. Floor: train.
 * Each rank writes runs/NAME/routing-RANK.jsonl, one object for each training forward of a MoE
 * layer: step, layer (among the MoE layers), token [N] (its place in the step's batch: sequence * S
 * + position), expert [N*k] (those that compute it; -1: a pad, or dropped), gap [N] (by how much
 * probability the narrowest decision about it was made)
 */
#pragma once
#include "train/batch.h"
#include "train/job.h"

typedef struct tr_routing_log tr_routing_log;

/* Local. Starts an empty file and watches job's model. `batches` says which micro-batch is at work.
 */
tr_status tr_routing_log_open(tr_job *job, const tr_batches *batches, tr_routing_log **log_p);
void tr_routing_log_close(tr_routing_log *log); /* NULL-safe */
