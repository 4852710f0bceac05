/* schedule.c - completes the lists of computations: messages, slots. Floor: train. */
#include "train/schedule.h"

#include "base/heap.h"

#include <stdlib.h>

const char *tr_action_name(tr_action_kind kind) {
    static const char *const names[TR_ACTION_KINDS] = {[TR_RECV_FORWARD] = "wait for input",
                                                       [TR_SEND_FORWARD] = "send of output",
                                                       [TR_RECV_BACKWARD] = "wait for gradient",
                                                       [TR_SEND_BACKWARD] = "send of gradient",
                                                       [TR_FORWARD] = "forward",
                                                       [TR_BACKWARD] = "backward",
                                                       [TR_BACKWARD_INPUT] = "input gradient",
                                                       [TR_WEIGHT] = "weight gradients",
                                                       [TR_FORWARD_BACKWARD] =
                                                           "forward and backward"};
    return names[kind];
}

tr_parts tr_action_parts(const tr_action *a) {
    switch (a->kind) {
    case TR_FORWARD:
        return (tr_parts){.forward = &a->task};
    case TR_BACKWARD:
        return (tr_parts){.input = &a->task, .weight = &a->task};
    case TR_BACKWARD_INPUT:
        return (tr_parts){.input = &a->task};
    case TR_WEIGHT:
        return (tr_parts){.weight = &a->task};
    case TR_FORWARD_BACKWARD:
        return (tr_parts){.forward = &a->task, .input = &a->other, .weight = &a->other};
    default:
        return (tr_parts){0};
    }
}

static void append(tr_schedule *s, tr_action action) {
    s->actions = tr_heap_grow(s->actions, s->count, &s->capacity, sizeof *s->actions);
    s->actions[s->count++] = action;
}

void tr_schedule_add(tr_schedule *s, tr_action_kind kind, tr_task task, tr_task other) {
    append(s, (tr_action){.kind = kind, .task = task, .other = other});
}

/* --- one rank's list, completed -----------------------------------------------------------------
 */

typedef struct {
    const tr_schedule_shape *shape;
    int64_t rank;
    tr_schedule *out;
    int32_t *slot;  /* [chunks, micro-batches] of those in flight */
    int32_t *user;  /* [slots] the chunk that has it, or had it last */
    bool *taken;    /* [slots] */
    int64_t room;   /* slots that user and taken have room for */
    int64_t vacant; /* slots not taken */
    int64_t depth;  /* forward only: a micro-batch's slot is chunk * depth + micro_batch % depth */
} completion;

static int32_t *slot_of(const completion *c, const tr_task *task) {
    return &c->slot[task->chunk * c->shape->micro_batches + task->micro_batch];
}

static void make_room(completion *c, int64_t slots) {
    tr_schedule *s = c->out;
    if (slots > c->room) {
        c->room = 2 * slots;
        c->user = tr_heap_resize(c->user, c->room, sizeof *c->user);
        c->taken = tr_heap_resize(c->taken, c->room, sizeof *c->taken);
        s->slot_chunks = tr_heap_resize(s->slot_chunks, c->room, sizeof *s->slot_chunks);
    }
    for (; s->slots < slots; s->slots++, c->vacant++) {
        c->user[s->slots] = -1;
        c->taken[s->slots] = false;
        s->slot_chunks[s->slots] = 0;
    }
}

/* A free slot, best one that the chunk has used before, so that its memory fits; else a new one. */
static void take_slot(completion *c, const tr_task *task) {
    int64_t best = -1, slots = c->out->slots;
    if (c->shape->forward_only) best = task->chunk * c->depth + task->micro_batch % c->depth;
    for (int64_t i = slots; c->vacant > 0 && i-- > 0 && !c->shape->forward_only;)
        if (!c->taken[i] && (best < 0 || c->user[best] != task->chunk || c->user[i] == task->chunk))
            best = i;
    if (best < 0) best = slots;
    make_room(c, best + 1);
    c->user[best] = task->chunk;
    c->vacant -= !c->taken[best];
    c->taken[best] = true;
    c->out->slot_chunks[best] |= UINT64_C(1) << task->chunk;
    *slot_of(c, task) = (int32_t)best;
}

/* A send or receive between the task's stage and the one `step` (1 or -1) further. */
static void add_message(completion *c, tr_action_kind kind, const tr_task *task, int64_t step) {
    const tr_stages *st = &c->shape->stages;
    int64_t next = tr_stage_of(st, c->rank, task->chunk) + step;
    if (next < 0 || next >= tr_stages_count(st)) return;
    tr_action a = {.kind = kind, .task = *task, .peer = (int32_t)tr_stage_rank(st, next)};
    if (a.peer == c->rank && step < 0) {
        a.other = (tr_task){task->micro_batch, (int32_t)tr_stage_chunk(st, next), 0};
        a.other.slot = *slot_of(c, &a.other);
    }
    append(c->out, a);
}

/* A computation between its receives and sends, and the slots of its tasks. */
static void complete(completion *c, tr_action a) {
    tr_parts p = tr_action_parts(&a);
    if (p.forward) take_slot(c, p.forward);
    a.task.slot = *slot_of(c, &a.task);
    if (a.kind == TR_FORWARD_BACKWARD) a.other.slot = *slot_of(c, &a.other);
    if (p.forward) add_message(c, TR_RECV_FORWARD, p.forward, -1);
    if (p.input) add_message(c, TR_RECV_BACKWARD, p.input, 1);
    append(c->out, a);
    if (p.forward) add_message(c, TR_SEND_FORWARD, p.forward, 1);
    if (p.input) add_message(c, TR_SEND_BACKWARD, p.input, -1);
    if (p.weight) {
        c->taken[*slot_of(c, p.weight)] = false;
        c->vacant++;
    }
}

static tr_schedule complete_list(const tr_schedule *made, const tr_schedule_shape *shape,
                                 int64_t rank) {
    tr_schedule out = {0};
    int64_t m = shape->micro_batches, v = shape->stages.chunks;
    int64_t depth = v == 1 ? 2 : shape->stages.ranks;
    completion c = {.shape = shape, .rank = rank, .out = &out, .depth = depth < m ? depth : m};
    c.slot = tr_heap_alloc(v * m, sizeof *c.slot);
    for (int64_t i = 0; i < made->count; i++) complete(&c, made->actions[i]);
    free(c.slot);
    free(c.user);
    free(c.taken);
    return out;
}

/* --- all ranks ----------------------------------------------------------------------------------
 */

void tr_schedule_free(tr_schedule *s) {
    free(s->actions);
    free(s->slot_chunks);
    *s = (tr_schedule){0};
}

void tr_schedules_free(tr_schedule *schedules, int64_t ranks) {
    for (int64_t r = 0; schedules && r < ranks; r++) tr_schedule_free(&schedules[r]);
    free(schedules);
}

tr_schedule *tr_schedules_create(const tr_schedule_shape *shape) {
    tr_schedule *lists = tr_heap_alloc(shape->stages.ranks, sizeof *lists);
    tr_schedule_make(lists, shape);
    for (int64_t r = 0; r < shape->stages.ranks; r++) {
        tr_schedule completed = complete_list(&lists[r], shape, r);
        tr_schedule_free(&lists[r]);
        lists[r] = completed;
    }
    return lists;
}

tr_schedule tr_schedule_create(const tr_schedule_shape *shape, int64_t rank) {
    tr_schedule *all = tr_schedules_create(shape), mine = all[rank];
    all[rank] = (tr_schedule){0};
    tr_schedules_free(all, shape->stages.ranks);
    return mine;
}
