/* Property: what any partition saves, any other loads bit for bit, in the same file; a save that
 * fails, on whatever rank and for whatever reason, ends on all ranks and changes nothing. Floor:
 * tests. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "fixture.h"
#include "ranks.h"

static int rank, size;

static tr_status save_list(const char *folder, int64_t step, int64_t keep, fx_mode mode,
                           int64_t ntensors, const tr_tensor_info *tensors) {
    fx_part part = fx_part_make(mode, (uint64_t)step, rank, size, ntensors, tensors);
    tr_progress_state state = fx_state(step);
    fx_fill(&part, step, tensors);
    tr_status status = tr_checkpoint_save(ranks_world, folder, keep, &state, ntensors, tensors,
                                          part.npieces, part.pieces);
    fx_part_free(&part);
    return status;
}

static tr_status save(const char *folder, int64_t step, int64_t keep, fx_mode mode) {
    return save_list(folder, step, keep, mode, fx_ntensors, fx_tensors);
}

static tr_status load_list(const char *folder, int64_t step, bool moments, fx_mode mode,
                           int64_t ntensors, const tr_tensor_info *tensors) {
    char path[256];
    tr_checkpoint_path(path, sizeof path, folder, step);
    fx_part part = fx_part_make(mode, (uint64_t)step + 99, rank, size, ntensors, tensors);
    tr_status status = tr_checkpoint_load(ranks_world, path, moments, ntensors, tensors,
                                          part.npieces, part.pieces);
    if (status == TR_OK) {
        CHECK(fx_wrong(&part, step, moments ? 3 : 1, tensors) == 0, "step %d partition %d",
              (int)step, (int)mode);
        if (!moments && part.elems > 0)
            CHECK(((unsigned char *)part.pieces[0].m)[0] == 0xff, "moments were touched");
    }
    fx_part_free(&part);
    return status;
}

static tr_status load(const char *folder, int64_t step, bool moments, fx_mode mode) {
    return load_list(folder, step, moments, mode, fx_ntensors, fx_tensors);
}

static void expect_state(const char *folder, int64_t step) {
    char path[256];
    tr_progress_state state;
    tr_checkpoint_path(path, sizeof path, folder, step);
    ranks_expect(tr_checkpoint_state(ranks_world, path, &state), TR_OK, "");
    CHECK(fx_state_right(&state, step), "step %d", (int)step);
    free(state.config);
}

/* Whether the folder holds exactly these steps, newest first, and no other file. */
static void expect_steps(const char *folder, int64_t n, const int64_t *want) {
    int64_t *steps, count;
    char command[256];
    ranks_expect(tr_checkpoint_list(ranks_world, folder, &steps, &count), TR_OK, "");
    CHECK(count == n, "%d steps, want %d", (int)count, (int)n);
    for (int64_t i = 0; i < n && i < count; i++)
        CHECK(steps[i] == want[i], "step %d, want %d", (int)steps[i], (int)want[i]);
    free(steps);
    snprintf(command, sizeof command, "test $(ls -A '%s' 2>/dev/null | wc -l) -eq %d", folder,
             (int)n);
    if (ranks_first()) CHECK(system(command) == 0, "other files in %s", folder);
    ranks_wait();
}

static void all_partitions(const char *folder) {
    for (fx_mode from = 0; from < FX_COVERS; from++) {
        ranks_expect(save(folder, 100 + from, 0, from), TR_OK, "");
        expect_state(folder, 100 + from);
        for (fx_mode to = 0; to < FX_MODES; to++) {
            ranks_expect(load(folder, 100 + from, true, to), TR_OK, "");
            ranks_expect(load(folder, 100 + from, false, to), TR_OK, "");
        }
    }
}

static void test_every_partition_loads_every_other(void **unused) {
    (void)unused;
    const char *folder = ranks_folder();
    all_partitions(folder);
    setenv("TRIREME_IO_LIMIT", "7", 1);
    all_partitions(folder);
    unsetenv("TRIREME_IO_LIMIT");
    ranks_remove_folder();
    ranks_done();
}

static void test_files_do_not_depend_on_the_partition(void **unused) {
    (void)unused;
    const char *folder = ranks_folder();
    char command[512];
    for (fx_mode mode = 0; mode < FX_COVERS; mode++) {
        ranks_expect(save(folder, 5, 0, mode), TR_OK, "");
        snprintf(command, sizeof command,
                 mode == 0 ? "cp '%s/step-00000005.h5' '%s/first'"
                           : "cmp '%s/step-00000005.h5' '%s/first'",
                 folder, folder);
        if (ranks_first()) CHECK(system(command) == 0, "partition %d", (int)mode);
        if (mode == 0) sleep(1); /* nor on the time of day */
        ranks_wait();
    }
    ranks_remove_folder();
    ranks_done();
}

