/* watch_verdict.c - which rank keeps a job from going on. Floor: dist. */
#include "dist/watching.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { NAMED = 4, LISTED = 8 }; /* ranks told of in full, and in what all do */

typedef struct {
    char *out;
    size_t bytes, used;
} text;

__attribute__((format(printf, 2, 3))) static void add(text *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->out + t->used, t->bytes - t->used, format, args);
    va_end(args);
    t->used += n > 0 ? (size_t)n : 0;
    if (t->used >= t->bytes) t->used = t->bytes - 1; /* cut off */
}

void tr_watch_describe(char *out, size_t bytes, const tr_mark *mark) {
    text t = {out, bytes, 0};
    out[0] = 0;
    if (mark->action[0]) {
        add(&t, "`%s", mark->action);
        if (mark->micro_batch >= 0) add(&t, " of micro-batch %lld", (long long)mark->micro_batch);
        add(&t, "`");
    }
    if (mark->step >= 0)
        add(&t, "%sstep %lld", mark->action[0] ? " of " : "", (long long)mark->step);
}

static void add_rank(text *t, int rank, const tr_witness *w) {
    add(t, "rank %d", rank);
    if (w->mark.place[0]) add(t, " (%s)", w->mark.place);
}

static void add_deed(text *t, const tr_witness *w) {
    char deed[160];
    tr_watch_describe(deed, sizeof deed, &w->mark);
    add(t, " has been in %s", deed);
    if (isfinite(w->idle)) add(t, " for %.0f s", w->idle);
}

typedef bool chooser(const tr_witness *w);
static bool is_silent(const tr_witness *w) {
    return !w->runs;
}
static bool is_busy(const tr_witness *w) {
    return w->runs && !w->mark.waits;
}

static int count(const tr_witness *ranks, int n, chooser *chosen) {
    int found = 0;
    for (int r = 0; r < n; r++) found += chosen(&ranks[r]);
    return found;
}

/* One phrase for each of the first few chosen. */
static void name_chosen(text *t, const tr_witness *ranks, int n, chooser *chosen) {
    int named = 0, left = count(ranks, n, chosen);
    for (int r = 0; r < n && named < NAMED; r++) {
        const tr_witness *w = &ranks[r];
        if (!chosen(w)) continue;
        add(t, "%s", named++ ? "; " : "");
        add_rank(t, r, w);
        if (w->runs) {
            add_deed(t, w);
            add(t, " without waiting for others: it computes, reads or writes without an end");
        } else if (w->known) {
            add_deed(t, w);
            add(t, ": its process is stopped or gone");
        } else {
            add(t, " does not answer: its machine is down or cut off, or its process is stopped");
        }
    }
    if (left > named) add(t, "; and %d ranks more", left - named);
}

static void list_all(text *t, const tr_witness *ranks, int n, double limit) {
    add(t, "all ranks have waited for each other for %.0f s:", limit);
    for (int r = 0; r < n && r < LISTED; r++) {
        char deed[160];
        tr_watch_describe(deed, sizeof deed, &ranks[r].mark);
        add(t, "%s ", r ? "," : "");
        add_rank(t, r, &ranks[r]);
        add(t, " in %s", deed);
    }
    if (n > LISTED) add(t, ", and %d ranks more", n - LISTED);
}

void tr_watch_verdict(char *out, size_t bytes, const tr_witness *ranks, int n, double limit) {
    text t = {out, bytes, 0};
    if (count(ranks, n, is_silent) > 0)
        name_chosen(&t, ranks, n, is_silent);
    else if (count(ranks, n, is_busy) > 0)
        name_chosen(&t, ranks, n, is_busy);
    else
        list_all(&t, ranks, n, limit);
}
