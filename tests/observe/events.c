/* Properties: crc32c gives the published values; an event file is records with right lengths and
 * checksums whose protobuf fields hold what was written; every start makes a new, later file that
 * says at which step it starts. */
#include "observe/events.h"
#include "observe/crc32c.h"
#include "observe/metrics.h"
#include "tests/observe/folder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <time.h>

/* RFC 3720, appendix B.4, and the usual check value. */
static void crc_known_answers(void **state) {
    (void)state;
    uint8_t block[32];
    assert_int_equal(tr_crc32c("", 0), 0);
    assert_int_equal(tr_crc32c("123456789", 9), 0xe3069283u);
    memset(block, 0, sizeof block);
    assert_int_equal(tr_crc32c(block, sizeof block), 0x8a9136aau);
    memset(block, 0xff, sizeof block);
    assert_int_equal(tr_crc32c(block, sizeof block), 0x62a8ab43u);
    for (int i = 0; i < 32; i++) block[i] = (uint8_t)i;
    assert_int_equal(tr_crc32c(block, sizeof block), 0x46dd794eu);
    for (int i = 0; i < 32; i++) block[i] = (uint8_t)(31 - i);
    assert_int_equal(tr_crc32c(block, sizeof block), 0x113fdb5cu);
    /* mask: ((crc >> 15) | (crc << 17)) + 0xa282ead8 of 0xe3069283 */
    assert_int_equal(tr_crc32c_masked("123456789", 9), 0xc78ab0e5u);
}

/* A piece of a message that is read from the front. */
typedef struct {
    const uint8_t *at, *end;
} reader;

static uint64_t read_varint(reader *r) {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
        assert_true(r->at < r->end);
        uint8_t byte = *r->at++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) return value;
    }
}

static void read_fixed(reader *r, void *out, size_t bytes) {
    assert_true((size_t)(r->end - r->at) >= bytes);
    memcpy(out, r->at, bytes);
    r->at += bytes;
}

static reader read_bytes(reader *r) {
    uint64_t bytes = read_varint(r);
    assert_true((uint64_t)(r->end - r->at) >= bytes);
    reader inner = {r->at, r->at + bytes};
    r->at = inner.end;
    return inner;
}

enum { MAX_SCALARS = 8 };
typedef struct {
    double wall_time;
    int64_t step;
    char version[32];
    int64_t session_status; /* 0: no session log */
    int scalars;
    char tag[MAX_SCALARS][32];
    float value[MAX_SCALARS];
} event;

static void read_text(reader *r, char *out, size_t room) {
    reader text = read_bytes(r);
    size_t bytes = (size_t)(text.end - text.at);
    assert_true(bytes < room);
    memcpy(out, text.at, bytes);
    out[bytes] = 0;
}

static void read_summary(reader r, event *e) {
    while (r.at < r.end) {
        assert_int_equal(read_varint(&r), 1 << 3 | 2);
        reader value = read_bytes(&r);
        assert_true(e->scalars < MAX_SCALARS);
        assert_int_equal(read_varint(&value), 1 << 3 | 2);
        read_text(&value, e->tag[e->scalars], sizeof e->tag[0]);
        assert_int_equal(read_varint(&value), 2 << 3 | 5);
        read_fixed(&value, &e->value[e->scalars], sizeof(float));
        assert_ptr_equal(value.at, value.end);
        e->scalars++;
    }
}

static event read_event(reader r) {
    event e = {0};
    while (r.at < r.end) {
        uint64_t key = read_varint(&r);
        reader inner;
        switch (key) {
        case 1 << 3 | 1:
            read_fixed(&r, &e.wall_time, sizeof e.wall_time);
            break;
        case 2 << 3 | 0:
            e.step = (int64_t)read_varint(&r);
            break;
        case 3 << 3 | 2:
            read_text(&r, e.version, sizeof e.version);
            break;
        case 5 << 3 | 2:
            read_summary(read_bytes(&r), &e);
            break;
        case 7 << 3 | 2:
            inner = read_bytes(&r);
            assert_int_equal(read_varint(&inner), 1 << 3 | 0);
            e.session_status = (int64_t)read_varint(&inner);
            assert_ptr_equal(inner.at, inner.end);
            break;
        default:
            fail_msg("key %llu", (unsigned long long)key);
        }
    }
    return e;
}

/* Checks framing and checksums; returns how many events are in the file. */
static int read_file(const char *path, event *out, int room) {
    size_t bytes = 0;
    char *text = read_all(path, &bytes);
    assert_non_null(text);
    reader r = {(uint8_t *)text, (uint8_t *)text + bytes};
    int count = 0;
    while (r.at < r.end) {
        uint64_t length;
        uint32_t crc;
        const uint8_t *start = r.at;
        read_fixed(&r, &length, sizeof length);
        read_fixed(&r, &crc, sizeof crc);
        assert_int_equal(crc, tr_crc32c_masked(start, sizeof length));
        assert_true((uint64_t)(r.end - r.at) >= length);
        reader data = {r.at, r.at + length};
        r.at = data.end;
        read_fixed(&r, &crc, sizeof crc);
        assert_int_equal(crc, tr_crc32c_masked(data.at, length));
        assert_true(count < room);
        out[count++] = read_event(data);
    }
    free(text);
    return count;
}