static void test_pieces_must_cover_once(void **unused) {
    (void)unused;
    const char *folder = ranks_folder();
    tr_progress_state state = fx_state(1);
    for (int flaw = 0; flaw < 4; flaw++) {
        fx_part part = fx_part_make(FX_EVEN, 0, rank, size, fx_ntensors, fx_tensors);
        const char *words = fx_tensors[0].name;
        if (rank == size - 1 && flaw == 0) part.pieces[0].count--;
        if (rank == size - 1 && flaw == 1) part.pieces[0].tensor = fx_ntensors;
        if (rank == size - 1 && flaw == 2) part.pieces[0].box.offset[0]++;
        if (rank == size - 1 && flaw == 3) part.pieces[0].v = NULL;
        if (flaw == 1) words = "of tensor 8 of 8";
        tr_status status = tr_checkpoint_save(ranks_world, folder, 0, &state, fx_ntensors,
                                              fx_tensors, part.npieces, part.pieces);
        ranks_expect(status, TR_ERR_INTERNAL, words);
        fx_part_free(&part);
    }
    expect_steps(folder, 0, NULL);
    ranks_remove_folder();
    ranks_done();
}

static void test_another_model_is_named(void **unused) {
    (void)unused;
    const char *folder = ranks_folder();
    tr_tensor_info other[16];
    memcpy(other, fx_tensors, (size_t)fx_ntensors * sizeof *other);
    ranks_expect(save(folder, 1, 0, FX_RANDOM), TR_OK, "");
    ranks_expect(load_list(folder, 1, true, FX_EVEN, fx_ntensors - 1, other), TR_ERR_USAGE,
                 "model.two");
    other[3].shape[0]++;
    ranks_expect(load_list(folder, 1, true, FX_EVEN, fx_ntensors, other), TR_ERR_USAGE,
                 "model.layers.0.mlp.gate.weight");
    other[3].shape[0]--;
    other[6].name = "model.absent";
    ranks_expect(load_list(folder, 1, false, FX_EVEN, fx_ntensors, other), TR_ERR_USAGE,
                 "model.absent");
    other[6].name = "model/slash";
    ranks_expect(save_list(folder, 2, 0, FX_EVEN, fx_ntensors, other), TR_ERR_INTERNAL,
                 "model/slash");
    other[6].name = other[7].name;
    ranks_expect(save_list(folder, 2, 0, FX_EVEN, fx_ntensors, other), TR_ERR_IO, "model.two");
    expect_steps(folder, 1, (int64_t[]){1});
    ranks_remove_folder();
    ranks_done();
}

static void test_many_and_empty_tensors(void **unused) {
    (void)unused;
    enum { MANY = 300 };
    const char *folder = ranks_folder();
    static char names[MANY][32];
    static tr_tensor_info list[MANY];
    for (int t = 0; t < MANY; t++) {
        snprintf(names[t], sizeof names[t], "layers.%d.weight", t);
        list[t] = (tr_tensor_info){names[t], 2, {t % 5, 3}}; /* every fifth has no element */
    }
    ranks_expect(save_list(folder, 1, 0, FX_RANDOM, MANY, list), TR_OK, "");
    ranks_expect(load_list(folder, 1, true, FX_EVEN, MANY, list), TR_OK, "");
    ranks_expect(save_list(folder, 2, 0, FX_EVEN, 0, list), TR_OK, "");
    ranks_expect(load_list(folder, 2, true, FX_EVEN, 0, list), TR_OK, "");
    ranks_remove_folder();
    ranks_done();
}

static void test_keep_and_names(void **unused) {
    (void)unused;
    char folder[128], command[512];
    snprintf(folder, sizeof folder, "%s/made/by/save", ranks_folder());
    expect_steps(folder, 0, NULL);
    for (int64_t step = 10; step <= 50; step += 10)
        ranks_expect(save(folder, step, 2, FX_EVEN), TR_OK, "");
    expect_steps(folder, 2, (int64_t[]){50, 40});
    ranks_expect(save(folder, 50, 2, FX_RANDOM), TR_OK, ""); /* the same step again */
    expect_steps(folder, 2, (int64_t[]){50, 40});
    ranks_expect(load(folder, 50, true, FX_EVEN), TR_OK, "");
    ranks_expect(save(folder, 45, 1, FX_EVEN), TR_OK, ""); /* went back: 50 is not ours to remove */
    expect_steps(folder, 2, (int64_t[]){50, 45});
    snprintf(command, sizeof command,
             "cd '%s' && touch .step-00000007.h5.partial .step-00000007.h5.partial-2.locktest.0",
             folder);
    if (ranks_first()) CHECK(system(command) == 0, "%s", command);
    ranks_wait();
    ranks_expect(save(folder, 123456789, 0, FX_EVEN), TR_OK, "");
    expect_steps(folder, 3, (int64_t[]){123456789, 50, 45}); /* leftovers are gone */
    snprintf(command, sizeof command,
             "cd '%s' && touch step-1.h5 step-000000x1.h5 step-00000001.h5.bak other && mkdir "
             "step-00000060.h5",
             folder);
    if (ranks_first()) CHECK(system(command) == 0, "%s", command);
    ranks_wait();
    ranks_expect(save(folder, 60, 0, FX_EVEN), TR_ERR_IO, "step-00000060.h5");
    int64_t *steps, count;
    ranks_expect(tr_checkpoint_list(ranks_world, folder, &steps, &count), TR_OK, "");
    CHECK(count == 4 && steps[1] == 60, "%d steps",
          (int)count); /* a folder is listed by its name */
    free(steps);
    strcat(folder, "/other");
    ranks_expect(save(folder, 1, 0, FX_EVEN), TR_ERR_IO, "other");
    strcat(folder, "/below");
    ranks_expect(save(folder, 1, 0, FX_EVEN), TR_ERR_IO, "other");
    ranks_remove_folder();
    ranks_done();
}

