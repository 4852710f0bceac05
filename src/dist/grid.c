/* grid.c - the grid's arithmetic and its communicators, see grid.h. Floor: dist.
 *
 * Every group is an equivalence between places ("equal d, c and t") with its members in the order
 * of their world ranks, so the one predicate `same_group` defines sizes, members and splits. */
#include "dist/grid.h"

#include "base/heap.h"

#include <stdio.h>
#include <stdlib.h>

/* Of an axis: products of three axes stay far below 64 bits. */
enum { MOST_RANKS = 1 << 20 };

tr_grid_place tr_grid_place_of(tr_grid_shape shape, int rank) {
    tr_grid_place at = {.shape = shape, .rank = rank};
    at.world = shape.pipeline * shape.data * shape.context * shape.tensor;
    at.t = rank % shape.tensor;
    at.c = rank / shape.tensor % shape.context;
    at.d = rank / (shape.tensor * shape.context) % shape.data;
    at.p = rank / (shape.tensor * shape.context * shape.data);
    int i = at.d * shape.context + at.c;
    at.expert_rank = i % shape.expert;
    at.expert_replica = i / shape.expert;
    return at;
}

int tr_grid_rank_of(tr_grid_shape shape, int p, int d, int c, int t) {
    return ((p * shape.data + d) * shape.context + c) * shape.tensor + t;
}

static bool is_end_stage(const tr_grid_place *at) {
    return at->p == 0 || at->p == at->shape.pipeline - 1;
}

/* Which of the parts that key/value heads are cut into. */
static int head_part(const tr_grid_place *at) {
    return at->shape.head_copies > 1 ? at->t / at->shape.head_copies : at->t;
}

static int heads_of(const tr_grid_place *at) {
    return at->shape.context_heads > 1 ? at->shape.context_heads : 1;
}

static bool same_group(const tr_grid_place *a, const tr_grid_place *b, tr_group group) {
    bool p = a->p == b->p, d = a->d == b->d, c = a->c == b->c, t = a->t == b->t;
    switch (group) {
    case TR_GROUP_WORLD:
        return true;
    case TR_GROUP_PIPELINE:
        return d && c && t;
    case TR_GROUP_DATA:
        return p && c && t;
    case TR_GROUP_CONTEXT:
        return p && d && t;
    case TR_GROUP_HEADS:
        return p && d && t && a->c / heads_of(a) == b->c / heads_of(b);
    case TR_GROUP_RING:
        return p && d && t && a->c % heads_of(a) == b->c % heads_of(b);
    case TR_GROUP_TENSOR:
        return p && d && c;
    case TR_GROUP_EXPERT:
        return p && t && a->expert_replica == b->expert_replica;
    case TR_GROUP_MICRO_BATCH:
        return p && d;
    case TR_GROUP_STAGE:
        return p;
    case TR_GROUP_REPLICA:
        return p && t;
    case TR_GROUP_HEAD_REPLICA:
        return p && head_part(a) == head_part(b);
    case TR_GROUP_EXPERT_REPLICA:
        return p && a->expert_rank == b->expert_rank;
    case TR_GROUP_EMBEDDING:
        return d && c && t && (p || (is_end_stage(a) && is_end_stage(b)));
    case TR_GROUP_COUNT:
        break;
    }
    return false;
}

int tr_grid_group(tr_grid_shape shape, int rank, tr_group group, int *out_ranks) {
    tr_grid_place at = tr_grid_place_of(shape, rank);
    int members = 0;
    for (int other = 0; other < at.world; other++) {
        tr_grid_place there = tr_grid_place_of(shape, other);
        if (!same_group(&at, &there, group)) continue;
        if (out_ranks) out_ranks[members] = other;
        members++;
    }
    return members;
}

/* "1, 2 or 4": the numbers that divide n. */
static void list_divisors(int n, char *text, size_t room) {
    int last = 0, used = 0;
    text[0] = '\0';
    for (int i = 1; i <= n; i++) {
        if (n % i != 0) continue;
        if (last != 0)
            used += snprintf(text + used, room - (size_t)used, "%s%d", used ? ", " : "", last);
        if ((size_t)used + 32 > room) return;
        last = i;
    }
    snprintf(text + used, room - (size_t)used, "%s%d", used ? " or " : "", last);
}

