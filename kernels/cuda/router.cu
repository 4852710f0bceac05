/* router.cu - choosing experts, the statistics of the choice, its gradient, and the experts'
 * capacity. Floor: kernels.
 *
 * A warp takes a token. Bytes a token and expert: forward 8 (logits are read again from the cache,
 * once for each of the k choices), backward 8, statistics 4. The choices are made by k searches of
 * E/32 steps and five exchanges each, which for hundreds of experts takes about as long as the
 * memory. Capacity sorts all pairs (sort.cu): in one pass by position, in four more by score. Not
 * measured on a card yet. */
#include "kernels/cuda/sort.h"
#include "kernels/cuda/vec.h"

#include "kernels/makers.h"

#include <math.h>

/* Orders floats as unsigned integers: zeros are equal, NaN is below all. */
DEVFN uint32_t order_of(float x) {
    const uint32_t u = (uint32_t)__float_as_int(x + 0.0f);
    if (x != x) return 0;
    return u ^ (u >> 31 ? 0xffffffffu : 0x80000000u);
}

/* Orders numbered values: the larger value, then the lower number, is more. Never 0 or ~0. */
DEVFN uint64_t choice_of(uint32_t order, int64_t number) {
    return (uint64_t)order << 32 | (uint32_t)~number;
}
DEVFN int64_t number_of(uint64_t choice) {
    return (int64_t)(uint32_t) ~(uint32_t)choice;
}

DEVFN uint64_t warp_max(uint64_t v) {
    for (int o = WARP / 2; o > 0; o /= 2) {
        const uint64_t other = __shfl_xor_sync(0xffffffffu, v, o);
        if (other > v) v = other;
    }
    return v;
}

/* --- forward --------------------------------------------------------------------------------- */

/* Of a logit: its sigmoid, or its part of the softmax whose sum has that inverse. */
DEVFN float score_of(const tr_routing &how, float logit, float max, float inverse) {
    return how.score == TR_SIGMOID ? 1 / (1 + expf(-logit)) : expf(logit - max) * inverse;
}

/* How good group g of x[E] is, ordered: its best logit or, of sigmoids, the sum of its two best
 * scores. */
DEVFN uint32_t worth_of(const tr_routing &how, const float *x, int64_t g) {
    const int64_t size = how.E / how.groups;
    float first = -INFINITY, second = -INFINITY;
    for (int64_t e = g * size; e < (g + 1) * size; e++) {
        second = fmaxf(second, fminf(first, x[e]));
        first = fmaxf(first, x[e]);
    }
    if (how.score == TR_SIGMOID) first = score_of(how, first, 0, 0) + score_of(how, second, 0, 0);
    return order_of(first);
}

/* The worst of the groups of x[E] that are kept; 0, below all, if they all are. group: where the
 * groups' worths are put. A warp. */
DEVFN uint64_t last_kept(const tr_routing &how, const float *x, float *group) {
    if (how.kept == how.groups) return 0;
    const int lane = (int)threadIdx.x % WARP;
    for (int64_t g = lane; g < how.groups; g += WARP)
        group[g] = __int_as_float((int)worth_of(how, x, g));
    SYNCWARP(0xffffffffu);
    uint64_t last = ~(uint64_t)0;
    for (int64_t i = 0; i < how.kept; i++) {
        uint64_t best = 0;
        for (int64_t g = lane; g < how.groups; g += WARP) {
            const uint64_t choice = choice_of((uint32_t)__float_as_int(group[g]), g);
            if (choice < last && choice > best) best = choice;
        }
        last = warp_max(best);
    }
    return last;
}

/* index[k] = the k best of x[E] in the groups that are at least `bar`. A warp. */
DEVFN void choose(int32_t *index, const tr_routing &how, const float *x, const float *group,
                  uint64_t bar) {
    const int lane = (int)threadIdx.x % WARP;
    const int64_t size = how.E / how.groups;
    uint64_t last = ~(uint64_t)0;
    for (int64_t j = 0; j < how.k; j++) {
        uint64_t best = 0;
        for (int64_t e = lane; e < how.E; e += WARP) {
            const uint64_t choice = choice_of(order_of(x[e]), e);
            if (choice >= last || choice <= best) continue;
            if (bar && choice_of((uint32_t)__float_as_int(group[e / size]), e / size) < bar)
                continue;
            best = choice;
        }
        last = warp_max(best);
        if (lane == 0) index[j] = (int32_t)number_of(last);
    }
}

