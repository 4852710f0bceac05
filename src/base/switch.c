/* switch.c - the table of switches. Floor: base. */
#include "base/switch.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    int64_t least, most;
} switches[] = {
    {"TRIREME_CHUNK_LIMIT", 1, INT_MAX}, /* elements of one MPI call */
    {"TRIREME_SYNCHRONOUS", 0, 1},       /* a send ends only with its receive */
    {"TRIREME_NO_SHARED", 0, 1},         /* ranks of a node share no memory */
    {"TRIREME_NODE_RANKS", 1, INT_MAX},  /* so many ranks pass for a node */
    {"TRIREME_IO_LIMIT", 1, INT_MAX},    /* elements of one HDF5 call */
    {"TRIREME_NO_SPACE_CHECK", 0, 1},    /* a full disk is found by writing */
    {"TRIREME_FAIL_WRITE_RANK", -1, INT_MAX},
    {"TRIREME_FAIL_READ_RANK", -1, INT_MAX},
};

enum { SWITCHES = sizeof switches / sizeof *switches };

static bool is_set(const char *text) {
    return text && *text;
}

static bool read(int i, const char *text, int64_t *value_p) {
    char *end;
    errno = 0;
    *value_p = strtoll(text, &end, 10);
    return *end == 0 && !errno && *value_p >= switches[i].least && *value_p <= switches[i].most;
}

int64_t tr_switch(const char *name, int64_t otherwise) {
    const char *text = getenv(name);
    int64_t value;
    int i = 0;
    while (i < SWITCHES && strcmp(switches[i].name, name) != 0) i++;
    if (i == SWITCHES) abort(); /* a name that the table lacks */
    return is_set(text) && read(i, text, &value) ? value : otherwise;
}

tr_status tr_switches_check(void) {
    for (int i = 0; i < SWITCHES; i++) {
        const char *text = getenv(switches[i].name);
        int64_t value;
        if (!is_set(text) || read(i, text, &value)) continue;
        return tr_fail(TR_ERR_USAGE,
                       "the environment variable %s is \"%s\"; it must be a whole number from %lld "
                       "to %lld, or not set",
                       switches[i].name, text, (long long)switches[i].least,
                       (long long)switches[i].most);
    }
    return TR_OK;
}
