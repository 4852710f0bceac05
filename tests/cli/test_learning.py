"""Property: learning is real. On text from a source whose entropy is known (a random order-2 Markov
chain) the loss on held-out text comes within 0.02 nats of it, dense and with experts."""
import numpy as np
import pytest

LETTERS = np.frombuffer(b"abcd", np.uint8)
MARGIN = 0.02


def chain(seed):
    """next[a, b, c]: how likely c is after a and b. Rows differ, so that both letters count."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(len(LETTERS), 0.4), size=(len(LETTERS), len(LETTERS)))


def entropies(next):
    """Nats a letter where the last letter alone is known, and where the last two are (which is the
    chain's entropy rate), under its own distribution of pairs."""
    n = len(LETTERS)
    pair = np.full((n, n), 1 / n**2)
    for _ in range(10000):
        pair = np.einsum("ab,abc->bc", pair, next)
    triple = pair[:, :, None] * next
    assert np.allclose(pair, triple.sum(0), atol=1e-13)
    after_one = triple.sum(0) / triple.sum((0, 2))[:, None]
    return [float(-(triple * np.log(p + 1e-300)).sum()) for p in (after_one[None], next)]


def sample(next, size, seed):
    rng = np.random.default_rng(seed)
    steps = np.cumsum(next, axis=2)
    u = rng.random(size)
    out = np.zeros(size, np.int64)
    a = b = 0
    for i in range(size):
        c = min(int(np.searchsorted(steps[a, b], u[i], side="right")), len(LETTERS) - 1)
        out[i], a, b = c, b, c
    return LETTERS[out].tobytes()


MODELS = {
    "dense": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                  num_key_value_heads=2, intermediate_size=64),
    "moe": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                intermediate_size=32, num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=32, shared_expert_intermediate_size=0,
                first_k_dense_replace=0, router_aux_loss_coef=0.01),
}


@pytest.mark.parametrize("kind,ranks", [("dense", 1), ("moe", 2)])
def test_entropy_is_reached(lab, kind, ranks):
    next = chain(seed=7)
    (lab.path / "text.txt").write_bytes(sample(next, 400_000, seed=1))
    (lab.path / "held-out.txt").write_bytes(sample(next, 64_001, seed=2))
    config = lab.config(
        "run", kind, model=MODELS[kind], parallel=dict(expert=2) if kind == "moe" else {},
        run=dict(peak_flops=1e11), data=dict(sequence_length=128),
        training=dict(steps=1000, global_batch_size=8, micro_batch_size=4, evaluate_batches=62),
        optimizer=dict(learning_rate=5e-3, min_learning_rate=1e-4, warmup_steps=20),
        checkpoint=dict(every=0))
    lab.train(config, ranks=ranks)
    rows = lab.rows("run")
    after_one, entropy = entropies(next)
    first, loss = rows[0]["loss"], rows[-1]["validation_loss"]
    print(f"{kind}: {first:.4f} at first, {loss:.4f} on held-out text, entropy {entropy:.4f} "
          f"({after_one:.4f} for one who sees one letter)")
    assert after_one > entropy + 5 * MARGIN
    assert abs(loss - entropy) < MARGIN
