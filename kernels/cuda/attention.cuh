/* attention.cuh - what the attention kernels share: the call, which keys a query sees, the end of a
 * row. Floor: kernels, internal to kernels/cuda.
 *
 * Positions become rows of k: query i stands at i + q_start - k_start there, and what causality,
 * window and document leave of the keys is one interval a query; dilation thins it out. A tile of
 * queries by keys is seen by all, by some, or by nobody: then it is neither loaded nor computed.
 * Every warp of a block decides that alone, and alike. */
#pragma once
#include "kernels/cuda/stream.h"
#include "kernels/kernels.h"
#include "kernels/simt/simt.h"

typedef struct {
    int begin, end; /* empty: 0, 0 */
} interval;

typedef struct {
    tr_attention a;
    bool vector_q, vector_k, vector_v, vector_dout; /* rows of whole chunks at 16 bytes */
    bool pair_out;                                  /* columns 2d, 2d + 1 of out are one word */
    /* backward; work memory */
    float *delta;    /* [B, Hq, Sq], sum of dout * out */
    interval *spans; /* [B, query tiles], the keys a tile's queries are between */
} attention_call;

enum { SEEN_BY_NONE, SEEN_BY_SOME, SEEN_BY_ALL };

static const float LOG2_E = 1.44269504088896340736f;

/* The makers of each type: attention_f32.cu and attention_bf16_*.cu. The backward ones find delta
 * and spans filled, for tiles of the size they give. */
void tr_attention_f32_forward(tr_stream *s, const attention_call *c);
void tr_attention_f32_backward(tr_stream *s, const attention_call *c);
void tr_attention_bf16_forward(tr_stream *s, const attention_call *c);
void tr_attention_bf16_backward(tr_stream *s, const attention_call *c);
static const int F32_QUERIES = 32, BF16_QUERIES = 64; /* rows of a span */

/* Where element 0 of row i of a head lies. */
DEVFN int64_t q_at(const tr_attention *a, int b, int i, int h) {
    return b * a->q_batch + i * a->q_row + h * a->Dqk;
}
DEVFN int64_t k_at(const tr_attention *a, int b, int j, int h) {
    return b * a->k_batch + j * a->k_row + h * a->Dqk;
}
DEVFN int64_t v_at(const tr_attention *a, int b, int j, int h) {
    return b * a->v_batch + j * a->v_row + h * a->Dv;
}
DEVFN int64_t out_at(const tr_attention *a, int b, int i, int h) {
    return b * a->out_batch + i * a->out_row + h * a->Dv;
}
DEVFN int64_t dout_at(const tr_attention *a, int b, int i, int h) {
    return b * a->dout_batch + i * a->dout_row + h * a->Dv;
}
DEVFN int64_t lse_at(const tr_attention *a, int b, int i, int h) {
    return b * a->lse_batch + h * a->lse_head + i;
}

/* The row of k at query i's position. */
DEVFN int64_t place_of(const tr_attention *a, int i) {
    return a->mask.q_start - a->mask.k_start + i;
}

/* The keys that query i is between; none for rows past the end. */
DEVFN interval keys_of(const tr_attention *a, int b, int i) {
    const tr_mask *m = &a->mask;
    int64_t place = place_of(a, i), begin = 0, end = i < a->Sq ? a->Sk : 0;
    if (m->window > 0) {
        if (begin < place - m->window + 1) begin = place - m->window + 1;
        if (end > place + m->window) end = place + m->window;
    }
    if (m->causal && end > place + 1) end = place + 1;
    if (m->doc_begin && i < a->Sq) {
        int64_t first = m->doc_begin[b * a->Sq + i] - m->k_start;
        if (begin < first) begin = first;
        if (m->doc_end) {
            int64_t last = m->doc_end[b * a->Sq + i] - m->k_start;
            if (end > last) end = last;
        }
    }
    interval keys = {0, 0};
    if (begin < end) keys.begin = (int)begin, keys.end = (int)end;
    return keys;
}

/* Whether dilation lets a query see keys so far away. */
DEVFN bool sees_apart(const tr_mask *m, int64_t apart) {
    return m->dilation <= 1 || apart % m->dilation == 0 || (apart < m->local && -apart < m->local);
}

DEVFN bool sees(const tr_attention *a, interval keys, int64_t place, int j) {
    return j >= keys.begin && j < keys.end && sees_apart(&a->mask, place - j);
}

/* Some key of begin..end-1 is seen from `place`. */
DEVFN bool sees_any(const tr_attention *a, interval keys, int64_t place, int begin, int end) {
    const tr_mask *m = &a->mask;
    if (begin < keys.begin) begin = keys.begin;
    if (end > keys.end) end = keys.end;
    if (begin >= end || m->dilation <= 1) return begin < end;
    int64_t near = place - end + 1, far = place - begin; /* how far apart they are */
    if (near < m->local && -far < m->local) return true;
    int64_t rest = far % m->dilation;
    return far - (rest < 0 ? rest + m->dilation : rest) >= near;
}

