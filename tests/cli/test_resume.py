"""Property: a run that stops and goes on is the run that never stopped, whatever is damaged,
missing or changed meanwhile; and what cannot be gone on from is refused by name."""
import json
import re
import shutil

import h5py
import numpy as np
import pytest
from compare import first_flip
from conftest import Lab
from jobs import (Job, check_same_checkpoint, check_same_run, contents, metrics_text, saved_steps,
                  small)

CONSTANT = dict(schedule="constant")  # the rate of a step must not depend on training.steps
JOBS = {  # name: kind, ranks, settings
    "dense": ("dense", 1, {}),
    "moe on pp2 x dp2 x ep2": ("moe", 4, dict(parallel=dict(pipeline=2, expert=2))),
    "moe on dp2 x tp2": ("moe", 4, dict(parallel=dict(tensor=2))),
    "bfloat16": ("moe", 1, dict(run=dict(dtype="bfloat16"))),
}


def held_out(lab, name, samples):
    """A validation file of so many samples."""
    (lab.path / name).write_bytes((lab.path / "held-out.txt").read_bytes()[:samples * 48 + 1])
    return dict(data=dict(validation=[name]))


@pytest.mark.parametrize("job", JOBS)
def test_ten_and_ten_are_twenty(lab, job):
    kind, ranks, more = JOBS[job]
    more = {**more, "optimizer": CONSTANT}
    straight, parts = small(lab, "straight", kind, **more), small(lab, "parts", kind, **more)
    lab.train(straight, ranks=ranks)
    assert len(lab.rows("straight")) == 20
    lab.train(parts, "training.steps=10", ranks=ranks)
    assert len(lab.rows("parts")) == 10
    done = lab.train(parts, ranks=ranks)
    assert "resumed from checkpoints/parts/step-00000010.h5" in done.stdout
    assert "changed    training.steps 10 -> 20" in done.stdout
    check_same_run(lab, "straight", "parts", 20)
    shutil.rmtree(lab.path / "runs/parts")
    lab.train(parts, ranks=ranks, resume="checkpoints/parts/step-00000010.h5")
    assert metrics_text(lab, "parts") == metrics_text(lab, "straight", first=11)
    check_same_checkpoint(lab.checkpoint_path("straight", 20), lab.checkpoint_path("parts", 20))


def test_killed_twice_then_gone_on_by_path(lab):
    heavy = dict(training=dict(global_batch_size=48, micro_batch_size=4))
    straight, parts = small(lab, "straight", **heavy), small(lab, "parts", **heavy)
    lab.train(straight)
    for rows, resume in ((6, None), (11, "checkpoints/parts/step-00000005.h5")):
        job = Job(lab, "parts", parts, resume=resume)
        assert job.wait_for_rows(rows)
        job.kill_all()
        assert len(lab.rows("parts")) < 20
    lab.train(parts, resume=lab.checkpoint_path("parts", 10))
    check_same_run(lab, "straight", "parts", 20)


# --- other grids ----------------------------------------------------------------------------------

@pytest.fixture(scope="module", params=["dense", "moe"])
def ten_steps(request, shared_lab):
    """Ten steps on four ranks, and ten more on one from there."""
    lab, kind = shared_lab, request.param
    more = dict(optimizer=CONSTANT, log=dict(routing=kind == "moe"))
    grid = dict(pipeline=2, expert=2) if kind == "moe" else dict(pipeline=2, tensor=2)
    begin = small(lab, f"begin-{kind}", kind, parallel=grid, **more)
    lab.train(begin, "training.steps=10", ranks=4)
    one = f"one-{kind}"
    lab.train(small(lab, one, kind, **more), resume=lab.checkpoint_path(f"begin-{kind}", 10))
    return lab, kind, more, one


@pytest.mark.parametrize("grid", [(2, dict()), (2, dict(pipeline=2)), (2, dict(context=2)),
                                  (4, dict(context=2, expert=2)), (2, dict(tensor=2)),
                                  (4, dict(tensor=4))])