static void test_one_rank_failing_fails_all(void **unused) {
    (void)unused;
    const char *folder = ranks_folder();
    char which[16];
    time_t start = time(NULL);
    ranks_expect(save(folder, 1, 1, FX_EVEN), TR_OK, "");
    for (int failing = 0; failing < size; failing++) {
        snprintf(which, sizeof which, "%d", failing);
        setenv("TRIREME_FAIL_WRITE_RANK", which, 1);
        ranks_expect(save(folder, 2, 1, FX_EVEN), TR_ERR_IO, "on request");
        unsetenv("TRIREME_FAIL_WRITE_RANK");
        expect_steps(folder, 1, (int64_t[]){1});
        setenv("TRIREME_FAIL_READ_RANK", which, 1);
        ranks_expect(load(folder, 1, true, FX_EVEN), TR_ERR_DATA, "on request");
        unsetenv("TRIREME_FAIL_READ_RANK");
        ranks_expect(load(folder, 1, true, FX_EVEN), TR_OK, "");
    }
    CHECK(time(NULL) - start < 30, "slow");
    ranks_remove_folder();
    ranks_done();
}

static void test_full_disk(void **unused) {
    (void)unused;
    const char *folder = ranks_folder();
    const tr_tensor_info large[] = {{"a", 2, {500, 100}}, {"b", 1, {70000}}}; /* 1.4 MB */
    int32_t mounted = ranks_first() ? mount("none", folder, "tmpfs", 0, "size=2500k") == 0 : 0;
    tr_end(tr_all_reduce_begin(ranks_world, NULL, TR_MAX, TR_I32, &mounted, 1));
    if (!mounted) {
        if (ranks_first()) printf("skipped: mounting a small tmpfs is not allowed here\n");
        ranks_remove_folder();
        ranks_done();
        return;
    }
    time_t start = time(NULL);
    ranks_expect(save_list(folder, 1, 1, FX_EVEN, 2, large), TR_OK, "");
    ranks_expect(save_list(folder, 2, 1, FX_EVEN, 2, large), TR_ERR_IO, "MiB free");
    expect_steps(folder, 1, (int64_t[]){1});
    setenv("TRIREME_NO_SPACE_CHECK", "1", 1);
    for (fx_mode mode = 0; mode < FX_COVERS; mode++) {
        ranks_expect(save_list(folder, 2, 1, mode, 2, large), TR_ERR_IO, "disk full?");
        if (ranks_first() && mode == 0) printf("message: %s\n", tr_error_message());
        expect_steps(folder, 1, (int64_t[]){1});
        ranks_expect(load_list(folder, 1, true, FX_RANDOM, 2, large), TR_OK, "");
    }
    char command[256]; /* not even the metadata fits */
    snprintf(command, sizeof command, "dd if=/dev/zero of='%s/filler' bs=4k 2>/dev/null", folder);
    if (ranks_first()) CHECK(system(command) != 0, "the disk is not full");
    ranks_wait();
    ranks_expect(save_list(folder, 2, 1, FX_EVEN, 2, large), TR_ERR_IO, "No space left");
    ranks_expect(load_list(folder, 1, true, FX_EVEN, 2, large), TR_OK, "");
    unsetenv("TRIREME_NO_SPACE_CHECK");
    CHECK(time(NULL) - start < 30, "slow");
    ranks_wait();
    if (ranks_first()) CHECK(umount(folder) == 0, "%s stays mounted", folder);
    ranks_remove_folder();
    ranks_done();
}

int main(int argc, char **argv) {
    ranks_world = tr_comm_start(&argc, &argv);
    rank = tr_comm_rank(ranks_world);
    size = tr_comm_size(ranks_world);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_partition_loads_every_other),
        cmocka_unit_test(test_files_do_not_depend_on_the_partition),
        cmocka_unit_test(test_pieces_must_cover_once),
        cmocka_unit_test(test_another_model_is_named),
        cmocka_unit_test(test_many_and_empty_tensors),
        cmocka_unit_test(test_keep_and_names),
        cmocka_unit_test(test_one_rank_failing_fails_all),
        cmocka_unit_test(test_full_disk),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    tr_comm_stop(ranks_world);
    return failed;
}
