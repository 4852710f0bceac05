/* shared.c - collectives of ranks that map each other's memory, and their part in collectives that
 * span nodes. Floor: dist.
 *
 * Every rank shows two counters to the others of its node: `begun`, raised when its input to an
 * operation may be read, and `done`, raised when it has read all it needs of its peers' memory and
 * written its part. An operation is one piece, or several, each with a sequence number s: announce
 * begun = s work          once begun(peers) >= s: read the peers, then done = s complete      once
 * done(peers) >= s: nobody touches this rank's buffer any more Buffers from tr_comm_alloc are
 * worked where they lie, in one piece a node: piece j holds the blocks of node j's ranks. Over
 * several nodes a reduce_scatter first sums every piece on each node, the rank in place l taking
 * the blocks of all ranks in place l, which then exchange them; an all_gather exchanges first. So
 * each block crosses the network once for each pair of nodes, not of ranks. An all_reduce of
 * private memory goes piece by piece through two staging slots beside the counters: announcing
 * copies a piece in, working sums all ranks' slots straight into the buffer, and a slot is free
 * once all peers have done the piece it held. Invariants:
 * 1. All ranks begin the same operations in the same order, so sequences and slots agree.
 * 2. Each rank announces and works pieces in that order, whichever tr_end or tr_test drives them,
 *    so the counters only grow and `done >= s` covers everything before s.
 * 3. Ranks at work on one piece write and read disjoint memory. Let block l be that of the piece's
 *    rank in place l. Place l reads block l of all buffers and writes it in its own
 *    (reduce_scatter) or in all (all_reduce); or it reads block k of buffer k and writes block
 *    k != l of its own (all_gather). The exchange between nodes touches blocks l of buffer l alone.
 * Signatures of the operations are compared, so ranks that disagree stop instead of mixing data. */
#include "dist/backend.h"

#include "base/rng.h"

#include <string.h>

enum { MOST_RANKS = 256 }; /* of a node: their pointers are kept on the stack */

static int64_t buffer_bytes(const tr_comm *comm, const tr_work *work) {
    int64_t blocks = work->kind == TR_WORK_ALL_REDUCE ? 1 : comm->size;
    return blocks * work->n * (int64_t)tr_dtype_bytes(work->dtype);
}

static tr_memory *find_shared(tr_comm *comm, const tr_work *work) {
    tr_memory *memory = tr_memory_find(comm, work->buffer, buffer_bytes(comm, work));
    return memory && memory->peer ? memory : NULL;
}

static bool serves(tr_comm *comm, const tr_work *work) {
    if (!comm->lines || !tr_comm_get_switches()->shared || comm->node_size > MOST_RANKS)
        return false;
    switch (work->kind) {
    case TR_WORK_BARRIER:
        return comm->nodes == 1;
    case TR_WORK_ALL_REDUCE:
        return comm->nodes == 1 && work->dtype == TR_F32 && work->op == TR_SUM;
    case TR_WORK_REDUCE_SCATTER:
    case TR_WORK_ALL_GATHER:
        return find_shared(comm, work) != NULL;
    default:
        return false;
    }
}

static bool is_staged(const tr_request *request) {
    return request->work.kind == TR_WORK_ALL_REDUCE && !request->memory;
}

static int64_t offset_of(const tr_request *request) {
    return (char *)request->work.buffer - request->memory->own;
}

static bool peers_begun(const tr_comm *comm, int64_t sequence) {
    for (int k = 0; k < comm->node_size; k++)
        if (atomic_load_explicit(&comm->lines[k]->begun, memory_order_acquire) < sequence)
            return false;
    return true;
}

static bool peers_done(const tr_comm *comm, int64_t sequence) {
    for (int k = 0; k < comm->node_size; k++)
        if (atomic_load_explicit(&comm->lines[k]->done, memory_order_acquire) < sequence)
            return false;
    return true;
}

