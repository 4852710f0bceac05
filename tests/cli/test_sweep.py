"""Property: the sweep draws the same configs for the same seed, reaches every value of every axis,
and its comparison fails when the grid trains another model than one rank does."""
import random

import pytest
from sweep import AXES, MOST_RANKS, compare, describe, draw, drawn_config, ranks_of, sections


def test_a_config_depends_on_seed_and_number_alone():
    one = [drawn_config(5, i, 0) for i in range(20)]
    assert one == [drawn_config(5, i, 0) for i in range(20)]
    assert len({describe(d) for d in one}) > 15
    assert drawn_config(5, 3, 0) != drawn_config(6, 3, 0)
    assert drawn_config(5, 3, 0) != drawn_config(5, 3, 1)


def test_every_value_is_drawn():
    rng = random.Random(1)
    drawn = [draw(rng) for _ in range(6000)]
    for names, choices in AXES:
        seen = {tuple(d[name] for name in names.split()) for d in drawn}
        possible = set()
        for d in drawn:
            for value in choices(d) if callable(choices) else choices:
                possible.add(value if isinstance(value, tuple) else (value,))
        assert seen == possible, names
    for d in drawn:
        assert 2 <= ranks_of(d) <= MOST_RANKS
        rows = d["training.micro_batch_size"] * d["data"] * d["micro_batches"]
        assert sections(d)["training"]["global_batch_size"] == rows


SMALL = {"parallel.pipeline": 1, "data": 2, "parallel.context": 1, "parallel.tensor": 1,
         "micro_batches": 1, "model.num_hidden_layers": 2, "model.num_experts": 4,
         "model.router_aux_loss_coef": 0.01}


@pytest.mark.parametrize("change, where", [
    ("optimizer.beta1=0.91", r"\.weight"),
    ("optimizer.learning_rate=3.003e-4", r"step \d+ (loss|grad_norm)"),
    ("model.router_aux_loss_coef=0.0101", "step 1 (grad_norm|aux_loss)"),
    ("run.seed=2", "step 1 loss"),
])
def test_a_difference_is_found(lab, change, where):
    with pytest.raises(AssertionError, match=where):
        print(compare(lab, draw(random.Random(1), SMALL), [change]))
