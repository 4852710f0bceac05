/* saved.c - the table of what a block saves for its backward. Floor: model. */
#include "model/layers.h"

#include "base/heap.h"

#include <stdlib.h>
#include <string.h>

/* Dropped by: no recomputation, full, selective and full. */
typedef enum { NEVER, FULL, SELECTIVE } drop_rule;
typedef enum { COMPUTE, FLOAT, INT32 } element;
typedef enum { TOKENS, LOCAL, PAIRS, HERE } rows_of; /* N; N_loc; N_loc*k; rows of experts */
typedef enum { W1, W_STAT, W_H, W_Q, W_KV2, W_SPREAD, W_HEADS, W_I, W_IE, W_E, W_SIG } width_of;

static const struct {
    drop_rule drop;
    element type;
    rows_of rows;
    width_of width;
    bool operand; /* of a weight gradient */
} table[TR_SAVED_COUNT] = {
    [TR_SAVED_X] = {NEVER, COMPUTE, LOCAL, W_H},
    [TR_SAVED_NORM1] = {SELECTIVE, COMPUTE, LOCAL, W_H, .operand = true},
    [TR_SAVED_STAT1] = {FULL, FLOAT, LOCAL, W_STAT},
    [TR_SAVED_Q] = {FULL, COMPUTE, TOKENS, W_Q},
    [TR_SAVED_KV] = {FULL, COMPUTE, TOKENS, W_KV2},
    [TR_SAVED_ATTN] = {SELECTIVE, COMPUTE, TOKENS, W_Q, .operand = true},
    [TR_SAVED_HEADS] = {SELECTIVE, COMPUTE, TOKENS, W_SPREAD},
    [TR_SAVED_LSE] = {SELECTIVE, FLOAT, TOKENS, W_HEADS},
    [TR_SAVED_MID] = {FULL, COMPUTE, LOCAL, W_H},
    [TR_SAVED_NORM2] = {SELECTIVE, COMPUTE, LOCAL, W_H, .operand = true},
    [TR_SAVED_STAT2] = {FULL, FLOAT, LOCAL, W_STAT},
    [TR_SAVED_GATE] = {FULL, COMPUTE, TOKENS, W_I},
    [TR_SAVED_UP] = {FULL, COMPUTE, TOKENS, W_I},
    [TR_SAVED_ACT] = {SELECTIVE, COMPUTE, TOKENS, W_I, .operand = true},
    [TR_SAVED_PROB] = {NEVER, FLOAT, LOCAL, W_E},
    [TR_SAVED_LOGITS] = {NEVER, FLOAT, LOCAL, W_SIG},
    [TR_SAVED_RLSE] = {NEVER, FLOAT, LOCAL, W1},
    [TR_SAVED_INDEX] = {NEVER, INT32, PAIRS, W1},
    [TR_SAVED_WEIGHT] = {NEVER, FLOAT, PAIRS, W1},
    [TR_SAVED_XE] = {FULL, COMPUTE, HERE, W_H, .operand = true},
    [TR_SAVED_GATE_E] = {FULL, COMPUTE, HERE, W_IE},
    [TR_SAVED_UP_E] = {FULL, COMPUTE, HERE, W_IE},
    [TR_SAVED_ACT_E] = {SELECTIVE, COMPUTE, HERE, W_IE, .operand = true},
    [TR_SAVED_YE] = {FULL, COMPUTE, HERE, W_H},
};

/* This tensor rank's part of the feed-forward's width. */
static int64_t own_width(const tr_env *c, int64_t width) {
    return tr_block_of(width, c->grid->at.shape.tensor, c->grid->at.t).count;
}

void tr_saved_init(const tr_env *c, tr_saved *saved, bool is_moe, int64_t mlp_width) {
    *saved = (tr_saved){.width = own_width(c, mlp_width)};
    if (!is_moe) return;
    int64_t E = c->config->num_experts, groups = tr_router_groups(c);
    tr_stops_init(c, saved);
    saved->stats = tr_heap_alloc(groups * (2 + 2 * E), sizeof *saved->stats);
    saved->balance = tr_heap_alloc(groups * (1 + E), sizeof *saved->balance);
}

void tr_saved_restart(const tr_env *c, tr_saved *saved, int64_t mlp_width) {
    memset(saved->t, 0, sizeof saved->t);
    saved->width = own_width(c, mlp_width);
}

void tr_saved_fini(tr_saved *saved) {
    tr_stops_fini(saved);
    free(saved->stats);
    free(saved->balance);
}

