/* prove.c - proves that the lists of all ranks work together. Floor: train.
 *
 * The lists are run against each other without time: each rank goes on as far as it can, and what
 * an action needs is checked when it comes. Micro-batches pass each point of a stage in order, so a
 * count says which have passed. */
#include "train/schedule.h"

#include "base/heap.h"

#include <stdlib.h>

/* Points of a virtual stage that a micro-batch passes. */
typedef enum { RECEIVED, FORWARD, SENT, RECEIVED_BACK, INPUT, SENT_BACK, WEIGHT, POINTS } point;

typedef struct {
    int64_t stage, micro_batch; /* stage -1: none */
} place;

/* What a slot's memory holds. */
typedef struct {
    place tenant;           /* in flight */
    place output, gradient; /* whose boundary buffers were written last */
    place sent, sent_back;  /* the last messages that left from them to another rank */
} slot_state;

typedef struct {
    const tr_schedule *lists;
    const tr_schedule_shape *shape;
    int64_t stages;
    int64_t (*done)[POINTS]; /* [stages] */
    int64_t *next;           /* [ranks] the action to run */
    slot_state **slots;      /* [ranks][slots] */
    /* the action at hand */
    int64_t rank;
    const tr_action *a;
    const char *wrong;
} proof;

static bool same(place a, place b) {
    return a.stage == b.stage && a.micro_batch == b.micro_batch;
}

static place place_of(const proof *p, const tr_task *t) {
    return (place){tr_stage_of(&p->shape->stages, p->rank, t->chunk), t->micro_batch};
}

static bool passed(const proof *p, place at, point what) {
    return p->done[at.stage][what] > at.micro_batch;
}

/* A requirement that no other rank can bring about. */
static bool require(proof *p, bool holds, const char *otherwise) {
    if (!holds && !p->wrong) p->wrong = otherwise;
    return holds;
}

static slot_state *slot_of(proof *p, const tr_task *t) {
    bool there = t->slot >= 0 && t->slot < p->lists[p->rank].slots && t->chunk >= 0 &&
                 t->chunk < p->shape->stages.chunks && t->micro_batch >= 0 &&
                 t->micro_batch < p->shape->micro_batches;
    return require(p, there, "no such slot, chunk or micro-batch") ? &p->slots[p->rank][t->slot]
                                                                   : NULL;
}

static void pass(proof *p, place at, point what) {
    require(p, p->done[at.stage][what] == at.micro_batch, "micro-batches out of order");
    p->done[at.stage][what]++;
}

/* The last message of a buffer has been received: it may be written. */
static bool output_free(const proof *p, const slot_state *s) {
    return s->sent.stage < 0 ||
           passed(p, (place){s->sent.stage + 1, s->sent.micro_batch}, RECEIVED);
}
static bool gradient_free(const proof *p, const slot_state *s) {
    return s->sent_back.stage < 0 ||
           passed(p, (place){s->sent_back.stage - 1, s->sent_back.micro_batch}, RECEIVED_BACK);
}

/* In evaluation a slot is free once its output is on its way, or copied to the next chunk. */
static void move_in(proof *p, slot_state *s, place at) {
    place old = s->tenant;
    bool gone = old.stage < 0;
    if (!gone && p->shape->forward_only) {
        int64_t next = old.stage + 1;
        bool copied = next < p->stages && tr_stage_rank(&p->shape->stages, next) == p->rank;
        gone =
            passed(p, copied ? (place){next, old.micro_batch} : old, copied ? RECEIVED : FORWARD);
    }
    require(p, gone, "more in flight than slots");
    s->tenant = at;
}

/* --- the actions: false while another rank has to go on first -----------------------------------
 */

