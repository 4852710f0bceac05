/* param.h - one declaration per weight; storage, gradient buckets, optimizer shards, checkpoint
 * records, memory plan, parameter and FLOP counts all derive from it. Floor: model.
 *
 * Every rank declares every weight of the whole model, in the same order; those whose stage is another
 * have no storage here. After seal, the local weights lie in two spaces, one per gradient group:
 * dense (summed over data x context) and expert (summed over the ranks with the same experts). A
 * space is one flat run of elements, cut into buckets; in each bucket, rank i of the group owns the
 * i-th of `size` equal parts: it reduces, updates (AdamW) and stores the fp32 master and moments of
 * that part alone (ZeRO stage 1; Rajbhandari et al. 2020). */
#pragma once
#include "dist/blocks.h"
#include "dist/grid.h"
#include "kernels/kernels.h"

typedef enum { TR_SPLIT_NONE, TR_SPLIT_EXPERT } tr_split; /* dimension 0 over the expert group */
typedef enum { TR_INIT_NORMAL, TR_INIT_ONES } tr_init;

typedef struct {
    const char *name;          /* "model.layers.3.mlp.gate_proj.weight": the checkpoint's key */
    int ndim;
    int64_t shape[TR_MAX_DIM]; /* global extents */
    tr_split split;
    tr_init init;
    float init_std;
    bool decay;
    int stage;       /* pipeline stage that holds it */
    int copy_stage;  /* a second stage that holds the same weight (tied embedding), or -1 */
} tr_param_decl;

typedef struct {
    tr_param_decl decl; /* name owned by the registry */
    tr_box box;         /* this rank's part; elems_loc = 0 when it is another stage's */
    int64_t elems, elems_loc;
    int space;          /* 0 dense, 1 expert */
    int64_t offset;     /* first element in its space */
    bool primary;       /* false on the stage that holds the tied copy: not counted, not saved */
    void *weight;       /* device, compute type [elems_loc] */
    float *grad;        /* device, fp32 [elems_loc] */
} tr_param;

/* A run of one parameter inside this rank's shard: what AdamW and checkpoints loop over. */
typedef struct {
    const tr_param *param;
    int64_t first;  /* in the parameter's local elements */
    int64_t count;
    int64_t offset; /* in its space */
    int64_t shard;  /* in the space's shard arrays */
} tr_segment;

typedef struct {
    /* declared */
    tr_comm *comm;         /* the gradient's group, borrowed */
    /* derived */
    int64_t elems;         /* padded; a multiple of bucket_elems */
    int64_t bucket_elems;  /* a multiple of 64 * group size */
    int64_t buckets;
    int64_t shard_elems;   /* elems / group size */
    int64_t nsegments;
    tr_segment *segments;  /* by shard offset */
    /* state: device memory */
    void *weights;         /* compute type [elems], from tr_comm_alloc on the host */
    float *grads;          /* [elems], from tr_comm_alloc */
    float *master;         /* [shard_elems]; NULL when the compute type is F32: weights are the masters */
    float *m, *v;          /* [shard_elems] */
} tr_space;

typedef struct tr_registry {
    tr_param *params; /* in order of declaration */
    int64_t count, capacity;
    tr_space space[2];
    tr_dtype t;
    bool sealed;
} tr_registry;

tr_registry *tr_registry_create(tr_dtype compute);
void tr_registry_destroy(tr_registry *reg); /* Collective on the world. NULL-safe. */

/* Local. Copies *decl. Returns the index of the parameter (pointers move until seal). */
int64_t tr_registry_add(tr_registry *reg, const tr_param_decl *decl);

/* Collective on the world. Fixes offsets and buckets; `allocate` false computes sizes only. */
void tr_registry_seal(tr_registry *reg, const tr_grid *grid, int64_t bucket_elems, bool allocate);

/* Local. Draws the initial weights of this rank: a function of (seed, name, global element) alone.
 * Fills weights and masters; moments zero. */
void tr_registry_init(tr_registry *reg, const tr_grid *grid, uint64_t seed);

/* Local. fp32 master values of a segment (host memory on the CPU). */
float *tr_segment_master(const tr_registry *reg, const tr_segment *segment);

/* Local. Parameters of the whole model, and those active for one token (k of E experts). */
int64_t tr_registry_total(const tr_registry *reg);
