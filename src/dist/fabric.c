/* fabric.c - operations on device memory through the device's fabric. Floor: dist.
 *
 * A link is some ranks of a communicator that have joined as a group of the fabric, with a stream
 * of its own: all ranks, for collectives, and each pair, for messages. It joins when it is first
 * used, for which expect.c cares early: its first rank makes the id, and MPI carries it. A request
 * waits in the link's queue until the link has joined and what it began before is in the stream; it
 * is complete, for tr_test, once it is in the stream itself, and tr_end makes the caller's stream
 * wait for it. So the host does not wait for transfers, and what goes on at the same time is up to
 * the streams.
 *
 * Collectives go to the stream in the order in which they were begun, behind the caller's work.
 *
 * Messages cannot: the fabric matches those of a pair by their order alone, in which the one's
 * sends and the other's receives need not be begun (other tags, other directions); and a message
 * that has come to the head of a stream keeps all behind it waiting until its peer does the same,
 * which around a circle of ranks is for ever. So the two ranks of a pair agree before, by small
 * messages through MPI:
 *     announce  The second tells the first each of its messages that may move now: it has been
 *               begun, and the caller's stream has come to that point.
 *     go        The first finds those that match one of its own, which may move too, by tag, in
 *               order; it begins them as one group, and tells the second, which does the same.
 * Both therefore begin the same, in the same order, and only what neither side keeps waiting. A
 * message then ends as a synchronous send through MPI would, and nobody waits in a circle who would
 * not with those. Pairs have a stream each, so none waits behind another's. */
#include "dist/backend.h"

#include "base/fabric.h"
#include "base/heap.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_AT_ONCE = 16 }; /* messages in one group */

typedef enum { FRESH, IDENTIFYING, JOINING, JOINED } link_progress;

/* The second's messages that are to move, in order. */
typedef struct {
    int32_t count;
    tr_notice message[MOST_AT_ONCE];
} go_word;

struct tr_link {
    tr_link *next;
    tr_comm *comm;
    tr_device *device; /* borrowed */
    int peer;          /* of comm; -1: a link of all */
    int rank, size;    /* in the link */
    link_progress progress;
    char *id;
    MPI_Request *id_moves; /* [size] */
    tr_fabric_group *group;
    tr_stream *stream;
    tr_request *first, *last; /* begun and not in the stream, in order */
    int issued;               /* of these, given to the group */
    /* of the first of a pair: what the second has announced */
    tr_notice *announced;
    int64_t announced_count, announced_room;
    go_word go;
    MPI_Request going;
};

static const tr_fabric *fabric_of(const tr_link *link) {
    return link->device->fabric;
}

static bool is_message(const tr_work *work) {
    return work->kind == TR_WORK_SEND || work->kind == TR_WORK_RECV;
}

static bool serves(tr_comm *comm, const tr_work *work) {
    tr_device *device = tr_work_device(work);
    if (!device || !device->fabric || comm->size == 1) return false;
    return !is_message(work) || work->peer != comm->rank;
}

/* --- joining ------------------------------------------------------------------------------------
 */

static int rank_in_comm(const tr_link *link, int rank) {
    if (link->peer < 0) return rank;
    return rank == link->rank ? link->comm->rank : link->peer;
}

static tr_link *find_link(tr_comm *comm, tr_device *device, int peer) {
    for (tr_link *link = comm->links; link; link = link->next)
        if (link->device == device && link->peer == peer) return link;
    tr_link *link = tr_heap_alloc(1, sizeof *link);
    bool pair = peer >= 0;
    *link = (tr_link){.next = comm->links,
                      .comm = comm,
                      .device = device,
                      .peer = peer,
                      .rank = pair ? comm->rank > peer : comm->rank,
                      .size = pair ? 2 : comm->size,
                      .stream = device->stream_create(device),
                      .going = MPI_REQUEST_NULL};
    link->id = tr_heap_alloc(fabric_of(link)->id_bytes, 1);
    link->id_moves = tr_heap_alloc(link->size, sizeof *link->id_moves);
    for (int r = 0; r < link->size; r++) link->id_moves[r] = MPI_REQUEST_NULL;
    comm->links = link;
    return link;
}

