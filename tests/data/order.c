/* order.c - Property: every position of the endless order names one sample, each exactly once an
 * epoch, by a pure function of (files, weights, seed, position). Floor: tests. */
#include "data/mixture.h"
#include "data/permute.h"
#include "tests/data/files.h"

#include <math.h>

enum { S = 4 };

/* A file of raw bytes with exactly n samples of S tokens. */
static void write_samples(const char *path, int64_t n) {
    uint8_t *bytes = malloc((size_t)(n * S + 1));
    for (int64_t i = 0; i <= n * S; i++) bytes[i] = (uint8_t)(i * 7 + i / 251);
    write_file(path, bytes, (size_t)(n * S + 1));
    free(bytes);
}

static int64_t id_at(const tr_dataset *d, int64_t position) {
    int32_t input[S], label[S];
    uint8_t valid[S];
    int64_t id = -1;
    assert_int_equal(tr_dataset_sample(d, position, input, label, valid, &id), TR_OK);
    assert_int_equal(tr_dataset_id(d, position), id);
    return id;
}

static tr_dataset *open_list(int n, const char *const *paths, const double *weights, uint64_t seed,
                             bool shuffle) {
    file_list x;
    return open_or_fail(&(tr_dataset_options){.files = files_of(&x, n, paths, weights),
                                              .sequence_length = S,
                                              .vocab_size = 256,
                                              .pad_id = -1,
                                              .shuffle = shuffle,
                                              .seed = seed});
}

static void permutation_is_one(void **state) {
    (void)state;
    const int64_t sizes[] = {1, 2, 3, 4, 5, 7, 16, 17, 1000, 65536, 65537};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        for (uint64_t key = 0; key < 3; key++) {
            int64_t n = sizes[k];
            uint8_t *seen = calloc((size_t)n, 1);
            for (int64_t i = 0; i < n; i++) {
                int64_t p = tr_permute(key, n, i);
                assert_true(p >= 0 && p < n);
                assert_int_equal(seen[p]++, 0);
            }
            free(seen);
        }
    }
    /* Large sets, where not all can be tried: within range, no repeats among the first 1000. */
    int64_t first[1000], n = (INT64_C(1) << 61) + 12345;
    for (int i = 0; i < 1000; i++) {
        first[i] = tr_permute(9, n, i);
        assert_true(first[i] >= 0 && first[i] < n);
        for (int j = 0; j < i; j++) assert_int_not_equal(first[i], first[j]);
    }
}

/* Over many keys every place gets every number equally often, and neighbours are unrelated. */
static void permutation_is_even(void **state) {
    (void)state;
    enum { N = 10, KEYS = 20000 };
    int64_t hits[N][N] = {0}, successors = 0;
    for (uint64_t key = 0; key < KEYS; key++) {
        for (int64_t i = 0; i < N; i++) {
            int64_t p = tr_permute(key, N, i);
            hits[i][p]++;
            if (i + 1 < N) successors += tr_permute(key, N, i + 1) == (p + 1) % N;
        }
    }
    double worst = 0, want = (double)KEYS / N;
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++)
            worst = fmax(worst, fabs((double)hits[i][j] - want) / sqrt(want));
    double rate = (double)successors / (KEYS * (N - 1.0));
    print_message("worst deviation %.2f sigma; successors %.4f (1/%d expected)\n", worst, rate,
                  N - 1);
    assert_true(worst < 5);
    assert_true(fabs(rate - 1.0 / (N - 1)) < 0.01);
}

static void each_sample_once_an_epoch(void **state) {
    (void)state;
    const int64_t sizes[] = {1, 2, 3, 1000, 65537};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        int64_t n = sizes[k];
        write_samples("a", n);
        write_samples("b", 3);
        tr_dataset *d = open_list(2, (const char *[]){"a", "b"}, NULL, 7, true);
        n += 3;
        assert_int_equal(tr_dataset_samples(d), n);
        int64_t *before = calloc((size_t)n, sizeof *before), same = 0;
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            uint8_t *seen = calloc((size_t)n, 1);
            same = 0;
            for (int64_t i = 0; i < n; i++) {
                int64_t id = id_at(d, epoch * n + i);
                assert_true(id >= 0 && id < n);
                assert_int_equal(seen[id]++, 0);
                same += before[i] == id;
                before[i] = id;
            }
            free(seen);
            if (n >= 1000 && epoch > 0) assert_true(same < 20);
        }
        free(before);
        tr_dataset_close(d);
    }
}

static void order_is_a_function(void **state) {
    (void)state;
    write_samples("a", 1000);
    tr_dataset *d = open_list(1, (const char *[]){"a"}, NULL, 7, true);
    tr_dataset *again = open_list(1, (const char *[]){"a"}, NULL, 7, true);
    tr_dataset *other = open_list(1, (const char *[]){"a"}, NULL, 8, true);
    int same = 0;
    for (int64_t i = 2999; i >= 0; i--) { /* asked backwards, as no grid would */
        int64_t id = id_at(d, i);
        assert_int_equal(id, id_at(again, i));
        same += id == id_at(other, i);
    }
    print_message("seeds 7 and 8 agree at %d of 3000 positions\n", same);
    assert_true(same < 20);
    tr_dataset_close(d);
    tr_dataset_close(again);
    tr_dataset_close(other);
}

static void validation_keeps_file_order(void **state) {
    (void)state;
    write_samples("a", 5);
    write_samples("b", 4);
    tr_dataset *d = open_list(2, (const char *[]){"a", "b"}, NULL, 7, false);
    for (int64_t i = 0; i < 30; i++) assert_int_equal(id_at(d, i), i % 9);
    tr_dataset_close(d);
}

