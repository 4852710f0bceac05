/* Property: the checksum is its formula, sums up over any partition, and sees every changed bit,
 * every exchange and every shift; what runs cover is known exactly. Floor: tests. */
#include "checkpoint/checksum.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/rng.h"
#include "fixture.h"

enum { N = 1237 };

static void fill(uint32_t *words, int64_t n) {
    for (int64_t i = 0; i < n; i++) words[i] = (uint32_t)tr_mix64((uint64_t)i + 77);
}

static void test_formula(void **state) {
    (void)state;
    uint32_t w[N];
    fill(w, N);
    for (int64_t n = 0; n <= N; n += n < 70 ? 1 : 389) {
        uint64_t want = 0;
        for (int64_t i = 0; i < n; i++)
            want += tr_mix64((uint64_t)(i + 1) * UINT64_C(0x9e3779b97f4a7c15) ^ w[i]);
        assert_true(tr_checksum(0, w, n) == want);
        for (int64_t cut = 0; cut <= n; cut += 13)
            assert_true(tr_checksum(0, w, cut) + tr_checksum(cut, w + cut, n - cut) == want);
    }
    assert_true(tr_checksum(0, NULL, 0) == 0);
}

static void test_large_and_unaligned(void **state) {
    (void)state;
    int64_t n = (1 << 21) + 5;
    char *memory = malloc((size_t)n * 4 + 8);
    uint64_t whole = 0;
    for (int64_t i = 0; i < n * 4 + 8; i++) memory[i] = (char)tr_mix64((uint64_t)i);
    for (int64_t i = 0; i < n; i += 1001)
        whole += tr_checksum(i, memory + 3 + 4 * i, n - i < 1001 ? n - i : 1001);
    assert_true(tr_checksum(0, memory + 3, n) == whole);
    free(memory);
}

static void test_every_bit_is_seen(void **state) {
    (void)state;
    uint32_t w[N];
    fill(w, N);
    uint64_t want = tr_checksum(0, w, N);
    for (int64_t bit = 0; bit < 32 * N; bit++) {
        w[bit / 32] ^= UINT32_C(1) << (bit % 32);
        assert_true(tr_checksum(0, w, N) != want);
        w[bit / 32] ^= UINT32_C(1) << (bit % 32);
    }
    for (int64_t i = 1; i < N; i++) { /* exchanges */
        uint32_t kept = w[i];
        w[i] = w[0];
        w[0] = kept;
        assert_true(tr_checksum(0, w, N) != want);
        w[0] = w[i];
        w[i] = kept;
    }
    assert_true(tr_checksum(0, w, N) == want);
    uint32_t zeros[64] = {0};
    assert_true(tr_checksum(0, zeros, 63) != tr_checksum(0, zeros, 64));
    assert_true(tr_checksum(1, w, N) != want);
}

static void test_runs_of_boxes(void **state) {
    (void)state;
    for (int64_t t = 0; t < fx_ntensors; t++)
        for (fx_mode mode = 0; mode < FX_COVERS; mode++)
            for (int size = 1; size < 6; size++) {
                const tr_tensor_info *info = &fx_tensors[t];
                uint64_t sum = 0, cover = 0, want = 0, full = 0;
                fx_part whole = fx_part_make(FX_LAST, 0, 0, 1, 1, info);
                fx_fill(&whole, 3, info);
                tr_checksum_run(info, &whole.pieces[0].box, 0, whole.elems, whole.memory, &want,
                                &full);
                assert_true(want == tr_checksum(0, whole.memory, whole.elems));
                assert_true(full == tr_checksum_cover(0, whole.elems));
                for (int rank = 0; rank < size; rank++) {
                    fx_part part = fx_part_make(mode, (uint64_t)t, rank, size, 1, info);
                    fx_fill(&part, 3, info);
                    for (int64_t p = 0; p < part.npieces; p++)
                        tr_checksum_run(info, &part.pieces[p].box, part.pieces[p].first,
                                        part.pieces[p].count, part.pieces[p].master, &sum, &cover);
                    fx_part_free(&part);
                }
                assert_true(sum == want);
                assert_true(cover == full);
                fx_part_free(&whole);
            }
}

static void test_cover_sees_gaps_and_overlaps(void **state) {
    (void)state;
    uint64_t whole = tr_checksum_cover(0, 100);
    assert_true(tr_checksum_cover(0, 40) + tr_checksum_cover(40, 60) == whole);
    assert_true(tr_checksum_cover(40, 60) + tr_checksum_cover(0, 40) == whole);
    assert_true(tr_checksum_cover(0, 41) + tr_checksum_cover(40, 60) != whole);
    assert_true(tr_checksum_cover(0, 39) + tr_checksum_cover(40, 60) != whole);
    assert_true(2 * whole != whole && tr_checksum_cover(0, 50) * 2 != whole);
    assert_true(tr_checksum_cover(10, 0) == 0);
}

static void test_state(void **state) {
    (void)state;
    tr_progress_state a = fx_state(7);
    uint64_t want = tr_checksum_state(&a);
    int64_t *numbers[] = {&a.step,    &a.samples,        &a.tokens,
                          &a.updates, &a.skipped_in_row, (int64_t *)&a.data_fingerprint};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        *numbers[i] ^= 1;
        assert_true(tr_checksum_state(&a) != want);
        *numbers[i] ^= 1;
    }
    char text[64] = "run: {name: x, seed: 1}";
    a.config = text;
    for (size_t n = strlen(text); n > 0; n--) {
        want = tr_checksum_state(&a);
        text[n - 1] ^= 1;
        assert_true(tr_checksum_state(&a) != want);
        text[n - 1] = 0;
        assert_true(tr_checksum_state(&a) != want);
    }
}

static void test_speed(void **state) {
    (void)state;
    int64_t n = 1 << 18; /* 1 MiB: as read, in the cache */
    uint32_t *w = malloc((size_t)n * 4);
    fill(w, n);
    double best = 1e9;
    uint64_t sum = 0;
    for (int k = 0; k < 50; k++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        sum += tr_checksum(0, w, n);
        clock_gettime(CLOCK_MONOTONIC, &b);
        double s = (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
        if (s < best) best = s;
    }
    printf("checksum: %.1f GB/s on one core (%016llx)\n", 4e-9 * (double)n / best,
           (unsigned long long)sum);
    free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_formula),
                                       cmocka_unit_test(test_large_and_unaligned),
                                       cmocka_unit_test(test_every_bit_is_seen),
                                       cmocka_unit_test(test_runs_of_boxes),
                                       cmocka_unit_test(test_cover_sees_gaps_and_overlaps),
                                       cmocka_unit_test(test_state),
                                       cmocka_unit_test(test_speed)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
