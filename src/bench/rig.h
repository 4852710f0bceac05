/* rig.h - a layer by itself: what model.c puts around layers, without a model. Floor: bench. */
#pragma once
#include "bench/lab.h"
#include "model/layers.h"

typedef struct {
    /* set before tr_rig_open */
    tr_model_config config; /* the model's, or changed */
    int context_heads;      /* ranks that exchange heads; 0 is 1 */
    int expert;             /* ranks of an expert group; 0: 1 */
    tr_exchange_kind exchange;
    /* made by it */
    tr_env env;
    tr_grid *grid;
    tr_arena *fixed, *kept;
    tr_saved saved;
    tr_pass pass;
    uint8_t *valid; /* device [N], all 1 */
} tr_rig;

/* Collective on comm, which becomes one context group. B sequences of length S. *rig is zero but
 * for what is set before. */
void tr_rig_open(tr_rig *rig, const tr_lab *lab, tr_comm *comm, tr_dtype t, int64_t B, int64_t S);
void tr_rig_close(tr_rig *rig); /* Collective on comm */
/* Local. Before each forward: forgets what the last one saved. */
void tr_rig_restart(tr_rig *rig);