static void exchange_id(tr_link *link) {
    MPI_Comm mpi = link->comm->internal;
    int bytes = (int)fabric_of(link)->id_bytes;
    if (link->rank > 0) {
        TR_MPI(MPI_Irecv(link->id, bytes, MPI_BYTE, rank_in_comm(link, 0), TR_TAG_ID, mpi,
                         &link->id_moves[0]));
        return;
    }
    fabric_of(link)->make_id(fabric_of(link), link->id);
    for (int r = 1; r < link->size; r++)
        TR_MPI(MPI_Isend(link->id, bytes, MPI_BYTE, rank_in_comm(link, r), TR_TAG_ID, mpi,
                         &link->id_moves[r]));
}

static void join(tr_link *link) {
    char name[96];
    if (link->peer < 0)
        snprintf(name, sizeof name, "group %s", link->comm->name);
    else
        snprintf(name, sizeof name, "messages with rank %d of group %s", link->peer,
                 link->comm->name);
    link->group = fabric_of(link)->join(fabric_of(link), link->id, link->rank, link->size,
                                        link->stream, name);
}

/* True once the link has joined and its group has nothing going on. */
static bool settled(tr_link *link) {
    int all = 0;
    switch (link->progress) {
    case FRESH:
        exchange_id(link);
        link->progress = IDENTIFYING;
        /* fallthrough */
    case IDENTIFYING:
        TR_MPI(MPI_Testall(link->size, link->id_moves, &all, MPI_STATUSES_IGNORE));
        if (!all) return false;
        join(link);
        link->progress = JOINING;
        /* fallthrough */
    default:
        if (!fabric_of(link)->settled(link->group)) return false;
        link->progress = JOINED;
        return true;
    }
}

/* --- the queue ----------------------------------------------------------------------------------
 */

/* What was issued is in the stream now, and leaves the queue. */
static void take_issued(tr_link *link) {
    tr_request *before = NULL, *after;
    for (tr_request *r = link->first; link->issued > 0; r = after) {
        after = r->after;
        if (r->link_state != TR_LINK_ISSUED) {
            before = r;
            continue;
        }
        if (before)
            before->after = after;
        else
            link->first = after;
        if (link->last == r) link->last = before;
        r->link = NULL;
        link->device->event_record(r->event, link->stream);
        link->issued--;
    }
}

static void mark_issued(tr_link *link, tr_request *request) {
    request->link_state = TR_LINK_ISSUED;
    link->issued++;
}

/* --- collectives --------------------------------------------------------------------------------
 */

static void issue_all_to_all(tr_link *link, const tr_request *request) {
    const tr_work *work = &request->work;
    int size = link->size, count = 0;
    const int64_t *rows = request->rows;
    tr_fabric_message messages[2 * size];
    const char *from = work->send;
    char *to = work->buffer;
    for (int k = 0; k < size; k++) {
        int64_t out = rows[k] * work->row_bytes, in = rows[size + k] * work->row_bytes;
        if (out > 0 && k != link->rank) tr_count_sent(link->comm, k, out);
        if (out > 0) messages[count++] = (tr_fabric_message){true, k, (void *)(uintptr_t)from, out};
        if (in > 0) messages[count++] = (tr_fabric_message){false, k, to, in};
        from += out;
        to += in;
    }
    if (count > 0) fabric_of(link)->exchange(link->group, messages, count);
}

static void issue_collective(tr_link *link, tr_request *request) {
    const tr_work *work = &request->work;
    const tr_fabric *fabric = fabric_of(link);
    link->device->stream_wait_event(link->stream, request->event);
    mark_issued(link, request);
    switch (work->kind) {
    case TR_WORK_BROADCAST:
        fabric->broadcast(link->group, work->peer, work->buffer, work->n);
        break;
    case TR_WORK_ALL_REDUCE:
        fabric->all_reduce(link->group, work->op, work->dtype, work->buffer, work->n);
        break;
    case TR_WORK_REDUCE_SCATTER:
        fabric->reduce_scatter(link->group, work->dtype, work->buffer, work->n);
        break;
    case TR_WORK_ALL_GATHER:
        fabric->all_gather(link->group, work->dtype, work->buffer, work->n);
        break;
    case TR_WORK_ALL_TO_ALL:
        issue_all_to_all(link, request);
        break;
    default:
        tr_abort("work %d is unknown", (int)work->kind);
    }
}

