/* device.h - opens devices: the CPU, or one that a module brings (a GPU, or its emulation).
 * Floor: kernels. */
#pragma once
#include "base/device.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *name;     /* "cpu", "cuda", "simt", "simt-check" */
    const char *level;    /* cpu: as tr_device_cpu says */
    int local_rank;       /* this process among those of the job on its node; chooses a GPU */
    bool fabric;          /* cuda: with collectives on device memory (NCCL) */
    double limit_seconds; /* that one of them may take; 0: any */
    /* Called when a call fails that cannot be undone, with a text; does not return. NULL: prints
     * the text and ends the process with code 70. */
    void (*fatal)(const char *text);
} tr_device_wish;

/* Local. NULL with a message (tr_error_message) and its status (tr_error_status): TR_ERR_USAGE for
 * a wish that is wrong or that this machine cannot fulfil, TR_ERR_INTERNAL when a device is there
 * but does not work. */
tr_device *tr_device_open(const tr_device_wish *wish);

/* Local. The CPU device with the fastest kernels this processor runs. `level` limits them for
 * tests: "ref", "portable", "avx2", "avx512", "avx512bf16", or NULL for the environment's
 * TRIREME_CPU_LEVEL and, without that, the fastest. NULL result, with a message, if the processor
 * lacks it or the name is unknown. Sets flush-to-zero in every OpenMP thread. Its kernels also take
 * a NULL stream. */
tr_device *tr_device_cpu(const char *level);
void tr_device_destroy(tr_device *device); /* NULL-safe */

#ifdef __cplusplus
}
#endif
