/* formats.c - Property: what a file of each format holds is read back exactly, and a file that is
 * not right is refused with its name, its fault and the remedy. Floor: tests. */
#include "data/tokens.h"
#include "tests/data/files.h"

#include <fcntl.h>
#include <sys/stat.h>

enum { N = 1000 };

static void read_and_compare(const char *path, tr_tokens_format format, tr_token_type type,
                             const int64_t *ids, int64_t n) {
    tr_tokens t = {0};
    if (tr_tokens_open(path, &t) != TR_OK) fail_msg("%s", tr_error_message());
    assert_int_equal(t.format, format);
    assert_int_equal(t.type, type);
    assert_int_equal(t.count, n);
    int64_t *got = calloc((size_t)n + 1, sizeof *got);
    for (int64_t first = 0; first <= n; first += 1 + first / 3) { /* all, then shorter tails */
        got[n - first] = -77;
        tr_tokens_read(&t, first, n - first, got);
        assert_memory_equal(got, ids + first, (size_t)(n - first) * sizeof *got);
        assert_int_equal(got[n - first], -77);
    }
    free(got);
    tr_tokens_close(&t);
}

static void llmc_is_read(void **state) {
    (void)state;
    int64_t ids[N];
    for (int i = 0; i < N; i++) ids[i] = (i * 977) % 65536;
    write_llmc("u16.bin", 2, ids, N, 1, N);
    read_and_compare("u16.bin", TR_TOKENS_LLMC, TR_TOKEN_U16, ids, N);
    for (int i = 0; i < N; i++) ids[i] = INT64_C(4294967295) - i * 1000003;
    write_llmc("u32.bin", 4, ids, N, 7, N);
    read_and_compare("u32.bin", TR_TOKENS_LLMC, TR_TOKEN_U32, ids, N);
}

static void bytes_are_read(void **state) {
    (void)state;
    int64_t ids[N];
    uint8_t bytes[N];
    for (int i = 0; i < N; i++) ids[i] = bytes[i] = (uint8_t)(i * 7);
    write_file("plain.txt", bytes, N);
    read_and_compare("plain.txt", TR_TOKENS_BYTES, TR_TOKEN_U8, ids, N);
}

/* Every integer type, with sequences of uneven lengths (some empty) in order and out of order. */
static void megatron_is_read(void **state) {
    (void)state;
    const int type[] = {1, 2, 3, 4, 5, 8}, width[] = {1, 1, 2, 4, 8, 2};
    const int64_t low[] = {0, -128, -32768, INT32_MIN, INT64_MIN, 0};
    const int64_t high[] = {255, 127, 32767, INT32_MAX, INT64_MAX, 65535};
    const int32_t lengths[] = {3, 0, 500, 1, 496, 0};
    const int64_t docs[] = {0, 2, 2, 6};
    for (int c = 0; c < 6; c++) {
        int64_t ids[N], stream[N], offsets[6], at = 0;
        for (int i = 0; i < N; i++)
            ids[i] = i % 3 == 0 ? low[c] + i % 100 : i % 3 == 1 ? high[c] - i % 100 : i % 100;
        FILE *f = fopen("m.bin", "wb");
        for (int i = 0; i < N; i++) fwrite(&ids[i], (size_t)width[c], 1, f);
        assert_int_equal(fclose(f), 0);
        for (int i = 0; i < 6; i++) {
            offsets[i] = at;
            at += lengths[i] * width[c];
        }
        index_fields x = {.version = 1,
                          .type = (uint8_t)type[c],
                          .n = 6,
                          .d = 4,
                          .lengths = lengths,
                          .offsets = offsets,
                          .docs = docs};
        write_index("m.idx", &x);
        read_and_compare("m.bin", TR_TOKENS_MEGATRON, (tr_token_type)type[c], ids, N);

        /* The last long sequence first in the .bin: the index's order is what counts. */
        const int64_t moved[] = {496 * width[c], 0, 499 * width[c],
                                 999 * width[c], 0, 8 * width[c]};
        x.offsets = moved;
        write_index("m.idx", &x);
        memcpy(stream, ids + 496, 504 * sizeof *ids);
        memcpy(stream + 504, ids, 496 * sizeof *ids);
        read_and_compare("m.bin", TR_TOKENS_MEGATRON, (tr_token_type)type[c], stream, N);
        tr_tokens t = {0};
        assert_int_equal(tr_tokens_open("m.bin", &t), TR_OK);
        assert_int_equal(t.documents, 3);
        assert_int_equal(t.nruns, 2);
        tr_tokens_close(&t);
    }
    unlink("m.idx");
}

