"""Property: `trireme bench` prints each row of its table with a verdict, says why one is skipped,
fits 100 columns, leaves no files, and exits 0 whether or not targets are met. The model is tiny: no
number is judged."""
import os
import re

import pytest
from conftest import ROOT

TINY = ["training.steps=1", "model.hidden_size=32", "model.num_hidden_layers=2",
        "model.num_attention_heads=2", "model.intermediate_size=64", "model.vocab_size=300",
        "data.sequence_length=32"]
SETS = [word for setting in TINY for word in ("--set", setting)]

# (start of the row, whether it has a target)
TRAIN = [("training step fp32, B 4, T 32", True), ("memory of the step fp32", True),
         ("training step fp32, B 4, T 2", True), ("training step bf16, B 4, T 32", True),
         ("training step bf16, B 4, T 2", True)]
COMM = [("checkpoint save", True), ("checkpoint load", True)]
KERNELS = [("attention memory, S 128", False), ("attention memory, S 512; base x 4", True),
           ("attention memory, S 2048; base x 16", True)]
KERNELS += [(f"attention {t} {way}, S 128, D {d}", True)
            for t in ("fp32", "bf16") for way in ("forward", "backward") for d in (64, 128)]
KERNELS += [(f"GEMM {t} {way}, {rows} rows", False) for t in ("fp32", "bf16")
            for way in ("forward", "input gradient", "weight gradient") for rows in (128, 8)]
KERNELS += [(f"dense layer {t}", False) for t in ("fp32", "bf16")]
KERNELS += [(f"MoE layer {t}", True) for t in ("fp32", "bf16")]
SCHEDULES = [(f"idle under {kind}", True) for kind in ("1f1b", "gpipe", "interleaved", "zb_h1",
                                                       "zb_v", "dualpipe_v")]
PAIRS = [("data parallel", True), ("tensor parallel", True), ("sum of", True),
         ("ring attention fp32, S 256", True), ("ring attention fp32, S 512", True),
         ("Ulysses attention fp32, S 512", True)]
OVERLAP = [("reduction hidden", False)]
BY_NODE = [("expert exchange by node", True), ("its messages between nodes", True),
           ("their bytes", True)]


def module(device):
    return os.path.join(os.path.dirname(os.environ["TRIREME"]), f"libtrireme_{device}.so")


def rows_of(text):
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100, max(lines, key=len)
    return {line[:40].strip(): line[40:] for line in lines}


def check_rows(rows, expected):
    own_products = any(name.startswith("peak of bf16") for name in rows)
    for start, has_target in expected:
        has_target &= own_products or not start.startswith("attention bf16")
        found = [rest for name, rest in rows.items() if name.startswith(start)]
        assert found, f"no row '{start}' among {sorted(rows)}"
        for rest in found:
            assert re.search(r"\d+\.\d\d (GFLOP/s|GB/s|GB|MB|%|ms|sent)", rest), (start, rest)
            assert bool(re.search(r"  (met|missed)$", rest)) == has_target, (start, rest)


def test_one_rank(lab):
    before = sorted(p.name for p in lab.path.iterdir())
    text = lab.run("bench", *SETS).stdout
    rows = rows_of(text)
    assert "medians of 1 repetition or more\n" in text
    check_rows(rows, TRAIN + COMM + KERNELS)
    for start, _ in PAIRS + SCHEDULES + OVERLAP:
        skipped = [rest for name, rest in rows.items() if name.startswith(start)]
        assert len(skipped) == 1 and "skipped: needs 2 ranks" in skipped[0], (start, skipped)
    assert "skipped: needs several nodes" in text
    met, missed = (len(re.findall(rf"  {word}$", text, re.M)) for word in ("met", "missed"))
    assert text.endswith(f"{met} targets met, {missed} missed, 14 rows skipped\n")
    assert sorted(p.name for p in lab.path.iterdir()) == before


def test_steps_of_experts_in_one_type(lab):
    sets = [*SETS, "--set", "model.num_experts=4", "--set", "run.dtype=bfloat16"]
    rows = rows_of(lab.run("bench", "train", *sets).stdout)
    check_rows(rows, TRAIN[3:])
    assert not [name for name in rows if "fp32" in name and name.startswith("training step")]


