/* exchange.h - rows on their way to the ranks of their experts, and back. Floor: model. Legend in
 * pass.h.
 *
 * A row makes stops: its source, where it was routed; at last the rank that has its experts. At
 * each stop the rows at hand are sorted by where they go next (kernel moe_sort), a row once to each
 * place however many of its experts lie that way; on the way back its copies are added up where
 * they were made. A hop carries rows from one stop to the next:
 *     alone          source = experts, no hop
 *     flat           source -> experts
 *     hierarchical   source -> sender for a node -> receiver on that node -> experts
 * where one rank of each node sends, and one receives, for each other node: one message for a pair
 * of nodes, and a token once to a node (DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.2). The first
 * and the last hop stay inside the node. With one node, or one rank on each, the way is flat.
 *
 * Rows travel in the wire's type, sums included; routing weights as fp32. */
#pragma once
#include "model/pass.h"

/* Collective on the expert group. Of `num_experts` experts over it; `wire` is the compute type or
 * BF16. */
tr_exchange *tr_exchange_create(const tr_grid *grid, tr_device *device, int64_t num_experts,
                                tr_exchange_kind kind, tr_dtype wire);
void tr_exchange_destroy(tr_exchange *exchange); /* Collective likewise. NULL-safe. */

/* Local. Type of rows on the wire, and whether there is a hop. */
tr_dtype tr_exchange_wire(const tr_exchange *exchange);
bool tr_exchange_crosses(const tr_exchange *exchange);
bool tr_exchange_is_hierarchical(const tr_exchange *exchange);

/* Local. Host memory of a record's stops. */
void tr_stops_init(const tr_env *c, tr_saved *saved);
void tr_stops_fini(tr_saved *saved);
/* Local. Rows of this rank's experts when all experts get equally many, and bytes that a
 * micro-batch keeps of the stops then. */
int64_t tr_stops_balanced(const tr_env *c);
int64_t tr_stops_bytes(const tr_env *c);
/* Local. The last stop: rows at hand, sorted by this rank's experts. */
static inline const tr_stop *tr_stop_of_experts(const tr_saved *saved) {
    return &saved->stop[saved->stops - 1];
}

/* Collective on the expert group. Makes the stops of `saved` from each row's experts: index [N_loc,
 * k] (-1: none), weight [N_loc,k], which stays. */
void tr_exchange_plan(const tr_pass *pass, tr_saved *saved, const int32_t *index,
                      const float *weight);

/* Rows that are under way. */
typedef struct {
    const void *rows; /* at the hop that is under way */
    tr_dtype t;
    int64_t width;
    tr_request *request;
} tr_journey;

/* Collective on the expert group. x [N_loc,H] from the source; the result is at hand at the last
 * stop, [rows,H], of type t of the journey. Memory is scratch (x itself without a hop). */
tr_journey tr_go_begin(const tr_env *c, const tr_saved *saved, const void *x);
const void *tr_go_end(const tr_env *c, const tr_saved *saved, tr_journey *journey);
/* Collective on the expert group. Back: rows [rows,width] of the last stop, of type t, F32 or BF16,
 * in memory that stays until the end; there y[N_loc,width] = beta*y + the sum of each row's copies.
 * There must be a hop. */
tr_journey tr_return_begin(const tr_env *c, const tr_saved *saved, const void *rows, int64_t width,
                           tr_dtype t);
void tr_return_end(const tr_env *c, const tr_saved *saved, tr_journey *journey, tr_dtype y_t,
                   void *y, float beta);
