/* format.h - the file's layout, and the HDF5 helpers that save, load and the commands share. Floor:
 * checkpoint. Internal to this folder; the layout is described in checkpoints/README.md.
 *
 * HDF5 must be started after MPI: it then ends itself in MPI_Finalize. Every entry point calls
 * tr_h5_begin, and nothing else of the program touches HDF5. */
#pragma once
#include <hdf5.h>

#include "checkpoint/store.h"

#define TR_FORMAT "trireme-checkpoint"
enum { TR_FORMAT_VERSION = 1, TR_ARRAYS = 3, TR_PATH_BYTES = 4096 };

/* Groups of the three arrays of a tensor: the master, first and second moment. */
extern const char *const tr_array_group[TR_ARRAYS];

/* One dataset: a tensor's master or moment. */
typedef struct {
    int array; /* 0 master, 1 first moment, 2 second moment */
    tr_tensor_info info;
    uint64_t checksum; /* as the file says */
} tr_entry;

int64_t tr_tensor_elems(const tr_tensor_info *info);

/* Local. "67 x 32"; "damaged" for a negative ndim. */
void tr_shape_text(char *out, size_t bytes, const tr_tensor_info *info);

/* The master, m or v of a piece; NULL when it is not wanted. */
static inline void *tr_piece_array(const tr_piece *piece, int array) {
    return array == 0 ? piece->master : array == 1 ? piece->m : piece->v;
}

/* Local. TR_ERR_INTERNAL when a piece leaves its tensor or its box. */
tr_status tr_pieces_check(int64_t ntensors, const tr_tensor_info *tensors, int64_t npieces,
                          const tr_piece *pieces);

/* Local. The length of the longest start of pieces[0..npieces) that is one run in the tensor and
 * in all three arrays: *run_p is that run. */
int64_t tr_pieces_merge(int64_t npieces, const tr_piece *pieces, tr_piece *run_p);

/* Local. Around everything that an entry point asks of HDF5: starts it when need be, and its errors
 * go into tr_h5_fail's message, not to standard error. (Outside, no handler may be left: HDF5 would
 * print at exit what failed opens left behind.) */
void tr_h5_begin(void);
void tr_h5_end(void);

/* Local. tr_fail with the text and, behind it, what HDF5 said first since tr_h5_begin. */
tr_status tr_h5_fail(tr_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Local. "/model/name". */
void tr_h5_name(char out[TR_PATH_BYTES], const tr_entry *entry);

/* Local. Opens for reading, without MPI: a damaged file cannot leave ranks waiting for each other.
 * TR_ERR_MISSING, TR_ERR_IO (permission), TR_ERR_DATA (cut, or not HDF5). */
tr_status tr_h5_open(const char *path, hid_t *file_p);

/* Local. Scalar attributes. Signed and unsigned numbers are 64-bit, little endian. < 0: failed. */
int tr_h5_put_i64(hid_t object, const char *name, int64_t value);
int tr_h5_put_u64(hid_t object, const char *name, uint64_t value);
int tr_h5_get_i64(hid_t object, const char *name, int64_t *value);
int tr_h5_get_u64(hid_t object, const char *name, uint64_t *value);

/* Local. Moves the run [first, first + count) of `box` between data[count] and an open dataset, by
 * independent calls of at most 1 GiB. < 0: failed. */
typedef enum { TR_READ, TR_WRITE } tr_direction;
int tr_h5_transfer(hid_t dataset, tr_direction direction, hid_t transfer_list, const tr_box *box,
                   int64_t first, int64_t count, float *data);

/* Local. The state of an open file, checked against its checksum. TR_ERR_DATA. */
tr_status tr_state_read(hid_t file, const char *path, tr_progress_state *state);

/* Local. Shape and checksum of the entry's dataset into *entry. < 0: it is not there, damaged, or
 * not a float32 tensor. */
int tr_entry_read(hid_t file, tr_entry *entry);

/* Collective on world. sums[nentries] holds checksums summed over this rank's part of the entries
 * that `again` does not mark. Reads the marked ones, each rank a disjoint part of about equal size,
 * and compares every sum with the entry's checksum (a rank needs those of its tr_block_of the
 * entries). bad[nentries], the same on all ranks: 1 where the data or its checksum is damaged (or
 * ndim is negative, which must not be marked). */
tr_status tr_entries_verify(tr_comm *world, hid_t file, int64_t nentries, const tr_entry *entries,
                            const bool *again, int64_t *sums, int32_t *bad);
