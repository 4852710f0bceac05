/* megatron.c - checks a Megatron index completely, so that nothing after it can go wrong.
 * Floor: data. */
#include "data/megatron.h"

#include "base/heap.h"

#include <inttypes.h>
#include <string.h>

/* The position in the stream is known of every so many sequences; lengths lead to the others. */
enum { MILESTONE = 1024 };

typedef struct {
    const char *path;        /* of the index */
    const uint8_t *lengths;  /* [n] i32 */
    const uint8_t *offsets;  /* [n] i64 */
    const uint8_t *document; /* [d] i64 */
    int64_t n, d;
} index_view;

static int32_t load_i32(const uint8_t *table, int64_t i) {
    int32_t v;
    memcpy(&v, table + 4 * i, 4);
    return v;
}

static int64_t load_i64(const uint8_t *table, int64_t i) {
    int64_t v;
    memcpy(&v, table + 8 * i, 8);
    return v;
}

bool tr_megatron_is_index(const tr_file_map *map) {
    return map->size >= TR_MEGATRON_MAGIC_BYTES &&
           memcmp(map->bytes, TR_MEGATRON_MAGIC, TR_MEGATRON_MAGIC_BYTES) == 0;
}

/* Of an index whose header is right. */
static void find_tables(const tr_file_map *map, index_view *v) {
    v->n = load_i64(map->bytes + 18, 0);
    v->d = load_i64(map->bytes + 26, 0);
    v->lengths = map->bytes + TR_MEGATRON_HEADER_BYTES;
    v->offsets = v->lengths + 4 * v->n;
    v->document = v->offsets + 8 * v->n;
}

static tr_status read_header(const tr_file_map *map, index_view *v, tr_token_type *type_p) {
    if (map->size < TR_MEGATRON_HEADER_BYTES || !tr_megatron_is_index(map))
        return tr_fail(
            TR_ERR_DATA,
            "%s: not a Megatron index (it should begin with MMIDIDX); move it away if the "
            ".bin is of another format, or build both again",
            v->path);
    int64_t version = load_i64(map->bytes + 9, 0);
    if (version != 1)
        return tr_fail(TR_ERR_DATA,
                       "%s: Megatron index of version %" PRId64
                       "; only 1 is known: build the files again",
                       v->path, version);
    int type = map->bytes[17];
    if (type == 6 || type == 7)
        return tr_fail(TR_ERR_DATA,
                       "%s: type code %d is floating point, which are no tokens; build the files "
                       "with an integer type",
                       v->path, type);
    if (type < TR_TOKEN_U8 || type > TR_TOKEN_U16)
        return tr_fail(
            TR_ERR_DATA,
            "%s: unknown type code %d; 1 u8, 2 i8, 3 i16, 4 i32, 5 i64 and 8 u16 are read", v->path,
            type);
    *type_p = (tr_token_type)type;

    v->n = load_i64(map->bytes + 18, 0);
    v->d = load_i64(map->bytes + 26, 0);
    int64_t room = map->size - TR_MEGATRON_HEADER_BYTES;
    if (v->n < 0 || v->n > room / 12 || v->d < 1 || v->d > room / 8 || 12 * v->n + 8 * v->d != room)
        return tr_fail(TR_ERR_DATA,
                       "%s: its header promises %" PRId64 " sequences and %" PRId64
                       " document entries, which does not fit its size of %" PRId64
                       " bytes; copy or build it again",
                       v->path, v->n, v->d, map->size);
    find_tables(map, v);
    return TR_OK;
}

/* Documents are stretches of sequences: 0 = document[0] <= document[1] <= ... = n. */
static tr_status check_documents(const index_view *v) {
    int64_t last = 0;
    for (int64_t i = 0; i < v->d; i++) {
        int64_t here = load_i64(v->document, i);
        bool ends = i == v->d - 1;
        if (here < last || here > v->n || (i == 0 && here != 0) || (ends && here != v->n))
            return tr_fail(TR_ERR_DATA,
                           "%s: document entry %" PRId64 " is %" PRId64
                           "; entries rise from 0 to the number of sequences, %" PRId64
                           "; build the index again",
                           v->path, i, here, v->n);
        last = here;
    }
    return TR_OK;
}

