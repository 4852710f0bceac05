/* Property: through NCCL, what is expected of it has joined, and has been tried, when tr_comm_join
 * returns; what follows joins and connects nothing more. Each rank has an NCCL that only writes
 * down. `id`, `joining` and `first` end the job: NCCL fails on one rank, before any work. */
#include "fake_nccl.h"
#include "fake_runtime.h"
#include "no_kernels.h"
#include "tests/dist/mpi_check.h"

#include "kernels/cuda/nccl_fabric.h"
#include "kernels/module.h"

static tr_device *device;
static tr_fabric *nccl;

static void fatal(const char *text) {
    tr_abort("%s", text);
}

static void open_device(void) {
    char text[256] = "";
    tr_device_wish wish = {.name = "cuda", .fatal = fatal};
    tr_module_call call = {
        .layout = tr_module_layout_here, .wish = &wish, .text = text, .text_bytes = sizeof text};
    fake_reset();
    fake_nccl_reset();
    fake_log_questions(false);
    fake_nccl_polls(3);
    device = tr_module_open(&call);
    if (device) nccl = tr_nccl_open(device, &(tr_nccl_wish){0}, text, sizeof text);
    if (!nccl) tr_abort("no device: %s", text);
    device->fabric = nccl;
}

static void close_device(tr_comm *world) {
    tr_comm_leave_device(world, device);
    tr_nccl_close(nccl);
    device->fabric = NULL;
    device->destroy(device);
}

static const int64_t ones[2] = {1, 1};

static void expect_all(tr_comm *world) {
    tr_comm_expect_blocks(world, device);
    tr_comm_expect_rows(world, device, ones, ones);
    tr_comm_expect_messages(world, device, 1 - tr_comm_rank(world));
}

/* How many calls of a name there are in the log. */
static int count(const char *name) {
    int found = 0;
    char line[64];
    snprintf(line, sizeof line, "%s ", name);
    for (const char *at = fake_log(); (at = strstr(at, line)); at++) found++;
    return found;
}

static void joins_and_tries(tr_comm *world) {
    int rank = tr_comm_rank(world);
    open_device();
    expect_all(world);
    fake_clear();
    tr_comm_join(world, device);
    TR_CHECK(count("ncclCommInitRankConfig") == 2, "all ranks, and a pair: %s", fake_log());
    TR_CHECK(count("ncclAllGather") == 1, "blocks: %s", fake_log());
    TR_CHECK(count("ncclSend") == 3 && count("ncclRecv") == 3, "2 of rows and 1: %s", fake_log());
    char *memory = device->allocator.alloc(device->allocator.self, 64);
    fake_clear();
    tr_end(tr_all_gather_begin(world, device->stream, TR_U8, memory, 8));
    tr_request *sent = tr_send_begin(world, device->stream, 1 - rank, 7, memory, 8);
    tr_end(tr_recv_begin(world, device->stream, 1 - rank, 7, memory + 32, 8));
    tr_end(sent);
    TR_CHECK(count("ncclAllGather") == 1 && count("ncclSend") == 1, "used: %s", fake_log());
    TR_CHECK(count("ncclCommInitRankConfig") == 0, "joined before: %s", fake_log());
    device->allocator.free(device->allocator.self, memory, 64);
    close_device(world);
    TR_CHECK(fake_alive() == 0 && fake_nccl_alive() == 0, "something is left");
}

/* Not a case: ends the job. */
static void fails(tr_comm *world, const char *what) {
    int rank = tr_comm_rank(world);
    open_device();
    expect_all(world);
    if (!strcmp(what, "id") && rank == 0)
        fake_fail("ncclGetUniqueId", 1, (cudaError_t)ncclSystemError);
    if (!strcmp(what, "joining") && rank == 1)
        fake_fail("ncclCommInitRankConfig", 1, (cudaError_t)ncclSystemError);
    if (!strcmp(what, "first") && rank == 1)
        fake_fail("ncclAllGather", 1, (cudaError_t)ncclUnhandledCudaError);
    tr_comm_join(world, device);
    printf("rank %d goes on\n", rank);
}

static const mpi_case cases[] = {{"joins_and_tries", joins_and_tries}};

int main(int argc, char **argv) {
    tr_comm *world = tr_comm_start(&argc, &argv);
    tr_comm_set_name(world, "world");
    if (argc > 1) {
        fails(world, argv[1]);
        return 0;
    }
    int failed = mpi_check_all(world, cases, 1);
    tr_comm_stop(world);
    return failed != 0;
}
