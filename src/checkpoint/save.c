/* save.c - writing a checkpoint. Floor: checkpoint.
 *
 * Order, each step agreed by all ranks before the next:
 *   1. every rank sums the checksums of its pieces; together they must cover each tensor once;
 *   2. rank 0 makes the folder, removes what a killed save left, asks for room, and writes the
 * whole file but its tensors' data under the temporary name;
 *   3. all ranks open it through MPI-IO and write their pieces; flush (fsync on every rank), close;
 *   4. rank 0: fsync, rename, fsync of the folder, then older checkpoints go.
 * No collective HDF5 call changes metadata, so no disk-full error can strike some ranks inside one
 * and leave the others waiting. On any failure rank 0 removes the temporary file. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/switch.h"
#include "checkpoint/checksum.h"
#include "checkpoint/folder.h"
#include "dist/watch.h"

typedef struct {
    /* declared, borrowed */
    tr_comm *world;
    const char *directory;
    const tr_progress_state *state;
    int64_t ntensors, npieces, keep;
    const tr_tensor_info *tensors;
    const tr_piece *pieces;
    /* derived */
    char partial[TR_PATH_BYTES];
    int64_t *sums; /* [TR_ARRAYS][ntensors]: checksums over all ranks, as unsigned numbers */
} save_job;

static tr_entry entry_of(const save_job *job, int64_t e) {
    return (tr_entry){(int)(e / job->ntensors), job->tensors[e % job->ntensors],
                      (uint64_t)job->sums[e]};
}

/* Names become links inside a group. */
static tr_status check_names(const save_job *job) {
    for (int64_t t = 0; t < job->ntensors; t++) {
        const char *name = job->tensors[t].name;
        if (!*name || strchr(name, '/') || strcmp(name, ".") == 0 || strlen(name) > 1024)
            return tr_fail(TR_ERR_INTERNAL, "\"%.80s\" cannot name a tensor in a checkpoint", name);
    }
    return TR_OK;
}

static tr_status check_job(const save_job *job) {
    TR_TRY(check_names(job));
    TR_TRY(tr_pieces_check(job->ntensors, job->tensors, job->npieces, job->pieces));
    for (int64_t p = 0; p < job->npieces; p++)
        for (int a = 0; a < TR_ARRAYS; a++)
            if (job->pieces[p].count > 0 && !tr_piece_array(&job->pieces[p], a))
                return tr_fail(TR_ERR_INTERNAL, "tensor %s is saved without its %s",
                               job->tensors[job->pieces[p].tensor].name, tr_array_group[a] + 1);
    return TR_OK;
}

/* Collective. Fills job->sums. TR_ERR_INTERNAL on all ranks when a tensor is not covered once. */
static tr_status sum_pieces(save_job *job) {
    int64_t n = TR_ARRAYS * job->ntensors;
    uint64_t *sums = (uint64_t *)job->sums, *cover = sums + n;
    for (int64_t p = 0; p < job->npieces; p++) {
        const tr_piece *piece = &job->pieces[p];
        tr_watch_progress();
        for (int a = 0; a < TR_ARRAYS; a++) {
            int64_t e = a * job->ntensors + piece->tensor;
            tr_checksum_run(&job->tensors[piece->tensor], &piece->box, piece->first, piece->count,
                            tr_piece_array(piece, a), &sums[e], &cover[e]);
        }
    }
    tr_end(tr_all_reduce_begin(job->world, NULL, TR_SUM, TR_I64, job->sums, 2 * n));
    for (int64_t e = 0; e < n; e++) {
        tr_entry entry = entry_of(job, e);
        if (cover[e] != tr_checksum_cover(0, tr_tensor_elems(&entry.info)))
            return tr_fail(TR_ERR_INTERNAL, "the ranks' pieces do not cover tensor %s exactly once",
                           entry.info.name);
    }
    return TR_OK;
}

static hid_t text_type(const char *text) {
    hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, strlen(text) + 1);
    H5Tset_cset(type, H5T_CSET_UTF8);
    return type;
}

