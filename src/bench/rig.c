/* rig.c - surroundings of a single layer. Floor: bench. */
#include "bench/rig.h"

#include "base/heap.h"

#include <stdlib.h>
#include <string.h>

enum { CHUNK = 64 << 20 };

void tr_rig_open(tr_rig *rig, const tr_lab *lab, tr_comm *comm, tr_dtype t, int64_t B, int64_t S) {
    int cp = tr_comm_size(comm);
    tr_device *device = lab->device;
    tr_env *c = &rig->env;
    rig->grid = tr_grid_create(comm, (tr_grid_shape){.pipeline = 1,
                                                     .data = 1,
                                                     .context = cp,
                                                     .expert = rig->expert > 1 ? rig->expert : 1,
                                                     .tensor = 1,
                                                     .context_heads = rig->context_heads});
    *c = (tr_env){.config = &rig->config,
                  .grid = rig->grid,
                  .registry = tr_registry_create(t),
                  .device = device,
                  .kernels = device->kernels,
                  .stream = device->stream,
                  .t = t,
                  .scratch = tr_arena_create(&device->allocator, CHUNK),
                  .micro_batches = 1,
                  .loss_scale = 1};
    tr_env_shape(c, B, S);
    int64_t E = rig->config.num_experts;
    if (E > 0) c->exchange = tr_exchange_create(rig->grid, device, E, rig->exchange, t);
    rig->kept = tr_arena_create(&device->allocator, CHUNK);
    rig->fixed = tr_arena_create(&device->allocator, CHUNK);
    tr_heads_open(c, rig->fixed);
    c->sums.expert_load = tr_heap_alloc(E, sizeof *c->sums.expert_load);
    tr_saved_init(c, &rig->saved, E > 0, rig->config.intermediate_size);
    rig->valid = tr_allocator_take(&device->allocator, (size_t)c->N, "a layer's rows");
    if (!rig->valid) tr_abort("%s", tr_error_message());
    uint8_t *ones = tr_heap_alloc(c->N, 1);
    memset(ones, 1, (size_t)c->N);
    device->copy(c->stream, rig->valid, ones, (size_t)c->N, TR_TO_DEVICE);
    device->stream_wait(c->stream);
    free(ones);
    rig->pass = (tr_pass){.c = c, .kept = rig->kept, .valid = rig->valid, .training = true};
}

void tr_rig_restart(tr_rig *rig) {
    memset(rig->saved.t, 0, sizeof rig->saved.t);
    tr_arena_reset(rig->kept);
}

void tr_rig_close(tr_rig *rig) {
    tr_env *c = &rig->env;
    tr_allocator_give(&c->device->allocator, rig->valid, (size_t)c->N);
    tr_registry_destroy(c->registry);
    tr_arena_destroy(c->scratch);
    tr_heads_close(c);
    tr_arena_destroy(rig->fixed);
    tr_arena_destroy(rig->kept);
    tr_saved_fini(&rig->saved);
    tr_exchange_destroy(c->exchange);
    tr_grid_destroy(rig->grid);
    free(c->sums.expert_load);
}
