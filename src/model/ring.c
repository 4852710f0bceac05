/* ring.c - attention over a ring of context ranks: each computes for its queries, and receives
 * of the others' keys and values what these need (Liu, Zaharia, Abbeel 2023, "Ring Attention").
 * Floor: model.
 *
 * A pair of a chunk of queries and a chunk of keys is one kernel call; pairs that causality, the
 * window or documents empty are not computed, and a chunk of which a rank needs no pair is not sent
 * to it: all ranks know the documents of the whole sequence and so agree on what moves. In step s
 * rank r works on what rank r-s owns. Keys and values come straight from their owner, who offers
 * them from the start; the next block arrives while one is used. In the backward the fp32 gradients
 * of a block go straight back and are added there, in the order of steps. Of a rank's own pairs
 * those of different chunks come first, while the first keys arrive, and those of a chunk with
 * itself last, while the last gradients do.
 *
 * Nobody waits in a circle: keys wait for nothing but their receiver's turn. Of the gradients that
 * have not arrived let one have the lowest step; its receiver is waiting for it or computes, and
 * its sender waits for none of a higher step before it sends it, as the room that it needs was used
 * for one of a lower step. While a rank waits for room it takes what arrives.
 *
 * One rank is the same code with a single chunk, so without a ring it is plain attention bit for
 * bit. */
#include "model/layers.h"

#include <math.h>

enum { TAG_KV = 1, TAG_DKV = 2 };

typedef struct {
    const tr_pass *pass;
    const tr_env *c;
    const tr_sequence *x;
    tr_comm *comm;
    int me; /* ring place */
    int64_t D;
    int64_t kv_elems; /* keys and values of a chunk */
    int64_t q_row, q_batch, k_row, k_batch, v_from;
    int offers; /* in c->offers */
} ring;

static ring ring_of(const tr_pass *pass) {
    const tr_env *c = pass->c;
    tr_comm *comm = c->grid->comm[TR_GROUP_RING];
    const tr_sequence *x = &c->cut;
    ring r = {.pass = pass, .c = c, .x = x, .comm = comm, .me = tr_comm_rank(comm)};
    r.D = c->config->head_dim;
    int64_t q = c->Aq * r.D, kv = c->Akv * r.D;
    r.kv_elems = 2 * c->B * x->chunk * kv;
    /* packed rows are [position, b] (heads.c), others [b, position] */
    bool by_position = x->heads > 1;
    r.q_row = by_position ? c->B * q : q;
    r.q_batch = by_position ? q : x->S_ring * q;
    by_position = x->size > 1;
    r.k_row = by_position ? c->B * 2 * kv : kv;
    r.k_batch = by_position ? 2 * kv : x->S_ring * kv;
    r.v_from = by_position ? kv : c->N * kv;
    return r;
}

static void *at(const void *base, int64_t elems, tr_dtype t) {
    return (char *)base + (size_t)elems * tr_dtype_bytes(t);
}

/* The call for local query chunk qa against keys and values of chunk k_chunk. */
static tr_attention pair(const ring *r, int qa, int64_t k_chunk, const tr_saved *saved,
                         const void *kv) {
    const tr_env *c = r->c;
    int64_t C = r->x->chunk, q0 = qa * C;
    const int32_t *begin = r->pass->begin;
    return (tr_attention){.B = c->B,
                          .Sq = C,
                          .Sk = C,
                          .Hq = c->Aq,
                          .Hkv = c->Akv,
                          .Dqk = r->D,
                          .Dv = r->D,
                          .scale = 1.0f / sqrtf((float)r->D),
                          .mask = {.causal = true,
                                   .q_start = tr_sequence_chunk(r->x, r->me, qa) * C,
                                   .k_start = k_chunk * C,
                                   .window = c->config->sliding_window,
                                   .doc_begin = begin ? begin + q0 * c->B : NULL},
                          .t = c->t,
                          .q = at(saved->t[TR_SAVED_Q], q0 * r->q_row, c->t),
                          .q_row = r->q_row,
                          .q_batch = r->q_batch,
                          .k = kv,
                          .v = at(kv, r->v_from, c->t),
                          .k_row = r->k_row,
                          .v_row = r->k_row,
                          .k_batch = r->k_batch,
                          .v_batch = r->k_batch,
                          .out_row = r->q_row,
                          .out_batch = r->q_batch,
                          .lse = (float *)saved->t[TR_SAVED_LSE] + q0,
                          .lse_head = r->x->S_ring,
                          .lse_batch = c->Aq * r->x->S_ring};
}

