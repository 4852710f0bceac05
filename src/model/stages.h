/* stages.h - which pipeline rank holds which layers. Floor: model. Pure and local.
 *
 * The layers are cut into ranks * chunks virtual stages, and a micro-batch passes them in order.
 * Chunk c of rank r is virtual stage c * ranks + r (Narayanan et al. 2021, interleaved), or, folded
 * like a V, stage r for chunk 0 and 2 * ranks - 1 - r for chunk 1 (Qi et al. 2024): then the first
 * and the last stage are on rank 0. With one chunk, stage and rank are the same. */
#pragma once
#include "config/config.h"
#include "dist/blocks.h"

enum { TR_MAX_CHUNKS = 64 };

typedef struct {
    int64_t ranks, chunks;
    bool folded; /* chunks is 2 */
} tr_stages;

tr_stages tr_stages_of(const tr_config *config);

static inline int64_t tr_stages_count(const tr_stages *s) {
    return s->ranks * s->chunks;
}
int64_t tr_stage_of(const tr_stages *stages, int64_t rank, int64_t chunk);
int64_t tr_stage_rank(const tr_stages *stages, int64_t stage);
int64_t tr_stage_chunk(const tr_stages *stages, int64_t stage);

/* Of the model's `layers` layers: those of a virtual stage, and the stage of one layer. */
tr_range tr_stage_layers(const tr_stages *stages, int64_t layers, int64_t stage);
int64_t tr_stage_of_layer(const tr_stages *stages, int64_t layers, int64_t layer);
