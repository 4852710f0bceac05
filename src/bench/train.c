/* train.c - whole training steps on random tokens: speed, memory, and what a second rank gains,
 * data parallel or tensor parallel. Floor: bench. */
#include "bench/groups.h"
#include "bench/stepper.h"

#include <math.h>
#include <string.h>

/* Collective on s->comm. *flops_p: operations a second of its ranks together, at length T. */
static tr_status speed(tr_stepper *s, int64_t T, double *gflops_p) {
    const tr_config *c = s->config;
    TR_TRY(tr_stepper_shape(s, T));
    double seconds =
        tr_lab_time(s->lab, s->comm, 0.5 * (double)s->lab->repeats, tr_stepper_step, s);
    if (!isfinite(s->norm))
        return tr_fail(TR_ERR_INTERNAL, "a training step's gradient is not finite");
    *gflops_p = 1e-9 * tr_model_flops_per_token(s->job->model, T) *
                (double)(c->training.global_batch_size * T) / seconds;
    return TR_OK;
}

static int64_t shorter(const tr_lab *lab) {
    return lab->T / 16 > 0 ? lab->T / 16 : 1;
}

static tr_status speed_row(tr_stepper *s, tr_dtype t, int64_t T, double target, double *gflops_p) {
    tr_lab *lab = s->lab;
    double peak = tr_lab_peak(lab, t);
    tr_row_begin(&lab->table, "training step %s, B %lld, T %lld", tr_lab_dtype(t),
                 (long long)lab->B, (long long)T);
    TR_TRY(speed(s, T, gflops_p));
    tr_row_end(&lab->table, &(tr_row){.unit = "GFLOP/s",
                                      .measured = *gflops_p,
                                      .base = peak,
                                      .kind = lab->device->emulated ? TR_ALONE : TR_SHARE,
                                      .target = lab->device->host_memory ? target : 0});
    return TR_OK;
}

/* The most that was resident during the steps just measured; pages that ranks map together count
 * once. */
static void memory_row(tr_lab *lab, tr_dtype t) {
    tr_row_begin(&lab->table, "memory of the step %s", tr_lab_dtype(t));
    if (!lab->device->host_memory) {
        tr_row_skip(&lab->table, "the device's memory is not measured");
        return;
    }
    double gb = 1e-9 * tr_lab_sum(lab, tr_resident_peak() - tr_resident_duplicate());
    tr_row_end(&lab->table, &(tr_row){.unit = "GB",
                                      .measured = gb,
                                      .kind = TR_ALONE,
                                      .target = t == TR_F32 ? 6 : 0,
                                      .at_most = true});
}

/* Weights, gradients and moments were found to be too large, by all ranks. */
static bool too_large(tr_lab *lab, tr_dtype t, tr_status status) {
    if (status == TR_OK || strncmp(tr_error_message(), "out of memory", 13) != 0) return false;
    tr_row_begin(&lab->table, "training step %s, B %lld", tr_lab_dtype(t), (long long)lab->B);
    tr_row_skip(&lab->table, "out of memory for weights, gradients and moments");
    return true;
}

/* Both lengths of one type. *gflops_p: of the long one. */
static tr_status type_rows(tr_lab *lab, tr_dtype t, double *gflops_p) {
    tr_stepper s;
    double few = 0;
    tr_resident_restart();
    tr_status status = tr_stepper_open(&s, lab, lab->world, t, lab->B, NULL);
    if (too_large(lab, t, status)) {
        tr_stepper_close(&s);
        return TR_OK;
    }
    if (status == TR_OK) status = speed_row(&s, t, lab->T, t == TR_F32 ? 0.75 : 0.65, gflops_p);
    if (status == TR_OK) {
        memory_row(lab, t);
        status = speed_row(&s, t, shorter(lab), t == TR_F32 ? 0.65 : 0.48, &few);
    }
    tr_stepper_close(&s);
    return status;
}

/* --- one rank by itself ----------------------------------------------------------------------- */

typedef struct {
    tr_lab *lab;
    int64_t batch;
    const char *const *sets;
    double gflops;
    tr_status status;
} single;

static void one_rank(void *self) {
    single *a = self;
    tr_stepper s;
    a->status = tr_stepper_open(&s, a->lab, a->lab->alone, TR_F32, a->batch, a->sets);
    if (a->status == TR_OK) a->status = speed(&s, a->lab->T, &a->gflops);
    tr_stepper_close(&s);
}

/* Both ranks' speed against what one reaches with `batch` sequences while the other sleeps. */
static tr_status against_one(tr_lab *lab, double both, int64_t batch, const char *const *sets,
                             double target) {
    single a = {.lab = lab, .batch = batch, .sets = sets};
    tr_lab_rank_0(lab, one_rank, &a);
    TR_TRY(tr_agree(lab->world, a.status));
    if (tr_comm_rank(lab->world) == 0)
        tr_row_end(&lab->table, &(tr_row){.unit = "GFLOP/s",
                                          .measured = both,
                                          .base = a.gflops,
                                          .kind = TR_TIMES,
                                          .target = target});
    return TR_OK;
}

static bool two_ranks(tr_lab *lab) {
    if (lab->ranks != 2) tr_row_skip(&lab->table, "needs 2 ranks (mpirun -n 2)");
    return lab->ranks == 2;
}

static tr_status data_row(tr_lab *lab, double both) {
    tr_row_begin(&lab->table, "data parallel fp32; base 1 rank");
    return two_ranks(lab) ? against_one(lab, both, lab->B / 2, NULL, 1.9) : TR_OK;
}

/* A step of one sequence that both share, the model 1024 wide. */
static tr_status tensor_row(tr_lab *lab) {
    static const char *const sets[] = {"model.hidden_size=1024",
                                       "model.num_attention_heads=16",
                                       "model.intermediate_size=2736",
                                       "model.num_key_value_heads=16",
                                       "model.num_hidden_layers=4",
                                       "training.micro_batch_size=1",
                                       "parallel.tensor=2",
                                       NULL};
    tr_stepper s;
    double both = 0;
    tr_row_begin(&lab->table, "tensor parallel fp32; base 1 rank");
    if (!two_ranks(lab)) return TR_OK;
    tr_status status = tr_stepper_open(&s, lab, lab->world, TR_F32, 1, sets);
    if (status == TR_OK) status = speed(&s, lab->T, &both);
    tr_stepper_close(&s);
    TR_TRY(status);
    const char *alone[sizeof sets / sizeof *sets] = {NULL};
    memcpy(alone, sets, sizeof sets - 2 * sizeof *sets); /* all but the group */
    return against_one(lab, both, 1, alone, 1.7);
}

tr_status tr_bench_train(tr_lab *lab) {
    double fp32 = 0, bf16 = 0;
    if (lab->config->run.dtype == TR_F32) { /* run.dtype bfloat16: its rows alone */
        TR_TRY(type_rows(lab, TR_F32, &fp32));
        TR_TRY(data_row(lab, fp32));
        TR_TRY(tensor_row(lab));
    }
    return type_rows(lab, TR_BF16, &bf16);
}
