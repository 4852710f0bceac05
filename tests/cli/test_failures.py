"""Property: whatever goes wrong (a signal, a dead rank, a full disk, bad data, numbers that are not
finite) ends the whole job with the documented exit code and one text that names the thing, leaves
no process and loses nothing that was saved."""
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import Lab, english
from jobs import (Job, check_same_run, checksum, metrics_text, processes_in, rank_of, saved_steps,
                  small, wait_until_gone)

SIGNALS = {"TERM": signal.SIGTERM, "USR1": signal.SIGUSR1}

# --- asked to stop --------------------------------------------------------------------------------

# What is going on when the signal comes. In the first, nothing but the signal causes a save.
MOMENTS = {
    "training": dict(training=dict(steps=60, global_batch_size=32, micro_batch_size=4,
                                   evaluate_every=0), checkpoint=dict(every=0)),
    "evaluation": dict(training=dict(steps=10, evaluate_every=5, evaluate_batches=720),
                       data=dict(validation=["long.txt"]), checkpoint=dict(every=0)),
    "save": dict(training=dict(steps=30, evaluate_every=0), checkpoint=dict(every=1, keep=2)),
}


def long_lab(path):
    lab = Lab(path)
    (lab.path / "long.txt").write_bytes(english(500 * 48, seed=3) * 12)
    return lab


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs that nobody stops, by ranks and moment."""
    lab, made = long_lab(tmp_path_factory.mktemp("undisturbed")), {}

    def get(moment, ranks):
        name = f"{moment}-{ranks}"
        if name not in made:
            lab.train(small(lab, name, **MOMENTS[moment]), ranks=ranks)
            made[name] = lab.path / "runs" / name, lab.path / "checkpoints" / name
        return made[name]

    return get


def check_like_undisturbed(lab, undisturbed, moment, ranks, steps):
    for folder, source in zip(("runs", "checkpoints"), undisturbed(moment, ranks)):
        (lab.path / folder / "whole").symlink_to(source)
    check_same_run(lab, "whole", "run", steps)


TARGETS = [(1, 0), (2, 0), (2, 1), (2, "mpirun")]  # ranks, who is sent the signal
BLOWS = [(name, moment, *target) for name, moment in (
    ("TERM", "training"), ("USR1", "training"), ("TERM", "evaluation"), ("USR1", "save"))
    for target in TARGETS if (name, target[1]) != ("TERM", "mpirun")]  # that has its own test


@pytest.mark.parametrize("name,moment,ranks,target", BLOWS)
def test_signal(tmp_path, undisturbed, name, moment, ranks, target):
    lab = long_lab(tmp_path)
    config = small(lab, "run", **MOMENTS[moment])
    steps = MOMENTS[moment]["training"]["steps"]
    job = Job(lab, "run", config, ranks=ranks)
    assert job.wait_for_rows(4)
    if moment == "evaluation":
        time.sleep(0.05)  # step 5 takes less, and its evaluation much more
    job.send(SIGNALS[name], target)
    job.finish(75)
    wait_until_gone(lab)
    rows = lab.rows("run")
    assert f"stopped at step {len(rows)} after saving; run the same command again" in job.text()
    assert saved_steps(lab, "run")[-1] == len(rows) < steps
    assert moment != "evaluation" or (len(rows) == 5 and "validation_loss" in rows[-1])
    lab.train(config, ranks=ranks)
    check_like_undisturbed(lab, undisturbed, moment, ranks, steps)


@pytest.mark.parametrize("name", SIGNALS)
def test_signal_before_mpi_has_started(lab, name):
    """As soon as it would not end the process, which is before MPI makes its threads."""
    config = small(lab, "run", **MOMENTS["training"])
    job = Job(lab, "run", config)
    bit, threads = 1 << (SIGNALS[name] - 1), None
    while threads is None and job.process.poll() is None:
        status = dict(line.split(":", 1) for line in open(f"/proc/{job.process.pid}/status"))
        if int(status["SigBlk"], 16) & bit:
            threads = int(status["Threads"])
    assert threads == 1
    job.send(SIGNALS[name])
    job.finish(75)
    assert saved_steps(lab, "run") == [1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_signals_come_at_any_instruction(lab, ranks):
    """A thousand a second all through long steps, in the middle of every kernel: only the stop."""
    config = small(lab, "run", training=dict(steps=1000, global_batch_size=1024, micro_batch_size=4,
                                             evaluate_every=0))
    job = Job(lab, "run", config, ranks=ranks)
    sent = 0
    while "parameters" not in job.text():
        time.sleep(0.01)
    time.sleep(0.2)
    while job.process.poll() is None:
        for pid in processes_in(lab.path):
            if rank_of(pid) is not None or ranks == 1:
                os.kill(pid, signal.SIGUSR1)
                sent += 1
        time.sleep(0.0005)
    job.finish(75)
    assert saved_steps(lab, "run") == [len(lab.rows("run"))]
    print(f"{ranks} ranks: {sent} signals")


def test_stopped_run_that_was_not_auto_says_how_to_go_on(lab):
    config = small(lab, "run", **MOMENTS["training"])
    job = Job(lab, "run", config, resume="never")
    assert job.wait_for_rows(2)
    job.send(signal.SIGTERM)
    job.finish(75)
    assert "run it again with --resume auto to go on" in job.text()


# --- a rank dies ----------------------------------------------------------------------------------

@pytest.mark.parametrize("moment", ["start", "training", "save"])
@pytest.mark.parametrize("rank", [0, 3])
def test_killed_rank_ends_the_job(lab, moment, rank):
    grid = dict(pipeline=2, expert=2)
    more = MOMENTS["save" if moment == "save" else "training"]
    config = small(lab, "run", "moe", parallel=grid, **more)
    job = Job(lab, "run", config, "training.steps=100000", ranks=4)
    if moment != "start":
        assert job.wait_for_rows(3)
    while True:
        try:
            job.send(signal.SIGKILL, rank)
            break
        except StopIteration:  # not there yet
            time.sleep(0.005)
    started = time.monotonic()
    assert job.finish(137 if moment != "start" else None, timeout=60) != 0
    wait_until_gone(lab)
    print(f"{moment}, rank {rank}: all gone {time.monotonic() - started:.1f} s after its death")


def test_lock_of_a_killed_save_holds_up_nobody(lab):
    """Open MPI locks a file by a semaphore with the file's name, one for all jobs of the node, and
    a job that is killed meanwhile leaves it taken. So no name may come twice."""
    lock = Path("/dev/shm/sem.OMPIO_.step-00000023.h5.partial")
    lock.write_bytes(bytes(8) + b"\x80" + bytes(23))  # glibc's sem_t, value 0, between processes
    try:
        lab.train(small(lab, "run", training=dict(steps=23, evaluate_every=0),
                        checkpoint=dict(every=23)), ranks=2, timeout=60)
    finally:
        lock.unlink(missing_ok=True)
    assert saved_steps(lab, "run") == [23]


# --- full disks -----------------------------------------------------------------------------------

@pytest.fixture
def tiny_disk(lab):
    """mount(size) puts a file system of that size at lab/disk; again: it changes the size."""
    disk = lab.path / "disk"
    disk.mkdir()
    mounted = []

    def mount(size):
        options = f"size={size}" + (",remount" if mounted else "")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk],
                              capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no tiny disk here: {done.stderr.strip()}")
        mounted.append(size)

    yield mount
    if mounted:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("found_by,ranks", [("asking", 1), ("writing", 1), ("writing", 2)])
def test_disk_full_at_a_save(lab, tiny_disk, found_by, ranks):
    more = dict(training=dict(steps=40, evaluate_every=0), checkpoint=dict(every=2, keep=0))
    lab.train(small(lab, "whole", **more), ranks=ranks)
    tiny_disk("3m")
    env = {"TRIREME_NO_SPACE_CHECK": "1"} if found_by == "writing" else {}
    config = small(lab, "run", **more)
    (lab.path / "checkpoints/run").symlink_to(lab.path / "disk")
    done = lab.train(config, ranks=ranks, env=env, code=74)
    assert done.stderr.count("error:") == 1 and "checkpoints/run" in done.stderr
    steps = saved_steps(lab, "run")  # and nothing else
    assert 0 < len(steps) < 20 and steps == list(range(2, steps[-1] + 1, 2))
    for step in steps:
        lab.run("checkpoint", "verify", f"checkpoints/run/step-{step:08d}.h5")
    tiny_disk("64m")
    done = lab.train(config, ranks=ranks)
    assert f"resumed from checkpoints/run/step-{steps[-1]:08d}.h5" in done.stdout
    check_same_run(lab, "whole", "run", 40)
    print(f"{found_by}, {ranks} ranks: full at step {steps[-1] + 2}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_metrics_on_a_full_disk(lab, tiny_disk, ranks):
    more = dict(training=dict(steps=200, evaluate_every=0, global_batch_size=2),
                checkpoint=dict(every=20), data=dict(validation=[]))
    lab.train(small(lab, "whole", **more), ranks=ranks)
    tiny_disk("32k")
    config = small(lab, "run", run=dict(directory="disk"), **more)
    done = lab.train(config, ranks=ranks, code=74)
    assert done.stderr.count("error:") == 1
    assert "disk/run/metrics.jsonl" in done.stderr and "No space left on device" in done.stderr
    tiny_disk("1m")
    lab.train(config, ranks=ranks)
    (lab.path / "runs/run").symlink_to(lab.path / "disk/run")
    check_same_run(lab, "whole", "run", 200)


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_rank_cannot_write_or_read(lab, ranks):
    grid = dict(pipeline=2, expert=2) if ranks == 4 else {}
    config = small(lab, "run", "moe", parallel=grid)
    lab.train(config, "training.steps=5", ranks=ranks)
    for fail, code, text in (("WRITE", 74, "writing failed on request"),
                             ("READ", 65, "reading failed on request")):
        done = lab.train(config, ranks=ranks, code=code, timeout=30,
                         env={f"TRIREME_FAIL_{fail}_RANK": "1"})
        assert text in done.stderr and done.stderr.count("error:") == 1
        assert saved_steps(lab, "run") == [5]
    lab.train(config, ranks=ranks)
    assert saved_steps(lab, "run") == [5, 10, 15, 20]


# 2.5 GB of address space, of which the libraries take the most.
LIMIT_RANK_1 = ("sh", "-c", 'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then ulimit -v 2500000; fi; '
                            'exec "$@"', "sh")


@pytest.mark.parametrize("ranks, limited", [(1, None), (2, None), (2, 1)])
def test_model_larger_than_memory(lab, ranks, limited):
    """Of the machine, or of what one rank is allowed: one text for all, and what would do."""
    width = 4096 if limited else 1048576
    config = small(lab, "run", model=dict(hidden_size=width, intermediate_size=width))
    done = lab.train(config, ranks=ranks, code=70, timeout=60,
                     prefix=LIMIT_RANK_1 if limited else ())
    error, = [line for line in done.stderr.splitlines() if "rror: " in line]
    assert f"out of memory: rank {limited or 0} of {ranks} asks for " in error
    asked = float(re.search(r"asks for ([\d.]+) MiB", error)[1])
    plan = lab.run("train", config, "--dry-run", ranks=ranks).stdout
    assert asked == float(re.search(r"memory +([\d.]+) MiB", plan)[1])
    for remedy in ("more ranks", "fewer or narrower layers"):
        assert remedy in error
    assert ("parallel.zero 3 (now 1)" in error) == (ranks > 1)  # one rank has nobody to share with


LARGE_BATCH = dict(global_batch_size=65536, micro_batch_size=32768, evaluate_batches=1)


def test_activations_larger_than_memory(lab):
    """Of one rank: all know it before the first step."""
    config = small(lab, "run", training=LARGE_BATCH)
    done = lab.train(config, ranks=2, code=70, timeout=60, prefix=LIMIT_RANK_1)
    error, = [line for line in done.stderr.splitlines() if "rror: " in line]
    assert "out of memory: rank 1 of 2 asks for about " in error
    asked = re.search(r"about ([\d.]+) MiB for the activations of 1 micro-batch in f", error)[1]
    assert re.search(rf"about {asked} MiB for 1 micro-batch in flight", done.stdout)
    for remedy in ("training.micro_batch_size (now 32768)", "parallel.recompute full (now none)",
                   "more ranks"):
        assert remedy in error
    assert not (lab.path / "runs").exists()


def test_memory_that_ends_at_work(lab):
    """Nothing is taken in advance for an evaluation: a rank that then has none ends the job."""
    config = small(lab, "run", training=dict(steps=1), checkpoint=dict(every=1))
    lab.train(config)
    large = small(lab, "large", training=LARGE_BATCH)
    done = lab.run("eval", large, "--checkpoint", lab.checkpoint_path("run", 1), ranks=2, code=70,
                   timeout=120, prefix=LIMIT_RANK_1)
    error, = [line for line in done.stderr.splitlines() if line.startswith("error: out of memory")]
    assert "(rank 1" in error and "micro_batch_size" in error


@pytest.mark.parametrize("key", ["run.directory", "checkpoint.directory"])
def test_folder_that_is_a_file(lab, key):
    config = small(lab, "run")
    done = lab.train(config, f"{key}=text.txt", ranks=2, code=74)
    assert "text.txt" in done.stderr and done.stderr.count("error:") == 1


# --- data -----------------------------------------------------------------------------------------

# mpirun asks the other ranks to end once one has ended with a code.
WITNESS = ("sh", "-c", 'trap : TERM; "$@"; code=$?; echo $code > code-$OMPI_COMM_WORLD_RANK; '
           'exit $code', "sh")


def codes(lab, ranks):
    return [int((lab.path / f"code-{r}").read_text()) for r in range(ranks)]


def write_tokens(path, ids):
    """llm.c's format of 16-bit tokens."""
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + np.asarray(ids, np.uint16).tobytes())


