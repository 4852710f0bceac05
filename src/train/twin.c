/* twin.c - shrinks a config, one dimension after the other. Floor: train. */
#include "train/twin.h"

#include "base/heap.h"
#include "model/stages.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { TRIES = 64, FEW_MICRO_BATCHES = 32, LAYERS_A_STAGE = 2, LEAST_LENGTH = 24 };

typedef struct {
    int world;
    int64_t data;   /* size of the data axis */
    tr_config *now; /* the smallest accepted so far */
} shrinker;

/* Settings that are given together, as --set has them. */
enum { MOST_SETS = 8 };
typedef struct {
    char *text[MOST_SETS];
    int count;
} sets;

static void add(sets *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add(sets *s, const char *format, ...) {
    va_list args;
    va_start(args, format);
    s->text[s->count++] = tr_heap_vformat(format, args);
    va_end(args);
}

/* The config with these settings, if the program takes it. Frees the settings. */
static tr_status change(shrinker *s, sets *given) {
    tr_config *changed = NULL;
    int64_t data;
    tr_status status = tr_config_alter(s->now, false, given->count, given->text, &changed);
    if (status == TR_OK) status = tr_config_check_world(changed, s->world, &data);
    for (int i = 0; i < given->count; i++) free(given->text[i]);
    if (status != TR_OK) {
        tr_config_destroy(changed);
        return status;
    }
    tr_config_destroy(s->now);
    s->now = changed;
    s->data = data;
    return TR_OK;
}

static bool try(shrinker *s, sets *given) {
    return change(s, given) == TR_OK;
}

/* The first of unit, 2*unit, ... from `least` on, below what it is now. */
static void narrow(shrinker *s, const char *key, int64_t now, int64_t least, int64_t unit) {
    int64_t value = tr_round_up(least, unit);
    for (int i = 0; i < TRIES && value < now; i++, value += unit) {
        sets given = {0};
        add(&given, "model.%s=%lld", key, (long long)value);
        if (try(s, &given)) return;
    }
}

/* --- layers ------------------------------------------------------------------------------------
 */

/* The layer of `from` that layer j of the n in the twin's stage stands for: spread evenly, and the
 * last one of the other kind if that is missing. */
static int64_t stand_for(const tr_model_config *m, tr_range from, int64_t n, int64_t j) {
    bool kind = tr_config_layer_is_moe(m, from.first);
    int64_t layer = from.first + tr_block_of(from.count, n, j).first;
    for (int64_t i = 0; i < n; i++)
        if (tr_config_layer_is_moe(m, from.first + tr_block_of(from.count, n, i).first) != kind)
            return layer;
    for (int64_t i = from.first; i < from.first + from.count && j == n - 1; i++)
        if (tr_config_layer_is_moe(m, i) != kind) return i;
    return layer;
}

/* Two layers a (virtual) stage, and one more in the first where the layers do not divide. */
static void fewer_layers(shrinker *s) {
    const tr_model_config *m = &s->now->model;
    tr_stages stages = tr_stages_of(s->now);
    int64_t count = tr_stages_count(&stages), L = m->num_hidden_layers;
    int64_t few = count * LAYERS_A_STAGE + (L % count > 0);
    if (few >= L) return;
    tr_heap_text list;
    tr_heap_text_begin(&list);
    int64_t listed = 0;
    for (int64_t i = 0; i < few && m->num_experts > 0; i++) {
        int64_t stage = tr_stage_of_layer(&stages, few, i);
        tr_range mine = tr_stage_layers(&stages, few, stage);
        tr_range from = tr_stage_layers(&stages, L, stage);
        if (tr_config_layer_is_moe(m, stand_for(m, from, mine.count, i - mine.first))) continue;
        fprintf(list.to, "%s%lld", listed++ ? "," : "", (long long)i);
    }
    char *dense = tr_heap_text_end(&list);
    sets given = {0};
    add(&given, "model.num_hidden_layers=%lld", (long long)few);
    add(&given, "model.mlp_only_layers=[%s]", dense);
    add(&given, "model.first_k_dense_replace=0");
    add(&given, "model.decoder_sparse_step=1");
    try(s, &given);
    free(dense);
}

/* --- widths ------------------------------------------------------------------------------------
 */

/* Fewer heads in the same ratio. Ranks that share them, by tensor or by context_heads, have whole
 * key/value heads, or copies of one, as they had before. */
static void fewer_heads(shrinker *s) {
    const tr_model_config *m = &s->now->model;
    int64_t keys = m->num_key_value_heads, ratio = m->num_attention_heads / keys;
    int64_t unit = s->now->parallel.tensor * s->now->parallel.context_heads;
    int64_t least = unit > 2 ? unit : 2;
    if (keys % unit) return;
    for (int64_t few = tr_round_up(least, unit); few < keys; few += unit) {
        sets given = {0};
        add(&given, "model.num_attention_heads=%lld", (long long)(few * ratio));
        add(&given, "model.num_key_value_heads=%lld", (long long)few);
        if (try(s, &given)) return;
    }
}

/* Weights grow as rows shorten, so that activations keep their size and attention its contrast. */
static void narrower_stream(shrinker *s) {
    int64_t wide = s->now->model.hidden_size;
    narrow(s, "hidden_size", wide, 32, 16);
    double grown = sqrt((double)wide / (double)s->now->model.hidden_size);
    sets given = {0};
    add(&given, "model.initializer_range=%.9g", s->now->model.initializer_range * grown);
    try(s, &given);
}

static void narrower(shrinker *s) {
    fewer_heads(s);
    narrow(s, "head_dim", s->now->model.head_dim, 8, 8);
    narrower_stream(s);
    narrow(s, "intermediate_size", s->now->model.intermediate_size, 48, 24);
    narrow(s, "moe_intermediate_size", s->now->model.moe_intermediate_size, 24, 24);
    narrow(s, "shared_expert_intermediate_size", s->now->model.shared_expert_intermediate_size, 24,
           24);
}

/* An odd vocabulary stays odd: 50257 becomes 145. */
static void smaller_vocabulary(shrinker *s) {
    int64_t V = s->now->model.vocab_size, few = 128 + V % 64, pad = s->now->data.pad_id;
    int64_t end = s->now->data.end_of_document;
    if (few >= V) return;
    sets given = {0};
    add(&given, "model.vocab_size=%lld", (long long)few);
    add(&given, "data.pad_id=%lld", (long long)(pad < few ? pad : few - 1));
    add(&given, "data.end_of_document=%lld", (long long)(end < few ? end : few - 1));
    try(s, &given);
}

/* --- the batch ---------------------------------------------------------------------------------
 */

/* Shorter sequences with the same rest over 2 * context; a window keeps its share of them. */
static void shorter(shrinker *s) {
    int64_t S = s->now->data.sequence_length, W = s->now->model.sliding_window;
    int64_t unit = 2 * s->now->parallel.context;
    int64_t few = tr_round_up(LEAST_LENGTH, unit) + S % unit;
    for (int i = 0; i < TRIES && few < S; i++, few += unit) {
        sets given = {0};
        int64_t window = W < S ? tr_ceil_div(W * few, S) : W;
        add(&given, "data.sequence_length=%lld", (long long)few);
        add(&given, "model.sliding_window=%lld", (long long)window);
        if (try(s, &given)) return;
    }
}

static void smaller_batch(shrinker *s) {
    int64_t B = s->now->training.micro_batch_size, p = s->now->parallel.pipeline;
    int64_t m = s->now->training.global_batch_size / (B * s->data);
    int64_t few_m = tr_round_up(FEW_MICRO_BATCHES, p) + m % p, few_B = B > 2 ? 2 : B;
    if (few_m > m) few_m = m;
    sets given = {0};
    add(&given, "training.micro_batch_size=%lld", (long long)few_B);
    add(&given, "training.global_batch_size=%lld", (long long)(few_B * few_m * s->data));
    try(s, &given);
}

/* --- the whole ---------------------------------------------------------------------------------
 */

/* What is not about size: no files, two steps, several gradient buckets. */
static tr_status lay_aside(shrinker *s) {
    const tr_config *c = s->now;
    sets given = {0};
    add(&given, "run.dtype=float32");
    add(&given, "model.init_from=null");
    add(&given, "data.train=[]");
    add(&given, "data.validation=[]");
    add(&given, "training.evaluate_every=0");
    add(&given, "parallel.expert_exchange_dtype=same");
    if (c->training.steps < 2) add(&given, "training.steps=2");
    if (c->parallel.bucket_elems > 4096) add(&given, "parallel.bucket_elems=4096");
    return change(s, &given);
}

tr_status tr_twin_create(const tr_config *config, int world, tr_config **twin_p) {
    shrinker s = {.world = world};
    TR_TRY(tr_config_alter(config, false, 0, NULL, &s.now));
    tr_status status = lay_aside(&s);
    if (status != TR_OK) {
        tr_config_destroy(s.now);
        return tr_context(TR_ERR_INTERNAL, "the twin of a config that is accepted");
    }
    fewer_layers(&s);
    narrower(&s);
    smaller_vocabulary(&s);
    shorter(&s);
    smaller_batch(&s);
    *twin_p = s.now;
    return TR_OK;
}
