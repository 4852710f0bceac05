/* job.c - builds and frees what a run holds; moves its state to and from checkpoints. Floor: train.
 */
#include "train/job.h"

#include "base/heap.h"
#include "base/log.h"
#include "dist/watch.h"
#include "model/unit.h"
#include "train/inventory.h"
#include "train/place.h"

#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- making -------------------------------------------------------------------------------------
 */

static int allowed_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    return CPU_COUNT(&set);
}

/* OpenMP threads of this rank: the setting, OMP_NUM_THREADS, or its share of the cores it may use.
 */
static int choose_threads(const tr_config *config, tr_comm *world) {
    int cores = allowed_cores(), ranks = tr_comm_node_size(world);
    int threads = (int)config->run.threads;
    if (threads == 0 && getenv("OMP_NUM_THREADS")) threads = omp_get_max_threads();
    if (threads == 0) threads = cores > ranks ? cores / ranks : 1;
    if (threads > cores)
        tr_warn("run.threads is %d but this process may use %d cores; start mpirun with "
                "--bind-to none (launch/env.sh does) or lower run.threads",
                threads, cores);
    omp_set_num_threads(threads);
    return threads;
}

void tr_job_place(const tr_job *job, char *out, size_t bytes) {
    const tr_grid_place *at = &job->grid->at;
    const struct {
        const char *name;
        int size, place;
    } axes[] = {{"pipeline", at->shape.pipeline, at->p},
                {"data", at->shape.data, at->d},
                {"context", at->shape.context, at->c},
                {"tensor", at->shape.tensor, at->t}};
    *out = '\0';
    for (size_t i = 0, used = 0; i < sizeof axes / sizeof *axes; i++)
        if (axes[i].size > 1 && used < bytes)
            used += (size_t)snprintf(out + used, bytes - used, "%s%s %d", used ? ", " : "",
                                     axes[i].name, axes[i].place);
}

/* Tensor ranks that hold the same key/value heads. */
static int head_copies(const tr_config *config) {
    int64_t heads = config->model.num_key_value_heads, tensor = config->parallel.tensor;
    return heads < tensor ? (int)(tensor / heads) : 1;
}

static tr_registry_options registry_options(const tr_config *config, tr_job_purpose purpose) {
    return (tr_registry_options){.read_only = purpose == TR_JOB_READS,
                                 .zero = (int)config->parallel.zero,
                                 .overlap = config->parallel.overlap,
                                 .two_at_once = config->parallel.schedule == TR_SCHEDULE_DUALPIPE_V,
                                 .bucket_elems = config->parallel.bucket_elems};
}

tr_status tr_job_create(const tr_config *config, tr_comm *world, tr_job_purpose purpose,
                        tr_job **job_p) {
    int64_t data;
    TR_TRY(tr_config_check_world(config, tr_comm_size(world), &data));
    tr_grid_shape shape = {.pipeline = (int)config->parallel.pipeline,
                           .data = (int)data,
                           .context = (int)config->parallel.context,
                           .expert = (int)config->parallel.expert,
                           .tensor = (int)config->parallel.tensor,
                           .head_copies = head_copies(config),
                           .context_heads = (int)config->parallel.context_heads};
    TR_TRY(tr_grid_shape_check(&shape, tr_comm_size(world)));
    tr_job *job = tr_heap_alloc(1, sizeof *job);
    job->config = config;
    job->world = world;
    job->threads = choose_threads(config, world);
    job->grid = tr_grid_create(world, shape);
    char place[128];
    tr_job_place(job, place, sizeof place);
    tr_watch_place(place);
    tr_status status = tr_place_open(config, world, &job->device);
    if (status != TR_OK) {
        tr_job_destroy(job);
        return status;
    }
    job->model = tr_model_create(config, job->grid, job->device);
    tr_registry_options options = registry_options(config, purpose);
    status = tr_registry_seal(tr_model_registry(job->model), job->grid, &options,
                              purpose == TR_JOB_PLANS ? NULL : job->device);
    if (status != TR_OK) {
        tr_job_destroy(job);
        return status;
    }
    job->config_text = tr_config_print(config);
    job->micro_batches =
        config->training.global_batch_size / config->training.micro_batch_size / data;
    *job_p = job;
    return TR_OK;
}

