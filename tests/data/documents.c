/* documents.c - Property: wherever a sample begins, each of its tokens is told the document it is
 * in: by the token that ends documents, or by Megatron's index, however many sequences and empty
 * documents that has and in whichever order they lie in the .bin. Floor: tests. */
#include "base/rng.h"
#include "tests/data/files.h"

enum { MOST = 40000, SEQUENCES = 5000 };

static int64_t drawn;
static int64_t draw(int64_t n) {
    return (int64_t)(tr_random_u64(11, 7, (uint64_t)drawn++) % (uint64_t)n);
}

/* A file of Megatron's with random sequences, some empty and, if `moved`, in another order in the
 * .bin; every document takes 0 to 3 of them. starts[i]: whether a document begins at token i of the
 * stream. Returns its tokens. */
static int64_t write_megatron(bool moved, int64_t n, uint8_t *starts) {
    static int32_t lengths[SEQUENCES];
    static int64_t offsets[SEQUENCES], docs[SEQUENCES + 2], order[SEQUENCES];
    static uint8_t tokens[MOST];
    int64_t at = 0, documents = 0, i = 0;
    memset(starts, 0, MOST);
    for (i = 0; i < n; i++) lengths[i] = (int32_t)(draw(4) ? draw(12) : 0), order[i] = i;
    for (i = 0; i < n && moved; i++) {
        int64_t other = draw(n), kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
    for (i = 0; i < n; i++) { /* the .bin holds them in this order */
        offsets[order[i]] = at;
        at += lengths[order[i]];
    }
    for (i = 0; i < n;) {
        docs[documents++] = i;
        i += draw(4);
    }
    docs[documents] = n;
    int64_t next = 0, first = 0;
    for (i = 0; i < n; i++) {
        for (; next < documents && docs[next] <= i; next++) starts[first] = 1;
        first += lengths[i];
    }
    for (i = 0; i < at; i++) tokens[i] = (uint8_t)i;
    write_file("m.bin", tokens, (size_t)at);
    write_index("m.idx", &(index_fields){.version = 1,
                                         .type = 1,
                                         .n = (uint64_t)n,
                                         .d = (uint64_t)documents + 1,
                                         .lengths = lengths,
                                         .offsets = offsets,
                                         .docs = docs});
    return at;
}

static tr_dataset_options options(file_list *x, const char *path, int64_t S, int64_t end) {
    return (tr_dataset_options){.files = one_file(x, path),
                                .sequence_length = S,
                                .vocab_size = 256,
                                .pad_id = -1,
                                .documents = true,
                                .end_of_document = end};
}

/* Every sample of the file in order, against the walk. */
static void check_samples(const tr_dataset_options *o, const uint8_t *starts) {
    tr_dataset *d = open_or_fail(o);
    int64_t S = o->sequence_length;
    int32_t *input = calloc((size_t)S, 4), *label = calloc((size_t)S, 4);
    int32_t *begin = calloc((size_t)S, 4);
    uint8_t *valid = calloc((size_t)S, 1);
    for (int64_t k = 0; k < tr_dataset_samples(d); k++) {
        assert_int_equal(tr_dataset_sample(d, k, input, label, valid, NULL), TR_OK);
        memset(begin, 0xee, (size_t)S * 4);
        tr_dataset_documents(d, k, input, begin);
        for (int64_t i = 0, here = 0; i < S; i++) {
            if (starts[k * S + i]) here = i;
            if (begin[i] != here)
                fail_msg("sample %" PRId64 ", token %" PRId64 ": %d, not %" PRId64, k, i, begin[i],
                         here);
        }
    }
    free(input);
    free(label);
    free(begin);
    free(valid);
    tr_dataset_close(d);
}

static void by_index(void **state) {
    (void)state;
    static uint8_t starts[MOST];
    static const int64_t sequences[] = {20, 300, 1024, 1025, SEQUENCES}, lengths[] = {1, 7, 64};
    for (int n = 0; n < 5; n++)
        for (int moved = 0; moved < 2; moved++) {
            int64_t tokens = write_megatron(moved, sequences[n], starts);
            for (int s = 0; s < 3; s++) {
                file_list x;
                tr_dataset_options o = options(&x, "m.bin", lengths[s], -1);
                if (tokens > lengths[s]) check_samples(&o, starts);
            }
        }
}

static void by_token(void **state) {
    (void)state;
    static uint8_t bytes[1000], starts[1000];
    for (int i = 0; i < 1000; i++) {
        bytes[i] = draw(9) ? (uint8_t)('a' + draw(20)) : '\n';
        starts[i] = i > 0 && bytes[i - 1] == '\n';
    }
    write_file("text", bytes, sizeof bytes);
    for (int64_t S = 1; S < 40; S += 6) {
        file_list x;
        tr_dataset_options o = options(&x, "text", S, '\n');
        check_samples(&o, starts);
    }
}

/* A token that is given ends documents, whatever an index says. */
static void the_token_comes_first(void **state) {
    (void)state;
    static uint8_t starts[MOST];
    int64_t tokens = write_megatron(false, 300, starts);
    for (int64_t i = 0; i < tokens; i++) starts[i] = i > 0 && (uint8_t)(i - 1) == 9;
    file_list x;
    tr_dataset_options o = options(&x, "m.bin", 33, 9);
    check_samples(&o, starts);
}

static void files_have_to_say(void **state) {
    (void)state;
    write_text("text", "no end in sight");
    file_list x;
    tr_dataset_options o = options(&x, "text", 4, -1);
    tr_dataset *d = NULL;
    expect_failure(tr_dataset_open(&o, &d), TR_ERR_USAGE, "text", "raw bytes",
                   "data.end_of_document", "Megatron", NULL);
    assert_null(d);
}

static void boundaries_are_part_of_the_data(void **state) {
    (void)state;
    static uint8_t starts[MOST];
    uint64_t print[2][2];
    for (int i = 0; i < 2; i++) {
        drawn = 1000;
        write_megatron(false, 300, starts);
        if (i == 1) { /* the same tokens, one document: its table begins after n lengths, offsets */
            FILE *f = fopen("m.idx", "r+b");
            int64_t zero = 0;
            assert_int_equal(fseek(f, 34 + 12 * 300 + 8, SEEK_SET), 0);
            assert_int_equal(fwrite(&zero, 8, 1, f), 1);
            assert_int_equal(fclose(f), 0);
        }
        for (int documents = 0; documents < 2; documents++) {
            file_list x;
            tr_dataset_options o = options(&x, "m.bin", 16, -1);
            o.documents = documents;
            tr_dataset *d = open_or_fail(&o);
            print[i][documents] = tr_dataset_fingerprint(d);
            tr_dataset_close(d);
        }
    }
    assert_int_equal(print[0][0], print[1][0]);
    assert_int_not_equal(print[0][1], print[1][1]);
}

/* Drawn samples have documents of their own, of many lengths. */
static void drawn_samples_have_some(void **state) {
    (void)state;
    enum { S = 48 };
    tr_dataset *d = open_or_fail(&(tr_dataset_options){.synthetic = true,
                                                       .sequence_length = S,
                                                       .vocab_size = 100,
                                                       .pad_id = -1,
                                                       .documents = true,
                                                       .end_of_document = -1,
                                                       .seed = 5});
    int whole = 0, documents = 0;
    for (int64_t k = 0; k < 100; k++) {
        int32_t input[S] = {0}, begin[S];
        tr_dataset_documents(d, k, input, begin);
        assert_int_equal(begin[0], 0);
        whole += begin[S - 1] == 0;
        for (int i = 1; i < S; i++) {
            assert_true(begin[i] == begin[i - 1] || begin[i] == i);
            documents += begin[i] == i;
        }
    }
    assert_in_range(whole, 10, 60);
    assert_in_range(documents, 100, 600);
    tr_dataset_close(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(by_index),
                                       cmocka_unit_test(by_token),
                                       cmocka_unit_test(the_token_comes_first),
                                       cmocka_unit_test(files_have_to_say),
                                       cmocka_unit_test(boundaries_are_part_of_the_data),
                                       cmocka_unit_test(drawn_samples_have_some)};
    return cmocka_run_group_tests_name("documents", tests, enter_scratch, leave_scratch);
}
