/* Properties of every operation of comm.h, on 1 to 8 ranks, with odd sizes, zeros and counts that
 * depend on the rank: with shared memory, without, and on pretended nodes; in pieces of 1000; with
 * synchronous sends. `test_comm bench` prints speeds instead; `mismatch` and `bad_peer` end
 * the job as tr_abort does.
 *
 * Also built for device memory (TR_TEST_ON_DEVICE, on_device.h), staged or through a fabric. */
#include "dist/backend.h"
#include "dist/watch.h"
#include "tests/dist/mpi_check.h"
#include "tests/dist/mpi_counts.h"

#include "base/rng.h"

#include <math.h>
#include <omp.h>
#include <time.h>
#include <unistd.h>

#include "tests/dist/on_device.h"

#ifdef TR_TEST_ON_DEVICE
static const bool on_host = false;
#else
static const bool on_host = true;
#endif

void comm_bench(tr_comm *world);

/* Element i of what rank `rank` holds: needs its fraction's low bits, so the order of sums shows.
 */
static float value_of(int rank, int64_t i) {
    return (float)(tr_random_uniform(7, (uint64_t)rank, (uint64_t)i) * 3.0 - 1.5);
}

static void *checked_malloc(int64_t bytes) {
    void *memory = malloc((size_t)(bytes > 0 ? bytes : 1));
    if (!memory) tr_abort("no memory");
    return memory;
}

static const int64_t sizes[] = {0, 1, 7, 1000, 2500, 70001};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

static void send_around(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    for (int s = 0; s < SIZES; s++) {
        /* The count depends on the sender. */
        int from = (rank + size - 1) % size;
        int64_t n = sizes[s] + rank, n_from = sizes[s] + from;
        unsigned char *out = checked_malloc(n), *in = checked_malloc(n_from);
        for (int64_t i = 0; i < n; i++) out[i] = (unsigned char)(i * 7 + rank);
        memset(in, 0xee, (size_t)n_from);
        tr_request *recv = tr_recv_begin(world, NULL, from, 5, in, n_from);
        tr_request *send = tr_send_begin(world, NULL, (rank + 1) % size, 5, out, n);
        tr_end(send);
        tr_end(recv);
        for (int64_t i = 0; i < n_from; i++)
            TR_CHECK(in[i] == (unsigned char)(i * 7 + from), "size %lld byte %lld",
                     (long long)n_from, (long long)i);
        free(out);
        free(in);
    }
}

/* Property: whichever message comes is found, others stay in flight, and what was sent is counted
 * once, without what a rank sends to itself. */
static void whichever_comes(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    int to = (rank + 1) % size, from = (rank + size - 1) % size;
    tr_sent before = tr_comm_sent(world);
    int32_t out[2] = {rank, rank + 100}, in[2] = {-1, -1};
    tr_request *waiting[3] = {NULL};
    for (int i = 0; i < 2; i++) waiting[1 + i] = tr_recv_begin(world, NULL, from, 1 + i, &in[i], 4);
    for (int i = 1; i >= 0; i--) { /* the second first: no other is in flight */
        tr_request *send = tr_send_begin(world, NULL, to, 1 + i, &out[i], 4);
        int found = tr_wait_any(waiting, 3);
        TR_CHECK(found == 1 + i, "found %d, not %d", found, 1 + i);
        tr_end(waiting[found]);
        waiting[found] = NULL;
        tr_end(send);
        TR_CHECK(in[i] == from + 100 * i, "got %d", in[i]);
        tr_end(tr_barrier_begin(world));
    }
    tr_sent after = tr_comm_sent(world);
    int others = size > 1 ? 2 : 0;
    TR_CHECK(after.messages - before.messages == others, "%lld messages",
             (long long)(after.messages - before.messages));
    TR_CHECK(after.bytes - before.bytes == 4 * others, "%lld bytes",
             (long long)(after.bytes - before.bytes));
}

