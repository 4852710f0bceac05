/* progress.c - how far a run is, for the person who waits for it. Floor: observe.
 *
 * mpirun gives a rank a terminal of its own whatever its own output is; but it passes on the width,
 * which is 0 when mpirun writes to a pipe or a file. So a terminal is one with a width.
 *
 * And mpirun no longer reads what the ranks print once it is told to end. A rank that waited for it
 * would not get to its save, so a line waits for a second at most, and is lost then. */
#include "observe/metrics.h"

#include "base/heap.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_COLUMNS = 100, MIN_BAR = 10, LINE_BYTES = 320 };
static const double redraw_seconds = 0.1, patience_seconds = 1;

struct tr_progress {
    /* declared */
    int64_t first_step, last_step, every;
    double start;
    int out; /* standard output; where it could make us wait, opened again so that it does not */
    /* state */
    bool stuck;        /* the last line was lost: the next ones do not wait */
    double first_done; /* when the first step ended, 0 before */
    double drawn_at;
    int drawn_columns; /* of the bar's line on the terminal now, 0: none */
};

/* The fields of a line, in the order in which they are printed. */
enum { F_STEP, F_LOSS, F_NORM, F_SPEED, F_MFU, F_LEFT, F_COUNT };
typedef struct {
    char text[F_COUNT][40]; /* "": not shown */
} fields;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* 0 when standard output is no terminal. */
static int terminal_columns(void) {
    struct winsize size = {0};
    if (!isatty(STDOUT_FILENO) || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return 0;
    return size.ws_col;
}

/* Its own open file, so that nobody else's writes to standard output stop waiting. */
static int open_output(void) {
    struct stat info;
    bool may_wait =
        fstat(STDOUT_FILENO, &info) == 0 && (S_ISFIFO(info.st_mode) || isatty(STDOUT_FILENO));
    int out = may_wait ? open("/proc/self/fd/1", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC) : -1;
    return out >= 0 ? out : STDOUT_FILENO;
}

static void print(tr_progress *p, const char *text, int bytes) {
    double until = p->stuck ? 0 : now() + patience_seconds;
    while (bytes > 0) {
        ssize_t n = write(p->out, text, (size_t)bytes);
        if (n >= 0) {
            p->stuck = false;
            text += n;
            bytes -= (int)n;
        } else if (errno == EAGAIN && now() < until) {
            struct pollfd room = {.fd = p->out, .events = POLLOUT};
            poll(&room, 1, (int)(1000 * patience_seconds));
        } else if (errno != EINTR) {
            p->stuck = true;
            return;
        }
    }
}

tr_progress *tr_progress_start(int64_t steps_done, int64_t last_step, int64_t every) {
    tr_progress *progress = tr_heap_alloc(1, sizeof *progress);
    *progress = (tr_progress){.first_step = steps_done + 1,
                              .last_step = last_step,
                              .every = every,
                              .start = now(),
                              .out = open_output()};
    return progress;
}

/* "12s", "3m12s", "2h05m" or "4d07h". */
static void print_duration(char *out, size_t bytes, double seconds) {
    long long s = (long long)ceil(fmin(seconds, 1e12));
    if (s < 60)
        snprintf(out, bytes, "%llds", s);
    else if (s < 3600)
        snprintf(out, bytes, "%lldm%02llds", s / 60, s % 60);
    else if (s < 86400)
        snprintf(out, bytes, "%lldh%02lldm", s / 3600, s / 60 % 60);
    else
        snprintf(out, bytes, "%lldd%02lldh", s / 86400, s / 3600 % 24);
}

/* The mean time of the steps so far, times those to come. The first step is slower than the rest
 * (memory is taken, pages are touched), so it counts only while there is no other. */
static double seconds_left(const tr_progress *p, int64_t step) {
    int64_t done = step - p->first_step;
    double each = done > 0 ? (now() - p->first_done) / (double)done : p->first_done - p->start;
    return each * (double)(p->last_step - step);
}

static void print_number(char *out, size_t bytes, const char *before, int digits, double value) {
    if (isnan(value))
        snprintf(out, bytes, "%snan", before); /* printf would show its sign */
    else if (fabs(value) < 1e4)
        snprintf(out, bytes, "%s%.*f", before, digits, value);
    else
        snprintf(out, bytes, "%s%.*g", before, digits, value);
}

/* "step   7/200" */
static void print_step(char *out, size_t bytes, const tr_progress *p, int64_t step) {
    char last[24];
    int width = snprintf(last, sizeof last, "%lld", (long long)p->last_step);
    snprintf(out, bytes, "step %*lld/%s", width, (long long)step, last);
}

static fields describe(const tr_progress *p, const tr_step_record *r) {
    fields f = {0};
    char left[24];
    print_step(f.text[F_STEP], sizeof f.text[0], p, r->step);
    print_number(f.text[F_LOSS], sizeof f.text[0], "loss ", 4, r->loss);
    if (r->skipped)
        snprintf(f.text[F_NORM], sizeof f.text[0], "%s: skipped",
                 isfinite(r->grad_norm) ? "no labels" : "not finite");
    else
        print_number(f.text[F_NORM], sizeof f.text[0], "grad norm ", 3, r->grad_norm);
    snprintf(f.text[F_SPEED], sizeof f.text[0], "%.0f tok/s", r->tokens_per_second);
    if (isfinite(r->mfu)) snprintf(f.text[F_MFU], sizeof f.text[0], "MFU %.1f %%", 100 * r->mfu);
    if (r->step < p->last_step) {
        print_duration(left, sizeof left, seconds_left(p, r->step));
        snprintf(f.text[F_LEFT], sizeof f.text[0], "%s left", left);
    }
    return f;
}

/* Joins the fields with " | "; returns the columns. */
static int join(char line[LINE_BYTES], const fields *f) {
    int used = 0;
    line[0] = 0;
    for (int i = 0; i < F_COUNT; i++)
        if (f->text[i][0])
            used += snprintf(line + used, (size_t)(LINE_BYTES - used), "%s%s", used ? " | " : "",
                             f->text[i]);
    return used;
}

/* "[=====     ] " with `cells` between the brackets, at most MAX_COLUMNS. */
static void print_bar(char bar[LINE_BYTES], int cells, int full) {
    memset(bar + 1, ' ', (size_t)cells);
    memset(bar + 1, '=', (size_t)full);
    bar[0] = '[';
    memcpy(bar + 1 + cells, "] ", 3);
}

/* Rewrites the bar's line. What does not fit beside a bar is left out, the least wanted first. */
static void draw(tr_progress *p, const tr_step_record *r, int columns) {
    static const int unwanted[] = {F_MFU, F_NORM, F_SPEED, F_LEFT};
    int room = columns <= MAX_COLUMNS ? columns - 1 : MAX_COLUMNS; /* the last one would wrap */
    fields f = describe(p, r);
    char line[LINE_BYTES], bar[LINE_BYTES] = "";
    int used = join(line, &f);
    for (size_t i = 0; i < sizeof unwanted / sizeof *unwanted && used + 3 + MIN_BAR > room; i++) {
        f.text[unwanted[i]][0] = 0;
        used = join(line, &f);
    }
    int cells = room - used - 3;
    if (cells >= MIN_BAR) {
        print_bar(bar, cells, (int)(r->step * cells / p->last_step));
        used = room;
    } else if (used > room) {
        used = room;
    }
    int erase = p->drawn_columns > used ? p->drawn_columns - used : 0;
    char text[3 * LINE_BYTES];
    print(p, text, snprintf(text, sizeof text, "\r%s%.*s%*s", bar, room, line, erase, ""));
    p->drawn_columns = used;
    p->drawn_at = now();
}

void tr_progress_pause(tr_progress *progress) {
    if (!progress || progress->drawn_columns == 0) return;
    print(progress, "\n", 1);
    progress->drawn_columns = 0;
}

static void say_validation(tr_progress *p, const tr_step_record *r) {
    char step[40], loss[40], bits[40], text[LINE_BYTES];
    print_step(step, sizeof step, p, r->step);
    print_number(loss, sizeof loss, "", 4, r->validation_loss);
    print_number(bits, sizeof bits, "", 4, r->validation_bits_per_byte);
    print(p, text,
          snprintf(text, sizeof text, "%s | validation loss %s | %s bits per byte\n", step, loss,
                   bits));
}

void tr_progress_step(tr_progress *progress, const tr_step_record *record) {
    if (!progress) return;
    tr_progress *p = progress;
    int64_t step = record->step;
    if (p->first_done == 0) p->first_done = now();
    int columns = terminal_columns();
    bool first_or_last = step == p->first_step || step == p->last_step;
    if (columns > 0) {
        if (first_or_last || record->evaluated || now() - p->drawn_at >= redraw_seconds)
            draw(p, record, columns);
    } else if (first_or_last || (p->every > 0 && step % p->every == 0)) {
        fields f = describe(p, record);
        char line[LINE_BYTES], text[LINE_BYTES];
        join(line, &f);
        print(p, text, snprintf(text, sizeof text, "%.*s\n", MAX_COLUMNS, line));
    }
    if (record->evaluated) {
        tr_progress_pause(p);
        say_validation(p, record);
    }
}

void tr_progress_finish(tr_progress *progress) {
    if (!progress) return;
    tr_progress_pause(progress);
    if (progress->out != STDOUT_FILENO) close(progress->out);
    free(progress);
}
