"""Property: `trireme verify` says of a right grid that it is right, finds a gradient that is wrong
on one rank, refuses what `train` refuses in the same words, and leaves no file behind."""
import os
import re

import pytest

# mpirun waits twice this many seconds for the other ranks once one has ended with an error.
os.environ["OMPI_MCA_odls_base_sigkill_timeout"] = "1"

GRIDS = {  # name: (kind, ranks, parallel settings, more sections)
    "one rank": ("moe", 1, {}, {}),
    "dense pp2 x cp2 zb_v": ("dense", 4, dict(pipeline=2, context=2, schedule="zb_v"), dict(
        model=dict(tie_word_embeddings=True, sliding_window=9))),
    "uneven pp3 gpipe": ("moe", 3, dict(pipeline=3, schedule="gpipe", recompute="full"), dict(
        model=dict(num_hidden_layers=10, decoder_sparse_step=2))),
    "pp2 x dp2 x cp2, ep4": ("moe", 8, dict(pipeline=2, context=2, expert=4), dict(
        model=dict(expert_capacity_factor=0.7, router_aux_loss_scope="sequence"))),
    "ep4 of 10, capacity, bfloat16 on the way": (
        "moe", 4, dict(expert=4, expert_exchange_dtype="bfloat16"),
        dict(model=dict(num_experts=10, expert_capacity_factor=0.7))),
    "dp2 x cp2 x tp2, ep2": ("moe", 8, dict(context=2, expert=2, tensor=2), dict(
        model=dict(expert_capacity_factor=0.7, expert_drop_policy="probability"))),
    "cp4 of heads 2, documents": ("moe", 4, dict(context=4, context_heads=2, expert=2), dict(
        data=dict(document_mask=True, reset_position_ids=True))),
    "aux per global batch": ("moe", 4, dict(pipeline=2, expert=2, schedule="gpipe"), dict(
        model=dict(router_aux_loss_scope="global_batch"), data=dict(pad_id=0))),
}


def verify(lab, config, *words, **more):
    """The finished process; whatever it does, it fits a terminal and writes no file."""
    before = sorted(p.name for p in lab.path.iterdir())
    done = lab.run("verify", config, *words, **more)
    assert sorted(p.name for p in lab.path.iterdir()) == before
    assert max(map(len, done.stdout.splitlines()), default=0) <= 100, done.stdout
    return done


def check_table(text):
    """Both steps' sums and parameters are there, and all within their limits."""
    for name in ("loss", "aux loss", "z loss", "gradient norm"):
        rows = re.findall(rf"^  {name} +\S+ +\S+ +(\S+) +(\S+)$", text, re.M)
        assert len(rows) == 2 and all(float(d) <= float(limit) for d, limit in rows), text
    limits = re.search(r"^  limit +(\S+) +(\S+) +(\S+) +(\S+)$", text, re.M)
    rows = re.findall(r"^  (model\S+|lm_head\S+) +(\S+) +(\S+) +(\S+) +(\S+)$", text, re.M)
    for _, *values in rows:
        assert all(float(v) <= float(limit) for v, limit in zip(values, limits.groups())), text
    return [name for name, *_ in rows]


@pytest.mark.parametrize("grid", GRIDS)
def test_right_grids(lab, grid):
    kind, ranks, parallel, more = GRIDS[grid]
    config = lab.config("right", kind, parallel=parallel, **more)
    text = verify(lab, config, ranks=ranks).stdout
    assert "a twin of right.yaml" in text and "verified" in text
    assert len(check_table(text)) == 20


def test_the_config_itself(lab):
    """--full reads the data and keeps the type; without files it draws samples."""
    config = lab.config("full", "moe", run=dict(dtype="bfloat16"),
                        parallel=dict(context=2, expert=2))
    text = verify(lab, config, "--full", "--all", ranks=4).stdout
    assert "bfloat16" in text and "drawn" not in text and "verified" in text
    names = check_table(text)
    assert len(names) == len(set(names)) and "lm_head.weight" in names
    done = verify(lab, config, "--full", "--set", "data.train=[none.txt]", ranks=2)
    assert "none.txt" in done.stderr and "drawn" in done.stdout and "verified" in done.stdout


