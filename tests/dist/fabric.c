/* Properties of operations through a device's fabric, beyond those of comm.c (test_comm_device):
 * links are made when they are used, or before, messages find each other by tag whatever the order
 * and wait in no circle, what moves at the same time moves together. The fabric stands on MPI and
 * promises no more than NCCL. `fails`, `lengths` end the job. */
#include "dist/backend.h"
#include "tests/dist/device_memory.h"
#include "tests/dist/mpi_check.h"
#include "tests/dist/mpi_fabric.h"

static late_device *late;
static tr_device *device;
static tr_fabric *fabric;
static tr_stream *streams[2];

/* The device goes on while the host waits for something else. */
int MPI_Iprobe(int source, int tag, MPI_Comm comm, int *flag, MPI_Status *status) {
    if (late) late_tick(late);
    return PMPI_Iprobe(source, tag, comm, flag, status);
}

static device_memory with(tr_stream *stream, int64_t n, int32_t value, int delay) {
    int32_t *data = malloc((size_t)(4 * n + 4));
    if (!data) abort();
    for (int64_t i = 0; i < n; i++) data[i] = value + (int32_t)i;
    device_memory m = device_memory_of(late, stream, 4 * n);
    device_memory_write(&m, data, 4 * n, delay);
    free(data);
    return m;
}

static void expect(const device_memory *m, int64_t n, int32_t value, const char *what) {
    int32_t *data = malloc((size_t)(4 * n + 4));
    if (!data) abort();
    device_memory_read(m, data, 4 * n);
    device->stream_wait(m->stream);
    for (int64_t i = 0; i < n; i++)
        TR_CHECK(data[i] == value + (int32_t)i, "%s: %d, not %d", what, data[i],
                 value + (int32_t)i);
    free(data);
}

static tr_request *send(tr_comm *comm, int to, int tag, const device_memory *m) {
    return tr_send_begin(comm, m->stream, to, tag, m->at, (int64_t)m->bytes);
}

static tr_request *receive(tr_comm *comm, int from, int tag, const device_memory *m) {
    return tr_recv_begin(comm, m->stream, from, tag, m->at, (int64_t)m->bytes);
}

/* Property: a group is joined by the first operation that needs it, and no other is. */
static void links_are_lazy(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    tr_comm *comm = tr_comm_split(world, 0, rank);
    int64_t before = mpi_fabric_count(fabric).joined;
    float host = 1;
    tr_end(tr_all_reduce_begin(comm, NULL, TR_SUM, TR_F32, &host, 1));
    TR_CHECK(mpi_fabric_count(fabric).joined == before, "host memory needs none");
    device_memory m = with(streams[0], size, rank, 0);
    for (int i = 0; i < 3; i++) tr_end(tr_all_gather_begin(comm, m.stream, TR_I32, m.at, 1));
    TR_CHECK(mpi_fabric_count(fabric).joined == before + 1, "one of all ranks");
    if (rank < 2)
        for (int i = 0; i < 2; i++)
            tr_end(rank == 0 ? send(comm, 1, 0, &m) : receive(comm, 0, 0, &m));
    TR_CHECK(mpi_fabric_count(fabric).joined == before + 1 + (rank < 2), "and of one pair");
    device_memory_free(&m);
    int64_t joined = mpi_fabric_count(fabric).groups_now;
    tr_comm_free(comm);
    TR_CHECK(joined - mpi_fabric_count(fabric).groups_now == 1 + (rank < 2), "all left");
}

/* Property: what is expected has joined and been tried when tr_comm_join returns, once each, and
 * its first operation joins nothing; what is expected and not joined is forgotten with its group.
 */
