/* Property: the CPU device is the level that was asked for, by argument or environment, or says why
 * not; every thread flushes denormals; the measured peak is one that a product does not beat. */
#include "harness.h"

#include "base/status.h"
#include "kernels/makers.h"
#include "kernels/peak.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void levels_by_name(void **state) {
    (void)state;
    tr_device *d = tr_device_cpu("ref");
    assert_string_equal(d->name, "cpu ref");
    tr_device_destroy(d);
    setenv("TRIREME_CPU_LEVEL", "portable", 1);
    d = tr_device_cpu(NULL);
    assert_string_equal(d->name, "cpu portable");
    tr_device_destroy(d);
    d = tr_device_cpu("ref"); /* an argument goes before the environment */
    assert_string_equal(d->name, "cpu ref");
    tr_device_destroy(d);
    setenv("TRIREME_CPU_LEVEL", "sse9", 1);
    assert_null(tr_device_cpu(NULL));
    assert_non_null(strstr(tr_error_message(), "sse9"));
    assert_non_null(strstr(tr_error_message(), "portable"));
    assert_non_null(strstr(tr_error_message(), "TRIREME_CPU_LEVEL"));
    setenv("TRIREME_CPU_LEVEL", "", 1);
    d = tr_device_cpu(NULL);
    assert_non_null(d);
    printf("  best here: %s\n", d->name);
    tr_device_destroy(d);
    unsetenv("TRIREME_CPU_LEVEL");
    tr_device_destroy(NULL);
}

static void every_level_fills_the_table(void **state) {
    (void)state;
    static const char *const names[] = {"ref", "portable", "avx2", "avx512", "avx512bf16"};
    for (int i = 0; i < 5; i++) {
        tr_device *d = tr_device_cpu(names[i]);
        if (!d) continue;
        const char *row = (const char *)d->kernels;
        for (size_t at = 0; at < sizeof(tr_kernels); at += sizeof(void *)) {
            void *function;
            memcpy(&function, row + at, sizeof function);
            assert_non_null(function);
        }
        tr_device_destroy(d);
    }
}

static void threads_flush_denormals(void **state) {
    (void)state;
    tr_device *d = tr_device_cpu("portable");
    int threads = 0, flushed = 0;
#pragma omp parallel reduction(+ : threads, flushed)
    {
        volatile float small = 1e-30f;
        threads++;
        flushed += small * 1e-10f == 0;
    }
    printf("  %d of %d threads flush\n", flushed, threads);
    assert_int_equal(flushed, threads);
    tr_device_destroy(d);
}

static double product_rate(tr_dtype t) {
    enum { SIDE = 384 };
    tr_device *d = tr_device_cpu(NULL);
    size_t bytes = SIDE * SIDE * sizeof(float);
    char *memory = d->allocator.alloc(d->allocator.self, 3 * bytes);
    assert_non_null(memory);
    d->zero(NULL, memory, 3 * bytes);
    tr_gemm g = {SIDE,   SIDE, SIDE, memory, memory + bytes, memory + 2 * bytes,
                 SIDE,   SIDE, SIDE, false,  true,           t,
                 TR_F32, 0};
    double best = 0;
    for (int i = 0; i < 20; i++) {
        double start = omp_get_wtime();
        d->kernels->gemm(NULL, &g);
        double rate = 2.0 * SIDE * SIDE * SIDE / (omp_get_wtime() - start);
        if (rate > best) best = rate;
    }
    d->allocator.free(d->allocator.self, memory, 3 * bytes);
    tr_device_destroy(d);
    return best;
}

static void peak_is_plausible(void **state) {
    (void)state;
    int threads = omp_get_max_threads();
    for (int i = 0; i < 2; i++) {
        tr_dtype t = i ? TR_BF16 : TR_F32;
        double start = omp_get_wtime(), peak = tr_peak_flops(t, threads, 0.05);
        double seconds = omp_get_wtime() - start, rate = product_rate(t);
        printf("  %s, %d threads: peak %.1f GFLOP/s in %.3f s; a product of 384 reaches %.1f\n",
               i ? "bf16" : "f32", threads, peak * 1e-9, seconds, rate * 1e-9);
        assert_true(peak > 1e8 && peak < 1e12 * threads);
    }
    assert_true(tr_peak_flops(TR_F32, 1 << 20, 0.01) <= 1.5e12 * omp_get_num_procs());
    assert_true(tr_peak_flops(TR_F32, 0, 0) > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(levels_by_name),
        cmocka_unit_test(every_level_fills_the_table),
        cmocka_unit_test(threads_flush_denormals),
        cmocka_unit_test(peak_is_plausible),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
