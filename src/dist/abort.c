/* abort.c - the end of a job that cannot go on, see comm.h. Floor: dist. */
#include "dist/backend.h"
#include "dist/watch.h"

#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Process-wide by contract. */
static enum { UNGUARDED, RUNS, ABORTS } phase;

/* Libraries that cannot go on end their process with codes of their own: OpenMP without a thread
 * with 1, MPI without memory with 2, even inside MPI_Abort. */
static void end_early(void) {
    if (phase == UNGUARDED) return;
    if (phase == RUNS)
        tr_print_error("a library ended this process, see its text above; where that tells of "
                       "threads or memory: fewer ranks a machine, a smaller run.threads, or a "
                       "higher limit (ulimit -u, -v)");
    _Exit(TR_ERR_INTERNAL);
}

void tr_guard_exit(bool on) {
    static bool installed;
    if (!installed) installed = atexit(end_early) == 0;
    phase = on ? RUNS : UNGUARDED;
}

void tr_abort(const char *format, ...) {
    char what[2048], where[512], text[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    tr_watch_here(where, sizeof where);
    snprintf(text, sizeof text, "%s%s", what, where);
    tr_print_error(text);
    if (phase == RUNS) phase = ABORTS;

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
