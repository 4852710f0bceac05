/* checkpoint.c - saving and loading the model with its moments, against writing and reading as many
 * bytes of the same memory, in the same folder, by the same ranks. Floor: bench.
 *
 * A save and a raw write both end with fsync. Both reads find their file on the disk alone: it is
 * dropped from the page cache before. The measurements alternate, and what was written is removed
 * at the end. */
#include "bench/groups.h"

#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    tr_lab *lab;
    tr_job *job;
    char folder[4096], raw[4200], checkpoint[4200];
    bool parent_was_there; /* checkpoint.directory */
} disk;

typedef tr_status (*transfer)(const disk *d);

/* --- raw files -------------------------------------------------------------------------------- */

typedef struct {
    char *memory;
    int64_t bytes;
} run;

enum { RUNS = 3 * TR_SPACES };

/* As many bytes as this rank's masters; of fp32 weights that are their own, in one run. */
static char *masters(const tr_space *s) {
    if (s->master || !s->weights) return (char *)s->master;
    return (char *)s->weights + tr_comm_rank(s->comm) * s->shard_elems * 4;
}

/* Masters and moments of this rank; returns their bytes. */
static int64_t list_runs(const disk *d, run runs[RUNS]) {
    const tr_registry *r = tr_model_registry(d->job->model);
    int64_t total = 0;
    for (int i = 0; i < TR_SPACES; i++) {
        const tr_space *s = &r->space[i];
        char *arrays[] = {masters(s), (char *)s->m, (char *)s->v};
        for (int k = 0; k < 3; k++) {
            runs[3 * i + k] = (run){arrays[k], s->shard_elems * 4};
            total += s->shard_elems * 4;
        }
    }
    return total;
}

static tr_status raw_failed(const disk *d, const char *what) {
    return tr_fail(TR_ERR_IO, "%s: %s failed: %s", d->raw, what, strerror(errno));
}

/* Moves this rank's runs to or from its place in the file. */
static tr_status move_runs(const disk *d, int fd, bool out) {
    run runs[RUNS];
    int64_t at = tr_comm_rank(d->lab->world) * list_runs(d, runs);
    for (int i = 0; i < RUNS; i++)
        for (int64_t done = 0, n = 0; done < runs[i].bytes; done += n, at += n) {
            char *memory = runs[i].memory + done;
            size_t left = (size_t)(runs[i].bytes - done);
            n = out ? pwrite(fd, memory, left, at) : pread(fd, memory, left, at);
            if (n <= 0) return raw_failed(d, out ? "writing" : "reading");
        }
    return TR_OK;
}

static tr_status raw_write(const disk *d) {
    int fd = open(d->raw, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) return raw_failed(d, "opening");
    tr_status status = move_runs(d, fd, true);
    if (fsync(fd) != 0 && status == TR_OK) status = raw_failed(d, "fsync");
    close(fd);
    return status;
}

