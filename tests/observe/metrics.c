/* Properties: a row has exactly the documented keys in their order and reads back to the same
 * doubles; opening at step L leaves the rows 1..L and nothing else; a full disk is an error that
 * names the file and costs no earlier row. */
#include "observe/metrics.h"
#include "tests/observe/folder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

static tr_step_record record_of(int64_t step) {
    static const int64_t load[] = {3, 5, 0, 8, 4, 4, 4, 4};
    static int64_t ids[2];
    ids[0] = 2 * step;
    ids[1] = 2 * step + 1;
    return (tr_step_record){.step = step,
                            .loss = 5.5 / (double)step,
                            .aux_loss = 0.01,
                            .grad_norm = (double)0.1f,
                            .learning_rate = 3e-4,
                            .tokens = 512 * step,
                            .samples = 2 * step,
                            .moe_layers = 2,
                            .experts = 4,
                            .expert_load = load,
                            .sample_ids = ids,
                            .n_samples = 2,
                            .seconds = 8.89,
                            .tokens_per_second = 2048,
                            .mfu = 0.5};
}

static void write_steps(int64_t last_step, int64_t first, int64_t last) {
    tr_metrics *metrics;
    assert_int_equal(tr_metrics_open(folder, last_step, true, false, &metrics), TR_OK);
    for (int64_t step = first; step <= last; step++) {
        tr_step_record record = record_of(step);
        assert_int_equal(tr_metrics_write(metrics, &record), TR_OK);
    }
    assert_int_equal(tr_metrics_close(metrics), TR_OK);
}

static void assert_file(const char *name, const char *want) {
    char *got = read_all(in_folder(name), NULL);
    assert_non_null(got);
    assert_string_equal(got, want);
    free(got);
}

static void row_is_as_documented(void **state) {
    (void)state;
    write_steps(0, 1, 1);
    assert_file("metrics.jsonl",
                "{\"step\":1,\"loss\":5.5,\"aux_loss\":0.01,\"z_loss\":0,"
                "\"grad_norm\":0.10000000149011612,\"learning_rate\":0.0003,\"tokens\":512,"
                "\"samples\":2,\"skipped\":0,\"expert_load\":[[3,5,0,8],[4,4,4,4]],"
                "\"seconds\":8.89,\"tokens_per_second\":2048,\"mfu\":0.5}\n");
    assert_file("samples.jsonl", "{\"step\":1,\"samples\":[2,3]}\n");
}

static void evaluation_adds_two_keys(void **state) {
    (void)state;
    tr_metrics *metrics;
    assert_int_equal(tr_metrics_open(folder, 0, false, false, &metrics), TR_OK);
    tr_step_record record = record_of(1);
    record.moe_layers = 0;
    record.skipped = record.evaluated = true;
    record.validation_loss = 2.5;
    record.validation_bits_per_byte = 3.25;
    assert_int_equal(tr_metrics_write(metrics, &record), TR_OK);
    assert_int_equal(tr_metrics_close(metrics), TR_OK);
    char *got = read_all(in_folder("metrics.jsonl"), NULL);
    assert_non_null(strstr(got, "\"skipped\":1,\"expert_load\":[],\"seconds\""));
    assert_non_null(strstr(got, "\"mfu\":0.5,\"validation_loss\":2.5,"
                                "\"validation_bits_per_byte\":3.25}\n"));
    assert_int_not_equal(access(in_folder("samples.jsonl"), F_OK), 0);
    free(got);
}

static void numbers_read_back_and_others_are_null(void **state) {
    (void)state;
    static const double values[] = {0.0,        -0.0,      1.0 / 3, 0.1,      1e300,
                                    -5e-324,    0x1p-1074, 1e22,    2.5e-45,  1e15,
                                    123456.789, 0x1p+53,   NAN,     -INFINITY};
    enum { COUNT = sizeof values / sizeof *values };
    tr_metrics *metrics;
    assert_int_equal(tr_metrics_open(folder, 0, false, false, &metrics), TR_OK);
    for (int64_t i = 0; i < COUNT; i++) {
        tr_step_record record = record_of(i + 1);
        record.loss = values[i];
        assert_int_equal(tr_metrics_write(metrics, &record), TR_OK);
    }
    assert_int_equal(tr_metrics_close(metrics), TR_OK);
    FILE *file = fopen(in_folder("metrics.jsonl"), "r");
    for (int64_t i = 0; i < COUNT; i++) {
        json_t *row = json_loadf(file, JSON_DISABLE_EOF_CHECK | JSON_DECODE_INT_AS_REAL, NULL);
        assert_non_null(row);
        json_t *loss = json_object_get(row, "loss");
        if (isfinite(values[i])) {
            double got = json_real_value(loss);
            assert_memory_equal(&got, &values[i], sizeof got);
        } else {
            assert_true(json_is_null(loss));
        }
        json_decref(row);
    }
    fclose(file);
}

/* Writes 1..9 in one go as the truth; then 1..7, resumes at 4 and goes on: the same bytes. */
static void resumed_file_equals_an_undisturbed_one(void **state) {
    (void)state;
    write_steps(0, 1, 9);
    char *want = read_all(in_folder("metrics.jsonl"), NULL);
    char *want_samples = read_all(in_folder("samples.jsonl"), NULL);
    write_steps(0, 1, 7);
    write_steps(4, 5, 9);
    assert_file("metrics.jsonl", want);
    assert_file("samples.jsonl", want_samples);
    write_steps(9, 10, 9); /* nothing beyond: nothing is cut */
    assert_file("metrics.jsonl", want);
    write_steps(0, 1, 0);
    assert_file("metrics.jsonl", "");
    assert_int_not_equal(access(in_folder("metrics.jsonl.tmp"), F_OK), 0);
    free(want);
    free(want_samples);
}

