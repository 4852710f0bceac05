/* arena.cc - device and shared memory of the host runtime, and copies to and from it.
 * Floor: kernels.
 *
 * One mapping, of which the system gives only the pages in use. Allocations are first fit with a
 * red zone behind each; in checked programs the search goes on from the last allocation, so that
 * freed memory stays unused for long and a use after free is found. All memory starts as 0xff: NaN
 * in every float format, -1 in integers. */
#include "kernels/simt/internal.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <stdlib.h>
#include <sys/mman.h>

unsigned char *simt_dynamic;

namespace simt {

arena_state arena;

namespace {

constexpr size_t MB = 1024 * KB;
constexpr long DEFAULT_MEMORY_MB = 1024, MOST_MEMORY_MB = 1 << 20; /* TRIREME_SIMT_MEMORY_MB */
constexpr size_t ALIGNMENT = 256;                                  /* as cudaMalloc's */

std::recursive_mutex mutex;
std::map<size_t, size_t> allocated; /* offset -> bytes */
size_t search_from;
int opened;

struct shared_array {
    const void *key;
    size_t offset, bytes;
};
struct {
    size_t dynamic_bytes;
    std::vector<shared_array> arrays; /* SIMT_SHARED of this launch */
    size_t top;                       /* where the next one goes */
} shared;

size_t padded(size_t bytes) {
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + RED_ZONE;
}

/* First gap of `room` bytes at or after `from` and before `to`; 0: none. */
size_t find_gap(size_t room, size_t from, size_t to) {
    size_t at = from;
    auto next = allocated.lower_bound(from);
    if (next != allocated.begin()) {
        auto before = std::prev(next);
        size_t end = before->first + padded(before->second);
        if (end > at) at = end;
    }
    for (; next != allocated.end() && next->first < to; ++next) {
        if (next->first >= at + room) return at;
        at = next->first + padded(next->second);
    }
    return at + room <= to ? at : 0;
}

/* Whether all bytes are of one allocation; reports it if not. */
bool in_allocation(const char *what, const void *p, size_t bytes) {
    size_t offset = arena_offset(p), start = 0, have = 0;
    if (bytes == 0) return true;
    if (offset >= arena.bytes || !arena_find(offset, &start, &have) || offset - start >= have) {
        report("out of bounds", nullptr, nullptr,
               "%s of %zu bytes: %p is no allocated device "
               "memory",
               what, bytes, p);
        return false;
    }
    if (bytes > have - (offset - start)) {
        report("out of bounds", nullptr, nullptr,
               "%s of %zu bytes at byte %zu of an allocation of %zu", what, bytes, offset - start,
               have);
        return false;
    }
    return true;
}

void shared_fill(size_t offset, size_t bytes) {
    memset(arena.base + offset, 0xff, bytes);
    if (checked) shadow_allocate(offset, bytes);
}

} // namespace

guard::guard() {
    mutex.lock();
    arena_create();
}

guard::~guard() {
    mutex.unlock();
}

void refuse_setting(const char *name, const char *what_would_do) {
    fprintf(stderr, "error: %s=%s: %s\n", name, getenv(name), what_would_do);
    fflush(stdout);
    _Exit(64); /* a program may take exit for a library's failure */
}

bool switch_on(const char *name) {
    const char *text = getenv(name);
    if (!text || !*text || strcmp(text, "0") == 0) return false;
    if (strcmp(text, "1") != 0) refuse_setting(name, "0 or 1");
    return true;
}

static size_t memory_megabytes() {
    const char *name = "TRIREME_SIMT_MEMORY_MB", *text = getenv(name);
    if (!text || !*text) return (size_t)DEFAULT_MEMORY_MB;
    char *end;
    long megabytes = strtol(text, &end, 10);
    if (*end || megabytes < 1 || megabytes > MOST_MEMORY_MB) refuse_setting(name, "1 to 1048576");
    return (size_t)megabytes;
}

void arena_create() {
    if (arena.bytes) return;
    size_t megabytes = memory_megabytes(), bytes = SHARED_WINDOW + megabytes * MB;
    void *base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        fprintf(stderr, "simt: no address space for %zu MB (TRIREME_SIMT_MEMORY_MB)\n", megabytes);
        exit(1);
    }
    arena.base = static_cast<unsigned char *>(base);
    arena.bytes = bytes;
    search_from = SHARED_WINDOW + RED_ZONE;
    hooks_create();
    if (checked) shadow_create();
    const char *schedule = getenv("TRIREME_SIMT_SCHEDULE");
    if (schedule && !simt_set_schedule(schedule))
        refuse_setting("TRIREME_SIMT_SCHEDULE", "fifo, reversed or random:SEED");
    if (switch_on("TRIREME_SIMT_COST")) simt_set_cost(true);
    protect_create();
}

void arena_open_for_host() {
    if (opened++ == 0) protect_open(true);
}

void arena_close_for_host() {
    if (--opened == 0) protect_open(false);
}

