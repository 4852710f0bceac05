/* Property: the device layer asks the CUDA runtime for the right things in the right order on the
 * right stream, tells each of its failures by name, and gives back what it took. A runtime that
 * only writes down stands in for CUDA's. */
#include "fake_runtime.h"

#include "kernels/cuda/stream.h"
#include "kernels/makers.h"
#include "kernels/module.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ends.h"

/* Kernels have tests of their own. */
void tr_cuda_linear(tr_kernels *k) {
    (void)k;
}
void tr_cuda_layers(tr_kernels *k) {
    (void)k;
}
void tr_cuda_loss(tr_kernels *k) {
    (void)k;
}
void tr_cuda_moe(tr_kernels *k) {
    (void)k;
}
void tr_cuda_attention(tr_kernels *k) {
    (void)k;
}
void tr_cuda_optimizer(tr_kernels *k) {
    (void)k;
}

/* What the program's `fatal` was given; it does not return. */
static char fatal_text[1024];
static jmp_buf fatal_exit;

static void fatal(const char *text) {
    snprintf(fatal_text, sizeof fatal_text, "%s", text);
    longjmp(fatal_exit, 1);
}

static char refusal[1024];
static tr_status refusal_status;

static tr_device *open_as(const char *name, int local_rank) {
    tr_device_wish wish = {.name = name, .local_rank = local_rank, .fatal = fatal};
    tr_module_call call = {.layout = tr_module_layout_here,
                           .wish = &wish,
                           .text = refusal,
                           .text_bytes = sizeof refusal};
    refusal[0] = '\0';
    tr_device *device = tr_module_open(&call);
    refusal_status = call.status;
    return device;
}

static tr_device *open_one(void) {
    fake_reset();
    tr_device *d = open_as("cuda", 0);
    assert_non_null(d);
    fake_clear();
    return d;
}

static void close_one(tr_device *d) {
    d->destroy(d);
    assert_int_equal(fake_alive(), 0);
}

/* --- opening -----------------------------------------------------------------------------------
 */

static void opens_and_closes(void **state) {
    (void)state;
    fake_reset();
    tr_device *d = open_as("cuda", 0);
    assert_string_equal(d->name, "cuda Fake GPU");
    assert_string_equal(d->identity, "0000:00:00.0");
    assert_false(d->host_memory);
    assert_ptr_equal(tr_stream_device(d->stream), d);
    assert_null(d->findings);
    assert_string_equal(fake_log(), "cudaGetDeviceCount \n"
                                    "cudaSetDevice 0\n"
                                    "cudaGetDeviceProperties 0\n"
                                    "cudaDeviceGetPCIBusId 0\n"
                                    "cudaStreamCreateWithFlags 1\n"); /* not the legacy one */
    fake_clear();
    close_one(d);
    assert_string_equal(fake_log(), "cudaStreamSynchronize s1\ncudaStreamDestroy s1\n");
}

/* One visible each: device 0. Several visible: by local rank, shared when ranks are more. */
static void chooses_by_local_rank(void **state) {
    (void)state;
    int tried = 0;
    for (int visible = 1; visible <= 8; visible++)
        for (int rank = 0; rank < 17; rank++, tried++) {
            char set[64], identity[32];
            fake_reset();
            fake_devices(visible);
            tr_device *d = open_as("cuda", rank);
            int want = visible == 1 ? 0 : rank % visible;
            snprintf(set, sizeof set, "cudaSetDevice %d\n", want);
            snprintf(identity, sizeof identity, "0000:%02x:00.0", want);
            assert_non_null(strstr(fake_log(), set));
            assert_string_equal(d->identity, identity);
            close_one(d);
        }
    printf("  %d combinations of visible devices and local ranks\n", tried);
}

static void refuses(const char *a, const char *b, tr_status status) {
    assert_null(open_as("cuda", 0));
    printf("  %d: %s\n", (int)refusal_status, refusal);
    assert_int_equal(refusal_status, status);
    assert_non_null(strstr(refusal, a));
    assert_non_null(strstr(refusal, b));
    assert_int_equal(fake_alive(), 0);
}

