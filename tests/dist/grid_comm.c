/* Property: the communicators of a grid hold the ranks that the grid's arithmetic names, in order,
 * on every shape of the world. */
#include "dist/grid.h"
#include "tests/dist/mpi_check.h"

static void check_shape(tr_comm *world, tr_grid_shape shape) {
    int size = tr_comm_size(world), rank = tr_comm_rank(world);
    tr_grid *grid = tr_grid_create(world, shape);
    tr_grid_place at = tr_grid_place_of(shape, rank);
    TR_CHECK(memcmp(&at, &grid->at, sizeof at) == 0, "place");
    TR_CHECK(tr_grid_first_stage(grid) == (at.p == 0), "first stage");
    TR_CHECK(tr_grid_last_stage(grid) == (at.p == shape.pipeline - 1), "last stage");
    int *want = malloc((size_t)size * sizeof *want), *have = malloc((size_t)size * sizeof *have);
    for (int g = 0; g < TR_GROUP_COUNT; g++) {
        tr_comm *comm = grid->comm[g];
        int members = tr_grid_group(shape, rank, (tr_group)g, want);
        TR_CHECK(tr_comm_size(comm) == members, "group %d has %d", g, tr_comm_size(comm));
        have[tr_comm_rank(comm)] = rank;
        tr_end(tr_all_gather_begin(comm, NULL, TR_I32, have, 1));
        TR_CHECK(memcmp(want, have, (size_t)members * sizeof *want) == 0, "group %d", g);
    }
    free(want);
    free(have);
    tr_grid_destroy(grid);
}

static void grids(tr_comm *world) {
    int size = tr_comm_size(world);
    for (int p = 1; p <= size; p++)
        for (int c = 1; p * c <= size; c++)
            for (int t = 1; p * c * t <= size; t++) {
                tr_grid_shape shape = {.pipeline = p, .context = c, .expert = 1, .tensor = t};
                if (size % (p * c * t) != 0) continue;
                TR_CHECK(tr_grid_shape_check(&shape, size) == TR_OK, "shape");
                shape.expert = shape.data * c;
                shape.head_copies = t;
                check_shape(world, shape);
            }
    tr_grid_destroy(NULL);
}

static const mpi_case cases[] = {{"grids", grids}};

int main(int argc, char **argv) {
    tr_comm *world = tr_comm_start(&argc, &argv);
    int failed = mpi_check_all(world, cases, 1);
    tr_comm_stop(world);
    return failed != 0;
}
