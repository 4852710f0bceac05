/* watch.c - marks, and the thread that watches them. Floor: dist.
 *
 * The main thread writes its own line, all threads of the node read it, nothing waits. The watching
 * thread does not use MPI, and none of the C library's streams either: the main thread may hang in
 * the middle of a print. It leaves with _Exit, which launchers take for the job's failure. */
#include "dist/backend.h"
#include "dist/watching.h"

#include "base/heap.h"
#include "base/log.h"
#include "base/trace.h"

#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

/* --- marks ------------------------------------------------------------------------------------ */

/* Texts in words, so that a reader of another process races with nothing worse than a mix of two
 * marks; and what changes is not taken for a stall. */
enum { PLACE_WORDS = TR_PLACE_BYTES / 8, ACTION_WORDS = TR_ACTION_BYTES / 8 };
typedef struct {
    _Alignas(64) _Atomic uint64_t marks; /* made so far */
    _Atomic int64_t step, micro_batch;
    _Atomic uint64_t action[ACTION_WORDS], place[PLACE_WORDS];
    _Atomic bool waits;
    _Alignas(64) _Atomic uint64_t beats; /* signs of life of the watching thread */
    _Atomic bool ended;                  /* it has spoken: the others leave without a word */
} line;

/* Process-wide by contract. */
static line private_line = {.step = -1, .micro_batch = -1};
static line *own = &private_line; /* in shared memory while the watch runs */

static void put_text(_Atomic uint64_t *to, int words, const char *text) {
    uint64_t copy[PLACE_WORDS] = {0};
    memccpy(copy, text, 0, (size_t)words * 8 - 1);
    for (int i = 0; i < words; i++) atomic_store_explicit(&to[i], copy[i], memory_order_relaxed);
}

static void get_text(char *out, int words, const _Atomic uint64_t *from) {
    uint64_t copy[PLACE_WORDS];
    for (int i = 0; i < words; i++) copy[i] = atomic_load_explicit(&from[i], memory_order_relaxed);
    memcpy(out, copy, (size_t)words * 8);
    out[words * 8 - 1] = 0;
}

void tr_watch_progress(void) {
    uint64_t marks = atomic_load_explicit(&own->marks, memory_order_relaxed);
    atomic_store_explicit(&own->marks, marks + 1, memory_order_release);
}

void tr_watch_place(const char *place) {
    put_text(own->place, PLACE_WORDS, place);
}

void tr_watch_step(int64_t step) {
    atomic_store_explicit(&own->step, step, memory_order_relaxed);
    tr_watch_progress();
}

void tr_watch_action(const char *action, int64_t micro_batch) {
    tr_trace_action(action, micro_batch);
    put_text(own->action, ACTION_WORDS, action);
    atomic_store_explicit(&own->micro_batch, micro_batch, memory_order_relaxed);
    tr_watch_progress();
}

void tr_watch_wait(bool waits) {
    atomic_store_explicit(&own->waits, waits, memory_order_relaxed);
}

static tr_mark mark_on(const line *l) {
    tr_mark mark = {.step = atomic_load_explicit(&l->step, memory_order_relaxed),
                    .micro_batch = atomic_load_explicit(&l->micro_batch, memory_order_relaxed),
                    .waits = atomic_load_explicit(&l->waits, memory_order_relaxed)};
    get_text(mark.place, PLACE_WORDS, l->place);
    get_text(mark.action, ACTION_WORDS, l->action);
    return mark;
}

/* Moves what is marked to another line, from which on it is this rank's. */
static void move_line(line *to) {
    tr_mark mark = mark_on(own);
    put_text(to->place, PLACE_WORDS, mark.place);
    put_text(to->action, ACTION_WORDS, mark.action);
    atomic_store(&to->step, mark.step);
    atomic_store(&to->micro_batch, mark.micro_batch);
    atomic_store(&to->waits, false);
    own = to;
}

void tr_watch_here(char *out, size_t bytes) {
    char deed[160];
    tr_mark mark = mark_on(own);
    tr_watch_describe(deed, sizeof deed, &mark);
    snprintf(out, bytes, " (rank %d%s%s%s%s)", tr_log_get_rank(), mark.place[0] ? ", " : "",
             mark.place, deed[0] ? ", in " : "", deed);
}

/* --- what is known of others ------------------------------------------------------------------ */

/* Times are on the watch's clock, which stands still while this process is stopped. */
typedef struct {
    const line *line;      /* of a rank of this node; NULL: it must be asked */
    uint64_t marks, beats; /* last seen */
    double moved, beaten;  /* when these changed; of a rank that is asked: by its last answer */
    tr_mark mark;          /* last seen, or told */
    bool known;
    tr_watch_door door;
} other;

