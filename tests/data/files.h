/* files.h - a scratch folder and the data files that the tests write by hand. Floor: tests. */
#pragma once
#include "base/status.h"
#include "config/config.h"
#include "data/dataset.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Makes a scratch folder and goes there, so that tests name files plainly; cmocka group functions.
 */
static inline int enter_scratch(void **state) {
    char name[] = "/tmp/trireme-data-XXXXXX";
    if (!mkdtemp(name) || chdir(name) != 0) return -1;
    *state = strdup(name);
    return 0;
}

static inline int leave_scratch(void **state) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", (char *)*state);
    free(*state);
    return chdir("/") == 0 ? system(command) : -1;
}

/* A new file each time: some systems write one that is truncated to disk at once, which is slow. */
static inline void write_file(const char *path, const void *data, size_t bytes) {
    unlink(path);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

static inline void write_text(const char *path, const char *text) {
    write_file(path, text, strlen(text));
}

/* llm.c: `width` 2 or 4, ids below 2^31; the header's count may lie. */
static inline void write_llmc(const char *path, int width, const int64_t *ids, int64_t n,
                              int32_t version, int32_t count) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    int32_t header[256] = {width == 2 ? 20240520 : 20240801, version, count};
    fwrite(header, 4, 256, f);
    for (int64_t i = 0; i < n; i++) fwrite(&ids[i], (size_t)width, 1, f);
    assert_int_equal(fclose(f), 0);
}

/* Megatron's index, field by field, so that any may be wrong. */
typedef struct {
    const char *magic; /* 9 bytes */
    uint64_t version;
    uint8_t type;
    uint64_t n, d;
    const int32_t *lengths; /* [n] */
    const int64_t *offsets; /* [n] */
    const int64_t *docs;    /* [d] */
} index_fields;

static inline void write_index(const char *path, const index_fields *x) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fwrite(x->magic ? x->magic : "MMIDIDX\0", 9, 1, f);
    fwrite(&x->version, 8, 1, f);
    fwrite(&x->type, 1, 1, f);
    fwrite(&x->n, 8, 1, f);
    fwrite(&x->d, 8, 1, f);
    fwrite(x->lengths, 4, (size_t)x->n, f);
    fwrite(x->offsets, 8, (size_t)x->n, f);
    fwrite(x->docs, 8, (size_t)x->d, f);
    assert_int_equal(fclose(f), 0);
}

/* A list of up to four files; weights of 0 stand for none. */
typedef struct {
    tr_data_entry entries[4];
    tr_data_list list;
} file_list;

static inline tr_data_list *files_of(file_list *x, int n, const char *const *paths,
                                     const double *weights) {
    for (int i = 0; i < n; i++)
        x->entries[i] = (tr_data_entry){(char *)(uintptr_t)paths[i], weights ? weights[i] : -1};
    x->list = (tr_data_list){x->entries, n};
    return &x->list;
}

static inline tr_data_list *one_file(file_list *x, const char *path) {
    return files_of(x, 1, &path, NULL);
}

/* The call fails so, and its message holds each of the texts (up to a NULL). */
static inline void expect_failure(tr_status got, tr_status want, ...) {
    va_list args;
    va_start(args, want);
    const char *text;
    if (got != want) fail_msg("status %d, not %d: %s", got, want, tr_error_message());
    while ((text = va_arg(args, const char *)))
        if (!strstr(tr_error_message(), text))
            fail_msg("'%s' is not in: %s", text, tr_error_message());
    va_end(args);
}

static inline tr_dataset *open_or_fail(const tr_dataset_options *o) {
    tr_dataset *d = NULL;
    if (tr_dataset_open(o, &d) != TR_OK) fail_msg("%s", tr_error_message());
    return d;
}
