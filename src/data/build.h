/* build.h - `trireme data build` and `trireme data info`. Floor: data.
 *
 * A text becomes a file of tokens, one a byte, with a token after each document if one is asked
 * for: without these tokens the stream is the text again, byte for byte. Or the text stays text and
 * is only joined and cut in two, which is all that training on raw bytes needs. */
#pragma once
#include "data/text.h"

typedef enum {
    TR_BUILD_LLMC,     /* llm.c's .bin with u16 tokens */
    TR_BUILD_MEGATRON, /* Megatron's .bin with u16 tokens and .idx */
    TR_BUILD_TEXT      /* the text itself, for training on raw bytes */
} tr_build_format;

typedef struct {
    const char *const *inputs; /* [ninputs] text files, read one after the other */
    int64_t ninputs;
    const char *output;
    tr_build_format format;
    tr_documents documents;
    int64_t end_of_document;    /* token after each document; -1 none. 256 is the first free one */
    double validation_fraction; /* 0: none; else the last part of the text goes to... */
    const char *validation_output; /* ...this file, in the same format; NULL: none */
} tr_data_build_options;

/* Local. Writes the outputs and says what was written. An error before the final renames, as of a
 * full disk, leaves nothing new and what was there before untouched.
 * TR_ERR_USAGE, TR_ERR_MISSING, TR_ERR_DATA (no text, a document or file too long for its format)
 * or TR_ERR_IO. */
tr_status tr_data_build(const tr_data_build_options *options);

/* Local. Cuts a text in two: the first part to `train`, the last `fraction` of it to `validation`.
 */
tr_status tr_data_split_text(const char *text, const char *train, const char *validation,
                             double fraction);

/* Local. Prints what `path` holds, whatever its format: sizes, documents, the range of token ids
 * (every token is read) and the samples of `sequence_length` tokens. Lines of at most 100 columns.
 */
tr_status tr_data_info(const char *path, int64_t sequence_length);

/* Local. "llm.c", "megatron", "text"; "file", "paragraph", "line". TR_ERR_USAGE lists them. */
tr_status tr_data_parse_format(const char *name, tr_build_format *format_p);
tr_status tr_data_parse_documents(const char *name, tr_documents *documents_p);