static bool receive(proof *p, slot_state *s, place at) {
    bool local = p->a->peer == p->rank;
    place from = {at.stage - 1, at.micro_batch};
    if (!require(p, at.stage > 0, "the first stage receives a forward")) return true;
    if (!passed(p, from, SENT)) return false;
    if (local) {
        const slot_state *source = slot_of(p, &p->a->other);
        require(p, source && same(source->output, from), "an output copied from where it is not");
    }
    move_in(p, s, at);
    pass(p, at, RECEIVED);
    return true;
}

static bool send(proof *p, slot_state *s, place at) {
    if (!require(p, at.stage + 1 < p->stages, "the last stage sends a forward")) return true;
    require(p, same(s->output, at) && passed(p, at, FORWARD), "an output sent before it is made");
    if (p->a->peer != p->rank) s->sent = at;
    pass(p, at, SENT);
    return true;
}

static bool receive_back(proof *p, slot_state *s, place at) {
    place from = {at.stage + 1, at.micro_batch};
    if (!require(p, from.stage < p->stages, "the last stage receives a backward")) return true;
    if (!passed(p, from, SENT_BACK)) return false;
    bool local = p->a->peer == p->rank; /* the send has copied */
    if (!local && !gradient_free(p, s)) return false;
    require(p, same(s->tenant, at), "a gradient received into another's slot");
    pass(p, at, RECEIVED_BACK);
    return true;
}

static bool send_back(proof *p, slot_state *s, place at) {
    if (!require(p, at.stage > 0, "the first stage sends a backward")) return true;
    require(p, same(s->gradient, at) && passed(p, at, INPUT), "a gradient sent before it is made");
    if (p->a->peer == p->rank) {
        const slot_state *target = slot_of(p, &p->a->other);
        if (!target) return true;
        if (!gradient_free(p, target)) return false;
        require(p, same(target->tenant, (place){at.stage - 1, at.micro_batch}),
                "a gradient copied into another's slot");
    } else {
        s->sent_back = at;
    }
    pass(p, at, SENT_BACK);
    return true;
}

static void run_forward(proof *p, slot_state *s, place at) {
    if (at.stage == 0)
        move_in(p, s, at);
    else
        require(p, same(s->tenant, at) && passed(p, at, RECEIVED), "a forward without input");
    s->output = at;
    pass(p, at, FORWARD);
}

static void run_input(proof *p, slot_state *s, place at) {
    require(p, same(s->tenant, at), "a backward in another's slot");
    require(p, at.stage + 1 == p->stages || passed(p, at, RECEIVED_BACK),
            "a backward without gradient");
    s->gradient = at;
    pass(p, at, INPUT);
}

static void run_weight(proof *p, slot_state *s, place at) {
    require(p, same(s->tenant, at) && passed(p, at, INPUT),
            "weight gradients before their backward");
    s->tenant.stage = -1;
    pass(p, at, WEIGHT);
}

/* The parts of an action begin together. */
static bool compute(proof *p) {
    tr_parts parts = tr_action_parts(p->a);
    slot_state *f = parts.forward ? slot_of(p, parts.forward) : NULL;
    slot_state *b = parts.input ? slot_of(p, parts.input) : NULL;
    slot_state *w = parts.weight ? slot_of(p, parts.weight) : NULL;
    if (p->wrong) return true;
    if ((f && !output_free(p, f)) || (b && !gradient_free(p, b))) return false;
    if (b)
        require(p, passed(p, place_of(p, parts.input), FORWARD), "a backward before its forward");
    if (f) run_forward(p, f, place_of(p, parts.forward));
    if (b) run_input(p, b, place_of(p, parts.input));
    if (w) run_weight(p, w, place_of(p, parts.weight));
    return true;
}

