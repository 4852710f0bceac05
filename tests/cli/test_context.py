"""Property: context ranks, as a ring, exchanging heads, or both, compute what one rank computes,
with documents, windows and every other parallel form; documents do not see each other. Every send
waits for its receive here."""
import numpy as np
import pytest
from compare import check_case, check_rows
from conftest import english
from jobs import check_same_run

SYNCHRONOUS = {"TRIREME_SYNCHRONOUS": "1"}
DOCUMENTS = dict(document_mask=True, end_of_document=ord("u"))  # of some 14 letters, up to 100
RESET = dict(DOCUMENTS, reset_position_ids=True)
WORDS = dict(document_mask=True, end_of_document=ord(" "))
# widths that 3 divides, or that leave a rank's key/value heads fewer than those who share them
SIX = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8)

# name: (ranks, model kind, parallel settings, model settings, data settings)
CASES = {
    "heads 2": (2, "dense", dict(context=2, context_heads=2), {}, {}),
    "heads 3": (3, "moe", dict(context=3, context_heads=3, expert=3),
                dict(SIX, num_experts=6), {}),
    "heads 4, one kv head": (4, "dense", dict(context=4, context_heads=4),
                             dict(num_key_value_heads=1, sliding_window=9), {}),
    "heads 6, three kv heads": (6, "dense", dict(context=6, context_heads=6), SIX, RESET),
    "rings of 2, heads 2": (4, "moe", dict(context=4, context_heads=2, expert=2), {}, {}),
    "rings of 2, heads 3": (6, "dense", dict(context=6, context_heads=3), SIX, DOCUMENTS),
    "rings of 3, heads 2": (6, "moe", dict(context=6, context_heads=2, recompute="selective"),
                            dict(expert_capacity_factor=0.6), RESET),
    "heads 2, tensor 2": (4, "moe", dict(context=2, context_heads=2, tensor=2, recompute="full"),
                          {}, DOCUMENTS),
    "ring, documents": (4, "dense", dict(context=4), {}, DOCUMENTS),
    "ring of 3, words": (3, "moe", dict(context=3), {}, WORDS),
    "ring, documents, window": (2, "dense", dict(context=2, recompute="full"),
                                dict(sliding_window=7), RESET),
    "no context, documents": (2, "moe", dict(pipeline=2), {}, RESET),
    "zb_v, documents": (4, "moe", dict(pipeline=2, context=2, schedule="zb_v"), {}, DOCUMENTS),
    "zb_h1, heads": (4, "dense", dict(pipeline=2, context=2, context_heads=2, schedule="zb_h1"),
                     dict(tie_word_embeddings=True), DOCUMENTS),
    "interleaved, both": (8, "moe", dict(pipeline=2, context=4, context_heads=2, expert=4,
                                         schedule="interleaved"), {}, DOCUMENTS),
    "dualpipe_v, heads": (4, "moe", dict(pipeline=2, context=2, context_heads=2, expert=2,
                                         schedule="dualpipe_v", recompute="selective"), {}, RESET),
    "gpipe, dp2, heads": (8, "moe", dict(pipeline=2, context=2, context_heads=2, expert=4,
                                         schedule="gpipe"),
                          dict(router_aux_loss_scope="global_batch"), DOCUMENTS),
}


def settings(model, data, **training):
    return dict(model=model, data=data, checkpoint=dict(every=1),
                training=dict(dict(steps=1, micro_batch_size=2), **training))


@pytest.mark.parametrize("case", CASES)
def test_context_equals_one_rank(lab, case):
    ranks, kind, parallel, model, data = CASES[case]
    more = settings(model, data)
    alone = dict(schedule="gpipe") if "router_aux_loss_scope" in model else {}
    lab.train(lab.config("one", kind, parallel=alone, **more))
    lab.train(lab.config("many", kind, parallel=parallel, **more), ranks=ranks, env=SYNCHRONOUS)
    check_case(lab, case)


@pytest.mark.parametrize("ranks, parallel", [(1, {}), (4, dict(context=4)),
                                             (4, dict(context=4, context_heads=2))])
