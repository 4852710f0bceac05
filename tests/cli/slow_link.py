"""How much of the communication between two hosts hides behind compute. Not a test: run it on a
machine with two idle cores (a rank of one thread a host, hosts as in hosts.py).

    python3 tests/cli/slow_link.py build/trireme [gradients|ring ...] [--rate 1gbit] [--steps 5]
                                   [--set section.key=value ...]

Each case trains over a link without a limit and over one of the rate. What a host sends is counted
by its network card, so with T the time those bytes take at the rate
    hidden = 1 - (step over the slow link - step over the free link) / T
whatever the program says of itself. The two take turns, twice; a time is that of the fastest step
but the first, which other work on the machine disturbs least."""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from conftest import ROOT, Lab
from hosts import Hosts

WIDE = dict(hidden_size=768, num_attention_heads=12, num_key_value_heads=12, intermediate_size=2048,
            vocab_size=256)
EXPERTS = dict(WIDE, num_hidden_layers=4, num_experts=8, num_experts_per_tok=2,
               moe_intermediate_size=1024)
SHORT = dict(data=dict(sequence_length=1024), training=dict(global_batch_size=8,
                                                            micro_batch_size=1))
CASES = {  # dualpipe_v hides rows under another micro-batch, 1f1b the way back under gradients
    "gradients": dict(model=dict(WIDE, num_hidden_layers=12), data=dict(sequence_length=1024),
                      training=dict(global_batch_size=4, micro_batch_size=1)),
    "shared_expert": dict(model=dict(EXPERTS, shared_expert_intermediate_size=2048),
                          parallel=dict(expert=2), **SHORT),
    "1f1b": dict(model=EXPERTS, parallel=dict(expert=2), **SHORT),
    "dualpipe_v": dict(model=EXPERTS, parallel=dict(expert=2, schedule="dualpipe_v"), **SHORT),
    "ring": dict(model=dict(WIDE, num_hidden_layers=2), data=dict(sequence_length=16384),
                 training=dict(global_batch_size=1, micro_batch_size=1), parallel=dict(context=2)),
}
BITS = {"mbit": 1e6, "gbit": 1e9}


def bytes_per_second(rate):
    return float(rate[:-4]) * BITS[rate[-4:]] / 8


def sent(hosts, name):
    """Bytes the host has sent so far."""
    link = hosts.inside(hosts.pids[name], "ip", "-s", "-j", "link", "show", "eth0")
    return json.loads(link)[0]["stats64"]["tx"]["bytes"]


class Run:
    """One training over hosts: seconds of a step, and bytes that a host sends in one."""

    def __init__(self, lab, program, config, sets, rate):
        hosts = Hosts(2, slots=1, rate=rate)
        try:
            words = [str(ROOT / "launch/hosts.sh"), str(hosts.folder / "hosts"), program, "train",
                     config, "--resume", "never", *sets]
            environment = {**os.environ, **hosts.environment(), "OMP_NUM_THREADS": "1"}
            path = lab.path / "runs" / Path(config).stem / "metrics.jsonl"
            path.unlink(missing_ok=True)
            self.process = subprocess.Popen(hosts.command(lab.path, *words), cwd=lab.path,
                                            stdout=subprocess.DEVNULL, env=environment)
            counts = self.count(hosts, path)
        finally:
            hosts.close()
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if self.process.returncode != 0 or len(rows) < 3:
            sys.exit(f"{config}: code {self.process.returncode} after {len(rows)} steps")
        self.seconds = min(row["seconds"] for row in rows[1:])
        first, last = min(counts), max(counts)
        self.bytes = max(counts[last][h] - counts[first][h] for h in hosts.pids) / (last - first)

    def count(self, hosts, path):
        """{step: {host: bytes sent when the step had ended}}"""
        counts = {}
        while self.process.poll() is None:
            done = path.read_bytes().count(b"\n") if path.exists() else 0
            if done and done not in counts:
                counts[done] = {name: sent(hosts, name) for name in hosts.pids}
            time.sleep(0.005)
        return counts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", action="append", default=[])
    a = parser.parse_args()
    program, speed = str(Path(a.program).resolve()), bytes_per_second(a.rate)
    sets = [word for s in a.set for word in ("--set", s)]
    print(f"{'':10} {'step, free':>11} {'step, ' + a.rate:>14} {'sent a step':>13} "
          f"{'at the rate':>12} {'hidden':>8}")
    for name in a.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="trireme-link-") as folder:
            lab = Lab(folder)
            sections = {k: dict(v) for k, v in CASES[name].items()}
            sections["training"].update(steps=a.steps, evaluate_every=0)
            sections["data"].update(validation=[])
            config = lab.config(name, run=dict(peak_flops=1e11), checkpoint=dict(every=0),
                                **sections)
            runs = [Run(lab, program, config, sets, rate) for rate in (None, a.rate) * 2]
        free, slow = (min(runs[i::2], key=lambda run: run.seconds) for i in (0, 1))
        transfer = slow.bytes / speed
        print(f"{name:10} {free.seconds:9.3f} s {slow.seconds:12.3f} s {slow.bytes / 1e6:10.1f} MB "
              f"{transfer:10.3f} s {100 * (1 - (slow.seconds - free.seconds) / transfer):6.1f} %",
              flush=True)


if __name__ == "__main__":
    main()