static void expected_join_early(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world), other = (rank + 1) % size;
    int64_t ones[64];
    for (int r = 0; r < size; r++) ones[r] = 1;
    tr_comm *all = tr_comm_split(world, 0, rank), *pairs = tr_comm_split(world, rank / 2, rank);
    tr_comm *none = tr_comm_split(world, 0, rank);
    for (int i = 0; i < 2; i++) {
        tr_comm_expect_rows(all, device, ones, ones);
        for (int r = size - 1; r >= 0; r--) tr_comm_expect_messages(all, device, r);
        tr_comm_expect_blocks(pairs, device);
    }
    mpi_fabric_counts before = mpi_fabric_count(fabric), joined, used;
    tr_comm_join(world, device);
    joined = mpi_fabric_count(fabric);
    TR_CHECK(joined.joined - before.joined == 1 + (size - 1) + (tr_comm_size(pairs) > 1),
             "%lld joined", (long long)(joined.joined - before.joined));
    TR_CHECK(joined.collectives - before.collectives == (tr_comm_size(pairs) > 1), "blocks tried");
    TR_CHECK(joined.messages - before.messages == 2 * (size - 1) + 2 * size, "%lld messages tried",
             (long long)(joined.messages - before.messages));
    device_memory out = with(streams[1], size, rank, 0), in = with(streams[1], size, -1, 0);
    tr_request *sent = send(all, other, 1, &out);
    tr_end(receive(all, (rank + size - 1) % size, 1, &in));
    tr_end(sent);
    expect(&in, size, (rank + size - 1) % size, "after the trial");
    tr_end(tr_all_to_all_begin(all, out.stream, out.at, ones, in.at, ones, 4));
    tr_end(tr_all_gather_begin(pairs, out.stream, TR_I32, out.at, 1));
    used = mpi_fabric_count(fabric);
    TR_CHECK(used.joined == joined.joined, "an operation joins %lld",
             (long long)(used.joined - joined.joined));
    tr_comm_join(world, device);
    used = mpi_fabric_count(fabric);
    TR_CHECK(used.joined == joined.joined, "joined twice");
    device_memory_free(&out);
    device_memory_free(&in);
    tr_comm_expect_blocks(none, device);
    tr_comm_free(all);
    tr_comm_free(pairs);
    tr_comm_free(none);
    TR_CHECK(mpi_fabric_count(fabric).groups_now == before.groups_now, "all left");
}

/* Property: in a circle all may send first, and keep what comes waiting: nobody waits for ever. */
static void circle(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    int to = (rank + 1) % size, from = (rank + size - 1) % size;
    for (int round = 0; round < 10; round++) {
        int64_t n = round * 1000;
        device_memory out = with(streams[0], n, 10 * rank + round, (rank * 5 + round) % 7 * 4);
        device_memory in = with(streams[round % 2], n, -1, 0);
        tr_request *first = send(world, to, 3, &out), *second = receive(world, from, 3, &in);
        if (round % 3) {
            tr_end(first);
            tr_end(second);
        } else {
            tr_end(second);
            tr_end(first);
        }
        device->zero(out.stream, out.at, out.bytes); /* behind the send */
        expect(&in, n, 10 * from + round, "from the rank before");
        device_memory_free(&out);
        device_memory_free(&in);
    }
}

/* Property: messages are matched by tag and direction where the two ranks begin them in different
 * orders, and within a tag in order. */
static void crossed_tags(tr_comm *world) {
    enum { TAGS = 3, EACH = 4, N = TAGS * EACH };
    int rank = tr_comm_rank(world), size = tr_comm_size(world), peer = rank ^ 1;
    if (peer >= size) return;
    device_memory out[N], in[N];
    tr_request *sends[N], *receives[N];
    for (int i = 0; i < N; i++) {
        out[i] = with(streams[i % 2], 50 + i, 1000 * rank + i, i % 4 * 5);
        int tag = rank ? i % TAGS : TAGS - 1 - i % TAGS;
        if (rank) sends[i] = send(world, peer, tag, &out[i]);
        /* messages of tag t are those of the sender with i % TAGS or its mirror image == t */
        int theirs = peer ? i : i / TAGS * TAGS + TAGS - 1 - i % TAGS;
        in[i] = with(streams[i / 2 % 2], 50 + theirs, -1, 0);
        receives[i] = receive(world, peer, i % TAGS, &in[i]);
        if (!rank) sends[i] = send(world, peer, tag, &out[i]);
    }
    for (int i = N - 1; i >= 0; i--) tr_end(receives[i]);
    for (int i = 0; i < N; i++) tr_end(sends[i]);
    for (int i = 0; i < N; i++) {
        int theirs = peer ? i : i / TAGS * TAGS + TAGS - 1 - i % TAGS;
        expect(&in[i], 50 + theirs, 1000 * peer + theirs, "by tag");
    }
    for (int i = 0; i < N; i++) {
        device_memory_free(&in[i]);
        device_memory_free(&out[i]);
    }
}