def test_ten_more_on_another_grid(ten_steps, grid):
    lab, kind, more, one = ten_steps
    ranks, parallel = grid
    if kind == "dense":
        parallel = {k: v for k, v in parallel.items() if k != "expert"}
    name = f"{kind}-{ranks}-{'-'.join(parallel)}"
    config = small(lab, name, kind, parallel=parallel, **more)
    lab.train(config, ranks=ranks, resume=lab.checkpoint_path(f"begin-{kind}", 10))
    got, want = lab.rows(name), lab.rows(one)
    assert [r["step"] for r in got] == list(range(11, 21))
    flip = first_flip(lab, one, name, ranks, last=20) if kind == "moe" else 21
    print(f"{kind} {parallel}: loss at most {check_losses(got, want, flip):.1e} off, "
          f"first flip in step {flip}")


def check_losses(got, want, flip):
    """The worst difference before the first flip."""
    worst = 0
    for a, b in zip(got, want, strict=True):
        off = abs(a["loss"] - b["loss"]) / b["loss"]
        assert off < (5e-6 if a["step"] < flip else 1e-4), (a["step"], a["loss"], b["loss"])
        worst = max(worst, off if a["step"] < flip else 0)
        assert a["samples"] == b["samples"] and a["tokens"] == b["tokens"]
    return worst


def test_uneven_experts_move_between_grids(lab):
    """Ten experts over four ranks, by node, go on to the same bytes there, and over three ranks to
    what one rank computes."""
    more = dict(model=dict(num_experts=10), optimizer=CONSTANT, log=dict(routing=True))
    four = dict(expert=4, expert_exchange="hierarchical")
    env = {"TRIREME_NODE_RANKS": "2"}
    lab.train(small(lab, "four", "moe", parallel=four, **more), ranks=4, env=env)
    start = lab.checkpoint_path("four", 10)
    for name, ranks, parallel in (("again", 4, four), ("three", 3, dict(context=3, expert=3)),
                                  ("one", 1, dict())):
        lab.train(small(lab, name, "moe", parallel=parallel, **more), ranks=ranks, resume=start,
                  env=env)
    assert lab.rows("again") == lab.rows("four")[10:]
    check_same_checkpoint(lab.checkpoint_path("four", 20), lab.checkpoint_path("again", 20))
    flip = first_flip(lab, "one", "three", 3, last=20)
    check_losses(lab.rows("three"), lab.rows("one"), flip)


# --- the data's position --------------------------------------------------------------------------

def sample_rows(lab, name):
    return [json.loads(line) for line in open(lab.path / "runs" / name / "samples.jsonl")]


@pytest.mark.parametrize("batch", [4, 6, 10])
def test_every_epoch_is_each_sample_once(lab, batch):
    """12 samples an epoch, a stop in the fourth, another batch size from there. The weights stay
    as they are, so a step's loss tells which samples it read."""
    (lab.path / "tiny.txt").write_bytes((lab.path / "text.txt").read_bytes()[:12 * 48 + 5])
    more = dict(data=dict(train=["tiny.txt"]), log=dict(samples=True),
                optimizer=dict(learning_rate=1e-30, warmup_steps=0, **CONSTANT))
    lab.train(small(lab, "each", training=dict(steps=12, global_batch_size=1), **more))
    loss = {s["samples"][0]: r["loss"] for s, r in zip(sample_rows(lab, "each"), lab.rows("each"))}
    assert len(loss) == 12

    config = small(lab, "parts", training=dict(global_batch_size=4, micro_batch_size=2), **more)
    lab.train(config, "training.steps=10", ranks=2)
    lab.train(config, f"training.global_batch_size={batch}", "training.micro_batch_size=1", ranks=2)
    rows = sample_rows(lab, "parts")
    assert [r["step"] for r in rows] == list(range(1, 21))
    assert [len(r["samples"]) for r in rows] == [4] * 10 + [batch] * 10
    seen = sum((r["samples"] for r in rows), [])
    epochs = [seen[i:i + 12] for i in range(0, len(seen) - 11, 12)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs), epochs
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs) >= 6
    for read, row in zip(rows, lab.rows("parts"), strict=True):
        assert row["loss"] == pytest.approx(np.mean([loss[i] for i in read["samples"]]), rel=1e-6)
    assert lab.rows("parts")[-1]["samples"] == len(seen)


