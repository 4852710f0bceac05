/* hf.c - the model section from a Hugging Face config.json. Floor: config.
 *
 * Keys of the same name are taken as they are, others through a few aliases; each value goes the
 * way a --set goes, so types and ranges are the table's. Keys that would change the mathematics
 * into something this model does not compute are refused unless neutral; any other key is ignored.
 */
#include "base/file.h"
#include "base/log.h"
#include "config/settings.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

typedef enum { TYPE_PLAIN, TYPE_BIASED, TYPE_QWEN_MOE, TYPE_QK_NORM, TYPE_LATENT } type_kind;

static const struct {
    const char *name;
    type_kind kind;
} model_types[] = {
    {"llama", TYPE_PLAIN},        {"mistral", TYPE_PLAIN},      {"mixtral", TYPE_PLAIN},
    {"deepseek", TYPE_PLAIN},     {"qwen2", TYPE_BIASED},       {"qwen2_moe", TYPE_QWEN_MOE},
    {"qwen3", TYPE_QK_NORM},      {"qwen3_moe", TYPE_QK_NORM},  {"olmoe", TYPE_QK_NORM},
    {"deepseek_v2", TYPE_LATENT}, {"deepseek_v3", TYPE_LATENT},
};

/* A key that changes the mathematics, and the values (as JSON, between bars) that change nothing.
 */
static const struct {
    const char *key, *neutral, *what;
} unsupported[] = {
    {"attention_bias", "|null|false|", "biases of the attention projections"},
    {"qkv_bias", "|null|false|", "biases of the attention projections"},
    {"mlp_bias", "|null|false|", "biases of the feed-forward network"},
    {"topk_method", "|null|\"greedy\"|\"group_limited_greedy\"|",
     "routing with a bias of the choice alone (e_score_correction_bias)"},
    {"routed_scaling_factor", "|null|1|1.0|", "scaled expert outputs"},
    {"moe_layer_freq", "|null|1|", "experts in some layers by moe_layer_freq"},
    {"router_jitter_noise", "|null|0|0.0|", "noise in the router"},
    {"q_lora_rank", "|null|", "multi-head latent attention"},
    {"kv_lora_rank", "|null|", "multi-head latent attention"},
    {"qk_rope_head_dim", "|null|", "multi-head latent attention"},
    {"qk_nope_head_dim", "|null|", "multi-head latent attention"},
    {"v_head_dim", "|null|", "multi-head latent attention"},
    {"use_qk_norm", "|null|false|", "norms of queries and keys"},
    {"qk_layernorm", "|null|false|", "norms of queries and keys"},
    {"partial_rotary_factor", "|null|1|1.0|", "rotary embedding of a part of a head"},
    {"attention_dropout", "|null|0|0.0|", "dropout"},
    {"hidden_dropout", "|null|0|0.0|", "dropout"},
    {"attn_logit_softcapping", "|null|", "soft-capped scores"},
    {"final_logit_softcapping", "|null|", "soft-capped logits"},
    {"clip_qkv", "|null|", "clipped queries, keys and values"},
    {"num_nextn_predict_layers", "|null|0|", "multi-token prediction"},
};

/* Further names of a setting of this program. */
static const struct {
    const char *key, *setting;
} aliases[] = {
    {"num_local_experts", "num_experts"},
    {"n_routed_experts", "num_experts"},
    {"aux_loss_alpha", "router_aux_loss_coef"},
    {"layer_norm_epsilon", "layer_norm_eps"},
};

/* ---- small things ---- */

static tr_status take_text(tr_config *config, const char *setting, const char *yaml,
                           const char *path, const char *key) {
    int row = tr_setting_find("model", setting);
    if (config->places[row]) return TR_OK; /* the YAML, or an earlier name, has spoken */
    char where[1200];
    if (!strcmp(key, setting))
        snprintf(where, sizeof where, "%s: model.%s", path, setting);
    else
        snprintf(where, sizeof where, "%s: model.%s (%s)", path, setting, key);
    return tr_setting_assign_text(config, row, yaml, where);
}

static tr_status take(tr_config *config, const char *setting, const json_t *value, const char *path,
                      const char *key) {
    if (!value || json_is_null(value)) return TR_OK;
    char *yaml = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    tr_status status = take_text(config, setting, yaml, path, key);
    free(yaml);
    return status;
}

/* ---- what is refused ---- */

static tr_status check_type(const char *type, const char *path) {
    for (size_t i = 0; i < sizeof model_types / sizeof *model_types; i++) {
        if (strcmp(model_types[i].name, type)) continue;
        switch (model_types[i].kind) {
        case TYPE_PLAIN:
            return TR_OK;
        case TYPE_BIASED:
            tr_warn("%s: %s has biases on queries, keys and values, this model has none; its sizes "
                    "are taken",
                    path, type);
            return TR_OK;
        case TYPE_QWEN_MOE:
            tr_warn(
                "%s: %s has biases on queries, keys and values and a gate on its shared expert, "
                "this model has neither; its sizes are taken",
                path, type);
            return TR_OK;
        case TYPE_QK_NORM:
            return tr_refuse(path, type,
                             "of model_type has norms of queries and keys, which are not supported "
                             "yet; give the sizes in section model, without model.from");
        case TYPE_LATENT:
            return tr_refuse(
                path, type,
                "of model_type has multi-head latent attention, which is not supported "
                "yet; give the sizes in section model, without model.from");
        }
    }
    return tr_refuse(
        path, type,
        "of model_type is not known here; known are llama, mistral, mixtral, deepseek, "
        "qwen2 and qwen2_moe. Give the sizes in section model, without model.from");
}

