/* gather.h - whole parameters on rank 0, one at a time, wherever their parts are. Floor: train. */
#pragma once
#include "model/param.h"

typedef enum { TR_GATHER_WEIGHT, TR_GATHER_GRADIENT } tr_gather_kind; /* fp32 master; reduced sum */

typedef struct tr_gather tr_gather;

/* Collective on world; the registry is sealed with storage. */
tr_gather *tr_gather_create(tr_comm *world, const tr_registry *registry);
void tr_gather_destroy(tr_gather *gather); /* NULL-safe */

/* Collective on world. On rank 0 `whole` [elems of the parameter] gets its elements, row-major; the
 * others pass NULL. TR_ERR_INTERNAL on rank 0 (TR_OK elsewhere) when no rank holds some element, or
 * when two ranks hold one with different values (copies of a tied embedding have to be equal). */
tr_status tr_gather_parameter(tr_gather *gather, int64_t parameter, tr_gather_kind kind,
                              float *whole);

/* Local, in a world of one rank: puts `whole` in place of what gathering would give. */
void tr_gather_put(tr_gather *gather, int64_t parameter, tr_gather_kind kind, const float *whole);

/* Local. Whether this rank holds the first element of a parameter, and then where its gradient is
 * (device memory, [*count_p] elements follow); else NULL. */
float *tr_gather_first(tr_gather *gather, int64_t parameter, int64_t *count_p);