def test_data_that_cannot_be_read(lab):
    config = small(lab, "run")
    (lab.path / "short.txt").write_bytes(b"a" * 48)
    cases = [("data.train=[nothere.txt]", 66, "nothere.txt: no such file"),
             ("data.validation=[gone/held-out.txt]", 66, "gone/held-out.txt: no such file"),
             ("data.train=[short.txt]", 65, "short.txt: 48 tokens, but a sample of sequence_length "
                                            "48 needs 49"),
             ("data.train=[.]", 65, "a directory, not a file")]
    for setting, code, text in cases:
        done = lab.train(config, setting, ranks=2, code=code, prefix=WITNESS)
        assert text in done.stderr and done.stderr.count("error:") == 1
        assert codes(lab, 2) == [code, code]
    assert not (lab.path / "runs").exists()


def test_prompt_outside_the_vocabulary(lab):
    write_tokens(lab.path / "tokens.bin", [1, 2, 99] * 400)
    files = dict(train=["tokens.bin"], validation=["tokens.bin"])
    lab.train(small(lab, "run", model=dict(vocab_size=100), data=files, training=dict(steps=5)))
    sample = "generate", "--checkpoint", lab.checkpoint_path("run", 5), "--tokens", 2, "--prompt"
    lab.run(*sample, "abc")
    done = lab.run(*sample, "abcd", code=64)
    assert "--prompt: byte 100 is no token of a vocabulary of 100" in done.stderr


