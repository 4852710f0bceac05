/* main.c - the commands. Floor: main.
 *
 * `train` is the path of one batch: config -> grid -> model declares its weights -> registry sealed
 * -> plan -> weights initialised or loaded -> each step (train/trainer.h): samples -> schedule of
 * actions -> layers -> gradients reduced -> clip -> AdamW -> metrics -> checkpoint. */
#include "commands.h"

#include "base/log.h"
#include "base/switch.h"
#include "bench/bench.h"
#include "dist/watch.h"
#include "train/evaluate.h"
#include "train/generate.h"
#include "train/resume.h"
#include "train/signals.h"
#include "train/trainer.h"
#include "train/verify.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Where a finished run left its files, and what to do next. */
static void say_goodbye(const tr_job *job) {
    char run[4096], checkpoints[4096], path[4200];
    tr_job_run_directory(job->config, run, sizeof run);
    tr_job_checkpoint_directory(job->config, checkpoints, sizeof checkpoints);
    tr_checkpoint_path(path, sizeof path, checkpoints, job->at.step);
    tr_say("metrics    %s/metrics.jsonl (and events for TensorBoard)", run);
    tr_say("checkpoint %s", path);
    tr_say("next       %s generate --checkpoint %s --prompt \"...\"", program_invocation_name,
           path);
}

static tr_status train(tr_job *job, bool dry_run) {
    TR_TRY(tr_job_open_data(job));
    tr_job_print_plan(job);
    if (!job->train) return tr_fail(TR_ERR_USAGE, "data.train is empty; name at least one file");
    if (dry_run) return TR_OK;
    TR_TRY(tr_job_open_pipeline(job));
    TR_TRY(tr_job_reserve_steps(job));
    TR_TRY(tr_resume_start(job));
    if (job->at.step >= job->config->training.steps) {
        tr_say("already finished: step %lld of %lld; raise training.steps to go on",
               (long long)job->at.step, (long long)job->config->training.steps);
        return TR_OK;
    }
    tr_status status = tr_train(job);
    if (status == TR_OK) say_goodbye(job);
    if (status == TR_STOPPED)
        tr_say("stopped at step %lld after saving; run %s to go on", (long long)job->at.step,
               job->config->checkpoint.resume == TR_RESUME_AUTO ? "the same command again"
                                                                : "it again with --resume auto");
    return status;
}

static tr_status command_train(const tr_arguments *a, tr_comm *world) {
    tr_config *config = NULL;
    tr_job *job = NULL;
    tr_status status = tr_agree(world, tr_config_read(a->config, a->nsets, a->sets, &config));
    if (status == TR_OK)
        status = tr_job_create(config, world, a->dry_run ? TR_JOB_PLANS : TR_JOB_TRAINS, &job);
    if (status == TR_OK) {
        tr_watch_start(world, a->dry_run ? 0 : config->training.watchdog_seconds);
        status = train(job, a->dry_run);
        tr_watch_stop();
    }
    tr_job_destroy(job);
    tr_config_destroy(config);
    return status;
}

static tr_status command_verify(const tr_arguments *a, tr_comm *world) {
    tr_config *config = NULL;
    tr_status status = tr_agree(world, tr_config_read(a->config, a->nsets, a->sets, &config));
    if (status == TR_OK) status = tr_verify(config, world, &(tr_verify_options){a->full, a->all});
    tr_config_destroy(config);
    return status;
}

/* --- eval, generate -----------------------------------------------------------------------------
 */

static tr_status evaluate(tr_job *job, const char *checkpoint) {
    TR_TRY(tr_job_open_data(job));
    if (!job->validation)
        return tr_fail(TR_ERR_USAGE, "data.validation is empty; name a file to evaluate on");
    TR_TRY(tr_job_open_pipeline(job));
    TR_TRY(tr_job_load(job, checkpoint, false));
    tr_evaluation e;
    TR_TRY(tr_evaluate(job, &e));
    tr_say("loss %.6f bits_per_byte %.6f tokens %lld", e.loss, e.bits_per_byte,
           (long long)e.tokens);
    return TR_OK;
}

/* The config; one rank alone leaves its grid aside, for the loss is the same on every grid. */
static tr_status eval_config(const tr_arguments *a, tr_comm *world, tr_config **config_p) {
    tr_config *config = NULL;
    TR_TRY(tr_config_read(a->config, a->nsets, a->sets, &config));
    if (tr_comm_size(world) > 1) {
        *config_p = config;
        return TR_OK;
    }
    tr_status status = tr_config_alter(config, true, 0, NULL, config_p);
    tr_config_destroy(config);
    return status;
}

static tr_status command_eval(const tr_arguments *a, tr_comm *world) {
    tr_config *config = NULL;
    tr_job *job = NULL;
    if (!a->checkpoint) return tr_fail(TR_ERR_USAGE, "trireme eval needs --checkpoint PATH");
    tr_status status = tr_agree(world, eval_config(a, world, &config));
    if (status == TR_OK) status = tr_job_create(config, world, TR_JOB_READS, &job);
    if (status == TR_OK) status = evaluate(job, a->checkpoint);
    tr_job_destroy(job);
    tr_config_destroy(config);
    return status;
}