static tr_status try_open(const char *path) {
    tr_tokens t = {0};
    tr_status status = tr_tokens_open(path, &t);
    if (status != TR_OK) assert_null(t.path); /* nothing is set on failure */
    tr_tokens_close(&t);
    return status;
}

static void bad_files_are_refused(void **state) {
    (void)state;
    const int64_t ids[4] = {1, 2, 3, 4};
    expect_failure(try_open("none.txt"), TR_ERR_MISSING, "none.txt", "no such file", NULL);
    expect_failure(try_open("bad.bin/x"), TR_ERR_MISSING, "bad.bin/x", NULL);
    mkdir("folder", 0777);
    expect_failure(try_open("folder"), TR_ERR_DATA, "folder", "a directory", NULL);
    mkfifo("pipe", 0666);
    expect_failure(try_open("pipe"), TR_ERR_DATA, "pipe", "not a file", NULL);

    write_llmc("bad.bin", 2, ids, 4, 2, 4);
    expect_failure(try_open("bad.bin"), TR_ERR_DATA, "bad.bin", "version 2", "version 1", NULL);
    write_llmc("bad.bin", 4, ids, 4, 1, 4);
    expect_failure(try_open("bad.bin"), TR_ERR_DATA, "bad.bin", "version 1", "version 7", NULL);
    for (int32_t count = -1; count <= 5; count++) {
        write_llmc("bad.bin", 2, ids, 4, 1, count);
        if (count == 4)
            assert_int_equal(try_open("bad.bin"), TR_OK);
        else
            expect_failure(try_open("bad.bin"), TR_ERR_DATA, "bad.bin", "promises", "1032", NULL);
    }
    assert_int_equal(truncate("bad.bin", 1031), 0);
    expect_failure(try_open("bad.bin"), TR_ERR_DATA, "bad.bin", "1031", NULL);
    assert_int_equal(truncate("bad.bin", 20), 0);
    expect_failure(try_open("bad.bin"), TR_ERR_DATA, "bad.bin", "20", NULL);
    const int32_t other[] = {20240522, 1, 4};
    write_file("bad.bin", other, sizeof other);
    expect_failure(try_open("bad.bin"), TR_ERR_DATA, "bad.bin", "20240522", "20240520", NULL);
}

static const int32_t good_lengths[] = {2, 3};
static const int64_t good_offsets[] = {0, 4}, good_docs[] = {0, 1, 2};

static index_fields good_index(void) {
    return (index_fields){.version = 1,
                          .type = 8,
                          .n = 2,
                          .d = 3,
                          .lengths = good_lengths,
                          .offsets = good_offsets,
                          .docs = good_docs};
}

static void refuse_index(index_fields x, const char *text, const char *more) {
    write_index("m.idx", &x);
    expect_failure(try_open("m.bin"), TR_ERR_DATA, "m.idx", text, more, NULL);
}

