/* kernels.h - the table of kernels and their contracts. Floor: kernels.
 *
 * Makers: ref/ (the formula in plain loops; fills every row), cpu/ (fast; overrides rows), cuda/
 * (the GPU, and its emulation). All pointers are device memory unless a comment says host. All
 * calls are enqueued on the stream. Row-major, last dimension fastest. Results are bitwise
 * repeatable for the same inputs, maker and thread count. Sizes may be 0 unless said otherwise.
 * Statistics and sums are fp32 or better whatever t is. t is TR_F32 or TR_BF16.
 *
 * Rule: activations and their gradients are written (=), weight gradients are fp32 and added to
 * (+=).
 *
 * Legend: N rows (tokens), C or H width, B batch, S sequence, E experts, k experts a token,
 * V vocabulary, R rows in expert order. */
#pragma once
#include "base/dtype.h"
#include "base/forms.h"
#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* C[M,N] = beta*C + op(A)[M,K] op(B)[K,N]; op transposes when its flag is set (A is then stored
 * [K,M], B [N,K]). ld* are elements between rows as stored. A and B have type `ab`, C type `c`
 * (`ab` or F32). beta is 0 (C is not read, NaN there does not matter) or 1. K = 0 with beta 0
 * writes zeros. */
typedef struct {
    int64_t M, N, K;
    const void *A, *B;
    void *C;
    int64_t lda, ldb, ldc;
    bool trans_a, trans_b;
    tr_dtype ab, c;
    float beta;
} tr_gemm;

/* Rows whose number only the device may know: at most `max`; if `used` (device) is not NULL the
 * kernel touches only rows < *used. */
typedef struct {
    int64_t max;
    const int64_t *used;
} tr_rows;

/* Which keys a query sees. Row i of a call's queries has position q_start + i, row j of its keys
 * k_start + j. Query p sees key s when all of these hold:
 *     causal: s <= p             window > 0: s > p - window (and s < p + window if not causal)
 *     doc_begin != NULL: doc_begin[b,i] <= s < doc_end[b,i]  (positions; doc_end may be NULL: no
 * end) dilation > 1: (p - s) % dilation == 0, or |p - s| < local (sparse = local or atrous) Blocks
 * with no visible pair are never computed. */
typedef struct {
    bool causal;
    int64_t q_start, k_start;
    int64_t window;
    int64_t dilation, local;
    const int32_t *doc_begin, *doc_end; /* [B, Sq], nullable */
} tr_mask;

/* Attention, forward and backward (Dao 2023, "FlashAttention-2"; FORMULAS: online softmax, true
 * -inf, soft cap, sinks). out = softmax(mask(cap(q k^T scale))) v. Query head h reads key head
 * h / (Hq / Hkv). Nothing of size Sq*Sk is stored.
 * Element (b, i, h, d) of q is at q[b*q_batch + i*q_row + h*Dqk + d]; k, v, out and gradients alike
 * with their own strides (elements); heads are contiguous inside a row.
 *
 * merge (forward): out (F32) and lse already hold a partial result over other keys; the new block
 * is merged in by log-sum-exp. The very first part is written with merge = false.
 * A row that sees nothing: out 0, lse -inf (merge: unchanged).
 * sink != NULL: one extra logit a head that takes probability and gives no value; not with merge.
 * soft_cap > 0: scores become cap*tanh(s/cap) before the mask. */
typedef struct {
    int64_t B, Sq, Sk, Hq, Hkv, Dqk, Dv;
    float scale, soft_cap;
    tr_mask mask;
    tr_dtype t; /* of q, k, v, dout */
    const void *q, *k, *v;
    int64_t q_batch, q_row, k_batch, k_row, v_batch, v_row;
    void *out;      /* forward: written; backward: read */
    tr_dtype out_t; /* t or F32 */
    int64_t out_batch, out_row;
    float
        *lse; /* element (b, h, i) at lse[b*lse_batch + h*lse_head + i]; backward: the GLOBAL one */
    int64_t lse_batch, lse_head;
    bool merge;
    const float *sink; /* [Hq], nullable */
    /* backward only */
    const void *dout; /* strides of its own */
    int64_t dout_batch, dout_row;
    void *dq, *dk, *dv; /* strides of q, k, v; type grad_t: t or F32 */
    tr_dtype grad_t;
    bool add_dq, add_dkv; /* += instead of =; only with grad_t F32 */
    float *dsink;         /* [Hq] +=, nullable */
} tr_attention;

