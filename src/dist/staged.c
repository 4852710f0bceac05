/* staged.c - operations on device memory through host memory. Floor: dist.
 *
 * An operation is one part, or several if it is long and its result does not depend on how it is
 * cut: messages, broadcasts, gathers, sums of blocks. A part is copied to staging memory, is an
 * operation of the host's backends there, and is copied back; parts follow each other, so copies
 * of some hide behind the transfer of others:
 *     filled   its copies to the host are enqueued, behind what the caller had enqueued
 *     begun    they are done, and the host's operation has begun; at once where nothing leaves
 *     emptied  that is complete, what the caller had enqueued is done with the buffer, and the
 *              copies to the device are enqueued
 *     done     these are done
 * The parts' counts only grow, in this order. LANES parts are under way.
 *
 * Ranks copy at different speeds, but must begin the host's operations in the same order. So no
 * part begins while an operation begun earlier has parts that have not: of collectives, any
 * collective of the communicator, and of messages, one of the same kind, peer and tag. That holds
 * for operations on host memory too: while they would overtake they wait here, as one part without
 * copies. An operation waits only for those begun earlier, so nobody waits in a circle who would
 * not on host memory. */
#include "dist/backend.h"

#include "base/heap.h"

#include <stdlib.h>
#include <string.h>

static const int64_t PART_BYTES = INT64_C(4) << 20;
/* Of each rank's block, where a part holds a piece of all. */
static const int64_t LEAST_BLOCK_BYTES = INT64_C(1) << 16;
enum { LANES = 3 };

typedef struct {
    tr_staging memory;
    tr_event *out, *in; /* behind the copies to the host (NULL: nothing leaves), to the device */
    tr_request *part;
    bool complete; /* the part has been given back */
} lane;

struct tr_staged {
    tr_side *side; /* NULL: host memory */
    tr_request *queued_after;
    tr_event *ready; /* the caller's stream has come to the begin; NULL: host memory */
    int64_t piece;   /* elements of a block in one part */
    int64_t parts, filled, begun, emptied, done;
    int64_t send_bytes, recv_bytes; /* of all_to_all */
    lane lane[LANES];
};

static bool is_message(const tr_work *work) {
    return work->kind == TR_WORK_SEND || work->kind == TR_WORK_RECV;
}

/* Whether one may not overtake the other. */
static bool in_order(const tr_work *a, const tr_work *b) {
    if (!is_message(a) || !is_message(b)) return is_message(a) == is_message(b);
    return a->kind == b->kind && a->peer == b->peer && a->tag == b->tag;
}

static bool would_overtake(const tr_comm *comm, const tr_work *work) {
    for (const tr_request *r = comm->staged_first; r; r = r->staged->queued_after)
        if (in_order(&r->work, work)) return true;
    return false;
}

static bool serves(tr_comm *comm, const tr_work *work) {
    return tr_work_device(work) || would_overtake(comm, work);
}

/* --- what is copied ------------------------------------------------------------------------------
 */

static bool has_blocks(const tr_work *work) {
    return work->kind == TR_WORK_REDUCE_SCATTER || work->kind == TR_WORK_ALL_GATHER;
}

/* How many elements of a block one part takes. An all_reduce is not cut: in which order an element
 * is summed depends on its place; nor is an all_to_all, of which ranks do not know each other's
 * counts. */
static int64_t piece_of(const tr_comm *comm, const tr_work *work) {
    if (work->kind == TR_WORK_ALL_REDUCE || work->kind == TR_WORK_ALL_TO_ALL) return work->n;
    int64_t bytes = PART_BYTES, limit = tr_comm_get_switches()->chunk_limit;
    if (has_blocks(work)) {
        bytes /= comm->size;
        if (bytes < LEAST_BLOCK_BYTES) bytes = LEAST_BLOCK_BYTES;
    }
    int64_t elems = bytes / (int64_t)tr_dtype_bytes(work->dtype);
    /* with the switch parts are small too, but several transfers */
    return limit > 0 && limit * 5 / 2 < elems ? limit * 5 / 2 : elems;
}

/* The elements of a block that are in part `index`. */
static tr_range range_of(const tr_request *request, int64_t index) {
    int64_t piece = request->staged->piece, first = index * piece, left = request->work.n - first;
    return (tr_range){first, left < piece ? left : piece};
}

static int64_t align(int64_t bytes) {
    return tr_round_up(bytes, 64);
}

