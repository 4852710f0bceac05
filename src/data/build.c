/* build.c - text files to token files. Floor: data. */
#include "data/build.h"

#include "base/heap.h"
#include "base/log.h"
#include "data/megatron.h"
#include "data/output.h"
#include "data/print.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* One output: the training or the validation part. */
typedef struct {
    /* declared */
    const char *path;
    int64_t begin, end; /* its bytes of the text */
    /* state */
    tr_output data, index; /* index: Megatron only */
    int64_t tokens, documents, capacity;
    int32_t *lengths; /* [documents] Megatron only */
} part;

tr_status tr_data_parse_format(const char *name, tr_build_format *format_p) {
    if (strcmp(name, "llm.c") == 0 || strcmp(name, "llmc") == 0)
        *format_p = TR_BUILD_LLMC;
    else if (strcmp(name, "megatron") == 0)
        *format_p = TR_BUILD_MEGATRON;
    else if (strcmp(name, "text") == 0)
        *format_p = TR_BUILD_TEXT;
    else
        return tr_fail(TR_ERR_USAGE, "format '%s' is unknown; give llm.c, megatron or text", name);
    return TR_OK;
}

tr_status tr_data_parse_documents(const char *name, tr_documents *documents_p) {
    if (strcmp(name, "file") == 0)
        *documents_p = TR_DOCUMENTS_FILE;
    else if (strcmp(name, "paragraph") == 0)
        *documents_p = TR_DOCUMENTS_PARAGRAPH;
    else if (strcmp(name, "line") == 0)
        *documents_p = TR_DOCUMENTS_LINE;
    else
        return tr_fail(TR_ERR_USAGE, "documents '%s' is unknown; give file, paragraph or line",
                       name);
    return TR_OK;
}