/* The low half of the sequence above a hash of what must be equal on all ranks. */
static uint64_t signature(const tr_request *request, int64_t sequence) {
    const tr_work *work = &request->work;
    uint64_t what = tr_mix64((uint64_t)work->kind + 1);
    if (work->kind != TR_WORK_BARRIER) {
        uint64_t place = request->memory ? (uint64_t)offset_of(request) : UINT64_MAX;
        uint64_t bytes = (uint64_t)work->n * tr_dtype_bytes(work->dtype);
        what = tr_mix64(tr_mix64(what + place) + bytes);
    }
    return (uint64_t)sequence << 32 | (what & UINT32_MAX);
}

/* A note more than TR_SHARED_NOTES pieces old has been overwritten and is not checked. */
static void check_signatures(const tr_request *request, int64_t sequence) {
    const tr_comm *comm = request->comm;
    uint64_t own = signature(request, sequence);
    for (int k = 0; k < comm->node_size; k++) {
        uint64_t theirs = atomic_load_explicit(&comm->lines[k]->note[sequence % TR_SHARED_NOTES],
                                               memory_order_relaxed);
        if (own >> 32 == theirs >> 32 && own != theirs)
            tr_abort("ranks %d and %d of a communicator began different operations (kind, offset "
                     "in tr_comm_alloc's memory or count)",
                     comm->rank, comm->rank_of[comm->node * comm->node_size + k]);
    }
}

static float *staging_slot(const tr_comm *comm, int local, int64_t uses) {
    char *first = comm->lines_memory->peer[local] + TR_STAGING_OFFSET;
    return (float *)(void *)first + uses % TR_STAGING_SLOTS * TR_STAGING_ELEMS;
}

/* Piece `index` of a staged all_reduce. */
static tr_range staged_piece(const tr_request *request, int64_t index) {
    int64_t first = index * TR_STAGING_ELEMS, left = request->work.n - first;
    return (tr_range){first, left < TR_STAGING_ELEMS ? left : TR_STAGING_ELEMS};
}

/* An all_gather shows its blocks to the node once those of the other nodes are here. */
static bool may_announce(const tr_request *request) {
    return request->comm->nodes == 1 || request->work.kind != TR_WORK_ALL_GATHER ||
           request->across_done;
}

/* Announces one piece of the first operation that has one; false if there is none, or it has
 * to wait. */
static bool announce_one(tr_comm *comm) {
    tr_request *request = comm->announcing;
    if (!request || !may_announce(request)) return false;
    int64_t sequence = request->sequence + request->announced;
    if (is_staged(request)) {
        int64_t *held = &comm->slot_holds[comm->slots_filled % TR_STAGING_SLOTS];
        if (!peers_done(comm, *held)) return false;
        *held = sequence;
        tr_range piece = staged_piece(request, request->announced);
        memcpy(staging_slot(comm, comm->local, comm->slots_filled++),
               (const float *)request->work.buffer + piece.first,
               (size_t)piece.count * sizeof(float));
    }
    tr_shared_line *line = comm->lines[comm->local];
    atomic_store_explicit(&line->note[sequence % TR_SHARED_NOTES], signature(request, sequence),
                          memory_order_relaxed);
    atomic_store_explicit(&line->begun, sequence, memory_order_release);
    if (++request->announced == request->pieces) comm->announcing = request->queued_after;
    return true;
}

static void sum_staged(tr_request *request) {
    tr_comm *comm = request->comm;
    tr_range piece = staged_piece(request, request->worked);
    const float *in[MOST_RANKS];
    for (int k = 0; k < comm->node_size; k++) in[k] = staging_slot(comm, k, comm->slots_summed);
    comm->slots_summed++;
    float *out = (float *)request->work.buffer + piece.first;
    tr_sum_in_order(&out, 1, in, comm->node_size, piece.count);
}

/* Sums elements [first, first + n) of all buffers into this rank's, or into everybody's. */
static void sum_in_place(const tr_request *request, int64_t first, int64_t n, bool everywhere) {
    const tr_comm *comm = request->comm;
    int64_t at = offset_of(request) + first * (int64_t)sizeof(float);
    const float *in[MOST_RANKS];
    float *out[MOST_RANKS];
    for (int k = 0; k < comm->node_size; k++) {
        in[k] = (const float *)(const void *)(request->memory->peer[k] + at);
        int own_first = (comm->local + k) % comm->node_size;
        out[k] = (float *)(void *)(request->memory->peer[own_first] + at);
    }
    tr_sum_in_order(out, everywhere ? comm->node_size : 1, in, comm->node_size, n);
}

