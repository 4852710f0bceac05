/* Properties of operations on device memory that go through host memory, beyond those of comm.c
 * (test_comm_device): the same bits as on host memory, order kept with operations on host memory,
 * long ones in parts, nothing allocated once it has been seen. */
#include "dist/backend.h"
#include "tests/dist/device_memory.h"
#include "tests/dist/mpi_check.h"

#include "base/rng.h"

static late_device *late;
static tr_device *device;
static tr_stream *streams[2];

static float value_of(int rank, int64_t i) {
    return (float)(tr_random_uniform(11, (uint64_t)rank, (uint64_t)i) * 3.0 - 1.5);
}

static void *checked_malloc(int64_t bytes) {
    void *memory = malloc((size_t)(bytes > 0 ? bytes : 1));
    if (!memory) tr_abort("no memory");
    return memory;
}

typedef tr_request *sum_begin(tr_comm *comm, tr_stream *stream, float *buffer, int64_t n);

static tr_request *all_reduce(tr_comm *comm, tr_stream *stream, float *buffer, int64_t n) {
    return tr_all_reduce_begin(comm, stream, TR_SUM, TR_F32, buffer, n * tr_comm_size(comm));
}

static tr_request *reduce_scatter(tr_comm *comm, tr_stream *stream, float *buffer, int64_t n) {
    return tr_reduce_scatter_begin(comm, stream, TR_F32, buffer, n);
}

/* Compares what is defined afterwards: this rank's block. */
static void check_same(tr_comm *world, sum_begin *begin, int64_t n) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    int64_t bytes = 4 * n * size;
    float *host = checked_malloc(bytes), *got = checked_malloc(bytes);
    for (int64_t i = 0; i < n * size; i++) host[i] = value_of(rank, i);
    device_memory m = device_memory_of(late, streams[n % 2], bytes);
    device_memory_write(&m, host, bytes, 3);
    tr_end(begin(world, m.stream, (float *)(void *)m.at, n));
    device_memory_read(&m, got, bytes);
    tr_end(begin(world, NULL, host, n));
    device_memory_free(&m);
    TR_CHECK(memcmp(host + rank * n, got + rank * n, (size_t)(4 * n)) == 0, "n %lld", (long long)n);
    free(host);
    free(got);
}

/* Property: sums have the bits that private host memory gives, whether they are cut or not. */
static void same_as_host(tr_comm *world) {
    static const int64_t sizes[] = {1, 777, 30001, 1300007};
    for (int s = 0; s < 4; s++) {
        check_same(world, all_reduce, sizes[s]);
        check_same(world, reduce_scatter, sizes[s]);
    }
}

/* One rank's device is far ahead of the others'. */
static void hurry(tr_comm *world, bool ahead) {
    for (int i = 0; i < 200 && ahead; i++) {
        late_tick(late);
        tr_comm_poll(world);
    }
}

/* Property: collectives begun one after the other are the same operation on all ranks, however late
 * some rank's device is and wherever their memory is. */
static void collectives_in_order(tr_comm *world) {
    enum { ROUNDS = 30, KINDS = 4 };
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    for (int round = 0; round < ROUNDS; round++) {
        int32_t host[2] = {rank + round, 100 * rank + round};
        float floats[2][3];
        device_memory m[KINDS];
        tr_request *requests[KINDS + 3];
        for (int k = 0; k < KINDS; k++) {
            int32_t data[64];
            for (int i = 0; i < size; i++) data[i] = 1000 * round + 100 * k + rank;
            m[k] = device_memory_of(late, streams[k % 2], 4 * size);
            device_memory_write(&m[k], data, 4 * size, (rank * 7 + round) % 5 * 10);
        }
        for (int i = 0; i < 3; i++) floats[0][i] = floats[1][i] = (float)(rank + i);
        requests[0] = tr_all_reduce_begin(world, m[0].stream, TR_SUM, TR_I32, m[0].at, size);
        hurry(world, rank == round % size);
        requests[1] = tr_all_reduce_begin(world, NULL, TR_SUM, TR_I32, &host[0], 1);
        hurry(world, rank == round % size);
        requests[2] = tr_broadcast_begin(world, m[1].stream, size - 1, m[1].at, 4 * size);
        hurry(world, rank == round % size);
        requests[3] = tr_broadcast_begin(world, NULL, 0, &host[1], 4);
        hurry(world, rank == round % size);
        requests[4] = tr_all_gather_begin(world, m[2].stream, TR_I32, m[2].at, 1);
        hurry(world, rank == round % size);
        requests[5] = tr_all_reduce_begin(world, NULL, TR_SUM, TR_F32, floats[0], 3);
        hurry(world, rank == round % size);
        requests[6] = tr_all_reduce_begin(world, m[3].stream, TR_MAX, TR_I32, m[3].at, size);
        hurry(world, rank == round % size);
        for (int i = 6; i >= 0; i--) tr_end(requests[i]);
        int32_t got[KINDS][64];
        for (int k = 0; k < KINDS; k++) device_memory_read(&m[k], got[k], 4 * size);
        for (int k = 0; k < KINDS; k++) device_memory_free(&m[k]);
        int pairs = size * (size - 1) / 2;
        TR_CHECK(host[0] == pairs + size * round, "host sum %d", host[0]);
        TR_CHECK(host[1] == round || size == 1, "host broadcast %d", host[1]);
        TR_CHECK(floats[0][2] == (float)(pairs + 2 * size), "host f32 %g", (double)floats[0][2]);
        for (int i = 0; i < size; i++) {
            TR_CHECK(got[0][i] == 1000 * round * size + pairs, "sum %d", got[0][i]);
            TR_CHECK(got[1][i] == 1000 * round + 100 + size - 1, "broadcast %d", got[1][i]);
            TR_CHECK(got[2][i] == 1000 * round + 200 + i, "gather %d", got[2][i]);
            TR_CHECK(got[3][i] == 1000 * round + 300 + size - 1, "max %d", got[3][i]);
        }
    }
}

