"""Draws random configs and compares their grid with one rank, within the limits that the order of
float32 sums leaves: (a) one step from the same weights, at the start and from one rank's checkpoint
of step 5 (losses 2e-6, norm 5e-6, each gradient 1e-5); (b) ten steps (5e-6), or with experts those
before a token is routed differently; (c) that one step (loss 1e-4, norm 1e-3, auxiliary loss 2e-3,
score gap 1e-5). After it the two are different trainings, so one rank goes on from the grid's own
checkpoint of that step, and (b) holds again; for (a) another step is taken instead. And `trireme
verify` has to agree.

The learning rate is 3e-4. At ten times that, the program's default, a step of Adam moves a weight
of 0.02 by 15 % of itself, and some trainings magnify rounding more than the limits allow: one rank
is then 5e-5 from itself in ten steps with kernels of another vector width (TRIREME_CPU_LEVEL).

    TRIREME=build/trireme /usr/bin/python3 tests/cli/sweep.py --seed 1 --configs 14
    TRIREME=build/trireme /usr/bin/python3 tests/cli/sweep.py --seed 1 --only 7   one of them

Config i depends on the seed and i alone. Draws that the program refuses are counted, printed, and
drawn again. A new setting is a row of AXES."""
import argparse
import contextlib
import io
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import yaml
from compare import (STEPS, check_gradients, check_rows, differences, first_flip, gradients,
                     relative)
from conftest import Lab

MOST_RANKS = 8
FLIPPED = dict(loss=1e-4, norm=1e-3, aux=2e-3)  # limits of a step with a flip
DRAWS = 60  # refused in a row before the generator counts as broken


def moe(d):
    return d["model.num_experts"] > 0


def stages(d):
    return d["parallel.pipeline"] * d.get("parallel.virtual_stages", 1)


def lengths_fit(d, length):
    context, rows = d["parallel.context"], d["training.micro_batch_size"] * length
    heads = d["parallel.context_heads"]
    halves = 2 if heads % 2 and heads < context else 1
    return length % (halves * context) == 0 and rows // context % d["parallel.tensor"] == 0


def heads_fit(tensor, queries, keys):
    return queries % tensor == 0 and (keys % tensor == 0 or tensor % keys == 0)