/* Property: both ranks of a pair may send first, however large the message. */
static void exchange_4_mb(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world), peer = rank ^ 1;
    if (peer >= size) return;
    int64_t n = 1 << 20;
    int32_t *out = checked_malloc(4 * n), *in = checked_malloc(4 * n);
    for (int64_t i = 0; i < n; i++) out[i] = (int32_t)(i + rank);
    tr_request *send = tr_send_begin(world, NULL, peer, 1, out, 4 * n);
    tr_request *recv = tr_recv_begin(world, NULL, peer, 1, in, 4 * n);
    tr_end(recv);
    tr_end(send);
    for (int64_t i = 0; i < n; i++) TR_CHECK(in[i] == i + peer, "element %lld", (long long)i);
    free(out);
    free(in);
}

/* Property: messages are matched by tag, and in order within a tag, whatever the order of ends;
 * many are in flight at once. */
static void many_in_flight(tr_comm *world) {
    enum { TAGS = 8, EACH = 40, N = TAGS * EACH };
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    int to = (rank + 1) % size, from = (rank + size - 1) % size;
    static int64_t out[N], in[N];
    static tr_request *sends[N], *recvs[N];
    for (int i = 0; i < N; i++) { /* tags upwards */
        out[i] = rank * 1000 + i;
        sends[i] = tr_send_begin(world, NULL, to, i % TAGS, &out[i], sizeof out[i]);
    }
    tr_request *barrier = tr_barrier_begin(world);
    for (int i = 0; i < N; i++) { /* tags downwards, order kept within each */
        int message = TAGS - 1 - i % TAGS + i / TAGS * TAGS;
        in[message] = -1;
        recvs[i] = tr_recv_begin(world, NULL, from, message % TAGS, &in[message], sizeof in[0]);
    }
    for (int i = N - 1; i >= 0; i--) tr_end(recvs[i]);
    tr_end(barrier);
    for (int i = 0; i < N; i++) tr_end(sends[i]);
    for (int i = 0; i < N; i++)
        TR_CHECK(in[i] == from * 1000 + i, "message %d is %lld", i, (long long)in[i]);
}

/* Property: no rank leaves a barrier before the last has entered it (by the node's clock). */
static void barrier(tr_comm *world) {
    for (int late = 0; late < tr_comm_size(world); late++) {
        if (tr_comm_rank(world) == late) usleep(5000);
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        double entered = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
        tr_request *request = tr_barrier_begin(world);
        while (!tr_test(request)) usleep(100);
        TR_CHECK(tr_test(request), "a complete request stays complete");
        tr_end(request);
        clock_gettime(CLOCK_MONOTONIC, &now);
        double left = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
        tr_end(tr_all_reduce_begin(world, NULL, TR_MAX, TR_F64, &entered, 1));
        TR_CHECK(left >= entered, "left %g s before", entered - left);
    }
}

static void broadcast(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    for (int s = 0; s < SIZES; s++)
        for (int root = 0; root<size; root += size> 2 ? size - 2 : 1) {
            int64_t n = sizes[s];
            unsigned char *data = checked_malloc(n);
            for (int64_t i = 0; i < n; i++) data[i] = (unsigned char)(i * 3 + rank);
            tr_end(tr_broadcast_begin(world, NULL, root, data, n));
            for (int64_t i = 0; i < n; i++)
                TR_CHECK(data[i] == (unsigned char)(i * 3 + root), "root %d byte %lld", root,
                         (long long)i);
            free(data);
        }
}

