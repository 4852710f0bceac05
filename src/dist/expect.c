/* expect.c - the groups of a device's fabric, joined and connected before they are needed.
 * Floor: dist.
 *
 * A link joins with its first operation (fabric.c), and the library may connect its ranks only
 * then, and for that kind of operation alone. So who will use a group says so when it is made, and
 * tr_comm_join carries out a small operation of each kind that is expected, communicator after
 * communicator as all ranks have made them, so that nobody waits in a circle. Of one communicator
 * all operations begin before one ends. */
#include "dist/backend.h"

#include "base/fabric.h"
#include "base/heap.h"

#include <stdlib.h>

enum { TAG = 1000 }; /* of messages; callers have those below */

struct tr_expected {
    tr_expected *next;
    tr_device *device; /* borrowed */
    tr_work_kind kind; /* ALL_GATHER: of blocks; ALL_TO_ALL: of rows; SEND: messages */
    int peer;          /* of messages */
    int64_t *rows;     /* of ALL_TO_ALL: [size] to, then [size] from */
    tr_request *request[2];
};

/* A new one, last in the list; NULL: nothing is to be done, or it is there. */
static tr_expected *expect(tr_comm *comm, tr_device *device, tr_work_kind kind, int peer) {
    tr_expected **last = &comm->expected;
    if (!device->fabric || comm->size == 1 || peer == comm->rank) return NULL;
    for (; *last; last = &(*last)->next)
        if ((*last)->device == device && (*last)->kind == kind && (*last)->peer == peer)
            return NULL;
    tr_expected *e = tr_heap_alloc(1, sizeof *e);
    *e = (tr_expected){.device = device, .kind = kind, .peer = peer};
    return *last = e;
}

void tr_comm_expect_blocks(tr_comm *comm, tr_device *device) {
    expect(comm, device, TR_WORK_ALL_GATHER, -1);
}

void tr_comm_expect_rows(tr_comm *comm, tr_device *device, const int64_t *to, const int64_t *from) {
    tr_expected *e = expect(comm, device, TR_WORK_ALL_TO_ALL, -1);
    int64_t size = comm->size;
    if (!e) return;
    e->rows = tr_heap_alloc(2 * size, sizeof *e->rows);
    for (int64_t r = 0; r < size; r++) {
        e->rows[r] = to[r] != 0;
        e->rows[size + r] = from[r] != 0;
    }
}

void tr_comm_expect_messages(tr_comm *comm, tr_device *device, int peer) {
    expect(comm, device, TR_WORK_SEND, peer);
}

/* In memory of two bytes a rank: sent, and received. */
static void begin(tr_comm *comm, tr_expected *e, char *out) {
    tr_stream *stream = e->device->stream;
    char *in = out + comm->size;
    switch (e->kind) {
    case TR_WORK_ALL_GATHER:
        e->request[0] = tr_all_gather_begin(comm, stream, TR_U8, out, 1);
        break;
    case TR_WORK_ALL_TO_ALL:
        e->request[0] =
            tr_all_to_all_begin(comm, stream, out, e->rows, in, e->rows + comm->size, 1);
        break;
    default:
        e->request[0] = tr_recv_begin(comm, stream, e->peer, TAG, in, 1);
        e->request[1] = tr_send_begin(comm, stream, e->peer, TAG, out, 1);
    }
}

static void try_all(tr_comm *comm, tr_device *device) {
    const tr_allocator *a = &device->allocator;
    size_t used = 0, bytes = 0, each = 2 * (size_t)comm->size;
    for (const tr_expected *e = comm->expected; e; e = e->next)
        if (e->device == device) bytes += each;
    if (bytes == 0) return;
    char *memory = tr_allocator_take(a, bytes, "first messages");
    if (!memory) tr_abort("%s", tr_error_message());
    device->zero(device->stream, memory, bytes);
    for (tr_expected *e = comm->expected; e; e = e->next) {
        if (e->device != device) continue;
        begin(comm, e, memory + used);
        used += each;
    }
    for (const tr_expected *e = comm->expected; e; e = e->next)
        for (int i = 0; i < 2 && e->device == device; i++) tr_end(e->request[i]);
    device->stream_wait(device->stream);
    tr_allocator_give(a, memory, bytes);
    tr_expected_free(comm, device);
}

void tr_comm_join(tr_comm *world, tr_device *device) {
    if (!device->fabric) return;
    for (tr_comm *comm = world->runtime->comms; comm; comm = comm->next) try_all(comm, device);
    tr_end(tr_barrier_begin(world));
}

void tr_expected_free(tr_comm *comm, const tr_device *device) {
    for (tr_expected **at = &comm->expected; *at;) {
        tr_expected *e = *at;
        if (device && e->device != device) {
            at = &e->next;
            continue;
        }
        *at = e->next;
        free(e->rows);
        free(e);
    }
}
