/* router.c - scores tokens against experts, decides who goes where, and balances the load.
 * Floor: model.
 *
 * Softmax or sigmoid top-k routing (Shazeer et al. 2017; Mixtral, Qwen-MoE; DeepSeek-V3 2024, eq.
 * 12-15, without its bias), within a token's best groups of experts where they are grouped
 * (DeepSeek-V2), auxiliary loss alpha*E*sum f_i P_i (Switch Transformer, Fedus et al. 2021, eq. 4,
 * with f over k choices; of sigmoids P_i is the mean share of a token's sum, DeepSeek-V3, eq.
 * 17-20) and z loss c*mean lse^2 (ST-MoE, Zoph et al. 2022, eq. 5). Balance is measured over the
 * tokens of a micro-batch (summed over the ranks that share it), of each sequence, or of the whole
 * step; pads do not count and are not routed. Capacity counts per sequence, so every grid drops the
 * same tokens. */
#include "model/layers.h"

#include "base/heap.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A row of balance sums: {tokens, sum lse^2, choices [E], probabilities [E]}. */
static int64_t stats_width(const tr_env *c) {
    return 2 + 2 * c->config->num_experts;
}

int64_t tr_router_groups(const tr_env *c) {
    return c->config->router_aux_loss_scope == TR_AUX_SEQUENCE ? c->B : 1;
}

/* alpha*E*sum f_i P_i of one group. */
static double balance_loss(const tr_env *c, const double *stats) {
    int64_t E = c->config->num_experts;
    double tokens = stats[0], k = (double)c->config->num_experts_per_tok, sum = 0;
    if (tokens == 0) return 0;
    for (int64_t e = 0; e < E; e++)
        sum += stats[2 + e] / (k * tokens) * (stats[2 + E + e] / tokens);
    return c->config->router_aux_loss_coef * (double)E * sum;
}

static tr_routing routing(const tr_model_config *m, bool renormalise) {
    return (tr_routing){.E = m->num_experts,
                        .k = m->num_experts_per_tok,
                        .groups = m->n_group,
                        .kept = m->topk_group,
                        .score = m->scoring_func,
                        .renormalise = renormalise};
}

/* Sums for the balance losses and the load of experts, from this micro-batch. */
static void measure(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved) {
    tr_env *c = pass->c;
    tr_routing how = routing(c->config, c->config->norm_topk_prob);
    int64_t E = how.E, G = tr_router_groups(c), width = stats_width(c);
    size_t bytes = (size_t)(G * width) * sizeof(double);
    double *device_stats = tr_scratch(c, G * width, TR_F64);
    c->kernels->router_stats(c->stream, &how, saved->t[TR_SAVED_PROB], saved->t[TR_SAVED_RLSE],
                             saved->t[TR_SAVED_INDEX], pass->valid, device_stats, c->first_row,
                             c->N / G, c->N_loc, G);
    c->device->copy(c->stream, saved->stats, device_stats, bytes, TR_TO_HOST);
    c->device->stream_wait(c->stream);
    for (int64_t g = 0; g < G; g++)
        for (int64_t e = 0; e < E; e++)
            c->sums.expert_load[l->moe_index * E + e] += saved->stats[g * width + 2 + e];
    tr_comm *sharers = c->grid->comm[TR_GROUP_MICRO_BATCH];
    tr_end(tr_all_reduce_begin(sharers, NULL, TR_SUM, TR_F64, saved->stats, G * width));
    if (tr_comm_rank(sharers) != 0) return; /* the group's sum is counted once */
    double share = 1.0 / ((double)c->micro_batches * (double)G);
    for (int64_t g = 0; g < G; g++) {
        const double *s = saved->stats + g * width;
        if (c->config->router_aux_loss_scope != TR_AUX_GLOBAL_BATCH)
            c->sums.aux_loss += share * balance_loss(c, s);
        if (s[0] > 0) c->sums.z_loss += share * c->config->router_z_loss_coef * s[1] / s[0];
    }
}

void tr_router_global_stats(tr_env *c, tr_saved **saved, int64_t count) {
    int64_t width = stats_width(c);
    tr_comm *stage = c->grid->comm[TR_GROUP_STAGE];
    double *sum = tr_heap_alloc(width, sizeof *sum);
    /* stats are already summed over the ranks that share a micro-batch: one of them speaks */
    bool speaks = tr_comm_rank(c->grid->comm[TR_GROUP_MICRO_BATCH]) == 0;
    for (int64_t i = 0; i < count && speaks; i++)
        for (int64_t j = 0; j < width; j++) sum[j] += saved[i]->stats[j];
    tr_end(tr_all_reduce_begin(stage, NULL, TR_SUM, TR_F64, sum, width));
    for (int64_t i = 0; i < count; i++) {
        double tokens = saved[i]->stats[0]; /* the z loss stays the micro-batch's own */
        double z = saved[i]->stats[1];
        memcpy(saved[i]->stats, sum, (size_t)width * sizeof *sum);
        saved[i]->stats[1] = tokens > 0 ? z / tokens * sum[0] : 0;
        saved[i]->micro_tokens = tokens;
    }
    if (tr_comm_rank(stage) == 0) c->sums.aux_loss += balance_loss(c, sum);
    free(sum);
}

