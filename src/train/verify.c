/* verify.c - runs the two sides of a proof in turn. Floor: train. */
#include "train/verify.h"

#include "base/heap.h"
#include "base/log.h"
#include "model/unit.h"
#include "train/comparison.h"
#include "train/gather.h"
#include "train/rate.h"
#include "train/twin.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WORST = 20, BATCHES_TRIED = 4, SECONDS_BETWEEN_LINES = 5 };

/* The grid, or one rank. */
typedef struct {
    tr_config *config;
    tr_job *job;
    tr_step *step;
    tr_routes *routes; /* NULL: a dense model */
    tr_gather *gather;
} side;

typedef struct {
    tr_comm *world, *alone;
    bool root;
    side grid, one; /* one: rank 0 */
    tr_comparison c;
    float *a, *b; /* rank 0: a parameter of the grid, and of one rank */
    /* lines about long work */
    int step; /* from 0 */
    const char *doing;
    double last_line;
} verification;

/* --- progress ----------------------------------------------------------------------------------
 */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A line, where the last is long ago. */
static void progress(verification *v, int64_t done, int64_t of) {
    if (!v->root || now() < v->last_line + SECONDS_BETWEEN_LINES) return;
    v->last_line = now();
    tr_say("step %d     %s: %lld of %lld", v->step + 1, v->doing, (long long)done, (long long)of);
}

static void on_grid(void *self, int64_t i) {
    verification *v = self;
    progress(v, i, v->grid.job->micro_batches);
}

static void on_one(void *self, int64_t i) {
    verification *v = self;
    progress(v, i, v->one.job->micro_batches);
}

/* --- opening -----------------------------------------------------------------------------------
 */

static tr_status open_samples(verification *v, side *s, bool full) {
    const tr_config *c = s->config;
    if (full && c->data.train.count > 0) {
        tr_status status = tr_job_open_data(s->job);
        if (status == TR_OK) return TR_OK;
        if (s == &v->grid) tr_warn("data.train cannot be read: %s", tr_error_message());
    }
    tr_dataset_close(s->job->train);
    if (s == &v->grid) tr_say("samples    are drawn from run.seed");
    return tr_job_open_synthetic(s->job);
}

/* Collective on comm. */
static tr_status open_side(verification *v, side *s, tr_comm *comm, bool full,
                           void (*begins)(void *self, int64_t i)) {
    TR_TRY(tr_job_create(s->config, comm, TR_JOB_TRAINS, &s->job));
    TR_TRY(open_samples(v, s, full));
    TR_TRY(tr_job_open_pipeline(s->job));
    TR_TRY(tr_job_reserve_steps(s->job));
    TR_TRY(tr_job_init_weights(s->job));
    s->step = tr_step_create(s->job);
    tr_step_watch(s->step, begins, v);
    s->gather = tr_gather_create(comm, tr_model_registry(s->job->model));
    if (tr_model_moe_layers(&s->config->model) > 0)
        s->routes = tr_routes_create(s->job, tr_step_batches(s->step));
    return TR_OK;
}

/* The same job without any sharding. */
static tr_status one_rank_config(verification *v, bool full) {
    const tr_config *c = v->grid.config;
    char recompute[64], *sets[] = {recompute};
    static const char *const words[] = {"none", "selective", "full"};
    snprintf(recompute, sizeof recompute, "parallel.recompute=%s",
             words[full ? c->parallel.recompute : TR_RECOMPUTE_NONE]);
    return tr_config_alter(c, true, 1, sets, &v->one.config);
}

/* Rank 0. */
static tr_status open_one(verification *v, bool full) {
    TR_TRY(one_rank_config(v, full));
    TR_TRY(open_side(v, &v->one, v->alone, full, on_one));
    tr_job_use_threads(v->grid.job);
    const tr_registry *r = tr_model_registry(v->one.job->model);
    tr_say("one rank   %.1f MiB more on rank 0 for the whole model",
           (double)tr_registry_bytes(r) / 1048576.0);
    int64_t longest = 0;
    for (int64_t i = 0; i < r->count; i++)
        if (r->params[i].elems > longest) longest = r->params[i].elems;
    v->a = tr_heap_alloc(longest, sizeof *v->a);
    v->b = tr_heap_alloc(longest, sizeof *v->b);
    v->c.count = r->count;
    v->c.rows = tr_heap_alloc(r->count, sizeof *v->c.rows);
    for (int64_t i = 0; i < r->count; i++) v->c.rows[i].name = r->params[i].decl.name;
    return TR_OK;
}

