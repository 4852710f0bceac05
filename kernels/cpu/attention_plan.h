/* attention_plan.h - which keys a row, a group of rows and a block of rows see.
 * Floor: kernels, internal.
 *
 * Rows are cut into groups of MR (the height of a register tile), groups into blocks. The keys of a
 * row are one span, thinned by the mask's dilation. A tile is left out when no row of the group
 * sees any of its keys, computed without masking when all rows see all of them. */
#pragma once
#include "kernels/cpu/attention_simd.h"
#include "kernels/kernels.h"

typedef struct {
    int32_t begin, end; /* keys begin..end-1 of the call; 0, 0 when empty */
} span;

typedef struct {
    span some; /* no row of the group sees a key outside */
    span all;  /* every row sees all of these */
} group;

typedef struct {
    const tr_attention *a; /* borrowed */
    int64_t block;         /* rows of a block, a multiple of MR and KW */
    int64_t blocks;        /* that cover Sq */
    int64_t batches;       /* B with document masks, else 1: the same for every sequence */
    /* state, sequence by sequence */
    span *rows;    /* [batches, blocks*block] */
    group *groups; /* [batches, blocks*block/MR] */
    span *whole;   /* [batches, blocks]: no row of the block sees a key outside */
} plan;

static inline int64_t least(int64_t x, int64_t y) {
    return x < y ? x : y;
}
static inline int64_t most(int64_t x, int64_t y) {
    return x > y ? x : y;
}
static inline int64_t parts(int64_t n, int64_t size) {
    return (n + size - 1) / size;
}
static inline int64_t up(int64_t n, int64_t size) {
    return parts(n, size) * size;
}

typedef struct { /* memory handed out piece by piece; only counted while base is NULL */
    char *base;
    int64_t used; /* bytes */
} memory;

/* n objects of `bytes` each, 4 KiB aligned. */
static void *take(memory *at, int64_t n, size_t bytes) {
    int64_t here = at->used;
    at->used += up(n * (int64_t)bytes, 4096);
    return at->base ? at->base + here : NULL;
}

static plan plan_make(const tr_attention *a, int64_t block) {
    return (plan){.a = a,
                  .block = block,
                  .blocks = parts(a->Sq, block),
                  .batches = a->mask.doc_begin ? a->B : 1};
}

static void plan_take(plan *p, memory *at) {
    int64_t rows = p->batches * p->blocks * p->block;
    p->rows = take(at, rows, sizeof *p->rows);
    p->groups = take(at, rows / MR, sizeof *p->groups);
    p->whole = take(at, p->batches * p->blocks, sizeof *p->whole);
}

static span row_span(const tr_attention *a, int64_t b, int64_t i) {
    const tr_mask *m = &a->mask;
    int64_t p = m->q_start + i - m->k_start, begin = 0, end = a->Sk; /* p: the row's own key */
    if (i >= a->Sq) return (span){0, 0};
    if (m->causal) end = least(end, p + 1);
    if (m->window > 0) {
        begin = most(begin, p - m->window + 1);
        if (!m->causal) end = least(end, p + m->window);
    }
    if (m->doc_begin) begin = most(begin, m->doc_begin[b * a->Sq + i] - m->k_start);
    if (m->doc_begin && m->doc_end) end = least(end, m->doc_end[b * a->Sq + i] - m->k_start);
    return begin < end ? (span){(int32_t)begin, (int32_t)end} : (span){0, 0};
}

/* The smallest span that holds both. */
static span span_join(span x, span y) {
    if (x.begin == x.end) return y;
    if (y.begin == y.end) return x;
    return (span){x.begin < y.begin ? x.begin : y.begin, x.end > y.end ? x.end : y.end};
}

static span span_meet(span x, span y) {
    span both = {x.begin > y.begin ? x.begin : y.begin, x.end < y.end ? x.end : y.end};
    return both.begin < both.end ? both : (span){0, 0};
}

/* Fills what concerns block `i` of sequence b. */
static void plan_block(const plan *p, int64_t b, int64_t i) {
    span *rows = p->rows + (b * p->blocks + i) * p->block;
    group *groups = p->groups + (b * p->blocks + i) * p->block / MR;
    span *whole = p->whole + b * p->blocks + i;
    *whole = (span){0, 0};
    for (int64_t g = 0; g < p->block / MR; g++) {
        for (int64_t r = g * MR; r < (g + 1) * MR; r++) {
            rows[r] = row_span(p->a, b, i * p->block + r);
            groups[g].some = r % MR ? span_join(groups[g].some, rows[r]) : rows[r];
            groups[g].all = r % MR ? span_meet(groups[g].all, rows[r]) : rows[r];
        }
        if (p->a->mask.dilation > 1) groups[g].all = (span){0, 0};
        *whole = span_join(*whole, groups[g].some);
    }
}

/* Bits of the columns begin..end-1, of NR. */
static inline uint32_t column_bits(int64_t begin, int64_t end) {
    begin = most(begin, 0), end = least(end, NR);
    if (begin >= end) return 0;
    return (uint32_t)(((uint64_t)1 << end) - ((uint64_t)1 << begin));
}

/* What the MR rows from `row` on (spans at `rows`) see of keys j..j+NR-1. False: nothing. */
static bool tile_bits(const tr_mask *m, const span *rows, int64_t row, int64_t j,
                      uint32_t bits[MR]) {
    uint32_t any = 0;
    for (int64_t r = 0; r < MR; r++) {
        bits[r] = column_bits(rows[r].begin - j, rows[r].end - j);
        if (m->dilation > 1 && bits[r]) {
            int64_t own = m->q_start + row + r - m->k_start - j; /* column of the row's own key */
            int64_t first = (own % m->dilation + m->dilation) % m->dilation;
            uint32_t atrous = column_bits(own - m->local + 1, own + m->local);
            for (int64_t c = first; c < NR; c += m->dilation) atrous |= 1u << c;
            bits[r] &= atrous;
        }
        any |= bits[r];
    }
    return any != 0;
}

/* Takes the lowest run of set bits, [*first, *last), out of *bits. False when none is left. */
static inline bool next_run(uint64_t *bits, int64_t *first, int64_t *last) {
    if (!*bits) return false;
    int64_t skip = __builtin_ctzll(*bits);
    uint64_t rest = ~(*bits >> skip);
    int64_t run = rest ? __builtin_ctzll(rest) : 64;
    *first = skip, *last = skip + run;
    *bits &= *last < 64 ? ~(uint64_t)0 << *last : 0;
    return true;
}

/* kv heads of a wave: as many as fit beside each other in the caches, at least one a thread, within
 * 256 MiB. */
static int64_t wave_heads(int64_t heads, int64_t head_bytes, int64_t threads) {
    int64_t wave = threads * most(1, ((int64_t)1 << 20) / most(1, head_bytes));
    wave = least(wave, most(1, ((int64_t)256 << 20) / most(1, head_bytes)));
    return most(1, least(wave, heads));
}
