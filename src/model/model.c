/* model.c - the chunks of one pipeline rank and the slots of its micro-batches. Floor: model. */
#include "model/model.h"

#include "base/trace.h"
#include "model/layers.h"
#include "model/stages.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 64 << 20 }; /* arena growth, bytes */

/* One of this rank's virtual stages. */
typedef struct {
    tr_range layers;
    tr_block_layer *blocks; /* [layers] */
    bool first, last;       /* begins with the embedding; ends with the head */
} chunk_layers;

typedef struct {
    tr_arena *kept;
    tr_saved *block; /* [most layers of a chunk] */
    tr_head_saved head;
    void *input, *output, *gradient; /* [N,H], cross stages */
    int32_t *token, *label;
    uint8_t *valid;
    const chunk_layers *chunk; /* of the last forward */
    bool waiting;              /* for its backward */
    tr_weight_queue queue;     /* of its weight gradients */
} slot_state;

struct tr_model {
    tr_env env;
    tr_stages stages;
    chunk_layers *chunks; /* [stages.chunks] */
    int64_t most_layers;  /* of a chunk */
    int64_t embedding;
    tr_head_layer head;
    /* per shape */
    tr_arena *persistent;
    slot_state *slots;
    int64_t nslots;
};

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
    const chunk_layers *chunk = &model->chunks[tr_stage_chunk(st, stage)];
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
    tr_param_decl norm = {.name = "model.norm.weight",
                          .ndim = 1,
                          .shape = {m->hidden_size},
                          .init = TR_INIT_ONES,
                          .stage = head_rank,
                          .copy_stage = -1};
    model->embedding = tr_registry_add(r, &embedding);
    int64_t moe_index = 0;
    for (int64_t i = 0; i < m->num_hidden_layers; i++) {
        tr_block_layer elsewhere;
        tr_block_layer *here = layer_here(model, i);
        int rank = (int)tr_stage_rank(st, tr_stage_of_layer(st, m->num_hidden_layers, i));
        tr_block_declare(here ? here : &elsewhere, r, m, i, moe_index, rank);
        moe_index += tr_config_layer_is_moe(m, i);
    }
    model->head.norm = tr_registry_add(r, &norm);
    model->head.weight = model->embedding;
    if (!m->tie_word_embeddings) {
        tr_param_decl head = embedding;
        strcpy(head.name, "lm_head.weight");
        head.stage = head_rank;
        model->head.weight = tr_registry_add(r, &head);
    }
}

static void make_chunks(tr_model *model) {
    const tr_stages *st = &model->stages;
    model->chunks = calloc((size_t)st->chunks, sizeof *model->chunks);
    if (!model->chunks) abort();
    for (int64_t i = 0; i < st->chunks; i++) {
        chunk_layers *chunk = &model->chunks[i];
        int64_t stage = tr_stage_of(st, model->env.grid->at.p, i);
        chunk->layers = tr_stage_layers(st, model->env.config->num_hidden_layers, stage);
        chunk->first = stage == 0;
        chunk->last = stage + 1 == tr_stages_count(st);
        chunk->blocks = calloc((size_t)chunk->layers.count + 1, sizeof *chunk->blocks);
        if (!chunk->blocks) abort();
        if (chunk->layers.count > model->most_layers) model->most_layers = chunk->layers.count;
    }
}

tr_model *tr_model_create(const tr_config *config, const tr_grid *grid, tr_device *device) {
    const tr_model_config *m = &config->model;
    tr_model *model = calloc(1, sizeof *model);
    if (!model) abort();
    model->stages = tr_stages_of(config);
    tr_env *c = &model->env;
    *c = (tr_env){.config = m,
                  .grid = grid,
                  .device = device,
                  .kernels = device->kernels,
                  .t = config->run.dtype,
                  .recompute = config->parallel.recompute};
    c->registry = tr_registry_create(c->t);
    c->stream = device->stream_create(device);
    c->scratch = tr_arena_create(&device->allocator, CHUNK);
    c->sums.expert_load =
        calloc((size_t)(tr_model_moe_layers(m) * m->num_experts) + 1, sizeof *c->sums.expert_load);
    if (!c->sums.expert_load) abort();
    make_chunks(model);
    declare(model, m);
    return model;
}

