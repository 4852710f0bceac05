/* tracing.c - opens, cuts and sums up the trace of a run. Floor: train. */
#include "train/tracing.h"

#include "base/log.h"
#include "base/trace.h"
#include "model/unit.h"

#include <stdio.h>

static void path_of(const tr_job *job, char *out, size_t bytes) {
    char directory[4096];
    tr_job_run_directory(job->config, directory, sizeof directory);
    snprintf(out, bytes, "%s/trace-%d.json", directory, tr_comm_rank(job->world));
}

tr_status tr_tracing_open(const tr_job *job) {
    char path[4200], place[128];
    path_of(job, path, sizeof path);
    tr_job_place(job, place, sizeof place);
    tr_end(tr_barrier_begin(job->world));
    return tr_agree(job->world, tr_trace_open(path, tr_comm_rank(job->world), place));
}

static void say(const tr_job *job, double sums[5]) {
    char path[4200];
    path_of(job, path, sizeof path);
    tr_say("trace      %s and one of each other rank", path);
    tr_say(
        "           ranks waited %.0f %% of the time; transfers were under way %.0f %% of it, and "
        "%.0f %% of",
        100 * sums[1] / sums[0], 100 * sums[2] / sums[0],
        sums[2] > 0 ? 100 * sums[3] / sums[2] : 0);
    tr_say("           that was hidden under computation");
    if (sums[4] > 0)
        tr_warn("%.0f events found no room in the trace; trace shorter steps", sums[4]);
}

tr_status tr_tracing_close(const tr_job *job) {
    tr_units_settle(tr_model_registry(job->model)); /* whose end the picture would lack */
    tr_trace_sums local = tr_trace_sum();
    double sums[5] = {local.seconds, local.waiting, local.transfers, local.hidden,
                      (double)local.dropped};
    tr_status status = tr_agree(job->world, tr_trace_close());
    tr_end(tr_all_reduce_begin(job->world, NULL, TR_SUM, TR_F64, sums, 5));
    if (status == TR_OK) say(job, sums);
    return status;
}