static tr_status open(verification *v, const tr_config *config, bool full) {
    tr_job *plan = NULL; /* refuses what does not fit the ranks */
    TR_TRY(tr_job_create(config, v->world, TR_JOB_PLANS, &plan));
    tr_job_destroy(plan);
    tr_status status = full ? tr_config_alter(config, false, 0, NULL, &v->grid.config)
                            : tr_twin_create(config, tr_comm_size(v->world), &v->grid.config);
    TR_TRY(tr_agree(v->world, status));
    tr_say(full ? "verify     %s" : "verify     a twin of %s (--full takes the config itself)",
           config->source);
    TR_TRY(open_side(v, &v->grid, v->world, full, on_grid));
    tr_job_print_plan(v->grid.job);
    v->alone = tr_comm_split(v->world, tr_comm_rank(v->world), 0);
    status = v->root ? open_one(v, full) : TR_OK;
    tr_end_asleep(tr_barrier_begin(v->world));
    return tr_agree(v->world, status);
}

static void close_side(side *s) {
    tr_routes_destroy(s->routes);
    tr_gather_destroy(s->gather);
    tr_step_destroy(s->step);
    tr_job_destroy(s->job);
    tr_config_destroy(s->config);
}

static void close(verification *v) {
    for (int s = 0; s < TR_VERIFIED_STEPS; s++) tr_flips_free(&v->c.step[s].flips);
    free(v->c.rows);
    free(v->a);
    free(v->b);
    close_side(&v->one);
    close_side(&v->grid);
    tr_comm_free(v->alone);
}

/* --- parameters --------------------------------------------------------------------------------
 */

/* Rank 0. What is found outside the table's numbers: the first is kept. */
static void note_fault(verification *v) {
    if (!v->c.fault[0]) snprintf(v->c.fault, sizeof v->c.fault, "%s", tr_error_message());
}

/* Collective on world. On rank 0 the difference of parameter i, whose values on the grid then
 * replace one rank's. */
static double compare(verification *v, int64_t i, tr_gather_kind kind, double least) {
    tr_status status = tr_gather_parameter(v->grid.gather, i, kind, v->a);
    if (!v->root) return 0;
    if (status == TR_OK) status = tr_gather_parameter(v->one.gather, i, kind, v->b);
    if (status != TR_OK) note_fault(v);
    int64_t n = tr_model_registry(v->one.job->model)->params[i].elems;
    double difference = tr_verify_relative(v->a, v->b, n, least);
    tr_gather_put(v->one.gather, i, kind, v->a);
    return status == TR_OK ? difference : INFINITY;
}

static void compare_gradients(verification *v, int step) {
    const tr_registry *r = tr_model_registry(v->grid.job->model);
    double norm = v->c.step[step].one[TR_VERIFY_NORM], total = (double)tr_registry_total(r);
    v->doing = "comparing gradients";
    for (int64_t i = 0; i < r->count; i++) {
        double share = norm * sqrt((double)r->params[i].elems / total);
        double d = compare(v, i, TR_GATHER_GRADIENT, v->c.step[step].limits.share * share);
        if (v->root) v->c.rows[i].gradient[step] = d;
        progress(v, i, r->count);
    }
}

static void compare_weights(verification *v, int step) {
    const tr_registry *r = tr_model_registry(v->grid.job->model);
    v->doing = "comparing weights";
    for (int64_t i = 0; i < r->count; i++) {
        double d = compare(v, i, TR_GATHER_WEIGHT, 0);
        if (v->root) v->c.rows[i].weight[step] = d;
        progress(v, i, r->count);
    }
    if (v->root) tr_registry_publish(tr_model_registry(v->one.job->model));
}

/* Bit for bit: how a weight begins depends on the seed and its name alone. */
static void compare_initial(verification *v) {
    const tr_registry *r = tr_model_registry(v->grid.job->model);
    v->doing = "comparing initial weights";
    for (int64_t i = 0; i < r->count; i++) {
        double d = compare(v, i, TR_GATHER_WEIGHT, 0);
        if (d > 0) {
            tr_fail(TR_ERR_INTERNAL, "the initial %s is off by %.1e", r->params[i].decl.name, d);
            note_fault(v);
        }
        progress(v, i, r->count);
    }
}

/* --- a step ------------------------------------------------------------------------------------
 */

/* Rank 0 works, the others sleep. */
static tr_status step_one(verification *v, tr_step_result *result_p) {
    tr_status status = TR_OK;
    if (v->root) {
        v->doing = "micro-batches on one rank";
        tr_job_use_threads(v->one.job);
        status = tr_step_gradients(v->one.step, result_p);
        tr_job_use_threads(v->grid.job);
    }
    tr_end_asleep(tr_barrier_begin(v->world));
    return tr_agree(v->world, status);
}

static void record(verification *v, int step, const tr_step_result *grid,
                   const tr_step_result *one) {
    const tr_config *c = v->grid.config;
    tr_verify_step *s = &v->c.step[step];
    const tr_step_result *from[2] = {grid, one};
    for (int i = 0; i < 2; i++) {
        double *to = i == 0 ? s->grid : s->one;
        to[TR_VERIFY_LOSS] = from[i]->loss;
        to[TR_VERIFY_AUX] = from[i]->aux_loss;
        to[TR_VERIFY_Z] = from[i]->z_loss;
        to[TR_VERIFY_NORM] = from[i]->grad_norm;
    }
    tr_dtype coarsest = c->parallel.expert > 1 ? tr_config_wire(c) : c->run.dtype;
    s->limits = tr_verify_limits_of(coarsest, s->flips.count,
                                    c->training.global_batch_size * c->data.sequence_length);
}

