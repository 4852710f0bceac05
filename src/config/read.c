/* read.c - from a file, or text, and overrides to a checked config. Floor: config.
 *
 * Precedence: --set, the YAML, the Hugging Face config.json of model.from, defaults. */
#include "base/file.h"
#include "base/heap.h"
#include "config/settings.h"

#include <errno.h>
#include <libfyaml.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FILE_BYTES = 4 << 20 };

/* Where a key stands: "name:line:column". */
static void place_of(struct fy_node *key, const char *name, char *out, size_t bytes) {
    struct fy_token *token = key ? fy_node_get_scalar_token(key) : NULL;
    const struct fy_mark *mark = token ? fy_token_start_mark(token) : NULL;
    if (mark)
        snprintf(out, bytes, "%s:%d:%d", name, mark->line + 1, mark->column + 1);
    else
        snprintf(out, bytes, "%s", name);
}

/* A key's text, or NULL when it is a list, a map or text with NUL. */
static const char *key_text(struct fy_node *key) {
    if (!key || !fy_node_is_scalar(key) || fy_node_is_alias(key)) return NULL;
    const char *text = fy_node_get_scalar0(key);
    return text && strlen(text) == fy_node_get_scalar_length(key) ? text : NULL;
}

static int section_index(const char *name) {
    for (int i = 0; tr_sections[i]; i++)
        if (!strcmp(tr_sections[i], name)) return i;
    return -1;
}

static tr_status refuse_section(const char *where, const char *name) {
    tr_guess guess = {.word = name};
    for (const char *const *s = tr_sections; *s; s++) tr_guess_offer(&guess, *s);
    for (int i = 0; i < tr_setting_count; i++)
        if (!strcmp(tr_settings[i].key, name))
            return tr_fail(TR_ERR_USAGE, "%s: %s: is no section; it is a key of section %s (%s.%s)",
                           where, name, tr_settings[i].section, tr_settings[i].section, name);
    if (guess.best)
        return tr_fail(TR_ERR_USAGE, "%s: %s: unknown section; did you mean %s?", where, name,
                       guess.best);
    return tr_fail(TR_ERR_USAGE,
                   "%s: %s: unknown section; there are run, model, parallel, data, training, "
                   "optimizer, checkpoint and log",
                   where, name);
}

static tr_status refuse_key(const char *where, const char *section, const char *key) {
    tr_guess guess = {.word = key};
    for (int i = 0; i < tr_setting_count; i++) {
        const tr_setting *row = &tr_settings[i];
        if (!strcmp(row->section, section)) tr_guess_offer(&guess, row->key);
    }
    if (guess.best)
        return tr_fail(TR_ERR_USAGE, "%s: unknown key; did you mean %s.%s?", where, section,
                       guess.best);
    for (int i = 0; i < tr_setting_count; i++)
        if (!strcmp(tr_settings[i].key, key))
            return tr_fail(TR_ERR_USAGE, "%s: unknown key; it belongs to section %s", where,
                           tr_settings[i].section);
    return tr_fail(TR_ERR_USAGE, "%s: unknown key; `trireme help config` lists those of %s", where,
                   section);
}

static tr_status read_key(tr_config *config, const char *section, struct fy_node_pair *pair,
                          const char *name) {
    char at[1024], where[1280];
    struct fy_node *key_node = fy_node_pair_key(pair);
    const char *key = key_text(key_node);
    place_of(key_node, name, at, sizeof at);
    if (!key) return tr_fail(TR_ERR_USAGE, "%s: %s: a key must be a word", at, section);
    snprintf(where, sizeof where, "%s: %s.%.100s", at, section, key);
    int row = tr_setting_find(section, key);
    if (row < 0) return refuse_key(where, section, key);
    if (config->places[row])
        return tr_fail(TR_ERR_USAGE, "%s: is given twice, first at %s; keep one", where,
                       config->places[row]);
    return tr_setting_assign(config, row, fy_node_pair_value(pair), where);
}

/* Nothing where keys and values, or sections, could be. */
static bool is_empty(struct fy_node *node) {
    if (!node) return true;
    if (!fy_node_is_scalar(node) || fy_node_get_style(node) != FYNS_PLAIN) return false;
    const char *text = fy_node_get_scalar0(node);
    return tr_yaml_null(text ? text : "");
}

static tr_status read_section(tr_config *config, const char *section, struct fy_node *node,
                              const char *at, const char *name) {
    if (node && fy_node_is_alias(node)) node = fy_node_resolve_alias(node);
    if (is_empty(node)) return TR_OK;
    if (!fy_node_is_mapping(node))
        return tr_fail(TR_ERR_USAGE,
                       "%s: %s: must hold keys and values; `trireme help config` "
                       "lists them",
                       at, section);
    void *state = NULL;
    struct fy_node_pair *pair;
    while ((pair = fy_node_mapping_iterate(node, &state)))
        TR_TRY(read_key(config, section, pair, name));
    return TR_OK;
}

