/* moe.c - counting and sorting pairs of token and expert, integer work of N*k steps that is the
 * same code for every instruction set; the portable form of the rest, and the choice. Floor:
 * kernels. */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/moe_body.h"
#include "kernels/cpu/scratch.h"

/* --- statistics ------------------------------------------------------------------------------ */

enum { STATS_EXPERTS = 16 }; /* one cache line of probabilities */

typedef struct {
    const float *prob, *lse;
    float *inverse; /* [N] of the sum of a token's sigmoids; NULL: prob is a share as it is */
    const int32_t *index;
    const uint8_t *valid;
    double *stats;
    int64_t first, rows, N, E, k, blocks; /* rows a group, blocks of experts */
} stats_args;

typedef struct {
    int64_t begin, end;
} row_range;

/* The rows here that belong to group g. */
static row_range rows_of(const stats_args *a, int64_t g) {
    int64_t begin = g * a->rows - a->first, end = begin + a->rows;
    return (row_range){begin > 0 ? begin : 0, tr_min_i64(end, a->N)};
}

/* Tokens, squared lse and choices of group g. */
static void count_group(const stats_args *a, int64_t g) {
    double *to = a->stats + g * (2 + 2 * a->E), tokens = 0, squares = 0;
    row_range here = rows_of(a, g);
    memset(to + 2, 0, (size_t)a->E * sizeof *to);
    for (int64_t n = here.begin; n < here.end; n++) {
        if (a->valid && !a->valid[n]) continue;
        tokens += 1;
        squares += (double)a->lse[n] * (double)a->lse[n];
        for (int64_t j = 0; j < a->k; j++) to[2 + a->index[n * a->k + j]] += 1;
    }
    to[0] = tokens;
    to[1] = squares;
}

static void inverse_range(const void *args, int64_t begin, int64_t end) {
    const stats_args *a = args;
    for (int64_t n = begin; n < end; n++) {
        double sum = (double)TR_SIGMOID_FLOOR;
        for (int64_t e = 0; e < a->E; e++) sum += (double)a->prob[n * a->E + e];
        a->inverse[n] = (float)(1 / sum);
    }
}

/* Sum of the shares of group g over a few neighbouring experts. */
static void sum_probs(const stats_args *a, int64_t g, int64_t block) {
    int64_t first = block * STATS_EXPERTS, count = tr_min_i64(STATS_EXPERTS, a->E - first);
    double sum[STATS_EXPERTS] = {0};
    row_range here = rows_of(a, g);
    for (int64_t n = here.begin; n < here.end; n++) {
        if (a->valid && !a->valid[n]) continue;
        const float *p = a->prob + n * a->E + first;
        double scale = a->inverse ? (double)a->inverse[n] : 1;
        for (int64_t e = 0; e < count; e++) sum[e] += (double)p[e] * scale;
    }
    memcpy(a->stats + g * (2 + 2 * a->E) + 2 + a->E + first, sum, (size_t)count * sizeof *sum);
}

/* Item i is a block of experts of a group; the last of each group counts. */
static void stats_range(const void *args, int64_t begin, int64_t end) {
    const stats_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t g = i / (a->blocks + 1), block = i % (a->blocks + 1);
        if (block == a->blocks)
            count_group(a, g);
        else
            sum_probs(a, g, block);
    }
}

static void router_stats(tr_stream *s, const tr_routing *how, const float *prob, const float *lse,
                         const int32_t *index, const uint8_t *valid, double *stats, int64_t first,
                         int64_t rows, int64_t N, int64_t G) {
    (void)s;
    if (G <= 0) return;
    int64_t E = how->E, k = how->k, blocks = (E + STATS_EXPERTS - 1) / STATS_EXPERTS;
    stats_args a = {prob, lse, NULL, index, valid, stats, first, rows, N, E, k, blocks};
    if (how->score == TR_SIGMOID) {
        a.inverse = tr_scratch((size_t)(N + 1) * sizeof *a.inverse);
        tr_for_range(inverse_range, &a, N, N * E * (int64_t)sizeof(float));
    }
    tr_for_range(stats_range, &a, G * (blocks + 1), N * (E + k) * (int64_t)sizeof(float));
}

/* --- capacity -------------------------------------------------------------------------------- */

enum { SELECT_EXPERTS = 256, SELECT_BITS = 4, SELECT_DIGITS = 1 << SELECT_BITS };

typedef struct {
    int32_t *taken;
    const int32_t *index;
    const float *score;
    int64_t S, E, k, capacity, blocks; /* blocks of experts handled together */
    bool by_score;
} capacity_args;

/* Orders floats as unsigned integers. */
static uint32_t order_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u ^ (u >> 31 ? 0xffffffffu : 0x80000000u);
}

/* The pairs of one sequence, and the experts looked at: e of index, less `first`, below `count`. */
typedef struct {
    const int32_t *index;
    const float *score;
    int64_t pairs, first, count;
} pair_set;

/* The expert of pair i within the set, or -1. */
static int64_t expert_of(const pair_set *p, int64_t i) {
    int64_t e = p->index[i] - p->first;
    return e >= 0 && e < p->count ? e : -1;
}

