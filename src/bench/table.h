/* table.h - the rows of the printed table. Floor: bench.
 *
 * A row's name is printed when its measurement begins and the rest of the line when it ends, so the
 * table shows its own progress. Rank 0 prints; lines have at most 100 columns. */
#pragma once
#include <stdbool.h>

typedef enum {
    TR_SHARE,  /* measured / base, in percent */
    TR_TIMES,  /* measured / base, as a factor */
    TR_POINTS, /* how far measured and base are apart, both in percent */
    TR_ALONE   /* measured against the target itself; there is no base */
} tr_row_kind;

typedef struct {
    const char *unit; /* "GFLOP/s", "GB/s", "GB", "MB" */
    double measured, base;
    tr_row_kind kind;
    double target;    /* of the ratio, or of what was measured; 0: there is none */
    bool at_most;     /* the target is an upper limit */
    const char *note; /* printed in place of a target; nullable */
} tr_row;

typedef struct {
    int met, missed, skipped;
    bool open; /* a row's name is printed, the rest is not */
} tr_table;

/* Local, on every rank. */
void tr_table_head(void);
void tr_table_foot(const tr_table *table);
/* An error ended the measurements: so says the row that is open. */
void tr_table_break(tr_table *table);
void tr_row_begin(tr_table *table, const char *name, ...) __attribute__((format(printf, 2, 3)));
void tr_row_end(tr_table *table, const tr_row *row);
/* Instead of tr_row_end. */
void tr_row_skip(tr_table *table, const char *reason);
