/* routing.c - writes routing decisions as they are made. Floor: train. */
#include "train/routing.h"

#include "base/heap.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tr_routing_log {
    tr_job *job;
    const tr_batches *batches;
    FILE *file;
};

static void watch(void *self, int64_t layer, const int32_t *index, const float *gap) {
    tr_routing_log *log = self;
    int64_t k = log->job->config->model.num_experts_per_tok;
    int64_t N = tr_batches_rows(log->batches);
    FILE *f = log->file;
    fprintf(f, "{\"step\": %" PRId64 ", \"layer\": %" PRId64 ", \"token\": [",
            log->job->at.step + 1, layer);
    for (int64_t n = 0; n < N; n++)
        fprintf(f, "%s%" PRId64, n ? "," : "", tr_batches_token(log->batches, n));
    fprintf(f, "], \"expert\": [");
    for (int64_t i = 0; i < N * k; i++) fprintf(f, "%s%d", i ? "," : "", (int)index[i]);
    fprintf(f, "], \"gap\": [");
    for (int64_t n = 0; n < N; n++) fprintf(f, "%s%.3g", n ? "," : "", (double)gap[n]);
    fprintf(f, "]}\n");
}

tr_status tr_routing_log_open(tr_job *job, const tr_batches *batches, tr_routing_log **log_p) {
    char directory[4096], path[4200];
    tr_job_run_directory(job->config, directory, sizeof directory);
    snprintf(path, sizeof path, "%s/routing-%d.jsonl", directory, tr_comm_rank(job->world));
    FILE *file = fopen(path, "w");
    if (!file)
        return tr_fail(TR_ERR_IO, "cannot write %s: %s; log.routing=false does without it", path,
                       strerror(errno));
    tr_routing_log *log = tr_heap_alloc(1, sizeof *log);
    *log = (tr_routing_log){job, batches, file};
    tr_model_watch_routing(job->model, watch, log);
    *log_p = log;
    return TR_OK;
}

void tr_routing_log_close(tr_routing_log *log) {
    if (!log) return;
    tr_model_watch_routing(log->job->model, NULL, NULL);
    fclose(log->file);
    free(log);
}