/* Integers and doubles are exact: any order of summation gives the same. */
static void all_reduce_exact(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    for (int s = 0; s < SIZES; s++) {
        int64_t n = sizes[s];
        int64_t *i64 = checked_malloc(8 * n);
        int32_t *i32 = checked_malloc(4 * n);
        double *f64 = checked_malloc(8 * n);
        float *f32 = checked_malloc(4 * n);
        for (int64_t i = 0; i < n; i++) {
            i64[i] = (INT64_C(1) << 40) * (rank + 1) + i;
            i32[i] = (int32_t)((rank * 31 + i) % 17);
            f64[i] = rank + 0.5 * (double)i;
            f32[i] = (float)((rank + 1) * (i % 3 == 0 ? -1 : 1));
        }
        tr_request *requests[] = {
            tr_all_reduce_begin(world, NULL, TR_SUM, TR_I64, i64, n),
            tr_all_reduce_begin(world, NULL, TR_MAX, TR_I32, i32, n),
            tr_all_reduce_begin(world, NULL, TR_SUM, TR_F64, f64, n),
            tr_all_reduce_begin(world, NULL, TR_MIN, TR_F32, f32, n),
        };
        for (int r = 0; r < 4; r++) tr_end(requests[r]);
        int64_t pairs = size * (size - 1) / 2;
        for (int64_t i = 0; i < n; i++) {
            int32_t most = 0;
            for (int k = 0; k < size; k++)
                if ((k * 31 + i) % 17 > most) most = (int32_t)((k * 31 + i) % 17);
            TR_CHECK(i64[i] == (INT64_C(1) << 40) * (pairs + size) + size * i, "i64 %lld",
                     (long long)i);
            TR_CHECK(i32[i] == most, "i32 %lld", (long long)i);
            TR_CHECK(f64[i] == (double)pairs + size * 0.5 * (double)i, "f64 %lld", (long long)i);
            TR_CHECK(f32[i] == (i % 3 == 0 ? (float)-size : 1.0f), "f32 %lld", (long long)i);
        }
        free(i64);
        free(i32);
        free(f64);
        free(f32);
    }
}

/* fp32 sums: within rounding of float64, bitwise the same on all ranks and again. */
static void all_reduce_f32(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    int64_t n = 600001; /* several pieces */
    float *first = checked_malloc(4 * n), *again = checked_malloc(4 * n);
    for (int64_t i = 0; i < n; i++) first[i] = again[i] = value_of(rank, i);
    tr_end(tr_all_reduce_begin(world, NULL, TR_SUM, TR_F32, first, n));
    tr_end(tr_all_reduce_begin(world, NULL, TR_SUM, TR_F32, again, n));
    TR_CHECK(memcmp(first, again, (size_t)(4 * n)) == 0, "not repeatable");
    for (int64_t i = 0; i < n; i += 97) {
        double want = 0, bound = 0;
        for (int k = 0; k < size; k++) {
            want += value_of(k, i);
            bound += fabs(value_of(k, i));
        }
        TR_CHECK(fabs(first[i] - want) <= size * 6e-8 * bound, "element %lld", (long long)i);
    }
    memcpy(again, first, (size_t)(4 * n));
    tr_end(tr_broadcast_begin(world, NULL, 0, again, 4 * n));
    TR_CHECK(memcmp(first, again, (size_t)(4 * n)) == 0, "differs from rank 0");
    free(first);
    free(again);
}

/* One reduce_scatter and all_gather of size*n over `buffer`, compared with sums in rank order:
 * bitwise where the memory is shared or two ranks add, else within rounding. */
static void check_sum(tr_comm *comm, float *buffer, int64_t n, bool in_rank_order) {
    int rank = tr_comm_rank(comm), size = tr_comm_size(comm);
    for (int64_t i = 0; i < size * n; i++) buffer[i] = value_of(rank, i);
    tr_end(tr_reduce_scatter_begin(comm, NULL, TR_F32, buffer, n));
    /* By contract peers may overwrite theirs now, and the rest of ours is undefined. */
    for (int64_t i = 0; i < size * n; i++)
        if (i / (n > 0 ? n : 1) != rank) buffer[i] = NAN;
    tr_end(tr_all_gather_begin(comm, NULL, TR_F32, buffer, n));
    double worst = 0;
    for (int64_t i = 0; i < size * n; i++) {
        float in_order = value_of(0, i);
        double want = value_of(0, i), bound = fabs(want);
        for (int k = 1; k < size; k++) {
            in_order += value_of(k, i);
            want += value_of(k, i);
            bound += fabs(value_of(k, i));
        }
        double error = fabs(buffer[i] - want) / bound;
        if (!(error <= worst)) worst = error;
        if (in_rank_order)
            TR_CHECK(buffer[i] == in_order, "n %lld element %lld: %.9g, not %.9g", (long long)n,
                     (long long)i, (double)buffer[i], (double)in_order);
    }
    TR_CHECK(worst <= size * 6e-8, "n %lld: error %.2g", (long long)n, worst);
    for (int64_t i = 0; i < size * n; i++) buffer[i] = -1; /* a peer still reading would see it */
}

