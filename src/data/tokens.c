/* tokens.c - recognising and reading token files. Floor: data. */
#include "data/tokens.h"

#include "base/heap.h"
#include "base/log.h"
#include "data/megatron.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the formats are little-endian");

int64_t tr_token_bytes(tr_token_type type) {
    switch (type) {
    case TR_TOKEN_U8:
    case TR_TOKEN_I8:
        return 1;
    case TR_TOKEN_I16:
    case TR_TOKEN_U16:
        return 2;
    case TR_TOKEN_I32:
    case TR_TOKEN_U32:
        return 4;
    case TR_TOKEN_I64:
        return 8;
    }
    return 0;
}

const char *tr_token_type_name(tr_token_type type) {
    switch (type) {
    case TR_TOKEN_U8:
        return "u8";
    case TR_TOKEN_I8:
        return "i8";
    case TR_TOKEN_I16:
        return "i16";
    case TR_TOKEN_U16:
        return "u16";
    case TR_TOKEN_I32:
        return "i32";
    case TR_TOKEN_U32:
        return "u32";
    case TR_TOKEN_I64:
        return "i64";
    }
    return "?";
}

const char *tr_tokens_format_name(tr_tokens_format format) {
    switch (format) {
    case TR_TOKENS_BYTES:
        return "raw bytes";
    case TR_TOKENS_LLMC:
        return "llm.c";
    case TR_TOKENS_MEGATRON:
        return "Megatron";
    }
    return "?";
}

static bool has_ending(const char *path, const char *ending) {
    size_t n = strlen(path), e = strlen(ending);
    return n >= e && strcmp(path + n - e, ending) == 0;
}

char *tr_tokens_index_path(const char *path) {
    int stem = (int)strlen(path) - (has_ending(path, ".bin") ? 4 : 0);
    return tr_heap_format("%.*s.idx", stem, path);
}

/* One run over all tokens from byte `offset`. */
static void set_single_run(tr_tokens *t, int64_t offset) {
    t->nruns = 1;
    t->runs = tr_heap_alloc(2, sizeof *t->runs);
    t->runs[0].offset = offset;
    t->runs[1].first = t->count;
}

static tr_status open_llmc(tr_tokens *t, const int32_t *header) {
    bool narrow = header[0] == TR_LLMC_U16_MAGIC;
    int32_t version = narrow ? TR_LLMC_U16_VERSION : TR_LLMC_U32_VERSION;
    if (header[1] != version)
        return tr_fail(TR_ERR_DATA,
                       "%s: llm.c token file of version %" PRId32 ", while magic %" PRId32
                       " goes with version %" PRId32 "; write it again with llm.c's data scripts",
                       t->path, header[1], header[0], version);
    t->format = TR_TOKENS_LLMC;
    t->type = narrow ? TR_TOKEN_U16 : TR_TOKEN_U32;
    t->count = (int64_t)(uint32_t)header[2]; /* writers let it pass 2^31 */
    int64_t want = TR_LLMC_HEADER_BYTES + t->count * tr_token_bytes(t->type);
    if (t->map.size != want)
        return tr_fail(TR_ERR_DATA,
                       "%s: the llm.c header promises %" PRId64 " tokens, a file of %" PRId64
                       " bytes, but it has %" PRId64 "; copy or write the file again",
                       t->path, t->count, want, t->map.size);
    set_single_run(t, TR_LLMC_HEADER_BYTES);
    return TR_OK;
}

static tr_status open_bytes(tr_tokens *t, int32_t magic) {
    if (magic / 10000 >= 2024 && magic / 10000 <= 2026) /* llm.c's magic numbers are dates */
        return tr_fail(TR_ERR_DATA,
                       "%s: magic number %" PRId32
                       " is of the llm.c family, but not a token file's "
                       "(%d or %d); name the token file",
                       t->path, magic, TR_LLMC_U16_MAGIC, TR_LLMC_U32_MAGIC);
    if (tr_megatron_is_index(&t->map))
        return tr_fail(TR_ERR_DATA, "%s: a Megatron index; name the .bin beside it instead",
                       t->path);
    if (has_ending(t->path, ".bin"))
        tr_warn("%s: no llm.c header and no .idx beside it, so it is read as raw bytes", t->path);
    t->format = TR_TOKENS_BYTES;
    t->type = TR_TOKEN_U8;
    t->count = t->map.size;
    set_single_run(t, 0);
    return TR_OK;
}

