/* sort.cu - a stable radix sort, least digit first. Floor: kernels.
 *
 * A pass of up to 10 bits is three kernels: blocks count the digits of their tile of 2048 pairs, a
 * warp for each digit sums its counts over the tiles before, and the blocks move their pairs.
 * Inside a tile each warp holds 256 neighbours and counts by matching digits among its lanes, so
 * order is kept and no count depends on timing. It moves 20 bytes a pair and pass, and 8 for each
 * digit of a tile. 64k tokens of 128k words take two passes; the pairs of any number of experts
 * below 1024 take one: bound by the time to start kernels. Not measured on a card yet. */
#include "kernels/cuda/sort.h"

#include "kernels/cuda/vec.h"

enum { ROUNDS = 8, TILE = THREADS * ROUNDS, MAX_BITS = 10, MAX_DIGITS = 1 << MAX_BITS };

static int64_t tiles_of(int64_t n) {
    return (n + TILE - 1) / TILE;
}

static size_t round_up(int64_t bytes) {
    return (size_t)((bytes + 255) / 256 * 256);
}

size_t tr_cuda_sort_bytes(int64_t n) {
    return 4 * round_up(4 * n) + round_up(4 * MAX_DIGITS * tiles_of(n)) + 4 * MAX_DIGITS;
}

tr_cuda_sorter tr_cuda_sorter_in(void *work, int64_t n) {
    const size_t array = round_up(4 * n);
    char *at = (char *)work;
    tr_cuda_sorter sorter = {};
    sorter.n = n;
    sorter.pairs.key = (uint32_t *)at;
    sorter.pairs.value = (int32_t *)(at + array);
    sorter.other.key = (uint32_t *)(at + 2 * array);
    sorter.other.value = (int32_t *)(at + 3 * array);
    sorter.totals = (int32_t *)(at + 4 * array);
    sorter.counts = sorter.totals + MAX_DIGITS;
    return sorter;
}

int tr_cuda_key_bits(int64_t keys) {
    int bits = 0;
    while (bits < 32 && (int64_t)1 << bits < keys) bits++;
    return bits;
}

/* The digits of a warp's pairs, round by round, and the lanes that have the same one. Beyond the
 * last pair the digit is `digits`, which counts nothing. */
typedef struct {
    int digit[ROUNDS];
    unsigned peers[ROUNDS];
} warp_digits;

DEVFN bool leads(unsigned peers) {
    return __ffs((int)peers) - 1 == (int)threadIdx.x % WARP;
}

/* Adds the digits of the warp's pairs, which begin at `first`, to count[digits], its own. */
DEVFN void count_warp(warp_digits *at, int *count, const uint32_t *key, int64_t first, int64_t n,
                      int shift, int digits) {
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int64_t i = first + r * WARP + (int)threadIdx.x % WARP;
        at->digit[r] = i < n ? (int)(key[i] >> shift) & (digits - 1) : digits;
        at->peers[r] = __match_any_sync(0xffffffffu, at->digit[r]);
        if (at->digit[r] < digits && leads(at->peers[r]))
            count[at->digit[r]] += __popc(at->peers[r]);
        SYNCWARP(0xffffffffu);
    }
}

/* count[digit * tiles + tile] = how many of the tile's keys have the digit. */
__global__ void count_digits(int32_t *count, const uint32_t *key, int64_t n, int64_t tiles,
                             int shift, int digits) {
    SIMT_DYN_SMEM(int, seen); /* [WARPS, digits] */
    const int warp = (int)threadIdx.x / WARP;
    for (int i = (int)threadIdx.x; i < WARPS * digits; i += THREADS) seen[i] = 0;
    SYNCTHREADS();
    warp_digits at;
    const int64_t first = (int64_t)blockIdx.x * TILE + warp * WARP * ROUNDS;
    count_warp(&at, seen + warp * digits, key, first, n, shift, digits);
    SYNCTHREADS();
    for (int d = (int)threadIdx.x; d < digits; d += THREADS) {
        int sum = 0;
        for (int w = 0; w < WARPS; w++) sum += seen[w * digits + d];
        count[d * tiles + blockIdx.x] = sum;
    }
}

/* Inclusive sum over the lanes up to this one. */
DEVFN int warp_scan(int v) {
    for (int o = 1; o < WARP; o *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, v, o);
        if ((int)threadIdx.x % WARP >= o) v += below;
    }
    return v;
}