/* How a token chooses k of E experts. They are in `groups` of equal size, neighbours together; a
 * token chooses among those of its `kept` best groups (ties: the lowest group). Under softmax a
 * group is as good as its best expert (DeepSeek-AI 2024, "DeepSeek-V2", 2.2.2), under sigmoid as
 * the sum of its two highest prob ("DeepSeek-V3", 2.1.2; of a group of one, its only). 1 of 1: no
 * limit. */
typedef struct {
    int64_t E, k;         /* 1 <= k <= kept * E / groups */
    int64_t groups, kept; /* 1 <= kept <= groups, which divides E */
    tr_score score;       /* what prob is made of logits by */
    bool renormalise;     /* the weights of the chosen are divided by their sum */
} tr_routing;

/* Is added to a sum of sigmoids before it divides: all of them may be 0 (DeepSeek-V3's code). */
#define TR_SIGMOID_FLOOR 1e-20f

typedef struct {
    float learning_rate, beta1, beta2, epsilon, weight_decay;
    float grad_scale; /* gradients are multiplied by this first (clipping) */
    int64_t t;        /* 1-based count of updates done, this one included */
} tr_adamw;

struct tr_kernels {
    /* --- dense linear algebra -------------------------------------------------------------- */
    void (*gemm)(tr_stream *s, const tr_gemm *g);

    /* Y[r,N] = X[r,K] op(W[g]) for rows offsets[g] <= r < offsets[g+1] of each group g; W[g] is
     * [N,K] (trans_w) or [K,N]. Y = or += by beta (0 or 1). Types as in gemm. Groups may be empty.
     * max_rows bounds offsets[G]. */
    void (*grouped_gemm)(tr_stream *s, tr_dtype ab, tr_dtype c, int64_t G,
                         const int64_t *offsets /* [G+1] */, int64_t max_rows, const void *X,
                         const void *W, bool trans_w, void *Y, int64_t N, int64_t K, float beta);
    /* dW[g][N,K] = or += (by beta, 0 or 1) dY[rows of g, N]^T X[rows of g, K] */
    void (*grouped_gemm_weight)(tr_stream *s, tr_dtype ab, int64_t G, const int64_t *offsets,
                                int64_t max_rows, const void *dY, const void *X, float *dW,
                                int64_t N, int64_t K, float beta);

    /* --- norms, activations, positions ------------------------------------------------------ */
    /* y[n,c] = x[n,c] w[c] rstd[n], rstd = 1/sqrt(mean_c x^2 + eps). y may alias x. C >= 1.
     * Zhang, Sennrich 2019. Rows are `stride` elements apart in x and y (>= C; C when dense). */
    void (*rmsnorm_forward)(tr_stream *s, tr_dtype t, void *y, float *rstd /* [N] */, const void *x,
                            const void *w /* [C] */, int64_t N, int64_t C, int64_t stride,
                            float eps);
    /* dx = residual + d(rmsnorm)/dx dy; dw += . residual nullable; dx may alias residual or dy. */
    void (*rmsnorm_backward)(tr_stream *s, tr_dtype t, void *dx, float *dw, const void *dy,
                             const void *x, const void *w, const float *rstd, const void *residual,
                             int64_t N, int64_t C, int64_t stride);
    /* y[n,c] = (x[n,c] - mean[n]) rstd[n] w[c] + b[c], mean over c, rstd = 1/sqrt(mean_c (x -
     * mean)^2
     * + eps). Ba et al. 2016. The rest as in rmsnorm. */
    void (*layernorm_forward)(tr_stream *s, tr_dtype t, void *y, float *mean /* [N] */,
                              float *rstd /* [N] */, const void *x, const void *w /* [C] */,
                              const void *b /* [C] */, int64_t N, int64_t C, int64_t stride,
                              float eps);
    /* dx = residual + d(layernorm)/dx dy; dw += ., db += . The rest as in rmsnorm_backward. */
    void (*layernorm_backward)(tr_stream *s, tr_dtype t, void *dx, float *dw, float *db,
                               const void *dy, const void *x, const void *w, const float *mean,
                               const float *rstd, const void *residual, int64_t N, int64_t C,
                               int64_t stride);
    /* Rotates x[n, h, 0..2F) in place by angle position[n]*freq[i] (direction +1) or its inverse
     * (-1); pairs are (i, i+F) or, interleaved, (2i, 2i+1). The rotated values are multiplied by
     * `factor` (YaRN; 1 otherwise; the backward multiplies too). Su et al. 2021. Angles in fp64 or
     * reduced so that positions up to 2^20 keep fp32 accuracy. row: elements between n and n+1. */
    void (*rope)(tr_stream *s, tr_dtype t, void *x /* [N, heads, D] */,
                 const int32_t *position /* [N] */, const float *freq /* [F] */, int64_t N,
                 int64_t heads, int64_t D, int64_t F, int64_t row, bool interleaved, float factor,
                 int direction);
    /* h = f(gate) * up, row by row; Shazeer 2020 (SwiGLU, GeGLU). h may alias gate or up. */
    void (*glu_forward)(tr_stream *s, tr_dtype t, tr_activation f, void *h, const void *gate,
                        const void *up, tr_rows rows, int64_t C);
    /* dgate and dup may alias dh, gate or up (each element is read before it is written). */
    void (*glu_backward)(tr_stream *s, tr_dtype t, tr_activation f, void *dgate, void *dup,
                         const void *dh, const void *gate, const void *up, tr_rows rows, int64_t C);
    /* y += x, rounded once. x_t is t or F32. */
    void (*add)(tr_stream *s, tr_dtype t, void *y, tr_dtype x_t, const void *x, int64_t n);
    void (*cast)(tr_stream *s, tr_dtype to_t, void *to, tr_dtype from_t, const void *from,
                 int64_t n); /* to and from do not overlap */

