/* nccl_fabric.h - NCCL as a device's fabric. Floor: kernels, internal to the module for GPUs. */
#pragma once
#include "base/fabric.h"

#include <stddef.h>

typedef struct {
    int ordinal;          /* the CUDA device */
    double limit_seconds; /* that joining, or what is next in a group's stream, may take; 0: any */
    double look_seconds;  /* between two looks of the watching thread; 0: there is none */
} tr_nccl_wish;

/* Local. NULL with a text if NCCL does not work here. What fails later ends the job through
 * tr_cuda_fatal, from any thread. `device` is borrowed. */
tr_fabric *tr_nccl_open(tr_device *device, const tr_nccl_wish *wish, char *text, size_t text_bytes);
/* Local. All groups have been left. NULL-safe. */
void tr_nccl_close(tr_fabric *fabric);
/* Local. What the thread does: ends the job if a group has failed, or takes longer than the limit.
 */
void tr_nccl_look(tr_fabric *fabric);
