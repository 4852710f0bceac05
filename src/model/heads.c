/* heads.c - attention over context ranks: rows are exchanged for heads in the head group (Jacobs et
 * al. 2023, "DeepSpeed-Ulysses") before the ring sees them, and back. Floor: model.
 *
 * A rank has all heads of its N rows (b, i); attention wants its part of the heads of all rows of
 * the head group. A row's heads are cut into parts, one for each member, and packed as [member][i]
 * [b][part]. So block m of what is sent is what member m wants, and the blocks that arrive from
 * members 0, 1, ... follow each other in the order of positions: one exchange of equal, contiguous
 * blocks, and nothing to put in order behind it. Packed rows of keys hold the row's values too, so
 * that a chunk of positions is one message in the ring. Members that share a key/value head each
 * get it, and their gradients of it are summed when they come back. */
#include "model/layers.h"

#include "base/heap.h"

#include <stdlib.h>

static bool exchanged(const tr_env *c) {
    return c->cut.heads > 1;
}

/* Whether attention's layout differs from the rows': keys are packed for rings alone, too. */
static bool packed(const tr_env *c, tr_saved_id what) {
    return what == TR_SAVED_KV ? c->cut.size > 1 : exchanged(c);
}

static const tr_packing *packing(const tr_env *c, tr_saved_id what) {
    return &c->packing[what == TR_SAVED_KV];
}

static int64_t packed_elems(const tr_env *c, tr_saved_id what) {
    int64_t tensors = what == TR_SAVED_KV ? 2 : 1, heads = what == TR_SAVED_KV ? c->Akv : c->Aq;
    return c->N * c->cut.heads * tensors * heads * c->config->head_dim;
}

int64_t tr_heads_scratch_bytes(const tr_env *c) {
    int64_t q = packed_elems(c, TR_SAVED_Q), kv = packed_elems(c, TR_SAVED_KV);
    if (c->cut.size == 1) return 0;
    return (exchanged(c) ? 3 * q + 4 * kv : 2 * kv) * (int64_t)tr_dtype_bytes(c->t);
}

/* --- packing -------------------------------------------------------------------------------------
 * Own rows are seen as parts: `tensors` (1 of queries, 2 of keys and values) of N rows of P parts,
 * part p of row n of tensor j being number (j*N + n)*P + p. */

static void *upload(const tr_env *c, tr_arena *arena, const int32_t *from, int64_t n) {
    size_t bytes = (size_t)n * sizeof *from;
    void *to = tr_arena_alloc(arena, bytes);
    c->device->copy(c->stream, to, from, bytes, TR_TO_DEVICE);
    c->device->stream_wait(c->stream);
    return to;
}

static tr_packing make_packing(const tr_env *c, tr_arena *arena, int64_t tensors, int64_t P) {
    int64_t members = c->cut.heads, copies = members / P, rows = c->N * members * tensors;
    tr_packing x = {.packed = rows, .own = c->N * P * tensors, .copies = copies};
    int32_t *pack = tr_heap_alloc(rows, sizeof *pack);
    int32_t *unpack = tr_heap_alloc(rows, sizeof *unpack);
    for (int64_t m = 0, to = 0; m < members; m++)
        for (int64_t i = 0; i < c->S_loc; i++)
            for (int64_t b = 0; b < c->B; b++)
                for (int64_t j = 0; j < tensors; j++, to++) {
                    int64_t own = (j * c->N + b * c->S_loc + i) * P + m / copies;
                    pack[to] = (int32_t)own;
                    unpack[own * copies + m % copies] = (int32_t)to;
                }
    x.pack = upload(c, arena, pack, rows);
    x.unpack = upload(c, arena, unpack, rows);
    free(pack);
    free(unpack);
    return x;
}

/* Of the ring too, in which each may have to do with each. */
static void expect(const tr_env *c) {
    tr_comm *heads = c->grid->comm[TR_GROUP_HEADS], *ring = c->grid->comm[TR_GROUP_RING];
    if (exchanged(c)) tr_comm_expect_rows(heads, c->device, c->one_each, c->one_each);
    for (int r = 0; r < c->cut.rings; r++) tr_comm_expect_messages(ring, c->device, r);
}