void tr_job_use_threads(const tr_job *job) {
    omp_set_num_threads(job->threads);
}

static tr_dataset_options data_options(const tr_config *c) {
    return (tr_dataset_options){.sequence_length = c->data.sequence_length,
                                .vocab_size = c->model.vocab_size,
                                .pad_id = c->data.pad_id,
                                .mask = c->data.mask,
                                .documents = c->data.document_mask,
                                .end_of_document = c->data.end_of_document,
                                .seed = (uint64_t)c->run.seed};
}

tr_status tr_job_open_synthetic(tr_job *job) {
    tr_dataset_options o = data_options(job->config);
    o.synthetic = true;
    return tr_dataset_open(&o, &job->train);
}

static tr_status open_data(tr_job *job) {
    const tr_config *c = job->config;
    tr_dataset_options o = data_options(c);
    if (c->data.train.count > 0) {
        o.files = &c->data.train;
        o.shuffle = true;
        TR_TRY(tr_dataset_open(&o, &job->train));
        job->at.data_fingerprint = tr_dataset_fingerprint(job->train);
    }
    if (c->data.validation.count > 0) {
        o.files = &c->data.validation;
        o.shuffle = false;
        TR_TRY(tr_dataset_open(&o, &job->validation));
    }
    return TR_OK;
}

tr_status tr_job_open_data(tr_job *job) {
    return tr_agree(job->world, open_data(job));
}

tr_status tr_job_open_pipeline(tr_job *job) {
    const tr_config *c = job->config;
    TR_TRY(tr_pipeline_create(job->model, job->grid, c, job->micro_batches,
                              c->training.micro_batch_size, c->data.sequence_length,
                              &job->pipeline));
    tr_comm_join(job->world, job->device);
    return TR_OK;
}

void tr_job_destroy(tr_job *job) {
    if (!job) return;
    tr_pipeline_destroy(job->pipeline);
    tr_dataset_close(job->train);
    tr_dataset_close(job->validation);
    tr_model_destroy(job->model);
    if (job->device) tr_comm_leave_device(job->world, job->device);
    tr_device_destroy(job->device);
    tr_grid_destroy(job->grid);
    tr_lock_release(job->locks);
    free(job->config_text);
    free(job->at.config);
    free(job);
}

void tr_job_run_directory(const tr_config *c, char *out, size_t bytes) {
    snprintf(out, bytes, "%s/%s", c->run.directory, c->run.name);
}

void tr_job_checkpoint_directory(const tr_config *c, char *out, size_t bytes) {
    snprintf(out, bytes, "%s/%s", c->checkpoint.directory, c->run.name);
}

/* --- checkpoints ---------------------------------------------------------------------------------
 */

tr_status tr_job_save(tr_job *job) {
    char directory[4096];
    tr_job_checkpoint_directory(job->config, directory, sizeof directory);
    tr_units_settle(tr_model_registry(job->model));
    tr_inventory v = tr_inventory_take(tr_model_registry(job->model), true);
    tr_inventory_download(&v);
    tr_progress_state state = job->at;
    state.config = job->config_text;
    tr_status status = tr_checkpoint_save(job->world, directory, job->config->checkpoint.keep,
                                          &state, v.ntensors, v.tensors, v.npieces, v.pieces);
    tr_inventory_free(&v);
    return status;
}

/* The tied embedding's second copy follows the first: masters and moments, shard by shard. */
static void copy_tied(tr_job *job, bool moments) {
    tr_registry *r = tr_model_registry(job->model);
    tr_space *s = &r->space[TR_SPACE_TIED];
    tr_comm *pair = job->grid->comm[TR_GROUP_EMBEDDING];
    for (int64_t k = 0; k < s->nsegments; k++) {
        const tr_segment *g = &s->segments[k];
        tr_stream *stream = r->device->stream;
        int64_t size = (int64_t)tr_dtype_bytes(tr_master_type(r));
        tr_end(tr_broadcast_begin(pair, stream, 0, tr_segment_master(r, g), g->count * size));
        for (int i = 0; i < 2 && moments; i++)
            tr_end(tr_broadcast_begin(pair, stream, 0, (i ? s->v : s->m) + g->shard,
                                      g->count * (int64_t)sizeof(float)));
    }
}

