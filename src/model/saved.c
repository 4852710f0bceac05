/* saved.c - the table of what a block saves for its backward, and linear layers. Floor: model. */
#include "model/pass.h"

typedef enum { KEEP_ALWAYS, KEEP_UNLESS_FULL, KEEP_ONLY_NONE } keep_rule;

static const keep_rule rule_of[TR_SAVED_COUNT] = {
    [TR_SAVED_X] = KEEP_ALWAYS,           [TR_SAVED_NORM1] = KEEP_ONLY_NONE,
    [TR_SAVED_RSTD1] = KEEP_UNLESS_FULL,  [TR_SAVED_Q] = KEEP_UNLESS_FULL,
    [TR_SAVED_KV] = KEEP_UNLESS_FULL,     [TR_SAVED_ATTN] = KEEP_ONLY_NONE,
    [TR_SAVED_LSE] = KEEP_ONLY_NONE,      [TR_SAVED_MID] = KEEP_UNLESS_FULL,
    [TR_SAVED_NORM2] = KEEP_ONLY_NONE,    [TR_SAVED_RSTD2] = KEEP_UNLESS_FULL,
    [TR_SAVED_GATE] = KEEP_UNLESS_FULL,   [TR_SAVED_UP] = KEEP_UNLESS_FULL,
    [TR_SAVED_ACT] = KEEP_ONLY_NONE,      [TR_SAVED_PROB] = KEEP_ALWAYS,
    [TR_SAVED_RLSE] = KEEP_ALWAYS,        [TR_SAVED_INDEX] = KEEP_ALWAYS,
    [TR_SAVED_WEIGHT] = KEEP_ALWAYS,      [TR_SAVED_ROW_OF] = KEEP_ALWAYS,
    [TR_SAVED_PAIR_OF] = KEEP_ALWAYS,     [TR_SAVED_OFFSET] = KEEP_ALWAYS,
    [TR_SAVED_LOCAL] = KEEP_ALWAYS,       [TR_SAVED_FROM] = KEEP_ALWAYS,
    [TR_SAVED_TO] = KEEP_ALWAYS,          [TR_SAVED_XE] = KEEP_UNLESS_FULL,
    [TR_SAVED_GATE_E] = KEEP_UNLESS_FULL, [TR_SAVED_UP_E] = KEEP_UNLESS_FULL,
    [TR_SAVED_ACT_E] = KEEP_ONLY_NONE,    [TR_SAVED_YE] = KEEP_UNLESS_FULL,
};

static bool kept(const tr_pass *pass, tr_saved_id id) {
    if (rule_of[id] == KEEP_ALWAYS) return true;
    if (!pass->training || pass->recomputing) return false;
    return pass->c->recompute == TR_RECOMPUTE_NONE ||
           (pass->c->recompute == TR_RECOMPUTE_SELECTIVE && rule_of[id] == KEEP_UNLESS_FULL);
}

void *tr_save(const tr_pass *pass, tr_saved *saved, tr_saved_id id, int64_t elems, tr_dtype t) {
    tr_arena *arena = kept(pass, id) ? pass->kept : pass->c->scratch;
    saved->t[id] = tr_arena_alloc(arena, (size_t)elems * tr_dtype_bytes(t));
    return saved->t[id];
}

void tr_saved_forget(const tr_pass *pass, tr_saved *saved) {
    for (int id = 0; id < TR_SAVED_COUNT; id++)
        if (!kept(pass, (tr_saved_id)id)) saved->t[id] = NULL;
}

void tr_linear(const tr_env *c, void *y, tr_dtype y_t, const void *x, const tr_param *w, int64_t N,
               float beta) {
    int64_t out = w->decl.shape[0], in = w->decl.shape[1];
    c->kernels->gemm(c->stream, &(tr_gemm){.M = N,
                                           .N = out,
                                           .K = in,
                                           .A = x,
                                           .lda = in,
                                           .B = w->weight,
                                           .ldb = in,
                                           .trans_b = true,
                                           .C = y,
                                           .ldc = out,
                                           .ab = c->t,
                                           .c = y_t,
                                           .beta = beta});
}

void tr_linear_input(const tr_env *c, void *dx, const void *dy, const tr_param *w, int64_t N,
                     float beta) {
    int64_t out = w->decl.shape[0], in = w->decl.shape[1];
    c->kernels->gemm(c->stream, &(tr_gemm){.M = N,
                                           .N = in,
                                           .K = out,
                                           .A = dy,
                                           .lda = out,
                                           .B = w->weight,
                                           .ldb = in,
                                           .C = dx,
                                           .ldc = in,
                                           .ab = c->t,
                                           .c = c->t,
                                           .beta = beta});
}

void tr_linear_weight(const tr_env *c, const tr_param *w, const void *dy, const void *x,
                      int64_t N) {
    int64_t out = w->decl.shape[0], in = w->decl.shape[1];
    c->kernels->gemm(c->stream, &(tr_gemm){.M = out,
                                           .N = in,
                                           .K = N,
                                           .A = dy,
                                           .lda = out,
                                           .trans_a = true,
                                           .B = x,
                                           .ldb = in,
                                           .C = w->grad,
                                           .ldc = in,
                                           .ab = c->t,
                                           .c = TR_F32,
                                           .beta = 1});
}
