/* trainer.c - the training loop. Floor: train. */
#include "train/trainer.h"

#include "base/heap.h"
#include "base/log.h"
#include "base/trace.h"
#include "dist/watch.h"
#include "kernels/peak.h"
#include "observe/metrics.h"
#include "train/evaluate.h"
#include "train/rate.h"
#include "train/routing.h"
#include "train/signals.h"
#include "train/step.h"
#include "train/tracing.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    tr_job *job;
    tr_step *step;
    tr_metrics *metrics;     /* rank 0 */
    tr_progress *progress;   /* rank 0 */
    tr_routing_log *routing; /* log.routing: every rank */
    double flops_per_token, world_peak;
    int64_t loads;     /* MoE layers * experts */
    int64_t traced_to; /* the last step that is traced */
    bool tracing;
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
        return tr_fail(TR_ERR_IO,
                       "cannot write %s: %s; make room, or set run.directory to a place where you "
                       "may write",
                       path, strerror(errno));
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

/* FLOP/s all ranks could reach together: the setting, or what each measures while all compute. Not
 * a number where a device is emulated, so that no utilisation is told. */
static double measure_peak(tr_job *job) {
    if (job->device->emulated) return NAN;
    job->peak_flops = job->config->run.peak_flops;
    if (job->peak_flops == 0)
        job->peak_flops = tr_device_peak(job->device, job->config->run.dtype, job->threads, 0.2);
    double sum = job->peak_flops;
    tr_end(tr_all_reduce_begin(job->world, NULL, TR_SUM, TR_F64, &sum, 1));
    return sum;
}

static tr_status loop_open(loop *l, tr_job *job) {
    const tr_config *c = job->config;
    *l = (loop){.job = job};
    l->step = tr_step_create(job);
    l->flops_per_token = tr_model_flops_per_token(job->model, c->data.sequence_length);
    l->world_peak = measure_peak(job);
    l->loads = tr_model_moe_layers(&c->model) * c->model.num_experts;
    l->expert_load = tr_heap_alloc(l->loads, sizeof *l->expert_load);
    l->sample_ids = tr_heap_alloc(c->training.global_batch_size, sizeof *l->sample_ids);
    tr_status status = TR_OK;
    if (tr_comm_rank(job->world) == 0) status = open_files(l);
    TR_TRY(tr_agree(job->world, status));
    if (c->log.routing) status = tr_routing_log_open(job, tr_step_batches(l->step), &l->routing);
    TR_TRY(tr_agree(job->world, status));
    if (!c->log.trace) return TR_OK;
    l->traced_to = c->log.trace_steps ? job->at.step + c->log.trace_steps : c->training.steps;
    TR_TRY(tr_tracing_open(job));
    l->tracing = true;
    return TR_OK;
}

/* Collective. Writes the trace of a step; closes it after the last one. */
static tr_status trace_step(loop *l, bool last) {
    if (!l->tracing) return TR_OK;
    tr_trace_flush();
    if (!last) return TR_OK;
    l->tracing = false;
    return tr_tracing_close(l->job);
}

static tr_status loop_close(loop *l) {
    tr_progress_finish(l->progress);
    tr_status status = tr_metrics_close(l->metrics);
    tr_routing_log_close(l->routing);
    tr_step_destroy(l->step);
    free(l->expert_load);
    free(l->sample_ids);
    return status;
}

/* --- one step
 * ------------------------------------------------------------------------------------- */

/* Forward, backward and update on the next samples; fills the record. */
static tr_status train_step(loop *l, tr_step_record *record) {
    tr_job *job = l->job;
    const tr_config *c = job->config;
    int64_t batch_tokens = c->training.global_batch_size * c->data.sequence_length;
    tr_step_result result;
    double started = now(), rate = tr_learning_rate(c, job->at.step + 1);
    TR_TRY(tr_step_gradients(l->step, &result));
    bool updated = tr_step_update(l->step, &result, rate);
    double seconds = now() - started, speed = (double)batch_tokens / seconds;
    for (int64_t i = 0; i < l->loads; i++) l->expert_load[i] = (int64_t)result.expert_load[i];
    *record = (tr_step_record){.step = job->at.step,
                               .loss = result.loss,
                               .aux_loss = result.aux_loss,
                               .z_loss = result.z_loss,
                               .grad_norm = result.grad_norm,
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
    tr_watch_action("metrics", -1);
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
    tr_watch_action("agreement on going on", -1);
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
        tr_status traced = trace_step(l, job->at.step >= l->traced_to);
        bool stop = stop_asked(job), done = job->at.step == c->training.steps;
        if (stop || due(job->at.step, c->checkpoint.every, c->training.steps))
            TR_TRY(tr_job_save(job));
        TR_TRY(traced); /* a trace that cannot be written costs no step */
        if (stop && !done) return TR_STOPPED;
    }
    return TR_OK;
}

tr_status tr_train(tr_job *job) {
    loop l;
    tr_status status = loop_open(&l, job);
    if (status == TR_OK) status = steps(&l);
    if (status == TR_OK || status == TR_STOPPED) {
        tr_status traced = trace_step(&l, true);
        if (traced != TR_OK) status = traced;
    }
    tr_status closed = tr_agree(job->world, loop_close(&l));
    return status != TR_OK ? status : closed;
}
