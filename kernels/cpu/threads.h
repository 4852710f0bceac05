/* threads.h - sharing the rows of a call between threads. Floor: kernels, internal. */
#pragma once
#include <stdint.h>

/* Work on items begin..end-1 of a call; `args` is the call's own struct. */
typedef void tr_range_fn(const void *args, int64_t begin, int64_t end);

/* Local. Runs fn over 0..n-1 in contiguous parts of equal size, one a thread. A call that moves few
 * bytes (reads and writes of all n items) is run by the caller alone, without a parallel region. */
void tr_for_range(tr_range_fn *fn, const void *args, int64_t n, int64_t traffic_bytes);