/* Finds for each expert the score of the pair that takes its last place (0 if places are left) by
 * radix selection: four bits of the score a pass, from the highest. places[e] becomes the number of
 * pairs of exactly that score that are kept. */
static void select_threshold(const pair_set *p, uint32_t *threshold, int64_t *places) {
    static const uint32_t digit_mask = SELECT_DIGITS - 1;
    memset(threshold, 0, (size_t)p->count * sizeof *threshold);
    for (int shift = 32 - SELECT_BITS; shift >= 0; shift -= SELECT_BITS) {
        int64_t seen[SELECT_EXPERTS][SELECT_DIGITS] = {{0}};
        uint32_t prefix = shift + SELECT_BITS == 32 ? 0 : ~0u << (shift + SELECT_BITS);
        for (int64_t i = 0; i < p->pairs; i++) {
            int64_t e = expert_of(p, i);
            if (e < 0) continue;
            uint32_t key = order_of(p->score[i]);
            if (((key ^ threshold[e]) & prefix) == 0) seen[e][key >> shift & digit_mask]++;
        }
        for (int64_t e = 0; e < p->count; e++) {
            uint32_t digit = digit_mask;
            for (; digit > 0 && seen[e][digit] < places[e]; digit--) places[e] -= seen[e][digit];
            threshold[e] |= digit << shift;
        }
    }
}

/* Items are blocks of experts of a sequence. */
static void capacity_range(const void *args, int64_t begin, int64_t end) {
    const capacity_args *a = args;
    for (int64_t item = begin; item < end; item++) {
        int64_t start = item / a->blocks * a->S * a->k;
        int64_t first = item % a->blocks * SELECT_EXPERTS;
        pair_set p = {a->index + start, a->score + start, a->S * a->k, first,
                      tr_min_i64(SELECT_EXPERTS, a->E - first)};
        int64_t places[SELECT_EXPERTS];
        uint32_t threshold[SELECT_EXPERTS];
        for (int64_t e = 0; e < p.count; e++) places[e] = a->capacity;
        if (a->by_score) select_threshold(&p, threshold, places);
        for (int64_t i = 0; i < p.pairs; i++) {
            int64_t e = expert_of(&p, i);
            if (e < 0) continue;
            uint32_t key = a->by_score ? order_of(p.score[i]) : 0;
            uint32_t bar = a->by_score ? threshold[e] : 0;
            if (key > bar || (key == bar && places[e]-- > 0)) a->taken[start + i] = p.index[i];
        }
    }
}

static void router_capacity(tr_stream *s, int32_t *taken, const int32_t *index, const float *score,
                            int64_t B, int64_t S, int64_t E, int64_t k, int64_t capacity,
                            bool by_score) {
    (void)s;
    if (B * S * k == 0) return;
    memset(taken, 0xff, (size_t)(B * S * k) * sizeof *taken);
    int64_t blocks = (E + SELECT_EXPERTS - 1) / SELECT_EXPERTS;
    capacity_args a = {taken, index, score, S, E, k, capacity, blocks, by_score};
    tr_for_range(capacity_range, &a, B * blocks, B * S * k * 64);
}

/* --- sorting --------------------------------------------------------------------------------- */

/* The place of pair j of a row; -1 if it has none, or an earlier pair has the same. */
static inline int64_t place_of(const int32_t *index, const int32_t *place, int64_t j) {
    if (index[j] < 0 || !place) return index[j];
    int64_t p = place[index[j]];
    for (int64_t i = 0; i < j; i++)
        if (index[i] >= 0 && place[index[i]] == p) return -1;
    return p;
}

/* Counting sort. While rows are placed, offsets[p+1] is where the next row of place p goes: at the
 * end it is where place p ends, as it should be. */
static void moe_sort(tr_stream *s, int64_t *offsets, int32_t *row_of, int32_t *pair_of,
                     const int32_t *index, const int32_t *place, int64_t N, int64_t P, int64_t k) {
    (void)s;
    int64_t rows = 0;
    memset(offsets, 0, (size_t)(P + 1) * sizeof *offsets);
    for (int64_t n = 0; n < N; n++)
        for (int64_t j = 0; j < k; j++) {
            int64_t p = place_of(index + n * k, place, j);
            row_of[n * k + j] = (int32_t)p; /* for the second pass */
            if (p >= 0) offsets[p + 1]++;
        }
    for (int64_t p = 0; p < P; p++) {
        int64_t count = offsets[p + 1];
        offsets[p + 1] = rows;
        rows += count;
    }
    for (int64_t i = 0; i < N * k; i++) {
        if (row_of[i] < 0) continue;
        int64_t r = offsets[row_of[i] + 1]++;
        row_of[i] = (int32_t)r;
        pair_of[r] = (int32_t)i;
    }
}

void tr_cpu_moe(tr_kernels *k, tr_cpu_level level) {
    if (level >= TR_CPU_AVX512)
        tr_moe_avx512(k);
    else if (level >= TR_CPU_AVX2)
        tr_moe_avx2(k);
    else
        fill_rows(k);
    k->router_stats = router_stats;
    k->router_capacity = router_capacity;
    k->moe_sort = moe_sort;
}
