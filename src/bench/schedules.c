/* schedules.c - how much of a pipeline's time two ranks stand idle, against what the simulator says
 * from the durations of the same run. Floor: bench. */
#include "bench/groups.h"

#include "base/heap.h"
#include "base/rng.h"
#include "plan/simulate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 2, MICRO_BATCHES = 8 };

/* What one rank's computations took. */
typedef struct {
    double first, last; /* when the first began and the last ended */
    double busy;
    double seconds[TR_ACTION_KINDS], count[TR_ACTION_KINDS];
} stopwatch;

typedef struct {
    tr_lab *lab;
    tr_config *config;
    tr_job *job;
    int64_t T;
    int32_t *token;
    uint8_t *valid;
    stopwatch now;
    double idle, expected; /* of the last step: measured, simulated; shares of all ranks' time */
} pipeline_job;

static void load(void *self, int64_t i, tr_micro_batch *batch) {
    const pipeline_job *j = self;
    (void)i;
    *batch = (tr_micro_batch){.token = j->token, .label = j->token, .valid = j->valid};
}

static void watch(void *self, const tr_action *a, double begin, double end) {
    stopwatch *w = &((pipeline_job *)self)->now;
    if (!tr_action_computes(a->kind)) return;
    if (w->busy == 0) w->first = begin;
    w->last = end;
    w->busy += end - begin;
    w->seconds[a->kind] += end - begin;
    w->count[a->kind]++;
}

/* Collective. Sums over the ranks; first and last are those of all. */
static stopwatch of_all(const pipeline_job *j) {
    stopwatch w = j->now;
    w.first = -w.first;
    tr_comm *world = j->lab->world;
    double bounds[2] = {w.first, w.last};
    tr_end(tr_all_reduce_begin(world, NULL, TR_MAX, TR_F64, bounds, 2));
    w.first = -bounds[0];
    w.last = bounds[1];
    w.busy = tr_lab_sum(j->lab, w.busy);
    for (int k = 0; k < TR_ACTION_KINDS; k++) {
        w.seconds[k] = tr_lab_sum(j->lab, w.seconds[k]);
        w.count[k] = tr_lab_sum(j->lab, w.count[k]);
    }
    return w;
}

static double mean(const stopwatch *w, tr_action_kind kind) {
    return w->count[kind] > 0 ? w->seconds[kind] / w->count[kind] : 0;
}

static double simulated(const pipeline_job *j, const stopwatch *w) {
    tr_costs costs = {.forward = mean(w, TR_FORWARD),
                      .input = mean(w, TR_BACKWARD_INPUT),
                      .weight = mean(w, TR_WEIGHT),
                      .both = mean(w, TR_FORWARD_BACKWARD)};
    if (w->count[TR_WEIGHT] == 0) costs.input = mean(w, TR_BACKWARD);
    tr_schedule_shape shape = {.kind = j->config->parallel.schedule,
                               .stages = tr_stages_of(j->config),
                               .micro_batches = MICRO_BATCHES};
    tr_schedule *all = tr_schedules_create(&shape);
    tr_timeline t = tr_simulate(all, &shape, &costs);
    double idle = tr_timeline_idle(&t);
    tr_timeline_free(&t);
    tr_schedules_free(all, shape.stages.ranks);
    return idle;
}

static void step(void *self) {
    pipeline_job *j = self;
    j->now = (stopwatch){0};
    tr_model_begin_step(j->job->model, MICRO_BATCHES, 1.0f / (float)(MICRO_BATCHES * j->T));
    tr_pipeline_train(j->job->pipeline, load, j);
    stopwatch w = of_all(j);
    j->idle = 1 - w.busy / (RANKS * (w.last - w.first));
    j->expected = simulated(j, &w);
}

static tr_status open(pipeline_job *j, const char *schedule) {
    tr_lab *lab = j->lab;
    char kind[64], length[64];
    snprintf(kind, sizeof kind, "parallel.schedule=%s", schedule);
    snprintf(length, sizeof length, "data.sequence_length=%lld", (long long)j->T);
    const char *sets[] = {"parallel.pipeline=2",
                          "model.num_hidden_layers=4",
                          "model.vocab_size=256", /* so that the head weighs little */
                          "training.micro_batch_size=1",
                          kind,
                          length,
                          NULL};
    TR_TRY(tr_lab_job(lab, lab->world, TR_F32, MICRO_BATCHES, sets, &j->config, &j->job));
    TR_TRY(tr_job_init_weights(j->job));
    TR_TRY(tr_job_open_pipeline(j->job));
    j->token = tr_heap_alloc(j->T, sizeof *j->token);
    j->valid = tr_heap_alloc(j->T, 1);
    memset(j->valid, 1, (size_t)j->T);
    for (int64_t i = 0; i < j->T; i++)
        j->token[i] = (int32_t)(tr_random_u64(4, 0, (uint64_t)i) % 256);
    tr_pipeline_watch(j->job->pipeline, watch, j);
    return TR_OK;
}

/* The median step, by how far it is from the simulation. */
static void measure(pipeline_job *j) {
    double idle[64], off[64];
    int64_t n = j->lab->repeats < 64 ? j->lab->repeats : 64;
    step(j);
    for (int64_t i = 0; i < n; i++) {
        step(j);
        idle[i] = j->idle;
        off[i] = j->idle - j->expected;
    }
    j->idle = tr_lab_median(idle, n);
    j->expected = j->idle - tr_lab_median(off, n);
}

static tr_status schedule_row(tr_lab *lab, const char *schedule) {
    pipeline_job j = {.lab = lab, .T = lab->T / 8 > 0 ? lab->T / 8 : 1};
    tr_row_begin(&lab->table, "idle under %s; base simulated", schedule);
    if (lab->ranks != RANKS || tr_comm_node_size(lab->world) != RANKS) {
        tr_row_skip(&lab->table, "needs 2 ranks on one node (mpirun -n 2)");
        return TR_OK;
    }
    tr_status status = open(&j, schedule);
    if (status == TR_OK) {
        measure(&j);
        tr_row_end(&lab->table, &(tr_row){.unit = "%",
                                          .measured = 100 * j.idle,
                                          .base = 100 * j.expected,
                                          .kind = TR_POINTS,
                                          .target = 5,
                                          .at_most = true});
    }
    tr_job_destroy(j.job);
    tr_config_destroy(j.config);
    free(j.token);
    free(j.valid);
    return status;
}

tr_status tr_bench_schedules(tr_lab *lab) {
    static const char *const schedules[] = {"1f1b",  "gpipe", "interleaved",
                                            "zb_h1", "zb_v",  "dualpipe_v"};
    for (size_t i = 0; i < sizeof schedules / sizeof *schedules; i++)
        TR_TRY(schedule_row(lab, schedules[i]));
    return TR_OK;
}
