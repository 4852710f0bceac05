"""A checkpoint seen from outside: by h5py, h5ls and its README's formula; written by three ranks
and read by two; and by whoever finds the folder after a save was killed. Floor: tests.
Arguments: mpiexec, checkpoint_tool, checkpoints/README.md."""
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import h5py
import numpy as np

MPIEXEC, TOOL, README = sys.argv[1:4]
GROUPS = "model", "optimizer/exp_avg", "optimizer/exp_avg_sq"


def readme_code(word):
    """The README's Python block that holds `word`."""
    blocks = re.findall(r"```python\n(.*?)```", open(README).read(), re.S)
    return next(b for b in blocks if word in b)


def command(ranks, *words):
    """One rank needs no mpiexec."""
    return ([MPIEXEC, "-n", str(ranks)] if ranks > 1 else []) + [TOOL, *map(str, words)]


def tool(ranks, *words, code=0):
    run = subprocess.run(command(ranks, *words), text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, timeout=60)
    assert run.returncode == code, (words, run.returncode, run.stdout, run.stderr)
    return run.stdout + run.stderr


def all_right(path, names):
    """Whether every checksum of the file is what the README's formula gives."""
    with h5py.File(path) as f:
        return names["state_checksum"](f) == f.attrs["checksum"] and all(
            names["checksum"](data[()]) == data.attrs["checksum"]
            for group in GROUPS for data in f[group].values())


def check_layout(path, names):
    assert all_right(path, names)
    with h5py.File(path) as f:
        assert f.attrs["format"] in (b"trireme-checkpoint", "trireme-checkpoint")
        assert f.attrs["version"] == 1 and f.attrs["step"] == 12 and f.attrs["samples"] == 384
        assert f.attrs["tokens"] == 12000000 and f.attrs["updates"] == 11
        assert f["config"][()].decode().startswith("run:\n  name: fixture\n")
        for group in GROUPS:
            assert len(f[group]) == 8
            for data in f[group].values():
                assert data.dtype == np.float32 and data.chunks is None and data.size > 0
        assert f["model/model.embed_tokens.weight"].shape == (67, 32)
        assert f["optimizer/exp_avg/model.odd"].shape == (3, 5, 1, 7)
    listing = subprocess.run(["h5ls", "-r", path], text=True, stdout=subprocess.PIPE, check=True)
    assert "/optimizer/exp_avg_sq/model.odd Dataset {3, 5, 1, 7}" in listing.stdout


def check_commands(path):
    text = tool(2, "info", path)
    for part in ("fixture", "12,000,000", "67 x 32", "model.two", "8 tensors"):
        assert part in text, (part, text)
    assert max(len(line) for line in text.replace(path, "").splitlines()) <= 100
    assert "25 checksums" in tool(3, "verify", path)
    flipped = path + ".flipped"
    shutil.copy(path, flipped)
    with h5py.File(path) as f:
        offset = f["optimizer/exp_avg/model.layers.0.mlp.gate.weight"].id.get_offset()
    with open(flipped, "r+b") as f:
        f.seek(offset + 5)
        byte = f.read(1)[0]
        f.seek(offset + 5)
        f.write(bytes([byte ^ 4]))
    text = tool(2, "verify", flipped, code=65)
    assert "damaged: optimizer/exp_avg/model.layers.0.mlp.gate.weight" in text, text
    assert "exp_avg/model.layers.0.mlp.gate.weight" in tool(2, "load", flipped, code=65)
    os.remove(flipped)
    assert path + ".none" in tool(2, "load", path + ".none", code=66)


def check_kill(folder, kills, seed, names):
    """A process of the job is killed at a random moment, again and again: what bears a final name
    is complete, the last announced step or a later one is there (mpiexec may lose what a job says
    as it dies), and the next job starts unhindered."""
    rng = random.Random(seed)
    inside = 0
    for kill in range(kills):
        ranks = 2 if kill % 4 == 0 else 1  # ending a job of several takes mpiexec seconds
        job = subprocess.Popen(command(ranks, "endless", folder, 400000), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(1 + kill % 2):
            saved = job.stdout.readline()
        assert saved.startswith("saved"), saved
        time.sleep(rng.random() * 0.05)
        processes = [str(job.pid)]
        if ranks > 1:
            processes = subprocess.run(["pgrep", "-P", str(job.pid)], text=True,
                                       stdout=subprocess.PIPE).stdout.split()
        os.kill(int(rng.choice(processes)), signal.SIGKILL)
        more, _ = job.communicate(timeout=60)
        last = int((saved + more).split()[-1])
        found = sorted(os.listdir(folder))
        final = [n for n in found if re.fullmatch(r"step-\d{8}\.h5", n)]
        others = [n for n in found if n not in final]
        assert all(n.startswith(".step-") and ".h5.partial" in n for n in others), found
        inside += bool(others)
        assert final and final[-1] >= "step-%08d.h5" % last, (last, found)
        for name in final:
            assert all_right(os.path.join(folder, name), names), name
            os.remove(os.path.join(folder, name))
    print("%d kills, %d inside a save; every file with a final name was complete" % (kills, inside))


def main():
    names = {}
    exec(readme_code("def checksum"), names)
    folder = tempfile.mkdtemp(prefix="trireme-outside-")
    try:
        tool(3, "save", folder, 12)
        path = os.path.join(folder, "step-00000012.h5")
        for ranks in 1, 2, 4:
            tool(ranks, "load", path)
        check_layout(path, names)
        check_commands(path)
        killed = os.path.join(folder, "killed")
        os.mkdir(killed)
        check_kill(killed, 20, 1, names)
        tool(2, "save", killed, 1)
        assert os.listdir(killed) == ["step-00000001.h5"], os.listdir(killed)
    finally:
        shutil.rmtree(folder)


main()
