"""Property: log.trace gives one Chrome trace a rank whose slices nest, whose transfers end, and
which shows every action of the schedule in its order; tracing changes no result."""
import json

import pytest
from jobs import check_same_run, saved_steps, small

GRID = dict(parallel=dict(pipeline=2, expert=2))


def read(lab, name, rank):
    return json.loads((lab.path / "runs" / name / f"trace-{rank}.json").read_text())


def slices(events, track):
    """The (name, start, end) of a track's nested slices, by start; checks that they nest."""
    open_, done = [], []
    for e in events:
        if e.get("tid") != track or e["ph"] not in "BE":
            continue
        if e["ph"] == "B":
            open_.append((e["name"], e["ts"]))
        else:
            name, start = open_.pop()
            assert e["ts"] >= start
            done.append((name, start, e["ts"]))
    assert open_ == []
    return sorted(done, key=lambda s: s[1])


def test_trace(lab):
    steps = dict(training=dict(steps=4, micro_batch_size=1, evaluate_every=0))
    plain = small(lab, "plain", "moe", **GRID, **steps)
    traced = small(lab, "traced", "moe", **GRID, **steps, log=dict(trace=True, trace_steps=2))
    lab.train(plain, ranks=4)
    said = lab.train(traced, ranks=4).stdout
    check_same_run(lab, "plain", "traced", 4)
    assert "trace-0.json" in said and "hidden under computation" in said
    for rank in range(4):
        events = read(lab, "traced", rank)
        assert {e["pid"] for e in events} == {rank}
        actions = slices(events, 0)
        assert all(a[2] <= b[1] for a, b in zip(actions, actions[1:]))  # one after the other
        names = [a[0] for a in actions]
        forwards = [n for n in names if n.startswith("forward ")]
        batches = 8 // 2  # the global batch over two data ranks
        assert forwards == [f"forward {i}" for i in range(batches)] * 2  # two steps
        assert names.count("update of weights") == 2
        layers = slices(events, 1)
        assert layers and all(any(a[1] <= w[1] and w[2] <= a[2] for a in actions) for w in layers)
        begun = {e["id"]: e for e in events if e["ph"] == "b"}
        ended = {e["id"]: e for e in events if e["ph"] == "e"}
        assert begun.keys() == ended.keys() and begun
        assert all(ended[i]["ts"] >= begun[i]["ts"] for i in begun)
        kinds = {e["name"] for e in begun.values()}
        assert kinds >= {"reduce_scatter", "all_gather", "all_to_all"}
        assert ("send" in kinds) and ("receive" in kinds)
        waits = slices(events, 2)
        assert all(a[2] <= b[1] for a, b in zip(waits, waits[1:]))


@pytest.mark.parametrize("steps,want", [(0, 3), (5, 3), (1, 1)])
def test_how_many_steps(lab, steps, want):
    run = small(lab, "run", "dense", training=dict(steps=3, evaluate_every=0),
                log=dict(trace=True, trace_steps=steps))
    lab.train(run)
    names = [e["name"] for e in read(lab, "run", 0) if e["ph"] == "B"]
    assert names.count("update of weights") == want


def test_trace_that_cannot_be_written_costs_no_step(lab):
    config = small(lab, "run", training=dict(steps=10, evaluate_every=0),
                   log=dict(trace=True, trace_steps=5))
    (lab.path / "runs/run").mkdir(parents=True)
    (lab.path / "runs/run/trace-1.json").symlink_to("/dev/full")
    done = lab.train(config, ranks=2, code=74)
    assert "cannot write runs/run/trace-1.json: No space left on device" in done.stderr
    assert "log.trace=false does without it" in done.stderr
    assert done.stderr.count("error:") == 1
    assert saved_steps(lab, "run") == [5] and len(lab.rows("run")) == 5
