"""What the tests of stopping and going on share: small jobs, running ones that can be hurt, and
whether two runs are the same byte for byte."""
import os
import re
import signal
import subprocess
import time

import h5py
import numpy as np
from conftest import ROOT

# mpirun waits twice this many seconds for the other ranks once one has ended with an error.
os.environ["OMPI_MCA_odls_base_sigkill_timeout"] = "1"
GROUPS = "model", "optimizer/exp_avg", "optimizer/exp_avg_sq"
STATE = "step", "samples", "tokens", "updates", "skipped_in_row", "data_fingerprint"

KINDS = {
    "dense": dict(hidden_size=32, num_hidden_layers=2, intermediate_size=48),
    "moe": dict(hidden_size=32, num_hidden_layers=2, first_k_dense_replace=0),
}


def small(lab, name, kind="dense", **sections):
    """A config of a job of 20 steps that takes about a second."""
    base = {
        "run": dict(peak_flops=1e11),
        "model": dict(KINDS[kind]),
        "training": dict(steps=20, evaluate_every=5, evaluate_batches=2),
        "checkpoint": dict(every=5, keep=0),
    }
    for section, values in sections.items():
        base.setdefault(section, {}).update(values)
    return lab.config(name, kind, **base)


# --- comparing ------------------------------------------------------------------------------------

def metrics_text(lab, name, first=1, last=10**9):
    """The rows of metrics.jsonl as they are written, without the fields that tell the time."""
    lines = (lab.path / "runs" / name / "metrics.jsonl").read_text().splitlines(keepends=True)
    text = [re.sub(r',"(seconds|tokens_per_second|mfu)":[^,}]+', "", line) for line in lines]
    assert all(line.count("seconds") == 0 for line in text)
    return [t for t in text if first <= int(re.match(r'{"step":(\d+),', t)[1]) <= last]


def contents(path):
    """Everything a checkpoint holds except its config, as bytes."""
    with h5py.File(path) as f:
        held = {k: int(f.attrs[k]) for k in STATE}
        for group in GROUPS:
            for name, data in f[group].items():
                held[f"{group}/{name}"] = data[()].tobytes()
    return held


def check_same_checkpoint(a, b):
    a, b = contents(a), contents(b)
    assert a.keys() == b.keys()
    assert [k for k in a if a[k] != b[k]] == []


def check_same_run(lab, one, other, step):
    """Equal metrics text and equal bytes in every tensor of the checkpoint of `step`."""
    assert metrics_text(lab, one) == metrics_text(lab, other)
    check_same_checkpoint(lab.checkpoint_path(one, step), lab.checkpoint_path(other, step))


def saved_steps(lab, name):
    """The steps of a run's checkpoints; nothing else may lie beside them."""
    names = sorted(os.listdir(lab.path / "checkpoints" / name))
    assert all(re.fullmatch(r"step-\d{8}\.h5", n) for n in names), names
    return [int(n[5:-3]) for n in names]


def checksum(a):
    """The store's checksum of a tensor, as checkpoints/README.md defines it."""
    namespace = {}
    text = (ROOT / "checkpoints" / "README.md").read_text()
    code = [b.split("```")[0] for b in text.split("```python\n")[1:] if "def checksum" in b]
    exec(code[0], namespace)
    return namespace["checksum"](a)


# --- running --------------------------------------------------------------------------------------

def processes_in(folder):
    """Process ids whose working directory is `folder`: mpirun, its ranks and what they started."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.readlink(f"/proc/{entry}/cwd") == str(folder):
                found.append(int(entry))
        except OSError:
            pass
    return found


def rank_of(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as f:
            found = re.search(rb"OMPI_COMM_WORLD_RANK=(\d+)", f.read())
        with open(f"/proc/{pid}/comm") as f:
            return int(found[1]) if found and f.read().strip() == "trireme" else None
    except OSError:
        return None


def shared_memory_of(pid):
    """Files in /dev/shm that a process has mapped; nobody removes those of a job killed whole."""
    try:
        with open(f"/proc/{pid}/maps") as f:
            return set(re.findall(r"/dev/shm/\S+", f.read()))
    except OSError:
        return set()


class Job:
    """A training that runs while the test looks on."""

    def __init__(self, lab, name, config, *sets, ranks=1, resume=None, env=None, launcher=()):
        self.lab, self.name, self.ranks = lab, name, ranks
        words = [os.environ["TRIREME"], "train", config]
        for s in sets:
            words += ["--set", s]
        if resume:
            words += ["--resume", str(resume)]
        if ranks > 1 and not launcher:
            launcher = ["mpirun", "-n", str(ranks)]
        words = [*launcher, *words]
        self.said = lab.path / f"{name}.said"
        with open(self.said, "w") as out:
            self.process = subprocess.Popen(
                ["sh", "-c", f'. {ROOT}/launch/env.sh; exec "$@"', "sh", *words], cwd=lab.path,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **(env or {})})

    def rows(self):
        try:
            return (self.lab.path / "runs" / self.name / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def wait_for_rows(self, n):
        """Until step n is in metrics.jsonl; false if the job ended before."""
        while self.rows() < n and self.process.poll() is None:
            time.sleep(0.001)
        return self.rows() >= n and self.process.poll() is None

    def pid(self, target):
        """Of "mpirun", or of a rank by its number."""
        if target == "mpirun" or self.ranks == 1:
            return self.process.pid
        return next(p for p in processes_in(self.lab.path) if rank_of(p) == target)

    def send(self, signal_number, target="mpirun"):
        os.kill(self.pid(target), signal_number)

    def kill_all(self):
        """The whole job at once, as a power cut would."""
        pids = [self.process.pid, *processes_in(self.lab.path)]
        left = set.union(*map(shared_memory_of, pids))
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        self.process.wait(60)
        for path in left:
            if os.path.exists(path):
                os.unlink(path)

    def finish(self, code=None, timeout=120):
        """Waits for the end; returns the exit code (a signal's as a shell says it)."""
        try:
            ended = self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                self.kill_all()
        ended = 128 - ended if ended < 0 else ended
        assert code is None or ended == code, f"exit code {ended}, not {code}\n{self.text()}"
        return ended

    def text(self):
        return self.said.read_text()


def wait_until_gone(lab, seconds=60):
    """No process of the lab is left; how long that took."""
    started = time.monotonic()
    while left := processes_in(lab.path):
        assert time.monotonic() - started < seconds, f"processes left: {left}"
        time.sleep(0.02)
    return time.monotonic() - started
