/* internal.h - what the files of the host runtime share: the block that runs, its fibers, and the
 * arena.
 * Floor: kernels.
 *
 * The compiler's hooks get an address and nothing else, so the state is global, one per shared
 * library; a lock (launch.cc) lets one host thread in at a time.
 *
 * fiber.cc    stacks, the switch, the ready ring     barrier.cc  __syncthreads
 * launch.cc   one grid, block by block               warp.cc     shuffles, votes, syncwarp
 * arena.cc    memory, red zones, protection          matrix.cc   mma, ldmatrix
 * shadow.cc   who wrote and read what: races         async.cc    cp.async
 * hooks.cc    the compiler's calls of checked code   report.cc   texts with file and line
 * cost.cc     bank conflicts and sectors             stream.cc   launches, streams, events
 * fault.cc    what the processor traps               cuda.cc     cuda_runtime_api.h */
#pragma once
#include "kernels/simt/runtime.h"

#include <functional>
#include <stdio.h>
#include <string.h>
#include <string>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#define SIMT_ASAN 1
#else
#define SIMT_ASAN 0
#endif

#pragma GCC visibility push(hidden)
namespace simt {

constexpr int LANES = 32;
constexpr int MAX_THREADS = 1024;
constexpr size_t KB = 1024;
constexpr size_t STACK_BYTES = SIMT_ASAN ? 256 * KB : 64 * KB;
constexpr size_t SHARED_DEFAULT = 48 * KB; /* more needs SIMT_MAX_SMEM */
constexpr size_t SHARED_LIMIT = 163 * KB;  /* compute capability 8.0 */

/* Fibers */

struct fiber {
    void *sp;
    unsigned char *stack; /* STACK_BYTES above a guard page */
    void *fake;           /* ASan's */
};

enum thread_state { READY, AT_BARRIER, AT_COLLECTIVE, EXITED };

enum collective_op {
    OP_SYNCWARP,
    OP_SHFL,
    OP_BALLOT,
    OP_MATCH,
    OP_REDUCE,
    OP_MMA,
    OP_LDMATRIX,
    OP_COUNT
};

struct async_copy {
    void *to;
    const void *from; /* NULL: zeros */
    int group;
};

struct thread {
    simt_thread pub; /* first: simt_self points here */
    thread_state state;
    fiber *on; /* NULL: not started, or ended */
    const char *site;
    collective_op op;
    unsigned mask;
    int vote;
    int group; /* the open cp.async group */
    std::vector<async_copy> copies;
};

struct warp;
struct collective {
    collective_op op;
    const char *site;
    unsigned mask, arrived;
    void (*compute)(warp &w, collective &c);
    void *payload[LANES];
};

struct warp {
    int index;
    unsigned syncs; /* syncwarps so far, from 1 */
    unsigned alive; /* lanes that have not exited */
    int pending;
    collective waiting[LANES];
};

struct block {
    const char *name; /* of the kernel; NULL: none runs */
    int threads, live;
    unsigned number; /* in the grid, x fastest */
    unsigned epoch;  /* barriers so far, from 1 */
    int arrived;     /* at the barrier */
    const char *barrier_site;
    simt_vote barrier_vote;
    void (*body)(void *);
    const simt_call *call;
    bool aborted;
    thread thread_at[MAX_THREADS];
    warp warp_at[MAX_THREADS / LANES];
};
extern block now;

inline thread &self() {
    return *reinterpret_cast<thread *>(simt_self);
}

void fibers_begin_launch(); /* host stack bounds; fibers left over by an aborted block are reset */
void fibers_run_block();    /* starts the ready threads; returns when all exited or one aborted */
void make_ready(thread &t);
void ready_reset();
void wait_here(); /* self() has set its state and gives way until made ready */
[[noreturn]] void abort_block();
extern unsigned char *stack_now; /* of the fiber that runs */
inline bool on_current_stack(const void *p) {
    return (size_t)(static_cast<const unsigned char *>(p) - stack_now) < STACK_BYTES;
}
bool in_guard_page(const void *p);
void *current_stack_top();

/* Position i of n, in the order that the schedule runs blocks. */
uint64_t schedule_block(uint64_t i, uint64_t n);

/* Barriers and collectives */

inline bool same_site(const char *a, const char *b) {
    return a == b || strcmp(a, b) == 0;
}

void barrier_release();
bool barrier_complete();
/* Publishes payload and waits for the lanes of mask; the last to arrive computes for all. */
void join(collective_op op, unsigned mask, void *payload, const char *site,
          void (*compute)(warp &w, collective &c));
void warp_exit(thread &t); /* completes what waited for this lane only */
const char *op_name(collective_op op);
/* The scheduler has nobody to run: reports who waits where. */
void report_deadlock();

/* Launches */

/* Reports and returns what is wrong with the sizes of a launch. */
cudaError_t check_launch(const simt_call &call);
/* What SIMT_MAX_SMEM said of a kernel; 0: nothing. */
size_t shared_allowed(const void *kernel);
void run_kernel(const simt_call &call); /* now, and releases its arguments */

/* Held by whoever runs kernels or changes the arena. */
struct guard {
    guard();
    ~guard();
};

/* Streams and the entry points of cuda_runtime_api.h */

void enqueue(cudaStream_t stream, std::function<void()> run);
void drain(cudaStream_t stream);
void drain_all();
cudaError_t set_error(cudaError_t error); /* for cudaGetLastError; returns it */
cudaError_t device_error();               /* what every call returns once a report was made */
bool is_pinned(const void *p);

/* The arena: a window of shared memory, then device memory. Red zones lie between allocations. */

constexpr size_t DYNAMIC_WINDOW = 256 * KB, SHARED_WINDOW = 512 * KB;
constexpr size_t RED_ZONE = 256, SHARED_RED_ZONE = 128;

struct arena_state {
    unsigned char *base;
    size_t bytes; /* window and device memory; 0: not created yet */
};
extern arena_state arena;

inline size_t arena_offset(const void *p) { /* >= arena.bytes: outside */
    return (size_t)(static_cast<const unsigned char *>(p) - arena.base);
}

void arena_create();              /* also reads the settings; nothing if it exists */
bool switch_on(const char *name); /* 0 or 1 in the environment */
/* Ends the process with code 64. */
[[noreturn]] void refuse_setting(const char *name, const char *what_would_do);
void arena_open_for_host();  /* counted: the host may touch device memory until */
void arena_close_for_host(); /* as many closes */
void arena_room(size_t *free_p, size_t *total_p);
/* The allocation that starts at or last before offset. False: there is none. */
bool arena_find(size_t offset, size_t *start_p, size_t *bytes_p);
void shared_begin_launch(size_t dynamic_bytes);
void shared_begin_block();

/* Faults, and protection of device memory from host code */

void fault_begin_launch();
void protect_create();
void protect_open(bool open); /* does nothing unless protection is on */

/* Checks: the shadow of the arena */

extern bool checked; /* the kernels call hooks */
enum access_kind { READ, WRITE, ATOMIC, ASYNC_ISSUE, ASYNC_ARRIVE };
const char *access_name(access_kind kind);
void access(const void *p, size_t bytes, access_kind kind, const void *pc, thread &t);
/* The same for an address of any kind, by self(). */
void access_anywhere(const void *p, size_t bytes, access_kind kind, const void *pc);
void hooks_create();
void shadow_create();
void shadow_begin_launch();
void shadow_end_launch();
void shadow_begin_block();
/* bytes are now allocated (not yet written), written, or free. */
void shadow_allocate(size_t offset, size_t bytes);
void shadow_write(size_t offset, size_t bytes);
void shadow_release(size_t offset, size_t bytes);
void shadow_copy(size_t to, size_t from, size_t bytes);

/* Cost */

extern bool cost_on;
void cost_note(size_t offset, size_t bytes, access_kind kind, const void *pc, const simt_thread &t);
void cost_fold_block(); /* the block's requests are complete */

/* Reports. pc and other may be NULL; site too. */

void report(const char *kind, const void *pc, const void *other, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
std::string where(const void *pc); /* "file:line" of a return address */

/* Nobody runs while a report is made: its strings may be templates that a checked file compiled,
 * with hooks. */
struct pause {
    simt_thread *who;
    pause() : who(simt_self) { simt_self = nullptr; }
    ~pause() { simt_self = who; }
};

} // namespace simt
#pragma GCC visibility pop
