/* abort.c - the end of a job that cannot go on, see comm.h. Floor: dist. */
#include "dist/backend.h"
#include "dist/watch.h"

#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void tr_abort(const char *format, ...) {
    char what[2048], where[512], text[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    tr_watch_here(where, sizeof where);
    snprintf(text, sizeof text, "%s%s", what, where);
    tr_print_error(text);

    int up = 0, down = 0;
    MPI_Initialized(&up);
    MPI_Finalized(&down);
    if (up && !down) MPI_Abort(MPI_COMM_WORLD, TR_ERR_INTERNAL);
    _Exit(TR_ERR_INTERNAL);
}

void tr_abort_with(const char *text) {
    tr_abort("%s", text);
}

void tr_mpi_check(int code, const char *call) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "unknown error";
    int length = 0;
    MPI_Error_string(code, text, &length);
    tr_abort("%.*s failed: %s", (int)strcspn(call, "("), call, text);
}