static int put_format(hid_t file) {
    hid_t type = text_type(TR_FORMAT), space = H5Screate(H5S_SCALAR);
    hid_t attribute = H5Acreate2(file, "format", type, space, H5P_DEFAULT, H5P_DEFAULT);
    int rc = attribute < 0 ? -1 : H5Awrite(attribute, type, TR_FORMAT);
    if (attribute >= 0) H5Aclose(attribute);
    H5Sclose(space);
    H5Tclose(type);
    return rc;
}

/* A dataset, because an attribute holds at most 64 KiB. */
static int put_config(hid_t file, const char *text) {
    hid_t type = text_type(text), space = H5Screate(H5S_SCALAR);
    hid_t create = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_obj_track_times(create, false);
    hid_t dataset = H5Dcreate2(file, "config", type, space, H5P_DEFAULT, create, H5P_DEFAULT);
    int rc = dataset < 0 ? -1 : H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, text);
    if (dataset >= 0) H5Dclose(dataset);
    H5Pclose(create);
    H5Sclose(space);
    H5Tclose(type);
    return rc;
}

static int put_state(hid_t file, const tr_progress_state *state) {
    const struct {
        const char *name;
        int64_t value;
    } numbers[] = {{"version", TR_FORMAT_VERSION}, {"step", state->step},
                   {"samples", state->samples},    {"tokens", state->tokens},
                   {"updates", state->updates},    {"skipped_in_row", state->skipped_in_row}};
    int rc = put_format(file);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers && rc >= 0; i++)
        rc = tr_h5_put_i64(file, numbers[i].name, numbers[i].value);
    if (rc >= 0) rc = tr_h5_put_u64(file, "data_fingerprint", state->data_fingerprint);
    if (rc >= 0) rc = tr_h5_put_u64(file, "checksum", tr_checksum_state(state));
    return rc < 0 ? rc : put_config(file, state->config);
}

static int put_group(hid_t file, const char *path) {
    hid_t list = H5Pcreate(H5P_GROUP_CREATE);
    H5Pset_link_creation_order(list, H5P_CRT_ORDER_TRACKED | H5P_CRT_ORDER_INDEXED);
    H5Pset_obj_track_times(list, false);
    hid_t group = H5Gcreate2(file, path, H5P_DEFAULT, list, H5P_DEFAULT);
    H5Pclose(list);
    return group < 0 ? -1 : H5Gclose(group);
}

/* A dataset with its place in the file and its checksum, without its data. */
static int put_tensor(hid_t file, hid_t create, const tr_entry *entry) {
    char name[TR_PATH_BYTES];
    hsize_t shape[TR_MAX_DIM];
    tr_h5_name(name, entry);
    for (int d = 0; d < entry->info.ndim; d++) shape[d] = (hsize_t)entry->info.shape[d];
    hid_t space = H5Screate_simple(entry->info.ndim, shape, NULL);
    hid_t dataset = H5Dcreate2(file, name, H5T_IEEE_F32LE, space, H5P_DEFAULT, create, H5P_DEFAULT);
    int rc = dataset < 0 ? -1 : tr_h5_put_u64(dataset, "checksum", entry->checksum);
    if (dataset >= 0) H5Dclose(dataset);
    H5Sclose(space);
    return rc;
}

static tr_status put_all(const save_job *job, hid_t file) {
    if (put_state(file, job->state) < 0 || put_group(file, "/model") < 0 ||
        put_group(file, "/optimizer") < 0 || put_group(file, tr_array_group[1]) < 0 ||
        put_group(file, tr_array_group[2]) < 0)
        return tr_h5_fail(TR_ERR_IO, "%s: cannot be written", job->partial);
    hid_t create = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_obj_track_times(create, false);
    H5Pset_fill_time(create, H5D_FILL_TIME_NEVER);
    H5Pset_alloc_time(create, H5D_ALLOC_TIME_EARLY);
    tr_status status = TR_OK;
    for (int64_t e = 0; e < TR_ARRAYS * job->ntensors && status == TR_OK; e++) {
        tr_entry entry = entry_of(job, e);
        tr_watch_progress();
        if (put_tensor(file, create, &entry) < 0)
            status = tr_h5_fail(TR_ERR_IO, "%s: cannot make tensor %s (is its name taken?)",
                                job->partial, entry.info.name);
    }
    H5Pclose(create);
    return status;
}

