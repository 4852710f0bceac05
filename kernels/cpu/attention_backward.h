/* attention_backward.h - flash attention, backward (Dao 2023), compiled by attention_<level>.c.
 * Floor: kernels, internal.
 *
 * A task is a block of keys of one kv head: it walks over the blocks of queries that see it, for
 * each query head of the group. dK and dV of the block stay in cache; dQ is added to in place. Two
 * tasks may meet at a block of dQ: they add in the order of their keys (a counter per block says
 * whose turn it is), so that results do not depend on the number of threads. Tasks are handed out
 * by key block first, so that neighbours in time belong to different heads and rarely wait. A task
 * only waits for tasks handed out before it.
 *
 * P = exp(S - lse), dS = P (dO V^T - delta), delta = rowsum(dO out), dV = P^T dO, dK = dS^T Q,
 * dQ = dS K. Where a row sees one key, P is 1 and dS is 0 exactly: S and lse, dO V^T and delta are
 * computed by the same chains of fma.
 *
 * Bound by multiply-adds. Of that peak on a Zen 4 core, S 4096 causal: fp32 87 % (head dimension
 * 64) and 86 % (128); bf16 80 and 82 % of twice as much. The rest: at this length the queries of a
 * head (6 MB at 128) come from the third cache at each visit, which a longer block of keys makes
 * rarer.
 */
#pragma once
#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/stream.h"

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

enum {
    BBR = 128,
    BBC = 192,
    BREATH = 16
}; /* queries and keys of a block: more keys, fewer visits to the queries; visits of a breath */

typedef struct {               /* a query head of the wave, all its rows */
    float *q, *dout;           /* rows form by blocks: [blocks][D/NR][BBR][KP] */
    float *q_cols, *dout_cols; /* cols form by blocks (fp32 words: q and dout themselves) */
    float *dq;                 /* sums, by blocks: [blocks][Dqk/NR][BBR][NR] */
    float *lse, *delta;        /* [rows]; lse is infinity where a row sees nothing: P is 0 */
    uint8_t *dead;             /* [rows] of those */
    double *sink;              /* [blocks]: the part of dsink */
    atomic_int *turn;          /* [blocks]: the key block that adds to dq next */
} query_state;

typedef struct {
    tr_stream *stream;     /* borrowed */
    const tr_attention *a; /* borrowed */
    plan plan;
    int64_t key_blocks, group_heads;
    int64_t wave; /* kv heads in work together */
    /* state */
    query_state *queries; /* [wave * group_heads] */
    char *threads;
    int64_t thread_bytes;
    atomic_llong next; /* task to be handed out */
} backward_call;

typedef struct { /* one block of keys of one kv head */
    const backward_call *f;
    int64_t first, n; /* keys of the call */
    head k;
    bool any; /* a key is not finite: dead says which */
    /* work */
    float *k_trans, *v_trans, *k_cols; /* packed */
    float *dk, *dv;                    /* sums: [D/NR][BBC][NR] */
    float *p, *slope;                  /* [BBR][NR]: probabilities of a panel, the cap's slope */
    float *p_cols;                     /* the same as words along the rows */
    float *ds;                         /* rows form: [BBC/NR][BBR][KP] */
    float *ds_cols;                    /* of a panel, words along the rows */
    uint8_t dead[BBC];
    /* of the present block of queries */
    const group *groups;
    int64_t groups_n;
    uint64_t live[BBR / MR]; /* panels that a group sees */
} key_block;

static void key_block_take(key_block *x, const tr_attention *a, memory *at) {
    int64_t qk = up(a->Dqk, NR), v = up(a->Dv, NR);
    x->k_trans = take(at, BBC * trans_words(a->Dqk), sizeof(float));
    x->v_trans = take(at, BBC * trans_words(a->Dv), sizeof(float));
    x->k_cols = take(at, BBC / KW * qk, sizeof(float));
    x->dk = take(at, BBC * qk, sizeof(float));
    x->dv = take(at, BBC * v, sizeof(float));
    x->p = take(at, BBR * NR, sizeof(float));
    x->slope = take(at, BBR * NR, sizeof(float));
    x->p_cols = TR_PAIRS ? take(at, BBR / KW * NR, sizeof(float)) : x->p;
    x->ds = take(at, BBR * BBC / KW, sizeof(float));
    x->ds_cols = TR_PAIRS ? take(at, BBR / KW * NR, sizeof(float)) : NULL;
}