# --- damage ---------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with an undisturbed run of 20 steps, saved every 5."""
    lab = Lab(tmp_path_factory.mktemp("whole"))
    lab.train(small(lab, "run", log=dict(samples=True)))
    return lab.path


@pytest.fixture
def copied(whole, tmp_path):
    """The same run twice: "whole", and "run" to be hurt."""
    shutil.copytree(whole, tmp_path / "lab")
    lab = Lab(tmp_path / "lab")
    for folder in "runs", "checkpoints":
        shutil.copytree(lab.path / folder / "run", lab.path / folder / "whole")
    return lab


def flip_byte(path):
    with h5py.File(path) as f:
        data = f["model/model.layers.1.self_attn.q_proj.weight"]
        at = data.id.get_offset() + 4 * 100 + 1
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def cut(path, left):
    content = path.read_bytes()
    path.write_bytes(content[:left(len(content))])


DAMAGE = {
    "flipped": flip_byte,
    "cut by one byte": lambda path: cut(path, lambda n: n - 1),
    "cut by half": lambda path: cut(path, lambda n: n // 2),
    "emptied": lambda path: cut(path, lambda n: 0),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_newest_is_passed_over(copied, damage, ranks):
    lab = copied
    lab.checkpoint_path("run", 20).unlink()
    DAMAGE[damage](lab.checkpoint_path("run", 15))
    sets = ("parallel.pipeline=2",) if ranks == 2 else ()
    done = lab.train("run.yaml", *sets, ranks=ranks)
    said = done.stdout + done.stderr
    assert "passed over: checkpoints/run/step-00000015.h5" in said
    assert "resumed from checkpoints/run/step-00000010.h5" in said
    if ranks == 1:
        check_same_run(lab, "whole", "run", 20)
        assert sample_rows(lab, "whole") == sample_rows(lab, "run")
    else:
        for a, b in zip(lab.rows("run"), lab.rows("whole"), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=5e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_damaged(copied, ranks):
    lab = copied
    for step, damage in zip((5, 10, 15, 20), DAMAGE.values()):
        damage(lab.checkpoint_path("run", step))
    before = metrics_text(lab, "run")
    done = lab.train("run.yaml", ranks=ranks, code=65)
    for step in (5, 10, 15, 20):
        assert f"checkpoints/run/step-{step:08d}.h5" in done.stderr
    assert "no checkpoint in checkpoints/run can be read; use --resume never" in done.stderr
    assert metrics_text(lab, "run") == before


def test_rows_beyond_the_step_and_a_torn_line_are_cut(copied):
    lab = copied
    for step in (15, 20):
        lab.checkpoint_path("run", step).unlink()
    for name in "metrics.jsonl", "samples.jsonl":
        path = lab.path / "runs/run" / name
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:17]) + lines[17][:30])
    lab.train("run.yaml")
    check_same_run(lab, "whole", "run", 20)
    assert sample_rows(lab, "whole") == sample_rows(lab, "run")
    # torn in the very line after the loaded step, and nothing beyond it
    lab.checkpoint_path("run", 20).unlink()
    path = lab.path / "runs/run/metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:15]) + b'{"step":16,"loss":3.1')
    lab.train("run.yaml")
    check_same_run(lab, "whole", "run", 20)


# --- the choices of --resume ----------------------------------------------------------------------

def everything(lab):
    files = [p for folder in ("runs", "checkpoints") for p in (lab.path / folder).rglob("*")]
    return {p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None) for p in files}


def test_already_finished(copied):
    lab = copied
    before = everything(lab)
    done = lab.train("run.yaml")
    assert "already finished: step 20 of 20; raise training.steps to go on" in done.stdout
    lab.train("run.yaml", "training.steps=15")
    assert everything(lab) == before


