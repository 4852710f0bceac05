"""Property: `trireme plan CONFIG` tells what `train --dry-run` does, and without the grid's ranks
what can be told without them; `trireme plan CONFIG --schedule` draws every kind of schedule within
100 columns and writes a trace whose events are what it drew, needs no ranks of the grid, and names
what is impossible."""
import json
import re

import pytest

KINDS = {"1f1b": 8, "gpipe": 8, "interleaved": 16, "zb_h1": 8, "zb_v": 16, "dualpipe_v": 16}
IDLE = {  # of 4 ranks, 8 micro-batches, F = B = W: idle / (idle + work), FORMULAS of each kind
    "1f1b": 9 / 33, "gpipe": 9 / 33, "interleaved": 4.5 / 28.5, "zb_h1": 3 / 27,
    "dualpipe_v": 3 / 27}


def plan(lab, kind, *words, **more):
    config = lab.config("plan", "moe", model=dict(num_hidden_layers=8),
                        parallel=dict(pipeline=4, schedule=kind, expert=2))
    return lab.run("plan", config, "--schedule", "--world", 4 * 2, "--set",
                   "training.global_batch_size=16", *words, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_and_traces(lab, kind):
    said = plan(lab, kind, "--trace", "trace.json").stdout
    lines = said.splitlines()
    assert max(map(len, lines)) <= 100, said
    rows = [line for line in lines if line.startswith("rank ")]
    assert len(rows) == 4
    idle = float(next(line for line in lines if line.startswith("idle")).split()[1]) / 100
    if kind in IDLE:
        assert abs(idle - IDLE[kind]) < 1e-4

    events = json.loads((lab.path / "trace.json").read_text())["traceEvents"]
    done = [e for e in events if e["ph"] == "X" and not e["name"].startswith("wait")]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == [f"rank {r}" for r in range(4)]
    for rank in range(4):
        mine = [e for e in done if e["tid"] == rank]
        forwards = sum("forward" in e["name"] for e in mine)
        assert forwards == KINDS[kind]
        assert abs(sum(e["dur"] for e in mine) - 8 * 3 * 1000) < 1
        ends = [(e["ts"], e["ts"] + e["dur"]) for e in mine]
        assert all(a[1] <= b[0] + 0.01 for a, b in zip(ends, ends[1:]))


def test_many_ranks_and_micro_batches_fit(lab):
    config = lab.config("plan", model=dict(num_hidden_layers=128))
    said = lab.run("plan", config, "--schedule", "--set", "parallel.pipeline=64", "--set",
                   "parallel.schedule=zb_v", "--set", "training.global_batch_size=500").stdout
    assert max(map(len, said.splitlines())) <= 100
    assert said.count("rank ") >= 64


@pytest.mark.parametrize("kind,ranks", [("1f1b", 30000), ("zb_v", 4000)])
def test_thousands_of_ranks_take_seconds(lab, kind, ranks):
    """Every backward goes down all ranks: no time that grows with their square."""
    config = lab.config("plan", model=dict(num_hidden_layers=30000))
    said = lab.run("plan", config, "--schedule", "--set", f"parallel.pipeline={ranks}", "--set",
                   f"parallel.schedule={kind}", "--set", "training.global_batch_size=1",
                   timeout=60).stdout
    assert said.count("rank ") >= ranks


def test_what_is_impossible_is_named(lab):
    for kind, words, code, text in [
            ("zb_v", ["--set", "parallel.pipeline=5"], 64, "use a pipeline of 1 to 4"),
            ("interleaved", ["--set", "parallel.virtual_stages=1"], 64, "use 2 or more"),
            ("1f1b", ["--set", "parallel.virtual_stages=2"], 64, "to interleaved"),
            ("1f1b", ["--world", "6"], 64, "divide the 6 ranks"),
            ("zb_v", ["--set", "training.global_batch_size=1048578"], 64,
             "at most 524288 are possible with pipeline 4 * virtual_stages 2"),
            ("1f1b", ["--trace", "no/such/folder"], 74, "cannot write no/such/folder")]:
        assert text in plan(lab, kind, *words, code=code).stderr
    assert "another file after --trace" in plan(lab, "1f1b", "--trace", "no/such", code=74).stderr


def test_what_a_config_takes(lab):
    config = lab.config("plan", "moe", parallel=dict(pipeline=2, expert=2))
    here, elsewhere = (lab.run("plan", config, ranks=ranks).stdout for ranks in (4, 1))
    idle = "1f1b leaves ranks idle for 20.00 % of the time"  # (p - 1) / (m + p - 1), m = 8 / 2
    for said in here, elsewhere, lab.run("plan", config, "--world", 4, ranks=3).stdout:
        assert idle in said and max(map(len, said.splitlines())) <= 100
        assert re.search(r"model +0.07 M parameters", said)
    assert here.startswith(lab.run("train", config, "--dry-run", ranks=4).stdout)
    assert "grid       4 ranks" in elsewhere
    assert "mpirun -n 4 before this command says what a rank takes" in elsewhere
    whole = lab.run("plan", lab.config("whole", "moe")).stdout  # its grid is here: one rank
    memory = [re.search(r"memory +([\d.]+ MiB)", said)[1] for said in (whole, elsewhere)]
    assert memory[0] == memory[1] and "0.00 %" in whole
    done = lab.run("plan", config, "--world", 4, "--schedule", "--trace", "t.json", ranks=2)
    assert "t.json" in done.stdout and (lab.path / "t.json").exists()
    assert "divide the 3 ranks" in lab.run("plan", config, ranks=3, code=64).stderr


def test_memory_is_that_of_the_rank_with_the_most(lab):
    """The last stage's, where one micro-batch is in flight and logits are large."""
    config = lab.config("plan", "moe", model=dict(vocab_size=20000), parallel=dict(pipeline=2),
                        training=dict(global_batch_size=4, micro_batch_size=4))
    said = lab.run("plan", config, ranks=2).stdout
    print(said)
    logits = 4 * 4 * 48 * 20000 / 2**20
    assert float(re.search(r"about ([\d.]+) MiB for 1 micro-batch in flight\n", said)[1]) > logits
    assert "  on rank 1, which takes the most\n" in said
    alone = lab.run("plan", config, "--set", "parallel.pipeline=1", ranks=1).stdout
    assert "takes the most" not in alone


def test_the_legend_explains_what_is_drawn(lab):
    assert "the number is the micro-batch" in plan(lab, "1f1b").stdout
    assert "the number" not in plan(lab, "zb_v", "--set", "training.global_batch_size=128").stdout
    said = plan(lab, "1f1b", "--set", "model.num_hidden_layers=4").stdout
    assert "a unit: 1 layer forward" in said
