/* bound_layers.c - kernels of the dense layers, the loss and the optimizer, at the sizes of the
 * model measured. Floor: bench. */
#include "base/heap.h"
#include "base/rng.h"
#include "bench/bound.h"

#include <stdlib.h>

enum { HEAD_ROWS = 1024, OPTIMIZER_ELEMS = 32 << 20 };

/* One type's operands. x, dx [N,H]; up, gate, h [N,I]; logits [n,V]. */
typedef struct {
    const tr_bound *b;
    tr_dtype t;
    tr_activation f;
    int64_t N, H, I, V, heads, D, n;
    void *x, *dx, *dy, *w, *table, *gate, *up, *h, *dgate, *dup, *dlogits;
    float *f32, *dw, *db, *mean, *rstd, *freq, *logits, *dtable;
    double *part, *sum;
    int32_t *token, *label, *position;
    int64_t distinct; /* tokens among the N */
} layers;

static void rmsnorm_forward(void *self) {
    const layers *o = self;
    o->b->k->rmsnorm_forward(o->b->s, o->t, o->dx, o->rstd, o->x, o->w, o->N, o->H, o->H, 1e-6f);
}

static void rmsnorm_backward(void *self) {
    const layers *o = self;
    o->b->k->rmsnorm_backward(o->b->s, o->t, o->dx, o->dw, o->dy, o->x, o->w, o->rstd, o->dx, o->N,
                              o->H, o->H);
}

static void layernorm_forward(void *self) {
    const layers *o = self;
    o->b->k->layernorm_forward(o->b->s, o->t, o->dx, o->mean, o->rstd, o->x, o->w, o->w, o->N, o->H,
                               o->H, 1e-5f);
}

static void layernorm_backward(void *self) {
    const layers *o = self;
    o->b->k->layernorm_backward(o->b->s, o->t, o->dx, o->dw, o->db, o->dy, o->x, o->w, o->mean,
                                o->rstd, o->dx, o->N, o->H, o->H);
}

static void rope(void *self) {
    const layers *o = self;
    o->b->k->rope(o->b->s, o->t, o->dy, o->position, o->freq, o->N, o->heads, o->D, o->D / 2,
                  o->heads * o->D, false, 1, 1);
}

static void glu_forward(void *self) {
    const layers *o = self;
    o->b->k->glu_forward(o->b->s, o->t, o->f, o->h, o->gate, o->up, (tr_rows){o->N, NULL}, o->I);
}

static void glu_backward(void *self) {
    const layers *o = self;
    o->b->k->glu_backward(o->b->s, o->t, o->f, o->dgate, o->dup, o->h, o->gate, o->up,
                          (tr_rows){o->N, NULL}, o->I);
}

static void add(void *self) {
    const layers *o = self;
    o->b->k->add(o->b->s, o->t, o->dx, o->t, o->x, o->N * o->H);
}

static void cast_up(void *self) {
    const layers *o = self;
    o->b->k->cast(o->b->s, TR_F32, o->f32, o->t, o->x, o->N * o->H);
}

static void cast_down(void *self) {
    const layers *o = self;
    o->b->k->cast(o->b->s, o->t, o->dx, TR_F32, o->f32, o->N * o->H);
}

static void embedding_forward(void *self) {
    const layers *o = self;
    o->b->k->embedding_forward(o->b->s, o->t, o->dx, o->token, o->table, 0, o->V, o->N, o->H);
}

static void embedding_backward(void *self) {
    const layers *o = self;
    o->b->k->embedding_backward(o->b->s, o->t, o->dtable, o->token, o->dy, 0, o->V, o->N, o->H);
}

static void cross_entropy(void *self) {
    const layers *o = self;
    o->b->k->cross_entropy(o->b->s, o->t, o->logits, o->V, o->label, NULL, o->sum, o->dlogits, o->V,
                           1e-4f, o->n, o->V);
}

static void cross_entropy_part(void *self) {
    const layers *o = self;
    o->b->k->cross_entropy_part(o->b->s, o->logits, o->V, o->label, 0, o->part, o->n, o->V);
}

