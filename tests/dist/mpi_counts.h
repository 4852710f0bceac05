/* mpi_counts.h - how many transfers the library asked of MPI, and the largest, by standing between
 * the two (MPI's profiling interface). */
#pragma once
#include <stdint.h>

typedef struct {
    int64_t calls, largest; /* of sends, receives, broadcasts and reductions; elements of a call */
    int64_t sends, synchronous_sends;
} mpi_counts;

extern mpi_counts mpi_counted;