void arena_room(size_t *free_p, size_t *total_p) {
    *total_p = arena.bytes - SHARED_WINDOW;
    size_t used = RED_ZONE;
    for (const auto &entry : allocated) used += padded(entry.second);
    *free_p = used < *total_p ? *total_p - used : 0;
}

bool arena_find(size_t offset, size_t *start_p, size_t *bytes_p) {
    auto next = allocated.upper_bound(offset);
    if (next == allocated.begin()) return false;
    auto at = std::prev(next);
    *start_p = at->first;
    *bytes_p = at->second;
    return true;
}

void shared_begin_launch(size_t dynamic_bytes) {
    if (checked) { /* what the launch before had */
        shadow_release(0, shared.dynamic_bytes);
        for (const shared_array &array : shared.arrays) shadow_release(array.offset, array.bytes);
    }
    shared.dynamic_bytes = dynamic_bytes;
    shared.arrays.clear();
    shared.top = DYNAMIC_WINDOW + SHARED_RED_ZONE;
    simt_dynamic = arena.base;
}

void shared_begin_block() {
    shared_fill(0, shared.dynamic_bytes);
    for (const shared_array &array : shared.arrays) shared_fill(array.offset, array.bytes);
}

} // namespace simt

using namespace simt;

void *simt_shared(const void *key, size_t bytes) {
    for (const shared_array &array : shared.arrays)
        if (array.key == key) return arena.base + array.offset;
    size_t total = bytes;
    for (const shared_array &array : shared.arrays) total += array.bytes;
    if (total > SHARED_DEFAULT) {
        report("shared memory", nullptr, nullptr,
               "%zu bytes of SIMT_SHARED: at most %zu, more is for SIMT_DYN_SMEM", total,
               SHARED_DEFAULT);
        abort_block();
    }
    size_t allowed = shared_allowed(now.call->kernel);
    size_t dynamic = std::max(allowed, shared.dynamic_bytes);
    size_t limit = allowed ? SHARED_LIMIT : SHARED_DEFAULT;
    if (total + dynamic > limit) {
        report("shared memory", nullptr, nullptr,
               "%zu bytes of SIMT_SHARED and %zu of SIMT_DYN_SMEM: at most %zu together%s", total,
               dynamic, limit, allowed ? "" : " without SIMT_MAX_SMEM");
        abort_block();
    }
    size_t offset = shared.top;
    shared.top += (bytes + 127) / 128 * 128 + SHARED_RED_ZONE; /* whole rows of banks */
    shared.arrays.push_back({key, offset, bytes});
    shared_fill(offset, bytes);
    return arena.base + offset;
}

void *simt_malloc(size_t bytes) {
    guard held;
    size_t room = padded(bytes), first = SHARED_WINDOW + RED_ZONE;
    if (room < bytes || room > arena.bytes) return nullptr;
    size_t offset = find_gap(room, checked ? search_from : first, arena.bytes);
    if (!offset) offset = find_gap(room, first, arena.bytes);
    if (!offset) return nullptr;
    allocated[offset] = bytes;
    search_from = offset + room;
    arena_open_for_host();
    memset(arena.base + offset, 0xff, bytes);
    arena_close_for_host();
    if (checked) shadow_allocate(offset, bytes);
    return arena.base + offset;
}

void simt_free(void *memory) {
    if (!memory) return;
    guard held;
    size_t offset = arena_offset(memory);
    auto entry = allocated.find(offset);
    if (entry == allocated.end()) {
        report("free", nullptr, nullptr, "%p is not the start of an allocation", memory);
        return;
    }
    if (checked) shadow_release(offset, entry->second);
    size_t page = 4 * KB, begin = (offset + page - 1) / page * page;
    size_t end = (offset + entry->second) / page * page;
    if (end > begin) madvise(arena.base + begin, end - begin, MADV_DONTNEED);
    allocated.erase(entry);
}

void simt_h2d(void *to, const void *from, size_t bytes) {
    guard held;
    if (!in_allocation("a copy to the device", to, bytes)) return;
    arena_open_for_host();
    memcpy(to, from, bytes);
    arena_close_for_host();
    if (checked) shadow_write(arena_offset(to), bytes);
}

void simt_d2h(void *to, const void *from, size_t bytes) {
    guard held;
    if (!in_allocation("a copy to the host", from, bytes)) return;
    arena_open_for_host();
    memcpy(to, from, bytes);
    arena_close_for_host();
}

void simt_d2d(void *to, const void *from, size_t bytes) {
    guard held;
    const char *what = "a copy on the device";
    if (!in_allocation(what, from, bytes) || !in_allocation(what, to, bytes)) return;
    arena_open_for_host();
    memmove(to, from, bytes);
    arena_close_for_host();
    if (checked) shadow_copy(arena_offset(to), arena_offset(from), bytes);
}

void simt_memset(void *to, int value, size_t bytes) {
    guard held;
    if (!in_allocation("a memset", to, bytes)) return;
    arena_open_for_host();
    memset(to, value, bytes);
    arena_close_for_host();
    if (checked) shadow_write(arena_offset(to), bytes);
}