/* What is added to a sum of the scores that divides. */
DEVFN float floor_of(const tr_routing &how) {
    return how.score == TR_SIGMOID ? TR_SIGMOID_FLOOR : 0;
}

/* weight[k] of the chosen. A warp. */
DEVFN void weigh(float *weight, const int32_t *index, const tr_routing &how, const float *x,
                 float max, float inverse) {
    const int lane = (int)threadIdx.x % WARP;
    float sum = 0;
    for (int64_t j = lane; j < how.k; j += WARP) sum += score_of(how, x[index[j]], max, inverse);
    sum = how.renormalise ? warp_sum(sum, WARP) + floor_of(how) : 1;
    for (int64_t j = lane; j < how.k; j += WARP)
        weight[j] = score_of(how, x[index[j]], max, inverse) / sum;
}

/* A warp a token. Until its probabilities are written, their row holds the groups' worths. */
__global__ void route(tr_routing how, const float *logits, const uint8_t *valid, float *prob,
                      float *lse, int32_t *index, float *weight, int64_t rows) {
    const int lane = (int)threadIdx.x % WARP;
    for (int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP; n < rows;
         n += (int64_t)gridDim.x * WARPS) {
        const float *x = logits + n * how.E;
        float *p = prob + n * how.E, *w = weight + n * how.k, max = -INFINITY, sum = 0;
        int32_t *at = index + n * how.k;
        for (int64_t e = lane; e < how.E; e += WARP) max = fmaxf(max, x[e]);
        for (int o = WARP / 2; o > 0; o /= 2)
            max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, o));
        for (int64_t e = lane; e < how.E; e += WARP) sum += expf(x[e] - max);
        sum = warp_sum(sum, WARP);
        if (lane == 0) lse[n] = max + logf(sum);
        if (!valid || valid[n]) {
            choose(at, how, x, p, last_kept(how, x, p));
            SYNCWARP(0xffffffffu);
            weigh(w, at, how, x, max, 1 / sum);
        } else {
            for (int64_t j = lane; j < how.k; j += WARP) at[j] = -1, w[j] = 0;
        }
        for (int64_t e = lane; e < how.E; e += WARP) p[e] = score_of(how, x[e], max, 1 / sum);
    }
}

static void router_forward(tr_stream *s, const tr_routing *how, const float *logits,
                           const uint8_t *valid, float *prob, float *lse, int32_t *index,
                           float *weight, int64_t N) {
    if (N <= 0) return;
    LAUNCH(route, blocks_for(N, WARPS), THREADS, 0, s->handle)
    (*how, logits, valid, prob, lse, index, weight, N);
    tr_cuda_launched(s, "router_forward");
}

/* --- statistics ------------------------------------------------------------------------------ */

/* Groups are cut into chunks of rows, at most STAT_CHUNKS each, whose sums are added afterwards. */
enum { STAT_ROWS = 256, STAT_CHUNKS = 128 };

typedef struct {
    const float *prob, *lse;
    const float *inverse; /* [N] of the sum of a token's sigmoids; NULL: prob is a share as it is */
    const int32_t *index;
    const uint8_t *valid;
    int64_t first, rows, N, E, k, G;
    int64_t chunks, each, parts; /* of a group, rows of one, parts of THREADS experts */
} stats_args;

DEVFN bool is_valid(const stats_args &a, int64_t n) {
    return !a.valid || a.valid[n];
}

/* Rows begin to end of the experts that begin at `e`, by the whole block: their choices and
 * probabilities. */
DEVFN void sum_experts(const stats_args &a, double *to, int64_t begin, int64_t end, int64_t e) {
    SIMT_SHARED(int, seen, THREADS);
    SIMT_SHARED(double, part, THREADS);
    const int me = (int)threadIdx.x, here = a.E - e < THREADS ? (int)(a.E - e) : (int)THREADS;
    int size = 1;
    while (size < here) size *= 2;
    const int column = me % size, lanes = THREADS / size;
    double sum = 0;
    for (int64_t n = begin + me / size; n < end; n += lanes)
        if (column < here && is_valid(a, n))
            sum += (double)a.prob[n * a.E + e + column] * (a.inverse ? (double)a.inverse[n] : 1);
    seen[me] = 0;
    part[me] = sum;
    SYNCTHREADS();
    for (int64_t i = begin * a.k + me; i < end * a.k; i += THREADS) {
        const int64_t chosen = is_valid(a, i / a.k) ? a.index[i] - e : -1;
        if (chosen >= 0 && chosen < here) atomicAdd(&seen[chosen], 1);
    }
    SYNCTHREADS();
    if (me < here) {
        for (int lane = 1; lane < lanes; lane++) sum += part[lane * size + me];
        to[2 + e + me] = (double)seen[me];
        to[2 + a.E + e + me] = sum;
    }
    SYNCTHREADS();
}

