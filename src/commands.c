/* commands.c - the commands that work on files alone: plan, checkpoint, data. Floor: main. */
#include "commands.h"

#include "checkpoint/store.h"
#include "data/build.h"
#include "plan/draw.h"

#include <string.h>

/* The fewest ranks on which the grid is possible: expert divides data * context. */
static int64_t least_world(const tr_config *c) {
    int64_t data = 1, context = c->parallel.context;
    while (data * context % c->parallel.expert) data++;
    return c->parallel.pipeline * data * context * c->parallel.tensor;
}

static tr_status plan(const tr_arguments *a, const tr_config *c, int64_t world) {
    int64_t data;
    TR_TRY(tr_config_check_world(c, (int)world, &data));
    int64_t batch = c->training.global_batch_size, micro = c->training.micro_batch_size;
    return tr_plan_schedule(c, batch / (micro * data), a->trace);
}

static tr_status run_plan(const tr_arguments *a, int ranks) {
    if (!a->schedule)
        return tr_fail(TR_ERR_USAGE, "what to plan? trireme plan CONFIG --schedule draws the "
                                     "pipeline; trireme train CONFIG --dry-run plans the memory");
    tr_config *config = NULL;
    TR_TRY(tr_config_read(a->config, a->nsets, a->sets, &config));
    int64_t world = a->world ? a->world : ranks > 1 ? ranks : least_world(config);
    tr_status status = plan(a, config, world);
    tr_config_destroy(config);
    return status;
}

tr_status tr_command_plan(const tr_arguments *a, tr_comm *world) {
    tr_status status = TR_OK;
    if (tr_comm_rank(world) == 0) status = run_plan(a, tr_comm_size(world));
    return tr_agree(world, status);
}

tr_status tr_command_checkpoint(const tr_arguments *a, tr_comm *world) {
    const char *operation = a->operation ? a->operation : "";
    const char *path = a->npaths ? a->paths[0] : NULL;
    if (strcmp(operation, "info") != 0 && strcmp(operation, "verify") != 0)
        return tr_fail(TR_ERR_USAGE, "checkpoint '%s'? trireme checkpoint info|verify PATH",
                       operation);
    if (!path) return tr_fail(TR_ERR_USAGE, "which file? trireme checkpoint %s PATH", operation);
    return *operation == 'i' ? tr_checkpoint_info(world, path) : tr_checkpoint_verify(world, path);
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
        return tr_fail(TR_ERR_USAGE, "data '%s'? trireme data build|info PATH...", operation);
    if (a->npaths == 0) return tr_fail(TR_ERR_USAGE, "which file? trireme data info PATH...");
    for (int i = 0; i < a->npaths; i++) TR_TRY(tr_data_info(a->paths[i], a->sequence_length));
    return TR_OK;
}

tr_status tr_command_data(const tr_arguments *a, tr_comm *world) {
    return tr_agree(world, tr_comm_rank(world) == 0 ? run_data(a) : TR_OK);
}
