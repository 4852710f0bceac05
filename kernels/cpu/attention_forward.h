/* attention_forward.h - flash attention, forward (Dao 2023), compiled by attention_<level>.c.
 * Floor: kernels, internal.
 *
 * Threads share (head, block of queries). K (transposed) and V are packed once for a wave of kv
 * heads; then, for each block of keys, tiles of scores become probabilities and are multiplied by
 * V. Probabilities are relative to a row's maximum over an earlier block as long as no score
 * exceeds that by much: then they are made in the registers that hold the scores. Only where one
 * does, as in the first block, are scores stored to find the new maximum. Results do not depend on
 * the number of threads.
 *
 * Bound by multiply-adds. Of that peak on a Zen 4 core, S 4096 causal: fp32 85 % (head dimension
 * 64) and 88 % (128); bf16 77 and 84 % of twice as much. */
#pragma once
#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/stream.h"

#include <omp.h>

enum { FBR = 64, FBC = 256 }; /* queries and keys of a block */

/* The bits of 20.0f: scores may exceed what probabilities are relative to by this much, so that a
 * probability is at most 5e8 and the sum of any row is finite. */
enum { LIFT_BITS = 0x41a00000 };

typedef struct {
    const tr_attention *a; /* borrowed */
    plan plan;
    int64_t keys, key_blocks;          /* Sk up to whole blocks */
    int64_t wave;                      /* kv heads packed together */
    int64_t trans_floats, cols_floats; /* of a kv head */
    /* state */
    float *trans, *cols; /* [wave, ...]: K and V */
    uint8_t *dead, *any; /* [wave, keys], [wave, key_blocks]: rows of V that are not finite */
    char *threads;       /* work memory of each */
    int64_t thread_bytes;
} forward_call;

typedef struct { /* one block of queries of one head */
    const forward_call *f;
    int64_t rows;  /* computed, a multiple of MR */
    int64_t first; /* row 0 as a row of the call */
    const span *spans;
    const group *groups;
    const float *trans, *cols; /* of its kv head */
    /* work */
    float *q, *o; /* rows form, [Dqk]; sums, [Dv/NR][FBR][NR] */
    float *s, *p; /* [groups] of rows forms of MR rows: scores, probabilities (fp32 words: s) */
    float *m, *l, *decay;    /* [FBR]: row maximum, row sum, factor of what was summed so far */
    uint64_t live[FBR / MR]; /* panels of the present key block that a group sees */
} query_block;

static void query_block_take(query_block *x, const tr_attention *a, memory *at) {
    x->q = take(at, FBR * up(a->Dqk, NR) / KW, sizeof(float));
    x->s = take(at, FBR * FBC, sizeof(float));
    x->p = TR_PAIRS ? take(at, FBR * FBC / KW, sizeof(float)) : x->s;
    x->o = take(at, FBR * up(a->Dv, NR), sizeof(float));
    x->m = take(at, FBR, sizeof(float));
    x->l = take(at, FBR, sizeof(float));
    x->decay = take(at, FBR, sizeof(float));
}

static void pack_key_block(const forward_call *f, int64_t slot, int64_t index, int64_t block) {
    int64_t k0 = block * FBC, n = least(FBC, up(f->a->Sk - k0, NR));
    head k = key_head(f->a, index), v = value_head(f->a, index);
    pack_trans(&k, k0, n, f->trans + slot * f->trans_floats + k0 * trans_words(k.D));
    /* a panel of cols holds all keys */
    f->any[slot * f->key_blocks + block] =
        pack_cols_finite(&v, k0, n, f->keys, f->cols + slot * f->cols_floats + k0 / KW * NR,
                         f->dead + slot * f->keys + k0);
}

/* Caps a tile of scores; out of line, since its constants would cost the products their registers.
 */
static __attribute__((noinline)) void cap_tile(float *s, float cap) {
    for (int i = 0; i < 2 * MR; i++)
        vec_keep(s + i * VEC, vec_tanh(vec_words(s + i * VEC) / cap) * cap);
}

/* Group g sees nothing of the panel at key j, some of it (bits say what), or all. */
typedef enum { SEES_NONE, SEES_SOME, SEES_ALL } sight;

static inline sight look(const query_block *x, int64_t g, int64_t j, uint32_t bits[MR]) {
    const group *see = x->groups + g;
    if (j >= see->some.end || j + NR <= see->some.begin) return SEES_NONE;
    if (j >= see->all.begin && j + NR <= see->all.end) return SEES_ALL;
    return tile_bits(&x->f->a->mask, x->spans + g * MR, x->first + g * MR, j, bits) ? SEES_SOME
                                                                                    : SEES_NONE;
}

