/* attention.c - causal flash attention: speed as a share of the peak, bf16 against fp32, and memory
 * against length. Floor: bench. */
#include "bench/groups.h"

#include "kernels/peak.h"

#include <string.h>

typedef struct {
    tr_device *device;
    tr_attention attention;
} call;

static void forward(void *self) {
    const call *c = self;
    c->device->kernels->attention_forward(c->device->stream, &c->attention);
}

static void backward(void *self) {
    const call *c = self;
    c->device->kernels->attention_backward(c->device->stream, &c->attention);
}

/* Forward, GFLOP: two products of D for each pair of a query and a key it sees. Backward: five. */
static double gflop(const tr_attention *a) {
    double S = (double)a->Sq;
    return 1e-9 * 4.0 * (double)(a->Dqk * a->Hq) * S * (S + 1) / 2;
}

typedef struct {
    double forward, backward; /* GFLOP/s of all ranks */
} rates;

/* Whether bf16 has instructions of its own, which are to be faster than fp32's. */
static bool has_own(const tr_lab *lab, tr_dtype t) {
    return !lab->device->host_memory ||
           strcmp(tr_peak_instruction(t), tr_peak_instruction(TR_F32)) != 0;
}

static rates rows(tr_lab *lab, tr_dtype t, int64_t S, int64_t D, double peak, const rates *fp32) {
    const char *type = tr_lab_dtype(t);
    int64_t heads = lab->config->model.hidden_size / D;
    double seconds = 0.2 * (double)lab->repeats;
    rates r;
    tr_arena_reset(lab->memory);
    call c = {lab->device, tr_lab_attention(lab, t, 1, S, heads > 0 ? heads : 1, D)};
    double work = gflop(&c.attention) * lab->ranks;
    tr_row result = {.unit = "GFLOP/s", .kind = fp32 ? TR_TIMES : TR_SHARE};
    tr_row_begin(&lab->table, "attention %s forward, S %lld, D %lld", type, (long long)S,
                 (long long)D);
    r.forward = work / tr_lab_time(lab, lab->world, seconds, forward, &c);
    result.measured = r.forward;
    result.base = fp32 ? fp32->forward : peak;
    result.target = !fp32 ? 0.82 : has_own(lab, t) ? 1.6 : 0;
    tr_row_end(&lab->table, &result);
    tr_row_begin(&lab->table, "attention %s backward, S %lld, D %lld", type, (long long)S,
                 (long long)D);
    r.backward = 2.5 * work / tr_lab_time(lab, lab->world, seconds, backward, &c);
    result.measured = r.backward;
    result.base = fp32 ? fp32->backward : peak;
    result.target = !fp32 ? 0.85 : has_own(lab, t) ? 1.6 : 0;
    tr_row_end(&lab->table, &result);
    return r;
}

/* --- memory ----------------------------------------------------------------------------------- */

/* Bytes of a forward and a backward: inputs, outputs and whatever work memory the kernels take, one
 * head a thread. */
static double bytes_at(tr_lab *lab, int64_t S) {
    lab->device->trim(lab->device); /* what earlier calls have left is not to be used unseen */
    double before = tr_resident_now();
    tr_resident_restart();
    call c = {lab->device, tr_lab_attention(lab, TR_F32, 1, S, lab->threads, 64)};
    forward(&c);
    backward(&c);
    return tr_resident_peak() - before;
}

/* Linear in S: the work memory is fixed or grows with S, so bytes a position may fall, not rise. */
static void memory_rows(tr_lab *lab) {
    tr_arena *outer = lab->memory;
    double first = 0;
    for (int64_t times = 1; times <= 16; times *= 4) {
        int64_t S = 4 * lab->T * times;
        if (times == 1)
            tr_row_begin(&lab->table, "attention memory, S %lld", (long long)S);
        else
            tr_row_begin(&lab->table, "attention memory, S %lld; base x %lld", (long long)S,
                         (long long)times);
        if (!lab->device->host_memory || !tr_resident_restart()) {
            tr_row_skip(&lab->table, lab->device->host_memory
                                         ? "this system cannot measure a new peak of memory"
                                         : "the device's memory is not measured");
            continue;
        }
        lab->memory = tr_arena_create(&lab->device->allocator, 1 << 20);
        double mb = 1e-6 * tr_lab_sum(lab, bytes_at(lab, S));
        tr_arena_destroy(lab->memory);
        if (times == 1) first = mb;
        tr_row_end(&lab->table, &(tr_row){.unit = "MB",
                                          .measured = mb,
                                          .base = first * (double)times,
                                          .kind = times == 1 ? TR_ALONE : TR_TIMES,
                                          .target = times == 1 ? 0 : 1.1,
                                          .at_most = true});
    }
    lab->memory = outer;
}

void tr_bench_attention(tr_lab *lab) {
    tr_arena_reset(lab->memory);
    memory_rows(lab);
    for (int64_t D = 64; D <= 128; D *= 2) {
        double peak = tr_lab_peak(lab, TR_F32);
        rates fp32 = rows(lab, TR_F32, 4 * lab->T, D, peak, NULL);
        rows(lab, TR_BF16, 4 * lab->T, D, peak, &fp32);
    }
    tr_arena_reset(lab->memory);
}
