/* shadow.cc - who wrote and read each piece of device and shared memory, and what that allows.
 * Floor: kernels.
 *
 * Per 2 bytes there is a state (allocated, written, freed; for each byte) that lasts, and a cell
 * with the last write and the last reads, which counts only while its serial is that of the
 * current launch (device memory) or block (shared memory): nothing is cleared between them.
 *
 * Two accesses conflict if one is a write and not both are atomic. They race if they come from
 * different blocks of a launch; or from different warps with no barrier between (the block's
 * epoch is the same); or from different lanes of a warp with neither a barrier nor a syncwarp
 * between. Shuffles order nothing. A syncwarp of some lanes counts as one of all: there a race
 * may be missed, never invented. */
#include "kernels/simt/internal.h"

#include <stdlib.h>
#include <sys/mman.h>

namespace simt {

bool checked;

namespace {

/* States, for the first byte of the two; the second byte's are one bit further up. */
enum { WRITTEN = 1, ALLOCATED = 4, FREED = 16 };

enum { PENDING = 1, HAS_WRITE = 2, WRITE_ATOMIC = 4 };

struct cell {
    uint32_t serial;
    uint32_t w_block, w_epoch, w_syncs;
    int32_t w_pc;
    uint32_t r_block, r_epoch, r_syncs; /* r_block: MANY after reads of several blocks */
    uint32_t r_warps, r_lanes;          /* of that epoch; lanes if one warp, of those syncs */
    int32_t r_pc;
    uint16_t w_thread;
    uint8_t flags;
    uint8_t bytes; /* which of the two: of the write, and of the reads from bit 4 */
};

constexpr uint32_t MANY = ~0u;
constexpr size_t RECLAIM_CELLS = 8u << 20; /* touched cells after which their pages are returned */

struct {
    uint8_t *state;
    cell *cells;
    size_t granules, touched;
    uint32_t launch, block;
} shadow;

void *map_zeros(size_t bytes) {
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        fprintf(stderr,
                "simt: no address space for the shadow of device memory, %zu MB: a smaller "
                "TRIREME_SIMT_MEMORY_MB helps\n",
                bytes / KB / KB);
        exit(1);
    }
    return memory;
}

/* Code addresses as distances from the runtime, which is linked into the same object. */
int32_t pack_pc(const void *pc) {
    intptr_t distance = (intptr_t)pc - (intptr_t)&shadow;
    return distance == (int32_t)distance ? (int32_t)distance : 0;
}

const void *unpack_pc(int32_t distance) {
    return distance ? (const void *)((intptr_t)&shadow + distance) : nullptr;
}

/* Changes the states of bytes [offset, offset + bytes): both bits of set and clear are given for
 * the first byte. */
void change_states(size_t offset, size_t bytes, int set, int clear) {
    size_t end = offset + bytes;
    if (bytes && offset % 2) {
        uint8_t &s = shadow.state[offset / 2];
        s = (uint8_t)((s & ~(2 * clear)) | 2 * set);
        offset++;
    }
    int both = 3 * set, keep = ~(3 * clear);
    if (keep == ~(3 * (WRITTEN | ALLOCATED | FREED)))
        memset(shadow.state + offset / 2, both, end > offset ? (end - offset) / 2 : 0);
    else
        for (size_t g = offset / 2; g < end / 2; g++)
            shadow.state[g] = (uint8_t)((shadow.state[g] & keep) | both);
    if (end > offset && end % 2) {
        uint8_t &s = shadow.state[end / 2];
        s = (uint8_t)((s & ~clear) | set);
    }
}

struct place { /* in words */
    char text[128];
    explicit place(size_t offset) {
        size_t start = 0, bytes = 0;
        if (offset < DYNAMIC_WINDOW)
            snprintf(text, sizeof text, "byte %zu of dynamic shared memory (%zu bytes)", offset,
                     now.call->dynamic_bytes);
        else if (offset < SHARED_WINDOW)
            snprintf(text, sizeof text, "byte %zu of static shared memory",
                     offset - DYNAMIC_WINDOW - SHARED_RED_ZONE);
        else if (arena_find(offset, &start, &bytes))
            snprintf(text, sizeof text, "byte %zu of device memory of %zu bytes", offset - start,
                     bytes);
        else
            snprintf(text, sizeof text, "device memory at offset %zu", offset - SHARED_WINDOW);
    }
};

struct request { /* one access, on the way through its granules */
    size_t offset, bytes;
    access_kind kind;
    const void *pc;
    const thread *t;
    unsigned syncs;
};

bool not_allocated(const request &q, uint8_t state, unsigned mask) {
    if ((state / ALLOCATED & mask) == mask) return false;
    bool freed = state / FREED & mask;
    report(freed ? "use after free" : "out of bounds", q.pc, nullptr,
           "thread %d: %s of %zu bytes at %s", q.t->pub.id, access_name(q.kind), q.bytes,
           place(q.offset).text);
    return true;
}

bool not_written(const request &q, uint8_t state, unsigned mask) {
    if ((q.kind != READ && q.kind != ATOMIC) || (state & mask) == mask) return false;
    report("uninitialised read", q.pc, nullptr,
           "thread %d: %s of %zu bytes that nobody wrote, at %s", q.t->pub.id, access_name(q.kind),
           q.bytes, place(q.offset).text);
    return true;
}

/* Why an access of this thread is not ordered after one by (block, epoch, ...), or NULL. */
const char *unordered(const request &q, uint32_t block, uint32_t epoch, bool other_warp,
                      bool other_lane, uint32_t syncs) {
    if (block != now.number) return "another block of the launch";
    if (epoch != now.epoch) return nullptr;
    if (other_warp) return "another warp, and no barrier between";
    if (other_lane && syncs == q.syncs) return "the same warp, and no SYNCWARP between";
    return nullptr;
}

bool races(const request &q, const cell &c, unsigned mask) {
    int id = q.t->pub.id, warp_index = q.t->pub.warp;
    if (c.flags & HAS_WRITE && c.bytes & mask && !(c.flags & WRITE_ATOMIC && q.kind == ATOMIC)) {
        const char *why = unordered(q, c.w_block, c.w_epoch, c.w_thread / LANES != warp_index,
                                    c.w_thread != id, c.w_syncs);
        if (why) {
            report("race", q.pc, unpack_pc(c.w_pc),
                   "%s by thread %d, after a write by thread %d of block %u (%s), at %s",
                   access_name(q.kind), id, c.w_thread, c.w_block, why, place(q.offset).text);
            return true;
        }
    }
    if (q.kind != READ && q.kind != ASYNC_ARRIVE && c.r_warps && c.bytes >> 4 & mask) {
        const char *why = unordered(q, c.r_block, c.r_epoch, (c.r_warps & ~(1u << warp_index)) != 0,
                                    (c.r_lanes & ~(1u << q.t->pub.lane)) != 0, c.r_syncs);
        if (why) {
            report("race", q.pc, unpack_pc(c.r_pc), "%s by thread %d, after a read (%s), at %s",
                   access_name(q.kind), id, why, place(q.offset).text);
            return true;
        }
    }
    return false;
}

inline void note_write(const request &q, cell &c, unsigned mask) {
    bool same = c.flags & HAS_WRITE && c.w_thread == q.t->pub.id && c.w_epoch == now.epoch;
    c.bytes = (uint8_t)((c.bytes & (same ? 0xff : 0xf0)) | mask);
    c.flags = HAS_WRITE;
    if (q.kind == ATOMIC) c.flags |= WRITE_ATOMIC;
    if (q.kind == ASYNC_ISSUE) c.flags |= PENDING;
    c.w_block = now.number;
    c.w_thread = (uint16_t)q.t->pub.id;
    c.w_epoch = now.epoch;
    c.w_syncs = q.syncs;
    c.w_pc = pack_pc(q.pc);
}

inline void note_read(const request &q, cell &c, unsigned mask) {
    uint32_t warp_bit = 1u << q.t->pub.warp;
    if (c.bytes >> 4 != mask) c.r_warps = 0; /* other bytes: forget rather than mix up */
    if (!c.r_warps)
        c.r_block = now.number;
    else if (c.r_block != now.number)
        c.r_block = MANY;
    if (c.r_epoch != now.epoch) c.r_warps = c.r_lanes = 0;
    if (c.r_warps != warp_bit || c.r_syncs != q.syncs) c.r_lanes = 0;
    c.bytes = (uint8_t)((c.bytes & 0x0f) | mask << 4);
    c.r_epoch = now.epoch;
    c.r_syncs = q.syncs;
    c.r_warps |= warp_bit;
    c.r_lanes |= 1u << q.t->pub.lane;
    c.r_pc = pack_pc(q.pc);
}

/* Whether all earlier accesses are of this thread, or ordered before this one: then nothing can be
 * wrong but the granule's state. That is nearly every access; what is asked here is enough for an
 * order, not all that makes one. */
inline bool is_ordered(const request &q, const cell &c) {
    const simt_thread &t = q.t->pub;
    bool writes =
        !(c.flags & HAS_WRITE) || (c.flags == HAS_WRITE && c.w_block == now.number &&
                                   (c.w_epoch != now.epoch || c.w_thread == t.id ||
                                    (c.w_thread / LANES == t.warp && c.w_syncs != q.syncs)));
    bool reads =
        !c.r_warps || q.kind == READ ||
        (c.r_block == now.number &&
         (c.r_epoch != now.epoch ||
          (c.r_warps == 1u << t.warp && (c.r_lanes == 1u << t.lane || c.r_syncs != q.syncs))));
    return writes && reads;
}

/* Reports what is wrong with an access, and returns whether anything is. */
__attribute__((noinline)) bool is_wrong(const request &q, const cell &c, uint8_t state,
                                        unsigned mask) {
    if (not_allocated(q, state, mask)) return true;
    if (c.flags & PENDING && !(q.kind == ASYNC_ARRIVE && c.w_thread == q.t->pub.id)) {
        report("cp.async", q.pc, unpack_pc(c.w_pc),
               "%s by thread %d while a copy of thread %d is on its way, at %s",
               access_name(q.kind), q.t->pub.id, c.w_thread, place(q.offset).text);
        return true;
    }
    return not_written(q, state, mask) || races(q, c, mask);
}

/* False: something was reported. */
inline bool visit(const request &q, size_t granule, unsigned mask, uint32_t serial) {
    uint8_t &state = shadow.state[granule];
    cell &c = shadow.cells[granule];
    unsigned needed = mask * ALLOCATED;
    if (q.kind == READ || q.kind == ATOMIC) needed |= mask;
    if (c.serial != serial) {
        c.serial = serial;
        c.flags = 0;
        c.r_warps = 0;
        shadow.touched++;
    }
    bool simple = (state & needed) == needed && is_ordered(q, c);
    if (!simple && is_wrong(q, c, state, mask)) return false;
    if (q.kind == READ) {
        note_read(q, c, mask);
        return true;
    }
    note_write(q, c, mask);
    if (q.kind != ASYNC_ISSUE) state = (uint8_t)(state | mask);
    return true;
}

} // namespace