static bool run(proof *p) {
    const tr_stages *st = &p->shape->stages;
    if (tr_action_computes(p->a->kind)) return compute(p);
    slot_state *s = slot_of(p, &p->a->task);
    if (!s) return true;
    place at = place_of(p, &p->a->task);
    bool up = p->a->kind == TR_SEND_FORWARD || p->a->kind == TR_RECV_BACKWARD;
    int64_t next = at.stage + (up ? 1 : -1);
    if (next >= 0 && next < p->stages)
        require(p, tr_stage_rank(st, next) == p->a->peer, "a message for a rank without the stage");
    switch (p->a->kind) {
    case TR_RECV_FORWARD:
        return receive(p, s, at);
    case TR_SEND_FORWARD:
        return send(p, s, at);
    case TR_RECV_BACKWARD:
        return receive_back(p, s, at);
    default:
        return send_back(p, s, at);
    }
}

/* --- all of them --------------------------------------------------------------------------------
 */

static tr_status finished(const proof *p) {
    int64_t m = p->shape->micro_batches, back = p->shape->forward_only ? 0 : m;
    for (int64_t r = 0; r < p->shape->stages.ranks; r++)
        if (p->next[r] != p->lists[r].count)
            return tr_fail(TR_ERR_INTERNAL, "schedule: rank %lld waits for ever at action %lld",
                           (long long)r, (long long)p->next[r]);
    for (int64_t s = 0; s < p->stages; s++) {
        bool first = s == 0, last = s + 1 == p->stages;
        const int64_t want[POINTS] = {[RECEIVED] = first ? 0 : m,
                                      [FORWARD] = m,
                                      [SENT] = last ? 0 : m,
                                      [RECEIVED_BACK] = last ? 0 : back,
                                      [INPUT] = back,
                                      [SENT_BACK] = first ? 0 : back,
                                      [WEIGHT] = back};
        for (int i = 0; i < POINTS; i++)
            if (p->done[s][i] != want[i])
                return tr_fail(TR_ERR_INTERNAL,
                               "schedule: %lld micro-batches pass point %d of stage %lld, not %lld",
                               (long long)p->done[s][i], i, (long long)s, (long long)want[i]);
    }
    return TR_OK;
}

/* As far as rank r can go now; *moved_p: it went on at all. */
static tr_status go_on(proof *p, int64_t r, bool *moved_p) {
    for (p->rank = r; p->next[r] < p->lists[r].count; p->next[r]++) {
        p->a = &p->lists[r].actions[p->next[r]];
        bool ran = run(p);
        if (p->wrong)
            return tr_fail(TR_ERR_INTERNAL, "schedule: rank %lld, action %lld: %s", (long long)r,
                           (long long)p->next[r], p->wrong);
        if (!ran) return TR_OK;
        *moved_p = true;
    }
    return TR_OK;
}

tr_status tr_schedules_prove(const tr_schedule *lists, const tr_schedule_shape *shape) {
    int64_t ranks = shape->stages.ranks;
    proof p = {.lists = lists, .shape = shape, .stages = tr_stages_count(&shape->stages)};
    p.done = tr_heap_alloc(p.stages, sizeof *p.done);
    p.next = tr_heap_alloc(ranks, sizeof *p.next);
    p.slots = tr_heap_alloc(ranks, sizeof *p.slots);
    const place none = {-1, 0};
    for (int64_t r = 0; r < ranks; r++) {
        p.slots[r] = tr_heap_alloc(lists[r].slots, sizeof *p.slots[r]);
        for (int64_t i = 0; i < lists[r].slots; i++)
            p.slots[r][i] = (slot_state){none, none, none, none, none};
    }
    tr_status status = TR_OK;
    /* Forwards go up the ranks and backwards down: so do the rounds, in turn. */
    bool moved = true;
    for (int64_t round = 0; moved && status == TR_OK; round++) {
        moved = false;
        for (int64_t i = 0; i < ranks && status == TR_OK; i++)
            status = go_on(&p, round % 2 ? ranks - 1 - i : i, &moved);
    }
    if (status == TR_OK) status = finished(&p);
    for (int64_t r = 0; r < ranks; r++) free(p.slots[r]);
    free(p.slots);
    free(p.next);
    free(p.done);
    return status;
}
