/* commands.c - the commands that work on files alone: plan, checkpoint, data. Floor: main. */
#include "commands.h"

#include "base/log.h"
#include "checkpoint/store.h"
#include "data/build.h"
#include "plan/draw.h"
#include "train/job.h"

#include <string.h>

/* The fewest ranks on which the grid is possible: expert divides data * context. */
static int64_t least_world(const tr_config *c) {
    int64_t data = 1, context = c->parallel.context;
    while (data * context % c->parallel.expert) data++;
    return c->parallel.pipeline * data * context * c->parallel.tensor;
}

/* Collective on comm. The plan of training, by the ranks that would train. */
static tr_status plan_here(const tr_config *c, tr_comm *comm) {
    tr_job *job = NULL;
    TR_TRY(tr_job_create(c, comm, TR_JOB_PLANS, &job));
    tr_job_print_plan(job);
    tr_job_destroy(job);
    return TR_OK;
}

/* Collective on comm, one rank. What can be told of a grid without its ranks. */
static tr_status plan_elsewhere(const tr_config *c, tr_comm *comm, int64_t ranks) {
    tr_config *whole = NULL;
    tr_job *job = NULL;
    TR_TRY(tr_config_alter(c, true, 0, NULL, &whole));
    tr_status status = tr_job_create(whole, comm, TR_JOB_PLANS, &job);
    if (status == TR_OK) {
        int64_t bytes = tr_registry_bytes(tr_model_registry(job->model));
        tr_job_print_model(job);
        tr_say("grid       %lld ranks", (long long)ranks);
        tr_say("memory     %.1f MiB for weights, gradients and optimizer of the whole model;",
               (double)bytes / 0x1p20);
        tr_say("           mpirun -n %lld before this command says what a rank takes",
               (long long)ranks);
    }
    tr_job_destroy(job);
    tr_config_destroy(whole);
    return status;
}

/* Collective on comm. */
static tr_status plan(const tr_arguments *a, const tr_config *c, tr_comm *comm) {
    int64_t data = 1, size = tr_comm_size(comm), micro = c->training.micro_batch_size;
    int64_t ranks = a->world ? a->world : size > 1 ? size : least_world(c);
    bool root = tr_comm_rank(comm) == 0;
    TR_TRY(tr_config_check_world(c, (int)ranks, &data));
    if (!a->schedule && ranks == size) TR_TRY(plan_here(c, comm));
    tr_comm *alone = tr_comm_split(comm, tr_comm_rank(comm), 0);
    tr_status status = TR_OK;
    if (root && !a->schedule && ranks != size) status = plan_elsewhere(c, alone, ranks);
    if (root && status == TR_OK)
        status = tr_plan_schedule(c, c->training.global_batch_size / (micro * data), a->schedule,
                                  a->trace);
    tr_comm_free(alone);
    return tr_agree(comm, status);
}

/* Nothing runs, so the machine need not have the device that the config asks for. */
tr_status tr_command_plan(const tr_arguments *a, tr_comm *world) {
    char *const here[] = {"run.device=cpu", "run.collectives=mpi"};
    tr_config *config = NULL, *planned = NULL;
    tr_status status = tr_config_read(a->config, a->nsets, a->sets, &config);
    if (status == TR_OK) status = tr_config_alter(config, false, 2, here, &planned);
    status = tr_agree(world, status);
    if (status == TR_OK) status = plan(a, planned, world);
    tr_config_destroy(planned);
    tr_config_destroy(config);
    return status;
}

tr_status tr_command_checkpoint(const tr_arguments *a, tr_comm *world) {
    const char *operation = a->operation ? a->operation : "";
    const char *path = a->npaths ? a->paths[0] : NULL;
    if (strcmp(operation, "info") != 0 && strcmp(operation, "verify") != 0)
        return tr_fail(TR_ERR_USAGE, "trireme checkpoint info|verify PATH%s%s",
                       *operation ? ", not " : "", operation);
    if (!path) return tr_fail(TR_ERR_USAGE, "which file? trireme checkpoint %s PATH", operation);
    return *operation == 'i' ? tr_checkpoint_info(world, path, a->tensors)
                             : tr_checkpoint_verify(world, path);
}

static tr_status build(const tr_arguments *a) {
    tr_data_build_options o = {.inputs = a->paths,
                               .ninputs = a->npaths,
                               .output = a->output,
                               .end_of_document = a->end_of_document,
                               .validation_fraction = a->validation_fraction,
                               .validation_output = a->validation_output};
    if (a->npaths == 0 || !a->output)
        return tr_fail(TR_ERR_USAGE, "trireme data build TEXT... --output FILE");
    TR_TRY(tr_data_parse_format(a->format ? a->format : "llm.c", &o.format));
    TR_TRY(tr_data_parse_documents(a->documents ? a->documents : "file", &o.documents));
    return tr_data_build(&o);
}

static tr_status run_data(const tr_arguments *a) {
    const char *operation = a->operation ? a->operation : "";
    if (!strcmp(operation, "build")) return build(a);
    if (strcmp(operation, "info") != 0)
        return tr_fail(TR_ERR_USAGE, "trireme data build|info PATH...%s%s",
                       *operation ? ", not " : "", operation);
    if (a->npaths == 0) return tr_fail(TR_ERR_USAGE, "which file? trireme data info PATH...");
    for (int i = 0; i < a->npaths; i++) TR_TRY(tr_data_info(a->paths[i], a->sequence_length));
    return TR_OK;
}

tr_status tr_command_data(const tr_arguments *a, tr_comm *world) {
    return tr_agree(world, tr_comm_rank(world) == 0 ? run_data(a) : TR_OK);
}
