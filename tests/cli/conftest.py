"""Runs the program in a fresh folder and reads what it wrote."""
import json
import os
import random
import subprocess
from pathlib import Path

import h5py
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TIMINGS = ("seconds", "tokens_per_second", "mfu")


def english(size, seed=1):
    """Text with structure to learn: words of a made-up language, some much more common."""
    rng = random.Random(seed)
    letters = "etaoinshrdlu"
    words = ["".join(rng.choice(letters) for _ in range(rng.randint(2, 7))) for _ in range(80)]
    weights = [1 / (i + 1) for i in range(len(words))]
    out = []
    while sum(map(len, out)) + len(out) < size:
        out += rng.choices(words, weights, k=200)
    return " ".join(out)[:size].encode()


MODELS = {
    "dense": dict(vocab_size=256, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
                  num_key_value_heads=2, intermediate_size=48),
    "moe": dict(vocab_size=256, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, intermediate_size=48, num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=24, shared_expert_intermediate_size=16,
                first_k_dense_replace=1, router_aux_loss_coef=0.01, router_z_loss_coef=0.001),
}


class Lab:
    """One folder in which runs happen."""

    def __init__(self, path):
        self.path = Path(path)
        (self.path / "text.txt").write_bytes(english(60000))
        (self.path / "held-out.txt").write_bytes(english(6000, seed=2))

    def config(self, name, kind="dense", **sections):
        """A config file of a small job; sections override its values."""
        c = {
            "run": {"name": name},
            "model": dict(MODELS[kind]),
            "data": {"train": ["text.txt"], "validation": ["held-out.txt"], "sequence_length": 48},
            "training": {"steps": 10, "global_batch_size": 8, "micro_batch_size": 1,
                         "evaluate_batches": 2},
            "optimizer": {"warmup_steps": 4},
            "checkpoint": {"every": 5, "keep": 0},
            "log": {"tensorboard": False},
        }
        for section, values in sections.items():
            c.setdefault(section, {}).update(values)
        path = self.path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(c, sort_keys=False))
        return path.name

    def run(self, *words, ranks=1, code=0, env=None, timeout=240, prefix=(), launcher=()):
        """Runs trireme; checks the exit code; returns the finished process with text output.
        launcher: what starts the ranks, if not mpirun on this host."""
        if ranks > 1 and not launcher:
            launcher = ["mpirun", "-n", str(ranks)]
        command = [*launcher, *prefix, os.environ["TRIREME"], *map(str, words)]
        everything = f'. {ROOT}/launch/env.sh; exec "$@"'
        done = subprocess.run(["sh", "-c", everything, "sh", *command], cwd=self.path, text=True,
                              errors="replace", capture_output=True, timeout=timeout,
                              env={**os.environ, **(env or {})})
        if code is not None:
            assert done.returncode == code, (
                f"exit code {done.returncode}, not {code}\n{' '.join(command)}\n"
                f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        return done

    def train(self, config, *sets, ranks=1, resume=None, **more):
        words = ["train", config]
        for s in sets:
            words += ["--set", s]
        if resume:
            words += ["--resume", resume]
        return self.run(*words, ranks=ranks, **more)

    def rows(self, name, timings=False):
        text = (self.path / "runs" / name / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        if not timings:
            for row in rows:
                for key in TIMINGS:
                    del row[key]
        return rows

    def checkpoint_path(self, name, step):
        return self.path / "checkpoints" / name / f"step-{step:08d}.h5"

    def tensors(self, name, step, group="model"):
        with h5py.File(self.checkpoint_path(name, step)) as f:
            return {k: v[()] for k, v in f[group].items()}


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))
