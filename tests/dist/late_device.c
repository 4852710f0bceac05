/* late_device.c - see late_device.h. */
#include "tests/dist/late_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Device memory is mapped twice: where nobody may touch it, and where streams work. */
typedef struct memory {
    struct memory *next;
    char *outside, *inside;
    size_t bytes;
} memory;

typedef enum { OP_COPY, OP_ZERO, OP_RECORD, OP_WAIT, OP_STEP } op_kind;
typedef struct op {
    struct op *next;
    op_kind kind;
    void *to;
    const void *from;
    size_t bytes;
    tr_copy_kind copy;
    tr_event *event;
    uint64_t serial; /* of the record that is made or waited for */
    bool (*step)(void *self);
    void *self;
} op;

struct tr_event {
    late_device *late;
    uint64_t recorded, done;
};

struct tr_stream {
    tr_device *device; /* as every stream's first member */
    late_device *late;
    tr_stream *next;
    op *first, *last;
};

struct late_device {
    tr_device device;
    memory *memories, *stagings;
    tr_stream *streams;
    uint64_t random;
    int64_t events, stagings_made;
};

#define LATE_CHECK(condition, text)                                                                \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "late device: %s\n", text);                                            \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static uint64_t random_below(late_device *late, uint64_t n) {
    late->random ^= late->random << 13;
    late->random ^= late->random >> 7;
    late->random ^= late->random << 17;
    return late->random % n;
}

/* --- memory --------------------------------------------------------------------------------------
 */

static char *find(memory *list, const void *at, size_t bytes) {
    for (memory *m = list; m; m = m->next)
        if ((const char *)at >= m->outside && (const char *)at + bytes <= m->outside + m->bytes)
            return m->inside + ((const char *)at - m->outside);
    return NULL;
}

static void remove_from(memory **list, void *at) {
    while (*list && (*list)->outside != at) list = &(*list)->next;
    LATE_CHECK(*list, "memory is freed that it has not");
    memory *m = *list;
    *list = m->next;
    munmap(m->outside, m->bytes);
    if (m->inside != m->outside) munmap(m->inside, m->bytes);
    free(m);
}

static memory *add_to(memory **list, size_t bytes, bool hidden) {
    memory *m = calloc(1, sizeof *m);
    int file = memfd_create("late", 0);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    m->bytes = (bytes + page) / page * page;
    LATE_CHECK(file >= 0 && ftruncate(file, (off_t)m->bytes) == 0, "no memory");
    m->inside = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    m->outside = hidden ? mmap(NULL, m->bytes, PROT_NONE, MAP_SHARED, file, 0) : m->inside;
    LATE_CHECK(m->inside != MAP_FAILED && m->outside != MAP_FAILED, "no memory");
    close(file);
    memset(m->inside, 0xff, m->bytes);
    m->next = *list;
    *list = m;
    return m;
}

static void *alloc_device(void *self, size_t bytes) {
    late_device *late = self;
    return add_to(&late->memories, bytes, true)->outside;
}

static void free_device(void *self, void *at, size_t bytes) {
    late_device *late = self;
    (void)bytes;
    remove_from(&late->memories, at);
}

static void *alloc_staging(void *self, size_t bytes) {
    late_device *late = self;
    late->stagings_made++;
    return add_to(&late->stagings, bytes, false)->outside;
}

static void free_staging(void *self, void *at, size_t bytes) {
    late_device *late = self;
    (void)bytes;
    remove_from(&late->stagings, at);
}

void *late_inside(late_device *late, const void *outside, size_t bytes) {
    char *inside = find(late->memories, outside, bytes);
    LATE_CHECK(inside, "an address is not the device's (any more)");
    return inside;
}

/* --- streams -------------------------------------------------------------------------------------
 */

static bool is_over(const late_device *late, const op *o) {
    (void)late;
    switch (o->kind) {
    case OP_WAIT:
        return o->event->done >= o->serial;
    case OP_STEP:
        return o->step(o->self);
    default:
        return true;
    }
}

static void *host_or_device(late_device *late, const void *at, size_t bytes, bool device) {
    if (device) return late_inside(late, at, bytes);
    char *inside = find(late->stagings, at, bytes);
    LATE_CHECK(inside, "a late copy of host memory that is not staging memory (any more)");
    return inside;
}

