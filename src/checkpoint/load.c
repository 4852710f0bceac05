/* load.c - reading a checkpoint. Floor: checkpoint.
 *
 * Every rank reads its pieces and sums their checksums as they come. Where the pieces of all ranks
 * cover a tensor exactly once (a trainer's shards do), that sum is compared with the file's; other
 * tensors (replicas that read the same, tensors not asked for) are read once more, each rank an
 * equal part of them. Either way all data of the arrays that are read, or without moments of the
 * weights, is checked before a load succeeds. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/heap.h"
#include "base/switch.h"
#include "checkpoint/checksum.h"
#include "checkpoint/folder.h"

enum { PART = 1 << 20 }; /* elements read at a time: still in the cache when they are summed */

typedef struct {
    /* declared, borrowed */
    tr_comm *world;
    const char *path;
    int64_t ntensors, npieces;
    const tr_piece *pieces;
    const tr_tensor_info *tensors;
    /* derived */
    int arrays; /* 1: weights alone, 3: with moments */
    int64_t nentries;
    tr_entry *entries; /* [arrays][ntensors] */
    hid_t file;
    float *part; /* [PART] of a run whose type is not the file's */
    /* state [nentries] */
    int64_t *sums, *cover;
    bool *again;
    int32_t *bad;
} load_job;

tr_status tr_checkpoint_list(tr_comm *world, const char *directory, int64_t **steps_p,
                             int64_t *count_p) {
    int64_t *steps = NULL, count = 0;
    bool first = tr_comm_rank(world) == 0;
    TR_TRY(tr_agree(world, first ? tr_folder_steps(directory, &steps, &count) : TR_OK));
    tr_end(tr_broadcast_begin(world, NULL, 0, &count, sizeof count));
    if (!first) steps = malloc((size_t)count * sizeof *steps + 1);
    tr_status status =
        tr_agree(world, steps ? TR_OK : tr_fail(TR_ERR_INTERNAL, "out of memory listing"));
    if (status != TR_OK) {
        free(steps);
        return status;
    }
    tr_end(tr_broadcast_begin(world, NULL, 0, steps, count * (int64_t)sizeof *steps));
    *steps_p = steps;
    *count_p = count;
    return TR_OK;
}

/* Room for one fixed-length string; NULL: not one. */
static char *text_room(hid_t type, hid_t space) {
    bool text = H5Tget_class(type) == H5T_STRING && H5Tis_variable_str(type) == 0 &&
                H5Sget_simple_extent_npoints(space) == 1;
    return text ? tr_heap_alloc((int64_t)H5Tget_size(type) + 1, 1) : NULL;
}

/* On the heap; NULL: damaged. */
static char *get_config(hid_t file) {
    hid_t dataset = H5Dopen2(file, "config", H5P_DEFAULT);
    if (dataset < 0) return NULL;
    hid_t type = H5Dget_type(dataset), space = H5Dget_space(dataset);
    char *text = text_room(type, space);
    if (text && H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, text) < 0) {
        free(text);
        text = NULL;
    }
    H5Sclose(space);
    H5Tclose(type);
    H5Dclose(dataset);
    return text;
}

static bool has_format(hid_t file) {
    hid_t attribute = H5Aopen(file, "format", H5P_DEFAULT);
    if (attribute < 0) return false;
    hid_t type = H5Aget_type(attribute), space = H5Aget_space(attribute);
    char *text = text_room(type, space);
    bool ours = text && H5Aread(attribute, type, text) >= 0 && strcmp(text, TR_FORMAT) == 0;
    free(text);
    H5Sclose(space);
    H5Tclose(type);
    H5Aclose(attribute);
    return ours;
}

static tr_status check_format(hid_t file, const char *path) {
    int64_t version = 0;
    if (!has_format(file) || tr_h5_get_i64(file, "version", &version) < 0)
        return tr_h5_fail(TR_ERR_DATA, "%s: damaged, or HDF5 but not a checkpoint", path);
    if (version != TR_FORMAT_VERSION)
        return tr_fail(TR_ERR_DATA, "%s: format version %" PRId64 ", this program reads %d", path,
                       version, TR_FORMAT_VERSION);
    return TR_OK;
}

tr_status tr_state_read(hid_t file, const char *path, tr_progress_state *state) {
    TR_TRY(check_format(file, path));
    uint64_t sum = 0;
    *state = (tr_progress_state){.config = get_config(file)};
    if (!state->config || tr_h5_get_i64(file, "step", &state->step) < 0 ||
        tr_h5_get_i64(file, "samples", &state->samples) < 0 ||
        tr_h5_get_i64(file, "tokens", &state->tokens) < 0 ||
        tr_h5_get_i64(file, "updates", &state->updates) < 0 ||
        tr_h5_get_i64(file, "skipped_in_row", &state->skipped_in_row) < 0 ||
        tr_h5_get_u64(file, "data_fingerprint", &state->data_fingerprint) < 0 ||
        tr_h5_get_u64(file, "checksum", &sum) < 0 || sum != tr_checksum_state(state)) {
        free(state->config);
        state->config = NULL;
        return tr_h5_fail(TR_ERR_DATA, "%s: damaged: its state or config fails the checksum", path);
    }
    return TR_OK;
}