/* Tokens and squared lse of rows begin to end, by the whole block. */
DEVFN void sum_tokens(const stats_args &a, double *to, int64_t begin, int64_t end) {
    SIMT_SHARED(double, red, WARPS);
    double tokens = 0, squares = 0;
    for (int64_t n = begin + threadIdx.x; n < end; n += THREADS) {
        if (!is_valid(a, n)) continue;
        tokens += 1;
        squares += (double)a.lse[n] * (double)a.lse[n];
    }
    tokens = block_sum(tokens, red);
    squares = block_sum(squares, red);
    if (threadIdx.x > 0) return;
    to[0] = tokens;
    to[1] = squares;
}

/* to[G, chunks, 2+2E]; an item is a chunk and a part of the experts. */
__global__ void stats_chunks(double *to, stats_args a) {
    for (int64_t item = blockIdx.x; item < a.G * a.chunks * a.parts; item += gridDim.x) {
        const int64_t chunk = item / a.parts, part = item % a.parts, g = chunk / a.chunks;
        int64_t begin = g * a.rows - a.first, end = begin + a.rows;
        begin = begin > 0 ? begin : 0, end = end < a.N ? end : a.N;
        begin += chunk % a.chunks * a.each;
        if (begin + a.each < end) end = begin + a.each;
        double *sums = to + chunk * (2 + 2 * a.E);
        sum_experts(a, sums, begin, end, part * THREADS);
        if (part == 0) sum_tokens(a, sums, begin, end);
    }
}

__global__ void stats_sum(double *stats, const double *from, int64_t G, int64_t chunks,
                          int64_t width) {
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < G * width;
         i += (int64_t)gridDim.x * THREADS) {
        const double *at = from + i / width * chunks * width + i % width;
        double sum = 0;
        for (int64_t c = 0; c < chunks; c++) sum += at[c * width];
        stats[i] = sum;
    }
}

/* inverse[n] = 1 / sum of prob[n,:]. A warp a token. */
__global__ void sum_sigmoids(float *inverse, const float *prob, int64_t rows, int64_t E) {
    const int lane = (int)threadIdx.x % WARP;
    for (int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP; n < rows;
         n += (int64_t)gridDim.x * WARPS) {
        float sum = 0;
        for (int64_t e = lane; e < E; e += WARP) sum += prob[n * E + e];
        sum = warp_sum(sum, WARP) + TR_SIGMOID_FLOOR;
        if (lane == 0) inverse[n] = 1 / sum;
    }
}

static void router_stats(tr_stream *s, const tr_routing *how, const float *prob, const float *lse,
                         const int32_t *index, const uint8_t *valid, double *stats, int64_t first,
                         int64_t rows, int64_t N, int64_t G) {
    if (G <= 0) return;
    const int64_t E = how->E, k = how->k;
    const int64_t most = rows < N ? rows : N, width = 2 + 2 * E;
    int64_t each = (most + STAT_CHUNKS - 1) / STAT_CHUNKS;
    if (each < STAT_ROWS) each = STAT_ROWS;
    const int64_t chunks = most > each ? (most + each - 1) / each : 1;
    const int64_t parts = E > THREADS ? (E + THREADS - 1) / THREADS : 1;
    const int64_t sums = chunks > 1 ? G * chunks * width : 0;
    const int64_t tokens = how->score == TR_SIGMOID ? N : 0;
    double *work = NULL;
    if (sums + tokens > 0)
        work = (double *)tr_cuda_work(s, (size_t)sums * sizeof(double) +
                                             (size_t)tokens * sizeof(float));
    double *to = chunks > 1 ? work : stats;
    float *inverse = tokens > 0 ? (float *)(work + sums) : NULL;
    if (tokens > 0) {
        LAUNCH(sum_sigmoids, blocks_for(N, WARPS), THREADS, 0, s->handle)(inverse, prob, N, E);
        tr_cuda_launched(s, "router_stats' sigmoids");
    }
    const stats_args a = {prob, lse, inverse, index, valid,  first, rows,
                          N,    E,   k,       G,     chunks, each,  parts};
    LAUNCH(stats_chunks, blocks_for(G * chunks * parts, 1), THREADS, 0, s->handle)(to, a);
    tr_cuda_launched(s, "router_stats");
    if (chunks == 1) return;
    LAUNCH(stats_sum, blocks_for(G * width, THREADS), THREADS, 0, s->handle)
    (stats, to, G, chunks, width);
    tr_cuda_launched(s, "router_stats' sums");
}

