/* store.h - HDF5 checkpoints: logical global tensors, written and read by all ranks at once.
 * Floor: checkpoint. Knows tensors and runs of elements, not models: the trainer describes what is
 * where. The file's layout is documented in checkpoints/README.md. */
#pragma once
#include "dist/blocks.h"
#include "dist/comm.h"

/* One global tensor, the same list in the same order on every rank. */
typedef struct {
    const char *name;
    int ndim;
    int64_t shape[TR_MAX_DIM];
} tr_tensor_info;

/* A run of elements this rank holds: [first, first+count) of `box` flattened row-major. Host
 * memory; the three arrays are the master, first and second moment (NULL: not wanted). Over all
 * ranks the pieces of a save cover each tensor exactly once; pieces of a load may overlap, and the
 * master may be bfloat16, to which the file's values are rounded. */
typedef struct {
    int64_t tensor; /* index in the list */
    tr_box box;
    int64_t first, count;
    tr_dtype master_type; /* TR_F32; in a load also TR_BF16 */
    void *master;
    float *m, *v;
} tr_piece;

typedef struct {
    int64_t step, samples, tokens;
    int64_t updates; /* optimizer steps done (skipped ones not counted) */
    int64_t skipped_in_row;
    uint64_t data_fingerprint;
    char *config; /* resolved YAML; owned after a read */
} tr_progress_state;

/* Collective on world. Writes directory/step-%08d.h5 (the folder is made): free space is checked
 * first, all ranks write under a temporary name, then flush, rename, fsync the directory; then, of
 * the steps up to this one, all but the newest `keep` (0: all are kept) are removed. TR_ERR_IO
 * (disk full, no permission) leaves older ones as they were and no temporary file; TR_ERR_INTERNAL
 * names a tensor that the pieces do not cover exactly once. */
tr_status tr_checkpoint_save(tr_comm *world, const char *directory, int64_t keep,
                             const tr_progress_state *state, int64_t ntensors,
                             const tr_tensor_info *tensors, int64_t npieces,
                             const tr_piece *pieces);

/* Collective on world. Reads state (and, with npieces > 0 on any rank, pieces; every tensor's
 * checksum is verified over all ranks). `moments` false reads weights alone. TR_ERR_MISSING,
 * TR_ERR_DATA (damaged: names file and tensor), TR_ERR_USAGE (tensor list differs from the file's:
 * names the first). */
tr_status tr_checkpoint_state(tr_comm *world, const char *path, tr_progress_state *state);
tr_status tr_checkpoint_load(tr_comm *world, const char *path, bool moments, int64_t ntensors,
                             const tr_tensor_info *tensors, int64_t npieces,
                             const tr_piece *pieces);

/* Collective on world. The step numbers of directory/step-*.h5, newest first, the same on all
 * ranks; *count_p 0 when there are none. Caller frees *steps_p. */
tr_status tr_checkpoint_list(tr_comm *world, const char *directory, int64_t **steps_p,
                             int64_t *count_p);
void tr_checkpoint_path(char *out, size_t bytes, const char *directory, int64_t step);

/* The commands `trireme checkpoint info|verify PATH`; collective on world; print on rank 0. */
tr_status tr_checkpoint_info(tr_comm *world, const char *path, bool all);
tr_status tr_checkpoint_verify(tr_comm *world, const char *path);
