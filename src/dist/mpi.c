/* mpi.c - every operation through MPI. Floor: dist.
 *
 * MPI counts are int: `piece_elems` bounds what one call carries and every loop below goes by it.
 * Pieces of one message use one tag and rely on MPI's order between two ranks. Operations with all
 * their transfers posted at once are complete when these are; sums of blocks post new transfers
 * as they advance, and so may not use MPI's collectives, whose order of posting must agree. */
#include "dist/backend.h"

#include "base/heap.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* One call carries at most 1 GiB: larger ones fail or hang in several MPI layers. */
static const int64_t PIECE_BYTES = INT64_C(1) << 30;
/* Sums go in pieces that stay in cache. */
static const int64_t SUM_PIECE_BYTES = INT64_C(1) << 20;
/* From here on an fp32 all_reduce is our reduce_scatter and all_gather, several times as fast as
 * MPI_Iallreduce (64 MB on one node: 12 against 61 ms). */
static const int64_t SUM_ELEMS = INT64_C(1) << 16;
/* Pieces of a reduce_scatter that are under way at a time, and staged. */
enum { LANES = 4 };

static int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t piece_elems(int64_t most_bytes, tr_dtype dtype) {
    int64_t limit = tr_comm_get_switches()->chunk_limit;
    int64_t elems = most_bytes / (int64_t)tr_dtype_bytes(dtype);
    return limit > 0 ? min64(limit, elems) : elems;
}

static int to_int(int64_t count) {
    if (count < 0 || count > INT_MAX) tr_abort("count %lld is no MPI count", (long long)count);
    return (int)count;
}

static MPI_Datatype mpi_type(tr_dtype dtype) {
    switch (dtype) {
    case TR_F32:
        return MPI_FLOAT;
    case TR_F64:
        return MPI_DOUBLE;
    case TR_I32:
        return MPI_INT32_T;
    case TR_I64:
        return MPI_INT64_T;
    case TR_BF16:
        return MPI_UINT16_T;
    case TR_U8:
        return MPI_BYTE;
    }
    tr_abort("element type %d is unknown", (int)dtype);
}

static MPI_Op mpi_op(tr_op op) {
    switch (op) {
    case TR_SUM:
        return MPI_SUM;
    case TR_MAX:
        return MPI_MAX;
    case TR_MIN:
        return MPI_MIN;
    }
    tr_abort("reduction %d is unknown", (int)op);
}

/* The place of one more transfer. */
static MPI_Request *add_transfer(tr_request *request) {
    if (request->mpi_count == request->mpi_room) {
        request->mpi_room = request->mpi_room ? 2 * request->mpi_room : 8;
        request->mpi = tr_heap_resize(request->mpi, request->mpi_room, sizeof *request->mpi);
        request->statuses =
            tr_heap_resize(request->statuses, request->mpi_room, sizeof *request->statuses);
    }
    request->mpi[request->mpi_count] = MPI_REQUEST_NULL;
    return &request->mpi[request->mpi_count++];
}

/* True when the transfers [first, first + count) have all completed. */
static bool transfers_complete(tr_request *request, int64_t first, int64_t count) {
    int complete = 0;
    int code = MPI_Testall(to_int(count), request->mpi + first, &complete, request->statuses);
    if (code == MPI_ERR_IN_STATUS) /* the error proper is in one of the statuses */
        for (int64_t i = 0; i < count; i++)
            if (request->statuses[i].MPI_ERROR != MPI_ERR_PENDING)
                tr_mpi_check(request->statuses[i].MPI_ERROR, "a transfer");
    tr_mpi_check(code, "MPI_Testall");
    return complete != 0;
}

static void post_send(const void *from, int64_t n, MPI_Datatype type, int peer, int tag,
                      MPI_Comm comm, MPI_Request *out) {
    if (tr_comm_get_switches()->synchronous)
        TR_MPI(MPI_Issend(from, to_int(n), type, peer, tag, comm, out));
    else
        TR_MPI(MPI_Isend(from, to_int(n), type, peer, tag, comm, out));
}

static void post_recv(void *to, int64_t n, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
                      MPI_Request *out) {
    TR_MPI(MPI_Irecv(to, to_int(n), type, peer, tag, comm, out));
}

void tr_count_sent(tr_comm *comm, int peer, int64_t bytes) {
    comm->sent.messages++;
    comm->sent.bytes += bytes;
    if (comm->node_of[peer] == comm->node) return;
    comm->sent.messages_out++;
    comm->sent.bytes_out += bytes;
}

/* Posts all pieces of one message; one of no bytes is still a message. */
static void send_pieces(tr_request *request, const void *from, int64_t bytes, int peer, int tag,
                        MPI_Comm comm) {
    int64_t piece = piece_elems(PIECE_BYTES, TR_U8), first = 0;
    if (peer != request->comm->rank) tr_count_sent(request->comm, peer, bytes);
    do {
        post_send((const char *)from + first, min64(piece, bytes - first), MPI_BYTE, peer, tag,
                  comm, add_transfer(request));
        first += piece;
    } while (first < bytes);
}