def test_documents_do_not_see_each_other(lab, ranks, parallel):
    """Another text in a sample's first document: the loss and the gradient of labels in the others
    keep their bits."""
    S, end, samples = 48, ord("u"), 8
    text = np.frombuffer(english(S * samples + 1, seed=3), np.uint8).copy()
    text[text == end] = ord("x")
    for k in range(samples):
        text[[k * S + 8 + k, k * S + 19 + 2 * k]] = end  # three documents
    first = np.concatenate([np.arange(S) <= 8 + k for k in range(samples)] + [[False]])
    changed = np.where(first & (text != end), text[::-1], text)
    changed[first & (changed == end) & (text != end)] = ord("y")
    assert (changed != text).sum() > 50
    labelled = ~first
    labelled[1:] &= ~first[:-1]  # predicted from the end of a first document
    for name, body in (("plain", text), ("changed", changed)):
        (lab.path / f"{name}.txt").write_bytes(body.tobytes())
        (lab.path / f"{name}.txt.mask").write_bytes(labelled.astype(np.uint8).tobytes())
        lab.train(lab.config(name, "dense", parallel=parallel,
                             data=dict(DOCUMENTS, train=[f"{name}.txt"], validation=[], mask=True),
                             training=dict(steps=1), checkpoint=dict(every=1)), ranks=ranks)
    assert lab.rows("plain") == lab.rows("changed")
    a, b = (lab.tensors(name, 1, "optimizer/exp_avg") for name in ("plain", "changed"))
    assert [k for k in a if not np.array_equal(a[k], b[k])] == []


@pytest.mark.parametrize("parallel", [dict(context=2, context_heads=2), dict(context=2)])
def test_recompute_changes_nothing(lab, parallel):
    for recompute in ("none", "selective", "full"):
        lab.train(lab.config(recompute, "moe", data=RESET, training=dict(steps=4),
                             checkpoint=dict(every=4),
                             parallel=dict(parallel, recompute=recompute)), ranks=2)
    for recompute in ("selective", "full"):
        assert lab.rows("none") == lab.rows(recompute)
        a, b = lab.tensors("none", 4), lab.tensors(recompute, 4)
        assert all(np.array_equal(a[k], b[k]) for k in a)


def test_small_messages_and_resume(lab):
    """In pieces of 1000 elements the same bytes come out, also of a run that was stopped."""
    plain, pieces = (
        lab.config(name, "moe", parallel=dict(context=4, context_heads=2, expert=2),
                   data=dict(DOCUMENTS, validation=[]), optimizer=dict(schedule="constant"),
                   training=dict(steps=6)) for name in ("plain", "pieces"))
    lab.train(plain, ranks=4)
    for steps in (3, 6):
        lab.train(pieces, f"training.steps={steps}", ranks=4, env={"TRIREME_CHUNK_LIMIT": "1000"})
    check_same_run(lab, "plain", "pieces", 6)


def test_other_context_ranks_go_on(lab):
    """A checkpoint knows nothing of rings and heads."""
    more = dict(data=DOCUMENTS, optimizer=dict(schedule="constant"), checkpoint=dict(every=1))
    lab.train(lab.config("one", **more))
    for step, ranks, grid in [(4, 2, dict(context=2, context_heads=2)), (7, 4, dict(context=4)),
                              (10, 4, dict(context=4, context_heads=2))]:
        lab.train(lab.config("many", parallel=grid, **more), f"training.steps={step}", ranks=ranks)
    check_rows(lab.rows("many"), lab.rows("one"), loss=5e-6, norm=5e-6, aux=0)


def test_bfloat16_is_near(lab):
    """Heads are exchanged in bfloat16; sums over ring ranks are float32."""
    for name, ranks, parallel in (("one", 1, {}),
                                  ("many", 4, dict(context=4, context_heads=2))):
        lab.train(lab.config(name, run=dict(name=name, dtype="bfloat16"), parallel=parallel,
                             data=DOCUMENTS), ranks=ranks)
    check_rows(lab.rows("many"), lab.rows("one"), loss=2e-3, norm=2e-2, aux=2e-2)


@pytest.mark.parametrize("sets, says", [
    (["parallel.context=2", "data.sequence_length=46"], ["46", "2 * context 2 = 4", "44 or 48"]),
    (["parallel.context=4", "parallel.context_heads=2", "data.sequence_length=46"],
     ["46", "of context 4 = 4", "44 or 48"]),
    (["parallel.context=4", "parallel.context_heads=3"], ["context_heads", "3", "1, 2 or 4"]),
    (["parallel.context=4", "parallel.context_heads=4", "parallel.tensor=2"],
     ["context_heads", "4", "the 2 query heads", "1 or 2"]),
    (["data.document_mask=true"], ["text.txt", "raw bytes", "data.end_of_document"]),
])
def test_refusals(lab, sets, says):
    words = [w for s in sets for w in ("--set", s)]
    ranks = 8 if "parallel.tensor=2" in sets else 4
    done = lab.run("train", lab.config("refused", "dense"), *words, ranks=ranks, code=64)
    for text in says:
        assert text in done.stderr, done.stderr
