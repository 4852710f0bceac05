/* weights.c - the queue of weight gradients. Floor: model. */
#include "base/heap.h"
#include "model/gradient.h"
#include "model/pass.h"

void tr_weight_add(const tr_pass *pass, const tr_weight_job *job) {
    tr_weight_queue *q = pass->queue;
    if (!q) {
        job->run(pass->c, job);
        return;
    }
    q->jobs = tr_heap_grow(q->jobs, q->count, &q->capacity, sizeof *q->jobs);
    q->jobs[q->count++] = *job;
}

static void complete(const tr_env *c, const tr_weight_job *job) {
    tr_gradients_made(c->registry, c->stream, job->unit);
}

void tr_weights_complete(const tr_pass *pass, int64_t unit) {
    tr_weight_add(pass, &(tr_weight_job){.run = complete, .unit = unit});
}

void tr_weights_drain(const tr_env *c, tr_weight_queue *q) {
    for (int64_t i = 0; i < q->count; i++) q->jobs[i].run(c, &q->jobs[i]);
    q->count = 0;
}

void *tr_operand(const tr_pass *pass, int64_t elems) {
    tr_arena *arena = pass->queue ? pass->kept : pass->c->scratch;
    return tr_arena_alloc(arena, (size_t)elems * tr_dtype_bytes(pass->c->t));
}

const void *tr_operand_copy(const tr_pass *pass, const void *values, int64_t elems) {
    const tr_env *c = pass->c;
    if (!pass->queue) return values;
    void *copy = tr_operand(pass, elems);
    c->device->copy(c->stream, copy, values, (size_t)elems * tr_dtype_bytes(c->t), TR_ON_DEVICE);
    return copy;
}

const void *tr_operand_rows(const tr_pass *pass, const void *x) {
    const tr_env *c = pass->c;
    const void *rows = tr_rows_gather(c, x);
    return rows == x ? x : tr_operand_copy(pass, rows, c->N * c->config->hidden_size);
}
