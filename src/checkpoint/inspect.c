/* inspect.c - the commands `checkpoint info` and `checkpoint verify`. Floor: checkpoint. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/heap.h"
#include "base/log.h"
#include "checkpoint/format.h"

/* Everything a file holds, as the file says. */
typedef struct {
    int64_t count, capacity;
    tr_entry *entries; /* names owned; ndim -1: damaged beyond its shape */
    hid_t file;
    int array; /* being listed */
} catalog;

static void catalog_free(catalog *c) {
    for (int64_t e = 0; e < c->count; e++) free((char *)c->entries[e].info.name);
    free(c->entries);
}

static herr_t add_entry(hid_t group, const char *name, const H5L_info_t *link, void *context) {
    (void)link;
    (void)group;
    catalog *c = context;
    c->entries = tr_heap_grow(c->entries, c->count, &c->capacity, sizeof *c->entries);
    tr_entry *entry = &c->entries[c->count];
    *entry = (tr_entry){.array = c->array, .info = {.name = tr_heap_copy(name)}};
    if (tr_entry_read(c->file, entry) < 0) entry->info.ndim = -1;
    c->count++;
    return 0;
}

/* Local. In the order of saving. */
static tr_status catalog_read(hid_t file, const char *path, int arrays, catalog *c) {
    c->file = file;
    for (c->array = 0; c->array < arrays; c->array++)
        if (H5Literate_by_name(file, tr_array_group[c->array], H5_INDEX_CRT_ORDER, H5_ITER_INC,
                               NULL, add_entry, c, H5P_DEFAULT) < 0)
            return tr_h5_fail(TR_ERR_DATA, "%s: damaged at %s", path, tr_array_group[c->array]);
    if (c->count % arrays != 0)
        return tr_fail(TR_ERR_DATA, "%s: damaged: weights and moments differ in number", path);
    return TR_OK;
}

/* "1,234,567" */
static void put_thousands(char out[32], int64_t n) {
    char digits[24];
    int length = snprintf(digits, sizeof digits, "%" PRId64, n), at = 0;
    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0) out[at++] = ',';
        out[at++] = digits[i];
    }
    out[at] = 0;
}

/* The value of the first `name:` in a resolved config, which is run.name. */
static void put_config_name(char out[48], const char *config) {
    const char *at = config;
    while ((at = strstr(at, "name:")) && at > config && !strchr(" {\n", at[-1])) at += 5;
    if (!at) {
        snprintf(out, 48, "(unnamed)");
        return;
    }
    at += 5;
    at += strspn(at, " \"'");
    size_t length = strcspn(at, "\"',}#\n");
    snprintf(out, 48, "%.*s", length < 47 ? (int)length : 47, at);
}

static void say_tensor(const tr_tensor_info *info) {
    char shape[128], size[32];
    tr_shape_text(shape, sizeof shape, info);
    put_thousands(size, info->ndim < 0 ? 0 : tr_tensor_elems(info));
    tr_say("  %-56.56s %-22.22s %14s", info->name, shape, size);
}

static void say_info(const char *path, const tr_progress_state *state, const catalog *c,
                     int64_t file_bytes, bool all) {
    enum { SHOWN = 40 };
    char number[32], name[48];
    int64_t parameters = 0;
    for (int64_t t = 0; t < c->count; t++)
        if (c->entries[t].info.ndim >= 0) parameters += tr_tensor_elems(&c->entries[t].info);
    put_config_name(name, state->config);
    tr_say("checkpoint  %s", path);
    tr_say("config      %s", name);
    tr_say("step        %" PRId64 " (%" PRId64 " updates, %" PRId64 " skipped in a row)",
           state->step, state->updates, state->skipped_in_row);
    put_thousands(number, state->samples);
    tr_say("samples     %s", number);
    put_thousands(number, state->tokens);
    tr_say("tokens      %s", number);
    tr_say("data        %016" PRIx64, state->data_fingerprint);
    put_thousands(number, parameters);
    tr_say("parameters  %s in %" PRId64 " tensors, float32 with two moments", number, c->count);
    tr_say("file        %.1f MiB", (double)file_bytes / 0x1p20);
    for (int64_t t = 0; t < c->count; t++) {
        if (!all && c->count > SHOWN && t == SHOWN * 3 / 4) {
            tr_say("  ... (%" PRId64 " more; --tensors lists all)", c->count - SHOWN);
            t += c->count - SHOWN;
        }
        say_tensor(&c->entries[t].info);
    }
}

static tr_status info_local(const char *path, bool all) {
    hid_t file;
    hsize_t bytes = 0;
    tr_progress_state state = {0};
    catalog c = {0};
    TR_TRY(tr_h5_open(path, &file));
    tr_status status = tr_state_read(file, path, &state);
    if (status == TR_OK) status = catalog_read(file, path, 1, &c);
    if (status == TR_OK) {
        H5Fget_filesize(file, &bytes);
        say_info(path, &state, &c, (int64_t)bytes, all);
    }
    catalog_free(&c);
    free(state.config);
    H5Fclose(file);
    return status;
}

tr_status tr_checkpoint_info(tr_comm *world, const char *path, bool all) {
    tr_h5_begin();
    tr_status status = tr_agree(world, tr_comm_rank(world) == 0 ? info_local(path, all) : TR_OK);
    tr_h5_end();
    return status;
}

/* Collective. The entries' data against their checksums. */
static tr_status verify_catalog(tr_comm *world, hid_t file, const char *path, const catalog *c) {
    size_t n = (size_t)c->count + 1;
    int64_t *sums = calloc(n, sizeof *sums), damaged = 0;
    int32_t *bad = calloc(n, sizeof *bad);
    bool *again = calloc(n, sizeof *again);
    const tr_entry *entries = c->entries;
    bool ready = sums && bad && again;
    tr_status status =
        tr_agree(world, ready ? TR_OK : tr_fail(TR_ERR_INTERNAL, "out of memory verifying"));
    if (status != TR_OK) goto out;
    for (int64_t e = 0; e < c->count; e++) again[e] = entries[e].info.ndim >= 0;
    status = tr_entries_verify(world, file, c->count, entries, again, sums, bad);
    if (status != TR_OK) goto out;
    for (int64_t e = 0; e < c->count; e++) {
        damaged += bad[e];
        if (bad[e])
            tr_say("damaged: %s/%s", tr_array_group[entries[e].array] + 1, entries[e].info.name);
    }
    if (damaged > 0)
        status = tr_fail(TR_ERR_DATA, "%s: %" PRId64 " of %" PRId64 " tensors are damaged", path,
                         damaged, c->count);
    else
        tr_say("%s: all %" PRId64 " checksums are right", path, c->count + 1);
out:
    free(sums);
    free(bad);
    free(again);
    return status;
}

tr_status tr_checkpoint_verify(tr_comm *world, const char *path) {
    hid_t file = -1;
    tr_progress_state state = {0};
    catalog c = {0};
    tr_h5_begin();
    tr_status status = tr_agree(world, tr_h5_open(path, &file));
    if (status == TR_OK) status = tr_agree(world, tr_state_read(file, path, &state));
    if (status == TR_OK) status = tr_agree(world, catalog_read(file, path, TR_ARRAYS, &c));
    if (status == TR_OK) status = verify_catalog(world, file, path, &c);
    catalog_free(&c);
    free(state.config);
    if (file >= 0) H5Fclose(file);
    tr_h5_end();
    return status;
}
