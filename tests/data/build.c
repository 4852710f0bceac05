/* build.c - Property: a built file read back without its end-of-document tokens is the text, the
 * held-out part is the end of it and in no other file, and a failure leaves nothing. Floor: tests.
 */
#include "data/build.h"
#include "data/output.h"
#include "data/print.h"
#include "data/tokens.h"
#include "tests/data/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

/* Tokens of a file as text, with '|' for the token `end`. Caller frees. */
static char *text_of(const char *path, int64_t end) {
    tr_tokens t = {0};
    if (tr_tokens_open(path, &t) != TR_OK) fail_msg("%s", tr_error_message());
    int64_t *ids = calloc((size_t)t.count, sizeof *ids);
    char *text = calloc((size_t)t.count + 1, 1);
    tr_tokens_read(&t, 0, t.count, ids);
    for (int64_t i = 0; i < t.count; i++) text[i] = ids[i] == end ? '|' : (char)ids[i];
    free(ids);
    tr_tokens_close(&t);
    return text;
}

static void expect_text(const char *path, int64_t end, const char *want) {
    char *got = text_of(path, end);
    assert_string_equal(got, want);
    free(got);
}

static int64_t documents_of(const char *path) {
    tr_tokens t = {0};
    assert_int_equal(tr_tokens_open(path, &t), TR_OK);
    int64_t n = t.documents;
    tr_tokens_close(&t);
    return n;
}

