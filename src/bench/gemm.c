/* gemm.c - the matrix products of the model's training step: forward, gradient of the input and of
 * the weights, at the rows of a whole step and of a small one. Floor: bench. */
#include "bench/groups.h"

#include <stdio.h>

enum { HEAD_ROWS = 1024 }; /* the head works on chunks of about so many */

typedef enum { FORWARD, INPUT, WEIGHT, PASSES } pass_kind;

/* A linear layer [out, in] and how often the model has it. */
typedef struct {
    int64_t out, in, count;
} linear;

typedef struct {
    tr_device *device;
    tr_gemm gemm;
} product;

static void run(void *self) {
    const product *p = self;
    p->device->kernels->gemm(p->device->stream, &p->gemm);
}

/* As tr_linear, tr_linear_input and tr_linear_weight of the model call it. x [M,in], w [out,in],
 * y [M,out]; result: fp32 room for any of them. */
static tr_gemm product_of(pass_kind pass, tr_dtype t, const linear *l, int64_t M, const void *x,
                          const void *w, const void *y, void *result) {
    tr_gemm g = {.ab = t, .c = t, .C = result};
    switch (pass) {
    case FORWARD:
        g.M = M, g.N = l->out, g.K = l->in;
        g.A = x, g.lda = l->in, g.B = w, g.ldb = l->in, g.trans_b = true;
        break;
    case INPUT:
        g.M = M, g.N = l->in, g.K = l->out;
        g.A = y, g.lda = l->out, g.B = w, g.ldb = l->in;
        break;
    default:
        g.M = l->out, g.N = l->in, g.K = M;
        g.A = y, g.lda = l->out, g.trans_a = true, g.B = x, g.ldb = l->in;
        g.c = TR_F32, g.beta = 1;
    }
    g.ldc = g.N;
    return g;
}

/* Adds a layer to the list, or to the count of an equal one. */
static void add(linear *list, int *count, linear l) {
    for (int i = 0; i < *count; i++)
        if (list[i].out == l.out && list[i].in == l.in) {
            list[i].count += l.count;
            return;
        }
    list[(*count)++] = l;
}

static int list_layers(const tr_model_config *m, linear list[6]) {
    int64_t L = m->num_hidden_layers, H = m->hidden_size, I = m->intermediate_size;
    int64_t q = m->num_attention_heads * m->head_dim, kv = m->num_key_value_heads * m->head_dim;
    int count = 0;
    add(list, &count, (linear){q, H, L});
    add(list, &count, (linear){kv, H, 2 * L});
    add(list, &count, (linear){H, q, L});
    add(list, &count, (linear){I, H, 2 * L});
    add(list, &count, (linear){H, I, L});
    add(list, &count, (linear){m->vocab_size, H, 1});
    return count;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Seconds of one product on all ranks at once. */
static double time_layer(tr_lab *lab, pass_kind pass, tr_dtype t, const linear *l, int64_t M) {
    tr_arena_reset(lab->memory);
    void *x = tr_lab_random(lab, M * l->in, t), *w = tr_lab_random(lab, l->out * l->in, t);
    void *y = tr_lab_random(lab, M * l->out, t);
    int64_t room = larger(larger(M * l->out, M * l->in), l->out * l->in);
    void *result = tr_lab_random(lab, room, TR_F32);
    product p = {lab->device, product_of(pass, t, l, M, x, w, y, result)};
    return tr_lab_time(lab, lab->world, 0.05 * (double)lab->repeats, run, &p);
}

/* One pass of all layers of a step. */
static void row(tr_lab *lab, pass_kind pass, tr_dtype t, int64_t M, double peak) {
    static const char *const names[PASSES] = {"forward", "input gradient", "weight gradient"};
    linear list[6];
    char note[32] = "";
    double flop = 0, seconds = 0, slowest = 0;
    tr_row_begin(&lab->table, "GEMM %s %s, %lld rows", tr_lab_dtype(t), names[pass], (long long)M);
    for (int i = 0, n = list_layers(&lab->config->model, list); i < n; i++) {
        const linear *l = &list[i];
        int64_t rows = l->out == lab->config->model.vocab_size && M > HEAD_ROWS ? HEAD_ROWS : M;
        double once = time_layer(lab, pass, t, l, rows);
        double work = 2e-9 * (double)(lab->ranks * rows * l->out * l->in), rate = work / once;
        double times = (double)(l->count * M) / (double)rows;
        flop += times * work;
        seconds += times * once;
        if (slowest > 0 && rate > slowest) continue;
        slowest = rate;
        snprintf(note, sizeof note, "worst %.0f %%", 100 * rate / peak);
    }
    tr_row_end(&lab->table, &(tr_row){.unit = "GFLOP/s",
                                      .measured = flop / seconds,
                                      .base = peak,
                                      .kind = TR_SHARE,
                                      .note = note});
}

void tr_bench_gemm(tr_lab *lab) {
    int64_t all = lab->B * lab->T, few = larger(all / 16, 1);
    for (tr_dtype t = TR_F32; t <= TR_BF16; t++) {
        double peak = tr_lab_peak(lab, t);
        for (int pass = FORWARD; pass < PASSES; pass++) row(lab, (pass_kind)pass, t, all, peak);
        for (int pass = FORWARD; pass < PASSES; pass++) row(lab, (pass_kind)pass, t, few, peak);
    }
    tr_arena_reset(lab->memory);
}
