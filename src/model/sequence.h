/* sequence.h - which positions of a sequence each context rank holds, and which keys its queries
 * need. Floor: model. Local, pure arithmetic.
 *
 * Of `size` context ranks every `heads` neighbours form a head group and the ranks with equal
 * places in their head groups a ring (Fang, Zhao 2024, "USP"): rank = ring place * heads + head
 * place. A sequence is cut into 2*rings equal chunks, of which ring place i has chunks i and
 * 2*rings-1-i (zig-zag: all have the same causal work); without rings it is one chunk. These
 * positions, S_ring of them in rising order, are what attention of a head group works on; between
 * attentions its members hold equal parts of them, one after the other. So the exchange of rows for
 * heads moves whole blocks, and all heads meet in the order of positions. */
#pragma once
#include "dist/grid.h"

typedef struct {
    int size, heads, rings;
    int chunks;     /* of a ring place: 2, or 1 without rings */
    int64_t S;      /* the sequence */
    int64_t S_ring; /* positions of a ring place */
    int64_t S_loc;  /* positions of a rank */
    int64_t chunk;  /* positions of a chunk */
} tr_sequence;

/* 2*rings divides S where there are several ring places, and size does. */
tr_sequence tr_sequence_of(const tr_grid_shape *shape, int64_t S);

/* Which of the 2*rings chunks is number `half` of a ring place. */
int64_t tr_sequence_chunk(const tr_sequence *cut, int ring, int half);
/* Global position of position j of the S_ring of a ring place. */
int64_t tr_sequence_ring_position(const tr_sequence *cut, int ring, int64_t j);
/* Global position of row i of the S_loc of a rank. */
int64_t tr_sequence_position(const tr_sequence *cut, int rank, int64_t i);
/* How many rows of a rank from row i on, it included, have consecutive positions. */
int64_t tr_sequence_run(const tr_sequence *cut, int rank, int64_t i);

/* Whether some query of a chunk sees some key of another or the same one: causal, in a window
 * (0: none), and from first_key[q_chunk] on, where documents (nullable) let none of its queries see
 * an earlier key. */
bool tr_sequence_sees(const tr_sequence *cut, const int64_t *first_key, int64_t window,
                      int64_t q_chunk, int64_t k_chunk);