/* Property: messages of one tag keep their order, also device and host memory mixed. */
static void messages_in_order(tr_comm *world) {
    enum { N = 12 };
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    int to = (rank + 1) % size, from = (rank + size - 1) % size;
    int32_t out[N], in[N], got[N];
    device_memory sent[N], received[N];
    tr_request *requests[2 * N];
    for (int i = 0; i < N; i++) {
        bool on_host = i % 3 == 2;
        out[i] = 100 * rank + i;
        in[i] = got[i] = -1;
        sent[i] = device_memory_of(late, streams[i % 2], 4);
        received[i] = device_memory_of(late, streams[(i + 1) % 2], 4);
        device_memory_write(&sent[i], &out[i], 4, (N - i) * 3);
        device_memory_write(&received[i], &in[i], 4, i * 20); /* the buffer is in use until then */
        hurry(world, rank == 0);
        requests[i] = tr_send_begin(world, on_host ? NULL : sent[i].stream, to, 4,
                                    on_host ? (void *)&out[i] : sent[i].at, 4);
        requests[N + i] = tr_recv_begin(world, on_host ? NULL : received[i].stream, from, 4,
                                        on_host ? (void *)&in[i] : received[i].at, 4);
    }
    hurry(world, rank == 0);
    /* what rank 0 has sent is here while the buffers are in use */
    TR_MPI(MPI_Barrier(MPI_COMM_WORLD));
    for (int i = 2 * N - 1; i >= 0; i--) tr_end(requests[i]);
    for (int i = 0; i < N; i++) device_memory_read(&received[i], &got[i], 4);
    for (int i = 0; i < N; i++) {
        device_memory_free(&sent[i]);
        device_memory_free(&received[i]);
        int32_t is = i % 3 == 2 ? in[i] : got[i];
        TR_CHECK(is == 100 * from + i, "message %d is %d", i, is);
    }
}

typedef struct {
    const bool *open;
} gate;

static bool passes(void *self) {
    return *((gate *)self)->open;
}

/* Property: a receive begins at once, and delays no sends, however long its buffer is in use; but
 * what comes is not copied there before. */
static void receives_begin_at_once(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world), peer = rank ^ 1;
    int32_t value = 100 + rank, used = -1, got = 0, word = 0;
    bool open = false;
    if (peer >= size) return;
    device_memory out = device_memory_of(late, streams[0], 4);
    device_memory in = device_memory_of(late, streams[1], 4);
    gate *shut = checked_malloc(sizeof *shut);
    *shut = (gate){&open};
    device_memory_write(&out, &value, 4, 3);
    late_enqueue(in.stream, passes, shut);
    device_memory_write(&in, &used, 4, 3);
    tr_request *recv = tr_recv_begin(world, in.stream, peer, 1, in.at, 4);
    tr_end(tr_send_begin(world, out.stream, peer, 1, out.at, 4));
    tr_request *told = tr_recv_begin(world, NULL, peer, 2, &word, 4);
    tr_end(tr_send_begin(world, NULL, peer, 2, &value, 4));
    tr_end(told); /* the peer's send has ended */
    hurry(world, true);
    TR_CHECK(!tr_test(recv), "copied into a buffer in use");
    open = true;
    tr_end(recv);
    device_memory_read(&in, &got, 4);
    device_memory_free(&in);
    device_memory_free(&out);
    TR_CHECK(got == 100 + peer, "received %d", got);
}

