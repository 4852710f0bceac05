/* mpi_fabric.h - a fabric for tests: what NCCL promises and no more, over MPI, on a late device.
 * Joining and beginning settle late. Operations take their turn in the group's stream and keep it
 * waiting until their peers come to theirs: every message is synchronous. Messages are matched by
 * their order alone. Wrong use ends the process. */
#pragma once
#include "base/fabric.h"
#include "tests/dist/late_device.h"

/* Borrowed by the device of `late`, whose fabric it becomes. */
tr_fabric *mpi_fabric_create(late_device *late);
/* Fails unless all groups were left. */
void mpi_fabric_destroy(tr_fabric *fabric);

typedef struct {
    int64_t joined, groups_now, collectives, exchanges, messages;
    int64_t most_at_once; /* messages in one exchange */
} mpi_fabric_counts;
mpi_fabric_counts mpi_fabric_count(const tr_fabric *fabric);
/* From the n-th operation on (1: the first) the fabric fails: the job ends. 0: never. */
void mpi_fabric_fail_at(tr_fabric *fabric, int64_t n);