/* Copies [B, S_loc, k] parts of the context ranks into one [B, S, k] in position order, or back. */
static void reorder(const tr_env *c, void *whole, void *parts, size_t pair_bytes, bool gather) {
    const tr_sequence *x = &c->cut;
    size_t row = (size_t)c->config->num_experts_per_tok * pair_bytes;
    for (int r = 0; r < x->size; r++)
        for (int64_t b = 0; b < c->B; b++)
            for (int64_t i = 0, run; i < x->S_loc; i += run) {
                run = tr_sequence_run(x, r, i);
                int64_t position = tr_sequence_position(x, r, i);
                char *w = (char *)whole + (size_t)(b * x->S + position) * row;
                char *p = (char *)parts + (size_t)((r * c->B + b) * x->S_loc + i) * row;
                c->device->copy(c->stream, gather ? w : p, gather ? p : w, (size_t)run * row,
                                TR_ON_DEVICE);
            }
}

/* `count` elements of each rank of a group, in the order of its ranks; `mine` if it is alone. */
static const void *gather(const tr_env *c, tr_group group, const void *mine, tr_dtype t,
                          int64_t count) {
    tr_comm *comm = c->grid->comm[group];
    size_t bytes = (size_t)count * tr_dtype_bytes(t);
    if (tr_comm_size(comm) == 1) return mine;
    char *all = tr_scratch(c, tr_comm_size(comm) * count, t);
    c->device->copy(c->stream, all + (size_t)tr_comm_rank(comm) * bytes, mine, bytes, TR_ON_DEVICE);
    tr_end(tr_all_gather_begin(comm, c->stream, t, all, count));
    return all;
}

/* [N_loc,k] of this rank -> [B,S,k] of the whole sequences: over tensor ranks, then context ranks.
 */
static const void *gather_sequences(const tr_env *c, const void *mine, tr_dtype t) {
    int64_t k = c->config->num_experts_per_tok;
    const void *rows = gather(c, TR_GROUP_TENSOR, mine, t, c->N_loc * k);
    const void *parts = gather(c, TR_GROUP_CONTEXT, rows, t, c->N * k);
    if (parts == rows) return rows;
    void *whole = tr_scratch(c, c->B * c->S * k, t);
    reorder(c, whole, (void *)parts, tr_dtype_bytes(t), true);
    return whole;
}

/* index[N_loc,k] without the pairs beyond the capacity of an expert in a whole sequence;
 * *choices_p: of all ranks that share the sequences. */
static const int32_t *limit(const tr_env *c, const int32_t *index, const float *score,
                            tr_capacity_choices *choices_p) {
    const tr_model_config *m = c->config;
    int cp = c->grid->at.shape.context;
    int64_t E = m->num_experts, k = m->num_experts_per_tok, first = c->first_row * k;
    int64_t capacity =
        (int64_t)ceil((double)(k * c->S) / (double)E * m->expert_capacity_factor - 1e-9);
    int32_t *taken = tr_scratch(c, c->B * c->S * k, TR_I32);
    *choices_p = (tr_capacity_choices){gather_sequences(c, index, TR_I32),
                                       gather_sequences(c, score, TR_F32), taken};
    c->kernels->router_capacity(c->stream, taken, choices_p->index, choices_p->score, c->B, c->S, E,
                                k, capacity, m->expert_drop_policy == TR_DROP_PROBABILITY);
    if (cp == 1) return taken + first;
    int32_t *parts = tr_scratch(c, c->B * c->S * k, TR_I32);
    reorder(c, taken, parts, sizeof *parts, false);
    return parts + c->grid->at.c * c->N * k + first;
}

void tr_router_open(const tr_env *c) {
    if (c->config->num_experts == 0 || c->config->expert_capacity_factor <= 0) return;
    tr_comm_expect_blocks(c->grid->comm[TR_GROUP_TENSOR], c->device);
    tr_comm_expect_blocks(c->grid->comm[TR_GROUP_CONTEXT], c->device);
}

