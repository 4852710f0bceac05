/* Property: the fabric asks NCCL for the right things in the right order, counts, types and
 * streams, begins nothing before what goes on has settled, ends the job with a text that names what
 * failed and where, and gives back what it took. An NCCL and a CUDA runtime that only write down
 * stand in for the real ones. */
#include "fake_nccl.h"
#include "fake_runtime.h"

#include "kernels/cuda/nccl_fabric.h"
#include "kernels/module.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "ends.h"
#include "no_kernels.h"

static char fatal_text[1024];
static jmp_buf fatal_exit;
static volatile bool in_thread, fatal_called;

static void fatal(const char *text) {
    snprintf(fatal_text, sizeof fatal_text, "%s", text);
    fatal_called = true;
    while (in_thread) pause(); /* it does not return */
    longjmp(fatal_exit, 1);
}

static tr_device *device;
static const tr_fabric *nccl;
static tr_stream *stream;
static char *memory;

static void open_fabric(double limit, double look) {
    char text[256] = "";
    tr_device_wish wish = {.name = "cuda", .fatal = fatal};
    tr_module_call call = {
        .layout = tr_module_layout_here, .wish = &wish, .text = text, .text_bytes = sizeof text};
    fake_reset();
    fake_nccl_reset();
    device = tr_module_open(&call);
    assert_non_null(device);
    tr_nccl_wish nccl_wish = {.limit_seconds = limit, .look_seconds = look};
    nccl = tr_nccl_open(device, &nccl_wish, text, sizeof text);
    assert_non_null(nccl);
    stream = device->stream_create(device);
    memory = device->allocator.alloc(device->allocator.self, 4096);
    fake_clear();
}

static void close_fabric(void) {
    device->allocator.free(device->allocator.self, memory, 4096);
    tr_nccl_close((tr_fabric *)(uintptr_t)nccl);
    device->destroy(device);
    assert_int_equal(fake_alive(), 0);
    assert_int_equal(fake_nccl_alive(), 0);
    assert_int_equal(fake_nccl_groups(), 0);
}

static tr_fabric_group *join(int rank, int size) {
    char id[1024];
    assert_true(nccl->id_bytes <= (int64_t)sizeof id);
    nccl->make_id(nccl, id);
    return nccl->join(nccl, id, rank, size, stream, "group data");
}

static void settle(tr_fabric_group *g) {
    while (!nccl->settled(g)) continue;
}

static void leave(tr_fabric_group *g) {
    nccl->finish(g);
    settle(g);
    nccl->leave(g);
}

static tr_fabric_group *joined(int rank, int size) {
    tr_fabric_group *g = join(rank, size);
    settle(g);
    fake_clear();
    return g;
}

/* The log without the making of events and the questions. */
static const char *calls(void) {
    static char kept[1 << 14];
    kept[0] = '\0';
    for (const char *line = fake_log(), *end; *line; line = end + 1) {
        end = strchr(line, '\n');
        if (!strncmp(line, "cudaEvent", 9) && strncmp(line, "cudaEventRecord", 15)) continue;
        if (!strncmp(line, "ncclCommGetAsyncError", 21)) continue;
        strncat(kept, line, (size_t)(end - line + 1));
    }
    return kept;
}

/* Property: a device brings the fabric when it is wished for, and takes it away. */
static void comes_with_the_device(void **state) {
    (void)state;
    char text[512] = "";
    tr_device_wish wish = {.name = "cuda", .fabric = true, .limit_seconds = 60, .fatal = fatal};
    tr_module_call call = {
        .layout = tr_module_layout_here, .wish = &wish, .text = text, .text_bytes = sizeof text};
    fake_reset();
    unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    tr_device *d = tr_module_open(&call);
    assert_non_null(d);
    assert_non_null(strstr(d->fabric->name, "nccl "));
    assert_string_equal(getenv("CUDA_DEVICE_MAX_CONNECTIONS"), "32");
    d->destroy(d);
    fake_fail("ncclGetVersion", 1, (cudaError_t)ncclSystemError);
    assert_null(tr_module_open(&call));
    assert_non_null(strstr(text, "result 2; run.collectives mpi does without"));
    assert_int_equal(fake_alive(), 0);
}

/* --- what is asked ------------------------------------------------------------------------------
 */

