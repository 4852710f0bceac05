/* abort.c - the end of a job that cannot go on, see comm.h. Floor: dist. */
#include "dist/backend.h"

#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Process-wide, so that any floor can abort without carrying a grid. */
static char abort_place[128];
static int64_t abort_step = -1;

void tr_abort_place(const char *place) {
    snprintf(abort_place, sizeof abort_place, "%s", place);
}
void tr_abort_step(int64_t step) {
    abort_step = step;
}

void tr_abort(const char *format, ...) {
    char what[2048], text[4096], step[32] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (abort_step >= 0) snprintf(step, sizeof step, ", step %lld", (long long)abort_step);
    snprintf(text, sizeof text, "%s (rank %d%s%s%s)", what, tr_log_get_rank(),
             abort_place[0] ? ", " : "", abort_place, step);
    tr_print_error(text);

    int up = 0, down = 0;
    MPI_Initialized(&up);
    MPI_Finalized(&down);
    if (up && !down) MPI_Abort(MPI_COMM_WORLD, TR_ERR_INTERNAL);
    _Exit(TR_ERR_INTERNAL);
}

void tr_mpi_check(int code, const char *call) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "unknown error";
    int length = 0;
    MPI_Error_string(code, text, &length);
    tr_abort("%.*s failed: %s", (int)strcspn(call, "("), call, text);
}
