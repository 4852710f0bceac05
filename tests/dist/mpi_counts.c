/* mpi_counts.c - see mpi_counts.h. */
#include "tests/dist/mpi_counts.h"

#include <mpi.h>

mpi_counts mpi_counted;

static void note(int count) {
    mpi_counted.calls++;
    if (count > mpi_counted.largest) mpi_counted.largest = count;
}

int MPI_Isend(const void *buf, int count, MPI_Datatype datatype, int dest, int tag, MPI_Comm comm,
              MPI_Request *request) {
    note(count);
    mpi_counted.sends++;
    return PMPI_Isend(buf, count, datatype, dest, tag, comm, request);
}

int MPI_Issend(const void *buf, int count, MPI_Datatype datatype, int dest, int tag, MPI_Comm comm,
               MPI_Request *request) {
    note(count);
    mpi_counted.synchronous_sends++;
    return PMPI_Issend(buf, count, datatype, dest, tag, comm, request);
}

int MPI_Irecv(void *buf, int count, MPI_Datatype datatype, int source, int tag, MPI_Comm comm,
              MPI_Request *request) {
    note(count);
    return PMPI_Irecv(buf, count, datatype, source, tag, comm, request);
}

int MPI_Ibcast(void *buffer, int count, MPI_Datatype datatype, int root, MPI_Comm comm,
               MPI_Request *request) {
    note(count);
    return PMPI_Ibcast(buffer, count, datatype, root, comm, request);
}

int MPI_Iallreduce(const void *sendbuf, void *recvbuf, int count, MPI_Datatype datatype, MPI_Op op,
                   MPI_Comm comm, MPI_Request *request) {
    note(count);
    return PMPI_Iallreduce(sendbuf, recvbuf, count, datatype, op, comm, request);
}
