/* scratch.c - one growing block a thread. Floor: kernels.
 * Kernels get no context to keep memory in, and OpenMP's threads outlive every call: so the block
 * is thread-local, the one state of this floor. */
#include "kernels/cpu/scratch.h"

#include "base/arena.h"
#include "base/heap.h"

static _Thread_local struct {
    void *memory;
    size_t bytes;
} mine;

void tr_scratch_free(void) {
    const tr_allocator *host = tr_host_allocator();
    if (mine.memory) host->free(host->self, mine.memory, mine.bytes);
    mine.memory = NULL;
    mine.bytes = 0;
}

void *tr_scratch(size_t bytes) {
    if (bytes <= mine.bytes) return mine.memory;
    tr_scratch_free();
    const tr_allocator *host = tr_host_allocator();
    mine.bytes = (bytes + 4095) / 4096 * 4096;
    mine.memory = host->alloc(host->self, mine.bytes);
    if (!mine.memory)
        tr_out_of_memory("%zu bytes wanted for a kernel's work memory; use more ranks or a smaller "
                         "micro_batch_size",
                         bytes);
    return mine.memory;
}
