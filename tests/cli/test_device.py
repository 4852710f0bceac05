"""Property: a device with memory of its own computes what the CPU computes, on one rank and on two
that exchange through host memory; checkpoints go from one to the other; a device that this machine
lacks is refused in words. The GPU's kernels run on the host (run.device simt), which ends a program
whose host code touches device memory."""
import ctypes
import os
import re
from pathlib import Path

import pytest

STEPS = 3
PROTECT = {"TRIREME_SIMT_PROTECT": "1"}


def has_module(device):
    name = f"libtrireme_{device.replace('-', '_')}.so"
    return (Path(os.environ["TRIREME"]).parent / name).is_file()


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


needs_simt = pytest.mark.skipif(not has_module("simt"), reason="libtrireme_simt.so is not built")
no_driver = pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")


def small(lab, name, device, dtype="float32", **sections):
    base = dict(run=dict(device=device, dtype=dtype, peak_flops=1e9),
                model=dict(num_hidden_layers=2, vocab_size=256, expert_capacity_factor=1.0),
                data=dict(sequence_length=16, validation=[]),
                training=dict(steps=STEPS, global_batch_size=2),
                checkpoint=dict(every=STEPS))
    for section, values in sections.items():
        base.setdefault(section, {}).update(values)
    return lab.config(name, "moe", **base)


def check_same(lab, one, other, tolerance, first=1):
    a, b = lab.rows(one), lab.rows(other)
    assert len(a) == len(b)
    for x, y in list(zip(a, b))[first - 1:]:
        for key in "loss", "aux_loss", "z_loss", "grad_norm":
            print(f"step {x['step']} {key}: {x[key]} and {y[key]}")
            assert abs(x[key] - y[key]) <= tolerance * max(abs(x[key]), 1e-2), key


@needs_simt
@pytest.mark.parametrize("dtype, ranks, parallel, env", [
    ("float32", 1, {}, PROTECT),
    ("bfloat16", 1, {}, {}),
    ("float32", 2, dict(expert=2, zero=3), PROTECT),
    ("float32", 2, dict(tensor=2), {}),
    ("float32", 2, dict(context=2), {}),
    ("float32", 2, dict(pipeline=2), {}),
], ids=["fp32", "bf16", "ep2", "tp2", "cp2", "pp2"])
def test_trains_as_the_cpu_does(lab, dtype, ranks, parallel, env):
    for device in "cpu", "simt":
        config = small(lab, device, device, dtype, parallel=parallel)
        done = lab.train(config, ranks=ranks, env=env, timeout=400)
        assert re.search(rf"device +{device} ", done.stdout)
        assert "simt:" not in done.stderr
        told = ["MFU" in done.stdout, *(r["mfu"] is not None for r in lab.rows(device, True))]
        assert set(told) == {device == "cpu"}  # the emulation's times mean nothing
    check_same(lab, "cpu", "simt", 2e-2 if dtype == "bfloat16" else 5e-6)


@needs_simt
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_forms_train_as_on_the_cpu(lab, dtype):
    forms = dict(norm_type="layer_norm", hidden_act="gelu_pytorch_tanh", scoring_func="sigmoid")
    for device in "cpu", "simt":
        lab.train(small(lab, device, device, dtype, model=forms, parallel=dict(tensor=2)), ranks=2,
                  env=PROTECT, timeout=400)
    check_same(lab, "cpu", "simt", 2e-2 if dtype == "bfloat16" else 5e-6)


@needs_simt
@pytest.mark.parametrize("begins, goes_on", [("simt", "cpu"), ("cpu", "simt")])
def test_checkpoints_go_across(lab, begins, goes_on):
    more = f"training.steps={STEPS + 2}"
    lab.train(small(lab, "straight", "cpu"), more)
    config = small(lab, "across", begins)
    lab.train(config)
    done = lab.train(config, more, f"run.device={goes_on}")
    assert "resumed from" in done.stdout
    check_same(lab, "straight", "across", 5e-6)


@needs_simt
def test_text_losses_and_proofs_come_from_the_device(lab):
    """generate takes the device of the checkpoint's config, eval and verify that of theirs; --set
    names another, and each says the same on both."""
    lab.train(small(lab, "trained", "simt"), "training.steps=1", "checkpoint.every=1")
    sample = ["generate", "--checkpoint", lab.checkpoint_path("trained", 1), "--prompt", "the",
              "--tokens", 4, "--temperature", 0]
    config = small(lab, "asked", "simt", data=dict(validation=["held-out.txt"]),
                   training=dict(evaluate_batches=1))
    evaluate = ["eval", config, "--checkpoint", lab.checkpoint_path("trained", 1)]
    verify = ["verify", config]
    cpu = ["--set", "run.device=cpu"]
    missing = {"TRIREME_MODULE_DIR": str(lab.path)}
    for words in sample, evaluate, verify:  # without its module the device cannot be opened
        assert "run.device simt" in lab.run(*words, code=64, env=missing).stderr
        lab.run(*words, *cpu, env=missing)
        told, other = lab.run(*words, timeout=400).stdout, lab.run(*words, *cpu).stdout
        if words is sample:
            assert told == other
        elif words is evaluate:
            there, here = (float(re.match(r"loss (\S+) ", text)[1]) for text in (told, other))
            assert there == pytest.approx(here, rel=5e-6)
    stored = lab.run(*sample, code=64, env=missing).stderr
    assert "device of its training" in stored and "--set run.device=cpu" in stored
    asked = lab.run(*sample, "--set", "run.device=simt", code=64, env=missing).stderr
    assert "run.device simt" in asked and "of its training" not in asked


@needs_simt
def test_checked_kernels_find_nothing(lab):
    if not has_module("simt-check"):
        pytest.skip("libtrireme_simt_check.so is not built")
    config = small(lab, "checked", "simt-check", "bfloat16",
                   training=dict(steps=1, global_batch_size=1))
    done = lab.train(config, timeout=400)
    assert "simt:" not in done.stderr and "SIMT" not in done.stderr, done.stderr


@no_driver
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_driver_is_said_once(lab, ranks):
    config = small(lab, "gpu", "cuda")
    done = lab.train(config, ranks=ranks, code=64)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and re.search("no (NVIDIA )?driver", errors[0]), done.stderr
    assert "run.device cpu" in errors[0] or "--preset cuda" in errors[0]


@needs_simt
@pytest.mark.parametrize("switch", ["MEMORY_MB=nonsense", "MEMORY_MB=0", "COST=yes", "PROTECT=2",
                                    "SCHEDULE=sorted", "STREAMS=lazy"])
def test_a_switch_that_makes_no_sense_is_refused(lab, switch):
    name, value = f"TRIREME_SIMT_{switch}".split("=")
    done = lab.train(small(lab, "run", "simt"), env={name: value}, code=64)
    assert f"error: {name}={value}: " in done.stderr