/* Property: as ring attention does: each offers its block to all at once, and takes those of the
 * others one after the other, computing between. */
static void offers(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    device_memory own = with(streams[0], 3000, 100 * rank, 10), in[2];
    tr_request *offered[64], *coming = NULL;
    for (int i = 0; i < 2; i++) in[i] = with(streams[0], 3000, -1, 0);
    for (int s = 1; s < size; s++) offered[s] = send(world, (rank + s) % size, 1, &own);
    for (int s = 0; s < size; s++) {
        tr_request *arrived = coming;
        if (s + 1 < size)
            coming = receive(world, (rank + size - s - 1) % size, 1, &in[(s + 1) % 2]);
        if (s == 0) continue;
        tr_end(arrived);
        expect(&in[s % 2], 3000, 100 * ((rank + size - s) % size), "offer");
    }
    for (int s = 1; s < size; s++) tr_end(offered[s]);
    device_memory_free(&own);
    for (int i = 0; i < 2; i++) device_memory_free(&in[i]);
}

/* Property: as a pipeline of one forward and one backward does: what goes up and what comes down
 * between two stages cross, in buffers that are used again, with a sum over pairs of ranks between.
 */
static void pipeline(tr_comm *world) {
    enum { MICRO = 7, SLOTS = 3, N = 800 };
    int rank = tr_comm_rank(world), size = tr_comm_size(world), ahead = size - rank;
    device_memory x[SLOTS], g[SLOTS];
    tr_request *up[SLOTS] = {NULL}, *down[SLOTS] = {NULL};
    for (int i = 0; i < SLOTS; i++) {
        x[i] = with(streams[0], N, -1, 0);
        g[i] = with(streams[0], N, -1, 0);
    }
    if (ahead > SLOTS) ahead = SLOTS;
    for (int t = 0; t < MICRO + ahead - 1; t++) {
        int forward = t, backward = t - ahead + 1;
        if (forward < MICRO) {
            int s = forward % SLOTS;
            tr_end(up[s]);
            up[s] = NULL;
            int32_t data[N];
            for (int i = 0; i < N; i++) data[i] = 1000 * forward + i;
            if (rank > 0) {
                tr_end(receive(world, rank - 1, 1, &x[s]));
                expect(&x[s], N, 1000 * forward + rank - 1, "forward");
            }
            for (int i = 0; i < N; i++) data[i] += rank;
            device_memory_write(&x[s], data, 4 * N, 6);
            if (rank + 1 < size) up[s] = send(world, rank + 1, 1, &x[s]);
        }
        if (backward >= 0) {
            int s = backward % SLOTS;
            tr_end(down[s]);
            down[s] = NULL;
            int32_t data[N];
            if (rank + 1 < size) {
                tr_end(receive(world, rank + 1, 2, &g[s]));
                expect(&g[s], N, 5000 * backward + rank + 1, "backward");
            }
            for (int i = 0; i < N; i++) data[i] = 5000 * backward + rank + i;
            device_memory_write(&g[s], data, 4 * N, 6);
            if (rank > 0) down[s] = send(world, rank - 1, 2, &g[s]);
        }
    }
    for (int i = 0; i < SLOTS; i++) {
        tr_end(up[i]);
        tr_end(down[i]);
    }
    for (int i = 0; i < SLOTS; i++) {
        device_memory_free(&x[i]);
        device_memory_free(&g[i]);
    }
}