static bool same_file(const char *a, const char *b) {
    struct stat x, y;
    if (strcmp(a, b) == 0) return true;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static tr_status check_output(const tr_data_build_options *o, const char *path) {
    for (int64_t i = 0; i < o->ninputs; i++)
        if (same_file(path, o->inputs[i]))
            return tr_fail(TR_ERR_USAGE, "%s is an input too; write to another file", path);
    size_t n = strlen(path);
    if (o->format == TR_BUILD_MEGATRON && (n < 5 || strcmp(path + n - 4, ".bin") != 0))
        return tr_fail(TR_ERR_USAGE,
                       "%s: Megatron's files are NAME.bin and NAME.idx; name the output NAME.bin",
                       path);
    return TR_OK;
}

static tr_status fail_same_output(const tr_data_build_options *o) {
    return tr_fail(TR_ERR_USAGE, "%s is the output for training and for validation; name two files",
                   o->output);
}

static tr_status check_options(const tr_data_build_options *o) {
    if (!o->output || !*o->output)
        return tr_fail(TR_ERR_USAGE, "no output is named; give the file to write");
    if (o->end_of_document < -1 || o->end_of_document > UINT16_MAX)
        return tr_fail(TR_ERR_USAGE,
                       "end-of-document token %" PRId64
                       "; it must be from 0 to 65535 (256 is the first that is not a byte)",
                       o->end_of_document);
    if (o->format == TR_BUILD_TEXT && o->end_of_document >= 0)
        return tr_fail(TR_ERR_USAGE,
                       "text has no end-of-document token; use format llm.c or megatron");
    if ((o->validation_fraction != 0) != (o->validation_output != NULL))
        return tr_fail(TR_ERR_USAGE, "a validation fraction and a validation output go together; "
                                     "give both or neither");
    TR_TRY(check_output(o, o->output));
    if (!o->validation_output) return TR_OK;
    if (!(o->validation_fraction > 0 && o->validation_fraction < 1))
        return tr_fail(TR_ERR_USAGE,
                       "validation fraction %g; it must be between 0 and 1, like 0.05",
                       o->validation_fraction);
    if (same_file(o->output, o->validation_output)) return fail_same_output(o);
    return check_output(o, o->validation_output);
}

static tr_status write_tokens(part *p, const uint8_t *bytes, int64_t n, int64_t end) {
    uint16_t ids[4096];
    for (int64_t done = 0; done < n;) {
        int64_t k = n - done < 4096 ? n - done : 4096;
        for (int64_t i = 0; i < k; i++) ids[i] = bytes[done + i];
        TR_TRY(tr_output_write(&p->data, ids, k * 2));
        done += k;
    }
    uint16_t last = (uint16_t)end;
    if (end >= 0) TR_TRY(tr_output_write(&p->data, &last, 2));
    return TR_OK;
}

static tr_status write_document(const tr_data_build_options *o, part *p, const uint8_t *bytes,
                                int64_t n) {
    int64_t tokens = n + (o->end_of_document >= 0);
    if (o->format == TR_BUILD_LLMC && p->tokens + tokens > INT32_MAX)
        return tr_fail(
            TR_ERR_DATA,
            "%s: more than %d tokens, the most that llm.c's header can count; use format "
            "megatron",
            p->path, INT32_MAX);
    if (o->format == TR_BUILD_MEGATRON) {
        if (tokens > INT32_MAX)
            return tr_fail(TR_ERR_DATA,
                           "%s: a document of %" PRId64
                           " tokens, where Megatron's index allows %d; "
                           "make paragraphs or lines the documents",
                           p->path, tokens, INT32_MAX);
        p->lengths = tr_heap_grow(p->lengths, p->documents, &p->capacity, sizeof *p->lengths);
        p->lengths[p->documents] = (int32_t)tokens;
    }
    p->documents++;
    p->tokens += tokens;
    return o->format == TR_BUILD_TEXT ? tr_output_write(&p->data, bytes, n)
                                      : write_tokens(p, bytes, n, o->end_of_document);
}

static tr_status write_documents(const tr_data_build_options *o, const tr_text *text, part *p) {
    for (int64_t f = 0; f < text->count; f++) {
        int64_t from = p->begin > text->first[f] ? p->begin : text->first[f];
        int64_t to = p->end < text->first[f + 1] ? p->end : text->first[f + 1];
        while (from < to) {
            const uint8_t *bytes = text->files[f].bytes + (from - text->first[f]);
            int64_t n = tr_text_document(bytes, to - from, o->documents);
            TR_TRY(write_document(o, p, bytes, n));
            from += n;
        }
    }
    return TR_OK;
}

static tr_status write_index(part *p) {
    char *path = tr_tokens_index_path(p->path);
    tr_status status = tr_output_open(path, &p->index);
    free(path);
    TR_TRY(status);
    uint8_t header[TR_MEGATRON_HEADER_BYTES];
    int64_t version = 1, entries = p->documents + 1, offset = 0;
    memcpy(header, TR_MEGATRON_MAGIC, TR_MEGATRON_MAGIC_BYTES);
    memcpy(header + 9, &version, 8);
    header[17] = TR_TOKEN_U16;
    memcpy(header + 18, &p->documents, 8); /* a document is one sequence */
    memcpy(header + 26, &entries, 8);
    TR_TRY(tr_output_write(&p->index, header, sizeof header));
    TR_TRY(tr_output_write(&p->index, p->lengths, 4 * p->documents));
    for (int64_t i = 0; i < p->documents; i++) {
        TR_TRY(tr_output_write(&p->index, &offset, 8));
        offset += 2 * (int64_t)p->lengths[i];
    }
    for (int64_t i = 0; i <= p->documents; i++) TR_TRY(tr_output_write(&p->index, &i, 8));
    return tr_output_finish(&p->index);
}

/* Everything but giving the files their names. */
static tr_status write_part(const tr_data_build_options *o, const tr_text *text, part *p) {
    int32_t header[TR_LLMC_HEADER_BYTES / 4] = {TR_LLMC_U16_MAGIC, TR_LLMC_U16_VERSION};
    if (o->format == TR_BUILD_LLMC) TR_TRY(tr_output_write(&p->data, header, sizeof header));
    TR_TRY(write_documents(o, text, p));
    if (o->format == TR_BUILD_LLMC) {
        int32_t count = (int32_t)p->tokens;
        TR_TRY(tr_output_patch(&p->data, 8, &count, sizeof count));
    }
    if (o->format == TR_BUILD_MEGATRON) TR_TRY(write_index(p));
    return tr_output_finish(&p->data);
}

/* The index first: a .bin without one would pass for raw bytes. */
static tr_status publish(part *p) {
    if (p->index.path) TR_TRY(tr_output_publish(&p->index));
    return tr_output_publish(&p->data);
}

static void report(const tr_data_build_options *o, const part *p) {
    char name[TR_PATH_COLUMNS + 1], tokens[TR_COUNT_CHARS], documents[TR_COUNT_CHARS];
    tr_print_path(p->path, name);
    tr_print_count(p->tokens, tokens);
    tr_print_count(p->documents, documents);
    if (o->format == TR_BUILD_TEXT)
        tr_say("%s: %s bytes", name, tokens);
    else
        tr_say("%s: %s tokens, %s %s (vocab_size %d or more)", name, tokens, documents,
               p->documents == 1 ? "document" : "documents",
               o->end_of_document >= 256 ? (int)o->end_of_document + 1 : 256);
}

static tr_status build_parts(const tr_data_build_options *o, const tr_text *text, part *parts) {
    int64_t all = text->first[text->count], n = 1;
    parts[0] = (part){.path = o->output, .end = all};
    if (o->validation_output) {
        int64_t cut = tr_text_cut(text, o->validation_fraction);
        if (cut == 0)
            return tr_fail(TR_ERR_DATA,
                           "%s: the text of %" PRId64 " bytes is too short to be cut in two",
                           o->inputs[0], all);
        parts[0].end = cut;
        parts[n++] = (part){.path = o->validation_output, .begin = cut, .end = all};
    }
    for (int64_t i = 0; i < n; i++) TR_TRY(tr_output_open(parts[i].path, &parts[i].data));
    if (n == 2 && same_file(parts[0].data.temporary, parts[1].data.temporary))
        return fail_same_output(o);
    for (int64_t i = 0; i < n; i++) TR_TRY(write_part(o, text, &parts[i]));
    tr_text_warn_bad_utf8(text);
    for (int64_t i = 0; i < n; i++) TR_TRY(publish(&parts[i]));
    for (int64_t i = 0; i < n; i++) report(o, &parts[i]);
    return TR_OK;
}

tr_status tr_data_build(const tr_data_build_options *options) {
    tr_text text = {0};
    part parts[2] = {0};
    TR_TRY(check_options(options));
    TR_TRY(tr_text_open(options->inputs, options->ninputs, &text));
    tr_status status = build_parts(options, &text, parts);
    for (int i = 0; i < 2; i++) {
        tr_output_close(&parts[i].data);
        tr_output_close(&parts[i].index);
        free(parts[i].lengths);
    }
    tr_text_close(&text);
    return status;
}

tr_status tr_data_split_text(const char *text, const char *train, const char *validation,
                             double fraction) {
    return tr_data_build(&(tr_data_build_options){.inputs = &text,
                                                  .ninputs = 1,
                                                  .output = train,
                                                  .format = TR_BUILD_TEXT,
                                                  .end_of_document = -1,
                                                  .validation_fraction = fraction,
                                                  .validation_output = validation});
}