static void joins_and_leaves(void **state) {
    (void)state;
    open_fabric(0, 0);
    tr_fabric_group *g = join(2, 5);
    settle(g);
    leave(g);
    assert_string_equal(calls(), "ncclGetUniqueId \n"
                                 "ncclCommInitRankConfig 2 of 5 id 7 blocking 0\n"
                                 "ncclCommFinalize c1\nncclCommDestroy c1\n");
    g = join(0, 2);
    nccl->leave(g); /* given up */
    assert_non_null(strstr(calls(), "ncclCommAbort c2\n"));
    nccl->leave(NULL);
    close_fabric();
}

static void collectives(void **state) {
    (void)state;
    open_fabric(0, 0);
    tr_fabric_group *g = joined(2, 4);
    nccl->broadcast(g, 3, memory + 8, 100);
    settle(g);
    assert_string_equal(calls(), "ncclBroadcast m1+8 m1+8 100 u8 root 3 c1 s2\n"
                                 "cudaEventRecord e1 s2\n");
    fake_clear();
    nccl->all_reduce(g, TR_MAX, TR_I64, memory, 9);
    settle(g);
    nccl->all_reduce(g, TR_MIN, TR_F64, memory, 9);
    settle(g);
    nccl->all_reduce(g, TR_SUM, TR_I32, memory, 9);
    settle(g);
    assert_string_equal(calls(), "ncclAllReduce m1 m1 9 i64 max c1 s2\ncudaEventRecord e2 s2\n"
                                 "ncclAllReduce m1 m1 9 f64 min c1 s2\ncudaEventRecord e3 s2\n"
                                 "ncclAllReduce m1 m1 9 i32 sum c1 s2\ncudaEventRecord e4 s2\n");
    fake_clear();
    nccl->reduce_scatter(g, TR_F32, memory, 16);
    settle(g);
    nccl->all_gather(g, TR_BF16, memory, 16);
    settle(g);
    assert_string_equal(calls(), "ncclReduceScatter m1 m1+128 16 f32 sum c1 s2\n"
                                 "cudaEventRecord e5 s2\n"
                                 "ncclAllGather m1+64 m1 16 bf16 c1 s2\n"
                                 "cudaEventRecord e6 s2\n");
    leave(g);
    close_fabric();
}

static void messages_are_grouped(void **state) {
    (void)state;
    open_fabric(0, 0);
    tr_fabric_group *g = joined(0, 3);
    const tr_fabric_message messages[] = {
        {true, 1, memory, 10}, {false, 2, memory + 64, 20}, {true, 0, memory + 128, 30}};
    nccl->exchange(g, messages, 3);
    settle(g);
    assert_string_equal(calls(), "ncclGroupStart \nncclSend m1 10 u8 to 1 c1 s2\n"
                                 "ncclRecv m1+64 20 u8 from 2 c1 s2\n"
                                 "ncclSend m1+128 30 u8 to 0 c1 s2\nncclGroupEnd \n"
                                 "cudaEventRecord e1 s2\n");
    leave(g);
    close_fabric();
}

/* Property: what goes on is asked for until it is over, and only then is an event behind it. */
static void waits_for_what_goes_on(void **state) {
    (void)state;
    open_fabric(0, 0);
    fake_nccl_polls(3);
    tr_fabric_group *g = join(0, 2);
    for (int i = 0; i < 3; i++) assert_false(nccl->settled(g));
    assert_true(nccl->settled(g));
    nccl->all_reduce(g, TR_SUM, TR_F32, memory, 4);
    for (int i = 0; i < 3; i++) assert_false(nccl->settled(g));
    assert_null(strstr(fake_log(), "cudaEventRecord"));
    assert_true(nccl->settled(g));
    assert_non_null(strstr(fake_log(), "cudaEventRecord e1 s2"));
    fake_clear();
    assert_true(nccl->settled(g));
    assert_int_equal(fake_calls(), 0);
    leave(g);
    close_fabric();
}

/* Property: more operations than are watched at a time go to the stream all the same. */
static void many_operations(void **state) {
    (void)state;
    open_fabric(100, 0);
    tr_fabric_group *g = joined(0, 2);
    fake_event_polls(1 << 20); /* the device does not get to them */
    for (int i = 0; i < 100; i++) {
        nccl->all_gather(g, TR_F32, memory, 1);
        settle(g);
        tr_nccl_look((tr_fabric *)(uintptr_t)nccl);
    }
    fake_event_polls(1);
    tr_nccl_look((tr_fabric *)(uintptr_t)nccl);
    leave(g);
    close_fabric();
}