/* Scores of group g and the panel at key j, -inf where hidden; work: a tile of memory. */
VEC_FN void score_tile(const query_block *x, int64_t g, int64_t j, sight sees,
                       const uint32_t bits[MR], float *work, vec c[MR][2]) {
    const tr_attention *a = x->f->a;
    tile_clear(c);
    multiply_rows(c, 2, 0, parts(a->Dqk, KW), x->q + g * MR * KP, FBR,
                  x->trans + j * trans_words(a->Dqk));
    if (TR_PAIRS) {
        UNROLL for (int i = 0; i < MR; i++) {
            c[i][0] *= a->scale, c[i][1] *= a->scale;
        }
    }
    if (a->soft_cap > 0) {
        tile_store(c, 2, work);
        cap_tile(work, a->soft_cap);
        tile_load(c, 2, work);
    }
    if (sees == SEES_SOME) tile_hide(c, bits, -INFINITY);
}

/* Row i of a tile of probabilities, where value_tile reads them. */
VEC_FN void keep_probabilities(query_block *x, int64_t g, int64_t panel, int i, vec p0, vec p1) {
#if TR_PAIRS
    vec_keep(x->p + (g * FBC / NR + panel) * MR * KP + i * KP, word_row(p0, p1));
#else
    float *at = x->p + (g * FBC + panel * NR) * MR + i * NR;
    vec_keep(at, p0);
    vec_keep(at + VEC, p1);
#endif
}

/* Probabilities of group g and the keys k0..k0+n-1 relative to the maxima so far, straight from the
 * registers. False, with nothing done that counts, when a score is so far above its row's maximum
 * that they must be taken relative to a new one. */
VEC_FN bool attend_as_before(query_block *x, int64_t g, int64_t k0, int64_t n) {
    const float *m = x->m + g * MR;
    vec sum[MR];
    vec_i32 top = {0};
    uint64_t live = 0;
    for (int i = 0; i < MR; i++) {
        if (m[i] == -INFINITY) return false;
        sum[i] = (vec){0};
    }
    for (int64_t j = k0; j < k0 + n; j += NR) {
        uint32_t bits[MR];
        vec c[MR][2];
        sight sees = look(x, g, j, bits);
        if (sees == SEES_NONE) continue;
        live |= (uint64_t)1 << (j - k0) / NR;
        score_tile(x, g, j, sees, bits, x->s + (g * FBC + (j - k0)) * MR, c);
        UNROLL for (int i = 0; i < MR; i++) {
            vec base = vec_all(m[i]);
            c[i][0] -= base, c[i][1] -= base;
            top = bits_max(top, bits_max((vec_i32)c[i][0], (vec_i32)c[i][1]));
            c[i][0] = vec_exp_score(c[i][0]), c[i][1] = vec_exp_score(c[i][1]);
            sum[i] += c[i][0] + c[i][1];
            keep_probabilities(x, g, (j - k0) / NR, i, c[i][0], c[i][1]);
        }
    }
    if (bits_above(top, LIFT_BITS)) return false;
    x->live[g] = live;
    for (int i = 0; i < MR; i++) x->l[g * MR + i] += vec_sum_lanes(sum[i]);
    return true;
}

/* Scores of row i of group g become probabilities relative to m. Returns their sum. */
VEC_FN float row_probabilities(query_block *x, int64_t g, int i, float m) {
    const float *s = x->s + g * FBC * MR + i * NR;
    vec base = vec_all(m == -INFINITY ? 0 : m), sum = {0};
    int64_t first, last;
    for (uint64_t bits = x->live[g]; next_run(&bits, &first, &last);)
        for (int64_t j = first; j < last; j++) {
            vec p0 = vec_exp_score(vec_words(s + j * MR * NR) - base);
            vec p1 = vec_exp_score(vec_words(s + j * MR * NR + VEC) - base);
            sum += p0 + p1;
            keep_probabilities(x, g, j, i, p0, p1);
        }
    return vec_sum_lanes(sum);
}

/* The same relative to new maxima: scores are stored first. */
static void attend_anew(query_block *x, int64_t g, int64_t k0, int64_t n) {
    float *s = x->s + g * FBC * MR, *m = x->m + g * MR, *l = x->l + g * MR;
    vec top[MR];
    x->live[g] = 0;
    for (int i = 0; i < MR; i++) top[i] = vec_all(-INFINITY);
    for (int64_t j = k0; j < k0 + n; j += NR) {
        uint32_t bits[MR];
        vec c[MR][2];
        sight sees = look(x, g, j, bits);
        if (sees == SEES_NONE) continue;
        x->live[g] |= (uint64_t)1 << (j - k0) / NR;
        score_tile(x, g, j, sees, bits, s + (j - k0) * MR, c);
        tile_store(c, 2, s + (j - k0) * MR);
        UNROLL for (int i = 0; i < MR; i++) {
            top[i] = vec_max(top[i], vec_max(c[i][0], c[i][1]));
        }
    }
    for (int i = 0; i < MR && x->live[g]; i++) {
        float old = m[i], now = vec_max_lane(top[i]);
        if (old > now) now = old;
        float decay = old == now ? 1 : expf(old - now);
        m[i] = now;
        l[i] = l[i] * decay + row_probabilities(x, g, i, now);
        x->decay[g * MR + i] = decay;
    }
}

