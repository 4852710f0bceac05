/* tool.c - the store on a command line, for tests from outside and for measuring. Floor: tests.
 *   save DIR STEP       writes the fixture's tensors, cut at random
 *   load PATH           loads them under another cut and compares bit for bit
 *   info|verify PATH    the commands of the program
 *   endless DIR ELEMS   saves steps 1, 2, 3, ... of a large tensor, two kept, until it is killed
 *   bench DIR MIB N     N tensors of MIB in all (with moments): saving and loading against write
 *                       and read of the same bytes to one shared file */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "fixture.h"

static tr_comm *world;
static int rank, size;

static tr_status save(const char *directory, int64_t step, int64_t keep, fx_mode mode, int64_t n,
                      const tr_tensor_info *tensors) {
    fx_part part = fx_part_make(mode, (uint64_t)step, rank, size, n, tensors);
    tr_progress_state state = fx_state(step);
    fx_fill(&part, step, tensors);
    tr_status status =
        tr_checkpoint_save(world, directory, keep, &state, n, tensors, part.npieces, part.pieces);
    fx_part_free(&part);
    return status;
}

static tr_status load(const char *path) {
    tr_progress_state state;
    TR_TRY(tr_checkpoint_state(world, path, &state));
    fx_part part = fx_part_make(FX_RANDOM, 4711, rank, size, fx_ntensors, fx_tensors);
    tr_status status =
        tr_checkpoint_load(world, path, true, fx_ntensors, fx_tensors, part.npieces, part.pieces);
    if (status == TR_OK &&
        (fx_wrong(&part, state.step, 3, fx_tensors) != 0 || !fx_state_right(&state, state.step)))
        status = tr_fail(TR_ERR_INTERNAL, "%s: wrong values were loaded", path);
    fx_part_free(&part);
    free(state.config);
    return tr_agree(world, status);
}

static tr_status endless(const char *directory, int64_t elems) {
    tr_tensor_info large = {"model.large", 1, {elems}};
    for (int64_t step = 1;; step++) {
        TR_TRY(save(directory, step, 2, FX_RANDOM, 1, &large));
        tr_say("saved %d", (int)step);
    }
}

static double seconds(void) {
    struct timespec t;
    tr_end(tr_barrier_begin(world));
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Every rank's part of one shared file, with fsync: what the disk does for `bytes` a rank. */
static void raw(const char *path, bool writing, char *memory, int64_t bytes) {
    int fd = open(path, writing ? O_CREAT | O_RDWR : O_RDONLY, 0666);
    for (int64_t at = 0; at < bytes;) {
        size_t n = (size_t)(bytes - at < (1 << 26) ? bytes - at : 1 << 26);
        ssize_t done = writing ? pwrite(fd, memory + at, n, rank * bytes + at)
                               : pread(fd, memory + at, n, rank * bytes + at);
        if (done <= 0) tr_abort("%s: the plain transfer failed", path);
        at += done;
    }
    if (writing) fsync(fd);
    close(fd);
}

static tr_tensor_info *bench_tensors(int64_t mib, int64_t n) {
    tr_tensor_info *tensors = calloc((size_t)n, sizeof *tensors);
    for (int64_t t = 0; t < n; t++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%d.weight", (int)t);
        tensors[t] = (tr_tensor_info){strdup(name), 2, {mib * (1 << 18) / 3 / n / 256, 256}};
    }
    return tensors;
}

static tr_status bench_round(const char *directory, fx_part *part, int64_t n,
                             const tr_tensor_info *tensors) {
    char path[256], plain[256];
    int64_t bytes = 12 * part->elems; /* gaps in memory do not matter here */
    double total = (double)(bytes * size) / 1e6, at[5];
    tr_progress_state state = fx_state(1);
    tr_checkpoint_path(path, sizeof path, directory, 1);
    snprintf(plain, sizeof plain, "%s/plain", directory);
    if (rank == 0) unlink(plain);
    at[0] = seconds();
    TR_TRY(
        tr_checkpoint_save(world, directory, 1, &state, n, tensors, part->npieces, part->pieces));
    at[1] = seconds();
    raw(plain, true, (char *)part->memory, bytes);
    at[2] = seconds();
    TR_TRY(tr_checkpoint_load(world, path, true, n, tensors, part->npieces, part->pieces));
    at[3] = seconds();
    raw(plain, false, (char *)part->memory, bytes);
    at[4] = seconds();
    tr_say("%.0f MB: save %.2f s %.0f MB/s (plain %.0f, %.0f %%); load %.2f s %.0f MB/s (plain "
           "%.0f, %.0f %%)",
           total, at[1] - at[0], total / (at[1] - at[0]), total / (at[2] - at[1]),
           100 * (at[2] - at[1]) / (at[1] - at[0]), at[3] - at[2], total / (at[3] - at[2]),
           total / (at[4] - at[3]), 100 * (at[4] - at[3]) / (at[3] - at[2]));
    return TR_OK;
}

static tr_status bench(const char *directory, int64_t mib, int64_t n) {
    tr_tensor_info *tensors = bench_tensors(mib, n);
    fx_part part = fx_part_make(FX_EVEN, 0, rank, size, n, tensors);
    tr_status status = TR_OK;
    for (int k = 0; k < 4 && status == TR_OK; k++)
        status = bench_round(directory, &part, n, tensors);
    fx_part_free(&part);
    for (int64_t t = 0; t < n; t++) free((char *)tensors[t].name);
    free(tensors);
    return status;
}

static tr_status dispatch(int argc, char **argv) {
    const char *verb = argc > 2 ? argv[1] : "";
    int64_t number = argc > 3 ? strtoll(argv[3], NULL, 10) : 0;
    if (strcmp(verb, "save") == 0)
        return save(argv[2], number, 0, FX_RANDOM, fx_ntensors, fx_tensors);
    if (strcmp(verb, "load") == 0) return load(argv[2]);
    if (strcmp(verb, "info") == 0) return tr_checkpoint_info(world, argv[2], false);
    if (strcmp(verb, "verify") == 0) return tr_checkpoint_verify(world, argv[2]);
    if (strcmp(verb, "endless") == 0) return endless(argv[2], number);
    if (strcmp(verb, "bench") == 0 && argc > 4)
        return bench(argv[2], number, strtoll(argv[4], NULL, 10));
    return tr_fail(TR_ERR_USAGE, "see the head of tool.c");
}

int main(int argc, char **argv) {
    world = tr_comm_start(&argc, &argv);
    rank = tr_comm_rank(world);
    size = tr_comm_size(world);
    tr_status status = dispatch(argc, argv);
    if (status != TR_OK && rank == 0) tr_print_error(tr_error_message());
    tr_comm_stop(world);
    return (int)status;
}
