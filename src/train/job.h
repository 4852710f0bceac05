/* job.h - everything one run holds on this rank: grid, device, model, data, progress. The commands
 * train, eval and generate are built from it. Floor: train. */
#pragma once
#include "base/lock.h"
#include "checkpoint/store.h"
#include "data/dataset.h"
#include "model/model.h"
#include "train/pipeline.h"

typedef struct {
    /* borrowed */
    const tr_config *config;
    tr_comm *world;
    /* owned */
    tr_grid *grid;
    tr_device *device;
    tr_model *model;
    tr_pipeline *pipeline;
    tr_dataset *train, *validation; /* NULL when there is none */
    char *config_text;
    tr_lock *locks; /* rank 0: of the folders it writes in; NULL: none */
    int threads;
    /* derived: micro-batches a data rank has in one step */
    int64_t micro_batches;
    double peak_flops; /* of this rank, 0 until asked for */
    /* state */
    tr_progress_state at;
} tr_job;

/* What a job is for, which decides what its registry stores: */
typedef enum {
    TR_JOB_TRAINS, /* weights, gradients, optimizer */
    TR_JOB_READS,  /* weights */
    TR_JOB_PLANS   /* nothing: it says what a training would */
} tr_job_purpose;

/* Collective on world. Checks config against the world, makes grid and device, declares the model,
 * seals its registry. *job_p is set only on success. */
tr_status tr_job_create(const tr_config *config, tr_comm *world, tr_job_purpose purpose,
                        tr_job **job_p);
/* Collective on world. Opens the data sets the config names. */
tr_status tr_job_open_data(tr_job *job);
/* Local. Instead: job->train draws its samples. */
tr_status tr_job_open_synthetic(tr_job *job);
/* Collective on world, after tr_job_create. Slots and schedule for training; the device's groups
 * have joined. */
tr_status tr_job_open_pipeline(tr_job *job);
/* Collective on world, then. The memory of training steps (tr_model_reserve). */
tr_status tr_job_reserve_steps(tr_job *job);
void tr_job_destroy(tr_job *job); /* Collective on world. NULL-safe */
/* Local. Computes with this job's threads from now on, where a process holds two jobs in turn. */
void tr_job_use_threads(const tr_job *job);

/* Collective on world. Initial weights by seed, or from model.init_from. */
tr_status tr_job_init_weights(tr_job *job);
/* Collective on world. checkpoint.directory/run.name/step-*.h5 at the current progress. */
tr_status tr_job_save(tr_job *job);
/* Collective on world. Weights (with `moments`: the optimizer too, and the progress) from a file.
 */
tr_status tr_job_load(tr_job *job, const char *path, bool moments);

/* Local. This rank's coordinates on the axes that are split, "pipeline 1, data 0"; "" for none. */
void tr_job_place(const tr_job *job, char *out, size_t bytes);

/* Where this run's files are. */
void tr_job_run_directory(const tr_config *config, char *out, size_t bytes);
void tr_job_checkpoint_directory(const tr_config *config, char *out, size_t bytes);

/* Local. Prints on rank 0 the model's size. */
void tr_job_print_model(const tr_job *job);
/* Collective on world. Prints the plan on rank 0: model, grid, memory of the rank with the most. */
void tr_job_print_plan(const tr_job *job);