static int files_here(void) {
    int n = 0;
    DIR *d = opendir(".");
    for (struct dirent *e; (e = readdir(d));) n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static int empty_folder(void **state) {
    (void)state;
    return system("rm -rf ./*") == 0 ? 0 : -1;
}

static int saved_output = -1;

static void capture_begin(void) {
    fflush(stdout);
    saved_output = dup(1);
    int fd = open("/tmp", O_TMPFILE | O_RDWR, 0600);
    assert_true(fd >= 0);
    dup2(fd, 1);
    close(fd);
}

static void capture_end(char *text, size_t room) {
    fflush(stdout);
    ssize_t n = pread(1, text, room - 1, 0);
    text[n > 0 ? n : 0] = 0;
    dup2(saved_output, 1);
    close(saved_output);
}

static tr_status build(tr_data_build_options o) {
    char text[4096];
    capture_begin();
    tr_status status = tr_data_build(&o);
    capture_end(text, sizeof text);
    if (status == TR_OK) assert_true(strlen(text) > 0);
    return status;
}

static void build_or_fail(tr_data_build_options o) {
    if (build(o) != TR_OK) fail_msg("%s", tr_error_message());
}

static void documents_are_cut(void **state) {
    (void)state;
    const char *text = "\n\none\ntwo\n\n  \nthree\n\nfour";
    const char *want[] = {"\n\none\ntwo\n\n  \nthree\n\nfour|",
                          "\n\none\ntwo\n\n  \n|three\n\n|four|",
                          "\n\none\n|two\n\n  \n|three\n\n|four|"};
    const int64_t documents[] = {1, 3, 4};
    const char *input = "in.txt";
    write_text(input, text);
    for (int rule = 0; rule < 3; rule++) {
        for (int format = 0; format < 2; format++) {
            tr_data_build_options o = {.inputs = &input,
                                       .ninputs = 1,
                                       .output = "out.bin",
                                       .format = (tr_build_format)format,
                                       .documents = (tr_documents)rule,
                                       .end_of_document = 256};
            build_or_fail(o);
            expect_text("out.bin", 256, want[rule]);
            assert_int_equal(documents_of("out.bin"), format == 0 ? -1 : documents[rule]);
            o.end_of_document = -1;
            build_or_fail(o);
            expect_text("out.bin", -1, text);
        }
    }
    const char *blank = "  \n\n \n";
    assert_int_equal(tr_text_document((const uint8_t *)blank, 6, TR_DOCUMENTS_LINE), 6);
}

static void inputs_are_joined(void **state) {
    (void)state;
    const char *inputs[] = {"a", "empty", "b"};
    write_text("a", "first");
    write_text("empty", "");
    write_text("b", "second\nthird");
    tr_data_build_options o = {.inputs = inputs,
                               .ninputs = 3,
                               .output = "out.bin",
                               .format = TR_BUILD_MEGATRON,
                               .end_of_document = 0};
    build_or_fail(o);
    expect_text("out.bin", 0, "first|second\nthird|");
    assert_int_equal(documents_of("out.bin"), 2);
    o.format = TR_BUILD_TEXT;
    o.end_of_document = -1;
    o.output = "out.txt";
    build_or_fail(o);
    expect_text("out.txt", -1, "firstsecond\nthird");
}

/* All 256 bytes and more than one buffer's worth of them. */
static void large_text_is_exact(void **state) {
    (void)state;
    enum { N = 3000001 };
    uint8_t *bytes = malloc(N);
    for (int i = 0; i < N; i++) bytes[i] = (uint8_t)(i * 31 + i / 1000);
    write_file("in", bytes, N);
    for (int format = 0; format < 3; format++) {
        tr_data_build_options o = {.inputs = (const char *[]){"in"},
                                   .ninputs = 1,
                                   .output = "out.bin",
                                   .format = (tr_build_format)format,
                                   .documents = TR_DOCUMENTS_LINE,
                                   .end_of_document = -1};
        if (format == TR_BUILD_TEXT) o.output = "out.txt";
        build_or_fail(o);
        char *got = text_of(o.output, -1);
        assert_memory_equal(got, bytes, N);
        free(got);
    }
    free(bytes);
}

static void cut_is_at_a_boundary(void **state) {
    (void)state;
    const struct {
        const char *a, *b;
        double fraction;
        int64_t want;
    } cases[] = {
        {"0123\n5678\nabcd\nfghi\n", "", 0.25, 15},        /* exactly at a line */
        {"0123\n5678\nabcd\nfghi\n", "", 0.2, 15},         /* within one: the whole line */
        {"0123456789\nbcdefghijklmnopqrst", "", 0.05, 29}, /* the line is much too long */
        {"0123456789", "", 0.3, 7},
        {"0123456789", "", 1e-9, 9}, /* one byte at least */
        {"0123456789", "", 0.999, 1},
        {"0123", "56789", 0.5, 4},            /* the second file begins a line */
        {"01234567\xe2\x82\xac", "", 0.1, 8}, /* not within a character */
        {"0123456\xf0\x9f\x98\x80", "", 0.2, 7},
        {"\x80\x80\x80\x80\x80\x80\x80\x80", "", 0.2, 4}, /* not UTF-8: no endless search */
        {"x", "", 0.5, 0},
        {"\xe2\x82\xac", "", 0.5, 0}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        write_text("a", cases[c].a);
        write_text("b", cases[c].b);
        tr_text t = {0};
        assert_int_equal(tr_text_open((const char *[]){"a", "b"}, 2, &t), TR_OK);
        int64_t got = tr_text_cut(&t, cases[c].fraction);
        if (got != cases[c].want)
            fail_msg("case %zu: cut at %" PRId64 ", not %" PRId64, c, got, cases[c].want);
        tr_text_close(&t);
    }
}

static void validation_is_the_end(void **state) {
    (void)state;
    char text[10001] = "";
    for (int i = 0; i < 1000; i++) sprintf(text + 10 * i, "verse %03d\n", i);
    write_text("in", text);
    for (int format = 0; format < 3; format++) {
        const char *names[][2] = {{"t.bin", "v.bin"}, {"t.bin", "v.bin"}, {"t.txt", "v.txt"}};
        build_or_fail((tr_data_build_options){.inputs = (const char *[]){"in"},
                                              .ninputs = 1,
                                              .output = names[format][0],
                                              .format = (tr_build_format)format,
                                              .end_of_document = -1,
                                              .validation_fraction = 0.0503,
                                              .validation_output = names[format][1]});
        char *train = text_of(names[format][0], -1), *validation = text_of(names[format][1], -1);
        assert_int_equal(strlen(validation), 510);
        assert_int_equal(strlen(train) + strlen(validation), strlen(text));
        assert_memory_equal(train, text, strlen(train));
        assert_string_equal(validation, text + strlen(train));
        free(train);
        free(validation);
    }
    capture_begin();
    tr_status status = tr_data_split_text("in", "x.txt", "y.txt", 0.05);
    char said[1000];
    capture_end(said, sizeof said);
    assert_int_equal(status, TR_OK);
    assert_string_equal(said, "x.txt: 9,500 bytes\ny.txt: 500 bytes\n");
    expect_text("y.txt", -1, text + 9500);
}

static void bad_options_are_refused(void **state) {
    (void)state;
    const char *input = "in";
    write_text(input, "some text\n");
    write_text("empty", "");
    write_text("one", "x");
    symlink("in", "alias");
    mkdir("folder", 0777);
    const tr_data_build_options good = {
        .inputs = &input, .ninputs = 1, .output = "out.bin", .end_of_document = 256};
    tr_data_build_options o;
    int before = files_here();
#define REFUSE(change, status, ...)                                                                \
    o = good;                                                                                      \
    change;                                                                                        \
    expect_failure(build(o), status, __VA_ARGS__, NULL);                                           \
    assert_int_equal(files_here(), before)
    REFUSE(o.ninputs = 0, TR_ERR_USAGE, "no text file");
    REFUSE(o.output = NULL, TR_ERR_USAGE, "no output");
    REFUSE(o.output = "in", TR_ERR_USAGE, "in is an input too");
    REFUSE(o.output = "./alias", TR_ERR_USAGE, "alias is an input too");
    REFUSE(o.output = "folder", TR_ERR_USAGE, "folder: not a regular file");
    REFUSE(o.output = "none/out.bin", TR_ERR_IO, "none/out.bin: cannot create");
    REFUSE(o.end_of_document = 65536, TR_ERR_USAGE, "65536", "0 to 65535");
    REFUSE(o.end_of_document = -2, TR_ERR_USAGE, "-2");
    REFUSE(o.format = TR_BUILD_TEXT, TR_ERR_USAGE, "no end-of-document");
    REFUSE((o.format = TR_BUILD_MEGATRON, o.output = "out"), TR_ERR_USAGE, "NAME.bin");
    REFUSE(o.validation_fraction = 0.1, TR_ERR_USAGE, "both or neither");
    REFUSE(o.validation_output = "v", TR_ERR_USAGE, "both or neither");
    const double fractions[] = {-0.1, 1, 5, NAN};
    for (int i = 0; i < 4; i++) {
        REFUSE((o.validation_output = "v", o.validation_fraction = fractions[i]), TR_ERR_USAGE,
               "between 0 and 1");
    }
    REFUSE((o.validation_output = "out.bin", o.validation_fraction = 0.1), TR_ERR_USAGE,
           "name two files");
    REFUSE((o.validation_output = "./out.bin", o.validation_fraction = 0.1), TR_ERR_USAGE,
           "name two files");
    REFUSE((o.validation_output = "in", o.validation_fraction = 0.1), TR_ERR_USAGE,
           "in is an input too");
    REFUSE(o.inputs = (const char *[]){"nowhere"}, TR_ERR_MISSING, "nowhere: no such file");
    REFUSE(o.inputs = (const char *[]){"empty"}, TR_ERR_DATA, "empty: no text");
    REFUSE((o.inputs = (const char *[]){"one"}, o.validation_output = "v",
            o.validation_fraction = 0.5),
           TR_ERR_DATA, "one", "too short");
#undef REFUSE
    tr_build_format format;
    tr_documents documents;
    assert_int_equal(tr_data_parse_format("megatron", &format), TR_OK);
    assert_int_equal(format, TR_BUILD_MEGATRON);
    assert_int_equal(tr_data_parse_documents("paragraph", &documents), TR_OK);
    assert_int_equal(documents, TR_DOCUMENTS_PARAGRAPH);
    expect_failure(tr_data_parse_format("hdf5", &format), TR_ERR_USAGE, "hdf5", "megatron", NULL);
    expect_failure(tr_data_parse_documents("page", &documents), TR_ERR_USAGE, "page", "line", NULL);
}

/* A document, or a file, of more tokens than its format can count (the input is a hole). */
static void too_many_tokens_are_refused(void **state) {
    (void)state;
    write_text("in", "x");
    assert_int_equal(truncate("in", (INT64_C(1) << 31) - 1), 0);
    for (int format = 0; format < 2; format++) {
        expect_failure(build((tr_data_build_options){.inputs = (const char *[]){"in"},
                                                     .ninputs = 1,
                                                     .output = "out.bin",
                                                     .format = (tr_build_format)format,
                                                     .end_of_document = 256}),
                       TR_ERR_DATA, "out.bin", "2147483647",
                       format == 0 ? "use format megatron" : "make paragraphs or lines", NULL);
        assert_int_equal(files_here(), 1);
    }
}

/* The limit on file sizes stands in for a full disk: the write fails, whenever it comes. */
static void full_disk_leaves_nothing(void **state) {
    (void)state;
    enum { N = 400000 };
    char *text = calloc(1, N + 1);
    for (int i = 0; i < N; i++) text[i] = i % 50 ? 'x' : '\n';
    write_text("in", text);
    write_text("out.bin", "an older file");
    struct rlimit old, now;
    getrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, SIG_IGN);
    const rlim_t limits[] = {0, 1000, 70000, 300000, 799000};
    for (int format = 0; format < 3; format++) {
        for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
            if (format == TR_BUILD_TEXT && limits[i] > 200000) continue;
            now = (struct rlimit){limits[i], old.rlim_max};
            tr_data_build_options o = {.inputs = (const char *[]){"in"},
                                       .ninputs = 1,
                                       .output = "out.bin",
                                       .format = (tr_build_format)format,
                                       .documents = TR_DOCUMENTS_LINE,
                                       .end_of_document = -1};
            if (i == 1 || i == 2) { /* the second file is the one that fails, at 70000 */
                o.validation_output = "v.bin";
                o.validation_fraction = 0.9;
            }
            setrlimit(RLIMIT_FSIZE, &now);
            tr_status status = tr_data_build(&o); /* prints nothing when it fails */
            setrlimit(RLIMIT_FSIZE, &old);
            expect_failure(status, TR_ERR_IO, ": cannot write it", "make room", NULL);
            assert_int_equal(files_here(), 2);
            expect_text("out.bin", -1, "an older file");
        }
    }
    signal(SIGXFSZ, SIG_DFL);
    free(text);
}

