/* schedule.h - what each pipeline stage does in which order: a list of actions made by one function
 * per kind, proved by one checker, run by one executor (pipeline.h). Floor: train. Pure and local.
 *
 * A send begins at its place in the list and does not wait; its buffer is free again when the peer
 * has received. A receive waits for its message. A micro-batch lives in slot mb % slots from its
 * forward (or the receive before it) until its backward (and the send after it).
 * Sources: GPipe (Huang et al. 2019); 1F1B (PipeDream-Flush, Narayanan et al. 2021). */
#pragma once
#include "base/status.h"
#include "config/config.h"

typedef enum {
    TR_RECV_FORWARD, /* boundary input from the stage before */
    TR_FORWARD,
    TR_SEND_FORWARD,  /* boundary output to the stage after */
    TR_RECV_BACKWARD, /* gradient of the output from the stage after */
    TR_BACKWARD,
    TR_SEND_BACKWARD, /* gradient of the input to the stage before */
    TR_ACTION_KINDS
} tr_action_kind;

typedef struct {
    tr_action_kind kind;
    int64_t micro_batch;
} tr_action;

typedef struct {
    tr_action *actions;
    int64_t count;
    int64_t slots; /* micro-batches in flight at most */
} tr_schedule;

/* The list of `stage` of `stages` for m >= 0 micro-batches. forward_only: evaluation. */
tr_schedule tr_schedule_create(tr_schedule_kind kind, int64_t stages, int64_t stage, int64_t m,
                               bool forward_only);
void tr_schedule_free(tr_schedule *schedule);

/* Proves the lists of all stages together: each stage runs every micro-batch forward once and,
 * after it, backward once; every send has its receive in the same order; no stage waits for ever,
 * even when a send completes only with its receive; no slot is used by two micro-batches.
 * TR_ERR_INTERNAL says what is wrong. `schedules` is [stages]. */
tr_status tr_schedule_check(const tr_schedule *schedules, int64_t stages, int64_t m,
                            bool forward_only);