/* Counts become those of the tiles before; totals[digit] is that of all tiles. A warp each. */
__global__ void sum_digits(int32_t *count, int32_t *totals, int64_t tiles, int digits) {
    const int d = (int)(blockIdx.x * WARPS + threadIdx.x / WARP), lane = (int)threadIdx.x % WARP;
    if (d >= digits) return;
    int before = 0;
    for (int64_t first = 0; first < tiles; first += WARP) {
        const int64_t i = d * tiles + first + lane;
        const int own = first + lane < tiles ? count[i] : 0, sum = warp_scan(own);
        if (first + lane < tiles) count[i] = before + sum - own;
        before += __shfl_sync(0xffffffffu, sum, WARP - 1);
    }
    if (lane == 0) totals[d] = before;
}

/* Where the thread's first digit begins: the totals of the digits of the threads before. */
DEVFN int sum_before(const int32_t *totals, int first, int count, int digits, int *red) {
    int own = 0;
    for (int d = first; d < first + count && d < digits; d++) own += totals[d];
    const int sum = warp_scan(own), warp = (int)threadIdx.x / WARP;
    if (threadIdx.x % WARP == WARP - 1) red[warp] = sum;
    SYNCTHREADS();
    int before = sum - own;
    for (int w = 0; w < warp; w++) before += red[w];
    return before;
}

/* Moves the pairs of a tile to their places. */
__global__ void move_pairs(tr_cuda_pairs to, tr_cuda_pairs from, const int32_t *count,
                           const int32_t *totals, int64_t n, int64_t tiles, int shift, int digits) {
    SIMT_DYN_SMEM(int, next); /* [WARPS, digits]: counts, then where the next pair goes */
    SIMT_SHARED(int, red, WARPS);
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    for (int i = (int)threadIdx.x; i < WARPS * digits; i += THREADS) next[i] = 0;
    SYNCTHREADS();
    warp_digits at;
    const int64_t first = (int64_t)blockIdx.x * TILE + warp * WARP * ROUNDS;
    count_warp(&at, next + warp * digits, from.key, first, n, shift, digits);
    const int each = (digits + THREADS - 1) / THREADS, mine = (int)threadIdx.x * each;
    int begin = sum_before(totals, mine, each, digits, red); /* its barrier: counts are complete */
    for (int d = mine; d < mine + each && d < digits; d++) {
        int place = begin + count[d * tiles + blockIdx.x];
        for (int w = 0; w < WARPS; w++) {
            const int seen = next[w * digits + d];
            next[w * digits + d] = place;
            place += seen;
        }
        begin += totals[d];
    }
    SYNCTHREADS();
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int64_t i = first + r * WARP + lane;
        int *place = next + warp * digits + at.digit[r];
        const unsigned peers = at.peers[r];
        if (i < n) {
            const int p = *place + __popc(peers & ((1u << lane) - 1));
            to.key[p] = from.key[i];
            to.value[p] = from.value[i];
        }
        SYNCWARP(0xffffffffu);
        if (i < n && leads(peers)) *place += __popc(peers);
        SYNCWARP(0xffffffffu);
    }
}

void tr_cuda_sort(tr_stream *s, tr_cuda_sorter *sorter, int bits) {
    const int64_t n = sorter->n, tiles = tiles_of(n);
    const int passes = (bits + MAX_BITS - 1) / MAX_BITS;
    if (n <= 1 || passes == 0) return;
    const int each = (bits + passes - 1) / passes;
    for (int shift = 0; shift < bits; shift += each) {
        const int digits = 1 << (bits - shift < each ? bits - shift : each);
        const size_t shared = (size_t)(WARPS * digits) * sizeof(int);
        const tr_cuda_pairs from = sorter->pairs, to = sorter->other;
        LAUNCH(count_digits, (unsigned)tiles, THREADS, shared, s->handle)
        (sorter->counts, from.key, n, tiles, shift, digits);
        tr_cuda_launched(s, "sort: counts");
        LAUNCH(sum_digits, (unsigned)((digits + WARPS - 1) / WARPS), THREADS, 0, s->handle)
        (sorter->counts, sorter->totals, tiles, digits);
        tr_cuda_launched(s, "sort: sums");
        LAUNCH(move_pairs, (unsigned)tiles, THREADS, shared, s->handle)
        (to, from, sorter->counts, sorter->totals, n, tiles, shift, digits);
        tr_cuda_launched(s, "sort: places");
        sorter->pairs = to;
        sorter->other = from;
    }
}
