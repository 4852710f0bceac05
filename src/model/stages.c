/* stages.c - virtual stages, see stages.h. Floor: model. */
#include "model/stages.h"

tr_stages tr_stages_of(const tr_config *config) {
    tr_schedule_kind kind = config->parallel.schedule;
    return (tr_stages){.ranks = config->parallel.pipeline,
                       .chunks = config->parallel.virtual_stages,
                       .folded = kind == TR_SCHEDULE_ZB_V || kind == TR_SCHEDULE_DUALPIPE_V};
}

int64_t tr_stage_of(const tr_stages *s, int64_t rank, int64_t chunk) {
    return s->folded && chunk == 1 ? 2 * s->ranks - 1 - rank : chunk * s->ranks + rank;
}

int64_t tr_stage_rank(const tr_stages *s, int64_t stage) {
    return s->folded && stage >= s->ranks ? 2 * s->ranks - 1 - stage : stage % s->ranks;
}

int64_t tr_stage_chunk(const tr_stages *s, int64_t stage) {
    return stage / s->ranks;
}

tr_range tr_stage_layers(const tr_stages *s, int64_t layers, int64_t stage) {
    return tr_block_of(layers, tr_stages_count(s), stage);
}

int64_t tr_stage_of_layer(const tr_stages *s, int64_t layers, int64_t layer) {
    return tr_block_owner(layers, tr_stages_count(s), layer);
}
