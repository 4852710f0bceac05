/* mixture.h - which file a position of a weighted mixture reads. Floor: data.
 *
 * One period of positions is laid out at the start: every file gets its share of slots (the largest
 * remainders round up), the slots are shuffled, and each slot knows how many earlier slots its file
 * has. The pattern then repeats, so any position is found without a history. */
#pragma once
#include "base/status.h"

enum { TR_MIXTURE_MIN_PERIOD = 1000, TR_MIXTURE_MAX_PERIOD = 65536 };

typedef struct {
    int64_t period;  /* slots: the fewest >= 1000 with whole shares, else 65536 */
    int64_t *count;  /* [files] slots a period, >= 1 */
    int32_t *file;   /* [period] */
    int64_t *before; /* [period] earlier slots of the same file */
} tr_mixture;

/* Local. `weights` [files] are positive and each at least 1/65536 of their sum. */
void tr_mixture_init(const double *weights, int64_t files, uint64_t seed, tr_mixture *mixture);
void tr_mixture_fini(tr_mixture *mixture);

/* Local. The file read at `position` >= 0, and how many earlier positions read that file. */
void tr_mixture_locate(const tr_mixture *mixture, int64_t position, int64_t *file_p,
                       int64_t *own_position_p);
