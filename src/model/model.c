/* model.c - the chunks of one pipeline rank and the slots of its micro-batches: declared, shaped,
 * counted. Floor: model. */
#include "model/model.h"

#include "base/heap.h"
#include "model/gradient.h"
#include "model/parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 64 << 20 }; /* arena growth, bytes */

int64_t tr_model_moe_layers(const tr_model_config *m) {
    int64_t n = 0;
    for (int64_t i = 0; i < m->num_hidden_layers; i++) n += tr_config_layer_is_moe(m, i);
    return n;
}

/* Where layer i of the model is kept on this rank; NULL: elsewhere. */
static tr_block_layer *layer_here(const tr_model *model, int64_t i) {
    const tr_stages *st = &model->stages;
    int64_t stage = tr_stage_of_layer(st, model->env.config->num_hidden_layers, i);
    if (tr_stage_rank(st, stage) != model->env.grid->at.p) return NULL;
    const tr_chunk_layers *chunk = &model->chunks[tr_stage_chunk(st, stage)];
    return &chunk->blocks[i - chunk->layers.first];
}

static void declare(tr_model *model, const tr_model_config *m) {
    tr_registry *r = model->env.registry;
    const tr_stages *st = &model->stages;
    int head_rank = (int)tr_stage_rank(st, tr_stages_count(st) - 1);
    tr_param_decl embedding = {.name = "model.embed_tokens.weight",
                               .ndim = 2,
                               .shape = {m->vocab_size, m->hidden_size},
                               .split = TR_SPLIT_ROWS,
                               .init = TR_INIT_NORMAL,
                               .init_std = (float)m->initializer_range,
                               .decay = true,
                               .stage = 0,
                               .copy_stage =
                                   m->tie_word_embeddings && head_rank > 0 ? head_rank : -1};
    int head_here = head_rank == model->env.grid->at.p;
    model->embedding_unit = tr_registry_unit(
        r, false, (model->env.grid->at.p == 0) + (head_here && m->tie_word_embeddings));
    model->embedding = tr_registry_add(r, &embedding);
    int64_t moe_index = 0;
    for (int64_t i = 0; i < m->num_hidden_layers; i++) {
        tr_block_layer elsewhere;
        tr_block_layer *here = layer_here(model, i);
        int rank = (int)tr_stage_rank(st, tr_stage_of_layer(st, m->num_hidden_layers, i));
        int64_t unit = tr_registry_unit(r, true, 1);
        tr_block_declare(here ? here : &elsewhere, r, m, i, moe_index, rank);
        if (here) here->unit = unit;
        moe_index += tr_config_layer_is_moe(m, i);
    }
    model->head_units[0] = model->head_units[1] = tr_registry_unit(r, false, 1);
    tr_norm_declare(&model->head.norm, r, m, "model.norm", head_rank);
    model->head.weight = model->embedding;
    if (m->tie_word_embeddings) model->head_units[1] = model->embedding_unit;
    if (!m->tie_word_embeddings) {
        tr_param_decl head = embedding;
        strcpy(head.name, "lm_head.weight");
        head.stage = head_rank;
        model->head.weight = tr_registry_add(r, &head);
    }
}

static void make_chunks(tr_model *model) {
    const tr_stages *st = &model->stages;
    model->chunks = tr_heap_alloc(st->chunks, sizeof *model->chunks);
    for (int64_t i = 0; i < st->chunks; i++) {
        tr_chunk_layers *chunk = &model->chunks[i];
        int64_t stage = tr_stage_of(st, model->env.grid->at.p, i);
        chunk->layers = tr_stage_layers(st, model->env.config->num_hidden_layers, stage);
        chunk->first = stage == 0;
        chunk->last = stage + 1 == tr_stages_count(st);
        chunk->blocks = tr_heap_alloc(chunk->layers.count, sizeof *chunk->blocks);
        if (chunk->layers.count > model->most_layers) model->most_layers = chunk->layers.count;
    }
}

