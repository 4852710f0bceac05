/* nccl.c - NCCL as a device's fabric. Floor: kernels, in the module for GPUs.
 *
 * Communicators do not block: a call may still be going on when it returns, and the next may be
 * made once ncclCommGetAsyncError no longer says ncclInProgress. That is what `settled` asks.
 *
 * Work that is in a stream ends only if all ranks take part, and the host may be waiting for it in
 * a call of the CUDA runtime. So a thread looks at the groups from time to time: at NCCL's own
 * errors (a connection that broke), and at an event behind each operation. Where one has failed, or
 * has been the next of its stream for longer than the limit, it ends the job. It does not abort the
 * group before: what waits for an aborted operation goes on, with what happens to be in its buffer,
 * and ncclCommAbort may itself wait, for a call of the runtime that waits for the operation. */
#include "kernels/cuda/nccl_fabric.h"

#include "kernels/cuda/stream.h"

#include <nccl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WATCHED = 8 }; /* operations of a stream: the oldest, and the newest */

static const char joining[] = "joining";
static const char choose_network[] =
    "NCCL_SOCKET_IFNAME chooses the network, NCCL_DEBUG=INFO tells more";

typedef struct {
    const char *what;
    double since;
    tr_event *end;
} operation;

typedef struct nccl_fabric {
    tr_fabric fabric; /* first: a tr_fabric is one */
    tr_device *device;
    tr_nccl_wish wish;
    char name[32];
    pthread_mutex_t lock; /* of the list, and of what the thread reads in it */
    pthread_cond_t stop;
    pthread_t thread;
    bool stopping;
    tr_fabric_group *groups;
} nccl_fabric;

struct tr_fabric_group {
    nccl_fabric *fabric;
    tr_fabric_group *next;
    ncclComm_t comm;
    tr_stream *stream;
    int rank, size;
    char name[96];
    /* state */
    const char *doing; /* goes on since; NULL: it has settled */
    double since;
    bool in_stream; /* it ends in the stream, when it has settled */
    bool finished;
    operation operations[WATCHED]; /* a ring */
    int first, count;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* --- failures ------------------------------------------------------------------------------------
 */

/* Ends the job. `what` of the group has failed. */
static void fail(tr_fabric_group *g, const char *what, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn));

static void fail(tr_fabric_group *g, const char *what, const char *format, ...) {
    char why[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    tr_cuda_fatal(g->fabric->device, "NCCL: %s of %s (rank %d of %d) %s", what, g->name, g->rank,
                  g->size, why);
}

static void fail_with(tr_fabric_group *g, const char *what, ncclResult_t result) {
    const char *detail = g->comm ? ncclGetLastError(g->comm) : "";
    const char *remedy = "NCCL_DEBUG=INFO tells more";
    if (what == joining)
        remedy = choose_network;
    else if (result == ncclRemoteError || result == ncclSystemError)
        remedy = "a rank or a connection is gone, see the other ranks' messages; NCCL_DEBUG=INFO "
                 "tells more";
    fail(g, what, "failed: %s%s%s; %s", ncclGetErrorString(result), detail && *detail ? ": " : "",
         detail ? detail : "", remedy);
}

static void check(tr_fabric_group *g, ncclResult_t result) {
    if (result != ncclSuccess && result != ncclInProgress) fail_with(g, g->doing, result);
}

/* --- what goes on --------------------------------------------------------------------------------
 */

static void start(tr_fabric_group *g, const char *what, bool in_stream) {
    if (g->doing || g->finished)
        fail(g, what, "is begun while %s goes on", g->doing ? g->doing : "nothing more");
    pthread_mutex_lock(&g->fabric->lock);
    g->doing = what;
    g->since = now();
    g->in_stream = in_stream;
    pthread_mutex_unlock(&g->fabric->lock);
}

/* The oldest that are over leave the ring. Under the lock. */
static void forget_ended(tr_fabric_group *g) {
    while (g->count > 0 && g->fabric->device->event_done(g->operations[g->first].end)) {
        g->first = (g->first + 1) % WATCHED;
        g->count--;
        /* the next has its turn from now on */
        if (g->count > 0) g->operations[g->first].since = now();
    }
}

static bool settled(tr_fabric_group *g) {
    ncclResult_t state = ncclSuccess;
    if (!g->doing) return true;
    check(g, ncclCommGetAsyncError(g->comm, &state));
    check(g, state);
    if (state == ncclInProgress) return false;
    pthread_mutex_lock(&g->fabric->lock);
    if (g->in_stream) {
        forget_ended(g);
        if (g->count < WATCHED) g->count++; /* else the newest takes the place of the one before */
        operation *o = &g->operations[(g->first + g->count - 1) % WATCHED];
        o->what = g->doing;
        o->since = now();
        g->fabric->device->event_record(o->end, g->stream);
    }
    g->doing = NULL;
    pthread_mutex_unlock(&g->fabric->lock);
    return true;
}

/* Under the lock. */
static void look_at(tr_fabric_group *g) {
    double limit = g->fabric->wish.limit_seconds;
    ncclResult_t state = ncclSuccess;
    forget_ended(g);
    const operation *next = g->count > 0 ? &g->operations[g->first] : NULL;
    const char *what = next ? next->what : g->doing;
    double since = next ? next->since : g->since;
    if (!what) what = "an operation";
    ncclResult_t asked = ncclCommGetAsyncError(g->comm, &state);
    if (asked != ncclSuccess) fail_with(g, what, asked);
    if (state != ncclSuccess && state != ncclInProgress) fail_with(g, what, state);
    if ((next || g->doing) && limit > 0 && now() - since > limit)
        fail(g, what,
             "has not ended for %.0f s (training.watchdog_seconds): a rank is gone, or does "
             "something else",
             limit);
}

void tr_nccl_look(tr_fabric *fabric) {
    nccl_fabric *f = (nccl_fabric *)(void *)fabric;
    pthread_mutex_lock(&f->lock);
    for (tr_fabric_group *g = f->groups; g; g = g->next) look_at(g);
    pthread_mutex_unlock(&f->lock);
}

static void *watch(void *self) {
    nccl_fabric *f = self;
    tr_cuda_check(f->device, cudaSetDevice(f->wish.ordinal), "cudaSetDevice");
    for (;;) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        int64_t ns = until.tv_nsec + (int64_t)(f->wish.look_seconds * 1e9);
        until.tv_sec += ns / 1000000000;
        until.tv_nsec = ns % 1000000000;
        pthread_mutex_lock(&f->lock);
        if (!f->stopping) pthread_cond_timedwait(&f->stop, &f->lock, &until);
        bool stopping = f->stopping;
        pthread_mutex_unlock(&f->lock);
        if (stopping) return NULL;
        tr_nccl_look(&f->fabric);
    }
}

