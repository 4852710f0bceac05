/* lock.c - flock on a file that says who holds it. Floor: base.
 *
 * The holder removes the file before it lets go, so one that waits may get the lock of a file that
 * is no longer there: it then begins again. */
#include "base/lock.h"

#include "base/file.h"
#include "base/heap.h"
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { TRIES = 60, PAUSE_NS = 50000000 }; /* 3 s: a killed rank is gone by then */

struct tr_lock {
    tr_lock *next;
    int fd;
    bool made; /* the directory */
    char *path, *directory;
};

static bool is_folder(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

static bool is_held(const tr_lock *locks, int fd) {
    struct stat held, new;
    if (fstat(fd, &new) != 0) return false;
    for (; locks; locks = locks->next)
        if (fstat(locks->fd, &held) == 0 && same_file(&held, &new)) return true;
    return false;
}

/* Whether the file is still the one at `path`. */
static bool is_there(int fd, const char *path) {
    struct stat opened, there;
    return fstat(fd, &opened) == 0 && stat(path, &there) == 0 && same_file(&opened, &there);
}

static tr_status refuse(int fd, const char *directory, const char *name) {
    char holder[160] = "";
    ssize_t n = pread(fd, holder, sizeof holder - 1, 0);
    long pid = 0;
    char host[80] = "";
    if (n <= 0 || sscanf(holder, "%ld %79s", &pid, host) != 2)
        return tr_fail(TR_ERR_USAGE,
                       "%s/%s is in use by another job; wait for its end, or give this run "
                       "another run.name",
                       directory, name);
    return tr_fail(TR_ERR_USAGE,
                   "%s/%s is in use by another job, whose first rank is process %ld on host %s; "
                   "wait for its end, stop it there (kill -USR1 %ld lets it save), or give this "
                   "run another run.name",
                   directory, name, pid, host, pid);
}

static void say_holder(int fd) {
    char host[80] = "unknown", text[160];
    gethostname(host, sizeof host - 1);
    int n = snprintf(text, sizeof text, "%ld %s\n", (long)getpid(), host);
    bool said = ftruncate(fd, 0) == 0 && pwrite(fd, text, (size_t)n, 0) == n;
    (void)said; /* the lock holds without its text, on a full disk too */
}

/* A descriptor that has the lock; -1 if `locks` hold it already. */
static tr_status open_locked(const tr_lock *locks, const char *path, const char *directory,
                             const char *setting, const char *name, int *fd_p) {
    for (int tries = 1;;) {
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (fd < 0)
            return tr_fail(TR_ERR_IO,
                           "%s: cannot be made: %s; set %s to a place where you may write", path,
                           strerror(errno), setting);
        *fd_p = fd;
        if (is_held(locks, fd)) {
            close(fd);
            *fd_p = -1;
            return TR_OK;
        }
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
            if (is_there(fd, path)) return TR_OK;
        } else if (errno != EWOULDBLOCK && errno != EINTR) {
            tr_warn("%s: this file system has no locks (%s): nothing keeps a second job out", path,
                    strerror(errno));
            return TR_OK;
        } else if (tries++ == TRIES) {
            tr_status status = refuse(fd, directory, name);
            close(fd);
            return status;
        } else {
            nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
        }
        close(fd);
    }
}

tr_status tr_lock_take(tr_lock **locks_p, const char *directory, const char *setting,
                       const char *name) {
    bool made = !is_folder(directory);
    TR_TRY(tr_file_make_folder(directory, setting));
    char *path = tr_heap_format("%s/.%s.lock", directory, name);
    int fd = -1;
    tr_status status = open_locked(*locks_p, path, directory, setting, name, &fd);
    if (status != TR_OK || fd < 0) {
        free(path);
        return status;
    }
    say_holder(fd);
    tr_lock *lock = tr_heap_alloc(1, sizeof *lock);
    *lock = (tr_lock){.next = *locks_p,
                      .fd = fd,
                      .made = made,
                      .path = path,
                      .directory = tr_heap_copy(directory)};
    *locks_p = lock;
    return TR_OK;
}

void tr_lock_release(tr_lock *locks) {
    while (locks) {
        tr_lock *lock = locks;
        locks = lock->next;
        unlink(lock->path);
        close(lock->fd);
        if (lock->made) rmdir(lock->directory);
        free(lock->path);
        free(lock->directory);
        free(lock);
    }
}