/* --- backward -------------------------------------------------------------------------------- */

typedef struct {
    const float *dweight, *logits, *prob, *lse;
    const int32_t *index;
    const float *weight;
    const uint8_t *valid;
    const float *prob_grad, *z_grad;
    int64_t first, rows, N;
} route_gradients;

/* w_j = p_j / sum p has the gradient (dw_j - sum_i dw_i w_i) / sum p; w_j = p_j has dw_j. */
typedef struct {
    float dot, inverse;
} weight_slope;

DEVFN weight_slope slope_of(const tr_routing &how, const route_gradients &a, int64_t n) {
    if (!how.renormalise) return weight_slope{0, 1};
    float dot = 0, chosen = 0;
    for (int64_t i = n * how.k + (int)threadIdx.x % WARP; i < (n + 1) * how.k; i += WARP) {
        dot += a.dweight[i] * a.weight[i];
        chosen += a.prob[n * how.E + a.index[i]];
    }
    dot = warp_sum(dot, WARP);
    return weight_slope{dot, 1 / (warp_sum(chosen, WARP) + floor_of(how))};
}

/* A warp a token: dlogits = p (dp - mean + z), dp the gradient of prob, mean = sum p dp. All of it
 * is written as if the weights had none, then the chosen again. */
__global__ void route_backward(tr_routing how, float *dlogits, route_gradients a) {
    const int lane = (int)threadIdx.x % WARP;
    const int64_t E = how.E, k = how.k;
    for (int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP; n < a.N;
         n += (int64_t)gridDim.x * WARPS) {
        const float *p = a.prob + n * E;
        float *d = dlogits + n * E;
        if (a.valid && !a.valid[n]) {
            for (int64_t e = lane; e < E; e += WARP) d[e] = 0;
            continue;
        }
        const int64_t g = (a.first + n) / a.rows;
        const float *dp = a.prob_grad ? a.prob_grad + g * E : NULL;
        const float z = a.z_grad ? a.z_grad[g] * a.lse[n] : 0;
        const weight_slope w = a.dweight ? slope_of(how, a, n) : weight_slope{0, 0};
        float mean = 0;
        for (int64_t e = lane; e < E && dp; e += WARP) mean += p[e] * dp[e];
        for (int64_t i = n * k + lane; i < (n + 1) * k && a.dweight; i += WARP)
            mean += p[a.index[i]] * ((a.dweight[i] - w.dot) * w.inverse);
        mean = warp_sum(mean, WARP);
        for (int64_t e = lane; e < E; e += WARP) d[e] = p[e] * ((dp ? dp[e] : 0) - mean + z);
        if (!a.dweight) continue;
        SYNCWARP(0xffffffffu);
        for (int64_t i = n * k + lane; i < (n + 1) * k; i += WARP) {
            const int64_t e = a.index[i];
            const float own = (dp ? dp[e] : 0) + (a.dweight[i] - w.dot) * w.inverse;
            d[e] = p[e] * (own - mean + z);
        }
    }
}

/* A warp a token. With share_e = p_e / sum p: p has the gradient (dp - <share, dp>) / sum p and, of
 * the chosen, that of the weight; dlogits = p (1 - p) of it + z softmax. */
__global__ void route_backward_sigmoid(tr_routing how, float *dlogits, route_gradients a) {
    const int lane = (int)threadIdx.x % WARP;
    const int64_t E = how.E, k = how.k;
    for (int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP; n < a.N;
         n += (int64_t)gridDim.x * WARPS) {
        const float *p = a.prob + n * E, *x = a.logits + n * E;
        float *d = dlogits + n * E;
        if (a.valid && !a.valid[n]) {
            for (int64_t e = lane; e < E; e += WARP) d[e] = 0;
            continue;
        }
        const int64_t g = (a.first + n) / a.rows;
        const float *dp = a.prob_grad ? a.prob_grad + g * E : NULL;
        const float z = a.z_grad ? a.z_grad[g] * a.lse[n] : 0;
        const weight_slope w = a.dweight ? slope_of(how, a, n) : weight_slope{0, 0};
        float whole = 0, mean = 0;
        for (int64_t e = lane; e < E && dp; e += WARP) {
            whole += p[e];
            mean += p[e] * dp[e];
        }
        whole = warp_sum(whole, WARP) + TR_SIGMOID_FLOOR;
        mean = warp_sum(mean, WARP) / whole;
        for (int64_t e = lane; e < E; e += WARP) {
            const float of_lse = a.z_grad ? z * expf(x[e] - a.lse[n]) : 0;
            d[e] = p[e] * (1 - p[e]) * (dp ? (dp[e] - mean) / whole : 0) + of_lse;
        }
        if (!a.dweight) continue;
        SYNCWARP(0xffffffffu);
        for (int64_t i = n * k + lane; i < (n + 1) * k; i += WARP) {
            const int64_t e = a.index[i];
            d[e] += p[e] * (1 - p[e]) * ((a.dweight[i] - w.dot) * w.inverse);
        }
    }
}

