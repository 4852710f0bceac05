/* parts.h - what a model consists of, for model.c and walk.c alone. Floor: model. */
#pragma once
#include "model/layers.h"
#include "model/stages.h"

/* One of this rank's virtual stages. */
typedef struct {
    tr_range layers;
    tr_block_layer *blocks; /* [layers] */
    bool first, last;       /* begins with the embedding; ends with the head */
} tr_chunk_layers;

typedef struct {
    tr_arena *kept;
    tr_saved *block; /* [most layers of a chunk] */
    tr_head_saved head;
    void *input, *output, *gradient; /* [N,H], cross stages */
    int32_t *token, *label;
    uint8_t *valid;
    int32_t *position, *begin;               /* NULL unless documents are told apart */
    int64_t *first_key;                      /* host, owned */
    bool labelled, own_positions, documents; /* of the micro-batch loaded last */
    const tr_chunk_layers *chunk;            /* of the last forward */
    bool waiting;                            /* for its backward */
    tr_weight_queue queue;                   /* of its weight gradients */
} tr_slot;

struct tr_model {
    tr_env env;
    tr_stages stages;
    tr_chunk_layers *chunks; /* [stages.chunks] */
    int64_t most_layers;     /* of a chunk */
    int64_t embedding, embedding_unit;
    tr_head_layer head;
    int64_t head_units[2];  /* of its norm and its weight */
    bool documents;         /* micro-batches may come with them */
    tr_arena *back_scratch; /* of a backward beside a forward */
    /* per shape */
    tr_arena *persistent;
    tr_slot *slots;
    int64_t nslots;
};

/* Of a block's dense or shared feed-forward; 0: none. */
static inline int64_t tr_block_width(const tr_block_layer *b) {
    return b->is_moe ? b->moe.shared.width : b->mlp.width;
}
