/* simulate.h - when each action of a schedule would run, from what each kind costs. Floor: plan.
 * Pure and local. */
#pragma once
#include "train/schedule.h"

/* Of one chunk of one rank, in any unit of time. */
typedef struct {
    double forward, input, weight; /* forward, gradient of the input, of the weights */
    double both;                   /* FORWARD_BACKWARD; 0: as much as its three parts */
    double message;                /* from a send to its arrival on another rank */
    const double *share;           /* [stages] factors of the four above; NULL: all are 1 */
} tr_costs;

typedef struct {
    double start, end; /* of sends: both when it begins; of receives: from waiting to arrival */
} tr_span;

typedef struct {
    int64_t ranks;
    tr_span **spans;     /* [ranks][actions of that rank] */
    double start, end;   /* first start and last end over all ranks */
    double *work, *idle; /* [ranks] sum of computations; end - start less that */
    double *gap;         /* [ranks] idle time between the rank's own first and last computation */
} tr_timeline;

/* Of lists that are proved. Freed by tr_timeline_free. */
tr_timeline tr_simulate(const tr_schedule *schedules, const tr_schedule_shape *shape,
                        const tr_costs *costs);
void tr_timeline_free(tr_timeline *timeline);

/* Idle time of all ranks over the time of all ranks, 0 to 1. */
double tr_timeline_idle(const tr_timeline *timeline);