static void query_state_take(query_state *x, const tr_attention *a, int64_t blocks, memory *at) {
    int64_t rows = blocks * BBR, qk = rows * up(a->Dqk, NR), v = rows * up(a->Dv, NR);
    x->q = take(at, qk / KW, sizeof(float));
    x->dout = take(at, v / KW, sizeof(float));
    x->q_cols = TR_PAIRS ? take(at, qk / KW, sizeof(float)) : x->q;
    x->dout_cols = TR_PAIRS ? take(at, v / KW, sizeof(float)) : x->dout;
    x->dq = take(at, qk, sizeof(float));
    x->lse = take(at, 2 * rows, sizeof(float));
    x->delta = x->lse ? x->lse + rows : NULL;
    x->dead = take(at, rows, 1);
    x->sink = take(at, blocks, sizeof(double));
    x->turn = take(at, blocks, sizeof(atomic_int));
}

/* --- before the tasks: query heads, block by block -----------------------------------------------
 */

/* delta of the VEC rows from r on, in word_fma's order of products. */
static vec delta_rows(const head *out, const head *dout, int64_t r) {
    vec sum = {0};
    for (int64_t d = 0; d < dout->D; d += VEC) {
        vec x[VEC], y[VEC];
        UNROLL for (int i = 0; i < VEC; i++) {
            x[i] = head_values(dout, dout->t, r + i, d);
            y[i] = head_values(out, out->t, r + i, d);
        }
        vec_transpose(x);
        vec_transpose(y);
        UNROLL for (int i = 0; i < VEC; i++) {
            int w = TR_PAIRS ? i ^ 1 : i;
            sum = vec_fma(x[w], y[w], sum);
        }
    }
    return sum;
}

static span block_whole(const backward_call *f, int64_t b, int64_t block) {
    return f->plan.whole[(f->plan.batches > 1 ? b : 0) * f->plan.blocks + block];
}

static void write_dq(const tr_attention *a, const query_state *x, int64_t b, int64_t h,
                     int64_t block) {
    const float *from = x->dq + block * BBR * up(a->Dqk, NR);
    int64_t q0 = block * BBR;
    unpack_rows(a->grad_t, a->dq, b * a->q_batch + q0 * a->q_row + h * a->Dqk, a->q_row,
                least(BBR, a->Sq - q0), a->Dqk, from, BBR, a->scale, a->add_dq);
}

/* lse, delta and the sink's gradient of a block's rows. */
static void query_rows(const backward_call *f, const query_state *x, int64_t b, int64_t h,
                       int64_t block, const head *dout) {
    const tr_attention *a = f->a;
    int64_t q0 = block * BBR, n = least(BBR, a->Sq - q0);
    const span *rows = f->plan.rows + (f->plan.batches > 1 ? b : 0) * f->plan.blocks * BBR;
    head out = {.at = tr_at(a->out_t, a->out, b * a->out_batch + h * a->Dv),
                .row = a->out_row,
                .n = a->Sq,
                .D = a->Dv,
                .t = a->out_t,
                .scale = 1,
                .dead = x->dead};
    for (int64_t r = q0; r < q0 + BBR; r++) {
        float lse = r < q0 + n ? a->lse[b * a->lse_batch + h * a->lse_head + r] : -INFINITY;
        x->dead[r] = rows[r].begin == rows[r].end || lse == -INFINITY;
        x->lse[r] = x->dead[r] ? INFINITY : lse;
    }
    for (int64_t r = q0; r < q0 + up(n, VEC); r += VEC)
        vec_keep(x->delta + r, delta_rows(&out, dout, r));
    x->sink[block] = 0;
    for (int64_t r = q0; r < q0 + n && a->dsink && a->sink; r++)
        x->sink[block] -= (double)expf(a->sink[h] - x->lse[r]) * (double)x->delta[r];
}

