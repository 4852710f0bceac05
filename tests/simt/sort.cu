/* Property: the device's sort is std::stable_sort by the lower bits of the keys, for any number of
 * tiles and passes; equal keys keep their order; work memory is enough. */
#include "kernels/cuda/sort.cu"
#include "tests/simt/check.h"

#include <numeric>

extern "C" void tr_cuda_launched(tr_stream *, const char *) {}

static uint32_t random_key(uint64_t i) {
    i = (i + 1) * 0x9e3779b97f4a7c15u;
    return (uint32_t)((i ^ i >> 31) * 0xbf58476d1ce4e5b9u >> 29);
}

/* Keys below `limit`, or all equal where limit is 1. */
static void check_sort(int64_t n, int bits, uint64_t limit) {
    std::vector<uint32_t> key((size_t)n);
    std::vector<int32_t> value((size_t)n), order((size_t)n);
    for (int64_t i = 0; i < n; i++) {
        key[(size_t)i] = (uint32_t)(random_key((uint64_t)i) % limit);
        value[(size_t)i] = (int32_t)(3 * i);
    }
    const uint32_t mask = bits < 32 ? (1u << bits) - 1 : ~0u;
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return (key[(size_t)a] & mask) < (key[(size_t)b] & mask);
    });
    tr_stream s = {};
    void *work = simt_malloc(tr_cuda_sort_bytes(n));
    tr_cuda_sorter sorter = tr_cuda_sorter_in(work, n);
    simt_h2d(sorter.pairs.key, key.data(), (size_t)n * sizeof(uint32_t));
    simt_h2d(sorter.pairs.value, value.data(), (size_t)n * sizeof(int32_t));
    tr_cuda_sort(&s, &sorter, bits);
    const std::vector<uint32_t> sorted = to_host(sorter.pairs.key, (size_t)n);
    const std::vector<int32_t> moved = to_host(sorter.pairs.value, (size_t)n);
    int wrong = 0;
    for (size_t i = 0; i < (size_t)n; i++)
        wrong += sorted[i] != key[(size_t)order[i]] || moved[i] != value[(size_t)order[i]];
    CHECK(wrong == 0, "%d of %lld pairs, %d bits, keys below %llu", wrong, (long long)n, bits,
          (unsigned long long)limit);
    simt_free(work);
}

int main() {
    for (int64_t n : {0, 1, 2, 31, 33, 255, 2047, 2048, 2049, 9000, 70000}) {
        check_sort(n, 1, 2);
        check_sort(n, 9, 1);
        check_sort(n, 9, 300);
        check_sort(n, 10, 1024);
        check_sort(n, 17, 1 << 17);
        if (n < 10000) check_sort(n, 32, (uint64_t)1 << 32);
    }
    const int bits[][2] = {{0, 0}, {1, 0}, {2, 1}, {3, 2}, {256, 8}, {257, 9}, {1024, 10}};
    for (const auto &b : bits) CHECK(tr_cuda_key_bits(b[0]) == b[1], "%d keys", b[0]);
    CHECK(tr_cuda_key_bits((int64_t)1 << 40) == 32, "more than any key");
    CHECK(simt_errors() == 0, "%d reports", simt_errors());
    return check_result("sort");
}