void tr_heads_open(tr_env *c, tr_arena *arena) {
    tr_sequence *x = &c->cut;
    c->offers = tr_heap_alloc(x->rings, sizeof(tr_request *));
    c->one_each = tr_heap_alloc(x->heads, sizeof *c->one_each);
    for (int i = 0; i < x->heads; i++) c->one_each[i] = 1;
    if (x->size == 1) return;
    expect(c);
    if (exchanged(c)) c->packing[0] = make_packing(c, arena, 1, x->heads);
    c->packing[1] = make_packing(c, arena, 2, c->Hkv / c->Akv);
}

void tr_heads_close(tr_env *c) {
    free(c->offers);
    free(c->one_each);
    c->offers = NULL;
    c->one_each = NULL;
}

/* Elements of a part of a row. */
static int64_t part(const tr_env *c, tr_saved_id what) {
    return (what == TR_SAVED_KV ? c->Akv : c->Aq) * c->config->head_dim;
}

static void pack(const tr_env *c, tr_saved_id what, const void *own, void *to) {
    const tr_packing *x = packing(c, what);
    c->kernels->gather_rows(c->stream, c->t, to, c->t, own, x->pack, 1, NULL,
                            (tr_rows){.max = x->packed}, part(c, what));
}

/* A copy, or the sum of the copies. */
static void unpack(const tr_env *c, tr_saved_id what, const void *from, void *own) {
    const tr_packing *x = packing(c, what);
    c->kernels->combine_rows(c->stream, c->t, own, c->t, from, x->unpack, NULL, 0, x->own,
                             x->copies, part(c, what));
}

/* Block m of `from` goes to member m, whose block arrives as its number says. */
static tr_request *exchange(const tr_env *c, tr_saved_id what, const void *from, void *to) {
    int64_t block = packed_elems(c, what) / c->cut.heads * (int64_t)tr_dtype_bytes(c->t);
    return tr_all_to_all_begin(c->grid->comm[TR_GROUP_HEADS], c->stream, from, c->one_each, to,
                               c->one_each, block);
}

/* --- to attention and back -----------------------------------------------------------------------
 */

void *tr_heads_room(const tr_env *c, tr_saved_id what, void *own) {
    return packed(c, what) ? tr_scratch(c, packed_elems(c, what), c->t) : own;
}

tr_request *tr_heads_spread(const tr_env *c, tr_saved_id what, const void *own, void *to) {
    if (!packed(c, what)) return NULL;
    void *sent = exchanged(c) ? tr_scratch(c, packed_elems(c, what), c->t) : to;
    pack(c, what, own, sent);
    return exchanged(c) ? exchange(c, what, sent, to) : NULL;
}

tr_return tr_heads_return_begin(const tr_env *c, tr_saved_id what, const void *all) {
    tr_return r = {.what = what, .parts = all};
    if (!exchanged(c)) return r;
    void *arrived = tr_scratch(c, packed_elems(c, what), c->t);
    r.parts = arrived;
    r.request = exchange(c, what, all, arrived);
    return r;
}

void tr_heads_return_end(const tr_env *c, const tr_return *r, void *own) {
    tr_end(r->request);
    if (packed(c, r->what)) unpack(c, r->what, r->parts, own);
}

void *tr_attend_room(const tr_pass *pass, tr_saved *saved, tr_saved_id what) {
    const tr_env *c = pass->c;
    int64_t D = c->config->head_dim;
    if (!packed(c, what)) return tr_save(pass, saved, what);
    return tr_scratch(c, what == TR_SAVED_KV ? 2 * c->N * c->Hkv * D : c->N * c->Hq * D, c->t);
}

tr_request *tr_attend_share(const tr_pass *pass, tr_saved *saved, tr_saved_id what, void *own) {
    if (packed(pass->c, what))
        return tr_heads_spread(pass->c, what, own, tr_save(pass, saved, what));
    saved->t[what] = own;
    return NULL;
}

void tr_attend(const tr_pass *pass, tr_saved *saved) {
    const tr_env *c = pass->c;
    void *own = tr_save(pass, saved, TR_SAVED_ATTN);
    void *all = exchanged(c) ? tr_save(pass, saved, TR_SAVED_HEADS) : own;
    tr_save(pass, saved, TR_SAVED_LSE);
    tr_ring_forward(pass, saved, all);
    tr_return back = tr_heads_return_begin(c, TR_SAVED_Q, all);
    tr_heads_return_end(c, &back, own);
}
