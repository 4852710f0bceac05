/* fake_nccl.c - see fake_nccl.h. Compiled with NCCL's own header, so that signatures are checked.
 * Floor: tests. */
#include "fake_nccl.h"

#include "fake_runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ncclComm {
    int number, left; /* questions until what goes on is over */
};

static struct {
    int polls, made, alive, groups;
    ncclResult_t state;
} nccl;

void fake_nccl_reset(void) {
    memset(&nccl, 0, sizeof nccl);
}
void fake_nccl_polls(int polls) {
    nccl.polls = polls;
}
void fake_nccl_state(ncclResult_t state) {
    nccl.state = state;
}
int fake_nccl_alive(void) {
    return nccl.alive;
}
int fake_nccl_groups(void) {
    return nccl.groups;
}

/* What a call on a communicator returns. */
static ncclResult_t go_on(ncclComm_t comm, int failure) {
    if (failure) return (ncclResult_t)failure;
    comm->left = nccl.polls;
    return nccl.polls > 0 ? ncclInProgress : ncclSuccess;
}

static const char *type_name(ncclDataType_t type) {
    switch (type) {
    case ncclFloat32:
        return "f32";
    case ncclBfloat16:
        return "bf16";
    case ncclFloat64:
        return "f64";
    case ncclInt32:
        return "i32";
    case ncclInt64:
        return "i64";
    case ncclUint8:
        return "u8";
    default:
        return "?";
    }
}

static const char *op_name(ncclRedOp_t op) {
    return op == ncclSum ? "sum" : op == ncclMax ? "max" : op == ncclMin ? "min" : "?";
}

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return (ncclResult_t)fake_note("ncclGetVersion", " ");
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 7, sizeof *id);
    return (ncclResult_t)fake_note("ncclGetUniqueId", " ");
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    int failure = fake_note("ncclCommInitRankConfig", " %d of %d id %d blocking %d", rank, nranks,
                            id.internal[sizeof id.internal - 1], config->blocking);
    if (failure) return (ncclResult_t)failure;
    *comm = calloc(1, sizeof **comm);
    if (!*comm) abort();
    (*comm)->number = ++nccl.made;
    nccl.alive++;
    return go_on(*comm, 0);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    int failure = fake_note("ncclCommGetAsyncError", " c%d", comm->number);
    *state = comm->left > 0 ? ncclInProgress : nccl.state;
    if (comm->left > 0) comm->left--;
    return (ncclResult_t)failure;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    return go_on(comm, fake_note("ncclCommFinalize", " c%d", comm->number));
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    int failure = fake_note("ncclCommDestroy", " c%d", comm->number);
    if (failure) return (ncclResult_t)failure;
    free(comm);
    nccl.alive--;
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    (void)fake_note("ncclCommAbort", " c%d", comm->number);
    free(comm);
    nccl.alive--;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    static char text[32];
    snprintf(text, sizeof text, "result %d", (int)result);
    return text;
}

const char *ncclGetLastError(ncclComm_t comm) {
    return comm ? "what NCCL says of it" : "";
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return go_on(comm, fake_note("ncclBroadcast", " %s %s %zu %s root %d c%d %s", fake_name(from),
                                 fake_name(to), count, type_name(type), root, comm->number,
                                 fake_name(stream)));
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return go_on(comm, fake_note("ncclAllReduce", " %s %s %zu %s %s c%d %s", fake_name(from),
                                 fake_name(to), count, type_name(type), op_name(op), comm->number,
                                 fake_name(stream)));
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return go_on(comm, fake_note("ncclReduceScatter", " %s %s %zu %s %s c%d %s", fake_name(from),
                                 fake_name(to), count, type_name(type), op_name(op), comm->number,
                                 fake_name(stream)));
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    return go_on(comm,
                 fake_note("ncclAllGather", " %s %s %zu %s c%d %s", fake_name(from), fake_name(to),
                           count, type_name(type), comm->number, fake_name(stream)));
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    return go_on(comm, fake_note("ncclSend", " %s %zu %s to %d c%d %s", fake_name(from), count,
                                 type_name(type), peer, comm->number, fake_name(stream)));
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return go_on(comm, fake_note("ncclRecv", " %s %zu %s from %d c%d %s", fake_name(to), count,
                                 type_name(type), peer, comm->number, fake_name(stream)));
}

ncclResult_t ncclGroupStart(void) {
    int failure = fake_note("ncclGroupStart", " ");
    nccl.groups += failure == 0;
    return (ncclResult_t)failure;
}

ncclResult_t ncclGroupEnd(void) {
    nccl.groups--;
    int failure = fake_note("ncclGroupEnd", " ");
    return failure ? (ncclResult_t)failure : nccl.polls > 0 ? ncclInProgress : ncclSuccess;
}