/* Nothing that is in flight moves by itself: kernels call this between their parts. */
static void poll(void *world) {
    tr_comm_poll(world);
}

tr_model *tr_model_create(const tr_config *config, const tr_grid *grid, tr_device *device) {
    const tr_model_config *m = &config->model;
    tr_model *model = tr_heap_alloc(1, sizeof *model);
    model->stages = tr_stages_of(config);
    model->documents = config->data.document_mask;
    tr_env *c = &model->env;
    *c = (tr_env){.config = m,
                  .grid = grid,
                  .device = device,
                  .kernels = device->kernels,
                  .t = config->run.dtype,
                  .recompute = config->parallel.recompute};
    c->registry = tr_registry_create(c->t);
    c->stream = device->stream;
    tr_comm *world = grid->comm[TR_GROUP_WORLD];
    if (device->stream_drive && tr_comm_size(world) > 1)
        device->stream_drive(c->stream, poll, world);
    c->scratch = tr_arena_create(&device->allocator, CHUNK);
    model->back_scratch = tr_arena_create(&device->allocator, CHUNK);
    if (m->num_experts > 0)
        c->exchange = tr_exchange_create(grid, device, m->num_experts,
                                         config->parallel.expert_exchange, tr_config_wire(config));
    c->sums.expert_load =
        tr_heap_alloc(tr_model_moe_layers(m) * m->num_experts, sizeof *c->sums.expert_load);
    make_chunks(model);
    declare(model, m);
    return model;
}

static void slot_free(tr_model *model, tr_slot *s) {
    tr_arena_destroy(s->kept);
    for (int64_t i = 0; i < model->most_layers; i++) tr_saved_fini(&s->block[i]);
    free(s->block);
    free(s->queue.jobs);
    free(s->first_key);
}

static void shape_free(tr_model *model) {
    for (int64_t i = 0; i < model->nslots; i++) slot_free(model, &model->slots[i]);
    free(model->slots);
    tr_tensor_close(&model->env);
    tr_heads_close(&model->env);
    tr_arena_destroy(model->persistent);
    model->slots = NULL;
    model->persistent = NULL;
    model->nslots = 0;
}

void tr_model_destroy(tr_model *model) {
    if (!model) return;
    tr_env *c = &model->env;
    shape_free(model);
    tr_arena_destroy(c->scratch);
    tr_arena_destroy(model->back_scratch);
    tr_exchange_destroy(c->exchange);
    tr_registry_destroy(c->registry);
    if (c->device->stream_drive) c->device->stream_drive(c->stream, NULL, NULL);
    free(c->sums.expert_load);
    for (int64_t i = 0; i < model->stages.chunks; i++) free(model->chunks[i].blocks);
    free(model->chunks);
    free(model);
}

bool tr_model_exchanges_by_node(const tr_model *model) {
    return model->env.exchange && tr_exchange_is_hierarchical(model->env.exchange);
}

tr_registry *tr_model_registry(tr_model *model) {
    return model->env.registry;
}

/* Whether some chunk has experts in its i-th layer. */
static bool may_be_moe(const tr_model *model, int64_t i) {
    for (int64_t k = 0; k < model->stages.chunks; k++)
        if (i < model->chunks[k].layers.count && model->chunks[k].blocks[i].is_moe) return true;
    return false;
}