static void reduce_scatter_all_gather(tr_comm *world) {
    int size = tr_comm_size(world);
    bool direct = on_host && tr_comm_get_switches()->shared && tr_comm_node_size(world) == size;
    for (int s = 0; s < SIZES; s++) {
        int64_t n = sizes[s], bytes = size * n * 4;
        float *private_memory = checked_malloc(bytes);
        float *shared = tr_comm_alloc(world, bytes + 400);
        check_sum(world, private_memory, n, size <= 2);
        check_sum(world, shared, n, size <= 2 || direct);
        check_sum(world, shared + 100, n, size <= 2 || direct);
        tr_comm_free_memory(world, shared);
        free(private_memory);
    }
}

static void repeats_bitwise(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    int64_t n = 30011;
    float *buffer = tr_comm_alloc(world, size * n * 4), *first = checked_malloc(4 * n);
    for (int round = 0; round < 3; round++) {
        for (int64_t i = 0; i < size * n; i++) buffer[i] = value_of(rank, i);
        tr_end(tr_reduce_scatter_begin(world, NULL, TR_F32, buffer, n));
        if (round == 0) memcpy(first, buffer + rank * n, (size_t)(4 * n));
        TR_CHECK(memcmp(first, buffer + rank * n, (size_t)(4 * n)) == 0, "round %d", round);
    }
    tr_comm_free_memory(world, buffer);
    free(first);
}

/* Property: any element type is gathered; zeroed, page-aligned memory comes from tr_comm_alloc. */
static void all_gather_types(tr_comm *world) {
    static const tr_dtype types[] = {TR_BF16, TR_U8, TR_F64, TR_I32, TR_I64};
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    for (int t = 0; t < 5; t++)
        for (int in_shared = 0; in_shared < 2; in_shared++) {
            int64_t n = 1733, bytes = n * (int64_t)tr_dtype_bytes(types[t]);
            unsigned char *data =
                in_shared ? tr_comm_alloc(world, size * bytes) : checked_malloc(size * bytes);
            if (in_shared) {
                TR_CHECK((uintptr_t)data % 4096 == 0, "alignment");
                for (int64_t i = 0; i < size * bytes; i++) TR_CHECK(data[i] == 0, "not zeroed");
            }
            for (int64_t i = 0; i < bytes; i++)
                data[rank * bytes + i] = (unsigned char)(i * 5 + rank * 31);
            tr_end(tr_all_gather_begin(world, NULL, types[t], data, n));
            for (int k = 0; k < size; k++)
                for (int64_t i = 0; i < bytes; i++)
                    TR_CHECK(data[k * bytes + i] == (unsigned char)(i * 5 + k * 31),
                             "type %d rank %d", (int)types[t], k);
            if (in_shared)
                tr_comm_free_memory(world, data);
            else
                free(data);
        }
}

/* Property: rows reach the rank they are for, in rank order, with counts from 0 up, and a rank that
 * sends or receives nothing at all. rows(a, b) is what a sends to b. */
