/* bound_moe.c - kernels of a mixture-of-experts layer of the model's width: 8 experts of half its
 * feed-forward width, 2 a token. Floor: bench. */
#include "bench/bound.h"

#include <stdlib.h>

enum { EXPERTS = 8, CHOSEN = 2 };

/* One type's operands; R = N CHOSEN rows in the experts' order. */
typedef struct {
    const tr_bound *b;
    tr_dtype t;
    tr_routing how;
    int64_t N, H, I, S, R, capacity;
    void *x, *y, *rows, *up, *w; /* [N,H], [N,H], [R,H], [R,I], [E,I,H] */
    float *logits, *prob, *lse, *weight, *dweight, *dlogits, *prob_grad, *z_grad, *dw;
    double *stats;
    int64_t *offsets;
    int32_t *index, *taken, *row_of, *pair_of;
} experts;

static void router_forward(void *self) {
    const experts *o = self;
    o->b->k->router_forward(o->b->s, &o->how, o->logits, NULL, o->prob, o->lse, o->index, o->weight,
                            o->N);
}

static void router_stats(void *self) {
    const experts *o = self;
    o->b->k->router_stats(o->b->s, &o->how, o->prob, o->lse, o->index, NULL, o->stats, 0, o->N,
                          o->N, 1);
}

static void router_backward(void *self) {
    const experts *o = self;
    o->b->k->router_backward(o->b->s, &o->how, o->dlogits, o->dweight, o->logits, o->prob, o->lse,
                             o->index, o->weight, NULL, o->prob_grad, o->z_grad, 0, o->N, o->N);
}

static void capacity_by(const experts *o, bool by_score) {
    o->b->k->router_capacity(o->b->s, o->taken, o->index, o->weight, o->N / o->S, o->S, EXPERTS,
                             CHOSEN, o->capacity, by_score);
}

static void capacity_by_row(void *self) {
    capacity_by(self, false);
}

static void capacity_by_score(void *self) {
    capacity_by(self, true);
}

static void moe_sort(void *self) {
    const experts *o = self;
    o->b->k->moe_sort(o->b->s, o->offsets, o->row_of, o->pair_of, o->index, NULL, o->N, EXPERTS,
                      CHOSEN);
}

static void gather_rows(void *self) {
    const experts *o = self;
    o->b->k->gather_rows(o->b->s, o->t, o->rows, o->t, o->x, o->pair_of, CHOSEN, NULL,
                         (tr_rows){o->R, o->offsets + EXPERTS}, o->H);
}

static void combine_rows(void *self) {
    const experts *o = self;
    o->b->k->combine_rows(o->b->s, o->t, o->y, o->t, o->rows, o->row_of, o->weight, 0, o->N, CHOSEN,
                          o->H);
}

static void combine_rows_weight(void *self) {
    const experts *o = self;
    o->b->k->combine_rows_weight(o->b->s, o->dweight, o->t, o->x, o->t, o->rows, o->row_of, o->N,
                                 CHOSEN, o->H);
}

static void grouped_forward(void *self) {
    const experts *o = self;
    o->b->k->grouped_gemm(o->b->s, o->t, o->t, EXPERTS, o->offsets, o->R, o->rows, o->w, true,
                          o->up, o->I, o->H, 0);
}

static void grouped_input(void *self) {
    const experts *o = self;
    o->b->k->grouped_gemm(o->b->s, o->t, o->t, EXPERTS, o->offsets, o->R, o->up, o->w, false,
                          o->rows, o->H, o->I, 0);
}

static void grouped_weight(void *self) {
    const experts *o = self;
    o->b->k->grouped_gemm_weight(o->b->s, o->t, EXPERTS, o->offsets, o->R, o->up, o->rows, o->dw,
                                 o->I, o->H, 1);
}

static int64_t half(int64_t n) {
    return n > 1 ? n / 2 : 1;
}