/* Collective on world. Whether tokens were routed differently by near ties alone. */
static bool found_near_ties(verification *v, int step) {
    const tr_flips *flips = &v->c.step[step].flips;
    int64_t found = v->root && flips->count > 0 && flips->gap <= v->c.step[step].limits.gap;
    if (found)
        tr_say("step %d     again with other samples: a near tie (score gap %.1e) routed %lld "
               "token%s differently",
               step + 1, flips->gap, (long long)flips->count, flips->count == 1 ? "" : "s");
    tr_end(tr_broadcast_begin(v->world, NULL, 0, &found, sizeof found));
    return found;
}

static void skip_samples(side *s) {
    s->job->at.samples += s->config->training.global_batch_size;
}

/* Collective on world. Gradients of both sides. Where a token lies so near a tie that the sides
 * route it differently, other samples are tried, for they make a sharper proof (in bfloat16 such
 * tokens are many). */
static tr_status gradients(verification *v, int step, tr_step_result *grid, tr_step_result *one) {
    tr_flips *flips = &v->c.step[step].flips;
    for (int attempt = 1;; attempt++) {
        if (v->grid.routes) tr_routes_clear(v->grid.routes);
        if (v->one.routes) tr_routes_clear(v->one.routes);
        v->doing = "micro-batches on the grid";
        TR_TRY(tr_step_gradients(v->grid.step, grid));
        TR_TRY(step_one(v, one));
        if (v->grid.routes) tr_flips_find(v->grid.routes, v->one.routes, flips);
        if (v->root) record(v, step, grid, one);
        bool last = attempt == BATCHES_TRIED || v->grid.config->run.dtype != TR_F32;
        if (last || !found_near_ties(v, step)) return TR_OK;
        tr_flips_free(flips);
        skip_samples(&v->grid);
        if (v->root) skip_samples(&v->one);
    }
}

/* For tests: see TRIREME_VERIFY_BREAK in verify.h. "": nothing is to be broken. */
static const char *to_break(void) {
    const char *name = getenv("TRIREME_VERIFY_BREAK");
    return name ? name : "";
}

static double broken_rate(const verification *v, double rate) {
    bool last = tr_comm_rank(v->world) == tr_comm_size(v->world) - 1;
    return last && !strcmp(to_break(), "update") ? 1.01 * rate : rate;
}

/* Collective on world. */
static tr_status break_gradient(verification *v) {
    const char *name = to_break();
    if (!*name || !strcmp(name, "update")) return TR_OK;
    tr_registry *r = tr_model_registry(v->grid.job->model);
    int64_t i = 0, count = 0, rank = tr_comm_rank(v->world);
    while (i < r->count && strcmp(r->params[i].decl.name, name) != 0) i++;
    if (i == r->count)
        return tr_fail(TR_ERR_USAGE,
                       "TRIREME_VERIFY_BREAK is %s, which is neither update nor a parameter of "
                       "this model (--all lists them)",
                       name);
    float *gradient = tr_gather_first(v->grid.gather, i, &count);
    int64_t lowest = gradient ? rank : INT64_MAX;
    tr_end(tr_all_reduce_begin(v->world, NULL, TR_MIN, TR_I64, &lowest, 1));
    if (lowest == rank)
        r->device->kernels->add(r->device->stream, TR_F32, gradient, TR_F32, gradient, count);
    return TR_OK;
}

/* Collective on world. */
static tr_status run_step(verification *v, int step) {
    tr_step_result grid = {0}, one = {0};
    v->step = step;
    double rate = tr_learning_rate(v->grid.config, step + 1);
    TR_TRY(gradients(v, step, &grid, &one));
    TR_TRY(break_gradient(v));
    compare_gradients(v, step);
    tr_step_update(v->grid.step, &grid, broken_rate(v, rate));
    if (v->root) tr_step_update(v->one.step, &grid, rate);
    compare_weights(v, step);
    return TR_OK;
}

static tr_status run(verification *v, const tr_verify_options *options) {
    compare_initial(v);
    for (int step = 0; step < TR_VERIFIED_STEPS; step++) TR_TRY(run_step(v, step));
    tr_status status = TR_OK;
    if (v->root) {
        tr_comparison_print(&v->c, options->all ? v->c.count : WORST);
        status = tr_comparison_judge(&v->c);
    }
    TR_TRY(tr_agree(v->world, status));
    tr_say("verified   this grid computes what one rank computes");
    return TR_OK;
}

tr_status tr_verify(const tr_config *config, tr_comm *world, const tr_verify_options *options) {
    verification v = {.world = world, .root = tr_comm_rank(world) == 0, .last_line = now()};
    tr_status status = open(&v, config, options->full);
    if (status == TR_OK) status = run(&v, options);
    close(&v);
    return status;
}