static void slot_init(tr_model *model, tr_slot *s) {
    const tr_env *c = &model->env;
    size_t boundary = (size_t)tr_model_boundary_bytes(model);
    s->kept = tr_arena_create(&c->device->allocator, CHUNK);
    s->input = tr_arena_alloc(model->persistent, boundary);
    s->output = tr_arena_alloc(model->persistent, boundary);
    s->gradient = tr_arena_alloc(model->persistent, boundary);
    s->token = tr_arena_alloc(model->persistent, (size_t)c->N * 4);
    s->label = tr_arena_alloc(model->persistent, (size_t)c->N * 4);
    s->valid = tr_arena_alloc(model->persistent, (size_t)c->N);
    if (model->documents) {
        s->position = tr_arena_alloc(model->persistent, (size_t)c->N * 4);
        s->begin = tr_arena_alloc(model->persistent, (size_t)(c->B * c->cut.S_ring) * 4);
        s->first_key = tr_heap_alloc(2 * c->cut.rings, sizeof *s->first_key);
    }
    s->block = tr_heap_alloc(model->most_layers, sizeof *s->block);
    for (int64_t i = 0; i < model->most_layers; i++)
        tr_saved_init(c, &s->block[i], may_be_moe(model, i), 0);
}

/* Global positions of the local rows, and rotary frequencies theta^(-2i/D) (Su et al. 2021). */
static void positions(tr_model *model) {
    tr_env *c = &model->env;
    int64_t D = c->config->head_dim;
    int32_t *position = tr_heap_alloc(c->N, sizeof *position);
    float *freq = tr_heap_alloc(D / 2, sizeof *freq);
    for (int64_t n = 0; n < c->N; n++)
        position[n] = (int32_t)tr_sequence_position(&c->cut, c->grid->at.c, n % c->S_loc);
    for (int64_t i = 0; i < D / 2; i++)
        freq[i] = (float)pow(c->config->rope_theta, -2.0 * (double)i / (double)D);
    c->position = tr_arena_alloc(model->persistent, (size_t)c->N * sizeof *position);
    c->freq = tr_arena_alloc(model->persistent, (size_t)(D / 2) * sizeof *freq);
    c->loss_sum = tr_arena_alloc(model->persistent, sizeof *c->loss_sum);
    c->device->copy(c->stream, c->position, position, (size_t)c->N * sizeof *position,
                    TR_TO_DEVICE);
    c->device->copy(c->stream, c->freq, freq, (size_t)(D / 2) * sizeof *freq, TR_TO_DEVICE);
    c->device->zero(c->stream, c->loss_sum, sizeof *c->loss_sum);
    c->device->stream_wait(c->stream);
    free(position);
    free(freq);
}

void tr_model_shape(tr_model *model, int64_t slots, int64_t B, int64_t S) {
    tr_env *c = &model->env;
    shape_free(model);
    tr_env_shape(c, B, S);
    tr_tensor_open(c);
    model->persistent = tr_arena_create(&c->device->allocator, CHUNK);
    positions(model);
    tr_heads_open(c, model->persistent);
    tr_router_open(c);
    model->slots = tr_heap_alloc(slots, sizeof *model->slots);
    model->nslots = slots;
    for (int64_t i = 0; i < slots; i++) slot_init(model, &model->slots[i]);
}

int64_t tr_model_active_params(const tr_model *model) {
    const tr_model_config *m = model->env.config;
    const tr_registry *r = model->env.registry;
    int64_t total = 0;
    for (int64_t i = 0; i < r->count; i++) {
        const tr_param *p = &r->params[i];
        bool expert = p->decl.split == TR_SPLIT_EXPERT;
        total += expert ? p->elems / m->num_experts * m->num_experts_per_tok : p->elems;
    }
    return total;
}

double tr_model_flops_per_token(const tr_model *model, int64_t S) {
    const tr_model_config *m = model->env.config;
    double attention = (double)(m->num_hidden_layers * m->num_attention_heads * m->head_dim * S);
    return 6.0 * (double)tr_model_active_params(model) + 6.0 * attention;
}

void tr_model_begin_step(tr_model *model, int64_t micro_batches, float loss_scale) {
    tr_env *c = &model->env;
    const tr_model_config *m = c->config;
    c->micro_batches = micro_batches;
    c->loss_scale = loss_scale;
    c->sums.aux_loss = c->sums.z_loss = 0;
    memset(c->sums.expert_load, 0,
           (size_t)(tr_model_moe_layers(m) * m->num_experts) * sizeof *c->sums.expert_load);
    c->device->zero(c->stream, c->loss_sum, sizeof *c->loss_sum);
    tr_gradients_begin(c->registry, micro_batches / c->grid->at.shape.data);
}

