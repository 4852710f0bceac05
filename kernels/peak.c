/* peak.c - the measurement of peak.h over the loops of cpu/peak*.c, and by products on devices that
 * are not the CPU. Floor: kernels. */
#include "kernels/peak.h"

#include "kernels/cpu/peak_loops.h"
#include "kernels/makers.h"

#include <omp.h>

/* The loop of the fastest instructions for t. */
static tr_peak_loop *loop_for(tr_dtype t) {
    tr_cpu_level level = tr_cpu_fastest_level();
    if (level >= TR_CPU_AVX512_BF16 && t == TR_BF16) return tr_peak_avx512bf16;
    if (level >= TR_CPU_AVX512) return tr_peak_avx512;
    return level >= TR_CPU_AVX2 ? tr_peak_avx2 : tr_peak_portable;
}

const char *tr_peak_instruction(tr_dtype t) {
    return loop_for(t) == tr_peak_avx512bf16 ? "bf16 dot product" : "fp32 multiply-add";
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

/* Seconds of a product of that side; its matrices are given. */
static double product_seconds(tr_device *device, tr_dtype t, int64_t side, void *const matrix[3]) {
    tr_gemm g = {.M = side,
                 .N = side,
                 .K = side,
                 .A = matrix[0],
                 .B = matrix[1],
                 .C = matrix[2],
                 .lda = side,
                 .ldb = side,
                 .ldc = side,
                 .trans_b = true,
                 .ab = t,
                 .c = t};
    device->stream_wait(device->stream);
    double begin = omp_get_wtime();
    device->kernels->gemm(device->stream, &g);
    device->stream_wait(device->stream);
    return omp_get_wtime() - begin;
}

/* Seconds of the second product of that side: the first loads the kernel. 0: no memory for it. */
static double seconds_at(tr_device *device, tr_dtype t, int64_t side) {
    size_t bytes = (size_t)(side * side) * tr_dtype_bytes(t);
    const tr_allocator *a = &device->allocator;
    void *matrix[3];
    double seconds = 0;
    for (int i = 0; i < 3; i++) matrix[i] = a->alloc(a->self, bytes);
    if (matrix[0] && matrix[1] && matrix[2]) {
        for (int i = 0; i < 3; i++) device->zero(device->stream, matrix[i], bytes);
        product_seconds(device, t, side, matrix);
        seconds = product_seconds(device, t, side, matrix);
    }
    for (int i = 0; i < 3; i++) tr_allocator_give(a, matrix[i], bytes);
    return seconds;
}

double tr_device_peak(tr_device *device, tr_dtype t, int threads, double seconds) {
    enum { LEAST = 32, MOST = 8192 };
    if (device->host_memory) return tr_peak_flops(t, threads, seconds);
    double start = omp_get_wtime(), best = 0;
    for (int64_t side = LEAST; side <= MOST; side *= 2) {
        double once = seconds_at(device, t, side), side_real = (double)side;
        if (once == 0) break;
        double rate = 2 * side_real * side_real * side_real / once;
        if (rate > best) best = rate;
        if (omp_get_wtime() + 16 * once > start + seconds) break; /* the next takes 2 x 8 times */
    }
    return best;
}