static int64_t rows(int pattern, int a, int b, int size) {
    switch (pattern) {
    case 0:
        return (a * 3 + b * 5) % 4;
    case 1:
        return b == 0 ? 700 + a : 0; /* all to rank 0 */
    case 2:
        return a == size - 1 ? 0 : a + 2 * b; /* the last sends nothing */
    case 3:
        return 0;
    default:
        return 5 * (a + 1) * ((a + b) % 2 == 0);
    }
}

static void all_to_all(tr_comm *world) {
    static const int64_t row_sizes[] = {4, 12, 2500};
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    int64_t *send_rows = checked_malloc(8 * size), *recv_rows = checked_malloc(8 * size);
    for (int w = 0; w < 3; w++)
        for (int pattern = 0; pattern < 5; pattern++) {
            int64_t row = row_sizes[w], sent = 0, received = 0;
            for (int k = 0; k < size; k++) {
                sent += send_rows[k] = rows(pattern, rank, k, size);
                received += recv_rows[k] = rows(pattern, k, rank, size);
            }
            unsigned char *send = checked_malloc(sent * row),
                          *recv = checked_malloc(received * row);
            int64_t at = 0;
            for (int k = 0; k < size; k++)
                for (int64_t i = 0; i < send_rows[k] * row; i++)
                    send[at++] = (unsigned char)(rank * 17 + k * 5 + i);
            memset(recv, 0xee, (size_t)(received * row));
            tr_request *request =
                tr_all_to_all_begin(world, NULL, send, send_rows, recv, recv_rows, row);
            memset(send_rows, 0x7f, (size_t)(8 * size)); /* read before begin returned */
            tr_end(request);
            at = 0;
            for (int k = 0; k < size; k++)
                for (int64_t i = 0; i < recv_rows[k] * row; i++, at++)
                    TR_CHECK(recv[at] == (unsigned char)(k * 17 + rank * 5 + i),
                             "pattern %d row %lld from %d", pattern, (long long)row, k);
            free(send);
            free(recv);
        }
    free(send_rows);
    free(recv_rows);
}

/* Property: operations of one communicator overlap and end in any order that ranks share, and
 * point-to-point messages do not meet those of collectives. */
static void collectives_overlap(tr_comm *world) {
    enum { N = 5 };
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    int64_t n = 5003;
    float *buffers[N];
    tr_request *scatters[N], *sums[N];
    double small[N];
    int32_t passed = -1;
    tr_request *recv = tr_recv_begin(world, NULL, (rank + size - 1) % size, 0, &passed, 4);
    for (int i = 0; i < N; i++) {
        buffers[i] = i % 2 ? tr_comm_alloc(world, size * n * 4) : checked_malloc(size * n * 4);
        for (int64_t e = 0; e < size * n; e++) buffers[i][e] = (float)(rank + i + e % 10);
        small[i] = rank + i;
    }
    for (int i = 0; i < N; i++) {
        scatters[i] = tr_reduce_scatter_begin(world, NULL, TR_F32, buffers[i], n);
        sums[i] = tr_all_reduce_begin(world, NULL, TR_SUM, TR_F64, &small[i], 1);
    }
    tr_request *send = tr_send_begin(world, NULL, (rank + 1) % size, 0, &rank, 4);
    for (int i = N - 1; i >= 0; i--) {
        tr_end(sums[i]);
        tr_end(scatters[i]);
    }
    tr_end(recv);
    tr_end(send);
    int64_t ranks_sum = size * (size - 1) / 2;
    TR_CHECK(passed == (rank + size - 1) % size, "%d", passed);
    for (int i = 0; i < N; i++) {
        TR_CHECK(small[i] == (double)(ranks_sum + size * i), "all_reduce %d", i);
        for (int64_t e = rank * n; e < (rank + 1) * n; e++)
            TR_CHECK(buffers[i][e] == (float)(ranks_sum + size * (i + e % 10)),
                     "reduce_scatter %d element %lld", i, (long long)e);
    }
    for (int i = 0; i < N; i++) {
        if (i % 2)
            tr_comm_free_memory(world, buffers[i]);
        else
            free(buffers[i]);
    }
}

