/* warp.cc - what the lanes of a warp do together: one meeting mechanism, and shuffles, votes,
 * matches, sums and syncwarp on top of it.
 * Floor: kernels.
 *
 * Each lane publishes a pointer to a payload on its own stack; the last to arrive computes for
 * all. Lanes that have exited are not waited for. */
#include "kernels/simt/internal.h"

namespace simt {

namespace {

struct exchange {
    uint64_t in, out;
    int argument, width;
    int mode;
};

exchange &lane_exchange(collective &c, int lane) {
    return *static_cast<exchange *>(c.payload[lane]);
}

bool has(unsigned mask, int lane) {
    return mask >> lane & 1;
}

bool met(const warp &w, const collective &c) {
    return (c.mask & w.alive & ~c.arrived) == 0;
}

/* Computes for all lanes and readies them, but for `runs`, which goes on by itself. */
void complete(warp &w, int i, const thread *runs) {
    collective c = w.waiting[i];
    w.waiting[i] = w.waiting[--w.pending];
    simt_count.collectives++;
    if (c.compute) c.compute(w, c);
    for (int lane = 0; lane < LANES; lane++) {
        thread &t = now.thread_at[w.index * LANES + lane];
        if (has(c.arrived, lane) && &t != runs) make_ready(t);
    }
}

/* The lane that `lane` reads (PTX ISA, shfl): width cuts the warp into segments. */
int source_lane(int lane, const exchange &e) {
    int segment = lane & ~(e.width - 1);
    int source = lane;
    switch (e.mode) {
    case SIMT_SHFL_IDX:
        return segment | (e.argument & (e.width - 1));
    case SIMT_SHFL_UP:
        source = lane - e.argument;
        return source < segment ? lane : source;
    case SIMT_SHFL_DOWN:
        source = lane + e.argument;
        break;
    case SIMT_SHFL_XOR:
        source = lane ^ e.argument;
        break;
    }
    return source >= segment + e.width ? lane : source;
}

void compute_shfl(warp &w, collective &c) {
    for (int lane = 0; lane < LANES; lane++) {
        if (!has(c.arrived, lane)) continue;
        exchange &e = lane_exchange(c, lane);
        int source = source_lane(lane, e);
        if (source >= 0 && source < LANES && has(c.arrived, source)) {
            e.out = lane_exchange(c, source).in;
            continue;
        }
        report("inactive lane", nullptr, nullptr,
               "warp %d: lane %d reads lane %d, which takes no part in the shuffle of %s", w.index,
               lane, source, c.site);
        e.out = ~0ull;
    }
}

void compute_ballot(warp &, collective &c) {
    uint64_t votes = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (has(c.arrived, lane) && lane_exchange(c, lane).in) votes |= 1u << lane;
    for (int lane = 0; lane < LANES; lane++)
        if (has(c.arrived, lane)) lane_exchange(c, lane).out = votes;
}

void compute_match(warp &, collective &c) {
    for (int lane = 0; lane < LANES; lane++) {
        if (!has(c.arrived, lane)) continue;
        exchange &e = lane_exchange(c, lane);
        e.out = 0;
        for (int other = 0; other < LANES; other++)
            if (has(c.arrived, other) && lane_exchange(c, other).in == e.in) e.out |= 1u << other;
    }
}

unsigned reduce_two(simt_reduce_op op, unsigned a, unsigned b) {
    switch (op) {
    case SIMT_REDUCE_ADD:
        return a + b;
    case SIMT_REDUCE_MIN_SIGNED:
        return (int)a < (int)b ? a : b;
    case SIMT_REDUCE_MAX_SIGNED:
        return (int)a > (int)b ? a : b;
    case SIMT_REDUCE_MIN_UNSIGNED:
        return a < b ? a : b;
    case SIMT_REDUCE_MAX_UNSIGNED:
        return a > b ? a : b;
    case SIMT_REDUCE_AND:
        return a & b;
    case SIMT_REDUCE_OR:
        return a | b;
    case SIMT_REDUCE_XOR:
        return a ^ b;
    }
    return 0;
}

void compute_reduce(warp &, collective &c) {
    unsigned result = 0;
    bool first = true;
    for (int lane = 0; lane < LANES; lane++) {
        if (!has(c.arrived, lane)) continue;
        const exchange &e = lane_exchange(c, lane);
        unsigned v = (unsigned)e.in;
        result = first ? v : reduce_two((simt_reduce_op)e.mode, result, v);
        first = false;
    }
    for (int lane = 0; lane < LANES; lane++)
        if (has(c.arrived, lane)) lane_exchange(c, lane).out = result;
}

void compute_syncwarp(warp &w, collective &) {
    w.syncs++;
}

uint64_t exchange_with(collective_op op, unsigned mask, exchange e, const char *site,
                       void (*compute)(warp &, collective &)) {
    join(op, mask, &e, site, compute);
    return e.out;
}

} // namespace

const char *op_name(collective_op op) {
    static const char *names[OP_COUNT] = {"__syncwarp", "a shuffle", "a vote",     "a match",
                                          "a reduce",   "an mma",    "an ldmatrix"};
    return names[op];
}

void warp_exit(thread &t) {
    warp &w = now.warp_at[t.pub.warp];
    w.alive &= ~(1u << t.pub.lane);
    for (int i = w.pending - 1; i >= 0; i--)
        if (met(w, w.waiting[i])) complete(w, i, nullptr);
}

void join(collective_op op, unsigned mask, void *payload, const char *site,
          void (*compute)(warp &w, collective &c)) {
    thread &t = self();
    warp &w = now.warp_at[t.pub.warp];
    int lane = t.pub.lane;
    if (!has(mask, lane)) {
        report("mask", nullptr, nullptr, "thread %d calls %s at %s with mask %08x, without lane %d",
               t.pub.id, op_name(op), site, mask, lane);
        abort_block();
    }
    int i = 0;
    while (i < w.pending && (w.waiting[i].mask != mask || has(w.waiting[i].arrived, lane))) i++;
    collective &c = w.waiting[i];
    if (i == w.pending) {
        w.pending++;
        c.op = op;
        c.site = site;
        c.mask = mask;
        c.arrived = 0;
        c.compute = compute;
    }
    if (c.op != op || !same_site(c.site, site)) {
        report("divergent warp operation", nullptr, nullptr,
               "thread %d calls %s at %s, other lanes wait in %s at %s", t.pub.id, op_name(op),
               site, op_name(c.op), c.site);
        if (c.op != op) abort_block();
    }
    c.arrived |= 1u << lane;
    c.payload[lane] = payload;
    if (met(w, c)) {
        complete(w, i, &t);
        return;
    }
    t.state = AT_COLLECTIVE;
    t.site = site;
    t.op = op;
    t.mask = mask;
    wait_here();
}

} // namespace simt

