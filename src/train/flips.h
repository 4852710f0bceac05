/* flips.h - tokens that two jobs, a grid and one rank, send to different experts. Floor: train.
 *
 * The k-th and the next expert of a token may score so alike that the order of a float32 sum
 * decides between them. From such a token on the two jobs compute different functions: a difference
 * that must be told from an error. A token may differ without a near tie only after another of its
 * sequence did: in an earlier layer, for attention passes the change on, or in the same one where
 * experts take a limited number of a sequence's tokens. */
#pragma once
#include "train/step.h"

typedef struct tr_routes tr_routes; /* what this rank's tokens chose in one step */

/* Local. Watches the job's model; `batches` says which micro-batch is at work. */
tr_routes *tr_routes_create(tr_job *job, const tr_batches *batches);
void tr_routes_destroy(tr_routes *routes); /* NULL-safe */
/* Local. Forgets, before the next step. */
void tr_routes_clear(tr_routes *routes);

typedef struct {
    int64_t layer;              /* among the MoE layers */
    int64_t sequence, position; /* the token's, in the step's batch */
    double gap;                 /* the smaller of the two jobs' (tr_watch_routing) */
    bool caused;                /* by another flip in its sequence */
} tr_flip;

typedef struct {
    tr_flip *flips; /* by sequence, layer, position; owned */
    int64_t count;
    int64_t unseen; /* (layer, token) pairs of one rank's that the grid did not route */
    double gap;     /* the largest of flips that no other caused; 0 without any */
} tr_flips;

/* Collective on the grid's world. `one`, the job of one rank over the same batch, is given on rank
 * 0 alone, where *flips_p is filled; elsewhere it is empty. */
void tr_flips_find(const tr_routes *grid, const tr_routes *one, tr_flips *flips_p);
void tr_flips_free(tr_flips *flips);
