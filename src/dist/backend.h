/* backend.h - what stands behind comm.h. Floor: dist, private to it.
 *
 * comm.c turns each call into a `tr_work` (what is asked), takes a request from the communicator's
 * pool and gives it to the first backend that serves it. A backend only begins work and advances
 * it without waiting; who waits, and drives everything else in flight meanwhile, is comm.c. So a
 * backend for device memory (its `begin` enqueues on work.stream, its `advance` asks an event)
 * stands beside those for host memory and no caller changes. In the order in which they are asked:
 *     fabric  device memory, through the device's fabric (NCCL)
 *     staged  device memory, through host memory and the two below
 *     shared  reductions, gathers and barriers through memory that the ranks of a node map
 *     mpi     everything else */
#pragma once
#include "base/device.h"
#include "dist/blocks.h"
#include "dist/comm.h"

#include <mpi.h>
#include <stdatomic.h>

typedef enum {
    TR_WORK_SEND,
    TR_WORK_RECV,
    TR_WORK_BARRIER,
    TR_WORK_BROADCAST,
    TR_WORK_ALL_REDUCE,
    TR_WORK_REDUCE_SCATTER,
    TR_WORK_ALL_GATHER,
    TR_WORK_ALL_TO_ALL,
    TR_WORK_COUNT
} tr_work_kind;

typedef struct {
    tr_work_kind kind;
    tr_stream *stream; /* a device backend orders after it; host memory is ready at once */
    void *buffer;      /* received into, or worked on in place */
    const void *send;  /* of sends and all_to_all */
    int64_t n;         /* elements of dtype; of one block where the buffer has size blocks */
    tr_dtype dtype;    /* TR_U8 where the interface counts bytes */
    tr_op op;
    int peer, tag;                        /* peer is the root of a broadcast */
    const int64_t *send_rows, *recv_rows; /* valid during begin only */
    int64_t row_bytes;
} tr_work;

typedef struct {
    const char *name;
    bool (*serves)(tr_comm *comm, const tr_work *work); /* mpi has none: it serves the rest */
    void (*begin)(tr_request *request);
    bool (*advance)(tr_request *request); /* true: complete. Never waits. */
    void (*end)(tr_request *request);     /* nullable: in tr_end, once complete */
} tr_backend;

extern const tr_backend tr_backend_fabric, tr_backend_staged, tr_backend_shared, tr_backend_mpi;

typedef struct tr_staged tr_staged;     /* staged.c */
typedef struct tr_link tr_link;         /* fabric.c */
typedef struct tr_expected tr_expected; /* expect.c */
typedef struct tr_side tr_side;         /* side.c */

/* fabric.c: where a request of a link is, and what the ranks of a pair tell each other of it. */
typedef enum { TR_LINK_BEGUN, TR_LINK_ANNOUNCED, TR_LINK_ISSUED } tr_link_state;
typedef struct {
    int32_t sends, tag;
    int64_t bytes;
} tr_notice;

struct tr_request {
    tr_comm *comm;
    const tr_backend *backend;
    tr_work work;
    bool complete;
    int64_t traced;              /* its number in the trace */
    tr_request *next, *previous; /* in flight in the process; `next` also links the pool */
    /* mpi: the transfers posted, who takes part, and pieces of a reduce_scatter with their staging
     */
    MPI_Request *mpi;
    MPI_Status *statuses;
    int64_t mpi_count, mpi_room;
    float *staging;
    int64_t staging_elems, pieces_posted, pieces_added;
    int tag;
    const int *parties; /* [party_count] ranks that exchange blocks, borrowed */
    int party_count, party;
    bool gathering; /* sums of blocks are done, or not wanted */
    /* shared */
    tr_request *queued_after;
    struct tr_memory *memory; /* what the buffer lies in; NULL: private, or none */
    int64_t sequence, pieces; /* of its first piece, and how many */
    int64_t announced, worked;
    bool across_begun, across_done; /* the exchange between nodes */
    /* staged and fabric: all_to_all's counts, send and recv, as they outlast the begin */
    int64_t *rows; /* [2 * size] */
    tr_staged *staged;
    /* fabric */
    tr_link *link;
    tr_request *after; /* in the link's queue */
    tr_event *event;   /* at its begin on the caller's stream, then at its end on the link's */
    tr_link_state link_state;
    tr_notice notice;
    MPI_Request noticed;
};

