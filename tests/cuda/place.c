/* Property: two ranks of one node that use one GPU are found, whatever the order; ranks of other
 * nodes, and devices without an identity, share nothing. */
#include "train/place.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 8 };

/* Nodes of `ranks` ranks, on each of which `visible` GPUs are dealt out by local rank. */
static void every_count_of_ranks_and_gpus(void **state) {
    (void)state;
    int tried = 0;
    for (int nodes = 1; nodes <= 2; nodes++)
        for (int ranks = 1; ranks <= MOST / nodes; ranks++)
            for (int visible = 1; visible <= MOST; visible++, tried++) {
                char identity[MOST][TR_IDENTITY_BYTES];
                int node[MOST], pair[2] = {-1, -1};
                for (int r = 0; r < nodes * ranks; r++) {
                    node[r] = r / ranks;
                    snprintf(identity[r], TR_IDENTITY_BYTES, "gpu %d", r % ranks % visible);
                }
                bool shared = tr_place_shared(nodes * ranks, node,
                                              (const char(*)[TR_IDENTITY_BYTES])identity, pair);
                assert_int_equal(shared, ranks > visible);
                if (!shared) continue;
                assert_int_equal(pair[0], 0);
                assert_int_equal(pair[1], visible);
            }
    printf("  %d combinations of nodes, ranks and GPUs\n", tried);
}

/* A launcher shows each rank a GPU of its own, which it calls 0. */
static void one_visible_each(void **state) {
    (void)state;
    const char identity[3][TR_IDENTITY_BYTES] = {"bus 1", "bus 2", "bus 1"};
    const int apart[] = {0, 0, 1}, together[] = {0, 1, 0};
    int pair[2];
    assert_false(tr_place_shared(3, apart, identity, pair));
    assert_true(tr_place_shared(3, together, identity, pair));
    assert_int_equal(pair[0], 0);
    assert_int_equal(pair[1], 2);
    const char none[2][TR_IDENTITY_BYTES] = {"", ""};
    assert_false(tr_place_shared(2, apart, none, pair));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_count_of_ranks_and_gpus),
        cmocka_unit_test(one_visible_each),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
