/* fuzz.c - Property: no header, however damaged, makes opening or reading a file do anything but
 * succeed or refuse with a message. (To be run under -fsanitize=address,undefined too.)
 * Floor: tests. */
#include "base/rng.h"
#include "data/tokens.h"
#include "tests/data/files.h"

enum { ROUNDS = 4000, LARGEST = 1400 };

static uint64_t draw(uint64_t *n, uint64_t below) {
    return tr_random_u64(5, 6, ++*n) % below;
}

/* Changes some bytes, most of them near the start, or the length. */
static size_t damage(uint8_t *bytes, size_t size, uint64_t *n) {
    const uint8_t values[] = {0, 1, 2, 8, 0x7f, 0x80, 0xff};
    for (uint64_t k = 1 + draw(n, 4); k > 0; k--) {
        size_t at = draw(n, 2) ? draw(n, size < 50 ? size : 50) : draw(n, size);
        bytes[at] = draw(n, 2) ? values[draw(n, sizeof values)] : (uint8_t)draw(n, 256);
    }
    if (draw(n, 8) == 0) return draw(n, size);
    if (draw(n, 8) == 0) return size + draw(n, LARGEST - size);
    return size;
}

/* Opens PATH and reads every token of it, in pieces. */
static bool open_and_read(const char *path) {
    tr_tokens t = {0};
    tr_status status = tr_tokens_open(path, &t);
    if (status != TR_OK) {
        if (status != TR_ERR_DATA || strlen(tr_error_message()) < 10 || t.path)
            fail_msg("status %d: %s", status, tr_error_message());
        return false;
    }
    int64_t ids[97];
    for (int64_t done = 0; done < t.count; done += 97) {
        int64_t n = t.count - done < 97 ? t.count - done : 97;
        tr_tokens_read(&t, done, n, ids);
    }
    assert_true(t.count >= 0 && t.count <= LARGEST);
    tr_tokens_close(&t);
    return true;
}

static void fuzz(const char *read, const char *damaged, const uint8_t *good, size_t size) {
    uint64_t n = 0;
    int opened = 0;
    write_file(damaged, good, size);
    assert_true(open_and_read(read));
    for (int i = 0; i < ROUNDS; i++) {
        uint8_t bytes[LARGEST] = {0};
        memcpy(bytes, good, size);
        size_t now = damage(bytes, size, &n);
        write_file(damaged, bytes, now);
        opened += open_and_read(read);
    }
    print_message("%s: %d of %d damaged files still fit\n", damaged, opened, ROUNDS);
    assert_true(opened < ROUNDS * 3 / 4);
}

static size_t load(const char *path, uint8_t *bytes) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    size_t size = fread(bytes, 1, LARGEST, f);
    fclose(f);
    return size;
}

static void llmc_headers(void **state) {
    (void)state;
    int64_t ids[100];
    uint8_t good[LARGEST];
    for (int i = 0; i < 100; i++) ids[i] = i;
    for (int width = 2; width <= 4; width += 2) {
        write_llmc("x", width, ids, width == 2 ? 100 : 80, width == 2 ? 1 : 7,
                   width == 2 ? 100 : 80);
        fuzz("x", "x", good, load("x", good));
    }
}

static void megatron_indices(void **state) {
    (void)state;
    uint8_t bin[240], good[LARGEST];
    for (int i = 0; i < 240; i++) bin[i] = (uint8_t)i;
    write_file("m.bin", bin, sizeof bin);
    const int type[] = {1, 8, 4, 5}, width[] = {1, 2, 4, 8};
    for (int c = 0; c < 4; c++) {
        int32_t lengths[6];
        int64_t offsets[6], docs[] = {0, 1, 4, 6};
        for (int i = 0; i < 6; i++) {
            lengths[i] = 40 / width[c];
            offsets[i] = i * 40;
        }
        write_index("m.idx", &(index_fields){.version = 1,
                                             .type = (uint8_t)type[c],
                                             .n = 6,
                                             .d = 4,
                                             .lengths = lengths,
                                             .offsets = offsets,
                                             .docs = docs});
        fuzz("m.bin", "m.idx", good, load("m.idx", good));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(llmc_headers),
                                       cmocka_unit_test(megatron_indices)};
    return cmocka_run_group_tests_name("data fuzz", tests, enter_scratch, leave_scratch);
}