/* What one rank shows to its peers: two counters and signatures of its latest operations. */
enum { TR_SHARED_NOTES = 64 };
typedef struct {
    _Alignas(64) _Atomic int64_t begun; /* last sequence whose input may be read */
    _Alignas(64) _Atomic int64_t done;  /* last sequence it is through with */
    _Alignas(64) _Atomic uint64_t note[TR_SHARED_NOTES];
} tr_shared_line;

/* Behind a rank's line: slots through which private memory is summed, two so that one is filled
 * while the other is read; small enough for the second cache. */
enum { TR_STAGING_OFFSET = 4096, TR_STAGING_SLOTS = 2, TR_STAGING_ELEMS = 1 << 16 };
static const int64_t TR_LINE_BYTES =
    TR_STAGING_OFFSET + (int64_t)sizeof(float) * TR_STAGING_SLOTS * TR_STAGING_ELEMS;

/* One tr_comm_alloc. */
typedef struct tr_memory {
    struct tr_memory *next;
    int64_t bytes;
    char *own;
    char **peer; /* [node_size] as mapped here, by place on the node; NULL: private memory */
} tr_memory;

typedef struct {
    tr_request *first, *last; /* in flight, in the order they were begun */
    bool map_warned;
    int local;      /* this process among the world's on its node */
    tr_comm *comms; /* all, oldest first */
    tr_side *sides; /* of devices that operations have used */
} tr_runtime;

struct tr_comm {
    tr_runtime *runtime; /* the world's */
    tr_comm *next;       /* among the runtime's */
    bool is_world;
    const char *name; /* of the group, for messages */
    int rank, size;
    /* nodes.c. Where nodes hold different numbers of ranks only the next lines are of use. */
    int nodes, node, node_size, local; /* this rank is number `local` of node_size on `node` */
    int *node_of;                      /* [size] */
    bool may_share;                    /* all nodes hold equally many ranks, more than one */
    int *rank_of;                      /* [nodes * node_size] */
    int *across;                       /* [nodes] ranks with this rank's `local` */
    int *everyone;                     /* [size] 0, 1, ... */
    MPI_Comm mpi;                      /* point to point */
    MPI_Comm internal;                 /* messages of collectives */
    int64_t internal_begun;            /* collectives begun on `internal`: gives their tags */
    tr_memory *memories;
    bool map_failed; /* peers' memory cannot be mapped: do not try again */
    tr_request *pool;
    int64_t in_flight;
    tr_sent sent;
    tr_request *staged_first, *staged_last; /* staged: parts of theirs have not begun */
    tr_link *links;                         /* fabric */
    tr_expected *expected;                  /* of the fabric, and not yet tried */
    /* shared: NULL lines unless the ranks of every node map each other's memory */
    tr_memory *lines_memory;
    tr_shared_line **lines;               /* [node_size] */
    int64_t shared_begun;                 /* the last sequence given */
    tr_request *queue_first, *queue_last; /* begun and not worked through */
    tr_request *announcing;               /* the first of them with a piece to announce */
    int64_t slots_filled, slots_summed;   /* staged pieces so far */
    int64_t slot_holds[TR_STAGING_SLOTS]; /* the sequence whose piece is in it */
};

/* comm.c */
typedef struct {
    int64_t chunk_limit; /* elements per MPI call, 0: no limit but the default's */
    bool synchronous, shared;
    int node_ranks; /* pretended ranks of the world on a node, 0: as it is */
} tr_comm_switches;
const tr_comm_switches *tr_comm_get_switches(void);