def test_token_outside_the_vocabulary_met_by_one_rank(lab):
    ids = list((lab.path / "text.txt").read_bytes()[:9600])
    write_tokens(lab.path / "tokens.bin", ids)
    more = dict(data=dict(train=["tokens.bin"]), log=dict(samples=True))
    lab.train(small(lab, "whole", **more), ranks=2)
    samples = json.loads(open(lab.path / "runs/whole/samples.jsonl").readlines()[6])["samples"]
    at = samples[5] * 48 + 20  # rank 1 has samples 4 to 7 of step 7
    ids[at] = 300
    write_tokens(lab.path / "tokens.bin", ids)
    done = lab.train(small(lab, "run", **more), ranks=2, code=65, prefix=WITNESS)
    assert codes(lab, 2) == [65, 65]
    assert done.stderr.count("error:") == 1
    assert f"tokens.bin: token 300 at position {at} is not in a vocabulary of 256" in done.stderr
    assert metrics_text(lab, "run") == metrics_text(lab, "whole", last=6)
    assert saved_steps(lab, "run") == [5]


# --- numbers --------------------------------------------------------------------------------------

def damage_weights(lab, source, name, change):
    """A checkpoint like `source`, its weights changed by change(weights), its checksums right."""
    path = lab.path / name
    path.write_bytes(source.read_bytes())
    with h5py.File(path, "r+") as f:
        weights = {k: v[()] for k, v in f["model"].items()}
        for k in change(weights):
            f["model"][k][...] = weights[k]
            f["model"][k].attrs["checksum"] = np.uint64(checksum(weights[k]))
    return name