static void pack_query_block(const backward_call *f, const query_state *x, int64_t b, int64_t h,
                             int64_t block) {
    const tr_attention *a = f->a;
    int64_t q0 = block * BBR, n = up(least(BBR, a->Sq - q0), MR);
    int64_t qk = block * BBR * up(a->Dqk, NR), v = block * BBR * up(a->Dv, NR);
    head q = query_head(a, b, h);
    head dout = head_of(a, a->dout, b * a->dout_batch + h * a->Dv, a->dout_row, a->Sq, a->Dv, 1);
    span whole = block_whole(f, b, block);
    q.dead = dout.dead = x->dead;
    query_rows(f, x, b, h, block, &dout);
    pack_rows(&q, q0, n, BBR, x->q + qk / KW);
    pack_rows(&dout, q0, n, BBR, x->dout + v / KW);
    if (TR_PAIRS) {
        pack_cols(&q, q0, n, BBR, x->q_cols + qk / KW);
        pack_cols(&dout, q0, n, BBR, x->dout_cols + v / KW);
    }
    memset(x->dq + qk, 0, sizeof(float) * BBR * (size_t)up(a->Dqk, NR));
    atomic_init(x->turn + block, whole.begin / BBC);
    if (whole.begin == whole.end) write_dq(a, x, b, h, block);
}

/* A task. */

/* A tile of MR rows as words along the rows (at: row 0 of a panel in cols form). */
VEC_FN void keep_columns(float *at, vec c[MR][2]) {
#if TR_PAIRS
    UNROLL for (int i = 0; i < MR; i += 2) {
        vec_keep(at + i / 2 * NR, word_column(c[i][0], c[i + 1][0]));
        vec_keep(at + i / 2 * NR + VEC, word_column(c[i][1], c[i + 1][1]));
    }
#else
    tile_store(c, 2, at);
#endif
}

/* Caps a tile of scores and keeps the derivative; out of line, as in the forward. */
static __attribute__((noinline)) void cap_slope_tile(float *s, float *slope, float cap) {
    for (int i = 0; i < 2 * MR; i++) {
        vec t = vec_tanh(vec_words(s + i * VEC) / cap);
        vec_keep(s + i * VEC, t * cap);
        vec_keep(slope + i * VEC, 1 - t * t);
    }
}

/* P of group g of the block of queries and panel j of the keys. */
VEC_FN void probability_tile(key_block *x, const query_state *s, int64_t block, int64_t g,
                             int64_t j, bool full, const uint32_t bits[MR]) {
    const tr_attention *a = x->f->a;
    const float *q = s->q + block * BBR * up(a->Dqk, NR) / KW + g * MR * KP;
    const float *lse = s->lse + block * BBR + g * MR;
    float *p = x->p + g * MR * NR;
    vec c[MR][2];
    tile_clear(c);
    multiply_rows(c, 2, 0, parts(a->Dqk, KW), q, BBR, x->k_trans + j * trans_words(a->Dqk));
    if (TR_PAIRS) {
        UNROLL for (int i = 0; i < MR; i++) {
            c[i][0] *= a->scale, c[i][1] *= a->scale;
        }
    }
    if (a->soft_cap > 0) {
        tile_store(c, 2, p);
        cap_slope_tile(p, x->slope + g * MR * NR, a->soft_cap);
        tile_load(c, 2, p);
    }
    UNROLL for (int i = 0; i < MR; i++) {
        c[i][0] = vec_exp_score(c[i][0] - lse[i]);
        c[i][1] = vec_exp_score(c[i][1] - lse[i]);
    }
    if (!full) tile_hide(c, bits, 0);
    tile_store(c, 2, p);
    if (TR_PAIRS) keep_columns(x->p_cols + g * MR / KW * NR, c);
}

