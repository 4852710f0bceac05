/* schedule.c - makers and checker of action lists. Floor: train. */
#include "train/schedule.h"

#include <stdlib.h>

/* --- makers -------------------------------------------------------------------------------------
 */

static void add(tr_schedule *s, tr_action_kind kind, int64_t micro_batch) {
    s->actions[s->count++] = (tr_action){kind, micro_batch};
}

static void add_forward(tr_schedule *s, int64_t stages, int64_t stage, int64_t micro_batch) {
    if (stage > 0) add(s, TR_RECV_FORWARD, micro_batch);
    add(s, TR_FORWARD, micro_batch);
    if (stage + 1 < stages) add(s, TR_SEND_FORWARD, micro_batch);
}

static void add_backward(tr_schedule *s, int64_t stages, int64_t stage, int64_t micro_batch) {
    if (stage + 1 < stages) add(s, TR_RECV_BACKWARD, micro_batch);
    add(s, TR_BACKWARD, micro_batch);
    if (stage > 0) add(s, TR_SEND_BACKWARD, micro_batch);
}

tr_schedule tr_schedule_create(tr_schedule_kind kind, int64_t stages, int64_t stage, int64_t m,
                               bool forward_only) {
    tr_schedule s = {.actions = malloc((size_t)(6 * m + 1) * sizeof(tr_action))};
    if (!s.actions) abort();
    /* forwards before the first backward: all, or as many as the stages still to come */
    int64_t ahead = kind == TR_SCHEDULE_GPIPE ? m : stages - stage;
    if (ahead > m) ahead = m;
    s.slots = forward_only ? (m < 2 ? m : 2) : ahead;
    for (int64_t i = 0; i < (forward_only ? m : ahead - 1); i++) add_forward(&s, stages, stage, i);
    if (forward_only) return s;
    for (int64_t i = ahead - 1; i < m && m > 0; i++) { /* steady: one forward, one backward */
        add_forward(&s, stages, stage, i);
        add_backward(&s, stages, stage, i - (ahead - 1));
    }
    for (int64_t i = m - (ahead - 1); i < m; i++) add_backward(&s, stages, stage, i);
    return s;
}

void tr_schedule_free(tr_schedule *s) {
    free(s->actions);
    *s = (tr_schedule){0};
}

/* --- checker ------------------------------------------------------------------------------------
 */

/* Progress of one stage through its list. */
typedef struct {
    int64_t next;                  /* action to run */
    int64_t done[TR_ACTION_KINDS]; /* how many of each kind have run: micro-batches go in order */
    int64_t live; /* forwards (or their receives) begun without backward finished */
} stage_state;

/* Whether stage r can run its next action now. A message sent is one more SEND done by the sender;
 * a stage whose slot's earlier send has not been received cannot write that slot again. */
static bool ready(const tr_schedule *all, const stage_state *state, int64_t stages, int64_t r) {
    const tr_action *a = &all[r].actions[state[r].next];
    int64_t slots = all[r].slots;
    switch (a->kind) {
    case TR_RECV_FORWARD:
        return state[r - 1].done[TR_SEND_FORWARD] > a->micro_batch;
    case TR_RECV_BACKWARD:
        return state[r + 1].done[TR_SEND_BACKWARD] > a->micro_batch;
    case TR_FORWARD: /* writes the slot's output: its last send has been received */
        return r + 1 == stages || a->micro_batch < slots ||
               state[r + 1].done[TR_RECV_FORWARD] > a->micro_batch - slots;
    case TR_BACKWARD: /* writes the slot's gradient */
        return r == 0 || a->micro_batch < slots ||
               state[r - 1].done[TR_RECV_BACKWARD] > a->micro_batch - slots;
    default:
        return true;
    }
}

/* What must hold before an action whatever the other stages do. */
static const char *wrong(const tr_schedule *all, const stage_state *s, int64_t stages, int64_t r,
                         bool forward_only) {
    const tr_action *a = &all[r].actions[s->next];
    bool first = r == 0, last = r + 1 == stages;
    if (a->micro_batch != s->done[a->kind]) return "micro-batches out of order";
    switch (a->kind) {
    case TR_RECV_FORWARD:
        return first ? "the first stage receives a forward" : NULL;
    case TR_SEND_BACKWARD:
        if (first) return "the first stage sends a backward";
        return s->done[TR_BACKWARD] > a->micro_batch ? NULL : "a gradient sent before it is made";
    case TR_SEND_FORWARD:
        if (last) return "the last stage sends a forward";
        return s->done[TR_FORWARD] > a->micro_batch ? NULL : "an output sent before it is made";
    case TR_RECV_BACKWARD:
        return last ? "the last stage receives a backward" : NULL;
    case TR_FORWARD:
        if (!first && s->done[TR_RECV_FORWARD] <= a->micro_batch) return "a forward without input";
        return forward_only || s->live < all[r].slots ? NULL : "more in flight than slots";
    case TR_BACKWARD:
        if (s->done[TR_FORWARD] <= a->micro_batch) return "a backward before its forward";
        if (!last && s->done[TR_RECV_BACKWARD] <= a->micro_batch)
            return "a backward without gradient";
        return NULL;
    default:
        return "an unknown action";
    }
}

static tr_status finished(const tr_schedule *all, const stage_state *state, int64_t stages,
                          int64_t m, bool forward_only) {
    for (int64_t r = 0; r < stages; r++) {
        int64_t back = forward_only ? 0 : m;
        const int64_t want[TR_ACTION_KINDS] = {
            r > 0 ? m : 0,   m, r + 1 < stages ? m : 0, r + 1 < stages ? back : 0, back,
            r > 0 ? back : 0};
        if (state[r].next != all[r].count)
            return tr_fail(TR_ERR_INTERNAL, "schedule: stage %lld waits for ever at action %lld",
                           (long long)r, (long long)state[r].next);
        for (int k = 0; k < TR_ACTION_KINDS; k++)
            if (state[r].done[k] != want[k])
                return tr_fail(TR_ERR_INTERNAL,
                               "schedule: stage %lld has %lld actions of kind %d, not %lld",
                               (long long)r, (long long)state[r].done[k], k, (long long)want[k]);
    }
    return TR_OK;
}

tr_status tr_schedule_check(const tr_schedule *all, int64_t stages, int64_t m, bool forward_only) {
    stage_state *state = calloc((size_t)stages, sizeof *state);
    if (!state) abort();
    tr_status status = TR_OK;
    for (bool moved = true; moved && status == TR_OK;) {
        moved = false;
        for (int64_t r = 0; r < stages && status == TR_OK; r++) {
            stage_state *s = &state[r];
            while (s->next < all[r].count) {
                const char *why = wrong(all, s, stages, r, forward_only);
                if (why) {
                    status = tr_fail(TR_ERR_INTERNAL, "schedule: stage %lld, action %lld: %s",
                                     (long long)r, (long long)s->next, why);
                    break;
                }
                if (!ready(all, state, stages, r)) break;
                tr_action_kind kind = all[r].actions[s->next++].kind;
                s->done[kind]++;
                s->live += kind == TR_FORWARD ? 1 : kind == TR_BACKWARD ? -1 : 0;
                moved = true;
            }
        }
    }
    if (status == TR_OK) status = finished(all, state, stages, m, forward_only);
    free(state);
    return status;
}
