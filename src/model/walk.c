/* walk.c - micro-batches on their way through the blocks of a chunk. Floor: model. */
#include "base/heap.h"
#include "base/trace.h"
#include "model/gradient.h"
#include "model/parts.h"
#include "model/unit.h"

#include <stdlib.h>
#include <string.h>

void tr_model_load(tr_model *model, int64_t slot, const tr_micro_batch *batch) {
    tr_env *c = &model->env;
    tr_slot *s = &model->slots[slot];
    c->device->copy(c->stream, s->token, batch->token, (size_t)c->N * 4, TR_TO_DEVICE);
    c->device->copy(c->stream, s->valid, batch->valid, (size_t)c->N, TR_TO_DEVICE);
    s->labelled = batch->label != NULL;
    s->own_positions = batch->position != NULL;
    s->documents = batch->begin != NULL;
    if (s->labelled)
        c->device->copy(c->stream, s->label, batch->label, (size_t)c->N * 4, TR_TO_DEVICE);
    if (s->own_positions)
        c->device->copy(c->stream, s->position, batch->position, (size_t)c->N * 4, TR_TO_DEVICE);
    if (s->documents) {
        c->device->copy(c->stream, s->begin, batch->begin, (size_t)(c->B * c->cut.S_ring) * 4,
                        TR_TO_DEVICE);
        memcpy(s->first_key, batch->first_key,
               (size_t)(c->cut.rings * c->cut.chunks) * sizeof *s->first_key);
    }
    c->device->stream_wait(c->stream);
}

static tr_pass pass_of(tr_env *c, const tr_slot *s, bool training) {
    return (tr_pass){.c = c,
                     .kept = s->kept,
                     .valid = s->valid + c->first_row,
                     .position = s->own_positions ? s->position : c->position,
                     .begin = s->documents ? s->begin : NULL,
                     .first_key = s->documents ? s->first_key : NULL,
                     .training = training};
}

