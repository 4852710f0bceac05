/* layers.h - the layers of a block: each declares its weights, runs forward and runs backward.
 * Floor: model. Legend in pass.h.
 *
 * A layer's forward writes its output into memory the caller gives and saves what its backward
 * needs (tr_save). A backward receives dy, writes dx (=) and adds weight gradients (+=). Collective
 * layers are called by all ranks of their group in the same order. */
#pragma once
#include "model/exchange.h"

/* --- norms ----------------------------------------------------------------------------------- */
typedef struct {
    int64_t weight, bias; /* registry indices; bias -1: rmsnorm has none */
} tr_norm_layer;

/* Declares PREFIX.weight and, of layernorm, PREFIX.bias. */
void tr_norm_declare(tr_norm_layer *layer, tr_registry *registry, const tr_model_config *config,
                     const char *prefix, int stage);
/* Floats that a norm keeps of each row. */
int64_t tr_norm_statistics(const tr_model_config *config);
/* Local. y = norm(x), [rows,H]. statistics [rows] rstd, then of layernorm [rows] mean. */
void tr_norm_forward(const tr_norm_layer *layer, const tr_env *c, void *y, float *statistics,
                     const void *x, int64_t rows);
/* Local. dx = residual + the gradient of x; residual nullable. */
void tr_norm_backward(const tr_norm_layer *layer, const tr_env *c, void *dx, const void *dy,
                      const void *x, const float *statistics, const void *residual, int64_t rows);

/* --- attention: q, k, v projections, rotary positions, softmax attention, output projection ------
 */
typedef struct {
    int64_t q, k, v, o; /* registry indices */
} tr_attention_layer;

void tr_attention_declare(tr_attention_layer *layer, tr_registry *registry,
                          const tr_model_config *config, int64_t index, int stage);
/* Collective on the context and tensor groups, as is its backward. y[N_loc,H] +=
 * attention(x[N_loc,H]). */
void tr_attention_layer_forward(const tr_attention_layer *layer, const tr_pass *pass,
                                tr_saved *saved, const void *x, void *y);
/* dx[N_loc,H] = gradient of x, from dy[N_loc,H]. x = the saved NORM1. */
void tr_attention_layer_backward(const tr_attention_layer *layer, const tr_pass *pass,
                                 tr_saved *saved, const void *dy, void *dx);

/* Attention over the sequence of the context group: causal, sliding window, documents (heads.c,
 * ring.c). `what` is TR_SAVED_Q, of queries, or TR_SAVED_KV, of keys and values. "Own" are a rank's
 * rows with all its heads, [N,Hq,D], or [N,Hkv,D] keys and then values; "all" is what its attention
 * works on.
 * Local. Memory for own rows that tr_attend_share will take. */
void *tr_attend_room(const tr_pass *pass, tr_saved *saved, tr_saved_id what);
/* Collective on the head group. Saves `what` as attention sees it; NULL, or to be ended before. */
tr_request *tr_attend_share(const tr_pass *pass, tr_saved *saved, tr_saved_id what, void *own);
/* Collective on the context group. ATTN and LSE from Q and KV. */
void tr_attend(const tr_pass *pass, tr_saved *saved);

/* For the backward. Local. Scratch for all, or `own` itself where all is nothing else. */
void *tr_heads_room(const tr_env *c, tr_saved_id what, void *own);
/* Collective on the head group. all = own; NULL, or to be ended before it is used. */
tr_request *tr_heads_spread(const tr_env *c, tr_saved_id what, const void *own, void *all);
/* Collective on the head group. own = all, with the copies of a key/value head summed. */
typedef struct {
    tr_saved_id what;
    const void *parts;
    tr_request *request;
} tr_return;
tr_return tr_heads_return_begin(const tr_env *c, tr_saved_id what, const void *all);
void tr_heads_return_end(const tr_env *c, const tr_return *back, void *own);

/* Local. What these need for the shape of c, and its memory in scratch. */
void tr_heads_open(tr_env *c, tr_arena *arena);
void tr_heads_close(tr_env *c);
int64_t tr_heads_scratch_bytes(const tr_env *c);

/* Collective on the ring. out and LSE of all from Q and KV. backward: dq and dkv of all (type t,
 * laid out as Q and KV) from dout of all. */
void tr_ring_forward(const tr_pass *pass, tr_saved *saved, void *out);
void tr_ring_backward(const tr_pass *pass, const tr_saved *saved, const void *dout, void *dq,
                      void *dkv);