static void carry_out(late_device *late, const op *o) {
    switch (o->kind) {
    case OP_COPY:
        memmove(host_or_device(late, o->to, o->bytes, o->copy != TR_TO_HOST),
                host_or_device(late, o->from, o->bytes, o->copy != TR_TO_DEVICE), o->bytes);
        break;
    case OP_ZERO:
        memset(late_inside(late, o->to, o->bytes), 0, o->bytes);
        break;
    case OP_RECORD:
        o->event->done = o->serial;
        break;
    case OP_STEP:
        free(o->self);
        break;
    default:
        break;
    }
}

/* True if the first of the stream's work is over now. */
static bool step(tr_stream *stream) {
    op *o = stream->first;
    if (!o || !is_over(stream->late, o)) return false;
    carry_out(stream->late, o);
    stream->first = o->next;
    if (!stream->first) stream->last = NULL;
    free(o);
    return true;
}

void late_tick(late_device *late) {
    for (tr_stream *s = late->streams; s; s = s->next)
        if (random_below(late, 3) == 0) step(s);
}

static void enqueue(tr_stream *stream, op what) {
    op *o = malloc(sizeof *o);
    LATE_CHECK(o, "no memory");
    *o = what;
    o->next = NULL;
    if (stream->last)
        stream->last->next = o;
    else
        stream->first = o;
    stream->last = o;
}

static tr_stream *stream_create(tr_device *device) {
    late_device *late = (late_device *)(void *)device;
    tr_stream *s = calloc(1, sizeof *s);
    LATE_CHECK(s, "no memory");
    *s = (tr_stream){.device = device, .late = late, .next = late->streams};
    late->streams = s;
    return s;
}

static void stream_wait(tr_stream *stream) {
    tr_device *device = stream->device;
    while (stream->first) {
        late_tick(stream->late);
        if (device->meanwhile) device->meanwhile(device->meanwhile_self);
    }
}

static void stream_destroy(tr_stream *stream) {
    stream_wait(stream);
    tr_stream **link = &stream->late->streams;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    free(stream);
}

static void copy(tr_stream *stream, void *to, const void *from, size_t bytes, tr_copy_kind kind) {
    LATE_CHECK(stream, "a copy without a stream");
    enqueue(stream, (op){.kind = OP_COPY, .to = to, .from = from, .bytes = bytes, .copy = kind});
}

static void zero(tr_stream *stream, void *at, size_t bytes) {
    enqueue(stream, (op){.kind = OP_ZERO, .to = at, .bytes = bytes});
}

void late_enqueue(tr_stream *stream, bool (*function)(void *self), void *self) {
    enqueue(stream, (op){.kind = OP_STEP, .step = function, .self = self});
}

/* --- events --------------------------------------------------------------------------------------
 */

static tr_event *event_create(tr_device *device) {
    tr_event *e = calloc(1, sizeof *e);
    LATE_CHECK(e, "no memory");
    e->late = (late_device *)(void *)device;
    e->late->events++;
    return e;
}

static void event_destroy(tr_event *event) {
    if (!event) return;
    LATE_CHECK(event->done == event->recorded, "an event is destroyed before it is done");
    event->late->events--;
    free(event);
}

static void event_record(tr_event *event, tr_stream *stream) {
    enqueue(stream, (op){.kind = OP_RECORD, .event = event, .serial = ++event->recorded});
}

static bool event_done(tr_event *event) {
    late_tick(event->late);
    return event->done == event->recorded;
}

static void stream_wait_event(tr_stream *stream, tr_event *event) {
    enqueue(stream, (op){.kind = OP_WAIT, .event = event, .serial = event->recorded});
}

/* --- the device ----------------------------------------------------------------------------------
 */

late_device *late_create(uint64_t seed) {
    late_device *late = calloc(1, sizeof *late);
    LATE_CHECK(late, "no memory");
    late->random = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    late->device = (tr_device){
        .name = "late",
        .allocator = {.alloc = alloc_device, .free = free_device, .self = late},
        .staging = {.alloc = alloc_staging, .free = free_staging, .self = late},
        .stream_create = stream_create,
        .stream_destroy = stream_destroy,
        .stream_wait = stream_wait,
        .copy = copy,
        .zero = zero,
        .event_create = event_create,
        .event_destroy = event_destroy,
        .event_record = event_record,
        .event_done = event_done,
        .stream_wait_event = stream_wait_event,
    };
    return late;
}

tr_device *late_device_of(late_device *late) {
    return &late->device;
}

int64_t late_stagings(const late_device *late) {
    return late->stagings_made;
}

void late_destroy(late_device *late) {
    LATE_CHECK(!late->memories && !late->stagings, "memory is left");
    LATE_CHECK(!late->streams && late->events == 0, "streams or events are left");
    free(late);
}
