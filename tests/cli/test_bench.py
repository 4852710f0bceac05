"""Property: `trireme bench` prints each row of its table with a verdict, says why one is skipped,
fits 100 columns, leaves no files, and exits 0 whether or not targets are met. The model is tiny: no
number is judged."""
import re

import pytest

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


def rows_of(text):
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100, max(lines, key=len)
    return {line[:40].strip(): line[40:] for line in lines}


def check_rows(rows, expected):
    for start, has_target in expected:
        found = [rest for name, rest in rows.items() if name.startswith(start)]
        assert found, f"no row '{start}' among {sorted(rows)}"
        for rest in found:
            assert re.search(r"\d+\.\d\d (GFLOP/s|GB/s|GB|MB|%|ms|sent)", rest), (start, rest)
            assert bool(re.search(r"  (met|missed)$", rest)) == has_target, (start, rest)


def test_one_rank(lab):
    before = sorted(p.name for p in lab.path.iterdir())
    text = lab.run("bench", *SETS).stdout
    rows = rows_of(text)
    check_rows(rows, TRAIN + COMM + KERNELS)
    for start, _ in PAIRS + SCHEDULES + OVERLAP:
        skipped = [rest for name, rest in rows.items() if name.startswith(start)]
        assert len(skipped) == 1 and "skipped: needs 2 ranks" in skipped[0], (start, skipped)
    assert "skipped: needs several nodes" in text
    met, missed = (len(re.findall(rf"  {word}$", text, re.M)) for word in ("met", "missed"))
    assert text.endswith(f"{met} targets met, {missed} missed, 14 rows skipped\n")
    assert sorted(p.name for p in lab.path.iterdir()) == before


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


@pytest.mark.parametrize("words, code, text", [
    (["speed"], 64, "kernels, comm or train"),
    (["comm", "train"], 64, "one word too many"),
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