int64_t tr_ring_scratch_bytes(const tr_env *c);

/* --- gated feed-forward ------------------------------------------------------------------- */
typedef struct {
    int64_t gate, up, down;
    int64_t width; /* of the whole layer; 0: there is none */
} tr_mlp_layer;

void tr_mlp_declare(tr_mlp_layer *layer, tr_registry *registry, const tr_model_config *config,
                    const char *prefix, int64_t width, int stage);
/* Collective on the tensor group, as is its backward. y[N_loc,H] += mlp(x), in two parts or at
 * once: what is widened, then the product that narrows it. */
void tr_mlp_forward_begin(const tr_mlp_layer *layer, const tr_pass *pass, tr_saved *saved,
                          const void *x);
void tr_mlp_forward_end(const tr_mlp_layer *layer, const tr_pass *pass, const tr_saved *saved,
                        void *y);
void tr_mlp_forward(const tr_mlp_layer *layer, const tr_pass *pass, tr_saved *saved, const void *x,
                    void *y);
/* A backward between its parts, in scratch. */
typedef struct {
    void *dgate, *dup; /* [N,width] */
} tr_mlp_flight;
/* dx[N_loc,H] = (add: +=) gradient of x. */
tr_mlp_flight tr_mlp_backward_begin(const tr_mlp_layer *layer, const tr_pass *pass, tr_saved *saved,
                                    const void *dy);
void tr_mlp_backward_end(const tr_mlp_layer *layer, const tr_pass *pass,
                         const tr_mlp_flight *flight, const void *x, void *dx, bool add);
/* Without add; scratch is as it was. */
void tr_mlp_backward(const tr_mlp_layer *layer, const tr_pass *pass, tr_saved *saved, const void *x,
                     const void *dy, void *dx);

/* --- mixture of experts ------------------------------------------------------------------------
 */
typedef struct {
    int64_t router, gate, up,
        down; /* gate, up [E,Ie,H]; down [E,H,Ie], split over the expert group */
    tr_mlp_layer shared;
    int64_t moe_index; /* which MoE layer of the model: row of expert_load */
} tr_moe_layer;

void tr_moe_declare(tr_moe_layer *layer, tr_registry *registry, const tr_model_config *config,
                    int64_t index, int64_t moe_index, int stage);
/* A forward or backward between its parts: rows travel to the experts, or back. */
typedef struct {
    tr_journey rows;
    tr_mlp_flight shared; /* backward, as is dx */
    void *dx;
    tr_arena_mark mark;
} tr_moe_flight;

/* Collective on the expert, context and tensor groups. y[N_loc,H] += moe(x). Adds to the step's
 * sums unless recomputing. In three parts, or at once: what is done between two parts hides the
 * rows' travel. */
void tr_moe_forward_begin(const tr_moe_layer *layer, const tr_pass *pass, tr_saved *saved,
                          const void *x, tr_moe_flight *flight);
void tr_moe_forward_middle(const tr_moe_layer *layer, const tr_pass *pass, tr_saved *saved,
                           const void *x, void *y, tr_moe_flight *flight);
void tr_moe_forward_end(const tr_moe_layer *layer, const tr_pass *pass, tr_saved *saved, void *y,
                        tr_moe_flight *flight);
void tr_moe_forward(const tr_moe_layer *layer, const tr_pass *pass, tr_saved *saved, const void *x,
                    void *y);
/* Collective on the expert and tensor groups. dx[N_loc,H] = gradient of x. x = the saved NORM2. */
void tr_moe_backward_begin(const tr_moe_layer *layer, const tr_pass *pass, tr_saved *saved,
                           const void *dy, void *dx, tr_moe_flight *flight);
void tr_moe_backward_middle(const tr_moe_layer *layer, const tr_pass *pass, tr_saved *saved,
                            tr_moe_flight *flight);
void tr_moe_backward_end(const tr_moe_layer *layer, const tr_pass *pass, tr_saved *saved, void *dx,
                         tr_moe_flight *flight);
void tr_moe_backward(const tr_moe_layer *layer, const tr_pass *pass, tr_saved *saved,
                     const void *dy, void *dx);

/* The router's part of it (router.c): scores, balance losses, who goes where.
 * open: local, before any. Says which groups it will use.
 * forward: PROB, RLSE, INDEX, WEIGHT from x, stats, and the way of the rows. */
