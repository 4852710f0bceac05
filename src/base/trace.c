/* trace.c - the events, and the file of them (Trace Event Format, Google 2016). Floor: base. */
#include "base/trace.h"

#include "base/heap.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROOM = 1 << 17 }; /* events between two flushes */

typedef enum { ACTIONS, WORK, WAITING, TRANSFERS } track;

typedef struct {
    const char *name;
    int64_t at;    /* ns since the open */
    int64_t value; /* micro-batch or layer; bytes of a transfer; -1 none */
    int64_t id;    /* of a transfer */
    track track;
    bool begins;
} event;

static struct {
    FILE *file; /* NULL: no trace is open */
    char path[4200];
    int rank;
    int64_t start;
    event *events;
    int64_t count, transfers_begun;
    bool acting;
    /* sums, ns */
    int64_t under_way; /* transfers */
    int64_t waiting_since, transfers_since, waiting, transfers, both_since, both, end, dropped;
    bool waits;
} trace;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec - trace.start;
}

static void add(track on, bool begins, const char *name, int64_t value, int64_t id, int64_t at) {
    if (trace.count == ROOM) {
        trace.dropped++;
        return;
    }
    trace.events[trace.count++] = (event){name, at, value, id, on, begins};
}

static void print_event(const event *e) {
    static const char *const category[] = {"action", "work", "waiting", "transfer"};
    const char *phase = e->track == TRANSFERS ? (e->begins ? "b" : "e") : (e->begins ? "B" : "E");
    fprintf(trace.file, ",\n{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f", phase, trace.rank,
            (int)e->track, 1e-3 * (double)e->at);
    if (e->name) fprintf(trace.file, ",\"cat\":\"%s\",\"name\":\"%s", category[e->track], e->name);
    if (e->name && e->value >= 0 && e->track != TRANSFERS)
        fprintf(trace.file, " %" PRId64, e->value);
    if (e->name) fputs("\"", trace.file);
    if (e->track == TRANSFERS) fprintf(trace.file, ",\"id\":%" PRId64, e->id);
    if (e->track == TRANSFERS && e->begins)
        fprintf(trace.file, ",\"args\":{\"bytes\":%" PRId64 "}", e->value);
    fputs("}", trace.file);
}

static void name_track(const char *what, int number, const char *name) {
    fprintf(trace.file,
            ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"args\":{\"name\":\"%s\"}}",
            trace.rank, number, what, name);
}

static tr_status cannot_write(const char *path) {
    return tr_fail(TR_ERR_IO,
                   "cannot write %s: %s; make room there, or log.trace=false does without it", path,
                   strerror(errno));
}

tr_status tr_trace_open(const char *path, int rank, const char *place) {
    static const char *const tracks[] = {"actions", "work", "waiting", "transfers"};
    memset(&trace, 0, sizeof trace);
    trace.events = tr_heap_alloc(ROOM, sizeof *trace.events);
    snprintf(trace.path, sizeof trace.path, "%s", path);
    trace.rank = rank;
    trace.file = fopen(path, "w");
    if (!trace.file) {
        free(trace.events);
        return cannot_write(path);
    }
    trace.start = now();
    fprintf(
        trace.file,
        "[{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}}",
        rank, rank);
    char process[160];
    snprintf(process, sizeof process, "rank %d%s%s", rank, *place ? ": " : "", place);
    name_track("process_name", 0, process);
    for (int i = 0; i < 4; i++) name_track("thread_name", i, tracks[i]);
    return TR_OK;
}

void tr_trace_flush(void) {
    if (!trace.file) return;
    for (int64_t i = 0; i < trace.count; i++) print_event(&trace.events[i]);
    trace.count = 0;
}

tr_status tr_trace_close(void) {
    if (!trace.file) return TR_OK;
    trace.end = now();
    if (trace.acting) add(ACTIONS, false, NULL, -1, 0, trace.end);
    tr_trace_flush();
    fputs("]\n", trace.file);
    bool bad = ferror(trace.file) != 0;
    bad = fclose(trace.file) != 0 || bad;
    trace.file = NULL;
    free(trace.events);
    return bad ? cannot_write(trace.path) : TR_OK;
}

tr_trace_sums tr_trace_sum(void) {
    return (tr_trace_sums){.seconds = 1e-9 * (double)(trace.file ? now() : trace.end),
                           .waiting = 1e-9 * (double)trace.waiting,
                           .transfers = 1e-9 * (double)trace.transfers,
                           .hidden = 1e-9 * (double)(trace.transfers - trace.both),
                           .dropped = trace.dropped};
}

void tr_trace_action(const char *name, int64_t index) {
    if (!trace.file) return;
    int64_t at = now();
    if (trace.acting) add(ACTIONS, false, NULL, -1, 0, at);
    add(ACTIONS, true, name, index, 0, at);
    trace.acting = true;
}

void tr_trace_work_begin(const char *name, int64_t index) {
    if (trace.file) add(WORK, true, name, index, 0, now());
}

void tr_trace_work_end(void) {
    if (trace.file) add(WORK, false, NULL, -1, 0, now());
}

void tr_trace_wait_begin(const char *name) {
    if (!trace.file) return;
    int64_t at = now();
    add(WAITING, true, name, -1, 0, at);
    trace.waits = true;
    trace.waiting_since = trace.both_since = at;
}

void tr_trace_wait_end(void) {
    if (!trace.file || !trace.waits) return;
    int64_t at = now();
    add(WAITING, false, NULL, -1, 0, at);
    trace.waits = false;
    trace.waiting += at - trace.waiting_since;
    if (trace.under_way) trace.both += at - trace.both_since;
}

int64_t tr_trace_transfer_begin(const char *name, int64_t bytes) {
    if (!trace.file) return 0;
    int64_t at = now(), id = ++trace.transfers_begun;
    add(TRANSFERS, true, name, bytes, id, at);
    if (trace.under_way++ == 0) trace.transfers_since = trace.both_since = at;
    return id;
}

void tr_trace_transfer_end(const char *name, int64_t id) {
    if (!trace.file || id == 0) return;
    int64_t at = now();
    add(TRANSFERS, false, name, 0, id, at);
    if (--trace.under_way) return;
    trace.transfers += at - trace.transfers_since;
    if (trace.waits) trace.both += at - trace.both_since;
}
