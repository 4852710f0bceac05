/* mpi_fabric.c - see mpi_fabric.h. */
#include "tests/dist/mpi_fabric.h"

#include "dist/comm.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    tr_fabric fabric;
    late_device *late;
    int64_t ids, operations, fail_at;
    mpi_fabric_counts counts;
} mpi_fabric;

typedef struct {
    int32_t key, creator; /* ranks of the world */
} group_id;

enum { TAG_CARD, TAG_TABLE, TAG_DATA, TAGS };

typedef struct transfer transfer;

struct tr_fabric_group {
    mpi_fabric *fabric;
    group_id id;
    int rank, size;
    tr_stream *stream;
    char name[96];
    int *world; /* [size] ranks of the world */
    MPI_Request *joins;
    int join_count;
    enum { CARDS, TABLE, READY } joining;
    int patience; /* calls of settled until it is */
    transfer *begun;
    bool finished;
};

#define FABRIC_CHECK(condition, ...)                                                               \
    do {                                                                                           \
        if (!(condition)) tr_abort("mpi fabric: " __VA_ARGS__);                                    \
    } while (0)

static int tag_of(const tr_fabric_group *g, int what) {
    return g->id.key * TAGS + what;
}

static void make_id(const tr_fabric *fabric, void *id) {
    mpi_fabric *f = (mpi_fabric *)(uintptr_t)fabric;
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    /* messages of the creator's groups and of others to the same rank have different tags */
    group_id made = {.key = (int32_t)(f->ids++ * size + rank), .creator = rank};
    memcpy(id, &made, sizeof made);
}

static tr_fabric_group *join(const tr_fabric *fabric, const void *id, int rank, int size,
                             tr_stream *stream, const char *name) {
    tr_fabric_group *g = calloc(1, sizeof *g);
    g->fabric = (mpi_fabric *)(uintptr_t)fabric;
    memcpy(&g->id, id, sizeof g->id);
    g->rank = rank;
    g->size = size;
    g->stream = stream;
    snprintf(g->name, sizeof g->name, "%s", name);
    g->world = calloc((size_t)size, sizeof *g->world);
    g->joins = calloc((size_t)size, sizeof *g->joins);
    MPI_Comm_rank(MPI_COMM_WORLD, &g->world[rank]);
    FABRIC_CHECK((rank == 0) == (g->world[rank] == g->id.creator), "the id is another group's");
    g->fabric->counts.joined++;
    g->fabric->counts.groups_now++;
    g->patience = 5;
    if (rank == 0) {
        for (int r = 1; r < size; r++)
            MPI_Irecv(&g->world[r], 1, MPI_INT, MPI_ANY_SOURCE, tag_of(g, TAG_CARD) + r * 1000000,
                      MPI_COMM_WORLD, &g->joins[g->join_count++]);
    } else {
        MPI_Isend(&g->world[rank], 1, MPI_INT, g->id.creator, tag_of(g, TAG_CARD) + rank * 1000000,
                  MPI_COMM_WORLD, &g->joins[g->join_count++]);
    }
    return g;
}

static void exchange_table(tr_fabric_group *g) {
    g->join_count = 0;
    if (g->rank > 0)
        MPI_Irecv(g->world, g->size, MPI_INT, g->id.creator, tag_of(g, TAG_TABLE), MPI_COMM_WORLD,
                  &g->joins[g->join_count++]);
    for (int r = 1; r < g->size && g->rank == 0; r++)
        MPI_Isend(g->world, g->size, MPI_INT, g->world[r], tag_of(g, TAG_TABLE), MPI_COMM_WORLD,
                  &g->joins[g->join_count++]);
}

/* --- operations ----------------------------------------------------------------------------------
 */

/* What happens in the stream: all messages at once, then `sum` of what came. */
struct transfer {
    tr_fabric_group *group;
    int count;
    tr_fabric_message *messages;
    MPI_Request *requests;
    bool posted;
    /* reductions: size contributions of n elements, in rank order */
    char *arrived;
    void *result;
    tr_op op;
    tr_dtype t;
    int64_t n;
};