tr_status tr_grid_shape_check(tr_grid_shape *shape, int world) {
    const struct {
        const char *name;
        int value;
    } axes[] = {{"pipeline", shape->pipeline},
                {"context", shape->context},
                {"tensor", shape->tensor},
                {"expert", shape->expert}};
    for (size_t i = 0; i < sizeof axes / sizeof axes[0]; i++)
        if (axes[i].value < 1 || axes[i].value > MOST_RANKS)
            return tr_fail(TR_ERR_USAGE, "parallel.%s is %d; it must be 1 to %d", axes[i].name,
                           axes[i].value, MOST_RANKS);
    if (shape->data < 0)
        return tr_fail(TR_ERR_USAGE,
                       "the data axis is %d; it must be 1 or more, or 0 for what the "
                       "other axes leave of the world",
                       shape->data);

    char fit[512];
    int64_t others = (int64_t)shape->pipeline * shape->context * shape->tensor;
    if (others > world || world % others != 0) {
        list_divisors(world, fit, sizeof fit);
        return tr_fail(TR_ERR_USAGE,
                       "parallel: pipeline %d x context %d x tensor %d = %lld does not divide the "
                       "%d ranks; a product of %s would, or a multiple of %lld ranks",
                       shape->pipeline, shape->context, shape->tensor, (long long)others, world,
                       fit, (long long)others);
    }
    int data = world / (int)others;
    if (shape->data != 0 && shape->data != data)
        return tr_fail(TR_ERR_USAGE,
                       "parallel: pipeline %d x data %d x context %d x tensor %d is not the %d "
                       "ranks; data %d would fit",
                       shape->pipeline, shape->data, shape->context, shape->tensor, world, data);
    if (shape->head_copies < 0 || (shape->head_copies > 1 && shape->tensor % shape->head_copies))
        return tr_fail(TR_ERR_USAGE, "%d tensor ranks cannot hold every key/value head %d times",
                       shape->tensor, shape->head_copies);
    if (shape->context_heads < 0 ||
        (shape->context_heads > 1 && shape->context % shape->context_heads))
        return tr_fail(TR_ERR_USAGE, "%d context ranks are no groups of %d that exchange heads",
                       shape->context, shape->context_heads);
    int holders = data * shape->context;
    if (holders % shape->expert != 0) {
        list_divisors(holders, fit, sizeof fit);
        return tr_fail(TR_ERR_USAGE,
                       "parallel.expert %d does not divide data %d x context %d = %d; %s would",
                       shape->expert, data, shape->context, holders, fit);
    }
    shape->data = data;
    return TR_OK;
}

tr_grid *tr_grid_create(tr_comm *world, tr_grid_shape shape) {
    tr_grid *grid = tr_heap_alloc(1, sizeof *grid);
    int *members = tr_heap_alloc(tr_comm_size(world), sizeof *members);
    int rank = tr_comm_rank(world);
    grid->at = tr_grid_place_of(shape, rank);
    static const char *const name[TR_GROUP_COUNT] = {
        [TR_GROUP_WORLD] = "world",
        [TR_GROUP_PIPELINE] = "pipeline",
        [TR_GROUP_DATA] = "data",
        [TR_GROUP_CONTEXT] = "context",
        [TR_GROUP_HEADS] = "heads",
        [TR_GROUP_RING] = "ring",
        [TR_GROUP_TENSOR] = "tensor",
        [TR_GROUP_EXPERT] = "expert",
        [TR_GROUP_MICRO_BATCH] = "micro-batch",
        [TR_GROUP_STAGE] = "stage",
        [TR_GROUP_REPLICA] = "replica",
        [TR_GROUP_HEAD_REPLICA] = "head replica",
        [TR_GROUP_EXPERT_REPLICA] = "expert replica",
        [TR_GROUP_EMBEDDING] = "embedding",
    };
    for (int g = 0; g < TR_GROUP_COUNT; g++) {
        tr_grid_group(shape, rank, (tr_group)g, members);
        grid->comm[g] = tr_comm_split(world, members[0], rank);
        tr_comm_set_name(grid->comm[g], name[g]);
    }
    free(members);
    return grid;
}

void tr_grid_destroy(tr_grid *grid) {
    if (!grid) return;
    for (int g = 0; g < TR_GROUP_COUNT; g++) tr_comm_free(grid->comm[g]);
    free(grid);
}
