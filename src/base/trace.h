/* trace.h - what this rank did when, as Chrome-trace events that Perfetto opens. Floor: base.
 *
 * Four tracks a rank: actions (forward, backward, ... one after the other), the work inside them
 * (layers), waiting for others, and transfers, from their begin to the moment this rank saw them
 * complete. Events go to memory that is allocated at the start and to the file between steps.
 *
 * Process-wide, so that any floor can mark. While no trace is open a mark costs one test. All
 * functions are local. Names are not copied: literals. */
#pragma once
#include "base/status.h"

typedef struct {
    double seconds;   /* traced */
    double waiting;   /* of that, waiting for others */
    double transfers; /* during which at least one transfer was under way */
    double hidden;    /* of these, not waiting */
    int64_t dropped;  /* events that found no room */
} tr_trace_sums;

/* Creates the file. Time 0 is now: all ranks call it right after a barrier. `place` names the rank
 * in the picture. TR_ERR_IO. */
tr_status tr_trace_open(const char *path, int rank, const char *place);
/* Ends the running action and writes everything. TR_ERR_IO when something could not be written. No
 * trace is open: does nothing. */
tr_status tr_trace_close(void);
/* Writes what has gathered, between steps. */
void tr_trace_flush(void);
/* From the last open until the close. */
tr_trace_sums tr_trace_sum(void);

/* The running action ends and this one begins; index is its micro-batch, or -1. */
void tr_trace_action(const char *name, int64_t index);
/* Work inside the action, as a layer. It nests. */
void tr_trace_work_begin(const char *name, int64_t index);
void tr_trace_work_end(void);
/* This rank stands still until `end`. It does not nest. */
void tr_trace_wait_begin(const char *name);
void tr_trace_wait_end(void);
/* A transfer is under way; bytes that this rank gives or takes. Returns what its end is told. */
int64_t tr_trace_transfer_begin(const char *name, int64_t bytes);
void tr_trace_transfer_end(const char *name, int64_t transfer);