/* Collective. Rank 0's state to everyone. */
static tr_status share_state(tr_comm *world, tr_progress_state *state) {
    bool first = tr_comm_rank(world) == 0;
    char *config = state->config;
    int64_t bytes = first ? (int64_t)strlen(config) + 1 : 0;
    tr_end(tr_broadcast_begin(world, NULL, 0, &bytes, sizeof bytes));
    if (!first) config = malloc((size_t)bytes);
    tr_status status =
        tr_agree(world, config ? TR_OK : tr_fail(TR_ERR_INTERNAL, "out of memory for a config"));
    if (status == TR_OK) {
        tr_end(tr_broadcast_begin(world, NULL, 0, state, sizeof *state));
        tr_end(tr_broadcast_begin(world, NULL, 0, config, bytes));
        state->config = config;
    } else {
        free(config);
        state->config = NULL;
    }
    return status;
}

tr_status tr_checkpoint_state(tr_comm *world, const char *path, tr_progress_state *state) {
    tr_status status = TR_OK;
    tr_progress_state found = {0};
    if (tr_comm_rank(world) == 0) {
        hid_t file;
        tr_h5_begin();
        status = tr_h5_open(path, &file);
        if (status == TR_OK) {
            status = tr_state_read(file, path, &found);
            H5Fclose(file);
        }
        tr_h5_end();
    }
    TR_TRY(tr_agree(world, status));
    TR_TRY(share_state(world, &found));
    *state = found;
    return TR_OK;
}

/* TR_ERR_USAGE unless the file has this tensor in this shape; then its checksum is in *entry. */
static tr_status match_entry(const load_job *job, tr_entry *entry) {
    char name[TR_PATH_BYTES];
    tr_entry found = *entry;
    const tr_tensor_info *want = &entry->info, *got = &found.info;
    tr_h5_name(name, entry);
    if (tr_entry_read(job->file, &found) < 0) {
        if (H5Lexists(job->file, name, H5P_DEFAULT) == 0)
            return tr_fail(TR_ERR_USAGE,
                           "%s has no tensor %s: it is of another model; give the config that it "
                           "was made with (`h5dump -d config %s` prints it)",
                           job->path, name + 1, job->path);
        return tr_h5_fail(TR_ERR_DATA, "%s: damaged at tensor %s", job->path, name + 1);
    }
    if (got->ndim != want->ndim ||
        memcmp(got->shape, want->shape, (size_t)want->ndim * sizeof *want->shape) != 0) {
        char there[128], here[128];
        tr_shape_text(there, sizeof there, got);
        tr_shape_text(here, sizeof here, want);
        return tr_fail(TR_ERR_USAGE,
                       "%s is of another model: tensor %s is %s there, %s here; give the config "
                       "that it was made with (`h5dump -d config %s` prints it)",
                       job->path, want->name, there, here, job->path);
    }
    entry->checksum = found.checksum;
    return TR_OK;
}

static herr_t find_extra(hid_t group, const char *name, const H5L_info_t *link, void *context) {
    (void)group;
    (void)link;
    const load_job *job = context;
    for (int64_t t = 0; t < job->ntensors; t++)
        if (strcmp(name, job->tensors[t].name) == 0) return 0;
    tr_fail(TR_ERR_USAGE,
            "%s holds tensor %s, which this model lacks; give the config that it was made with "
            "(`h5dump -d config %s` prints it)",
            job->path, name, job->path);
    return 1;
}

/* The file's list against ours; ranks share the work in order, so the first difference is named. */
static tr_status match_entries(load_job *job) {
    tr_range mine = tr_block_of(job->nentries, tr_comm_size(job->world), tr_comm_rank(job->world));
    for (int64_t e = mine.first; e < mine.first + mine.count; e++)
        TR_TRY(match_entry(job, &job->entries[e]));
    for (int a = 0; a < job->arrays && mine.first == 0; a++) {
        H5G_info_t group;
        if (H5Gget_info_by_name(job->file, tr_array_group[a], &group, H5P_DEFAULT) < 0)
            return tr_h5_fail(TR_ERR_DATA, "%s: damaged at %s", job->path, tr_array_group[a]);
        if (group.nlinks > (hsize_t)job->ntensors &&
            H5Literate_by_name(job->file, tr_array_group[a], H5_INDEX_NAME, H5_ITER_NATIVE, NULL,
                               find_extra, job, H5P_DEFAULT) != 0)
            return TR_ERR_USAGE;
    }
    return TR_OK;
}

