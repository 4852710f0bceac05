/* lab.c - the model measured, the clock, peaks, random numbers. Floor: bench. */
#include "bench/lab.h"

#include "base/heap.h"
#include "base/log.h"
#include "base/rng.h"
#include "kernels/peak.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The size of GPT-2 124M; three feed-forward matrices of 2048 weigh what GPT-2's two of 3072 do.
 * training.steps is how often each row is measured at least. */
static const char model_text[] = "model:\n"
                                 "  vocab_size: 50257\n"
                                 "  hidden_size: 768\n"
                                 "  num_hidden_layers: 12\n"
                                 "  num_attention_heads: 12\n"
                                 "  intermediate_size: 2048\n"
                                 "  tie_word_embeddings: true\n"
                                 "data: {sequence_length: 1024}\n"
                                 "training: {steps: 3, global_batch_size: 4, micro_batch_size: 1}\n"
                                 "checkpoint: {keep: 0}\n";

enum { OWN_SETS = 5, MORE_SETS = 8, SET_BYTES = 80, CHUNK = 64 << 20 };

/* --- opening ---------------------------------------------------------------------------------- */

/* Collective on comm. The model under the caller's sets and then `own`. */
static tr_status parse(const tr_lab *lab, tr_comm *comm, int nown, char *const *own,
                       tr_config **config_p) {
    char **sets = tr_heap_alloc(lab->nsets + nown, sizeof *sets);
    for (int i = 0; i < lab->nsets; i++) sets[i] = lab->sets[i];
    for (int i = 0; i < nown; i++) sets[lab->nsets + i] = own[i];
    tr_status status = tr_agree(comm, tr_config_parse(model_text, "the benchmark's model",
                                                      lab->nsets + nown, sets, config_p));
    free(sets);
    return status;
}

static tr_status check(const tr_config *c) {
    if (c->parallel.pipeline * c->parallel.context * c->parallel.expert * c->parallel.tensor > 1)
        return tr_fail(TR_ERR_USAGE, "bench cuts the batch over all ranks; leave "
                                     "parallel.pipeline, context, expert and tensor at 1");
    return TR_OK;
}

/* All ranks name rank 0's process, so no two runs share files. */
static void choose_name(tr_lab *lab) {
    int64_t pid = getpid();
    tr_end(tr_broadcast_begin(lab->world, NULL, 0, &pid, sizeof pid));
    snprintf(lab->name, sizeof lab->name, "bench-%lld", (long long)pid);
}

tr_status tr_lab_open(tr_lab *lab, tr_comm *world, int nsets, char *const *sets) {
    *lab = (tr_lab){
        .world = world, .nsets = nsets, .sets = sets, .ranks = tr_comm_size(world), .drawn = 1};
    choose_name(lab);
    TR_TRY(parse(lab, world, 0, NULL, &lab->config));
    TR_TRY(check(lab->config));
    TR_TRY(tr_job_create(lab->config, world, TR_JOB_PLANS, &lab->plan));
    lab->threads = lab->plan->threads;
    lab->device = lab->plan->device;
    lab->B = lab->config->training.global_batch_size;
    lab->T = lab->config->data.sequence_length;
    lab->repeats = lab->config->training.steps;
    lab->alone = tr_comm_split(world, tr_comm_rank(world), 0);
    lab->memory = tr_arena_create(&lab->device->allocator, CHUNK);
    return TR_OK;
}

void tr_lab_close(tr_lab *lab) {
    tr_arena_destroy(lab->memory);
    tr_comm_free(lab->alone);
    tr_job_destroy(lab->plan);
    tr_config_destroy(lab->config);
}

tr_status tr_lab_job(tr_lab *lab, tr_comm *comm, tr_dtype t, int64_t batch, const char *const *sets,
                     tr_config **config_p, tr_job **job_p) {
    char text[OWN_SETS + MORE_SETS][SET_BYTES], *own[OWN_SETS + MORE_SETS];
    int n = OWN_SETS;
    for (; sets && *sets && n < OWN_SETS + MORE_SETS; sets++)
        snprintf(text[n++], SET_BYTES, "%s", *sets);
    for (int i = 0; i < n; i++) own[i] = text[i];
    snprintf(text[0], SET_BYTES, "run.dtype=%s", tr_dtype_name(t));
    snprintf(text[1], SET_BYTES, "run.name=%s", lab->name);
    snprintf(text[2], SET_BYTES, "run.threads=%d", lab->threads);
    snprintf(text[3], SET_BYTES, "training.global_batch_size=%lld", (long long)batch);
    snprintf(text[4], SET_BYTES, "training.micro_batch_size=%lld",
             (long long)(batch > tr_comm_size(comm) ? batch / tr_comm_size(comm) : 1));
    TR_TRY(parse(lab, comm, n, own, config_p));
    return tr_job_create(*config_p, comm, TR_JOB_TRAINS, job_p);
}

/* --- the clock -------------------------------------------------------------------------------- */