def test_never_moves_the_old_run_away(copied):
    lab = copied
    for n in 1, 2:
        done = lab.train("run.yaml", resume="never")
        assert f"moved runs/run to runs/run.old-{n}" in done.stdout
        assert f"moved checkpoints/run to checkpoints/run.old-{n}" in done.stdout
        check_same_run(lab, "whole", "run", 20)
        check_same_run(lab, "whole", f"run.old-{n}", 20)
        assert saved_steps(lab, "run") == [5, 10, 15, 20]
    # one number for both folders, and nothing moves where the start fails
    shutil.rmtree(lab.path / "runs/run.old-1")
    shutil.rmtree(lab.path / "checkpoints/run.old-2")
    before = everything(lab)
    lab.train("run.yaml", "model.init_from=nowhere.h5", resume="never", code=66)
    assert everything(lab) == before
    lab.train("run.yaml", "training.steps=1", "training.evaluate_every=0", resume="never")
    assert saved_steps(lab, "run.old-3") == [5, 10, 15, 20]
    check_same_run(lab, "whole", "run.old-3", 20)


def test_never_may_start_from_the_weights_it_moves_away(copied):
    lab = copied
    lab.train("run.yaml", "model.init_from=checkpoints/run/step-00000020.h5", resume="never")
    assert lab.rows("run")[0]["step"] == 1
    assert lab.rows("run")[0]["loss"] < lab.rows("whole")[0]["loss"] - 0.5


@pytest.mark.parametrize("ranks", [1, 2])
def test_path_missing_or_damaged(copied, ranks):
    lab = copied
    flip_byte(lab.checkpoint_path("run", 15))
    before = everything(lab)
    done = lab.train("run.yaml", resume="nowhere/step-00000001.h5", ranks=ranks, code=66)
    assert "nowhere/step-00000001.h5" in done.stderr
    done = lab.train("run.yaml", resume=lab.checkpoint_path("run", 15), ranks=ranks, code=65)
    assert str(lab.checkpoint_path("run", 15)) in done.stderr and "q_proj" in done.stderr
    done = lab.train("run.yaml", resume="text.txt", ranks=ranks, code=65)
    assert "text.txt" in done.stderr
    assert everything(lab) == before


def test_going_back_leaves_the_later_steps(copied):
    """A run that went back and was stopped goes on from where it was, not from the old future."""
    lab = copied
    done = lab.train("run.yaml", "training.steps=12", resume="checkpoints/run/step-00000010.h5")
    assert "moved checkpoints/run/step-00000020.h5 to checkpoints/run.old-1/step-00000020.h5" \
        in done.stdout
    assert saved_steps(lab, "run") == [5, 10, 12] and saved_steps(lab, "run.old-1") == [15, 20]
    assert len(lab.rows("run")) == 12
    done = lab.train("run.yaml", "training.steps=14")
    assert "resumed from checkpoints/run/step-00000012.h5" in done.stdout
    assert [r["step"] for r in lab.rows("run")] == list(range(1, 15))


# --- what may change ------------------------------------------------------------------------------

OTHER = {  # another model or other data
    "model.intermediate_size": ("64", "model.intermediate_size: 64 against 48"),
    "model.rope_theta": ("500", "model.rope_theta: 500 against 10000"),
    "data.sequence_length": ("24", "data.sequence_length: 24 against 48"),
    "data.train": ("[held-out.txt]", "data.train: "),
    "run.seed": ("7", "run.seed: 7 against 1234"),
}


@pytest.mark.parametrize("key", OTHER)
def test_another_model_or_data_is_refused(copied, key):
    lab = copied
    before = everything(lab)
    value, text = OTHER[key]
    for resume in None, lab.checkpoint_path("run", 10):
        done = lab.train("run.yaml", f"{key}={value}", resume=resume, code=64)
        assert text in done.stderr and "--resume never" in done.stderr
    assert everything(lab) == before


def test_other_contents_of_the_data_are_refused(copied):
    lab = copied
    path = lab.path / "text.txt"
    content = bytearray(path.read_bytes())
    content[30000] ^= 1
    path.write_bytes(content)
    done = lab.train("run.yaml", "training.steps=30", code=64, ranks=2)
    assert "other contents of the data.train files" in done.stderr
    assert done.stderr.count("error:") == 1


