/* comparison.h - what a grid gave beside what one rank gave, against limits, as text.
 * Floor: train. All calls are local, on rank 0. */
#pragma once
#include "train/flips.h"

enum { TR_VERIFIED_STEPS = 2 };
typedef enum { TR_VERIFY_LOSS, TR_VERIFY_AUX, TR_VERIFY_Z, TR_VERIFY_NORM, TR_VERIFY_SUMS } tr_sum;

typedef struct {
    double sum[TR_VERIFY_SUMS]; /* relative */
    double gradient, weight;    /* ||grid - one|| / ||one|| of a parameter */
    double gap;                 /* of a flip that nothing else caused */
    double share; /* of its part of the whole norm: to this a smaller gradient is held */
} tr_verify_limits;

/* The limits of one step from the same weights, when `flips` of the batch's tokens were routed
 * differently. */
tr_verify_limits tr_verify_limits_of(tr_dtype t, int64_t flips, int64_t tokens);

typedef struct {
    const char *name;
    double gradient[TR_VERIFIED_STEPS], weight[TR_VERIFIED_STEPS];
} tr_verify_row;

typedef struct {
    double grid[TR_VERIFY_SUMS], one[TR_VERIFY_SUMS];
    tr_flips flips;
    tr_verify_limits limits;
} tr_verify_step;

typedef struct {
    tr_verify_step step[TR_VERIFIED_STEPS];
    tr_verify_row *rows; /* [count], in order of declaration */
    int64_t count;
    char fault[512]; /* found outside the table: "" if nothing is */
} tr_comparison;

/* ||a - b|| / max(||b||, least); infinite when that is a division by 0. */
double tr_verify_relative(const float *a, const float *b, int64_t n, double least);

/* Prints the table, at most 100 columns; worst rows first, `most` of them. */
void tr_comparison_print(const tr_comparison *comparison, int64_t most);
/* TR_OK, or TR_ERR_INTERNAL naming the worst. */
tr_status tr_comparison_judge(const tr_comparison *comparison);
