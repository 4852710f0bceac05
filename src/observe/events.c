/* events.c - records and the few protobuf messages of a TensorBoard event file. Floor: observe.
 *
 * Fields used (tensorflow/core/util/event.proto and framework/summary.proto):
 *   Event      1 double wall_time, 2 int64 step, 3 string file_version, 5 Summary, 7 SessionLog
 *   Summary    1 repeated Value;   Value 1 string tag, 2 float simple_value
 *   SessionLog 1 enum status, START = 1 */
#include "observe/events.h"

#include "base/heap.h"
#include "observe/crc32c.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct tr_events {
    char *path;
    FILE *file;
};

/* A message under construction. Ours are small: a few scalars, tags of a few letters. */
enum { TR_MESSAGE_MAX = 4096 };
typedef struct {
    size_t bytes;
    bool overflow;
    uint8_t data[TR_MESSAGE_MAX];
} message;

enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

static void put(message *m, const void *data, size_t bytes) {
    if (bytes > sizeof m->data - m->bytes) {
        m->overflow = true;
        return;
    }
    memcpy(m->data + m->bytes, data, bytes);
    m->bytes += bytes;
}

static void put_varint(message *m, uint64_t value) {
    do {
        uint8_t byte = (uint8_t)((value & 0x7f) | (value > 0x7f ? 0x80 : 0));
        put(m, &byte, 1);
        value >>= 7;
    } while (value);
}

static void put_key(message *m, int field, int wire) {
    put_varint(m, (uint64_t)(field << 3 | wire));
}

static void put_bytes(message *m, int field, const void *data, size_t bytes) {
    put_key(m, field, WIRE_BYTES);
    put_varint(m, bytes);
    put(m, data, bytes);
}

static void put_message(message *m, int field, const message *inner) {
    m->overflow = m->overflow || inner->overflow;
    put_bytes(m, field, inner->data, inner->bytes);
}

/* The fields every event starts with. */
static message event_at(int64_t step) {
    message event = {0};
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    put_key(&event, 1, WIRE_64);
    put(&event, &seconds, sizeof seconds);
    put_key(&event, 2, WIRE_VARINT);
    put_varint(&event, (uint64_t)step);
    return event;
}

static tr_status write_record(tr_events *events, const message *event) {
    if (event->overflow)
        return tr_fail(TR_ERR_INTERNAL, "%s: an event is longer than %d bytes", events->path,
                       TR_MESSAGE_MAX);
    uint64_t length = event->bytes;
    uint32_t length_crc = tr_crc32c_masked(&length, sizeof length);
    uint32_t data_crc = tr_crc32c_masked(event->data, event->bytes);
    fwrite(&length, sizeof length, 1, events->file);
    fwrite(&length_crc, sizeof length_crc, 1, events->file);
    fwrite(event->data, 1, event->bytes, events->file);
    fwrite(&data_crc, sizeof data_crc, 1, events->file);
    if (fflush(events->file) != 0 || ferror(events->file))
        return tr_fail(TR_ERR_IO, "%s: cannot write it: %s; log.tensorboard=false does without it",
                       events->path, strerror(errno));
    return TR_OK;
}

/* TensorBoard reads a folder's files in the order of their names: the seconds come first, and a
 * second start within one second takes the next. */
static tr_status create_file(const char *folder, tr_events *events) {
    char host[65] = "localhost";
    if (gethostname(host, sizeof host - 1) != 0) strcpy(host, "localhost");
    for (time_t seconds = time(NULL);; seconds++) {
        free(events->path);
        events->path =
            tr_heap_format("%s/events.out.tfevents.%010lld.%s", folder, (long long)seconds, host);
        int fd = open(events->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0) {
            events->file = fdopen(fd, "w");
            if (events->file) return TR_OK;
            close(fd);
        }
        if (fd >= 0 || errno != EEXIST)
            return tr_fail(TR_ERR_IO, "%s: cannot create it: %s", events->path, strerror(errno));
    }
}

static tr_status write_head(tr_events *events, int64_t first_step) {
    static const char version[] = "brain.Event:2";
    message head = event_at(0);
    put_bytes(&head, 3, version, sizeof version - 1);
    TR_TRY(write_record(events, &head));

    message log = {0}, start = event_at(first_step);
    put_key(&log, 1, WIRE_VARINT);
    put_varint(&log, 1);
    put_message(&start, 7, &log);
    return write_record(events, &start);
}

tr_status tr_events_open(const char *folder, int64_t first_step, tr_events **events_p) {
    tr_events *events = tr_heap_alloc(1, sizeof *events);
    tr_status status = create_file(folder, events);
    if (status == TR_OK) status = write_head(events, first_step);
    if (status != TR_OK) {
        tr_events_close(events);
        return status;
    }
    *events_p = events;
    return TR_OK;
}

tr_status tr_events_write(tr_events *events, int64_t step, int64_t count,
                          const tr_scalar *scalars) {
    message event = event_at(step), summary = {0};
    for (int64_t i = 0; i < count; i++) {
        message value = {0};
        float number = (float)scalars[i].value;
        put_bytes(&value, 1, scalars[i].tag, strlen(scalars[i].tag));
        put_key(&value, 2, WIRE_32);
        put(&value, &number, sizeof number);
        put_message(&summary, 1, &value);
    }
    put_message(&event, 5, &summary);
    return write_record(events, &event);
}

tr_status tr_events_close(tr_events *events) {
    if (!events) return TR_OK;
    tr_status status = TR_OK;
    if (events->file && fclose(events->file) != 0)
        status =
            tr_fail(TR_ERR_IO, "%s: cannot write it: %s; log.tensorboard=false does without it",
                    events->path, strerror(errno));
    free(events->path);
    free(events);
    return status;
}
