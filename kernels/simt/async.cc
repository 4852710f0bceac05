/* async.cc - cp.async: copies that arrive when the thread waits for their group.
 * Floor: kernels.
 *
 * They are carried out as late as the contract allows, so a wait that is missing or too short
 * shows as old contents, in checked kernels as a report. */
#include "kernels/simt/internal.h"

using namespace simt;

void simt_cp_async16(void *shared, const void *global, bool filled) {
    thread &t = self();
    const void *pc = __builtin_return_address(0);
    if ((uintptr_t)shared % 16 || (filled && (uintptr_t)global % 16)) {
        report("alignment", pc, nullptr, "thread %d: cp.async takes 16-byte aligned addresses",
               t.pub.id);
        return;
    }
    if (arena_offset(shared) >= SHARED_WINDOW) {
        report("cp.async", pc, nullptr, "thread %d: %p is not in shared memory", t.pub.id, shared);
        return;
    }
    if (checked) {
        access(shared, 16, ASYNC_ISSUE, pc, t);
        if (filled) access_anywhere(global, 16, READ, pc);
    }
    t.copies.push_back({shared, filled ? global : nullptr, t.group});
}

void simt_cp_async_commit() {
    self().group++;
}

void simt_cp_async_wait(int newest) {
    thread &t = self();
    const void *pc = __builtin_return_address(0);
    size_t kept = 0;
    for (const async_copy &copy : t.copies) {
        if (copy.group >= t.group - newest) {
            t.copies[kept++] = copy;
            continue;
        }
        if (copy.from)
            memcpy(copy.to, copy.from, 16);
        else
            memset(copy.to, 0, 16);
        if (checked) access(copy.to, 16, ASYNC_ARRIVE, pc, t);
    }
    t.copies.resize(kept);
}
