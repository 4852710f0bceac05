/* ring.c - attention over the context group: keys and values travel around a ring while each rank
 * computes with what it has. Floor: model.
 *
 * The sequence is cut into 2*cp chunks; a pair of a query chunk and a key chunk is one kernel call,
 * and pairs the mask empties are skipped. One rank is the same code with a single chunk, so cp = 1
 * equals no context parallelism bit for bit. Buffers are doubled: while one key/value block is
 * used, the next arrives. In the backward the fp32 gradients of a block follow it one step behind
 * and make one last hop home. */
#include "model/layers.h"

#include <math.h>
#include <string.h>

enum { TAG_KV = 1, TAG_DKV = 2 };

typedef struct {
    const tr_env *c;
    tr_comm *comm;
    int cp, rank, next, prev;
    int chunks; /* local chunks: 2, or 1 without a ring */
    int64_t C;  /* positions a chunk */
    int64_t Hq, Hkv, D;
    int64_t kv_elems; /* of keys (and of values) of one rank */
} ring;

static ring ring_of(const tr_env *c) {
    const tr_model_config *m = c->config;
    tr_comm *comm = c->grid->comm[TR_GROUP_CONTEXT];
    ring r = {.c = c,
              .comm = comm,
              .cp = tr_comm_size(comm),
              .rank = tr_comm_rank(comm),
              .Hq = c->Hq,
              .Hkv = c->Hkv,
              .D = m->head_dim};
    r.next = (r.rank + 1) % r.cp;
    r.prev = (r.rank + r.cp - 1) % r.cp;
    r.chunks = r.cp > 1 ? 2 : 1;
    r.C = c->S_loc / r.chunks;
    r.kv_elems = c->N * r.Hkv * r.D;
    return r;
}

/* Which of the 2*cp chunks is local chunk `half` of `rank`. */
static int64_t chunk_of(int cp, int rank, int half) {
    return half == 0 ? rank : 2 * cp - 1 - rank;
}

int64_t tr_ring_position(int64_t S, int cp, int rank, int64_t i) {
    if (cp == 1) return i;
    int64_t C = S / (2 * cp);
    return chunk_of(cp, rank, (int)(i / C)) * C + i % C;
}

/* A causal query chunk sees a key chunk that is not later and not wholly before its window. */
static bool visible(const ring *r, int64_t q_chunk, int64_t k_chunk) {
    int64_t window = r->c->config->sliding_window;
    if (k_chunk > q_chunk) return false;
    return window == 0 || q_chunk * r->C - ((k_chunk + 1) * r->C - 1) < window;
}

static void *at(const void *base, int64_t elems, tr_dtype t) {
    return (char *)base + (size_t)elems * tr_dtype_bytes(t);
}

/* The call for local query chunk qa against key chunk kb of a block that came from rank `src`. */
static tr_attention pair(const ring *r, int qa, int kb, int src, const tr_saved *saved,
                         const void *kv) {
    const tr_env *c = r->c;
    int64_t q_row = r->Hq * r->D, kv_row = r->Hkv * r->D, q0 = qa * r->C, k0 = kb * r->C;
    return (tr_attention){.B = c->B,
                          .Sq = r->C,
                          .Sk = r->C,
                          .Hq = r->Hq,
                          .Hkv = r->Hkv,
                          .Dqk = r->D,
                          .Dv = r->D,
                          .scale = 1.0f / sqrtf((float)r->D),
                          .mask = {.causal = true,
                                   .q_start = chunk_of(r->cp, r->rank, qa) * r->C,
                                   .k_start = chunk_of(r->cp, src, kb) * r->C,
                                   .window = c->config->sliding_window},
                          .t = c->t,
                          .q = at(saved->t[TR_SAVED_Q], q0 * q_row, c->t),
                          .q_row = q_row,
                          .q_batch = c->S_loc * q_row,
                          .k = at(kv, k0 * kv_row, c->t),
                          .v = at(kv, r->kv_elems + k0 * kv_row, c->t),
                          .k_row = kv_row,
                          .v_row = kv_row,
                          .k_batch = c->S_loc * kv_row,
                          .v_batch = c->S_loc * kv_row,
                          .out_row = q_row,
                          .out_batch = c->S_loc * q_row,
                          .lse = (float *)saved->t[TR_SAVED_LSE] + q0,
                          .lse_head = c->S_loc,
                          .lse_batch = r->Hq * c->S_loc};
}

/* Begins the exchange of `bytes`: out to the next rank, in from the previous. */
static void exchange(const ring *r, int tag, const void *out, void *in, int64_t bytes,
                     tr_request *request[2]) {
    request[0] = tr_recv_begin(r->comm, r->c->stream, r->prev, tag, in, bytes);
    request[1] = tr_send_begin(r->comm, r->c->stream, r->next, tag, out, bytes);
}

static void end(tr_request *request[2]) {
    tr_end(request[0]);
    tr_end(request[1]);
    request[0] = request[1] = NULL;
}