tr_status tr_job_load(tr_job *job, const char *path, bool moments) {
    tr_units_settle(tr_model_registry(job->model));
    tr_inventory v = tr_inventory_take(tr_model_registry(job->model), moments);
    tr_progress_state state = {0};
    tr_status status = tr_checkpoint_state(job->world, path, &state);
    if (status == TR_OK)
        status = tr_checkpoint_load(job->world, path, moments, v.ntensors, v.tensors, v.npieces,
                                    v.pieces);
    if (status == TR_OK) tr_inventory_upload(&v);
    tr_inventory_free(&v);
    if (status != TR_OK) {
        free(state.config);
        return status;
    }
    copy_tied(job, moments);
    tr_registry_publish(tr_model_registry(job->model));
    if (moments) {
        free(job->at.config);
        state.data_fingerprint = job->at.data_fingerprint;
        job->at = state;
    } else
        free(state.config);
    return TR_OK;
}

tr_status tr_job_init_weights(tr_job *job) {
    if (job->config->model.init_from) return tr_job_load(job, job->config->model.init_from, false);
    tr_registry_init(tr_model_registry(job->model), (uint64_t)job->config->run.seed);
    tr_registry_publish(tr_model_registry(job->model));
    return TR_OK;
}

/* --- the plan ------------------------------------------------------------------------------------
 */

/* What this rank does in a step. */
static tr_schedule schedule_of(const tr_job *job) {
    tr_schedule_shape shape = {.kind = job->config->parallel.schedule,
                               .stages = tr_stages_of(job->config),
                               .micro_batches = job->micro_batches};
    return tr_schedule_create(&shape, job->grid->at.p);
}

static tr_slot_use use_of(const tr_schedule *schedule) {
    tr_slot_use use = {.slots = schedule->slots, .chunks = schedule->slot_chunks};
    for (int64_t i = 0; i < schedule->count; i++) {
        use.split |= schedule->actions[i].kind == TR_BACKWARD_INPUT;
        use.both |= schedule->actions[i].kind == TR_FORWARD_BACKWARD;
    }
    return use;
}

tr_status tr_job_reserve_steps(tr_job *job) {
    tr_schedule schedule = schedule_of(job);
    tr_slot_use use = use_of(&schedule);
    tr_status status = tr_model_reserve(job->model, &use);
    tr_schedule_free(&schedule);
    return status;
}

/* What the machine could still give, as /proc/meminfo says; unlimited when it does not. */
static double available_bytes(void) {
    char line[256];
    double kib = INFINITY;
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f)) sscanf(line, "MemAvailable: %lf kB", &kib);
    if (f) fclose(f);
    return kib * 1024;
}

/* Routing by groups limits how many nodes a token goes to where no group lies on two. */
static void warn_of_groups(const tr_job *job) {
    const tr_model_config *m = &job->config->model;
    const tr_comm *comm = job->grid->comm[TR_GROUP_EXPERT];
    int64_t size = m->num_experts / m->n_group, parts = tr_comm_size(comm), across = 0;
    for (int64_t g = 0; g < m->n_group; g++) {
        int first = (int)tr_block_owner(m->num_experts, parts, g * size);
        int last = (int)tr_block_owner(m->num_experts, parts, (g + 1) * size - 1);
        across += tr_comm_node_of(comm, first) != tr_comm_node_of(comm, last);
    }
    if (across > 0 && m->topk_group < m->n_group)
        tr_warn("%lld of n_group %lld groups of experts lie on several nodes, so a token may go to "
                "more than topk_group %lld nodes; with as many groups as nodes, or a multiple, it "
                "would not",
                (long long)across, (long long)m->n_group, (long long)m->topk_group);
}

/* How experts are shared out and reached. */
static void print_exchange(const tr_job *job) {
    const tr_config *c = job->config;
    int64_t E = c->model.num_experts, ranks = c->parallel.expert;
    int64_t most = tr_ceil_div(E, ranks), least = E / ranks;
    char share[64];
    if (most == least)
        snprintf(share, sizeof share, "%lld", (long long)most);
    else
        snprintf(share, sizeof share, "%lld or %lld", (long long)least, (long long)most);
    bool asked = c->parallel.expert_exchange == TR_EXCHANGE_HIERARCHICAL;
    tr_say("experts    %lld a layer, %s a rank; rows travel in %s %s", (long long)E, share,
           tr_dtype_name(tr_config_wire(c)),
           tr_model_exchanges_by_node(job->model) ? "by one rank of each node"
           : asked                                ? "from rank to rank: nodes make no levels"
                                                  : "from rank to rank");
}