/* --- what moves ----------------------------------------------------------------------------------
 */

static bool sees(const ring *r, int64_t q_chunk, int64_t k_chunk) {
    return tr_sequence_sees(r->x, r->pass->first_key, r->c->config->sliding_window, q_chunk,
                            k_chunk);
}

/* Of the two chunks of a ring place, which lie side by side in memory. */
typedef struct {
    int first, count;
} halves;

/* What the queries of ring place `there` need of what `owner` has. */
static halves needed(const ring *r, int there, int owner) {
    bool need[2] = {false, false};
    for (int qa = 0; qa < 2; qa++)
        for (int kb = 0; kb < 2; kb++)
            need[kb] |=
                sees(r, tr_sequence_chunk(r->x, there, qa), tr_sequence_chunk(r->x, owner, kb));
    return (halves){!need[0], need[0] + need[1]};
}

static int before(const ring *r, int step) {
    return (r->me - step + r->x->rings) % r->x->rings;
}
static int after(const ring *r, int step) {
    return (r->me + step) % r->x->rings;
}

/* What this rank takes from the rank that many steps before, and gives to the one after. */
static halves taken(const ring *r, int step) {
    return needed(r, r->me, before(r, step));
}
static halves given(const ring *r, int step) {
    return needed(r, after(r, step), r->me);
}

/* The next step in which something is taken, or given; `rings` when there is none. */
static int next_step(const ring *r, int step, halves (*moved)(const ring *r, int step)) {
    do step++;
    while (step < r->x->rings && moved(r, step).count == 0);
    return step;
}

static tr_request *send(const ring *r, int to, int tag, halves h, tr_dtype t, const void *block) {
    int64_t bytes = r->kv_elems * (int64_t)tr_dtype_bytes(t);
    return tr_send_begin(r->comm, r->c->stream, to, tag, (const char *)block + h.first * bytes,
                         h.count * bytes);
}

static tr_request *receive(const ring *r, int from, int tag, halves h, tr_dtype t, void *block) {
    int64_t bytes = r->kv_elems * (int64_t)tr_dtype_bytes(t);
    return tr_recv_begin(r->comm, r->c->stream, from, tag, (char *)block + h.first * bytes,
                         h.count * bytes);
}

/* Offers this rank's keys and values to all who need them. */
static void offer(ring *r, const void *kv) {
    for (int step = 1; step < r->x->rings; step++) {
        halves h = given(r, step);
        if (h.count > 0)
            r->c->offers[r->offers++] = send(r, after(r, step), TAG_KV, h, r->c->t, kv);
    }
}

static void end_offers(const ring *r) {
    for (int i = 0; i < r->offers; i++) tr_end(r->c->offers[i]);
}

/* Begins to receive the keys and values of a step, if there are any. */
static tr_request *take(const ring *r, int step, void *to) {
    if (step >= r->x->rings) return NULL;
    return receive(r, before(r, step), TAG_KV, taken(r, step), r->c->t, to);
}

/* --- forward -------------------------------------------------------------------------------------
 */

