/* comm_bench.c - speed of the operations that a training step waits for: the best and the median of
 * several rounds, each the slowest rank's time. Run as `mpirun -n 2 tests/test_comm bench`. */
#include "dist/comm.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void comm_bench(tr_comm *world);

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct {
    tr_comm *comm;
    float *buffer;
    int64_t n; /* of one block */
} bench_data;

static void sum(bench_data *data) {
    tr_end(tr_reduce_scatter_begin(data->comm, NULL, TR_F32, data->buffer, data->n));
    tr_end(tr_all_gather_begin(data->comm, NULL, TR_F32, data->buffer, data->n));
}

static void all_reduce(bench_data *data) {
    tr_end(tr_all_reduce_begin(data->comm, NULL, TR_SUM, TR_F32, data->buffer,
                               data->n * tr_comm_size(data->comm)));
}

static void all_to_all(bench_data *data) {
    int size = tr_comm_size(data->comm);
    int64_t rows[1024];
    for (int k = 0; k < size && k < 1024; k++) rows[k] = data->n / 2 / 64;
    tr_end(tr_all_to_all_begin(data->comm, NULL, data->buffer, rows,
                               data->buffer + size * (data->n / 2), rows, 256));
}

static void small_all_reduce(bench_data *data) {
    double values[16] = {0};
    tr_end(tr_all_reduce_begin(data->comm, NULL, TR_SUM, TR_F64, values, 16));
}

static void barrier(bench_data *data) {
    tr_end(tr_barrier_begin(data->comm));
}

enum { ROUNDS = 31 };

/* Fills times[ROUNDS], sorted. */
static void measure(bench_data *data, void (*work)(bench_data *), int each, double *times) {
    for (int round = -1; round < ROUNDS; round++) { /* the first warms up */
        tr_end(tr_barrier_begin(data->comm));
        double begin = MPI_Wtime();
        for (int i = 0; i < each; i++) work(data);
        double time = (MPI_Wtime() - begin) / each;
        tr_end(tr_all_reduce_begin(data->comm, NULL, TR_MAX, TR_F64, &time, 1));
        if (round >= 0) times[round] = time;
    }
    qsort(times, ROUNDS, sizeof times[0], by_value);
}

void comm_bench(tr_comm *world) {
    int rank = tr_comm_rank(world), size = tr_comm_size(world);
    int64_t bytes = INT64_C(64) << 20, n = bytes / 4 / size / 128 * 128;
    bench_data shared = {world, tr_comm_alloc(world, bytes), n};
    bench_data own = {world, calloc(1, (size_t)bytes), n};
    if (!own.buffer) tr_abort("no memory");
    memset(own.buffer, 0, (size_t)bytes);
    const struct {
        const char *name;
        bench_data *data;
        void (*work)(bench_data *);
        int64_t bytes; /* 0: so small that latency counts */
    } rows[] = {{"64 MB sum, shared memory", &shared, sum, bytes},
                {"64 MB sum, private memory", &own, sum, bytes},
                {"64 MB all_reduce, shared", &shared, all_reduce, bytes},
                {"64 MB all_reduce, private", &own, all_reduce, bytes},
                {"32 MB all_to_all", &own, all_to_all, bytes / 2},
                {"16 doubles all_reduce", &own, small_all_reduce, 0},
                {"barrier", &own, barrier, 0}};
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        double times[ROUNDS];
        measure(rows[r].data, rows[r].work, rows[r].bytes == 0 ? 200 : 1, times);
        if (rank != 0) continue;
        double best = times[0], median = times[ROUNDS / 2];
        if (rows[r].bytes == 0)
            printf("%d ranks  %-28s best %8.2f us  median %8.2f us\n", size, rows[r].name,
                   best * 1e6, median * 1e6);
        else
            printf("%d ranks  %-28s best %8.2f ms %6.2f GB/s  median %8.2f ms %6.2f GB/s\n", size,
                   rows[r].name, best * 1e3, (double)rows[r].bytes / best * 1e-9, median * 1e3,
                   (double)rows[r].bytes / median * 1e-9);
        fflush(stdout);
    }
    tr_comm_free_memory(world, shared.buffer);
    free(own.buffer);
}