static void recv_pieces(tr_request *request, void *to, int64_t bytes, int peer, int tag,
                        MPI_Comm comm) {
    int64_t piece = piece_elems(PIECE_BYTES, TR_U8), first = 0;
    do {
        post_recv((char *)to + first, min64(piece, bytes - first), MPI_BYTE, peer, tag, comm,
                  add_transfer(request));
        first += piece;
    } while (first < bytes);
}

static void begin_broadcast(tr_request *request) {
    const tr_work *work = &request->work;
    int64_t piece = piece_elems(PIECE_BYTES, work->dtype);
    for (int64_t first = 0; first < work->n; first += piece)
        TR_MPI(MPI_Ibcast((char *)work->buffer + first, to_int(min64(piece, work->n - first)),
                          MPI_BYTE, work->peer, request->comm->internal, add_transfer(request)));
}

static void begin_all_reduce(tr_request *request) {
    const tr_work *work = &request->work;
    int64_t piece = piece_elems(PIECE_BYTES, work->dtype);
    int64_t elem = (int64_t)tr_dtype_bytes(work->dtype);
    for (int64_t first = 0; first < work->n; first += piece)
        TR_MPI(MPI_Iallreduce(MPI_IN_PLACE, (char *)work->buffer + first * elem,
                              to_int(min64(piece, work->n - first)), mpi_type(work->dtype),
                              mpi_op(work->op), request->comm->internal, add_transfer(request)));
}

/* Blocks to and from every peer, nearest ranks first, so that no rank is everybody's target. */
static void begin_all_to_all(tr_request *request) {
    const tr_work *work = &request->work;
    const tr_comm *comm = request->comm;
    int64_t row = work->row_bytes, to_me_from = 0, own_from = 0;
    for (int k = 0; k < comm->rank; k++) own_from += work->send_rows[k];
    for (int k = 0; k < comm->size; k++) {
        char *to = (char *)work->buffer + to_me_from * row;
        int64_t bytes = work->recv_rows[k] * row;
        to_me_from += work->recv_rows[k];
        if (bytes == 0) continue;
        if (k == comm->rank)
            tr_copy_threaded(to, (const char *)work->send + own_from * row, bytes);
        else
            recv_pieces(request, to, bytes, k, request->tag, comm->internal);
    }
    for (int step = 1; step < comm->size; step++) {
        int k = (comm->rank + step) % comm->size;
        int64_t from = 0;
        for (int j = 0; j < k; j++) from += work->send_rows[j];
        int64_t bytes = work->send_rows[k] * row;
        if (bytes > 0)
            send_pieces(request, (const char *)work->send + from * row, bytes, k, request->tag,
                        comm->internal);
    }
}

/* The party `step` places after this one, or before it for a negative step. */
static int party_at(const tr_request *request, int step) {
    int index = (request->party + step + request->party_count) % request->party_count;
    return request->parties[index];
}

/* The elements of the buffer that are `rank`'s block. */
static tr_range block_of(const tr_request *request, int rank) {
    int64_t n = request->work.n;
    if (request->work.kind == TR_WORK_ALL_REDUCE) return tr_block_of(n, request->comm->size, rank);
    return (tr_range){rank * n, n};
}

static void begin_all_gather(tr_request *request) {
    MPI_Comm comm = request->comm->internal;
    int64_t elem = (int64_t)tr_dtype_bytes(request->work.dtype);
    char *buffer = request->work.buffer;
    for (int step = 1; step < request->party_count; step++) {
        int from = party_at(request, -step);
        tr_range block = block_of(request, from);
        recv_pieces(request, buffer + block.first * elem, block.count * elem, from, request->tag,
                    comm);
    }
    tr_range own = block_of(request, request->comm->rank);
    for (int step = 1; step < request->party_count; step++)
        send_pieces(request, buffer + own.first * elem, own.count * elem, party_at(request, step),
                    request->tag, comm);
}

/* reduce_scatter: in step k = 1, 2, ... party p sends the block of party p+k to it and adds what
 * party p-k sends: own + (p-1) + (p-2) + ..., the same order in every run. The pieces of all steps
 * form one row of work; LANES of them are under way, each with a staging place and two transfers
 * (receive, send). */
typedef struct {
    int64_t piece, pieces, total; /* elements of a piece; pieces of a step, and of all */
} scatter_plan;

static scatter_plan plan_of(const tr_request *request) {
    int64_t largest = block_of(request, 0).count;
    scatter_plan plan = {.piece = min64(piece_elems(SUM_PIECE_BYTES, TR_F32), largest)};
    plan.pieces = tr_ceil_div(largest, plan.piece);
    plan.total = plan.pieces * (request->party_count - 1);
    return plan;
}

/* The elements of piece `index` in `rank`'s block; the last one of a smaller block may be empty. */
static tr_range piece_of(const tr_request *request, const scatter_plan *plan, int64_t index,
                         int rank) {
    tr_range block = block_of(request, rank);
    int64_t first = index % plan->pieces * plan->piece;
    return (tr_range){block.first + first, min64(plan->piece, block.count - first)};
}