static void says_what_is_missing(void **state) {
    (void)state;
    fake_reset();
    fake_driver(0);
    refuses("no NVIDIA driver", "run.device cpu", TR_ERR_USAGE);
    fake_reset();
    fake_driver(12040);
    refuses("too old: it serves CUDA 12.4", "CUDA 13.0", TR_ERR_USAGE);
    fake_reset();
    fake_devices(0);
    setenv("CUDA_VISIBLE_DEVICES", "7", 1);
    refuses("no GPU", "CUDA_VISIBLE_DEVICES is '7'", TR_ERR_USAGE);
    unsetenv("CUDA_VISIBLE_DEVICES");
    refuses("no GPU", "not set", TR_ERR_USAGE);
    fake_reset();
    fake_capability(7, 5);
    refuses("Fake GPU has compute capability 7.5", "TRIREME_CUDA_ARCHITECTURES", TR_ERR_USAGE);
    fake_capability(8, 6);
    close_one(open_as("cuda", 0));
}

/* Property: a build without NCCL says so. */
static void refuses_a_fabric(void **state) {
    (void)state;
    tr_device_wish wish = {.name = "cuda", .fabric = true, .fatal = fatal};
    tr_module_call call = {.layout = tr_module_layout_here,
                           .wish = &wish,
                           .text = refusal,
                           .text_bytes = sizeof refusal};
    fake_reset();
    assert_null(tr_module_open(&call));
    assert_non_null(strstr(refusal, "built without NCCL; use run.collectives mpi"));
    assert_int_equal(fake_alive(), 0);
}

static void refuses_other_builds(void **state) {
    (void)state;
    tr_device_wish wish = {.name = "cuda"};
    tr_module_layout smaller = tr_module_layout_here, changed = tr_module_layout_here;
    smaller.kernels_bytes -= sizeof(void *);
    changed.interface++; /* as when a row's arguments change and no size does */
    for (int i = 0; i < 2; i++) {
        tr_module_call call = {.layout = i ? smaller : changed,
                               .wish = &wish,
                               .text = refusal,
                               .text_bytes = sizeof refusal};
        fake_reset();
        assert_null(tr_module_open(&call));
        assert_int_equal(call.status, TR_ERR_USAGE);
        assert_non_null(strstr(refusal, "other sources"));
        assert_int_equal(fake_calls(), 0);
    }
}

/* --- what is asked of the runtime --------------------------------------------------------------
 */

static void copies_on_the_stream(void **state) {
    (void)state;
    tr_device *d = open_one();
    tr_stream *other = d->stream_create(d);
    char host[64];
    char *memory = d->allocator.alloc(d->allocator.self, 256);
    char *pinned = d->staging.alloc(d->staging.self, 128);
    d->copy(d->stream, memory, host, 64, TR_TO_DEVICE);
    d->copy(other, pinned, memory + 64, 32, TR_TO_HOST);
    d->copy(other, memory + 128, memory, 8, TR_ON_DEVICE);
    d->copy(other, memory, host, 0, TR_TO_DEVICE); /* nothing */
    d->zero(other, memory + 1, 255);
    d->zero(other, memory, 0);
    d->stream_wait(other);
    d->allocator.free(d->allocator.self, memory, 256);
    d->staging.free(d->staging.self, pinned, 128);
    d->stream_destroy(other);
    assert_string_equal(fake_log(), "cudaStreamCreateWithFlags 1\n"
                                    "cudaMalloc 256\n"
                                    "cudaHostAlloc 128 0\n"
                                    "cudaMemcpyAsync m1 h 64 to-device s1\n"
                                    "cudaMemcpyAsync p1 m1+64 32 to-host s2\n"
                                    "cudaMemcpyAsync m1+128 m1 8 on-device s2\n"
                                    "cudaMemsetAsync m1+1 0 255 s2\n"
                                    "cudaStreamSynchronize s2\n"
                                    "cudaFree m1\n"
                                    "cudaFreeHost p1\n"
                                    "cudaStreamSynchronize s2\n"
                                    "cudaStreamDestroy s2\n");
    close_one(d);
}

