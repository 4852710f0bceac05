/* routing.c - writes routing decisions as they are made. Floor: train. */
#include "train/routing.h"

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

static float best_of(const float *prob, int64_t first, int64_t count) {
    float best = prob[first];
    for (int64_t e = first; e < first + count; e++)
        if (prob[e] > best) best = prob[e];
    return best;
}

/* Whether group g is one of those that are chosen from. */
static bool is_kept(const tr_model_config *m, const float *prob, int64_t g) {
    int64_t size = m->num_experts / m->n_group, before = 0;
    float best = best_of(prob, g * size, size);
    for (int64_t other = 0; other < m->n_group; other++) {
        float there = best_of(prob, other * size, size);
        before += there > best || (there == best && other < g);
    }
    return before < m->topk_group;
}

/* Of what is chosen, the least; of what is left, the most. */
typedef struct {
    double in, out;
} margin;

static void add(margin *m, bool chosen, double prob) {
    if (chosen && prob < m->in) m->in = prob;
    if (!chosen && prob > m->out) m->out = prob;
}

static double gap_of(const margin *m) {
    return m->out < 0 ? 1 : m->in - m->out;
}

double tr_routing_gap(const tr_model_config *m, const float *prob, const int32_t *index) {
    int64_t size = m->num_experts / m->n_group, k = m->num_experts_per_tok;
    margin experts = {1, -1}, groups = {1, -1};
    for (int64_t g = 0; g < m->n_group; g++) {
        bool kept = is_kept(m, prob, g);
        add(&groups, kept, (double)best_of(prob, g * size, size));
        for (int64_t e = g * size; e < (g + 1) * size && kept; e++) {
            bool chosen = false;
            for (int64_t j = 0; j < k; j++) chosen = chosen || index[j] == e;
            add(&experts, chosen, (double)prob[e]);
        }
    }
    double a = gap_of(&experts), b = gap_of(&groups);
    return a < b ? a : b;
}

static void watch(void *self, int64_t layer, const int32_t *index, const float *prob) {
    tr_routing_log *log = self;
    const tr_config *c = log->job->config;
    int64_t E = c->model.num_experts, k = c->model.num_experts_per_tok;
    int64_t N = tr_batches_rows(log->batches);
    FILE *f = log->file;
    fprintf(f, "{\"step\": %" PRId64 ", \"layer\": %" PRId64 ", \"token\": [",
            log->job->at.step + 1, layer);
    for (int64_t n = 0; n < N; n++)
        fprintf(f, "%s%" PRId64, n ? "," : "", tr_batches_token(log->batches, n));
    fprintf(f, "], \"expert\": [");
    for (int64_t i = 0; i < N * k; i++) fprintf(f, "%s%d", i ? "," : "", (int)index[i]);
    fprintf(f, "], \"gap\": [");
    for (int64_t n = 0; n < N; n++)
        fprintf(f, "%s%.3g", n ? "," : "", tr_routing_gap(&c->model, prob + n * E, index + n * k));
    fprintf(f, "]}\n");
}

tr_status tr_routing_log_open(tr_job *job, const tr_batches *batches, tr_routing_log **log_p) {
    char directory[4096], path[4200];
    tr_job_run_directory(job->config, directory, sizeof directory);
    snprintf(path, sizeof path, "%s/routing-%d.jsonl", directory, tr_comm_rank(job->world));
    FILE *file = fopen(path, "w");
    if (!file) return tr_fail(TR_ERR_IO, "cannot write %s: %s", path, strerror(errno));
    tr_routing_log *log = malloc(sizeof *log);
    if (!log) abort();
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
