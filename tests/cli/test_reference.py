"""Property: loss, balance losses and every gradient of one step equal those of an independent model
in float64 (gradients by central differences along a random direction of each weight)."""
import json

import numpy as np
import pytest
from conftest import MODELS
from reference import step_loss

S, BATCH = 24, 4
VARIANTS = {
    "dense": ("dense", {}),
    "dense tied": ("dense", dict(tie_word_embeddings=True)),
    "dense windowed, one kv head": ("dense", dict(sliding_window=7, num_key_value_heads=1)),
    "dense wide heads": ("dense", dict(head_dim=10, rope_theta=500.0)),
    "dense, GeGLU": ("dense", dict(hidden_act="gelu_pytorch_tanh")),
    "dense, LayerNorm": ("dense", dict(norm_type="layer_norm", layer_norm_eps=1e-3)),
    "moe": ("moe", {}),
    "moe, LayerNorm": ("moe", dict(norm_type="layer_norm")),
    "moe, GeGLU": ("moe", dict(hidden_act="gelu_pytorch_tanh")),
    "moe of sigmoids": ("moe", dict(scoring_func="sigmoid", router_aux_loss_coef=0.1)),
    "moe of sigmoids, per sequence, not renormalised": ("moe", dict(
        scoring_func="sigmoid", norm_topk_prob=False, router_aux_loss_scope="sequence")),
    "moe of sigmoids in groups, with capacity": ("moe", dict(
        scoring_func="sigmoid", num_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2,
        expert_capacity_factor=0.7, expert_drop_policy="probability")),
    "moe no renormalising": ("moe", dict(norm_topk_prob=False)),
    "moe per sequence": ("moe", dict(router_aux_loss_scope="sequence")),
    "moe capacity by position": ("moe", dict(expert_capacity_factor=0.6)),
    "moe capacity by probability": ("moe", dict(expert_capacity_factor=0.7,
                                                expert_drop_policy="probability")),
    "moe in 2 of 4 groups": ("moe", dict(num_experts=12, num_experts_per_tok=4, n_group=4,
                                         topk_group=2, router_aux_loss_coef=0.1)),
    "moe top 1 of 3, mixed layers": ("moe", dict(num_experts=3, num_experts_per_tok=1,
                                                 first_k_dense_replace=0, mlp_only_layers=[2],
                                                 shared_expert_intermediate_size=0)),
}


DOCUMENTS = {  # name: (kind, model, reset_position_ids)
    "documents": ("dense", {}, False),
    "documents with positions of their own": ("moe", {}, True),
    "documents and a window": ("dense", dict(sliding_window=4), True),
}
PADDED = {"moe with pads": ("moe", {}), "moe with pads and capacity": (
    "moe", dict(expert_capacity_factor=0.5))}
SPACE = 32


def one_step(lab, kind, model, pad, **data):
    """Trains a step that changes nothing; returns weights, gradients, tokens and the log's row."""
    config = lab.config(
        "one", kind, model=model,
        data=dict(sequence_length=S, pad_id=pad, **data),
        training=dict(steps=1, global_batch_size=BATCH, micro_batch_size=2),
        optimizer=dict(learning_rate=1e-30, min_learning_rate=0, warmup_steps=0, clip=0,
                       beta1=0.5), log=dict(samples=True))
    lab.train(config, resume="never")
    ids = json.loads((lab.path / "runs/one/samples.jsonl").read_text())["samples"]
    text = np.frombuffer((lab.path / "text.txt").read_bytes(), np.uint8).astype(int)
    tokens = np.stack([text[i * S:i * S + S + 1] for i in ids])
    weights = {k: v.astype(np.float64) for k, v in lab.tensors("one", 1).items()}
    grads = {k: v.astype(np.float64) / 0.5
             for k, v in lab.tensors("one", 1, "optimizer/exp_avg").items()}
    return weights, grads, tokens, lab.rows("one")[0]


@pytest.mark.parametrize("variant", [*VARIANTS, *PADDED, *DOCUMENTS])
def test_one_step(lab, variant):
    kind, changes, *more = {**VARIANTS, **PADDED, **DOCUMENTS}[variant]
    pad = SPACE if variant in PADDED else -1
    end, reset = (SPACE, more[0]) if more else (None, False)
    data = dict(document_mask=True, end_of_document=end, reset_position_ids=reset) if more else {}
    m = {**MODELS[kind], **changes}
    weights, grads, tokens, row = one_step(lab, kind, changes, pad, **data)
    assert set(weights) == set(grads)
    plan = []
    loss, aux, z = step_loss(weights, m, tokens, 2, plan, pad, end, reset)
    for name, got, want in (("loss", row["loss"], loss), ("aux", row["aux_loss"], aux),
                            ("z", row["z_loss"], z)):
        print(f"{variant}: {name} {got:.9g} against {want:.9g}")
        assert got == pytest.approx(want, rel=2e-6, abs=1e-12)
    rng = np.random.default_rng(0)
    worst = 0.0
    for name in weights:
        direction = rng.standard_normal(weights[name].shape)
        direction *= np.linalg.norm(grads[name]) / np.linalg.norm(direction)
        direction += grads[name]  # along the gradient and a random way at once
        eps = 1e-5 / np.abs(direction).max()
        sides = []
        for sign in (+1, -1):
            moved = {**weights, name: weights[name] + sign * eps * direction}
            sides.append(sum(step_loss(moved, m, tokens, 2, plan, pad, end, reset)))
        want = (sides[0] - sides[1]) / (2 * eps)
        got = (grads[name] * direction).sum()
        error = abs(got - want) / max(abs(want), 1e-12)
        worst = max(worst, error)
        assert error < 2e-5, f"{name}: gradient along a direction {got:.9g}, not {want:.9g}"
    print(f"{variant}: {len(weights)} gradients, worst relative difference {worst:.1e}")
