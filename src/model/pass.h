/* pass.h - what every layer's forward and backward shares: sizes, device, memory, and the table of
 * tensors a block saves for its backward. Floor: model.
 *
 * Legend: B sequences of the micro-batch, S_loc positions of this context rank, N = B*S_loc rows,
 * N_loc = N / tensor ranks of them on this one, H hidden_size, Hq/Hkv heads of this tensor rank,
 * Aq/Akv heads and S_ring positions that this rank's attention works on (heads.c; without context
 * ranks Hq/Hkv and S), D head_dim, I intermediate size (of this tensor rank, where split), E
 * experts, k experts a token, R rows in expert order, V vocabulary. Activations have the compute
 * type t. */
#pragma once
#include "config/config.h"
#include "model/model.h"
#include "model/param.h"
#include "model/sequence.h"

/* Sums of one step, host memory, this rank's share: a plain sum over all ranks gives the step's. */
typedef struct {
    double aux_loss, z_loss; /* coefficient-weighted, averaged over the step's micro-batches */
    double *expert_load;     /* [MoE layers of the model, E] choices of this rank's tokens */
} tr_step_sums;

/* Memory through which rows cross the tensor group (tensor.c), mapped by its ranks on this node;
 * NULL when this rank is alone. */
typedef struct {
    void *rows;     /* [N,H] type t */
    float *partial; /* [N,H] */
} tr_tensor_buffers;

/* How rows reach their experts (exchange.h). */
typedef struct tr_exchange tr_exchange;
/* How own rows of queries, or of keys and values, become those of attention (heads.c). */
typedef struct {
    int64_t own, packed;    /* rows of a part of the heads */
    int64_t copies;         /* packed rows of an own one */
    int32_t *pack, *unpack; /* device [packed]: the own row; [own,copies]: the packed ones */
} tr_packing;

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
    tr_exchange *exchange; /* NULL: no layer has experts */
    tr_arena *scratch;     /* temporaries; marked and released inside each layer */
    /* the shape of a micro-batch (tr_env_shape) */
    int64_t B, S, S_loc, N;
    int64_t N_loc, first_row; /* this tensor rank's rows of the N */
    int64_t Hq, Hkv;
    tr_sequence cut;
    int64_t Aq, Akv;
    tr_tensor_buffers tensor;
    tr_packing packing[2]; /* queries; keys and values */
    int64_t *one_each;     /* host [cut.heads] ones */
    tr_request **offers;   /* host [cut.rings] for what a ring rank sends */
    int32_t *position;     /* device [N] global positions */
    float *freq;           /* device [D/2] rotary frequencies */
    /* the step (tr_model_begin_step) */
    int64_t micro_batches; /* of the whole step, over all data ranks */
    float loss_scale;      /* 1 / labelled tokens of the global batch */
    tr_step_sums sums;
    tr_watch_routing watch; /* nullable: sees every routing decision */
    void *watch_self;
    double *loss_sum; /* device: cross-entropy over this rank's labelled tokens */
} tr_env;

/* A weight gradient that is to be computed: dW += dy^T x. What it reads stays where it is until it
 * has been. */
typedef struct tr_weight_job {
    void (*run)(const tr_env *c, const struct tr_weight_job *job);
    tr_param *w;
    const void *dy, *x; /* device [rows,out], [rows,in] */
    int64_t rows;
    const int64_t *offset; /* of experts: their rows, on the device; else NULL */
    int64_t unit;          /* of a job that says that a unit's gradients are complete */
} tr_weight_job;

typedef struct {
    tr_weight_job *jobs;
    int64_t count, capacity;
} tr_weight_queue;

/* One forward or backward of one micro-batch. */
typedef struct {
    tr_env *c;
    tr_arena *kept;          /* what the backward needs; reset when the micro-batch is done */
    const uint8_t *valid;    /* device [N_loc]; 0 for pads */
    const int32_t *position; /* device [N] for rotation */
    /* documents: NULL where each sequence is one */
    const int32_t *begin;     /* device [chunks,B,chunk]: where that of attention's rows begins */
    const int64_t *first_key; /* host [2*rings], or [1]: see tr_sequence_sees */
    bool training;            /* false: nothing is kept */
    bool recomputing;         /* a forward run again inside the backward */
    tr_weight_queue *queue;   /* of weight gradients; NULL: they are computed at once */
} tr_pass;