def test_other_settings_are_logged(copied):
    lab = copied
    done = lab.train("run.yaml", "training.steps=22", "optimizer.learning_rate=1e-3",
                     "optimizer.schedule=constant", "parallel.recompute=full", ranks=2)
    for line in ("training.steps 20 -> 22", "optimizer.learning_rate 0.003 -> 0.001",
                 "optimizer.schedule cosine -> constant", "parallel.recompute none -> full"):
        assert f"changed    {line}\n" in done.stdout
    assert len(re.findall("^changed", done.stdout, re.M)) == 4
    row = lab.rows("run")[-1]
    assert row["step"] == 22 and row["learning_rate"] == 1e-3


# --- checkpoints ----------------------------------------------------------------------------------

def test_init_from_takes_the_weights_alone(copied):
    lab = copied
    fresh = small(lab, "fresh", model=dict(init_from="checkpoints/run/step-00000020.h5"),
                  optimizer=dict(learning_rate=1e-30, min_learning_rate=0, warmup_steps=0,
                                 weight_decay=0), training=dict(steps=1, global_batch_size=4))
    lab.train(fresh)
    row, = lab.rows("fresh")
    assert row["step"] == 1 and row["samples"] == 4 and row["tokens"] == 4 * 48
    held = contents(lab.checkpoint_path("fresh", 1))
    assert held["step"] == held["updates"] == 1 and held["samples"] == 4
    source = contents(lab.checkpoint_path("run", 20))
    assert all(held[k] == source[k] for k in held if k.startswith("model/"))
    # moments that began at zero hold 0.1 of the clipped gradient, no more
    norm = np.sqrt(sum((v.astype(np.float64)**2).sum()
                       for v in lab.tensors("fresh", 1, "optimizer/exp_avg").values())) / 0.1
    clipped = row["grad_norm"] * min(1, 1 / (row["grad_norm"] + 1e-6))
    assert norm == pytest.approx(clipped, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_keep(lab, ranks):
    config = small(lab, "run", training=dict(steps=7), checkpoint=dict(every=1, keep=2))
    lab.train(config, ranks=ranks)
    assert saved_steps(lab, "run") == [6, 7]
    lab.train(config, "training.steps=8", "checkpoint.every=0", "checkpoint.keep=1", ranks=ranks)
    assert saved_steps(lab, "run") == [8]


def test_info_and_verify(copied):
    lab = copied
    path = "checkpoints/run/step-00000015.h5"
    said = lab.run("checkpoint", "info", path).stdout
    with h5py.File(lab.path / path) as f:
        parameters = sum(data.size for data in f["model"].values())
        assert f["config"][()].decode().startswith("run:\n") and f.attrs["step"] == 15
        assert all(f[g].keys() == f["model"].keys() for g in ("optimizer/exp_avg",
                                                              "optimizer/exp_avg_sq"))
    for text in (path, "15 (15 updates", f"{15 * 8:,}", f"{15 * 8 * 48:,}", f"{parameters:,}"):
        assert text in said
    assert "more" not in said
    for ranks in 1, 2:
        assert "checksums are right" in lab.run("checkpoint", "verify", path, ranks=ranks).stdout
    flip_byte(lab.path / path)
    done = lab.run("checkpoint", "verify", path, code=65)
    assert "damaged: model/model.layers.1.self_attn.q_proj.weight" in done.stdout + done.stderr
    lab.run("checkpoint", "verify", "nowhere.h5", code=66)
    lab.run("checkpoint", "info", "nowhere.h5", code=66)


def test_info_of_many_tensors(lab):
    config = small(lab, "deep", model=dict(num_hidden_layers=8), training=dict(steps=1))
    lab.train(config)
    names = set(lab.tensors("deep", 1))
    for words, whole in ([], False), (["--tensors"], True):
        said = lab.run("checkpoint", "info", lab.checkpoint_path("deep", 1), *words).stdout
        listed = {line.split()[0] for line in said.splitlines() if line.startswith("  ")}
        assert (names <= listed) == whole
        assert ("; --tensors lists all)" in said) != whole


# --- evaluation -----------------------------------------------------------------------------------

def evaluated(done):
    found = re.search(r"^loss (\S+) bits_per_byte (\S+) tokens (\d+)\n\Z", done.stdout, re.M)
    assert found, done.stdout
    return float(found[1]), float(found[2]), int(found[3])


GRIDS = {"dp2": (2, []), "pp2": (2, ["parallel.pipeline=2"]), "cp2": (2, ["parallel.context=2"]),
         "dp4": (4, []), "cp3": (3, ["parallel.context=3"]), "tp2": (2, ["parallel.tensor=2"])}


@pytest.mark.parametrize("samples", [7, 13, 125])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_eval_is_the_training_s_own(lab, kind, samples):
    """... on every grid, and whether the validation data divides or not."""
    config = small(lab, "run", kind, **held_out(lab, "some.txt", samples))
    lab.train(config)
    row = lab.rows("run")[-1]
    path = "checkpoints/run/step-00000020.h5"
    loss, bits, tokens = evaluated(lab.run("eval", config, "--checkpoint", path))
    assert abs(loss - row["validation_loss"]) <= 5.1e-7
    assert abs(bits - row["validation_bits_per_byte"]) <= 5.1e-7
    assert bits == pytest.approx(loss / np.log(2), abs=2e-6)
    assert tokens == min(samples, 16) * 48
    grids = GRIDS if samples == 7 else {"dp4": GRIDS["dp4"]} if samples == 13 else {}
    for grid, (ranks, sets) in grids.items():
        words = sum((["--set", s] for s in sets), [])
        if kind == "moe" and grid in ("dp2", "cp2", "dp4"):
            words += ["--set", "parallel.expert=2"]
        there = evaluated(lab.run("eval", config, "--checkpoint", path, *words, ranks=ranks))
        assert there[2] == tokens
        assert abs(there[0] - loss) <= 2e-6 * loss + 1e-6, grid  # both are printed to 6 places
    sets = "--set", "parallel.pipeline=2", "--set", "parallel.context=2"  # one rank needs no grid
    assert evaluated(lab.run("eval", config, "--checkpoint", path, *sets)) == (loss, bits, tokens)


@pytest.mark.parametrize("ranks", [1, 4])
def test_evaluation_changes_nothing(lab, ranks):
    grid = dict(parallel=dict(pipeline=2, expert=2)) if ranks == 4 else {}
    for name, every in (("often", 1), ("once", 0)):
        lab.train(small(lab, name, "moe", training=dict(steps=6, evaluate_every=every), **grid),
                  ranks=ranks)
    often, once = metrics_text(lab, "often"), metrics_text(lab, "once")
    strip = re.compile(r',"validation_\w+":[^,}]+')
    assert all(row.count("validation_loss") == 1 for row in often)
    assert [row.count("validation_loss") for row in once] == [0] * 5 + [1]
    assert [strip.sub("", row) for row in often] == [strip.sub("", row) for row in once]
    check_same_checkpoint(lab.checkpoint_path("often", 6), lab.checkpoint_path("once", 6))


# --- generate -------------------------------------------------------------------------------------

def test_generate(copied):
    lab = copied

    def sample(*words):
        return lab.run("generate", "--checkpoint", "checkpoints/run/step-00000020.h5", "--prompt",
                       "the ", "--tokens", 60, *words).stdout

    first = sample()
    assert first.startswith("the ") and len(first) >= 60
    assert sample() == first == sample("--seed", 1)
    assert sample("--seed", 2) != first
    greedy = sample("--temperature", 0)
    assert greedy != first and greedy == sample("--temperature", 0, "--seed", 9)
    assert sample("--top-p", 0) == greedy  # the likeliest token alone
    done = lab.run("generate", "--checkpoint", "checkpoints/run/step-00000020.h5", "--prompt", "a",
                   ranks=2, code=64)
    assert "generate runs on one rank, not 2" in done.stderr
    lab.run("generate", "--checkpoint", "nowhere.h5", "--prompt", "a", code=66)
    done = lab.run("generate", "--checkpoint", "checkpoints/run/step-00000020.h5", code=64)
    assert "--prompt" in done.stderr