static void slot_free(tr_model *model, slot_state *s) {
    tr_arena_destroy(s->kept);
    for (int64_t i = 0; i < model->most_layers; i++) tr_saved_fini(&s->block[i]);
    free(s->block);
    free(s->queue.jobs);
}

static void shape_free(tr_model *model) {
    for (int64_t i = 0; i < model->nslots; i++) slot_free(model, &model->slots[i]);
    free(model->slots);
    tr_tensor_close(&model->env);
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
    tr_registry_destroy(c->registry);
    c->device->stream_destroy(c->stream);
    free(c->sums.expert_load);
    for (int64_t i = 0; i < model->stages.chunks; i++) free(model->chunks[i].blocks);
    free(model->chunks);
    free(model);
}

tr_registry *tr_model_registry(tr_model *model) {
    return model->env.registry;
}

static int64_t mlp_width(const tr_block_layer *b) {
    return b->is_moe ? b->moe.shared.width : b->mlp.width;
}

/* Whether some chunk has experts in its i-th layer. */
static bool may_be_moe(const tr_model *model, int64_t i) {
    for (int64_t k = 0; k < model->stages.chunks; k++)
        if (i < model->chunks[k].layers.count && model->chunks[k].blocks[i].is_moe) return true;
    return false;
}

static void slot_init(tr_model *model, slot_state *s) {
    const tr_env *c = &model->env;
    size_t boundary = (size_t)tr_model_boundary_bytes(model);
    s->kept = tr_arena_create(&c->device->allocator, CHUNK);
    s->input = tr_arena_alloc(model->persistent, boundary);
    s->output = tr_arena_alloc(model->persistent, boundary);
    s->gradient = tr_arena_alloc(model->persistent, boundary);
    s->token = tr_arena_alloc(model->persistent, (size_t)c->N * 4);
    s->label = tr_arena_alloc(model->persistent, (size_t)c->N * 4);
    s->valid = tr_arena_alloc(model->persistent, (size_t)c->N);
    s->block = calloc((size_t)model->most_layers + 1, sizeof *s->block);
    if (!s->block) abort();
    for (int64_t i = 0; i < model->most_layers; i++)
        tr_saved_init(c, &s->block[i], may_be_moe(model, i), 0);
}

/* Global positions of the local rows, and rotary frequencies theta^(-2i/D) (Su et al. 2021). */
static void positions(tr_model *model) {
    tr_env *c = &model->env;
    int64_t D = c->config->head_dim;
    int32_t *position = malloc((size_t)(c->N + 1) * sizeof *position);
    float *freq = malloc((size_t)(D / 2 + 1) * sizeof *freq);
    if (!position || !freq) abort();
    for (int64_t n = 0; n < c->N; n++)
        position[n] =
            (int32_t)tr_ring_position(c->S, c->grid->at.shape.context, c->grid->at.c, n % c->S_loc);
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
    model->slots = calloc((size_t)slots, sizeof *model->slots);
    if (!model->slots) abort();
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
    tr_gradients_begin(c->registry);
}

void tr_model_sums_get(tr_model *model, tr_model_sums *sums) {
    tr_env *c = &model->env;
    c->device->copy(c->stream, &sums->loss_sum, c->loss_sum, sizeof sums->loss_sum, TR_TO_HOST);
    c->device->stream_wait(c->stream);
    sums->aux_loss = c->sums.aux_loss;
    sums->z_loss = c->sums.z_loss;
    sums->expert_load = c->sums.expert_load;
}