def test_two_ranks(lab):
    before = sorted(p.name for p in lab.path.iterdir())
    rows = rows_of(lab.run("bench", "comm", *SETS, ranks=2).stdout)
    check_rows(rows, PAIRS[2:] + COMM)
    hidden = [rest for name, rest in rows.items() if name.startswith(OVERLAP[0][0])]
    assert re.search(r"\d ms +\d.*%|took less than 1 %", hidden[0]), hidden  # not to be judged
    check_rows(rows_of(lab.run("bench", "train", *SETS, ranks=2).stdout),
               TRAIN + PAIRS[:2] + SCHEDULES)
    assert sorted(p.name for p in lab.path.iterdir()) == before


def test_four_ranks_on_two_nodes(lab):
    text = lab.run("bench", "comm", *SETS, ranks=4, env={"TRIREME_NODE_RANKS": "2"}).stdout
    rows = rows_of(text)
    check_rows(rows, BY_NODE)
    assert "met" in rows["its messages between nodes; base flat"]
    assert "met" in rows["their bytes; base flat"]


# Rows of the table of kernels (kernels/kernels.h), and the types each is timed in.
ROWS = dict.fromkeys(["gemm", "attention_forward", "attention_backward", "rmsnorm_forward",
                      "rmsnorm_backward", "layernorm_forward", "layernorm_backward", "rope",
                      "glu_forward", "glu_backward", "add", "cast to fp32", "cast from fp32",
                      "embedding_forward", "embedding_backward", "cross_entropy",
                      "cross_entropy_whole", "gather_rows", "combine_rows", "combine_rows_weight",
                      "grouped_gemm", "grouped_gemm_weight"],
                     {"fp32", "bf16"})
ROWS |= dict.fromkeys(["cross_entropy_part", "adamw", "sum_squares", "router_forward",
                       "router_stats", "router_backward", "router_capacity", "moe_sort"], {"fp32"})


@pytest.mark.parametrize("device", ["cpu", "simt"])
def test_each_kernel_beside_its_bound(lab, device):
    declared = set(re.findall(r"void \(\*(\w+)\)", (ROOT / "kernels/kernels.h").read_text()))
    assert {name.split(" ")[0] for name in ROWS} == declared
    if device == "simt" and not os.path.exists(module("simt")):
        pytest.skip("no module for simt beside the program: it needs a C++ compiler")
    sets = SETS if device == "cpu" else SETS + [
        "--set", "run.device=simt", "--set", "data.sequence_length=8",
        "--set", "training.global_batch_size=2"]
    text = lab.run("bench", "rows", *sets, timeout=600).stdout
    assert max(map(len, text.splitlines())) <= 100
    share = r"[\d.]+ %" if device == "cpu" else "-"  # an emulation's times mean nothing
    found = re.findall(r"^(\w.{19}) (.{34}) (fp32|bf16) +([\d.]+) +[\d.]+ "
                       rf"(?:GB/s|TFLOP/s) +{share}$", text, re.M)
    types = {}
    for kernel, _, dtype, microseconds in found:
        types.setdefault(kernel.strip(), set()).add(dtype)
        assert float(microseconds) > 0
    assert types == ROWS
    assert re.search(r"^copy of \d+ MB: [\d.]+ GB/s", text, re.M)
    assert ("times mean nothing" in text) == (device == "simt")


@pytest.mark.parametrize("words, code, text", [
    (["speed"], 64, "kernels, comm, train or rows"),
    (["comm", "train"], 64, "one word too many"),
    (["rows", "--set", "model.num_experts=4"], 64, "bench rows takes a dense model"),
    (["--set", "model.num_experts=4"], 64, "leave model.num_experts at 0"),
    (["--set", "parallel.pipeline=1", "--set", "model.wide=4"], 64, "model.wide"),
    (["comm", "--set", "checkpoint.directory=text.txt", *SETS], 74, "text.txt"),
])
def test_refusals(lab, words, code, text):
    done = lab.run("bench", *words, code=code)
    assert text in done.stderr, done.stderr


def test_ranks_that_do_not_divide_the_batch(lab):
    done = lab.run("bench", *SETS, ranks=3, code=64)
    assert "global_batch_size" in done.stderr and "4" in done.stderr, done.stderr
