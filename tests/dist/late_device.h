/* late_device.h - a device for tests on machines without one. Its memory cannot be touched by the
 * host, or by MPI: reading it crashes. New memory is full of 0xff. What is enqueued on its streams
 * happens late, in steps of random streams, while the host asks for events or waits: what is not
 * ordered by streams and events goes wrong. Wrong use (copies of memory that is not the device's,
 * leaks) ends the process. */
#pragma once
#include "base/device.h"

typedef struct late_device late_device;

late_device *late_create(uint64_t seed);
tr_device *late_device_of(late_device *late);
/* Fails unless everything was given back. */
void late_destroy(late_device *late);

/* One random step of every stream. */
void late_tick(late_device *late);
/* Where the host may touch what is at an address of the device. */
void *late_inside(late_device *late, const void *outside, size_t bytes);
/* Enqueues what is called until it returns true; `self` is freed then. */
void late_enqueue(tr_stream *stream, bool (*step)(void *self), void *self);
/* Pieces of staging memory allocated so far. */
int64_t late_stagings(const late_device *late);
