/* file.c - files that a user names. Floor: base. */
#include "base/file.h"

#include "base/heap.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

tr_status tr_file_check(const char *path, const char *what) {
    struct stat info;
    if (stat(path, &info) != 0) {
        if (errno != ENOENT && errno != ENOTDIR)
            return tr_fail(TR_ERR_IO, "%s: cannot be opened: %s", path, strerror(errno));
        return tr_fail(TR_ERR_MISSING,
                       "%s: there is no such %s; the path is relative to the working directory",
                       path, what);
    }
    if (S_ISREG(info.st_mode)) return TR_OK;
    return tr_fail(TR_ERR_USAGE, "%s: is a %s; name a %s", path,
                   S_ISDIR(info.st_mode) ? "folder" : "pipe or device", what);
}

static tr_status make(const char *path, const char *setting) {
    struct stat info;
    if (mkdir(path, 0777) == 0) return TR_OK;
    if (errno == EEXIST && stat(path, &info) == 0 && S_ISDIR(info.st_mode)) return TR_OK;
    return tr_fail(TR_ERR_IO,
                   "%s: cannot make this folder: %s; set %s to a place where you may write", path,
                   strerror(errno), setting);
}

tr_status tr_file_make_folder(const char *folder, const char *setting) {
    char *path = tr_heap_copy(folder);
    tr_status status = TR_OK;
    for (char *end = path + 1; status == TR_OK && end[-1]; end++) {
        char here = *end;
        if (here != '/' && here != 0) continue;
        *end = 0;
        status = make(path, setting);
        *end = here;
    }
    free(path);
    return status;
}
