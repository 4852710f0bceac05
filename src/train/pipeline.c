/* pipeline.c - the executor of action lists. Floor: train. */
#include "train/pipeline.h"

#include "base/heap.h"
#include "dist/watch.h"

#include <stdlib.h>
#include <time.h>

struct tr_pipeline {
    tr_model *model;
    const tr_grid *grid;
    tr_comm *comm; /* the pipeline group */
    const tr_config *config;
    tr_stages stages;
    tr_schedule train;
    tr_pipeline_watcher watch; /* nullable */
    void *watch_self;
    /* state: per slot */
    int64_t slots;
    tr_request **sending_output, **sending_gradient; /* must end before the buffer is written */
    tr_request **receiving;                          /* begun, waiting for its action */
};

static tr_schedule_shape shape_of(const tr_config *config, int64_t m, bool forward_only) {
    return (tr_schedule_shape){.kind = config->parallel.schedule,
                               .stages = tr_stages_of(config),
                               .micro_batches = m,
                               .forward_only = forward_only};
}

/* Those that training's actions name; evaluation's are among them. */
static void expect(const tr_pipeline *p) {
    tr_device *device = tr_stream_device(tr_model_stream(p->model));
    for (int64_t i = 0; i < p->train.count; i++) {
        const tr_action *a = &p->train.actions[i];
        if (!tr_action_computes(a->kind)) tr_comm_expect_messages(p->comm, device, a->peer);
    }
}

tr_status tr_pipeline_create(tr_model *model, const tr_grid *grid, const tr_config *config,
                             int64_t m, int64_t B, int64_t S, tr_pipeline **pipeline_p) {
    tr_schedule_shape shape = shape_of(config, m, false);
    tr_schedule *all = tr_schedules_create(&shape);
    tr_status status = tr_schedules_prove(all, &shape);
    if (status != TR_OK) {
        tr_schedules_free(all, shape.stages.ranks);
        return status;
    }
    tr_pipeline *p = tr_heap_alloc(1, sizeof *p);
    p->train = all[grid->at.p];
    all[grid->at.p] = (tr_schedule){0};
    tr_schedules_free(all, shape.stages.ranks);
    p->model = model;
    p->grid = grid;
    p->comm = grid->comm[TR_GROUP_PIPELINE];
    p->config = config;
    p->stages = shape.stages;
    int64_t evaluation = shape.stages.chunks == 1 ? 2 : tr_stages_count(&shape.stages);
    p->slots = p->train.slots > evaluation ? p->train.slots : evaluation;
    p->sending_output = tr_heap_alloc(3 * p->slots, sizeof(tr_request *));
    p->sending_gradient = p->sending_output + p->slots;
    p->receiving = p->sending_gradient + p->slots;
    tr_model_shape(model, p->slots, B, S);
    expect(p);
    *pipeline_p = p;
    return TR_OK;
}

void tr_pipeline_destroy(tr_pipeline *p) {
    if (!p) return;
    tr_schedule_free(&p->train);
    free(p->sending_output);
    free(p);
}

static void end(tr_request **request) {
    tr_end(*request);
    *request = NULL;
}

/* --- messages -----------------------------------------------------------------------------------
 */

/* Between two chunks of this rank nothing is sent: it is copied. */
static bool local(const tr_pipeline *p, const tr_action *a) {
    return a->peer == p->grid->at.p;
}

/* A boundary is known by the chunk that receives, and the direction. */
static int tag_of(const tr_pipeline *p, const tr_action *a) {
    bool forward = a->kind == TR_RECV_FORWARD || a->kind == TR_SEND_FORWARD;
    int64_t stage = tr_stage_of(&p->stages, p->grid->at.p, a->task.chunk);
    if (!tr_action_receives(a->kind)) stage += forward ? 1 : -1;
    return 1 + 2 * (int)tr_stage_chunk(&p->stages, stage) + !forward;
}

static void receive_begin(tr_pipeline *p, const tr_action *a) {
    int32_t slot = a->task.slot;
    bool forward = a->kind == TR_RECV_FORWARD;
    if (!forward) end(&p->sending_gradient[slot]); /* the same buffer, an earlier micro-batch's */
    void *buffer = forward ? tr_model_input(p->model, slot) : tr_model_gradient(p->model, slot);
    p->receiving[slot] = tr_recv_begin(p->comm, tr_model_stream(p->model), a->peer, tag_of(p, a),
                                       buffer, tr_model_boundary_bytes(p->model));
}

static void receive(tr_pipeline *p, const tr_action *a) {
    int32_t slot = a->task.slot;
    if (local(p, a)) {
        if (a->kind == TR_RECV_FORWARD)
            tr_model_hand_over(p->model, tr_model_output(p->model, a->other.slot),
                               tr_model_input(p->model, slot));
        return; /* a gradient was handed over by its send */
    }
    if (!p->receiving[slot]) receive_begin(p, a);
    end(&p->receiving[slot]);
}

