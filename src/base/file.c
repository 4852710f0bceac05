/* file.c - files that a user names. Floor: base. */
#include "base/file.h"

#include <errno.h>
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