static transfer *make_transfer(tr_fabric_group *g, int most) {
    mpi_fabric *f = g->fabric;
    FABRIC_CHECK(!g->begun && g->joining == READY && g->patience == 0 && !g->finished,
                 "%s: begun before it has settled", g->name);
    f->operations++;
    if (f->fail_at > 0 && f->operations >= f->fail_at)
        tr_abort("mpi fabric: operation %lld of %s fails", (long long)f->operations, g->name);
    transfer *x = calloc(1, sizeof *x);
    x->group = g;
    x->messages = calloc((size_t)most + 1, sizeof *x->messages);
    x->requests = calloc((size_t)most + 1, sizeof *x->requests);
    g->begun = x;
    g->patience = 1 + (int)(f->operations % 3);
    return x;
}

static void add(transfer *x, bool sends, int peer, void *buffer, int64_t bytes) {
    FABRIC_CHECK(bytes > 0 && peer >= 0 && peer < x->group->size, "%s: a message of %lld bytes",
                 x->group->name, (long long)bytes);
    x->messages[x->count++] = (tr_fabric_message){sends, peer, buffer, bytes};
}

static void post(transfer *x) {
    tr_fabric_group *g = x->group;
    for (int i = 0; i < x->count; i++) {
        const tr_fabric_message *m = &x->messages[i];
        bool own = x->arrived && (char *)m->buffer >= x->arrived &&
                   (char *)m->buffer < x->arrived + g->size * x->n * 8;
        void *at = own ? m->buffer : late_inside(g->fabric->late, m->buffer, (size_t)m->bytes);
        if (m->sends)
            MPI_Issend(at, (int)m->bytes, MPI_BYTE, g->world[m->peer], tag_of(g, TAG_DATA),
                       MPI_COMM_WORLD, &x->requests[i]);
        else
            MPI_Irecv(at, (int)m->bytes, MPI_BYTE, g->world[m->peer], tag_of(g, TAG_DATA),
                      MPI_COMM_WORLD, &x->requests[i]);
    }
    x->posted = true;
}

#define REDUCE(type)                                                                               \
    do {                                                                                           \
        type *out = result;                                                                        \
        for (int64_t i = 0; i < x->n; i++) {                                                       \
            type sum = ((const type *)(const void *)x->arrived)[i];                                \
            for (int r = 1; r < x->group->size; r++) {                                             \
                type other = ((const type *)(const void *)x->arrived)[r * x->n + i];               \
                if (x->op == TR_SUM) sum += other;                                                 \
                if (x->op == TR_MAX && other > sum) sum = other;                                   \
                if (x->op == TR_MIN && other < sum) sum = other;                                   \
            }                                                                                      \
            out[i] = sum;                                                                          \
        }                                                                                          \
    } while (0)

static void reduce(const transfer *x) {
    void *result =
        late_inside(x->group->fabric->late, x->result, (size_t)x->n * tr_dtype_bytes(x->t));
    switch (x->t) {
    case TR_F32:
        REDUCE(float);
        break;
    case TR_F64:
        REDUCE(double);
        break;
    case TR_I32:
        REDUCE(int32_t);
        break;
    case TR_I64:
        REDUCE(int64_t);
        break;
    default:
        tr_abort("mpi fabric: no sums of type %d", (int)x->t);
    }
}

/* In the stream. */
static bool run(void *self) {
    transfer *x = self;
    int all = 0;
    if (!x->posted) post(x);
    MPI_Testall(x->count, x->requests, &all, MPI_STATUSES_IGNORE);
    if (!all) return false;
    if (x->arrived) reduce(x);
    free(x->arrived);
    free(x->messages);
    free(x->requests);
    return true; /* x itself is the stream's to free */
}

static bool settled(tr_fabric_group *g) {
    int all = 0;
    MPI_Testall(g->join_count, g->joins, &all, MPI_STATUSES_IGNORE);
    if (!all) return false;
    if (g->joining == CARDS) exchange_table(g);
    if (g->joining != READY) {
        g->joining++;
        return false;
    }
    if (g->patience > 0 && --g->patience > 0) return false;
    if (g->begun) late_enqueue(g->stream, run, g->begun);
    g->begun = NULL;
    return true;
}

