/* tracing.h - log.trace: runs/NAME/trace-RANK.json of a run's first steps, and what they come to.
 * Floor: train. Marks are made where the work is (base/trace.h). */
#pragma once
#include "train/job.h"

/* Collective on world. Opens the files; the times of all ranks count from here. */
tr_status tr_tracing_open(const tr_job *job);
/* Collective on world. Closes the files; rank 0 says how much of the time ranks waited and how much
 * of the transfers was hidden. */
tr_status tr_tracing_close(const tr_job *job);
