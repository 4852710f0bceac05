/* inventory.h - a model's tensors as checkpoints see them, and this rank's runs of them in host
 * memory. Floor: train. */
#pragma once
#include "checkpoint/store.h"
#include "model/param.h"

typedef struct {
    tr_tensor_info *tensors;
    tr_piece *pieces;
    int64_t ntensors, npieces;
    /* state: copies of what lies in device memory, see inventory.c */
    const tr_registry *registry;
    int arrays; /* 1: masters; 3: moments too */
    void *copies;
    size_t copies_bytes;
} tr_inventory;

/* Local. What this rank owns of each tensor, its second moments too with `moments`; tied copies are
 * left to the first stage. Where device memory is not the host's the pieces are in memory of this
 * inventory: contents undefined until tr_inventory_download. */
tr_inventory tr_inventory_take(const tr_registry *registry, bool moments);
void tr_inventory_free(tr_inventory *inventory);

/* Local. From and to the device; nothing on the CPU. Nothing is being gathered (tr_units_settle).
 */
void tr_inventory_download(const tr_inventory *inventory);
void tr_inventory_upload(const tr_inventory *inventory);
