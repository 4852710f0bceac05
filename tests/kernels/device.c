/* Property: the CPU device is the level that was asked for, by argument or environment, or says why
 * not; every thread flushes denormals; the measured peak is one that a product does not beat. A
 * module's device fills the table and moves bytes; a module that is not there, or cut off, is
 * named. */
#include "harness.h"

#include "base/status.h"
#include "kernels/makers.h"
#include "kernels/peak.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    printf("  fastest here: %s\n", d->name);
    tr_device_destroy(d);
    unsetenv("TRIREME_CPU_LEVEL");
    tr_device_destroy(NULL);
}

static void check_table(const tr_device *d) {
    const char *row = (const char *)d->kernels;
    for (size_t at = 0; at < sizeof(tr_kernels); at += sizeof(void *)) {
        void *function;
        memcpy(&function, row + at, sizeof function);
        assert_non_null(function);
    }
}

static void every_level_fills_the_table(void **state) {
    (void)state;
    static const char *const names[] = {"ref", "portable", "avx2", "avx512", "avx512bf16"};
    for (int i = 0; i < 5; i++) {
        tr_device *d = tr_device_cpu(names[i]);
        if (!d) continue;
        check_table(d);
        tr_device_destroy(d);
    }
}

/* Bytes go to a module's device and back in the order of its stream; what it checks is counted. */
static void use_module(tr_device *d) {
    enum { BYTES = 4096 };
    unsigned char *up = d->staging.alloc(d->staging.self, BYTES), down[BYTES];
    char *memory = tr_allocator_take(&d->allocator, BYTES, "a test");
    tr_stream *other = d->stream_create(d);
    tr_event *e = d->event_create(d);
    assert_true(d->event_done(e));
    for (int i = 0; i < BYTES; i++) up[i] = (unsigned char)(i * 7);
    d->copy(d->stream, memory, up, BYTES, TR_TO_DEVICE);
    d->zero(d->stream, memory, 16);
    d->event_record(e, d->stream);
    d->stream_wait_event(other, e);
    d->copy(other, memory + 32, memory, 32, TR_ON_DEVICE);
    d->copy(other, down, memory, BYTES, TR_TO_HOST);
    d->stream_wait(other);
    assert_true(d->event_done(e));
    for (int i = 0; i < BYTES; i++) {
        int from = i >= 32 && i < 64 ? i - 32 : i;
        assert_int_equal(down[i], from < 16 ? 0 : up[from]);
    }
    assert_false(d->host_memory);
    assert_true(d->findings && d->findings(d) == 0);
    d->event_destroy(e);
    d->stream_destroy(other);
    tr_allocator_give(&d->allocator, memory, BYTES);
    d->staging.free(d->staging.self, up, BYTES);
}

static void modules_bring_devices(void **state) {
    (void)state;
    static const char *const names[] = {"simt", "simt-check"};
    for (int i = 0; i < 2; i++) {
        tr_device *d = tr_device_open(&(tr_device_wish){.name = names[i], .local_rank = 3});
        if (!d) {
            printf("  %-10s skipped: %s\n", names[i], tr_error_message());
            continue;
        }
        printf("  %s\n", d->name);
        check_table(d);
        use_module(d);
        tr_device_destroy(d);
    }
}

static void says_which_module_is_missing(void **state) {
    (void)state;
    char before[4096];
    const char *directory = getenv("TRIREME_MODULE_DIR");
    snprintf(before, sizeof before, "%s", directory ? directory : "");
    setenv("TRIREME_MODULE_DIR", "/nowhere", 1);
    assert_null(tr_device_open(&(tr_device_wish){.name = "simt"}));
    assert_int_equal(tr_error_status(), TR_ERR_USAGE);
    assert_non_null(strstr(tr_error_message(), "/nowhere/libtrireme_simt.so"));
    assert_non_null(strstr(tr_error_message(), "cmake --preset release"));
    assert_null(tr_device_open(&(tr_device_wish){.name = "cuda"}));
    assert_non_null(strstr(tr_error_message(), "cmake --preset cuda"));
    setenv("TRIREME_MODULE_DIR", before, 1);
    assert_null(tr_device_open(&(tr_device_wish){.name = "tpu"}));
    assert_non_null(strstr(tr_error_message(), "use cpu, cuda, simt or simt-check"));
}

/* This program's file stands in for a module, at every eighth of its length. */
static void says_which_module_is_cut_off(void **state) {
    (void)state;
    char before[4096], folder[] = "/tmp/trireme-module-XXXXXX", path[64];
    const char *directory = getenv("TRIREME_MODULE_DIR");
    snprintf(before, sizeof before, "%s", directory ? directory : "");
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/libtrireme_simt.so", folder);
    setenv("TRIREME_MODULE_DIR", folder, 1);
    FILE *self = fopen("/proc/self/exe", "rb"), *copy = fopen(path, "wb");
    assert_non_null(self);
    assert_non_null(copy);
    long bytes = 0;
    for (int c; (c = fgetc(self)) != EOF; bytes++) fputc(c, copy);
    fclose(self);
    assert_int_equal(fclose(copy), 0);
    for (int eighths = 7; eighths > 0; eighths--) {
        assert_int_equal(truncate(path, bytes * eighths / 8), 0);
        assert_null(tr_device_open(&(tr_device_wish){.name = "simt"}));
        assert_int_equal(tr_error_status(), TR_ERR_USAGE);
        assert_non_null(strstr(tr_error_message(), path));
        assert_non_null(strstr(tr_error_message(), "cut off"));
    }
    unlink(path);
    rmdir(folder);
    setenv("TRIREME_MODULE_DIR", before, 1);
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
    /* bf16 takes no instruction that is slower than fp32's; a busy machine has more tries */
    bool slower = true;
    for (int i = 0; i < 20 && slower; i++)
        slower = tr_peak_flops(TR_BF16, 1, 0.02) < 0.8 * tr_peak_flops(TR_F32, 1, 0.02);
    assert_false(slower);
    assert_true(tr_peak_flops(TR_F32, 1 << 20, 0.01) <= 1.5e12 * omp_get_num_procs());
    assert_true(tr_peak_flops(TR_F32, 0, 0) > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(levels_by_name),
        cmocka_unit_test(every_level_fills_the_table),
        cmocka_unit_test(modules_bring_devices),
        cmocka_unit_test(says_which_module_is_missing),
        cmocka_unit_test(says_which_module_is_cut_off),
        cmocka_unit_test(threads_flush_denormals),
        cmocka_unit_test(peak_is_plausible),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