@pytest.mark.parametrize("ranks", [1, 4])
def test_steps_that_are_not_finite(lab, ranks):
    """inf in the last layer: one stage sees it first; all ranks skip, then give up together."""
    grid = dict(pipeline=2, expert=2) if ranks == 4 else {}
    lab.train(small(lab, "seed", "moe", training=dict(steps=1)))

    def change(weights):
        weights["model.layers.1.self_attn.v_proj.weight"][3, 5] = np.inf
        return ["model.layers.1.self_attn.v_proj.weight"]

    source = damage_weights(lab, lab.checkpoint_path("seed", 1), "bad.h5", change)
    config = small(lab, "run", "moe", parallel=grid, checkpoint=dict(every=1),
                   model=dict(init_from=source), training=dict(max_skipped_steps=4))
    done = lab.train(config, ranks=ranks, code=70)
    assert done.stderr.count("error:") == 1
    assert "the gradients of 4 steps in a row were not finite" in done.stderr
    assert "training.max_skipped_steps" in done.stderr
    rows = lab.rows("run")
    assert [(r["step"], r["skipped"], r["samples"]) for r in rows] == \
        [(i, 1, 8 * i) for i in range(1, 5)]
    assert all(r["grad_norm"] is None and r["loss"] is None for r in rows)
    with h5py.File(lab.path / source) as want, h5py.File(lab.checkpoint_path("run", 3)) as got:
        for k in want["model"]:
            assert want["model"][k][()].tobytes() == got["model"][k][()].tobytes()
            assert not got["optimizer/exp_avg"][k][()].any()
        assert got.attrs["updates"] == 0 and got.attrs["skipped_in_row"] == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_bad_step_is_skipped(lab, ranks):
    """The weights of a letter in one sample are inf: the step that reads it changes nothing."""
    lab.train(small(lab, "seed", training=dict(steps=1)))
    def change(weights):
        weights["model.embed_tokens.weight"][ord("Z"), 3] = np.inf
        return ["model.embed_tokens.weight"]

    source = damage_weights(lab, lab.checkpoint_path("seed", 1), "bad.h5", change)
    lab.train(small(lab, "order", training=dict(steps=8), log=dict(samples=True)))
    ids = json.loads(open(lab.path / "runs/order/samples.jsonl").readlines()[3])["samples"]
    text = bytearray((lab.path / "text.txt").read_bytes())
    text[ids[6] * 48 + 7] = ord("Z")
    (lab.path / "text.txt").write_bytes(bytes(text))
    config = small(lab, "run", training=dict(steps=8, max_skipped_steps=2, evaluate_every=0),
                   model=dict(init_from=source), checkpoint=dict(every=1))
    lab.train(config, ranks=ranks)
    rows = lab.rows("run")
    assert [r["skipped"] for r in rows] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert [r["samples"] for r in rows] == [8 * i for i in range(1, 9)]
    assert [r["grad_norm"] is None for r in rows] == [False] * 3 + [True] + [False] * 4
    before, after = lab.tensors("run", 3), lab.tensors("run", 4)
    assert all(before[k].tobytes() == after[k].tobytes() for k in before)
    with h5py.File(lab.checkpoint_path("run", 8)) as f:
        assert f.attrs["updates"] == 7 and f.attrs["step"] == 8 and f.attrs["skipped_in_row"] == 0
        assert all(np.isfinite(v[()]).all() for k, v in f["model"].items() if "embed" not in k)


