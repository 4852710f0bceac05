/* rate.h - the learning rate of a step. Floor: train. */
#pragma once
#include "config/config.h"

/* Step s is 1-based, as logged. Linear warm-up: peak*s/warmup for s <= warmup. Then from the peak
 * to min_learning_rate at the last step, by a half cosine or a line; constant stays at the peak;
 * WSD stays there until the last decay_steps, which go down in a line. */
double tr_learning_rate(const tr_config *config, int64_t step);
