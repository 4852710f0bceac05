/* metrics.c - one step's record as a JSON row, a row of sample numbers and TensorBoard scalars.
 * Floor: observe. */
#include "observe/metrics.h"

#include "base/file.h"
#include "base/heap.h"
#include "observe/events.h"
#include "observe/rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct tr_metrics {
    tr_rows *steps;
    tr_rows *samples;  /* NULL: not asked for */
    tr_events *events; /* NULL: not asked for */
};

static tr_status open_rows(const char *folder, const char *name, int64_t last_step,
                           tr_rows **rows_p) {
    char *path = tr_heap_format("%s/%s", folder, name);
    tr_status status = tr_rows_open(path, last_step, rows_p);
    free(path);
    return status;
}

tr_status tr_metrics_open(const char *run_directory, int64_t last_step, bool samples,
                          bool tensorboard, tr_metrics **metrics_p) {
    TR_TRY(tr_file_make_folder(run_directory, "run.directory"));
    tr_metrics *metrics = tr_heap_alloc(1, sizeof *metrics);
    tr_status status = open_rows(run_directory, "metrics.jsonl", last_step, &metrics->steps);
    if (status == TR_OK && samples)
        status = open_rows(run_directory, "samples.jsonl", last_step, &metrics->samples);
    if (status == TR_OK && tensorboard)
        status = tr_events_open(run_directory, last_step + 1, &metrics->events);
    if (status != TR_OK) {
        tr_rows_close(metrics->samples);
        tr_rows_close(metrics->steps);
        free(metrics);
        return status;
    }
    *metrics_p = metrics;
    return TR_OK;
}

static void put_number(FILE *to, const char *key, double value) {
    char text[32] = "null";
    for (int digits = 15; isfinite(value) && digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    fprintf(to, ",\"%s\":%s", key, text);
}

static void put_count(FILE *to, const char *key, int64_t value) {
    fprintf(to, ",\"%s\":%lld", key, (long long)value);
}

static void put_list(FILE *to, const int64_t *values, int64_t n) {
    fputc('[', to);
    for (int64_t i = 0; i < n; i++) fprintf(to, i ? ",%lld" : "%lld", (long long)values[i]);
    fputc(']', to);
}

static tr_status write_row(tr_rows *rows, const tr_step_record *r) {
    FILE *to = tr_rows_begin(rows, r->step);
    put_number(to, "loss", r->loss);
    put_number(to, "aux_loss", r->aux_loss);
    put_number(to, "z_loss", r->z_loss);
    put_number(to, "grad_norm", r->grad_norm);
    put_number(to, "learning_rate", r->learning_rate);
    put_count(to, "tokens", r->tokens);
    put_count(to, "samples", r->samples);
    put_count(to, "skipped", r->skipped);
    fputs(",\"expert_load\":[", to);
    for (int64_t layer = 0; layer < r->moe_layers; layer++) {
        if (layer > 0) fputc(',', to);
        put_list(to, r->expert_load + layer * r->experts, r->experts);
    }
    fputc(']', to);
    put_number(to, "seconds", r->seconds);
    put_number(to, "tokens_per_second", r->tokens_per_second);
    put_number(to, "mfu", r->mfu);
    if (r->evaluated) {
        put_number(to, "validation_loss", r->validation_loss);
        put_number(to, "validation_bits_per_byte", r->validation_bits_per_byte);
    }
    return tr_rows_end(rows);
}

static tr_status write_samples(tr_rows *rows, const tr_step_record *r) {
    FILE *to = tr_rows_begin(rows, r->step);
    fputs(",\"samples\":", to);
    put_list(to, r->sample_ids, r->n_samples);
    return tr_rows_end(rows);
}

/* The busiest expert's tokens over the mean, in the worst layer: 1 is perfect balance. */
static double load_imbalance(const tr_step_record *r) {
    double worst = 1;
    for (int64_t layer = 0; layer < r->moe_layers; layer++) {
        const int64_t *load = r->expert_load + layer * r->experts;
        double most = 0, sum = 0;
        for (int64_t e = 0; e < r->experts; e++) {
            most = fmax(most, (double)load[e]);
            sum += (double)load[e];
        }
        if (sum > 0) worst = fmax(worst, most * (double)r->experts / sum);
    }
    return worst;
}

static tr_status write_events(tr_events *events, const tr_step_record *r) {
    tr_scalar scalars[16];
    int64_t n = 0;
    scalars[n++] = (tr_scalar){"loss", r->loss};
    scalars[n++] = (tr_scalar){"grad_norm", r->grad_norm};
    scalars[n++] = (tr_scalar){"learning_rate", r->learning_rate};
    scalars[n++] = (tr_scalar){"tokens_per_second", r->tokens_per_second};
    if (isfinite(r->mfu)) scalars[n++] = (tr_scalar){"mfu", r->mfu};
    if (r->moe_layers > 0) {
        scalars[n++] = (tr_scalar){"aux_loss", r->aux_loss};
        scalars[n++] = (tr_scalar){"z_loss", r->z_loss};
        scalars[n++] = (tr_scalar){"expert_load_max_over_mean", load_imbalance(r)};
    }
    if (r->evaluated) {
        scalars[n++] = (tr_scalar){"validation_loss", r->validation_loss};
        scalars[n++] = (tr_scalar){"validation_bits_per_byte", r->validation_bits_per_byte};
    }
    return tr_events_write(events, r->step, n, scalars);
}

tr_status tr_metrics_write(tr_metrics *metrics, const tr_step_record *record) {
    TR_TRY(write_row(metrics->steps, record));
    if (metrics->samples && record->sample_ids) TR_TRY(write_samples(metrics->samples, record));
    if (metrics->events) TR_TRY(write_events(metrics->events, record));
    return TR_OK;
}

tr_status tr_metrics_close(tr_metrics *metrics) {
    if (!metrics) return TR_OK;
    tr_status steps = tr_rows_close(metrics->steps), samples = tr_rows_close(metrics->samples);
    tr_status events = tr_events_close(metrics->events);
    free(metrics);
    TR_TRY(steps);
    TR_TRY(samples);
    return events;
}