/* Property: ranks that end operations of two communicators in opposite orders do not hang. */
static void opposite_orders(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    tr_comm *other = tr_comm_split(world, 0, -rank); /* the same ranks, reversed */
    TR_CHECK(tr_comm_rank(other) == size - 1 - rank, "key orders");
    int64_t n = 40009;
    for (int in_shared = 0; in_shared < 2; in_shared++) {
        tr_comm *comms[2] = {world, other};
        float *buffers[2];
        tr_request *requests[2];
        for (int c = 0; c < 2; c++) {
            buffers[c] =
                in_shared ? tr_comm_alloc(comms[c], size * n * 4) : checked_malloc(size * n * 4);
            for (int64_t e = 0; e < size * n; e++) buffers[c][e] = (float)(rank + c);
        }
        for (int c = 0; c < 2; c++)
            requests[c] = tr_reduce_scatter_begin(comms[c], NULL, TR_F32, buffers[c], n);
        tr_end(requests[rank % 2]);
        tr_end(requests[1 - rank % 2]);
        for (int c = 0; c < 2; c++) {
            int64_t own = tr_comm_rank(comms[c]) * n;
            for (int64_t e = own; e < own + n; e++)
                TR_CHECK(buffers[c][e] == (float)(size * (size - 1) / 2 + size * c), "comm %d", c);
            if (in_shared)
                tr_comm_free_memory(comms[c], buffers[c]);
            else
                free(buffers[c]);
        }
    }
    tr_comm_free(other);
}

/* Property: communicators cut from the world work at the same time without meeting. */
static void split(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    tr_comm *halves = tr_comm_split(world, rank % 2, rank);
    tr_comm *some = tr_comm_split(world, rank == 0 ? -1 : 3, rank);
    TR_CHECK((some == NULL) == (rank == 0), "negative color");
    TR_CHECK(tr_comm_size(halves) == (size + 1 - rank % 2) / 2, "%d", tr_comm_size(halves));
    TR_CHECK(tr_comm_rank(halves) == rank / 2, "%d", tr_comm_rank(halves));
    TR_CHECK(!some || tr_comm_size(some) == size - 1, "some");
    int own_size = 0;
    MPI_Comm_size(*(MPI_Comm *)tr_comm_mpi(halves), &own_size);
    TR_CHECK(own_size == tr_comm_size(halves), "tr_comm_mpi");

    double whole = rank, half = rank, part = rank;
    tr_request *a = tr_all_reduce_begin(world, NULL, TR_SUM, TR_F64, &whole, 1);
    tr_request *b = tr_all_reduce_begin(halves, NULL, TR_SUM, TR_F64, &half, 1);
    tr_request *c = some ? tr_all_reduce_begin(some, NULL, TR_SUM, TR_F64, &part, 1) : NULL;
    int64_t n = 3001;
    float *sum = tr_comm_alloc(halves, tr_comm_size(halves) * n * 4);
    check_sum(halves, sum, n, false);
    tr_end(c);
    tr_end(b);
    tr_end(a);
    double want = 0;
    for (int k = rank % 2; k < size; k += 2) want += k;
    TR_CHECK(half == want, "halves");
    TR_CHECK(whole == size * (size - 1) / 2.0, "world");
    TR_CHECK(!some || part == size * (size - 1) / 2.0, "some");
    tr_comm_free(halves); /* with its memory */
    tr_comm_free(some);
}

/* Property: all well: all OK. Else everyone returns the lowest failing rank's status, and rank 0
 * holds its message. */
static void agree(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    TR_CHECK(tr_agree(world, TR_OK) == TR_OK, "all well");
    for (int failing = 0; failing < size; failing++) {
        tr_status mine = TR_OK;
        tr_fail(TR_OK, "stale");
        if (rank == failing) mine = tr_fail(TR_ERR_DATA, "bad thing on %d", rank);
        if (rank > failing && rank % 2) mine = tr_fail(TR_ERR_IO, "later thing on %d", rank);
        TR_CHECK(tr_agree(world, mine) == TR_ERR_DATA, "failing %d", failing);
        char want[64];
        snprintf(want, sizeof want, "bad thing on %d", failing);
        if (rank == 0) TR_CHECK(!strcmp(tr_error_message(), want), "%s", tr_error_message());
    }
}