static struct {
    /* declared */
    tr_comm *world, *node; /* borrowed, owned */
    double limit, tick;
    /* derived */
    int rank, size;
    uint64_t key;
    line *shared;
    other *others;     /* [size] */
    tr_testimony *own; /* [size] room for answers */
    int socket, stop;  /* stop: an eventfd */
    bool asks;         /* some rank must be asked */
    /* state */
    pthread_t thread;
    double clock, last_wake, asking_since; /* -1: nobody has been asked lately */
} watch;

static double monotonic(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void advance_clock(void) {
    double now = monotonic(), passed = now - watch.last_wake;
    watch.last_wake = now;
    watch.clock += passed < 2 * watch.tick ? passed : 2 * watch.tick;
}

static bool runs(const other *o) {
    return watch.clock - o->beaten < 4 * watch.tick;
}

static tr_witness witness_of(const other *o) {
    return (tr_witness){
        .runs = runs(o), .known = o->known, .idle = watch.clock - o->moved, .mark = o->mark};
}

static void look_at_node(void) {
    for (int r = 0; r < watch.size; r++) {
        other *o = &watch.others[r];
        if (!o->line) continue;
        uint64_t marks = atomic_load_explicit(&o->line->marks, memory_order_acquire);
        uint64_t beats = atomic_load_explicit(&o->line->beats, memory_order_relaxed);
        if (marks != o->marks) o->moved = watch.clock;
        if (beats != o->beats) o->beaten = watch.clock;
        o->marks = marks;
        o->beats = beats;
        o->mark = mark_on(o->line);
        o->known = true;
        if (atomic_load_explicit(&o->line->ended, memory_order_relaxed)) _Exit(TR_ERR_INTERNAL);
    }
}

static void hear(const tr_testimony *answer) {
    if (!answer) _Exit(TR_ERR_INTERNAL);
    if (answer->about < 0 || answer->about >= watch.size) return;
    const tr_witness *w = &answer->witness;
    other *o = &watch.others[answer->about];
    if (o->line) return; /* seen from here */
    double moved = watch.clock - w->idle;
    if (moved > o->moved) o->moved = moved;
    if (w->runs) o->beaten = watch.clock;
    o->mark = w->mark;
    o->known = true;
}

/* Seconds since anybody of the node, or of all, is known to have made a mark. */
static double idle(bool of_all) {
    double latest = -INFINITY;
    for (int r = 0; r < watch.size; r++)
        if ((of_all || watch.others[r].line) && watch.others[r].moved > latest)
            latest = watch.others[r].moved;
    return watch.clock - latest;
}

/* Whether this rank is the first one that runs, of its node or of all. */
static bool is_first(bool of_all) {
    for (int r = 0; r < watch.rank; r++)
        if ((of_all || watch.others[r].line) && runs(&watch.others[r])) return false;
    return true;
}

/* --- the thread ------------------------------------------------------------------------------- */

static void write_error(const char *text) {
    struct pollfd room = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&room, 1, 1000) == 1) (void)!write(STDERR_FILENO, text, strlen(text));
}

static void tell_others(tr_watch_word word) {
    for (int r = 0; r < watch.size && watch.socket >= 0; r++)
        if (!watch.others[r].line)
            tr_watch_tell(watch.socket, watch.key, word, watch.rank, r, &watch.others[r].door);
}

_Noreturn static void end_job(void) {
    char verdict[3000], text[4096];
    tr_witness *witnesses = calloc((size_t)watch.size, sizeof *witnesses);
    for (int r = 0; r < watch.size && witnesses; r++) witnesses[r] = witness_of(&watch.others[r]);
    if (witnesses)
        tr_watch_verdict(verdict, sizeof verdict, witnesses, watch.size, watch.limit);
    else
        snprintf(verdict, sizeof verdict, "no rank has gone on for %.0f s", watch.limit);
    snprintf(text, sizeof text,
             "error: %s. The job ends here (training.watchdog_seconds %.0f); the same command goes "
             "on from the last checkpoint\n",
             verdict, watch.limit);
    write_error(text);
    atomic_store(&own->ended, true);
    tell_others(TR_WATCH_END);
    _Exit(TR_ERR_INTERNAL);
}

static void look(void) {
    look_at_node();
    double half = watch.limit / 2, still = idle(false);
    if (still < half || !is_first(false)) {
        watch.asking_since = -1;
        return;
    }
    /* The first rank that runs on each node asks the ranks of other nodes, in time for answers. */
    if (watch.asking_since < 0) watch.asking_since = watch.clock;
    tell_others(TR_WATCH_ASK);
    if (idle(true) < watch.limit || (watch.asks && watch.clock - watch.asking_since < half / 2))
        return;
    /* The first of all speaks; another one only if it does not. */
    if (is_first(true) || still > watch.limit + half / 2) end_job();
}

