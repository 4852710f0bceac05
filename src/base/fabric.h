/* fabric.h - collectives between the memories of devices, as one library offers them (NCCL).
 * Floor: base.
 *
 * Ranks join groups; what a group begins goes to the group's stream in that order, and ranks of a
 * group begin the same in the same order. Nothing here orders it after work of other streams, or
 * others after it: who calls does that with the device's events (dist/fabric.c).
 *
 * No function waits. Joining, beginning and finishing go on until `settled` says so; only then may
 * the next be begun. No function fails: a call that does, a peer that is lost, and an operation
 * that takes longer than the limit the fabric was opened with end the job through the `fatal` it
 * was opened with. */
#pragma once
#include "base/device.h"
#include "base/dtype.h"

typedef struct tr_fabric_group tr_fabric_group;

/* One of several that move at the same time. */
typedef struct {
    bool sends; /* or receives */
    int peer;
    void *buffer;
    int64_t bytes; /* > 0 */
} tr_fabric_message;

struct tr_fabric {
    const char *name; /* "nccl 2.28.9" */
    int64_t id_bytes;

    /* Local. An id, by which the ranks of one group find each other: one makes it, all get it. */
    void (*make_id)(const tr_fabric *fabric, void *id);
    /* Collective on the group. `stream` is borrowed; `name` is for messages, copied. */
    tr_fabric_group *(*join)(const tr_fabric *fabric, const void *id, int rank, int size,
                             tr_stream *stream, const char *name);
    /* Local. Drives what goes on; true: it is done, what was begun is in the stream. */
    bool (*settled)(tr_fabric_group *group);

    /* Collective on the group, as in dist/comm.h: in place, n elements a block, n > 0. */
    void (*broadcast)(tr_fabric_group *group, int root, void *buffer, int64_t bytes);
    void (*all_reduce)(tr_fabric_group *group, tr_op op, tr_dtype t, void *buffer, int64_t n);
    void (*reduce_scatter)(tr_fabric_group *group, tr_dtype t, void *buffer, int64_t n);
    void (*all_gather)(tr_fabric_group *group, tr_dtype t, void *buffer, int64_t n);
    /* Those between two ranks are matched in order; none waits for another. A rank may be its own
     * peer. */
    void (*exchange)(tr_fabric_group *group, const tr_fabric_message *messages, int count);

    /* Collective on the group. Nothing will follow. */
    void (*finish)(tr_fabric_group *group);
    /* Local. After `finish` has settled; before it, what goes on is given up. NULL-safe. */
    void (*leave)(tr_fabric_group *group);
};