/* Rank 0. Everything but the tensors' data, with checksummed metadata (libver 1.10) kept together
 * in large blocks. No object keeps the time of day: equal states make equal files, byte for byte.
 */
static tr_status write_skeleton(const save_job *job) {
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG);
    H5Pset_file_locking(access, false, true);
    H5Pset_meta_block_size(access, 1 << 16);
    hid_t create = H5Pcreate(H5P_FILE_CREATE);
    H5Pset_obj_track_times(create, false);
    hid_t file = H5Fcreate(job->partial, H5F_ACC_TRUNC, create, access);
    H5Pclose(create);
    H5Pclose(access);
    if (file < 0)
        return tr_h5_fail(TR_ERR_IO, "%s: cannot be made; let this user write in its folder",
                          job->partial);
    tr_status status = put_all(job, file);
    if (H5Fclose(file) < 0 && status == TR_OK)
        status = tr_h5_fail(TR_ERR_IO, "%s: cannot be written (disk full?)", job->partial);
    return status;
}

/* What the file takes: data, and at most 1 KiB of metadata a dataset. */
static int64_t file_bytes(const save_job *job) {
    int64_t bytes = (1 << 20) + (int64_t)strlen(job->state->config);
    for (int64_t t = 0; t < job->ntensors; t++)
        bytes += TR_ARRAYS * (4 * tr_tensor_elems(&job->tensors[t]) + 1024);
    return bytes;
}

static tr_status prepare(const save_job *job) {
    TR_TRY(tr_folder_make(job->directory));
    tr_folder_clean(job->directory);
    if (!tr_switch("TRIREME_NO_SPACE_CHECK", 0))
        TR_TRY(tr_folder_room(job->directory, file_bytes(job)));
    return write_skeleton(job);
}

/* Opening through MPI-IO is collective and cannot be undone by some ranks: first see that this rank
 * reaches the file at all. */
static tr_status can_write(const save_job *job) {
    int fd = open(job->partial, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return tr_fail(
            TR_ERR_IO,
            "%s: rank %d cannot write it: %s; checkpoint.directory must be on a disk that "
            "all machines share",
            job->partial, tr_comm_rank(job->world), strerror(errno));
    close(fd);
    return TR_OK;
}

static tr_status write_run(const save_job *job, hid_t file, hid_t list, const tr_piece *run) {
    for (int a = 0; a < TR_ARRAYS; a++) {
        char name[TR_PATH_BYTES];
        tr_entry entry = entry_of(job, a * job->ntensors + run->tensor);
        tr_h5_name(name, &entry);
        hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
        int rc = dataset < 0 ? -1
                             : tr_h5_transfer(dataset, TR_WRITE, list, &run->box, run->first,
                                              run->count, tr_piece_array(run, a));
        if (dataset >= 0) H5Dclose(dataset);
        if (rc < 0)
            return tr_h5_fail(TR_ERR_IO, "%s: writing %s failed (disk full?)", job->partial, name);
    }
    return TR_OK;
}

static tr_status write_pieces(const save_job *job, hid_t file) {
    if (tr_switch("TRIREME_FAIL_WRITE_RANK", -1) == tr_comm_rank(job->world))
        return tr_fail(TR_ERR_IO, "%s: writing failed on request", job->partial);
    hid_t list = H5Pcreate(H5P_DATASET_XFER);
    H5Pset_dxpl_mpio(list, H5FD_MPIO_INDEPENDENT);
    tr_status status = TR_OK;
    for (int64_t p = 0; p < job->npieces && status == TR_OK;) {
        tr_piece run;
        p += tr_pieces_merge(job->npieces - p, &job->pieces[p], &run);
        if (run.count > 0) status = write_run(job, file, list, &run);
    }
    H5Pclose(list);
    return status;
}

/* Puts what this host wrote on the disk part by part: one fsync of a large file on a slow disk
 * would give no sign of progress for longer than the watch allows. What goes wrong here, or is not
 * supported, the flush that follows tells. */
static void sync_parts(const save_job *job) {
    enum { PART = 1 << 26 };
    struct stat info;
    int fd = open(job->partial, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) != 0) info.st_size = 0;
    for (int64_t at = 0; at < info.st_size; at += PART) {
        sync_file_range(fd, at + PART, PART, SYNC_FILE_RANGE_WRITE); /* the next one is under way */
        sync_file_range(fd, at, PART,
                        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                            SYNC_FILE_RANGE_WAIT_AFTER);
        tr_watch_progress();
    }
    if (fd >= 0) close(fd);
}

