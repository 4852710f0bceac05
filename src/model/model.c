/* model.c - the blocks of one pipeline stage and the slots of its micro-batches. Floor: model. */
#include "model/model.h"

#include "model/layers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 64 << 20 }; /* arena growth, bytes */

typedef struct {
    tr_arena *kept;
    tr_saved *block; /* [blocks of this stage] */
    tr_head_saved head;
    void *input, *output, *gradient; /* [N,H], cross stages */
    int32_t *token, *label;
    uint8_t *valid;
} slot_state;

struct tr_model {
    tr_env env;
    tr_range layers; /* of this stage */
    tr_block_layer *blocks;
    int64_t embedding;
    tr_head_layer head;
    bool first, last;
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

static void declare(tr_model *model, const tr_model_config *m, int pp) {
    tr_registry *r = model->env.registry;
    tr_param_decl embedding = {.name = "model.embed_tokens.weight",
                               .ndim = 2,
                               .shape = {m->vocab_size, m->hidden_size},
                               .split = TR_SPLIT_ROWS,
                               .init = TR_INIT_NORMAL,
                               .init_std = (float)m->initializer_range,
                               .decay = true,
                               .stage = 0,
                               .copy_stage = m->tie_word_embeddings && pp > 1 ? pp - 1 : -1};
    tr_param_decl norm = {.name = "model.norm.weight",
                          .ndim = 1,
                          .shape = {m->hidden_size},
                          .init = TR_INIT_ONES,
                          .stage = pp - 1,
                          .copy_stage = -1};
    model->embedding = tr_registry_add(r, &embedding);
    int64_t moe_index = 0;
    for (int64_t i = 0; i < m->num_hidden_layers; i++) {
        tr_block_layer elsewhere;
        int stage = (int)tr_block_owner(m->num_hidden_layers, pp, i);
        int64_t mine = i - model->layers.first;
        bool here = mine >= 0 && mine < model->layers.count;
        tr_block_declare(here ? &model->blocks[mine] : &elsewhere, r, m, i, moe_index, stage);
        moe_index += tr_config_layer_is_moe(m, i);
    }
    model->head.norm = tr_registry_add(r, &norm);
    model->head.weight = model->embedding;
    if (!m->tie_word_embeddings) {
        tr_param_decl head = embedding;
        strcpy(head.name, "lm_head.weight");
        head.stage = pp - 1;
        model->head.weight = tr_registry_add(r, &head);
    }
}

tr_model *tr_model_create(const tr_config *config, const tr_grid *grid, tr_device *device) {
    const tr_model_config *m = &config->model;
    int pp = grid->at.shape.pipeline;
    tr_model *model = calloc(1, sizeof *model);
    if (!model) abort();
    model->first = grid->at.p == 0;
    model->last = grid->at.p == pp - 1;
    model->layers = tr_block_of(m->num_hidden_layers, pp, grid->at.p);
    model->blocks = calloc((size_t)model->layers.count + 1, sizeof *model->blocks);
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
    if (!model->blocks || !c->sums.expert_load) abort();
    declare(model, m, pp);
    return model;
}

static void slot_free(tr_model *model, slot_state *s) {
    tr_arena_destroy(s->kept);
    for (int64_t i = 0; i < model->layers.count; i++) tr_saved_fini(&s->block[i]);
    free(s->block);
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
    free(model->blocks);
    free(model);
}

tr_registry *tr_model_registry(tr_model *model) {
    return model->env.registry;
}

static int64_t mlp_width(const tr_block_layer *b) {
    return b->is_moe ? b->moe.shared.width : b->mlp.width;
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
    s->block = calloc((size_t)model->layers.count + 1, sizeof *s->block);
    if (!s->block) abort();
    for (int64_t i = 0; i < model->layers.count; i++)
        tr_saved_init(c, &s->block[i], model->blocks[i].is_moe, mlp_width(&model->blocks[i]));
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
    for (int i = 0; i < TR_SPACES; i++) {
        tr_space *s = &c->registry->space[i];
        if (s->elems) c->device->zero(c->stream, s->grads, (size_t)s->elems * sizeof(float));
    }
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
    const tr_param *w = tr_param_at(c, model->embedding);
    const void *dy = tr_rows_gather(c, s->gradient);
    c->kernels->embedding_backward(c->stream, c->t, w->grad, s->token, dy, w->box.offset[0],
                                   w->box.extent[0], c->N, c->config->hidden_size);
}

void tr_model_forward(tr_model *model, int64_t slot, bool training) {
    tr_env *c = &model->env;
    slot_state *s = &model->slots[slot];
    tr_pass pass = pass_of(c, s, training);
    tr_arena_reset(s->kept);
    if (model->first) embed(model, s);
    void *x = s->input;
    for (int64_t i = 0; i < model->layers.count; i++) {
        tr_saved *saved = &s->block[i];
        memset(saved->t, 0, sizeof saved->t);
        bool is_last = i + 1 == model->layers.count;
        void *y =
            is_last ? s->output : tr_arena_alloc(s->kept, (size_t)tr_model_boundary_bytes(model));
        saved->t[TR_SAVED_X] = x;
        tr_block_forward(&model->blocks[i], &pass, saved, y);
        x = y;
    }
    if (model->last) tr_head_forward(&model->head, &pass, &s->head, x, s->label);
}

void tr_model_backward(tr_model *model, int64_t slot) {
    tr_env *c = &model->env;
    slot_state *s = &model->slots[slot];
    tr_pass pass = pass_of(c, s, true);
    if (model->last) tr_head_backward(&model->head, &pass, &s->head, s->output, s->gradient);
    for (int64_t i = model->layers.count; i-- > 0;)
        tr_block_backward(&model->blocks[i], &pass, &s->block[i], s->gradient);
    if (model->first) embed_backward(model, s);
}

void tr_model_all_forwards_done(tr_model *model, int64_t slots) {
    tr_env *c = &model->env;
    if (c->config->router_aux_loss_scope != TR_AUX_GLOBAL_BATCH) return;
    tr_saved **saved = malloc((size_t)(slots + 1) * sizeof *saved);
    if (!saved) abort();
    for (int64_t i = 0; i < model->layers.count; i++) {
        if (!model->blocks[i].is_moe) continue;
        for (int64_t j = 0; j < slots; j++) saved[j] = &model->slots[j].block[i];
        tr_router_global_stats(c, saved, slots);
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

int64_t tr_model_plan_activations(const tr_model *model, int64_t slots, int64_t B, int64_t S) {
    tr_env c = model->env;
    tr_env_shape(&c, B, S);
    int64_t H = c.config->hidden_size, t = (int64_t)tr_dtype_bytes(c.t), boundary = c.N_loc * H * t;
    int64_t a_slot = 3 * boundary + 9 * c.N, scratch = 0;
    for (int64_t i = 0; i < model->layers.count; i++) {
        const tr_block_layer *b = &model->blocks[i];
        int64_t kept, all, width = mlp_width(b);
        tr_saved_plan(&c, b->is_moe, width, &kept, &all);
        /* a backward holds what it computes again and about as many gradients as tensors */
        if (all + all - kept > scratch) scratch = all + all - kept;
        a_slot += kept;
    }
    int64_t head = tr_head_scratch_bytes(&c);
    if (model->last) a_slot += boundary + 4 * c.N_loc;
    if (model->last && head > scratch) scratch = head;
    return slots * a_slot + scratch + tr_tensor_bytes(&c);
}
