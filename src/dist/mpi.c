/* mpi.c - every operation through MPI. Floor: dist.
 *
 * MPI counts are int: `piece_elems` bounds what one call carries and every loop below goes by it.
 * Pieces of one message use one tag and rely on MPI's order between two ranks. Operations with all
 * their transfers posted at once are complete when these are; reduce_scatter posts new transfers
 * as it advances, and so may not use MPI's collectives, whose order of posting must agree. */
#include "dist/backend.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* One call carries at most 1 GiB: larger ones fail or hang in several MPI layers. */
static const int64_t PIECE_BYTES = INT64_C(1) << 30;
/* Reductions go in pieces that stay in cache. */
static const int64_t REDUCE_PIECE_BYTES = INT64_C(1) << 20;
/* Pieces of a reduce_scatter that are under way at a time, and staged. */
enum { LANES = 4 };
/* Tags of collectives' messages, distinct for all that can be in flight. */
enum { INTERNAL_TAGS = 1 << 14 };

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
        request->mpi = realloc(request->mpi, (size_t)request->mpi_room * sizeof *request->mpi);
        request->statuses =
            realloc(request->statuses, (size_t)request->mpi_room * sizeof *request->statuses);
        if (!request->mpi || !request->statuses)
            tr_abort("no memory for %lld transfers", (long long)request->mpi_room);
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

/* Posts all pieces of one message; one of no bytes is still a message. */
static void send_pieces(tr_request *request, const void *from, int64_t bytes, int peer, int tag,
                        MPI_Comm comm) {
    int64_t piece = piece_elems(PIECE_BYTES, TR_U8), first = 0;
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
    int64_t piece = piece_elems(REDUCE_PIECE_BYTES, work->dtype);
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

static void begin_all_gather(tr_request *request) {
    const tr_comm *comm = request->comm;
    int64_t bytes = request->work.n * (int64_t)tr_dtype_bytes(request->work.dtype);
    char *blocks = request->work.buffer;
    for (int step = 1; step < request->party_count; step++) {
        int from = party_at(request, -step);
        recv_pieces(request, blocks + from * bytes, bytes, from, request->tag, comm->internal);
    }
    for (int step = 1; step < request->party_count; step++)
        send_pieces(request, blocks + comm->rank * bytes, bytes, party_at(request, step),
                    request->tag, comm->internal);
}

/* reduce_scatter: in step k = 1, 2, ... party p sends the block of party p+k to it and adds what
 * party p-k sends: own + (p-1) + (p-2) + ..., the same order in every run. The pieces of all steps
 * form one row of work; LANES of them are under way, each with a staging place and two transfers
 * (receive, send). */
typedef struct {
    int64_t pieces, piece, n; /* pieces of one step, elements of a piece and of a block */
    int64_t total;
} scatter_plan;

static scatter_plan plan_of(const tr_request *request) {
    scatter_plan plan = {.n = request->work.n};
    plan.piece = min64(piece_elems(REDUCE_PIECE_BYTES, TR_F32), plan.n);
    plan.pieces = tr_ceil_div(plan.n, plan.piece);
    plan.total = plan.pieces * (request->party_count - 1);
    return plan;
}

static void post_piece(tr_request *request, const scatter_plan *plan) {
    const tr_comm *comm = request->comm;
    int64_t index = request->pieces_posted++, lane = index % LANES;
    int step = (int)(index / plan->pieces) + 1;
    int64_t first = index % plan->pieces * plan->piece;
    int64_t n = min64(plan->piece, plan->n - first);
    int to = party_at(request, step);
    const float *blocks = request->work.buffer;
    post_recv(request->staging + lane * plan->piece, n, MPI_FLOAT, party_at(request, -step),
              request->tag, comm->internal, &request->mpi[2 * lane]);
    post_send(blocks + to * plan->n + first, n, MPI_FLOAT, to, request->tag, comm->internal,
              &request->mpi[2 * lane + 1]);
}

static void begin_reduce_scatter(tr_request *request) {
    scatter_plan plan = plan_of(request);
    if (request->staging_elems < LANES * plan.piece) {
        free(request->staging);
        request->staging_elems = LANES * plan.piece;
        request->staging = malloc((size_t)request->staging_elems * sizeof(float));
        if (!request->staging) tr_abort("no memory to stage a reduce_scatter");
    }
    request->pieces_posted = request->pieces_added = 0;
    for (int lane = 0; lane < 2 * LANES; lane++) add_transfer(request);
    while (request->pieces_posted < min64(LANES, plan.total)) post_piece(request, &plan);
}

static bool advance_reduce_scatter(tr_request *request) {
    scatter_plan plan = plan_of(request);
    float *own = (float *)request->work.buffer + request->comm->rank * plan.n;
    while (request->pieces_added < plan.total) {
        int64_t lane = request->pieces_added % LANES;
        if (!transfers_complete(request, 2 * lane, 2)) return false;
        int64_t first = request->pieces_added % plan.pieces * plan.piece;
        const float *in[2] = {own + first, request->staging + lane * plan.piece};
        float *out = own + first;
        tr_sum_in_order(&out, 1, in, 2, min64(plan.piece, plan.n - first));
        request->pieces_added++;
        if (request->pieces_posted < plan.total) post_piece(request, &plan);
    }
    return true;
}

int tr_take_tag(tr_comm *comm) {
    return (int)(comm->internal_begun++ % INTERNAL_TAGS);
}

void tr_exchange_begin(tr_request *request, const int *parties, int party_count, int party) {
    request->mpi_count = 0;
    request->parties = parties;
    request->party_count = party_count;
    request->party = party;
    if (request->work.kind == TR_WORK_REDUCE_SCATTER)
        begin_reduce_scatter(request);
    else
        begin_all_gather(request);
}

bool tr_exchange_advance(tr_request *request) {
    if (request->work.kind == TR_WORK_REDUCE_SCATTER) return advance_reduce_scatter(request);
    return transfers_complete(request, 0, request->mpi_count);
}

static bool serves(tr_comm *comm, const tr_work *work) {
    (void)comm;
    (void)work;
    return true;
}

static void begin(tr_request *request) {
    const tr_work *work = &request->work;
    tr_comm *comm = request->comm;
    request->mpi_count = 0;
    if (work->kind != TR_WORK_SEND && work->kind != TR_WORK_RECV) request->tag = tr_take_tag(comm);
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
    case TR_WORK_REDUCE_SCATTER:
    case TR_WORK_ALL_GATHER:
        tr_exchange_begin(request, comm->everyone, comm->size, comm->rank);
        break;
    case TR_WORK_ALL_TO_ALL:
        begin_all_to_all(request);
        break;
    case TR_WORK_COUNT:
        break;
    }
}

const tr_backend tr_backend_mpi = {
    .name = "mpi", .serves = serves, .begin = begin, .advance = tr_exchange_advance};
