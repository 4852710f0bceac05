/* mixture.c - weighted mixtures of files. Floor: data. */
#include "data/mixture.h"

#include "base/heap.h"
#include "base/rng.h"
#include "data/permute.h"

#include <math.h>
#include <stdlib.h>

static const double whole = 1e-6; /* a share this close to a whole number of slots is one */

static bool period_fits(const double *share, int64_t files, int64_t period) {
    for (int64_t f = 0; f < files; f++) {
        double slots = share[f] * (double)period;
        if (slots < 1 - whole || fabs(slots - nearbyint(slots)) > whole) return false;
    }
    return true;
}

/* Whole slots first, then one more for the largest remainders until the period is full. */
static void share_slots(const double *share, int64_t files, int64_t period, int64_t *count) {
    double *rest = tr_heap_alloc(files, sizeof *rest);
    int64_t left = period;
    for (int64_t f = 0; f < files; f++) {
        double slots = share[f] * (double)period;
        count[f] = (int64_t)floor(slots + whole);
        rest[f] = slots - (double)count[f];
        left -= count[f];
    }
    for (; left > 0; left--) {
        int64_t best = 0;
        for (int64_t f = 1; f < files; f++)
            if (rest[f] > rest[best]) best = f;
        count[best]++;
        rest[best] -= 1;
    }
    free(rest);
}

void tr_mixture_init(const double *weights, int64_t files, uint64_t seed, tr_mixture *mixture) {
    double sum = 0, *share = tr_heap_alloc(files, sizeof *share);
    for (int64_t f = 0; f < files; f++) sum += weights[f];
    for (int64_t f = 0; f < files; f++) share[f] = weights[f] / sum;

    int64_t period = TR_MIXTURE_MIN_PERIOD;
    while (period < TR_MIXTURE_MAX_PERIOD && !period_fits(share, files, period)) period++;
    mixture->period = period;
    mixture->count = tr_heap_alloc(files, sizeof *mixture->count);
    mixture->file = tr_heap_alloc(period, sizeof *mixture->file);
    mixture->before = tr_heap_alloc(period, sizeof *mixture->before);
    share_slots(share, files, period, mixture->count);

    uint64_t key = tr_random_u64(seed, tr_stream_of_name("data.mixture"), 0);
    int64_t slot = 0;
    for (int64_t f = 0; f < files; f++)
        for (int64_t i = 0; i < mixture->count[f]; i++)
            mixture->file[tr_permute(key, period, slot++)] = (int32_t)f;
    int64_t *seen = tr_heap_alloc(files, sizeof *seen);
    for (int64_t s = 0; s < period; s++) mixture->before[s] = seen[mixture->file[s]]++;
    free(seen);
    free(share);
}

void tr_mixture_fini(tr_mixture *mixture) {
    free(mixture->count);
    free(mixture->file);
    free(mixture->before);
    *mixture = (tr_mixture){0};
}

void tr_mixture_locate(const tr_mixture *mixture, int64_t position, int64_t *file_p,
                       int64_t *own_position_p) {
    int64_t round = position / mixture->period, slot = position % mixture->period;
    *file_p = mixture->file[slot];
    *own_position_p = round * mixture->count[*file_p] + mixture->before[slot];
}
