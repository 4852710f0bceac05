/* config.h - every setting, resolved and checked. Floor: config.
 *
 * The rows in settings.c (key, type, default, range, help) are the one declaration of a setting:
 * they parse, override, check, print and explain it. This struct is where the values end up. */
#pragma once
#include "base/dtype.h"
#include "base/forms.h"
#include "base/status.h"

#include <stdio.h>

typedef struct {
    char *path;
    double weight; /* relative; < 0: the entry had no weight */
} tr_data_entry;

typedef struct {
    tr_data_entry *entries;
    int64_t count;
} tr_data_list;

typedef struct {
    int64_t *values;
    int64_t count;
} tr_int_list;

typedef enum { TR_DEVICE_CPU, TR_DEVICE_CUDA, TR_DEVICE_SIMT, TR_DEVICE_SIMT_CHECK } tr_device_kind;
typedef enum { TR_COLLECTIVES_NCCL, TR_COLLECTIVES_MPI } tr_collectives;
typedef enum {
    TR_SCHEDULE_1F1B,
    TR_SCHEDULE_GPIPE,
    TR_SCHEDULE_INTERLEAVED,
    TR_SCHEDULE_ZB_H1,
    TR_SCHEDULE_ZB_V,
    TR_SCHEDULE_DUALPIPE_V
} tr_schedule_kind;
typedef enum { TR_EXCHANGE_FLAT, TR_EXCHANGE_HIERARCHICAL } tr_exchange_kind;
typedef enum { TR_WIRE_SAME, TR_WIRE_BFLOAT16 } tr_wire;
typedef enum { TR_RECOMPUTE_NONE, TR_RECOMPUTE_SELECTIVE, TR_RECOMPUTE_FULL } tr_recompute;
typedef enum { TR_LR_COSINE, TR_LR_LINEAR, TR_LR_CONSTANT, TR_LR_WSD } tr_lr_schedule;
typedef enum { TR_RESUME_AUTO, TR_RESUME_NEVER, TR_RESUME_PATH } tr_resume;
typedef enum { TR_AUX_MICRO_BATCH, TR_AUX_SEQUENCE, TR_AUX_GLOBAL_BATCH } tr_aux_scope;
typedef enum { TR_DROP_POSITION, TR_DROP_PROBABILITY } tr_drop_policy;

/* Hugging Face names (LlamaConfig, MixtralConfig, Qwen2MoeConfig, DeepseekV3Config). */
typedef struct {
    char *from, *init_from;
    int64_t vocab_size, hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads;
    int64_t head_dim, intermediate_size;
    tr_activation hidden_act;
    double rope_theta, initializer_range;
    tr_norm_type norm_type;
    double rms_norm_eps, layer_norm_eps; /* of each type */
    int64_t sliding_window;              /* 0: none */
    bool tie_word_embeddings;
    /* mixture of experts; num_experts 0 = dense */
    int64_t num_experts, num_experts_per_tok, moe_intermediate_size;
    int64_t shared_expert_intermediate_size; /* 0: no shared expert */
    int64_t n_group, topk_group; /* groups of experts, and those a token chooses among */
    tr_score scoring_func;
    bool norm_topk_prob;
    double router_aux_loss_coef, router_z_loss_coef;
    tr_aux_scope router_aux_loss_scope;
    double expert_capacity_factor; /* 0: dropless */
    tr_drop_policy expert_drop_policy;
    int64_t decoder_sparse_step, first_k_dense_replace;
    tr_int_list mlp_only_layers;
} tr_model_config;