double tr_lab_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double tr_lab_median(double *times, int64_t count) {
    qsort(times, (size_t)count, sizeof *times, by_value);
    return 0.5 * (times[count / 2] + times[(count - 1) / 2]);
}

/* Until the device has done it. */
static double time_once(const tr_lab *lab, tr_comm *comm, void (*work)(void *self), void *self) {
    tr_end(tr_barrier_begin(comm));
    double begin = tr_lab_now();
    work(self);
    lab->device->stream_wait(lab->device->stream);
    double seconds = tr_lab_now() - begin;
    tr_end(tr_all_reduce_begin(comm, NULL, TR_MAX, TR_F64, &seconds, 1));
    return seconds;
}

double tr_lab_time(const tr_lab *lab, tr_comm *comm, double seconds, void (*work)(void *self),
                   void *self) {
    enum { MOST = 200 };
    double times[MOST], spent = 0;
    int64_t count = 0;
    work(self);
    while (count < MOST && (count < lab->repeats || spent < seconds)) {
        times[count] = time_once(lab, comm, work, self);
        spent += times[count++];
    }
    return tr_lab_median(times, count);
}

void tr_lab_rank_0(const tr_lab *lab, void (*work)(void *self), void *self) {
    if (tr_comm_rank(lab->world) == 0) work(self);
    tr_end_asleep(tr_barrier_begin(lab->world));
}

/* --- rows and data ---------------------------------------------------------------------------- */

double tr_lab_sum(const tr_lab *lab, double value) {
    tr_end(tr_all_reduce_begin(lab->world, NULL, TR_SUM, TR_F64, &value, 1));
    return value;
}

const char *tr_lab_dtype(tr_dtype t) {
    return t == TR_F32 ? "fp32" : "bf16";
}

double tr_lab_peak(tr_lab *lab, tr_dtype t) {
    if (lab->device->host_memory)
        tr_row_begin(&lab->table, "peak of %s", tr_peak_instruction(t));
    else
        tr_row_begin(&lab->table, "peak of %s products", tr_lab_dtype(t));
    tr_end(tr_barrier_begin(lab->world));
    double peak =
        tr_lab_sum(lab, tr_device_peak(lab->device, t, lab->threads, 0.1 * (double)lab->repeats)) /
        1e9;
    tr_row_end(&lab->table, &(tr_row){.unit = "GFLOP/s", .measured = peak, .kind = TR_ALONE});
    return peak;
}

void *tr_lab_random(tr_lab *lab, int64_t elems, tr_dtype t) {
    tr_device *device = lab->device;
    size_t bytes = (size_t)elems * sizeof(float);
    const tr_allocator *host = tr_host_allocator();
    float *values = host->alloc(host->self, bytes + 1);
    if (!values) tr_abort("out of memory: %zu bytes of random numbers", bytes);
    uint64_t stream = lab->drawn++;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < elems; i++)
        values[i] = (float)tr_random_uniform(1, stream, (uint64_t)i) - 0.5f;
    float *f32 = tr_arena_alloc(lab->memory, bytes);
    device->copy(device->stream, f32, values, bytes, TR_TO_DEVICE);
    device->stream_wait(device->stream);
    host->free(host->self, values, bytes + 1);
    if (t == TR_F32) return f32;
    void *out = tr_arena_alloc(lab->memory, (size_t)elems * tr_dtype_bytes(t));
    device->kernels->cast(device->stream, t, out, TR_F32, f32, elems);
    return out;
}

tr_attention tr_lab_attention(tr_lab *lab, tr_dtype t, int64_t B, int64_t S, int64_t H, int64_t D) {
    int64_t row = H * D, n = B * S * row;
    size_t bytes = (size_t)n * tr_dtype_bytes(t);
    return (tr_attention){.B = B,
                          .Sq = S,
                          .Sk = S,
                          .Hq = H,
                          .Hkv = H,
                          .Dqk = D,
                          .Dv = D,
                          .scale = 1.0f / sqrtf((float)D),
                          .mask = {.causal = true},
                          .t = t,
                          .q = tr_lab_random(lab, n, t),
                          .k = tr_lab_random(lab, n, t),
                          .v = tr_lab_random(lab, n, t),
                          .dout = tr_lab_random(lab, n, t),
                          .q_batch = S * row,
                          .k_batch = S * row,
                          .v_batch = S * row,
                          .out_batch = S * row,
                          .dout_batch = S * row,
                          .q_row = row,
                          .k_row = row,
                          .v_row = row,
                          .out_row = row,
                          .dout_row = row,
                          .out = tr_arena_alloc(lab->memory, bytes),
                          .out_t = t,
                          .lse = tr_arena_alloc(lab->memory, (size_t)(B * S * H) * sizeof(float)),
                          .lse_batch = S * H,
                          .lse_head = S,
                          .dq = tr_arena_alloc(lab->memory, bytes),
                          .dk = tr_arena_alloc(lab->memory, bytes),
                          .dv = tr_arena_alloc(lab->memory, bytes),
                          .grad_t = t};
}
