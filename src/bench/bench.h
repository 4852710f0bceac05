/* bench.h - `trireme bench`: speeds and memory as ratios of what the same machine reaches in the
 * same run, in one table with the targets. Floor: bench. */
#pragma once
#include "dist/comm.h"

/* Collective on world. `what`: "kernels", "comm", "train", or NULL for these
 * three; "rows". `sets` override the
 * settings of the model that is measured, as in `train`; all sizes follow from it. Prints rows on
 * rank 0 as they are measured; a missed target is no error. TR_ERR_USAGE; TR_ERR_IO (the files of
 * the checkpoint rows); TR_ERR_INTERNAL when a step is not finite. */
tr_status tr_bench(tr_comm *world, const char *what, int nsets, char *const *sets);