void tr_model_sums_get(tr_model *model, tr_model_sums *sums) {
    tr_env *c = &model->env;
    c->device->copy(c->stream, &sums->loss_sum, c->loss_sum, sizeof sums->loss_sum, TR_TO_HOST);
    c->device->stream_wait(c->stream);
    sums->aux_loss = c->sums.aux_loss;
    sums->z_loss = c->sums.z_loss;
    sums->expert_load = c->sums.expert_load;
}

void tr_model_watch_routing(tr_model *model, tr_watch_routing watch, void *self) {
    model->env.watch = watch;
    model->env.watch_self = self;
}

tr_stream *tr_model_stream(const tr_model *model) {
    return model->env.stream;
}
void *tr_model_input(tr_model *model, int64_t slot) {
    return model->slots[slot].input;
}
void *tr_model_output(tr_model *model, int64_t slot) {
    return model->slots[slot].output;
}
void *tr_model_gradient(tr_model *model, int64_t slot) {
    return model->slots[slot].gradient;
}

void tr_model_hand_over(tr_model *model, const void *from, void *to) {
    const tr_env *c = &model->env;
    c->device->copy(c->stream, to, from, (size_t)tr_model_boundary_bytes(model), TR_ON_DEVICE);
}

int64_t tr_model_boundary_bytes(const tr_model *model) {
    const tr_env *c = &model->env;
    return c->N_loc * c->config->hidden_size * (int64_t)tr_dtype_bytes(c->t);
}

int64_t tr_model_activation_bytes(const tr_model *model) {
    size_t bytes = tr_arena_peak_bytes(model->env.scratch) + (size_t)tr_tensor_bytes(&model->env);
    bytes += tr_arena_peak_bytes(model->back_scratch);
    if (model->persistent) bytes += tr_arena_peak_bytes(model->persistent);
    for (int64_t i = 0; i < model->nslots; i++) bytes += tr_arena_peak_bytes(model->slots[i].kept);
    return (int64_t)bytes;
}

/* Bytes that a forward or backward works with: what it is sure to, and a bound. */
typedef struct {
    int64_t least, most;
} work;

static void grow(int64_t *most, int64_t bytes) {
    if (bytes > *most) *most = bytes;
}

/* What a micro-batch in a chunk keeps, beside the boundary buffers of its slot; *scratch grows to
 * what its backward works with. */
static int64_t plan_chunk(const tr_env *c, const tr_chunk_layers *chunk, bool split,
                          work *scratch) {
    int64_t boundary = c->N_loc * c->config->hidden_size * (int64_t)tr_dtype_bytes(c->t), sum = 0;
    int64_t head = tr_head_scratch_bytes(c);
    int64_t attention = tr_heads_scratch_bytes(c) + tr_ring_scratch_bytes(c);
    for (int64_t i = 0; i < chunk->layers.count; i++) {
        int64_t kept, all, operands, width = tr_block_width(&chunk->blocks[i]);
        tr_saved_plan(c, chunk->blocks[i].is_moe, width, &kept, &all, &operands);
        /* a backward holds what it computes again, and at most about as many gradients as tensors
         */
        grow(&scratch->least, all - kept);
        grow(&scratch->most, all - kept + all + attention);
        sum += kept + (split ? operands : 0);
    }
    if (chunk->last) grow(&scratch->least, head);
    grow(&scratch->most, scratch->least);
    return sum + (chunk->last ? boundary + 4 * c->N_loc * tr_norm_statistics(c->config) : 0);
}

