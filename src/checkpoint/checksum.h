/* checksum.h - a checksum of a tensor that any partition can compute part by part. Floor:
 * checkpoint.
 *
 * sum over elements i of mix((i + 1) * K ^ w_i) modulo 2^64, w_i the 32 bits of element i of the
 * flattened tensor, mix = tr_mix64, K = 0x9e3779b97f4a7c15. Addition commutes, so parts add up in
 * any order; mix is a bijection, so one changed word always changes the sum, and any other damage
 * escapes with probability 2^-64. Everything here is local. */
#pragma once
#include "checkpoint/store.h"

/* The part of elements [first, first + n), whose 32-bit words lie at `words` (any alignment). Large
 * parts use the OpenMP threads. */
uint64_t tr_checksum(int64_t first, const void *words, int64_t n);

/* What a set of runs covers: each run adds h(first) - h(first + n), so the sum over disjoint runs
 * that fill [0, total) is tr_checksum_cover(0, total), and that of any other set is not (but for a
 * chance of 2^-64). */
uint64_t tr_checksum_cover(int64_t first, int64_t n);

/* Adds the checksum of the run [first, first + n) of `box`, a part of a tensor of `info`'s shape,
 * to *sum, and what it covers to *cover. data[n] holds the run. */
void tr_checksum_run(const tr_tensor_info *info, const tr_box *box, int64_t first, int64_t n,
                     const float *data, uint64_t *sum, uint64_t *cover);

/* Of everything in a state: its numbers and the text of its config. */
uint64_t tr_checksum_state(const tr_progress_state *state);
