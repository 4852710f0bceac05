/* simulate.c - runs the lists of all ranks against a clock. Floor: plan. */
#include "plan/simulate.h"

#include "base/heap.h"

#include <stdlib.h>

typedef struct {
    const tr_schedule *lists;
    const tr_schedule_shape *shape;
    const tr_costs *costs;
    tr_timeline *out;
    double *forward, *backward; /* [stages, micro-batches] when each was sent; < 0: not yet */
    int64_t *next;              /* [ranks] */
    double *clock;              /* [ranks] */
} simulation;

static int64_t stage_of(const simulation *s, int64_t rank, const tr_task *t) {
    return tr_stage_of(&s->shape->stages, rank, t->chunk);
}

static double *sent(const simulation *s, double *table, int64_t stage, int64_t micro_batch) {
    return &table[stage * s->shape->micro_batches + micro_batch];
}

static double share(const simulation *s, int64_t rank, const tr_task *t) {
    return s->costs->share ? s->costs->share[stage_of(s, rank, t)] : 1;
}

static double cost(const simulation *s, int64_t rank, const tr_action *a) {
    const tr_costs *c = s->costs;
    tr_parts p = tr_action_parts(a);
    double sum = 0;
    if (a->kind == TR_FORWARD_BACKWARD && c->both > 0)
        return c->both * 0.5 * (share(s, rank, &a->task) + share(s, rank, &a->other));
    if (p.forward) sum += c->forward * share(s, rank, p.forward);
    if (p.input) sum += c->input * share(s, rank, p.input);
    if (p.weight) sum += c->weight * share(s, rank, p.weight);
    return sum;
}

/* When the message of a receive is there; < 0: it is not sent yet. */
static double arrival(const simulation *s, int64_t rank, const tr_action *a) {
    bool forward = a->kind == TR_RECV_FORWARD;
    int64_t from = stage_of(s, rank, &a->task) + (forward ? -1 : 1);
    double at = *sent(s, forward ? s->forward : s->backward, from, a->task.micro_batch);
    return at < 0 || a->peer == rank ? at : at + s->costs->message;
}

/* The next action of a rank; false: it waits for a message that is not sent yet. */
static bool step(simulation *s, int64_t rank) {
    const tr_action *a = &s->lists[rank].actions[s->next[rank]];
    double start = s->clock[rank], end = start;
    if (tr_action_receives(a->kind)) {
        double at = arrival(s, rank, a);
        if (at < 0) return false;
        if (at > end) end = at;
    } else if (tr_action_computes(a->kind)) {
        end += cost(s, rank, a);
        s->out->work[rank] += end - start;
    } else {
        double *table = a->kind == TR_SEND_FORWARD ? s->forward : s->backward;
        *sent(s, table, stage_of(s, rank, &a->task), a->task.micro_batch) = start;
    }
    s->out->spans[rank][s->next[rank]++] = (tr_span){start, end};
    s->clock[rank] = end;
    return true;
}

/* Idle times, once all actions have their spans. */
static void measure(const simulation *s) {
    tr_timeline *t = s->out;
    for (int64_t r = 0; r < t->ranks; r++) {
        double first = -1, last = 0;
        for (int64_t i = 0; i < s->lists[r].count; i++) {
            if (!tr_action_computes(s->lists[r].actions[i].kind)) continue;
            if (first < 0) first = t->spans[r][i].start;
            last = t->spans[r][i].end;
        }
        t->gap[r] = last - first - t->work[r];
        if (r == 0 || first < t->start) t->start = first;
        if (r == 0 || last > t->end) t->end = last;
    }
    for (int64_t r = 0; r < t->ranks; r++) t->idle[r] = t->end - t->start - t->work[r];
}

tr_timeline tr_simulate(const tr_schedule *lists, const tr_schedule_shape *shape,
                        const tr_costs *costs) {
    int64_t ranks = shape->stages.ranks, places = tr_stages_count(&shape->stages);
    places *= shape->micro_batches;
    tr_timeline out = {.ranks = ranks};
    out.spans = tr_heap_alloc(ranks, sizeof *out.spans);
    out.work = tr_heap_alloc(3 * ranks, sizeof *out.work);
    simulation s = {.lists = lists, .shape = shape, .costs = costs, .out = &out};
    s.forward = tr_heap_alloc(2 * places, sizeof *s.forward);
    s.next = tr_heap_alloc(ranks, sizeof *s.next);
    s.clock = tr_heap_alloc(ranks, sizeof *s.clock);
    out.idle = out.work + ranks;
    out.gap = out.idle + ranks;
    s.backward = s.forward + places;
    for (int64_t i = 0; i < 2 * places; i++) s.forward[i] = -1;
    for (int64_t r = 0; r < ranks; r++) {
        out.spans[r] = tr_heap_alloc(lists[r].count, sizeof *out.spans[r]);
    }
    /* Forwards go up the ranks and backwards down: so do the rounds, in turn. */
    bool moved = true;
    for (int64_t round = 0; moved; round++) {
        moved = false;
        for (int64_t i = 0; i < ranks; i++) {
            int64_t r = round % 2 ? ranks - 1 - i : i;
            while (s.next[r] < lists[r].count && step(&s, r)) moved = true;
        }
    }
    measure(&s);
    free(s.forward);
    free(s.next);
    free(s.clock);
    return out;
}

void tr_timeline_free(tr_timeline *t) {
    for (int64_t r = 0; r < t->ranks; r++) free(t->spans[r]);
    free(t->spans);
    free(t->work); /* and idle, gap */
    *t = (tr_timeline){0};
}

double tr_timeline_idle(const tr_timeline *t) {
    double idle = 0, all = (double)t->ranks * (t->end - t->start);
    for (int64_t r = 0; r < t->ranks; r++) idle += t->idle[r];
    return all > 0 ? idle / all : 0;
}