void tr_job_print_model(const tr_job *job) {
    const tr_model_config *m = &job->config->model;
    tr_say("model      %.2f M parameters, %.2f M active a token; %lld layers, %lld of them MoE",
           (double)tr_registry_total(tr_model_registry(job->model)) / 1e6,
           (double)tr_model_active_params(job->model) / 1e6, (long long)m->num_hidden_layers,
           (long long)tr_model_moe_layers(m));
}

typedef struct {
    int64_t fixed, working, slots; /* bytes of weights and their like, and of so many slots */
} need;

/* This rank's. */
static need need_of(const tr_job *job) {
    const tr_config *c = job->config;
    tr_schedule schedule = schedule_of(job);
    tr_slot_use use = use_of(&schedule);
    need n = {.fixed = tr_registry_bytes(tr_model_registry(job->model)),
              .working = tr_model_plan_activations(job->model, &use, c->training.micro_batch_size,
                                                   c->data.sequence_length),
              .slots = schedule.slots};
    tr_schedule_free(&schedule);
    return n;
}

/* Collective on world. Stages differ: the last one has the logits, the first most slots. */
static void print_memory(const tr_job *job) {
    const tr_config *c = job->config;
    int ranks = tr_comm_size(job->world), most = 0;
    need *all = tr_heap_alloc(ranks, sizeof *all);
    all[tr_comm_rank(job->world)] = need_of(job);
    tr_end(tr_all_reduce_begin(job->world, NULL, TR_SUM, TR_I64, all,
                               ranks * (int64_t)(sizeof *all / sizeof(int64_t))));
    bool differ = false;
    for (int r = 1; r < ranks; r++) {
        int64_t bytes = all[r].fixed + all[r].working;
        differ |= bytes != all[0].fixed + all[0].working;
        if (bytes > all[most].fixed + all[most].working) most = r;
    }
    need n = all[most];
    free(all);
    tr_say("memory     %.1f MiB a rank for weights, gradients and optimizer (zero %lld)",
           (double)n.fixed / 1048576.0, (long long)c->parallel.zero);
    tr_say("           about %.1f MiB for %lld micro-batch%s in flight%s",
           (double)n.working / 1048576.0, (long long)n.slots, n.slots == 1 ? "" : "es",
           c->parallel.virtual_stages > 1 ? ", each in one part of the rank's layers" : "");
    if (differ) tr_say("           on rank %d, which takes the most", most);
    double there = available_bytes() / tr_comm_node_size(job->world);
    if ((double)(n.fixed + n.working) > there)
        tr_warn("that is more than the %.1f MiB this machine has free for a rank; use more ranks, "
                "a smaller training.micro_batch_size or parallel.recompute",
                there / 1048576.0);
}

void tr_job_print_plan(const tr_job *job) {
    const tr_config *c = job->config;
    const tr_grid_shape *g = &job->grid->at.shape;
    tr_job_print_model(job);
    tr_say(
        "grid       %d rank%s: pipeline %d x data %d x context %d x tensor %d, expert %d of data x "
        "context",
        job->grid->at.world, job->grid->at.world == 1 ? "" : "s", g->pipeline, g->data, g->context,
        g->tensor, g->expert);
    if (g->expert > 1) {
        print_exchange(job);
        warn_of_groups(job);
    }
    tr_say("device     %s, %d thread%s a rank, %s", job->device->name, job->threads,
           job->threads == 1 ? "" : "s", c->run.dtype == TR_F32 ? "float32" : "bfloat16");
    tr_say(
        "batch      %lld sequence%s of %lld tokens a step, %lld micro-batch%s of %lld a data rank",
        (long long)c->training.global_batch_size, c->training.global_batch_size == 1 ? "" : "s",
        (long long)c->data.sequence_length, (long long)job->micro_batches,
        job->micro_batches == 1 ? "" : "es", (long long)c->training.micro_batch_size);
    print_memory(job);
}
