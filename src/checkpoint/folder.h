/* folder.h - the files of a checkpoint folder: names, room, old ones, durable renaming. Floor:
 * checkpoint. Internal to this folder. Everything here is local; saving calls it on rank 0. */
#pragma once
#include "checkpoint/format.h"

/* "directory/.step-00000100.h5.partial-ATTEMPT": where a save writes. Open MPI locks a file by its
 * name alone, for all jobs of a node, and a job that is killed in between leaves it locked for
 * ever: so no two saves ever use one name. */
void tr_folder_partial(char *out, size_t bytes, const char *directory, int64_t step,
                       uint64_t attempt);

/* Steps of step-*.h5 in the directory, newest first; none when it does not exist. */
tr_status tr_folder_steps(const char *directory, int64_t **steps_p, int64_t *count_p);

/* TR_ERR_USAGE if the path of a checkpoint is a folder, naming the newest one in it. */
tr_status tr_folder_refuse(const char *path);

/* Makes the directory and its parents. TR_ERR_IO. */
tr_status tr_folder_make(const char *directory);

/* Removes what interrupted saves (and MPI-IO's lock tests) left: .step-*.h5.partial*. */
void tr_folder_clean(const char *directory);

/* TR_ERR_IO unless the file system has `bytes` free. */
tr_status tr_folder_room(const char *directory, int64_t bytes);

/* fsync of the partial file, rename to its final name, fsync of the directory. TR_ERR_IO. */
tr_status tr_folder_publish(const char *directory, const char *partial, int64_t step);

/* Of the steps up to `newest`, removes all but the last `keep`. Later steps (left by a run that
 * went back) are not touched. */
tr_status tr_folder_prune(const char *directory, int64_t newest, int64_t keep);