void tr_ring_forward(const tr_pass *pass, tr_saved *saved, void *out_t) {
    const tr_env *c = pass->c;
    ring r = ring_of(pass);
    int64_t q_elems = c->B * r.x->S_ring * c->Aq * r.D;
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    tr_dtype t = r.x->rings > 1 ? TR_F32 : c->t; /* partial results are merged in fp32 */
    void *out = t != c->t ? tr_scratch(c, q_elems, t) : out_t, *buffer[2] = {NULL, NULL};
    for (int i = 0; i < 2 && r.x->rings > 1; i++) buffer[i] = tr_scratch(c, 2 * r.kv_elems, c->t);
    const void *kv = saved->t[TR_SAVED_KV];
    int filled = 0;
    bool started[2] = {false, false};
    offer(&r, kv);
    for (int step = 0, next; step < r.x->rings; step = next) {
        next = next_step(&r, step, taken);
        tr_request *coming = take(&r, next, buffer[filled]);
        for (int qa = 0; qa < r.x->chunks; qa++)
            for (int kb = 0; kb < r.x->chunks; kb++) {
                int64_t k_chunk = tr_sequence_chunk(r.x, before(&r, step), kb);
                if (!sees(&r, tr_sequence_chunk(r.x, r.me, qa), k_chunk)) continue;
                tr_attention a = pair(&r, qa, k_chunk, saved, at(kv, kb * r.kv_elems, c->t));
                a.out_t = t;
                a.out = at(out, qa * r.x->chunk * r.q_row, t);
                a.merge = started[qa];
                started[qa] = true;
                c->kernels->attention_forward(c->stream, &a);
            }
        tr_end(coming);
        kv = buffer[filled];
        filled = !filled;
    }
    end_offers(&r);
    if (out != out_t) c->kernels->cast(c->stream, c->t, out_t, t, out, q_elems);
    tr_arena_release(c->scratch, mark);
}

/* --- backward ------------------------------------------------------------------------------------
 */

typedef struct {
    ring r;
    const tr_saved *saved;
    const void *out, *dout;
    float *dq, *own;        /* of this rank's queries; of its keys and values, two chunks */
    bool q_started[2];      /* the chunk of dq has been written */
    float *sent[2];         /* of others' keys and values, and their way home */
    tr_request *sending[2]; /* NULL: the memory is free */
    float *arriving;        /* of this rank's, from the rank `coming_step` after it */
    tr_request *coming;     /* NULL: all have come */
    int coming_step;
} gradients;

static tr_attention gradient_pair(const gradients *g, int qa, int64_t k_chunk, const void *kv) {
    const ring *r = &g->r;
    tr_attention a = pair(r, qa, k_chunk, g->saved, kv);
    int64_t q_at = qa * r->x->chunk * r->q_row;
    a.out_t = r->c->t;
    a.out = at(g->out, q_at, r->c->t);
    a.dout = at(g->dout, q_at, r->c->t);
    a.dout_row = r->q_row;
    a.dout_batch = r->q_batch;
    return a;
}

/* No ring: a single call that writes the gradients in their own type. */
static void backward_alone(const gradients *g, void *dq, void *dkv) {
    const tr_env *c = g->r.c;
    tr_attention a = gradient_pair(g, 0, 0, g->saved->t[TR_SAVED_KV]);
    a.grad_t = c->t;
    a.dq = dq;
    a.dk = dkv;
    a.dv = at(dkv, g->r.v_from, c->t);
    c->kernels->attention_backward(c->stream, &a);
}

static void expect(gradients *g, int step) {
    const ring *r = &g->r;
    g->coming_step = step;
    g->coming = NULL;
    if (step < r->x->rings)
        g->coming = receive(r, after(r, step), TAG_DKV, given(r, step), TR_F32, g->arriving);
}

/* Adds what is expected to this rank's own, and expects the next. */
static void collect(gradients *g) {
    const ring *r = &g->r;
    halves h = given(r, g->coming_step);
    int64_t first = h.first * r->kv_elems;
    tr_end(g->coming);
    r->c->kernels->add(r->c->stream, TR_F32, g->own + first, TR_F32, g->arriving + first,
                       h.count * r->kv_elems);
    expect(g, next_step(r, g->coming_step, given));
}

/* Waits until the memory that is sent from is free. */
static void make_room(gradients *g, int i) {
    while (!tr_test(g->sending[i])) {
        tr_request *any[] = {g->sending[i], g->coming};
        if (tr_wait_any(any, 2) == 1) collect(g);
    }
    tr_end(g->sending[i]);
    g->sending[i] = NULL;
}

/* Pairs of a local chunk of queries and one of keys: all, or by whether these have one number. */
typedef enum { ALL, DIFFERENT, SAME } pairs;

static bool among(pairs which, int qa, int kb) {
    return which == ALL || (which == SAME) == (qa == kb);
}

