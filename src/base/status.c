/* status.c - the one error message of this process. Floor: base. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

enum { TR_MESSAGE_BYTES = 4096 };
static char message[TR_MESSAGE_BYTES];
static tr_status message_status;

tr_status tr_fail(tr_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return message_status = status;
}

tr_status tr_context(tr_status status, const char *format, ...) {
    char front[TR_MESSAGE_BYTES / 2], whole[2 * TR_MESSAGE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(front, sizeof front, format, args);
    va_end(args);
    snprintf(whole, sizeof whole, "%s: %s", front, message);
    snprintf(message, sizeof message, "%.*s", TR_MESSAGE_BYTES - 1, whole);
    return message_status = status;
}

const char *tr_error_message(void) {
    return message;
}

tr_status tr_error_status(void) {
    return message_status;
}
