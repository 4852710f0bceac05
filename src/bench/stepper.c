/* stepper.c - training steps on random tokens. Floor: bench. */
#include "bench/stepper.h"

#include "base/heap.h"
#include "base/rng.h"
#include "model/gradient.h"
#include "train/optimizer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void load(void *self, int64_t i, tr_micro_batch *batch) {
    const tr_stepper *s = self;
    (void)i;
    *batch = (tr_micro_batch){.token = s->token, .label = s->label, .valid = s->valid};
}

void tr_stepper_gradients(void *self) {
    tr_stepper *s = self;
    double squares = 0;
    tr_model_begin_step(s->job->model, s->job->micro_batches * s->job->grid->at.shape.data,
                        1.0f / (float)(s->config->training.global_batch_size * s->T));
    tr_pipeline_train(s->job->pipeline, load, s);
    tr_gradients_reduce(tr_model_registry(s->job->model), s->job->grid, &squares);
    tr_end(tr_all_reduce_begin(s->comm, NULL, TR_SUM, TR_F64, &squares, 1));
    s->norm = sqrt(squares);
}

void tr_stepper_step(void *self) {
    tr_stepper *s = self;
    const tr_config *c = s->config;
    tr_stepper_gradients(s);
    double scale = c->optimizer.clip > 0 ? c->optimizer.clip / (s->norm + 1e-6) : 1;
    tr_optimizer_step o = {1e-4,
                           c->optimizer.beta1,
                           c->optimizer.beta2,
                           c->optimizer.epsilon,
                           c->optimizer.weight_decay,
                           ++s->updates};
    tr_optimizer_update(tr_model_registry(s->job->model), &o, scale < 1 ? scale : 1);
    s->job->device->stream_wait(s->job->device->stream);
}

tr_status tr_stepper_open(tr_stepper *s, tr_lab *lab, tr_comm *comm, tr_dtype t, int64_t batch,
                          const char *const *sets) {
    *s = (tr_stepper){.lab = lab, .comm = comm};
    TR_TRY(tr_lab_job(lab, comm, t, batch, sets, &s->config, &s->job));
    TR_TRY(tr_job_init_weights(s->job));
    int64_t most = s->config->training.micro_batch_size * lab->T;
    s->token = tr_heap_alloc(most, sizeof *s->token);
    s->label = tr_heap_alloc(most, sizeof *s->label);
    s->valid = tr_heap_alloc(most, 1);
    memset(s->valid, 1, (size_t)most);
    uint64_t V = (uint64_t)s->config->model.vocab_size, d = (uint64_t)s->job->grid->at.d;
    for (int64_t i = 0; i < most; i++) {
        s->token[i] = (int32_t)(tr_random_u64(2, d, (uint64_t)i) % V);
        s->label[i] = (int32_t)(tr_random_u64(3, d, (uint64_t)i) % V);
    }
    return TR_OK;
}

void tr_stepper_close(tr_stepper *s) {
    tr_job_destroy(s->job);
    tr_config_destroy(s->config);
    free(s->token);
    free(s->label);
    free(s->valid);
}

tr_status tr_stepper_shape(tr_stepper *s, int64_t T) {
    const tr_config *c = s->config;
    s->T = T;
    tr_pipeline_destroy(s->job->pipeline);
    s->job->pipeline = NULL;
    return tr_pipeline_create(s->job->model, s->job->grid, c, s->job->micro_batches,
                              c->training.micro_batch_size, T, &s->job->pipeline);
}