typedef struct {
    struct {
        char *name, *directory;
        int64_t seed;
        tr_device_kind device;
        tr_collectives collectives;
        tr_dtype dtype;
        int64_t threads;   /* 0: OMP_NUM_THREADS, or cores / ranks of the node */
        double peak_flops; /* a rank's, for MFU; 0: measured */
    } run;
    tr_model_config model;
    struct {
        int64_t pipeline, context, expert, tensor;
        int64_t context_heads; /* context ranks that exchange heads; the others form rings */
        tr_schedule_kind schedule;
        int64_t virtual_stages; /* of a pipeline rank */
        tr_exchange_kind expert_exchange;
        tr_wire expert_exchange_dtype;
        tr_recompute recompute;
        int64_t bucket_elems; /* gradient bucket size */
        int64_t zero;         /* stage */
        bool overlap;
    } parallel;
    struct {
        tr_data_list train, validation;
        int64_t sequence_length;
        int64_t pad_id;         /* -1: none. Pads are neither predicted, routed nor counted */
        double bytes_per_token; /* for bits per byte */
        bool mask; /* FILE.mask beside each data file: one byte a token, 0 = not predicted */
        bool document_mask;      /* attention stays inside a document */
        int64_t end_of_document; /* its last token; -1: Megatron's index says where they end */
        bool reset_position_ids; /* positions count from the document's beginning */
    } data;
    struct {
        int64_t steps, global_batch_size, micro_batch_size, evaluate_every, evaluate_batches;
        int64_t max_skipped_steps; /* consecutive non-finite steps before exit 70 */
        int64_t watchdog_seconds;  /* without progress of any rank before exit 70; 0: no limit */
    } training;
    struct {
        double learning_rate, min_learning_rate;
        int64_t warmup_steps, decay_steps; /* decay_steps: WSD's last part */
        tr_lr_schedule schedule;
        double beta1, beta2, epsilon, weight_decay, clip;
    } optimizer;
    struct {
        char *directory;
        int64_t every, keep;
        tr_resume resume;
        char *resume_path; /* with TR_RESUME_PATH */
    } checkpoint;
    struct {
        int64_t every;
        bool samples;
        bool tensorboard;
        bool routing;
        bool trace;
        int64_t trace_steps; /* 0: all */
    } log;
    /* state, for messages: the name it was read under, and where each setting was given (by row of
     * the table; NULL: nowhere, it has its default) */
    char *source, **places;
} tr_config;

/* Local, the same on every rank that reads the same bytes. Reads the file, applies `sets`
 * ("section.key=value", YAML values), fills defaults, checks every key by itself and all that can
 * be checked without knowing the world. TR_ERR_MISSING, or TR_ERR_USAGE naming file, line, key,
 * value and what would do. *config_p is set only on success. */
tr_status tr_config_read(const char *path, int nsets, char *const *sets, tr_config **config_p);
/* The same from text (a checkpoint's stored config); `name` is used in messages. */
tr_status tr_config_parse(const char *text, const char *name, int nsets, char *const *sets,
                          tr_config **config_p);
/* The same from a config that was read, with `sets` over it; `unsharded` leaves out section
 * parallel first, so that it has its defaults (but a schedule that router_aux_loss_scope needs):
 * what one rank runs. */
tr_status tr_config_alter(const tr_config *config, bool unsharded, int nsets, char *const *sets,
                          tr_config **config_p);
void tr_config_destroy(tr_config *config); /* NULL-safe */

/* Local. The resolved config as YAML that reads back to the same values. Caller frees. */
char *tr_config_print(const tr_config *config);
/* Local. The sections whose change forbids a resume (model, and what data is read in which order),
 * in the same form: equal text, same job. Caller frees. */
char *tr_config_identity(const tr_config *config);
/* Local. "section.key old -> new", a line each, of all settings outside the identity that differ
 * (what a resume may change and logs). Caller frees; "" if none differ. */
char *tr_config_changes(const tr_config *from, const tr_config *to);
/* Local. The value of "section.key" as YAML, for messages. Caller frees. */
char *tr_config_value(const tr_config *config, const char *name);
/* Local. `text` as a YAML string, for building a --set from an argument. Caller frees. */
char *tr_config_quote(const char *text);
/* "float32", "bfloat16", ... */
const char *tr_dtype_name(tr_dtype t);

/* Local. Names of the first differing key of two configs' identities, for messages. Caller frees;
 * NULL if none differ. */
char *tr_config_difference(const tr_config *a, const tr_config *b);

/* Local. Checks that need the world's size: divisibility of batch, experts, sequence, layers.
 * *data_p gets the size of the data axis. TR_ERR_USAGE with both numbers and the nearest that work.
 */
tr_status tr_config_check_world(const tr_config *config, int world, int64_t *data_p);

/* Local. The type of rows between the ranks of an expert group. */
static inline tr_dtype tr_config_wire(const tr_config *config) {
    return config->parallel.expert_exchange_dtype == TR_WIRE_SAME ? config->run.dtype : TR_BF16;
}

/* The table of settings as text, wrapped to 100 columns. */
void tr_config_help(FILE *to);

/* Local. Whether layer `i` has experts (decoder_sparse_step, mlp_only_layers,
 * first_k_dense_replace, num_experts). */
bool tr_config_layer_is_moe(const tr_model_config *model, int64_t layer);
