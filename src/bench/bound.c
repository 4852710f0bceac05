/* bound.c - bounds, the clock of single kernels, and their rows. Floor: bench. */
#include "bench/bound.h"

#include "base/log.h"
#include "bench/groups.h"

#include <stdarg.h>
#include <stdio.h>

enum { COPY_BYTES = 256 << 20, EMULATED_BYTES = 1 << 20 };

/* Seconds a call, over `calls` enqueued one behind the other. */
static double batch(const tr_bound *b, const tr_bound_row *row, int64_t calls) {
    double begin = tr_lab_now();
    for (int64_t i = 0; i < calls; i++) row->run(row->self);
    b->device->stream_wait(b->s);
    return (tr_lab_now() - begin) / (double)calls;
}

/* Median of batches of about 2 ms, after two calls that load code and grow work memory. */
static double seconds_of(const tr_bound *b, const tr_bound_row *row) {
    enum { MOST = 100, CALLS = 200 };
    double times[MOST], spent = 0;
    batch(b, row, 1);
    double once = batch(b, row, 1);
    if (b->device->emulated) return once;
    int64_t count = 0, calls = 1 + (int64_t)(2e-3 / (once + 1e-7));
    if (calls > CALLS) calls = CALLS;
    while (count < MOST && (count < b->lab->repeats || spent < 0.02 * (double)b->lab->repeats)) {
        times[count] = batch(b, row, calls);
        spent += times[count++] * (double)calls;
    }
    return tr_lab_median(times, count);
}

void tr_bound_time(const tr_bound *b, const tr_bound_row *row, const char *shape, ...) {
    char text[48];
    va_list list;
    va_start(list, shape);
    vsnprintf(text, sizeof text, shape, list);
    va_end(list);
    double seconds = seconds_of(b, row), moving = row->bytes / b->copy;
    double doing = row->flop / b->peak[row->t == TR_BF16];
    bool moves = moving >= doing;
    char share[16] = "-";
    if (!b->device->emulated)
        snprintf(share, sizeof share, "%.1f %%", 100 * (moves ? moving : doing) / seconds);
    tr_say("%-20s %-34s %-4s %11.1f %9.2f %-7s %8s", row->kernel, text, tr_lab_dtype(row->t),
           1e6 * seconds, (moves ? 1e-9 * row->bytes : 1e-12 * row->flop) / seconds,
           moves ? "GB/s" : "TFLOP/s", share);
}

int32_t *tr_bound_integers(const tr_bound *b, int64_t count, const int32_t *value) {
    int32_t *memory = tr_arena_alloc(b->lab->memory, (size_t)count * sizeof *memory);
    b->device->copy(b->s, memory, value, (size_t)count * sizeof *memory, TR_TO_DEVICE);
    b->device->stream_wait(b->s);
    return memory;
}

void *tr_bound_room(const tr_bound *b, int64_t elems, tr_dtype t) {
    return tr_arena_alloc(b->lab->memory, (size_t)elems * tr_dtype_bytes(t));
}

/* --- the bounds --------------------------------------------------------------------------------
 */

typedef struct {
    const tr_bound *b;
    char *memory;
    size_t bytes; /* of each half */
} halves;

static void copy_half(void *self) {
    const halves *h = self;
    h->b->device->copy(h->b->s, h->memory + h->bytes, h->memory, h->bytes, TR_ON_DEVICE);
}

static double copy_speed(const tr_bound *b) {
    halves h = {b, NULL, b->device->emulated ? EMULATED_BYTES : COPY_BYTES};
    tr_arena_reset(b->lab->memory);
    h.memory = tr_arena_alloc(b->lab->memory, 2 * h.bytes);
    b->device->zero(b->s, h.memory, 2 * h.bytes);
    double seconds = seconds_of(b, &(tr_bound_row){.run = copy_half, .self = &h});
    tr_arena_reset(b->lab->memory);
    return 2 * (double)h.bytes / seconds;
}

void tr_bound_open(tr_bound *b, tr_lab *lab) {
    *b = (tr_bound){
        .lab = lab, .device = lab->device, .k = lab->device->kernels, .s = lab->device->stream};
    b->copy = copy_speed(b);
    for (tr_dtype t = TR_F32; t <= TR_BF16; t++) b->peak[t] = 1e9 * tr_lab_peak(lab, t);
    tr_say("copy of %d MB: %.2f GB/s read and written",
           (b->device->emulated ? EMULATED_BYTES : COPY_BYTES) >> 20, 1e-9 * b->copy);
    if (b->device->emulated)
        tr_say("this device is an emulation: times mean nothing, so there are no shares");
    tr_say("bound: bytes that must move at the copy's speed, or operations at the peak's");
    tr_say("%-20s %-34s %-4s %11s %9s %-7s %8s", "kernel", "shape", "type", "us", "speed", "",
           "of bound");
}

static void all_rows(void *self) {
    tr_bound b;
    tr_bound_open(&b, self);
    tr_bound_products(&b);
    tr_bound_layers(&b);
    tr_bound_moe(&b);
}

void tr_bench_rows(tr_lab *lab) {
    tr_lab_rank_0(lab, all_rows, lab);
}
