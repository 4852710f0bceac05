/* assign.c - one value into one setting, or the reason why not. Floor: config. */
#include "config/settings.h"

#include "base/heap.h"

#include <libfyaml.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- refusing ---- */

enum { SHOWN_BYTES = 72 }; /* of a value, in a message */

tr_status tr_refuse(const char *where, const char *value, const char *format, ...) {
    char shown[SHOWN_BYTES + 4], text[2048];
    size_t n = 0;
    for (; value[n] && n < SHOWN_BYTES; n++)
        shown[n] = (unsigned char)value[n] < 0x20 || value[n] == 0x7f ? ' ' : value[n];
    if (value[n]) {
        while (n > 0 && ((unsigned char)value[n] & 0xc0) == 0x80) n--; /* no half characters */
        memcpy(shown + n, "...", 3);
        n += 3;
    }
    shown[n] = 0;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return tr_fail(TR_ERR_USAGE, "%s: value %s %s", where, shown, text);
}

/* "takes an integer, at least 1; KEY is ..." */
static tr_status refuse_type(const char *where, const char *value, const tr_setting *row,
                             const char *why) {
    tr_heap_text out;
    tr_heap_text_begin(&out);
    tr_setting_write_type(out.to, row);
    char *type = tr_heap_text_end(&out);
    tr_status status = tr_refuse(where, value, "%s; %s takes %s", why, row->key, type);
    free(type);
    return status;
}

/* ---- reading nodes ---- */

/* A scalar's text, owned by the document; NULL when the node is none or holds a NUL. */
static const char *scalar_text(struct fy_node *node) {
    if (!node || !fy_node_is_scalar(node)) return NULL;
    const char *text = fy_node_get_scalar0(node);
    if (!text) text = "";
    return strlen(text) == fy_node_get_scalar_length(node) ? text : NULL;
}

static bool is_plain(struct fy_node *node) {
    return !node || fy_node_get_style(node) == FYNS_PLAIN;
}

static const char *node_shown(struct fy_node *node) {
    if (node && fy_node_is_mapping(node)) return "{...}";
    if (node && fy_node_is_sequence(node)) return "[...]";
    const char *text = node ? scalar_text(node) : NULL;
    if (node && !text) return "with a NUL character";
    return text && *text ? text : is_plain(node) ? "null" : "\"\"";
}

static bool is_null(struct fy_node *node) {
    if (!node) return true;
    const char *text = scalar_text(node);
    return text && is_plain(node) && tr_yaml_null(text);
}

/* ---- one kind each; every one leaves the old value where it refuses ---- */

static bool outside(const tr_range *range, double value) {
    if (range->low_open ? value <= range->low : value < range->low) return true;
    return range->high_open ? value >= range->high : value > range->high;
}

static tr_status assign_number(tr_config *config, const tr_setting *row, struct fy_node *node,
                               const char *where) {
    const char *text = scalar_text(node), *shown = node_shown(node);
    int64_t integer = 0;
    double real = 0;
    if (!text) return refuse_type(where, shown, row, "is no number");
    bool integral = row->kind == TR_KIND_INT;
    tr_number read = integral ? tr_yaml_int(text, &integer) : tr_yaml_real(text, &real);
    if (read != TR_NUMBER_NONE && !is_plain(node))
        return refuse_type(where, shown, row, "is quoted, so it is text and no number");
    switch (read) {
    case TR_NUMBER_NONE:
        return refuse_type(where, shown, row, "is no number");
    case TR_NUMBER_FRACTION:
        return refuse_type(where, shown, row, "is no whole number");
    case TR_NUMBER_HUGE:
        return refuse_type(where, shown, row,
                           integral ? "is too large, or no number" : "is not finite");
    case TR_NUMBER_OK:
        break;
    }
    if (outside(&row->range, integral ? (double)integer : real))
        return refuse_type(where, shown, row, "is out of range");
    if (integral)
        *(int64_t *)tr_setting_field(config, row) = integer;
    else
        *(double *)tr_setting_field(config, row) = real;
    return TR_OK;
}

static tr_status assign_bool(tr_config *config, const tr_setting *row, struct fy_node *node,
                             const char *where) {
    const char *text = scalar_text(node);
    bool value;
    if (!text || !is_plain(node) || !tr_yaml_bool(text, &value))
        return refuse_type(where, node_shown(node), row, "is no truth value");
    *(bool *)tr_setting_field(config, row) = value;
    return TR_OK;
}

/* The place of `text` among "one|two", or -1. */
static int word_index(const char *words, const char *text) {
    size_t n = strlen(text);
    for (int i = 0;; i++) {
        size_t length = strcspn(words, "|");
        if (length == n && !strncmp(words, text, n)) return i;
        if (words[length] == 0) return -1;
        words += length + 1;
    }
}

