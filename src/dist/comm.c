/* comm.c - communicators, their requests and who waits, see comm.h. Floor: dist.
 *
 * Nothing progresses in the background: a rank that waits drives every operation in flight in the
 * process, in the order they were begun, so that ranks that end operations of different
 * communicators in different orders still serve each other. */
#include "dist/backend.h"
#include "dist/watch.h"

#include "base/heap.h"
#include "base/log.h"
#include "base/switch.h"
#include "base/trace.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Process-wide by contract: test switches, set before the first operation. */
static tr_comm_switches switches = {.chunk_limit = 0, .synchronous = false, .shared = true};

const tr_comm_switches *tr_comm_get_switches(void) {
    return &switches;
}
void tr_comm_set_chunk_limit(int64_t elems) {
    switches.chunk_limit = elems;
}
void tr_comm_set_synchronous(bool on) {
    switches.synchronous = on;
}
void tr_comm_set_shared(bool on) {
    switches.shared = on;
}
void tr_comm_set_node_ranks(int ranks) {
    switches.node_ranks = ranks;
}

static void read_switches(void) {
    tr_comm_switches *s = &switches;
    s->chunk_limit = tr_switch("TRIREME_CHUNK_LIMIT", s->chunk_limit);
    s->node_ranks = (int)tr_switch("TRIREME_NODE_RANKS", s->node_ranks);
    s->synchronous = tr_switch("TRIREME_SYNCHRONOUS", s->synchronous);
    s->shared = !tr_switch("TRIREME_NO_SHARED", !s->shared);
}

/* Collective on mpi, which the new communicator owns. */
static tr_comm *wrap(MPI_Comm mpi, tr_runtime *runtime) {
    tr_comm *comm = tr_heap_alloc(1, sizeof *comm);
    comm->runtime = runtime;
    comm->name = "";
    tr_comm **last = &runtime->comms;
    while (*last) last = &(*last)->next;
    *last = comm;
    comm->mpi = mpi;
    TR_MPI(MPI_Comm_rank(mpi, &comm->rank));
    TR_MPI(MPI_Comm_size(mpi, &comm->size));
    TR_MPI(MPI_Comm_dup(mpi, &comm->internal));
    tr_nodes_find(comm);
    if (comm->may_share) comm->lines_memory = tr_memory_create(comm, TR_LINE_BYTES);
    if (comm->lines_memory && comm->lines_memory->peer) {
        comm->lines = tr_heap_alloc(comm->node_size, sizeof *comm->lines);
        for (int k = 0; k < comm->node_size; k++)
            comm->lines[k] = (tr_shared_line *)(void *)comm->lines_memory->peer[k];
    }
    return comm;
}

tr_comm *tr_comm_start(int *argc, char ***argv) {
    tr_out_of_memory_ends(tr_abort_with);
    tr_guard_exit(true);
    /* Open MPI's own file layer reads chunked HDF5 data wrongly with data sieving (ompi #10546). */
    setenv("OMPI_MCA_fbtl_posix_read_datasieving", "0", 0);
    int provided;
    TR_MPI(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided));
    TR_MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    TR_MPI(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN));
    int rank;
    TR_MPI(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    tr_log_rank(rank);
    if (provided < MPI_THREAD_FUNNELED)
        tr_abort("this MPI does not allow threads (MPI_THREAD_FUNNELED)");
    read_switches();

    tr_runtime *runtime = tr_heap_alloc(1, sizeof *runtime);
    MPI_Comm mpi;
    TR_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &mpi));
    tr_comm *world = wrap(mpi, runtime);
    world->is_world = true;
    runtime->local = world->local;
    return world;
}

tr_comm *tr_comm_split(tr_comm *parent, int color, int key) {
    MPI_Comm mpi;
    TR_MPI(MPI_Comm_split(parent->mpi, color < 0 ? MPI_UNDEFINED : color, key, &mpi));
    return mpi == MPI_COMM_NULL ? NULL : wrap(mpi, parent->runtime);
}

