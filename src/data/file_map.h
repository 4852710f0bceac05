/* file_map.h - a whole file as read-only memory. Floor: data. */
#pragma once
#include "base/status.h"

typedef struct {
    const uint8_t *bytes; /* [size]; NULL when size is 0 */
    int64_t size;
} tr_file_map;

/* Local. Maps a regular file. TR_ERR_MISSING when there is none, TR_ERR_DATA for a directory or a
 * pipe, TR_ERR_IO when it cannot be read. A file cut after this point ends the process (SIGBUS). */
tr_status tr_file_map_open(const char *path, tr_file_map *map_p);
/* Local. Says that a file will be read here and there, so that the system does not read ahead (some
 * do by 8 MiB, all of it in vain). */
void tr_file_map_expect_jumps(const tr_file_map *map);
void tr_file_map_close(tr_file_map *map); /* harmless on a zeroed or closed map */
