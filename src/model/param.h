/* param.h - one declaration per weight; storage, gradient buckets, optimizer shards, checkpoint
 * records, memory plan, parameter and FLOP counts all derive from it. Floor: model.
 *
 * Every rank declares every weight of the whole model, in the same order; those of other stages
 * have no storage here. After seal, the local weights lie in spaces, one per gradient group:
 * vectors and whole weights (summed over the stage), those split over the tensor group (over data x
 * context), key/value heads that several tensor ranks hold (over these too), experts (over the
 * ranks with the same ones) and tied (the embedding that lives on the first and the last stage;
 * over data x context, then the two). Every element of a parameter is in the shard of one rank of a
 * stage, so a plain sum over the world counts it once.
 *
 * Weights are used in units: the embedding, each layer, the head. What a unit has in one space is a
 * stretch of elements, cut into buckets; in each bucket, rank i of the group owns the i-th of
 * `size` equal parts: it updates and stores the fp32 master and moments of that part alone. That is
 * stage 1 of ZeRO (Rajbhandari et al. 2020). From stage 2 on a rank keeps only that part of the
 * gradients (gradient.h), from stage 3 on of the weights too (unit.h): whole stretches then exist
 * for a while, in berths (berths.h). Vectors, which are small, and groups of one rank stay at
 * stage 1. */
#pragma once
#include "dist/blocks.h"
#include "dist/grid.h"
#include "kernels/kernels.h"
#include "model/berths.h"

/* How a weight is cut, into parts that may be uneven or empty. */
typedef enum {
    TR_SPLIT_NONE,
    TR_SPLIT_EXPERT,  /* dimension 0 over the expert group */
    TR_SPLIT_ROWS,    /* dimension 0 over the tensor group */
    TR_SPLIT_COLUMNS, /* dimension 1 over the tensor group */
    TR_SPLIT_HEADS    /* as ROWS; neighbours share a part where key/value heads are too few */
} tr_split;
typedef enum { TR_INIT_NORMAL, TR_INIT_ONES, TR_INIT_ZEROS } tr_init;
typedef enum {
    TR_SPACE_VECTORS, /* parameters of one dimension */
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
    bool decay;     /* weight decay applies: matrices, not norms or biases */
    int stage;      /* the pipeline stage that holds it */
    int copy_stage; /* a second stage that holds the same weight (tied embedding), or -1 */
} tr_param_decl;

typedef struct {
    tr_param_decl decl;
    /* derived */
    tr_box box;               /* this rank's part */
    int64_t elems, elems_loc; /* global; local, 0 when another stage holds it */
    tr_space_id space;
    int64_t unit, stretch; /* stretch: -1 when another stage holds it */
    int64_t offset;        /* first element in its space */
    bool primary;          /* this stage counts and saves it (false: a tied copy) */
    /* state */
    void *weight; /* device, compute type [elems_loc]; NULL: not here now (ZeRO 3) */
    float *grad;  /* device, fp32 [elems_loc]; NULL: likewise (ZeRO 2) */
    bool fresh;   /* grad holds nothing of this step yet: the first to add overwrites */
} tr_param;

/* A run of one parameter inside this rank's shard: what AdamW and checkpoints loop over. */
typedef struct {
    const tr_param *param;
    int64_t first; /* in the parameter's local elements */
    int64_t count;
    int64_t offset; /* in its space */
    int64_t shard;  /* in the space's shard arrays */
} tr_segment;

/* What one unit has in one space: gathered, reduced and updated together, bucket by bucket. */
typedef struct {
    tr_space_id space;
    int64_t unit;
    int64_t offset;       /* its first element in the space */
    int64_t bucket_elems; /* a multiple of 64 * group size */
    int64_t buckets;
    int64_t part;               /* bucket_elems / group size: what a rank owns of a bucket */
    int64_t shard;              /* its first element in the space's shard arrays: [buckets, part] */
    int64_t segment, nsegments; /* of the space's segments, bucket by bucket */
    /* state */
    tr_request **gathering;       /* [buckets] of its weights, under way */
    tr_request **reducing;        /* [buckets] of its gradients, under way */
    int weight_berth, grad_berth; /* -1: none */
    bool reduced; /* a reduction has begun in this step (ZeRO 1), or the shard's sum holds one */
} tr_stretch;

