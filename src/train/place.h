/* place.h - which device each rank computes on. Floor: train. */
#pragma once
#include "config/config.h"
#include "dist/comm.h"
#include "kernels/device.h"

enum { TR_IDENTITY_BYTES = 64 };

/* Collective on world. The device of run.device for this rank, by its number on its node. Refuses,
 * on all ranks alike, what some rank has not, and GPUs that ranks would share under NCCL. */
tr_status tr_place_open(const tr_config *config, tr_comm *world, tr_device **device_p);

/* Local. Whether two of `ranks` ranks on one node have one identity (base/device.h; "" is none);
 * then the first such pair. */
bool tr_place_shared(int ranks, const int *node, const char (*identity)[TR_IDENTITY_BYTES],
                     int pair[2]);
