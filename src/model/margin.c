/* margin.c - shows routing decisions, and how narrow each was, to whoever watches. Floor: model.
 *
 * Two choices are made for a token: its k experts, and by each of these whether it is kept where
 * the expert takes the likeliest tokens of a sequence. A decision's margin is the difference in
 * probability to what would have turned it; by position nothing narrow is decided. */
#include "model/layers.h"

#include "base/heap.h"

#include <math.h>
#include <stdlib.h>

static void *host_copy(const tr_env *c, const void *device, int64_t count, size_t size) {
    void *copy = tr_heap_alloc(count, size);
    c->device->copy(c->stream, copy, device, (size_t)count * size, TR_TO_HOST);
    return copy;
}

/* How good group g is: its best probability or, of sigmoids, the sum of its two best. */
static float worth_of(const tr_model_config *m, const float *prob, int64_t g) {
    int64_t size = m->num_experts / m->n_group;
    float first = 0, second = 0;
    for (int64_t e = g * size; e < (g + 1) * size; e++) {
        second = fmaxf(second, fminf(first, prob[e]));
        first = fmaxf(first, prob[e]);
    }
    return m->scoring_func == TR_SIGMOID ? first + second : first;
}

/* Whether group g is one of those that are chosen from. */
static bool is_kept(const tr_model_config *m, const float *prob, int64_t g) {
    int64_t before = 0;
    float mine = worth_of(m, prob, g);
    for (int64_t other = 0; other < m->n_group; other++) {
        float there = worth_of(m, prob, other);
        before += there > mine || (there == mine && other < g);
    }
    return before < m->topk_group;
}

/* Of what is chosen, the least; of what is left, the most. */
typedef struct {
    double in, out;
} margin;

static void add(margin *m, bool chosen, double prob) {
    if (chosen && prob < m->in) m->in = prob;
    if (!chosen && prob > m->out) m->out = prob;
}

static double gap_of(const margin *m) {
    return m->out < 0 ? 1 : m->in - m->out;
}

/* Probability of the last chosen expert less that of the best one left in its groups, or what the
 * last of its groups is worth less the best of the others, whichever is less; 1 when there was
 * nothing to choose. */
static double choice_margin(const tr_model_config *m, const float *prob, const int32_t *index) {
    int64_t size = m->num_experts / m->n_group, k = m->num_experts_per_tok;
    margin experts = {INFINITY, -1}, groups = {INFINITY, -1};
    for (int64_t g = 0; g < m->n_group; g++) {
        bool kept = is_kept(m, prob, g);
        add(&groups, kept, (double)worth_of(m, prob, g));
        for (int64_t e = g * size; e < (g + 1) * size && kept; e++) {
            bool chosen = false;
            for (int64_t j = 0; j < k; j++) chosen = chosen || index[j] == e;
            add(&experts, chosen, (double)prob[e]);
        }
    }
    double a = gap_of(&experts), b = gap_of(&groups);
    return a < b ? a : b;
}

/* On the host: the choices of whole sequences, and at each expert's limit the least probability
 * that it kept and the most that it dropped, [B,E]. */
typedef struct {
    int32_t *index, *taken;
    float *score;
    float *least_kept, *most_dropped;
} edges;

static void edges_find(edges *e, const tr_env *c, const tr_capacity_choices *choices) {
    int64_t E = c->config->num_experts, k = c->config->num_experts_per_tok, sequence = c->S * k;
    int64_t pairs = c->B * sequence;
    e->index = host_copy(c, choices->index, pairs, sizeof *e->index);
    e->score = host_copy(c, choices->score, pairs, sizeof *e->score);
    e->taken = host_copy(c, choices->taken, pairs, sizeof *e->taken);
    c->device->stream_wait(c->stream);
    e->least_kept = tr_heap_alloc(c->B * E, sizeof *e->least_kept);
    e->most_dropped = tr_heap_alloc(c->B * E, sizeof *e->most_dropped);
    for (int64_t i = 0; i < c->B * E; i++) {
        e->least_kept[i] = INFINITY;
        e->most_dropped[i] = -INFINITY;
    }
    for (int64_t i = 0; i < pairs; i++) {
        if (e->index[i] < 0) continue;
        int64_t place = i / sequence * E + e->index[i];
        bool kept = e->taken[i] >= 0;
        float *edge = kept ? &e->least_kept[place] : &e->most_dropped[place];
        *edge = kept ? fminf(*edge, e->score[i]) : fmaxf(*edge, e->score[i]);
    }
}

static void edges_free(edges *e) {
    free(e->index);
    free(e->score);
    free(e->taken);
    free(e->least_kept);
    free(e->most_dropped);
}

/* Row n of this rank: drops become -1, and a kept or dropped choice near the edge narrows gap. */
static void apply_edges(const edges *e, const tr_env *c, int64_t n, int32_t *index, float *gap) {
    const tr_model_config *m = c->config;
    int64_t k = m->num_experts_per_tok, row = c->first_row + n, b = row / c->S_loc;
    int64_t position = tr_sequence_position(&c->cut, c->grid->at.c, row % c->S_loc);
    for (int64_t j = 0; j < k; j++) {
        int64_t i = (b * c->S + position) * k + j, place = b * m->num_experts + index[j];
        if (index[j] < 0) continue;
        float narrow = e->taken[i] >= 0 ? e->score[i] - e->most_dropped[place]
                                        : e->least_kept[place] - e->score[i];
        if (m->expert_drop_policy == TR_DROP_PROBABILITY && narrow < *gap) *gap = narrow;
        index[j] = e->taken[i];
    }
}

void tr_router_show(const tr_moe_layer *l, const tr_pass *pass, const tr_saved *saved,
                    const tr_capacity_choices *choices) {
    const tr_env *c = pass->c;
    int64_t E = c->config->num_experts, k = c->config->num_experts_per_tok, N = c->N_loc;
    int32_t *index = host_copy(c, saved->t[TR_SAVED_INDEX], N * k, sizeof *index);
    float *prob = host_copy(c, saved->t[TR_SAVED_PROB], N * E, sizeof *prob);
    float *gap = tr_heap_alloc(N, sizeof *gap);
    c->device->stream_wait(c->stream);
    edges e = {0};
    if (choices->taken) edges_find(&e, c, choices);
    for (int64_t n = 0; n < N; n++) {
        gap[n] = (float)choice_margin(c->config, prob + n * E, index + n * k);
        if (choices->taken) apply_edges(&e, c, n, index + n * k, &gap[n]);
    }
    c->watch(c->watch_self, l->moe_index, index, gap);
    edges_free(&e);
    free(index);
    free(prob);
    free(gap);
}