/* Collective. HDF5's own collectives count as waiting. */
static tr_status write_data(const save_job *job) {
    TR_TRY(tr_agree(job->world, can_write(job)));
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_fapl_mpio(access, *(MPI_Comm *)tr_comm_mpi(job->world), MPI_INFO_NULL);
    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG);
    tr_watch_wait(true);
    hid_t file = H5Fopen(job->partial, H5F_ACC_RDWR, access);
    tr_watch_wait(false);
    H5Pclose(access);
    tr_status status = TR_OK;
    if (file < 0) status = tr_h5_fail(TR_ERR_IO, "%s: cannot be opened by all ranks", job->partial);
    status = tr_agree(job->world, status);
    if (status != TR_OK && file >= 0) /* others are not there to close it with us */
        tr_abort("%s: opened through MPI-IO by some ranks only", job->partial);
    TR_TRY(status);
    tr_watch_action("save: writing", -1);
    status = tr_agree(job->world, write_pieces(job, file));
    if (status == TR_OK) {
        tr_watch_action("save: to the disk", -1);
        sync_parts(job);
    }
    tr_watch_wait(true);
    if (status == TR_OK && H5Fflush(file, H5F_SCOPE_GLOBAL) < 0)
        status = tr_h5_fail(TR_ERR_IO, "%s: flush failed (disk full?)", job->partial);
    if (H5Fclose(file) < 0 && status == TR_OK)
        status = tr_h5_fail(TR_ERR_IO, "%s: close failed (disk full?)", job->partial);
    tr_watch_wait(false);
    return tr_agree(job->world, status);
}

static tr_status publish(const save_job *job) {
    TR_TRY(tr_folder_publish(job->directory, job->partial, job->state->step));
    tr_folder_clean(job->directory);
    return job->keep > 0 ? tr_folder_prune(job->directory, job->state->step, job->keep) : TR_OK;
}

/* A number that no other save has. */
static uint64_t new_attempt(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return ((uint64_t)now.tv_sec << 32 | (uint64_t)now.tv_nsec) ^ (uint64_t)getpid() << 40;
}

static tr_status save(save_job *job) {
    bool first = tr_comm_rank(job->world) == 0;
    tr_watch_action("save: checksums", -1);
    TR_TRY(tr_agree(job->world, check_job(job)));
    TR_TRY(tr_agree(job->world, sum_pieces(job)));
    tr_watch_action("save: making the file", -1);
    TR_TRY(tr_agree(job->world, first ? prepare(job) : TR_OK));
    TR_TRY(write_data(job));
    tr_watch_action("save: final name", -1);
    return tr_agree(job->world, first ? publish(job) : TR_OK);
}

tr_status tr_checkpoint_save(tr_comm *world, const char *directory, int64_t keep,
                             const tr_progress_state *state, int64_t ntensors,
                             const tr_tensor_info *tensors, int64_t npieces,
                             const tr_piece *pieces) {
    save_job job = {.world = world,
                    .directory = directory,
                    .state = state,
                    .ntensors = ntensors,
                    .npieces = npieces,
                    .keep = keep,
                    .tensors = tensors,
                    .pieces = pieces};
    uint64_t attempt = new_attempt();
    tr_end(tr_broadcast_begin(world, NULL, 0, &attempt, sizeof attempt));
    tr_h5_begin();
    tr_folder_partial(job.partial, sizeof job.partial, directory, state->step, attempt);
    job.sums = calloc((size_t)(2 * TR_ARRAYS * ntensors) + 1, sizeof *job.sums);
    tr_status status =
        tr_agree(world, job.sums ? TR_OK : tr_fail(TR_ERR_INTERNAL, "out of memory saving"));
    if (status == TR_OK) status = save(&job);
    if (status != TR_OK) {
        if (tr_comm_rank(world) == 0) tr_folder_clean(directory);
        tr_end(tr_barrier_begin(world)); /* nobody sees the failed file after this returns */
    }
    free(job.sums);
    tr_h5_end();
    return status;
}