static tr_status assign_enum(tr_config *config, const tr_setting *row, struct fy_node *node,
                             const char *where) {
    const char *text = scalar_text(node);
    int index = text ? word_index(row->names, text) : -1;
    if (index < 0) return refuse_type(where, node_shown(node), row, "is not among its words");
    *(unsigned *)tr_setting_field(config, row) = (unsigned)index;
    return TR_OK;
}

static tr_status assign_string(tr_config *config, const tr_setting *row, struct fy_node *node,
                               const char *where) {
    const char *text = scalar_text(node);
    if (!text || !*text || is_null(node))
        return refuse_type(where, node_shown(node), row, "is no text");
    char **field = tr_setting_field(config, row);
    free(*field);
    *field = tr_heap_copy(text);
    return TR_OK;
}

static tr_status assign_resume(tr_config *config, const tr_setting *row, struct fy_node *node,
                               const char *where) {
    const char *text = scalar_text(node);
    if (!text || !*text || is_null(node))
        return refuse_type(where, node_shown(node), row, "is no text");
    int index = word_index(row->names, text);
    free(config->checkpoint.resume_path);
    config->checkpoint.resume_path = index < 0 ? tr_heap_copy(text) : NULL;
    config->checkpoint.resume = index < 0 ? TR_RESUME_PATH : (tr_resume)index;
    return TR_OK;
}

static tr_status read_weight(struct fy_node *node, const char *where, double *weight_p) {
    const char *text = scalar_text(node);
    double value = 0;
    if (!text || !is_plain(node) || tr_yaml_real(text, &value) != TR_NUMBER_OK || value <= 0)
        return tr_refuse(where, node_shown(node),
                         "is no weight of a data file; a weight is a number above 0");
    *weight_p = value;
    return TR_OK;
}

/* A path, or {path, weight}. *entry_p owns its path, also on failure. */
static tr_status read_entry(struct fy_node *node, const char *where, tr_data_entry *entry_p) {
    static const char what[] = "is no data file; an entry is a path or {path: FILE, weight: 2}";
    *entry_p = (tr_data_entry){.weight = -1};
    struct fy_node *path = node;
    if (node && fy_node_is_mapping(node)) {
        path = NULL;
        void *state = NULL;
        struct fy_node_pair *pair;
        while ((pair = fy_node_mapping_iterate(node, &state))) {
            const char *key = scalar_text(fy_node_pair_key(pair));
            struct fy_node *value = fy_node_pair_value(pair);
            bool repeated = false;
            if (key && !strcmp(key, "path")) {
                repeated = path != NULL;
                path = value;
            } else if (key && !strcmp(key, "weight")) {
                repeated = entry_p->weight >= 0;
                TR_TRY(read_weight(value, where, &entry_p->weight));
            } else {
                return tr_refuse(where, "{...}",
                                 "has the unknown key %s; an entry is a path or "
                                 "{path: FILE, weight: 2}",
                                 key ? key : "?");
            }
            if (repeated) return tr_refuse(where, "{...}", "has %s twice; keep one", key);
        }
        if (!path) return tr_refuse(where, "{...}", "%s", what);
    }
    const char *text = scalar_text(path);
    if (!text || !*text || is_null(path)) return tr_refuse(where, node_shown(path), "%s", what);
    entry_p->path = tr_heap_copy(text);
    return TR_OK;
}

static void free_list(tr_data_list *list) {
    for (int64_t i = 0; i < list->count; i++) free(list->entries[i].path);
    free(list->entries);
    *list = (tr_data_list){0};
}

/* Items of a list; a lone item counts as a list of one. */
static int64_t item_count(struct fy_node *node) {
    return node && fy_node_is_sequence(node) ? fy_node_sequence_item_count(node) : 1;
}

static struct fy_node *item(struct fy_node *node, int64_t i) {
    struct fy_node *found =
        node && fy_node_is_sequence(node) ? fy_node_sequence_get_by_index(node, (int)i) : node;
    return found && fy_node_is_alias(found) ? fy_node_resolve_alias(found) : found;
}

static tr_status assign_data(tr_config *config, const tr_setting *row, struct fy_node *node,
                             const char *where) {
    tr_data_list list = {.count = item_count(node)};
    list.entries = tr_heap_alloc(list.count, sizeof *list.entries);
    int64_t weighted = 0;
    tr_status status = TR_OK;
    for (int64_t i = 0; i < list.count && status == TR_OK; i++) {
        status = read_entry(item(node, i), where, &list.entries[i]);
        weighted += list.entries[i].weight > 0;
    }
    if (status == TR_OK && weighted > 0 && weighted < list.count)
        status = tr_refuse(where, "[...]",
                           "gives a weight to %lld of %lld files; give one to each, or to none",
                           (long long)weighted, (long long)list.count);
    if (status != TR_OK) {
        free_list(&list);
        return status;
    }
    tr_data_list *field = tr_setting_field(config, row);
    free_list(field);
    *field = list;
    return TR_OK;
}