static void bad_indices_are_refused(void **state) {
    (void)state;
    const uint16_t ids[5] = {1, 2, 3, 4, 5};
    write_file("m.bin", ids, sizeof ids);
    index_fields x = good_index();
    write_index("m.idx", &x);
    assert_int_equal(try_open("m.bin"), TR_OK);
    expect_failure(try_open("m.idx"), TR_ERR_DATA, "m.idx", "name the .bin", NULL);
    expect_failure(try_open("m"), TR_ERR_MISSING, "m.idx is there", "name the .bin", NULL);

#define REFUSE(change, text, more)                                                                 \
    x = good_index();                                                                              \
    change;                                                                                        \
    refuse_index(x, text, more)
    REFUSE(x.magic = "TNTIDX\0\0", "not a Megatron index", "MMIDIDX");
    REFUSE(x.version = 2, "version 2", "only 1");
    REFUSE(x.type = 6, "type code 6", "floating point");
    REFUSE(x.type = 7, "type code 7", "floating point");
    REFUSE(x.type = 0, "type code 0", "8 u16");
    REFUSE(x.type = 9, "type code 9", "8 u16");
    REFUSE(x.type = 4, "does not fit", "m.bin");
    REFUSE(x.type = 1, "lists 5 tokens of u8", "10 bytes");
    REFUSE(x.lengths = ((const int32_t[]){2, 2}), "lists 4 tokens", "10 bytes");
    REFUSE(x.lengths = ((const int32_t[]){2, 4}), "sequence 1 has 4 tokens", "10 bytes");
    REFUSE(x.lengths = ((const int32_t[]){5, 3}), "more than 5 tokens", "10 bytes");
    REFUSE(x.lengths = ((const int32_t[]){-1, 3}), "sequence 0 has -1 tokens", "m.bin");
    REFUSE(x.lengths = ((const int32_t[]){INT32_MAX, 3}), "sequence 0 has 2147483647", "m.bin");
    REFUSE(x.offsets = ((const int64_t[]){0, -2}), "at byte -2", "m.bin");
    REFUSE(x.offsets = ((const int64_t[]){0, 3}), "at byte 3", "m.bin");
    REFUSE(x.offsets = ((const int64_t[]){0, INT64_MAX - 1}), "sequence 1", "m.bin");
    REFUSE(x.docs = ((const int64_t[]){1, 1, 2}), "document entry 0 is 1", "from 0");
    REFUSE(x.docs = ((const int64_t[]){0, 1, 1}), "document entry 2 is 1", "2");
    REFUSE(x.docs = ((const int64_t[]){0, 3, 2}), "document entry 1 is 3", "2");
    REFUSE(x.docs = ((const int64_t[]){0, -1, 2}), "document entry 1 is -1", "2");
    REFUSE(x.d = 2, "document entry 1 is 1", "2");
    REFUSE((x.n = 0, x.d = 1), "lists 0 tokens", "10 bytes");
#undef REFUSE

    x = good_index();
    write_index("m.idx", &x);
    struct stat st;
    assert_int_equal(stat("m.idx", &st), 0);
    for (long size = st.st_size - 1; size >= 0; size--) {
        assert_int_equal(truncate("m.idx", size), 0);
        expect_failure(try_open("m.bin"), TR_ERR_DATA, "m.idx", NULL);
    }
    write_index("m.idx", &x);
    assert_int_equal(truncate("m.idx", st.st_size + 2), 0); /* as of an index with modes */
    expect_failure(try_open("m.bin"), TR_ERR_DATA, "m.idx", "does not fit its size", NULL);
    write_index("m.idx", &x);
    assert_int_equal(truncate("m.bin", 9), 0);
    expect_failure(try_open("m.bin"), TR_ERR_DATA, "m.bin", "9 bytes", NULL);
    unlink("m.bin");
    expect_failure(try_open("m.bin"), TR_ERR_MISSING, "m.idx is there", "m.bin", NULL);
    unlink("m.idx");
}

static void options_are_checked(void **state) {
    (void)state;
    enum { S = 8 };
    file_list x;
    tr_dataset *d = NULL;
    tr_dataset_options good = {.sequence_length = S, .vocab_size = 256, .pad_id = -1}, o = good;
    tr_data_list empty = {0};
    o.files = &empty;
    expect_failure(tr_dataset_open(&o, &d), TR_ERR_USAGE, "empty", "at least one", NULL);

    write_text("short", "12345678");
    write_text("enough", "123456789");
    good.files = one_file(&x, "short");
    expect_failure(tr_dataset_open(&good, &d), TR_ERR_DATA, "short", "8 tokens", "needs 9", NULL);
    write_text("nothing", "");
    good.files = one_file(&x, "nothing");
    expect_failure(tr_dataset_open(&good, &d), TR_ERR_DATA, "nothing", "0 tokens", NULL);
    good.files = one_file(&x, "enough");
    d = open_or_fail(&good);
    assert_int_equal(tr_dataset_samples(d), 1);
    tr_dataset_close(d);
    d = NULL;

    o = good;
    o.vocab_size = 255;
    expect_failure(tr_dataset_open(&o, &d), TR_ERR_USAGE, "enough", "256 or more", "255", NULL);
    o.vocab_size = INT64_C(1) << 40;
    expect_failure(tr_dataset_open(&o, &d), TR_ERR_USAGE, "vocab_size", NULL);
    o = good;
    o.sequence_length = 0;
    expect_failure(tr_dataset_open(&o, &d), TR_ERR_USAGE, "sequence_length is 0", NULL);
    o = good;
    o.pad_id = 256;
    expect_failure(tr_dataset_open(&o, &d), TR_ERR_USAGE, "pad_id is 256", "-1 for none", NULL);
    assert_null(d);
    tr_dataset_close(NULL);
}