void tr_router_open(const tr_env *c);
void tr_router_forward(const tr_moe_layer *layer, const tr_pass *pass, tr_saved *saved,
                       const void *x);
/* dx[N_loc,H] += through the router, from dweight[N_loc,k]; with the balance losses. */
void tr_router_backward(const tr_moe_layer *layer, const tr_pass *pass, const tr_saved *saved,
                        const void *x, const float *dweight, void *dx);
/* Of whole sequences, where experts take a limited number of their tokens. Device memory. */
typedef struct {
    const int32_t *index; /* [B,S,k] */
    const float *score;   /* [B,S,k] probabilities as they came */
    const int32_t *taken; /* [B,S,k] index without what was dropped; NULL: without limit */
} tr_capacity_choices;
/* Local. Tells the model's watcher what the layer decided (margin.c). */
void tr_router_show(const tr_moe_layer *layer, const tr_pass *pass, const tr_saved *saved,
                    const tr_capacity_choices *choices);
/* Local. Groups over which balance is measured in a micro-batch: 1, or its sequences. */
int64_t tr_router_groups(const tr_env *c);
/* Collective on the stage, scope global_batch: replaces the stats of every saved
 * micro-batch by the sums over all of the step's. */
void tr_router_global_stats(tr_env *c, tr_saved **saved, int64_t count);

/* --- a block: norm, attention, norm, feed-forward, each on a residual branch
 * ---------------------- */
typedef struct {
    int64_t unit; /* of its weights */
    tr_norm_layer norm1, norm2;
    tr_attention_layer attention;
    bool is_moe;
    tr_mlp_layer mlp; /* when !is_moe */
    tr_moe_layer moe; /* when is_moe */
} tr_block_layer;

void tr_block_declare(tr_block_layer *block, tr_registry *registry, const tr_model_config *config,
                      int64_t index, int64_t moe_index, int stage);
/* A block's forward or backward between its parts. */
typedef struct {
    const tr_block_layer *block;
    tr_pass pass;
    tr_saved *saved;
    void *out;     /* y, or d */
    void *dnormed; /* backward */
    tr_arena_mark mark, inner;
    tr_moe_flight moe;
} tr_block_flight;

/* Collective on the expert, context and tensor groups, as is its backward. y[N_loc,H] = block(saved
 * X). In three parts, or at once: where a layer has experts, rows travel between the parts. */
void tr_block_forward_begin(tr_block_flight *flight, const tr_block_layer *block,
                            const tr_pass *pass, tr_saved *saved, void *y);
void tr_block_forward_middle(tr_block_flight *flight);
void tr_block_forward_end(tr_block_flight *flight);
void tr_block_forward(const tr_block_layer *block, const tr_pass *pass, tr_saved *saved, void *y);
/* d[N_loc,H]: the gradient of the output becomes, in place, that of the input. */
void tr_block_backward_begin(tr_block_flight *flight, const tr_block_layer *block,
                             const tr_pass *pass, tr_saved *saved, void *d);
void tr_block_backward_middle(tr_block_flight *flight);
void tr_block_backward_end(tr_block_flight *flight);
void tr_block_backward(const tr_block_layer *block, const tr_pass *pass, tr_saved *saved, void *d);

/* --- final norm and head, fused with the cross-entropy
 * --------------------------------------------- Logits exist for one chunk of rows at a time. In
 * training the gradients of the logits are used at once (weight gradient, gradient of the normed
 * input), since the loss scale is known beforehand. */
typedef struct {
    tr_norm_layer norm;
    int64_t weight; /* lm_head, or the tied embedding */
} tr_head_layer;

typedef struct {
    float *statistics; /* of the norm */
    void *dnorm;       /* [N_loc,H] gradient of the normed input */
} tr_head_saved;

/* Collective on the tensor group. x[N_loc,H], label[N]. */
void tr_head_forward(const tr_head_layer *head, const tr_pass *pass, tr_head_saved *saved,
                     const void *x, const int32_t *label);
/* dx[N_loc,H] = . */
void tr_head_backward(const tr_head_layer *head, const tr_pass *pass, const tr_head_saved *saved,
                      const void *x, void *dx);
/* Scratch bytes of a training forward. */
int64_t tr_head_scratch_bytes(const tr_env *c);
/* One tensor rank. Logits [V] of row n, for sampling. Device memory in scratch. */
float *tr_head_logits(const tr_head_layer *head, const tr_pass *pass, const void *x, int64_t n);
