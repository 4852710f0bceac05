/* comm.h - messages between the ranks of one group. Floor: dist.
 *
 * Every operation is split-phase: begin -> request -> tr_end, so compute can run in between.
 * Buffers belong to the operation until tr_end returns. Order: all ranks of a communicator begin
 * the same collectives in the same order; requests may end in any order that is the same on all
 * ranks. Operations are ordered after what was enqueued on `stream` (NULL: host only), and once
 * tr_end has returned, work enqueued on it sees the result.
 *
 * Buffers are memory of the stream's device, or the host's where it is NULL. Device memory moves
 * through the device's fabric where it has one (NCCL; sums are then in its order), else through
 * host memory, with the results that host memory gives. Both sides of a message are in the same
 * kind of memory. Sends through a fabric end no earlier than the receive has begun.
 *
 * Counts are 64-bit elements or bytes; MPI's int counts are met by one chunking helper
 * (tr_comm_set_chunk_limit lowers the limit for tests). Requests come from a pool: nothing is
 * allocated inside a step. A failed MPI call ends the job through tr_abort (a broken peer cannot be
 * repaired); only tr_agree returns errors.
 *
 * The ranks of one node map each other's buffers from tr_comm_alloc: reduce_scatter and all_gather
 * on them add and copy there directly, and exchange between nodes only what each rank's place on
 * its node stands for. Inside one node fp32 all_reduce of any buffer is direct too, and all these
 * add in rank order. The rest goes through MPI. Either way results repeat bitwise, and all_reduce
 * is the same on all ranks.
 */
#pragma once
#include "base/dtype.h"
#include "base/status.h"

typedef struct tr_stream tr_stream;   /* base/device.h */
typedef struct tr_device tr_device;   /* base/device.h */
typedef struct tr_comm tr_comm;       /* the ranks of one group */
typedef struct tr_request tr_request; /* an operation that has begun */

/* Collective on all processes. Starts MPI (with the HDF5 read fix in its environment) and returns
 * the world. A single process without mpirun works. */
tr_comm *tr_comm_start(int *argc, char ***argv);
/* Collective. Ends MPI. */
void tr_comm_stop(tr_comm *world);

/* Collective on `parent`. Ranks with equal color (>= 0) form a communicator, ordered by key;
 * color < 0: none, returns NULL. */
tr_comm *tr_comm_split(tr_comm *parent, int color, int key);
void tr_comm_free(tr_comm *comm); /* NULL-safe. Collective on comm. */

/* Local. A literal, for messages: what the group is. */
void tr_comm_set_name(tr_comm *comm, const char *name);
/* Local, the same on all ranks that it names. Operations on the device's memory will follow: on
 * blocks of buffers (all collectives but the next), all_to_all between ranks for which `to` and
 * `from` are not 0 ([size], read before it returns), messages with `peer`. Where the device has no
 * fabric, nothing is. */
void tr_comm_expect_blocks(tr_comm *comm, tr_device *device);
void tr_comm_expect_rows(tr_comm *comm, tr_device *device, const int64_t *to, const int64_t *from);
void tr_comm_expect_messages(tr_comm *comm, tr_device *device, int peer);
/* Collective on the world. Joins and tries what is expected, so that a fabric that does not work
 * ends the job here, and no later operation waits for that. Returns once all ranks have. What was
 * not expected joins when it is first used. */
void tr_comm_join(tr_comm *world, tr_device *device);
/* Collective on the ranks that have used the device together, which have nothing in flight on it.
 * Gives back what operations on a device's memory
 * keep of it; before it is destroyed. */
void tr_comm_leave_device(tr_comm *world, tr_device *device);

int tr_comm_rank(const tr_comm *comm);
int tr_comm_size(const tr_comm *comm);
int tr_comm_node_size(const tr_comm *comm);         /* how many of its ranks are on this node */
int tr_comm_node_of(const tr_comm *comm, int rank); /* number of a node, among those of comm */
int tr_comm_local_rank(const tr_comm *comm);        /* this process among the world's on its node */
void *tr_comm_mpi(tr_comm *comm); /* its MPI_Comm, for HDF5: *(MPI_Comm *)result */

/* Collective on comm. Zeroed memory, 4 KiB aligned, shared inside the node where possible. */
void *tr_comm_alloc(tr_comm *comm, int64_t bytes);
void tr_comm_free_memory(tr_comm *comm, void *memory); /* Collective. NULL-safe. */
/* Collective on comm. The same where collectives on it are given a stream of the device: memory of
 * tr_comm_alloc if the device's is the host's, else the device's. */
