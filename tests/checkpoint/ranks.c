/* ranks.c - see ranks.h. Floor: tests. */
#include "ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

tr_comm *ranks_world;
int32_t ranks_failures;
static char folder[64];

void ranks_done(void) {
    tr_end(tr_all_reduce_begin(ranks_world, NULL, TR_MAX, TR_I32, &ranks_failures, 1));
    int32_t failures = ranks_failures;
    ranks_failures = 0;
    assert_int_equal(failures, 0);
}

const char *ranks_folder(void) {
    if (ranks_first()) {
        snprintf(folder, sizeof folder, "/tmp/trireme-checkpoint-XXXXXX");
        if (!mkdtemp(folder)) tr_abort("no scratch folder");
    }
    tr_end(tr_broadcast_begin(ranks_world, NULL, 0, folder, sizeof folder));
    return folder;
}

void ranks_remove_folder(void) {
    char command[128];
    ranks_wait();
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (ranks_first() && system(command) != 0) fprintf(stderr, "%s is left behind\n", folder);
    ranks_wait();
}

void ranks_expect(tr_status status, tr_status want, const char *words) {
    CHECK(status == want, "status %d, want %d: %s", (int)status, (int)want, tr_error_message());
    if (want != TR_OK)
        CHECK(strstr(tr_error_message(), words) != NULL, "\"%s\" lacks \"%s\"", tr_error_message(),
              words);
}
