/* verify.c - checksums against the file's. Floor: checkpoint. */
#include <stdlib.h>
#include <string.h>

#include "checkpoint/checksum.h"
#include "checkpoint/format.h"

int tr_entry_read(hid_t file, tr_entry *entry) {
    char name[TR_PATH_BYTES];
    hsize_t shape[H5S_MAX_RANK];
    tr_h5_name(name, entry);
    hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
    if (dataset < 0) return -1;
    hid_t space = H5Dget_space(dataset), type = H5Dget_type(dataset);
    int ndim = space < 0 ? -1 : H5Sget_simple_extent_ndims(space);
    int rc = -1;
    if (ndim >= 0 && ndim <= TR_MAX_DIM && H5Tequal(type, H5T_IEEE_F32LE) > 0 &&
        H5Sget_simple_extent_dims(space, shape, NULL) == ndim) {
        entry->info.ndim = ndim;
        for (int d = 0; d < ndim; d++) entry->info.shape[d] = (int64_t)shape[d];
        rc = tr_h5_get_u64(dataset, "checksum", &entry->checksum);
    }
    if (type >= 0) H5Tclose(type);
    if (space >= 0) H5Sclose(space);
    H5Dclose(dataset);
    return rc;
}

enum { TR_VERIFY_ELEMS = 1 << 20 }; /* read and summed at a time: stays in the cache */

/* Sums elements [first, first + count) of an entry. < 0: cannot be read. */
static int sum_range(hid_t file, const tr_entry *entry, int64_t first, int64_t count, float *buffer,
                     int64_t *sum) {
    char name[TR_PATH_BYTES];
    tr_box whole = {.ndim = entry->info.ndim};
    memcpy(whole.extent, entry->info.shape, sizeof whole.extent);
    tr_h5_name(name, entry);
    hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
    int rc = dataset < 0 ? -1 : 0;
    uint64_t part = 0;
    for (int64_t n; count > 0 && rc >= 0; first += n, count -= n) {
        n = count < TR_VERIFY_ELEMS ? count : TR_VERIFY_ELEMS;
        rc = tr_h5_transfer(dataset, TR_READ, H5P_DEFAULT, &whole, first, n, buffer);
        part += tr_checksum(first, buffer, n);
    }
    if (dataset >= 0) H5Dclose(dataset);
    *sum = (int64_t)((uint64_t)*sum + part);
    return rc;
}

/* This rank's part of the marked entries laid end to end. */
static void sum_part(tr_comm *world, hid_t file, int64_t nentries, const tr_entry *entries,
                     const bool *again, float *buffer, int64_t *sums, int32_t *bad) {
    int64_t total = 0, at = 0;
    for (int64_t e = 0; e < nentries; e++)
        if (again[e]) total += tr_tensor_elems(&entries[e].info);
    tr_range mine = tr_block_of(total, tr_comm_size(world), tr_comm_rank(world));
    for (int64_t e = 0; e < nentries; e++) {
        if (!again[e]) continue;
        int64_t n = tr_tensor_elems(&entries[e].info);
        int64_t first = mine.first > at ? mine.first - at : 0;
        int64_t end = mine.first + mine.count - at < n ? mine.first + mine.count - at : n;
        if (first < end && sum_range(file, &entries[e], first, end - first, buffer, &sums[e]) < 0)
            bad[e] = 1;
        at += n;
    }
}

tr_status tr_entries_verify(tr_comm *world, hid_t file, int64_t nentries, const tr_entry *entries,
                            const bool *again, int64_t *sums, int32_t *bad) {
    float *buffer = malloc(TR_VERIFY_ELEMS * sizeof *buffer);
    TR_TRY(tr_agree(world,
                    buffer ? TR_OK : tr_fail(TR_ERR_INTERNAL, "out of memory for verification")));
    memset(bad, 0, (size_t)nentries * sizeof *bad);
    sum_part(world, file, nentries, entries, again, buffer, sums, bad);
    free(buffer);
    tr_end(tr_all_reduce_begin(world, NULL, TR_SUM, TR_I64, sums, nentries));
    tr_range mine = tr_block_of(nentries, tr_comm_size(world), tr_comm_rank(world));
    for (int64_t e = mine.first; e < mine.first + mine.count; e++)
        if (entries[e].info.ndim < 0 || (uint64_t)sums[e] != entries[e].checksum) bad[e] = 1;
    tr_end(tr_all_reduce_begin(world, NULL, TR_MAX, TR_I32, bad, nentries));
    return TR_OK;
}