static void cross_entropy_whole(void *self) {
    const layers *o = self;
    o->b->k->cross_entropy_whole(o->b->s, o->t, o->part, 1, o->logits, o->V, o->label, 0, NULL,
                                 o->sum, o->dlogits, o->V, 1e-4f, o->n, o->V);
}

/* --- operands ----------------------------------------------------------------------------------
 */

/* Random tokens below V; how many different ones. */
static int64_t draw(int32_t *value, int64_t count, int64_t V) {
    char *seen = tr_heap_alloc(V, 1);
    int64_t distinct = 0;
    for (int64_t i = 0; i < count; i++) {
        value[i] = (int32_t)(tr_random_u64(4, 0, (uint64_t)i) % (uint64_t)V);
        distinct += !seen[value[i]];
        seen[value[i]] = 1;
    }
    free(seen);
    return distinct;
}

static void draw_integers(layers *o) {
    int32_t *value = tr_heap_alloc(o->N, sizeof *value);
    o->distinct = draw(value, o->N, o->V);
    o->token = tr_bound_integers(o->b, o->N, value);
    o->label = tr_bound_integers(o->b, o->n, value);
    for (int64_t i = 0; i < o->N; i++) value[i] = (int32_t)(i % o->b->lab->T);
    o->position = tr_bound_integers(o->b, o->N, value);
    free(value);
}

static void open(layers *o, const tr_bound *b, tr_dtype t) {
    tr_lab *lab = b->lab;
    const tr_model_config *m = &lab->config->model;
    *o = (layers){.b = b,
                  .t = t,
                  .f = m->hidden_act,
                  .N = lab->B * lab->T,
                  .H = m->hidden_size,
                  .I = m->intermediate_size,
                  .V = m->vocab_size,
                  .heads = m->num_attention_heads,
                  .D = m->head_dim};
    o->n = o->N < HEAD_ROWS ? o->N : HEAD_ROWS;
    tr_arena_reset(lab->memory);
    o->x = tr_lab_random(lab, o->N * o->H, t);
    o->dx = tr_lab_random(lab, o->N * o->H, t);
    o->dy = tr_lab_random(lab, o->N * o->heads * o->D, t);
    o->w = tr_lab_random(lab, o->H, t);
    o->table = tr_lab_random(lab, o->V * o->H, t);
    o->gate = tr_lab_random(lab, o->N * o->I, t);
    o->up = tr_lab_random(lab, o->N * o->I, t);
    o->h = tr_lab_random(lab, o->N * o->I, t);
    o->dgate = tr_bound_room(b, o->N * o->I, t);
    o->dup = tr_bound_room(b, o->N * o->I, t);
    o->f32 = tr_lab_random(lab, o->N * o->H, TR_F32);
    o->logits = tr_lab_random(lab, o->n * o->V, TR_F32);
    o->freq = tr_lab_random(lab, o->D / 2 + 1, TR_F32);
    o->dw = tr_lab_random(lab, o->H, TR_F32);
    o->db = tr_lab_random(lab, o->H, TR_F32);
    o->mean = tr_bound_room(b, o->N, TR_F32);
    o->dtable = tr_lab_random(lab, o->V * o->H, TR_F32);
    o->rstd = tr_bound_room(b, o->N, TR_F32);
    o->dlogits = tr_bound_room(b, o->n * o->V, t);
    o->part = tr_bound_room(b, 3 * o->n, TR_F64);
    o->sum = tr_bound_room(b, 1, TR_F64);
    b->device->zero(b->s, o->sum, sizeof *o->sum);
    draw_integers(o);
}

/* --- rows --------------------------------------------------------------------------------------
 */

static void row(layers *o, const char *kernel, void (*run)(void *self), double bytes, int64_t rows,
                int64_t columns) {
    tr_bound_time(o->b, &(tr_bound_row){kernel, o->t, bytes, 0, run, o}, "[%lld, %lld]",
                  (long long)rows, (long long)columns);
}