static tr_status open_any(tr_tokens *t) {
    int32_t header[3] = {0};
    if (t->map.size >= (int64_t)sizeof header) memcpy(header, t->map.bytes, sizeof header);
    if (header[0] == TR_LLMC_U16_MAGIC || header[0] == TR_LLMC_U32_MAGIC)
        return open_llmc(t, header);
    char *index = tr_tokens_index_path(t->path);
    tr_status status = access(index, F_OK) == 0 && strcmp(index, t->path) != 0
                           ? tr_megatron_open(t, index)
                           : open_bytes(t, header[0]);
    free(index);
    return status;
}

/* What the user may have meant by a file that is not there. */
static void hint_at_index(const char *path) {
    char *index = tr_tokens_index_path(path);
    if (access(index, F_OK) == 0)
        tr_context(TR_ERR_MISSING,
                   has_ending(path, ".bin")
                       ? "%s is there, but not the .bin that belongs to it"
                       : "%s is there: name the .bin beside it, with its ending",
                   index);
    free(index);
}

tr_status tr_tokens_open(const char *path, tr_tokens *tokens) {
    tr_tokens t = {.documents = -1};
    tr_status status = tr_file_map_open(path, &t.map);
    if (status == TR_ERR_MISSING) hint_at_index(path);
    TR_TRY(status);
    t.path = tr_heap_copy(path);
    status = open_any(&t);
    if (status == TR_OK)
        *tokens = t;
    else
        tr_tokens_close(&t);
    return status;
}

void tr_tokens_close(tr_tokens *tokens) {
    tr_file_map_close(&tokens->map);
    tr_file_map_close(&tokens->index);
    free(tokens->path);
    free(tokens->runs);
    free(tokens->milestones);
    *tokens = (tr_tokens){0};
}

#define WIDEN(type)                                                                                \
    for (int64_t i = 0; i < n; i++) ids[i] = (int64_t)((const type *)from)[i]

/* Tokens are aligned: maps to pages, headers and run offsets to the token's width. */
static void widen(tr_token_type type, const void *from, int64_t n, int64_t *ids) {
    switch (type) {
    case TR_TOKEN_U8:
        WIDEN(uint8_t);
        break;
    case TR_TOKEN_I8:
        WIDEN(int8_t);
        break;
    case TR_TOKEN_I16:
        WIDEN(int16_t);
        break;
    case TR_TOKEN_U16:
        WIDEN(uint16_t);
        break;
    case TR_TOKEN_I32:
        WIDEN(int32_t);
        break;
    case TR_TOKEN_U32:
        WIDEN(uint32_t);
        break;
    case TR_TOKEN_I64:
        WIDEN(int64_t);
        break;
    }
}

/* The run that holds `position`. */
static int64_t find_run(const tr_tokens *t, int64_t position) {
    int64_t low = 0, high = t->nruns - 1;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (t->runs[middle].first <= position)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

void tr_tokens_read(const tr_tokens *tokens, int64_t first, int64_t n, int64_t *ids) {
    int64_t bytes = tr_token_bytes(tokens->type);
    for (int64_t r = n > 0 ? find_run(tokens, first) : 0; n > 0; r++) {
        const tr_token_run *run = &tokens->runs[r];
        int64_t here = run[1].first - first;
        if (here > n) here = n;
        widen(tokens->type, tokens->map.bytes + run->offset + (first - run->first) * bytes, here,
              ids);
        first += here;
        ids += here;
        n -= here;
    }
}

void tr_tokens_documents(const tr_tokens *tokens, int64_t first, int64_t n, int32_t *begin) {
    tr_megatron_documents(tokens, first, n, begin);
}

tr_status tr_tokens_open_mask(const tr_tokens *tokens, tr_file_map *mask_p) {
    char *path = tr_heap_format("%s.mask", tokens->path);
    tr_file_map mask = {0};
    tr_status status = tr_file_map_open(path, &mask);
    if (status == TR_OK && mask.size != tokens->count) {
        status = tr_fail(TR_ERR_DATA,
                         "%s: %" PRId64 " bytes for %" PRId64
                         " tokens; a mask has one byte a token, 0 for those not to be predicted",
                         path, mask.size, tokens->count);
        tr_file_map_close(&mask);
    }
    free(path);
    if (status == TR_OK) *mask_p = mask;
    return status;
}
