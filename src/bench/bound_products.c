/* bound_products.c - matrix products of the model's layers, and causal attention at four lengths.
 * Floor: bench. */
#include "bench/bound.h"

enum { HEAD_ROWS = 1024 }; /* the head works on chunks of about so many */

typedef struct {
    const tr_bound *b;
    tr_gemm gemm;
    tr_attention attention;
} product;

static void gemm(void *self) {
    const product *p = self;
    p->b->k->gemm(p->b->s, &p->gemm);
}

static void forward(void *self) {
    const product *p = self;
    p->b->k->attention_forward(p->b->s, &p->attention);
}

static void backward(void *self) {
    const product *p = self;
    p->b->k->attention_backward(p->b->s, &p->attention);
}

/* --- gemm --------------------------------------------------------------------------------------
 */

static void gemm_row(product *p, const char *what) {
    const tr_gemm *g = &p->gemm;
    double e = (double)tr_dtype_bytes(g->ab), c = (double)tr_dtype_bytes(g->c) * (1 + g->beta);
    double bytes = e * (double)(g->M * g->K + g->K * g->N) + c * (double)(g->M * g->N);
    double flop = 2.0 * (double)g->M * (double)g->N * (double)g->K;
    tr_bound_time(p->b, &(tr_bound_row){"gemm", g->ab, bytes, flop, gemm, p}, "%lld %lld %lld %s",
                  (long long)g->M, (long long)g->N, (long long)g->K, what);
}

/* y [M,out] = x [M,in] w^T, its input gradient y w, and its weight gradient dw += y^T x. */
static void layer(const tr_bound *b, tr_dtype t, int64_t M, int64_t out, int64_t in) {
    tr_lab *lab = b->lab;
    product p = {.b = b};
    tr_arena_reset(lab->memory);
    void *x = tr_lab_random(lab, M * in, t), *w = tr_lab_random(lab, out * in, t);
    void *y = tr_lab_random(lab, M * out, t), *dw = tr_lab_random(lab, out * in, TR_F32);
    p.gemm = (tr_gemm){.M = M, .N = out, .K = in, .ab = t, .c = t};
    p.gemm.A = x, p.gemm.lda = in, p.gemm.B = w, p.gemm.ldb = in, p.gemm.trans_b = true;
    p.gemm.C = y, p.gemm.ldc = out;
    gemm_row(&p, "forward");
    p.gemm = (tr_gemm){.M = M, .N = in, .K = out, .ab = t, .c = t};
    p.gemm.A = y, p.gemm.lda = out, p.gemm.B = w, p.gemm.ldb = in;
    p.gemm.C = x, p.gemm.ldc = in;
    gemm_row(&p, "input");
    p.gemm = (tr_gemm){.M = out, .N = in, .K = M, .ab = t, .c = TR_F32, .beta = 1};
    p.gemm.A = y, p.gemm.lda = out, p.gemm.trans_a = true, p.gemm.B = x, p.gemm.ldb = in;
    p.gemm.C = dw, p.gemm.ldc = in;
    gemm_row(&p, "weight");
}

static void gemm_rows(const tr_bound *b, tr_dtype t) {
    const tr_model_config *m = &b->lab->config->model;
    int64_t N = b->lab->B * b->lab->T, H = m->hidden_size;
    layer(b, t, N, m->num_attention_heads * m->head_dim, H);
    layer(b, t, N, m->intermediate_size, H);
    layer(b, t, N, H, m->intermediate_size);
    layer(b, t, N < HEAD_ROWS ? N : HEAD_ROWS, m->vocab_size, H);
}

/* --- attention ---------------------------------------------------------------------------------
 */

/* As many tokens at each length, as those of the longest. Only pairs that are seen count: two
 * products of D forward, five backward. */
static void attention_rows(const tr_bound *b, tr_dtype t, int64_t D) {
    tr_lab *lab = b->lab;
    int64_t most = 8 * lab->T, H = lab->config->model.hidden_size / D;
    if (H < 1) H = 1;
    for (int64_t S = lab->T; S <= most; S *= 2) {
        int64_t B = most / S;
        tr_arena_reset(lab->memory);
        product p = {.b = b, .attention = tr_lab_attention(lab, t, B, S, H, D)};
        double elems = (double)(B * S * H * D), e = (double)tr_dtype_bytes(t);
        double flop = 2.0 * elems * (double)(S + 1);
        tr_bound_time(b, &(tr_bound_row){"attention_forward", t, 4 * elems * e, flop, forward, &p},
                      "B %lld S %lld H %lld D %lld causal", (long long)B, (long long)S,
                      (long long)H, (long long)D);
        tr_bound_time(
            b, &(tr_bound_row){"attention_backward", t, 8 * elems * e, 2.5 * flop, backward, &p},
            "B %lld S %lld H %lld D %lld causal", (long long)B, (long long)S, (long long)H,
            (long long)D);
    }
}

void tr_bound_products(const tr_bound *b) {
    for (tr_dtype t = TR_F32; t <= TR_BF16; t++) {
        gemm_rows(b, t);
        for (int64_t D = 64; D <= 128; D *= 2) attention_rows(b, t, D);
    }
    tr_arena_reset(b->lab->memory);
}