static void info_of(const char *path, int64_t sequence_length, char *said, size_t room) {
    capture_begin();
    tr_status status = tr_data_info(path, sequence_length);
    capture_end(said, room);
    if (status != TR_OK) fail_msg("%s", tr_error_message());
    int column = 0;
    for (const char *c = said; *c; c++) {
        column = *c == '\n' ? 0 : column + 1;
        assert_true(column <= 100);
    }
}

static void info_tells(void **state) {
    (void)state;
    char said[2000];
    write_text("in", "Hello world\n");
    info_of("in", 4, said, sizeof said);
    assert_string_equal(said, "file        in\n"
                              "format      raw bytes, tokens of u8\n"
                              "size        12 bytes\n"
                              "tokens      12\n"
                              "documents   not recorded in this format\n"
                              "token ids   10 to 119\n"
                              "vocab_size  256 or more\n"
                              "samples     2 of sequence_length 4\n");
    char lines[40001];
    for (int i = 0; i < 5000; i++) sprintf(lines + 8 * i, "line%03d\n", i % 1000);
    write_text("in", lines);
    char long_name[250];
    memset(long_name, 'n', sizeof long_name);
    strcpy(long_name + 200, ".bin");
    build_or_fail((tr_data_build_options){.inputs = (const char *[]){"in"},
                                          .ninputs = 1,
                                          .output = long_name,
                                          .format = TR_BUILD_MEGATRON,
                                          .documents = TR_DOCUMENTS_LINE,
                                          .end_of_document = 256});
    info_of(long_name, 64, said, sizeof said);
    assert_non_null(strstr(said, "file        ...nnnn"));
    assert_non_null(strstr(said,
                           "format      Megatron, tokens of u16\nsize        90,000 bytes\n"
                           "tokens      45,000\ndocuments   5,000\ntoken ids   10 to 256\n"
                           "vocab_size  257 or more\nsamples     703 of sequence_length 64\n"));
    write_text("in", "abc");
    write_file("in.mask", "\1\0\1", 3);
    info_of("in", 4, said, sizeof said);
    assert_non_null(strstr(said, "samples     0 of"));
    assert_non_null(strstr(said, "mask        2 tokens are to be predicted"));
    assert_int_equal(truncate("in.mask", 2), 0);
    capture_begin();
    tr_status status = tr_data_info("in", 4);
    capture_end(said, sizeof said);
    expect_failure(status, TR_ERR_DATA, "in.mask", NULL);
    expect_failure(tr_data_info("in", 0), TR_ERR_USAGE, "sequence_length is 0", NULL);
    expect_failure(tr_data_info("none", 4), TR_ERR_MISSING, "none", NULL);
    const int64_t numbers[] = {0, 999, 1000, 1234567, -1, -1000, INT64_MAX};
    const char *want[] = {
        "0", "999", "1,000", "1,234,567", "-1", "-1,000", "9,223,372,036,854,775,807"};
    for (int i = 0; i < 7; i++) {
        tr_print_count(numbers[i], said);
        assert_string_equal(said, want[i]);
    }
}