/* What a slot keeps for the backwards of the chunks that use it: they use the same memory. */
static int64_t plan_slot(const tr_env *c, const tr_model *model, const tr_slot_use *use, int64_t i,
                         work *scratch) {
    int64_t most = 0;
    for (int64_t k = 0; k < model->stages.chunks; k++)
        if (use->chunks[i] >> k & 1)
            grow(&most, plan_chunk(c, &model->chunks[k], use->split, scratch));
    return most;
}

int64_t tr_model_plan_activations(const tr_model *model, const tr_slot_use *use, int64_t B,
                                  int64_t S) {
    tr_env c = model->env;
    tr_env_shape(&c, B, S);
    int64_t boundary = c.N_loc * c.config->hidden_size * (int64_t)tr_dtype_bytes(c.t);
    int64_t sum = 0;
    work scratch = {0};
    int64_t documents = model->documents ? 4 * (c.N + c.B * c.cut.S_ring) : 0;
    for (int64_t i = 0; i < use->slots; i++)
        sum += 3 * boundary + 9 * c.N + documents + plan_slot(&c, model, use, i, &scratch);
    return sum + scratch.most * (use->both ? 2 : 1) + tr_tensor_bytes(&c);
}

/* --- memory of training steps -------------------------------------------------------------------
 */

static tr_status fail_reserve(const tr_model *model, const tr_slot_use *use) {
    static const char *const recompute[] = {"parallel.recompute full (now none), ",
                                            "parallel.recompute full (now selective), ", ""};
    const tr_env *c = &model->env;
    const tr_comm *world = c->grid->comm[TR_GROUP_WORLD];
    char batch[80] = "", where[256];
    tr_allocator_explain(&c->device->allocator, where, sizeof where);
    if (c->B > 1)
        snprintf(batch, sizeof batch, "a smaller training.micro_batch_size (now %lld), ",
                 (long long)c->B);
    return tr_fail(TR_ERR_INTERNAL,
                   "out of memory: rank %d of %d asks for about %.1f MiB for the activations of "
                   "%lld micro-batch%s in flight%s; use %s%sor more ranks (parallel.pipeline, "
                   "context or tensor)",
                   tr_comm_rank(world), tr_comm_size(world),
                   (double)tr_model_plan_activations(model, use, c->B, c->S) / 0x1p20,
                   (long long)use->slots, use->slots == 1 ? "" : "es", where, batch,
                   recompute[c->recompute]);
}

/* As much as a step may use or, where that is not there, is sure to. */
static bool reserve_scratch(tr_arena *arena, const work *bytes) {
    return tr_arena_reserve(arena, (size_t)bytes->most) ||
           tr_arena_reserve(arena, (size_t)bytes->least);
}

/* Local. */
static tr_status reserve(tr_model *model, const tr_slot_use *use) {
    enum { ALIGNMENT = 4096 }; /* what a layer's tensors lose to it, at most */
    const tr_env *c = &model->env;
    int64_t lost = (model->most_layers + 1) * ALIGNMENT, sum = 0;
    work scratch = {0};
    int64_t *kept = tr_heap_alloc(use->slots, sizeof *kept);
    for (int64_t i = 0; i < use->slots; i++)
        sum += kept[i] = plan_slot(c, model, use, i, &scratch) + lost;
    sum += scratch.least * (use->both ? 2 : 1);
    bool there = tr_allocator_has(&c->device->allocator, (size_t)sum);
    for (int64_t i = 0; i < use->slots && there; i++)
        there = tr_arena_reserve(model->slots[i].kept, (size_t)kept[i]);
    there = there && reserve_scratch(c->scratch, &scratch) &&
            (!use->both || reserve_scratch(model->back_scratch, &scratch));
    free(kept);
    return there ? TR_OK : fail_reserve(model, use);
}

tr_status tr_model_reserve(tr_model *model, const tr_slot_use *use) {
    return tr_agree(model->env.grid->comm[TR_GROUP_WORLD], reserve(model, use));
}
