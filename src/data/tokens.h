/* tokens.h - one data file as a stream of token ids. Floor: data.
 *
 * Three formats: llm.c (recognised by its magic number), Megatron (by the .idx beside the .bin) and
 * raw bytes (all others: a token is a byte). Whatever the format, the stream is a list of runs,
 * stretches of tokens that lie one after the other in the file: one run, except for a Megatron
 * index that orders its sequences differently from the .bin. Nothing is read at the start but the
 * headers, which are checked against the sizes of the files, so reading needs no checks. */
#pragma once
#include "data/file_map.h"

typedef enum { TR_TOKENS_BYTES, TR_TOKENS_LLMC, TR_TOKENS_MEGATRON } tr_tokens_format;

/* Megatron's codes; 6 and 7 are floats. It has none for u32. */
typedef enum {
    TR_TOKEN_U8 = 1,
    TR_TOKEN_I8 = 2,
    TR_TOKEN_I16 = 3,
    TR_TOKEN_I32 = 4,
    TR_TOKEN_I64 = 5,
    TR_TOKEN_U16 = 8,
    TR_TOKEN_U32 = 9
} tr_token_type;

typedef struct {
    int64_t first;  /* position of the run's first token in the stream */
    int64_t offset; /* its byte in the file */
} tr_token_run;

typedef struct {
    char *path;
    tr_tokens_format format;
    tr_token_type type;
    int64_t count;     /* tokens */
    int64_t documents; /* -1: the format does not say */
    int64_t nruns;
    tr_token_run *runs; /* [nruns + 1], rising; the last one's first is `count` */
    tr_file_map map;
    /* Megatron */
    tr_file_map index;
    int64_t *milestones; /* positions in the stream of some of its sequences (megatron.c) */
} tr_tokens;

/* Header of llm.c: 256 little-endian i32: magic, version, number of tokens, zeros. */
enum {
    TR_LLMC_HEADER_BYTES = 1024,
    TR_LLMC_U16_MAGIC = 20240520,
    TR_LLMC_U16_VERSION = 1,
    TR_LLMC_U32_MAGIC = 20240801,
    TR_LLMC_U32_VERSION = 7
};

/* Local. Recognises the format and checks its headers. TR_ERR_MISSING, TR_ERR_IO, or TR_ERR_DATA
 * naming file and fault. *tokens is written only on success. */
tr_status tr_tokens_open(const char *path, tr_tokens *tokens);
void tr_tokens_close(tr_tokens *tokens); /* harmless on a zeroed or closed one */

/* Local. Token ids [first, first + n) of the stream; the caller keeps within 0 and count. */
void tr_tokens_read(const tr_tokens *tokens, int64_t first, int64_t n, int64_t *ids /* [n] */);

/* Local. Where documents begin: token first + i of the stream is in the one that begins at first +
 * begin[i], or at `first` where that is earlier. The format records documents. */
void tr_tokens_documents(const tr_tokens *tokens, int64_t first, int64_t n,
                         int32_t *begin /* [n] */);

/* Local. Maps FILE.mask, one byte a token (0: the token is not to be predicted). TR_ERR_MISSING, or
 * TR_ERR_DATA when it has not one byte for each token. */
tr_status tr_tokens_open_mask(const tr_tokens *tokens, tr_file_map *mask_p);

/* Local. Bytes of one token. */
int64_t tr_token_bytes(tr_token_type type);
/* "raw bytes", "llm.c", "Megatron"; "u16", ... */
const char *tr_tokens_format_name(tr_tokens_format format);
const char *tr_token_type_name(tr_token_type type);
/* FILE.bin and FILE give FILE.idx. Caller frees. */
char *tr_tokens_index_path(const char *path);
