/* sequence.c - arithmetic of context ranks, see sequence.h. Floor: model. */
#include "model/sequence.h"

tr_sequence tr_sequence_of(const tr_grid_shape *shape, int64_t S) {
    int size = shape->context, heads = shape->context_heads > 1 ? shape->context_heads : 1;
    int rings = size / heads, chunks = rings > 1 ? 2 : 1;
    return (tr_sequence){.size = size,
                         .heads = heads,
                         .rings = rings,
                         .chunks = chunks,
                         .S = S,
                         .S_ring = S / rings,
                         .S_loc = S / size,
                         .chunk = S / (rings * chunks)};
}

int64_t tr_sequence_chunk(const tr_sequence *x, int ring, int half) {
    return half == 0 ? ring : 2 * x->rings - 1 - ring;
}

int64_t tr_sequence_ring_position(const tr_sequence *x, int ring, int64_t j) {
    return tr_sequence_chunk(x, ring, (int)(j / x->chunk)) * x->chunk + j % x->chunk;
}

/* Row i of a rank among the positions of its ring place. */
static int64_t place(const tr_sequence *x, int rank, int64_t i) {
    return rank % x->heads * x->S_loc + i;
}

int64_t tr_sequence_position(const tr_sequence *x, int rank, int64_t i) {
    return tr_sequence_ring_position(x, rank / x->heads, place(x, rank, i));
}

int64_t tr_sequence_run(const tr_sequence *x, int rank, int64_t i) {
    int64_t chunk = x->chunk - place(x, rank, i) % x->chunk, rows = x->S_loc - i;
    return chunk < rows ? chunk : rows;
}

bool tr_sequence_sees(const tr_sequence *x, const int64_t *first_key, int64_t window,
                      int64_t q_chunk, int64_t k_chunk) {
    int64_t q = q_chunk * x->chunk, last = (k_chunk + 1) * x->chunk - 1; /* first query, last key */
    if (k_chunk > q_chunk) return false;
    if (window > 0 && last <= q - window) return false;
    return !first_key || last >= first_key[q_chunk];
}
