/* makers.c - in which order each rank computes, one function per kind of schedule. Floor: train.
 *
 * F, B, W: forward, gradient of the input, gradients of the weights; p ranks, m micro-batches. The
 * idle time of each kind stands in tests/plan/simulate.c, which checks it. */
#include "train/schedule.h"

#include "base/heap.h"

#include <stdlib.h>

static tr_task task(int64_t chunk, int64_t micro_batch) {
    return (tr_task){.micro_batch = micro_batch, .chunk = (int32_t)chunk};
}

static void add(tr_schedule *s, tr_action_kind kind, int64_t chunk, int64_t micro_batch) {
    tr_schedule_add(s, kind, task(chunk, micro_batch), (tr_task){0});
}

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* --- one chunk a rank ---------------------------------------------------------------------------
 */

static void make_gpipe(tr_schedule *s, int64_t m) {
    for (int64_t i = 0; i < m; i++) add(s, TR_FORWARD, 0, i);
    for (int64_t i = 0; i < m; i++) add(s, TR_BACKWARD, 0, i);
}

/* As many forwards ahead as there are stages still to come, then one forward, one backward. */
static void make_1f1b(tr_schedule *s, int64_t m, int64_t p, int64_t rank) {
    int64_t ahead = least(m, p - rank) - 1;
    for (int64_t i = 0; i < ahead; i++) add(s, TR_FORWARD, 0, i);
    for (int64_t i = 0; i < m; i++) {
        if (i + ahead < m) add(s, TR_FORWARD, 0, i + ahead);
        add(s, TR_BACKWARD, 0, i);
    }
}

/* 1F1B whose weight gradients come `rank` micro-batches late, so that those of the end fill the
 * time in which a stage would wait for the stages after it (Qi et al. 2024, section 2.1.1). */
static void make_zb_h1(tr_schedule *s, int64_t m, int64_t p, int64_t rank) {
    int64_t ahead = least(m, p - rank) - 1, late = 0;
    for (int64_t i = 0; i < ahead; i++) add(s, TR_FORWARD, 0, i);
    for (int64_t i = 0; i < m; i++) {
        if (i + ahead < m) add(s, TR_FORWARD, 0, i + ahead);
        add(s, TR_BACKWARD_INPUT, 0, i);
        if (i >= rank) add(s, TR_WEIGHT, 0, late++);
    }
    while (late < m) add(s, TR_WEIGHT, 0, late++);
}

/* --- several chunks a rank ----------------------------------------------------------------------
 */

/* Micro-batches go in groups of p: a rank takes a group through its first chunk, then through the
 * next; backwards likewise from the last chunk (Narayanan et al. 2021, section 2.2). The last group
 * may have fewer: what it lacks is left out. */
static void make_interleaved(tr_schedule *s, int64_t m, const tr_stages *st, int64_t rank) {
    int64_t p = st->ranks, v = st->chunks, all = tr_ceil_div(m, p) * p * v;
    int64_t ahead = least(all, 2 * (p - rank - 1) + (v - 1) * p);
    for (int64_t i = 0; i < all + ahead; i++) {
        int64_t f = i, b = i - ahead; /* numbers of a forward and a backward in their order */
        int64_t forward = f / (p * v) * p + f % p, backward = b / (p * v) * p + b % p;
        if (f < all && forward < m) add(s, TR_FORWARD, f / p % v, forward);
        if (b >= 0 && backward < m) add(s, TR_BACKWARD, v - 1 - b / p % v, backward);
    }
}

/* Forwards alone: a group of micro-batches through the first chunk, then through the next. */
static void make_forwards(tr_schedule *s, int64_t m, const tr_stages *st) {
    for (int64_t first = 0; first < m; first += st->ranks)
        for (int64_t chunk = 0; chunk < st->chunks; chunk++)
            for (int64_t i = first; i < least(m, first + st->ranks); i++)
                add(s, TR_FORWARD, chunk, i);
}