static void rows(layers *o) {
    double e = (double)tr_dtype_bytes(o->t), x = (double)(o->N * o->H), h = (double)(o->N * o->I);
    double logits = (double)(o->n * o->V), q = (double)(o->N * o->heads * o->D);
    row(o, "rmsnorm_forward", rmsnorm_forward, 2 * x * e, o->N, o->H);
    row(o, "rmsnorm_backward", rmsnorm_backward, 4 * x * e, o->N, o->H);
    row(o, "layernorm_forward", layernorm_forward, 2 * x * e, o->N, o->H);
    row(o, "layernorm_backward", layernorm_backward, 4 * x * e, o->N, o->H);
    row(o, "rope", rope, 2 * q * e, o->N, o->heads * o->D);
    row(o, "glu_forward", glu_forward, 3 * h * e, o->N, o->I);
    row(o, "glu_backward", glu_backward, 5 * h * e, o->N, o->I);
    row(o, "add", add, 3 * x * e, o->N, o->H);
    row(o, "cast to fp32", cast_up, x * (e + 4), o->N, o->H);
    row(o, "cast from fp32", cast_down, x * (e + 4), o->N, o->H);
    double wanted = (double)(o->distinct * o->H);
    row(o, "embedding_forward", embedding_forward, (x + wanted) * e, o->N, o->H);
    row(o, "embedding_backward", embedding_backward, x * e + 8 * wanted, o->N, o->H);
    row(o, "cross_entropy", cross_entropy, logits * (4 + e), o->n, o->V);
    if (o->t == TR_F32)
        row(o, "cross_entropy_part", cross_entropy_part, logits * 4, o->n, o->V);
    else
        cross_entropy_part(o); /* what the next row reads */
    row(o, "cross_entropy_whole", cross_entropy_whole, logits * (4 + e), o->n, o->V);
}

/* --- the optimizer -----------------------------------------------------------------------------
 */

typedef struct {
    const tr_bound *b;
    float *p, *m, *v, *g;
    void *compute;
    double *sum;
    int64_t n;
} weights;

static void adamw(void *self) {
    const weights *o = self;
    tr_adamw how = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 10};
    o->b->k->adamw(o->b->s, &how, o->p, o->compute, TR_BF16, o->m, o->v, o->g, o->n);
}

static void sum_squares(void *self) {
    const weights *o = self;
    o->b->k->sum_squares(o->b->s, o->sum, o->g, o->n);
}

static void optimizer(const tr_bound *b) {
    tr_lab *lab = b->lab;
    int64_t all = tr_registry_total(tr_model_registry(lab->plan->model));
    weights o = {.b = b, .n = all < OPTIMIZER_ELEMS ? all : OPTIMIZER_ELEMS};
    double n = (double)o.n;
    tr_arena_reset(lab->memory);
    o.p = tr_lab_random(lab, o.n, TR_F32);
    o.g = tr_lab_random(lab, o.n, TR_F32);
    o.m = tr_bound_room(b, o.n, TR_F32);
    o.v = tr_bound_room(b, o.n, TR_F32);
    o.compute = tr_bound_room(b, o.n, TR_BF16);
    o.sum = tr_bound_room(b, 1, TR_F64);
    b->device->zero(b->s, o.m, (size_t)o.n * sizeof *o.m);
    b->device->zero(b->s, o.v, (size_t)o.n * sizeof *o.v);
    b->device->zero(b->s, o.sum, sizeof *o.sum);
    tr_bound_time(b, &(tr_bound_row){"adamw", TR_F32, 30 * n, 0, adamw, &o}, "[%lld], bf16 copy",
                  (long long)o.n);
    tr_bound_time(b, &(tr_bound_row){"sum_squares", TR_F32, 4 * n, 0, sum_squares, &o}, "[%lld]",
                  (long long)o.n);
}

void tr_bound_layers(const tr_bound *b) {
    layers o;
    for (tr_dtype t = TR_F32; t <= TR_BF16; t++) {
        open(&o, b, t);
        rows(&o);
    }
    optimizer(b);
    tr_arena_reset(b->lab->memory);
}
