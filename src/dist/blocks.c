/* blocks.c - block arithmetic, see blocks.h. Floor: dist. */
#include "dist/blocks.h"

tr_range tr_block_of(int64_t n, int64_t parts, int64_t index) {
    int64_t each = n / parts, larger = n % parts;
    return (tr_range){.first = index * each + (index < larger ? index : larger),
                      .count = each + (index < larger)};
}

int64_t tr_block_owner(int64_t n, int64_t parts, int64_t item) {
    int64_t each = n / parts, larger = n % parts;
    int64_t in_larger = larger * (each + 1); /* items held by the larger parts */
    return item < in_larger ? item / (each + 1) : larger + (item - in_larger) / each;
}

int64_t tr_box_elems(const tr_box *box) {
    int64_t elems = 1;
    for (int d = 0; d < box->ndim; d++) elems *= box->extent[d];
    return elems;
}

int64_t tr_box_place(const tr_box *box, const int64_t *shape, int64_t i) {
    int64_t place = 0, row = 1; /* elements below one index of dimension d */
    for (int d = box->ndim - 1; d >= 0; d--) {
        place += (box->offset[d] + i % box->extent[d]) * row;
        i /= box->extent[d];
        row *= shape[d];
    }
    return place;
}

/* Greedy: at every position take the longest run of whole rows of the outermost dimension d that
 * the position is aligned to and the count can fill. The positions climb to outer dimensions (one
 * box each), run along one of them, and descend again: 2*ndim - 1 boxes at most. */
int tr_box_cut(const tr_box *box, int64_t first, int64_t count, tr_box out[2 * TR_MAX_DIM - 1]) {
    int64_t row[TR_MAX_DIM] = {1, 1, 1, 1}; /* elements below one index of dimension d */
    int64_t below = 1;
    for (int d = box->ndim - 1; d >= 0; d--) {
        row[d] = below;
        below *= box->extent[d];
    }
    int boxes = 0;
    while (count > 0) {
        int d = 0;
        while (first % row[d] != 0 || count < row[d]) d++; /* row[ndim-1] is 1: ends */
        tr_box *cut = &out[boxes++];
        *cut = *box;
        for (int outer = 0; outer <= d; outer++) {
            cut->offset[outer] += first / row[outer] % box->extent[outer];
            cut->extent[outer] = 1;
        }
        int64_t to_edge = box->offset[d] + box->extent[d] - cut->offset[d];
        int64_t rows = count / row[d];
        cut->extent[d] = rows < to_edge ? rows : to_edge;
        first += cut->extent[d] * row[d];
        count -= cut->extent[d] * row[d];
    }
    return boxes;
}