static int64_t width(const tr_env *c, const tr_saved *saved, tr_saved_id id) {
    const tr_model_config *m = c->config;
    switch (table[id].width) {
    case W1:
        return 1;
    case W_H:
        return m->hidden_size;
    case W_Q:
        return c->Hq * m->head_dim;
    case W_KV2:
        return 2 * c->cut.heads * c->Akv * m->head_dim;
    case W_SPREAD:
        return c->cut.heads > 1 ? c->Hq * m->head_dim : 0;
    case W_HEADS:
        return c->Hq;
    case W_I:
        return saved->width;
    case W_IE:
        return m->moe_intermediate_size;
    case W_E:
        return m->num_experts;
    case W_STAT:
        return tr_norm_statistics(m);
    case W_SIG:
        return m->scoring_func == TR_SIGMOID ? m->num_experts : 0;
    }
    return 0;
}

static int64_t rows(const tr_env *c, const tr_saved *saved, tr_saved_id id) {
    switch (table[id].rows) {
    case TOKENS:
        return c->N;
    case LOCAL:
        return c->N_loc;
    case PAIRS:
        return c->N_loc * c->config->num_experts_per_tok;
    case HERE:
        return tr_stop_of_experts(saved)->sorted;
    }
    return 0;
}

static size_t bytes(const tr_env *c, const tr_saved *saved, tr_saved_id id) {
    static const tr_dtype type[] = {[FLOAT] = TR_F32, [INT32] = TR_I32};
    tr_dtype t = table[id].type == COMPUTE ? c->t : type[table[id].type];
    return (size_t)(rows(c, saved, id) * width(c, saved, id)) * tr_dtype_bytes(t);
}

/* Whether a training forward keeps the tensor. */
static bool survives(const tr_env *c, tr_saved_id id) {
    switch (c->recompute) {
    case TR_RECOMPUTE_NONE:
        return true;
    case TR_RECOMPUTE_SELECTIVE:
        return table[id].drop != SELECTIVE;
    case TR_RECOMPUTE_FULL:
        return table[id].drop == NEVER;
    }
    return true;
}

static bool kept(const tr_pass *pass, tr_saved_id id) {
    if (table[id].drop == NEVER) return true;
    return pass->training && !pass->recomputing && survives(pass->c, id);
}

void *tr_save(const tr_pass *pass, tr_saved *saved, tr_saved_id id) {
    bool stays = kept(pass, id) || (pass->queue && table[id].operand);
    tr_arena *arena = stays ? pass->kept : pass->c->scratch;
    return saved->t[id] = tr_arena_alloc(arena, bytes(pass->c, saved, id));
}

/* Gradients, and rows of the tensor group, that queued weight gradients read. */
static int64_t operand_elems(const tr_env *c, const tr_saved *saved, bool is_moe) {
    const tr_model_config *m = c->config;
    int64_t tensor = c->grid->at.shape.tensor > 1, N = c->N, H = m->hidden_size;
    int64_t elems = N * ((c->Hq + 2 * c->Hkv) * m->head_dim + (1 + tensor) * H);
    if (saved->width) elems += N * (2 * saved->width + (1 + tensor) * H);
    if (is_moe)
        elems += c->N_loc * m->num_experts +
                 tr_stop_of_experts(saved)->sorted * (H + 2 * m->moe_intermediate_size);
    return elems;
}

void tr_saved_plan(const tr_env *c, bool is_moe, int64_t mlp_width, int64_t *kept_bytes_p,
                   int64_t *all_bytes_p, int64_t *operand_bytes_p) {
    tr_saved balanced = {.width = own_width(c, mlp_width), .stops = 1};
    balanced.stop[0].sorted = is_moe ? tr_stops_balanced(c) : 0;
    *kept_bytes_p = *all_bytes_p = is_moe ? tr_stops_bytes(c) : 0;
    *operand_bytes_p = operand_elems(c, &balanced, is_moe) * (int64_t)tr_dtype_bytes(c->t);
    for (int id = 0; id < (is_moe ? TR_SAVED_COUNT : TR_SAVED_PROB); id++) {
        int64_t b = (int64_t)bytes(c, &balanced, (tr_saved_id)id);
        *all_bytes_p += b;
        if (survives(c, (tr_saved_id)id))
            *kept_bytes_p += b;
        else if (table[id].operand)
            *operand_bytes_p += b;
    }
}

void tr_saved_forget(const tr_pass *pass, tr_saved *saved) {
    for (int id = 0; id < TR_SAVED_COUNT; id++)
        if (!kept(pass, (tr_saved_id)id)) saved->t[id] = NULL;
}
