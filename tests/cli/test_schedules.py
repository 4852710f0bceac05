"""Property: every pipeline schedule computes what one rank computes, whatever the numbers of
stages, layers and micro-batches, with every recomputation and beside every other parallel form; and
a run goes on under another schedule. Every send waits for its receive here."""
import numpy as np
import pytest
from compare import check_case, check_rows, relative

SYNCHRONOUS = {"TRIREME_SYNCHRONOUS": "1"}

# name: (ranks, model kind, layers, micro-batches, parallel settings, model settings)
CASES = {
    "interleaved, alone": (1, "moe", 5, 3, dict(schedule="interleaved", virtual_stages=3), {}),
    "interleaved pp2 v3": (2, "dense", 7, 8,
                           dict(schedule="interleaved", pipeline=2, virtual_stages=3), {}),
    "interleaved pp4, 3 of 4": (4, "moe", 9, 3, dict(schedule="interleaved", pipeline=4), {}),
    "interleaved pp2 x cp2": (4, "moe", 4, 5, dict(schedule="interleaved", pipeline=2, context=2),
                              dict(tie_word_embeddings=True)),
    "zb_h1 pp4": (4, "moe", 6, 8, dict(schedule="zb_h1", pipeline=4, recompute="selective"),
                  dict(tie_word_embeddings=True)),
    "zb_h1 pp3, 2 of 3": (3, "dense", 4, 2, dict(schedule="zb_h1", pipeline=3), {}),
    "zb_h1 pp2 x dp2, ep2": (4, "moe", 4, 4, dict(schedule="zb_h1", pipeline=2, expert=2), {}),
    "zb_v, alone": (1, "dense", 3, 4, dict(schedule="zb_v"), dict(tie_word_embeddings=True)),
    "zb_v pp4, 3 of 4": (4, "moe", 9, 3, dict(schedule="zb_v", pipeline=4),
                         dict(tie_word_embeddings=True)),
    "zb_v pp2 x cp2, ep2": (4, "moe", 5, 6, dict(schedule="zb_v", pipeline=2, context=2, expert=2),
                            {}),
    "zb_v pp2 x tp2": (4, "moe", 4, 4, dict(schedule="zb_v", pipeline=2, tensor=2), {}),
    "dualpipe_v pp2": (2, "dense", 5, 8, dict(schedule="dualpipe_v", pipeline=2),
                       dict(tie_word_embeddings=True)),
    "dualpipe_v pp4, 3 of 4": (4, "moe", 8, 3, dict(schedule="dualpipe_v", pipeline=4), {}),
    "dualpipe_v pp4, 9 of 4": (4, "moe", 9, 9, dict(schedule="dualpipe_v", pipeline=4), {}),
    "dualpipe_v pp2 x dp2, ep2": (4, "moe", 4, 6, dict(schedule="dualpipe_v", pipeline=2, expert=2,
                                                       recompute="full"), {}),
    "dualpipe_v pp2 x tp2, capacity": (4, "moe", 4, 4,
                                       dict(schedule="dualpipe_v", pipeline=2, tensor=2),
                                       dict(expert_capacity_factor=0.6)),
}


def settings(layers, m, ranks, parallel, model):
    data = ranks // np.prod([parallel.get(k, 1) for k in ("pipeline", "context", "tensor")])
    return dict(model=dict(model, num_hidden_layers=layers), checkpoint=dict(every=1),
                training=dict(steps=2, global_batch_size=int(m * data)))


@pytest.mark.parametrize("case", CASES)
def test_schedule_equals_one_rank(lab, case):
    ranks, kind, layers, m, parallel, model = CASES[case]
    more = settings(layers, m, ranks, parallel, model)
    lab.train(lab.config("one", kind, **more))
    lab.train(lab.config("many", kind, parallel=parallel, **more), ranks=ranks, env=SYNCHRONOUS)
    check_case(lab, case)


def same(lab, a, b, step):
    assert lab.rows(a) == lab.rows(b)
    x, y = lab.tensors(a, step), lab.tensors(b, step)
    assert [k for k in x if not np.array_equal(x[k], y[k])] == []


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_weight_gradients_may_wait(lab, kind):
    """Computed late, they are the same to the bit: nothing they read has changed meanwhile."""
    for schedule in ("1f1b", "zb_h1"):
        config = lab.config(schedule, kind, parallel=dict(pipeline=2, schedule=schedule),
                            training=dict(steps=5))
        lab.train(config, ranks=2)
    same(lab, "1f1b", "zb_h1", 5)


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v"])
def test_recompute_changes_nothing(lab, schedule):
    grid = dict(pipeline=2, expert=2, schedule=schedule)
    for recompute in ("none", "selective", "full"):
        lab.train(lab.config(recompute, "moe", parallel=dict(grid, recompute=recompute),
                             training=dict(steps=5, global_batch_size=16)), ranks=4)
    same(lab, "none", "selective", 5)
    same(lab, "none", "full", 5)


def test_a_run_goes_on_under_another_schedule(lab):
    more = dict(model=dict(num_hidden_layers=9, tie_word_embeddings=True),
                optimizer=dict(schedule="constant"), checkpoint=dict(every=1))
    lab.train(lab.config("one", **more))
    for step, schedule, stages, ranks in [(3, "zb_v", 2, 2), (5, "interleaved", 3, 3),
                                          (7, "dualpipe_v", 2, 3), (8, "zb_h1", 1, 2),
                                          (10, "interleaved", 2, 2)]:
        parallel = dict(pipeline=ranks, schedule=schedule, virtual_stages=stages)
        lab.train(lab.config("many", parallel=parallel, **more), f"training.steps={step}",
                  ranks=ranks)
    got, want = lab.rows("many"), lab.rows("one")
    assert [row["step"] for row in got] == list(range(1, 11))
    check_rows(got, want, loss=5e-6, norm=5e-6, aux=5e-6)
    loss = [row["validation_loss"] for row in (got[-1], want[-1])]
    assert relative(*loss) < 5e-6
    said = lab.run("generate", "--checkpoint", lab.checkpoint_path("many", 10), "--prompt", "the",
                   "--tokens", 3).stdout
    assert said.startswith("the")
