/* h5.c - the few HDF5 calls of a checkpoint, with errors as short texts. Floor: checkpoint. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/switch.h"
#include "checkpoint/folder.h"
#include "dist/watch.h"

const char *const tr_array_group[TR_ARRAYS] = {"/model", "/optimizer/exp_avg",
                                               "/optimizer/exp_avg_sq"};

/* What HDF5 said first since tr_h5_begin: its own stack forgets at the next call. */
static char said[300];

/* The driver's texts run over lines, with the system's error between quotes: that alone is kept. */
static herr_t keep_innermost(unsigned n, const H5E_error2_t *error, void *unused) {
    (void)unused;
    if (n != 0 || !error->desc) return 0;
    const char *system_error = strstr(error->desc, "error message = '");
    const char *text = system_error ? system_error + 17 : error->desc;
    snprintf(said, sizeof said, "%.*s", (int)strcspn(text, "'\n"), text);
    return 0;
}

static herr_t listen(hid_t stack, void *unused) {
    if (!*said) H5Ewalk2(stack, H5E_WALK_UPWARD, keep_innermost, unused);
    return 0;
}

void tr_h5_begin(void) {
    H5open();
    H5Eset_auto2(H5E_DEFAULT, listen, NULL);
    *said = 0;
}

void tr_h5_end(void) {
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
}

tr_status tr_h5_fail(tr_status status, const char *format, ...) {
    char text[TR_PATH_BYTES + 512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return tr_fail(status, *said ? "%s (HDF5: %s)" : "%s", text, said);
}

void tr_h5_name(char out[TR_PATH_BYTES], const tr_entry *entry) {
    snprintf(out, TR_PATH_BYTES, "%s/%s", tr_array_group[entry->array], entry->info.name);
}

tr_status tr_h5_open(const char *path, hid_t *file_p) {
    TR_TRY(tr_folder_refuse(path));
    TR_TRY(tr_file_check(path, "checkpoint"));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return tr_fail(TR_ERR_IO, "%s: cannot be opened for reading: %s", path, strerror(errno));
    close(fd);
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG);
    H5Pset_file_locking(access, false, true);
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, access);
    H5Pclose(access);
    if (file < 0)
        return tr_h5_fail(TR_ERR_DATA, "%s: damaged, cut short or not a checkpoint", path);
    *file_p = file;
    return TR_OK;
}

static int put_number(hid_t object, const char *name, hid_t type, const void *value) {
    hid_t space = H5Screate(H5S_SCALAR);
    hid_t attribute = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    int rc = attribute < 0 ? -1 : H5Awrite(attribute, type, value);
    if (attribute >= 0) H5Aclose(attribute);
    H5Sclose(space);
    return rc;
}

/* The stored type and extent must be what put_number writes: a larger one would overrun *value. */
static int get_number(hid_t object, const char *name, hid_t type, void *value) {
    hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
    if (attribute < 0) return -1;
    hid_t stored = H5Aget_type(attribute), space = H5Aget_space(attribute);
    int rc = -1;
    if (H5Tequal(stored, type) > 0 && H5Sget_simple_extent_npoints(space) == 1)
        rc = H5Aread(attribute, type, value);
    H5Sclose(space);
    H5Tclose(stored);
    H5Aclose(attribute);
    return rc;
}

int tr_h5_put_i64(hid_t object, const char *name, int64_t value) {
    return put_number(object, name, H5T_STD_I64LE, &value);
}
int tr_h5_put_u64(hid_t object, const char *name, uint64_t value) {
    return put_number(object, name, H5T_STD_U64LE, &value);
}
int tr_h5_get_i64(hid_t object, const char *name, int64_t *value) {
    return get_number(object, name, H5T_STD_I64LE, value);
}
int tr_h5_get_u64(hid_t object, const char *name, uint64_t *value) {
    return get_number(object, name, H5T_STD_U64LE, value);
}

static int transfer_box(hid_t dataset, tr_direction direction, hid_t list, hid_t space,
                        const tr_box *box, float *data) {
    hsize_t offset[TR_MAX_DIM], extent[TR_MAX_DIM], elems = (hsize_t)tr_box_elems(box);
    for (int d = 0; d < box->ndim; d++) {
        offset[d] = (hsize_t)box->offset[d];
        extent[d] = (hsize_t)box->extent[d];
    }
    if (H5Sselect_hyperslab(space, H5S_SELECT_SET, offset, NULL, extent, NULL) < 0) return -1;
    hid_t memory = H5Screate_simple(1, &elems, NULL);
    int rc = direction == TR_WRITE ? H5Dwrite(dataset, H5T_IEEE_F32LE, memory, space, list, data)
                                   : H5Dread(dataset, H5T_IEEE_F32LE, memory, space, list, data);
    H5Sclose(memory);
    return rc;
}

int tr_h5_transfer(hid_t dataset, tr_direction direction, hid_t transfer_list, const tr_box *box,
                   int64_t first, int64_t count, float *data) {
    const int64_t limit = tr_switch("TRIREME_IO_LIMIT", INT64_C(1) << 28); /* 1 GiB */
    hid_t space = H5Dget_space(dataset);
    if (space < 0) return -1;
    int rc = 0;
    for (int64_t done = 0; done < count && rc >= 0; done += limit) {
        tr_box cut[2 * TR_MAX_DIM - 1];
        int64_t n = count - done < limit ? count - done : limit;
        tr_watch_progress();
        int cuts = tr_box_cut(box, first + done, n, cut);
        float *at = data + done;
        for (int c = 0; c < cuts && rc >= 0; c++) {
            rc = transfer_box(dataset, direction, transfer_list, space, &cut[c], at);
            at += tr_box_elems(&cut[c]);
        }
    }
    H5Sclose(space);
    return rc;
}
