/* rows.c - JSON lines by step: cutting on open, appending. Floor: observe. */
#include "observe/rows.h"

#include "base/heap.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char row_start[] = "{\"step\":";

struct tr_rows {
    char *path;
    FILE *file;
};

static tr_status fail_io(const char *path, const char *what) {
    int reason = errno;
    const char *remedy = reason == ENOSPC || reason == EDQUOT
                             ? "; free some space, then run again to go on"
                             : "; check the folder run.directory names";
    return tr_fail(TR_ERR_IO, "%s: cannot %s: %s%s", path, what, strerror(reason), remedy);
}

/* The step of a whole line that tr_rows_begin and tr_rows_end wrote; 0 for anything else. */
static int64_t step_of_line(const char *line, size_t bytes) {
    size_t start = sizeof row_start - 1;
    if (bytes < start + 3 || memcmp(line + bytes - 2, "}\n", 2) != 0) return 0;
    if (memcmp(line, row_start, start) != 0 || memchr(line, 0, bytes)) return 0;
    char *end;
    long long step = strtoll(line + start, &end, 10);
    return step > 0 && (*end == ',' || *end == '}') ? step : 0;
}

/* Reads all of `in`; copies the lines to keep to `out` unless that is NULL. Returns how many lines
 * are not kept. */
static int64_t filter(FILE *in, FILE *out, int64_t last_step) {
    char *line = NULL;
    size_t room = 0;
    int64_t dropped = 0, newest = 0;
    for (ssize_t bytes; (bytes = getline(&line, &room, in)) >= 0;) {
        int64_t step = step_of_line(line, (size_t)bytes);
        if (step <= newest || step > last_step) {
            dropped++;
            continue;
        }
        newest = step;
        if (out) fwrite(line, 1, (size_t)bytes, out);
    }
    if (!feof(in) && !ferror(in))
        tr_out_of_memory("a line of over %zu bytes of the metrics is read; free some memory", room);
    free(line);
    return dropped;
}

/* Makes a rename in the folder of `path` durable. Some file systems refuse: nothing is lost then.
 */
static void sync_folder_of(const char *path) {
    const char *slash = strrchr(path, '/');
    char *folder =
        slash ? tr_heap_format("%.*s", (int)(slash - path + 1), path) : tr_heap_copy(".");
    int fd = open(folder, O_RDONLY | O_DIRECTORY);
    free(folder);
    if (fd < 0) return;
    fsync(fd);
    close(fd);
}

static tr_status replace_by_kept(FILE *in, const char *path, int64_t last_step) {
    char *temporary = tr_heap_format("%s.tmp", path);
    tr_status status = TR_OK;
    FILE *out = fopen(temporary, "w");
    if (!out) {
        status = fail_io(temporary, "create it");
    } else {
        rewind(in);
        filter(in, out, last_step);
        bool bad = ferror(in) || fflush(out) != 0 || ferror(out) || fsync(fileno(out)) != 0;
        if (bad) status = fail_io(temporary, "write it");
        fclose(out);
        if (status == TR_OK && rename(temporary, path) != 0)
            status = fail_io(path, "cut rows from it");
        if (status != TR_OK) unlink(temporary);
    }
    free(temporary);
    if (status == TR_OK) sync_folder_of(path);
    return status;
}

static tr_status cut(const char *path, int64_t last_step) {
    struct stat info;
    if (stat(path, &info) != 0) return errno == ENOENT ? TR_OK : fail_io(path, "open it");
    if (!S_ISREG(info.st_mode)) return TR_OK; /* a pipe or a device: there are no old rows */
    FILE *in = fopen(path, "r");
    if (!in) return fail_io(path, "open it");
    tr_status status = TR_OK;
    int64_t dropped = filter(in, NULL, last_step);
    if (ferror(in)) status = fail_io(path, "read it");
    if (status == TR_OK && dropped > 0) status = replace_by_kept(in, path, last_step);
    fclose(in);
    return status;
}

tr_status tr_rows_open(const char *path, int64_t last_step, tr_rows **rows_p) {
    TR_TRY(cut(path, last_step));
    FILE *file = fopen(path, "a");
    if (!file) return fail_io(path, "open it for writing");
    tr_rows *rows = tr_heap_alloc(1, sizeof *rows);
    *rows = (tr_rows){.path = tr_heap_copy(path), .file = file};
    *rows_p = rows;
    return TR_OK;
}

FILE *tr_rows_begin(tr_rows *rows, int64_t step) {
    fprintf(rows->file, "%s%lld", row_start, (long long)step);
    return rows->file;
}

tr_status tr_rows_end(tr_rows *rows) {
    fputs("}\n", rows->file);
    if (fflush(rows->file) != 0 || ferror(rows->file)) return fail_io(rows->path, "write it");
    return TR_OK;
}

tr_status tr_rows_close(tr_rows *rows) {
    if (!rows) return TR_OK;
    tr_status status = TR_OK;
    if (fclose(rows->file) != 0) status = fail_io(rows->path, "write it");
    free(rows->path);
    free(rows);
    return status;
}
