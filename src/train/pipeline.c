/* pipeline.c - the executor of action lists. Floor: train. */
#include "train/pipeline.h"

#include "dist/watch.h"

#include <stdlib.h>

enum { TAG_FORWARD = 1, TAG_BACKWARD = 2 };

struct tr_pipeline {
    tr_model *model;
    const tr_grid *grid;
    tr_comm *comm; /* the pipeline group */
    const tr_config *config;
    tr_schedule train;
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

tr_status tr_pipeline_create(tr_model *model, const tr_grid *grid, const tr_config *config,
                             int64_t m, int64_t B, int64_t S, tr_pipeline **pipeline_p) {
    tr_schedule_shape shape = shape_of(config, m, false);
    if (shape.kind > TR_SCHEDULE_GPIPE)
        return tr_fail(TR_ERR_USAGE, "parallel.schedule: this schedule can be drawn (trireme plan "
                                     "CONFIG --schedule) but not run yet; use 1f1b or gpipe");
    tr_schedule *all = tr_schedules_create(&shape);
    tr_status status = tr_schedules_prove(all, &shape);
    if (status != TR_OK) {
        tr_schedules_free(all, shape.stages.ranks);
        return status;
    }
    tr_pipeline *p = calloc(1, sizeof *p);
    if (!p) abort();
    p->train = all[grid->at.p];
    all[grid->at.p] = (tr_schedule){0};
    tr_schedules_free(all, shape.stages.ranks);
    p->model = model;
    p->grid = grid;
    p->comm = grid->comm[TR_GROUP_PIPELINE];
    p->config = config;
    p->slots = p->train.slots > 2 ? p->train.slots : 2; /* evaluation uses two */
    p->sending_output = calloc((size_t)(3 * p->slots), sizeof(tr_request *));
    if (!p->sending_output) abort();
    p->sending_gradient = p->sending_output + p->slots;
    p->receiving = p->sending_gradient + p->slots;
    tr_model_shape(model, p->slots, B, S);
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

static void receive_begin(tr_pipeline *p, const tr_action *a, int64_t slot) {
    int64_t bytes = tr_model_boundary_bytes(p->model);
    if (a->kind == TR_RECV_FORWARD)
        p->receiving[slot] = tr_recv_begin(p->comm, NULL, p->grid->at.p - 1, TAG_FORWARD,
                                           tr_model_input(p->model, slot), bytes);
    else {
        end(&p->sending_gradient[slot]); /* the same buffer, an earlier micro-batch's */
        p->receiving[slot] = tr_recv_begin(p->comm, NULL, p->grid->at.p + 1, TAG_BACKWARD,
                                           tr_model_gradient(p->model, slot), bytes);
    }
}

/* Begins the receives that come after the compute at `i`, up to the next compute. A slot that this
 * compute still uses, or that waits for another receive, is left for its turn. */
static void look_ahead(tr_pipeline *p, const tr_schedule *s, int64_t i) {
    int64_t busy = s->actions[i].task.slot;
    for (int64_t j = i + 1; j < s->count && !tr_action_computes(s->actions[j].kind); j++) {
        int64_t slot = s->actions[j].task.slot;
        if (tr_action_receives(s->actions[j].kind) && slot != busy && !p->receiving[slot])
            receive_begin(p, &s->actions[j], slot);
    }
}

static void run(tr_pipeline *p, const tr_schedule *s, bool training, tr_load_micro_batch load,
                void *self) {
    tr_model *model = p->model;
    int64_t bytes = tr_model_boundary_bytes(model), forwards = 0;
    bool backward_seen = false;
    for (int64_t i = 0; i < s->count; i++) {
        const tr_action *a = &s->actions[i];
        int64_t slot = a->task.slot;
        tr_watch_action(tr_action_name(a->kind), a->task.micro_batch);
        if (tr_action_computes(a->kind)) look_ahead(p, s, i);
        switch (a->kind) {
        case TR_RECV_FORWARD:
        case TR_RECV_BACKWARD:
            if (!p->receiving[slot]) receive_begin(p, a, slot);
            end(&p->receiving[slot]);
            break;
        case TR_FORWARD: {
            tr_micro_batch batch;
            load(self, a->task.micro_batch, &batch);
            tr_model_load(model, slot, &batch);
            end(&p->sending_output[slot]);
            tr_model_forward(model, slot, training);
            forwards++;
            break;
        }
        case TR_SEND_FORWARD:
            p->sending_output[slot] = tr_send_begin(p->comm, NULL, p->grid->at.p + 1, TAG_FORWARD,
                                                    tr_model_output(model, slot), bytes);
            break;
        case TR_BACKWARD:
            if (!backward_seen) tr_model_all_forwards_done(model, forwards);
            backward_seen = true;
            end(&p->sending_gradient[slot]);
            tr_model_backward(model, slot);
            break;
        case TR_SEND_BACKWARD:
            p->sending_gradient[slot] =
                tr_send_begin(p->comm, NULL, p->grid->at.p - 1, TAG_BACKWARD,
                              tr_model_gradient(model, slot), bytes);
            break;
        default:
            tr_abort("unknown action in the schedule");
        }
    }
    for (int64_t i = 0; i < p->slots; i++) {
        end(&p->sending_output[i]);
        end(&p->sending_gradient[i]);
    }
}

void tr_pipeline_train(tr_pipeline *p, tr_load_micro_batch load, void *self) {
    run(p, &p->train, true, load, self);
}

void tr_pipeline_evaluate(tr_pipeline *p, int64_t m, tr_load_micro_batch load, void *self) {
    tr_schedule_shape shape = shape_of(p->config, m, true);
    tr_schedule s = tr_schedule_create(&shape, p->grid->at.p);
    run(p, &s, false, load, self);
    tr_schedule_free(&s);
}
