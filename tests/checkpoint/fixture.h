/* fixture.h - tensors whose every element is known, and ways to hand them out to ranks. Floor:
 * tests. All ranks compute the same partition and take their own part of it. */
#pragma once
#include "checkpoint/store.h"

typedef enum {
    FX_EVEN,    /* rank r holds the r-th block of every tensor: small ones leave ranks empty */
    FX_LAST,    /* everything on the last rank */
    FX_RANDOM,  /* runs of random length on random ranks */
    FX_EXPERTS, /* blocks of dimension 0, each cut into runs of random length */
    FX_COLUMNS, /* blocks of the last dimension */
    FX_COVERS,  /* the partitions above cover each tensor once */
    FX_REPLICAS = FX_COVERS, /* every rank holds everything: for loading only */
    FX_MODES
} fx_mode;

typedef struct {
    int64_t npieces, capacity, elems;
    tr_piece *pieces;
    float *memory; /* three arrays; pieces follow each other, with gaps */
} fx_part;

extern const tr_tensor_info fx_tensors[];
extern const int64_t fx_ntensors;

/* Local. This rank's pieces under a partition drawn from `seed`; memory is filled with 0xff. */
fx_part fx_part_make(fx_mode mode, uint64_t seed, int rank, int size, int64_t ntensors,
                     const tr_tensor_info *tensors);
void fx_part_free(fx_part *part);

/* Local. The bits of every element are a function of (step, tensor's name, array, global index):
 * fills them in, or counts those that differ. */
void fx_fill(fx_part *part, int64_t step, const tr_tensor_info *tensors);
int64_t fx_wrong(const fx_part *part, int64_t step, int arrays, const tr_tensor_info *tensors);

/* Local. A state that is a function of the step; config borrowed. */
tr_progress_state fx_state(int64_t step);
bool fx_state_right(const tr_progress_state *state, int64_t step);
