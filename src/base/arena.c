/* arena.c - chunks with a bump pointer. Floor: base. */
#include "base/arena.h"

#include "base/heap.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ALIGN = 64, MAX_CHUNKS = 256 };

struct tr_arena {
    /* declared */
    const tr_allocator *allocator; /* borrowed; NULL counts only */
    size_t chunk_bytes;
    /* state: chunks [0, count) are held, chunk `now` is being filled up to `used` */
    struct {
        char *base;
        size_t bytes;
    } chunks[MAX_CHUNKS];
    int64_t count, now;
    size_t used, total, peak, held;
};

static void *host_alloc(void *self, size_t bytes) {
    (void)self;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (bytes >= (size_t)4 << 20) madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

static void host_free(void *self, void *memory, size_t bytes) {
    (void)self;
    munmap(memory, bytes);
}

const tr_allocator *tr_host_allocator(void) {
    static const tr_allocator host = {.alloc = host_alloc, .free = host_free};
    return &host;
}

void tr_allocator_explain(const tr_allocator *a, char *text, size_t text_bytes) {
    *text = '\0';
    if (!a->explain) return;
    memcpy(text, ", ", 3);
    a->explain(a->self, text + 2, text_bytes - 2);
}

void *tr_allocator_take(const tr_allocator *a, size_t bytes, const char *what) {
    char where[256];
    void *memory = a->alloc(a->self, bytes ? bytes : 1);
    if (memory) return memory;
    tr_allocator_explain(a, where, sizeof where);
    tr_fail(TR_ERR_INTERNAL, "out of memory: %zu bytes wanted for %s%s", bytes, what, where);
    return NULL;
}

void tr_allocator_give(const tr_allocator *a, void *memory, size_t bytes) {
    if (memory) a->free(a->self, memory, bytes ? bytes : 1);
}

bool tr_allocator_has(const tr_allocator *a, size_t bytes) {
    void *probe = a->alloc(a->self, bytes ? bytes : 1);
    tr_allocator_give(a, probe, bytes);
    return probe;
}

tr_arena *tr_arena_create(const tr_allocator *allocator, size_t chunk_bytes) {
    tr_arena *a = tr_heap_alloc(1, sizeof *a);
    a->allocator = allocator;
    a->chunk_bytes = chunk_bytes;
    return a;
}

static void give_back(tr_arena *a) {
    for (int64_t i = 0; i < a->count; i++)
        a->allocator->free(a->allocator->self, a->chunks[i].base, a->chunks[i].bytes);
    a->count = 0;
    a->held = 0;
}

void tr_arena_destroy(tr_arena *a) {
    if (!a) return;
    give_back(a);
    free(a);
}

/* What is asked for where `bytes` more find no room. */
static size_t chunk_for(const tr_arena *a, size_t bytes) {
    return ((bytes > a->chunk_bytes ? bytes : a->chunk_bytes) + 4095) / 4096 * 4096;
}

_Noreturn static void out_of_memory(const tr_arena *a, size_t bytes) {
    char where[256];
    tr_allocator_explain(a->allocator, where, sizeof where);
    tr_out_of_memory(
        "%zu more bytes wanted, %zu MiB held by this arena%s; use more ranks, a smaller "
        "micro_batch_size or parallel.recompute",
        chunk_for(a, bytes), a->held >> 20, where);
}

/* Makes chunk `now` one that holds `bytes`; an unused chunk that is too small is replaced. false:
 * there is no memory. */
static bool next_chunk(tr_arena *a, size_t bytes) {
    int64_t i = a->count == 0 ? 0 : a->now + 1;
    size_t want = chunk_for(a, bytes);
    if (i < a->count && a->chunks[i].bytes < bytes) {
        a->allocator->free(a->allocator->self, a->chunks[i].base, a->chunks[i].bytes);
        a->held -= a->chunks[i].bytes;
        a->chunks[i].base = NULL;
    }
    if (i == MAX_CHUNKS) return false;
    if (i == a->count || !a->chunks[i].base) {
        char *base = a->allocator->alloc(a->allocator->self, want);
        if (!base) return false;
        a->chunks[i].base = base;
        a->chunks[i].bytes = want;
        a->held += want;
        if (i == a->count) a->count++;
    }
    a->now = i;
    a->used = 0;
    return true;
}

bool tr_arena_reserve(tr_arena *a, size_t bytes) {
    if (a->held >= bytes) return true;
    give_back(a);
    return next_chunk(a, bytes);
}

void *tr_arena_alloc(tr_arena *a, size_t bytes) {
    bytes = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    a->total += bytes;
    if (a->total > a->peak) a->peak = a->total;
    if (!a->allocator) return NULL;
    bool full = a->count == 0 || a->used + bytes > a->chunks[a->now].bytes;
    if (full && !next_chunk(a, bytes)) out_of_memory(a, bytes);
    void *p = a->chunks[a->now].base + a->used;
    a->used += bytes;
    return p;
}

tr_arena_mark tr_arena_get_mark(const tr_arena *a) {
    return (tr_arena_mark){a->now, a->used, a->total};
}

void tr_arena_release(tr_arena *a, tr_arena_mark mark) {
#ifndef NDEBUG /* what is released reads as NaN from now on (host memory only) */
    if (a->allocator == tr_host_allocator())
        for (int64_t i = mark.chunk; i < a->count && i <= a->now; i++) {
            size_t from = i == mark.chunk ? mark.used : 0;
            size_t to = i == a->now ? a->used : a->chunks[i].bytes;
            memset(a->chunks[i].base + from, 0xff, to - from);
        }
#endif
    a->now = mark.chunk;
    a->used = mark.used;
    a->total = mark.total;
}

void tr_arena_reset(tr_arena *a) {
    tr_arena_release(a, (tr_arena_mark){0, 0, 0});
}
size_t tr_arena_used_bytes(const tr_arena *a) {
    return a->total;
}
size_t tr_arena_peak_bytes(const tr_arena *a) {
    return a->peak;
}
size_t tr_arena_held_bytes(const tr_arena *a) {
    return a->held;
}
