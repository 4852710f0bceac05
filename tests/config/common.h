/* common.h - what the tests of the config floor share. */
#pragma once
#include "config/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MODEL                                                                                      \
    "model:\n"                                                                                     \
    "  vocab_size: 256\n"                                                                          \
    "  hidden_size: 64\n"                                                                          \
    "  num_hidden_layers: 4\n"                                                                     \
    "  num_attention_heads: 4\n"                                                                   \
    "  intermediate_size: 96\n"

/* The config of `text` and up to four overrides (NULL ends them); fails the test if refused. */
static inline tr_config *parsed(const char *text, const char *const *sets) {
    int n = 0;
    while (sets && sets[n]) n++;
    tr_config *config = NULL;
    tr_status status = tr_config_parse(text, "test.yaml", n, (char *const *)sets, &config);
    if (status != TR_OK) fail_msg("refused: %s", tr_error_message());
    return config;
}

/* Fails the test unless the stored message has `part`. */
static inline void expect_text(const char *what, const char *part) {
    if (!strstr(tr_error_message(), part))
        fail_msg("%s: message \"%s\" lacks \"%s\"", what, tr_error_message(), part);
}

static inline void write_file(const char *path, const void *bytes, size_t count) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}
