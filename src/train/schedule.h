/* schedule.h - what each pipeline rank does in which order: lists of actions made by one function
 * per kind (makers.c), proved by one checker (prove.c), run by one executor (pipeline.h) and timed
 * by one simulator (plan/simulate.h). Floor: train. Pure and local.
 *
 * A rank computes forwards and backwards of micro-batches through its chunks (model/stages.h). A
 * backward is one action, or two: the gradient of the input, which the stage before waits for, and
 * later the gradients of the weights. Where two stages meet, what crosses has a send and a receive.
 * A send begins at its place in the list and does not wait; its buffer is free again when the peer
 * has received. A receive waits for its message. Between two chunks of one rank the same actions
 * stand in the list and copy.
 *
 * A micro-batch in a chunk has a slot from its forward (or the receive before it) until its last
 * gradients are made. Chunks share the slots of their rank.
 * Sources: GPipe (Huang et al. 2019); 1F1B (PipeDream-Flush) and interleaved (Narayanan et al.
 * 2021); ZB-H1, ZB-V (Qi et al. 2024, "Zero Bubble Pipeline Parallelism"); DualPipe (DeepSeek-V3
 * 2024) folded to one copy of the weights (DualPipe-V, Sea AI Lab 2025). */
#pragma once
#include "base/status.h"
#include "model/stages.h"

typedef enum {
    TR_RECV_FORWARD,     /* boundary input from the stage before */
    TR_SEND_FORWARD,     /* boundary output to the stage after */
    TR_RECV_BACKWARD,    /* gradient of the output from the stage after */
    TR_SEND_BACKWARD,    /* gradient of the input to the stage before */
    TR_FORWARD,          /* from here on: computations */
    TR_BACKWARD,         /* gradients of input and weights */
    TR_BACKWARD_INPUT,   /* of the input; those of the weights are queued */
    TR_WEIGHT,           /* the queued ones */
    TR_FORWARD_BACKWARD, /* a forward, and at the same time the whole backward of another */
    TR_ACTION_KINDS
} tr_action_kind;

/* "wait for input", "forward", ... for people. */
const char *tr_action_name(tr_action_kind kind);

/* One micro-batch in one chunk of this rank. */
typedef struct {
    int64_t micro_batch;
    int32_t chunk, slot;
} tr_task;

typedef struct {
    tr_action_kind kind;
    int32_t peer; /* of a send or receive; this rank itself: between two of its chunks */
    tr_task task;
    tr_task other; /* FORWARD_BACKWARD: the backward's. RECV_FORWARD and SEND_BACKWARD between two
                      chunks of the rank: the micro-batch in the chunk before */
} tr_action;

typedef struct {
    tr_action *actions;
    int64_t count, capacity;
    int64_t slots;         /* in use at once, at most */
    uint64_t *slot_chunks; /* [slots] bit c: chunk c uses it */
} tr_schedule;

typedef struct {
    tr_schedule_kind kind;
    tr_stages stages;
    int64_t micro_batches; /* >= 0 */
    bool forward_only;     /* evaluation */
} tr_schedule_shape;

/* The lists of all ranks, [stages.ranks]. Any number of ranks and micro-batches; chunks as the kind
 * asks for (1 for 1F1B, GPipe and ZB-H1; any for interleaved; 2 folded for the V kinds). */
tr_schedule *tr_schedules_create(const tr_schedule_shape *shape);
/* Those of one rank; the others' are freed. */
tr_schedule tr_schedule_create(const tr_schedule_shape *shape, int64_t rank);
void tr_schedule_free(tr_schedule *schedule);
void tr_schedules_free(tr_schedule *schedules, int64_t ranks);

/* Proves the lists of all ranks together: every micro-batch goes through every chunk forward once,
 * then its input gradient, then its weight gradients; every send has its receive in the same order;
 * no rank waits for ever, even when a send completes only with its receive; nothing is written that
 * is still needed, and no slot is used by two. TR_ERR_INTERNAL says what is wrong. */
tr_status tr_schedules_prove(const tr_schedule *schedules, const tr_schedule_shape *shape);

/* Appends an action without slots. For makers. */
void tr_schedule_add(tr_schedule *list, tr_action_kind kind, tr_task task, tr_task other);
/* makers.c: the computations of every rank, without messages and slots. `lists` is [ranks], empty.
 */
void tr_schedule_make(tr_schedule *lists, const tr_schedule_shape *shape);

static inline bool tr_action_computes(tr_action_kind kind) {
    return kind >= TR_FORWARD;
}
static inline bool tr_action_receives(tr_action_kind kind) {
    return kind == TR_RECV_FORWARD || kind == TR_RECV_BACKWARD;
}

/* What a computation does to which task; NULL: it does not. */
typedef struct {
    const tr_task *forward, *input, *weight; /* forward, gradient of the input, of the weights */
} tr_parts;
tr_parts tr_action_parts(const tr_action *action);