/* Property: what two ranks have for each other at the same time moves in one group. */
static void together(tr_comm *world) {
    enum { N = 12 };
    int rank = tr_comm_rank(world), size = tr_comm_size(world), peer = rank ^ 1;
    if (peer >= size) return;
    device_memory m[2 * N];
    tr_request *requests[2 * N];
    mpi_fabric_counts before = mpi_fabric_count(fabric);
    for (int i = 0; i < N; i++) {
        m[i] = with(streams[0], 5, 100 * rank + i, 0);
        m[N + i] = with(streams[1], 5, -1, 0);
    }
    for (int i = 0; i < 2; i++) device->stream_wait(streams[i]); /* all may move */
    for (int i = 0; i < N; i++) {
        requests[i] = send(world, peer, i % 2, &m[i]);
        requests[N + i] = receive(world, peer, i % 2, &m[N + i]);
    }
    for (int i = 0; i < 2 * N; i++) tr_end(requests[i]);
    for (int i = 0; i < N; i++) expect(&m[N + i], 5, 100 * peer + i, "together");
    for (int i = 0; i < 2 * N; i++) device_memory_free(&m[i]);
    mpi_fabric_counts after = mpi_fabric_count(fabric);
    TR_CHECK(after.messages - before.messages == 2 * N, "%lld messages",
             (long long)(after.messages - before.messages));
    TR_CHECK(after.exchanges - before.exchanges < 2 * N, "in %lld groups",
             (long long)(after.exchanges - before.exchanges));
}

/* Property: messages and blocks of no bytes are none for the fabric. */
static void nothing_moves(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world), peer = rank ^ 1;
    int64_t none[64] = {0};
    device_memory m = with(streams[0], 0, 0, 0);
    mpi_fabric_counts before = mpi_fabric_count(fabric);
    tr_end(tr_all_to_all_begin(world, m.stream, m.at, none, m.at, none, 4));
    if (peer < size) {
        tr_request *request = receive(world, peer, 9, &m);
        tr_end(send(world, peer, 9, &m));
        tr_end(request);
    }
    device_memory_free(&m);
    TR_CHECK(mpi_fabric_count(fabric).exchanges == before.exchanges, "nothing moves");
}

/* Property: a device can be left, and used again. */
static void leave_and_return(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    for (int round = 0; round < 2; round++) {
        device_memory m = with(streams[0], size, rank, 0);
        tr_end(tr_all_reduce_begin(world, m.stream, TR_SUM, TR_I32, m.at, size));
        expect(&m, 1, size * (size - 1) / 2, "sum");
        device_memory_free(&m);
        tr_comm_leave_device(world, device);
        TR_CHECK(mpi_fabric_count(fabric).groups_now == 0, "groups are left");
    }
}

/* Not a case: ends the job, as the second operation fails on rank 1. */
static void fails(tr_comm *world) {
    if (tr_comm_rank(world) == 1) mpi_fabric_fail_at(fabric, 2);
    device_memory m = with(streams[0], 8, 0, 0);
    for (int i = 0; i < 3; i++) {
        tr_end(tr_all_reduce_begin(world, m.stream, TR_SUM, TR_I32, m.at, 8));
        device->stream_wait(m.stream);
    }
}

/* Not a case: ends the job, as a message is not as long as its receiver thinks. */
static void lengths(tr_comm *world) {
    int rank = tr_comm_rank(world);
    device_memory m = with(streams[0], 8 + rank, 0, 0);
    tr_end(rank == 0 ? send(world, 1, 5, &m) : receive(world, 0, 5, &m));
}

static const mpi_case cases[] = {
    {"links_are_lazy", links_are_lazy},
    {"expected_join_early", expected_join_early},
    {"circle", circle},
    {"crossed_tags", crossed_tags},
    {"offers", offers},
    {"pipeline", pipeline},
    {"together", together},
    {"nothing_moves", nothing_moves},
    {"leave_and_return", leave_and_return},
};

int main(int argc, char **argv) {
    tr_comm *world = tr_comm_start(&argc, &argv);
    tr_comm_set_name(world, "world");
    late = late_create((uint64_t)tr_comm_rank(world) + 500);
    device = late_device_of(late);
    fabric = mpi_fabric_create(late);
    for (int i = 0; i < 2; i++) streams[i] = device->stream_create(device);
    device->stream = streams[0];
    if (argc > 1) {
        (strcmp(argv[1], "fails") == 0 ? fails : lengths)(world);
        return 0;
    }
    int failed = mpi_check_all(world, cases, sizeof cases / sizeof cases[0]);
    for (int i = 0; i < 2; i++) device->stream_destroy(streams[i]);
    tr_comm_leave_device(world, device);
    mpi_fabric_destroy(fabric);
    late_destroy(late);
    late = NULL;
    tr_comm_stop(world);
    return failed != 0;
}
