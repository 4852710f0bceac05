/* pieces.c - what a rank holds of the tensors: checked, and put together into long runs. Floor:
 * checkpoint. */
#include <inttypes.h>
#include <stdio.h>

#include "checkpoint/format.h"

int64_t tr_tensor_elems(const tr_tensor_info *info) {
    int64_t elems = 1;
    for (int d = 0; d < info->ndim; d++) elems *= info->shape[d];
    return elems;
}

void tr_shape_text(char *out, size_t bytes, const tr_tensor_info *info) {
    snprintf(out, bytes, info->ndim < 0 ? "damaged" : "one number");
    for (int d = 0, used = 0; d < info->ndim && used < (int)bytes; d++)
        used += snprintf(out + used, bytes - (size_t)used, "%s%" PRId64, d ? " x " : "",
                         info->shape[d]);
}

static bool piece_fits(const tr_piece *piece, const tr_tensor_info *info) {
    const tr_box *box = &piece->box;
    if (box->ndim != info->ndim) return false;
    for (int d = 0; d < box->ndim; d++)
        if (box->offset[d] < 0 || box->extent[d] < 0 ||
            box->offset[d] + box->extent[d] > info->shape[d])
            return false;
    return piece->first >= 0 && piece->count >= 0 &&
           piece->first + piece->count <= tr_box_elems(box);
}

tr_status tr_pieces_check(int64_t ntensors, const tr_tensor_info *tensors, int64_t npieces,
                          const tr_piece *pieces) {
    for (int64_t p = 0; p < npieces; p++) {
        int64_t t = pieces[p].tensor;
        if (t < 0 || t >= ntensors)
            return tr_fail(TR_ERR_INTERNAL,
                           "piece %" PRId64 " is of tensor %" PRId64 " of %" PRId64, p, t,
                           ntensors);
        if (!piece_fits(&pieces[p], &tensors[t]))
            return tr_fail(TR_ERR_INTERNAL, "piece %" PRId64 " leaves its tensor %s", p,
                           tensors[t].name);
    }
    return TR_OK;
}

static bool same_box(const tr_box *a, const tr_box *b) {
    for (int d = 0; d < a->ndim; d++)
        if (a->offset[d] != b->offset[d] || a->extent[d] != b->extent[d]) return false;
    return true;
}

static bool follows(const void *next, const void *data, int64_t count, tr_dtype t) {
    return data ? next == (const char *)data + (size_t)count * tr_dtype_bytes(t) : !next;
}

int64_t tr_pieces_merge(int64_t npieces, const tr_piece *pieces, tr_piece *run_p) {
    tr_piece run = pieces[0];
    int64_t taken = 1;
    for (; taken < npieces; taken++) {
        const tr_piece *next = &pieces[taken];
        if (next->tensor != run.tensor || next->first != run.first + run.count ||
            !same_box(&next->box, &run.box) || next->master_type != run.master_type ||
            !follows(next->master, run.master, run.count, run.master_type) ||
            !follows(next->m, run.m, run.count, TR_F32) ||
            !follows(next->v, run.v, run.count, TR_F32))
            break;
        run.count += next->count;
    }
    *run_p = run;
    return taken;
}