static tr_status raw_read(const disk *d) {
    int fd = open(d->raw, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return raw_failed(d, "opening");
    tr_status status = move_runs(d, fd, false);
    close(fd);
    return status;
}

/* --- checkpoints ------------------------------------------------------------------------------ */

static tr_status save(const disk *d) {
    return tr_job_save(d->job);
}

static tr_status load(const disk *d) {
    return tr_job_load(d->job, d->checkpoint, true);
}

/* --- measuring -------------------------------------------------------------------------------- */

/* Collective. Before each measurement no file is there (out), or none in memory: both sides find
 * the same free pages. On a virtual machine fresh ones cost five times more than those just freed.
 */
static void make_ready(const disk *d, bool out) {
    if (tr_comm_rank(d->lab->world) == 0)
        for (int i = 0; i < 2; i++) {
            const char *path = i ? d->checkpoint : d->raw;
            int fd = out ? -1 : open(path, O_RDONLY | O_CLOEXEC);
            if (out) unlink(path);
            if (fd >= 0) {
                posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
                close(fd);
            }
        }
    tr_end(tr_barrier_begin(d->lab->world));
}

/* Collective. */
static tr_status time_once(const disk *d, transfer work, double *seconds_p) {
    double begin = tr_lab_now();
    TR_TRY(tr_agree(d->lab->world, work(d)));
    *seconds_p = tr_lab_now() - begin;
    tr_end(tr_all_reduce_begin(d->lab->world, NULL, TR_MAX, TR_F64, seconds_p, 1));
    return TR_OK;
}

/* A row of ours against raw. Collective. */
static tr_status row(const disk *d, bool out) {
    enum { MOST = 15 };
    double ours[MOST], raw[MOST], spent = 0;
    run runs[RUNS];
    double gb = 1e-9 * (double)(list_runs(d, runs) * d->lab->ranks);
    int64_t count = 0, repeats = d->lab->repeats;
    tr_row_begin(&d->lab->table,
                 out ? "checkpoint save; base raw write" : "checkpoint load; base raw read");
    if (!out) TR_TRY(tr_agree(d->lab->world, raw_write(d)));
    while (count < MOST && (count < repeats || spent < 0.3 * (double)repeats)) {
        make_ready(d, out);
        TR_TRY(time_once(d, out ? raw_write : raw_read, &raw[count]));
        make_ready(d, out);
        TR_TRY(time_once(d, out ? save : load, &ours[count]));
        spent += raw[count] + ours[count];
        count++;
    }
    tr_row_end(&d->lab->table, &(tr_row){.unit = "GB/s",
                                         .measured = gb / tr_lab_median(ours, count),
                                         .base = gb / tr_lab_median(raw, count),
                                         .kind = TR_SHARE,
                                         .target = 0.7});
    return TR_OK;
}

/* Moments that are not all zero. */
static void fill_moments(const disk *d) {
    const tr_registry *r = tr_model_registry(d->job->model);
    for (int i = 0; i < TR_SPACES; i++) {
        const tr_space *s = &r->space[i];
        for (int k = 0; k < 2 && s->elems; k++)
            r->device->copy(r->device->stream, k ? s->v : s->m, masters(s),
                            (size_t)s->shard_elems * 4, TR_ON_DEVICE);
    }
}

static tr_status rows(disk *d) {
    const tr_config *c = d->job->config;
    struct stat about;
    if (!d->job->device->host_memory) {
        tr_row_begin(&d->lab->table, "checkpoint save and load");
        tr_row_skip(&d->lab->table, "compared with files of host memory alone");
        return TR_OK;
    }
    TR_TRY(tr_job_init_weights(d->job));
    fill_moments(d);
    tr_job_checkpoint_directory(c, d->folder, sizeof d->folder);
    tr_checkpoint_path(d->checkpoint, sizeof d->checkpoint, d->folder, 0);
    snprintf(d->raw, sizeof d->raw, "%s/raw", d->folder);
    d->parent_was_there = stat(c->checkpoint.directory, &about) == 0;
    TR_TRY(save(d)); /* makes the folder; not counted */
    TR_TRY(row(d, true));
    return row(d, false);
}

static void clean_up(const disk *d) {
    if (!*d->folder || tr_comm_rank(d->lab->world) != 0) return;
    unlink(d->raw);
    unlink(d->checkpoint);
    rmdir(d->folder);
    if (!d->parent_was_there) rmdir(d->job->config->checkpoint.directory);
}

tr_status tr_bench_checkpoint(tr_lab *lab) {
    disk d = {.lab = lab};
    tr_config *config = NULL;
    tr_status status = tr_lab_job(lab, lab->world, TR_F32, lab->B, NULL, &config, &d.job);
    if (status == TR_OK) status = rows(&d);
    clean_up(&d);
    tr_end(tr_barrier_begin(lab->world));
    tr_job_destroy(d.job);
    tr_config_destroy(config);
    return status;
}