void tr_comm_free(tr_comm *comm) {
    if (!comm) return;
    if (comm->in_flight != 0)
        tr_abort("a communicator is freed with %lld operations in flight: tr_end them first",
                 (long long)comm->in_flight);
    tr_expected_free(comm, NULL);
    tr_links_free(comm, NULL);
    tr_comm **link = &comm->runtime->comms;
    while (*link != comm) link = &(*link)->next;
    *link = comm->next;
    while (comm->memories) tr_memory_destroy(comm, comm->memories);
    free(comm->lines);
    free(comm->node_of);
    free(comm->rank_of);
    free(comm->across);
    free(comm->everyone);
    while (comm->pool) {
        tr_request *request = comm->pool;
        comm->pool = request->next;
        free(request->mpi);
        free(request->statuses);
        free(request->staging);
        free(request->rows);
        tr_staged_free(request->staged);
        free(request);
    }
    TR_MPI(MPI_Comm_free(&comm->internal));
    TR_MPI(MPI_Comm_free(&comm->mpi));
    if (comm->is_world) free(comm->runtime);
    free(comm);
}

void tr_comm_leave_device(tr_comm *world, tr_device *device) {
    for (tr_comm *comm = world->runtime->comms; comm; comm = comm->next) {
        tr_expected_free(comm, device);
        tr_links_free(comm, device);
    }
    tr_side_free(world->runtime, device);
}

void tr_comm_set_name(tr_comm *comm, const char *name) {
    comm->name = name;
}

void tr_comm_stop(tr_comm *world) {
    tr_comm_free(world);
    TR_MPI(MPI_Finalize());
    tr_guard_exit(false);
}

int tr_comm_rank(const tr_comm *comm) {
    return comm->rank;
}
int tr_comm_size(const tr_comm *comm) {
    return comm->size;
}
int tr_comm_node_size(const tr_comm *comm) {
    return comm->node_size;
}
int tr_comm_node_of(const tr_comm *comm, int rank) {
    return comm->node_of[rank];
}
int tr_comm_local_rank(const tr_comm *comm) {
    return comm->runtime->local;
}
tr_sent tr_comm_sent(const tr_comm *comm) {
    return comm->sent;
}
void *tr_comm_mpi(tr_comm *comm) {
    return &comm->mpi;
}

void *tr_comm_alloc(tr_comm *comm, int64_t bytes) {
    return tr_memory_create(comm, bytes)->own;
}

void tr_comm_free_memory(tr_comm *comm, void *memory) {
    if (!memory) return;
    tr_memory *found = comm->memories;
    while (found && found->own != memory) found = found->next;
    if (!found)
        tr_abort("tr_comm_free_memory: the memory is not from this communicator's tr_comm_alloc");
    tr_memory_destroy(comm, found);
}

/* Requests: taken from the pool, and linked last among those in flight. */
static tr_request *take_request(tr_comm *comm, const tr_work *work) {
    tr_request *request = comm->pool;
    if (request)
        comm->pool = request->next;
    else
        request = tr_heap_alloc(1, sizeof *request);
    request->comm = comm;
    request->work = *work;
    request->complete = false;
    comm->in_flight++;
    return request;
}

static void give_request(tr_request *request) {
    tr_comm *comm = request->comm;
    request->next = comm->pool;
    comm->pool = request;
    comm->in_flight--;
}

static void link_request(tr_request *request) {
    tr_runtime *runtime = request->comm->runtime;
    request->next = NULL;
    request->previous = runtime->last;
    if (runtime->last)
        runtime->last->next = request;
    else
        runtime->first = request;
    runtime->last = request;
}

static void unlink_request(tr_request *request) {
    tr_runtime *runtime = request->comm->runtime;
    if (request->previous)
        request->previous->next = request->next;
    else
        runtime->first = request->next;
    if (request->next)
        request->next->previous = request->previous;
    else
        runtime->last = request->previous;
}

static const char *const work_name[TR_WORK_COUNT] = {
    [TR_WORK_SEND] = "send",
    [TR_WORK_RECV] = "receive",
    [TR_WORK_BARRIER] = "barrier",
    [TR_WORK_BROADCAST] = "broadcast",
    [TR_WORK_ALL_REDUCE] = "all_reduce",
    [TR_WORK_REDUCE_SCATTER] = "reduce_scatter",
    [TR_WORK_ALL_GATHER] = "all_gather",
    [TR_WORK_ALL_TO_ALL] = "all_to_all",
};