/* Each tensor rank looks up the tokens that its part of the table has; the others' rows are 0. */
static void embed(const tr_model *model, const tr_slot *s) {
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

static void embed_backward(const tr_model *model, const tr_slot *s) {
    const tr_env *c = &model->env;
    tr_param *w = tr_param_at(c, model->embedding);
    const void *dy = tr_rows_gather(c, s->gradient);
    c->kernels->embedding_backward(c->stream, c->t, tr_gradient_sum(c->registry, c->stream, w),
                                   s->token, dy, w->box.offset[0], w->box.extent[0], c->N,
                                   c->config->hidden_size);
}

/* A unit's weights are here from now on; those of the next one begin to come, -1: none. */
static void enter(const tr_model *model, int64_t unit, int64_t next) {
    tr_unit_take(model->env.registry, unit);
    tr_unit_expect(model->env.registry, next);
}

static void leave(const tr_model *model, int64_t unit) {
    tr_unit_leave(model->env.registry, unit);
}

static void enter_head(const tr_model *model) {
    enter(model, model->head_units[0], model->head_units[1]);
    enter(model, model->head_units[1], -1);
}

static void leave_head(const tr_model *model) {
    leave(model, model->head_units[0]);
    leave(model, model->head_units[1]);
}

/* The unit of the chunk's block i; before the first there is none, after the last maybe the head.
 */
static int64_t unit_at(const tr_model *model, const tr_chunk_layers *chunk, int64_t i) {
    if (i < 0 || i > chunk->layers.count) return -1;
    if (i < chunk->layers.count) return chunk->blocks[i].unit;
    return chunk->last ? model->head_units[1] : -1;
}

/* A forward or backward on its way through the blocks of a chunk. */
typedef struct {
    tr_slot *s;
    const tr_chunk_layers *chunk;
    tr_pass pass;
    void *x; /* forward: the next block's input */
    tr_block_flight block;
} walk;

static walk forward_open(tr_model *model, int64_t index, int64_t slot, bool training) {
    tr_slot *s = &model->slots[slot];
    tr_arena_reset(s->kept);
    s->chunk = &model->chunks[index];
    s->waiting = training;
    if (s->chunk->first) {
        enter(model, model->embedding_unit, unit_at(model, s->chunk, 0));
        embed(model, s);
        leave(model, model->embedding_unit);
    }
    return (walk){s, s->chunk, pass_of(&model->env, s, training), .x = s->input};
}

static void forward_begin(const tr_model *model, walk *w, int64_t i) {
    const tr_block_layer *block = &w->chunk->blocks[i];
    tr_saved *saved = &w->s->block[i];
    bool last = i + 1 == w->chunk->layers.count;
    size_t bytes = (size_t)tr_model_boundary_bytes(model);
    tr_saved_restart(&model->env, saved, tr_block_width(block));
    saved->t[TR_SAVED_X] = w->x;
    w->x = last ? w->s->output : tr_arena_alloc(w->s->kept, bytes);
    enter(model, block->unit, unit_at(model, w->chunk, i + 1));
    tr_block_forward_begin(&w->block, block, &w->pass, saved, w->x);
}

static void forward_end(const tr_model *model, walk *w) {
    tr_block_forward_end(&w->block);
    leave(model, w->block.block->unit);
}

static void forward_close(tr_model *model, walk *w) {
    if (!w->chunk->last || !w->s->labelled) return;
    tr_trace_work_begin("head and loss", -1);
    enter_head(model);
    tr_head_forward(&model->head, &w->pass, &w->s->head, w->x, w->s->label);
    leave_head(model);
    if (w->pass.training)
        tr_gradients_made(model->env.registry, model->env.stream, model->head_units[1]);
    tr_trace_work_end();
}

static walk backward_open(tr_model *model, tr_env *c, int64_t slot, bool split) {
    tr_slot *s = &model->slots[slot];
    walk w = {s, s->chunk, pass_of(c, s, true), .x = NULL};
    if (split) w.pass.queue = &s->queue;
    s->waiting = false;
    if (w.chunk->last) tr_head_backward(&model->head, &w.pass, &s->head, s->output, s->gradient);
    return w;
}

/* The i-th block from the end. */
static int64_t from_end(const walk *w, int64_t i) {
    return w->chunk->layers.count - 1 - i;
}

static void backward_begin(const tr_model *model, walk *w, int64_t i) {
    int64_t at = from_end(w, i);
    enter(model, w->chunk->blocks[at].unit, unit_at(model, w->chunk, at - 1));
    tr_block_backward_begin(&w->block, &w->chunk->blocks[at], &w->pass, &w->s->block[at],
                            w->s->gradient);
}

static void backward_end(const tr_model *model, walk *w) {
    int64_t unit = w->block.block->unit;
    tr_block_backward_end(&w->block);
    leave(model, unit);
    tr_weights_complete(&w->pass, unit);
}

static void backward_close(tr_model *model, walk *w) {
    if (!w->chunk->first) return;
    embed_backward(model, w->s);
    tr_gradients_made(model->env.registry, model->env.stream, model->embedding_unit);
}

static void mark(const walk *w, int64_t i) {
    tr_trace_work_begin("layer", w->chunk->layers.first + i);
}

void tr_model_forward(tr_model *model, int64_t chunk, int64_t slot, bool training) {
    walk w = forward_open(model, chunk, slot, training);
    for (int64_t i = 0; i < w.chunk->layers.count; i++) {
        mark(&w, i);
        forward_begin(model, &w, i);
        tr_block_forward_middle(&w.block);
        forward_end(model, &w);
        tr_trace_work_end();
    }
    forward_close(model, &w);
}

void tr_model_backward(tr_model *model, int64_t slot, bool split) {
    walk w = backward_open(model, &model->env, slot, split);
    for (int64_t i = 0; i < w.chunk->layers.count; i++) {
        mark(&w, from_end(&w, i));
        backward_begin(model, &w, i);
        tr_block_backward_middle(&w.block);
        backward_end(model, &w);
        tr_trace_work_end();
    }
    backward_close(model, &w);
}

/* One of the three parts of a layer's forward or backward. */
typedef enum { BEGIN, MIDDLE, END } part;

static void forward_part(const tr_model *model, walk *w, int64_t i, part p) {
    if (i < 0 || i >= w->chunk->layers.count) return;
    mark(w, i);
    if (p == BEGIN)
        forward_begin(model, w, i);
    else if (p == MIDDLE)
        tr_block_forward_middle(&w->block);
    else
        forward_end(model, w);
    tr_trace_work_end();
}

static void backward_part(const tr_model *model, walk *w, int64_t i, part p) {
    if (i < 0 || i >= w->chunk->layers.count) return;
    mark(w, from_end(w, i));
    if (p == BEGIN)
        backward_begin(model, w, i);
    else if (p == MIDDLE)
        tr_block_backward_middle(&w->block);
    else
        backward_end(model, w);
    tr_trace_work_end();
}

void tr_model_forward_backward(tr_model *model, int64_t chunk, int64_t slot, int64_t back_slot) {
    tr_env c = model->env; /* both are under way at once: each has its scratch memory */
    c.scratch = model->back_scratch;
    walk f = forward_open(model, chunk, slot, true), b = backward_open(model, &c, back_slot, false);
    int64_t forwards = f.chunk->layers.count, backwards = b.chunk->layers.count;
    /* the rows of one travel while the other computes */
    for (int64_t i = 0; i < forwards || i <= backwards; i++) {
        forward_part(model, &f, i, BEGIN);
        backward_part(model, &b, i - 1, END);
        backward_part(model, &b, i, BEGIN);
        forward_part(model, &f, i, MIDDLE);
        backward_part(model, &b, i, MIDDLE);
        forward_part(model, &f, i, END);
    }
    forward_close(model, &f);
    backward_close(model, &b);
}

void tr_model_weights(tr_model *model, int64_t slot) {
    tr_weights_drain(&model->env, &model->slots[slot].queue);
}

void tr_model_all_forwards_done(tr_model *model) {
    tr_env *c = &model->env;
    if (c->config->router_aux_loss_scope != TR_AUX_GLOBAL_BATCH) return;
    tr_saved **saved = tr_heap_alloc(model->nslots, sizeof *saved);
    for (int64_t k = 0; k < model->stages.chunks; k++)
        for (int64_t i = 0; i < model->chunks[k].layers.count; i++) {
            if (!model->chunks[k].blocks[i].is_moe) continue;
            int64_t count = 0;
            for (int64_t j = 0; j < model->nslots; j++) {
                tr_slot *s = &model->slots[j];
                if (s->waiting && s->chunk == &model->chunks[k]) saved[count++] = &s->block[i];
            }
            tr_router_global_stats(c, saved, count);
        }
    free(saved);
}

void tr_model_logits(tr_model *model, int64_t n, float *logits) {
    tr_env *c = &model->env;
    tr_slot *s = &model->slots[0];
    tr_pass pass = pass_of(c, s, false);
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    enter_head(model);
    float *device_logits = tr_head_logits(&model->head, &pass, s->output, n);
    c->device->copy(c->stream, logits, device_logits, (size_t)c->config->vocab_size * sizeof(float),
                    TR_TO_HOST);
    c->device->stream_wait(c->stream);
    leave_head(model);
    tr_arena_release(c->scratch, mark);
}