/* Property: a limit of 1000 sends 2500 in three transfers, and no call passes more, whatever the
 * operation; with the switch every send is synchronous. Counted between the library and MPI. */
static void transfers_are_cut(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    if (size < 2) return;
    tr_comm_set_chunk_limit(1000);
    tr_comm_set_synchronous(true);
    char data[2500];
    memset(data, rank, sizeof data);
    mpi_counted = (mpi_counts){0};
    if (rank == 0) tr_end(tr_send_begin(world, NULL, 1, 3, data, sizeof data));
    if (rank == 1) tr_end(tr_recv_begin(world, NULL, 0, 3, data, sizeof data));
    if (rank < 2) TR_CHECK(mpi_counted.calls == 3, "%lld calls", (long long)mpi_counted.calls);
    if (rank == 1) TR_CHECK(data[0] == 0 && data[1700] == 0 && data[2499] == 0, "data");

    int64_t *one = checked_malloc(8 * size);
    for (int k = 0; k < size; k++) one[k] = 1;
    char *blocks = checked_malloc(2500 * size), *sent = checked_malloc(2500 * size);
    memset(sent, rank, (size_t)(2500 * size));
    mpi_counted = (mpi_counts){0};
    tr_end(tr_all_to_all_begin(world, NULL, sent, one, blocks, one, 2500));
    TR_CHECK(mpi_counted.synchronous_sends == 3 * (size - 1), "all_to_all: %lld",
             (long long)mpi_counted.synchronous_sends);
    for (int64_t i = 0; i < 2500 * size; i++) TR_CHECK(blocks[i] == i / 2500, "all_to_all");

    float *floats = checked_malloc(2500 * size * 4);
    tr_end(tr_all_gather_begin(world, NULL, TR_U8, blocks, 2500));
    check_sum(world, floats, 2500, size == 2);
    tr_end(tr_broadcast_begin(world, NULL, 0, blocks, 2500));
    tr_end(tr_all_reduce_begin(world, NULL, TR_SUM, TR_F32, floats, 2500));
    TR_CHECK(mpi_counted.largest == 1000, "largest %lld", (long long)mpi_counted.largest);
    TR_CHECK(mpi_counted.sends == 0, "%lld sends are not synchronous",
             (long long)mpi_counted.sends);
    free(one);
    free(blocks);
    free(sent);
    free(floats);
}

/* Property: once a step has been seen, its repetition takes its requests from the pool. */
static int64_t pooled(const tr_comm *comm) {
    int64_t requests = 0;
    for (const tr_request *request = comm->pool; request; request = request->next) requests++;
    return requests;
}

static void requests_are_reused(tr_comm *world) {
    int64_t after_first = 0;
    for (int round = 0; round < 3; round++) {
        collectives_overlap(world);
        all_to_all(world);
        if (round == 0) after_first = pooled(world);
        TR_CHECK(pooled(world) == after_first, "round %d: %lld", round, (long long)pooled(world));
        TR_CHECK(world->in_flight == 0 && !world->runtime->first, "requests are left");
    }
}

/* Not a case: ends the job. Two ranks reduce different counts, in the place and step given. */
static void mismatch(tr_comm *world) {
    float *buffer = tr_comm_alloc(world, 4096);
    tr_watch_place("pipeline 1, data 0");
    tr_watch_step(17);
    tr_end(tr_reduce_scatter_begin(world, NULL, TR_F32, buffer, 10 + tr_comm_rank(world)));
}

