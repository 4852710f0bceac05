/* hooks.cc - what -fsanitize=thread makes the compiler call for each access of a checked kernel.
 * Floor: kernels.
 *
 * The names are libtsan's, which is never linked. Locals on the thread's own stack are hidden from
 * other threads and need no check. */
#include "kernels/simt/internal.h"

#include <link.h>

namespace simt {

namespace {

/* The part of the program that the kernels are in: constants of it are read by kernels. */
struct image {
    uintptr_t begin, end;
};

int find_image(dl_phdr_info *info, size_t, void *result) {
    uintptr_t mine = (uintptr_t)&find_image;
    image found = {UINTPTR_MAX, 0};
    bool holds = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) &segment = info->dlpi_phdr[i];
        if (segment.p_type != PT_LOAD) continue;
        uintptr_t begin = info->dlpi_addr + segment.p_vaddr, end = begin + segment.p_memsz;
        holds = holds || (mine >= begin && mine < end);
        if (begin < found.begin) found.begin = begin;
        if (end > found.end) found.end = end;
    }
    if (!holds) return 0;
    *static_cast<image *>(result) = found;
    return 1;
}

image own;

bool in_arguments(const void *p) {
    size_t offset =
        (size_t)(static_cast<const char *>(p) - static_cast<const char *>(now.call->arguments));
    return offset < now.call->arguments_bytes;
}

/* An address that is neither device memory nor the thread's own. */
void outside(const void *p, size_t bytes, access_kind kind, const void *pc) {
    if ((uintptr_t)p - own.begin < own.end - own.begin) return; /* threadIdx and the like */
    if (!simt_self || in_arguments(p) || is_pinned(p)) return;
    report("host memory", pc, nullptr, "thread %d: %s of %zu bytes at %p, which is host memory",
           simt_self->id, kind == READ ? "read" : "write", bytes, p);
}

inline void hook(const void *p, size_t bytes, access_kind kind, const void *pc) {
    if (simt_self && on_current_stack(p)) return;
    if (arena_offset(p) >= arena.bytes)
        outside(p, bytes, kind, pc);
    else if (!simt_self)
        report("host access", pc, nullptr, "host code %s device memory: copy it instead",
               kind == READ ? "reads" : "writes");
    else
        access(p, bytes, kind, pc, self());
}

inline void aligned_hook(const void *p, size_t bytes, access_kind kind, const void *pc) {
    if (simt_self && (uintptr_t)p % bytes)
        report("alignment", pc, nullptr, "thread %d: access of %zu bytes at %p", simt_self->id,
               bytes, p);
    hook(p, bytes, kind, pc);
}

} // namespace

void hooks_create() {
    dl_iterate_phdr(find_image, &own);
}

void access_anywhere(const void *p, size_t bytes, access_kind kind, const void *pc) {
    hook(p, bytes, kind, pc);
}

} // namespace simt

using namespace simt;

#define HOOK   extern "C" __attribute__((visibility("hidden"))) void
#define CALLER __builtin_return_address(0)

HOOK __tsan_init() {
    checked = true;
}
HOOK __tsan_read1(void *p) {
    hook(p, 1, READ, CALLER);
}
HOOK __tsan_read2(void *p) {
    aligned_hook(p, 2, READ, CALLER);
}
HOOK __tsan_read4(void *p) {
    aligned_hook(p, 4, READ, CALLER);
}
HOOK __tsan_read8(void *p) {
    aligned_hook(p, 8, READ, CALLER);
}
HOOK __tsan_read16(void *p) {
    aligned_hook(p, 16, READ, CALLER);
}
HOOK __tsan_write1(void *p) {
    hook(p, 1, WRITE, CALLER);
}
HOOK __tsan_write2(void *p) {
    aligned_hook(p, 2, WRITE, CALLER);
}
HOOK __tsan_write4(void *p) {
    aligned_hook(p, 4, WRITE, CALLER);
}
HOOK __tsan_write8(void *p) {
    aligned_hook(p, 8, WRITE, CALLER);
}
HOOK __tsan_write16(void *p) {
    aligned_hook(p, 16, WRITE, CALLER);
}
/* memcpy of a few bytes, which GPUs do byte by byte where needed */
HOOK __tsan_unaligned_read2(void *p) {
    hook(p, 2, READ, CALLER);
}
HOOK __tsan_unaligned_read4(void *p) {
    hook(p, 4, READ, CALLER);
}
HOOK __tsan_unaligned_read8(void *p) {
    hook(p, 8, READ, CALLER);
}
HOOK __tsan_unaligned_read16(void *p) {
    hook(p, 16, READ, CALLER);
}
HOOK __tsan_unaligned_write2(void *p) {
    hook(p, 2, WRITE, CALLER);
}
HOOK __tsan_unaligned_write4(void *p) {
    hook(p, 4, WRITE, CALLER);
}
HOOK __tsan_unaligned_write8(void *p) {
    hook(p, 8, WRITE, CALLER);
}
HOOK __tsan_unaligned_write16(void *p) {
    hook(p, 16, WRITE, CALLER);
}
HOOK __tsan_read_range(void *p, size_t bytes) {
    if (bytes) hook(p, bytes, READ, CALLER);
}
HOOK __tsan_write_range(void *p, size_t bytes) {
    if (bytes) hook(p, bytes, WRITE, CALLER);
}
/* Host code of the launchers */
HOOK __tsan_func_entry(void *) {}
HOOK __tsan_func_exit() {}
HOOK __tsan_vptr_read(void *) {}
HOOK __tsan_vptr_update(void *, void *) {}

uint4 simt_ld128(const void *p) {
    aligned_hook(p, 16, READ, CALLER);
    uint4 v;
    memcpy(&v, p, sizeof v);
    return v;
}

void simt_st128(void *p, uint4 v) {
    aligned_hook(p, 16, WRITE, CALLER);
    memcpy(p, &v, sizeof v);
}

uint64_t simt_atomic_load(const void *p, int bytes) {
    aligned_hook(p, (size_t)bytes, ATOMIC, CALLER);
    uint64_t bits = 0;
    memcpy(&bits, p, (size_t)bytes);
    return bits;
}

void simt_atomic_store(void *p, uint64_t bits, int bytes) {
    memcpy(p, &bits, (size_t)bytes);
}
