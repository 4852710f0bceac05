/* folder.c - the files of a checkpoint folder. Floor: checkpoint. */
#include "checkpoint/folder.h"

#include "base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

void tr_checkpoint_path(char *out, size_t bytes, const char *directory, int64_t step) {
    snprintf(out, bytes, "%s/step-%08" PRId64 ".h5", directory, step);
}

void tr_folder_partial(char *out, size_t bytes, const char *directory, int64_t step,
                       uint64_t attempt) {
    snprintf(out, bytes, "%s/.step-%08" PRId64 ".h5.partial-%016" PRIx64, directory, step, attempt);
}

/* The step of exactly "step-<at least 8 digits>.h5", or -1. */
static int64_t step_of_name(const char *name) {
    char again[64];
    if (strncmp(name, "step-", 5) != 0) return -1;
    int64_t step = strtoll(name + 5, NULL, 10);
    snprintf(again, sizeof again, "step-%08" PRId64 ".h5", step);
    return step >= 0 && strcmp(again, name) == 0 ? step : -1;
}

static int newest_first(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

tr_status tr_folder_steps(const char *directory, int64_t **steps_p, int64_t *count_p) {
    int64_t count = 0, capacity = 16, *steps = NULL;
    DIR *folder = opendir(directory);
    if (!folder && errno != ENOENT)
        return tr_fail(TR_ERR_IO,
                       "%s: cannot be listed: %s; checkpoint.directory must name a folder that "
                       "this user may read",
                       directory, strerror(errno));
    steps = malloc((size_t)capacity * sizeof *steps);
    for (struct dirent *e; folder && steps && (e = readdir(folder));) {
        int64_t step = step_of_name(e->d_name);
        if (step < 0) continue;
        if (count == capacity) {
            capacity *= 2;
            int64_t *more = realloc(steps, (size_t)capacity * sizeof *steps);
            if (!more) free(steps);
            steps = more;
            if (!steps) break;
        }
        steps[count++] = step;
    }
    if (folder) closedir(folder);
    if (!steps) return tr_fail(TR_ERR_INTERNAL, "out of memory listing %s", directory);
    qsort(steps, (size_t)count, sizeof *steps, newest_first);
    *steps_p = steps;
    *count_p = count;
    return TR_OK;
}

tr_status tr_folder_refuse(const char *path) {
    struct stat info;
    char newest[TR_PATH_BYTES];
    int64_t *steps, count;
    if (stat(path, &info) != 0 || !S_ISDIR(info.st_mode)) return TR_OK;
    TR_TRY(tr_folder_steps(path, &steps, &count));
    if (count > 0) tr_checkpoint_path(newest, sizeof newest, path, steps[0]);
    free(steps);
    if (count == 0)
        return tr_fail(TR_ERR_USAGE, "%s: is a folder without checkpoints; name a step-*.h5", path);
    return tr_fail(TR_ERR_USAGE, "%s: is a folder; name a checkpoint in it; the newest is %s", path,
                   newest);
}

static tr_status sync_path(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int rc = fd < 0 ? -1 : fsync(fd), why = errno;
    if (fd >= 0) close(fd);
    if (rc != 0)
        return tr_fail(TR_ERR_IO, "%s: not safely on disk: fsync: %s", path, strerror(why));
    return TR_OK;
}

tr_status tr_folder_make(const char *directory) {
    if (strlen(directory) + 64 > TR_PATH_BYTES)
        return tr_fail(TR_ERR_USAGE, "checkpoint.directory is too long: %.80s...", directory);
    return tr_file_make_folder(directory, "checkpoint.directory");
}

void tr_folder_clean(const char *directory) {
    char path[TR_PATH_BYTES];
    DIR *folder = opendir(directory);
    if (!folder) return;
    for (struct dirent *e; (e = readdir(folder));) {
        if (strncmp(e->d_name, ".step-", 6) != 0 || !strstr(e->d_name, ".h5.partial")) continue;
        int n = snprintf(path, sizeof path, "%s/%s", directory, e->d_name);
        if (n > 0 && (size_t)n < sizeof path) unlink(path);
    }
    closedir(folder);
}

tr_status tr_folder_room(const char *directory, int64_t bytes) {
    struct statvfs fs;
    if (statvfs(directory, &fs) != 0) return TR_OK; /* unknown: the write itself will tell */
    uint64_t room = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (room < (uint64_t)bytes)
        return tr_fail(TR_ERR_IO,
                       "%s: a checkpoint takes %.1f MiB and the disk has %.1f MiB free: make room, "
                       "or lower checkpoint.keep",
                       directory, (double)bytes / 0x1p20, (double)room / 0x1p20);
    return TR_OK;
}

tr_status tr_folder_publish(const char *directory, const char *partial, int64_t step) {
    char path[TR_PATH_BYTES];
    tr_checkpoint_path(path, sizeof path, directory, step);
    TR_TRY(sync_path(partial));
    if (rename(partial, path) != 0)
        return tr_fail(
            TR_ERR_IO,
            "%s: cannot take its final name: %s; see what lies in its place, and whether "
            "this user may write there",
            path, strerror(errno));
    return sync_path(directory);
}

tr_status tr_folder_prune(const char *directory, int64_t newest, int64_t keep) {
    int64_t *steps, count, kept = 0;
    TR_TRY(tr_folder_steps(directory, &steps, &count));
    tr_status status = TR_OK;
    for (int64_t i = 0; i < count; i++) {
        char path[TR_PATH_BYTES];
        if (steps[i] > newest || kept++ < keep) continue;
        tr_checkpoint_path(path, sizeof path, directory, steps[i]);
        if (unlink(path) != 0 && errno != ENOENT)
            status =
                tr_fail(TR_ERR_IO,
                        "%s: old checkpoint cannot be removed: %s; remove it, or keep all with "
                        "checkpoint.keep=0",
                        path, strerror(errno));
    }
    free(steps);
    return status;
}
