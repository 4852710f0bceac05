/* status.h - how a function says that it failed, and the message that goes with it.
 * Floor: base.
 *
 * A status is the exit code the program would end with. The function that finds an error calls
 * tr_fail with a text that names the thing and the remedy; callers pass the status up with TR_TRY
 * and may add context. The message waits in one buffer per process until tr_agree (dist/comm.h)
 * or main prints it once. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    TR_OK = 0,
    TR_ERR_USAGE = 64,    /* command line or config */
    TR_ERR_DATA = 65,     /* bad data or checkpoint content */
    TR_ERR_MISSING = 66,  /* a file that is not there */
    TR_ERR_INTERNAL = 70, /* internal or numeric failure */
    TR_ERR_IO = 74,       /* read or write failed, disk full */
    TR_STOPPED = 75       /* stopped by a signal after saving: run again to go on */
} tr_status;

#define TR_TRY(expr)                                                                               \
    do {                                                                                           \
        tr_status tr_try_ = (expr);                                                                \
        if (tr_try_ != TR_OK) return tr_try_;                                                      \
    } while (0)

/* Local. Stores the message (replacing any earlier one) and returns `status`. */
tr_status tr_fail(tr_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Local. Puts "text: " before the stored message; returns `status`. For callers that know more. */
tr_status tr_context(tr_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Local. The stored message, "" if there is none. Valid until the next tr_fail or tr_context. */
const char *tr_error_message(void);
/* Local. The status that was stored with it. */
tr_status tr_error_status(void);
