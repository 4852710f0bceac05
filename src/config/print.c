/* print.c - a config as YAML, its identity, its differences, and the table as help. Floor: config.
 */
#include "config/settings.h"

#include "base/heap.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- one value ---- */

static void write_data(FILE *to, const tr_data_list *list) {
    fputc('[', to);
    for (int64_t i = 0; i < list->count; i++) {
        const tr_data_entry *entry = &list->entries[i];
        if (i) fputs(", ", to);
        if (entry->weight < 0) {
            tr_write_string(to, entry->path);
            continue;
        }
        fputs("{path: ", to);
        tr_write_string(to, entry->path);
        fputs(", weight: ", to);
        tr_write_real(to, entry->weight);
        fputc('}', to);
    }
    fputc(']', to);
}

static void write_ints(FILE *to, const tr_int_list *list) {
    fputc('[', to);
    for (int64_t i = 0; i < list->count; i++)
        fprintf(to, "%s%lld", i ? ", " : "", (long long)list->values[i]);
    fputc(']', to);
}

static void write_word(FILE *to, const char *words, unsigned index) {
    for (; index > 0; index--) words += strcspn(words, "|") + 1;
    fprintf(to, "%.*s", (int)strcspn(words, "|"), words);
}

void tr_setting_write(FILE *to, const tr_config *config, const tr_setting *row) {
    const void *field = tr_setting_field(config, row);
    switch (row->kind) {
    case TR_KIND_INT:
        fprintf(to, "%lld", (long long)*(const int64_t *)field);
        break;
    case TR_KIND_REAL:
        tr_write_real(to, *(const double *)field);
        break;
    case TR_KIND_BOOL:
        fputs(*(const bool *)field ? "true" : "false", to);
        break;
    case TR_KIND_ENUM:
        write_word(to, row->names, *(const unsigned *)field);
        break;
    case TR_KIND_DATA:
        write_data(to, field);
        break;
    case TR_KIND_INTS:
        write_ints(to, field);
        break;
    case TR_KIND_NULL:
        fputs("null", to);
        break;
    case TR_KIND_STRING:
        if (*(char *const *)field)
            tr_write_string(to, *(char *const *)field);
        else
            fputs("null", to);
        break;
    case TR_KIND_RESUME:
        if (config->checkpoint.resume == TR_RESUME_PATH)
            tr_write_string(to, config->checkpoint.resume_path);
        else
            write_word(to, row->names, config->checkpoint.resume);
        break;
    }
}

/* ---- the whole config ---- */

/* The keys of model.from are all there by name, so it is left out. */
static bool resolved_away(const tr_setting *row) {
    return !strcmp(row->section, "model") && !strcmp(row->key, "from");
}

static char *print_rows(const tr_config *config, bool identity_only, const char *without) {
    tr_heap_text out;
    tr_heap_text_begin(&out);
    const char *section = "";
    for (int i = 0; i < tr_setting_count; i++) {
        const tr_setting *row = &tr_settings[i];
        if (resolved_away(row) || (identity_only && !row->identity)) continue;
        if (without && !strcmp(row->section, without)) continue;
        if (strcmp(section, row->section)) fprintf(out.to, "%s:\n", row->section);
        section = row->section;
        fprintf(out.to, "  %s: ", row->key);
        tr_setting_write(out.to, config, row);
        fputc('\n', out.to);
    }
    return tr_heap_text_end(&out);
}

char *tr_config_print(const tr_config *config) {
    return print_rows(config, false, NULL);
}

char *tr_settings_print(const tr_config *config, const char *without) {
    return print_rows(config, false, without);
}

char *tr_config_identity(const tr_config *config) {
    return print_rows(config, true, NULL);
}

static char *row_value(const tr_config *config, const tr_setting *row) {
    tr_heap_text out;
    tr_heap_text_begin(&out);
    tr_setting_write(out.to, config, row);
    return tr_heap_text_end(&out);
}

char *tr_config_value(const tr_config *config, const char *name) {
    char section[64];
    const char *dot = strchr(name, '.');
    snprintf(section, sizeof section, "%.*s", (int)(dot - name), name);
    return row_value(config, &tr_settings[tr_setting_find(section, dot + 1)]);
}

char *tr_config_quote(const char *text) {
    tr_heap_text out;
    tr_heap_text_begin(&out);
    tr_write_string(out.to, text);
    return tr_heap_text_end(&out);
}

/* ---- differences ---- */

static bool differ(const tr_config *a, const tr_config *b, const tr_setting *row, char **va_p,
                   char **vb_p) {
    *va_p = row_value(a, row);
    *vb_p = row_value(b, row);
    if (strcmp(*va_p, *vb_p)) return true;
    free(*va_p);
    free(*vb_p);
    return false;
}

