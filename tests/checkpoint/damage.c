/* Property: one flipped bit anywhere in a file either changes nothing or is an error that names the
 * file, and the tensor when it is in data; a file that is cut, foreign or absent is told as such.
 * Floor: tests. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <hdf5.h>

#include "base/rng.h"
#include "fixture.h"
#include "ranks.h"

static const tr_tensor_info tensors[] = {{"model.a", 2, {5, 7}}, {"model.b", 1, {11}}};
enum { NTENSORS = 2, STEP = 9 };

static int rank, size;
static char path[256], last[4096];
static char *bytes; /* the undamaged file, on rank 0 */
static int64_t file_bytes;

/* Rank 0 writes the first n bytes with byte `at` (if not negative) changed by `flip`. */
static void put_file(int64_t n, int64_t at, int flip) {
    ranks_wait();
    if (ranks_first()) {
        FILE *f = fopen(path, "wb");
        if (at >= 0) bytes[at] = (char)(bytes[at] ^ flip);
        CHECK(f && fwrite(bytes, 1, (size_t)n, f) == (size_t)n && fclose(f) == 0, "%s", path);
        if (at >= 0) bytes[at] = (char)(bytes[at] ^ flip);
    }
    ranks_wait();
}

static void flip_in_place(int64_t at, int flip) {
    ranks_wait();
    if (ranks_first()) {
        FILE *f = fopen(path, "r+b");
        CHECK(f && fseek(f, at, SEEK_SET) == 0 && fputc((bytes[at] ^ flip) & 0xff, f) != EOF &&
                  fclose(f) == 0,
              "%s", path);
    }
    ranks_wait();
}

static void set_up(void) {
    const char *folder = ranks_folder();
    fx_part part = fx_part_make(FX_EVEN, 0, rank, size, NTENSORS, tensors);
    tr_progress_state state = fx_state(STEP);
    fx_fill(&part, STEP, tensors);
    tr_checkpoint_path(path, sizeof path, folder, STEP);
    ranks_expect(tr_checkpoint_save(ranks_world, folder, 0, &state, NTENSORS, tensors, part.npieces,
                                    part.pieces),
                 TR_OK, "");
    fx_part_free(&part);
    if (ranks_first()) {
        FILE *f = fopen(path, "rb");
        fseek(f, 0, SEEK_END);
        file_bytes = ftell(f);
        rewind(f);
        bytes = malloc((size_t)file_bytes);
        CHECK(fread(bytes, 1, (size_t)file_bytes, f) == (size_t)file_bytes, "%s", path);
        fclose(f);
    }
    tr_end(tr_broadcast_begin(ranks_world, NULL, 0, &file_bytes, sizeof file_bytes));
}

static void tear_down(void) {
    free(bytes);
    bytes = NULL;
    ranks_remove_folder();
    ranks_done();
}

/* Loads everything; when that succeeds, everything must be right. */
static tr_status load(fx_mode mode) {
    tr_progress_state state = {0};
    fx_part part = fx_part_make(mode, 1, rank, size, NTENSORS, tensors);
    tr_status status =
        tr_checkpoint_load(ranks_world, path, true, NTENSORS, tensors, part.npieces, part.pieces);
    if (status == TR_OK) CHECK(fx_wrong(&part, STEP, 3, tensors) == 0, "wrong data was loaded");
    fx_part_free(&part);
    snprintf(last, sizeof last, "%s", tr_error_message());
    tr_status also = tr_checkpoint_state(ranks_world, path, &state);
    if (status == TR_OK) {
        CHECK(also == TR_OK, "the state fails alone: %s", tr_error_message());
        if (also == TR_OK) CHECK(fx_state_right(&state, STEP), "wrong state was loaded");
    }
    free(state.config);
    return status;
}

/* Where each dataset's data lies. */
static int64_t data_offset(const char *name) {
    int64_t offset = 0;
    if (ranks_first()) {
        hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
        hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
        offset = (int64_t)H5Dget_offset(dataset);
        H5Dclose(dataset);
        H5Fclose(file);
    }
    tr_end(tr_broadcast_begin(ranks_world, NULL, 0, &offset, sizeof offset));
    return offset;
}

static void test_every_bit_of_data(void **unused) {
    (void)unused;
    set_up();
    static const char *const names[] = {"model/model.a", "model/model.b",
                                        "optimizer/exp_avg/model.a",
                                        "optimizer/exp_avg_sq/model.b"};
    for (size_t d = 0; d < sizeof names / sizeof *names; d++) {
        int64_t offset = data_offset(names[d]), n = 4 * (d % 2 ? 11 : 35);
        if (d == 2) n = 4 * 35;
        for (int64_t bit = 0; bit < 8 * n; bit += size == 1 ? 7 : 35) {
            flip_in_place(offset + bit / 8, 1 << bit % 8);
            tr_status status = load(bit % 3 == 0   ? FX_EVEN
                                    : bit % 3 == 1 ? FX_REPLICAS
                                                   : FX_COLUMNS);
            CHECK(status == TR_ERR_DATA && strstr(last, names[d]) && strstr(last, path),
                  "bit %d of %s: %s", (int)bit, names[d], last);
            flip_in_place(offset + bit / 8, 0);
        }
    }
    CHECK(load(FX_EVEN) == TR_OK, "%s", last);
    tear_down();
}

