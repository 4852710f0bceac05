/* draw.h - a schedule's timeline for people: as text, and as a trace that Perfetto opens. Floor:
 * plan. */
#pragma once
#include "plan/simulate.h"

/* Local. A row a rank, a legend and the idle fraction, at most 100 columns, on standard output. */
void tr_draw_timeline(const tr_schedule *schedules, const tr_schedule_shape *shape,
                      const tr_timeline *timeline);

/* Local. Chrome's trace format (JSON): a thread a rank, an event a computation or a wait; a unit of
 * the timeline is a millisecond. TR_ERR_IO. */
tr_status tr_write_trace(const char *path, const tr_schedule *schedules,
                         const tr_schedule_shape *shape, const tr_timeline *timeline);

/* Local. `trireme plan CONFIG`: the config's schedule with a forward, a gradient of the input and
 * one of the weights costing a unit each for a rank's share of the layers: how much of the time
 * ranks idle, or with `draw` all of it. `trace` is a path, or NULL. */
tr_status tr_plan_schedule(const tr_config *config, int64_t micro_batches, bool draw,
                           const char *trace);