    /* --- embedding and loss ------------------------------------------------------------------ */
    /* The table holds tokens [first, first+V): rows of y are theirs, or zeros for other tokens. */
    void (*embedding_forward)(tr_stream *s, tr_dtype t, void *y /* [N,H] */,
                              const int32_t *token /* [N] */, const void *table /* [V,H] */,
                              int64_t first, int64_t V, int64_t N, int64_t H);
    /* +=; tokens that the table has not are passed over. The rows of a token are added in row
     * order, or in sums of 128, in that order, after its first 128: the same bits in every run,
     * whatever the other tokens are. */
    void (*embedding_backward)(tr_stream *s, tr_dtype t, float *dtable, const int32_t *token,
                               const void *dy, int64_t first, int64_t V, int64_t N, int64_t H);
    /* loss[n] = lse(logits[n]) - logits[n,label[n]] (0 where label < 0); *loss_sum += sum in fp64.
     * dlogits (nullable) = scale * (softmax - onehot), zero rows where label < 0; type t; it may be
     * logits itself when t is F32, or start at the same address when BF16 (row n then occupies the
     * first half of logits' row n: dlogits_ld is in its own elements). V >= 1. */
    void (*cross_entropy)(tr_stream *s, tr_dtype t, const float *logits /* [N, ld] */, int64_t ld,
                          const int32_t *label /* [N] */, float *loss /* [N], nullable */,
                          double *loss_sum, void *dlogits, int64_t dlogits_ld, float scale,
                          int64_t N, int64_t V);
    /* The same where P ranks hold parts of the vocabulary, this one tokens [first, first+V), V >= 0
     * (Shoeybi et al. 2019, "Megatron-LM"). First each rank says of its logits part[n] = {max,
     * sum exp(x - max), the label's logit}; {-inf, 0, 0} for what it has not, 0 for a label that is
     * elsewhere, nothing for rows without a label. */
    void (*cross_entropy_part)(tr_stream *s, const float *logits /* [N, ld] */, int64_t ld,
                               const int32_t *label /* [N] */, int64_t first,
                               double *part /* [N,3] */, int64_t N, int64_t V);
    /* Then from all parts, of the whole vocabulary the loss (loss and loss_sum nullable), and of
     * this rank's columns the gradient, which lies as cross_entropy's may. */
    void (*cross_entropy_whole)(tr_stream *s, tr_dtype t, const double *parts /* [P,N,3] */,
                                int64_t P, const float *logits, int64_t ld, const int32_t *label,
                                int64_t first, float *loss, double *loss_sum, void *dlogits,
                                int64_t dlogits_ld, float scale, int64_t N, int64_t V);