/* Bytes of the operation's buffer on this rank. */
static int64_t work_bytes(const tr_comm *comm, const tr_work *w) {
    int64_t n = w->n * (int64_t)tr_dtype_bytes(w->dtype), rows = 0;
    switch (w->kind) {
    case TR_WORK_REDUCE_SCATTER:
    case TR_WORK_ALL_GATHER:
        return n * comm->size;
    case TR_WORK_ALL_TO_ALL:
        for (int r = 0; r < comm->size; r++) rows += w->send_rows[r];
        return rows * w->row_bytes;
    default:
        return n;
    }
}

static bool advance(tr_request *request) {
    if (!request->complete && request->backend->advance(request)) {
        request->complete = true;
        tr_trace_transfer_end(work_name[request->work.kind], request->traced);
        unlink_request(request);
    }
    return request->complete;
}

/* In the order in which they are asked; those from HOST_BACKENDS on are for host memory. */
static const tr_backend *const backends[] = {&tr_backend_fabric, &tr_backend_staged,
                                             &tr_backend_shared, &tr_backend_mpi};
enum { HOST_BACKENDS = 2 };

static const tr_backend *choose(tr_comm *comm, const tr_work *work, int first) {
    while (backends[first]->serves && !backends[first]->serves(comm, work)) first++;
    return backends[first];
}

static tr_request *begin(tr_comm *comm, const tr_work *work) {
    tr_request *request = take_request(comm, work);
    link_request(request);
    request->backend = choose(comm, work, 0);
    request->traced = tr_trace_transfer_begin(work_name[work->kind], work_bytes(comm, work));
    request->backend->begin(request);
    return request;
}

tr_request *tr_part_begin(tr_comm *comm, const tr_work *work) {
    tr_request *part = take_request(comm, work);
    part->backend = choose(comm, work, HOST_BACKENDS);
    part->backend->begin(part);
    return part;
}

void tr_rows_keep(tr_request *request) {
    int64_t size = request->comm->size;
    size_t bytes = (size_t)size * sizeof *request->rows;
    if (!request->rows) request->rows = tr_heap_alloc(2 * size, sizeof *request->rows);
    memcpy(request->rows, request->work.send_rows, bytes);
    memcpy(request->rows + size, request->work.recv_rows, bytes);
}

bool tr_part_advance(tr_request *part) {
    if (!part->backend->advance(part)) return false;
    give_request(part);
    return true;
}

tr_request *tr_send_begin(tr_comm *comm, tr_stream *stream, int peer, int tag, const void *buffer,
                          int64_t bytes) {
    return begin(comm, &(tr_work){.kind = TR_WORK_SEND,
                                  .stream = stream,
                                  .peer = peer,
                                  .tag = tag,
                                  .send = buffer,
                                  .n = bytes,
                                  .dtype = TR_U8});
}

tr_request *tr_recv_begin(tr_comm *comm, tr_stream *stream, int peer, int tag, void *buffer,
                          int64_t bytes) {
    return begin(comm, &(tr_work){.kind = TR_WORK_RECV,
                                  .stream = stream,
                                  .peer = peer,
                                  .tag = tag,
                                  .buffer = buffer,
                                  .n = bytes,
                                  .dtype = TR_U8});
}

tr_request *tr_barrier_begin(tr_comm *comm) {
    if (comm->size == 1) return NULL;
    return begin(comm, &(tr_work){.kind = TR_WORK_BARRIER});
}

tr_request *tr_broadcast_begin(tr_comm *comm, tr_stream *stream, int root, void *buffer,
                               int64_t bytes) {
    if (comm->size == 1 || bytes == 0) return NULL;
    return begin(comm, &(tr_work){.kind = TR_WORK_BROADCAST,
                                  .stream = stream,
                                  .peer = root,
                                  .buffer = buffer,
                                  .n = bytes,
                                  .dtype = TR_U8});
}

tr_request *tr_all_reduce_begin(tr_comm *comm, tr_stream *stream, tr_op op, tr_dtype t,
                                void *buffer, int64_t n) {
    if (t != TR_F32 && t != TR_F64 && t != TR_I32 && t != TR_I64)
        tr_abort("all_reduce: element type %d; it must be F32, F64, I32 or I64", (int)t);
    if (comm->size == 1 || n == 0) return NULL;
    return begin(comm, &(tr_work){.kind = TR_WORK_ALL_REDUCE,
                                  .stream = stream,
                                  .op = op,
                                  .dtype = t,
                                  .buffer = buffer,
                                  .n = n});
}