/* Probabilities of the keys k0..k0+n-1, and what they do to sums and maxima. */
static void attend(query_block *x, int64_t k0, int64_t n) {
    for (int64_t g = 0; g < x->rows / MR; g++) {
        for (int64_t r = g * MR; r < (g + 1) * MR; r++) x->decay[r] = 1;
        if (!attend_as_before(x, g, k0, n)) attend_anew(x, g, k0, n);
    }
}

VEC_FN void value_tile(const query_block *x, int64_t g, int64_t k0, const float *cols, int nv,
                       float *o) {
    const span some = x->groups[g].some;
    int64_t first, last;
    vec c[MR][2];
    tile_load(c, nv, o);
    tile_scale(c, nv, x->decay + g * MR);
    for (uint64_t bits = x->live[g]; next_run(&bits, &first, &last);) {
        int64_t begin = most(first * NR, some.begin - k0), end = least(last * NR, some.end - k0);
        multiply_rows(c, nv, begin / KW, parts(end, KW), x->p + g * FBC * MR / KW, MR, cols);
    }
    tile_store(c, nv, o);
}

/* o = decay o + p V over the keys k0..k0+n-1. */
static void value_tiles(query_block *x, int64_t k0) {
    const tr_attention *a = x->f->a;
    for (int64_t d = 0; d < a->Dv; d += NR) {
        const float *cols = x->cols + (d / NR * x->f->keys + k0) / KW * NR;
        for (int64_t g = 0; g < x->rows / MR; g++) {
            float *o = x->o + (d * FBR + g * MR * NR);
            if (!x->live[g]) continue;
            if (panel_vectors(a->Dv, d) == 2)
                value_tile(x, g, k0, cols, 2, o);
            else
                value_tile(x, g, k0, cols, 1, o);
        }
    }
}

/* What value_tiles left out: values that are not finite, for the rows that see them. */
static void add_dead_values(query_block *x, const head *v, const uint8_t *dead, int64_t k0,
                            int64_t n) {
    for (int64_t k = 0; k < n; k++)
        for (int64_t r = 0; r < x->rows && dead[k0 + k]; r++) {
            if (!(x->live[r / MR] >> k / NR & 1)) continue;
            float p = rows_element(x->p + r / MR * FBC * MR / KW, MR, r % MR, k);
            if (p != 0) add_row(v, k0 + k, p, x->o + r * NR, FBR);
        }
}

/* Writes row r as out[at..] and *lse, or merges it into them. */
static void finish_row(const query_block *x, int64_t r, int64_t at, float *lse, float sink) {
    const tr_attention *a = x->f->a;
    const float *o = x->o + r * NR;
    float m = x->m[r], l = x->l[r];
    bool nothing = l == 0;
    if (nothing && a->merge) return;
    if (!nothing && sink != -INFINITY) {
        float top = sink > m ? sink : m;
        float part = expf(m - top); /* o is relative to m */
        l = l * part + expf(sink - top);
        *lse = top + logf(l);
        unpack_row(a->out_t, a->out, at, a->Dv, o, FBR, part / l, false);
        return;
    }
    float block = m + logf(l), old = *lse;
    if (!a->merge || old == -INFINITY) {
        unpack_row(a->out_t, a->out, at, a->Dv, o, FBR, nothing ? 0 : 1 / l, false);
        *lse = nothing ? -INFINITY : block;
        return;
    }
    float top = old > block ? old : block, merged = top + log1pf(expf(-fabsf(old - block)));
    float share = expf(block - merged);
    for (int64_t d = 0; d < a->Dv; d += VEC) {
        vec was = vec_load_n(a->out_t, a->out, at + d, a->Dv - d);
        vec is = vec_words(o + d / NR * FBR * NR + d % NR) * (1 / l);
        vec_store_n(a->out_t, a->out, at + d, a->Dv - d, was - (was - is) * share);
    }
    *lse = merged;
}