    /* --- mixture of experts ------------------------------------------------------------------- */
    /* Per token: prob = softmax(logits) over all experts, or sigmoid(logits); lse of the logits;
     * the k largest of its groups (ties: lowest expert), and their weights, from prob. Tokens with
     * valid[n] == 0 get index -1 and weight 0. valid nullable. */
    void (*router_forward)(tr_stream *s, const tr_routing *how, const float *logits /* [N,E] */,
                           const uint8_t *valid, float *prob /* [N,E] */, float *lse /* [N] */,
                           int32_t *index /* [N,k] */, float *weight /* [N,k] */, int64_t N);
    /* Sums over the valid tokens of each of G groups, written as doubles: stats[g] = {tokens, sum
     * lse^2, count of choices per expert [E], sum of share per expert [E]}; share is prob, of
     * sigmoids divided by the token's sum of them (DeepSeek-V3 2024, eq. 19). A group is `rows` >=
     * 1 consecutive rows; row n here is row first + n of them all, so its group is (first+n)/rows.
     */
    void (*router_stats)(tr_stream *s, const tr_routing *how, const float *prob, const float *lse,
                         const int32_t *index, const uint8_t *valid, double *stats /* [G, 2+2E] */,
                         int64_t first, int64_t rows, int64_t N, int64_t G);
    /* dlogits = through softmax or sigmoid of: dweight (gradient of the k weights, through the
     * renormalisation), plus aux: share[n,e] has gradient prob_grad[g,e], plus z: lse[n] has
     * gradient z_grad[g]*lse[n]. g = (first+n)/rows as in router_stats. Invalid tokens get zeros.
     * dweight, prob_grad and z_grad nullable; logits are read for z of sigmoids alone. */
    void (*router_backward)(tr_stream *s, const tr_routing *how, float *dlogits /* [N,E] */,
                            const float *dweight, const float *logits /* [N,E] */,
                            const float *prob, const float *lse, const int32_t *index,
                            const float *weight, const uint8_t *valid,
                            const float *prob_grad /* [G,E] */, const float *z_grad /* [G] */,
                            int64_t first, int64_t rows, int64_t N);
    /* taken[n,j] = index[n,j] for pairs that find a place, else -1: each expert takes at most
     * `capacity` pairs of each sequence of S rows; by position (the lowest rows) or by score (the
     * highest weight-before-renormalisation score[n,j], ties: the lowest row). */
    void (*router_capacity)(tr_stream *s, int32_t *taken /* [B*S,k] */,
                            const int32_t *index /* [B*S,k] */, const float *score /* [B*S,k] */,
                            int64_t B, int64_t S, int64_t E, int64_t k, int64_t capacity,
                            bool by_score);
    /* Sorts pairs n*k + j by place, then by row. The place of a pair is that of its expert
     * index[n,j], as the table says (NULL: the expert itself, then P = E), 0 to P-1; pairs whose
     * expert or place is -1 stay out, and of a row's pairs with one place all but the first.
     * offsets[P+1], row_of[n,k] (where the pair is sorted to, -1: out), pair_of[R] (inverse). */
    void (*moe_sort)(tr_stream *s, int64_t *offsets, int32_t *row_of, int32_t *pair_of,
                     const int32_t *index, const int32_t *place /* [E], nullable */, int64_t N,
                     int64_t P, int64_t k);
    /* The types of y (dy) and x are one, or F32 and BF16 either way. Rows without weights that keep
     * their type are copied bit by bit.
     * y[r,:] = (weight ? weight[from[r]] : 1) * x[from[r] / divisor, :] */
    void (*gather_rows)(tr_stream *s, tr_dtype y_t, void *y, tr_dtype x_t, const void *x,
                        const int32_t *from /* [R] */, int64_t divisor, const float *weight,
                        tr_rows rows, int64_t H);
    /* y[n,:] = beta*y[n,:] + sum_j (weight ? weight[n,j] : 1) x[row_of[n,j],:] over row_of >= 0 */
    void (*combine_rows)(tr_stream *s, tr_dtype y_t, void *y /* [N,H] */, tr_dtype x_t,
                         const void *x /* [R,H] */, const int32_t *row_of /* [N,k] */,
                         const float *weight /* [N,k] */, float beta, int64_t N, int64_t k,
                         int64_t H);
    /* dweight[n,j] = <dy[n,:], x[row_of[n,j],:]>, 0 where row_of < 0 */
    void (*combine_rows_weight)(tr_stream *s, float *dweight, tr_dtype dy_t, const void *dy,
                                tr_dtype x_t, const void *x, const int32_t *row_of, int64_t N,
                                int64_t k, int64_t H);

    /* --- attention -----------------------------------------------------------------------------
     */
    /* Work memory comes from the maker's own pool (grown on first use, kept). */
    void (*attention_forward)(tr_stream *s, const tr_attention *a);
    void (*attention_backward)(tr_stream *s, const tr_attention *a);

    /* --- optimizer -----------------------------------------------------------------------------
     */
    /* Decoupled AdamW (Loshchilov, Hutter 2019), all fp32 [n]: p -= lr (m^/(sqrt v^ + eps) + wd p).
     * compute (nullable) receives p as type compute_t. */
    void (*adamw)(tr_stream *s, const tr_adamw *h, float *p, void *compute, tr_dtype compute_t,
                  float *m, float *v, const float *g, int64_t n);
    /* *sum += sum of squares in fp64, fixed order. Non-finite inputs make it non-finite. */
    void (*sum_squares)(tr_stream *s, double *sum, const float *x, int64_t n);
};

/* Fills every row. */
void tr_kernels_ref(tr_kernels *k);

#ifdef __cplusplus
}
#endif
