/* on_device.c - see on_device.h. */
#undef TR_TEST_ON_DEVICE /* here operations are the real ones */
#include "tests/dist/on_device.h"

#include "tests/dist/late_device.h"
#include "tests/dist/mpi_fabric.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STREAMS = 3, MOST = 1024 };

/* A buffer of the caller and what stands for it on the device. */
typedef struct {
    void *host; /* NULL: only sent */
    char *device, *staging;
    size_t bytes;
} mirror;

typedef struct {
    tr_request *request; /* NULL: free */
    tr_stream *stream;
    mirror sent, worked;
} flight;

static struct {
    late_device *late;
    tr_fabric *fabric;
    tr_device *device;
    tr_stream *streams[STREAMS];
    int turn;
    flight flights[MOST];
} here;

void on_device_start(bool fabric, int rank) {
    here.late = late_create((uint64_t)rank + 1);
    here.device = late_device_of(here.late);
    here.fabric = fabric ? mpi_fabric_create(here.late) : NULL;
    for (int i = 0; i < STREAMS; i++) here.streams[i] = here.device->stream_create(here.device);
}

void on_device_stop(tr_comm *world) {
    for (int i = 0; i < STREAMS; i++) here.device->stream_destroy(here.streams[i]);
    tr_comm_leave_device(world, here.device);
    if (here.fabric) mpi_fabric_destroy(here.fabric);
    late_destroy(here.late);
    here.late = NULL;
}

bool on_device_has_fabric(void) {
    return here.fabric;
}

/* The device goes on while the host waits for something else. */
int MPI_Iprobe(int source, int tag, MPI_Comm comm, int *flag, MPI_Status *status) {
    if (here.late) late_tick(here.late);
    return PMPI_Iprobe(source, tag, comm, flag, status);
}

static mirror make_mirror(tr_stream *stream, const void *buffer, int64_t bytes) {
    const tr_allocator *a = &here.device->allocator, *s = &here.device->staging;
    mirror m = {.bytes = (size_t)bytes};
    m.device = a->alloc(a->self, m.bytes);
    m.staging = s->alloc(s->self, m.bytes);
    if (bytes > 0) memcpy(m.staging, buffer, m.bytes);
    here.device->copy(stream, m.device, m.staging, m.bytes, TR_TO_DEVICE);
    return m;
}

static void free_mirror(const mirror *m) {
    const tr_allocator *a = &here.device->allocator, *s = &here.device->staging;
    if (!m->device) return;
    a->free(a->self, m->device, m->bytes);
    s->free(s->self, m->staging, m->bytes);
}

static flight take_off(const void *sent, int64_t sent_bytes, void *worked, int64_t worked_bytes) {
    flight f = {.stream = here.streams[here.turn++ % STREAMS]};
    if (sent_bytes >= 0) f.sent = make_mirror(f.stream, sent, sent_bytes);
    if (worked_bytes >= 0) f.worked = make_mirror(f.stream, worked, worked_bytes);
    f.worked.host = worked;
    return f;
}

static void land(const flight *f) {
    const mirror *sent = &f->sent, *worked = &f->worked;
    if (sent->device) here.device->zero(f->stream, sent->device, sent->bytes);
    if (worked->device)
        here.device->copy(f->stream, worked->staging, worked->device, worked->bytes, TR_TO_HOST);
    here.device->stream_wait(f->stream);
    if (worked->bytes > 0) memcpy(worked->host, worked->staging, worked->bytes);
    free_mirror(sent);
    free_mirror(worked);
}

static tr_request *fly(flight f, tr_request *request) {
    f.request = request;
    int i = 0;
    if (!request) {
        land(&f);
        return NULL;
    }
    while (i < MOST && here.flights[i].request) i++;
    if (i == MOST) abort();
    here.flights[i] = f;
    return request;
}

tr_request *on_device_send(tr_comm *comm, tr_stream *none, int peer, int tag, const void *buffer,
                           int64_t bytes) {
    (void)none;
    flight f = take_off(buffer, bytes, NULL, -1);
    return fly(f, tr_send_begin(comm, f.stream, peer, tag, f.sent.device, bytes));
}

tr_request *on_device_recv(tr_comm *comm, tr_stream *none, int peer, int tag, void *buffer,
                           int64_t bytes) {
    (void)none;
    flight f = take_off(NULL, -1, buffer, bytes);
    return fly(f, tr_recv_begin(comm, f.stream, peer, tag, f.worked.device, bytes));
}

tr_request *on_device_broadcast(tr_comm *comm, tr_stream *none, int root, void *buffer,
                                int64_t bytes) {
    (void)none;
    flight f = take_off(NULL, -1, buffer, bytes);
    return fly(f, tr_broadcast_begin(comm, f.stream, root, f.worked.device, bytes));
}

tr_request *on_device_all_reduce(tr_comm *comm, tr_stream *none, tr_op op, tr_dtype t, void *buffer,
                                 int64_t n) {
    (void)none;
    flight f = take_off(NULL, -1, buffer, n * (int64_t)tr_dtype_bytes(t));
    return fly(f, tr_all_reduce_begin(comm, f.stream, op, t, f.worked.device, n));
}

tr_request *on_device_reduce_scatter(tr_comm *comm, tr_stream *none, tr_dtype t, void *buffer,
                                     int64_t n) {
    (void)none;
    flight f = take_off(NULL, -1, buffer, tr_comm_size(comm) * n * (int64_t)tr_dtype_bytes(t));
    return fly(f, tr_reduce_scatter_begin(comm, f.stream, t, f.worked.device, n));
}

tr_request *on_device_all_gather(tr_comm *comm, tr_stream *none, tr_dtype t, void *buffer,
                                 int64_t n) {
    (void)none;
    flight f = take_off(NULL, -1, buffer, tr_comm_size(comm) * n * (int64_t)tr_dtype_bytes(t));
    return fly(f, tr_all_gather_begin(comm, f.stream, t, f.worked.device, n));
}

tr_request *on_device_all_to_all(tr_comm *comm, tr_stream *none, const void *send,
                                 const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                                 int64_t row_bytes) {
    (void)none;
    int64_t sent = 0, received = 0;
    for (int k = 0; k < tr_comm_size(comm); k++) {
        sent += send_rows[k] * row_bytes;
        received += recv_rows[k] * row_bytes;
    }
    flight f = take_off(send, sent, recv, received);
    return fly(f, tr_all_to_all_begin(comm, f.stream, f.sent.device, send_rows, f.worked.device,
                                      recv_rows, row_bytes));
}

void on_device_end(tr_request *request) {
    int i = 0;
    tr_end(request);
    while (request && i < MOST && here.flights[i].request != request) i++;
    if (!request || i == MOST) return; /* nothing, or a barrier */
    flight f = here.flights[i];
    here.flights[i].request = NULL;
    land(&f);
}
