/* place.c - opens this rank's device. Floor: train. */
#include "train/place.h"

#include "base/heap.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool tr_place_shared(int ranks, const int *node, const char (*identity)[TR_IDENTITY_BYTES],
                     int pair[2]) {
    for (int b = 1; b < ranks; b++)
        for (int a = 0; a < b; a++) {
            if (!*identity[a] || node[a] != node[b] || strcmp(identity[a], identity[b]) != 0)
                continue;
            pair[0] = a;
            pair[1] = b;
            return true;
        }
    return false;
}

/* The same on all ranks. */
static tr_status check_shared(const tr_config *config, tr_comm *world, const tr_device *device) {
    int ranks = tr_comm_size(world), pair[2];
    char(*identity)[TR_IDENTITY_BYTES] = tr_heap_alloc(ranks, sizeof *identity);
    int *node = tr_heap_alloc(ranks, sizeof *node);
    snprintf(identity[tr_comm_rank(world)], TR_IDENTITY_BYTES, "%s", device->identity);
    tr_end(tr_all_gather_begin(world, NULL, TR_U8, identity, TR_IDENTITY_BYTES));
    for (int r = 0; r < ranks; r++) node[r] = tr_comm_node_of(world, r);
    tr_status status = TR_OK;
    bool shared = tr_place_shared(ranks, node, (const char(*)[TR_IDENTITY_BYTES])identity, pair);
    if (shared && config->run.collectives == TR_COLLECTIVES_NCCL)
        status = tr_fail(TR_ERR_USAGE,
                         "ranks %d and %d, on one node, would share GPU %s, and NCCL wants a GPU "
                         "for each; start as many ranks a node as it has GPUs, or add --set "
                         "run.collectives=mpi",
                         pair[0], pair[1], identity[pair[0]]);
    else if (shared && config->run.device == TR_DEVICE_CUDA)
        tr_warn("ranks %d and %d share GPU %s: each waits for the other", pair[0], pair[1],
                identity[pair[0]]);
    free(identity);
    free(node);
    return status;
}

tr_status tr_place_open(const tr_config *config, tr_comm *world, tr_device **device_p) {
    char *name = tr_config_value(config, "run.device");
    tr_device_wish wish = {.name = name,
                           .local_rank = tr_comm_local_rank(world),
                           .fabric = config->run.collectives == TR_COLLECTIVES_NCCL &&
                                     tr_comm_size(world) > 1,
                           .limit_seconds = (double)config->training.watchdog_seconds,
                           .fatal = tr_abort_with};
    tr_device *device = tr_device_open(&wish);
    free(name);
    tr_status status = tr_agree(world, device ? TR_OK : tr_error_status());
    if (status == TR_OK) status = check_shared(config, world, device);
    if (status != TR_OK) {
        tr_device_destroy(device);
        return status;
    }
    *device_p = device;
    return TR_OK;
}
