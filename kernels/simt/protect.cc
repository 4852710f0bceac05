/* protect.cc - host code that touches device memory, and threads that overrun their stack, die
 * with a message that says so.
 * Floor: kernels.
 *
 * With protection on, device memory is mapped without access except while kernels and copies run.
 * The handler passes every other fault on to the one that was there before. */
#include "kernels/simt/internal.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

namespace simt {

namespace {

struct {
    bool on, open, handler;
    struct sigaction before;
} protection;

constexpr size_t HANDLER_STACK = 256 * KB; /* the handler prints, and asks for source lines */

void print_fault(const void *address, const void *pc, bool wrote) {
    const void *next = static_cast<const unsigned char *>(pc) + 1; /* where() takes returns */
    const char *verb = wrote ? "wrote" : "read";
    if (in_guard_page(address)) {
        fprintf(stderr, "simt: kernel %s, thread %d: its stack of %zu KB is full\n    here:  %s\n",
                now.name ? now.name : "?", simt_self ? simt_self->id : -1, STACK_BYTES / KB,
                where(next).c_str());
    } else if (arena_offset(address) < arena.bytes) {
        size_t start = 0, bytes = 0, offset = arena_offset(address);
        fprintf(stderr, "simt: host code %s device memory at %p", verb, address);
        if (arena_find(offset, &start, &bytes) && offset - start < bytes)
            fprintf(stderr, " (byte %zu of an allocation of %zu)", offset - start, bytes);
        fprintf(stderr, ": copy it instead\n    here:  %s\n", where(next).c_str());
    } else if (simt_self) {
        fprintf(stderr,
                "simt: kernel %s, block (%u, %u, %u), thread %d %s %p, which is no memory\n"
                "    here:  %s\n",
                now.name, simt_block_index.x, simt_block_index.y, simt_block_index.z, simt_self->id,
                verb, address, where(next).c_str());
    }
}

void on_fault(int signal, siginfo_t *info, void *context) {
    const ucontext_t *machine = static_cast<const ucontext_t *>(context);
    const void *pc = reinterpret_cast<const void *>(machine->uc_mcontext.gregs[REG_RIP]);
    bool wrote = machine->uc_mcontext.gregs[REG_ERR] & 2; /* the page fault's error code */
    print_fault(info->si_addr, pc, wrote);
    sigaction(signal, &protection.before, nullptr); /* the access is repeated, for its handler */
}

void install_handler() {
    if (protection.handler) return;
    protection.handler = true;
    stack_t have, stack = {};
    if (sigaltstack(nullptr, &have) == 0 && have.ss_flags & SS_DISABLE) {
        stack.ss_sp = malloc(HANDLER_STACK);
        stack.ss_size = HANDLER_STACK;
        sigaltstack(&stack, nullptr);
    }
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &protection.before);
}

} // namespace

void protect_create() {
    install_handler();
    const char *wish = getenv("TRIREME_SIMT_PROTECT");
    if (wish && atoi(wish)) simt_set_protect(true);
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
    protection.open = !on;
    protect_open(!on);
    protection.on = on;
}
