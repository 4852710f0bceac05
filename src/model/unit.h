/* unit.h - the weights of a unit (param.h) are here when they are used. Floor: model.
 *
 * After an update each rank has its part of new weights. Before stage 3 of ZeRO the parts travel to
 * all ranks under the next forward's first computations, and a unit waits for its own alone. At
 * stage 3 whole weights exist only between take and leave, and for as long after that as their
 * berth is not needed; the next unit's travel meanwhile. */
#pragma once
#include "model/param.h"

/* Collective on the unit's groups, in the same order on all their ranks, as are the next three: a
 * unit's weights are whole, on the device, from take to leave. A unit may be taken twice. */
void tr_unit_take(tr_registry *registry, int64_t unit);
void tr_unit_leave(tr_registry *registry, int64_t unit);
/* It will be taken next: its weights begin to travel, if there is a berth. */
void tr_unit_expect(tr_registry *registry, int64_t unit);

/* Collective likewise. The masters of this rank's part of a stretch's bucket are new and, before
 * stage 3, written in its weights: they begin to travel. */
void tr_stretch_share(tr_registry *registry, const tr_stretch *stretch, int64_t bucket);
/* Collective likewise. Before masters change: nothing is under way any more, and at stage 3 no
 * berth holds weights. Whoever reads weights or masters without taking units calls it first. */
void tr_units_settle(tr_registry *registry);
/* Collective likewise. Weights from masters that were drawn or read. */
void tr_registry_publish(tr_registry *registry);
