"""Property: every grid computes what one rank computes, within the limits that the order of float32
sums leaves: (a) one step from the same weights, (b) ten steps dense, (c) ten steps with experts
until the first token is routed differently, and close after it."""
import h5py
import numpy as np
import pytest
from compare import STEPS, check_gradients, check_rows, first_flip, gradients
from jobs import checksum

GRIDS = {  # name: (ranks, parallel settings, global settings)
    "pp2": (2, dict(pipeline=2)),
    "pp3": (3, dict(pipeline=3)),  # 4 layers: 2, 1, 1
    "dp2": (2, {}),
    "dp4": (4, {}),
    "cp2": (2, dict(context=2)),
    "cp3": (3, dict(context=3)),
    "cp4": (4, dict(context=4)),
    "pp2 x cp2": (4, dict(pipeline=2, context=2)),
    "pp2 gpipe": (2, dict(pipeline=2, schedule="gpipe")),
    "pp2 interleaved": (2, dict(pipeline=2, schedule="interleaved")),
    "pp2 x dp2 x cp2": (8, dict(pipeline=2, context=2)),
    "tp2": (2, dict(tensor=2)),
    "tp4": (4, dict(tensor=4)),
    "pp2 x tp2": (4, dict(pipeline=2, tensor=2)),
    "cp2 x tp2": (4, dict(context=2, tensor=2)),
    "dp2 x tp2": (4, dict(tensor=2)),
}
BY_NODE = dict(expert_exchange="hierarchical")
MOE_GRIDS = {  # also: experts, and how many ranks are to pass for a node
    "ep2": (2, dict(expert=2)),
    "ep4": (4, dict(expert=4)),
    "cp3, ep3": (3, dict(context=3, expert=3), 6),
    "cp4, ep4 of 10": (4, dict(context=4, expert=4), 10),
    "ep4 of 10 by node": (4, dict(expert=4, **BY_NODE), 10, 2),
    "dp4 x cp2, ep8 of 10 by node": (8, dict(context=2, expert=8, **BY_NODE), 10, 2),
    "pp2 x cp2 x tp2, ep2 by node": (8, dict(pipeline=2, context=2, tensor=2, expert=2, **BY_NODE),
                                     6, 1),
    "dp2 x cp2 x tp2, ep4 by node": (8, dict(context=2, tensor=2, expert=4, **BY_NODE), 10, 4),
    "pp2 x dp2 x ep2": (4, dict(pipeline=2, expert=2)),
    "dp2 x cp2, ep4": (4, dict(context=2, expert=4)),
    "pp2 x dp2 x cp2, ep2": (8, dict(pipeline=2, context=2, expert=2)),
    "pp2 x dp2 x cp2, ep4": (8, dict(pipeline=2, context=2, expert=4)),
    "dp2 x tp2, ep2": (4, dict(expert=2, tensor=2)),
    "pp2 x dp2 x tp2, ep2": (8, dict(pipeline=2, expert=2, tensor=2)),
    "cp2 x tp2, ep2": (4, dict(context=2, expert=2, tensor=2)),
}
CASES = [(kind, grid) for kind in ("dense", "moe") for grid in GRIDS] + \
        [("moe", grid) for grid in MOE_GRIDS]


def laid_out(grid):
    """(ranks, parallel settings, experts, environment) of a grid."""
    given = {**GRIDS, **MOE_GRIDS}[grid]
    ranks, parallel, experts, node = given + (4, None)[len(given) - 2:]
    return ranks, parallel, experts, {"TRIREME_NODE_RANKS": str(node)} if node else {}


@pytest.fixture(scope="module")
def one_rank(shared_lab):
    """Runs of one rank, made when first asked for."""
    made = {}

    def get(kind, n_experts, micro_batch_size):
        name = f"one-{kind}-{n_experts}-{micro_batch_size}"
        if name not in made:
            model = dict(num_experts=n_experts) if kind == "moe" else {}
            config = shared_lab.config(name, kind, model=model,
                                       training=dict(micro_batch_size=micro_batch_size),
                                       checkpoint=dict(every=1, keep=0),
                                       log=dict(routing=kind == "moe"))
            shared_lab.train(config)
            made[name] = shared_lab.rows(name)
        return name, made[name]

    return get


