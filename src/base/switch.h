/* switch.h - switches of tests and experiments: environment variables TRIREME_*. Floor: base.
 *
 * They are declared in one table (switch.c). What they do is no setting of a run: a result does not
 * depend on them, or a test wants to see a failure. */
#pragma once
#include "base/status.h"

/* Local. The value, or `otherwise` where the variable is not set, empty, or refused by
 * tr_switches_check. */
int64_t tr_switch(const char *name, int64_t otherwise);
/* Local. TR_ERR_USAGE naming the variable, its value and what would do. */
tr_status tr_switches_check(void);