/* Who of ROWS queries from i on sees the keys j.. j+columns-1. By whole warps. */
template <int ROWS> DEVFN int seen_by(const tr_attention *a, int b, int i, int j, int columns) {
    bool some = false, all = a->mask.dilation <= 1;
    for (int r = (int)threadIdx.x & 31; r < ROWS; r += 32) {
        interval keys = keys_of(a, b, i + r);
        some |= sees_any(a, keys, place_of(a, i + r), j, j + columns);
        all &= keys.begin <= j && keys.end >= j + columns;
    }
    if (!__any_sync(~0u, some)) return SEEN_BY_NONE;
    return __all_sync(~0u, all) ? SEEN_BY_ALL : SEEN_BY_SOME;
}

/* The smallest interval with all keys of ROWS queries from i on. By whole warps. */
template <int ROWS> DEVFN interval span_of(const tr_attention *a, int b, int i) {
    interval span = {INT32_MAX, 0};
    for (int r = (int)threadIdx.x & 31; r < ROWS; r += 32) {
        interval keys = keys_of(a, b, i + r);
        if (keys.end == 0) continue;
        span.begin = min(span.begin, keys.begin);
        span.end = max(span.end, keys.end);
    }
    for (int step = 16; step > 0; step /= 2) {
        span.begin = min(span.begin, __shfl_xor_sync(~0u, span.begin, step));
        span.end = max(span.end, __shfl_xor_sync(~0u, span.end, step));
    }
    return span;
}

/* The next key tile from j on that the queries see, j >= end if there is none; *view_p: by whom.
 * Tiles begin at multiples of `columns` whatever the mask, so that masks which hide nothing change
 * no bit. */
template <int ROWS>
DEVFN int next_keys(const tr_attention *a, int b, int i, int j, int end, int columns, int *view_p) {
    for (*view_p = SEEN_BY_NONE; j < end; j += columns) {
        *view_p = seen_by<ROWS>(a, b, i, j, columns);
        if (*view_p != SEEN_BY_NONE) break;
    }
    return j;
}

/* The same for a key tile: the first queries >= i, in steps of ROWS, that see it; >= Sq if none do.
 * 32 spans of TILE rows are looked at at once. */
template <int ROWS, int TILE>
DEVFN int next_queries(const attention_call *c, int b, int i, int j, int columns, int *view_p) {
    const tr_attention *a = &c->a;
    int Sq = (int)a->Sq, tiles = (Sq + TILE - 1) / TILE, lane = (int)threadIdx.x & 31;
    *view_p = SEEN_BY_NONE;
    while (i < Sq) {
        int tile = i / TILE + lane;
        interval span = {0, 0};
        if (tile < tiles) span = c->spans[(int64_t)b * tiles + tile];
        unsigned meet = __ballot_sync(~0u, span.begin < j + columns && span.end > j);
        if (!meet) {
            i = (i / TILE + 32) * TILE;
            continue;
        }
        int first = (i / TILE + __ffs((int)meet) - 1) * TILE;
        for (i = max(i, first); i < Sq && i < first + TILE; i += ROWS) {
            *view_p = seen_by<ROWS>(a, b, i, j, columns);
            if (*view_p != SEEN_BY_NONE) return i;
        }
    }
    return i;
}

/* A score from a sum of products, and its derivative by the plain score. */
DEVFN float score_of(const tr_attention *a, float sum, float *slope_p) {
    float s = sum * a->scale;
    *slope_p = 1;
    if (!(a->soft_cap > 0)) return s;
    float t = tanhf(s / a->soft_cap);
    *slope_p = 1 - t * t;
    return a->soft_cap * t;
}

/* How a row ends: out = kept * out + factor * (sum of p v), where kept 0 does not read. */
typedef struct {
    float kept, factor, lse;
    bool write; /* false: merged with nothing */
} row_end;

/* Of a row with maximum m, sum l, and what lse held before (read only where a->merge). */
DEVFN row_end end_row(const tr_attention *a, int h, float m, float l, float old) {
    row_end end = {0, 0, -INFINITY, true};
    if (l == 0) {
        end.write = !a->merge;
        return end;
    }
    if (a->sink) {
        float sink = a->sink[h], top = fmaxf(m, sink), shrink = exp2f((m - top) * LOG2_E);
        l = l * shrink + exp2f((sink - top) * LOG2_E);
        end.factor = shrink / l;
        end.lse = top + logf(l);
        return end;
    }
    end.factor = 1 / l;
    end.lse = m + logf(l);
    if (a->merge && old != -INFINITY) {
        float top = fmaxf(old, end.lse);
        float merged = top + log1pf(expf(-fabsf(old - end.lse))), share = expf(end.lse - merged);
        end.kept = 1 - share;
        end.factor *= share;
        end.lse = merged;
    }
    return end;
}

/* Element `at` of out from the sum of p v. */
DEVFN void store_out(const tr_attention *a, int64_t at, const row_end *end, float sum) {
    float x = sum * end->factor;
    if (a->out_t == TR_BF16) {
        bf16 *out = (bf16 *)a->out + at;
        *out = f32_to_bf16(end->kept != 0 ? end->kept * bf16_to_f32(*out) + x : x);
    } else {
        float *out = (float *)a->out + at;
        *out = end->kept != 0 ? end->kept * *out + x : x;
    }
}

/* Element `at` of a gradient = or += x. */
DEVFN void store_grad(const tr_attention *a, void *grad, int64_t at, bool add, float x) {
    if (a->grad_t == TR_BF16)
        ((bf16 *)grad)[at] = f32_to_bf16(x);
    else
        ((float *)grad)[at] = add ? ((float *)grad)[at] + x : x;
}