static void exchange(tr_fabric_group *g, const tr_fabric_message *messages, int count) {
    FABRIC_CHECK(count > 0, "%s: an exchange of nothing", g->name);
    transfer *x = make_transfer(g, count);
    for (int i = 0; i < count; i++)
        add(x, messages[i].sends, messages[i].peer, messages[i].buffer, messages[i].bytes);
    mpi_fabric_counts *c = &g->fabric->counts;
    c->exchanges++;
    c->messages += count;
    if (count > c->most_at_once) c->most_at_once = count;
}

static void broadcast(tr_fabric_group *g, int root, void *buffer, int64_t bytes) {
    transfer *x = make_transfer(g, g->size);
    for (int r = 0; r < g->size; r++)
        if (g->rank == root ? r != root : r == g->rank)
            add(x, g->rank == root, g->rank == root ? r : root, buffer, bytes);
    g->fabric->counts.collectives++;
}

static void all_gather(tr_fabric_group *g, tr_dtype t, void *buffer, int64_t n) {
    int64_t bytes = n * (int64_t)tr_dtype_bytes(t);
    transfer *x = make_transfer(g, 2 * g->size);
    for (int r = 0; r < g->size; r++) {
        if (r == g->rank) continue;
        add(x, true, r, (char *)buffer + g->rank * bytes, bytes);
        add(x, false, r, (char *)buffer + r * bytes, bytes);
    }
    g->fabric->counts.collectives++;
}

/* Rank r's sum of the blocks `to + r * stride` of all, from own blocks. */
static void begin_reduction(tr_fabric_group *g, tr_op op, tr_dtype t, void *buffer, int64_t n,
                            bool scatter) {
    int64_t bytes = n * (int64_t)tr_dtype_bytes(t);
    transfer *x = make_transfer(g, 2 * g->size);
    x->arrived = malloc((size_t)(g->size * n * 8));
    x->op = op;
    x->t = t;
    x->n = n;
    x->result = (char *)buffer + (scatter ? g->rank * bytes : 0);
    for (int r = 0; r < g->size; r++) { /* to and from itself too */
        add(x, true, r, (char *)buffer + (scatter ? r * bytes : 0), bytes);
        add(x, false, r, x->arrived + r * bytes, bytes);
    }
    g->fabric->counts.collectives++;
}

static void all_reduce(tr_fabric_group *g, tr_op op, tr_dtype t, void *buffer, int64_t n) {
    begin_reduction(g, op, t, buffer, n, false);
}

static void reduce_scatter(tr_fabric_group *g, tr_dtype t, void *buffer, int64_t n) {
    begin_reduction(g, TR_SUM, t, buffer, n, true);
}

static void finish(tr_fabric_group *g) {
    FABRIC_CHECK(!g->begun && !g->finished, "%s: finished while something is begun", g->name);
    g->finished = true;
    g->patience = 3;
}

static void leave(tr_fabric_group *g) {
    if (!g) return;
    FABRIC_CHECK(g->finished && g->patience == 0, "%s: left before it has finished", g->name);
    g->fabric->counts.groups_now--;
    free(g->world);
    free(g->joins);
    free(g);
}

tr_fabric *mpi_fabric_create(late_device *late) {
    mpi_fabric *f = calloc(1, sizeof *f);
    f->late = late;
    f->fabric = (tr_fabric){.name = "mpi",
                            .id_bytes = sizeof(group_id),
                            .make_id = make_id,
                            .join = join,
                            .settled = settled,
                            .broadcast = broadcast,
                            .all_reduce = all_reduce,
                            .reduce_scatter = reduce_scatter,
                            .all_gather = all_gather,
                            .exchange = exchange,
                            .finish = finish,
                            .leave = leave};
    late_device_of(late)->fabric = &f->fabric;
    return &f->fabric;
}

void mpi_fabric_destroy(tr_fabric *fabric) {
    mpi_fabric *f = (mpi_fabric *)(void *)fabric;
    FABRIC_CHECK(f->counts.groups_now == 0, "%lld groups are left",
                 (long long)f->counts.groups_now);
    late_device_of(f->late)->fabric = NULL;
    free(f);
}

mpi_fabric_counts mpi_fabric_count(const tr_fabric *fabric) {
    return ((const mpi_fabric *)(const void *)fabric)->counts;
}

void mpi_fabric_fail_at(tr_fabric *fabric, int64_t n) {
    ((mpi_fabric *)(void *)fabric)->fail_at = n;
}