/* Speaks for itself, and for those of its node that cannot. */
static void answer_questions(void) {
    int count = 0;
    for (int r = 0; r < watch.size; r++)
        if (watch.others[r].line && (r == watch.rank || !runs(&watch.others[r])))
            watch.own[count++] = (tr_testimony){r, witness_of(&watch.others[r])};
    tr_watch_serve(watch.socket, watch.key, watch.rank, watch.own, count, hear);
}

static void *watch_all(void *unused) {
    (void)unused;
    struct pollfd wakers[2] = {{.fd = watch.stop, .events = POLLIN},
                               {.fd = watch.socket, .events = POLLIN}};
    double next = 0;
    while (!(wakers[0].revents & POLLIN)) {
        poll(wakers, 2, (int)(1000 * watch.tick));
        advance_clock();
        if (watch.socket >= 0) answer_questions();
        if (watch.clock < next) continue;
        next = watch.clock + watch.tick / 2;
        atomic_fetch_add_explicit(&own->beats, 1, memory_order_relaxed);
        look();
    }
    return NULL;
}

/* --- starting and stopping -------------------------------------------------------------------- */

/* What ranks tell each other at the start. */
typedef struct {
    uint64_t key; /* rank 0's is the job's */
    int32_t node;
    char place[TR_PLACE_BYTES];
    tr_watch_door door;
} card;

/* Collective on the node. Its ranks' lines; memory that is not shared leaves all but the own
 * unseen. */
static void map_lines(void) {
    watch.node = tr_comm_split(watch.world, tr_comm_node_of(watch.world, watch.rank), watch.rank);
    watch.shared = tr_comm_alloc(watch.node, sizeof *watch.shared);
    const tr_memory *memory = tr_memory_find(watch.node, watch.shared, sizeof *watch.shared);
    int size = tr_comm_size(watch.node);
    int32_t *ranks = tr_heap_alloc(size, sizeof *ranks);
    ranks[tr_comm_rank(watch.node)] = watch.rank;
    tr_end(tr_all_gather_begin(watch.node, NULL, TR_I32, ranks, 1));
    for (int k = 0; k < size && memory->peer; k++)
        watch.others[ranks[k]].line = (const line *)(const void *)memory->peer[k];
    watch.others[watch.rank].line = watch.shared;
    free(ranks);
    move_line(watch.shared);
}

/* Collective on world. */
static void exchange_cards(void) {
    card *cards = tr_heap_alloc(watch.size, sizeof *cards), *mine = &cards[watch.rank];
    if (getrandom(&mine->key, sizeof mine->key, 0) < 0) mine->key = (uint64_t)getpid();
    watch.socket = watch.asks ? tr_watch_open(&mine->door) : -1;
    get_text(mine->place, PLACE_WORDS, own->place);
    tr_end(tr_all_gather_begin(watch.world, NULL, TR_U8, cards, sizeof *cards));
    watch.key = cards[0].key;
    for (int r = 0; r < watch.size; r++) {
        watch.others[r].door = cards[r].door;
        memcpy(watch.others[r].mark.place, cards[r].place, sizeof cards[r].place);
    }
    free(cards);
}

void tr_watch_start(tr_comm *world, int64_t seconds) {
    if (seconds == 0) return;
    double tick = (double)seconds / 40;
    watch.world = world;
    watch.limit = (double)seconds;
    watch.tick = tick < 0.05 ? 0.05 : tick > 5 ? 5 : tick;
    watch.rank = tr_comm_rank(world);
    watch.size = tr_comm_size(world);
    watch.clock = 0;
    watch.last_wake = monotonic();
    watch.asking_since = -1;
    watch.others = tr_heap_alloc(watch.size, sizeof *watch.others);
    watch.own = tr_heap_alloc(watch.size, sizeof *watch.own);
    map_lines();
    watch.asks = false;
    for (int r = 0; r < watch.size; r++) {
        other *o = &watch.others[r];
        watch.asks |= !o->line;
        o->moved = o->beaten = o->line ? 0 : -INFINITY;
    }
    exchange_cards();
    watch.stop = eventfd(0, EFD_CLOEXEC);
    if (watch.stop < 0 || pthread_create(&watch.thread, NULL, watch_all, NULL) != 0)
        tr_abort("the watching thread cannot start; training.watchdog_seconds 0 does without");
}

void tr_watch_stop(void) {
    if (!watch.world) return;
    tr_end(tr_barrier_begin(watch.world)); /* until here all are watched */
    const uint64_t one = 1;
    if (write(watch.stop, &one, sizeof one) < 0) tr_abort("the watching thread cannot be stopped");
    pthread_join(watch.thread, NULL);
    close(watch.stop);
    if (watch.socket >= 0) close(watch.socket);
    move_line(&private_line);
    free(watch.others);
    free(watch.own);
    tr_comm_free(watch.node); /* and the lines with it */
    watch.world = watch.node = NULL;
}
