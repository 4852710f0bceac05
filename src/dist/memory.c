/* memory.c - memory that the ranks of a communicator on one node map. Floor: dist.
 *
 * Every rank backs its own part with an anonymous memory file and maps its peers' files through
 * /proc/PID/fd. Against a file in /dev/shm, or MPI's shared windows which live there: containers
 * give /dev/shm 64 MB and writing beyond it is a SIGBUS, and a killed job leaves the file behind.
 * Where mapping fails (ranks in different containers, or the switch is off) all ranks agree on
 * private memory and collectives on it go through MPI. */
#include "dist/backend.h"

#include "base/arena.h"
#include "base/heap.h"
#include "base/log.h"
#include "base/rng.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { HEAD_BYTES = 4096 }; /* one page before the memory, holding the file's own `key` */

/* What a rank tells its peers about its file. */
typedef struct {
    int64_t bytes, pid, fd;
    uint64_t key; /* a mapped file without it is another process's (its pid in another container) */
} file_card;

static uint64_t fresh_key(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t time = (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
    return tr_random_u64(time, (uint64_t)getpid(), 0);
}

static void *map_file(int fd, int64_t bytes) {
    void *map = mmap(NULL, (size_t)(HEAD_BYTES + bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) return NULL;
    return (char *)map + HEAD_BYTES;
}

static void unmap_file(char *memory, int64_t bytes) {
    if (memory) munmap(memory - HEAD_BYTES, (size_t)(HEAD_BYTES + bytes));
}

/* This rank's file, mapped. Its pages are zero, and are placed near whoever writes them first, its
 * rank. NULL: failed. */
static char *create_file(file_card *card) {
    card->key = fresh_key();
    card->pid = getpid();
    card->fd = memfd_create("trireme", MFD_CLOEXEC);
    if (card->fd < 0 || ftruncate((int)card->fd, HEAD_BYTES + card->bytes) != 0) return NULL;
    char *own = map_file((int)card->fd, card->bytes);
    if (!own) return NULL;
    memcpy(own - HEAD_BYTES, &card->key, sizeof card->key);
    madvise(own, (size_t)card->bytes, MADV_HUGEPAGE); /* a hint: some kernels decline */
    return own;
}

static char *open_peer(const file_card *card) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)card->pid, (long long)card->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return NULL;
    char *peer = NULL;
    errno = EXDEV; /* another process's file, unless size and key say otherwise */
    if (lseek(fd, 0, SEEK_END) == HEAD_BYTES + card->bytes) peer = map_file(fd, card->bytes);
    int reason = errno;
    close(fd);
    errno = reason;
    if (peer && memcmp(peer - HEAD_BYTES, &card->key, sizeof card->key) != 0) {
        unmap_file(peer, card->bytes);
        peer = NULL;
        errno = EXDEV;
    }
    return peer;
}

static void unmap_shared(tr_comm *comm, tr_memory *memory) {
    for (int k = 0; k < comm->node_size; k++) unmap_file(memory->peer[k], memory->bytes);
    free(memory->peer);
    memory->peer = NULL;
    memory->own = NULL;
}

/* Collective. Fills memory->own and ->peer on all ranks and returns 0; or on none, and returns some
 * rank's errno. */
static int create_shared(tr_comm *comm, tr_memory *memory) {
    file_card *cards = tr_heap_alloc(comm->size, sizeof *cards);
    memory->peer = tr_heap_alloc(comm->node_size, sizeof *memory->peer);
    file_card *mine = &cards[comm->rank];
    mine->bytes = memory->bytes;
    memory->own = create_file(mine);
    int32_t failure = memory->own ? 0 : errno;
    tr_end(tr_all_gather_begin(comm, NULL, TR_U8, cards, sizeof *cards));
    memory->peer[comm->local] = memory->own;
    const int *on_node = &comm->rank_of[(int64_t)comm->node * comm->node_size];
    for (int k = 0; k < comm->node_size && failure == 0; k++) {
        if (k != comm->local) memory->peer[k] = open_peer(&cards[on_node[k]]);
        if (!memory->peer[k]) failure = errno;
    }
    /* Also keeps every file open until all have mapped it. */
    tr_end(tr_all_reduce_begin(comm, NULL, TR_MAX, TR_I32, &failure, 1));
    if (mine->fd >= 0) close((int)mine->fd);
    free(cards);
    if (failure != 0) unmap_shared(comm, memory);
    return failure;
}