@pytest.mark.parametrize("kind,ranks", [("dense", 1), ("moe", 1), ("moe", 4)])
def test_nothing_to_learn(lab, kind, ranks):
    """Every label is padding: loss 0, no update, no NaN, and no failure however long it lasts."""
    (lab.path / "pads.txt").write_bytes(b"a" * 2000)
    grid = dict(pipeline=2, expert=2) if ranks == 4 else {}
    config = small(lab, "run", kind, parallel=grid, training=dict(steps=14, max_skipped_steps=3),
                   data=dict(train=["pads.txt"], validation=["pads.txt"], pad_id=ord("a")),
                   checkpoint=dict(every=1))
    lab.train(config, ranks=ranks)
    rows = lab.rows("run")
    assert len(rows) == 14
    assert all(r["loss"] == 0 and r["skipped"] == 1 and r["grad_norm"] == 0 for r in rows)
    assert all(r["aux_loss"] == 0 and r["z_loss"] == 0 for r in rows)
    assert rows[-1]["validation_loss"] == 0
    first, last = lab.tensors("run", 1), lab.tensors("run", 14)
    assert all(np.isfinite(last[k]).all() and np.array_equal(first[k], last[k]) for k in last)


# --- refusals -------------------------------------------------------------------------------------

TRAIN = ("train", "run.yaml")
REFUSALS = {  # words, exit code, what the error says
    "no command": ((), 64, ["no command"]),
    "unknown command": (("sail",), 64, ["unknown command 'sail'", "--help"]),
    "unknown option": ((*TRAIN, "--sideways"), 64, ["unknown option", "--sideways", "--help"]),
    "option without a value": ((*TRAIN, "--set"), 64, ["missing value", "--set"]),
    "a word too many": ((*TRAIN, "more"), 64, ["'more' is one word too many"]),
    "no config": (("train",), 64, ["trireme train needs a config file"]),
    "missing config": (("train", "nothere.yaml"), 66, ["nothere.yaml"]),
    "config that is no YAML": (("train", "broken.yaml"), 64, ["broken.yaml:4:1: is not YAML"]),
    "unknown key": ((*TRAIN, "--set", "training.step=3"), 64, ["training.step", "steps"]),
    "unknown section": ((*TRAIN, "--set", "trainig.steps=3"), 64, ["trainig", "training"]),
    "bad value": ((*TRAIN, "--set", "training.steps=many"), 64, ["training.steps", "many"]),
    "value out of range": ((*TRAIN, "--set", "optimizer.beta1=1.5"), 64, ["beta1", "1.5"]),
    "set without value": ((*TRAIN, "--set", "training.steps"), 64, ["training.steps"]),
    "unknown schedule": ((*TRAIN, "--set", "parallel.schedule=zigzag"), 64, ["zigzag", "1f1b"]),
    "world does not divide": ((*TRAIN, "--set", "parallel.pipeline=2", "--set",
                               "parallel.context=2"), 64, ["4", "2 ranks"]),
    "sequence does not divide": ((*TRAIN, "--set", "parallel.context=2", "--set",
                                  "data.sequence_length=46"), 64,
                                 ["data.sequence_length", "46", "2 * context", "44 or 48"]),
    "expert ranks do not divide": ((*TRAIN, "--set", "parallel.expert=3"), 64,
                                   ["parallel.expert", "value 3 does not divide data"]),
    "batch does not divide": ((*TRAIN, "--set", "training.global_batch_size=9"), 64,
                              ["training.global_batch_size", "9", "8 or 10"]),
    "more stages than layers": ((*TRAIN, "--set", "parallel.pipeline=8"), 64,
                                ["parallel.pipeline", "num_hidden_layers"]),
    "more experts a token than there are": ((*TRAIN, "--set", "model.num_experts_per_tok=9"), 64,
                                            ["num_experts_per_tok", "9", "num_experts 4"]),
    "small vocabulary for bytes": ((*TRAIN, "--set", "model.vocab_size=255"), 64,
                                   ["text.txt", "256", "255"]),
    "device that this build lacks": ((*TRAIN, "--set", "run.device=tpu"), 64,
                                     ["run.device", "tpu"]),
    "no data": ((*TRAIN, "--set", "data.train=[]"), 64, ["data.train is empty"]),
    "init_from missing": ((*TRAIN, "--set", "model.init_from=none.h5"), 66, ["none.h5"]),
    "init_from of no checkpoint": ((*TRAIN, "--set", "model.init_from=text.txt"), 65, ["text.txt"]),
    "eval without checkpoint": (("eval", "run.yaml"), 64, ["--checkpoint"]),
    "eval of a missing checkpoint": (("eval", "run.yaml", "--checkpoint", "none.h5"), 66,
                                     ["none.h5"]),
    "eval of no checkpoint": (("eval", "run.yaml", "--checkpoint", "text.txt"), 65, ["text.txt"]),
    "eval without validation data": (("eval", "run.yaml", "--checkpoint", "none.h5", "--set",
                                      "data.validation=[]"), 64, ["data.validation is empty"]),
    "eval of a folder": (("eval", "run.yaml", "--checkpoint", "kept"), 64,
                         ["kept: is a folder", "the newest is kept/step-00000007.h5"]),
    "resume of a folder": ((*TRAIN, "--resume", "empty"), 64,
                           ["empty: is a folder without checkpoints; name a step-*.h5"]),
    "folder as config": (("train", "kept"), 64, ["kept: is a folder; name a config file"]),
    "pipe as config": (("train", "pipe"), 64, ["pipe: is a pipe or device; name a config file"]),
    "pipe as model.from": ((*TRAIN, "--set", "model.from=pipe"), 64,
                           ["--set model.from: pipe: is a pipe or device; name a config.json"]),
    "pipe as checkpoint": (("checkpoint", "info", "pipe"), 64, ["pipe: is a pipe or device"]),
    "pipe as data": ((*TRAIN, "--set", "data.train=[pipe]"), 65, ["pipe: a pipe or device"]),
    "device as init_from": ((*TRAIN, "--set", "model.init_from=/dev/zero"), 64,
                            ["/dev/zero: is a pipe or device; name a checkpoint"]),
    "checkpoint what": (("checkpoint", "sink", "x.h5"), 64, ["info|verify PATH, not sink"]),
    "checkpoint": (("checkpoint",), 64, ["trireme checkpoint info|verify PATH"]),
    "checkpoint which": (("checkpoint", "info"), 64, ["which file"]),
    "data what": (("data", "sink"), 64, ["build|info PATH..., not sink"]),
    "data": (("data",), 64, ["trireme data build|info PATH..."]),
    "data info of a missing file": (("data", "info", "none.bin"), 66, ["none.bin"]),
    "not a number": (("generate", "--checkpoint", "x.h5", "--prompt", "a", "--tokens", "few"), 64,
                     ["--tokens few"]),
    "help on nothing": (("help", "sailing"), 64, ["no help on 'sailing'"]),
}


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("port"))
    small(lab, "run", "moe")
    os.mkfifo(lab.path / "pipe")
    (lab.path / "empty").mkdir()
    (lab.path / "kept").mkdir()
    for step in (3, 7):
        (lab.path / f"kept/step-{step:08d}.h5").touch()
    (lab.path / "broken.yaml").write_text("run:\n  name: [a\ntraining: {steps: 3}\n")
    return lab


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(port, case, ranks):
    """One error line, and the same code from one rank and from two."""
    words, code, texts = REFUSALS[case]
    if case == "world does not divide" and ranks == 1:
        texts = ["divide the 1 rank;"]
    elif case == "batch does not divide" and ranks == 1:
        words = (*words, "--set", "training.micro_batch_size=2")
    done = port.run(*words, ranks=ranks, code=code, env={"OMPI_MCA_odls_base_sigkill_timeout": "0"})
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == done.stderr.count("error: ") == 1, done.stderr
    for text in texts:
        assert text in errors[0], f"{text!r} is not in: {errors[0]}"
    assert not (port.path / "checkpoints").exists()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name, value, remedy", [
    ("NODE_RANKS", "two", "a whole number from 1 to"), ("NODE_RANKS", "0", "from 1 to"),
    ("CHUNK_LIMIT", "1e3", "from 1 to"), ("SYNCHRONOUS", "yes", "from 0 to 1"),
    ("IO_LIMIT", "99999999999", "from 1 to"), ("CPU_LEVEL", "sse9", "use ref, portable")])
