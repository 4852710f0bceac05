/* threads.c - sharing the rows of a call between threads. Floor: kernels, internal.
 * A parallel region costs from half a microsecond (threads spin) to some ten (they sleep); one core
 * moves 256 KiB from its caches in about ten. */
#include "kernels/cpu/threads.h"

#include <omp.h>

enum { ALONE_BYTES = 256 * 1024 };

void tr_for_range(tr_range_fn *fn, const void *args, int64_t n, int64_t traffic_bytes) {
    if (n <= 0) return;
    if (n == 1 || traffic_bytes < ALONE_BYTES || omp_get_max_threads() == 1 || omp_in_parallel()) {
        fn(args, 0, n);
        return;
    }
#pragma omp parallel
    {
        int64_t i = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t share = n / threads, rest = n % threads;
        int64_t begin = i * share + (i < rest ? i : rest);
        int64_t end = begin + share + (i < rest);
        if (begin < end) fn(args, begin, end);
    }
}