void tr_model_load(tr_model *model, int64_t slot, const tr_micro_batch *batch) {
    tr_env *c = &model->env;
    slot_state *s = &model->slots[slot];
    c->device->copy(c->stream, s->token, batch->token, (size_t)c->N * 4, TR_TO_DEVICE);
    c->device->copy(c->stream, s->label, batch->label, (size_t)c->N * 4, TR_TO_DEVICE);
    c->device->copy(c->stream, s->valid, batch->valid, (size_t)c->N, TR_TO_DEVICE);
    c->device->stream_wait(c->stream);
}

static tr_pass pass_of(tr_env *c, const slot_state *s, bool training) {
    return (tr_pass){
        .c = c, .kept = s->kept, .valid = s->valid + c->first_row, .training = training};
}

/* Each tensor rank looks up the tokens that its part of the table has; the others' rows are 0. */
static void embed(const tr_model *model, const slot_state *s) {
    const tr_env *c = &model->env;
    const tr_param *w = tr_param_at(c, model->embedding);
    int64_t H = c->config->hidden_size;
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    tr_partial sum = tr_partial_begin(c, s->input, false);
    void *rows = sum.t == c->t ? sum.at : tr_scratch(c, c->N * H, c->t);
    c->kernels->embedding_forward(c->stream, c->t, rows, s->token, w->weight, w->box.offset[0],
                                  w->box.extent[0], c->N, H);
    if (rows != sum.at) c->kernels->cast(c->stream, sum.t, sum.at, c->t, rows, c->N * H);
    tr_partial_end(c, &sum);
    tr_arena_release(c->scratch, mark);
}

static void embed_backward(const tr_model *model, const slot_state *s) {
    const tr_env *c = &model->env;
    tr_param *w = tr_param_at(c, model->embedding);
    const void *dy = tr_rows_gather(c, s->gradient);
    c->kernels->embedding_backward(c->stream, c->t, tr_gradient_sum(c->registry, c->stream, w),
                                   s->token, dy, w->box.offset[0], w->box.extent[0], c->N,
                                   c->config->hidden_size);
}

void tr_model_forward(tr_model *model, int64_t index, int64_t slot, bool training) {
    tr_env *c = &model->env;
    slot_state *s = &model->slots[slot];
    const chunk_layers *chunk = &model->chunks[index];
    tr_pass pass = pass_of(c, s, training);
    tr_arena_reset(s->kept);
    s->chunk = chunk;
    s->waiting = training;
    if (chunk->first) embed(model, s);
    void *x = s->input;
    for (int64_t i = 0; i < chunk->layers.count; i++) {
        tr_saved *saved = &s->block[i];
        tr_saved_restart(c, saved, mlp_width(&chunk->blocks[i]));
        bool is_last = i + 1 == chunk->layers.count;
        void *y =
            is_last ? s->output : tr_arena_alloc(s->kept, (size_t)tr_model_boundary_bytes(model));
        saved->t[TR_SAVED_X] = x;
        tr_trace_work_begin("layer", chunk->layers.first + i);
        tr_block_forward(&chunk->blocks[i], &pass, saved, y);
        tr_trace_work_end();
        x = y;
    }
    if (!chunk->last) return;
    tr_trace_work_begin("head and loss", -1);
    tr_head_forward(&model->head, &pass, &s->head, x, s->label);
    tr_trace_work_end();
}

void tr_model_backward(tr_model *model, int64_t slot, bool split) {
    tr_env *c = &model->env;
    slot_state *s = &model->slots[slot];
    const chunk_layers *chunk = s->chunk;
    tr_pass pass = pass_of(c, s, true);
    if (split) pass.queue = &s->queue;
    s->waiting = false;
    if (chunk->last) tr_head_backward(&model->head, &pass, &s->head, s->output, s->gradient);
    for (int64_t i = chunk->layers.count; i-- > 0;) {
        tr_trace_work_begin("layer", chunk->layers.first + i);
        tr_block_backward(&chunk->blocks[i], &pass, &s->block[i], s->gradient);
        tr_trace_work_end();
    }
    if (chunk->first) embed_backward(model, s);
}

void tr_model_weights(tr_model *model, int64_t slot) {
    tr_weights_drain(&model->env, &model->slots[slot].queue);
}

