/* output.h - a file that appears whole or not at all. Floor: data.
 *
 * Written as PATH.tmp; finish makes it durable, publish gives it its name. Several files that
 * belong together are all finished before the first is published. */
#pragma once
#include "base/status.h"

typedef struct {
    char *path, *temporary; /* temporary is NULL once published */
    int fd;                 /* -1 once finished */
    uint8_t *buffer;
    int64_t filled; /* bytes in the buffer */
    int64_t bytes;  /* written so far, the buffer's included */
} tr_output;

/* Local. TR_ERR_USAGE when `path` is a directory, TR_ERR_IO when the file cannot be made. */
tr_status tr_output_open(const char *path, tr_output *out);
/* Local. Appends. TR_ERR_IO names the file and, on a full disk, the remedy; so do those below. */
tr_status tr_output_write(tr_output *out, const void *data, int64_t bytes);
/* Local. Writes over `bytes` bytes that were written before, at `offset`. */
tr_status tr_output_patch(tr_output *out, int64_t offset, const void *data, int64_t bytes);
/* Local. Flushes, syncs and closes; nothing can be written after it. */
tr_status tr_output_finish(tr_output *out);
/* Local. Renames, replacing what was at `path`, and syncs the directory. After finish. */
tr_status tr_output_publish(tr_output *out);
/* Local. Frees; removes what is not published. Harmless on a zeroed or closed one. */
void tr_output_close(tr_output *out);
