/* comm.c - what two ranks gain: the sum of gradients, and attention over context ranks. Floor:
 * bench. */
#include "bench/groups.h"
#include "bench/rig.h"

static const char two_ranks[] = "needs 2 ranks on one node (mpirun -n 2)";

static bool two(const tr_lab *lab) {
    return lab->ranks == 2 && tr_comm_node_size(lab->world) == 2;
}

/* --- a sum ------------------------------------------------------------------------------------ */

typedef struct {
    tr_comm *comm;
    tr_stream *stream;
    float *buffer;
    int64_t elems;
} sum_job;

static void sum(void *self) {
    sum_job *s = self;
    tr_end(tr_all_reduce_begin(s->comm, s->stream, TR_SUM, TR_F32, s->buffer, s->elems));
}

void tr_bench_sum(tr_lab *lab) {
    int64_t bytes = lab->T << 16; /* 64 MiB */
    tr_row_begin(&lab->table, "sum of %.1f MB over 2 ranks", 1e-6 * (double)bytes);
    if (!two(lab)) {
        tr_row_skip(&lab->table, two_ranks);
        return;
    }
    tr_device *device = lab->device;
    sum_job s = {lab->world, device->stream, tr_comm_alloc_on(lab->world, device, bytes),
                 bytes / 4};
    double seconds = tr_lab_time(lab, lab->world, 0.2 * (double)lab->repeats, sum, &s);
    tr_row_end(&lab->table, &(tr_row){.unit = "GB/s",
                                      .measured = 1e-9 * (double)bytes / seconds,
                                      .kind = TR_ALONE,
                                      .target = 14});
    tr_comm_free_on(lab->world, device, s.buffer, bytes);
}

/* --- attention over context ranks ---------------------------------------------------------------
 */

typedef struct {
    tr_lab *lab;
    tr_comm *comm;
    int64_t S;
    int heads; /* of a head group */
    double seconds;
    tr_rig rig;
    void *q, *kv, *dout, *dq, *dkv;
} context_job;

static void context_step(void *self) {
    context_job *r = self;
    const tr_pass *pass = &r->rig.pass;
    const tr_env *c = pass->c;
    tr_saved *saved = &r->rig.saved;
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    tr_rig_restart(&r->rig);
    tr_request *keys = tr_attend_share(pass, saved, TR_SAVED_KV, r->kv);
    tr_end(tr_attend_share(pass, saved, TR_SAVED_Q, r->q));
    tr_end(keys);
    tr_attend(pass, saved);
    void *dout = tr_heads_room(c, TR_SAVED_Q, r->dout), *dq = tr_heads_room(c, TR_SAVED_Q, r->dq);
    void *dkv = tr_heads_room(c, TR_SAVED_KV, r->dkv);
    tr_end(tr_heads_spread(c, TR_SAVED_Q, r->dout, dout));
    tr_ring_backward(pass, saved, dout, dq, dkv);
    tr_return queries = tr_heads_return_begin(c, TR_SAVED_Q, dq);
    tr_return gradients = tr_heads_return_begin(c, TR_SAVED_KV, dkv);
    tr_heads_return_end(c, &queries, r->dq);
    tr_heads_return_end(c, &gradients, r->dkv);
    tr_arena_release(c->scratch, mark);
}

/* Collective on r->comm. Forward and backward of one sequence cut over it. */
static void context_time(void *self) {
    context_job *r = self;
    r->rig.config = r->lab->config->model;
    r->rig.context_heads = r->heads;
    tr_rig_open(&r->rig, r->lab, r->comm, TR_F32, 1, r->S);
    const tr_model_config *m = &r->rig.config;
    int64_t q = r->rig.env.N * m->num_attention_heads * m->head_dim;
    int64_t kv = 2 * r->rig.env.N * m->num_key_value_heads * m->head_dim;
    tr_arena_reset(r->lab->memory);
    r->q = tr_lab_random(r->lab, q, TR_F32);
    r->kv = tr_lab_random(r->lab, kv, TR_F32);
    r->dout = tr_lab_random(r->lab, q, TR_F32);
    r->dq = tr_lab_random(r->lab, q, TR_F32);
    r->dkv = tr_lab_random(r->lab, kv, TR_F32);
    r->seconds = tr_lab_time(r->lab, r->comm, 0.2 * (double)r->lab->repeats, context_step, r);
    tr_rig_close(&r->rig);
    tr_arena_reset(r->lab->memory);
}

/* A row: `heads` ranks exchange heads, or form a ring. */
static void context_row(tr_lab *lab, const char *name, int heads, const context_job *alone,
                        double target) {
    const tr_model_config *m = &lab->config->model;
    double S = (double)alone->S;
    context_job both = {.lab = lab, .comm = lab->world, .S = alone->S, .heads = heads};
    tr_row_begin(&lab->table, "%s fp32, S %lld; base 1 rank", name, (long long)alone->S);
    if (!two(lab)) {
        tr_row_skip(&lab->table, two_ranks);
        return;
    }
    context_time(&both);
    if (tr_comm_rank(lab->world) != 0) return;
    double work = 3.5e-9 * 4.0 * (double)(m->num_attention_heads * m->head_dim) * S * (S + 1) / 2;
    tr_row_end(&lab->table, &(tr_row){.unit = "GFLOP/s",
                                      .measured = work / both.seconds,
                                      .base = work / alone->seconds,
                                      .kind = TR_TIMES,
                                      .target = target});
}

void tr_bench_context(tr_lab *lab) {
    for (int64_t times = 8; times <= 16; times *= 2) {
        context_job alone = {.lab = lab, .comm = lab->alone, .S = times * lab->T, .heads = 1};
        if (two(lab)) tr_lab_rank_0(lab, context_time, &alone);
        context_row(lab, "ring attention", 1, &alone, 1.85);
        if (times == 16) context_row(lab, "Ulysses attention", 2, &alone, 1.8);
    }
}