static tr_status check_unsupported(const json_t *hf, const char *path) {
    for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported; i++) {
        const json_t *value = json_object_get(hf, unsupported[i].key);
        if (!value) continue;
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT), barred[64], where[1200];
        snprintf(barred, sizeof barred, "|%s|", text);
        snprintf(where, sizeof where, "%s: %s", path, unsupported[i].key);
        tr_status status = TR_OK;
        if (!strstr(unsupported[i].neutral, barred))
            status = tr_refuse(where, text,
                               "asks for %s, which this model does not have; give the sizes in "
                               "section model, without model.from",
                               unsupported[i].what);
        free(text);
        TR_TRY(status);
    }
    return TR_OK;
}

/* rope_scaling, or its newer form rope_parameters {rope_type, rope_theta}. */
static tr_status take_rope(tr_config *config, const json_t *hf, const char *path) {
    static const char *const names[] = {"rope_scaling", "rope_parameters"};
    int row = tr_setting_find("model", "rope_scaling");
    for (int i = 0; i < 2; i++) {
        const json_t *scaling = json_object_get(hf, names[i]);
        if (!scaling || json_is_null(scaling)) continue;
        const json_t *type = json_object_get(scaling, "rope_type");
        if (!type) type = json_object_get(scaling, "type");
        const char *word = json_string_value(type);
        bool none = word && !strcmp(word, "default");
        if (!none && !config->places[row]) {
            char *text = json_dumps(scaling, JSON_ENCODE_ANY | JSON_COMPACT), where[1200];
            snprintf(where, sizeof where, "%s: %s", path, names[i]);
            tr_status status = tr_refuse(
                where, text,
                "is not supported yet; set model.rope_scaling to null to train without it");
            free(text);
            return status;
        }
        TR_TRY(take(config, "rope_theta", json_object_get(scaling, "rope_theta"), path,
                    "rope_parameters.rope_theta"));
    }
    return TR_OK;
}

/* Whether layer_types names a window for some layers and none for others. */
static bool layers_differ(const json_t *hf) {
    const json_t *types = json_object_get(hf, "layer_types");
    for (size_t i = 1; i < json_array_size(types); i++)
        if (!json_equal(json_array_get(types, i), json_array_get(types, 0))) return true;
    return false;
}

/* A window counts unless use_sliding_window is false; one in some layers only is not supported. */
static tr_status take_window(tr_config *config, const json_t *hf, const char *path) {
    const json_t *window = json_object_get(hf, "sliding_window");
    const json_t *use = json_object_get(hf, "use_sliding_window");
    int row = tr_setting_find("model", "sliding_window");
    if (json_is_false(use) || !window || json_is_null(window) || config->places[row]) return TR_OK;
    const json_t *first = json_object_get(hf, "max_window_layers");
    if (layers_differ(hf) || (json_is_true(use) && json_integer_value(first) > 0)) {
        char where[1200], text[32];
        snprintf(where, sizeof where, "%s: sliding_window", path);
        snprintf(text, sizeof text, "%lld", (long long)json_integer_value(window));
        return tr_refuse(where, text,
                         "asks for a window in some layers only, which is not supported yet; set "
                         "model.sliding_window to one for all layers, or 0");
    }
    return take(config, "sliding_window", window, path, "sliding_window");
}

/* DeepSeek counts shared experts, each as wide as a routed one. */
static tr_status take_shared(tr_config *config, const json_t *hf, const char *path) {
    const json_t *count = json_object_get(hf, "n_shared_experts");
    if (!count || json_is_null(count)) return TR_OK;
    const json_t *width = json_object_get(hf, "moe_intermediate_size");
    json_int_t n = json_integer_value(count), w = json_integer_value(width);
    if (!json_is_integer(count) || !json_is_integer(width) || n < 0 || w < 1 || n > 65536 ||
        w > 16777216) {
        char where[1200];
        char *text = json_dumps(count, JSON_ENCODE_ANY | JSON_COMPACT);
        snprintf(where, sizeof where, "%s: n_shared_experts", path);
        tr_status status = tr_refuse(where, text,
                                     "is no count of experts of moe_intermediate_size; set "
                                     "model.shared_expert_intermediate_size");
        free(text);
        return status;
    }
    char yaml[32];
    snprintf(yaml, sizeof yaml, "%lld", (long long)(n * w));
    return take_text(config, "shared_expert_intermediate_size", yaml, path,
                     "n_shared_experts * moe_intermediate_size");
}

