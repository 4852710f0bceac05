/* step.c - one training step. Floor: train. */
#include "train/step.h"

#include "base/heap.h"
#include "dist/watch.h"
#include "model/gradient.h"
#include "train/optimizer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { S_LOSS, S_AUX, S_Z, S_SQUARES, S_LOADS };

struct tr_step {
    tr_job *job;
    tr_batches *batches;
    int64_t loads;                                   /* MoE layers * experts */
    double *sums;                                    /* [S_LOADS + loads] reduced over the world */
    void (*begins)(void *self, int64_t micro_batch); /* nullable */
    void *begins_self;
};

tr_step *tr_step_create(tr_job *job) {
    const tr_config *c = job->config;
    tr_step *s = tr_heap_alloc(1, sizeof *s);
    s->job = job;
    s->batches = tr_batches_create(job->grid, c, job->micro_batches);
    s->loads = tr_model_moe_layers(&c->model) * c->model.num_experts;
    s->sums = tr_heap_alloc(S_LOADS + s->loads, sizeof *s->sums);
    return s;
}

void tr_step_destroy(tr_step *s) {
    if (!s) return;
    tr_batches_destroy(s->batches);
    free(s->sums);
    free(s);
}

const tr_batches *tr_step_batches(const tr_step *s) {
    return s->batches;
}

void tr_step_watch(tr_step *s, void (*begins)(void *self, int64_t micro_batch), void *self) {
    s->begins = begins;
    s->begins_self = self;
}

static void load(void *self, int64_t i, tr_micro_batch *batch) {
    tr_step *s = self;
    if (s->begins) s->begins(s->begins_self, i);
    tr_batches_load(s->batches, i, batch);
}

/* This step's samples; *labels_p the labelled tokens of the global batch. */
static tr_status next_samples(tr_step *s, int64_t *labels_p) {
    tr_job *job = s->job;
    int64_t labels = 0;
    tr_status status = tr_batches_read(s->batches, job->train, job->at.samples,
                                       job->config->training.global_batch_size, &labels);
    int64_t sums[2] = {labels, status != TR_OK};
    tr_end(tr_all_reduce_begin(job->world, NULL, TR_SUM, TR_I64, sums, 2));
    if (sums[1]) return tr_agree(job->world, status);
    *labels_p = sums[0];
    return TR_OK;
}

/* Sums of the step over the world: loss, aux, z, squares of gradients, expert loads. */
static void reduce_sums(tr_step *s, double sum_squares) {
    tr_model_sums local;
    tr_model_sums_get(s->job->model, &local);
    s->sums[S_LOSS] = local.loss_sum;
    s->sums[S_AUX] = local.aux_loss;
    s->sums[S_Z] = local.z_loss;
    s->sums[S_SQUARES] = sum_squares;
    memcpy(s->sums + S_LOADS, local.expert_load, (size_t)s->loads * sizeof *s->sums);
    tr_end(tr_all_reduce_begin(s->job->world, NULL, TR_SUM, TR_F64, s->sums, S_LOADS + s->loads));
}

tr_status tr_step_gradients(tr_step *s, tr_step_result *result_p) {
    tr_job *job = s->job;
    int64_t labels = 0;
    double sum_squares = 0;
    tr_watch_step(job->at.step + 1);
    tr_watch_action("reading of samples", -1);
    TR_TRY(next_samples(s, &labels));
    tr_model_begin_step(job->model, job->micro_batches * job->grid->at.shape.data,
                        labels ? (float)(1.0 / (double)labels) : 0.0f);
    tr_pipeline_train(job->pipeline, load, s);
    tr_watch_action("reduction of gradients", -1);
    tr_gradients_reduce(tr_model_registry(job->model), job->grid, &sum_squares);
    reduce_sums(s, sum_squares);
    *result_p = (tr_step_result){.loss = labels ? s->sums[S_LOSS] / (double)labels : 0,
                                 .aux_loss = s->sums[S_AUX],
                                 .z_loss = s->sums[S_Z],
                                 .grad_norm = sqrt(s->sums[S_SQUARES]),
                                 .labels = labels,
                                 .expert_load = s->sums + S_LOADS};
    return TR_OK;
}

/* AdamW, unless the gradient is not finite or there was nothing to learn from (which is no fault).
 */
static bool update(tr_job *job, const tr_step_result *r, double learning_rate) {
    const tr_config *c = job->config;
    if (!isfinite(r->grad_norm)) job->at.skipped_in_row++;
    if (!isfinite(r->grad_norm) || r->labels == 0) return false;
    double scale = c->optimizer.clip > 0 ? c->optimizer.clip / (r->grad_norm + 1e-6) : 1;
    job->at.skipped_in_row = 0;
    job->at.updates++;
    tr_optimizer_step step = {learning_rate,        c->optimizer.beta1,        c->optimizer.beta2,
                              c->optimizer.epsilon, c->optimizer.weight_decay, job->at.updates};
    tr_optimizer_update(tr_model_registry(job->model), &step, scale < 1 ? scale : 1);
    return true;
}

bool tr_step_update(tr_step *s, const tr_step_result *result, double learning_rate) {
    tr_job *job = s->job;
    tr_watch_action("update of weights", -1);
    bool updated = update(job, result, learning_rate);
    job->at.step++;
    job->at.samples += job->config->training.global_batch_size;
    job->at.tokens += job->config->training.global_batch_size * job->config->data.sequence_length;
    return updated;
}
