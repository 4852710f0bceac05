"""Property: at every stage of ZeRO a grid computes what one rank computes, in every parallel form;
whether transfers overlap changes no bit, and stages 2 and 3 give the same bits; memory falls as
promised; and a run goes on at another stage on another grid."""
import re

import numpy as np
import pytest
from test_grids import check_gradients, check_rows, gradients

MPI = {"TRIREME_NO_SHARED": "1", "TRIREME_SYNCHRONOUS": "1", "TRIREME_CHUNK_LIMIT": "1000"}
NODES = {"TRIREME_NODE_RANKS": "2", "TRIREME_SYNCHRONOUS": "1"}

# name: (ranks, model kind, parallel settings, model settings, environment)
CASES = {
    "dp2": (2, "dense", {}, {}, {}),
    "dp4, tied": (4, "moe", {}, dict(tie_word_embeddings=True), NODES),
    "dp2 x ep2": (4, "moe", dict(expert=2, recompute="full"), {}, {}),
    "cp2 x dp2": (4, "moe", dict(context=2), {}, MPI),
    "tp2 x dp2": (4, "moe", dict(tensor=2, recompute="selective"), {}, {}),
    "pp2 x dp2 interleaved": (4, "moe", dict(pipeline=2, schedule="interleaved"), {}, NODES),
    "pp2 x dp2 zb_h1, tied": (4, "dense", dict(pipeline=2, schedule="zb_h1"),
                              dict(tie_word_embeddings=True, num_hidden_layers=5), {}),
    "pp2 x dp2 zb_v, tied": (4, "moe", dict(pipeline=2, schedule="zb_v"),
                             dict(tie_word_embeddings=True), MPI),
    "pp2 x dp2 dualpipe_v": (4, "moe", dict(pipeline=2, schedule="dualpipe_v", expert=2), {}, {}),
    "dp2 dualpipe_v": (2, "moe", dict(schedule="dualpipe_v"), dict(num_hidden_layers=6), MPI),
}


def train(lab, name, kind, ranks, model, parallel, env=None, **more):
    """Two steps of two micro-batches or more a rank, in buckets that cut layers."""
    more = dict(dict(training=dict(steps=2), checkpoint=dict(every=1)), **more)
    lab.train(lab.config(name, kind, model=model, parallel=dict(bucket_elems=1000, **parallel),
                         **more), ranks=ranks, env=env)
    return lab.rows(name)


def same(lab, a, b, step=2):
    assert lab.rows(a) == lab.rows(b)
    for group in ("model", "optimizer/exp_avg"):
        x, y = lab.tensors(a, step, group), lab.tensors(b, step, group)
        assert [k for k in x if not np.array_equal(x[k], y[k])] == []


@pytest.mark.parametrize("case", CASES)
def test_every_stage_equals_one_rank(lab, case):
    ranks, kind, parallel, model, env = CASES[case]
    want = train(lab, "one", kind, 1, model, {})
    for name, zero, overlap in [("1", 1, True), ("1-waits", 1, False), ("2", 2, True),
                                ("3", 3, True), ("3-waits", 3, False)]:
        got = train(lab, name, kind, ranks, model, dict(parallel, zero=zero, overlap=overlap), env)
        check_rows(got[:1], want[:1], loss=2e-6, norm=5e-6, aux=2e-6)
        worst = check_gradients(gradients(lab, name, 1), gradients(lab, "one", 1))
        print(f"{case} zero {name}: worst gradient {worst[0]:.1e} {worst[1]}")
    same(lab, "1", "1-waits")
    same(lab, "2", "3")
    same(lab, "3", "3-waits")


def test_one_micro_batch_gives_the_same_bits(lab):
    """Then the sums are the same at every stage."""
    more = dict(training=dict(steps=2, global_batch_size=4), run=dict(dtype="bfloat16"))
    for zero in (1, 2, 3):
        train(lab, f"{zero}", "moe", 4, {}, dict(zero=zero, expert=2), **more)
    same(lab, "1", "2")
    same(lab, "1", "3")


def test_a_run_goes_on_at_another_stage(lab):
    more = dict(optimizer=dict(schedule="constant"), checkpoint=dict(every=2))
    model = dict(tie_word_embeddings=True)
    train(lab, "one", "moe", 1, model, {}, training=dict(steps=6), **more)
    for steps, ranks, parallel in [(2, 4, dict(zero=3, expert=2)), (4, 2, dict(zero=1, pipeline=2)),
                                   (6, 4, dict(zero=2, pipeline=2, schedule="zb_v"))]:
        train(lab, "many", "moe", ranks, model, parallel, training=dict(steps=steps), **more)
    check_rows(lab.rows("many"), lab.rows("one"), loss=5e-6, norm=5e-6, aux=5e-6)
    assert lab.run("generate", "--checkpoint", lab.checkpoint_path("many", 6), "--prompt", "the",
                   "--tokens", 3).stdout.startswith("the")


LARGE = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=24, num_attention_heads=4,
             num_key_value_heads=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_falls(lab, dtype):
    """Weights, gradients and optimizer: 1/dp of what one rank holds, and at most a tenth more."""
    def memory(zero, ranks):
        config = lab.config("plan", model=LARGE, run=dict(dtype=dtype), parallel=dict(zero=zero))
        said = lab.run("train", config, "--dry-run", ranks=ranks).stdout
        return float(re.search(r"memory +([\d.]+) MiB", said)[1])
    whole = memory(1, 1)
    one, two, three = (memory(zero, 4) for zero in (1, 2, 3))
    assert whole > one > two > three
    print(f"{dtype}: {whole} MiB, on 4 ranks {one}, {two}, {three}")
    assert three <= whole * (1 / 4 + 0.1)