static void router_backward(tr_stream *s, const tr_routing *how, float *dlogits,
                            const float *dweight, const float *logits, const float *prob,
                            const float *lse, const int32_t *index, const float *weight,
                            const uint8_t *valid, const float *prob_grad, const float *z_grad,
                            int64_t first, int64_t rows, int64_t N) {
    if (N <= 0) return;
    const route_gradients a = {dweight, logits,    prob,   lse,   index, weight,
                               valid,   prob_grad, z_grad, first, rows,  N};
    if (how->score == TR_SIGMOID)
        LAUNCH(route_backward_sigmoid, blocks_for(N, WARPS), THREADS, 0, s->handle)
    (*how, dlogits, a);
    else LAUNCH(route_backward, blocks_for(N, WARPS), THREADS, 0, s->handle)(*how, dlogits, a);
    tr_cuda_launched(s, "router_backward");
}

/* --- capacity -------------------------------------------------------------------------------- */

/* Pairs in order of their score, the highest first. */
__global__ void score_pairs(tr_cuda_pairs to, const float *score, int64_t n) {
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * THREADS) {
        to.key[i] = ~order_of(score[i]);
        to.value[i] = (int32_t)i;
    }
}

/* Pairs in order of their sequence of `pairs` pairs and their expert; `none` for those without.
 * fresh: in order of their number, otherwise as they are. */
__global__ void expert_pairs(tr_cuda_pairs to, const int32_t *index, int64_t n, int64_t pairs,
                             int64_t E, int64_t none, bool fresh) {
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * THREADS) {
        const int64_t pair = fresh ? i : to.value[i];
        to.key[i] = (uint32_t)(index[pair] < 0 ? none : pair / pairs * E + index[pair]);
        if (fresh) to.value[i] = (int32_t)i;
    }
}

/* In sorted order a pair is beyond its expert's capacity if the one `capacity` before it is of the
 * same sequence and expert. */
__global__ void take_pairs(int32_t *taken, tr_cuda_pairs sorted, const int32_t *index, int64_t n,
                           int64_t capacity) {
    for (int64_t r = (int64_t)blockIdx.x * THREADS + threadIdx.x; r < n;
         r += (int64_t)gridDim.x * THREADS) {
        const bool fits = r < capacity || sorted.key[r - capacity] != sorted.key[r];
        taken[sorted.value[r]] = fits ? index[sorted.value[r]] : -1;
    }
}

static void router_capacity(tr_stream *s, int32_t *taken, const int32_t *index, const float *score,
                            int64_t B, int64_t S, int64_t E, int64_t k, int64_t capacity,
                            bool by_score) {
    const int64_t n = B * S * k;
    if (n <= 0) return;
    const unsigned blocks = blocks_for(n, THREADS);
    tr_cuda_sorter sorter = tr_cuda_sorter_in(tr_cuda_work(s, tr_cuda_sort_bytes(n)), n);
    if (by_score) {
        LAUNCH(score_pairs, blocks, THREADS, 0, s->handle)(sorter.pairs, score, n);
        tr_cuda_launched(s, "router_capacity's scores");
        tr_cuda_sort(s, &sorter, 32);
    }
    LAUNCH(expert_pairs, blocks, THREADS, 0, s->handle)
    (sorter.pairs, index, n, S * k, E, B * E, !by_score);
    tr_cuda_launched(s, "router_capacity's experts");
    tr_cuda_sort(s, &sorter, tr_cuda_key_bits(B * E + 1));
    LAUNCH(take_pairs, blocks, THREADS, 0, s->handle)(taken, sorter.pairs, index, n, capacity);
    tr_cuda_launched(s, "router_capacity");
}

extern "C" void tr_cuda_router(tr_kernels *k) {
    k->router_forward = router_forward;
    k->router_stats = router_stats;
    k->router_backward = router_backward;
    k->router_capacity = router_capacity;
}
