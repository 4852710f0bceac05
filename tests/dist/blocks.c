/* Properties of block arithmetic, each over every small case against counting by hand. */
#include "dist/blocks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* Property: the blocks of n items follow each other, cover n, differ by at most one with the larger
 * first, and the owner of an item is the block that holds it. */
static void blocks_partition_the_range(void **state) {
    (void)state;
    for (int64_t n = 0; n <= 40; n++)
        for (int64_t parts = 1; parts <= 17; parts++) {
            int64_t next = 0, last_count = n;
            for (int64_t i = 0; i < parts; i++) {
                tr_range block = tr_block_of(n, parts, i);
                assert_int_equal(block.first, next);
                assert_true(block.count == n / parts || block.count == n / parts + 1);
                assert_true(block.count <= last_count);
                for (int64_t item = block.first; item < block.first + block.count; item++)
                    assert_int_equal(tr_block_owner(n, parts, item), i);
                next += block.count;
                last_count = block.count;
            }
            assert_int_equal(next, n);
        }
}

static void counts_are_64_bit(void **state) {
    (void)state;
    int64_t n = (INT64_C(1) << 40) + 5;
    tr_range last = tr_block_of(n, 7, 6);
    assert_int_equal(last.first + last.count, n);
    assert_int_equal(tr_block_owner(n, 7, n - 1), 6);
    assert_int_equal(tr_block_owner(n, 7, last.first - 1), 5);

    tr_box box = {.ndim = 3, .offset = {1, 2, 3}, .extent = {8, 4096, 65536 * 16}};
    assert_int_equal(tr_box_elems(&box), INT64_C(8) * 4096 * 65536 * 16);
    tr_box cut[2 * TR_MAX_DIM - 1];
    int64_t row = 65536 * 16, plane = 4096 * row;
    int boxes = tr_box_cut(&box, 3 * plane - 1, 2 + plane, cut);
    assert_int_equal(boxes, 3);
    assert_int_equal(cut[0].offset[0], 1 + 2);
    assert_int_equal(cut[0].offset[1], 2 + 4095);
    assert_int_equal(cut[0].offset[2], 3 + row - 1);
    assert_int_equal(tr_box_elems(&cut[1]), plane);
    assert_int_equal(cut[2].offset[0], 1 + 4);
    assert_int_equal(tr_box_elems(&cut[2]), 1);
}

/* The flat indices of the cut boxes, walked in order, must be first, first + 1, ... */
static void check_cut(const tr_box *box, int64_t first, int64_t count) {
    static const int64_t shape[TR_MAX_DIM] = {6, 17, 26, 38};
    tr_box cut[2 * TR_MAX_DIM - 1];
    int boxes = tr_box_cut(box, first, count, cut);
    assert_true(boxes <= 2 * box->ndim - 1);
    int64_t want = first;
    for (int b = 0; b < boxes; b++) {
        assert_int_equal(cut[b].ndim, box->ndim);
        int64_t elems = tr_box_elems(&cut[b]);
        assert_true(elems > 0);
        for (int64_t e = 0; e < elems; e++) {
            int64_t rest = e, flat = 0, stride = 1, in_cut = 1, place = 0, whole = 1;
            for (int d = box->ndim - 1; d >= 0; d--) {
                int64_t at = cut[b].offset[d] + rest / in_cut % cut[b].extent[d];
                assert_true(at >= box->offset[d] && at < box->offset[d] + box->extent[d]);
                flat += (at - box->offset[d]) * stride;
                place += at * whole;
                stride *= box->extent[d];
                whole *= shape[d];
                in_cut *= cut[b].extent[d];
            }
            assert_int_equal(flat, want);
            assert_int_equal(tr_box_place(box, shape, flat), place);
            want++;
        }
    }
    assert_int_equal(want, first + count);
}

/* Property: for every run of every box of up to 4 dimensions with extents 1..4 (1..3 in 4-D), the
 * cut is the run, in order, in at most 2*ndim - 1 boxes, and its elements have their places. */
static void cuts_are_the_run(void **state) {
    (void)state;
    for (int ndim = 1; ndim <= TR_MAX_DIM; ndim++) {
        int most = ndim == 4 ? 3 : 4, shapes = 1;
        for (int d = 0; d < ndim; d++) shapes *= most;
        for (int s = 0; s < shapes; s++) {
            tr_box box = {.ndim = ndim};
            for (int d = 0, rest = s; d < ndim; d++, rest /= most) {
                box.extent[d] = 1 + rest % most;
                box.offset[d] = 10 * d + s % 3;
            }
            int64_t n = tr_box_elems(&box);
            for (int64_t first = 0; first <= n; first++)
                for (int64_t count = 0; first + count <= n; count++) check_cut(&box, first, count);
        }
    }
}

static void rounding(void **state) {
    (void)state;
    for (int64_t n = 0; n < 50; n++)
        for (int64_t by = 1; by < 9; by++) {
            assert_true(tr_ceil_div(n, by) * by >= n && tr_ceil_div(n, by) * by < n + by);
            assert_int_equal(tr_round_up(n, by), tr_ceil_div(n, by) * by);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_partition_the_range),
        cmocka_unit_test(counts_are_64_bit),
        cmocka_unit_test(cuts_are_the_run),
        cmocka_unit_test(rounding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
