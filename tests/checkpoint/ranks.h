/* ranks.h - cmocka on several ranks at once. Floor: tests. A failed check is counted, not jumped
 * out of, so that no rank is left waiting; ranks_done makes a failure on any rank everyone's. */
#pragma once
#include <stdio.h>

#include "checkpoint/store.h"

extern tr_comm *ranks_world;
extern int32_t ranks_failures;

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            ranks_failures++;                                                                      \
            fprintf(stderr, "rank %d, %s:%d: %s: ", tr_comm_rank(ranks_world), __FILE__, __LINE__, \
                    #condition);                                                                   \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
        }                                                                                          \
    } while (0)

static inline bool ranks_first(void) {
    return tr_comm_rank(ranks_world) == 0;
}

/* Collective. */
static inline void ranks_wait(void) {
    tr_end(tr_barrier_begin(ranks_world));
}

/* Collective. Ends a test: fails it on all ranks when a check failed on one. */
void ranks_done(void);

/* Collective. A fresh folder for this process group, the same name on all ranks; and its end. */
const char *ranks_folder(void);
void ranks_remove_folder(void);

/* Local, on every rank: whether `status` is `want` and the message has `words`. */
void ranks_expect(tr_status status, tr_status want, const char *words);