/* Copies the blocks of one node's ranks from the ranks in their places here. */
static void gather_blocks(const tr_request *request, const int *ranks_of_node) {
    const tr_comm *comm = request->comm;
    int64_t bytes = request->work.n * (int64_t)tr_dtype_bytes(request->work.dtype);
    for (int step = 1; step < comm->node_size; step++) {
        int k = (comm->local + step) % comm->node_size;
        int64_t at = offset_of(request) + ranks_of_node[k] * bytes;
        tr_copy_threaded(request->memory->own + at, request->memory->peer[k] + at, bytes);
    }
}

static void work_piece(tr_request *request) {
    const tr_comm *comm = request->comm;
    int64_t n = request->work.n;
    if (is_staged(request)) {
        sum_staged(request);
        return;
    }
    const int *ranks_of_node = &comm->rank_of[request->worked * comm->node_size];
    if (request->work.kind == TR_WORK_ALL_REDUCE) {
        tr_range block = tr_block_of(n, comm->node_size, comm->local);
        sum_in_place(request, block.first, block.count, true);
    } else if (request->work.kind == TR_WORK_REDUCE_SCATTER) {
        sum_in_place(request, ranks_of_node[comm->local] * n, n, false);
    } else if (request->work.kind == TR_WORK_ALL_GATHER) {
        gather_blocks(request, ranks_of_node);
    }
}

/* Works one piece of the oldest operation, if all ranks have announced it. */
static bool work_one(tr_comm *comm) {
    tr_request *request = comm->queue_first;
    if (!request || request->worked == request->announced) return false;
    int64_t sequence = request->sequence + request->worked;
    if (!peers_begun(comm, sequence)) return false;
    check_signatures(request, sequence);
    work_piece(request);
    atomic_store_explicit(&comm->lines[comm->local]->done, sequence, memory_order_release);
    if (++request->worked == request->pieces) {
        comm->queue_first = request->queued_after;
        if (!comm->queue_first) comm->queue_last = NULL;
    }
    return true;
}

/* Advances the exchange between nodes; true when it is done, or there is none. */
static bool exchange_across(tr_request *request) {
    tr_comm *comm = request->comm;
    if (request->across_done) return true;
    if (!request->across_begun) tr_exchange_begin(request, comm->across, comm->nodes, comm->node);
    request->across_begun = true;
    return request->across_done = tr_exchange_advance(request);
}

static void begin(tr_request *request) {
    tr_comm *comm = request->comm;
    const tr_work *work = &request->work;
    request->memory = work->kind == TR_WORK_BARRIER ? NULL : find_shared(comm, work);
    request->pieces = is_staged(request) ? tr_ceil_div(work->n, TR_STAGING_ELEMS) : comm->nodes;
    request->sequence = comm->shared_begun + 1;
    comm->shared_begun += request->pieces;
    request->announced = request->worked = 0;
    request->queued_after = NULL;
    if (comm->queue_last)
        comm->queue_last->queued_after = request;
    else
        comm->queue_first = request;
    comm->queue_last = request;
    if (!comm->announcing) comm->announcing = request;

    request->across_done = comm->nodes == 1;
    request->across_begun = false;
    if (comm->nodes > 1) request->tag = tr_take_tag(comm);
    if (work->kind == TR_WORK_ALL_GATHER) exchange_across(request);
    while (announce_one(comm)) {
    }
}

static bool advance(tr_request *request) {
    tr_comm *comm = request->comm;
    if (request->work.kind == TR_WORK_ALL_GATHER && !exchange_across(request)) return false;
    while (request->worked < request->pieces) {
        bool announced = announce_one(comm), worked = work_one(comm);
        if (!announced && !worked) return false;
    }
    if (!exchange_across(request)) return false;
    /* A barrier owns no memory, and a private buffer is nobody else's. */
    return !request->memory || peers_done(comm, request->sequence + request->pieces - 1);
}

const tr_backend tr_backend_shared = {
    .name = "shared", .serves = serves, .begin = begin, .advance = advance};
