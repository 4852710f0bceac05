/* berths.c - which stretch is where, see berths.h. Floor: model. */
#include "model/berths.h"

#include "base/heap.h"

#include <stdlib.h>

void tr_berths_plan(tr_berths *s, int few, int64_t layers, int64_t layer_elems,
                    int64_t other_elems) {
    int many = layers < few ? (int)layers : few;
    *s = (tr_berths){.count = many + (other_elems > layer_elems)};
    s->berth = tr_heap_alloc(s->count, sizeof *s->berth);
    for (int i = 0; i < s->count; i++) {
        s->berth[i] = (tr_berth){
            .offset = s->elems, .elems = i < many ? layer_elems : other_elems, .holds = -1};
        s->elems += s->berth[i].elems;
    }
}

void tr_berths_free(tr_berths *s) {
    free(s->berth);
    *s = (tr_berths){0};
}

/* Whether a is to be given away rather than b. */
static bool rather(const tr_berth *a, const tr_berth *b) {
    if ((a->holds < 0) != (b->holds < 0)) return a->holds < 0;
    if (a->moving != b->moving) return !a->moving;
    return a->since < b->since;
}

int tr_berths_find(const tr_berths *s, int64_t elems, bool patient) {
    int best = -1;
    for (int i = 0; i < s->count; i++) {
        const tr_berth *berth = &s->berth[i];
        if (berth->elems < elems) continue;
        /* a layer leaves the large berth to what needs it */
        if (i > 0 && berth->elems > s->berth[0].elems && s->berth[0].elems >= elems) continue;
        if (berth->users > 0 || (berth->moving && !patient)) continue;
        if (best < 0 || rather(berth, &s->berth[best])) best = i;
    }
    return best;
}

void tr_berths_touch(tr_berths *s, int i) {
    s->berth[i].since = ++s->now;
}

void tr_berths_fill(tr_berths *s, int i, int64_t stretch) {
    s->berth[i].holds = stretch;
    tr_berths_touch(s, i);
}

void tr_berths_empty(tr_berths *s, int i) {
    s->berth[i].holds = -1;
    s->berth[i].users = 0;
    s->berth[i].moving = false;
}