static void post_piece(tr_request *request, const scatter_plan *plan) {
    tr_comm *comm = request->comm;
    int64_t index = request->pieces_posted++, lane = index % LANES;
    int step = (int)(index / plan->pieces) + 1;
    int to = party_at(request, step), from = party_at(request, -step);
    tr_range out = piece_of(request, plan, index, to);
    tr_range in = piece_of(request, plan, index, comm->rank);
    post_recv(request->staging + lane * plan->piece, in.count, MPI_FLOAT, from, request->tag,
              comm->internal, &request->mpi[2 * lane]);
    tr_count_sent(comm, to, out.count * (int64_t)sizeof(float));
    post_send((const float *)request->work.buffer + out.first, out.count, MPI_FLOAT, to,
              request->tag, comm->internal, &request->mpi[2 * lane + 1]);
}

static void begin_reduce_scatter(tr_request *request) {
    scatter_plan plan = plan_of(request);
    if (request->staging_elems < LANES * plan.piece) {
        free(request->staging);
        request->staging_elems = LANES * plan.piece;
        request->staging = tr_heap_alloc(request->staging_elems, sizeof(float));
    }
    request->pieces_posted = request->pieces_added = 0;
    for (int lane = 0; lane < 2 * LANES; lane++) add_transfer(request);
    while (request->pieces_posted < min64(LANES, plan.total)) post_piece(request, &plan);
}

static bool advance_reduce_scatter(tr_request *request) {
    scatter_plan plan = plan_of(request);
    while (request->pieces_added < plan.total) {
        int64_t lane = request->pieces_added % LANES;
        if (!transfers_complete(request, 2 * lane, 2)) return false;
        tr_range piece = piece_of(request, &plan, request->pieces_added, request->comm->rank);
        float *own = (float *)request->work.buffer + piece.first;
        const float *in[2] = {own, request->staging + lane * plan.piece};
        tr_sum_in_order(&own, 1, in, 2, piece.count);
        request->pieces_added++;
        if (request->pieces_posted < plan.total) post_piece(request, &plan);
    }
    return true;
}

int tr_take_tag(tr_comm *comm) {
    return (int)(comm->internal_begun++ % TR_INTERNAL_TAGS);
}

void tr_exchange_begin(tr_request *request, const int *parties, int party_count, int party) {
    request->mpi_count = 0;
    request->parties = parties;
    request->party_count = party_count;
    request->party = party;
    request->gathering = request->work.kind == TR_WORK_ALL_GATHER;
    if (request->gathering)
        begin_all_gather(request);
    else
        begin_reduce_scatter(request);
}

bool tr_exchange_advance(tr_request *request) {
    if (!request->gathering) {
        if (!advance_reduce_scatter(request)) return false;
        if (request->work.kind == TR_WORK_REDUCE_SCATTER) return true;
        request->gathering = true;
        request->mpi_count = 0;
        begin_all_gather(request);
    }
    return transfers_complete(request, 0, request->mpi_count);
}

/* Whether it is one of ours, with sums and gathers of blocks. */
static bool is_exchange(const tr_work *work) {
    return work->kind == TR_WORK_REDUCE_SCATTER || work->kind == TR_WORK_ALL_GATHER ||
           (work->kind == TR_WORK_ALL_REDUCE && work->dtype == TR_F32 && work->op == TR_SUM &&
            work->n >= SUM_ELEMS);
}

static void begin(tr_request *request) {
    const tr_work *work = &request->work;
    tr_comm *comm = request->comm;
    request->mpi_count = 0;
    if (work->kind != TR_WORK_SEND && work->kind != TR_WORK_RECV) request->tag = tr_take_tag(comm);
    if (is_exchange(work)) {
        tr_exchange_begin(request, comm->everyone, comm->size, comm->rank);
        return;
    }
    switch (work->kind) {
    case TR_WORK_SEND:
        send_pieces(request, work->send, work->n, work->peer, work->tag, comm->mpi);
        break;
    case TR_WORK_RECV:
        recv_pieces(request, work->buffer, work->n, work->peer, work->tag, comm->mpi);
        break;
    case TR_WORK_BARRIER:
        TR_MPI(MPI_Ibarrier(comm->internal, add_transfer(request)));
        break;
    case TR_WORK_BROADCAST:
        begin_broadcast(request);
        break;
    case TR_WORK_ALL_REDUCE:
        begin_all_reduce(request);
        break;
    case TR_WORK_ALL_TO_ALL:
        begin_all_to_all(request);
        break;
    default:
        tr_abort("work %d is unknown", (int)work->kind);
    }
}

static bool advance(tr_request *request) {
    if (is_exchange(&request->work)) return tr_exchange_advance(request);
    return transfers_complete(request, 0, request->mpi_count);
}

const tr_backend tr_backend_mpi = {.name = "mpi", .begin = begin, .advance = advance};
