/* fiber.cc - a stack per waiting thread, the switch between them, and the ring of ready threads.
 * Floor: kernels.
 *
 * A thread gets a fiber when it first runs and keeps it until it exits; then the next thread that
 * has not started runs on the same fiber, without a switch. So a kernel without barriers needs one
 * fiber, whatever its block size. */
#include "kernels/simt/internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if SIMT_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

simt_thread *simt_self;
simt_counts simt_count;

namespace simt {

unsigned char *stack_now;

/* Saves the callee's registers of the System V ABI and the stack pointer in *save, and goes on
 * where `to` was saved. */
extern "C" __attribute__((visibility("hidden"))) void simt_switch(void **save, void *to);
asm(R"(
.text
.hidden simt_switch
.globl simt_switch
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, . - simt_switch
)");

namespace {

struct {
    enum { FIFO, REVERSED, RANDOM } order;
    unsigned seed, state;
} schedule;

struct {
    uint16_t id[MAX_THREADS];
    unsigned head, count;
} ready;

struct {
    fiber all[MAX_THREADS];
    fiber *idle[MAX_THREADS]; /* the last used is used next: its stack is in the cache */
    int count, idle_count;
    fiber host; /* the caller's own stack */
    fiber *current;
    size_t host_bytes; /* bounds of the host's stack, for ASan */
} fibers;

unsigned next_random() {
    schedule.state = schedule.state * 1664525u + 1013904223u; /* Numerical Recipes */
    return schedule.state >> 8;
}

void start_switch(fiber &from, const fiber &to) {
#if SIMT_ASAN
    size_t bytes = &to == &fibers.host ? fibers.host_bytes : STACK_BYTES;
    __sanitizer_start_switch_fiber(&from.fake, to.stack, bytes);
#else
    (void)from, (void)to;
#endif
}

void finish_switch(const fiber &me) {
#if SIMT_ASAN
    __sanitizer_finish_switch_fiber(me.fake, nullptr, nullptr);
#else
    (void)me;
#endif
}

void switch_to(fiber &to) {
    fiber &from = *fibers.current;
    fibers.current = &to;
    stack_now = to.stack;
    simt_count.switches++;
    start_switch(from, to);
    simt_switch(&from.sp, to.sp);
    finish_switch(from);
}

void fiber_main();

void arm(fiber &f) {
#if SIMT_ASAN
    __asan_unpoison_memory_region(f.stack, STACK_BYTES);
#endif
    /* Stacks are whole pages apart: from their very tops they would share a few sets of the cache.
     * 5 lines further each, all 64 of a page are used. */
    size_t lower = (size_t)(&f - fibers.all) * 5 % 64 * 64;
    void **top = reinterpret_cast<void **>(f.stack + STACK_BYTES - lower);
    *--top = nullptr; /* keeps the stack as after a call: 8 off a multiple of 16 */
    *--top = reinterpret_cast<void *>(fiber_main);
    top -= 6; /* the registers that simt_switch restores */
    memset(top, 0, 6 * sizeof *top);
    f.sp = top;
    f.fake = nullptr;
}

fiber *new_fiber() {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *memory = mmap(nullptr, STACK_BYTES + page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        report("out of memory", nullptr, nullptr, "no stack for a thread (%d fibers exist)",
               fibers.count);
        abort();
    }
    mprotect(memory, page, PROT_NONE);
    fiber *f = &fibers.all[fibers.count++];
    f->stack = static_cast<unsigned char *>(memory) + page;
    arm(*f);
    return f;
}

fiber *idle_fiber() {
    return fibers.idle_count ? fibers.idle[--fibers.idle_count] : new_fiber();
}

thread &next_ready() {
    unsigned k = 0;
    if (schedule.order == schedule.REVERSED) k = ready.count - 1;
    if (schedule.order == schedule.RANDOM) k = next_random() % ready.count;
    uint16_t *slot = &ready.id[(ready.head + k) % MAX_THREADS];
    uint16_t id = *slot;
    ready.count--;
    if (schedule.order == schedule.REVERSED) return now.thread_at[id];
    *slot = ready.id[ready.head];
    ready.head = (ready.head + 1) % MAX_THREADS;
    return now.thread_at[id];
}

/* What every fiber runs: threads, one after another, as long as fresh ones come up. */
void fiber_main() {
    fiber &me = *fibers.current;
    finish_switch(me);
    for (;;) {
        now.body(now.call->arguments);
        thread &t = self();
        t.state = EXITED;
        t.on = nullptr;
        now.live--;
        if (!t.copies.empty())
            report("copies at exit", nullptr, nullptr, "thread %d did not wait for its cp.async",
                   t.pub.id);
        warp_exit(t);
        if (barrier_complete()) barrier_release();
        if (ready.count == 0) {
            if (now.live) {
                report_deadlock();
                now.aborted = true;
            }
            fibers.idle[fibers.idle_count++] = &me;
            switch_to(fibers.host);
            continue;
        }
        thread &next = next_ready();
        simt_self = &next.pub;
        if (!next.on) {
            next.on = &me;
            continue;
        }
        fibers.idle[fibers.idle_count++] = &me;
        switch_to(*next.on);
    }
}

} // namespace

void make_ready(thread &t) {
    t.state = READY;
    ready.id[(ready.head + ready.count++) % MAX_THREADS] = (uint16_t)t.pub.id;
}

void ready_reset() {
    ready.head = ready.count = 0;
}

void wait_here() {
    if (ready.count == 0) {
        report_deadlock();
        abort_block();
    }
    thread &next = next_ready();
    simt_self = &next.pub;
    if (!next.on) next.on = idle_fiber();
    if (next.on != fibers.current) switch_to(*next.on);
}

void abort_block() {
    now.aborted = true;
    switch_to(fibers.host);
    abort(); /* nobody comes back: the fiber is armed afresh */
}

void fibers_begin_launch() {
    fibers.current = &fibers.host;
    if (fibers.idle_count != fibers.count) {
        fibers.idle_count = fibers.count;
        for (int i = 0; i < fibers.count; i++) {
            fibers.idle[i] = &fibers.all[i];
            arm(fibers.all[i]);
        }
    }
#if SIMT_ASAN
    pthread_attr_t attributes;
    void *stack = nullptr;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &fibers.host_bytes);
    pthread_attr_destroy(&attributes);
    fibers.host.stack = static_cast<unsigned char *>(stack);
#endif
    schedule.state = schedule.seed * 2654435761u + 1;
}