/* --- messages -----------------------------------------------------------------------------------
 */

static bool same(const tr_notice *a, const tr_notice *b) {
    return a->sends == b->sends && a->tag == b->tag;
}

/* Whether it may move now: it has not been told yet, and none before it that it must follow waits.
 */
static bool may_move(const tr_link *link, const tr_request *request) {
    if (request->link_state != TR_LINK_BEGUN || !link->device->event_done(request->event))
        return false;
    for (const tr_request *r = link->first; r != request; r = r->after)
        if (r->link_state == TR_LINK_BEGUN && same(&r->notice, &request->notice)) return false;
    return true;
}

static void announce(tr_link *link) {
    for (tr_request *r = link->first; r; r = r->after) {
        if (!may_move(link, r)) continue;
        r->link_state = TR_LINK_ANNOUNCED;
        TR_MPI(MPI_Isend(&r->notice, sizeof r->notice, MPI_BYTE, link->peer, TR_TAG_NOTICE,
                         link->comm->internal, &r->noticed));
    }
}

/* Takes one message of the peer if one is here. */
static bool hear(const tr_link *link, int tag, void *word, size_t bytes) {
    int here = 0;
    TR_MPI(MPI_Iprobe(link->peer, tag, link->comm->internal, &here, MPI_STATUS_IGNORE));
    if (here)
        TR_MPI(MPI_Recv(word, (int)bytes, MPI_BYTE, link->peer, tag, link->comm->internal,
                        MPI_STATUS_IGNORE));
    return here;
}

static void hear_notices(tr_link *link) {
    for (tr_notice n; hear(link, TR_TAG_NOTICE, &n, sizeof n);) {
        link->announced = tr_heap_grow(link->announced, link->announced_count,
                                       &link->announced_room, sizeof *link->announced);
        link->announced[link->announced_count++] = n;
    }
}

static void issue_messages(tr_link *link, tr_request *const *requests, int count) {
    tr_fabric_message messages[MOST_AT_ONCE];
    int moving = 0;
    for (int i = 0; i < count; i++) {
        const tr_work *w = &requests[i]->work;
        bool sends = w->kind == TR_WORK_SEND;
        void *buffer = sends ? (void *)(uintptr_t)w->send : w->buffer;
        mark_issued(link, requests[i]);
        if (sends) tr_count_sent(link->comm, link->peer, w->n);
        if (w->n > 0) messages[moving++] = (tr_fabric_message){sends, 1 - link->rank, buffer, w->n};
    }
    if (moving > 0) fabric_of(link)->exchange(link->group, messages, moving);
}

/* The first of the announced that matches a message of this rank, or -1. */
static int64_t find_announced(const tr_link *link, const tr_notice *mine) {
    tr_notice theirs = {.sends = !mine->sends, .tag = mine->tag};
    for (int64_t i = 0; i < link->announced_count; i++)
        if (same(&link->announced[i], &theirs)) return i;
    return -1;
}

static void lead(tr_link *link) {
    tr_request *chosen[MOST_AT_ONCE];
    int count = 0, gone = 0;
    hear_notices(link);
    TR_MPI(MPI_Test(&link->going, &gone, MPI_STATUS_IGNORE));
    if (!gone) return;
    for (tr_request *r = link->first; r && count < MOST_AT_ONCE; r = r->after) {
        int64_t found = may_move(link, r) ? find_announced(link, &r->notice) : -1;
        if (found < 0) continue;
        tr_notice theirs = link->announced[found];
        if (theirs.bytes != r->notice.bytes)
            tr_abort("rank %d of group %s sends %lld bytes with tag %d, and rank %d receives %lld",
                     r->notice.sends ? link->comm->rank : link->peer, link->comm->name,
                     (long long)(r->notice.sends ? r->notice.bytes : theirs.bytes), theirs.tag,
                     r->notice.sends ? link->peer : link->comm->rank,
                     (long long)(r->notice.sends ? theirs.bytes : r->notice.bytes));
        memmove(&link->announced[found], &link->announced[found + 1],
                (size_t)(--link->announced_count - found) * sizeof theirs);
        r->link_state = TR_LINK_ANNOUNCED;
        link->go.message[count] = theirs;
        chosen[count++] = r;
    }
    if (count == 0) return;
    link->go.count = count;
    TR_MPI(MPI_Isend(&link->go, sizeof link->go, MPI_BYTE, link->peer, TR_TAG_GO,
                     link->comm->internal, &link->going));
    issue_messages(link, chosen, count);
}