static void forward_block(const forward_call *f, query_block *x, int64_t slot, int64_t b, int64_t h,
                          int64_t block) {
    const tr_attention *a = f->a;
    int64_t index = b * a->Hkv + h / (a->Hq / a->Hkv), q0 = block * FBR;
    int64_t planned = (f->plan.batches > 1 ? b : 0) * f->plan.blocks + block;
    int64_t rows = least(FBR, a->Sq - q0);
    span whole = f->plan.whole[planned];
    head q = query_head(a, b, h), v = value_head(a, index);
    x->f = f;
    x->rows = up(rows, MR);
    x->first = q0;
    x->spans = f->plan.rows + planned * FBR;
    x->groups = f->plan.groups + planned * FBR / MR;
    x->trans = f->trans + slot * f->trans_floats;
    x->cols = f->cols + slot * f->cols_floats;
    pack_rows(&q, q0, x->rows, FBR, x->q);
    for (int64_t r = 0; r < rows; r++)
        prefetch_row(a->out_t, a->out, b * a->out_batch + (q0 + r) * a->out_row + h * a->Dv, a->Dv);
    memset(x->o, 0, sizeof(float) * FBR * (size_t)up(a->Dv, NR));
    for (int64_t r = 0; r < FBR; r++) x->m[r] = -INFINITY, x->l[r] = x->decay[r] = 0;
    for (int64_t k0 = whole.begin / FBC * FBC; k0 < whole.end; k0 += FBC) {
        int64_t n = least(FBC, whole.end - k0);
        attend(x, k0, n);
        value_tiles(x, k0);
        if (f->any[slot * f->key_blocks + k0 / FBC])
            add_dead_values(x, &v, f->dead + slot * f->keys, k0, n);
    }
    for (int64_t r = 0; r < rows; r++)
        finish_row(x, r, b * a->out_batch + (q0 + r) * a->out_row + h * a->Dv,
                   a->lse + b * a->lse_batch + h * a->lse_head + q0 + r,
                   a->sink ? a->sink[h] : -INFINITY);
}

/* Lays the call's memory out in `at`; only counts while that has no base. */
static void forward_take(forward_call *f, int64_t threads, memory *at) {
    query_block x;
    memory one = {0};
    plan_take(&f->plan, at);
    f->trans = take(at, f->wave * f->trans_floats, sizeof(float));
    f->cols = take(at, f->wave * f->cols_floats, sizeof(float));
    f->dead = take(at, f->wave * f->keys, 1);
    f->any = take(at, f->wave * f->key_blocks, 1);
    query_block_take(&x, f->a, &one);
    f->thread_bytes = one.used;
    f->threads = take(at, threads * one.used, 1);
}

void TR_LEVEL(tr_attention_forward)(tr_stream *s, const tr_attention *a) {
    int64_t heads = a->B * a->Hkv, group_heads = a->Hkv > 0 ? a->Hq / a->Hkv : 0;
    if (heads * group_heads * a->Sq == 0) return;
    int64_t threads = omp_get_max_threads(), key_blocks = parts(a->Sk, FBC);
    forward_call f = {.a = a, .plan = plan_make(a, FBR)};
    f.key_blocks = key_blocks, f.keys = key_blocks * FBC;
    f.trans_floats = f.keys * trans_words(a->Dqk);
    f.cols_floats = f.keys / KW * up(a->Dv, NR);
    f.wave = wave_heads(heads, (f.trans_floats + f.cols_floats) * (int64_t)sizeof(float), threads);
    memory at = {0};
    forward_take(&f, threads, &at);
    at = (memory){tr_scratch((size_t)at.used), 0};
    forward_take(&f, threads, &at);
#pragma omp parallel if (heads * group_heads * f.plan.blocks > 1)
    {
        query_block x;
        memory work = {f.threads + omp_get_thread_num() * f.thread_bytes, 0};
        query_block_take(&x, a, &work);
#pragma omp for
        for (int64_t i = 0; i < f.plan.batches * f.plan.blocks; i++)
            plan_block(&f.plan, i / f.plan.blocks, i % f.plan.blocks);
        for (int64_t base = 0; base < heads; base += f.wave) {
            int64_t n = least(f.wave, heads - base), tasks = n * group_heads * f.plan.blocks;
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < n * key_blocks; i++)
                pack_key_block(&f, i / key_blocks, base + i / key_blocks, i % key_blocks);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < tasks; i++) {
                /* the longest rows of a causal mask first */
                int64_t block = f.plan.blocks - 1 - i % f.plan.blocks, q = i / f.plan.blocks;
                int64_t slot = q / group_heads, index = base + slot;
                forward_block(&f, &x, slot, index / a->Hkv,
                              index % a->Hkv * group_heads + q % group_heads, block);
                if (omp_get_thread_num() == 0) tr_stream_breathe(s);
            }
        }
    }
}