static void orders_streams_by_events(void **state) {
    (void)state;
    tr_device *d = open_one();
    tr_stream *other = d->stream_create(d);
    tr_event *e = d->event_create(d);
    fake_event_polls(3);
    d->event_record(e, d->stream);
    d->stream_wait_event(other, e);
    assert_false(d->event_done(e));
    assert_int_equal(cudaGetLastError(), cudaSuccess); /* "not ready" is not left for others */
    assert_false(d->event_done(e));
    assert_true(d->event_done(e));
    d->event_destroy(e);
    d->event_destroy(NULL);
    d->stream_destroy(other);
    assert_string_equal(fake_log(), "cudaStreamCreateWithFlags 1\n"
                                    "cudaEventCreateWithFlags 2\n" /* without times */
                                    "cudaEventRecord e1 s1\n"
                                    "cudaStreamWaitEvent s2 e1 0\n"
                                    "cudaEventQuery e1\ncudaEventQuery e1\ncudaEventQuery e1\n"
                                    "cudaEventDestroy e1\n"
                                    "cudaStreamSynchronize s2\ncudaStreamDestroy s2\n");
    close_one(d);
}

static void count_meanwhile(void *self) {
    ++*(int *)self;
}

/* Property: while the host waits for a stream, who asked for it is called; also where work memory
 * grows. */
static void waits_with_others(void **state) {
    (void)state;
    int calls = 0;
    tr_device *d = open_one();
    d->meanwhile = count_meanwhile;
    d->meanwhile_self = &calls;
    fake_event_polls(4);
    d->stream_wait(d->stream);
    assert_int_equal(calls, 3);
    assert_string_equal(fake_log(), "cudaStreamQuery s1\ncudaStreamQuery s1\ncudaStreamQuery s1\n"
                                    "cudaStreamQuery s1\ncudaStreamSynchronize s1\n");
    tr_cuda_work(d->stream, 1);
    fake_event_polls(3);
    tr_cuda_work(d->stream, 3 << 20);
    assert_int_equal(calls, 5);
    close_one(d);
}

static void keeps_work_memory(void **state) {
    (void)state;
    tr_device *d = open_one();
    tr_stream *other = d->stream_create(d);
    fake_clear();
    void *small = tr_cuda_work(d->stream, 1000);
    assert_ptr_equal(tr_cuda_work(d->stream, 2 << 20), small);
    assert_ptr_not_equal(tr_cuda_work(other, 1), small); /* each stream has its own */
    tr_cuda_work(d->stream, (2 << 20) + 1);              /* more: when nobody uses the old one */
    assert_string_equal(fake_log(), "cudaMalloc 2097152\n"
                                    "cudaMalloc 2097152\n"
                                    "cudaStreamSynchronize s1\ncudaFree m1\ncudaMalloc 4194304\n");
    fake_clear();
    d->trim(d);
    assert_string_equal(fake_log(), "cudaStreamSynchronize s2\ncudaFree m2\n"
                                    "cudaStreamSynchronize s1\ncudaFree m3\n");
    tr_cuda_work(d->stream, 1);
    close_one(d); /* work memory and other streams go with it */
}

/* --- failures ----------------------------------------------------------------------------------
 */

/* Memory that is not there is NULL, with a text that says who asked, how much, and what is left. */
static void memory_runs_out(void **state) {
    (void)state;
    tr_device *d = open_one();
    fake_fail("cudaMalloc", 1, cudaErrorMemoryAllocation);
    assert_null(tr_allocator_take(&d->allocator, 12345, "optimizer state"));
    printf("  %s\n", tr_error_message());
    assert_string_equal(tr_error_message(),
                        "out of memory: 12345 bytes wanted for optimizer state, 5 of 80 MiB are "
                        "free on device 0 (cuda Fake GPU)");
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    fake_fail("cudaHostAlloc", 1, cudaErrorMemoryAllocation);
    assert_null(tr_allocator_take(&d->staging, 77, "transfers"));
    assert_non_null(strstr(tr_error_message(), "77 bytes wanted for transfers"));
    assert_non_null(strstr(tr_error_message(), "locked"));
    fake_fail("cudaMalloc", 1, cudaErrorMemoryAllocation);
    if (setjmp(fatal_exit) == 0) {
        tr_cuda_work(d->stream, 1);
        fail();
    }
    printf("  %s\n", fatal_text);
    assert_non_null(strstr(fatal_text, "2097152 bytes wanted as a kernel's work memory"));
    assert_non_null(strstr(fatal_text, "5 of 80 MiB are free"));
}

static void a_launch_fails(void **state) {
    (void)state;
    tr_device *d = open_one();
    tr_cuda_launched(d->stream, "rmsnorm_forward"); /* no error yet */
    fake_fail("cudaMemsetAsync", 1, cudaErrorInvalidConfiguration);
    (void)cudaMemsetAsync(NULL, 0, 1, d->stream->handle);
    if (setjmp(fatal_exit) == 0) {
        tr_cuda_launched(d->stream, "rmsnorm_forward");
        fail();
    }
    printf("  %s\n", fatal_text);
    assert_string_equal(fatal_text, "kernel rmsnorm_forward could not be launched: error 9 "
                                    "(device 0, cuda Fake GPU)");
    close_one(d);
}