static void open(experts *o, const tr_bound *b, tr_dtype t) {
    tr_lab *lab = b->lab;
    const tr_model_config *m = &lab->config->model;
    *o = (experts){.b = b,
                   .t = t,
                   .how = {.E = EXPERTS,
                           .k = CHOSEN,
                           .groups = 1,
                           .kept = 1,
                           .score = m->scoring_func,
                           .renormalise = true},
                   .N = lab->B * lab->T,
                   .H = m->hidden_size,
                   .I = half(m->intermediate_size),
                   .S = lab->T};
    o->R = o->N * CHOSEN;
    o->capacity = 1 + o->S * CHOSEN / EXPERTS;
    tr_arena_reset(lab->memory);
    o->x = tr_lab_random(lab, o->N * o->H, t);
    o->y = tr_lab_random(lab, o->N * o->H, t);
    o->w = tr_lab_random(lab, EXPERTS * o->I * o->H, t);
    o->rows = tr_bound_room(b, o->R * o->H, t);
    o->up = tr_lab_random(lab, o->R * o->I, t);
    o->dw = tr_lab_random(lab, EXPERTS * o->I * o->H, TR_F32);
    o->logits = tr_lab_random(lab, o->N * EXPERTS, TR_F32);
    o->dweight = tr_lab_random(lab, o->R, TR_F32);
    o->prob_grad = tr_lab_random(lab, EXPERTS, TR_F32);
    o->z_grad = tr_lab_random(lab, 1, TR_F32);
    o->prob = tr_bound_room(b, o->N * EXPERTS, TR_F32);
    o->dlogits = tr_bound_room(b, o->N * EXPERTS, TR_F32);
    o->lse = tr_bound_room(b, o->N, TR_F32);
    o->weight = tr_bound_room(b, o->R, TR_F32);
    o->stats = tr_bound_room(b, 2 + 2 * EXPERTS, TR_F64);
    o->offsets = tr_bound_room(b, EXPERTS + 1, TR_I64);
    o->index = tr_bound_room(b, o->R, TR_I32);
    o->taken = tr_bound_room(b, o->R, TR_I32);
    o->row_of = tr_bound_room(b, o->R, TR_I32);
    o->pair_of = tr_bound_room(b, o->R, TR_I32);
    router_forward(o);
    moe_sort(o);
    gather_rows(o);
}

static void row(experts *o, const char *kernel, void (*run)(void *self), double bytes, double flop,
                int64_t rows, int64_t columns, const char *more) {
    tr_bound_time(o->b, &(tr_bound_row){kernel, o->t, bytes, flop, run, o}, "[%lld, %lld]%s",
                  (long long)rows, (long long)columns, more);
}

/* Those that do not depend on the type. */
static void router_rows(experts *o) {
    double p = 4.0 * (double)(o->N * EXPERTS), r = 4.0 * (double)o->R, n = 4.0 * (double)o->N;
    row(o, "router_forward", router_forward, 2 * p + 2 * r + n, 0, o->N, EXPERTS, ", 2 chosen");
    row(o, "router_stats", router_stats, p + r + n, 0, o->N, EXPERTS, "");
    row(o, "router_backward", router_backward, 2 * p + 3 * r + n, 0, o->N, EXPERTS, "");
    row(o, "router_capacity", capacity_by_row, 3 * r, 0, o->N, CHOSEN, ", by row");
    row(o, "router_capacity", capacity_by_score, 3 * r, 0, o->N, CHOSEN, ", by score");
    row(o, "moe_sort", moe_sort, 3 * r, 0, o->N, CHOSEN, ", 8 places");
}

static void rows(experts *o) {
    double e = (double)tr_dtype_bytes(o->t), x = e * (double)(o->N * o->H);
    double r = e * (double)(o->R * o->H), up = e * (double)(o->R * o->I);
    double w = (double)(EXPERTS * o->I * o->H), flop = 2.0 * (double)(o->R * o->I * o->H);
    row(o, "gather_rows", gather_rows, x + r, 0, o->R, o->H, "");
    row(o, "combine_rows", combine_rows, x + r, 0, o->N, o->H, ", 2 rows");
    row(o, "combine_rows_weight", combine_rows_weight, x + r, 0, o->N, o->H, ", 2 rows");
    row(o, "grouped_gemm", grouped_forward, r + up + w * e, flop, o->R, o->H, " W^T, 8 groups");
    row(o, "grouped_gemm", grouped_input, r + up + w * e, flop, o->R, o->I, " W, 8 groups");
    row(o, "grouped_gemm_weight", grouped_weight, r + up + 8 * w, flop, o->I, o->H, ", 8 groups");
}

void tr_bound_moe(const tr_bound *b) {
    experts o;
    for (tr_dtype t = TR_F32; t <= TR_BF16; t++) {
        open(&o, b, t);
        if (t == TR_F32) router_rows(&o);
        rows(&o);
    }
    tr_arena_reset(b->lab->memory);
}