/* --- failures -----------------------------------------------------------------------------------
 */

static void use_everything(void) {
    const tr_fabric_message messages[] = {{true, 1, memory, 10}, {false, 1, memory, 20}};
    tr_fabric_group *g = join(1, 2);
    settle(g);
    nccl->broadcast(g, 0, memory, 4);
    settle(g);
    nccl->all_reduce(g, TR_SUM, TR_F32, memory, 4);
    settle(g);
    nccl->reduce_scatter(g, TR_F32, memory, 4);
    settle(g);
    nccl->all_gather(g, TR_F32, memory, 4);
    settle(g);
    nccl->exchange(g, messages, 2);
    settle(g);
    leave(g);
}

/* The number-th call fails. */
static void fail_at(int number, ncclResult_t result) {
    open_fabric(0, 0);
    fake_fail(NULL, number, (cudaError_t)result);
    fatal_text[0] = '\0';
    if (setjmp(fatal_exit) == 0) {
        use_everything();
        fail_msg("call %d failed unheard", number);
    }
}

/* Property: every n-th call may fail, and the job ends with its reason, without waiting for NCCL;
 * groups are ended. */
static void every_call_may_fail(void **state) {
    (void)state;
    static const ncclResult_t results[] = {ncclSystemError, ncclRemoteError,
                                           ncclUnhandledCudaError};
    open_fabric(0, 0);
    use_everything();
    char whole[1 << 14];
    snprintf(whole, sizeof whole, "%s", fake_log());
    close_fabric();
    int number = 0, failed = 0;
    for (const char *line = whole, *end; *line; line = end + 1) {
        end = strchr(line, '\n');
        ncclResult_t result = results[number++ % 3];
        if (strncmp(line, "nccl", 4) != 0) continue;
        fail_at(number, result);
        char want[64];
        snprintf(want, sizeof want, "result %d", (int)result);
        assert_non_null(strstr(fatal_text, want));
        assert_non_null(strstr(fatal_text, "NCCL"));
        if (strncmp(line, "ncclGetUniqueId", 15) != 0) {
            assert_non_null(strstr(fatal_text, "group data (rank 1 of 2)"));
        }
        assert_null(strstr(fake_log(), "ncclCommAbort"));
        assert_int_equal(fake_nccl_groups(), 0);
        failed++;
    }
    assert_true(failed > 15);
}

static void expect_fatal(const char *a, const char *b) {
    assert_non_null(strstr(fatal_text, a));
    assert_non_null(strstr(fatal_text, b));
    assert_null(strstr(fake_log(), "ncclCommAbort"));
}

/* Property: a peer that is lost while an operation is in the stream ends the job. */
static void a_peer_is_lost(void **state) {
    (void)state;
    open_fabric(0, 0);
    tr_fabric_group *g = joined(1, 2);
    fake_event_polls(1 << 20);
    nccl->reduce_scatter(g, TR_F32, memory, 4);
    settle(g);
    tr_nccl_look((tr_fabric *)(uintptr_t)nccl);
    fake_nccl_state(ncclRemoteError);
    if (setjmp(fatal_exit) == 0) {
        tr_nccl_look((tr_fabric *)(uintptr_t)nccl);
        fail_msg("nobody looks");
    }
    expect_fatal("reduce_scatter of group data (rank 1 of 2) failed", "a connection is gone");
}

static void exceed(bool in_stream) {
    open_fabric(0.05, 0);
    tr_fabric_group *g = joined(0, 2);
    fake_event_polls(1 << 20);
    if (!in_stream) fake_nccl_polls(1 << 20);
    nccl->all_gather(g, TR_F32, memory, 4);
    if (in_stream) settle(g);
    tr_nccl_look((tr_fabric *)(uintptr_t)nccl);
    usleep(70000);
    if (setjmp(fatal_exit) == 0) {
        tr_nccl_look((tr_fabric *)(uintptr_t)nccl);
        fail_msg("the limit is not kept");
    }
    expect_fatal("all_gather of group data (rank 0 of 2) has not ended", "watchdog_seconds");
}

/* Property: what takes longer than the limit ends the job: in the stream, or while it goes on. What
 * has ended is not held against anybody. */