static int64_t memory_bytes(const tr_request *request, int64_t count) {
    const tr_staged *s = request->staged;
    if (request->work.kind == TR_WORK_ALL_TO_ALL) return align(s->send_bytes) + s->recv_bytes;
    int64_t blocks = has_blocks(&request->work) ? request->comm->size : 1;
    return blocks * count * (int64_t)tr_dtype_bytes(request->work.dtype);
}

static void copy(const tr_request *request, bool to_host, void *to, const void *from,
                 int64_t bytes) {
    const tr_side *side = request->staged->side;
    if (bytes == 0) return;
    side->device->copy(to_host ? side->out : side->in, to, from, (size_t)bytes,
                       to_host ? TR_TO_HOST : TR_TO_DEVICE);
}

/* Copies a part of block `index` of the buffer. */
static void copy_block(const tr_request *request, const lane *l, tr_range range, int index,
                       bool to_host) {
    int64_t elem = (int64_t)tr_dtype_bytes(request->work.dtype), bytes = range.count * elem;
    char *device = (char *)request->work.buffer + (index * request->work.n + range.first) * elem;
    char *host = l->memory.at + index * bytes;
    copy(request, to_host, to_host ? host : device, to_host ? device : host, bytes);
}

static bool leaves(const tr_request *request) {
    const tr_work *work = &request->work;
    return work->kind != TR_WORK_RECV &&
           (work->kind != TR_WORK_BROADCAST || work->peer == request->comm->rank);
}

static void copy_out(const tr_request *request, const lane *l, tr_range range) {
    const tr_work *work = &request->work;
    const tr_comm *comm = request->comm;
    switch (work->kind) {
    case TR_WORK_SEND:
        copy(request, true, l->memory.at, (const char *)work->send + range.first, range.count);
        break;
    case TR_WORK_BROADCAST:
    case TR_WORK_ALL_REDUCE:
        copy_block(request, l, range, 0, true);
        break;
    case TR_WORK_REDUCE_SCATTER:
        for (int k = 0; k < comm->size; k++) copy_block(request, l, range, k, true);
        break;
    case TR_WORK_ALL_GATHER:
        copy_block(request, l, range, comm->rank, true);
        break;
    case TR_WORK_ALL_TO_ALL:
        copy(request, true, l->memory.at, work->send, request->staged->send_bytes);
        break;
    default: /* nothing leaves */
        break;
    }
}

static void copy_in(const tr_request *request, const lane *l, tr_range range) {
    const tr_work *work = &request->work;
    const tr_comm *comm = request->comm;
    const tr_staged *s = request->staged;
    switch (work->kind) {
    case TR_WORK_RECV:
    case TR_WORK_ALL_REDUCE:
        copy_block(request, l, range, 0, false);
        break;
    case TR_WORK_BROADCAST:
        if (work->peer != comm->rank) copy_block(request, l, range, 0, false);
        break;
    case TR_WORK_REDUCE_SCATTER:
        copy_block(request, l, range, comm->rank, false);
        break;
    case TR_WORK_ALL_GATHER:
        for (int k = 0; k < comm->size; k++)
            if (k != comm->rank) copy_block(request, l, range, k, false);
        break;
    case TR_WORK_ALL_TO_ALL:
        copy(request, false, work->buffer, l->memory.at + align(s->send_bytes), s->recv_bytes);
        break;
    default: /* nothing arrives */
        break;
    }
}

/* --- parts ---------------------------------------------------------------------------------------
 */

static lane *lane_of(tr_staged *s, int64_t index) {
    return &s->lane[index % LANES];
}

static bool event_done(const tr_staged *s, tr_event *event) {
    return !event || s->side->device->event_done(event);
}

static void fill(tr_request *request) {
    tr_staged *s = request->staged;
    lane *l = lane_of(s, s->filled);
    tr_range range = range_of(request, s->filled++);
    if (!s->side) return;
    l->memory = tr_side_take_staging(s->side, (size_t)memory_bytes(request, range.count));
    l->in = tr_side_take_event(s->side);
    l->out = NULL;
    if (!leaves(request)) return;
    l->out = tr_side_take_event(s->side);
    copy_out(request, l, range);
    s->side->device->event_record(l->out, s->side->out);
}

static void unqueue(tr_request *request) {
    tr_comm *comm = request->comm;
    tr_request *before = NULL;
    for (tr_request *r = comm->staged_first; r != request; r = r->staged->queued_after) before = r;
    tr_request *after = request->staged->queued_after;
    if (before)
        before->staged->queued_after = after;
    else
        comm->staged_first = after;
    if (comm->staged_last == request) comm->staged_last = before;
}

