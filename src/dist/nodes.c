/* nodes.c - which ranks of a communicator share a node. Floor: dist. */
#include "dist/backend.h"

#include "base/heap.h"

#include <stdlib.h>

/* The lowest rank of `comm` on this rank's node. The switch pretends that nodes hold so many ranks
 * of the world each. */
static int node_leader(const tr_comm *comm) {
    int pretended = tr_comm_get_switches()->node_ranks, world_rank, leader;
    TR_MPI(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank));
    MPI_Comm machine, node;
    TR_MPI(
        MPI_Comm_split_type(comm->mpi, MPI_COMM_TYPE_SHARED, comm->rank, MPI_INFO_NULL, &machine));
    TR_MPI(MPI_Comm_split(machine, pretended > 0 ? world_rank / pretended : 0, comm->rank, &node));
    TR_MPI(MPI_Allreduce(&comm->rank, &leader, 1, MPI_INT, MPI_MIN, node));
    TR_MPI(MPI_Comm_free(&node));
    TR_MPI(MPI_Comm_free(&machine));
    return leader;
}

void tr_nodes_find(tr_comm *comm) {
    int64_t size = comm->size;
    int *leader = tr_heap_alloc(size, sizeof *leader); /* of each rank's node */
    int *node = tr_heap_alloc(size, sizeof *node);     /* of each leader: its index */
    int *held = tr_heap_alloc(size, sizeof *held);     /* and ranks found on it so far */
    int *local = tr_heap_alloc(size, sizeof *local);   /* of each rank: its index on its node */
    comm->node_of = tr_heap_alloc(size, sizeof *comm->node_of);
    comm->rank_of = tr_heap_alloc(size, sizeof *comm->rank_of);
    comm->across = tr_heap_alloc(size, sizeof *comm->across);
    comm->everyone = tr_heap_alloc(size, sizeof *comm->everyone);
    int own = node_leader(comm);
    TR_MPI(MPI_Allgather(&own, 1, MPI_INT, leader, 1, MPI_INT, comm->mpi));

    for (int r = 0; r < comm->size; r++) {
        if (leader[r] == r) node[r] = comm->nodes++;
        comm->node_of[r] = node[leader[r]];
        local[r] = held[leader[r]]++;
    }
    comm->node_size = held[own];
    comm->node = node[own];
    comm->local = local[comm->rank];
    bool even = true;
    for (int r = 0; r < comm->size; r++) {
        comm->everyone[r] = r;
        even &= held[leader[r]] == comm->node_size;
    }
    for (int r = 0; r < comm->size && even; r++) {
        comm->rank_of[comm->node_of[r] * comm->node_size + local[r]] = r;
        if (local[r] == comm->local) comm->across[comm->node_of[r]] = r;
    }
    comm->may_share = even && comm->node_size > 1;
    free(leader);
    free(node);
    free(held);
    free(local);
}
