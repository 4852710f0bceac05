/* shared.c - collectives of ranks that map each other's memory. Floor: dist.
 *
 * Every rank shows two counters: `begun`, raised when it begins an operation, and `done`, raised
 * when it has read all it needs of its peers' buffers. An operation of sequence s on one rank goes
 *     begun(peers) >= s    the peers' buffers hold their input: read them, then done = s
 *     done(peers) >= s     nobody reads this rank's buffer any more: complete
 * Invariants:
 * 1. All ranks begin the same operations in the same order, so sequences agree.
 * 2. Each rank works its operations in that order, whichever tr_end or tr_test drives them, so the
 *    counters only grow and `done >= s` covers everything before s.
 * 3. Rank r writes block r of its buffer only (reduce_scatter), or all but block r (all_gather);
 *    peers read exactly what it does not write.
 * Signatures of the operations are compared, so ranks that disagree stop instead of mixing data. */
#include "dist/backend.h"

#include "base/rng.h"

#include <string.h>

enum { MAX_SUMMANDS_ON_STACK = 256 };

static int64_t block_bytes(const tr_work *work) {
    return work->n * (int64_t)tr_dtype_bytes(work->dtype);
}

static bool serves(tr_comm *comm, const tr_work *work) {
    if (!comm->lines || !tr_comm_get_switches()->shared) return false;
    if (work->kind == TR_WORK_BARRIER) return true;
    if (work->kind != TR_WORK_REDUCE_SCATTER && work->kind != TR_WORK_ALL_GATHER) return false;
    if (comm->size > MAX_SUMMANDS_ON_STACK) return false;
    tr_memory *memory = tr_memory_find(comm, work->buffer, comm->size * block_bytes(work));
    return memory && memory->peer;
}

/* The sequence's low half above a hash of what must be equal on all ranks. */
static uint64_t signature(const tr_request *request) {
    const tr_work *work = &request->work;
    uint64_t what = (uint64_t)work->kind;
    if (work->kind != TR_WORK_BARRIER) {
        uint64_t offset = (uint64_t)((char *)work->buffer - request->memory->own);
        what = tr_mix64(tr_mix64(tr_mix64(what) + offset) + (uint64_t)block_bytes(work));
    }
    return (uint64_t)request->sequence << 32 | (what & UINT32_MAX);
}

static void begin(tr_request *request) {
    tr_comm *comm = request->comm;
    tr_shared_line *line = comm->lines[comm->rank];
    if (request->work.kind != TR_WORK_BARRIER)
        request->memory =
            tr_memory_find(comm, request->work.buffer, comm->size * block_bytes(&request->work));
    request->sequence = ++comm->shared_begun;
    request->worked = false;
    request->queued_after = NULL;
    if (comm->queue_last)
        comm->queue_last->queued_after = request;
    else
        comm->queue_first = request;
    comm->queue_last = request;
    atomic_store_explicit(&line->note[request->sequence % TR_SHARED_NOTES], signature(request),
                          memory_order_relaxed);
    atomic_store_explicit(&line->begun, request->sequence, memory_order_release);
}

static bool peers_begun(const tr_comm *comm, int64_t sequence) {
    for (int k = 0; k < comm->size; k++)
        if (atomic_load_explicit(&comm->lines[k]->begun, memory_order_acquire) < sequence)
            return false;
    return true;
}

static bool peers_done(const tr_comm *comm, int64_t sequence) {
    for (int k = 0; k < comm->size; k++)
        if (atomic_load_explicit(&comm->lines[k]->done, memory_order_acquire) < sequence)
            return false;
    return true;
}

/* A note more than TR_SHARED_NOTES operations old has been overwritten and is not checked. */
static void check_signatures(const tr_request *request) {
    const tr_comm *comm = request->comm;
    uint64_t own = signature(request);
    for (int k = 0; k < comm->size; k++) {
        uint64_t theirs = atomic_load_explicit(
            &comm->lines[k]->note[request->sequence % TR_SHARED_NOTES], memory_order_relaxed);
        if (own >> 32 == theirs >> 32 && own != theirs)
            tr_abort("ranks %d and %d of a communicator began different operations (kind, offset "
                     "in tr_comm_alloc's memory or count)",
                     comm->rank, k);
    }
}

static void reduce_scatter(tr_request *request) {
    const tr_comm *comm = request->comm;
    int64_t bytes = block_bytes(&request->work);
    int64_t offset = (char *)request->work.buffer - request->memory->own + comm->rank * bytes;
    const float *in[MAX_SUMMANDS_ON_STACK];
    for (int k = 0; k < comm->size; k++)
        in[k] = (const float *)(const void *)(request->memory->peer[k] + offset);
    tr_sum_in_order((float *)(void *)(request->memory->own + offset), in, comm->size,
                    request->work.n);
}

static void all_gather(tr_request *request) {
    const tr_comm *comm = request->comm;
    int64_t bytes = block_bytes(&request->work);
    int64_t offset = (char *)request->work.buffer - request->memory->own;
    for (int step = 1; step < comm->size; step++) {
        int k = (comm->rank + step) % comm->size;
        int64_t block = offset + k * bytes;
        tr_copy_threaded(request->memory->own + block, request->memory->peer[k] + block, bytes);
    }
}

/* Works every operation of the communicator that can be worked, in order (invariant 2). */
static void work_queue(tr_comm *comm) {
    while (comm->queue_first && peers_begun(comm, comm->queue_first->sequence)) {
        tr_request *request = comm->queue_first;
        check_signatures(request);
        if (request->work.kind == TR_WORK_REDUCE_SCATTER) reduce_scatter(request);
        if (request->work.kind == TR_WORK_ALL_GATHER) all_gather(request);
        request->worked = true;
        comm->queue_first = request->queued_after;
        if (!comm->queue_first) comm->queue_last = NULL;
        atomic_store_explicit(&comm->lines[comm->rank]->done, request->sequence,
                              memory_order_release);
    }
}

static bool advance(tr_request *request) {
    if (!request->worked) work_queue(request->comm);
    if (!request->worked) return false;
    return request->work.kind == TR_WORK_BARRIER || peers_done(request->comm, request->sequence);
}

const tr_backend tr_backend_shared = {
    .name = "shared", .serves = serves, .begin = begin, .advance = advance};