/* --- groups --------------------------------------------------------------------------------------
 */

static void make_id(const tr_fabric *fabric, void *id) {
    const nccl_fabric *f = (const nccl_fabric *)(const void *)fabric;
    ncclUniqueId made;
    ncclResult_t result = ncclGetUniqueId(&made);
    if (result != ncclSuccess)
        tr_cuda_fatal(f->device, "NCCL: ncclGetUniqueId failed: %s; %s", ncclGetErrorString(result),
                      choose_network);
    memcpy(id, &made, sizeof made);
}

static tr_fabric_group *join(const tr_fabric *fabric, const void *id, int rank, int size,
                             tr_stream *stream, const char *name) {
    nccl_fabric *f = (nccl_fabric *)(uintptr_t)fabric;
    tr_fabric_group *g = calloc(1, sizeof *g);
    if (!g) abort();
    *g = (tr_fabric_group){.fabric = f, .stream = stream, .rank = rank, .size = size};
    snprintf(g->name, sizeof g->name, "%s", name);
    for (int i = 0; i < WATCHED; i++) g->operations[i].end = f->device->event_create(f->device);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId unique;
    config.blocking = 0;
    memcpy(&unique, id, sizeof unique);
    start(g, joining, false);
    check(g, ncclCommInitRankConfig(&g->comm, size, unique, rank, &config));
    pthread_mutex_lock(&f->lock);
    g->next = f->groups;
    f->groups = g;
    pthread_mutex_unlock(&f->lock);
    return g;
}

static void finish(tr_fabric_group *g) {
    start(g, "leaving", false);
    g->finished = true;
    check(g, ncclCommFinalize(g->comm));
}

static void leave(tr_fabric_group *g) {
    if (!g) return;
    nccl_fabric *f = g->fabric;
    bool done = g->finished && !g->doing;
    pthread_mutex_lock(&f->lock);
    tr_fabric_group **link = &f->groups;
    while (*link != g) link = &(*link)->next;
    *link = g->next;
    pthread_mutex_unlock(&f->lock);
    if (!g->doing) g->doing = "leaving";
    check(g, done ? ncclCommDestroy(g->comm) : ncclCommAbort(g->comm));
    for (int i = 0; i < WATCHED; i++) f->device->event_destroy(g->operations[i].end);
    free(g);
}

/* --- operations ----------------------------------------------------------------------------------
 */

static ncclDataType_t type_of(tr_fabric_group *g, tr_dtype t) {
    switch (t) {
    case TR_F32:
        return ncclFloat32;
    case TR_BF16:
        return ncclBfloat16;
    case TR_F64:
        return ncclFloat64;
    case TR_I32:
        return ncclInt32;
    case TR_I64:
        return ncclInt64;
    case TR_U8:
        return ncclUint8;
    }
    fail(g, "an operation", "has elements of type %d", (int)t);
}