/* What a block saves for its backward: one row a tensor. The table in saved.c gives each its shape,
 * type and whether a recomputation drops it; memory, recomputation and the plan all read that
 * table. */
typedef enum {
    TR_SAVED_X, /* the block's input */
    TR_SAVED_NORM1,
    TR_SAVED_STAT1, /* of the norm: rstd and, of layernorm, mean */
    TR_SAVED_Q,     /* rotated, as attention sees them (heads.c) */
    TR_SAVED_KV,    /* likewise; without context ranks [N,Hkv,D] keys, then values */
    TR_SAVED_ATTN,  /* attention's output */
    TR_SAVED_HEADS, /* the same before heads are exchanged for rows, where they are */
    TR_SAVED_LSE,   /* [B,Aq,S_ring] */
    TR_SAVED_MID,   /* after attention's residual */
    TR_SAVED_NORM2,
    TR_SAVED_STAT2,
    TR_SAVED_GATE, /* dense or shared expert */
    TR_SAVED_UP,
    TR_SAVED_ACT,    /* f(gate)*up */
    TR_SAVED_PROB,   /* router probabilities */
    TR_SAVED_LOGITS, /* of a router of sigmoids */
    TR_SAVED_RLSE,   /* router log-sum-exp */
    TR_SAVED_INDEX,  /* chosen experts */
    TR_SAVED_WEIGHT,
    TR_SAVED_XE, /* experts' input */
    TR_SAVED_GATE_E,
    TR_SAVED_UP_E,
    TR_SAVED_ACT_E,
    TR_SAVED_YE, /* experts' output */
    TR_SAVED_COUNT
} tr_saved_id;

/* Where rows are on their way to their experts (exchange.h), sorted by where they go next: to ranks
 * over a hop, or, at the last stop, to the experts there. */
enum { TR_MOST_STOPS = 4 };
typedef struct {
    int64_t rows, sorted; /* at hand; after sorting, or a bound of it */
    /* device, the micro-batch's memory */
    const float *weight;       /* [rows,k] of each row's experts */
    int64_t *offset;           /* [places+1] */
    int32_t *row_of, *pair_of; /* [rows,k] pair -> sorted row, [rows*k] back */
    /* host: rows to and from each rank of the hop that follows */
    int64_t *send_rows, *recv_rows;
} tr_stop;

typedef struct {
    void *t[TR_SAVED_COUNT]; /* device; NULL when not kept */
    int64_t width;           /* I of the dense or shared feed-forward */
    /* MoE: the way to the experts, and host memory of balance sums */
    tr_stop stop[TR_MOST_STOPS];
    int stops;
    double *stats;       /* [G, 2+2E], summed over the whole micro-batch */
    float *balance;      /* [G, E+1] gradients of the balance losses */
    double micro_tokens; /* scope global_batch: tokens of this micro-batch alone */
} tr_saved;

/* Local. Host memory of a block's record: `width` of its dense or shared feed-forward (whole; 0:
 * none), and what experts need. */
void tr_saved_init(const tr_env *c, tr_saved *saved, bool is_moe, int64_t width);
void tr_saved_fini(tr_saved *saved);
/* Local. Before a forward: forgets the last one's tensors; the width as in tr_saved_init. */
void tr_saved_restart(const tr_env *c, tr_saved *saved, int64_t width);
/* Local. Memory for one saved tensor: kept or scratch, by the table; remembers it in `saved`. */
void *tr_save(const tr_pass *pass, tr_saved *saved, tr_saved_id id);
/* Local. Bytes a block of this kind keeps for one micro-batch, all it saves, kept or not, and the
 * operands that it keeps besides when weight gradients are queued (rows of experts balanced). */
void tr_saved_plan(const tr_env *c, bool is_moe, int64_t width, int64_t *kept_bytes_p,
                   int64_t *all_bytes_p, int64_t *operand_bytes_p);
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

