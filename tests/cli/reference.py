"""The model again, in numpy and float64, from its formulas alone: loss, auxiliary and z loss of one
step. Written for clarity; nothing is shared with the program."""
import numpy as np


def norm(m, x, w, name):
    """The norm called `name`: by the mean square, or by mean and variance and with a bias."""
    if m.get("norm_type", "rms_norm") == "rms_norm":
        square = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(square + m.get("rms_norm_eps", 1e-6)) * w[f"{name}.weight"]
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + m.get("layer_norm_eps", 1e-5))
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def rotate(x, theta, position):
    """x [S, heads, D]: pairs (i, i + D/2) turned by position * theta^(-2i/D)."""
    _, _, D = x.shape
    angle = position[:, None] * theta ** (-2.0 * np.arange(D // 2) / D)
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    a, b = x[..., : D // 2], x[..., D // 2:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Documents:
    """The documents of a sample: each token is in one, and has a position."""

    def __init__(self, tokens, end=None, reset=False):
        self.number = np.zeros(len(tokens), int)  # the token that ends a document is its last
        if end is not None:
            self.number[1:] = np.cumsum(tokens[:-1] == end)
        self.position = np.arange(len(tokens))
        if reset:
            self.position -= np.searchsorted(self.number, self.number)


def attention(x, w, prefix, m, documents):
    S = x.shape[0]
    heads, kv = m["num_attention_heads"], m["num_key_value_heads"]
    D = m.get("head_dim", m["hidden_size"] // heads)
    project = lambda name, n: (x @ w[f"{prefix}.{name}_proj.weight"].T).reshape(S, n, D)
    theta = m.get("rope_theta", 10000.0)
    q, k = (rotate(project(a, n), theta, documents.position) for a, n in (("q", heads), ("k", kv)))
    v = project("v", kv)
    out = np.empty_like(q)
    i = np.arange(S)
    hidden = i[None, :] > i[:, None]
    hidden |= documents.number[None, :] != documents.number[:, None]
    if m.get("sliding_window"):
        hidden |= i[:, None] - i[None, :] >= m["sliding_window"]
    for h in range(heads):
        s = q[:, h] @ k[:, h * kv // heads].T / np.sqrt(D)
        s[hidden] = -np.inf
        p = np.exp(s - s.max(-1, keepdims=True))
        out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, h * kv // heads]
    return out.reshape(S, heads * D) @ w[f"{prefix}.o_proj.weight"].T


def activate(m, g):
    if m.get("hidden_act", "silu") == "silu":
        return g / (1 + np.exp(-g))
    return g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g ** 3)))


def gated(m, x, gate, up, down):
    return (activate(m, x @ gate.T) * (x @ up.T)) @ down.T


class Router:
    """Routes the sequences of one micro-batch and collects what the balance losses need. `plan` is
    a list of choices: empty, it is filled; else they are taken from it, in order, so that a
    derivative does not see a token jump to another expert."""

    def __init__(self, m, plan, frozen):
        self.m, self.plan, self.frozen = m, plan, frozen
        self.groups = []  # per sequence: (counts [E], shares of probability [S,E], lse [S])

    def __call__(self, x, w, prefix, real):
        """x [S,H]; real [S]: pads are neither routed nor counted."""
        m = self.m
        E, k = m["num_experts"], m["num_experts_per_tok"]
        logits = x @ w[f"{prefix}.gate.weight"].T
        lse = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        sigmoid = m.get("scoring_func") == "sigmoid"
        p = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits - lse[:, None])
        share = p / p.sum(-1, keepdims=True)  # what is balanced
        if self.frozen:
            chosen, keep = self.plan.pop(0)
        else:
            chosen = np.argsort(-self.within_groups(p), axis=-1, kind="stable")[:, :k]
            keep = self.capacity(np.where(real[:, None], chosen, -1),
                                 np.take_along_axis(p, chosen, -1))
            self.plan.append((chosen, keep))
        weight = np.take_along_axis(p, chosen, -1)
        if m.get("norm_topk_prob", True):
            weight = weight / weight.sum(-1, keepdims=True)
        self.groups.append((np.bincount(chosen[real].ravel(), minlength=E), share[real], lse[real]))
        out = np.zeros_like(x)
        for e in range(E):
            rows, slots = np.nonzero((chosen == e) & keep)
            weights = [w[f"{prefix}.experts.{n}_proj.weight"][e] for n in ("gate", "up", "down")]
            out[rows] += weight[rows, slots, None] * gated(m, x[rows], *weights)
        return out

    def within_groups(self, p):
        """p, and -1 for experts outside a token's best groups: those with the likeliest expert or,
        of sigmoids, with the two that together are the likeliest."""
        groups = self.m.get("n_group", 1)
        rising = np.sort(p.reshape(len(p), groups, -1), axis=-1)
        counted = 2 if self.m.get("scoring_func") == "sigmoid" else 1
        worth = rising[..., -counted:].sum(-1)
        kept = np.argsort(-worth, axis=-1, kind="stable")[:, :self.m.get("topk_group", groups)]
        mask = np.zeros((len(p), groups), bool)
        np.put_along_axis(mask, kept, True, -1)
        return np.where(np.repeat(mask, p.shape[1] // groups, axis=1), p, -1)

    def capacity(self, chosen, score):
        m, (S, k) = self.m, chosen.shape
        keep = np.ones((S, k), bool)
        factor = m.get("expert_capacity_factor", 0)
        keep &= chosen >= 0
        if not factor:
            return keep
        room = int(np.ceil(k * S / m["num_experts"] * factor - 1e-9))
        for e in range(m["num_experts"]):
            pairs = np.argwhere(chosen == e)
            if m.get("expert_drop_policy") == "probability":
                order = np.lexsort((pairs[:, 0], -score[pairs[:, 0], pairs[:, 1]]))
                pairs = pairs[order]
            for r, j in pairs[room:]:
                keep[r, j] = False
        return keep

    def losses(self):
        """(aux, z) of the micro-batch, weighted by their coefficients."""
        m = self.m
        E, k = m["num_experts"], m["num_experts_per_tok"]
        groups = self.groups
        if m.get("router_aux_loss_scope", "micro_batch") != "sequence":
            groups = [tuple(f([g[i] for g in groups]) for i, f in
                            enumerate((sum, np.concatenate, np.concatenate)))]
        aux = z = 0.0
        for counts, p, lse in groups:
            f = counts / (k * len(lse))
            aux += m["router_aux_loss_coef"] * E * (f * p.mean(0)).sum() / len(groups)
            z += m.get("router_z_loss_coef", 0.0) * (lse ** 2).mean() / len(groups)
        return aux, z


def is_moe(m, layer):
    return bool(m.get("num_experts")) and layer >= m.get("first_k_dense_replace", 0) \
        and layer not in m.get("mlp_only_layers", []) \
        and (layer + 1) % m.get("decoder_sparse_step", 1) == 0


def step_loss(w, m, tokens, micro_batch_size, plan=None, pad=-1, end=None, reset=False):
    """tokens [batch, S+1] -> (cross-entropy, aux, z) of the step. An empty plan is filled with the
    routing, a full one is followed. Pads are not predicted, and nothing is predicted from them.
    `end` ends documents; with `reset` their positions start again."""
    frozen = bool(plan)
    plan = list(plan) if frozen else plan if plan is not None else []
    total, aux, z, layers = 0.0, 0.0, 0.0, m["num_hidden_layers"]
    micro = len(tokens) // micro_batch_size
    labelled = (tokens[:, 1:] != pad) & (tokens[:, :-1] != pad)
    for b in range(micro):
        routers = {i: Router(m, plan, frozen) for i in range(layers) if is_moe(m, i)}
        for row in tokens[b * micro_batch_size:(b + 1) * micro_batch_size]:
            x = w["model.embed_tokens.weight"][row[:-1]]
            documents = Documents(row[:-1], end, reset)
            for i in range(layers):
                p = f"model.layers.{i}"
                x = x + attention(norm(m, x, w, f"{p}.input_layernorm"), w, f"{p}.self_attn", m,
                                  documents)
                h = norm(m, x, w, f"{p}.post_attention_layernorm")
                mats = lambda q: [w[f"{q}.{n}_proj.weight"] for n in ("gate", "up", "down")]
                if i in routers:
                    y = routers[i](h, w, f"{p}.mlp", row[:-1] != pad)
                    if m.get("shared_expert_intermediate_size"):
                        y = y + gated(m, h, *mats(f"{p}.mlp.shared_experts"))
                    x = x + y
                else:
                    x = x + gated(m, h, *mats(f"{p}.mlp"))
            head = w["model.embed_tokens.weight" if m.get("tie_word_embeddings") else
                     "lm_head.weight"]
            logits = norm(m, x, w, "model.norm") @ head.T
            top = logits.max(-1, keepdims=True)
            lse = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
            loss = lse - logits[np.arange(len(lse)), row[1:]]
            total += loss[(row[1:] != pad) & (row[:-1] != pad)].sum()
        for r in routers.values():
            a, b_ = r.losses()
            aux, z = aux + a / micro, z + b_ / micro
    return total / labelled.sum(), aux, z
