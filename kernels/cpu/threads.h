/* threads.h - how many rows a call has, and sharing them between threads.
 * Floor: kernels, internal. */
#pragma once
#include "kernels/kernels.h"

/* Work on items begin..end-1 of a call; `args` is the call's own struct. */
typedef void tr_range_fn(const void *args, int64_t begin, int64_t end);

/* Local. Runs fn over 0..n-1 in contiguous parts of equal size, one a thread. A call that moves few
 * bytes (reads and writes of all n items) is run by the caller alone, without a parallel region. */
void tr_for_range(tr_range_fn *fn, const void *args, int64_t n, int64_t traffic_bytes);

static inline int64_t tr_min_i64(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static inline int64_t tr_rows_used(tr_rows rows) {
    return rows.used ? tr_min_i64(*rows.used, rows.max) : rows.max;
}
/* tr_dtype_bytes, signed as counts are. */
static inline int64_t tr_element_bytes(tr_dtype t) {
    return (int64_t)tr_dtype_bytes(t);
}
