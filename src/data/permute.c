/* permute.c - a Feistel network with cycle walking. Floor: data.
 *
 * The network works on pairs (left, right) in [0, a) x [0, b) with a = ceil(sqrt n) and
 * b = ceil(n / a), adding a keyed hash of one half to the other (Black and Rogaway 2002, "Ciphers
 * with arbitrary finite domains"). It permutes a*b numbers, fewer than n + a; walking on from a
 * number outside [0, n) until one falls inside leaves a permutation of [0, n). */
#include "data/permute.h"

#include "base/rng.h"

enum { ROUNDS = 8 };

static uint64_t ceil_sqrt(uint64_t n) {
    uint64_t low = 1, high = UINT64_C(1) << 31;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (middle * middle >= n)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static uint64_t network(uint64_t key, uint64_t a, uint64_t b, uint64_t x) {
    uint64_t left = x / b, right = x % b;
    for (uint64_t r = 0; r < ROUNDS; r += 2) {
        left = (left + tr_random_u64(key, r, right) % a) % a;
        right = (right + tr_random_u64(key, r + 1, left) % b) % b;
    }
    return left * b + right;
}

int64_t tr_permute(uint64_t key, int64_t n, int64_t index) {
    uint64_t a = ceil_sqrt((uint64_t)n), b = ((uint64_t)n + a - 1) / a;
    uint64_t x = (uint64_t)index;
    do {
        x = network(key, a, b, x);
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}
