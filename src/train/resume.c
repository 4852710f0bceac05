/* resume.c - chooses and loads the state a run starts from. Floor: train. */
#include "train/resume.h"

#include "base/log.h"
#include "dist/watch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* --- setting aside -------------------------------------------------------------------------------
 */

static bool exists(const char *path) {
    struct stat s;
    return stat(path, &s) == 0;
}

static tr_status move(const char *from, const char *to) {
    if (rename(from, to) != 0)
        return tr_fail(TR_ERR_IO, "cannot move %s to %s: %s", from, to, strerror(errno));
    tr_say("moved %s to %s", from, to);
    return TR_OK;
}

/* The folders of a run, of its metrics and of its checkpoints, and where they go. */
typedef struct {
    char run[4096], checkpoints[4096];
    char old_run[4128], old_checkpoints[4128];
} folders;

static void folders_of(const tr_job *job, folders *f) {
    tr_job_run_directory(job->config, f->run, sizeof f->run);
    tr_job_checkpoint_directory(job->config, f->checkpoints, sizeof f->checkpoints);
}

/* Both old names are .old-N with the first N that is free for both. */
static tr_status find_old_names(folders *f) {
    for (int n = 1; n < 10000; n++) {
        snprintf(f->old_run, sizeof f->old_run, "%s.old-%d", f->run, n);
        snprintf(f->old_checkpoints, sizeof f->old_checkpoints, "%s.old-%d", f->checkpoints, n);
        if (!exists(f->old_run) && !exists(f->old_checkpoints)) return TR_OK;
    }
    return tr_fail(TR_ERR_IO, "%s.old-1 to .old-9999 all exist; remove some", f->run);
}

/* Rank 0. What an earlier run of this name left makes room. */
static tr_status set_run_aside(const tr_job *job) {
    folders f;
    folders_of(job, &f);
    TR_TRY(find_old_names(&f));
    if (exists(f.run)) TR_TRY(move(f.run, f.old_run));
    return exists(f.checkpoints) ? move(f.checkpoints, f.old_checkpoints) : TR_OK;
}

/* Weights first: they may come from a file in the folders that move, and where they fail nothing
 * has moved. */
static tr_status start_afresh(tr_job *job) {
    TR_TRY(tr_job_init_weights(job));
    return tr_agree(job->world, tr_comm_rank(job->world) == 0 ? set_run_aside(job) : TR_OK);
}

/* Rank 0. Of steps (newest first), the checkpoints after job->at.step make room. */
static tr_status set_steps_aside(const tr_job *job, const int64_t *steps, int64_t count) {
    folders f;
    char from[4200], to[4200];
    if (count == 0 || steps[0] <= job->at.step) return TR_OK;
    folders_of(job, &f);
    TR_TRY(find_old_names(&f));
    if (mkdir(f.old_checkpoints, 0777) != 0)
        return tr_fail(TR_ERR_IO, "cannot make %s: %s", f.old_checkpoints, strerror(errno));
    for (int64_t i = 0; i < count && steps[i] > job->at.step; i++) {
        tr_checkpoint_path(from, sizeof from, f.checkpoints, steps[i]);
        tr_checkpoint_path(to, sizeof to, f.old_checkpoints, steps[i]);
        TR_TRY(move(from, to));
    }
    return TR_OK;
}

/* A run that goes back to an earlier step leaves the steps after it: `auto` must not go on from
 * them later. */
static tr_status leave_later_steps(tr_job *job) {
    folders f;
    int64_t *steps = NULL, count = 0;
    folders_of(job, &f);
    TR_TRY(tr_checkpoint_list(job->world, f.checkpoints, &steps, &count));
    tr_status status = TR_OK;
    if (tr_comm_rank(job->world) == 0) status = set_steps_aside(job, steps, count);
    free(steps);
    return tr_agree(job->world, status);
}

/* --- loading -------------------------------------------------------------------------------------
 */

/* A line for each setting that differs, of those that a resume may change. */
static void say_changes(const tr_config *stored, const tr_config *now) {
    char *changes = tr_config_changes(stored, now), *rest = NULL;
    for (char *line = strtok_r(changes, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        tr_say("changed    %s", line);
    free(changes);
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
    else
        say_changes(stored, job->config);
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

/* Rank 0. Another job that goes on under this name must not read what this one is about to change.
 */
static tr_status lock_folders(tr_job *job) {
    const tr_config *c = job->config;
    TR_TRY(tr_lock_take(&job->locks, c->run.directory, "run.directory", c->run.name));
    return tr_lock_take(&job->locks, c->checkpoint.directory, "checkpoint.directory", c->run.name);
}

tr_status tr_resume_start(tr_job *job) {
    tr_watch_action("loading of the first state", -1);
    TR_TRY(tr_agree(job->world, tr_comm_rank(job->world) == 0 ? lock_folders(job) : TR_OK));
    switch (job->config->checkpoint.resume) {
    case TR_RESUME_NEVER:
        return start_afresh(job);
    case TR_RESUME_AUTO:
        return load_newest(job);
    case TR_RESUME_PATH:
        TR_TRY(load(job, job->config->checkpoint.resume_path));
        tr_say("resumed from %s", job->config->checkpoint.resume_path);
        return leave_later_steps(job);
    }
    return TR_OK;
}