/* --- the tensor group (tensor.c) -----------------------------------------------------------------
 * Between layers a rank holds N_loc consecutive rows; attention and feed-forward gather all N
 * before their first product and add up their last one's parts (Korthikanti et al. 2022, "Reducing
 * Activation Recomputation"). Alone, these copy and add nothing. */

/* Local. The numbers of rows and heads of micro-batches of B sequences of length S. */
void tr_env_shape(tr_env *c, int64_t B, int64_t S);
/* Collective on the tensor group. Memory for that shape. */
void tr_tensor_open(tr_env *c);
void tr_tensor_close(tr_env *c);
int64_t tr_tensor_bytes(const tr_env *c); /* of it */

/* Collective on the tensor group. All rows [N,H] from each rank's x[N_loc,H]; the memory is good
 * until the next call. */
const void *tr_rows_gather(const tr_env *c, const void *x);

/* A sum over the tensor group that products build up: what each computes of all N rows, in fp32.
 * The first product into `at` takes `beta`, later ones 1. */
typedef struct {
    void *at; /* [N,H] type t */
    tr_dtype t;
    float beta;
    void *out;
    bool add;
} tr_partial;
/* Local. out[N_loc,H] = (add: +=) the sum, once ended; one at a time. */
tr_partial tr_partial_begin(const tr_env *c, void *out, bool add);
/* Collective on the tensor group. */
void tr_partial_end(const tr_env *c, const tr_partial *partial);

/* Linear layers without bias, weights [out,in] as Hugging Face stores them (linear.c); the products
 * are over this rank's part of the weight.
 * Declares one, initialised by a normal distribution; the name as printf makes it. */
int64_t tr_linear_declare(tr_registry *registry, int64_t out, int64_t in, tr_split split,
                          double std, int stage, const char *format, ...)
    __attribute__((format(printf, 7, 8)));
/* Standard deviation of projections that end a residual branch: initializer_range / sqrt(2 layers)
 * (Radford et al. 2019, GPT-2). */
double tr_residual_std(const tr_model_config *config);
/* y[N,out] = beta*y + x[N,in] W^T */
void tr_linear(const tr_env *c, void *y, tr_dtype y_t, const void *x, const tr_param *w, int64_t N,
               float beta);
/* dx[N,in] = beta*dx + dy[N,out] W */
void tr_linear_input(const tr_env *c, void *dx, tr_dtype dx_t, const void *dy, const tr_param *w,
                     int64_t N, float beta);
/* dW[out,in] += dy[N,out]^T x[N,in], at once or queued: dy and x are operands. */
void tr_linear_weight(const tr_pass *pass, tr_param *w, const void *dy, const void *x, int64_t N);

/* --- weight gradients (weights.c) ----------------------------------------------------------------
 * A backward whose pass has a queue leaves them to later (Qi et al. 2024, "Zero Bubble"). What they
 * read, their operands, is then in the micro-batch's own memory: saved tensors that weights
 * multiply (saved.c knows them), and what these three give. Gradients of norms, embedding and head
 * are never queued. */
void tr_weight_add(const tr_pass *pass, const tr_weight_job *job);
/* Collective on the unit's groups. What has been added for a unit is all of this micro-batch. */
void tr_weights_complete(const tr_pass *pass, int64_t unit);
void tr_weights_drain(const tr_env *c, tr_weight_queue *queue);
/* Local. Memory for an operand: scratch, or the micro-batch's. */
void *tr_operand(const tr_pass *pass, int64_t elems);
/* Local. The same values as operand: in place, or a copy, for what is overwritten before. */
const void *tr_operand_copy(const tr_pass *pass, const void *values, int64_t elems);
/* Collective on the tensor group. All rows [N,H] of a saved x[N_loc,H] as operand. */
const void *tr_operand_rows(const tr_pass *pass, const void *x);

/* Local. A parameter's row of the registry by index; -1 gives NULL. */
static inline tr_param *tr_param_at(const tr_env *c, int64_t index) {
    return index < 0 ? NULL : &c->registry->params[index];
}