/* Every sequence within the .bin and aligned, all of them together as large as it. */
static tr_status check_sequences(const tr_tokens *t, const index_view *v, int64_t *count_p) {
    int64_t width = tr_token_bytes(t->type), count = 0, all = t->map.size / width;
    for (int64_t i = 0; i < v->n; i++) {
        int64_t length = load_i32(v->lengths, i), offset = load_i64(v->offsets, i);
        if (length < 0 || offset < 0 || offset % width || offset > t->map.size ||
            length > (t->map.size - offset) / width)
            return tr_fail(TR_ERR_DATA,
                           "%s: sequence %" PRId64 " has %" PRId64 " tokens of %s at byte %" PRId64
                           ", which does not fit %s of %" PRId64 " bytes; the two do not belong "
                           "together or are damaged: copy or build both again",
                           v->path, i, length, tr_token_type_name(t->type), offset, t->path,
                           t->map.size);
        count += length;
        if (count > all) break;
    }
    if (count * width != t->map.size)
        return tr_fail(TR_ERR_DATA,
                       "%s: it lists %s%" PRId64 " tokens of %s, but %s has %" PRId64
                       " bytes; the two do not belong together or one was cut: copy or build both "
                       "again",
                       v->path, count > all ? "more than " : "", count > all ? all : count,
                       tr_token_type_name(t->type), t->path, t->map.size);
    *count_p = count;
    return TR_OK;
}

/* Sequences that follow each other in the .bin too become one run. */
static void make_runs(tr_tokens *t, const index_view *v) {
    int64_t width = tr_token_bytes(t->type), first = 0, next = -1, capacity = 0;
    for (int64_t i = 0; i < v->n; i++) {
        int64_t length = load_i32(v->lengths, i), offset = load_i64(v->offsets, i);
        if (length == 0) continue;
        if (offset != next) {
            t->runs = tr_heap_grow(t->runs, t->nruns, &capacity, sizeof *t->runs);
            t->runs[t->nruns++] = (tr_token_run){first, offset};
        }
        next = offset + length * width;
        first += length;
    }
    t->runs = tr_heap_grow(t->runs, t->nruns, &capacity, sizeof *t->runs);
    t->runs[t->nruns] = (tr_token_run){first, 0};
}

static void set_milestones(tr_tokens *t, const index_view *v) {
    t->milestones = tr_heap_alloc(v->n / MILESTONE + 1, sizeof *t->milestones);
    int64_t first = 0;
    for (int64_t i = 0; i < v->n; i++) {
        if (i % MILESTONE == 0) t->milestones[i / MILESTONE] = first;
        first += load_i32(v->lengths, i);
    }
}

static tr_status read_index(tr_tokens *t, const tr_file_map *map, index_view *v) {
    TR_TRY(read_header(map, v, &t->type));
    TR_TRY(check_documents(v));
    TR_TRY(check_sequences(t, v, &t->count));
    t->format = TR_TOKENS_MEGATRON;
    t->documents = v->d - 1;
    make_runs(t, v);
    set_milestones(t, v);
    return TR_OK;
}

tr_status tr_megatron_open(tr_tokens *tokens, const char *index_path) {
    TR_TRY(tr_file_map_open(index_path, &tokens->index));
    index_view view = {.path = index_path};
    return read_index(tokens, &tokens->index, &view);
}

/* The last i of [0, n) with table[i] <= x, of an i64 table that rises from table[0] <= x. */
static int64_t last_at_most(const void *table, int64_t n, int64_t x) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (load_i64(table, middle) <= x)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The sequence that holds token `first` of the stream; *at_p its own first token. */
static int64_t find_sequence(const tr_tokens *t, const index_view *v, int64_t first,
                             int64_t *at_p) {
    int64_t mile = last_at_most(t->milestones, (v->n + MILESTONE - 1) / MILESTONE, first);
    int64_t i = mile * MILESTONE, at = t->milestones[mile];
    for (; at + load_i32(v->lengths, i) <= first; i++) at += load_i32(v->lengths, i);
    *at_p = at;
    return i;
}

void tr_megatron_documents(const tr_tokens *t, int64_t first, int64_t n, int32_t *begin) {
    index_view v;
    find_tables(&t->index, &v);
    int64_t at, i = find_sequence(t, &v, first, &at);
    int64_t next = last_at_most(v.document, v.d, i) + 1; /* the document after that of i */
    int32_t here = 0;
    for (int64_t j = 0; j < n;) {
        at += load_i32(v.lengths, i++);
        for (; j < n && first + j < at; j++) begin[j] = here;
        while (next < v.d && load_i64(v.document, next) < i) next++;
        if (next < v.d && load_i64(v.document, next) == i) here = (int32_t)(at - first);
    }
}
