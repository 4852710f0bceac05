/* model.h - the decoder of one pipeline rank: declares its weights, and runs micro-batches through
 * its chunks of layers (stages.h) in slots. Floor: model.
 *
 * A slot holds one micro-batch in flight in one chunk: its tokens, the activations its backward
 * needs and the buffers that cross stage boundaries. Any chunk can use any slot. */
#pragma once
#include "config/config.h"
#include "model/param.h"

typedef struct tr_model tr_model;

/* Host memory, this rank's positions of one micro-batch: [B, S_loc] each but the last two. */
typedef struct {
    const int32_t *token, *label; /* label -1: not predicted; NULL: no loss is asked for */
    const uint8_t *valid;         /* 0: pad */
    const int32_t *position;      /* for rotation; NULL: the places in the sequence */
    /* Documents; NULL: each sequence is one. begin [chunks,B,chunk] (sequence.h): where that of
     * each of the positions begins on which this rank's attention works. first_key [2*rings], or
     * [1]: the earliest of these in each chunk of the whole sequence. */
    const int32_t *begin;
    const int64_t *first_key;
} tr_micro_batch;

/* Host memory: what one step gave, this rank's share; a sum over the world gives the step's. */
typedef struct {
    double loss_sum;           /* cross-entropy summed over labelled tokens */
    double aux_loss, z_loss;   /* coefficient-weighted */
    const double *expert_load; /* [MoE layers of the model, E]; borrowed */
} tr_model_sums;

/* Told of each training forward of a MoE layer (its number among the MoE layers) of the micro-batch
 * that was loaded last. Host memory: index [N,k] the experts that compute each token (-1: a pad, or
 * dropped), gap [N] by how much probability the narrowest decision about it was made. */
typedef void (*tr_watch_routing)(void *self, int64_t moe_index, const int32_t *index,
                                 const float *gap);

/* Collective on the expert group. Declares all weights of the whole model, in checkpoint order. */
tr_model *tr_model_create(const tr_config *config, const tr_grid *grid, tr_device *device);
void tr_model_destroy(tr_model *model); /* Collective on the world. NULL-safe */
tr_registry *tr_model_registry(tr_model *model);
/* Local. Whether rows reach experts on other nodes by way of one rank of each node. */
bool tr_model_exchanges_by_node(const tr_model *model);

/* Collective on the tensor group. Memory for `slots` micro-batches of B sequences of length S
 * (global). After seal. */
void tr_model_shape(tr_model *model, int64_t slots, int64_t B, int64_t S);

int64_t tr_model_moe_layers(const tr_model_config *config);
/* Local. Parameters that work for one token (k of E experts), and training FLOPs a token:
 * 6 N + 6 layers S heads*head_dim (causal attention counted at half). */
int64_t tr_model_active_params(const tr_model *model);
double tr_model_flops_per_token(const tr_model *model, int64_t S);

/* Local. Clears the sums and gradients; loss_scale = 1 / labelled tokens of the global batch (0:
 * the batch has none); micro_batches of the whole step over all data ranks. */
void tr_model_begin_step(tr_model *model, int64_t micro_batches, float loss_scale);
void tr_model_sums_get(tr_model *model, tr_model_sums *sums);

/* Local. The micro-batch that slot works on. */
void tr_model_load(tr_model *model, int64_t slot, const tr_micro_batch *batch);
/* Collective on the expert, context and tensor groups of the stage. Reads the boundary input (first
 * stage: tokens), writes the boundary output (last stage: the loss, of labels). */
void tr_model_forward(tr_model *model, int64_t chunk, int64_t slot, bool training);
/* Likewise, through the chunk of the slot's forward. The boundary gradient goes from that of the
 * output to that of the input, in place. split: without the weight gradients of linear layers. */
void tr_model_backward(tr_model *model, int64_t slot, bool split);
/* Both at once, of two slots: a training forward through `chunk` and the whole backward of another
 * micro-batch, block by block, so that the rows that travel to and from the experts of one do so
 * while the other computes (DeepSeek-V3 2024, DualPipe). */
void tr_model_forward_backward(tr_model *model, int64_t chunk, int64_t slot, int64_t back_slot);
/* Local. The weight gradients that a split backward has left to later; until then what they read
 * stays in the slot. */
void tr_model_weights(tr_model *model, int64_t slot);
/* Collective on the stage. With router_aux_loss_scope global_batch: called between the last
 * forward and the first backward. Else does nothing. */
void tr_model_all_forwards_done(tr_model *model);

/* Local. From now on `watch` sees the routing of training forwards; NULL ends it. Costs copies. */
void tr_model_watch_routing(tr_model *model, tr_watch_routing watch, void *self);

/* The stream that all work goes to. */
tr_stream *tr_model_stream(const tr_model *model);
/* Device buffers [N_loc, H] that cross stages: this tensor rank's rows. */
void *tr_model_input(tr_model *model, int64_t slot);
void *tr_model_output(tr_model *model, int64_t slot);
void *tr_model_gradient(tr_model *model, int64_t slot);
/* Local. From one boundary buffer to another of this rank, where two of its chunks meet. */
void tr_model_hand_over(tr_model *model, const void *from, void *to);
int64_t tr_model_boundary_bytes(const tr_model *model);

/* Local, one stage and tensor rank. After a forward without training: logits [V] at row n of slot
 * 0, host memory.
 */
void tr_model_logits(tr_model *model, int64_t n, float *logits);

/* Bytes of activations held for `slots` micro-batches and scratch, the most so far. */
int64_t tr_model_activation_bytes(const tr_model *model);
/* What a schedule does with the slots. */
typedef struct {
    int64_t slots;
    const uint64_t *chunks; /* [slots] bit c: chunk c uses it; borrowed */
    bool split, both;       /* some backwards are split; some run beside a forward */
} tr_slot_use;
/* Local, pure. The same, planned before anything runs: what the blocks keep is exact (rows of
 * experts balanced), scratch a bound. */
int64_t tr_model_plan_activations(const tr_model *model, const tr_slot_use *use, int64_t B,
                                  int64_t S);
/* Collective on the world, after tr_model_shape. Takes what training steps need by that plan, so
 * that a step asks for more only where experts get more rows than their share. TR_ERR_INTERNAL, on
 * all ranks, if some rank has no memory for what is sure to be needed. */
tr_status tr_model_reserve(tr_model *model, const tr_slot_use *use);