void *tr_comm_alloc_on(tr_comm *comm, tr_device *device, int64_t bytes);
void tr_comm_free_on(tr_comm *comm, tr_device *device, void *memory, int64_t bytes); /* NULL-safe */
int64_t tr_comm_memory_bytes(int64_t bytes);     /* Local. What tr_comm_alloc takes for so many. */
int64_t tr_comm_held_bytes(const tr_comm *comm); /* Local. What it has taken and not given back. */

/* Point to point, matched by (peer, tag), tag < 1000, in order. bytes may be 0. */
tr_request *tr_send_begin(tr_comm *comm, tr_stream *stream, int peer, int tag, const void *buffer,
                          int64_t bytes);
tr_request *tr_recv_begin(tr_comm *comm, tr_stream *stream, int peer, int tag, void *buffer,
                          int64_t bytes);

/* Collective on comm; a communicator of one rank copies or does nothing. */
tr_request *tr_barrier_begin(tr_comm *comm);
tr_request *tr_broadcast_begin(tr_comm *comm, tr_stream *stream, int root, void *buffer,
                               int64_t bytes);
/* In place over buffer[n]; t is F32, F64, I32 or I64. */
tr_request *tr_all_reduce_begin(tr_comm *comm, tr_stream *stream, tr_op op, tr_dtype t,
                                void *buffer, int64_t n);
/* buffer[size*n]: afterwards [rank*n, rank*n + n) holds the sum over ranks, the rest is undefined.
 * t is F32. */
tr_request *tr_reduce_scatter_begin(tr_comm *comm, tr_stream *stream, tr_dtype t, void *buffer,
                                    int64_t n);
/* buffer[size*n]: every rank's [rank*n, rank*n + n) reaches all. */
tr_request *tr_all_gather_begin(tr_comm *comm, tr_stream *stream, tr_dtype t, void *buffer,
                                int64_t n);
/* Rank r gets send_rows[r] rows of row_bytes; blocks lie in rank order in send and recv. Count
 * arrays are host memory [size], read before begin returns. */
tr_request *tr_all_to_all_begin(tr_comm *comm, tr_stream *stream, const void *send,
                                const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                                int64_t row_bytes);

/* Waits and gives the request back; NULL does nothing (begin may return NULL for what is already
 * done, as on one rank). While it waits it drives everything that is in flight in the process. */
void tr_end(tr_request *request);
/* The same for a wait that may be long because others compute: it sleeps between two looks. */
void tr_end_asleep(tr_request *request);
/* True when tr_end would not wait (and for NULL). Drives progress; call it between slices of
 * compute. */
bool tr_test(tr_request *request);
/* Local, never waits. A step for everything that is in flight in the process; costs little when
 * nothing is. Nothing progresses by itself: computations call it between their parts. */
void tr_comm_poll(tr_comm *comm);
/* Waits until tr_end of one of them would not; which. NULL is none of them, and one is there. */
int tr_wait_any(tr_request *const *requests, int count);

/* Local. What this rank has sent to others of comm so far: point to point, all_to_all, and blocks
 * of the other collectives that are not MPI's own, or a fabric's. What the ranks of a node read in
 * each other's memory is not sent. */
typedef struct {
    int64_t messages, bytes;
    int64_t messages_out, bytes_out; /* of these, to other nodes */
} tr_sent;
tr_sent tr_comm_sent(const tr_comm *comm);

/* Collective on comm. OK if every rank passes OK; else all return the status of the lowest failing
 * rank, and rank 0 of `comm` holds that rank's message (tr_error_message). */
tr_status tr_agree(tr_comm *comm, tr_status status);

/* Local, never returns: prints the text with where this rank is (dist/watch.h) and ends the job
 * with exit code 70 through MPI_Abort. For broken invariants, failed MPI calls and want of memory
 * only. */
void tr_abort(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
void tr_abort_with(const char *text) __attribute__((noreturn)); /* as a callback takes it */

/* Test switches, process-wide, set before the first operation. Also read from the environment:
 * TRIREME_CHUNK_LIMIT (elements per MPI call), TRIREME_SYNCHRONOUS=1 (every send is MPI_Issend),
 * TRIREME_NO_SHARED=1 (ranks of one node use MPI like those of different nodes), TRIREME_NODE_RANKS
 * (pretend that nodes hold so many ranks of the world; for communicators made from then on). Equal
 * on all ranks; changed only while nothing is in flight. 0 gives back the default. */
void tr_comm_set_chunk_limit(int64_t elems);
void tr_comm_set_synchronous(bool on);
void tr_comm_set_shared(bool on);
void tr_comm_set_node_ranks(int ranks);