static tr_status read_root(tr_config *config, struct fy_node *root, const char *name) {
    char at[1024];
    if (is_empty(root)) return TR_OK;
    if (!fy_node_is_mapping(root))
        return tr_fail(TR_ERR_USAGE, "%s:1: must hold sections such as `model:`, nothing else",
                       name);
    unsigned seen = 0;
    void *state = NULL;
    struct fy_node_pair *pair;
    while ((pair = fy_node_mapping_iterate(root, &state))) {
        const char *section = key_text(fy_node_pair_key(pair));
        place_of(fy_node_pair_key(pair), name, at, sizeof at);
        if (!section) return tr_fail(TR_ERR_USAGE, "%s: a section's name must be a word", at);
        int index = section_index(section);
        if (index < 0) return refuse_section(at, section);
        if (seen >> index & 1)
            return tr_fail(TR_ERR_USAGE, "%s: %s: the section stands twice; join them", at,
                           section);
        seen |= 1u << index;
        TR_TRY(read_section(config, section, fy_node_pair_value(pair), at, name));
    }
    return TR_OK;
}

/* ---- overrides ---- */

static tr_status apply_set(tr_config *config, const char *set) {
    const char *equals = strchr(set, '=');
    const char *name_end = equals ? equals : set + strlen(set);
    const char *dot = memchr(set, '.', (size_t)(name_end - set));
    char section[128], key[128] = "", where[300];
    snprintf(section, sizeof section, "%.*s", (int)((dot ? dot : name_end) - set), set);
    if (section_index(section) < 0) return refuse_section("--set", section);
    if (!dot || !equals)
        return tr_fail(TR_ERR_USAGE,
                       "--set %s: must be section.key=value, such as training.steps=100", set);
    snprintf(key, sizeof key, "%.*s", (int)(equals - dot - 1), dot + 1);
    snprintf(where, sizeof where, "--set %s.%s", section, key);
    int row = tr_setting_find(section, key);
    if (row < 0) return refuse_key(where, section, key);
    return tr_setting_assign_text(config, row, equals + 1, where);
}

/* ---- the whole ---- */

static tr_status fill(tr_config *config, struct fy_node *root, const char *name, int nsets,
                      char *const *sets) {
    TR_TRY(read_root(config, root, name));
    for (int i = 0; i < nsets; i++) TR_TRY(apply_set(config, sets[i]));
    if (config->model.from) TR_TRY(tr_config_take_hf(config, config->model.from));
    for (int i = 0; i < tr_setting_count; i++)
        if (!config->places[i]) tr_setting_reset(config, i);
    return tr_config_complete(config);
}

tr_status tr_config_parse(const char *text, const char *name, int nsets, char *const *sets,
                          tr_config **config_p) {
    tr_document *document;
    TR_TRY(tr_document_parse(text, name, &document));
    tr_config *config = tr_heap_alloc(1, sizeof *config);
    config->places = tr_heap_alloc(tr_setting_count, sizeof *config->places);
    config->source = tr_heap_copy(name);
    tr_status status = fill(config, tr_document_root(document), name, nsets, sets);
    tr_document_destroy(document);
    if (status == TR_OK)
        *config_p = config;
    else
        tr_config_destroy(config);
    return status;
}

tr_status tr_config_alter(const tr_config *config, bool unsharded, int nsets, char *const *sets,
                          tr_config **config_p) {
    char *rest = tr_settings_print(config, unsharded ? "parallel" : NULL);
    bool global = config->model.router_aux_loss_scope == TR_AUX_GLOBAL_BATCH;
    const char *schedule = unsharded && global ? "parallel: {schedule: gpipe}\n" : "";
    char *text = tr_heap_format("%s%s", rest, schedule);
    tr_status status = tr_config_parse(text, config->source, nsets, sets, config_p);
    free(text);
    free(rest);
    return status;
}

/* The whole file, with a NUL at its end. */
static tr_status read_file(const char *path, char **text_p) {
    TR_TRY(tr_file_check(path, "config file"));
    FILE *file = fopen(path, "rb");
    if (!file) return tr_fail(TR_ERR_IO, "%s: cannot be opened: %s", path, strerror(errno));
    char *text = tr_heap_alloc(MAX_FILE_BYTES + 1, 1);
    size_t bytes = fread(text, 1, MAX_FILE_BYTES + 1, file);
    int error = ferror(file) ? errno : 0;
    fclose(file);
    tr_status status = TR_OK;
    if (error)
        status = tr_fail(TR_ERR_IO, "%s: cannot be read: %s", path, strerror(error));
    else if (bytes > MAX_FILE_BYTES)
        status = tr_fail(TR_ERR_USAGE, "%s: is larger than 4 MiB, so it is no config", path);
    else if (memchr(text, 0, bytes))
        status = tr_fail(TR_ERR_USAGE, "%s: holds a NUL byte, so it is no YAML text", path);
    if (status != TR_OK) {
        free(text);
        return status;
    }
    text[bytes] = 0;
    *text_p = text;
    return TR_OK;
}

tr_status tr_config_read(const char *path, int nsets, char *const *sets, tr_config **config_p) {
    char *text = NULL;
    TR_TRY(read_file(path, &text));
    tr_status status = tr_config_parse(text, path, nsets, sets, config_p);
    free(text);
    return status;
}

void tr_config_destroy(tr_config *config) {
    if (!config) return;
    for (int i = 0; i < tr_setting_count; i++) {
        tr_setting_clear(config, &tr_settings[i]);
        free(config->places[i]);
    }
    free(config->places);
    free(config->source);
    free(config);
}
