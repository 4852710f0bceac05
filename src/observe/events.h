/* events.h - TensorBoard event files, written without its libraries. Floor: observe.
 *
 * A file is a row of records: u64 length, masked crc32c of those 8 bytes, data, masked crc32c of
 * the data; little-endian. Data is an Event in Protocol Buffers' wire format. Each start of a run
 * makes a new file whose second record says at which step it starts: TensorBoard then forgets what
 * earlier files of the folder say about that step and later ones. */
#pragma once
#include "base/status.h"

typedef struct tr_events tr_events;

typedef struct {
    const char *tag;
    double value; /* stored as float32; NaN and infinities are kept */
} tr_scalar;

/* Local. Makes folder/events.out.tfevents.SECONDS.HOST (never an existing one). TR_ERR_IO. */
tr_status tr_events_open(const char *folder, int64_t first_step, tr_events **events_p);
/* Local. One event that holds all scalars of a step, handed to the system at once. TR_ERR_IO. */
tr_status tr_events_write(tr_events *events, int64_t step, int64_t count, const tr_scalar *scalars);
/* Local. TR_ERR_IO. NULL-safe. */
tr_status tr_events_close(tr_events *events);