/* Inputs are the tokens of sample `id` of the file that holds it. */
static void sample_reads_its_tokens(void **state) {
    (void)state;
    uint8_t a[3 * S + 2], b[2 * S + S];
    for (size_t i = 0; i < sizeof a; i++) a[i] = (uint8_t)i;
    for (size_t i = 0; i < sizeof b; i++) b[i] = (uint8_t)(100 + i);
    write_file("a", a, sizeof a);
    write_file("b", b, sizeof b);
    tr_dataset *d = open_list(2, (const char *[]){"a", "b"}, NULL, 1, true);
    assert_int_equal(tr_dataset_samples(d),
                     5); /* 3 and 2: b's last label would need a token more */
    assert_int_equal(tr_dataset_tokens(d), sizeof a + sizeof b);
    for (int64_t p = 0; p < 10; p++) {
        int32_t input[S], label[S];
        uint8_t valid[S];
        int64_t id;
        assert_int_equal(tr_dataset_sample(d, p, input, label, valid, &id), TR_OK);
        const uint8_t *from = id < 3 ? a + id * S : b + (id - 3) * S;
        for (int i = 0; i < S; i++) {
            assert_int_equal(input[i], from[i]);
            assert_int_equal(label[i], from[i + 1]);
            assert_int_equal(valid[i], 1);
        }
        assert_int_equal(tr_dataset_sample(d, p, input, label, valid, NULL), TR_OK);
    }
    int32_t x[S];
    uint8_t v[S];
    expect_failure(tr_dataset_sample(d, -1, x, x, v, NULL), TR_ERR_INTERNAL, "-1", NULL);
    tr_dataset_close(d);
}

/* Shares hold within one sample over each period, and a file's positions come in order. */
static void mixture_keeps_its_shares(void **state) {
    (void)state;
    const double weights[][4] = {
        {1, 1, 1, 1}, {0.7, 0.2, 0.05, 0.05}, {1, 2, 3, 1e-3}, {M_PI, M_E, 1, 0.1}, {5, 0, 0, 0}};
    for (int c = 0; c < 5; c++) {
        int n = c == 4 ? 1 : 4;
        double sum = 0, worst = 0;
        for (int f = 0; f < n; f++) sum += weights[c][f];
        tr_mixture m = {0};
        tr_mixture_init(weights[c], n, 3, &m);
        int64_t own[4] = {0};
        for (int64_t p = 0; p < 3 * m.period; p++) {
            int64_t f, position;
            tr_mixture_locate(&m, p, &f, &position);
            assert_int_equal(position, own[f]++);
            if ((p + 1) % m.period) continue;
            double rounds = (double)((p + 1) / m.period);
            for (int g = 0; g < n; g++) {
                double want = weights[c][g] / sum * (double)m.period;
                worst = fmax(worst, fabs((double)own[g] / rounds - want));
            }
        }
        print_message("period %" PRId64 ", worst deviation %.3f samples\n", m.period, worst);
        assert_true(worst <
                    0.5); /* within one sample is the promise; largest remainders do better */
        if (c < 2) assert_true(m.period == 1000 && worst == 0);
        tr_mixture_fini(&m);
    }
}

/* With weights each file goes through its own epochs, whole, before it begins the next. */
static void weighted_files_have_own_epochs(void **state) {
    (void)state;
    write_samples("a", 37);
    write_samples("b", 301);
    const double weights[] = {3, 1};
    tr_dataset *d = open_list(2, (const char *[]){"a", "b"}, weights, 11, true);
    uint8_t seen[338] = {0};
    int64_t drawn[2] = {0}, size[2] = {37, 301}, run = 0, longest = 0, last = -1;
    for (int64_t p = 0; p < 3000; p++) {
        int64_t id = id_at(d, p), f = id >= 37;
        assert_true(id >= 0 && id < 338);
        assert_int_equal(seen[id], drawn[f] / size[f]);
        seen[id]++;
        drawn[f]++;
        run = f == last ? run + 1 : 1;
        last = f;
        if (run > longest) longest = run;
    }
    print_message("drawn %" PRId64 " and %" PRId64 ", longest run of one file %" PRId64 "\n",
                  drawn[0], drawn[1], longest);
    assert_int_equal(drawn[0], 2250);
    assert_true(longest < 60);
    tr_dataset_close(d);
}

static void bad_weights_are_refused(void **state) {
    (void)state;
    write_samples("a", 5);
    const char *paths[] = {"a", "a"};
    const double bad[][2] = {{1, 0}, {1, INFINITY}, {NAN, 1}, {1, -1}, {1, 1e-6}};
    const char *texts[] = {"weight 0", "weight inf", "weight", "has no weight",
                           "less than 1/65536"};
    for (int c = 0; c < 5; c++) {
        file_list x;
        tr_dataset *d = NULL;
        tr_dataset_options o = {.files = files_of(&x, 2, paths, bad[c]),
                                .sequence_length = S,
                                .vocab_size = 256,
                                .pad_id = -1};
        expect_failure(tr_dataset_open(&o, &d), TR_ERR_USAGE, "a", texts[c], NULL);
        assert_null(d);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(permutation_is_one),
                                       cmocka_unit_test(permutation_is_even),
                                       cmocka_unit_test(each_sample_once_an_epoch),
                                       cmocka_unit_test(order_is_a_function),
                                       cmocka_unit_test(validation_keeps_file_order),
                                       cmocka_unit_test(sample_reads_its_tokens),
                                       cmocka_unit_test(mixture_keeps_its_shares),
                                       cmocka_unit_test(weighted_files_have_own_epochs),
                                       cmocka_unit_test(bad_weights_are_refused)};
    return cmocka_run_group_tests_name("data order", tests, enter_scratch, leave_scratch);
}
