/* text.h - text files read as one text, cut in two and into documents. Floor: data. */
#pragma once
#include "data/file_map.h"

typedef enum { TR_DOCUMENTS_FILE, TR_DOCUMENTS_PARAGRAPH, TR_DOCUMENTS_LINE } tr_documents;

/* The files one after the other. */
typedef struct {
    int64_t count;
    const char *const *paths; /* [count] borrowed */
    tr_file_map *files;       /* [count] */
    int64_t *first;           /* [count + 1] bytes before each file; the last is all */
} tr_text;

/* Local. TR_ERR_USAGE for an empty list, TR_ERR_DATA when there is no byte in any of the files, and
 * the errors of tr_file_map_open. */
tr_status tr_text_open(const char *const *paths, int64_t count, tr_text *text);
void tr_text_close(tr_text *text); /* harmless on a zeroed or closed one */

/* Local. Warns of each file that is not UTF-8, naming the first wrong byte. */
void tr_text_warn_bad_utf8(const tr_text *text);

/* Local. The byte at which the last `fraction` (0 < fraction < 1) of the text begins: the start of
 * the line there (so that the part is rather larger, but not more than twice), or else of the UTF-8
 * character there. 0 < result < all bytes, unless the text is a single character. */
int64_t tr_text_cut(const tr_text *text, double fraction);

/* Local. How many bytes at the start of bytes [size] are one document: all of them; or up to the
 * next line with anything but white space on it that follows an empty one (paragraph); or up to the
 * next such line (line). Empty lines belong to what precedes them, so documents put together are
 * the text again. */
int64_t tr_text_document(const uint8_t *bytes, int64_t size, tr_documents documents);

/* Local. The offset of the first byte that is not UTF-8, or -1. */
int64_t tr_text_find_bad_utf8(const uint8_t *bytes, int64_t size);
