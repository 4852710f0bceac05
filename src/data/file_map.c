/* file_map.c - files as memory. Floor: data. */
#include "data/file_map.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static tr_status fail_errno(const char *path) {
    if (errno == ENOENT || errno == ENOTDIR)
        return tr_fail(
            TR_ERR_MISSING,
            "%s: no such file; check the path, which is relative to the working directory", path);
    return tr_fail(TR_ERR_IO, "%s: cannot read it: %s", path, strerror(errno));
}

tr_status tr_file_map_open(const char *path, tr_file_map *map_p) {
    struct stat st;
    if (stat(path, &st) != 0) return fail_errno(path);
    if (!S_ISREG(st.st_mode))
        return tr_fail(TR_ERR_DATA, "%s: %s, not a file; name regular files", path,
                       S_ISDIR(st.st_mode) ? "a directory" : "a pipe or device");
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fail_errno(path);
    tr_file_map map = {0};
    tr_status status = TR_OK;
    if (fstat(fd, &st) != 0) {
        status = fail_errno(path);
    } else if (st.st_size > 0) {
        void *memory = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (memory == MAP_FAILED)
            status = fail_errno(path);
        else
            map = (tr_file_map){memory, (int64_t)st.st_size};
    }
    close(fd);
    if (status == TR_OK) *map_p = map;
    return status;
}

void tr_file_map_expect_jumps(const tr_file_map *map) {
    if (map->bytes) madvise((void *)map->bytes, (size_t)map->size, MADV_RANDOM);
}

void tr_file_map_close(tr_file_map *map) {
    if (map->bytes) munmap((void *)map->bytes, (size_t)map->size);
    *map = (tr_file_map){0};
}
