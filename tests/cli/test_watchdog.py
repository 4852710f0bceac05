"""Property: a job in which a rank stalls ends with exit code 70 soon after
training.watchdog_seconds, names that rank and what it was doing, and leaves no process; long work
that goes on, and a job that was suspended as a whole, are left alone."""
import os
import re
import signal
import subprocess
import time

import pytest
from jobs import Job, check_same_run, metrics_text, processes_in, rank_of, small, wait_until_gone

LIMIT = 2
SLACK = 6  # mpirun kills the others after twice jobs.py's second
GRID = dict(parallel=dict(pipeline=2, expert=2))
LONG = dict(training=dict(steps=100000, evaluate_every=0, watchdog_seconds=LIMIT),
            checkpoint=dict(every=0))


def stall(lab, rank, **env):
    """Stops one rank of four in the middle of training; returns the job's last words."""
    job = Job(lab, "run", small(lab, "run", "moe", **GRID, **LONG), ranks=4, env=env)
    assert job.wait_for_rows(20)
    job.send(signal.SIGSTOP, rank)
    started = time.monotonic()
    job.finish(70, timeout=60)
    wait_until_gone(lab)
    took = time.monotonic() - started
    assert LIMIT - 0.5 < took < LIMIT + SLACK, took
    said = [line for line in job.text().splitlines() if line.startswith("error:")]
    print(f"rank {rank} {env}: {took:.1f} s\n{said}")
    assert len(said) == 1
    assert "training.watchdog_seconds 2" in said[0] and "goes on from the last ch" in said[0]
    return said[0]


@pytest.mark.parametrize("rank", [0, 3])
def test_stopped_rank(lab, rank):
    said = stall(lab, rank)
    place = f"rank {rank} (pipeline {rank // 2}, data {rank % 2})"
    assert re.search(re.escape(f"error: {place} has been in `") + r"[a-z -]+\d*` of step \d+ "
                     r"for [23] s: its process is stopped or gone\.", said), said


@pytest.mark.parametrize("nodes,rank", [("1", 0), ("1", 2), ("3", 3)])
def test_stopped_rank_of_another_node(lab, nodes, rank):
    """The nodes are pretended: each holds so many ranks, and asks the others over the network."""
    said = stall(lab, rank, TRIREME_NODE_RANKS=nodes)
    place = f"rank {rank} (pipeline {rank // 2}, data {rank % 2})"
    assert f"error: {place} does not answer: its machine is down or cut off, or its " in said


def test_stopped_rank_beside_another_node(lab):
    """Two pretended nodes of two ranks: its neighbour knows what it was doing."""
    assert "error: rank 1 (pipeline 0, data 1) has been in `" in stall(
        lab, 1, TRIREME_NODE_RANKS="2")


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>
/* A disk that takes SHIM_US microseconds a KiB; where SHIM_RANK is given, for that rank alone. */
static void delay(size_t bytes) {
    const char *only = getenv("SHIM_RANK"), *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (only && (!rank || atoi(only) != atoi(rank))) return;
    long long ns = atoll(getenv("SHIM_US")) * (long long)bytes * 1000 / 1024;
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    nanosleep(&t, NULL);
}
static size_t all(const struct iovec *v, int n) {
    size_t bytes = 0;
    for (int i = 0; i < n; i++) bytes += v[i].iov_len;
    return bytes;
}
#define SLOW(name, bytes, parameters, arguments) ssize_t name parameters { \
    ssize_t (*real) parameters = (ssize_t (*) parameters)dlsym(RTLD_NEXT, #name); \
    delay(bytes); return real arguments; }
SLOW(pwrite, n, (int f, const void *b, size_t n, off_t o), (f, b, n, o))
SLOW(pwrite64, n, (int f, const void *b, size_t n, off64_t o), (f, b, n, o))
SLOW(pwritev, all(v, n), (int f, const struct iovec *v, int n, off_t o), (f, v, n, o))
SLOW(pwritev64, all(v, n), (int f, const struct iovec *v, int n, off64_t o), (f, v, n, o))
"""


def slow_disk(lab, us, rank=None):
    """Environment in which a KiB takes so long to write."""
    (lab.path / "shim.c").write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "shim.so", "shim.c", "-ldl"], cwd=lab.path,
                   check=True)
    env = {"LD_PRELOAD": str(lab.path / "shim.so"), "SHIM_US": str(us)}
    return env | ({} if rank is None else {"SHIM_RANK": str(rank)})


def test_rank_that_hangs_in_a_save(lab):
    """It runs, but its disk does not answer."""
    more = dict(training=dict(steps=20, evaluate_every=0, watchdog_seconds=LIMIT))
    done = lab.train(small(lab, "run", **more), ranks=2, code=70, timeout=60,
                     env=slow_disk(lab, 10**9, rank=1))
    assert re.search(r"error: rank 1 \(data 1\) has been in `save: writing` of step 5 for [23] s "
                     "without waiting for others", done.stderr), done.stderr
    wait_until_gone(lab)


def test_long_work_goes_on(lab):
    """Saves on a slow disk and an evaluation, each longer than the limit."""
    (lab.path / "long.txt").write_bytes((lab.path / "text.txt").read_bytes() * 80)
    more = dict(training=dict(steps=5, watchdog_seconds=1, evaluate_batches=10000),
                data=dict(validation=["long.txt"]))
    started = time.monotonic()
    lab.train(small(lab, "run", **more), "training.evaluate_every=0", ranks=2)
    evaluation = time.monotonic() - started
    started = time.monotonic()
    lab.train(small(lab, "slow", **more), "training.evaluate_batches=1", ranks=2,
              env=slow_disk(lab, 20000))
    print(f"evaluation {evaluation:.1f} s, save {time.monotonic() - started:.1f} s")
    assert evaluation > 3 and time.monotonic() - started > 3  # several limits


def test_suspended_job_goes_on(lab):
    """All ranks are stopped for longer than the limit, as by scontrol suspend, then continued."""
    more = dict(training=dict(steps=60, evaluate_every=0, watchdog_seconds=1), **GRID)
    lab.train(small(lab, "whole", "moe", **more), ranks=4)
    job = Job(lab, "run", small(lab, "run", "moe", **more), ranks=4)
    assert job.wait_for_rows(5)
    ranks = [pid for pid in processes_in(lab.path) if rank_of(pid) is not None]
    assert len(ranks) == 4
    for number, pause in ((signal.SIGSTOP, 2.5), (signal.SIGCONT, 0)):
        for pid in ranks:
            os.kill(pid, number)
        time.sleep(pause)
    job.finish(0)
    check_same_run(lab, "whole", "run", 60)


@pytest.mark.parametrize("limit", [60, 0])
def test_short_stall_and_no_limit(lab, limit):
    """One rank stops for less than the limit, or where there is none."""
    config = small(lab, "run", training=dict(steps=400, evaluate_every=0, watchdog_seconds=limit))
    job = Job(lab, "run", config, ranks=2)
    assert job.wait_for_rows(3)
    job.send(signal.SIGSTOP, 1)
    time.sleep(1.5)
    assert job.process.poll() is None
    job.send(signal.SIGCONT, 1)
    job.finish(0)
    assert len(metrics_text(lab, "run")) == 400
