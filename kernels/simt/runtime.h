/* runtime.h - what the host runtime offers to kernels (through simt_host.h) and to programs that
 * launch them.
 * Floor: kernels.
 *
 * Everything is hidden: each shared library that links the runtime has its own. One block runs at
 * a time, on the host thread that launched it or waits for it; other host threads that call in
 * meanwhile wait. A `site` is "file:line", a string that lives as long as the program. */
#pragma once
#include "kernels/simt/include/cuda_runtime_api.h"
#include "kernels/simt/types.h"

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

/* The thread, block and launch that run now. */
struct simt_thread {
    uint3 index;
    int id, lane, warp;
};
extern simt_thread *simt_self; /* NULL: host code runs */
extern uint3 simt_block_index;
extern dim3 simt_block_dim, simt_grid_dim;
extern unsigned char *simt_dynamic; /* the block's dynamic shared memory */

/* Launches */

struct simt_call {
    const char *name;
    const void *kernel; /* the function: what SIMT_MAX_SMEM was called with */
    dim3 grid, block;
    size_t dynamic_bytes;
    void (*body)(void *arguments); /* one thread's run */
    void *arguments;               /* a copy, on the heap */
    size_t arguments_bytes;
    void (*release)(void *arguments);
};

/* Takes over call.arguments. Runs the kernel at once on the NULL stream; else when the stream is
 * waited for (kernels/simt/stream.cc). */
void simt_launch(const simt_call &call, cudaStream_t stream);
void simt_allow_shared(const void *kernel, size_t bytes);

/* Device memory, at once: programs in the manner of CUDA use cudaMalloc and so on. */
void *simt_malloc(size_t bytes); /* NULL: the arena is full */
void simt_free(void *memory);
void simt_h2d(void *to, const void *from, size_t bytes);
void simt_d2h(void *to, const void *from, size_t bytes);
void simt_d2d(void *to, const void *from, size_t bytes);
void simt_memset(void *to, int value, size_t bytes);

/* Reports */

int simt_errors(); /* since the start or the last reset, repeated ones counted */
void simt_reset_errors();
/* Where the text of a report goes, each once; NULL: to stderr. */
void simt_on_report(void (*sink)(const char *text, void *context), void *context);

struct simt_counts {
    unsigned long switches, barriers, collectives, accesses, blocks;
};
extern simt_counts simt_count;

/* Settings; each starts as the environment says. There are also TRIREME_SIMT_STREAMS=deferred|eager
 * (stream.cc) and TRIREME_SIMT_MEMORY_MB, the size of device memory (1024). */

/* TRIREME_SIMT_SCHEDULE: "fifo", "reversed" or "random:SEED", the order in which ready threads and
 * blocks run. False: unknown name, nothing changed. */
bool simt_set_schedule(const char *name);
/* TRIREME_SIMT_PROTECT=1: host code that touches device memory dies with a message. */
void simt_set_protect(bool on);
/* TRIREME_SIMT_COST=1: counts bank conflicts and sectors in checked kernels. */
void simt_set_cost(bool on);

struct simt_cost_row { /* one source line's accesses of one kind */
    const char *site, *kind;
    bool shared;
    int bytes; /* of one lane */
    unsigned long requests;
    double parts, ideal; /* per request: wavefronts of shared memory, sectors of device memory */
};
void simt_each_cost(void (*each)(const simt_cost_row &row, void *context), void *context);
void simt_reset_cost();

/* Primitives of simt_host.h */

enum simt_vote { SIMT_NO_VOTE, SIMT_VOTE_OR, SIMT_VOTE_AND, SIMT_VOTE_COUNT };
enum simt_shfl_mode { SIMT_SHFL_IDX, SIMT_SHFL_UP, SIMT_SHFL_DOWN, SIMT_SHFL_XOR };
enum simt_reduce_op {
    SIMT_REDUCE_ADD,
    SIMT_REDUCE_MIN_SIGNED,
    SIMT_REDUCE_MAX_SIGNED,
    SIMT_REDUCE_MIN_UNSIGNED,
    SIMT_REDUCE_MAX_UNSIGNED,
    SIMT_REDUCE_AND,
    SIMT_REDUCE_OR,
    SIMT_REDUCE_XOR
};
int simt_syncthreads(const char *site, simt_vote vote, int predicate);
void simt_syncwarp(unsigned mask, const char *site);
uint64_t simt_shfl(unsigned mask, uint64_t bits, simt_shfl_mode mode, const char *site,
                   int argument, int width);
unsigned simt_ballot(unsigned mask, bool predicate, const char *site);
unsigned simt_match(unsigned mask, uint64_t bits, const char *site);
unsigned simt_reduce(unsigned mask, unsigned value, simt_reduce_op op, const char *site);
void simt_mma_m16n8k16(float *d, const uint32_t *a, const uint32_t *b, const float *c,
                       const char *site);
void simt_ldmatrix(uint32_t *r, const void *row, bool transposed, const char *site);
void simt_cp_async16(void *shared, const void *global, bool filled);
void simt_cp_async_commit();
void simt_cp_async_wait(int newest);
void *simt_shared(const void *key, size_t bytes);

/* In checked kernels vector accesses and atomics go through functions: the runtime's loads and
 * stores are not instrumented. */
uint4 simt_ld128(const void *p);
void simt_st128(void *p, uint4 v);
uint64_t simt_atomic_load(const void *p, int bytes); /* checks the access as an atomic one */
void simt_atomic_store(void *p, uint64_t bits, int bytes);

#pragma GCC visibility pop
