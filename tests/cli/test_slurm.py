"""Property: launch/slurm.sbatch, on a real Slurm cluster of this one machine: a job that meets its
time limit saves, is queued again and finishes with what a job without a limit computes; a cancelled
one saves and is not queued again; nothing is left behind."""
import os
import re
import shutil
import signal
import time

import pytest
import yaml
from cluster import Cluster, NotHere
from conftest import ROOT
from jobs import check_same_run, processes_in, saved_steps, small, wait_until_gone

GRID = dict(parallel=dict(pipeline=2, expert=2), optimizer=dict(schedule="constant"))
ENDLESS = 10**6


def slurm_rank(pid):
    """Of a trainer under srun; None for other processes."""
    try:
        with open(f"/proc/{pid}/comm") as name, open(f"/proc/{pid}/environ") as environment:
            if name.read().strip() == "trireme":
                return re.search("SLURM_PROCID=([0-9]+)", environment.read())[1]
    except OSError:
        pass
    return None


@pytest.fixture(scope="module")
def cluster():
    try:
        made = Cluster()
    except NotHere as reason:
        pytest.skip(f"no Slurm here: {reason}")
    yield made
    made.close()


class Job:
    """A training submitted with launch/slurm.sbatch from the lab's folder."""

    def __init__(self, cluster, lab, name, launcher, *options, steps=ENDLESS, **sections):
        if not (lab.path / "launch").exists():
            shutil.copytree(ROOT / "launch", lab.path / "launch")
        self.cluster, self.lab, self.name = cluster, lab, name
        sections = {**GRID, **sections}
        sections["training"] = dict(steps=steps, evaluate_every=0, **sections.get("training", {}))
        self.config = small(lab, name, "moe", **sections)
        said = cluster.call("sbatch", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1",
                            f"--job-name={name}", *options, "launch/slurm.sbatch", self.config,
                            cwd=lab.path, env={"TRIREME_LAUNCHER": launcher})
        self.number = int(re.search(r"Submitted batch job (\d+)", said)[1])
        self.output = lab.path / f"{name}-{self.number}.out"

    def text(self):
        return self.output.read_text() if self.output.exists() else ""

    def rows(self):
        path = self.lab.path / "runs" / self.name / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for(self, reached, seconds, what):
        until = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < until, \
                f"not {what} in {seconds} s\n{self.cluster.job(self.number)}\n{self.text()}"
            time.sleep(0.1)

    def wait_for_state(self, *states, seconds=60):
        self.wait_for(lambda: self.cluster.job(self.number)["JobState"] in states, seconds, states)

    def change_steps(self, steps):
        path = self.lab.path / self.config
        config = yaml.safe_load(path.read_text())
        config["training"]["steps"] = steps
        path.write_text(yaml.safe_dump(config))


def test_time_limit_requeue_finish(cluster, lab):
    """By srun and by mpirun, at the same time."""
    limit = ("--time=1", "--signal=B:USR1@20")  # Slurm looks every 30 s: it comes 10 to 40 s in
    jobs = {how: Job(cluster, lab, how, how, *limit) for how in ("srun", "mpirun")}
    ends = {}
    for how, job in jobs.items():
        job.wait_for(lambda: "run 1: the trainer ended with code" in job.text(), 90, "stopped")
        stopped = int(re.search(r"stopped at step (\d+) after saving", job.text())[1])
        ends[how] = stopped, stopped + 20
        job.change_steps(stopped + 20)  # the next run starts after 5 s at the earliest
    for how, job in jobs.items():
        stopped, end = ends[how]
        job.wait_for_state("COMPLETED")
        text = job.text()
        assert "run 1: USR1: the trainer saves and stops" in text
        assert "run 1: the trainer ended with code 75" in text
        assert f"resumed from checkpoints/{how}/step-{stopped:08d}.h5" in text
        assert "run 2: the trainer ended with code 0" in text and "run 3" not in text
        print("\n".join(line for line in text.splitlines() if f"job {job.number}" in line))
        whole = small(lab, "whole-" + how, "moe",
                      **GRID, training=dict(steps=end, evaluate_every=0))
        lab.train(whole, ranks=4, env={"TRIREME_NODE_RANKS": "2"})
        check_same_run(lab, "whole-" + how, how, end)
    wait_until_gone(lab)


@pytest.mark.parametrize("how", ["srun", "mpirun"])
def test_cancelled_job_saves(cluster, lab, how):
    job = Job(cluster, lab, how, how, checkpoint=dict(every=0))
    job.wait_for(lambda: job.rows() > 10, 60, "training")
    started = time.monotonic()
    cluster.call("scancel", str(job.number))
    job.wait_for_state("CANCELLED")
    wait_until_gone(lab)
    print(f"{how}: all gone after {time.monotonic() - started:.1f} s")
    print("\n".join(line for line in job.text().splitlines() if "| loss" not in line))
    assert saved_steps(lab, how) == [job.rows()]
    time.sleep(7)
    assert cluster.job(job.number)["JobState"] == "CANCELLED"
    assert not processes_in(lab.path)


def test_stalled_rank(cluster, lab):
    """The watchdog's end is the job's, by srun as by mpirun."""
    job = Job(cluster, lab, "stall", "srun", training=dict(watchdog_seconds=2))
    job.wait_for(lambda: job.rows() > 10, 60, "training")
    ranks = [pid for pid in processes_in(lab.path) if slurm_rank(pid) == "3"]
    os.kill(ranks[0], signal.SIGSTOP)
    job.wait_for_state("FAILED")
    wait_until_gone(lab)
    assert "error: rank 3 (pipeline 1, data 1) has been in `" in job.text()
    assert cluster.job(job.number)["ExitCode"] == "70:0"