/* The id that equals the vocabulary, a negative one and one beyond 32 bits, in every place. */
static void large_tokens_are_refused(void **state) {
    (void)state;
    enum { S = 600, T = 2 * S + 1 };
    const int64_t bad[] = {1000, -1, INT64_C(5000000000)};
    const int64_t places[] = {0, 1, S - 1, S, 511, 512, 2 * S};
    for (int c = 0; c < 3; c++) {
        for (int k = 0; k < 7; k++) {
            int64_t ids[T], offset = 0, docs[] = {0, 1};
            int32_t length = T, input[S], label[S];
            uint8_t valid[S];
            for (int i = 0; i < T; i++) ids[i] = i == places[k] ? bad[c] : 999;
            write_file("m.bin", ids, sizeof ids);
            write_index("m.idx", &(index_fields){.version = 1,
                                                 .type = 5,
                                                 .n = 1,
                                                 .d = 2,
                                                 .lengths = &length,
                                                 .offsets = &offset,
                                                 .docs = docs});
            file_list x;
            tr_dataset *d = open_or_fail(&(tr_dataset_options){.files = one_file(&x, "m.bin"),
                                                               .sequence_length = S,
                                                               .vocab_size = 1000,
                                                               .pad_id = -1});
            char id[40], place[40];
            sprintf(id, "token %" PRId64 " ", bad[c]);
            sprintf(place, "position %" PRId64 " ", places[k]);
            int failures = 0;
            for (int64_t p = 0; p < 2; p++) {
                tr_status status = tr_dataset_sample(d, p, input, label, valid, NULL);
                if (status == TR_OK) continue;
                failures++;
                expect_failure(status, TR_ERR_DATA, "m.bin", id, place, "1000", NULL);
            }
            assert_int_equal(failures, places[k] == S ? 2 : 1); /* token S is in both samples */
            tr_dataset_close(d);
        }
    }
    unlink("m.idx");
}

/* A mask hides the token it stands at from being predicted; a pad also has no prediction. */
static void mask_and_pad(void **state) {
    (void)state;
    enum { S = 6 };
    write_text("t", "abc__de__f___");
    write_file("t.mask", "\1\0\1\1\1\1\1\1\1\0\1\1\1", 13);
    file_list x;
    tr_dataset_options o = {
        .files = one_file(&x, "t"), .sequence_length = S, .vocab_size = 256, .pad_id = -1};
    int32_t input[S], label[S];
    uint8_t valid[S];
    const char *text = "abc__de__f___";
    for (int c = 0; c < 4; c++) {
        o.pad_id = c & 1 ? '_' : -1;
        o.mask = c & 2;
        tr_dataset *d = open_or_fail(&o);
        assert_int_equal(tr_dataset_samples(d), 2);
        for (int64_t p = 0; p < 2; p++) {
            assert_int_equal(tr_dataset_sample(d, p, input, label, valid, NULL), TR_OK);
            for (int i = 0; i < S; i++) {
                int64_t at = p * S + i;
                bool pad = o.pad_id >= 0 && (text[at] == '_' || text[at + 1] == '_');
                bool hidden = o.mask && (at + 1 == 1 || at + 1 == 9);
                assert_int_equal(input[i], text[at]);
                assert_int_equal(valid[i], o.pad_id < 0 || text[at] != '_');
                assert_int_equal(label[i], pad || hidden ? -1 : text[at + 1]);
            }
        }
        tr_dataset_close(d);
    }
    tr_dataset *d = NULL;
    assert_int_equal(truncate("t.mask", 12), 0);
    o.mask = true;
    expect_failure(tr_dataset_open(&o, &d), TR_ERR_DATA, "t.mask", "12 bytes", "13 tokens", NULL);
    unlink("t.mask");
    expect_failure(tr_dataset_open(&o, &d), TR_ERR_MISSING, "t.mask", NULL);
}

static uint64_t fingerprint(int n, const char *const *paths, const double *weights, bool mask) {
    file_list x;
    tr_dataset *d = open_or_fail(&(tr_dataset_options){.files = files_of(&x, n, paths, weights),
                                                       .sequence_length = 4,
                                                       .vocab_size = 256,
                                                       .pad_id = -1,
                                                       .mask = mask});
    uint64_t h = tr_dataset_fingerprint(d);
    tr_dataset_close(d);
    return h;
}

