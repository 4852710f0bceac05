/* trainer.c - the training loop. Floor: train. */
#include "train/trainer.h"

#include "base/log.h"
#include "kernels/peak.h"
#include "observe/metrics.h"
#include "train/batch.h"
#include "train/evaluate.h"
#include "train/optimizer.h"
#include "train/rate.h"
#include "train/routing.h"
#include "train/signals.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    tr_job *job;
    tr_batches *batches;
    tr_metrics *metrics;     /* rank 0 */
    tr_progress *progress;   /* rank 0 */
    tr_routing_log *routing; /* log.routing: every rank */
    double flops_per_token, world_peak;
    int64_t loads; /* MoE layers * experts */
    double *sums;  /* [4 + loads] reduced over the world */
    int64_t *expert_load, *sample_ids;
} loop;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* --- opening
 * -------------------------------------------------------------------------------------- */

static tr_status write_config(const tr_job *job, const char *directory) {
    char path[4200];
    snprintf(path, sizeof path, "%s/config.yaml", directory);
    FILE *f = fopen(path, "w");
    if (!f || fputs(job->config_text, f) < 0 || fclose(f) != 0)
        return tr_fail(TR_ERR_IO, "cannot write %s: %s", path, strerror(errno));
    return TR_OK;
}

static tr_status open_files(loop *l) {
    const tr_job *job = l->job;
    char directory[4096];
    tr_job_run_directory(job->config, directory, sizeof directory);
    TR_TRY(tr_metrics_open(directory, job->at.step, job->config->log.samples,
                           job->config->log.tensorboard, &l->metrics));
    TR_TRY(write_config(job, directory));
    l->progress =
        tr_progress_start(job->at.step, job->config->training.steps, job->config->log.every);
    return TR_OK;
}

/* FLOP/s all ranks could reach together: the setting, or what each measures while all compute. */
static double measure_peak(tr_job *job) {
    job->peak_flops = job->config->run.peak_flops;
    if (job->peak_flops == 0)
        job->peak_flops = tr_peak_flops(job->config->run.dtype, job->threads, 0.2);
    double sum = job->peak_flops;
    tr_end(tr_all_reduce_begin(job->world, NULL, TR_SUM, TR_F64, &sum, 1));
    return sum;
}

static tr_status loop_open(loop *l, tr_job *job) {
    const tr_config *c = job->config;
    *l = (loop){.job = job};
    l->batches = tr_batches_create(job->grid, job->micro_batches, c->training.micro_batch_size,
                                   c->data.sequence_length);
    l->flops_per_token = tr_model_flops_per_token(job->model, c->data.sequence_length);
    l->world_peak = measure_peak(job);
    l->loads = tr_model_moe_layers(&c->model) * c->model.num_experts;
    l->sums = calloc((size_t)(4 + l->loads), sizeof *l->sums);
    l->expert_load = calloc((size_t)l->loads + 1, sizeof *l->expert_load);
    l->sample_ids = calloc((size_t)c->training.global_batch_size, sizeof *l->sample_ids);
    if (!l->sums || !l->expert_load || !l->sample_ids) abort();
    tr_status status = TR_OK;
    if (tr_comm_rank(job->world) == 0) status = open_files(l);
    TR_TRY(tr_agree(job->world, status));
    if (c->log.routing) status = tr_routing_log_open(job, l->batches, &l->routing);
    return tr_agree(job->world, status);
}

static tr_status loop_close(loop *l) {
    tr_progress_finish(l->progress);
    tr_status status = tr_metrics_close(l->metrics);
    tr_routing_log_close(l->routing);
    tr_batches_destroy(l->batches);
    free(l->sums);
    free(l->expert_load);
    free(l->sample_ids);
    return status;
}

/* --- one step
 * ------------------------------------------------------------------------------------- */

/* This step's samples; *labels_p the labelled tokens of the global batch. */
static tr_status next_samples(loop *l, int64_t *labels_p) {
    tr_job *job = l->job;
    int64_t labels = 0;
    tr_status status = tr_batches_read(l->batches, job->train, job->at.samples,
                                       job->config->training.global_batch_size, &labels);
    /* every stage has read the same labels: the first stage's count */
    int64_t sums[2] = {job->grid->at.p == 0 ? labels : 0, status != TR_OK};
    tr_end(tr_all_reduce_begin(job->world, NULL, TR_SUM, TR_I64, sums, 2));
    if (sums[1]) return tr_agree(job->world, status);
    *labels_p = sums[0];
    return TR_OK;
}

/* Sums of the step over the world: loss, aux, z, squares of gradients, expert loads. */
static void reduce_sums(loop *l, double sum_squares) {
    tr_job *job = l->job;
    tr_model_sums local;
    tr_model_sums_get(job->model, &local);
    double *s = l->sums;
    s[0] = local.loss_sum;
    s[1] = local.aux_loss;
    s[2] = local.z_loss;
    s[3] = sum_squares;
    memcpy(s + 4, local.expert_load, (size_t)l->loads * sizeof *s);
    tr_end(tr_all_reduce_begin(job->world, NULL, TR_SUM, TR_F64, s, 4 + l->loads));
}

/* AdamW, unless the gradient is not finite or there was nothing to learn from (which is no fault).
 */
