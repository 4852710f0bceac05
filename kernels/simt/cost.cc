/* cost.cc - what each access site of checked kernels costs: wavefronts of shared memory and
 * sectors of device memory per request of a warp.
 * Floor: kernels.
 *
 * The k-th access of a site by each lane of a warp is taken for one request. Shared memory has 32
 * banks of 4 bytes; lanes are served 128 bytes at a time (all at up to 4 bytes each, 16 at 8, 8 at
 * 16), and each such turn takes as many wavefronts as some bank has different words to give.
 * Device memory moves sectors of 32 bytes. (CUDA C++ Programming Guide, "Compute Capabilities".) */
#include "kernels/simt/internal.h"

#include <algorithm>
#include <map>
#include <stdlib.h>

namespace simt {

bool cost_on;

namespace {

constexpr int BANKS = 32;

struct request {
    unsigned mask;
    uint32_t offset[LANES];
};

struct site {
    const void *pc;
    bool shared;
    access_kind kind;
    int bytes;
    unsigned long requests, parts, ideal;
    uint32_t times[MAX_THREADS];                    /* accesses of each thread, this block */
    std::vector<request> open[MAX_THREADS / LANES]; /* of each warp, this block */
};

struct key {
    const void *pc;
    int what;
    bool operator<(const key &b) const { return pc != b.pc ? pc < b.pc : what < b.what; }
};

std::map<key, site> sites;

/* Different words of the fullest bank. */
unsigned wavefronts(const request &q, int bytes, int begin, int end) {
    std::vector<uint32_t> words[BANKS];
    size_t most = 0;
    for (int lane = begin; lane < end; lane++) {
        if (!(q.mask >> lane & 1)) continue;
        for (uint32_t w = q.offset[lane] / 4; w <= (q.offset[lane] + (uint32_t)bytes - 1) / 4;
             w++) {
            std::vector<uint32_t> &bank = words[w % BANKS];
            if (std::find(bank.begin(), bank.end(), w) == bank.end()) bank.push_back(w);
            most = std::max(most, bank.size());
        }
    }
    return (unsigned)most;
}

void fold_shared(site &s, const request &q) {
    int lanes = std::min(LANES, 128 / s.bytes);
    for (int begin = 0; begin < LANES; begin += lanes) {
        unsigned parts = wavefronts(q, s.bytes, begin, begin + lanes);
        s.parts += parts;
        s.ideal += parts > 0;
    }
}

void fold_global(site &s, const request &q) {
    std::vector<uint32_t> sectors;
    size_t asked = 0;
    for (int lane = 0; lane < LANES; lane++) {
        if (!(q.mask >> lane & 1)) continue;
        asked += (size_t)s.bytes;
        uint32_t last = (q.offset[lane] + (uint32_t)s.bytes - 1) / 32;
        for (uint32_t sector = q.offset[lane] / 32; sector <= last; sector++)
            sectors.push_back(sector);
    }
    std::sort(sectors.begin(), sectors.end());
    size_t moved = (size_t)(std::unique(sectors.begin(), sectors.end()) - sectors.begin());
    s.parts += moved;
    s.ideal += std::min(moved, (asked + 31) / 32); /* fewer where lanes share words */
}

void print_row(const simt_cost_row &row, void *) {
    fprintf(stderr,
            "simt: cost: %-6s %-8s %2d bytes, %8lu requests, %5.2f %s each, %5.2f needed%s: %s\n",
            row.shared ? "shared" : "global", row.kind, row.bytes, row.requests, row.parts,
            row.shared ? "wavefronts" : "sectors", row.ideal,
            row.parts > 1.3 * row.ideal ? " <--" : "", row.site);
}

void print_all() {
    simt_each_cost(print_row, nullptr);
}

} // namespace

void cost_note(size_t offset, size_t bytes, access_kind kind, const void *pc,
               const simt_thread &t) {
    bool shared = offset < SHARED_WINDOW;
    if (bytes > 16) return; /* a copy of a struct: no single request */
    site &s = sites[{pc, (int)bytes * 16 + kind * 2 + shared}];
    s.pc = pc;
    s.shared = shared;
    s.kind = kind;
    s.bytes = (int)bytes;
    uint32_t k = s.times[t.id]++;
    std::vector<request> &open = s.open[t.warp];
    if (open.size() <= k) open.resize(k + 1);
    open[k].mask |= 1u << t.lane;
    open[k].offset[t.lane] = (uint32_t)offset;
}

void cost_fold_block() {
    for (auto &entry : sites) {
        site &s = entry.second;
        for (std::vector<request> &open : s.open) {
            for (const request &q : open) {
                s.requests++;
                if (s.shared)
                    fold_shared(s, q);
                else
                    fold_global(s, q);
            }
            open.clear();
        }
        std::fill(std::begin(s.times), std::end(s.times), 0u);
    }
}

} // namespace simt

using namespace simt;

void simt_each_cost(void (*each)(const simt_cost_row &row, void *context), void *context) {
    std::map<std::string, simt_cost_row> rows; /* a line may be compiled several times */
    for (const auto &entry : sites) {
        const site &s = entry.second;
        std::string line = where(s.pc);
        char suffix[48];
        snprintf(suffix, sizeof suffix, " %d %d %d", s.shared, s.kind, s.bytes);
        simt_cost_row &row = rows[line + suffix];
        row.shared = s.shared;
        row.kind = access_name(s.kind);
        row.bytes = s.bytes;
        row.requests += s.requests;
        row.parts += (double)s.parts;
        row.ideal += (double)s.ideal;
    }
    for (auto &entry : rows) {
        simt_cost_row &row = entry.second;
        std::string line = entry.first.substr(0, entry.first.find(' '));
        row.site = line.c_str();
        row.parts /= (double)row.requests;
        row.ideal /= (double)row.requests;
        each(row, context);
    }
}

void simt_reset_cost() {
    sites.clear();
}

void simt_set_cost(bool on) {
    static bool registered;
    cost_on = on;
    if (on && switch_on("TRIREME_SIMT_COST") && !registered) {
        registered = true;
        atexit(print_all);
    }
}
