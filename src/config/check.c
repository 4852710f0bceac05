/* check.c - what ties settings to each other. Floor: config.
 *
 * Defaults that follow from other settings, required keys, combinations that cannot work, and
 * divisibility by the world. Each refusal names the key given, both numbers and what would do. */
#include "config/settings.h"

#include "base/heap.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* A schedule lists all micro-batches of a step, and each rank proves the lists of all stages. */
enum { MAX_MICRO_BATCHES = 1 << 20, MAX_PASSES = 1 << 22 };

/* ---- refusing by key ---- */

static int row_of(const char *name) {
    char section[64];
    const char *dot = strchr(name, '.');
    snprintf(section, sizeof section, "%.*s", (int)(dot - name), name);
    return tr_setting_find(section, dot + 1);
}

/* Where `name` was given; the config's own name where it was not. */
static void place(const tr_config *config, const char *name, char *out, size_t bytes) {
    const char *given = config->places ? config->places[row_of(name)] : NULL;
    if (given)
        snprintf(out, bytes, "%s", given);
    else
        snprintf(out, bytes, "%s: %s", config->source ? config->source : "config", name);
}

/* "where: section.key: value V ..." with the value it has now. */
static tr_status refuse(const tr_config *config, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static tr_status refuse(const tr_config *config, const char *name, const char *format, ...) {
    char where[1400], text[1500];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    place(config, name, where, sizeof where);
    char *value = tr_config_value(config, name);
    bool given = config->places && config->places[row_of(name)];
    tr_status status = tr_refuse(where, value, "%s%s", given ? "" : "(the default) ", text);
    free(value);
    return status;
}

static tr_status missing(const tr_config *config, const char *name, const char *hint) {
    char where[1400];
    place(config, name, where, sizeof where);
    return tr_fail(TR_ERR_USAGE,
                   "%s: is required and not given%s; add it to section model, or name "
                   "a Hugging Face config.json in model.from",
                   where, hint);
}

/* ---- numbers that would do ---- */

/* "24 or 32": the multiples of `unit` around `value`. */
static const char *near_multiples(int64_t value, int64_t unit, char *out, size_t bytes) {
    int64_t below = value / unit * unit;
    if (below > 0)
        snprintf(out, bytes, "%lld or %lld", (long long)below, (long long)(below + unit));
    else
        snprintf(out, bytes, "%lld", (long long)unit);
    return out;
}

/* Whether every tensor rank has whole query heads, and key/value heads of its own or one that its
 * neighbours have too. */
static bool heads_fit(const tr_model_config *m, int64_t ranks) {
    int64_t kv = m->num_key_value_heads;
    return m->num_attention_heads % ranks == 0 && (kv % ranks == 0 || ranks % kv == 0);
}

/* "1, 2, 4 or 8": the divisors of n up to `most`, the largest few where there are many; with a
 * model, those that its heads can be cut into. */
static const char *divisors_for(const tr_model_config *m, int64_t n, int64_t most, char *out,
                                size_t bytes) {
    enum { MOST = 12 };
    int64_t found[MOST];
    int count = 0;
    for (int64_t d = n < most ? n : most; d >= 1 && count < MOST; d--)
        if (n % d == 0 && (!m || heads_fit(m, d))) found[count++] = d;
    size_t at = 0;
    out[0] = 0;
    for (int i = count - 1; i >= 0 && at < bytes; i--) {
        const char *joint = i == count - 1 ? "" : i == 0 ? " or " : ", ";
        at += (size_t)snprintf(out + at, bytes - at, "%s%lld", joint, (long long)found[i]);
    }
    return out;
}

static const char *divisors(int64_t n, char *out, size_t bytes) {
    return divisors_for(NULL, n, n, out, bytes);
}

static int64_t common_divisor(int64_t a, int64_t b) {
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* ---- the model ---- */

bool tr_config_layer_is_moe(const tr_model_config *model, int64_t layer) {
    if (model->num_experts == 0 || layer < model->first_k_dense_replace) return false;
    for (int64_t i = 0; i < model->mlp_only_layers.count; i++)
        if (model->mlp_only_layers.values[i] == layer) return false;
    return (layer + 1) % model->decoder_sparse_step == 0;
}

static int64_t moe_layers(const tr_model_config *model) {
    int64_t count = 0;
    for (int64_t i = 0; i < model->num_hidden_layers; i++)
        count += tr_config_layer_is_moe(model, i);
    return count;
}

static tr_status check_mlp_only_layers(const tr_config *config) {
    const tr_model_config *m = &config->model;
    for (int64_t i = 0; i < m->mlp_only_layers.count; i++)
        if (m->mlp_only_layers.values[i] >= m->num_hidden_layers)
            return refuse(config, "model.mlp_only_layers",
                          "names layer %lld of %lld; layers count from 0 to %lld",
                          (long long)m->mlp_only_layers.values[i], (long long)m->num_hidden_layers,
                          (long long)m->num_hidden_layers - 1);
    if (m->mlp_only_layers.count > m->num_hidden_layers)
        return refuse(config, "model.mlp_only_layers",
                      "names more layers than num_hidden_layers %lld; name each once",
                      (long long)m->num_hidden_layers);
    return TR_OK;
}

static tr_status require_rows(const tr_config *config) {
    for (int i = 0; i < tr_setting_count; i++) {
        const tr_setting *row = &tr_settings[i];
        if (!row->required || config->places[i]) continue;
        char name[100];
        snprintf(name, sizeof name, "%s.%s", row->section, row->key);
        return missing(config, name, "");
    }
    return TR_OK;
}

static bool takes_virtual_stages(tr_schedule_kind schedule) {
    return schedule == TR_SCHEDULE_INTERLEAVED || schedule == TR_SCHEDULE_ZB_V ||
           schedule == TR_SCHEDULE_DUALPIPE_V;
}

/* "configs/tiny.yaml" makes the name "tiny". */
static char *name_of_source(const char *source) {
    const char *slash = strrchr(source, '/'), *file = slash ? slash + 1 : source;
    const char *dot = strrchr(file, '.');
    int length = (int)(dot && dot > file ? dot - file : (int64_t)strlen(file));
    return tr_heap_format("%.*s", length, file);
}

static tr_status derive(tr_config *config) {
    tr_model_config *m = &config->model;
    if (!config->run.name) config->run.name = name_of_source(config->source);
    if (m->num_key_value_heads == 0) m->num_key_value_heads = m->num_attention_heads;
    if (m->head_dim == 0) {
        if (m->hidden_size % m->num_attention_heads)
            return refuse(config, "model.hidden_size",
                          "is not a multiple of num_attention_heads %lld; use one that is, or set "
                          "model.head_dim",
                          (long long)m->num_attention_heads);
        m->head_dim = m->hidden_size / m->num_attention_heads;
        if (m->head_dim % 2)
            return refuse(
                config, "model.hidden_size",
                "/ num_attention_heads %lld makes an odd head_dim of %lld, and the rotary "
                "embedding turns pairs; set an even model.head_dim",
                (long long)m->num_attention_heads, (long long)m->head_dim);
    }
    if (m->intermediate_size == 0) {
        if (moe_layers(m) < m->num_hidden_layers)
            return missing(config, "model.intermediate_size",
                           m->num_experts ? " (some layers have no experts)" : "");
        if (m->moe_intermediate_size == 0)
            return missing(config, "model.moe_intermediate_size",
                           ", nor is intermediate_size in its place");
        m->intermediate_size = m->moe_intermediate_size;
    }
    if (m->moe_intermediate_size == 0) m->moe_intermediate_size = m->intermediate_size;
    if (m->topk_group == 0) m->topk_group = m->n_group;
    if (!config->places[row_of("run.collectives")])
        config->run.collectives =
            config->run.device == TR_DEVICE_CUDA ? TR_COLLECTIVES_NCCL : TR_COLLECTIVES_MPI;
    tr_schedule_kind schedule = config->parallel.schedule;
    if (!config->places[row_of("parallel.virtual_stages")])
        config->parallel.virtual_stages = 1 + takes_virtual_stages(schedule);
    if (!config->places[row_of("optimizer.min_learning_rate")]) {
        double lowest = 3e-4, rate = config->optimizer.learning_rate;
        config->optimizer.min_learning_rate = rate < lowest ? rate : lowest;
    }
    return TR_OK;
}

static tr_status check_attention(const tr_config *config) {
    const tr_model_config *m = &config->model;
    char fits[256];
    if (m->num_attention_heads % m->num_key_value_heads)
        return refuse(
            config, "model.num_key_value_heads", "does not divide num_attention_heads %lld; use %s",
            (long long)m->num_attention_heads, divisors(m->num_attention_heads, fits, sizeof fits));
    if (m->head_dim % 2)
        return refuse(config, "model.head_dim",
                      "is odd, and the rotary embedding turns pairs; use %lld or %lld",
                      (long long)m->head_dim - 1, (long long)m->head_dim + 1);
    const char *const tokens[] = {"data.pad_id", "data.end_of_document"};
    const int64_t values[] = {config->data.pad_id, config->data.end_of_document};
    for (int i = 0; i < 2; i++)
        if (values[i] >= m->vocab_size)
            return refuse(config, tokens[i], "is no token of a vocabulary of %lld; use -1 to %lld",
                          (long long)m->vocab_size, (long long)m->vocab_size - 1);
    if (config->data.reset_position_ids && !config->data.document_mask)
        return refuse(config, "data.reset_position_ids",
                      "starts positions again where documents begin, which only document_mask "
                      "knows; set data.document_mask to true, or false here");
    return TR_OK;
}

static tr_status check_groups(const tr_config *config) {
    const tr_model_config *m = &config->model;
    char fits[256];
    if (m->num_experts % m->n_group)
        return refuse(config, "model.n_group", "does not divide num_experts %lld; use %s",
                      (long long)m->num_experts, divisors(m->num_experts, fits, sizeof fits));
    if (m->topk_group > m->n_group)
        return refuse(config, "model.topk_group", "is more than n_group %lld; use 1 to %lld",
                      (long long)m->n_group, (long long)m->n_group);
    int64_t size = m->num_experts / m->n_group, there = m->topk_group * size;
    if (m->num_experts_per_tok > there)
        return refuse(config, "model.topk_group",
                      "groups of num_experts / n_group = %lld have %lld experts, fewer than "
                      "num_experts_per_tok %lld; use %lld or more here",
                      (long long)size, (long long)there, (long long)m->num_experts_per_tok,
                      (long long)((m->num_experts_per_tok + size - 1) / size));
    return TR_OK;
}

static tr_status check_experts(const tr_config *config) {
    const tr_model_config *m = &config->model;
    if (m->num_experts == 0) {
        if (m->shared_expert_intermediate_size > 0)
            return refuse(config, "model.shared_expert_intermediate_size",
                          "asks for a shared expert where num_experts is 0; set num_experts, or 0 "
                          "here");
        if (m->n_group > 1)
            return refuse(config, "model.n_group",
                          "asks for groups of experts where num_experts is 0; set num_experts, or "
                          "1 here");
        return TR_OK;
    }
    if (m->num_experts_per_tok > m->num_experts)
        return refuse(config, "model.num_experts_per_tok",
                      "is more than num_experts %lld; use 1 to %lld", (long long)m->num_experts,
                      (long long)m->num_experts);
    TR_TRY(check_groups(config));
    if (moe_layers(m) == 0)
        return refuse(config, "model.num_experts",
                      "has no layer to be in: first_k_dense_replace, decoder_sparse_step and "
                      "mlp_only_layers leave none of %lld; set num_experts to 0, or free a layer",
                      (long long)m->num_hidden_layers);
    return TR_OK;
}

/* ---- the rest that needs no world ---- */

static tr_status check_virtual_stages(const tr_config *config) {
    tr_schedule_kind schedule = config->parallel.schedule;
    int64_t v = config->parallel.virtual_stages, p = config->parallel.pipeline;
    int64_t layers = config->model.num_hidden_layers;
    char *name = tr_config_value(config, "parallel.schedule");
    tr_status status = TR_OK;
    if (!takes_virtual_stages(schedule) && v > 1)
        status = refuse(config, "parallel.virtual_stages",
                        "asks for several parts of the model on a rank, and schedule %s has one; "
                        "use 1, or set parallel.schedule to interleaved",
                        name);
    else if (schedule == TR_SCHEDULE_INTERLEAVED && v < 2)
        status = refuse(config, "parallel.virtual_stages",
                        "is less than the 2 that schedule interleaved needs; use 2 or more, or set "
                        "parallel.schedule to 1f1b");
    else if (schedule != TR_SCHEDULE_INTERLEAVED && takes_virtual_stages(schedule) && v != 2)
        status = refuse(config, "parallel.virtual_stages",
                        "is not the 2 that schedule %s has; "
                        "use 2",
                        name);
    else if (v > layers)
        status = refuse(config, "parallel.virtual_stages",
                        "is more than num_hidden_layers %lld; set parallel.schedule to 1f1b",
                        (long long)layers);
    else if (p * v > layers)
        status =
            refuse(config, "parallel.virtual_stages",
                   "* pipeline %lld = %lld is more stages than num_hidden_layers %lld; use "
                   "a pipeline of 1 to %lld, more layers, or set parallel.schedule to 1f1b",
                   (long long)p, (long long)(p * v), (long long)layers, (long long)(layers / v));
    free(name);
    return status;
}

static tr_status check_heads(const tr_config *config) {
    const tr_model_config *m = &config->model;
    int64_t tensor = config->parallel.tensor, context = config->parallel.context;
    tr_model_config own = *m; /* a tensor rank's heads */
    char fits[256];
    if (!heads_fit(m, tensor))
        return refuse(
            config, "parallel.tensor",
            "must divide num_attention_heads %lld, and divide num_key_value_heads %lld "
            "or be a multiple of it; use %s",
            (long long)m->num_attention_heads, (long long)m->num_key_value_heads,
            divisors_for(m, m->num_attention_heads, m->num_attention_heads, fits, sizeof fits));
    own.num_attention_heads /= tensor;
    own.num_key_value_heads = tensor < m->num_key_value_heads ? m->num_key_value_heads / tensor : 1;
    int64_t heads = config->parallel.context_heads;
    if (context % heads || !heads_fit(&own, heads))
        return refuse(config, "parallel.context_heads",
                      "must divide context %lld and the %lld query heads of a rank, and divide its "
                      "%lld key/value heads or be a multiple of them; use %s",
                      (long long)context, (long long)own.num_attention_heads,
                      (long long)own.num_key_value_heads,
                      divisors_for(&own, context, context, fits, sizeof fits));
    return TR_OK;
}

/* How a sequence and the rows of a micro-batch are cut (model/sequence.h, model/tensor.c). */
static tr_status check_rows(const tr_config *config) {
    int64_t length = config->data.sequence_length, context = config->parallel.context;
    int64_t heads = config->parallel.context_heads;
    int64_t tensor = config->parallel.tensor, micro = config->training.micro_batch_size;
    int64_t halves = heads % 2 && heads < context ? 2 : 1; /* a ring's rank has two chunks */
    char fits[256];
    if (length % (halves * context))
        return refuse(config, "data.sequence_length",
                      "is not a multiple of %scontext %lld = %lld; use %s",
                      halves > 1 ? "2 * " : "", (long long)context, (long long)(halves * context),
                      near_multiples(length, halves * context, fits, sizeof fits));
    length /= context;
    if (micro * length % tensor)
        return refuse(
            config, "training.micro_batch_size",
            "* sequence_length / context %lld = %lld rows, which parallel.tensor %lld "
            "does not divide; use %s here",
            (long long)length, (long long)(micro * length), (long long)tensor,
            near_multiples(micro, tensor / common_divisor(length, tensor), fits, sizeof fits));
    return TR_OK;
}

static tr_status check_parallel(const tr_config *config) {
    const tr_model_config *m = &config->model;
    if (config->parallel.pipeline > m->num_hidden_layers)
        return refuse(config, "parallel.pipeline",
                      "is more stages than num_hidden_layers %lld; use 1 to %lld",
                      (long long)m->num_hidden_layers, (long long)m->num_hidden_layers);
    TR_TRY(check_virtual_stages(config));
    TR_TRY(check_heads(config));
    TR_TRY(check_rows(config));
    if (config->parallel.expert > 1 && m->num_experts == 0)
        return refuse(config, "parallel.expert",
                      "shares experts among ranks where num_experts is 0; use 1");
    if (m->num_experts > 0 && config->parallel.expert > m->num_experts)
        return refuse(config, "parallel.expert",
                      "is more ranks than num_experts %lld has experts; use 1 to %lld",
                      (long long)m->num_experts, (long long)m->num_experts);
    return TR_OK;
}

static tr_status check_collectives(const tr_config *config) {
    if (config->run.collectives == TR_COLLECTIVES_NCCL && config->run.device != TR_DEVICE_CUDA) {
        char *device = tr_config_value(config, "run.device");
        tr_status status = refuse(config, "run.collectives",
                                  "is between GPUs, and run.device is %s; use mpi", device);
        free(device);
        return status;
    }
    return TR_OK;
}

static tr_status check_training(const tr_config *config) {
    const char *name = config->run.name;
    if (tr_utf8_fault(name, strlen(name)) >= 0)
        return tr_fail(TR_ERR_USAGE,
                       "%s: run.name: the file's name is no UTF-8 text; name the run here",
                       config->source);
    if (strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, ".."))
        return refuse(config, "run.name",
                      "must name a folder inside run.directory; leave out slashes, `.` and `..`");
    if (config->training.evaluate_every > 0 && config->data.validation.count == 0)
        return refuse(config, "training.evaluate_every",
                      "asks for evaluation, and data.validation is empty; give files there, or 0 "
                      "here");
    if (config->data.validation.count > 0 && config->data.validation.entries[0].weight > 0)
        return refuse(config, "data.validation",
                      "has weights, and evaluation reads files in order; give paths alone");
    if (config->optimizer.min_learning_rate > config->optimizer.learning_rate) {
        char *rate = tr_config_value(config, "optimizer.learning_rate");
        tr_status status = refuse(config, "optimizer.min_learning_rate",
                                  "is above learning_rate %s; use at most that", rate);
        free(rate);
        return status;
    }
    int64_t steps = config->training.steps, warmup = config->optimizer.warmup_steps;
    if (config->optimizer.schedule == TR_LR_WSD && config->optimizer.decay_steps > 0 &&
        warmup + config->optimizer.decay_steps > steps)
        return refuse(config, "optimizer.decay_steps",
                      "and warmup_steps %lld are more than training.steps %lld; use at most %lld",
                      (long long)warmup, (long long)steps,
                      (long long)(steps > warmup ? steps - warmup : 0));
    return TR_OK;
}

tr_status tr_config_complete(tr_config *config) {
    TR_TRY(require_rows(config));
    TR_TRY(check_mlp_only_layers(config));
    TR_TRY(derive(config));
    TR_TRY(check_attention(config));
    TR_TRY(check_experts(config));
    TR_TRY(check_parallel(config));
    TR_TRY(check_collectives(config));
    return check_training(config);
}

/* ---- the world ---- */

/* The first key above 1 among those whose product must divide the world. */
static const char *grid_key(const tr_config *config) {
    if (config->parallel.pipeline > 1) return "parallel.pipeline";
    return config->parallel.context > 1 ? "parallel.context" : "parallel.tensor";
}

tr_status tr_config_check_world(const tr_config *config, int world, int64_t *data_p) {
    int64_t pipeline = config->parallel.pipeline, context = config->parallel.context;
    int64_t tensor = config->parallel.tensor, expert = config->parallel.expert;
    int64_t product = pipeline * context * tensor;
    char fits[256];
    if (world < 1 || world % product)
        return refuse(
            config, grid_key(config),
            "makes pipeline %lld * context %lld * tensor %lld = %lld, which does not "
            "divide the %d rank%s; start %s ranks (mpirun -n), or use a product that divides %d",
            (long long)pipeline, (long long)context, (long long)tensor, (long long)product, world,
            world == 1 ? "" : "s", near_multiples(world, product, fits, sizeof fits), world);
    int64_t data = world / product;
    if (data * context % expert)
        return refuse(
            config, "parallel.expert",
            "does not divide data %lld * context %lld = %lld (%d ranks); use %s", (long long)data,
            (long long)context, (long long)(data * context), world,
            divisors_for(NULL, data * context, config->model.num_experts, fits, sizeof fits));
    int64_t batch = config->training.global_batch_size, micro = config->training.micro_batch_size;
    if (batch % (micro * data))
        return refuse(
            config, "training.global_batch_size",
            "is not a multiple of micro_batch_size %lld * data-parallel ranks %lld = %lld; "
            "use %s",
            (long long)micro, (long long)data, (long long)(micro * data),
            near_multiples(batch, micro * data, fits, sizeof fits));
    int64_t micro_batches = batch / (micro * data);
    if (micro_batches > MAX_MICRO_BATCHES)
        return refuse(config, "training.global_batch_size",
                      "makes %lld micro-batches a rank in one step, at most %d are possible; raise "
                      "micro_batch_size or start more ranks",
                      (long long)micro_batches, MAX_MICRO_BATCHES);
    int64_t stages = pipeline * config->parallel.virtual_stages;
    if (micro_batches > MAX_PASSES / stages)
        return refuse(config, "training.global_batch_size",
                      "makes %lld micro-batches a rank in one step, at most %lld are possible with "
                      "pipeline %lld * virtual_stages %lld; raise micro_batch_size or use fewer "
                      "stages",
                      (long long)micro_batches, (long long)(MAX_PASSES / stages),
                      (long long)pipeline, (long long)config->parallel.virtual_stages);
    if (config->model.num_experts > 0 && config->parallel.schedule != TR_SCHEDULE_GPIPE &&
        config->model.router_aux_loss_scope == TR_AUX_GLOBAL_BATCH && micro_batches > 1)
        return refuse(config, "model.router_aux_loss_scope",
                      "needs all forwards before the first backward, and only schedule gpipe has "
                      "them with %lld micro-batches a rank; set parallel.schedule to gpipe, or "
                      "micro_batch_size to %lld",
                      (long long)micro_batches, (long long)(batch / data));
    *data_p = data;
    return TR_OK;
}