tr_request *tr_reduce_scatter_begin(tr_comm *comm, tr_stream *stream, tr_dtype t, void *buffer,
                                    int64_t n) {
    if (t != TR_F32) tr_abort("reduce_scatter: element type %d; it must be F32", (int)t);
    if (comm->size == 1 || n == 0) return NULL;
    return begin(comm, &(tr_work){.kind = TR_WORK_REDUCE_SCATTER,
                                  .stream = stream,
                                  .op = TR_SUM,
                                  .dtype = t,
                                  .buffer = buffer,
                                  .n = n});
}

tr_request *tr_all_gather_begin(tr_comm *comm, tr_stream *stream, tr_dtype t, void *buffer,
                                int64_t n) {
    if (comm->size == 1 || n == 0) return NULL;
    return begin(
        comm,
        &(tr_work){
            .kind = TR_WORK_ALL_GATHER, .stream = stream, .dtype = t, .buffer = buffer, .n = n});
}

tr_request *tr_all_to_all_begin(tr_comm *comm, tr_stream *stream, const void *send,
                                const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                                int64_t row_bytes) {
    if (send_rows[comm->rank] != recv_rows[comm->rank])
        tr_abort("all_to_all: %lld rows to itself but %lld from itself",
                 (long long)send_rows[comm->rank], (long long)recv_rows[comm->rank]);
    return begin(comm, &(tr_work){.kind = TR_WORK_ALL_TO_ALL,
                                  .stream = stream,
                                  .send = send,
                                  .send_rows = send_rows,
                                  .buffer = recv,
                                  .recv_rows = recv_rows,
                                  .row_bytes = row_bytes,
                                  .dtype = TR_U8});
}

/* Everything in flight takes a step, and MPI itself (a send that MPI calls complete may still have
 * to leave). */
static void drive(tr_comm *comm) {
    for (tr_request *request = comm->runtime->first, *next; request; request = next) {
        next = request->next;
        advance(request);
    }
    int flag;
    TR_MPI(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm->mpi, &flag, MPI_STATUS_IGNORE));
}

void tr_comm_poll(tr_comm *comm) {
    if (comm->runtime->first) drive(comm);
}

static void wait_begin(const char *what) {
    tr_watch_wait(true);
    tr_trace_wait_begin(what);
}

static void wait_end(void) {
    tr_trace_wait_end();
    tr_watch_wait(false);
}

void tr_end(tr_request *request) {
    if (!request) return;
    if (!advance(request)) {
        wait_begin(work_name[request->work.kind]);
        do {
            drive(request->comm);
            /* Ranks may share a core: a rank that waits lets the others run. */
            if (!request->complete) sched_yield();
        } while (!advance(request));
        wait_end();
    }
    if (request->backend->end) request->backend->end(request);
    give_request(request);
}

void tr_end_asleep(tr_request *request) {
    while (!tr_test(request)) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    tr_end(request);
}

bool tr_test(tr_request *request) {
    return !request || advance(request);
}

/* The first that is complete, or -1. */
static int complete_one(tr_request *const *requests, int count) {
    for (int i = 0; i < count; i++)
        if (requests[i] && advance(requests[i])) return i;
    return -1;
}

int tr_wait_any(tr_request *const *requests, int count) {
    int found = complete_one(requests, count), some = 0;
    if (found >= 0) return found;
    while (some < count && !requests[some]) some++;
    if (some == count) tr_abort("tr_wait_any: there is no operation to wait for");
    wait_begin("any");
    for (; found < 0; found = complete_one(requests, count)) {
        drive(requests[some]->comm);
        sched_yield();
    }
    wait_end();
    return found;
}

tr_status tr_agree(tr_comm *comm, tr_status status) {
    if (comm->size == 1) return status;
    /* Lower ranks make lower keys; a rank that is well makes the highest. */
    int64_t key = status == TR_OK ? INT64_MAX : (int64_t)comm->rank << 32 | (int64_t)status;
    tr_end(tr_all_reduce_begin(comm, NULL, TR_MIN, TR_I64, &key, 1));
    if (key == INT64_MAX) return TR_OK;
    int failed = (int)(key >> 32);
    char message[4096] = "";
    if (comm->rank == failed) memccpy(message, tr_error_message(), '\0', sizeof message - 1);
    tr_end(tr_broadcast_begin(comm, NULL, failed, message, sizeof message));
    return tr_fail((tr_status)(key & INT32_MAX), "%s", message);
}
