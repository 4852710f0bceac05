/* settings.h - the table of settings and what its rows can do. Floor: config, private to it.
 *
 * One row declares one setting. Reading, overriding, printing, comparing and explaining all loop
 * over the rows; only what ties two settings together (check.c) names them one by one. A row's
 * value lives in tr_config at `offset`; where it came from stands in config->places[row]. */
#pragma once
#include "config/config.h"

typedef enum {
    TR_KIND_INT,    /* int64_t */
    TR_KIND_REAL,   /* double */
    TR_KIND_BOOL,   /* bool */
    TR_KIND_STRING, /* char *, owned; NULL: none */
    TR_KIND_ENUM,   /* an enum; its value is the place of the word in `names` */
    TR_KIND_RESUME, /* tr_resume, and the path in checkpoint.resume_path */
    TR_KIND_DATA,   /* tr_data_list */
    TR_KIND_INTS,   /* tr_int_list */
    TR_KIND_NULL    /* nothing is stored: null alone is accepted */
} tr_kind;

typedef struct {
    double low, high;
    bool low_open, high_open; /* the bound itself is excluded */
} tr_range;

typedef struct {
    const char *section, *key;
    size_t offset;
    tr_kind kind;
    const char *fallback; /* the default as YAML; NULL: `derived`, or none, or required */
    const char *derived;  /* in words: how the default follows from other settings */
    bool required;
    bool nullable; /* null stands for the default */
    bool identity; /* a change forbids a resume */
    tr_range range;
    const char *names;   /* "one|two": an enum's words */
    const char *refusal; /* TR_KIND_NULL: why nothing else is taken, and what to do */
    const char *help;
} tr_setting;

extern const tr_setting tr_settings[];
extern const int tr_setting_count;
extern const char *const tr_sections[]; /* in the order of printing, NULL at the end */

/* The row of "section" and "key", or -1. */
int tr_setting_find(const char *section, const char *key);

static inline void *tr_setting_field(const tr_config *config, const tr_setting *row) {
    return (char *)config + row->offset;
}

/* The name most like `word` among those offered; best stays NULL when none comes close. */
typedef struct {
    const char *word, *best;
    int64_t distance;
} tr_guess;
void tr_guess_offer(tr_guess *guess, const char *name);

/* ---- values as text (value.c) ---- */

typedef enum { TR_NUMBER_OK, TR_NUMBER_NONE, TR_NUMBER_FRACTION, TR_NUMBER_HUGE } tr_number;

/* Scalars of YAML 1.2's core schema. An integer may be written as a float with an integral value.
 */
tr_number tr_yaml_int(const char *text, int64_t *value_p);
tr_number tr_yaml_real(const char *text, double *value_p); /* HUGE: infinite or not a number */
bool tr_yaml_bool(const char *text, bool *value_p);
bool tr_yaml_null(const char *text);

/* The byte at which `text` stops being UTF-8 without NUL, or -1. */
int64_t tr_utf8_fault(const char *text, size_t bytes);

/* The fewest digits that read back the same; a string, quoted when plain text would be misread. */
void tr_write_real(FILE *to, double value);
void tr_write_string(FILE *to, const char *text);
/* Every row as YAML that reads back, without section `without` (NULL: all). Caller frees. */
char *tr_settings_print(const tr_config *config, const char *without);
/* A row's value as YAML on one line. */
void tr_setting_write(FILE *to, const tr_config *config, const tr_setting *row);
/* "an integer, at least 1": what a row takes. */
void tr_setting_write_type(FILE *to, const tr_setting *row);

/* ---- setting and refusing (assign.c) ---- */

struct fy_node;

/* TR_ERR_USAGE "where: value V, then the text". V is shortened and made printable. */
tr_status tr_refuse(const char *where, const char *value, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Checks and stores a value; on success config->places[row] becomes `where`. */
tr_status tr_setting_assign(tr_config *config, int row, struct fy_node *node, const char *where);
tr_status tr_setting_assign_text(tr_config *config, int row, const char *yaml, const char *where);
/* Stores a row's default; the row counts as not given. */
void tr_setting_reset(tr_config *config, int row);
void tr_setting_clear(tr_config *config, const tr_setting *row); /* frees what the value owns */

/* ---- documents (document.c) ---- */

typedef struct tr_document tr_document;
/* Text (kept by the caller until destroyed) as one YAML document. TR_ERR_USAGE with
 * "name:line:column". */
tr_status tr_document_parse(const char *text, const char *name, tr_document **document_p);
void tr_document_destroy(tr_document *document); /* NULL-safe */
struct fy_node *tr_document_root(const tr_document *document);

/* ---- what follows once values are in ---- */

/* hf.c: takes the keys of a Hugging Face config.json that the YAML did not give. */
tr_status tr_config_take_hf(tr_config *config, const char *path);
/* check.c: defaults that follow from others, required keys, combinations. */
tr_status tr_config_complete(tr_config *config);
