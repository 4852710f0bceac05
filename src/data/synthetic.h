/* synthetic.h - samples drawn from a seed, for proofs that need no files. Floor: data.
 *
 * Some tokens are far more common than others, labels are hidden at a rate that differs from sample
 * to sample, and where there is a pad token every third sample ends in pads: so ranks and
 * micro-batches hold unequal numbers of labels, as real data may have it. Documents are of any
 * length; some fill a sample. */
#pragma once
#include <stdint.h>

/* Local, pure: a function of (seed, position). As tr_dataset_sample. */
void tr_synthetic_sample(uint64_t seed, int64_t position, int64_t S, int64_t vocab_size,
                         int64_t pad_id, int32_t *input /* [S] */, int32_t *label /* [S] */,
                         uint8_t *valid /* [S] */);
/* Local, pure. As tr_dataset_documents. */
void tr_synthetic_documents(uint64_t seed, int64_t position, int64_t S, int32_t *begin /* [S] */);
