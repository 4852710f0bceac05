/* param.h - one declaration per weight; storage, gradient buckets, optimizer shards, checkpoint
 * records, memory plan, parameter and FLOP counts all derive from it. Floor: model.
 *
 * Every rank declares every weight of the whole model, in the same order; those of other stages
 * have no storage here. After seal, the local weights lie in spaces, one per gradient group: whole
 * weights (summed over the stage), those split over the tensor group (over data x context),
 * key/value heads that several tensor ranks hold (over these too), experts (over the ranks with the
 * same ones) and tied (the embedding that lives on the first and the last stage; over data x
 * context, then the two). Every element of a parameter is in the shard of one rank of a stage, so
 * a plain sum over the world counts it once. A space is one flat run of elements cut
 * into buckets; in each bucket, rank i of the group owns the i-th of `size` equal parts: it
 * reduces, updates and stores the fp32 master and moments of that part alone (ZeRO stage 1;
 * Rajbhandari et al. 2020). */
#pragma once
#include "dist/blocks.h"
#include "dist/grid.h"
#include "kernels/kernels.h"

/* How a weight is cut, into parts that may be uneven or empty. */
typedef enum {
    TR_SPLIT_NONE,
    TR_SPLIT_EXPERT,  /* dimension 0 over the expert group */
    TR_SPLIT_ROWS,    /* dimension 0 over the tensor group */
    TR_SPLIT_COLUMNS, /* dimension 1 over the tensor group */
    TR_SPLIT_HEADS    /* as ROWS; neighbours share a part where key/value heads are too few */
} tr_split;
typedef enum { TR_INIT_NORMAL, TR_INIT_ONES } tr_init;
typedef enum {
    TR_SPACE_WHOLE,
    TR_SPACE_SPLIT,
    TR_SPACE_HEADS,
    TR_SPACE_EXPERT,
    TR_SPACE_TIED,
    TR_SPACES
} tr_space_id;

typedef struct {
    char name[96]; /* "model.layers.3.mlp.gate_proj.weight": the checkpoint's key */
    int ndim;
    int64_t shape[TR_MAX_DIM]; /* global extents */
    tr_split split;
    tr_init init;
    float init_std;
    bool decay;     /* weight decay applies: matrices, not norms */
    int stage;      /* the pipeline stage that holds it */
    int copy_stage; /* a second stage that holds the same weight (tied embedding), or -1 */
} tr_param_decl;

typedef struct {
    tr_param_decl decl;
    /* derived */
    tr_box box;               /* this rank's part */
    int64_t elems, elems_loc; /* global; local, 0 when another stage holds it */
    tr_space_id space;
    int64_t offset; /* first element in its space */
    bool primary;   /* this stage counts and saves it (false: a tied copy) */
    void *weight;   /* device, compute type [elems_loc] */
    float *grad;    /* device, fp32 [elems_loc] */
    bool fresh;     /* grad holds nothing of this step yet: the first to add overwrites */
} tr_param;

/* A run of one parameter inside this rank's shard: what AdamW and checkpoints loop over. */
typedef struct {
    const tr_param *param;
    int64_t first; /* in the parameter's local elements */
    int64_t count;
    int64_t offset; /* in its space */
    int64_t shard;  /* in the space's shard arrays */
} tr_segment;

typedef struct {
    /* declared */
    tr_comm *comm; /* the gradient's group, borrowed */
    /* derived */
    int64_t elems;        /* buckets * bucket_elems */
    int64_t bucket_elems; /* a multiple of 64 * group size */
    int64_t buckets;
    int64_t shard_elems; /* elems / group size */
    int64_t nsegments;
    tr_segment *segments; /* by shard offset: bucket by bucket */
    /* state: device memory */
    void *weights; /* compute type [elems], visible to the group's ranks on this node */
    float *grads;  /* fp32 [elems], likewise */
    float *master; /* [shard_elems]; NULL when the compute type is F32: weights are the masters */
    float *m, *v;  /* [shard_elems] */
    tr_request **requests; /* [buckets] of the reduction or gathering under way */
} tr_space;

typedef struct {
    tr_param *params; /* in order of declaration */
    int64_t count, capacity;
    tr_space space[TR_SPACES];
    tr_dtype t;
    tr_device *device; /* borrowed; NULL until sealed with storage */
    double *sum;       /* device, one number: sums of squares */
} tr_registry;

tr_registry *tr_registry_create(tr_dtype compute);
void tr_registry_destroy(tr_registry *registry); /* Collective on the world. NULL-safe. */

/* Local. Copies *decl; returns the parameter's index (its address is fixed by seal). */
int64_t tr_registry_add(tr_registry *registry, const tr_param_decl *decl);

/* Collective on the world. Fixes offsets and buckets; with a device, allocates zeroed storage. */
void tr_registry_seal(tr_registry *registry, const tr_grid *grid, int64_t bucket_elems,
                      tr_device *device);

/* Local. Draws the masters of this rank's shard: a function of (seed, name, global element) alone.
 */
void tr_registry_init(tr_registry *registry, uint64_t seed);

/* Collective on each space's group. Compute weights of the whole space from the shards' masters. */
void tr_registry_publish(tr_registry *registry);

/* Gradients of a step: nobody clears them, the first contribution to each overwrites it.
 * begin: local, before the first backward. beta: what that gradient is multiplied by before the
 * caller's contribution, which covers all of it. sum: the gradient to add to, cleared if it is
 * fresh, for kernels that only add. end: local, after the last backward; clears those that nobody
 * contributed to. */
void tr_gradients_begin(tr_registry *registry);
float tr_gradient_beta(tr_param *param);
float *tr_gradient_sum(const tr_registry *registry, tr_stream *stream, tr_param *param);
void tr_gradients_end(tr_registry *registry, tr_stream *stream);

/* Local. fp32 master values of a segment. */
float *tr_segment_master(const tr_registry *registry, const tr_segment *segment);
/* Local. Its gradient, fp32 device memory: after the reduction the sum over the group. */
float *tr_segment_gradient(const tr_registry *registry, const tr_segment *segment);
/* Local. The first element of bucket `b`'s part that this rank owns. */
int64_t tr_space_piece(const tr_space *space, int64_t bucket);

/* Local. Parameters of the whole model; bytes this rank holds for weights, gradients, masters and
 * moments (from the sealed layout; equals what is allocated). */
int64_t tr_registry_total(const tr_registry *registry);
int64_t tr_registry_bytes(const tr_registry *registry);
