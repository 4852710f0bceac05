/* Property: no change of bytes in a config makes the reader crash, hang or accept what it cannot
 * print and read back the same. */
#include "base/rng.h"
#include "tests/config/common.h"

enum { ROUNDS = 12000, MOST_BYTES = 8192 };

static const char *const pieces[] = {
    "[",    "]",   "{",    "}", ": ",   "- ",   "\n",      "  ",  "\"", "'", "&a",  "*a",
    "<<: ", "|",   ">",    "#", "---",  "...",  "\t",      "!",   "%",  "?", ",",   "\\",
    "0x",   "1e9", ".nan", "~", "\xc3", "\xff", "\\u2028", "\\0", "@",  "`", "null"};

/* One to four changes: a byte, a piece put in, a run cut, a run doubled. */
static size_t mutate(char *text, size_t bytes, uint64_t seed) {
    int changes = 1 + (int)(tr_random_u64(seed, 0, 0) % 4);
    for (int i = 0; i < changes; i++) {
        uint64_t draw[4];
        for (uint64_t j = 0; j < 4; j++) draw[j] = tr_random_u64(seed, 1 + j, (uint64_t)i);
        size_t at = draw[1] % (bytes + 1), run = draw[2] % 24;
        if (run > bytes - at) run = bytes - at;
        const char *piece = pieces[draw[3] % (sizeof pieces / sizeof *pieces)];
        size_t length = strlen(piece);
        switch (draw[0] % 4) {
        case 0:
            if (at < bytes) text[at] = (char)draw[3];
            break;
        case 1:
            if (bytes + length >= MOST_BYTES) break;
            memmove(text + at + length, text + at, bytes - at);
            memcpy(text + at, piece, length);
            bytes += length;
            break;
        case 2:
            memmove(text + at, text + at + run, bytes - at - run);
            bytes -= run;
            break;
        case 3:
            if (bytes + run >= MOST_BYTES) break;
            memmove(text + at + run, text + at, bytes - at);
            bytes += run;
            break;
        }
    }
    text[bytes] = 0;
    return bytes;
}

static size_t load(const char *name, char *text) {
    char path[500];
    snprintf(path, sizeof path, "%s/configs/%s.yaml", TR_SOURCE_DIR, name);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    size_t bytes = fread(text, 1, MOST_BYTES - 1, file);
    assert_int_equal(fclose(file), 0);
    text[bytes] = 0;
    return bytes;
}

static void mutations(void **state) {
    (void)state;
    static char text[MOST_BYTES + 1];
    int64_t accepted = 0, refused = 0;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        size_t bytes = load(round % 2 ? "tiny-moe" : "quickstart", text);
        mutate(text, bytes, round);
        tr_config *config = NULL;
        tr_status status = tr_config_parse(text, "fuzz.yaml", 0, NULL, &config);
        if (status != TR_OK) {
            if (status != TR_ERR_USAGE && status != TR_ERR_MISSING)
                fail_msg("round %llu: status %d", (unsigned long long)round, status);
            assert_true(strlen(tr_error_message()) > 0);
            refused++;
            continue;
        }
        char *first = tr_config_print(config);
        tr_config *again = parsed(first, NULL);
        char *second = tr_config_print(again);
        assert_string_equal(first, second);
        int64_t data;
        (void)tr_config_check_world(config, 4, &data);
        free(first);
        free(second);
        tr_config_destroy(again);
        tr_config_destroy(config);
        accepted++;
    }
    print_message("accepted %lld, refused %lld\n", (long long)accepted, (long long)refused);
    assert_true(accepted > ROUNDS / 50 && refused > ROUNDS / 50);
}

/* The same for the value of an override. */
static void overrides(void **state) {
    (void)state;
    static char text[MOST_BYTES + 1];
    static const char *const seeds[] = {"data.train=[a.txt, {path: b, weight: 2}]",
                                        "model.mlp_only_layers=[0, 1]", "optimizer.clip=1.5e-3",
                                        "checkpoint.resume=\"x y\""};
    for (uint64_t round = 0; round < ROUNDS; round++) {
        strcpy(text, seeds[round % 4]);
        mutate(text, strlen(text), ROUNDS + round);
        char *one[] = {text};
        tr_config *config = NULL;
        if (tr_config_parse(MODEL, "fuzz.yaml", 1, one, &config) != TR_OK) continue;
        char *first = tr_config_print(config);
        tr_config *again = parsed(first, NULL);
        char *second = tr_config_print(again);
        assert_string_equal(first, second);
        free(first);
        free(second);
        tr_config_destroy(again);
        tr_config_destroy(config);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(mutations), cmocka_unit_test(overrides)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
