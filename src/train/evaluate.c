/* evaluate.c - forwards over the validation data. Floor: train. */
#include "train/evaluate.h"

#include "dist/watch.h"
#include "train/batch.h"

#include <math.h>

tr_status tr_evaluate(tr_job *job, tr_evaluation *e) {
    const tr_config *c = job->config;
    int64_t B = c->training.micro_batch_size;
    int64_t count = c->training.evaluate_batches * c->training.global_batch_size;
    int64_t there = tr_dataset_samples(job->validation);
    if (count > there) count = there;
    int64_t m = tr_ceil_div(tr_ceil_div(count, B), job->grid->at.shape.data);
    tr_batches *batches = tr_batches_create(job->grid, c, m);
    int64_t labels = 0;
    tr_watch_action("evaluation", -1);
    tr_status status = tr_batches_read(batches, job->validation, 0, count, &labels);
    status = tr_agree(job->world, status);
    if (status == TR_OK) {
        tr_model_begin_step(job->model, m * job->grid->at.shape.data, 0);
        tr_pipeline_evaluate(job->pipeline, m, tr_batches_load, batches);
        tr_model_sums sums;
        tr_model_sums_get(job->model, &sums);
        double total[2] = {sums.loss_sum, (double)labels};
        tr_end(tr_all_reduce_begin(job->world, NULL, TR_SUM, TR_F64, total, 2));
        e->tokens = (int64_t)total[1];
        e->loss = total[1] > 0 ? total[0] / total[1] : 0;
        e->bits_per_byte = e->loss / log(2.0) / c->data.bytes_per_token;
    }
    tr_batches_destroy(batches);
    return status;
}
