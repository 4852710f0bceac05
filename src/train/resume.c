/* resume.c - chooses and loads the state a run starts from. Floor: train. */
#include "train/resume.h"

#include "base/log.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Rank 0 renames `path` to path.old-N, the first N that is free. */
static tr_status set_aside(const char *path) {
    struct stat s;
    if (stat(path, &s) != 0) return TR_OK;
    char to[4200];
    for (int n = 1; n < 10000; n++) {
        snprintf(to, sizeof to, "%s.old-%d", path, n);
        if (stat(to, &s) == 0) continue;
        if (rename(path, to) != 0)
            return tr_fail(TR_ERR_IO, "cannot move %s to %s: %s", path, to, strerror(errno));
        tr_say("moved %s to %s", path, to);
        return TR_OK;
    }
    return tr_fail(TR_ERR_IO, "%s.old-1 to .old-9999 all exist; remove some", path);
}

static tr_status start_afresh(tr_job *job) {
    char run[4096], checkpoints[4096];
    tr_job_run_directory(job->config, run, sizeof run);
    tr_job_checkpoint_directory(job->config, checkpoints, sizeof checkpoints);
    tr_status status = TR_OK;
    if (tr_comm_rank(job->world) == 0) {
        status = set_aside(run);
        if (status == TR_OK) status = set_aside(checkpoints);
    }
    TR_TRY(tr_agree(job->world, status));
    return tr_job_init_weights(job);
}

/* The stored config must describe the same model and data; other differences are worth a line. */
static tr_status compare(const tr_job *job, const tr_progress_state *state, const char *path) {
    tr_config *stored = NULL;
    tr_status status = tr_config_parse(state->config, path, 0, NULL, &stored);
    if (status != TR_OK) return tr_context(TR_ERR_DATA, "stored config");
    char *difference = tr_config_difference(job->config, stored);
    if (difference)
        status = tr_fail(TR_ERR_USAGE,
                         "%s was made by another model or data: %s; use --resume never to start "
                         "afresh, another run.name, or model.init_from to take the weights alone",
                         path, difference);
    else if (state->data_fingerprint != job->at.data_fingerprint)
        status = tr_fail(TR_ERR_USAGE,
                         "%s was made with other contents of the data.train files; use --resume "
                         "never to start afresh, or model.init_from to take the weights alone",
                         path);
    else {
        char *now = tr_config_print(job->config);
        if (strcmp(now, state->config) != 0)
            tr_say("some settings differ from those of %s (its /config holds them)", path);
        free(now);
    }
    free(difference);
    tr_config_destroy(stored);
    return status;
}

static tr_status load(tr_job *job, const char *path) {
    tr_progress_state state = {0};
    TR_TRY(tr_checkpoint_state(job->world, path, &state));
    tr_status status = tr_agree(job->world, compare(job, &state, path));
    free(state.config);
    TR_TRY(status);
    return tr_job_load(job, path, true);
}

static tr_status load_newest(tr_job *job) {
    char directory[4096], path[4200];
    int64_t *steps = NULL, count = 0;
    tr_job_checkpoint_directory(job->config, directory, sizeof directory);
    TR_TRY(tr_checkpoint_list(job->world, directory, &steps, &count));
    tr_status status = TR_OK;
    bool found = false;
    for (int64_t i = 0; i < count && !found; i++) {
        tr_checkpoint_path(path, sizeof path, directory, steps[i]);
        status = load(job, path);
        found = status == TR_OK;
        if (status != TR_OK && status != TR_ERR_DATA) break;
        if (status == TR_ERR_DATA) tr_warn("passed over: %s", tr_error_message());
    }
    free(steps);
    if (found) {
        tr_say("resumed from %s", path);
        return TR_OK;
    }
    if (status != TR_OK && status != TR_ERR_DATA) return status;
    if (count > 0)
        return tr_fail(TR_ERR_DATA,
                       "no checkpoint in %s can be read; use --resume never to start afresh",
                       directory);
    return tr_job_init_weights(job);
}

tr_status tr_resume_start(tr_job *job) {
    switch (job->config->checkpoint.resume) {
    case TR_RESUME_NEVER:
        return start_afresh(job);
    case TR_RESUME_AUTO:
        return load_newest(job);
    case TR_RESUME_PATH:
        TR_TRY(load(job, job->config->checkpoint.resume_path));
        tr_say("resumed from %s", job->config->checkpoint.resume_path);
        return TR_OK;
    }
    return TR_OK;
}