void tr_model_all_forwards_done(tr_model *model) {
    tr_env *c = &model->env;
    if (c->config->router_aux_loss_scope != TR_AUX_GLOBAL_BATCH) return;
    tr_saved **saved = malloc((size_t)(model->nslots + 1) * sizeof *saved);
    if (!saved) abort();
    for (int64_t k = 0; k < model->stages.chunks; k++)
        for (int64_t i = 0; i < model->chunks[k].layers.count; i++) {
            if (!model->chunks[k].blocks[i].is_moe) continue;
            int64_t count = 0;
            for (int64_t j = 0; j < model->nslots; j++) {
                slot_state *s = &model->slots[j];
                if (s->waiting && s->chunk == &model->chunks[k]) saved[count++] = &s->block[i];
            }
            tr_router_global_stats(c, saved, count);
        }
    free(saved);
}

void tr_model_watch_routing(tr_model *model, tr_watch_routing watch, void *self) {
    model->env.watch = watch;
    model->env.watch_self = self;
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

void tr_model_logits(tr_model *model, int64_t n, float *logits) {
    tr_env *c = &model->env;
    slot_state *s = &model->slots[0];
    tr_pass pass = pass_of(c, s, false);
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    float *device_logits = tr_head_logits(&model->head, &pass, s->output, n);
    c->device->copy(c->stream, logits, device_logits, (size_t)c->config->vocab_size * sizeof(float),
                    TR_TO_HOST);
    c->device->stream_wait(c->stream);
    tr_arena_release(c->scratch, mark);
}

int64_t tr_model_activation_bytes(const tr_model *model) {
    size_t bytes = tr_arena_peak_bytes(model->env.scratch) + (size_t)tr_tensor_bytes(&model->env);
    if (model->persistent) bytes += tr_arena_peak_bytes(model->persistent);
    for (int64_t i = 0; i < model->nslots; i++) bytes += tr_arena_peak_bytes(model->slots[i].kept);
    return (int64_t)bytes;
}

/* What a micro-batch in a chunk keeps, beside the boundary buffers of its slot; *scratch_p grows to
 * what its backward works with. */
static int64_t plan_chunk(const tr_env *c, const chunk_layers *chunk, bool split,
                          int64_t *scratch_p) {
    int64_t boundary = c->N_loc * c->config->hidden_size * (int64_t)tr_dtype_bytes(c->t), sum = 0;
    int64_t head = tr_head_scratch_bytes(c);
    for (int64_t i = 0; i < chunk->layers.count; i++) {
        int64_t kept, all, operands, width = mlp_width(&chunk->blocks[i]);
        tr_saved_plan(c, chunk->blocks[i].is_moe, width, &kept, &all, &operands);
        /* a backward holds what it computes again and about as many gradients as tensors */
        if (all + all - kept > *scratch_p) *scratch_p = all + all - kept;
        sum += kept + (split ? operands : 0);
    }
    if (chunk->last && head > *scratch_p) *scratch_p = head;
    return sum + (chunk->last ? boundary + 4 * c->N_loc : 0);
}

int64_t tr_model_plan_activations(const tr_model *model, int64_t slots, const uint64_t *slot_chunks,
                                  bool split, int64_t B, int64_t S) {
    tr_env c = model->env;
    tr_env_shape(&c, B, S);
    int64_t boundary = c.N_loc * c.config->hidden_size * (int64_t)tr_dtype_bytes(c.t);
    int64_t sum = 0, scratch = 0;
    for (int64_t i = 0; i < slots; i++) {
        int64_t most = 0; /* the chunks that use a slot use the same memory */
        for (int64_t k = 0; k < model->stages.chunks; k++) {
            if (!(slot_chunks[i] >> k & 1)) continue;
            int64_t bytes = plan_chunk(&c, &model->chunks[k], split, &scratch);
            if (bytes > most) most = bytes;
        }
        sum += 3 * boundary + 9 * c.N + most;
    }
    return sum + scratch + tr_tensor_bytes(&c);
}