void fibers_run_block() {
    thread &first = next_ready();
    simt_self = &first.pub;
    first.on = idle_fiber();
    switch_to(*first.on);
    simt_self = nullptr;
}

void *current_stack_top() {
    return fibers.current->stack + STACK_BYTES;
}

bool in_guard_page(const void *p) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < fibers.count; i++) {
        const unsigned char *stack = fibers.all[i].stack;
        if (p < stack && p >= stack - page) return true;
    }
    return false;
}

/* i -> i * step + seed, a permutation as step and n have no common factor. */
uint64_t schedule_block(uint64_t i, uint64_t n) {
    if (schedule.order == schedule.FIFO) return i;
    if (schedule.order == schedule.REVERSED) return n - 1 - i;
    uint64_t step = schedule.seed * 2654435761u % n, a, b;
    do {
        step++;
        for (a = step, b = n; b != 0;) {
            uint64_t rest = a % b;
            a = b;
            b = rest;
        }
    } while (a != 1);
    return (uint64_t)(((unsigned __int128)i * step + schedule.seed) % n);
}

} // namespace simt

bool simt_set_schedule(const char *name) {
    using simt::schedule;
    if (strcmp(name, "fifo") == 0) {
        schedule.order = schedule.FIFO;
    } else if (strcmp(name, "reversed") == 0) {
        schedule.order = schedule.REVERSED;
    } else if (strncmp(name, "random:", 7) == 0 && name[7]) {
        schedule.order = schedule.RANDOM;
        schedule.seed = (unsigned)strtoul(name + 7, nullptr, 10);
    } else {
        return false;
    }
    return true;
}
