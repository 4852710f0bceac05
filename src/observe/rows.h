/* rows.h - a file of JSON objects, one a line, in order of training steps. Floor: observe.
 *
 * Invariant: every line starts {"step":N and lines have growing N, so a resumed run can cut what
 * belongs to steps it is about to do again by looking at the first bytes of each line. */
#pragma once
#include "base/status.h"

#include <stdio.h>

typedef struct tr_rows tr_rows;

/* Local. Opens path for appending, made if it is not there. Lines of steps after `last_step` and
 * torn lines (no newline, or not what we write) are removed first: the rest is written beside it
 * and renamed over it, so a kill leaves the old file or the new one. TR_ERR_IO names the file. */
tr_status tr_rows_open(const char *path, int64_t last_step, tr_rows **rows_p);

/* Local. Begins the row of `step`, 1 or more: writes {"step":N. The caller adds ,"key":value pairs
 * to the stream, which is borrowed. */
FILE *tr_rows_begin(tr_rows *rows, int64_t step);
/* Local. Closes the object and hands the line to the system, so that it survives a kill. TR_ERR_IO
 * when the row or a part of it could not be written. */
tr_status tr_rows_end(tr_rows *rows);

/* Local. TR_ERR_IO when the last bytes could not be written. NULL-safe. */
tr_status tr_rows_close(tr_rows *rows);
