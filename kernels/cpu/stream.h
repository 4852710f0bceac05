/* stream.h - the CPU's stream. Floor: kernels, internal. */
#pragma once
#include "kernels/device.h"

struct tr_stream {
    tr_device *device; /* borrowed */
    void (*drive)(void *context);
    void *context;
};

/* Local, by the calling thread of a kernel alone. Between its parts. */
static inline void tr_stream_breathe(const tr_stream *s) {
    if (s && s->drive) s->drive(s->context);
}
