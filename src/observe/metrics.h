/* metrics.h - what a run writes about itself: metrics.jsonl, TensorBoard events, progress lines.
 * Floor: observe. All calls are local and made by rank 0 alone. */
#pragma once
#include "base/status.h"

/* One training step. Everything but the three timings is the same in equal runs. */
typedef struct {
    int64_t step;
    double loss, aux_loss, z_loss, grad_norm, learning_rate;
    int64_t tokens, samples; /* cumulative */
    bool skipped;
    int64_t moe_layers, experts;
    const int64_t *expert_load; /* [moe_layers, experts] */
    const int64_t *sample_ids;  /* [n_samples] of this step, in order; NULL unless log.samples */
    int64_t n_samples;
    double seconds, tokens_per_second;
    double mfu; /* model FLOP/s over peak FLOP/s, a fraction; NaN when the peak is not known */
    bool evaluated;
    double validation_loss, validation_bits_per_byte;
} tr_step_record;

typedef struct tr_metrics tr_metrics;

/* Opens run_directory/metrics.jsonl (and samples.jsonl, TensorBoard events when asked), creating
 * the folder and its parents. Rows of steps after `last_step` (0: a fresh run) and torn lines are
 * cut, so that a resumed run's file equals an undisturbed one's. TR_ERR_IO. */
tr_status tr_metrics_open(const char *run_directory, int64_t last_step, bool samples,
                          bool tensorboard, tr_metrics **metrics_p);
/* One JSON object and newline, handed to the system. Non-finite numbers are null; equal floats give
 * equal text: of 15 to 17 digits the fewest that read back to the same double. TR_ERR_IO. */
tr_status tr_metrics_write(tr_metrics *metrics, const tr_step_record *record);
tr_status tr_metrics_close(tr_metrics *metrics); /* NULL-safe */

/* Progress for people on standard output: on a terminal a bar that rewrites itself, otherwise plain
 * lines for the first step, the last, and those that `every` divides: step, loss, gradient norm,
 * tokens/s, MFU, time left. A validation gets a line of its own. At most 100 columns. */
typedef struct tr_progress tr_progress;
/* The steps to come are steps_done + 1 .. last_step; the clock of the first starts here. */
tr_progress *tr_progress_start(int64_t steps_done, int64_t last_step, int64_t every);
void tr_progress_step(tr_progress *progress, const tr_step_record *record);
/* Ends the bar's line, so that other text may follow; the next step draws it anew. NULL-safe. */
void tr_progress_pause(tr_progress *progress);
void tr_progress_finish(tr_progress *progress); /* NULL-safe */