/* Groups count under the routing that asks for them, and not under greedy. */
static tr_status take_groups(tr_config *config, const json_t *hf, const char *path) {
    const char *method = json_string_value(json_object_get(hf, "topk_method"));
    json_int_t groups = json_integer_value(json_object_get(hf, "n_group"));
    bool given = config->places[tr_setting_find("model", "n_group")] != NULL;
    if (!method && groups > 1 && !given) {
        char where[1200], text[32];
        snprintf(where, sizeof where, "%s: n_group", path);
        snprintf(text, sizeof text, "%lld", (long long)groups);
        return tr_refuse(where, text,
                         "asks for groups of experts without a topk_method that chooses by them; "
                         "set model.n_group and model.topk_group");
    }
    if (!method || strcmp(method, "group_limited_greedy")) return TR_OK;
    if (config->model.scoring_func == TR_SIGMOID && groups > 1 && !given) {
        char where[1200];
        snprintf(where, sizeof where, "%s: topk_method", path);
        return tr_refuse(where, method,
                         "ranks a group by its best expert, and under scoring_func sigmoid this "
                         "model ranks it by the sum of its best two; set model.n_group and "
                         "model.topk_group for that");
    }
    TR_TRY(take(config, "n_group", json_object_get(hf, "n_group"), path, "n_group"));
    return take(config, "topk_group", json_object_get(hf, "topk_group"), path, "topk_group");
}

/* A file that names the eps of layer norms and none of RMS norms has those. */
static tr_status take_norm(tr_config *config, const json_t *hf, const char *path) {
    const json_t *type = json_object_get(hf, "norm_type");
    const json_t *rms = json_object_get(hf, "rms_norm_eps");
    bool layer = json_is_number(json_object_get(hf, "layer_norm_eps")) ||
                 json_is_number(json_object_get(hf, "layer_norm_epsilon"));
    if ((!type || json_is_null(type)) && layer && (!rms || json_is_null(rms)))
        return take_text(config, "norm_type", "layer_norm", path, "layer_norm_eps");
    return take(config, "norm_type", type, path, "norm_type");
}

/* silu's other name. */
static tr_status take_activation(tr_config *config, const json_t *hf, const char *path) {
    const json_t *act = json_object_get(hf, "hidden_act");
    const char *word = json_string_value(act);
    if (word && !strcmp(word, "swish"))
        return take_text(config, "hidden_act", "silu", path, "hidden_act");
    return take(config, "hidden_act", act, path, "hidden_act");
}

/* ---- the whole ---- */

static tr_status take_all(tr_config *config, const json_t *hf, const char *path) {
    const char *type = json_string_value(json_object_get(hf, "model_type"));
    if (type) TR_TRY(check_type(type, path));
    TR_TRY(check_unsupported(hf, path));
    TR_TRY(take_rope(config, hf, path));
    TR_TRY(take_window(config, hf, path));
    TR_TRY(take_activation(config, hf, path));
    TR_TRY(take_norm(config, hf, path));
    for (int i = 0; i < tr_setting_count; i++) {
        const tr_setting *row = &tr_settings[i];
        static const char not_theirs[] =
            "|from|init_from|rope_scaling|sliding_window|n_group|topk_group|hidden_act|norm_type|";
        char barred[80];
        snprintf(barred, sizeof barred, "|%s|", row->key);
        if (strcmp(row->section, "model") || strstr(not_theirs, barred)) continue;
        TR_TRY(take(config, row->key, json_object_get(hf, row->key), path, row->key));
    }
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
        TR_TRY(take(config, aliases[i].setting, json_object_get(hf, aliases[i].key), path,
                    aliases[i].key));
    TR_TRY(take_shared(config, hf, path));
    TR_TRY(take_groups(config, hf, path));
    if (json_is_true(json_object_get(hf, "seq_aux")))
        TR_TRY(take_text(config, "router_aux_loss_scope", "sequence", path, "seq_aux"));
    if (type && !strcmp(type, "qwen2_moe")) /* its own default, where the key is left out */
        TR_TRY(take_text(config, "norm_topk_prob", "false", path, "default of qwen2_moe"));
    return TR_OK;
}

tr_status tr_config_take_hf(tr_config *config, const char *path) {
    const char *where = config->places[tr_setting_find("model", "from")];
    tr_status status = tr_file_check(path, "config.json");
    if (status != TR_OK) return tr_context(status, "%s", where);
    FILE *file = fopen(path, "rb");
    if (!file) return tr_fail(TR_ERR_IO, "%s: %s: %s", where, path, strerror(errno));
    json_error_t error;
    json_t *hf = json_loadf(file, JSON_REJECT_DUPLICATES, &error);
    fclose(file);
    if (!hf)
        return tr_fail(TR_ERR_USAGE, "%s:%d:%d: is not JSON: %s; %s must name a config.json", path,
                       error.line, error.column, error.text, where);
    if (!json_is_object(hf))
        status = tr_fail(TR_ERR_USAGE, "%s:1: is no JSON object; %s must name a config.json", path,
                         where);
    else
        status = take_all(config, hf, path);
    json_decref(hf);
    return status;
}
