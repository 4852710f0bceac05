/* text.c - reading and cutting text. Floor: data. */
#include "data/text.h"

#include "base/heap.h"
#include "base/log.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Length of the character at `c` by its first byte, 0 if none begins so; *low_p and *high_p bound
 * the second byte, which shuts out overlong forms, surrogates and numbers above 0x10ffff (RFC
 * 3629). */
static int64_t character_bytes(uint8_t c, uint8_t *low_p, uint8_t *high_p) {
    *low_p = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
    *high_p = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
    if (c < 0x80) return 1;
    if (c < 0xc2 || c > 0xf4) return 0;
    return c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

int64_t tr_text_find_bad_utf8(const uint8_t *bytes, int64_t size) {
    for (int64_t i = 0; i < size;) {
        uint64_t eight = UINT64_C(1) << 63;
        if (size - i >= 8) memcpy(&eight, bytes + i, 8);
        if (!(eight & UINT64_C(0x8080808080808080))) { /* eight characters of one byte */
            i += 8;
            continue;
        }
        uint8_t low, high;
        int64_t n = character_bytes(bytes[i], &low, &high);
        if (n == 0 || n > size - i) return i;
        for (int64_t j = 1; j < n; j++) {
            uint8_t c = bytes[i + j];
            if (c < (j == 1 ? low : 0x80) || c > (j == 1 ? high : 0xbf)) return i;
        }
        i += n;
    }
    return -1;
}

tr_status tr_text_open(const char *const *paths, int64_t count, tr_text *text) {
    if (count < 1) return tr_fail(TR_ERR_USAGE, "no text file is named; name at least one");
    tr_text t = {.count = count, .paths = paths};
    t.files = tr_heap_alloc(count, sizeof *t.files);
    t.first = tr_heap_alloc(count + 1, sizeof *t.first);
    tr_status status = TR_OK;
    for (int64_t i = 0; i < count && status == TR_OK; i++) {
        status = tr_file_map_open(paths[i], &t.files[i]);
        t.first[i + 1] = t.first[i] + t.files[i].size;
    }
    if (status == TR_OK && t.first[count] == 0)
        status = tr_fail(TR_ERR_DATA, "%s%s: no text in it; name a file with text", paths[0],
                         count > 1 ? " and the others" : "");
    if (status != TR_OK) {
        tr_text_close(&t);
        return status;
    }
    *text = t;
    return TR_OK;
}

void tr_text_warn_bad_utf8(const tr_text *text) {
    for (int64_t i = 0; i < text->count; i++) {
        int64_t bad = tr_text_find_bad_utf8(text->files[i].bytes, text->files[i].size);
        if (bad >= 0)
            tr_warn("%s: byte %" PRId64 " (0x%02x) is not UTF-8; bytes are taken as they are",
                    text->paths[i], bad, text->files[i].bytes[bad]);
    }
}

void tr_text_close(tr_text *text) {
    for (int64_t i = 0; text->files && i < text->count; i++) tr_file_map_close(&text->files[i]);
    free(text->files);
    free(text->first);
    *text = (tr_text){0};
}

int64_t tr_text_cut(const tr_text *text, double fraction) {
    int64_t all = text->first[text->count];
    int64_t part = (int64_t)((double)all * fraction);
    if (part < 1) part = 1;
    int64_t target = all - part, f = 0;
    while (target >= text->first[f + 1]) f++;

    /* A file's start is the start of a line, even where the file before it ends without one. */
    const uint8_t *bytes = text->files[f].bytes;
    int64_t at = target - text->first[f];
    for (int64_t p = at; p >= 0 && p >= at - part; p--)
        if ((p == 0 || bytes[p - 1] == '\n') && text->first[f] + p > 0) return text->first[f] + p;
    for (int i = 0; i < 3 && at > 0 && (bytes[at] & 0xc0) == 0x80; i++) at--;
    return text->first[f] + at;
}

/* Bytes of the first line, its end included; *blank_p: only white space on it. */
static int64_t line_bytes(const uint8_t *bytes, int64_t size, bool *blank_p) {
    const uint8_t *end = memchr(bytes, '\n', (size_t)size);
    int64_t n = end ? end - bytes + 1 : size;
    *blank_p = true;
    for (int64_t i = 0; i < n && *blank_p; i++)
        *blank_p = bytes[i] == ' ' || (bytes[i] >= '\t' && bytes[i] <= '\r');
    return n;
}

int64_t tr_text_document(const uint8_t *bytes, int64_t size, tr_documents documents) {
    if (documents == TR_DOCUMENTS_FILE) return size;
    bool text_seen = false, may_end = false;
    int64_t at = 0;
    while (at < size) {
        bool blank;
        int64_t n = line_bytes(bytes + at, size - at, &blank);
        if (!blank && may_end) break;
        text_seen = text_seen || !blank;
        may_end = text_seen && (blank || documents == TR_DOCUMENTS_LINE);
        at += n;
    }
    return at;
}