/* Collective. Memory of this rank alone; where some rank has none, the first of them ends the job.
 */
static void create_private(tr_comm *comm, tr_memory *memory) {
    const tr_allocator *host = tr_host_allocator();
    memory->own = host->alloc(host->self, (size_t)memory->bytes);
    int32_t first = memory->own ? -comm->size : -comm->rank;
    if (comm->size > 1) tr_end(tr_all_reduce_begin(comm, NULL, TR_MAX, TR_I32, &first, 1));
    if (first == -comm->rank)
        tr_abort("no memory: %lld bytes for weights or gradients; use a smaller model, or more "
                 "ranks on other machines",
                 (long long)memory->bytes);
    if (first != -comm->size) tr_end(tr_barrier_begin(comm)); /* for the end */
    memset(memory->own, 0, (size_t)memory->bytes);
}

static void warn_of_private(tr_runtime *runtime, int failure) {
    if (!runtime->map_warned)
        tr_warn("ranks of one node cannot map each other's memory (%s): they reduce through MPI, "
                "several times slower; start them in one container, as one user",
                strerror(failure));
    runtime->map_warned = true;
}

int64_t tr_comm_memory_bytes(int64_t bytes) {
    return bytes > 0 ? tr_round_up(bytes, 4096) : 4096;
}

int64_t tr_comm_held_bytes(const tr_comm *comm) {
    int64_t bytes = 0;
    for (const tr_memory *memory = comm->memories; memory; memory = memory->next)
        bytes += memory->bytes;
    return bytes;
}

tr_memory *tr_memory_create(tr_comm *comm, int64_t bytes) {
    int64_t range[2] = {bytes, -bytes};
    if (comm->size > 1) tr_end(tr_all_reduce_begin(comm, NULL, TR_MAX, TR_I64, range, 2));
    if (range[0] != bytes || -range[1] != bytes)
        tr_abort("tr_comm_alloc: ranks ask for different sizes, %lld here and %lld to %lld bytes",
                 (long long)bytes, (long long)-range[1], (long long)range[0]);
    tr_memory *memory = tr_heap_alloc(1, sizeof *memory);
    memory->bytes = tr_comm_memory_bytes(bytes);
    bool shared = comm->may_share && tr_comm_get_switches()->shared && !comm->map_failed;
    int failure = shared ? create_shared(comm, memory) : 0;
    if (!shared || failure != 0) create_private(comm, memory);
    if (failure != 0) warn_of_private(comm->runtime, failure);
    comm->map_failed |= failure != 0; /* once is enough */
    memory->next = comm->memories;
    comm->memories = memory;
    return memory;
}

void tr_memory_destroy(tr_comm *comm, tr_memory *memory) {
    tr_memory **link = &comm->memories;
    while (*link != memory) link = &(*link)->next;
    *link = memory->next;
    if (memory->peer) {
        unmap_shared(comm, memory);
    } else {
        const tr_allocator *host = tr_host_allocator();
        host->free(host->self, memory->own, (size_t)memory->bytes);
    }
    free(memory);
}

tr_memory *tr_memory_find(tr_comm *comm, const void *pointer, int64_t bytes) {
    uintptr_t at = (uintptr_t)pointer;
    for (tr_memory *memory = comm->memories; memory; memory = memory->next) {
        uintptr_t first = (uintptr_t)memory->own;
        if (at >= first && at + (uintptr_t)bytes <= first + (uintptr_t)memory->bytes) return memory;
    }
    return NULL;
}
