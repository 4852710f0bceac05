/* blocks.h - all block arithmetic: who owns which part of a range, and which boxes a run of a
 * row-major tensor covers. Floor: dist. Everything here is local and pure. */
#pragma once
#include <stdint.h>

enum { TR_MAX_DIM = 4 };

typedef struct {
    int64_t first, count;
} tr_range;

/* Part `index` of n items cut into `parts`: sizes differ by at most one, larger parts first
 * (10 over 3 -> 4, 3, 3). Parts may be empty. */
tr_range tr_block_of(int64_t n, int64_t parts, int64_t index);

/* Which part holds `item`. */
int64_t tr_block_owner(int64_t n, int64_t parts, int64_t item);

static inline int64_t tr_round_up(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}
static inline int64_t tr_ceil_div(int64_t n, int64_t by) {
    return (n + by - 1) / by;
}

/* An axis-aligned part of a tensor: offset[d] <= i < offset[d] + extent[d]. */
typedef struct {
    int ndim;
    int64_t offset[TR_MAX_DIM], extent[TR_MAX_DIM];
} tr_box;

int64_t tr_box_elems(const tr_box *box);

/* Place of element i of the box (flattened row-major) in its tensor of that shape, likewise. */
int64_t tr_box_place(const tr_box *box, const int64_t *shape, int64_t i);

/* The run [first, first + count) of `box` flattened row-major is a disjoint union of at most
 * 2*ndim - 1 boxes, in order. Writes them to out and returns how many. Offsets stay global. */
int tr_box_cut(const tr_box *box, int64_t first, int64_t count, tr_box out[2 * TR_MAX_DIM - 1]);