static void torn_lines_are_cut(void **state) {
    (void)state;
    static const char *const torn[] = {
        "{\"step\":3,\"loss\":1",        /* killed in the middle of a write */
        "{\"step\":3,\"loss\":1}",       /* killed before the newline */
        "{\"step\":3,\"loss\":1.2\n",    /* a full disk */
        "{\"step\":2,\"loss\":7}\n",     /* a second row of one step */
        "{\"step\":9,\"loss\":7}\n",     /* a later step */
        "{\"step\":\"3\",\"loss\":7}\n", /* not a number */
        "{\"step\":3x,\"loss\":7}\n",    "\n", "{",
    };
    static const char good[] = "{\"step\":1,\"loss\":2}\n{\"step\":2,\"loss\":1}\n";
    for (size_t i = 0; i < sizeof torn / sizeof *torn; i++) {
        char text[256];
        snprintf(text, sizeof text, "%s%s", good, torn[i]);
        write_all(in_folder("metrics.jsonl"), text);
        write_steps(5, 6, 5);
        assert_file("metrics.jsonl", good);
    }
    /* A torn line between whole ones costs only itself. */
    write_all(in_folder("metrics.jsonl"),
              "{\"step\":1,\"loss\":2}\n{\"st\n{\"step\":2,\"loss\":1}\n");
    write_steps(2, 3, 2);
    assert_file("metrics.jsonl", good);
    /* NULs, as a power cut leaves them. */
    FILE *file = fopen(in_folder("metrics.jsonl"), "a");
    fwrite("{\"step\":3,\0\0\0}\n", 1, 15, file);
    fclose(file);
    write_steps(8, 9, 8);
    assert_file("metrics.jsonl", good);
}

static void folders_are_made_and_a_file_in_the_way_is_named(void **state) {
    (void)state;
    char path[sizeof folder + 16];
    snprintf(path, sizeof path, "%s/a/b//c/", folder);
    tr_metrics *metrics;
    assert_int_equal(tr_metrics_open(path, 0, false, false, &metrics), TR_OK);
    assert_int_equal(tr_metrics_close(metrics), TR_OK);
    assert_int_equal(unlink(in_folder("a/b/c/metrics.jsonl")), 0);
    assert_int_equal(rmdir(in_folder("a/b/c")) | rmdir(in_folder("a/b")) | rmdir(in_folder("a")),
                     0);

    write_all(in_folder("file"), "");
    snprintf(path, sizeof path, "%s/file/run", folder);
    assert_int_equal(tr_metrics_open(path, 0, false, false, &metrics), TR_ERR_IO);
    assert_non_null(strstr(tr_error_message(), "/file"));
    assert_non_null(strstr(tr_error_message(), "run.directory"));
}

static void full_disk_is_an_error(void **state) {
    (void)state;
    assert_int_equal(symlink("/dev/full", in_folder("metrics.jsonl")), 0);
    tr_metrics *metrics;
    assert_int_equal(tr_metrics_open(folder, 0, false, false, &metrics), TR_OK);
    tr_step_record record = record_of(1);
    assert_int_equal(tr_metrics_write(metrics, &record), TR_ERR_IO);
    print_message("%s\n", tr_error_message());
    assert_non_null(strstr(tr_error_message(), "metrics.jsonl"));
    assert_non_null(strstr(tr_error_message(), "free some space"));
    tr_metrics_close(metrics);
}

/* The file may grow to 2500 bytes: a row fails half written. Later the disk has room again. */
static void rows_before_a_full_disk_survive(void **state) {
    (void)state;
    struct rlimit old, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = (struct rlimit){.rlim_cur = 2500, .rlim_max = old.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    tr_metrics *metrics;
    assert_int_equal(tr_metrics_open(folder, 0, false, false, &metrics), TR_OK);
    tr_status status = TR_OK;
    int64_t written = 0;
    while (status == TR_OK && written < 100) {
        tr_step_record record = record_of(written + 1);
        status = tr_metrics_write(metrics, &record);
        if (status == TR_OK) written++;
    }
    tr_metrics_close(metrics);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(status, TR_ERR_IO);
    assert_in_range(written, 5, 20);
    write_steps(written, written + 1, 20);
    char *got = read_all(in_folder("metrics.jsonl"), NULL);
    write_steps(0, 1, 20);
    assert_file("metrics.jsonl", got);
    free(got);
}

int main(void) {
#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        IN_FOLDER(row_is_as_documented),
        IN_FOLDER(evaluation_adds_two_keys),
        IN_FOLDER(numbers_read_back_and_others_are_null),
        IN_FOLDER(resumed_file_equals_an_undisturbed_one),
        IN_FOLDER(torn_lines_are_cut),
        IN_FOLDER(folders_are_made_and_a_file_in_the_way_is_named),
        IN_FOLDER(full_disk_is_an_error),
        IN_FOLDER(rows_before_a_full_disk_survive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
