"""What every comparison of a grid with one rank uses: rows of metrics.jsonl, gradients out of
checkpoints, and tokens that near ties send to other experts. Each check fails by an assertion."""
import json

import numpy as np
import yaml

BETA1 = 0.9
STEPS = 10


def relative(a, b):
    return abs(a - b) / max(abs(b), 1e-30) if b else abs(a)


def routing(lab, name, ranks):
    """{(step, layer): {token: (sorted experts, gap)}}"""
    seen = {}
    for r in range(ranks):
        for line in open(lab.path / "runs" / name / f"routing-{r}.jsonl"):
            row = json.loads(line)
            chosen = np.sort(np.array(row["expert"]).reshape(len(row["token"]), -1), 1)
            place = seen.setdefault((row["step"], row["layer"]), {})
            for token, who, gap in zip(row["token"], chosen, row["gap"]):
                place[token] = (tuple(who), gap)
    return seen


def first_flip(lab, one, name, ranks, last=STEPS, since=0):
    """The first step after `since` in which a token goes to other experts, or is dropped by one.
    Its scores were tied, unless another of its sequence had gone astray before: in an earlier
    layer, for attention passes that on, or in the same one where experts take a limited number of
    tokens."""
    a, b = ({place: tokens for place, tokens in routing(lab, run, size).items()
             if since < place[0] <= last} for run, size in ((one, 1), (name, ranks)))
    config = yaml.safe_load((lab.path / "runs" / one / "config.yaml").read_text())
    length = config["data"]["sequence_length"]
    limited = config["model"]["expert_capacity_factor"] > 0
    assert a.keys() == b.keys()
    flips = []
    for place in sorted(a):
        assert a[place].keys() == b[place].keys()
        flips += [(place, t, min(a[place][t][1], b[place][t][1])) for t in a[place]
                  if a[place][t][0] != b[place][t][0]]
    first = min((step for (step, _), _, _ in flips), default=last + 1)
    earliest = {}  # by sequence: layer and gaps of its first flips, which come in order of layers
    for (step, layer), token, gap in flips:
        if step == first:
            print(f"  flip: step {step} layer {layer} token {token} score gap {gap:.1e}")
            start, gaps = earliest.setdefault(token // length, (layer, []))
            if layer == start:
                gaps.append(gap)
    assert all((min if limited else max)(gaps) < 1e-5 for _, gaps in earliest.values())
    return first


def check_rows(got, want, loss, norm, aux):
    worst = {}
    for a, b in zip(got, want, strict=True):
        assert a["step"] == b["step"] and a["samples"] == b["samples"]
        for key, limit in (("loss", loss), ("grad_norm", norm), ("aux_loss", aux), ("z_loss", aux)):
            d = relative(a[key], b[key])
            worst[key] = max(worst.get(key, 0), d)
            assert d <= limit, f"step {a['step']} {key}: {a[key]} against {b[key]}, {d:.1e} off"
    return worst


def gradients(lab, name, step, before=None):
    """The clipped gradient of a step, from the first moments around it."""
    after = lab.tensors(name, step, "optimizer/exp_avg")
    old = before or {k: 0.0 for k in after}
    return {k: (v.astype(np.float64) - BETA1 * old[k]) / (1 - BETA1) for k, v in after.items()}


def differences(got, want):
    """Of each parameter, relative to its norm."""
    assert got.keys() == want.keys()
    return {k: np.linalg.norm(got[k] - want[k]) / max(np.linalg.norm(want[k]), 1e-30) for k in want}


def check_gradients(got, want):
    worst = max((d, k) for k, d in differences(got, want).items())
    assert worst[0] <= 1e-5, worst
    return worst


def check_case(lab, case):
    """The grid called "many" against the run called "one" of the same lab: losses of all steps, of
    the held-out text, and every parameter's gradient of step 1."""
    got, want = lab.rows("many"), lab.rows("one")
    check_rows(got, want, loss=2e-6, norm=5e-6, aux=2e-6)
    assert relative(got[-1]["validation_loss"], want[-1]["validation_loss"]) < 2e-6
    worst = check_gradients(gradients(lab, "many", 1), gradients(lab, "one", 1))
    print(f"{case}: worst gradient {worst[0]:.1e} {worst[1]}")