def test_a_switch_that_makes_no_sense(port, name, value, remedy, ranks):
    done = port.run("train", "run.yaml", "--set", "training.global_batch_size=12", ranks=ranks,
                    code=64, env={f"TRIREME_{name}": value})
    errors = [line for line in done.stderr.splitlines() if "rror: " in line]
    assert len(errors) == 1 and f"TRIREME_{name}" in errors[0], done.stderr
    assert value in errors[0] and remedy in errors[0]
    assert not (port.path / "checkpoints").exists()
    port.run("train", "run.yaml", "--dry-run", env={f"TRIREME_{name}": ""})


HELP = {
    "--help": ["train", "eval", "generate", "checkpoint", "data", "CONFIG", "75"],
    "help": ["train"],
    "--version": ["trireme 0"],
    "help config": ["training:", "global_batch_size: ", "micro_batch_size", "(default: "],
    "train --help": ["--set", "--resume", "--dry-run"],
    "plan --help": ["--schedule", "--world"],
    "generate --help": ["--temperature", "--top-p"],
}


@pytest.mark.parametrize("words", HELP)
def test_help(port, words):
    said = port.run(*words.split()).stdout
    assert all(text in said for text in HELP[words]), said
    assert max(map(len, said.splitlines())) <= 100, said
    assert port.run(*words.split(), ranks=2).stdout == said  # once, not once a rank