/* A program that uses all of the layer. */
static void use_everything(tr_device *d) {
    tr_stream *s = d->stream_create(d);
    tr_event *e = d->event_create(d);
    void *memory = d->allocator.alloc(d->allocator.self, 64);
    void *pinned = d->staging.alloc(d->staging.self, 64);
    d->copy(s, memory, pinned, 64, TR_TO_DEVICE);
    d->copy(s, memory, memory, 64, TR_ON_DEVICE);
    d->copy(s, pinned, memory, 64, TR_TO_HOST);
    d->zero(s, memory, 64);
    d->event_record(e, s);
    d->stream_wait_event(d->stream, e);
    d->event_done(e);
    d->stream_wait(s);
    tr_cuda_work(s, 10);
    tr_cuda_work(s, 4 << 20);
    d->trim(d);
    d->staging.free(d->staging.self, pinned, 64);
    d->allocator.free(d->allocator.self, memory, 64);
    d->event_destroy(e);
    d->stream_destroy(s);
}

/* The name of the nth call in a log. */
static void name_of_call(const char *log, int n, char *name, size_t bytes) {
    while (n-- > 1) log = strchr(log, '\n') + 1;
    snprintf(name, bytes, "%.*s", (int)strcspn(log, " \n"), log);
}

static void every_call_may_fail(void **state) {
    (void)state;
    char log[1 << 14], name[64];
    tr_device *d = open_one();
    use_everything(d);
    int calls = fake_calls();
    snprintf(log, sizeof log, "%s", fake_log());
    close_one(d);
    for (int n = 1; n <= calls; n++) {
        tr_device *volatile device = open_one();
        name_of_call(log, n, name, sizeof name);
        fake_fail(NULL, n, cudaErrorLaunchFailure);
        if (setjmp(fatal_exit) == 0) {
            use_everything(device);
            fail_msg("nobody noticed that call %d, %s, failed", n, name);
        }
        assert_true(strncmp(fatal_text, name, strlen(name)) == 0);
        assert_non_null(strstr(fatal_text, "failed: error 719 (device 0, cuda Fake GPU)"));
        assert_int_equal(fake_calls(), n); /* nothing is asked of a broken runtime */
    }
    printf("  %d calls, each failed once\n", calls);
}

static void every_call_of_opening_may_fail(void **state) {
    (void)state;
    char log[1 << 12], name[64];
    fake_reset();
    tr_device *d = open_as("cuda", 0);
    int calls = fake_calls();
    snprintf(log, sizeof log, "%s", fake_log());
    close_one(d);
    for (int n = 1; n <= calls; n++) {
        name_of_call(log, n, name, sizeof name);
        fake_reset();
        fake_fail(NULL, n, cudaErrorLaunchFailure);
        strcat(name, " failed: error 719");
        refuses(name, "", TR_ERR_INTERNAL);
    }
    fake_reset(); /* those that are asked when there is no driver */
    fake_driver(0);
    fake_fail("cudaDriverGetVersion", 1, cudaErrorLaunchFailure);
    refuses("cudaDriverGetVersion failed", "719", TR_ERR_INTERNAL);
    fake_reset();
    fake_driver(12000);
    fake_fail("cudaRuntimeGetVersion", 1, cudaErrorLaunchFailure);
    refuses("cudaRuntimeGetVersion failed", "719", TR_ERR_INTERNAL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(opens_and_closes),
        cmocka_unit_test(chooses_by_local_rank),
        cmocka_unit_test(says_what_is_missing),
        cmocka_unit_test(refuses_other_builds),
        cmocka_unit_test(refuses_a_fabric),
        cmocka_unit_test(copies_on_the_stream),
        cmocka_unit_test(orders_streams_by_events),
        cmocka_unit_test(waits_with_others),
        cmocka_unit_test(keeps_work_memory),
        ENDING_TEST(memory_runs_out),
        cmocka_unit_test(a_launch_fails),
        ENDING_TEST(every_call_may_fail),
        cmocka_unit_test(every_call_of_opening_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
