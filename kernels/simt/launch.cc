/* launch.cc - one kernel launch: its limits, and its blocks one after another.
 * Floor: kernels. */
#include "kernels/simt/internal.h"

#include <algorithm>
#include <map>
#include <stdlib.h>
#include <xmmintrin.h>

uint3 simt_block_index;
dim3 simt_block_dim, simt_grid_dim;

namespace simt {

block now;

namespace {

std::map<const void *, size_t> allowed_shared; /* by SIMT_MAX_SMEM */

constexpr unsigned DEFAULT_MXCSR = 0x1f80; /* GPUs keep denormals, whatever the host does */

void begin_threads() {
    for (int i = 0; i < now.threads; i++) {
        thread &t = now.thread_at[i];
        unsigned u = (unsigned)i, x = simt_block_dim.x, y = simt_block_dim.y;
        t.pub.index = {u % x, u / x % y, u / (x * y)};
        t.pub.id = i;
        t.pub.lane = i % LANES;
        t.pub.warp = i / LANES;
    }
}

void run_block() {
    now.live = now.threads;
    now.epoch = 1;
    now.arrived = 0;
    ready_reset();
    for (int i = 0; i < now.threads; i++) {
        thread &t = now.thread_at[i];
        t.on = nullptr;
        t.group = 0;
        t.copies.clear();
        make_ready(t);
    }
    for (int i = 0; i * LANES < now.threads; i++) {
        warp &w = now.warp_at[i];
        int lanes = now.threads - i * LANES;
        w.index = i;
        w.syncs = 1;
        w.pending = 0;
        w.alive = lanes >= LANES ? ~0u : (1u << lanes) - 1;
    }
    shared_begin_block();
    if (checked) shadow_begin_block();
    simt_count.blocks++;
    fibers_run_block();
    if (cost_on) cost_fold_block();
}

void run_grid() {
    const dim3 &g = simt_grid_dim;
    uint64_t blocks = (uint64_t)g.x * g.y * g.z;
    for (uint64_t i = 0; i < blocks && !now.aborted; i++) {
        uint64_t n = schedule_block(i, blocks);
        now.number = (unsigned)n;
        simt_block_index = {(unsigned)(n % g.x), (unsigned)(n / g.x % g.y),
                            (unsigned)(n / ((uint64_t)g.x * g.y))};
        run_block();
    }
}

} // namespace

size_t shared_allowed(const void *kernel) {
    auto allowed = allowed_shared.find(kernel);
    return allowed == allowed_shared.end() ? 0 : allowed->second;
}

cudaError_t check_launch(const simt_call &call) {
    const dim3 &g = call.grid, &b = call.block;
    uint64_t threads = (uint64_t)b.x * b.y * b.z;
    if (threads < 1 || threads > MAX_THREADS || b.z > 64) {
        report("launch", nullptr, nullptr, "kernel %s: a block of %u x %u x %u threads: 1 to 1024",
               call.name, b.x, b.y, b.z);
        return cudaErrorInvalidConfiguration;
    }
    if (g.x < 1 || g.y < 1 || g.z < 1 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) {
        report("launch", nullptr, nullptr,
               "kernel %s: a grid of %u x %u x %u blocks: 1 to 2^31 - 1, 65535 and 65535",
               call.name, g.x, g.y, g.z);
        return cudaErrorInvalidConfiguration;
    }
    size_t limit = std::max(shared_allowed(call.kernel), SHARED_DEFAULT);
    if (call.dynamic_bytes > limit) {
        report("shared memory", nullptr, nullptr,
               "kernel %s: %zu bytes of dynamic shared memory, %zu are allowed: SIMT_MAX_SMEM "
               "before the launch (at most %zu, compute capability 8.0)",
               call.name, call.dynamic_bytes, limit, SHARED_LIMIT);
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

void run_kernel(const simt_call &call) {
    now.name = call.name;
    now.call = &call;
    now.body = call.body;
    now.aborted = false;
    simt_block_index = {0, 0, 0};
    simt_grid_dim = call.grid;
    simt_block_dim = call.block;
    now.threads = (int)(call.block.x * call.block.y * call.block.z);
    unsigned mxcsr = _mm_getcsr();
    _mm_setcsr(DEFAULT_MXCSR);
    arena_open_for_host();
    shared_begin_launch(call.dynamic_bytes);
    if (checked) shadow_begin_launch();
    fibers_begin_launch();
    fault_begin_launch();
    begin_threads();
    run_grid();
    if (checked) shadow_end_launch();
    arena_close_for_host();
    _mm_setcsr(mxcsr);
    now.name = nullptr;
    call.release(call.arguments);
}

} // namespace simt

void simt_allow_shared(const void *kernel, size_t bytes) {
    using namespace simt;
    if (bytes > SHARED_LIMIT) {
        report("shared memory", nullptr, nullptr,
               "SIMT_MAX_SMEM of %zu bytes: at most %zu (compute capability 8.0)", bytes,
               SHARED_LIMIT);
        return;
    }
    allowed_shared[kernel] = bytes;
}
