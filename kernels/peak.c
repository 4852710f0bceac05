/* peak.c - the measurement of peak.h over the loops of cpu/peak*.c. Floor: kernels. */
#include "kernels/peak.h"

#include "kernels/cpu/peak_loops.h"
#include "kernels/makers.h"

#include <omp.h>

/* The loop of the best instructions for t. */
static tr_peak_loop *loop_for(tr_dtype t) {
    tr_cpu_level level = tr_cpu_best_level();
    if (level >= TR_CPU_AVX512_BF16 && t == TR_BF16) return tr_peak_avx512bf16;
    if (level >= TR_CPU_AVX512) return tr_peak_avx512;
    return level >= TR_CPU_AVX2 ? tr_peak_avx2 : tr_peak_portable;
}

/* The calling thread's fastest run of about a millisecond, in operations a second. */
static double fastest_run(tr_peak_loop *loop, double seconds) {
    const double run_seconds = 1e-3;
    double start = omp_get_wtime(), now = start, best = 0;
    int64_t rounds = 1000;
    do {
        double begin = now, operations = loop(rounds);
        now = omp_get_wtime();
        double rate = operations / (now - begin + 1e-9);
        if (rate > best) best = rate;
        if (now - begin < run_seconds) rounds *= 2;
    } while (now + 2 * run_seconds < start + seconds);
    return best;
}

double tr_peak_flops(tr_dtype t, int threads, double seconds) {
    int most = omp_get_num_procs();
    tr_peak_loop *loop = loop_for(t);
    double sum = 0;
    if (threads > most) threads = most;
    if (threads < 1) threads = 1;
#pragma omp parallel num_threads(threads) reduction(+ : sum)
    sum += fastest_run(loop, seconds);
    return sum;
}