void tr_router_forward(const tr_moe_layer *l, const tr_pass *pass, tr_saved *saved, const void *x) {
    tr_env *c = pass->c;
    const tr_model_config *m = c->config;
    int64_t E = m->num_experts, k = m->num_experts_per_tok, pairs = c->N_loc * k;
    float *prob = tr_save(pass, saved, TR_SAVED_PROB);
    float *lse = tr_save(pass, saved, TR_SAVED_RLSE);
    int32_t *index = tr_save(pass, saved, TR_SAVED_INDEX);
    float *weight = tr_save(pass, saved, TR_SAVED_WEIGHT);
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    float *logits = m->scoring_func == TR_SIGMOID ? tr_save(pass, saved, TR_SAVED_LOGITS)
                                                  : tr_scratch(c, c->N_loc * E, TR_F32);
    float *score = tr_scratch(c, pairs, TR_F32);
    tr_linear(c, logits, TR_F32, x, tr_param_at(c, l->router), c->N_loc, 0);
    const int32_t *taken = index;
    tr_capacity_choices choices = {0};
    if (m->expert_capacity_factor > 0) { /* capacity by score looks at weights as they came */
        tr_routing plain = routing(m, false);
        c->kernels->router_forward(c->stream, &plain, logits, pass->valid, prob, lse, index, score,
                                   c->N_loc);
        taken = limit(c, index, score, &choices);
    }
    tr_routing how = routing(m, m->norm_topk_prob);
    c->kernels->router_forward(c->stream, &how, logits, pass->valid, prob, lse, index, weight,
                               c->N_loc);
    tr_exchange_plan(pass, saved, taken, weight);
    measure(l, pass, saved);
    if (c->watch && pass->training) tr_router_show(l, pass, saved, &choices);
    tr_arena_release(c->scratch, mark);
}

/* Gradients of the balance losses: of each probability, prob_grad[g,e] = alpha*E*f_e/(T share), and
 * of each lse, z_grad[g]*lse. */
static void balance_gradient(const tr_env *c, const tr_saved *saved, float *prob_grad,
                             float *z_grad) {
    const tr_model_config *m = c->config;
    int64_t E = m->num_experts, G = tr_router_groups(c), width = stats_width(c);
    bool global = m->router_aux_loss_scope == TR_AUX_GLOBAL_BATCH;
    double share = 1.0 / ((double)c->micro_batches * (double)G);
    for (int64_t g = 0; g < G; g++) {
        const double *s = saved->stats + g * width;
        double tokens = s[0], micro_tokens = global ? saved->micro_tokens : tokens;
        double k = (double)m->num_experts_per_tok;
        double scale = tokens > 0 ? m->router_aux_loss_coef * (double)E / tokens : 0;
        if (!global) scale *= share;
        for (int64_t e = 0; e < E; e++)
            prob_grad[g * E + e] = tokens > 0 ? (float)(scale * s[2 + e] / (k * tokens)) : 0.0f;
        z_grad[g] =
            micro_tokens > 0 ? (float)(2.0 * m->router_z_loss_coef * share / micro_tokens) : 0.0f;
    }
}

void tr_router_backward(const tr_moe_layer *l, const tr_pass *pass, const tr_saved *saved,
                        const void *x, const float *dweight, void *dx) {
    const tr_env *c = pass->c;
    const tr_model_config *m = c->config;
    int64_t E = m->num_experts, G = tr_router_groups(c);
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    balance_gradient(c, saved, saved->balance, saved->balance + G * E);
    float *grads = tr_scratch(c, G * (E + 1), TR_F32);
    c->device->copy(c->stream, grads, saved->balance, (size_t)(G * (E + 1)) * sizeof *grads,
                    TR_TO_DEVICE);
    bool cast = c->t != TR_F32;
    float *dlogits = cast ? tr_scratch(c, c->N_loc * E, TR_F32) : tr_operand(pass, c->N_loc * E);
    tr_routing how = routing(m, m->norm_topk_prob);
    c->kernels->router_backward(c->stream, &how, dlogits, dweight, saved->t[TR_SAVED_LOGITS],
                                saved->t[TR_SAVED_PROB], saved->t[TR_SAVED_RLSE],
                                saved->t[TR_SAVED_INDEX], saved->t[TR_SAVED_WEIGHT], pass->valid,
                                grads, grads + G * E, c->first_row, c->N / G, c->N_loc);
    void *dlogits_t = dlogits;
    if (cast) {
        dlogits_t = tr_operand(pass, c->N_loc * E);
        c->kernels->cast(c->stream, c->t, dlogits_t, TR_F32, dlogits, c->N_loc * E);
    }
    tr_linear_input(c, dx, c->t, dlogits_t, tr_param_at(c, l->router), c->N_loc, 1);
    tr_linear_weight(pass, tr_param_at(c, l->router), dlogits_t, x, c->N_loc);
    tr_arena_release(c->scratch, mark);
}