static void send(tr_pipeline *p, const tr_action *a) {
    int32_t slot = a->task.slot, to = a->other.slot;
    bool forward = a->kind == TR_SEND_FORWARD;
    void *buffer = forward ? tr_model_output(p->model, slot) : tr_model_gradient(p->model, slot);
    if (!local(p, a)) {
        tr_request **request = forward ? p->sending_output : p->sending_gradient;
        request[slot] = tr_send_begin(p->comm, tr_model_stream(p->model), a->peer, tag_of(p, a),
                                      buffer, tr_model_boundary_bytes(p->model));
    } else if (!forward) {
        end(&p->sending_gradient[to]);
        tr_model_hand_over(p->model, buffer, tr_model_gradient(p->model, to));
    }
}

static bool uses(const tr_task *task, int32_t slot) {
    return task && task->slot == slot;
}

/* Begins the receives that come after the computation at `i`, up to the next one. What would have
 * to wait, or goes into a slot that this computation still uses, is left for its turn. */
static void look_ahead(tr_pipeline *p, const tr_schedule *s, int64_t i) {
    tr_parts now = tr_action_parts(&s->actions[i]);
    for (int64_t j = i + 1; j < s->count && !tr_action_computes(s->actions[j].kind); j++) {
        const tr_action *a = &s->actions[j];
        int32_t slot = a->task.slot;
        if (!tr_action_receives(a->kind) || local(p, a) || p->receiving[slot]) continue;
        if (uses(now.forward, slot) || uses(now.input, slot) || uses(now.weight, slot)) continue;
        if (a->kind == TR_RECV_FORWARD || tr_test(p->sending_gradient[slot])) receive_begin(p, a);
    }
}

/* --- computations -------------------------------------------------------------------------------
 */

typedef struct {
    bool training, backward_seen;
    tr_load_micro_batch load;
    void *self;
} running;

static void before_forward(tr_pipeline *p, const running *now, const tr_task *task) {
    tr_micro_batch batch;
    now->load(now->self, task->micro_batch, &batch);
    tr_model_load(p->model, task->slot, &batch);
    end(&p->sending_output[task->slot]);
}

static void before_backward(tr_pipeline *p, running *now, const tr_task *task) {
    if (!now->backward_seen) tr_model_all_forwards_done(p->model);
    now->backward_seen = true;
    end(&p->sending_gradient[task->slot]);
}

static void compute(tr_pipeline *p, running *now, const tr_action *a) {
    tr_model *model = p->model;
    const tr_task *task = &a->task;
    tr_parts parts = tr_action_parts(a);
    if (parts.forward) before_forward(p, now, parts.forward);
    if (parts.input) before_backward(p, now, parts.input);
    switch (a->kind) {
    case TR_FORWARD:
        tr_model_forward(model, task->chunk, task->slot, now->training);
        break;
    case TR_WEIGHT:
        tr_model_weights(model, task->slot);
        break;
    case TR_FORWARD_BACKWARD:
        tr_model_forward_backward(model, task->chunk, task->slot, a->other.slot);
        break;
    default:
        tr_model_backward(model, task->slot, a->kind == TR_BACKWARD_INPUT);
    }
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void run(tr_pipeline *p, const tr_schedule *s, running now) {
    for (int64_t i = 0; i < s->count; i++) {
        const tr_action *a = &s->actions[i];
        tr_watch_action(tr_action_name(a->kind), a->task.micro_batch);
        double begin = p->watch ? seconds() : 0;
        if (tr_action_computes(a->kind)) {
            look_ahead(p, s, i);
            compute(p, &now, a);
        } else if (tr_action_receives(a->kind)) {
            receive(p, a);
        } else {
            send(p, a);
        }
        if (p->watch) p->watch(p->watch_self, a, begin, seconds());
    }
    for (int64_t i = 0; i < p->slots; i++) {
        end(&p->sending_output[i]);
        end(&p->sending_gradient[i]);
    }
}

void tr_pipeline_watch(tr_pipeline *p, tr_pipeline_watcher watch, void *self) {
    p->watch = watch;
    p->watch_self = self;
}

void tr_pipeline_train(tr_pipeline *p, tr_load_micro_batch load, void *self) {
    run(p, &p->train, (running){.training = true, .load = load, .self = self});
}

void tr_pipeline_evaluate(tr_pipeline *p, int64_t m, tr_load_micro_batch load, void *self) {
    tr_schedule_shape shape = shape_of(p->config, m, true);
    tr_schedule s = tr_schedule_create(&shape, p->grid->at.p);
    run(p, &s, (running){.training = false, .load = load, .self = self});
    tr_schedule_free(&s);
}