/* Not a case: ends the job, with MPI's own error. */
static void bad_peer(tr_comm *world) {
    tr_end(tr_send_begin(world, NULL, 99, 0, NULL, 0));
}

/* Not a case: ends the job, with the error of one transfer of several. */
static void too_long(tr_comm *world) {
    char data[64];
    int peer = tr_comm_rank(world) ^ 1;
    tr_request *send = tr_send_begin(world, NULL, peer, 0, data, sizeof data);
    tr_end(tr_recv_begin(world, NULL, peer, 0, data, 10));
    tr_end(send);
}

static const mpi_case cases[] = {
    {"send_around", send_around},
    {"whichever_comes", whichever_comes},
    {"exchange_4_mb", exchange_4_mb},
    {"many_in_flight", many_in_flight},
    {"barrier", barrier},
    {"broadcast", broadcast},
    {"all_reduce_exact", all_reduce_exact},
    {"all_reduce_f32", all_reduce_f32},
    {"reduce_scatter_all_gather", reduce_scatter_all_gather},
    {"repeats_bitwise", repeats_bitwise},
    {"all_gather_types", all_gather_types},
    {"all_to_all", all_to_all},
    {"collectives_overlap", collectives_overlap},
    {"opposite_orders", opposite_orders},
    {"split", split},
    {"agree", agree},
    {"requests_are_reused", requests_are_reused},
};

static const mpi_case cut_case[] = {{"transfers_are_cut", transfers_are_cut}};

int main(int argc, char **argv) {
    tr_comm *world = tr_comm_start(&argc, &argv);
    if (!on_host) on_device_start(argc > 1 && !strcmp(argv[1], "fabric"), tr_comm_rank(world));
    static const mpi_case by_name[] = {{"bench", comm_bench},
                                       {"mismatch", mismatch},
                                       {"bad_peer", bad_peer},
                                       {"too_long", too_long}};
    for (size_t i = 0; i < sizeof by_name / sizeof by_name[0]; i++)
        if (argc > 1 && !strcmp(argv[1], by_name[i].name)) {
            by_name[i].body(world);
            tr_comm_stop(world);
            return 0;
        }
    omp_set_num_threads(tr_comm_size(world) > 2 ? 1 : 2); /* the ranks share a small machine */
    static const struct {
        int64_t limit;
        bool synchronous, shared;
        int node_ranks; /* 0: as it is */
        bool round_robin;
    } runs[] = {{0, false, true, 0, false},    {0, true, false, 0, false},
                {1000, false, true, 0, false}, {1000, true, false, 0, false},
                {0, false, true, 2, false},    {1000, true, true, 2, true}};
    int failed = 0, rank = tr_comm_rank(world);
    for (size_t r = 0; r < sizeof runs / sizeof runs[0]; r++) {
        if (runs[r].node_ranks > 0 && tr_comm_size(world) <= runs[r].node_ranks) continue;
        tr_comm_set_chunk_limit(runs[r].limit);
        tr_comm_set_synchronous(runs[r].synchronous);
        tr_comm_set_shared(runs[r].shared);
        tr_comm_set_node_ranks(runs[r].node_ranks);
        if (rank == 0)
            printf("limit %lld, %s sends, %s memory, nodes of %d%s\n", (long long)runs[r].limit,
                   runs[r].synchronous ? "synchronous" : "standard",
                   runs[r].shared ? "shared" : "private", runs[r].node_ranks,
                   runs[r].round_robin ? ", ranks dealt round" : "");
        int key = runs[r].round_robin ? rank % 2 * 1000 + rank : rank;
        tr_comm *comm = tr_comm_split(world, 0, key);
        failed += mpi_check_all(comm, cases, sizeof cases / sizeof cases[0]);
        tr_comm_free(comm);
    }
    tr_comm_set_node_ranks(0);
    if (on_host || !on_device_has_fabric()) failed += mpi_check_all(world, cut_case, 1);
    if (!on_host) on_device_stop(world);
    tr_comm_stop(world);
    return failed != 0;
}