static void the_limit_is_exceeded(void **state) {
    (void)state;
    exceed(false);
    exceed(true);
    open_fabric(0.05, 0);
    tr_fabric_group *g = joined(0, 2);
    nccl->all_gather(g, TR_F32, memory, 4);
    settle(g);
    usleep(70000);
    tr_nccl_look((tr_fabric *)(uintptr_t)nccl);
    leave(g);
    close_fabric();
}

/* The device gets to none of so many operations: one of another kind first. */
static tr_fabric_group *begin_many(int count) {
    tr_fabric_group *g = joined(0, 2);
    fake_event_polls(1 << 20);
    nccl->broadcast(g, 0, memory, 4);
    settle(g);
    for (int i = 1; i < count; i++) {
        nccl->all_gather(g, TR_F32, memory, 1);
        settle(g);
    }
    return g;
}

/* Property: of more operations than are watched at a time the oldest stay, by which the limit goes,
 * and the last place is the newest's. */
static void the_oldest_is_late(void **state) {
    (void)state;
    open_fabric(0.05, 0);
    begin_many(12);
    const char *at = fake_log();
    for (int i = 1; i <= 12; i++) {
        char line[32];
        snprintf(line, sizeof line, "cudaEventRecord e%d s2\n", i < 8 ? i : 8);
        at = strstr(at, line);
        if (!at) fail_msg("operation %d: no %s", i, line);
        at += strlen(line);
    }
    assert_null(strstr(at, "cudaEventRecord"));
    usleep(70000);
    if (setjmp(fatal_exit) == 0) {
        tr_nccl_look((tr_fabric *)(uintptr_t)nccl);
        fail_msg("the limit is not kept");
    }
    expect_fatal("broadcast of group data (rank 0 of 2) has not ended", "watchdog_seconds");
}

/* Property: once the newest has ended nothing is late, and the next is watched like the first. */
static void a_full_ring_empties(void **state) {
    (void)state;
    open_fabric(0.05, 0);
    tr_fabric_group *g = begin_many(12);
    fake_event_polls(1);
    fake_clear();
    tr_nccl_look((tr_fabric *)(uintptr_t)nccl);
    for (int i = 1; i <= 8; i++) {
        char line[32];
        snprintf(line, sizeof line, "cudaEventQuery e%d\n", i);
        assert_non_null(strstr(fake_log(), line));
    }
    usleep(70000);
    fake_clear();
    tr_nccl_look((tr_fabric *)(uintptr_t)nccl);
    assert_null(strstr(fake_log(), "cudaEventQuery"));
    nccl->all_gather(g, TR_F32, memory, 1);
    settle(g);
    assert_non_null(strstr(fake_log(), "cudaEventRecord e1 s2\n"));
    leave(g);
    close_fabric();
}

/* Property: to begin what must wait is a mistake, and is told. */
static void too_early(void **state) {
    (void)state;
    open_fabric(0, 0);
    fake_nccl_polls(2);
    tr_fabric_group *g = join(0, 2);
    if (setjmp(fatal_exit) == 0) {
        nccl->all_reduce(g, TR_SUM, TR_F32, memory, 4);
        fail_msg("begun too early");
    }
    assert_non_null(strstr(fatal_text, "all_reduce of group data (rank 0 of 2) is begun while "
                                       "joining goes on"));
}

/* Property: the thread looks, and stops when it is told. The last case: a thread stays behind. */
static void the_thread_looks(void **state) {
    (void)state;
    open_fabric(0.05, 0.01);
    close_fabric();
    open_fabric(0.05, 0.01);
    tr_fabric_group *g = joined(0, 2);
    fake_event_polls(1 << 20);
    in_thread = true;
    fatal_called = false;
    nccl->broadcast(g, 0, memory, 4);
    settle(g);
    for (int i = 0; i < 500 && !fatal_called; i++) usleep(10000);
    assert_true(fatal_called);
    assert_non_null(strstr(fatal_text, "broadcast of group data"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(comes_with_the_device),
        cmocka_unit_test(joins_and_leaves),
        cmocka_unit_test(collectives),
        cmocka_unit_test(messages_are_grouped),
        cmocka_unit_test(waits_for_what_goes_on),
        cmocka_unit_test(many_operations),
        ENDING_TEST(every_call_may_fail),
        ENDING_TEST(a_peer_is_lost),
        ENDING_TEST(the_limit_is_exceeded),
        ENDING_TEST(the_oldest_is_late),
        cmocka_unit_test(a_full_ring_empties),
        ENDING_TEST(too_early),
        ENDING_TEST(the_thread_looks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