void tr_ring_forward(const tr_pass *pass, tr_saved *saved) {
    const tr_env *c = pass->c;
    ring r = ring_of(c);
    int64_t q_elems = c->N * r.Hq * r.D;
    tr_save(pass, saved, TR_SAVED_ATTN);
    tr_save(pass, saved, TR_SAVED_LSE);
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    bool partial = r.cp > 1; /* partial results are merged in fp32 */
    void *out =
        partial && c->t != TR_F32 ? tr_scratch(c, q_elems, TR_F32) : saved->t[TR_SAVED_ATTN];
    void *buffer[2] = {NULL, NULL};
    for (int i = 0; i < 2 && r.cp > 1; i++) buffer[i] = tr_scratch(c, 2 * r.kv_elems, c->t);
    int64_t kv_bytes = 2 * r.kv_elems * (int64_t)tr_dtype_bytes(c->t);
    const void *kv = saved->t[TR_SAVED_KV];
    bool started[2] = {false, false};
    for (int step = 0; step < r.cp; step++) {
        tr_request *moving[2] = {NULL, NULL};
        if (step + 1 < r.cp) exchange(&r, TAG_KV, kv, buffer[step % 2], kv_bytes, moving);
        int src = (r.rank - step + r.cp) % r.cp;
        for (int qa = 0; qa < r.chunks; qa++)
            for (int kb = 0; kb < r.chunks; kb++) {
                if (!visible(&r, chunk_of(r.cp, r.rank, qa), chunk_of(r.cp, src, kb))) continue;
                tr_attention a = pair(&r, qa, kb, src, saved, kv);
                a.out_t = partial ? TR_F32 : c->t;
                a.out = at(out, qa * r.C * a.out_row, a.out_t);
                a.merge = started[qa];
                started[qa] = true;
                c->kernels->attention_forward(c->stream, &a);
            }
        end(moving);
        kv = buffer[step % 2];
    }
    if (out != saved->t[TR_SAVED_ATTN])
        c->kernels->cast(c->stream, c->t, saved->t[TR_SAVED_ATTN], TR_F32, out, q_elems);
    tr_arena_release(c->scratch, mark);
}

/* One rank: a single call that writes the gradients in their own type. */
static void backward_alone(const ring *r, const tr_saved *saved, const void *dout, void *dq,
                           void *dkv) {
    const tr_env *c = r->c;
    tr_attention a = pair(r, 0, 0, 0, saved, saved->t[TR_SAVED_KV]);
    a.out_t = a.grad_t = c->t;
    a.out = saved->t[TR_SAVED_ATTN];
    a.dout = dout;
    a.dout_row = a.out_row;
    a.dout_batch = a.out_batch;
    a.dq = dq;
    a.dk = dkv;
    a.dv = at(dkv, r->kv_elems, c->t);
    c->kernels->attention_backward(c->stream, &a);
}

/* All visible pairs of the block from `src`: dq += and dkv += (fp32). */
static void backward_block(const ring *r, const tr_saved *saved, int src, const void *kv,
                           const void *dout, float *dq, float *dkv) {
    const tr_env *c = r->c;
    for (int qa = 0; qa < r->chunks; qa++)
        for (int kb = 0; kb < r->chunks; kb++) {
            if (!visible(r, chunk_of(r->cp, r->rank, qa), chunk_of(r->cp, src, kb))) continue;
            tr_attention a = pair(r, qa, kb, src, saved, kv);
            int64_t q_at = qa * r->C * a.out_row, kv_at = kb * r->C * a.k_row;
            a.out_t = c->t;
            a.out = at(saved->t[TR_SAVED_ATTN], q_at, c->t);
            a.dout = at(dout, q_at, c->t);
            a.dout_row = a.out_row;
            a.dout_batch = a.out_batch;
            a.grad_t = TR_F32;
            a.add_dq = a.add_dkv = true;
            a.dq = dq + q_at;
            a.dk = dkv + kv_at;
            a.dv = dkv + r->kv_elems + kv_at;
            c->kernels->attention_backward(c->stream, &a);
        }
}

void tr_ring_backward(const tr_pass *pass, const tr_saved *saved, const void *dout, void *dq_t,
                      void *dkv_t) {
    const tr_env *c = pass->c;
    ring r = ring_of(c);
    if (r.cp == 1) {
        backward_alone(&r, saved, dout, dq_t, dkv_t);
        return;
    }
    int64_t q_elems = c->N * r.Hq * r.D, kv2 = 2 * r.kv_elems;
    int64_t kv_bytes = kv2 * (int64_t)tr_dtype_bytes(c->t), dkv_bytes = kv2 * 4;
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    void *buffer[2];
    float *travel[2], *here = tr_scratch(c, kv2, TR_F32), *dq = tr_scratch(c, q_elems, TR_F32);
    for (int i = 0; i < 2; i++) {
        buffer[i] = tr_scratch(c, kv2, c->t);
        travel[i] = tr_scratch(c, kv2, TR_F32);
    }
    c->device->zero(c->stream, dq, (size_t)q_elems * 4);
    const void *kv = saved->t[TR_SAVED_KV];
    for (int step = 0; step < r.cp; step++) {
        tr_request *keys[2] = {NULL, NULL}, *grads[2] = {NULL, NULL};
        if (step + 1 < r.cp) exchange(&r, TAG_KV, kv, buffer[step % 2], kv_bytes, keys);
        if (step > 0)
            exchange(&r, TAG_DKV, travel[(step - 1) % 2], travel[step % 2], dkv_bytes, grads);
        float *sum = step == 0 ? travel[0] : here;
        c->device->zero(c->stream, sum, (size_t)dkv_bytes);
        backward_block(&r, saved, (r.rank - step + r.cp) % r.cp, kv, dout, dq, sum);
        end(grads);
        if (step > 0) c->kernels->add(c->stream, TR_F32, travel[step % 2], TR_F32, here, kv2);
        end(keys);
        kv = buffer[step % 2];
    }
    tr_request *home[2]; /* the last rank's sum is the next rank's own block */
    exchange(&r, TAG_DKV, travel[(r.cp - 1) % 2], here, dkv_bytes, home);
    c->kernels->cast(c->stream, c->t, dq_t, TR_F32, dq, q_elems);
    end(home);
    c->kernels->cast(c->stream, c->t, dkv_t, TR_F32, here, kv2);
    tr_arena_release(c->scratch, mark);
}