/* The same on the staging memory, or the work itself. */
static tr_work part_of(const tr_request *request, const lane *l, tr_range range) {
    tr_work work = request->work;
    const tr_staged *s = request->staged;
    if (work.kind == TR_WORK_ALL_TO_ALL) {
        work.send_rows = request->rows;
        work.recv_rows = request->rows + request->comm->size;
    }
    if (!s->side) return work;
    work.stream = NULL;
    work.n = range.count;
    work.send = l->memory.at;
    work.buffer = l->memory.at + (work.kind == TR_WORK_ALL_TO_ALL ? align(s->send_bytes) : 0);
    return work;
}

/* Begins the next part if its copies are here and it overtakes nobody. */
static bool begin_part(tr_request *request) {
    tr_staged *s = request->staged;
    lane *l = lane_of(s, s->begun);
    if (s->begun == s->filled || !event_done(s, l->out)) return false;
    for (const tr_request *r = request->comm->staged_first; r != request;
         r = r->staged->queued_after)
        if (in_order(&r->work, &request->work)) return false;
    tr_work work = part_of(request, l, range_of(request, s->begun));
    l->complete = false;
    l->part = tr_part_begin(request->comm, &work);
    if (++s->begun == s->parts) unqueue(request);
    return true;
}

/* Takes back the oldest part if it is complete, and copies what it brought. */
static bool empty(tr_request *request) {
    tr_staged *s = request->staged;
    for (int64_t i = s->emptied; i < s->begun; i++) {
        lane *l = lane_of(s, i);
        if (!l->complete) l->complete = tr_part_advance(l->part);
    }
    lane *l = lane_of(s, s->emptied);
    /* what the caller had enqueued may still use the buffer */
    if (s->emptied == s->begun || !l->complete || !event_done(s, s->ready)) return false;
    tr_range range = range_of(request, s->emptied++);
    if (!s->side) return true;
    copy_in(request, l, range);
    s->side->device->event_record(l->in, s->side->in);
    return true;
}

static bool end_part(tr_request *request) {
    tr_staged *s = request->staged;
    lane *l = lane_of(s, s->done);
    if (s->done == s->emptied || !event_done(s, l->in)) return false;
    s->done++;
    if (!s->side) return true;
    tr_side_give_staging(s->side, l->memory);
    if (l->out) tr_side_give_event(s->side, l->out);
    tr_side_give_event(s->side, l->in);
    return true;
}

static void move(tr_request *request) {
    tr_staged *s = request->staged;
    for (bool moved = true; moved;) {
        moved = false;
        for (; s->filled < s->parts && s->filled - s->done < LANES; moved = true) fill(request);
        while (begin_part(request)) moved = true;
        while (empty(request)) moved = true;
        while (end_part(request)) moved = true;
    }
}

static bool advance(tr_request *request) {
    tr_staged *s = request->staged;
    move(request);
    if (s->done < s->parts) return false;
    if (s->side) tr_side_give_event(s->side, s->ready);
    return true;
}

static void keep_rows(tr_request *request) {
    const tr_work *work = &request->work;
    tr_staged *s = request->staged;
    int size = request->comm->size;
    tr_rows_keep(request);
    s->send_bytes = s->recv_bytes = 0;
    for (int k = 0; k < size; k++) {
        s->send_bytes += request->rows[k] * work->row_bytes;
        s->recv_bytes += request->rows[size + k] * work->row_bytes;
    }
}

static void begin(tr_request *request) {
    const tr_work *work = &request->work;
    tr_comm *comm = request->comm;
    if (!request->staged) request->staged = tr_heap_alloc(1, sizeof *request->staged);
    tr_staged *s = request->staged;
    tr_device *device = tr_work_device(work);
    *s = (tr_staged){.side = device ? tr_side_of(comm->runtime, device) : NULL};
    if (work->kind == TR_WORK_ALL_TO_ALL) keep_rows(request);
    s->piece = device ? piece_of(comm, work) : work->n;
    s->parts = work->n > s->piece ? tr_ceil_div(work->n, s->piece) : 1;
    if (comm->staged_last)
        comm->staged_last->staged->queued_after = request;
    else
        comm->staged_first = request;
    comm->staged_last = request;
    if (device) {
        s->ready = tr_side_take_event(s->side);
        device->event_record(s->ready, work->stream);
        if (leaves(request)) device->stream_wait_event(s->side->out, s->ready);
    }
    move(request);
}

void tr_staged_free(tr_staged *staged) {
    free(staged);
}

const tr_backend tr_backend_staged = {
    .name = "staged", .serves = serves, .begin = begin, .advance = advance};