@pytest.mark.parametrize("kind,grid", CASES)
def test_grid_equals_one_rank(shared_lab, one_rank, kind, grid):
    lab = shared_lab
    ranks, parallel, experts, env = laid_out(grid)
    one, want = one_rank(kind, experts, 1)
    name = f"{kind}-{grid}".replace(" ", "")
    model = dict(num_experts=experts) if kind == "moe" else {}
    config = lab.config(name, kind, model=model, log=dict(routing=kind == "moe"),
                        parallel=parallel, checkpoint=dict(every=1, keep=0))
    lab.train(config, ranks=ranks, env=env)
    got = lab.rows(name)

    check_rows(got[:1], want[:1], loss=2e-6, norm=5e-6, aux=2e-6)
    step1 = check_gradients(gradients(lab, name, 1), gradients(lab, one, 1))

    flip = first_flip(lab, one, name, ranks) if kind == "moe" else STEPS + 1
    worst = check_rows(got[:flip - 1], want[:flip - 1], loss=5e-6, norm=5e-6, aux=5e-6)
    check_rows(got[flip - 1:], want[flip - 1:], loss=1e-4, norm=1e-3, aux=2e-3)

    # the same from one rank's checkpoint of step 5
    lab.train(config, "run.name=again", "training.steps=6", ranks=ranks, env=env,
              resume=lab.checkpoint_path(one, 5))
    again = lab.rows("again")
    check_rows(again, want[5:6], loss=2e-6, norm=5e-6, aux=2e-6)
    before = lab.tensors(one, 5, "optimizer/exp_avg")
    step6 = check_gradients(gradients(lab, "again", 6, before), gradients(lab, one, 6, before))
    print(f"{kind} {grid}: step 1 {step1[0]:.1e}, step 6 {step6[0]:.1e}, 10 steps "
          f"loss {worst['loss']:.1e} norm {worst['grad_norm']:.1e}")


VARIANTS = {  # what changes the mathematics must be the same on every grid too
    "capacity by position": dict(expert_capacity_factor=0.6),
    "capacity by probability": dict(expert_capacity_factor=0.6, expert_drop_policy="probability"),
    "aux per sequence": dict(router_aux_loss_scope="sequence"),
    "aux per global batch": dict(router_aux_loss_scope="global_batch"),
    "groups of experts": dict(num_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2),
    "sigmoids": dict(scoring_func="sigmoid", router_aux_loss_coef=0.1),
    "sigmoids not renormalised, aux per sequence": dict(
        scoring_func="sigmoid", norm_topk_prob=False, router_aux_loss_scope="sequence"),
    "tied embedding": dict(tie_word_embeddings=True),
    "window": dict(sliding_window=9),
    "LayerNorm": dict(norm_type="layer_norm"),
    "GeGLU": dict(hidden_act="gelu_pytorch_tanh"),
    "pads": dict(),
}


# widths that 3 does not divide; its ranks' rows begin and end inside sequences
ODD = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8, intermediate_size=47,
           shared_expert_intermediate_size=17, vocab_size=259)
UNEVEN = dict(num_experts=10, num_experts_per_tok=3)
VARIANT_GRIDS = {
    "pp2 x dp2 x cp2, ep2": (8, {}, dict(pipeline=2, context=2, expert=2)),
    "cp2 x tp3, ep2": (6, ODD, dict(context=2, expert=2, tensor=3)),
    "dp2 x cp2, ep4 of 10": (4, UNEVEN, dict(context=2, expert=4)),
}


def check_one_step(lab, ranks, parallel, **more):
    """One step on one rank and on a grid; the worst gradient."""
    more = dict(more, training=dict(steps=1, micro_batch_size=2), checkpoint=dict(every=1))
    lab.train(lab.config("one", "moe", parallel=dict(schedule="gpipe"), **more))
    lab.train(lab.config("many", "moe", parallel=dict(schedule="gpipe", **parallel), **more),
              ranks=ranks)
    check_rows(lab.rows("many"), lab.rows("one"), loss=2e-6, norm=5e-6, aux=2e-6)
    return check_gradients(gradients(lab, "many", 1), gradients(lab, "one", 1))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("grid", VARIANT_GRIDS)
def test_variant_equals_one_rank(lab, grid, variant):
    ranks, model, parallel = VARIANT_GRIDS[grid]
    worst = check_one_step(lab, ranks, parallel, model=dict(model, **VARIANTS[variant]),
                           data=dict(pad_id=32 if variant == "pads" else -1))
    print(f"{variant}: worst gradient {worst[0]:.1e} {worst[1]}")


TENSOR = {  # what a tensor group may make of a model's widths: name: (ranks, parallel, model)
    "a head each": (6, dict(tensor=6), dict(ODD, num_key_value_heads=6)),
    "one key head": (3, dict(tensor=3), dict(ODD, num_key_value_heads=1)),
    "two ranks a key head": (6, dict(tensor=6), ODD),
    "parts without width": (3, dict(tensor=3), dict(ODD, intermediate_size=2,
                                                    shared_expert_intermediate_size=1)),
    "tied, two stages": (6, dict(pipeline=2, tensor=3), dict(ODD, tie_word_embeddings=True)),
    "tied, one stage": (3, dict(tensor=3), dict(ODD, tie_word_embeddings=True)),
    "head copies in two data ranks": (8, dict(tensor=4), {}),
}