/* dS of the same tile, from P. */
VEC_FN void gradient_tile(key_block *x, const query_state *s, int64_t block, int64_t g, int64_t j,
                          bool full, const uint32_t bits[MR]) {
    const tr_attention *a = x->f->a;
    const float *dout = s->dout + block * BBR * up(a->Dv, NR) / KW + g * MR * KP;
    const float *delta = s->delta + block * BBR + g * MR;
    const float *p = x->p + g * MR * NR, *slope = x->slope + g * MR * NR;
    float *ds = x->ds + (j / NR * BBR + g * MR) * KP;
    vec c[MR][2];
    tile_clear(c);
    multiply_rows(c, 2, 0, parts(a->Dv, KW), dout, BBR, x->v_trans + j * trans_words(a->Dv));
    UNROLL for (int i = 0; i < MR; i++) {
        c[i][0] = (c[i][0] - delta[i]) * vec_words(p + i * NR);
        c[i][1] = (c[i][1] - delta[i]) * vec_words(p + i * NR + VEC);
    }
    if (a->soft_cap > 0) {
        UNROLL for (int i = 0; i < MR; i++) {
            c[i][0] *= vec_words(slope + i * NR);
            c[i][1] *= vec_words(slope + i * NR + VEC);
        }
    }
    if (!full) tile_hide(c, bits, 0); /* V of a hidden key may be NaN */
#if TR_PAIRS
    UNROLL for (int i = 0; i < MR; i++) {
        vec_keep(ds + i * KP, word_row(c[i][0], c[i][1]));
    }
    keep_columns(x->ds_cols + g * MR / KW * NR, c);
#else
    tile_store(c, 2, ds);
#endif
}

VEC_FN void key_tile(const uint64_t seen, const float *A, const float *B, int nv, float *sum) {
    int64_t first, last;
    vec c[MR][2];
    tile_load(c, nv, sum);
    for (uint64_t bits = seen; next_run(&bits, &first, &last);)
        multiply_cols(c, nv, first * MR / KW, last * MR / KW, A, B);
    tile_store(c, nv, sum);
}

/* sum (dk or dv) += X^T rows for keys j..j+NR-1: X a panel of P or dS in cols form, rows the
 * block's q or dout in cols form; live: the groups that see the panel. */
static void key_sums(const key_block *x, uint64_t live, int64_t j, const float *X,
                     const float *rows, int64_t D, float *sum) {
    uint64_t seen[NR / MR];
    for (int64_t c = 0; c < NR / MR; c++) {
        int64_t key = x->first + j + c * MR;
        seen[c] = live;
        for (uint64_t bits = live; bits; bits &= bits - 1) {
            int64_t g = __builtin_ctzll(bits);
            span some = x->groups[g].some;
            if (some.end <= key || some.begin >= key + MR) seen[c] ^= (uint64_t)1 << g;
        }
    }
    for (int64_t d = 0; d < D; d += NR)
        for (int64_t c = 0; c < NR / MR; c++) {
            const float *B = rows + d * BBR / KW;
            float *to = sum + d * BBC + (j + c * MR) * NR;
            if (!seen[c]) continue;
            if (panel_vectors(D, d) == 2)
                key_tile(seen[c], X + c * MR, B, 2, to);
            else
                key_tile(seen[c], X + c * MR, B, 1, to);
        }
}

/* Everything of a block of queries but dQ: dS of all panels stays. */
static void key_panels(key_block *x, const query_state *s, int64_t block, const span *spans) {
    const tr_attention *a = x->f->a;
    int64_t qk = block * BBR * up(a->Dqk, NR) / KW, v = block * BBR * up(a->Dv, NR) / KW;
    memset(x->live, 0, sizeof x->live);
    for (int64_t j = 0; j < x->n; j += NR) {
        uint32_t bits[BBR / MR][MR];
        uint64_t live = 0, full = 0;
        for (int64_t g = 0; g < x->groups_n; g++) {
            const group *see = x->groups + g;
            int64_t key = x->first + j;
            if (key >= see->some.end || key + NR <= see->some.begin) continue;
            if (key >= see->all.begin && key + NR <= see->all.end)
                full |= (uint64_t)1 << g;
            else if (!tile_bits(&a->mask, spans + g * MR, block * BBR + g * MR, key, bits[g]))
                continue;
            live |= (uint64_t)1 << g;
            x->live[g] |= (uint64_t)1 << j / NR;
            probability_tile(x, s, block, g, j, full >> g & 1, bits[g]);
        }
        if (!live) continue;
        for (uint64_t rest = live; rest; rest &= rest - 1) {
            int64_t g = __builtin_ctzll(rest);
            gradient_tile(x, s, block, g, j, full >> g & 1, bits[g]);
        }
        const float *ds = TR_PAIRS ? x->ds_cols : x->ds + j / NR * BBR * KP;
        key_sums(x, live, j, x->p_cols, s->dout_cols + v, a->Dv, x->dv);
        key_sums(x, live, j, ds, s->q_cols + qk, a->Dqk, x->dk);
    }
}

