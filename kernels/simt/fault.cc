/* fault.cc - what the processor traps: host code that touches device memory, threads that overrun
 * their stack, wild addresses, and (in checked kernels) indices outside an array.
 * Floor: kernels.
 *
 * With protection on, device memory is mapped without access except while kernels and copies run.
 * A fault in a kernel is reported and ends its launch; one of the host is described and passed on
 * to the handler that was there before. */
#include "kernels/simt/internal.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

namespace simt {

namespace {

struct {
    bool on, open, handlers;
    struct sigaction before_segv, before_ill;
} protection;

constexpr size_t HANDLER_STACK = 256 * KB; /* the handler prints, and asks for source lines */

void report_kernel_fault(const void *address, const void *pc, bool trap, bool wrote) {
    int id = simt_self->id;
    if (trap)
        report("array bounds", pc, nullptr, "thread %d: an index is outside its array", id);
    else if (in_guard_page(address))
        report("stack", pc, nullptr, "thread %d: its stack of %zu KB is full", id,
               STACK_BYTES / KB);
    else
        report("wild address", pc, nullptr, "thread %d %s %p, where no memory is", id,
               wrote ? "wrote to" : "read from", address);
}

void describe_host_fault(const void *address, const void *pc, bool wrote) {
    size_t offset = arena_offset(address), start = 0, bytes = 0;
    if (offset >= arena.bytes) return;
    fprintf(stderr, "simt: host code %s device memory at %p", wrote ? "wrote" : "read", address);
    if (arena_find(offset, &start, &bytes) && offset - start < bytes)
        fprintf(stderr, ", byte %zu of an allocation of %zu", offset - start, bytes);
    fprintf(stderr, ": copy it instead\n    here:  %s\n", where(pc).c_str());
}

void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *registers = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
    uintptr_t at = (uintptr_t)registers[REG_RIP];
    const void *pc = reinterpret_cast<const void *>(at + 1); /* as where() wants it */
    bool wrote = registers[REG_ERR] & 2;                     /* the page fault's error code */
    if (simt_self) {
        report_kernel_fault(info->si_addr, pc, signal == SIGILL, wrote);
        registers[REG_RIP] = (greg_t)&abort_block; /* on the thread's stack, from its top */
        registers[REG_RSP] = (greg_t)current_stack_top() - 8;
        return;
    }
    if (signal == SIGSEGV) describe_host_fault(info->si_addr, pc, wrote);
    /* The instruction runs again, now for the handler before. */
    sigaction(signal, signal == SIGSEGV ? &protection.before_segv : &protection.before_ill,
              nullptr);
}

void install_handlers() {
    if (protection.handlers) return;
    protection.handlers = true;
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &protection.before_segv);
    sigaction(SIGILL, &action, &protection.before_ill);
}

} // namespace

void fault_begin_launch() {
    install_handlers();
    stack_t have, stack = {};
    if (sigaltstack(nullptr, &have) != 0 || !(have.ss_flags & SS_DISABLE)) return;
    stack.ss_sp = mmap(nullptr, HANDLER_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                       -1, 0); /* for each thread that launches */
    if (stack.ss_sp == MAP_FAILED) return;
    stack.ss_size = HANDLER_STACK;
    sigaltstack(&stack, nullptr);
}

void protect_create() {
    install_handlers();
    if (switch_on("TRIREME_SIMT_PROTECT")) simt_set_protect(true);
}

void protect_open(bool open) {
    if (!protection.on || protection.open == open) return;
    protection.open = open;
    mprotect(arena.base, arena.bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

} // namespace simt

void simt_set_protect(bool on) {
    using namespace simt;
    guard held;
    if (protection.on == on) return;
    protection.on = true;
    protection.open = on;
    protect_open(!on);
    protection.on = on;
}
