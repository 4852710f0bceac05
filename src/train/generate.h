/* generate.h - text from a trained model. Floor: train. */
#pragma once
#include "train/job.h"

typedef struct {
    const char *prompt; /* bytes */
    int64_t tokens;     /* to add */
    double temperature; /* 0: the most likely token */
    double top_p;       /* the smallest set of tokens with this much probability (Holtzman 2020) */
    uint64_t seed;
} tr_generate_options;

/* Local; a world of one rank. Writes prompt and continuation to standard output as they come. The
 * whole prefix (its last sequence_length tokens) is computed again for each token. */
tr_status tr_generate(tr_job *job, const tr_generate_options *options);