static void utf8_is_checked(void **state) {
    (void)state;
    const struct {
        const char *text;
        int64_t bad;
    } cases[] = {{"", -1},
                 {"plain", -1},
                 {"\xc3\xa9", -1},
                 {"\xe2\x82\xac", -1},
                 {"\xf0\x9f\x98\x80", -1},
                 {"\xf4\x8f\xbf\xbf", -1},
                 {"\xed\x9f\xbf", -1},
                 {"ab\x80", 2},
                 {"a\xc3", 1},
                 {"a\xc3z", 1},
                 {"\xc0\x80", 0},
                 {"\xc1\xbf", 0},
                 {"\xe0\x9f\xbf", 0},
                 {"\xed\xa0\x80", 0},
                 {"\xf0\x8f\xbf\xbf", 0},
                 {"\xf4\x90\x80\x80", 0},
                 {"\xf5\x80\x80\x80", 0},
                 {"ok\xe2\x82", 2},
                 {"\xe2\x82z", 0},
                 {"\xff", 0}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const char *text = cases[c].text;
        assert_int_equal(tr_text_find_bad_utf8((const uint8_t *)text, (int64_t)strlen(text)),
                         cases[c].bad);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(documents_are_cut, empty_folder),
        cmocka_unit_test_setup(inputs_are_joined, empty_folder),
        cmocka_unit_test_setup(large_text_is_exact, empty_folder),
        cmocka_unit_test_setup(cut_is_at_a_boundary, empty_folder),
        cmocka_unit_test_setup(validation_is_the_end, empty_folder),
        cmocka_unit_test_setup(bad_options_are_refused, empty_folder),
        cmocka_unit_test_setup(too_many_tokens_are_refused, empty_folder),
        cmocka_unit_test_setup(full_disk_leaves_nothing, empty_folder),
        cmocka_unit_test_setup(info_tells, empty_folder),
        cmocka_unit_test_setup(utf8_is_checked, empty_folder)};
    return cmocka_run_group_tests_name("data build", tests, enter_scratch, leave_scratch);
}