VEC_FN void query_tile(const key_block *x, int64_t g, const float *B, int nv, float *dq) {
    const span some = x->groups[g].some;
    int64_t first, last;
    vec c[MR][2];
    tile_load(c, nv, dq);
    for (uint64_t bits = x->live[g]; next_run(&bits, &first, &last);) {
        int64_t begin = most(first * NR, some.begin - x->first);
        int64_t end = least(last * NR, some.end - x->first);
        multiply_rows(c, nv, begin / KW, parts(end, KW), x->ds + g * MR * KP, BBR, B);
    }
    tile_store(c, nv, dq);
}

/* dQ += dS K (without the scale). */
static void query_sums(const key_block *x, float *dq) {
    const tr_attention *a = x->f->a;
    for (int64_t d = 0; d < a->Dqk; d += NR)
        for (int64_t g = 0; g < x->groups_n; g++) {
            const float *B = x->k_cols + d * BBC / KW;
            float *to = dq + d * BBR + g * MR * NR;
            if (!x->live[g]) continue;
            if (panel_vectors(a->Dqk, d) == 2)
                query_tile(x, g, B, 2, to);
            else
                query_tile(x, g, B, 1, to);
        }
    for (int64_t k = 0; k < x->n && x->any; k++)
        for (int64_t r = 0; r < x->groups_n * MR && x->dead[k]; r++) {
            if (!(x->live[r / MR] >> k / NR & 1)) continue;
            float ds = rows_element(x->ds, BBR, r, k);
            if (ds != 0) add_row(&x->k, x->first + k, ds, dq + r * NR, BBR);
        }
}

static void wait_turn(atomic_int *turn, int mine) {
    for (int spins = 0; atomic_load_explicit(turn, memory_order_acquire) != mine; spins++)
        if (spins > 1000) sched_yield();
}

/* One block of queries of head h: adds to dK, dV and dQ. */
static void visit(key_block *x, const query_state *s, int64_t b, int64_t h, int64_t block) {
    const backward_call *f = x->f;
    const tr_attention *a = f->a;
    int64_t planned = (f->plan.batches > 1 ? b : 0) * f->plan.blocks + block;
    int mine = (int)(x->first / BBC);
    span whole = f->plan.whole[planned];
    x->groups = f->plan.groups + planned * BBR / MR;
    x->groups_n = parts(least(BBR, a->Sq - block * BBR), MR);
    key_panels(x, s, block, f->plan.rows + planned * BBR);
    wait_turn(s->turn + block, mine);
    query_sums(x, s->dq + block * BBR * up(a->Dqk, NR));
    if (mine == (whole.end - 1) / BBC) write_dq(a, s, b, h, block);
    atomic_store_explicit(s->turn + block, mine + 1, memory_order_release);
}

