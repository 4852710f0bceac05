/* watch.h - what this rank is doing, for messages; and the end of a job in which a rank stalls.
 * Floor: dist.
 *
 * Each rank marks its place in the grid, its step and its action. Once the watch has started the
 * ranks of a node read each other's marks in memory that they map, and a thread of every rank,
 * which also shows that its process runs, looks at them from time to time. Ranks of other nodes are
 * asked over the network, only when those of the own node have stood still for half the limit.
 *
 * When no rank of the job has made a mark for the whole limit, one of those that run says which
 * rank is the cause and what it was doing, tells the others that run, and all leave with exit code
 * 70; the launcher (mpirun, srun --kill-on-bad-exit=1) then ends the rest. So one mark is owed
 * within the limit by somebody, in whatever takes long: micro-batches, evaluations, transfers from
 * and to a disk. Time in which a watching process was itself stopped (a suspended job) does not
 * count.
 *
 * Process-wide, so that any floor can mark without carrying a grid. */
#pragma once
#include "dist/comm.h"

/* Local. Where this rank is in the grid, as "pipeline 1, data 0"; "" for none. */
void tr_watch_place(const char *place);
/* Local. The step from now on; -1: none. */
void tr_watch_step(int64_t step);
/* Local, a few ns. What is done from now on, as "forward", and with which micro-batch; -1: none. */
void tr_watch_action(const char *action, int64_t micro_batch);
/* Local. The action goes on: within what may take longer than the limit. */
void tr_watch_progress(void);
/* Local. Between true and false this rank waits for others and is not the cause of a stall. */
void tr_watch_wait(bool waits);

/* Local. " (rank 2, pipeline 1, data 0, in `forward of micro-batch 3` of step 17)". */
void tr_watch_here(char *out, size_t bytes);

/* Collective on world. Watches until the stop; seconds 0: does nothing. */
void tr_watch_start(tr_comm *world, int64_t seconds);
/* Collective on world, also after an agreed failure. Nothing if it has not started. */
void tr_watch_stop(void);
