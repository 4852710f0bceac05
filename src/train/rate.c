/* rate.c - learning rate schedules. Floor: train. */
#include "train/rate.h"

#include <math.h>

double tr_learning_rate(const tr_config *config, int64_t step) {
    double peak = config->optimizer.learning_rate, low = config->optimizer.min_learning_rate;
    int64_t steps = config->training.steps, warmup = config->optimizer.warmup_steps;
    if (step <= warmup) return peak * (double)step / (double)warmup;
    double done = steps > warmup ? (double)(step - warmup) / (double)(steps - warmup) : 1.0;
    if (done > 1) done = 1;
    switch (config->optimizer.schedule) {
    case TR_LR_COSINE:
        return low + (peak - low) * 0.5 * (1 + cos(3.14159265358979323846 * done));
    case TR_LR_LINEAR:
        return peak + (low - peak) * done;
    case TR_LR_CONSTANT:
        return peak;
    case TR_LR_WSD: {
        int64_t decay = config->optimizer.decay_steps, left = steps - step;
        return left >= decay ? peak : low + (peak - low) * (double)left / (double)decay;
    }
    }
    return peak;
}