static void follow(tr_link *link) {
    tr_request *chosen[MOST_AT_ONCE];
    go_word go;
    if (!hear(link, TR_TAG_GO, &go, sizeof go)) return;
    for (int i = 0; i < go.count; i++) {
        tr_request *r = link->first;
        while (r && (r->link_state != TR_LINK_ANNOUNCED || !same(&r->notice, &go.message[i])))
            r = r->after;
        if (!r) tr_abort("a link is told to move a message that it has not announced");
        /* it has arrived, as it was answered */
        TR_MPI(MPI_Wait(&r->noticed, MPI_STATUS_IGNORE));
        r->link_state = TR_LINK_ISSUED;
        chosen[i] = r;
    }
    issue_messages(link, chosen, go.count);
}

/* --- requests -----------------------------------------------------------------------------------
 */

/* Never waits. Puts into the stream what may go there. */
static void drive(tr_link *link) {
    if (link->peer >= 0 && link->rank == 1) announce(link); /* also while it is joining */
    while (link->first && settled(link)) {
        if (link->issued > 0)
            take_issued(link);
        else if (link->peer < 0)
            issue_collective(link, link->first);
        else if (link->rank == 0)
            lead(link);
        else
            follow(link);
        if (link->peer >= 0 && link->issued == 0) break;
    }
}

static void begin(tr_request *request) {
    const tr_work *work = &request->work;
    tr_device *device = tr_work_device(work);
    bool message = is_message(work);
    tr_link *link = find_link(request->comm, device, message ? work->peer : -1);
    if (work->kind == TR_WORK_ALL_TO_ALL) tr_rows_keep(request);
    request->event = tr_side_take_event(tr_side_of(request->comm->runtime, device));
    device->event_record(request->event, work->stream);
    request->notice =
        (tr_notice){.sends = work->kind == TR_WORK_SEND, .tag = work->tag, .bytes = work->n};
    request->link = link;
    request->link_state = TR_LINK_BEGUN;
    request->after = NULL;
    if (link->last)
        link->last->after = request;
    else
        link->first = request;
    link->last = request;
    drive(link);
}

static bool advance(tr_request *request) {
    if (request->link) drive(request->link);
    return !request->link;
}

static void end(tr_request *request) {
    tr_device *device = tr_work_device(&request->work);
    device->stream_wait_event(request->work.stream, request->event);
    tr_side_give_event(tr_side_of(request->comm->runtime, device), request->event);
}

/* Takes those of the device, or all, off the communicator. */
static tr_link *take_links(tr_comm *comm, const tr_device *device) {
    tr_link *taken = NULL;
    for (tr_link **at = &comm->links; *at;) {
        tr_link *link = *at;
        if (device && link->device != device) {
            at = &link->next;
            continue;
        }
        *at = link->next;
        link->next = taken;
        taken = link;
    }
    return taken;
}

void tr_links_free(tr_comm *comm, const tr_device *device) {
    bool leaving = true;
    tr_link *taken = take_links(comm, device);
    for (tr_link *link = taken; link; link = link->next) {
        link->device->stream_wait(link->stream);
        fabric_of(link)->finish(link->group);
    }
    while (leaving) {
        leaving = false;
        for (tr_link *link = taken; link; link = link->next)
            leaving |= !fabric_of(link)->settled(link->group);
    }
    for (tr_link *link = taken, *next; link; link = next) {
        next = link->next;
        TR_MPI(MPI_Wait(&link->going, MPI_STATUS_IGNORE));
        fabric_of(link)->leave(link->group);
        link->device->stream_destroy(link->stream);
        free(link->id);
        free(link->id_moves);
        free(link->announced);
        free(link);
    }
}

const tr_backend tr_backend_fabric = {
    .name = "fabric", .serves = serves, .begin = begin, .advance = advance, .end = end};
