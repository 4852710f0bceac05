/* log.c - the sink of log lines. Floor: base. */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>

static int log_rank;

void tr_log_rank(int rank) {
    log_rank = rank;
}
int tr_log_get_rank(void) {
    return log_rank;
}

void tr_say(const char *format, ...) {
    if (log_rank != 0) return;
    va_list args;
    va_start(args, format);
    vfprintf(stdout, format, args);
    va_end(args);
    fputc('\n', stdout);
    fflush(stdout);
}

void tr_warn(const char *format, ...) {
    if (log_rank != 0) return;
    char text[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fflush(stdout);
    fprintf(stderr, "warning: %s\n", text);
    fflush(stderr);
}

void tr_print_error(const char *text) {
    fflush(stdout);
    fprintf(stderr, "error: %s\n", text);
    fflush(stderr);
}