static void run_task(const backward_call *f, key_block *x, int64_t slot, int64_t index,
                     int64_t block) {
    const tr_attention *a = f->a;
    int64_t b = index / a->Hkv, hk = index % a->Hkv, n = least(BBC, a->Sk - block * BBC);
    head v = value_head(a, index);
    x->f = f, x->first = block * BBC, x->n = n;
    x->k = key_head(a, index);
    pack_trans(&x->k, x->first, up(n, NR), x->k_trans);
    pack_trans(&v, x->first, up(n, NR), x->v_trans);
    x->any = pack_cols_finite(&x->k, x->first, up(n, KW), BBC, x->k_cols, x->dead);
    memset(x->dk, 0, sizeof(float) * BBC * (size_t)up(a->Dqk, NR));
    memset(x->dv, 0, sizeof(float) * BBC * (size_t)up(a->Dv, NR));
    for (int64_t h = 0; h < f->group_heads; h++)
        for (int64_t i = 0; i < f->plan.blocks; i++) {
            span whole = block_whole(f, b, i);
            if (x->first < whole.end && x->first + BBC > whole.begin)
                visit(x, f->queries + slot * f->group_heads + h, b, hk * f->group_heads + h, i);
            if (omp_get_thread_num() == 0 && i % BREATH == 0) tr_stream_breathe(f->stream);
        }
    unpack_rows(a->grad_t, a->dk, b * a->k_batch + x->first * a->k_row + hk * a->Dqk, a->k_row, n,
                a->Dqk, x->dk, BBC, TR_PAIRS ? a->scale : 1, a->add_dkv);
    unpack_rows(a->grad_t, a->dv, b * a->v_batch + x->first * a->v_row + hk * a->Dv, a->v_row, n,
                a->Dv, x->dv, BBC, 1, a->add_dkv);
}

/* The call. */

/* Lays the call's memory out in `at`; only counts while that has no base. */
static void backward_take(backward_call *f, int64_t threads, memory *at) {
    key_block x;
    memory one = {0};
    plan_take(&f->plan, at);
    f->queries = take(at, f->wave * f->group_heads, sizeof *f->queries);
    for (int64_t i = 0; i < f->wave * f->group_heads; i++) {
        query_state ignored;
        query_state_take(at->base ? f->queries + i : &ignored, f->a, f->plan.blocks, at);
    }
    key_block_take(&x, f->a, &one);
    f->thread_bytes = one.used;
    f->threads = take(at, threads * one.used, 1);
}

/* Kv heads base..base+n-1, by all threads of a parallel region. */
static void backward_wave(backward_call *f, key_block *x, int64_t base, int64_t n) {
    const tr_attention *a = f->a;
    int64_t blocks = f->plan.blocks, task;
#pragma omp single
    atomic_store(&f->next, 0);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < n * f->group_heads * blocks; i++) {
        int64_t q = i / blocks, index = base + q / f->group_heads;
        pack_query_block(f, f->queries + q, index / a->Hkv,
                         index % a->Hkv * f->group_heads + q % f->group_heads, i % blocks);
    }
    while ((task = atomic_fetch_add(&f->next, 1)) < n * f->key_blocks)
        run_task(f, x, task % n, base + task % n, task / n);
#pragma omp barrier
        /* dsink in the order of rows, whatever the wave */
#pragma omp single
    for (int64_t q = 0; q < n * f->group_heads && a->dsink; q++) {
        int64_t h = (base + q / f->group_heads) % a->Hkv * f->group_heads + q % f->group_heads;
        double sum = 0;
        for (int64_t i = 0; i < blocks; i++) sum += f->queries[q].sink[i];
        a->dsink[h] += (float)sum;
    }
}

void TR_LEVEL(tr_attention_backward)(tr_stream *stream, const tr_attention *a) {
    int64_t heads = a->B * a->Hkv, threads = omp_get_max_threads();
    if (heads == 0) return;
    backward_call f = {.stream = stream, .a = a, .plan = plan_make(a, BBR)};
    f.key_blocks = parts(a->Sk, BBC), f.group_heads = a->Hq / a->Hkv;
    memory at = {0};
    query_state one;
    query_state_take(&one, a, f.plan.blocks, &at);
    f.wave = wave_heads(heads, at.used * f.group_heads, threads);
    at = (memory){0};
    backward_take(&f, threads, &at);
    at = (memory){tr_scratch((size_t)at.used), 0};
    backward_take(&f, threads, &at);
#pragma omp parallel if (heads * most(f.key_blocks, f.plan.blocks) > 1)
    {
        key_block x;
        memory work = {f.threads + omp_get_thread_num() * f.thread_bytes, 0};
        key_block_take(&x, a, &work);
#pragma omp for
        for (int64_t i = 0; i < f.plan.batches * f.plan.blocks; i++)
            plan_block(&f.plan, i / f.plan.blocks, i % f.plan.blocks);
        for (int64_t base = 0; base < heads; base += f.wave)
            backward_wave(&f, &x, base, least(f.wave, heads - base));
    }
}
