/* info.c - what a data file holds, and numbers and paths for people. Floor: data. */
#include "base/log.h"
#include "data/build.h"
#include "data/print.h"
#include "data/tokens.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { READ_TOKENS = 8192 };

void tr_print_count(int64_t n, char *text) {
    char digits[TR_COUNT_CHARS];
    int length = snprintf(digits, sizeof digits, "%" PRId64, n);
    for (int i = 0; i < length; i++) {
        *text++ = digits[i];
        int left = length - 1 - i;
        if (left > 0 && left % 3 == 0 && digits[i] != '-') *text++ = ',';
    }
    *text = 0;
}

void tr_print_path(const char *path, char *text) {
    size_t n = strlen(path);
    if (n <= TR_PATH_COLUMNS)
        memcpy(text, path, n + 1);
    else
        snprintf(text, TR_PATH_COLUMNS + 1, "...%s", path + n - (TR_PATH_COLUMNS - 3));
}

/* Smallest and largest token id of a file with one token at least. */
static void find_range(const tr_tokens *t, int64_t *min_p, int64_t *max_p) {
    int64_t ids[READ_TOKENS], min = INT64_MAX, max = INT64_MIN;
    for (int64_t done = 0; done < t->count;) {
        int64_t n = t->count - done < READ_TOKENS ? t->count - done : READ_TOKENS;
        tr_tokens_read(t, done, n, ids);
        for (int64_t i = 0; i < n; i++) {
            if (ids[i] < min) min = ids[i];
            if (ids[i] > max) max = ids[i];
        }
        done += n;
    }
    *min_p = min;
    *max_p = max;
}

static void print_tokens(const tr_tokens *t, int64_t sequence_length) {
    char count[TR_COUNT_CHARS], documents[TR_COUNT_CHARS], samples[TR_COUNT_CHARS];
    tr_print_count(t->count, count);
    tr_print_count(t->documents, documents);
    tr_print_count(t->count > 0 ? (t->count - 1) / sequence_length : 0, samples);
    tr_say("tokens      %s", count);
    tr_say("documents   %s", t->documents < 0 ? "not recorded in this format" : documents);
    if (t->count > 0) {
        int64_t min, max;
        find_range(t, &min, &max);
        tr_say("token ids   %" PRId64 " to %" PRId64, min, max);
        if (min < 0 || max >= INT32_MAX)
            tr_say("vocab_size  none will do: ids must be from 0 to %d", INT32_MAX - 1);
        else
            tr_say("vocab_size  %" PRId64 " or more", t->format == TR_TOKENS_BYTES ? 256 : max + 1);
    }
    tr_say("samples     %s of sequence_length %" PRId64, samples, sequence_length);
}

static tr_status print_mask(const tr_tokens *t) {
    char path[4096], count[TR_COUNT_CHARS];
    int length = snprintf(path, sizeof path, "%s.mask", t->path);
    if (length >= (int)sizeof path || access(path, F_OK) != 0) return TR_OK;
    tr_file_map mask;
    TR_TRY(tr_tokens_open_mask(t, &mask));
    int64_t predicted = 0;
    for (int64_t i = 0; i < mask.size; i++) predicted += mask.bytes[i] != 0;
    tr_file_map_close(&mask);
    tr_print_count(predicted, count);
    tr_say("mask        %s tokens are to be predicted (with data.mask)", count);
    return TR_OK;
}

tr_status tr_data_info(const char *path, int64_t sequence_length) {
    if (sequence_length < 1)
        return tr_fail(TR_ERR_USAGE, "sequence_length is %" PRId64 "; it must be at least 1",
                       sequence_length);
    tr_tokens t = {0};
    TR_TRY(tr_tokens_open(path, &t));
    char name[TR_PATH_COLUMNS + 1], size[TR_COUNT_CHARS];
    tr_print_path(path, name);
    tr_print_count(t.map.size, size);
    tr_say("file        %s", name);
    tr_say("format      %s, tokens of %s%s", tr_tokens_format_name(t.format),
           tr_token_type_name(t.type),
           t.nruns > 1 ? ", sequences in another order than in the .bin" : "");
    tr_say("size        %s bytes", size);
    print_tokens(&t, sequence_length);
    tr_status status = print_mask(&t);
    tr_tokens_close(&t);
    return status;
}
