/* Properties of the grid's arithmetic, over every shape of a world of up to 16 ranks. */
#include "dist/grid.h"

#include <stdio.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { MOST = 16 };

typedef void (*shape_check)(tr_grid_shape shape, int world);

/* With every number of copies of key/value heads, and of ranks that exchange heads. */
static int for_every_split(tr_grid_shape shape, int world, shape_check check) {
    int shapes = 0;
    for (int copies = 1; copies <= shape.tensor; copies++)
        for (int heads = 1; heads <= shape.context; heads++) {
            if (shape.tensor % copies != 0 || shape.context % heads != 0) continue;
            shape.head_copies = copies;
            shape.context_heads = heads;
            check(shape, world);
            shapes++;
        }
    return shapes;
}

static int for_every_shape(shape_check check) {
    int shapes = 0;
    for (int world = 1; world <= MOST; world++)
        for (int p = 1; p <= world; p++)
            for (int d = 1; p * d <= world; d++)
                for (int c = 1; p * d * c <= world; c++) {
                    int t = world / (p * d * c);
                    if (p * d * c * t != world) continue;
                    for (int e = 1; e <= d * c; e++)
                        if (d * c % e == 0)
                            shapes +=
                                for_every_split((tr_grid_shape){p, d, c, e, t, 0, 0}, world, check);
                }
    return shapes;
}

/* Coordinates by counting through nested loops, as the header's rank order says. */
static void check_places(tr_grid_shape shape, int world) {
    int rank = 0;
    for (int p = 0; p < shape.pipeline; p++)
        for (int d = 0; d < shape.data; d++)
            for (int c = 0; c < shape.context; c++)
                for (int t = 0; t < shape.tensor; t++, rank++) {
                    tr_grid_place at = tr_grid_place_of(shape, rank);
                    assert_int_equal(at.world, world);
                    assert_int_equal(at.rank, rank);
                    assert_true(at.p == p && at.d == d && at.c == c && at.t == t);
                    assert_int_equal(at.expert_replica * shape.expert + at.expert_rank,
                                     d * shape.context + c);
                    assert_in_range(at.expert_rank, 0, shape.expert - 1);
                    assert_int_equal(tr_grid_rank_of(shape, p, d, c, t), rank);
                }
    assert_int_equal(rank, world);
}

static int size_of(tr_grid_shape s, tr_group group, const tr_grid_place *at) {
    switch (group) {
    case TR_GROUP_WORLD:
        return s.pipeline * s.data * s.context * s.tensor;
    case TR_GROUP_PIPELINE:
        return s.pipeline;
    case TR_GROUP_DATA:
        return s.data;
    case TR_GROUP_CONTEXT:
        return s.context;
    case TR_GROUP_HEADS:
        return s.context_heads;
    case TR_GROUP_RING:
        return s.context / s.context_heads;
    case TR_GROUP_TENSOR:
        return s.tensor;
    case TR_GROUP_EXPERT:
        return s.expert;
    case TR_GROUP_MICRO_BATCH:
        return s.context * s.tensor;
    case TR_GROUP_STAGE:
        return s.data * s.context * s.tensor;
    case TR_GROUP_REPLICA:
        return s.data * s.context;
    case TR_GROUP_HEAD_REPLICA:
        return s.data * s.context * s.head_copies;
    case TR_GROUP_EXPERT_REPLICA:
        return s.data * s.context / s.expert * s.tensor;
    case TR_GROUP_EMBEDDING:
        return s.pipeline > 1 && (at->p == 0 || at->p == s.pipeline - 1) ? 2 : 1;
    case TR_GROUP_COUNT:
        break;
    }
    return -1;
}

/* What a member's index in its group must be. */
static int index_of(tr_group group, const tr_grid_place *at) {
    const tr_grid_shape *s = &at->shape;
    switch (group) {
    case TR_GROUP_WORLD:
        return at->rank;
    case TR_GROUP_PIPELINE:
        return at->p;
    case TR_GROUP_DATA:
        return at->d;
    case TR_GROUP_CONTEXT:
        return at->c;
    case TR_GROUP_HEADS:
        return at->c % s->context_heads;
    case TR_GROUP_RING:
        return at->c / s->context_heads;
    case TR_GROUP_TENSOR:
        return at->t;
    case TR_GROUP_EXPERT:
        return at->expert_rank;
    case TR_GROUP_MICRO_BATCH:
        return at->c * s->tensor + at->t;
    case TR_GROUP_STAGE:
        return (at->d * s->context + at->c) * s->tensor + at->t;
    case TR_GROUP_REPLICA:
        return at->d * s->context + at->c;
    case TR_GROUP_HEAD_REPLICA:
        return (at->d * s->context + at->c) * s->head_copies + at->t % s->head_copies;
    case TR_GROUP_EXPERT_REPLICA:
        return at->expert_replica * s->tensor + at->t;
    case TR_GROUP_EMBEDDING:
        return at->p > 0 && at->p == at->shape.pipeline - 1;
    case TR_GROUP_COUNT:
        break;
    }
    return -1;
}

/* Property: every kind of group partitions the world (each member lists the same members), has its
 * size, and holds its members in order of the coordinate it runs over. */
