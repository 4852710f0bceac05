/* permute.h - a shuffled order that is computed, not stored. Floor: data. */
#pragma once
#include <stdint.h>

/* Local. The bijection of [0, n) chosen by `key`, evaluated at `index`: 1 <= n < 2^62,
 * 0 <= index < n. About 0.1 us. */
int64_t tr_permute(uint64_t key, int64_t n, int64_t index);