static void fingerprint_tells_data_apart(void **state) {
    (void)state;
    const char *ab[] = {"a", "b"}, *ba[] = {"b", "a"}, *cb[] = {"c", "b"};
    const double w[] = {1, 2}, v[] = {1, 3};
    write_text("a", "some text here");
    write_text("b", "and others there");
    write_text("c", "some text here");
    write_text("a.mask", "11111111111111");
    write_text("b.mask", "1111111111111111");
    uint64_t h = fingerprint(2, ab, NULL, false);
    assert_true(h == fingerprint(2, ab, NULL, false));
    assert_true(h == fingerprint(2, cb, NULL, false)); /* a moved file is the same data */
    uint64_t others[8] = {h,
                          fingerprint(2, ba, NULL, false),
                          fingerprint(1, ab, NULL, false),
                          fingerprint(2, ab, w, false),
                          fingerprint(2, ab, v, false),
                          fingerprint(2, ab, NULL, true)};
    write_text("b.mask", "1111111011111111");
    others[6] = fingerprint(2, ab, NULL, true);
    write_text("a", "some text Here");
    others[7] = fingerprint(2, ab, NULL, false);
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < i; j++) assert_true(others[i] != others[j]);
}

/* Offsets beyond 32 bits: a 5 GiB file of bytes and a 4.4 GB one of llm.c, both mostly holes. */
static void large_files_are_read_to_the_end(void **state) {
    (void)state;
    enum { S = 64 };
    const int64_t bytes = (INT64_C(5) << 30) + 1, tokens = INT64_C(1100000000);
    const int32_t header[3] = {20240801, 7, (int32_t)tokens};
    int fd = open("big.txt", O_WRONLY | O_CREAT, 0666);
    assert_int_equal(ftruncate(fd, bytes), 0);
    assert_int_equal(pwrite(fd, "0123456789", 10, bytes - 10), 10);
    assert_int_equal(pwrite(fd, "x", 1, (INT64_C(1) << 32) + 5), 1);
    close(fd);
    fd = open("big.bin", O_WRONLY | O_CREAT, 0666);
    assert_int_equal(ftruncate(fd, 1024 + 4 * tokens), 0);
    assert_int_equal(pwrite(fd, header, sizeof header, 0), sizeof header);
    const uint32_t last = 70000;
    assert_int_equal(pwrite(fd, &last, 4, 1024 + 4 * (tokens - 1)), 4);
    close(fd);

    file_list x;
    const char *paths[] = {"big.txt", "big.bin"};
    tr_dataset *d = open_or_fail(&(tr_dataset_options){.files = files_of(&x, 2, paths, NULL),
                                                       .sequence_length = S,
                                                       .vocab_size = 70001,
                                                       .pad_id = -1});
    int64_t first = (bytes - 1) / S, all = first + (tokens - 1) / S, id;
    assert_int_equal(tr_dataset_samples(d), all);
    assert_int_equal(tr_dataset_tokens(d), bytes + tokens);
    int32_t input[S], label[S];
    uint8_t valid[S];
    assert_int_equal(tr_dataset_sample(d, first - 1, input, label, valid, &id), TR_OK);
    assert_int_equal(id, first - 1);
    for (int i = 0; i < 10; i++) assert_int_equal(label[S - 10 + i], '0' + i);
    assert_int_equal(tr_dataset_sample(d, (INT64_C(1) << 32) / S, input, label, valid, &id), TR_OK);
    assert_int_equal(input[5], 'x');
    assert_int_equal(tr_dataset_sample(d, all - 1, input, label, valid, &id), TR_OK);
    assert_int_equal(label[S - 1], (tokens - 1) % S == 0 ? 70000 : 0);
    uint64_t h = tr_dataset_fingerprint(d);
    tr_dataset_close(d);

    tr_tokens t = {0};
    int64_t end;
    assert_int_equal(tr_tokens_open("big.bin", &t), TR_OK);
    tr_tokens_read(&t, tokens - 1, 1, &end);
    assert_int_equal(end, 70000);
    tr_tokens_close(&t);

    assert_int_equal(truncate("big.txt", bytes - 1), 0);
    assert_true(h != fingerprint(1, paths, NULL, false));
    unlink("big.txt");
    unlink("big.bin");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(llmc_is_read),
                                       cmocka_unit_test(bytes_are_read),
                                       cmocka_unit_test(megatron_is_read),
                                       cmocka_unit_test(bad_files_are_refused),
                                       cmocka_unit_test(bad_indices_are_refused),
                                       cmocka_unit_test(options_are_checked),
                                       cmocka_unit_test(large_tokens_are_refused),
                                       cmocka_unit_test(mask_and_pad),
                                       cmocka_unit_test(fingerprint_tells_data_apart),
                                       cmocka_unit_test(large_files_are_read_to_the_end)};
    return cmocka_run_group_tests_name("data formats", tests, enter_scratch, leave_scratch);
}
