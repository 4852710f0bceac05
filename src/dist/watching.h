/* watching.h - the parts of the watch: marks, who is to blame, questions to other nodes. Floor:
 * dist, private to it. */
#pragma once
#include "dist/watch.h"

#include <stdatomic.h>

enum { TR_PLACE_BYTES = 64, TR_ACTION_BYTES = 48, TR_WATCH_ADDRESSES = 4 };

/* What a rank says it is doing. */
typedef struct {
    char place[TR_PLACE_BYTES], action[TR_ACTION_BYTES];
    int64_t step, micro_batch; /* -1: none */
    bool waits;                /* for other ranks */
} tr_mark;

/* What one rank knows of another. */
typedef struct {
    bool runs;   /* it gave a sign of life lately */
    bool known;  /* `mark` is what it was doing when it last ran; else only its place is right */
    double idle; /* seconds since its last mark, INFINITY if unknown */
    tr_mark mark;
} tr_witness;

/* watch_verdict.c. Local, pure. Who has kept ranks [0, n) of the job from going on, in a sentence:
 * those that do not run, or else those that run and do not wait for others, or else all. */
void tr_watch_verdict(char *out, size_t bytes, const tr_witness *ranks, int n, double limit);
/* "`forward of micro-batch 3` of step 17", "step 17" before the first action, or "" */
void tr_watch_describe(char *out, size_t bytes, const tr_mark *mark);

/* watch_net.c: datagrams between the watching threads of ranks that cannot read each other's
 * memory. One that is asked answers what it is doing and for how long. */
typedef struct {
    uint32_t address[TR_WATCH_ADDRESSES]; /* IPv4 in network order; 0: none */
    uint16_t port;
} tr_watch_door;

/* Local. A socket and how to reach it. -1: none can be had. */
int tr_watch_open(tr_watch_door *door);
typedef enum { TR_WATCH_ASK, TR_WATCH_ANSWER, TR_WATCH_END } tr_watch_word;
/* Local. Asks rank `to`, or tells it that the job ends, at every address it has. */
void tr_watch_tell(int socket, uint64_t key, tr_watch_word word, int from, int to,
                   const tr_watch_door *door);
/* What a rank knows of one, itself or another. */
typedef struct {
    int32_t about;
    tr_witness witness;
} tr_testimony;
/* Local, does not wait. Takes what has come: answers each question with all of own [count]; calls
 * hear(answer), and hear(NULL) where the job ends. Datagrams without the job's key, or for another
 * rank, are dropped. */
void tr_watch_serve(int socket, uint64_t key, int rank, const tr_testimony *own, int count,
                    void (*hear)(const tr_testimony *answer));