/* Property: messages of several parts cross between two ranks that both send first. */
static void long_messages(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world), peer = rank ^ 1;
    int64_t n = (INT64_C(18) << 20) + 13;
    unsigned char *data = checked_malloc(n);
    for (int64_t i = 0; i < n; i++) data[i] = (unsigned char)(i % 251 + rank);
    device_memory out = device_memory_of(late, streams[0], n);
    device_memory in = device_memory_of(late, streams[1], n);
    device_memory_write(&out, data, n, 5);
    if (peer < size) {
        tr_request *send = tr_send_begin(world, out.stream, peer, 1, out.at, n);
        tr_request *recv = tr_recv_begin(world, in.stream, peer, 1, in.at, n);
        tr_end(send);
        tr_end(recv);
        device_memory_read(&in, data, n);
    }
    tr_end(tr_broadcast_begin(world, out.stream, size - 1, out.at, n));
    device_memory_free(&in);
    for (int64_t i = 0; i < n && peer < size; i++)
        TR_CHECK(data[i] == (unsigned char)(i % 251 + peer), "byte %lld", (long long)i);
    device_memory_read(&out, data, n);
    device_memory_free(&out);
    for (int64_t i = 0; i < n; i++)
        TR_CHECK(data[i] == (unsigned char)(i % 251 + size - 1), "broadcast %lld", (long long)i);
    free(data);
}

/* Property: a gather of several parts, begun while the device still computes what is gathered. */
static void long_gather(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    int64_t n = 2700001;
    int32_t *data = checked_malloc(4 * n * size);
    for (int64_t i = 0; i < n * size; i++) data[i] = i / n == rank ? (int32_t)(i * 3 + rank) : -1;
    device_memory m = device_memory_of(late, streams[0], 4 * n * size);
    device_memory_write(&m, data, 4 * n * size, 40);
    tr_request *request = tr_all_gather_begin(world, m.stream, TR_I32, m.at, n);
    while (!tr_test(request)) tr_comm_poll(world);
    tr_end(request);
    device_memory_read(&m, data, 4 * n * size);
    device_memory_free(&m);
    for (int64_t i = 0; i < n * size; i++)
        TR_CHECK(data[i] == (int32_t)(i * 3 + i / n), "element %lld", (long long)i);
    free(data);
}

/* Property: a step that has been seen allocates nothing. */
static void nothing_is_allocated(tr_comm *world) {
    int size = tr_comm_size(world);
    int64_t n = 1500000, ones[64], after_first = 0;
    for (int r = 0; r < size; r++) ones[r] = 1;
    device_memory a = device_memory_of(late, streams[0], 4 * n * size);
    device_memory b = device_memory_of(late, streams[0], 4 * n * size);
    for (int round = 0; round < 3; round++) {
        float *at = (float *)(void *)a.at;
        int peer = tr_comm_rank(world) ^ 1;
        tr_end(tr_reduce_scatter_begin(world, a.stream, TR_F32, at, n));
        tr_end(tr_all_gather_begin(world, a.stream, TR_F32, at, n));
        tr_end(tr_all_reduce_begin(world, a.stream, TR_SUM, TR_F32, at, n));
        tr_end(tr_all_to_all_begin(world, a.stream, a.at, ones, b.at, ones, 4 * n));
        if (peer < size) {
            tr_request *recv = tr_recv_begin(world, a.stream, peer, 0, b.at, 4 * n);
            tr_end(tr_send_begin(world, a.stream, peer, 0, a.at, 4 * n));
            tr_end(recv);
        }
        if (round == 0) after_first = late_stagings(late);
        TR_CHECK(late_stagings(late) == after_first, "round %d: %lld after %lld", round,
                 (long long)late_stagings(late), (long long)after_first);
    }
    device_memory_free(&a);
    device_memory_free(&b);
}

static const mpi_case cases[] = {
    {"same_as_host", same_as_host},
    {"collectives_in_order", collectives_in_order},
    {"messages_in_order", messages_in_order},
    {"receives_begin_at_once", receives_begin_at_once},
    {"long_messages", long_messages},
    {"long_gather", long_gather},
    {"nothing_is_allocated", nothing_is_allocated},
};

int main(int argc, char **argv) {
    tr_comm *world = tr_comm_start(&argc, &argv);
    late = late_create((uint64_t)tr_comm_rank(world) + 77);
    device = late_device_of(late);
    for (int i = 0; i < 2; i++) streams[i] = device->stream_create(device);
    int failed = 0;
    for (int run = 0; run < 3; run++) {
        tr_comm_set_shared(run != 1); /* also where ranks of a node do not map memory */
        tr_comm_set_synchronous(run == 1);
        tr_comm_set_node_ranks(run == 2 ? 2 : 0);
        if (run == 2 && tr_comm_size(world) <= 2) continue;
        tr_comm *comm = tr_comm_split(world, 0, tr_comm_rank(world));
        failed += mpi_check_all(comm, cases, sizeof cases / sizeof cases[0]);
        tr_comm_free(comm);
    }
    for (int i = 0; i < 2; i++) device->stream_destroy(streams[i]);
    tr_comm_leave_device(world, device);
    late_destroy(late);
    tr_comm_stop(world);
    return failed != 0;
}
