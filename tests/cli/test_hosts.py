"""Property: over several hosts, joined by a network alone, a job trains as on one; when a host
loses its power or its cable the job ends in time, and launched again it goes on as if nothing had
been. launch/hosts.sh starts all of them."""
import os
import signal
import subprocess
import time

import pytest
from conftest import ROOT
from hosts import Hosts, NotHere
from jobs import KINDS, Job, check_same_run, processes_in, saved_steps, small, wait_until_gone
from test_grids import check_rows


def make_hosts(count, **more):
    try:
        return Hosts(count, **more)
    except NotHere as reason:
        pytest.skip(f"no hosts of namespaces here: {reason}")


@pytest.fixture
def two():
    hosts = make_hosts(2)
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def three():
    hosts = make_hosts(3)
    yield hosts
    hosts.close()


SCRIPT = str(ROOT / "launch/hosts.sh")


def over(hosts, lab, ranks):
    """How a job of the lab is started over hosts."""
    words = hosts.command(lab.path, SCRIPT, str(hosts.folder / "hosts"), "-n", str(ranks))
    return dict(ranks=ranks, env=hosts.environment(), launcher=words)


GRIDS = {  # kind, ranks (two a host), settings
    "pp2 x dp2": ("dense", 4, dict(pipeline=2)),
    "dp4, ep4": ("moe", 4, dict(expert=4)),
    "pp3 x dp2, ep2": ("moe", 6, dict(pipeline=3, expert=2)),
    "cp3 with a host of one": ("dense", 3, dict(context=3)),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_hosts_equal_one_host(lab, three, grid):
    """To the byte like the same nodes pretended on one host; in DESIGN's limits like one node."""
    kind, ranks, parallel = GRIDS[grid]
    more = dict(parallel=parallel, model=dict(KINDS[kind], num_hidden_layers=3),
                training=dict(steps=8, evaluate_every=4))
    lab.train(small(lab, "here", kind, **more), ranks=ranks)
    lab.train(small(lab, "nodes", kind, **more), ranks=ranks, env={"TRIREME_NODE_RANKS": "2"})
    done = lab.train(small(lab, "hosts", kind, **more), **over(three, lab, ranks))
    check_same_run(lab, "nodes", "hosts", 8)
    last = 8 if kind == "dense" else 1  # then routing may differ: test_grids.py looks closer
    print(grid, check_rows(lab.rows("hosts")[:last], lab.rows("here")[:last], 5e-6, 5e-6, 5e-6))
    assert "warning" not in done.stderr


@pytest.mark.parametrize("blow", ["power_off", "cut"])
def test_lost_host(lab, two, blow):
    more = dict(parallel=dict(pipeline=2, expert=2), checkpoint=dict(every=5, keep=2),
                training=dict(steps=60, global_batch_size=32, evaluate_every=0))
    lab.train(small(lab, "whole", "moe", **more), **over(two, lab, 4))
    config = small(lab, "run", "moe", **more)
    job = Job(lab, "run", config, **over(two, lab, 4))
    assert job.wait_for_rows(12)
    getattr(two, blow)("h2")
    started = time.monotonic()
    assert job.finish(timeout=60) != 0
    ended = time.monotonic() - started
    wait_until_gone(lab, 60 - ended)  # those of the host without its cable, too
    print(f"{blow}: ended after {ended:.1f} s, all gone after {time.monotonic() - started:.1f} s")
    step = saved_steps(lab, "run")[-1]
    again = make_hosts(2)
    try:
        done = lab.train(config, **over(again, lab, 4))
    finally:
        again.close()
    assert f"resumed from checkpoints/run/step-{step:08d}.h5" in done.stdout
    check_same_run(lab, "whole", "run", 60)


def test_stalled_rank_on_another_host(lab, two):
    more = dict(parallel=dict(pipeline=2), training=dict(steps=100000, watchdog_seconds=2))
    job = Job(lab, "run", small(lab, "run", **more), **over(two, lab, 4))
    assert job.wait_for_rows(10)
    job.send(signal.SIGSTOP, 3)
    job.finish(70, timeout=60)
    wait_until_gone(lab)
    errors = [line for line in job.text().splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "rank 3 (pipeline 1, data 1) has been in `" in errors[0], errors


def test_usr1_saves_on_all_hosts(lab, two):
    more = dict(parallel=dict(pipeline=2), training=dict(steps=100000, evaluate_every=0),
                checkpoint=dict(every=0))
    job = Job(lab, "run", small(lab, "run", **more), **over(two, lab, 4))
    assert job.wait_for_rows(10)
    job.send(signal.SIGUSR1)
    job.finish(75)
    wait_until_gone(lab)
    assert saved_steps(lab, "run") == [len(lab.rows("run"))]


def test_what_hosts_sh_refuses(lab, two):
    """Before mpirun starts, each with its remedy; nobody is asked for a password."""
    program, env = os.environ["TRIREME"], {**os.environ, **two.environment()}
    good = str(two.folder / "hosts")
    (lab.path / "bad-hosts").write_text("h1 slots=1  # here\n\n# spare\nh9 slots=1\n")
    cases = [((), 64, "usage:"), ((good,), 64, "usage:"), ((good, "-n"), 64, "usage:"),
             (("none", program), 66, "none: no such file"),
             ((good, "./missing"), 66, "./missing: no such program"),
             (("bad-hosts", program), 69, "error: h9: no such host: h9; it must answer")]
    for words, code, text in cases:
        done = subprocess.run(two.command(lab.path, SCRIPT, *words), env=env,
                              capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code and text in done.stderr, (words, done)
    assert not processes_in(lab.path)