static void check_groups(tr_grid_shape shape, int world) {
    for (int g = 0; g < TR_GROUP_COUNT; g++)
        for (int rank = 0; rank < world; rank++) {
            int members[MOST], theirs[MOST];
            tr_grid_place at = tr_grid_place_of(shape, rank);
            int size = tr_grid_group(shape, rank, (tr_group)g, members);
            assert_int_equal(size, size_of(shape, (tr_group)g, &at));
            assert_int_equal(size, tr_grid_group(shape, rank, (tr_group)g, NULL));
            bool found = false;
            for (int i = 0; i < size; i++) {
                tr_grid_place there = tr_grid_place_of(shape, members[i]);
                if (g != TR_GROUP_EMBEDDING || size == 2)
                    assert_int_equal(index_of((tr_group)g, &there), i);
                found |= members[i] == rank;
                assert_int_equal(tr_grid_group(shape, members[i], (tr_group)g, theirs), size);
                assert_memory_equal(members, theirs, (size_t)size * sizeof members[0]);
            }
            assert_true(found);
        }
}

/* Property: members of a group agree in the coordinates that its comment in grid.h fixes. */
static void check_fixed_coordinates(tr_grid_shape shape, int world) {
    for (int rank = 0; rank < world; rank++) {
        int members[MOST];
        tr_grid_place a = tr_grid_place_of(shape, rank);
        for (int g = 0; g < TR_GROUP_COUNT; g++) {
            int size = tr_grid_group(shape, rank, (tr_group)g, members);
            for (int i = 0; i < size; i++) {
                tr_grid_place b = tr_grid_place_of(shape, members[i]);
                bool along_p =
                    g == TR_GROUP_WORLD || g == TR_GROUP_PIPELINE || g == TR_GROUP_EMBEDDING;
                bool along_t = g == TR_GROUP_WORLD || g == TR_GROUP_STAGE ||
                               g == TR_GROUP_HEAD_REPLICA || g == TR_GROUP_EXPERT_REPLICA;
                bool along_dc = along_t || g == TR_GROUP_REPLICA || g == TR_GROUP_EXPERT;
                bool row = g == TR_GROUP_MICRO_BATCH;
                assert_true(along_p || a.p == b.p);
                assert_true(along_dc || g == TR_GROUP_DATA || a.d == b.d);
                bool along_c = g == TR_GROUP_CONTEXT || g == TR_GROUP_HEADS || g == TR_GROUP_RING;
                assert_true(along_dc || row || along_c || a.c == b.c);
                assert_true(g != TR_GROUP_HEADS ||
                            a.c / shape.context_heads == b.c / shape.context_heads);
                assert_true(g != TR_GROUP_RING ||
                            a.c % shape.context_heads == b.c % shape.context_heads);
                assert_true(along_t || row || g == TR_GROUP_TENSOR || a.t == b.t);
                assert_true(g != TR_GROUP_HEAD_REPLICA ||
                            a.t / shape.head_copies == b.t / shape.head_copies);
                assert_true(g != TR_GROUP_EXPERT || a.expert_replica == b.expert_replica);
                assert_true(g != TR_GROUP_EXPERT_REPLICA || a.expert_rank == b.expert_rank);
            }
        }
    }
}

static void places(void **state) {
    (void)state;
    printf("%d shapes\n", for_every_shape(check_places));
}

static void groups(void **state) {
    (void)state;
    for_every_shape(check_groups);
    for_every_shape(check_fixed_coordinates);
}

static void check_data_is_filled(tr_grid_shape shape, int world) {
    tr_grid_shape filled = shape;
    assert_int_equal(tr_grid_shape_check(&filled, world), TR_OK);
    filled.data = 0;
    assert_int_equal(tr_grid_shape_check(&filled, world), TR_OK);
    assert_int_equal(filled.data, shape.data);
}

static void good_shapes_pass(void **state) {
    (void)state;
    for_every_shape(check_data_is_filled);
}

/* Property: a shape that cannot be is refused with the numbers and what would fit. */
static void bad_shapes_are_explained(void **state) {
    (void)state;
    const struct {
        tr_grid_shape shape;
        int world;
        const char *says[4];
    } bad[] = {
        {{3, 0, 1, 1, 1, 0, 0}, 8, {"pipeline 3", "8 ranks", "1, 2, 4 or 8", "multiple of 3"}},
        {{2, 0, 2, 1, 4, 0, 0}, 8, {"= 16", "8 ranks", "1, 2, 4 or 8", "multiple of 16"}},
        {{1, 3, 1, 1, 1, 0, 0}, 4, {"data 3", "4 ranks", "data 4 would fit"}},
        {{1, 0, 2, 3, 1, 0, 0}, 8, {"expert 3", "data 4 x context 2 = 8", "1, 2, 4 or 8"}},
        {{1, 0, 1, 2, 1, 0, 0}, 1, {"expert 2", "data 1 x context 1 = 1", "; 1 would"}},
        {{0, 0, 1, 1, 1, 0, 0}, 4, {"parallel.pipeline is 0", "1 to "}},
        {{1, 0, 1, 1, -2, 0, 0}, 4, {"parallel.tensor is -2", "1 to "}},
        {{1, 0, 1, 1, 4, 3, 0}, 4, {"4 tensor ranks", "3 times"}},
        {{1, 0, 4, 1, 1, 0, 3}, 4, {"4 context ranks", "groups of 3"}},
        {{1, -1, 1, 1, 1, 0, 0}, 4, {"data axis is -1", "1 or more"}},
        {{1 << 20, 0, 1 << 20, 1, 1 << 20, 0, 0}, 4, {"does not divide"}},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tr_grid_shape shape = bad[i].shape;
        assert_int_equal(tr_grid_shape_check(&shape, bad[i].world), TR_ERR_USAGE);
        for (int s = 0; s < 4 && bad[i].says[s]; s++)
            if (!strstr(tr_error_message(), bad[i].says[s]))
                fail_msg("\"%s\" lacks \"%s\"", tr_error_message(), bad[i].says[s]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(places),
        cmocka_unit_test(groups),
        cmocka_unit_test(good_shapes_pass),
        cmocka_unit_test(bad_shapes_are_explained),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