/* One array of a run. */
static tr_status read_run(load_job *job, int64_t e, const tr_piece *run, void *data, tr_dtype t) {
    char name[TR_PATH_BYTES];
    tr_h5_name(name, &job->entries[e]);
    hid_t dataset = H5Dopen2(job->file, name, H5P_DEFAULT);
    int rc = dataset < 0 ? -1 : 0;
    for (int64_t at = 0, n; at < run->count && rc >= 0; at += n) {
        n = run->count - at < PART ? run->count - at : PART;
        float *part = t == TR_F32 ? (float *)data + at : job->part;
        rc = tr_h5_transfer(dataset, TR_READ, H5P_DEFAULT, &run->box, run->first + at, n, part);
        tr_checksum_run(&job->entries[e].info, &run->box, run->first + at, n, part,
                        (uint64_t *)&job->sums[e], (uint64_t *)&job->cover[e]);
        for (int64_t i = 0; i < n && t == TR_BF16; i++)
            ((tr_bf16 *)data)[at + i] = tr_f32_to_bf16(part[i]);
    }
    if (dataset >= 0) H5Dclose(dataset);
    if (rc < 0) return tr_h5_fail(TR_ERR_DATA, "%s: cannot read tensor %s", job->path, name + 1);
    return TR_OK;
}

static tr_status read_pieces(load_job *job) {
    if (tr_switch("TRIREME_FAIL_READ_RANK", -1) == tr_comm_rank(job->world))
        return tr_fail(TR_ERR_DATA, "%s: reading failed on request", job->path);
    for (int64_t p = 0; p < job->npieces;) {
        tr_piece run;
        p += tr_pieces_merge(job->npieces - p, &job->pieces[p], &run);
        for (int a = 0; a < job->arrays; a++) {
            void *data = tr_piece_array(&run, a);
            tr_dtype t = a == 0 ? run.master_type : TR_F32;
            if (data && run.count > 0)
                TR_TRY(read_run(job, a * job->ntensors + run.tensor, &run, data, t));
        }
    }
    return TR_OK;
}

/* Collective. Which sums are whole is known from what the pieces cover over all ranks; a sum that
 * is not is cleared and read again. */
static tr_status verify(load_job *job) {
    tr_end(tr_all_reduce_begin(job->world, NULL, TR_SUM, TR_I64, job->cover, job->nentries));
    for (int64_t e = 0; e < job->nentries; e++) {
        int64_t elems = tr_tensor_elems(&job->entries[e].info);
        job->again[e] = (uint64_t)job->cover[e] != tr_checksum_cover(0, elems);
        if (job->again[e]) job->sums[e] = 0;
    }
    TR_TRY(tr_entries_verify(job->world, job->file, job->nentries, job->entries, job->again,
                             job->sums, job->bad));
    for (int64_t e = 0; e < job->nentries; e++)
        if (job->bad[e])
            return tr_fail(TR_ERR_DATA, "%s: damaged: tensor %s/%s fails its checksum", job->path,
                           tr_array_group[job->entries[e].array] + 1, job->entries[e].info.name);
    return TR_OK;
}

static tr_status load(load_job *job) {
    tr_progress_state state = {0};
    TR_TRY(tr_agree(job->world,
                    tr_pieces_check(job->ntensors, job->tensors, job->npieces, job->pieces)));
    TR_TRY(tr_agree(job->world, tr_h5_open(job->path, &job->file)));
    tr_status status = TR_OK;
    if (tr_comm_rank(job->world) == 0) {
        status = tr_state_read(job->file, job->path, &state);
        free(state.config);
    }
    TR_TRY(tr_agree(job->world, status));
    TR_TRY(tr_agree(job->world, match_entries(job)));
    TR_TRY(tr_agree(job->world, read_pieces(job)));
    return tr_agree(job->world, verify(job));
}

tr_status tr_checkpoint_load(tr_comm *world, const char *path, bool moments, int64_t ntensors,
                             const tr_tensor_info *tensors, int64_t npieces,
                             const tr_piece *pieces) {
    load_job job = {.world = world,
                    .path = path,
                    .ntensors = ntensors,
                    .npieces = npieces,
                    .pieces = pieces,
                    .tensors = tensors,
                    .arrays = moments ? TR_ARRAYS : 1,
                    .file = -1};
    job.nentries = job.arrays * ntensors;
    size_t n = (size_t)job.nentries + 1;
    job.entries = calloc(n, sizeof *job.entries);
    job.sums = calloc(n, sizeof *job.sums);
    job.cover = calloc(n, sizeof *job.cover);
    job.again = calloc(n, sizeof *job.again);
    job.bad = calloc(n, sizeof *job.bad);
    job.part = malloc(PART * sizeof *job.part);
    bool ready = job.entries && job.sums && job.cover && job.again && job.bad && job.part;
    for (int64_t e = 0; e < job.nentries && ready; e++)
        job.entries[e] = (tr_entry){(int)(e / ntensors), tensors[e % ntensors], 0};
    tr_status status =
        tr_agree(world, ready ? TR_OK : tr_fail(TR_ERR_INTERNAL, "out of memory loading"));
    tr_h5_begin();
    if (status == TR_OK) status = load(&job);
    if (job.file >= 0) H5Fclose(job.file);
    tr_h5_end();
    free(job.entries);
    free(job.sums);
    free(job.cover);
    free(job.again);
    free(job.bad);
    free(job.part);
    return status;
}