/* The visible ones of these pairs with the keys of a step: dq += and, for each half, dkv =. */
static void backward_block(gradients *g, int step, pairs which, const void *kv, float *dkv) {
    const ring *r = &g->r;
    for (int kb = 0; kb < 2; kb++) {
        int64_t k_chunk = tr_sequence_chunk(r->x, before(r, step), kb);
        bool k_started = false;
        for (int qa = 0; qa < 2; qa++) {
            if (!among(which, qa, kb) || !sees(r, tr_sequence_chunk(r->x, r->me, qa), k_chunk))
                continue;
            tr_attention a = gradient_pair(g, qa, k_chunk, at(kv, kb * r->kv_elems, r->c->t));
            a.grad_t = TR_F32;
            a.dq = g->dq + qa * r->x->chunk * r->q_row;
            a.dk = dkv + kb * r->kv_elems;
            a.dv = dkv + kb * r->kv_elems + r->v_from;
            a.add_dq = g->q_started[qa];
            a.add_dkv = k_started;
            g->q_started[qa] = k_started = true;
            r->c->kernels->attention_backward(r->c->stream, &a);
        }
    }
}

/* Own pairs of different chunks, then what comes, then the other own pairs. */
static void backward_ring(gradients *g) {
    ring *r = &g->r;
    const tr_env *c = r->c;
    void *buffer[2];
    for (int i = 0; i < 2; i++) buffer[i] = tr_scratch(c, 2 * r->kv_elems, c->t);
    const void *own_kv = g->saved->t[TR_SAVED_KV], *kv = own_kv;
    int filled = 0;
    c->device->zero(c->stream, g->own, 2 * (size_t)r->kv_elems * sizeof(float));
    offer(r, kv);
    expect(g, next_step(r, 0, given));
    for (int step = 0, next; step < r->x->rings; step = next) {
        next = next_step(r, step, taken);
        tr_request *coming = take(r, next, buffer[filled]);
        if (step == 0) {
            backward_block(g, step, DIFFERENT, kv, g->own);
        } else {
            make_room(g, filled);
            backward_block(g, step, ALL, kv, g->sent[filled]);
            g->sending[filled] =
                send(r, before(r, step), TAG_DKV, taken(r, step), TR_F32, g->sent[filled]);
        }
        if (g->coming && tr_test(g->coming)) collect(g);
        tr_end(coming);
        kv = buffer[filled];
        filled = !filled;
    }
    make_room(g, filled);
    backward_block(g, 0, SAME, own_kv, g->sent[filled]);
    while (g->coming) collect(g);
    c->kernels->add(c->stream, TR_F32, g->own, TR_F32, g->sent[filled], 2 * r->kv_elems);
    for (int i = 0; i < 2; i++) tr_end(g->sending[i]);
    end_offers(r);
}

void tr_ring_backward(const tr_pass *pass, const tr_saved *saved, const void *dout, void *dq_t,
                      void *dkv_t) {
    const tr_env *c = pass->c;
    bool exchanged = c->cut.heads > 1;
    gradients g = {.r = ring_of(pass),
                   .saved = saved,
                   .out = saved->t[exchanged ? TR_SAVED_HEADS : TR_SAVED_ATTN],
                   .dout = dout};
    if (g.r.x->rings == 1) {
        backward_alone(&g, dq_t, dkv_t);
        return;
    }
    int64_t q_elems = c->B * g.r.x->S_ring * c->Aq * g.r.D, kv2 = 2 * g.r.kv_elems;
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    g.dq = tr_scratch(c, q_elems, TR_F32);
    g.own = tr_scratch(c, kv2, TR_F32);
    g.arriving = tr_scratch(c, kv2, TR_F32);
    for (int i = 0; i < 2; i++) g.sent[i] = tr_scratch(c, kv2, TR_F32);
    backward_ring(&g);
    c->kernels->cast(c->stream, c->t, dq_t, TR_F32, g.dq, q_elems);
    c->kernels->cast(c->stream, c->t, dkv_t, TR_F32, g.own, kv2);
    tr_arena_release(c->scratch, mark);
}

int64_t tr_ring_scratch_bytes(const tr_env *c) {
    int64_t q = c->N * c->Hq * c->config->head_dim, t = (int64_t)tr_dtype_bytes(c->t);
    int64_t kv2 = 2 * c->N * c->cut.heads * c->Akv * c->config->head_dim;
    return c->cut.rings > 1 ? 4 * q + (2 * t + 4 * 4) * kv2 : 0;
}