static void test_bits_anywhere(void **unused) {
    (void)unused;
    set_up();
    int64_t seen = 0, harmless = 0;
    for (int64_t at = 0; at < file_bytes; at++) {
        int32_t wanted =
            ranks_first() && (bytes[at] != 0 || at % 997 == 0) && (size == 1 || at % 5 == 0);
        tr_end(tr_all_reduce_begin(ranks_world, NULL, TR_MAX, TR_I32, &wanted, 1));
        if (!wanted) continue;
        int flip = 1 << (tr_mix64((uint64_t)at) & 7);
        flip_in_place(at, flip);
        tr_status status = load(FX_EVEN);
        CHECK(status == TR_OK || strstr(last, path), "byte %d: %s", (int)at, last);
        CHECK(status == TR_OK || status == TR_ERR_DATA || status == TR_ERR_USAGE, "byte %d: %s",
              (int)at, last);
        seen++;
        harmless += status == TR_OK;
        flip_in_place(at, 0);
    }
    if (ranks_first()) printf("%d bits flipped, %d changed nothing\n", (int)seen, (int)harmless);
    CHECK(harmless < seen / 10, "%d of %d are harmless", (int)harmless, (int)seen);
    tear_down();
}

static void expect_damaged(const char *what, const char *words) {
    for (fx_mode mode = FX_EVEN; mode < FX_MODES; mode += FX_REPLICAS) {
        tr_status status = load(mode);
        CHECK(status == TR_ERR_DATA && strstr(last, path) && strstr(last, words), "%s: %d: %s",
              what, (int)status, last);
    }
    ranks_expect(tr_checkpoint_verify(ranks_world, path), TR_ERR_DATA, path);
    ranks_expect(tr_checkpoint_info(ranks_world, path, false), TR_ERR_DATA, path);
}

static void test_cut_foreign_and_absent(void **unused) {
    (void)unused;
    set_up();
    int64_t cuts[] = {0, 1, 8, 100, file_bytes / 2, file_bytes - 100, file_bytes - 1};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        put_file(cuts[i], -1, 0);
        expect_damaged("cut", "damaged");
    }
    if (ranks_first()) memset(bytes, 'x', (size_t)file_bytes);
    put_file(file_bytes, -1, 0);
    expect_damaged("text", "not a checkpoint");
    ranks_wait();
    if (ranks_first()) {
        hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
        H5Gclose(H5Gcreate2(file, "model", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
        H5Fclose(file);
    }
    ranks_wait();
    expect_damaged("foreign HDF5", "not a checkpoint");
    ranks_wait();
    if (ranks_first()) unlink(path);
    ranks_wait();
    CHECK(load(FX_EVEN) == TR_ERR_MISSING && strstr(last, path), "%s", last);
    ranks_expect(tr_checkpoint_verify(ranks_world, path), TR_ERR_MISSING, path);
    ranks_expect(tr_checkpoint_info(ranks_world, path, false), TR_ERR_MISSING, path);
    tear_down();
}

static void test_another_version(void **unused) {
    (void)unused;
    set_up();
    ranks_wait();
    if (ranks_first()) {
        int64_t version = 2;
        hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
        hid_t attribute = H5Aopen(file, "version", H5P_DEFAULT);
        H5Awrite(attribute, H5T_STD_I64LE, &version);
        H5Aclose(attribute);
        H5Fclose(file);
    }
    ranks_wait();
    expect_damaged("version 2", "version 2");
    tear_down();
}

static void test_verify_counts_all_damage(void **unused) {
    (void)unused;
    set_up();
    ranks_expect(tr_checkpoint_verify(ranks_world, path), TR_OK, "");
    ranks_expect(tr_checkpoint_info(ranks_world, path, false), TR_OK, "");
    flip_in_place(data_offset("model/model.b"), 64);
    flip_in_place(data_offset("optimizer/exp_avg_sq/model.a") + 139, 1);
    ranks_expect(tr_checkpoint_verify(ranks_world, path), TR_ERR_DATA, "2 of 6 tensors");
    tear_down();
}

int main(int argc, char **argv) {
    ranks_world = tr_comm_start(&argc, &argv);
    rank = tr_comm_rank(ranks_world);
    size = tr_comm_size(ranks_world);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_bit_of_data),        cmocka_unit_test(test_bits_anywhere),
        cmocka_unit_test(test_cut_foreign_and_absent),   cmocka_unit_test(test_another_version),
        cmocka_unit_test(test_verify_counts_all_damage),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    tr_comm_stop(ranks_world);
    return failed;
}