def groups(d):
    """(n_group, topk_group) that leave a token enough experts."""
    E, k = d["model.num_experts"], d["model.num_experts_per_tok"]
    return [(g, t) for g in (2, 3, 5) for t in (1, 2) if moe(d) and E % g == 0 and t < g
            and k <= t * E // g]


def grids():
    """(pipeline, data, context, tensor) of 2 to 8 ranks."""
    sizes = 1, 2, 3, 4
    return [(p, d, c, t) for p in sizes for d in sizes for c in sizes for t in sizes
            if 2 <= p * d * c * t <= MOST_RANKS]


# Each row draws one or more settings: (names, choices). Choices are a list, or a function of what
# has been drawn so far, which leaves out what the program would refuse; a value that stands twice
# comes twice as often; None leaves the setting out. "data" and "micro_batches" are no settings:
# ranks and global_batch_size follow from them; "node" is how many ranks are to pass for a node.
AXES = [
    ("parallel.pipeline data parallel.context parallel.tensor", grids()),
    ("node", [0, 0, 2, 3]),
    ("parallel.schedule", lambda d: ["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v", "dualpipe_v"]
     if d["parallel.pipeline"] > 1 else ["1f1b", "gpipe"]),
    ("parallel.virtual_stages",
     lambda d: [2, 3] if d["parallel.schedule"] == "interleaved" else
     [2] if d["parallel.schedule"] in ("zb_v", "dualpipe_v") else [1]),
    ("parallel.recompute", ["none", "selective", "full"]),
    ("parallel.bucket_elems", [512, 4096, 4194304]),
    ("parallel.zero", [1, 2, 3]),
    ("parallel.overlap", [True, False]),
    ("micro_batches", [1, 2, 3, 4, 5, 6]),
    ("training.micro_batch_size", [1, 2, 3]),
    ("data.pad_id", [-1, -1, 32]),
    ("data.document_mask data.end_of_document data.reset_position_ids",
     [(False, -1, False), (False, -1, False), (True, ord(" "), False), (True, ord("u"), False),
      (True, ord("u"), True)]),
    ("model.num_hidden_layers", lambda d: range(stages(d), stages(d) + 6)),
    ("model.hidden_size", [24, 32, 40]),
    ("model.num_attention_heads model.num_key_value_heads",
     lambda d: [(q, k) for q, k in ((4, 2), (4, 4), (6, 2), (4, 1), (12, 4), (6, 3))
                if heads_fit(d["parallel.tensor"], q, k)]),
    ("parallel.context_heads",
     lambda d: [n for n in range(1, d["parallel.context"] + 1) if d["parallel.context"] % n == 0
                and heads_fit(n, *(max(1, d[f"model.num_{heads}_heads"] // d["parallel.tensor"])
                                   for heads in ("attention", "key_value")))]),
    ("data.sequence_length", lambda d: [n for n in (24, 25, 32, 36, 48, 64) if lengths_fit(d, n)]),
    ("model.head_dim", [8, 12, 16]),
    ("model.intermediate_size", [48, 40]),
    ("model.vocab_size", [256, 257, 300]),
    # at 0.1 attention and routers prefer something, at 0.02 so narrow a model is even everywhere
    ("model.initializer_range", [0.1, 0.02]),
    ("model.tie_word_embeddings", [False, True]),
    ("model.sliding_window", [0, 0, 1, 9, 48]),
    ("model.num_experts", [0, 3, 4, 6, 8, 10]),
    ("parallel.expert",
     lambda d: [n for n in (1, 2, 3, 4, 6, 8) if d["data"] * d["parallel.context"] % n == 0
                and n <= d["model.num_experts"]] if moe(d) else [1]),
    ("parallel.expert_exchange", lambda d: ["flat", "hierarchical"] if moe(d) else [None]),
    ("model.num_experts_per_tok", lambda d: [1, 2, 3] if moe(d) else [None]),
    ("model.n_group model.topk_group", lambda d: [(None, None), (None, None)] + groups(d)),
    ("model.moe_intermediate_size", lambda d: [24, 20] if moe(d) else [None]),
    ("model.shared_expert_intermediate_size", lambda d: [0, 16] if moe(d) else [None]),
    ("model.norm_topk_prob", lambda d: [True, False] if moe(d) else [None]),
    ("model.first_k_dense_replace model.decoder_sparse_step",
     lambda d: [(None, None)] if not moe(d) else
     [(0, 1), (0, 1), (1, 1), (0, 2), (1, 2)] if d["model.num_hidden_layers"] > 1 else [(0, 1)]),
    ("model.router_aux_loss_coef", lambda d: [0.0, 0.01, 0.1] if moe(d) else [None]),
    ("model.router_z_loss_coef", lambda d: [0.0, 0.001] if moe(d) else [None]),
    ("model.router_aux_loss_scope",
     lambda d: [None] if not moe(d) else ["micro_batch", "sequence", "global_batch"]
     if d["parallel.schedule"] == "gpipe" or d["micro_batches"] == 1 else
     ["micro_batch", "sequence"]),
    ("model.expert_capacity_factor", lambda d: [0, 0, 0.6, 1.3] if moe(d) else [None]),
    # equal tokens at the beginning of documents have equal scores: rounding would choose which of
    # them is dropped by probability
    ("model.expert_drop_policy", lambda d: [None] if not moe(d) else
     ["position"] if d["data.document_mask"] else ["position", "probability"]),
    ("optimizer.clip", [1.0, 0.0]),
    ("model.scoring_func", lambda d: ["softmax", "sigmoid"] if moe(d) else [None]),
    ("model.norm_type", ["rms_norm", "layer_norm"]),
    ("model.hidden_act", ["silu", "gelu_pytorch_tanh"]),
]


def draw(rng, fixed=None):
    """{name: value}: one value of every axis; those of `fixed` as given."""
    drawn = {}
    for names, choices in AXES:
        value = rng.choice(choices(drawn) if callable(choices) else choices)
        names = names.split()
        drawn.update(zip(names, value if len(names) > 1 else [value]))
        drawn.update({name: fixed[name] for name in names if fixed and name in fixed})
    return drawn


def ranks_of(drawn):
    return drawn["data"] * drawn["parallel.pipeline"] * drawn["parallel.context"] * \
        drawn["parallel.tensor"]


def sections(drawn):
    """The drawn settings as sections of a config."""
    out = {"run": dict(peak_flops=1e11), "training": dict(steps=STEPS),
           "optimizer": dict(learning_rate=3e-4), "checkpoint": dict(every=1),
           "log": dict(routing=moe(drawn))}
    for name, value in drawn.items():
        section, _, key = name.partition(".")
        if key and value is not None:
            out.setdefault(section, {})[key] = value
    out["training"]["global_batch_size"] = (drawn["training.micro_batch_size"] * drawn["data"] *
                                            drawn["micro_batches"])
    return out


def describe(drawn):
    """The config in a line."""
    text = f"{ranks_of(drawn)} ranks:"
    for axis, short in (("pipeline", "pp"), ("data", "dp"), ("context", "cp"), ("tensor", "tp"),
                        ("expert", "ep")):
        size = drawn.get(axis) or drawn.get(f"parallel.{axis}")
        text += f" {short}{size}" if size > 1 else ""
    if drawn["parallel.context_heads"] > 1:
        text += f" heads {drawn['parallel.context_heads']}"
    text += f" {drawn['parallel.schedule']} m{drawn['micro_batches']} zero{drawn['parallel.zero']}"
    text += f" L{drawn['model.num_hidden_layers']}"
    text += " documents" if drawn["data.document_mask"] else ""
    text += f" nodes of {drawn['node']}" if drawn["node"] else ""
    if not moe(drawn):
        return text + " dense"
    by = " by node" if drawn["parallel.expert_exchange"] == "hierarchical" else ""
    kept = drawn["model.topk_group"]
    return text + f" E{drawn['model.num_experts']}{by}" + (f" groups {kept}" if kept else "")


def refusal(done):
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return lines[0].removeprefix("error: ") if lines else done.stderr


def compare_step(lab, many, one, step, ranks):
    """One step from the same weights; the worst gradient, or None where a near tie routed a token
    differently."""
    experts = (lab.path / "runs" / one / "routing-0.jsonl").exists()
    rows = [[row for row in lab.rows(name) if row["step"] == step] for name in (many, one)]
    check_rows(*rows, **FLIPPED)
    if experts and first_flip(lab, one, many, ranks, step, step - 1) == step:
        return None
    check_rows(*rows, loss=2e-6, norm=5e-6, aux=2e-6)
    before = lab.tensors("one", step - 1, "optimizer/exp_avg") if step > 1 else None
    return check_gradients(gradients(lab, many, step, before), gradients(lab, one, step, before))


def stretch(lab, one, ranks, start, off):
    """Compares the steps from `start` to the first flip, and that one; returns it, and adds to
    `off` how far losses and norms are from one rank's before it. What comes after a flip is another
    training: it is compared from the grid's own weights, by the next stretch."""
    got, want = lab.rows("many")[start:], lab.rows(one)
    experts = (lab.path / "runs" / one / "routing-0.jsonl").exists()
    flip = first_flip(lab, one, "many", ranks, since=start) if experts else STEPS + 1
    before = flip - 1 - start
    worst = check_rows(got[:before], want[:before], loss=5e-6, norm=5e-6, aux=5e-6)
    off += worst.values()
    check_rows(got[before:before + 1], want[before:before + 1], **FLIPPED)
    if flip >= STEPS:
        last = relative(got[-1]["validation_loss"], want[-1]["validation_loss"])
        assert last <= (1e-4 if flip == STEPS else 5e-6), f"validation loss {last:.1e} off"
    return flip


class Outcome(NamedTuple):
    text: str  # what was measured, or why the program refuses the config
    refused: bool = False


def compare(lab, drawn, change=None):
    """The grid against one rank. `change` alters the grid's settings alone, to see the comparison
    fail."""
    ranks, settings = ranks_of(drawn), sections(drawn)
    env = {"TRIREME_NODE_RANKS": str(drawn["node"])} if drawn["node"] else {}
    many = lab.config("many", "dense", **settings)
    done = lab.train(many, *(change or ()), ranks=ranks, code=None, env=env)
    if done.returncode == 64:
        return Outcome(refusal(done), refused=True)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    global_batch = settings["model"].get("router_aux_loss_scope") == "global_batch"
    settings["parallel"] = dict(schedule="gpipe" if global_batch else "1f1b")
    one = lab.config("one", "dense", **settings)
    lab.train(one)
    off, flips = [0], []

    first = compare_step(lab, "many", "one", 1, ranks)
    flip = stretch(lab, "one", ranks, 0, off)
    while flip < STEPS:
        flips.append(flip)
        name = f"from-{flip}"
        lab.train(one, f"run.name={name}", resume=lab.checkpoint_path("many", flip))
        flip = stretch(lab, name, ranks, flip, off)
    if flip == STEPS:
        flips.append(flip)

    again = None
    for start in (5, 4, 3, 2):  # the first whose next step routes all tokens alike
        path, steps = lab.checkpoint_path("one", start), f"training.steps={start + 1}"
        lab.train(many, *(change or ()), f"run.name=again-{start}", steps, ranks=ranks, env=env,
                  resume=path)
        lab.train(one, f"run.name=one-again-{start}", steps, resume=path)
        again = compare_step(lab, f"again-{start}", f"one-again-{start}", start + 1, ranks)
        if again:
            break
    assert again, "all steps have near ties"
    verified = lab.run("verify", many, ranks=ranks, code=None, env=env)
    assert verified.returncode == 0, f"verify\n{verified.stdout}\n{verified.stderr}"
    text = f"gradients {first[0]:.0e}" if first else "gradients (a flip in step 1)"
    text += f" {again[0]:.0e}, ten steps {max(off):.0e}"
    text += f", flips at {flips}" if flips else ""
    return Outcome(text)


def drawn_config(seed, i, attempt):
    return draw(random.Random(f"{seed}-{i}-{attempt}"))


def run_one(seed, i):
    """(whether it is within the limits; how many draws were refused). Prints as it goes."""
    for attempt in range(DRAWS):
        drawn = drawn_config(seed, i, attempt)
        print(f"{i:3} {describe(drawn)}", end=": ", flush=True)
        said = io.StringIO()
        with tempfile.TemporaryDirectory() as folder:
            try:
                with contextlib.redirect_stdout(said):
                    outcome = compare(Lab(folder), drawn)
            except Exception:
                print(f"FAILED\n{said.getvalue()}{traceback.format_exc()}")
                print(yaml.safe_dump(sections(drawn), sort_keys=False))
                print(f"again: TRIREME={os.environ['TRIREME']} {sys.executable} {sys.argv[0]} "
                      f"--seed {seed} --only {i}", flush=True)
                return False, attempt
        print(f"refused: {outcome.text}" if outcome.refused else outcome.text, flush=True)
        if not outcome.refused:
            return True, attempt
    print(f"{DRAWS} draws in a row were refused: mend AXES")
    return False, DRAWS


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--configs", type=int, default=14)
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--only", type=int, help="the number of one config")
    a = parser.parse_args()
    first, count = (a.first, a.configs) if a.only is None else (a.only, 1)
    os.environ["TRIREME"] = str(Path(os.environ["TRIREME"]).resolve())
    print(f"sweep with seed {a.seed}", flush=True)
    started, failed, refused = time.monotonic(), [], 0
    for i in range(first, first + count):
        within, draws = run_one(a.seed, i)
        refused += draws
        failed += [] if within else [i]
    print(f"seed {a.seed}: {count - len(failed)} of {count} configs within the limits of one rank, "
          f"{refused} draws refused, {time.monotonic() - started:.0f} s"
          + (f"; failed: {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
