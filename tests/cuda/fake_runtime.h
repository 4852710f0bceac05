/* fake_runtime.h - a CUDA runtime that only writes down what is asked of it, and fails on request.
 * Floor: tests. */
#pragma once
#include <cuda_runtime_api.h>
#include <stdbool.h>

/* Forgets everything: no calls, one device, a driver of the runtime's version, nothing fails. */
void fake_reset(void);
void fake_devices(int count);
void fake_driver(int version); /* 0: none */
void fake_capability(int major, int minor);

/* The nth call from now (1 is the next) of this name, or of any if NULL, returns `error`. */
void fake_fail(const char *name, int nth, cudaError_t error);

/* Events, and streams, are done when they are asked for the nth time. */
void fake_event_polls(int polls);

/* All calls since the last fake_clear, one a line: "cudaMemcpyAsync m2 m1 64 to-device s1".
 * Memory, streams and events have numbers in the order of their making; "h" is other memory. */
const char *fake_log(void);
/* Whether what is asked again and again, events, streams and states, is in the log. It is. */
void fake_log_questions(bool on);
void fake_clear(void); /* the log alone */
int fake_calls(void);  /* lines in it */

/* How much memory and how many streams and events were made and not given back. */
int fake_alive(void);

/* For fakes of other libraries: writes a line down, "CALL" and what follows; the result is what
 * fake_fail has for it, or 0. The name of an address in lines. */
int fake_note(const char *call, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *fake_name(const void *address);
