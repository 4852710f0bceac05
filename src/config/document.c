/* document.c - text to one YAML document, with errors that name line and column. Floor: config.
 *
 * Duplicate keys pass here: whoever reads a map refuses them and can then name the key. */
#include "config/settings.h"

#include "base/heap.h"

#include <libfyaml.h>
#include <stdlib.h>
#include <string.h>

struct tr_document {
    struct fy_diag *diag;
    struct fy_parser *parser;
    struct fy_document *yaml;
};

/* The library takes NUL and bad UTF-8 for the end of the text, so they are refused here. */
static tr_status check_bytes(const char *text, size_t bytes, const char *name) {
    int64_t fault = tr_utf8_fault(text, bytes);
    if (fault < 0) return TR_OK;
    int64_t line = 1, column = 1;
    for (int64_t i = 0; i < fault; i++) {
        column++;
        if (text[i] == '\n') {
            line++;
            column = 1;
        }
    }
    return tr_fail(TR_ERR_USAGE,
                   "%s:%lld:%lld: byte 0x%02x is not UTF-8 text; the file must be YAML in UTF-8",
                   name, (long long)line, (long long)column, (unsigned char)text[fault]);
}

static tr_status fail_parse(const tr_document *document, const char *name) {
    void *state = NULL;
    struct fy_diag_error *error = fy_diag_errors_iterate(document->diag, &state);
    if (!error || !error->msg) return tr_fail(TR_ERR_USAGE, "%s: is not YAML", name);
    return tr_fail(TR_ERR_USAGE, "%s:%d:%d: is not YAML: %s", name, error->line, error->column,
                   error->msg);
}

/* Errors are collected; what the library prints beside that is dropped. */
static void drop_output(struct fy_diag *diag, void *user, const char *text, size_t bytes) {
    (void)diag, (void)user, (void)text, (void)bytes;
}

static struct fy_diag *create_diag(void) {
    struct fy_diag_cfg options;
    fy_diag_cfg_default(&options);
    options.fp = NULL;
    options.output_fn = drop_output;
    struct fy_diag *diag = fy_diag_create(&options);
    fy_diag_set_collect_errors(diag, true);
    return diag;
}

tr_status tr_document_parse(const char *text, const char *name, tr_document **document_p) {
    size_t bytes = strlen(text);
    TR_TRY(check_bytes(text, bytes, name));
    tr_document *document = tr_heap_alloc(1, sizeof *document);
    document->diag = create_diag();
    const struct fy_parse_cfg options = {.flags = FYPCF_QUIET | FYPCF_DEFAULT_VERSION_1_2 |
                                                  FYPCF_JSON_NONE | FYPCF_ALLOW_DUPLICATE_KEYS,
                                         .diag = document->diag};
    document->parser = fy_parser_create(&options);
    tr_status status = TR_OK;
    if (!document->parser || fy_parser_set_string(document->parser, text, bytes)) {
        status = tr_fail(TR_ERR_INTERNAL, "%s: the YAML parser cannot start", name);
        goto out;
    }
    document->yaml = fy_parse_load_document(document->parser);
    if (fy_diag_got_error(document->diag)) {
        status = fail_parse(document, name);
        goto out;
    }
    struct fy_document *second = fy_parse_load_document(document->parser);
    if (second) {
        fy_parse_document_destroy(document->parser, second);
        status = tr_fail(TR_ERR_USAGE, "%s: holds a second document after `---`; keep one", name);
    } else if (fy_diag_got_error(document->diag)) {
        status = fail_parse(document, name);
    }
out:
    if (status == TR_OK)
        *document_p = document;
    else
        tr_document_destroy(document);
    return status;
}

void tr_document_destroy(tr_document *document) {
    if (!document) return;
    if (document->yaml) fy_parse_document_destroy(document->parser, document->yaml);
    if (document->parser) fy_parser_destroy(document->parser);
    fy_diag_destroy(document->diag);
    free(document);
}

struct fy_node *tr_document_root(const tr_document *document) {
    return document->yaml ? fy_document_root(document->yaml) : NULL;
}