@pytest.mark.parametrize("ranks", [1, 4])
def test_dry_run(lab, ranks):
    config = small(lab, "run", "moe", parallel=dict(pipeline=2, expert=2) if ranks == 4 else {})
    before = sorted(lab.path.rglob("*"))
    said = lab.run("train", config, "--dry-run", ranks=ranks).stdout
    for text in ("parameters", "1 rank:" if ranks == 1 else "4 ranks:", "8 sequences of 48 tokens",
                 "MiB a rank"):
        assert text in said
    assert "step" not in said.replace("tokens a step", "")
    assert sorted(lab.path.rglob("*")) == before
    lab.run("train", config, "--dry-run", "--set", "data.train=[none.txt]", ranks=ranks, code=66)
    lab.train(config, "training.steps=2", ranks=ranks)
    assert len(lab.rows("run")) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_thread(lab, ranks):
    """OpenMP ends a process that gets no thread with exit code 1; the job's is 70, and one line
    of each rank that ended so tells of it."""
    config = small(lab, "run", run=dict(threads=2))
    done = lab.run("train", config, ranks=ranks, code=70, env={"OMP_STACKSIZE": "200000G"})
    errors = re.findall("^error: .*", done.stderr, re.M)
    assert 1 <= len(errors) <= ranks, done.stderr
    assert all("a library ended this process" in line for line in errors)