static tr_status assign_ints(tr_config *config, const tr_setting *row, struct fy_node *node,
                             const char *where) {
    tr_int_list list = {.count = item_count(node)};
    list.values = tr_heap_alloc(list.count, sizeof *list.values);
    for (int64_t i = 0; i < list.count; i++) {
        struct fy_node *one = item(node, i);
        const char *text = scalar_text(one);
        if (!text || !is_plain(one) || tr_yaml_int(text, &list.values[i]) != TR_NUMBER_OK ||
            outside(&row->range, (double)list.values[i])) {
            free(list.values);
            return refuse_type(where, node_shown(one), row, "cannot be in the list");
        }
    }
    tr_int_list *field = tr_setting_field(config, row);
    free(field->values);
    *field = list;
    return TR_OK;
}

static tr_status assign_kind(tr_config *config, const tr_setting *row, struct fy_node *node,
                             const char *where) {
    switch (row->kind) {
    case TR_KIND_INT:
    case TR_KIND_REAL:
        return assign_number(config, row, node, where);
    case TR_KIND_BOOL:
        return assign_bool(config, row, node, where);
    case TR_KIND_ENUM:
        return assign_enum(config, row, node, where);
    case TR_KIND_STRING:
        return assign_string(config, row, node, where);
    case TR_KIND_RESUME:
        return assign_resume(config, row, node, where);
    case TR_KIND_DATA:
        return assign_data(config, row, node, where);
    case TR_KIND_INTS:
        return assign_ints(config, row, node, where);
    case TR_KIND_NULL:
        return tr_refuse(where, node_shown(node), "%s", row->refusal);
    }
    return TR_OK;
}

/* ---- what the floor calls ---- */

tr_status tr_setting_assign(tr_config *config, int row, struct fy_node *node, const char *where) {
    const tr_setting *setting = &tr_settings[row];
    if (node && fy_node_is_alias(node)) {
        node = fy_node_resolve_alias(node);
        if (!node) return tr_refuse(where, "*alias", "stands for nothing; name an anchor above it");
    }
    bool nothing = is_null(node) && (setting->nullable || setting->kind == TR_KIND_NULL);
    if (nothing)
        tr_setting_reset(config, row);
    else
        TR_TRY(assign_kind(config, setting, node, where));
    free(config->places[row]);
    config->places[row] = tr_heap_copy(where);
    return TR_OK;
}

tr_status tr_setting_assign_text(tr_config *config, int row, const char *yaml, const char *where) {
    tr_document *document;
    TR_TRY(tr_document_parse(yaml, where, &document));
    tr_status status = tr_setting_assign(config, row, tr_document_root(document), where);
    tr_document_destroy(document);
    return status;
}

void tr_setting_clear(tr_config *config, const tr_setting *row) {
    void *field = tr_setting_field(config, row);
    switch (row->kind) {
    case TR_KIND_INT:
        *(int64_t *)field = 0;
        break;
    case TR_KIND_REAL:
        *(double *)field = 0;
        break;
    case TR_KIND_BOOL:
        *(bool *)field = false;
        break;
    case TR_KIND_ENUM:
        *(unsigned *)field = 0;
        break;
    case TR_KIND_STRING:
        free(*(char **)field);
        *(char **)field = NULL;
        break;
    case TR_KIND_RESUME:
        free(config->checkpoint.resume_path);
        config->checkpoint.resume_path = NULL;
        config->checkpoint.resume = TR_RESUME_AUTO;
        break;
    case TR_KIND_DATA:
        free_list(field);
        break;
    case TR_KIND_INTS:
        free(((tr_int_list *)field)->values);
        *(tr_int_list *)field = (tr_int_list){0};
        break;
    case TR_KIND_NULL:
        break;
    }
}

void tr_setting_reset(tr_config *config, int row) {
    const tr_setting *setting = &tr_settings[row];
    tr_setting_clear(config, setting);
    free(config->places[row]);
    config->places[row] = NULL;
    if (!setting->fallback || setting->kind == TR_KIND_NULL) return;
    tr_status status = tr_setting_assign_text(config, row, setting->fallback, "default");
    (void)status; /* a test reads every default back */
    free(config->places[row]);
    config->places[row] = NULL;
}
