/* exchange.c - rows to their experts and back: by one rank of each node against every rank to every
 * other. Floor: bench. */
#include "bench/groups.h"
#include "bench/rig.h"

#include "base/heap.h"
#include "base/rng.h"

#include <stdlib.h>

enum { EXPERTS_A_RANK = 8, CHOSEN = 8 };

typedef struct {
    tr_rig rig;
    int32_t *index; /* [N_loc,k] */
    float *weight;
    void *x, *y;
    /* measured */
    double seconds, messages, bytes; /* of one exchange; sent to other nodes by all ranks */
} exchange;

/* Each rank has all experts' rows to send: experts drawn evenly, a token's all different. */
static void open(exchange *e, tr_lab *lab, tr_exchange_kind kind) {
    e->rig.config = lab->config->model;
    tr_model_config *m = &e->rig.config;
    m->num_experts = EXPERTS_A_RANK * lab->ranks;
    m->num_experts_per_tok = CHOSEN;
    e->rig.expert = lab->ranks;
    e->rig.exchange = kind;
    tr_rig_open(&e->rig, lab, lab->world, TR_F32, 1, 2 * lab->T * lab->ranks);
    int64_t N = e->rig.env.N, E = m->num_experts;
    tr_arena_reset(lab->memory);
    e->index = tr_arena_alloc(lab->memory, (size_t)(N * CHOSEN) * sizeof *e->index);
    int32_t *index = tr_heap_alloc(N * CHOSEN, sizeof *index);
    for (int64_t i = 0; i < N * CHOSEN; i++) {
        uint64_t first = tr_random_u64(1, (uint64_t)tr_comm_rank(lab->world),
                                       (uint64_t)(i / CHOSEN)); /* then every (E/8)-th */
        index[i] = (int32_t)((first + (uint64_t)(i % CHOSEN * (E / CHOSEN))) % (uint64_t)E);
    }
    tr_env *c = &e->rig.env;
    c->device->copy(c->stream, e->index, index, (size_t)(N * CHOSEN) * sizeof *index, TR_TO_DEVICE);
    c->device->stream_wait(c->stream);
    free(index);
    e->weight = tr_lab_random(lab, N * CHOSEN, TR_F32);
    e->x = tr_lab_random(lab, N * m->hidden_size, TR_F32);
    e->y = tr_lab_random(lab, N * m->hidden_size, TR_F32);
}

static void there_and_back(void *self) {
    exchange *e = self;
    const tr_env *c = &e->rig.env;
    tr_rig_restart(&e->rig);
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    tr_exchange_plan(&e->rig.pass, &e->rig.saved, e->index, e->weight);
    tr_journey j = tr_go_begin(c, &e->rig.saved, e->x);
    const void *rows = tr_go_end(c, &e->rig.saved, &j);
    j = tr_return_begin(c, &e->rig.saved, rows, c->config->hidden_size, j.t);
    tr_return_end(c, &e->rig.saved, &j, TR_F32, e->y, 0);
    tr_arena_release(c->scratch, mark);
}

/* Collective on world. */
static void measure(exchange *e, tr_lab *lab, tr_exchange_kind kind) {
    open(e, lab, kind);
    tr_comm *comm = e->rig.grid->comm[TR_GROUP_EXPERT];
    tr_sent before = tr_comm_sent(comm);
    there_and_back(e);
    tr_sent after = tr_comm_sent(comm);
    e->messages = tr_lab_sum(lab, (double)(after.messages_out - before.messages_out));
    e->bytes = tr_lab_sum(lab, (double)(after.bytes_out - before.bytes_out));
    e->seconds = tr_lab_time(lab, lab->world, 0.2 * (double)lab->repeats, there_and_back, e);
    tr_rig_close(&e->rig);
    tr_arena_reset(lab->memory);
}

/* Whether some node has several ranks, and there are several nodes. */
static bool has_levels(const tr_lab *lab) {
    bool several = false, together = false;
    for (int r = 1; r < lab->ranks; r++) {
        bool same = tr_comm_node_of(lab->world, r) == tr_comm_node_of(lab->world, r - 1);
        several |= !same;
        together |= same;
    }
    return several && together;
}

void tr_bench_exchange(tr_lab *lab) {
    exchange by_node = {0}, flat = {0};
    bool levels = has_levels(lab);
    tr_row_begin(&lab->table, "expert exchange by node; base flat");
    if (!levels) {
        tr_row_skip(&lab->table, "needs several nodes, with several ranks on one");
        return;
    }
    measure(&flat, lab, TR_EXCHANGE_FLAT);
    measure(&by_node, lab, TR_EXCHANGE_HIERARCHICAL);
    double rows = 2.0 * CHOSEN * 2.0 * (double)(lab->T * lab->ranks); /* there and back */
    double work = 4e-9 * rows * (double)lab->config->model.hidden_size;
    tr_row_end(&lab->table, &(tr_row){.unit = "GB/s",
                                      .measured = work / by_node.seconds,
                                      .base = work / flat.seconds,
                                      .kind = TR_TIMES,
                                      .target = 1});
    tr_row_begin(&lab->table, "its messages between nodes; base flat");
    tr_row_end(&lab->table, &(tr_row){.unit = "sent",
                                      .measured = by_node.messages,
                                      .base = flat.messages,
                                      .kind = TR_SHARE,
                                      .target = 0.5,
                                      .at_most = true});
    tr_row_begin(&lab->table, "their bytes; base flat");
    tr_row_end(&lab->table, &(tr_row){.unit = "MB",
                                      .measured = 1e-6 * by_node.bytes,
                                      .base = 1e-6 * flat.bytes,
                                      .kind = TR_SHARE,
                                      .target = 1,
                                      .at_most = true});
}