@pytest.mark.parametrize("case", TENSOR)
def test_tensor_group_equals_one_rank(lab, case):
    ranks, parallel, model = TENSOR[case]
    worst = check_one_step(lab, ranks, parallel, model=model)
    print(f"{case}: worst gradient {worst[0]:.1e} {worst[1]}")


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_bfloat16_is_near(lab, kind):
    """Sums over tensor ranks are float32: a grid differs from one rank by bfloat16's rounding."""
    for name, ranks, parallel in (("one", 1, {}), ("many", 4, dict(tensor=2, pipeline=2))):
        lab.train(lab.config(name, kind, run=dict(name=name, dtype="bfloat16"), parallel=parallel),
                  ranks=ranks)
    check_rows(lab.rows("many"), lab.rows("one"), loss=2e-3, norm=2e-2, aux=2e-2)


def test_bfloat16_on_the_way_is_near(lab):
    """Rows that travel as bfloat16 change a float32 run, by their rounding."""
    for name, wire in (("same", "same"), ("wire", "bfloat16")):
        lab.train(lab.config(name, "moe", parallel=dict(expert=4, expert_exchange_dtype=wire)),
                  ranks=4)
    check_rows(lab.rows("wire"), lab.rows("same"), loss=1e-4, norm=1e-3, aux=2e-3)
    assert lab.rows("wire")[0]["loss"] != lab.rows("same")[0]["loss"]


@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_fewer_micro_batches_than_stages(lab, m):
    more = dict(training=dict(steps=2, global_batch_size=m), checkpoint=dict(every=1))
    lab.train(lab.config("one", **more))
    lab.train(lab.config("many", parallel=dict(pipeline=4), **more), ranks=4)
    check_rows(lab.rows("many"), lab.rows("one"), loss=2e-6, norm=5e-6, aux=2e-6)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("grid", [dict(), dict(pipeline=2, context=2, expert=2), dict(tensor=4)])
def test_recompute_changes_nothing(lab, recompute, grid):
    ranks = 4 if grid else 1
    lab.train(lab.config("none", "moe", parallel=dict(grid)), ranks=ranks)
    lab.train(lab.config("some", "moe", parallel=dict(grid, recompute=recompute)), ranks=ranks)
    assert lab.rows("none") == lab.rows("some")
    a, b = lab.tensors("none", 10), lab.tensors("some", 10)
    assert all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("grid", [dict(pipeline=2, context=2, expert=2),
                                  dict(pipeline=2, tensor=2, expert=2),
                                  dict(expert=8, **BY_NODE)])
def test_synchronous_sends_and_small_messages(lab, grid):
    """Nothing deadlocks or changes when every send waits for its receive, or travels in pieces."""
    node = {"TRIREME_NODE_RANKS": "4"} if "expert_exchange" in grid else {}
    for name, env in (("plain", {}), ("synchronous", {"TRIREME_SYNCHRONOUS": "1"}),
                      ("pieces", {"TRIREME_CHUNK_LIMIT": "1000"})):
        lab.train(lab.config(name, "moe", parallel=grid, training=dict(steps=3),
                             model=dict(num_experts=10)), ranks=8, env={**node, **env})
    assert lab.rows("plain") == lab.rows("synchronous") == lab.rows("pieces")


def test_without_shared_memory(lab):
    """Tensor ranks that cannot map each other's memory compute the same through MPI."""
    parallel = dict(tensor=4)
    for name, env in (("plain", {}), ("mpi", {"TRIREME_NO_SHARED": "1"}),
                      ("two nodes", {"TRIREME_NODE_RANKS": "2"})):
        lab.train(lab.config(name, "moe", parallel=parallel, training=dict(steps=3)), ranks=4,
                  env=env)
    check_rows(lab.rows("mpi"), lab.rows("plain"), loss=5e-6, norm=5e-6, aux=5e-6)
    check_rows(lab.rows("two nodes"), lab.rows("plain"), loss=5e-6, norm=5e-6, aux=5e-6)


def test_all_tokens_to_one_expert(lab):
    """A router that sends every token to expert 0 starves the other ranks, and nobody hangs."""
    model = dict(num_experts_per_tok=1, router_aux_loss_coef=0.0)
    lab.train(lab.config("seed", "moe", model=model, training=dict(steps=1)))
    path = lab.checkpoint_path("seed", 1)
    names = [n for n in lab.tensors("seed", 1) if n.endswith(".mlp.gate.weight")]
    assert names
    one = lab.config("one", "moe", training=dict(steps=2),
                     model=dict(model, init_from=str(lab.path / "zero.h5")))
    # zero rows tie every expert; the lowest index wins every token
    rewrite = lab.path / "zero.h5"
    rewrite.write_bytes(path.read_bytes())
    with h5py.File(rewrite, "r+") as f:
        for n in names:
            data = f["model"][n]
            data[...] = 0
            data.attrs["checksum"] = np.uint64(checksum(data[()]))
    lab.train(one)
    lab.train(lab.config("many", "moe", training=dict(steps=2), parallel=dict(expert=4),
                         model=dict(model, init_from=str(rewrite))), ranks=4)
    assert all(load[0] > 0 and sum(load[1:]) == 0 for load in lab.rows("one")[0]["expert_load"])
    check_rows(lab.rows("many")[:1], lab.rows("one")[:1], loss=2e-6, norm=5e-6, aux=2e-6)