static ncclRedOp_t op_of(tr_op op) {
    return op == TR_MAX ? ncclMax : op == TR_MIN ? ncclMin : ncclSum;
}

static char *block(const tr_fabric_group *g, void *buffer, tr_dtype t, int64_t n) {
    return (char *)buffer + (size_t)(g->rank * n) * tr_dtype_bytes(t);
}

static void broadcast(tr_fabric_group *g, int root, void *buffer, int64_t bytes) {
    start(g, "broadcast", true);
    check(g, ncclBroadcast(buffer, buffer, (size_t)bytes, ncclUint8, root, g->comm,
                           g->stream->handle));
}

static void all_reduce(tr_fabric_group *g, tr_op op, tr_dtype t, void *buffer, int64_t n) {
    start(g, "all_reduce", true);
    check(g, ncclAllReduce(buffer, buffer, (size_t)n, type_of(g, t), op_of(op), g->comm,
                           g->stream->handle));
}

static void reduce_scatter(tr_fabric_group *g, tr_dtype t, void *buffer, int64_t n) {
    start(g, "reduce_scatter", true);
    check(g, ncclReduceScatter(buffer, block(g, buffer, t, n), (size_t)n, type_of(g, t), ncclSum,
                               g->comm, g->stream->handle));
}

static void all_gather(tr_fabric_group *g, tr_dtype t, void *buffer, int64_t n) {
    start(g, "all_gather", true);
    check(g, ncclAllGather(block(g, buffer, t, n), buffer, (size_t)n, type_of(g, t), g->comm,
                           g->stream->handle));
}

static ncclResult_t move(const tr_fabric_group *g, const tr_fabric_message *m) {
    size_t bytes = (size_t)m->bytes;
    cudaStream_t stream = g->stream->handle;
    return m->sends ? ncclSend(m->buffer, bytes, ncclUint8, m->peer, g->comm, stream)
                    : ncclRecv(m->buffer, bytes, ncclUint8, m->peer, g->comm, stream);
}

static void exchange(tr_fabric_group *g, const tr_fabric_message *messages, int count) {
    start(g, "messages", true);
    check(g, ncclGroupStart());
    ncclResult_t result = ncclSuccess;
    for (int i = 0; i < count && (result == ncclSuccess || result == ncclInProgress); i++)
        result = move(g, &messages[i]);
    ncclResult_t end = ncclGroupEnd(); /* also after a failure */
    check(g, result);
    check(g, end);
}

/* --- opening -------------------------------------------------------------------------------------
 */

tr_fabric *tr_nccl_open(tr_device *device, const tr_nccl_wish *wish, char *text,
                        size_t text_bytes) {
    int version = 0;
    ncclResult_t result = ncclGetVersion(&version);
    if (result != ncclSuccess) {
        snprintf(text, text_bytes, "NCCL does not work here: %s", ncclGetErrorString(result));
        return NULL;
    }
    if (version / 10000 != NCCL_VERSION_CODE / 10000 || version < NCCL_VERSION(2, 14, 0)) {
        snprintf(text, text_bytes,
                 "NCCL here is version %d, and the program was built with %d; install that, or "
                 "build again",
                 version, NCCL_VERSION_CODE);
        return NULL;
    }
    nccl_fabric *f = calloc(1, sizeof *f);
    if (!f) abort();
    f->device = device;
    f->wish = *wish;
    snprintf(f->name, sizeof f->name, "nccl %d.%d.%d", version / 10000, version / 100 % 100,
             version % 100);
    f->fabric = (tr_fabric){.name = f->name,
                            .id_bytes = sizeof(ncclUniqueId),
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
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->stop, NULL);
    if (wish->look_seconds > 0 && pthread_create(&f->thread, NULL, watch, f) != 0) {
        snprintf(text, text_bytes, "the thread that watches NCCL cannot start");
        f->wish.look_seconds = 0;
        tr_nccl_close(&f->fabric);
        return NULL;
    }
    return &f->fabric;
}

void tr_nccl_close(tr_fabric *fabric) {
    nccl_fabric *f = (nccl_fabric *)(void *)fabric;
    if (!f) return;
    pthread_mutex_lock(&f->lock);
    f->stopping = true;
    pthread_cond_signal(&f->stop);
    pthread_mutex_unlock(&f->lock);
    if (f->wish.look_seconds > 0) pthread_join(f->thread, NULL);
    pthread_cond_destroy(&f->stop);
    pthread_mutex_destroy(&f->lock);
    free(f);
}