/* --- ZB-V ---------------------------------------------------------------------------------------
 * All ranks are followed through time in steps of one F = B = W. At each step a rank does the first
 * of its preferences that has what it needs; at most 2p micro-batches are in its two chunks. Then
 * no rank waits between its first and its last action once m >= 2p. */

typedef struct {
    int64_t forward[2], input[2], weight[2]; /* how many are done, by chunk */
} v_progress;

typedef struct {
    tr_action_kind kind;
    int64_t chunk;
} v_choice;

/* Whether rank r could do it, with what all ranks had done before this step. */
static bool v_possible(const v_progress *before, const v_progress *now, v_choice c, int64_t r,
                       int64_t p, int64_t m) {
    const v_progress *me = &now[r], *was = &before[r];
    int64_t k = c.chunk, other = k == 0 ? r - 1 : r + 1; /* the rank a forward comes from */
    int64_t in_flight = me->forward[0] + me->forward[1] - me->weight[0] - me->weight[1];
    switch (c.kind) {
    case TR_FORWARD:
        if (me->forward[k] == m || in_flight >= 2 * p) return false;
        if (k == 0 && r == 0) return true;
        return (k == 1 && r == p - 1 ? was->forward[0] : before[other].forward[k]) > me->forward[k];
    case TR_BACKWARD_INPUT:
        if (was->forward[k] <= me->input[k]) return false;
        if (k == 1 && r == 0) return true;
        other = k == 0 ? r + 1 : r - 1;
        return (k == 0 && r == p - 1 ? was->input[1] : before[other].input[k]) > me->input[k];
    default:
        return me->input[k] > me->weight[k];
    }
}

static bool v_step(tr_schedule *s, const v_progress *before, v_progress *now, int64_t r, int64_t p,
                   int64_t m) {
    enum { CHOICES = 6 };
    static const v_choice steady[CHOICES] = {{TR_FORWARD, 1},        {TR_BACKWARD_INPUT, 0},
                                             {TR_WEIGHT, 0},         {TR_FORWARD, 0},
                                             {TR_BACKWARD_INPUT, 1}, {TR_WEIGHT, 1}};
    static const v_choice last[CHOICES] = {{TR_BACKWARD_INPUT, 1}, {TR_BACKWARD_INPUT, 0},
                                           {TR_WEIGHT, 0},         {TR_WEIGHT, 1},
                                           {TR_FORWARD, 0},        {TR_FORWARD, 1}};
    const v_choice *choices = now[r].forward[1] < m ? steady : last;
    for (int i = 0; i < CHOICES; i++) {
        v_choice c = choices[i];
        if (!v_possible(before, now, c, r, p, m)) continue;
        int64_t *done = c.kind == TR_FORWARD  ? now[r].forward
                        : c.kind == TR_WEIGHT ? now[r].weight
                                              : now[r].input;
        add(s, c.kind, c.chunk, done[c.chunk]++);
        return true;
    }
    return false;
}

static void make_zb_v(tr_schedule *lists, int64_t p, int64_t m) {
    v_progress *now = tr_heap_alloc(p, sizeof *now), *before = tr_heap_alloc(p, sizeof *before);
    for (bool moved = true; moved;) {
        moved = false;
        for (int64_t r = 0; r < p; r++) before[r] = now[r];
        for (int64_t r = 0; r < p; r++) moved |= v_step(&lists[r], before, now, r, p, m);
    }
    free(now);
    free(before);
}

/* --- DualPipe-V ---------------------------------------------------------------------------------
 * The eight phases of the published schedule for micro-batches >= 2p; of fewer, those that are not
 * there are left out. A backward is split where the stage before waits for it. */

typedef struct {
    tr_schedule *list;
    int64_t m;                         /* those that are there */
    int64_t forwards[2], backwards[2]; /* done so far, by chunk */
    tr_task *queued;                   /* split backwards: their weight gradients, first to last */
    int64_t first, end;
} dual;

static void dual_forward(dual *d, int64_t chunk) {
    int64_t i = d->forwards[chunk]++;
    if (i < d->m) add(d->list, TR_FORWARD, chunk, i);
}