/* Names of the event files, in order; at most 4. */
static int list_files(char names[4][256]) {
    struct dirent **entries;
    int n = scandir(folder, &entries, NULL, alphasort), count = 0;
    for (int i = 0; i < n; i++) {
        if (strncmp(entries[i]->d_name, "events.out.tfevents.", 20) == 0 && count < 4)
            snprintf(names[count++], 256, "%s", entries[i]->d_name);
        free(entries[i]);
    }
    free(entries);
    return count;
}

static void fields_hold_what_was_written(void **state) {
    (void)state;
    const tr_scalar scalars[] = {{"loss", 2.5}, {"grad_norm", NAN}, {"mfu", 0.1}};
    tr_events *events;
    assert_int_equal(tr_events_open(folder, 1, &events), TR_OK);
    assert_int_equal(tr_events_write(events, 1, 3, scalars), TR_OK);
    assert_int_equal(tr_events_write(events, INT64_C(1) << 40, 1, scalars), TR_OK);
    char names[4][256];
    assert_int_equal(list_files(names), 1);
    event e[8];
    assert_int_equal(read_file(in_folder(names[0]), e, 8), 4); /* already there before close */
    assert_int_equal(tr_events_close(events), TR_OK);

    assert_string_equal(e[0].version, "brain.Event:2");
    assert_int_equal(e[1].session_status, 1);
    assert_int_equal(e[1].step, 1);
    assert_int_equal(e[2].step, 1);
    assert_int_equal(e[2].scalars, 3);
    assert_string_equal(e[2].tag[0], "loss");
    assert_true(e[2].value[0] == 2.5f);
    assert_string_equal(e[2].tag[1], "grad_norm");
    assert_true(isnan(e[2].value[1]));
    assert_string_equal(e[2].tag[2], "mfu");
    assert_true(e[2].value[2] == 0.1f);
    assert_int_equal(e[3].step, INT64_C(1) << 40);
    for (int i = 0; i < 4; i++) assert_true(fabs(e[i].wall_time - (double)time(NULL)) < 60);
}

static void each_start_is_a_later_file(void **state) {
    (void)state;
    const tr_scalar loss = {"loss", 1};
    for (int64_t start = 0; start < 3; start++) {
        tr_events *events;
        assert_int_equal(tr_events_open(folder, 100 * start + 1, &events), TR_OK);
        assert_int_equal(tr_events_write(events, 100 * start + 1, 1, &loss), TR_OK);
        assert_int_equal(tr_events_close(events), TR_OK);
    }
    char names[4][256];
    assert_int_equal(list_files(names), 3);
    for (int i = 0; i < 3; i++) {
        event e[4];
        assert_int_equal(read_file(in_folder(names[i]), e, 4), 3);
        assert_int_equal(e[1].session_status, 1);
        assert_int_equal(e[1].step, 100 * i + 1);
    }
}

/* A MoE step shows its losses and how unevenly the experts are loaded; layer 1: 6 of 8 on one of 4.
 */
static void a_step_gets_its_scalars(void **state) {
    (void)state;
    static const char *const want[] = {
        "loss", "grad_norm", "learning_rate", "tokens_per_second",
        "mfu",  "aux_loss",  "z_loss",        "expert_load_max_over_mean"};
    const int64_t load[] = {2, 2, 2, 2, 1, 6, 1, 0};
    const tr_step_record record = {
        .step = 5, .loss = 4, .moe_layers = 2, .experts = 4, .expert_load = load};
    tr_metrics *metrics;
    assert_int_equal(tr_metrics_open(folder, 4, false, true, &metrics), TR_OK);
    assert_int_equal(tr_metrics_write(metrics, &record), TR_OK);
    assert_int_equal(tr_metrics_close(metrics), TR_OK);
    char names[4][256];
    assert_int_equal(list_files(names), 1);
    event e[4];
    assert_int_equal(read_file(in_folder(names[0]), e, 4), 3);
    assert_int_equal(e[1].step, 5);
    assert_int_equal(e[2].step, 5);
    assert_int_equal(e[2].scalars, 8);
    for (int i = 0; i < 8; i++) assert_string_equal(e[2].tag[i], want[i]);
    assert_true(e[2].value[0] == 4);
    assert_true(e[2].value[7] == 3);
}

static void a_folder_that_is_not_there_is_named(void **state) {
    (void)state;
    tr_events *events;
    assert_int_equal(tr_events_open(in_folder("nowhere"), 1, &events), TR_ERR_IO);
    assert_non_null(strstr(tr_error_message(), "nowhere"));
}

int main(void) {
#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crc_known_answers),
        IN_FOLDER(fields_hold_what_was_written),
        IN_FOLDER(each_start_is_a_later_file),
        IN_FOLDER(a_step_gets_its_scalars),
        IN_FOLDER(a_folder_that_is_not_there_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