typedef struct {
    int64_t first_param, params;
    int64_t first_stretch, stretches; /* consecutive */
    bool layer;                       /* one of many alike */
    int64_t completions;              /* see tr_registry_unit */
    int64_t left;                     /* state: completions to come in this step */
} tr_unit;

typedef struct {
    /* declared */
    tr_comm *comm; /* the gradient's group, borrowed */
    int zero;      /* the stage of ZeRO that holds here */
    /* derived */
    int64_t elems;       /* of all stretches */
    int64_t shard_elems; /* elems / group size */
    int64_t nsegments;
    tr_segment *segments; /* by shard offset: stretch by stretch */
    tr_berths weight_berths, grad_berths;
    /* state: device memory. The first two are visible to the group's ranks on this node. */
    void *weights; /* compute type [elems]; ZeRO 3: the berths */
    float *grads;  /* fp32 [elems]; ZeRO 2: the berths */
    float *sums;   /* ZeRO 2: gradients summed over the group [shard_elems]; else NULL */
    void *master;  /* tr_master_type [shard_elems]; NULL when the weights, of that type, are the
                      masters: before ZeRO 3 */
    float *m, *v;  /* [shard_elems] */
    /* read_only: grads, sums, m and v are NULL */
} tr_space;

/* parallel.zero, parallel.overlap and parallel.bucket_elems. */
typedef struct {
    bool read_only; /* weights are loaded and used: nothing else of a training is there */
    int zero;
    bool overlap;         /* transfers go on under computations; else each is waited for at once */
    bool two_at_once;     /* units of a forward and of a backward are used at the same time */
    int64_t bucket_elems; /* at most, but for rounding */
} tr_registry_options;

typedef struct {
    tr_param *params; /* in order of declaration */
    int64_t count, capacity;
    tr_unit *units; /* likewise, which is the order of the forward */
    int64_t nunits, units_capacity;
    tr_stretch *stretches; /* in the order of units */
    int64_t nstretches;
    tr_space space[TR_SPACES];
    tr_registry_options options;
    tr_dtype t;
    tr_device *device; /* borrowed; NULL until sealed with storage */
    double *squares;   /* device [nstretches]: sums of squares of this rank's gradients */
} tr_registry;

tr_registry *tr_registry_create(tr_dtype compute);
void tr_registry_destroy(tr_registry *registry); /* Collective on the world. NULL-safe. */

/* Local. The parameters added from now on are one unit; returns its number. `layer`: the model has
 * many like it. completions: how often a micro-batch completes its gradients on this rank
 * (tr_gradients_made): once, or twice for an embedding that is the head too. */
int64_t tr_registry_unit(tr_registry *registry, bool layer, int64_t completions);
/* Local. Copies *decl; returns the parameter's index (its address is fixed by seal). */
int64_t tr_registry_add(tr_registry *registry, const tr_param_decl *decl);

/* Collective on the world. Fixes offsets and buckets; with a device, allocates zeroed storage.
 * TR_ERR_INTERNAL if some rank has no memory for it, before any rank has touched its own. */
tr_status tr_registry_seal(tr_registry *registry, const tr_grid *grid,
                           const tr_registry_options *options, tr_device *device);

/* Local. Draws the masters of this rank's shard: a function of (seed, name, global element) alone.
 * Nothing is being gathered (tr_units_settle); the masters are fp32. */
void tr_registry_init(tr_registry *registry, uint64_t seed);

/* Local. The type of what weights are loaded as, updated as and made from: fp32, or the compute
 * type where they are only read. */
tr_dtype tr_master_type(const tr_registry *registry);
/* Local. Master values of a segment. */
void *tr_segment_master(const tr_registry *registry, const tr_segment *segment);
/* Local. Its gradient, fp32 device memory: after the reduction the sum over the group. */
float *tr_segment_gradient(const tr_registry *registry, const tr_segment *segment);
/* Local. Where this rank's part of bucket `b` begins, in elements of the stretch. */
int64_t tr_stretch_piece(const tr_registry *registry, const tr_stretch *stretch, int64_t b);
/* Local. This rank's part of the bucket's gradient. */
float *tr_stretch_gradient(const tr_registry *registry, const tr_stretch *stretch, int64_t b);

/* Local. Parameters of the whole model; bytes this rank holds for weights, masters and, unless
 * they are only read, gradients and moments (from the sealed layout; equals what is allocated). */
int64_t tr_registry_total(const tr_registry *registry);
int64_t tr_registry_bytes(const tr_registry *registry);
