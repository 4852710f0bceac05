/* megatron.h - the index beside a Megatron .bin. Floor: data.
 *
 *   offset  0  "MMIDIDX\0\0"
 *           9  u64 version, 1
 *          17  u8 type of a token (tr_token_type)
 *          18  u64 n, sequences
 *          26  u64 d, documents + 1
 *          34  i32 length [n], tokens of each sequence
 *              i64 offset [n], its byte in the .bin
 *              i64 document [d], first sequence of each document; the last entry is n
 * All little-endian, nothing aligned. */
#pragma once
#include "data/tokens.h"

#define TR_MEGATRON_MAGIC "MMIDIDX\0" /* with the string's own end: 9 bytes */
enum { TR_MEGATRON_MAGIC_BYTES = 9, TR_MEGATRON_HEADER_BYTES = 34 };

/* Local. Whether a file begins as an index does. */
bool tr_megatron_is_index(const tr_file_map *map);

/* Local. Fills in format, type, counts and runs of a mapped .bin, and keeps the index mapped. The
 * stream is the sequences in the index's order. TR_ERR_DATA when index and .bin do not fit in every
 * respect. */
tr_status tr_megatron_open(tr_tokens *tokens, const char *index_path);

/* Local. As tr_tokens_documents. */
void tr_megatron_documents(const tr_tokens *tokens, int64_t first, int64_t n, int32_t *begin);