/* The checkpoint's own config on one rank, with the caller's settings: its device is taken too. */
static tr_status stored_config(const tr_arguments *a, tr_comm *world, tr_config **config_p) {
    tr_progress_state state = {0};
    TR_TRY(tr_checkpoint_state(world, a->checkpoint, &state));
    char *sets[2 + sizeof a->sets / sizeof *a->sets] = {"model.init_from=null",
                                                        "run.collectives=mpi"};
    for (int i = 0; i < a->nsets; i++) sets[2 + i] = a->sets[i];
    tr_config *stored = NULL;
    tr_status status = tr_config_parse(state.config, a->checkpoint, 0, NULL, &stored);
    if (status == TR_OK) status = tr_config_alter(stored, true, 2 + a->nsets, sets, config_p);
    tr_config_destroy(stored);
    free(state.config);
    return status;
}

/* Whether the caller named a device. */
static bool names_device(const tr_arguments *a) {
    static const char key[] = "run.device=";
    for (int i = 0; i < a->nsets; i++)
        if (!strncmp(a->sets[i], key, sizeof key - 1)) return true;
    return false;
}

/* A checkpoint may have been brought from a machine with a device that this one lacks. */
static tr_status create_from_stored(const tr_arguments *a, const tr_config *config, tr_comm *world,
                                    tr_job **job_p) {
    tr_status status = tr_job_create(config, world, TR_JOB_READS, job_p);
    if (status != TR_ERR_USAGE || config->run.device == TR_DEVICE_CPU || names_device(a))
        return status;
    return tr_context(status, "the device of its training (--set run.device=cpu takes the CPU)");
}

static tr_status command_generate(const tr_arguments *a, tr_comm *world) {
    tr_config *config = NULL;
    tr_job *job = NULL;
    if (!a->checkpoint || !a->prompt)
        return tr_fail(TR_ERR_USAGE, "trireme generate needs --checkpoint PATH and --prompt TEXT");
    if (tr_comm_size(world) > 1)
        return tr_fail(TR_ERR_USAGE, "generate runs on one rank, not %d; start it without mpirun",
                       tr_comm_size(world));
    tr_status status = stored_config(a, world, &config);
    if (status == TR_OK) status = create_from_stored(a, config, world, &job);
    if (status == TR_OK) status = tr_job_load(job, a->checkpoint, false);
    if (status == TR_OK)
        status = tr_generate(job, &(tr_generate_options){a->prompt, a->tokens, a->temperature,
                                                         a->top_p, (uint64_t)a->seed});
    tr_job_destroy(job);
    tr_config_destroy(config);
    return status;
}

static tr_status command_bench(const tr_arguments *a, tr_comm *world) {
    return tr_bench(world, a->operation, a->nsets, a->sets);
}

/* --- the table ----------------------------------------------------------------------------------
 */

const tr_command tr_commands[] = {
    {"train", "CONFIG", "train a model, or go on with it", TR_TAKES_SET | TR_TAKES_TRAIN,
     command_train},
    {"verify", "CONFIG", "prove that a grid computes what one rank does",
     TR_TAKES_SET | TR_TAKES_VERIFY, command_verify},
    {"eval", "CONFIG --checkpoint PATH", "loss on the validation data",
     TR_TAKES_SET | TR_TAKES_CHECKPOINT, command_eval},
    {"generate", "--checkpoint PATH --prompt TEXT", "text from a trained model",
     TR_TAKES_SET | TR_TAKES_CHECKPOINT | TR_TAKES_SAMPLE, command_generate},
    {"plan", "CONFIG [--schedule]", "size, memory and idle time; draws a schedule",
     TR_TAKES_SET | TR_TAKES_PLAN, tr_command_plan},
    {"checkpoint", "info|verify PATH", "what a checkpoint holds; whether it is whole",
     TR_TAKES_INFO, tr_command_checkpoint},
    {"data", "build|info PATH...", "text to tokens; what a data file holds", TR_TAKES_DATA,
     tr_command_data},
    {"bench", "[kernels|comm|train|rows]", "speed, beside what the machine can do", TR_TAKES_SET,
     command_bench},
    {NULL, NULL, NULL, 0, NULL}};

int main(int argc, char **argv) {
    /* MPI takes a while to start: a signal that comes meanwhile must not end what could save */
    if (argc > 1 && !strcmp(argv[1], "train")) tr_signals_install();
    tr_comm *world = tr_comm_start(&argc, &argv);
    tr_log_rank(tr_comm_rank(world));
    const tr_command *command;
    tr_arguments arguments;
    tr_status status = tr_arguments_read(argc, argv, &command, &arguments);
    if (status == TR_OK) status = tr_agree(world, tr_switches_check());
    if (status == TR_OK && command) status = command->run(&arguments, world);
    if (status != TR_OK && status != TR_STOPPED && tr_comm_rank(world) == 0)
        tr_print_error(tr_error_message());
    tr_arguments_free(&arguments);
    tr_comm_stop(world);
    return (int)status;
}
