/* grid.h - ranks <-> coordinates <-> groups. Floor: dist.
 *
 * World = pipeline x data x context x tensor, tensor fastest, then context, data, pipeline:
 *     rank = ((p * data + d) * context + c) * tensor + t
 * Expert groups are cut out of data x context: with i = d * context + c, the `expert` ranks of
 * equal i / expert (and equal t) form an expert group (each holds a block of the experts, its place
 * is i % expert), and ranks of equal i % expert hold the same experts. Where key/value heads
 * are fewer than tensor ranks, each is held by `head_copies` neighbouring ones. Every
 * `context_heads` neighbours along context form a head group, those with equal c % context_heads a
 * ring. */
#pragma once
#include "dist/comm.h"

typedef struct {
    int pipeline, data, context, expert, tensor;
    int head_copies;   /* divides tensor; 0 is 1 */
    int context_heads; /* divides context; 0 is 1 */
} tr_grid_shape;

typedef enum {
    TR_GROUP_WORLD,
    TR_GROUP_PIPELINE,       /* equal d, c, t: ordered by stage */
    TR_GROUP_DATA,           /* equal p, c, t */
    TR_GROUP_CONTEXT,        /* equal p, d, t */
    TR_GROUP_HEADS,          /* part of CONTEXT: ranks that exchange rows for heads */
    TR_GROUP_RING,           /* part of CONTEXT: one rank of each HEADS group */
    TR_GROUP_TENSOR,         /* equal p, d, c */
    TR_GROUP_EXPERT,         /* the ranks that share one set of all experts */
    TR_GROUP_MICRO_BATCH,    /* context x tensor: share the rows of a micro-batch */
    TR_GROUP_STAGE,          /* data x context x tensor: hold the same whole weights */
    TR_GROUP_REPLICA,        /* data x context: hold the same parts of split weights */
    TR_GROUP_HEAD_REPLICA,   /* hold the same key/value heads */
    TR_GROUP_EXPERT_REPLICA, /* hold the same experts */
    TR_GROUP_EMBEDDING,      /* first and last stage, where a tied embedding lives twice */
    TR_GROUP_COUNT
} tr_group;

typedef struct {
    /* declared */
    tr_grid_shape shape;
    int world, rank;
    /* derived: coordinates and places inside the cut groups */
    int p, d, c, t;
    int expert_rank, expert_replica; /* i % expert, i / expert */
} tr_grid_place;

/* Local, pure. The place of `rank`. The shape multiplies to `world` and expert divides
 * data x context (checked by tr_grid_shape_check). */
tr_grid_place tr_grid_place_of(tr_grid_shape shape, int rank);
int tr_grid_rank_of(tr_grid_shape shape, int p, int d, int c, int t);
/* Local, pure. Size of a group, and the world ranks in it that `rank` belongs to (out may be NULL).
 * TR_GROUP_EMBEDDING has 1 or 2 members; a middle stage's group is itself alone. */
int tr_grid_group(tr_grid_shape shape, int rank, tr_group group, int *out_ranks);
/* Local. TR_ERR_USAGE naming the numbers and what would fit. Fills shape->data when it is 0. */
tr_status tr_grid_shape_check(tr_grid_shape *shape, int world);

typedef struct {
    tr_grid_place at;
    tr_comm *comm[TR_GROUP_COUNT]; /* never NULL; groups of one rank are real communicators */
} tr_grid;

/* Collective on world (borrowed). */
tr_grid *tr_grid_create(tr_comm *world, tr_grid_shape shape);
void tr_grid_destroy(tr_grid *grid); /* Collective. NULL-safe */

static inline bool tr_grid_first_stage(const tr_grid *g) {
    return g->at.p == 0;
}
static inline bool tr_grid_last_stage(const tr_grid *g) {
    return g->at.p == g->at.shape.pipeline - 1;
}