def test_a_large_config_becomes_small(lab):
    """Hours of training, and no data anywhere: its twin takes a moment."""
    config = lab.config(
        "large", "moe", run=dict(dtype="bfloat16"),
        data=dict(train=["none.bin"], sequence_length=4096, document_mask=True,
                  end_of_document=102399),
        model=dict(vocab_size=102400, hidden_size=5120, num_hidden_layers=60,
                   num_attention_heads=128, num_key_value_heads=8, head_dim=192, num_experts=160,
                   num_experts_per_tok=6, moe_intermediate_size=1536,
                   shared_expert_intermediate_size=3072, intermediate_size=12288,
                   sliding_window=1000),
        training=dict(global_batch_size=9216, micro_batch_size=4),
        parallel=dict(pipeline=4, expert=2, recompute="full"))
    text = verify(lab, config, ranks=8, timeout=60).stdout
    check_table(text)
    assert float(re.search(r"model +(\S+) M parameters", text)[1]) < 4, text
    assert "8 layers, 7 of them MoE" in text
    assert "32 micro-batches of 2 a data rank" in text and "float32" in text


@pytest.mark.parametrize("name", ["model.layers.2.mlp.experts.up_proj.weight", "model.norm.weight",
                                  "model.embed_tokens.weight"])
def test_a_wrong_gradient_is_found(lab, name):
    config = lab.config("wrong", "moe", model=dict(tie_word_embeddings=True),
                        parallel=dict(pipeline=2, expert=2))
    done = verify(lab, config, ranks=4, code=70, env=dict(TRIREME_VERIFY_BREAK=name))
    assert "error: this grid does not compute what one rank computes" in done.stderr
    assert name in done.stderr and "verified" not in done.stdout
    first = re.search(r"worst first.*\n  (\S+) ", done.stdout)
    assert first[1] == name, done.stdout


@pytest.mark.parametrize("parallel", [
    dict(pipeline=2, expert=2), dict(tensor=2, zero=2), dict(expert=4, zero=3),
    dict(context=4, context_heads=2, overlap=False)])
def test_a_wrong_update_is_found(lab, parallel):
    """Of one rank's shard: by the weights' columns alone, for the gradients are right."""
    config = lab.config("wrong", "moe", parallel=parallel)
    done = verify(lab, config, ranks=4, code=70, env=dict(TRIREME_VERIFY_BREAK="update"))
    assert "error: this grid does not compute what one rank computes" in done.stderr
    assert re.search(r"step [12]: the new weight of \S+ is off by", done.stderr), done.stderr
    rows = re.findall(r"^  (?:model|lm_head)\S+ +(.{10}) (.{10}) (.{10}) (.{10})$", done.stdout,
                      re.M)
    over = [any("!" in row[column] for row in rows) for column in range(4)]
    assert len(rows) == 20 and over == [False, True, False, True], done.stdout


def test_a_break_that_names_nothing(lab):
    done = verify(lab, lab.config("wrong", "dense"), code=64, env=dict(TRIREME_VERIFY_BREAK="x"))
    assert "TRIREME_VERIFY_BREAK is x" in done.stderr


@pytest.mark.parametrize("ranks, sets", [
    (3, []),
    (2, ["parallel.pipeline=5"]),
    (4, ["parallel.context=4", "data.sequence_length=20"]),
])
def test_refusals_are_those_of_training(lab, ranks, sets):
    config = lab.config("refused", "dense")
    words = [w for s in sets for w in ("--set", s)]
    train = lab.run("train", config, *words, ranks=ranks, code=64)
    verified = verify(lab, config, *words, ranks=ranks, code=64)
    said = [next(line for line in done.stderr.splitlines() if line.startswith("error: "))
            for done in (train, verified)]
    assert said[0] == said[1]
    assert verify(lab, "none.yaml", code=66).stderr.count("none.yaml") == 1