const char *access_name(access_kind kind) {
    static const char *names[] = {"read", "write", "atomic", "cp.async", "cp.async"};
    return names[kind];
}

void access(const void *p, size_t bytes, access_kind kind, const void *pc, thread &t) {
    size_t offset = arena_offset(p), end = offset + bytes;
    simt_count.accesses++;
    if (cost_on && kind != ASYNC_ARRIVE) cost_note(offset, bytes, kind, pc, t.pub);
    request q = {offset, bytes, kind, pc, &t, now.warp_at[t.pub.warp].syncs};
    uint32_t serial = offset < SHARED_WINDOW ? shadow.block : shadow.launch;
    if (end > arena.bytes) end = arena.bytes;
    for (size_t g = offset / 2; g <= (end - 1) / 2; g++) {
        unsigned mask = 3;
        if (2 * g < offset) mask &= 2;
        if (2 * g + 1 >= end) mask &= 1;
        if (!visit(q, g, mask, serial)) return;
    }
}

void shadow_create() {
    shadow.granules = arena.bytes / 2;
    shadow.state = static_cast<uint8_t *>(map_zeros(shadow.granules));
    shadow.cells = static_cast<cell *>(map_zeros(shadow.granules * sizeof(cell)));
}

void shadow_begin_launch() {
    shadow.launch++;
}

void shadow_begin_block() {
    shadow.block++;
}

void shadow_end_launch() {
    if (shadow.touched < RECLAIM_CELLS) return;
    shadow.touched = 0;
    madvise(shadow.cells, shadow.granules * sizeof(cell), MADV_DONTNEED);
}

void shadow_allocate(size_t offset, size_t bytes) {
    change_states(offset, bytes, ALLOCATED, WRITTEN | ALLOCATED | FREED);
}

void shadow_release(size_t offset, size_t bytes) {
    int freed = offset < SHARED_WINDOW ? 0 : FREED;
    change_states(offset, bytes, freed, WRITTEN | ALLOCATED | FREED);
}

void shadow_write(size_t offset, size_t bytes) {
    change_states(offset, bytes, WRITTEN, 0);
}

void shadow_copy(size_t to, size_t from, size_t bytes) {
    if (to % 2 || from % 2 || bytes % 2) {
        shadow_write(to, bytes);
        return;
    }
    for (size_t i = 0; i < bytes / 2; i++) {
        uint8_t &s = shadow.state[to / 2 + i];
        s = (uint8_t)((s & ~(3 * WRITTEN)) | (shadow.state[from / 2 + i] & (3 * WRITTEN)));
    }
}

} // namespace simt