char *tr_config_difference(const tr_config *a, const tr_config *b) {
    for (int i = 0; i < tr_setting_count; i++) {
        const tr_setting *row = &tr_settings[i];
        char *va, *vb;
        if (!row->identity || !differ(a, b, row, &va, &vb)) continue;
        tr_heap_text out;
        tr_heap_text_begin(&out);
        fprintf(out.to, "%s.%s: %s against %s", row->section, row->key, va, vb);
        free(va);
        free(vb);
        return tr_heap_text_end(&out);
    }
    return NULL;
}

char *tr_config_changes(const tr_config *from, const tr_config *to) {
    tr_heap_text out;
    tr_heap_text_begin(&out);
    for (int i = 0; i < tr_setting_count; i++) {
        const tr_setting *row = &tr_settings[i];
        char *va, *vb;
        if (row->identity || resolved_away(row) || !differ(from, to, row, &va, &vb)) continue;
        fprintf(out.to, "%s.%s %s -> %s\n", row->section, row->key, va, vb);
        free(va);
        free(vb);
    }
    return tr_heap_text_end(&out);
}

const char *tr_dtype_name(tr_dtype t) {
    switch (t) {
    case TR_F32:
        return "float32";
    case TR_BF16:
        return "bfloat16";
    case TR_F64:
        return "float64";
    case TR_I32:
        return "int32";
    case TR_I64:
        return "int64";
    case TR_U8:
        return "uint8";
    }
    return "unknown";
}

/* ---- help ---- */

static void write_range(FILE *to, const tr_range *range) {
    bool top = isfinite(range->high);
    fputs(range->low_open ? ", above " : top ? ", from " : ", at least ", to);
    tr_write_real(to, range->low);
    if (!top) return;
    fputs(range->high_open ? " to below " : " to ", to);
    tr_write_real(to, range->high);
}

static void write_words(FILE *to, const char *words) {
    for (const char *w = words; *w;) {
        int n = (int)strcspn(w, "|");
        const char *rest = w + n + (w[n] == '|');
        bool last = !rest[0], first = w == words;
        fprintf(to, "%s%.*s", first ? "" : last ? " or " : ", ", n, w);
        w = rest;
    }
}

void tr_setting_write_type(FILE *to, const tr_setting *row) {
    switch (row->kind) {
    case TR_KIND_INT:
        fputs("an integer", to);
        write_range(to, &row->range);
        break;
    case TR_KIND_REAL:
        fputs("a number", to);
        write_range(to, &row->range);
        break;
    case TR_KIND_BOOL:
        fputs("true or false", to);
        break;
    case TR_KIND_STRING:
        fputs("a text", to);
        break;
    case TR_KIND_ENUM:
        write_words(to, row->names);
        break;
    case TR_KIND_RESUME:
        fputs("auto, never or a path", to);
        break;
    case TR_KIND_DATA:
        fputs("a list of paths or {path: FILE, weight: 2}", to);
        break;
    case TR_KIND_INTS:
        fputs("a list of integers", to);
        write_range(to, &row->range);
        break;
    case TR_KIND_NULL:
        fputs("null", to);
        break;
    }
}

/* Words of `text` in lines of at most 100 columns, each after `indent` spaces. */
static void write_wrapped(FILE *to, const char *text, int indent) {
    enum { COLUMNS = 100 };
    int column = 0;
    for (const char *word = text; *word;) {
        int n = (int)strcspn(word, " ");
        if (column > 0 && column + 1 + n > COLUMNS) {
            fputc('\n', to);
            column = 0;
        }
        column += column == 0 ? fprintf(to, "%*s", indent, "") : fprintf(to, " ");
        column += fprintf(to, "%.*s", n, word);
        word += n;
        word += strspn(word, " ");
    }
    fputc('\n', to);
}

void tr_config_help(FILE *to) {
    write_wrapped(to,
                  "A config is a YAML file of sections and keys. --set section.key=value overrides "
                  "one, with the value in YAML: --set data.train=[a.txt,b.txt].",
                  0);
    const char *section = "";
    for (int i = 0; i < tr_setting_count; i++) {
        const tr_setting *row = &tr_settings[i];
        if (strcmp(section, row->section)) fprintf(to, "\n%s:\n", row->section);
        section = row->section;
        tr_heap_text head;
        tr_heap_text_begin(&head);
        fprintf(head.to, "%s: ", row->key);
        tr_setting_write_type(head.to, row);
        const char *value = row->derived ? row->derived : row->fallback ? row->fallback : "none";
        if (row->required)
            fputs(" (required)", head.to);
        else
            fprintf(head.to, " (default: %s)", value);
        char *line = tr_heap_text_end(&head);
        write_wrapped(to, line, 2);
        free(line);
        write_wrapped(to, row->help, 6);
    }
}