static bool update(loop *l, double grad_norm, int64_t labels, double learning_rate) {
    tr_job *job = l->job;
    const tr_config *c = job->config;
    if (!isfinite(grad_norm)) job->at.skipped_in_row++;
    if (!isfinite(grad_norm) || labels == 0) return false;
    double scale = c->optimizer.clip > 0 ? c->optimizer.clip / (grad_norm + 1e-6) : 1;
    job->at.skipped_in_row = 0;
    job->at.updates++;
    tr_optimizer_step step = {learning_rate,        c->optimizer.beta1,        c->optimizer.beta2,
                              c->optimizer.epsilon, c->optimizer.weight_decay, job->at.updates};
    tr_optimizer_update(tr_model_registry(job->model), &step, scale < 1 ? scale : 1);
    return true;
}

/* Forward, backward and update on the next samples; fills the record. */
static tr_status train_step(loop *l, tr_step_record *record) {
    tr_job *job = l->job;
    const tr_config *c = job->config;
    int64_t labels = 0, batch = c->training.global_batch_size, S = c->data.sequence_length;
    double started = now(), sum_squares = 0;
    tr_abort_step(job->at.step + 1);
    TR_TRY(next_samples(l, &labels));
    tr_model_begin_step(job->model, job->micro_batches * job->grid->at.shape.data,
                        labels ? (float)(1.0 / (double)labels) : 0.0f);
    tr_pipeline_train(job->pipeline, tr_batches_load, l->batches);
    tr_gradients_reduce(tr_model_registry(job->model), job->grid, &sum_squares);
    reduce_sums(l, sum_squares);
    double norm = sqrt(l->sums[3]), rate = tr_learning_rate(c, job->at.step + 1);
    bool updated = update(l, norm, labels, rate);
    job->at.step++;
    job->at.samples += batch;
    job->at.tokens += batch * S;
    double seconds = now() - started, speed = (double)(batch * S) / seconds;
    for (int64_t i = 0; i < l->loads; i++) l->expert_load[i] = (int64_t)l->sums[4 + i];
    *record = (tr_step_record){.step = job->at.step,
                               .loss = labels ? l->sums[0] / (double)labels : 0,
                               .aux_loss = l->sums[1],
                               .z_loss = l->sums[2],
                               .grad_norm = norm,
                               .learning_rate = rate,
                               .tokens = job->at.tokens,
                               .samples = job->at.samples,
                               .skipped = !updated,
                               .moe_layers = tr_model_moe_layers(&c->model),
                               .experts = c->model.num_experts,
                               .expert_load = l->expert_load,
                               .seconds = seconds,
                               .tokens_per_second = speed,
                               .mfu = speed * l->flops_per_token / l->world_peak};
    return TR_OK;
}

/* --- between steps
 * -------------------------------------------------------------------------------- */

static bool due(int64_t step, int64_t every, int64_t last) {
    return step == last || (every > 0 && step % every == 0);
}

static tr_status evaluate_if_due(loop *l, tr_step_record *record) {
    tr_job *job = l->job;
    const tr_config *c = job->config;
    if (!job->validation || !due(record->step, c->training.evaluate_every, c->training.steps))
        return TR_OK;
    tr_evaluation e;
    TR_TRY(tr_evaluate(job, &e));
    record->evaluated = true;
    record->validation_loss = e.loss;
    record->validation_bits_per_byte = e.bits_per_byte;
    return TR_OK;
}

/* Rank 0 writes; all agree. */
static tr_status write_record(loop *l, tr_step_record *record) {
    tr_job *job = l->job;
    tr_status status = TR_OK;
    if (tr_comm_rank(job->world) == 0) {
        int64_t batch = job->config->training.global_batch_size;
        for (int64_t i = 0; i < batch && job->config->log.samples; i++)
            l->sample_ids[i] = tr_dataset_id(job->train, record->samples - batch + i);
        record->sample_ids = job->config->log.samples ? l->sample_ids : NULL;
        record->n_samples = batch;
        status = tr_metrics_write(l->metrics, record);
        tr_progress_step(l->progress, record);
    }
    return tr_agree(job->world, status);
}

/* Collective. Whether some rank was asked to stop. */
static bool stop_asked(const tr_job *job) {
    int64_t stop = tr_signals_stop_asked();
    tr_end(tr_all_reduce_begin(job->world, NULL, TR_MAX, TR_I64, &stop, 1));
    return stop != 0;
}

static tr_status steps(loop *l) {
    tr_job *job = l->job;
    const tr_config *c = job->config;
    while (job->at.step < c->training.steps) {
        tr_step_record record;
        TR_TRY(train_step(l, &record));
        TR_TRY(evaluate_if_due(l, &record));
        TR_TRY(write_record(l, &record));
        if (job->at.skipped_in_row >= c->training.max_skipped_steps)
            return tr_fail(TR_ERR_INTERNAL,
                           "step %lld: the gradients of %lld steps in a row were not finite "
                           "(training.max_skipped_steps); lower optimizer.learning_rate and resume "
                           "from an earlier checkpoint",
                           (long long)job->at.step, (long long)job->at.skipped_in_row);
        bool stop = stop_asked(job), done = job->at.step == c->training.steps;
        if (stop || due(job->at.step, c->checkpoint.every, c->training.steps))
            TR_TRY(tr_job_save(job));
        if (stop && !done) return TR_STOPPED;
    }
    return TR_OK;
}

tr_status tr_train(tr_job *job) {
    loop l;
    tr_status status = loop_open(&l, job);
    if (status == TR_OK) status = steps(&l);
    tr_status closed = tr_agree(job->world, loop_close(&l));
    return status != TR_OK ? status : closed;
}
