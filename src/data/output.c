/* output.c - writing files that are never seen half done. Floor: data. */
#include "data/output.h"

#include "base/heap.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BUFFER_BYTES = 1 << 20 };

static tr_status fail_errno(const tr_output *out, const char *what) {
    bool full = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
    return tr_fail(TR_ERR_IO, "%s: cannot %s it: %s%s", out->path, what, strerror(errno),
                   full ? "; make room or write elsewhere (nothing was left behind)" : "");
}

tr_status tr_output_open(const char *path, tr_output *out) {
    struct stat st;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return tr_fail(TR_ERR_USAGE, "%s: not a regular file; name the file to write", path);
    tr_output o = {.path = tr_heap_copy(path)};
    o.temporary = tr_heap_format("%s.tmp", path);
    o.fd = open(o.temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (o.fd < 0) {
        tr_status status = fail_errno(&o, "create");
        free(o.path);
        free(o.temporary);
        return status;
    }
    o.buffer = tr_heap_alloc(BUFFER_BYTES, 1);
    *out = o;
    return TR_OK;
}

static tr_status write_all(tr_output *out, const uint8_t *data, int64_t bytes, int64_t offset) {
    while (bytes > 0) {
        ssize_t n = pwrite(out->fd, data, (size_t)bytes, offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return fail_errno(out, "write");
        data += n;
        offset += n;
        bytes -= n;
    }
    return TR_OK;
}

static tr_status flush(tr_output *out) {
    TR_TRY(write_all(out, out->buffer, out->filled, out->bytes - out->filled));
    out->filled = 0;
    return TR_OK;
}

tr_status tr_output_write(tr_output *out, const void *data, int64_t bytes) {
    const uint8_t *from = data;
    while (bytes > 0) {
        int64_t n = BUFFER_BYTES - out->filled;
        if (n > bytes) n = bytes;
        memcpy(out->buffer + out->filled, from, (size_t)n);
        out->filled += n;
        out->bytes += n;
        from += n;
        bytes -= n;
        if (out->filled == BUFFER_BYTES) TR_TRY(flush(out));
    }
    return TR_OK;
}

tr_status tr_output_patch(tr_output *out, int64_t offset, const void *data, int64_t bytes) {
    TR_TRY(flush(out));
    return write_all(out, data, bytes, offset);
}

tr_status tr_output_finish(tr_output *out) {
    TR_TRY(flush(out));
    if (fsync(out->fd) != 0) return fail_errno(out, "sync");
    int fd = out->fd;
    out->fd = -1;
    return close(fd) == 0 ? TR_OK : fail_errno(out, "close");
}

static tr_status sync_directory(const tr_output *out) {
    const char *slash = strrchr(out->path, '/');
    char *folder = tr_heap_copy(slash ? out->path : ".");
    if (slash) folder[slash == out->path ? 1 : slash - out->path] = 0;
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(folder);
    /* Some file systems cannot sync a directory and say EINVAL: the rename stands all the same. */
    bool bad = fd < 0 || (fsync(fd) != 0 && errno != EINVAL);
    tr_status status = bad ? fail_errno(out, "sync the directory of") : TR_OK;
    if (fd >= 0) close(fd);
    return status;
}

tr_status tr_output_publish(tr_output *out) {
    if (rename(out->temporary, out->path) != 0) return fail_errno(out, "rename");
    free(out->temporary);
    out->temporary = NULL;
    return sync_directory(out);
}

void tr_output_close(tr_output *out) {
    if (!out->path) return;
    if (out->fd >= 0) close(out->fd);
    if (out->temporary) unlink(out->temporary);
    free(out->temporary);
    free(out->path);
    free(out->buffer);
    *out = (tr_output){0};
}
