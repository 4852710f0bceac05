"""Property: whenever and wherever a job is killed, it goes on from a complete checkpoint, and in
the end it leaves byte for byte what a run that was never killed leaves."""
import os
import random
import signal
import subprocess
import time

import pytest
from jobs import Job, check_same_run, processes_in, rank_of, saved_steps, small, wait_until_gone
from test_failures import MOMENTS, long_lab

STEPS, KILLS = 100, 18  # of each job
JOBS = {  # kind, ranks, settings
    "dense on one rank": ("dense", 1, {}),
    "moe on pp2 x dp2 x ep2": ("moe", 4, dict(parallel=dict(pipeline=2, expert=2))),
}


def kill(job, rng):
    """Kills all or one of the job; returns which, or None where nothing was left to kill."""
    if job.process.poll() is not None:
        return None
    ranks = {rank_of(pid): pid for pid in processes_in(job.lab.path) if rank_of(pid) is not None}
    if rng.random() < 0.4 or not ranks:
        job.kill_all()
        return "all"
    rank = rng.choice(sorted(ranks))
    try:
        os.kill(ranks[rank], signal.SIGKILL)
    except ProcessLookupError:
        return None
    return f"rank {rank}"


@pytest.mark.parametrize("name", JOBS)
def test_killed_again_and_again(lab, name):
    kind, ranks, more = JOBS[name]
    seed = int(os.environ.get("TRIREME_KILL_SEED", "1"))
    rng = random.Random(seed)
    more = dict(more, training=dict(steps=STEPS, evaluate_every=7),
                checkpoint=dict(every=1, keep=3), log=dict(samples=True))
    lab.train(small(lab, "whole", kind, **more), ranks=ranks)
    config = small(lab, "run", kind, **more)
    print(f"{name}, TRIREME_KILL_SEED={seed}")
    for n in range(1, KILLS + 1):
        job = Job(lab, "run", config, ranks=ranks, env={"OMPI_MCA_odls_base_sigkill_timeout": "0"})
        before = job.rows()
        if n % 5:  # each at another instant of steps and saves
            job.wait_for_rows(before + rng.randint(1, 3))
            time.sleep(rng.uniform(0, 0.02))
        else:  # while it starts and loads
            time.sleep(rng.uniform(0.02, 0.4))
        who = kill(job, rng)
        code = job.finish(timeout=60)
        wait_until_gone(lab)
        print(f"  {n}: {who} killed, exit code {code}, row {before} -> {job.rows()}")
        assert who and code != 0, "it was faster than its killer: more steps are needed"
    lab.train(config, ranks=ranks)
    assert saved_steps(lab, "run") == [STEPS - 2, STEPS - 1, STEPS]
    check_same_run(lab, "whole", "run", STEPS)
    a, b = (lab.path / "runs" / n / "samples.jsonl" for n in ("whole", "run"))
    assert a.read_bytes() == b.read_bytes()


def test_term_to_mpirun(tmp_path):
    """mpirun itself then exits 1; with the time that launch/env.sh gives, the step is saved.
    mpirun was once seen not to end, on a busy machine, and not again in 200 tries: what it does
    then is printed, and what is ours, that the ranks save and go, holds all the same."""
    lab = long_lab(tmp_path)
    config = small(lab, "run", **MOMENTS["training"])
    more = ("training.steps=100000",)
    job = Job(lab, "run", config, *more, ranks=2, env={"OMPI_MCA_odls_base_sigkill_timeout": "4"})
    assert job.wait_for_rows(3)
    job.send(signal.SIGTERM, "mpirun")
    try:
        assert job.process.wait(60) == 1
        wait_until_gone(lab)
    except subprocess.TimeoutExpired:
        print(subprocess.run(["ps", "-Leo", "pid,ppid,lwp,stat,wchan:32,args"], text=True,
                             capture_output=True, check=False).stdout)
        assert processes_in(lab.path) == [job.process.pid], job.text()
        job.kill_all()
    assert saved_steps(lab, "run") == [len(lab.rows("run"))]
    assert lab.train(config, "training.steps=1").stdout.count("already finished") == 1