using namespace simt;

void simt_syncwarp(unsigned mask, const char *site) {
    join(OP_SYNCWARP, mask, nullptr, site, compute_syncwarp);
}

uint64_t simt_shfl(unsigned mask, uint64_t bits, simt_shfl_mode mode, const char *site,
                   int argument, int width) {
    if (width < 1 || width > LANES || (width & (width - 1))) {
        report("shuffle width", nullptr, nullptr, "width %d at %s: a power of two up to 32", width,
               site);
        abort_block();
    }
    return exchange_with(OP_SHFL, mask, {bits, 0, argument, width, mode}, site, compute_shfl);
}

unsigned simt_ballot(unsigned mask, bool predicate, const char *site) {
    return (unsigned)exchange_with(OP_BALLOT, mask, {predicate, 0, 0, 0, 0}, site, compute_ballot);
}

unsigned simt_match(unsigned mask, uint64_t bits, const char *site) {
    return (unsigned)exchange_with(OP_MATCH, mask, {bits, 0, 0, 0, 0}, site, compute_match);
}

unsigned simt_reduce(unsigned mask, unsigned value, simt_reduce_op op, const char *site) {
    return (unsigned)exchange_with(OP_REDUCE, mask, {value, 0, 0, 0, op}, site, compute_reduce);
}