static void dual_backward(dual *d, int64_t chunk, bool split) {
    int64_t i = d->backwards[chunk]++;
    if (split) d->queued[d->end++] = task(chunk, i);
    if (i < d->m) add(d->list, split ? TR_BACKWARD_INPUT : TR_BACKWARD, chunk, i);
}

static void dual_weight(dual *d) {
    tr_task t = d->queued[d->first++];
    if (t.micro_batch < d->m) add(d->list, TR_WEIGHT, t.chunk, t.micro_batch);
}

/* A forward in one chunk and a backward in the other at once, as far as both are there. */
static void dual_both(dual *d, int64_t chunk) {
    int64_t f = d->forwards[chunk], b = d->backwards[1 - chunk];
    if (f >= d->m || b >= d->m) {
        dual_forward(d, chunk);
        dual_backward(d, 1 - chunk, false);
        return;
    }
    d->forwards[chunk]++;
    d->backwards[1 - chunk]++;
    tr_schedule_add(d->list, TR_FORWARD_BACKWARD, task(chunk, f), task(1 - chunk, b));
}

/* The backwards that are left once no forward is; the second half is split. */
static void dual_backwards(dual *d, int64_t rank) {
    bool split = false;
    for (int64_t i = 0; i <= rank; i++) {
        bool middle = i == (rank + 1) / 2;
        split |= middle && rank % 2 == 1;
        dual_backward(d, 1, split);
        split |= middle;
        dual_backward(d, 0, split);
    }
}

static void make_dualpipe_v(tr_schedule *s, int64_t m, int64_t p, int64_t rank) {
    int64_t later = p - 1 - rank, all = m > 2 * p ? m : 2 * p;
    dual d = {.list = s, .m = m, .queued = tr_heap_alloc(2 * all, sizeof *d.queued)};
    for (int64_t i = 0; i < 2 * later; i++) dual_forward(&d, 0);
    for (int64_t i = 0; i <= rank; i++) {
        dual_forward(&d, 0);
        dual_forward(&d, 1);
    }
    for (int64_t i = 0; i < later; i++) {
        dual_backward(&d, 1, true);
        dual_weight(&d);
        dual_forward(&d, 1);
    }
    for (int64_t i = 0; i < all - 2 * p + rank + 1; i++) {
        if (i == 0 && later == 0) { /* the backward would wait for the forward's stage */
            dual_forward(&d, 0);
            dual_backward(&d, 1, false);
        } else {
            dual_both(&d, 0);
        }
        dual_both(&d, 1);
    }
    for (int64_t i = 0; i < later; i++) {
        dual_backward(&d, 1, false);
        dual_both(&d, 1);
    }
    dual_backwards(&d, rank);
    for (int64_t i = 0; i < later; i++) {
        dual_weight(&d);
        dual_backward(&d, 0, true);
    }
    while (d.first < d.end) dual_weight(&d);
    free(d.queued);
}

void tr_schedule_make(tr_schedule *lists, const tr_schedule_shape *shape) {
    const tr_stages *st = &shape->stages;
    int64_t p = st->ranks, m = shape->micro_batches;
    if (shape->kind == TR_SCHEDULE_ZB_V && !shape->forward_only) {
        make_zb_v(lists, p, m);
        return;
    }
    for (int64_t r = 0; r < p; r++) {
        tr_schedule *s = &lists[r];
        if (shape->forward_only)
            make_forwards(s, m, st);
        else if (shape->kind == TR_SCHEDULE_GPIPE)
            make_gpipe(s, m);
        else if (shape->kind == TR_SCHEDULE_1F1B)
            make_1f1b(s, m, p, r);
        else if (shape->kind == TR_SCHEDULE_ZB_H1)
            make_zb_h1(s, m, p, r);
        else if (shape->kind == TR_SCHEDULE_INTERLEAVED)
            make_interleaved(s, m, st, r);
        else
            make_dualpipe_v(s, m, p, r);
    }
}
