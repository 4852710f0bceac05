/* pass.h - what every layer's forward and backward shares: sizes, device, memory, and the table of
 * tensors a block saves for its backward. Floor: model.
 *
 * Legend: B sequences of the micro-batch, S_loc positions of this context rank, N = B*S_loc rows,
 * H hidden_size, Hq/Hkv heads, D head_dim, I intermediate size, E experts, k experts a token,
 * R rows in expert order, V vocabulary. Activations have the compute type t. */
#pragma once
#include "config/config.h"
#include "model/model.h"
#include "model/param.h"

/* Sums of one step, host memory, this rank's share: a plain sum over all ranks gives the step's. */
typedef struct {
    double aux_loss, z_loss; /* coefficient-weighted, averaged over the step's micro-batches */
    double *expert_load;     /* [MoE layers of the model, E] choices of this rank's tokens */
} tr_step_sums;

/* One per rank: everything that stays the same over micro-batches. All pointers but the arrays of
 * this file's own are borrowed. */
typedef struct {
    const tr_model_config *config;
    const tr_grid *grid;
    tr_registry *registry;
    tr_device *device;
    const tr_kernels *kernels;
    tr_stream *stream;
    tr_dtype t;
    tr_recompute recompute;
    tr_arena *scratch; /* temporaries; marked and released inside each layer */
    /* the shape of a micro-batch (tr_model_shape) */
    int64_t B, S, S_loc, N;
    int32_t *position; /* device [N] global positions */
    float *freq;       /* device [D/2] rotary frequencies */
    /* the step (tr_model_begin_step) */
    int64_t micro_batches; /* of the whole step, over all data ranks */
    float loss_scale;      /* 1 / labelled tokens of the global batch */
    tr_step_sums sums;
    tr_watch_routing watch; /* nullable: sees every routing decision */
    void *watch_self;
    double *loss_sum; /* device: cross-entropy over this rank's labelled tokens */
} tr_env;

/* One forward or backward of one micro-batch. */
typedef struct {
    tr_env *c;
    tr_arena *kept;       /* what the backward needs; reset when the micro-batch is done */
    const uint8_t *valid; /* device [N]; 0 for pads */
    bool training;        /* false: nothing is kept */
    bool recomputing;     /* a forward run again inside the backward */
} tr_pass;

/* What a block saves: one row a tensor (saved.c). TR_KEEP_ALWAYS rows are kept under every
 * recomputation, UNLESS_FULL rows under none and selective, ONLY_NONE rows under none alone. */
typedef enum {
    TR_SAVED_X,       /* [N,H] the block's input */
    TR_SAVED_NORM1,   /* [N,H] */
    TR_SAVED_RSTD1,   /* [N] */
    TR_SAVED_Q,       /* [N,Hq,D] rotated */
    TR_SAVED_KV,      /* [N,Hkv,D] rotated keys, then [N,Hkv,D] values */
    TR_SAVED_ATTN,    /* [N,Hq,D] attention's output */
    TR_SAVED_LSE,     /* [B,Hq,S_loc] */
    TR_SAVED_MID,     /* [N,H] after attention's residual */
    TR_SAVED_NORM2,   /* [N,H] */
    TR_SAVED_RSTD2,   /* [N] */
    TR_SAVED_GATE,    /* [N,I] dense or shared expert */
    TR_SAVED_UP,      /* [N,I] */
    TR_SAVED_ACT,     /* [N,I] silu(gate)*up */
    TR_SAVED_PROB,    /* [N,E] router probabilities */
    TR_SAVED_RLSE,    /* [N] router log-sum-exp */
    TR_SAVED_INDEX,   /* [N,k] chosen experts */
    TR_SAVED_WEIGHT,  /* [N,k] */
    TR_SAVED_ROW_OF,  /* [N,k] pair -> row in expert order */
    TR_SAVED_PAIR_OF, /* [N*k] row -> pair */
    TR_SAVED_OFFSET,  /* [E+1] rows by expert at the source */
    TR_SAVED_LOCAL,   /* [El+1] rows by local expert */
    TR_SAVED_FROM,    /* [R] expert order -> arrival */
    TR_SAVED_TO,      /* [R] arrival -> expert order */
    TR_SAVED_XE,      /* [R,H] experts' input */
    TR_SAVED_GATE_E,  /* [R,Ie] */
    TR_SAVED_UP_E,    /* [R,Ie] */
    TR_SAVED_ACT_E,   /* [R,Ie] */
    TR_SAVED_YE,      /* [N*k,H] experts' output, back at the source */
    TR_SAVED_COUNT
} tr_saved_id;

typedef struct {
    void *t[TR_SAVED_COUNT]; /* device; NULL when not kept */
    /* host, MoE: rows to and from each expert rank, and balance sums */
    int64_t *send_rows, *recv_rows; /* [ep] */
    int64_t rows_sent, rows_here;   /* their sums: R at the source and at the experts */
    double *stats;                  /* [G, 2+2E], summed over the context group */
    double micro_tokens;            /* scope global_batch: tokens of this micro-batch alone */
} tr_saved;

/* Local. Memory for one saved tensor: kept or scratch, by the table; remembers it in `saved`. */
void *tr_save(const tr_pass *pass, tr_saved *saved, tr_saved_id id, int64_t elems, tr_dtype t);
/* Local. Forgets what lies in scratch: called before scratch is released. */
void tr_saved_forget(const tr_pass *pass, tr_saved *saved);
/* Local. Whether a kept tensor has to be computed again. */
static inline bool tr_lost(const tr_saved *saved, tr_saved_id id) {
    return saved->t[id] == NULL;
}

/* Local. Scratch memory for `elems` of type t. */
static inline void *tr_scratch(const tr_env *c, int64_t elems, tr_dtype t) {
    return tr_arena_alloc(c->scratch, (size_t)elems * tr_dtype_bytes(t));
}

/* Linear layers without bias, weights [out,in] as Hugging Face stores them.
 * y[N,out] = beta*y + x[N,in] W^T */
void tr_linear(const tr_env *c, void *y, tr_dtype y_t, const void *x, const tr_param *w, int64_t N,
               float beta);
/* dx[N,in] = beta*dx + dy[N,out] W */
void tr_linear_input(const tr_env *c, void *dx, const void *dy, const tr_param *w, int64_t N,
                     float beta);
/* The queue of weight gradients, drained at once: dW[out,in] += dy^T x. The one place where a
 * linear layer's weight gradient is computed. */
void tr_linear_weight(const tr_env *c, const tr_param *w, const void *dy, const void *x, int64_t N);

/* Local. A parameter's row of the registry by index; -1 gives NULL. */
static inline tr_param *tr_param_at(const tr_env *c, int64_t index) {
    return index < 0 ? NULL : &c->registry->params[index];
}