/* comm.c. What a backend makes of others: operations on host memory, of shared or mpi. They are in
 * no list: who begins one advances it until true, which gives it back. */
tr_request *tr_part_begin(tr_comm *comm, const tr_work *work);
bool tr_part_advance(tr_request *part);

/* comm.c. Copies the counts of an all_to_all to request->rows. */
void tr_rows_keep(tr_request *request);

/* The device whose memory the work is on; NULL: host memory. */
static inline tr_device *tr_work_device(const tr_work *work) {
    tr_device *device = work->stream ? tr_stream_device(work->stream) : NULL;
    return device && !device->host_memory ? device : NULL;
}

/* staged.c. Local. Gives back what a request has kept. */
void tr_staged_free(tr_staged *staged);
/* fabric.c. Collective on comm. Leaves the groups on the device; NULL: on any. */
void tr_links_free(tr_comm *comm, const tr_device *device);
/* expect.c. Local. Forgets what is expected on the device; NULL: on any. */
void tr_expected_free(tr_comm *comm, const tr_device *device);

/* side.c: what operations keep of a device between them. All local. */
typedef struct {
    char *at;
    size_t bytes;
} tr_staging;
struct tr_side {
    tr_side *next;
    tr_device *device;   /* borrowed */
    tr_stream *out, *in; /* copies to the host, and to the device; owned */
    tr_event **events;   /* free ones */
    tr_staging *staging; /* free pieces */
    int64_t event_count, event_room, staging_count, staging_room;
};
tr_side *tr_side_of(tr_runtime *runtime, tr_device *device);
tr_event *tr_side_take_event(tr_side *side);
void tr_side_give_event(tr_side *side, tr_event *event);
/* `bytes` or more, 64-byte aligned, contents undefined; given back once nothing uses it. */
tr_staging tr_side_take_staging(tr_side *side, size_t bytes);
void tr_side_give_staging(tr_side *side, tr_staging staging);
void tr_side_free(tr_runtime *runtime, tr_device *device);

/* nodes.c. Collective on comm->mpi. Fills what comm holds about nodes. */
void tr_nodes_find(tr_comm *comm);

/* mpi.c. Tags of messages on comm->internal: collectives take them in turn, fabric.c has its own.
 */
enum { TR_INTERNAL_TAGS = 1 << 14, TR_TAG_ID, TR_TAG_NOTICE, TR_TAG_GO };

/* mpi.c. A reduce_scatter or all_gather (request->work) of only the blocks of `parties`, comm ranks
 * of which this one is number `party`. The tag comes from tr_take_tag at the operation's begin. */
int tr_take_tag(tr_comm *comm);
void tr_count_sent(tr_comm *comm, int peer, int64_t bytes);
void tr_exchange_begin(tr_request *request, const int *parties, int party_count, int party);
bool tr_exchange_advance(tr_request *request);

/* memory.c. Collective on comm: memory that the ranks of each node map, or private memory. */
tr_memory *tr_memory_create(tr_comm *comm, int64_t bytes);
void tr_memory_destroy(tr_comm *comm, tr_memory *memory);
/* Local. The allocation [pointer, pointer + bytes) lies in, or NULL. */
tr_memory *tr_memory_find(tr_comm *comm, const void *pointer, int64_t bytes);

/* sum.c, by all OpenMP threads. For every k: out[k][i] = in[0][i] + in[1][i] + ... in that order,
 * in fp32; count >= 2. out[0] is this rank's. Outputs are inputs, or only out[0] is given. */
void tr_sum_in_order(float *const *out, int outs, const float *const *in, int count, int64_t n);
void tr_copy_threaded(void *out, const void *in, int64_t bytes);

/* abort.c. From `on` to off the process that ends by exit does so with TR_ERR_INTERNAL. */
void tr_guard_exit(bool on);
/* Ends the job unless `code` is MPI_SUCCESS. */
void tr_mpi_check(int code, const char *call);
#define TR_MPI(call) tr_mpi_check((call), #call)
