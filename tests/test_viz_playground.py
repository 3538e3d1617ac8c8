"""The mask playground without a browser: its state, its sentence, its page, and the model behind it."""

import json
import random
import threading
import time
from base64 import b64decode
from types import SimpleNamespace

import numpy as np
import plotly.io
import pytest
import torch

import labkit
from labkit import masks, viz
from labkit.attention.maps import attention_maps
from labkit.errors import DataError, MaskError
from labkit.tasks.lm import ensure_mask_token, fill_in
from labkit.viz import live_model
from labkit.viz.live_model import LiveModel
from labkit.viz.mask_state import dense_of, fitted, mask_of, packed, painted_cells, tree_of

N = 6
SENTENCE = "The cat sat on the mat"


def random_mask(rng: random.Random, n: int, depth: int = 3) -> masks.Mask:
    """An expression of up to `depth` levels that is defined for one sentence of `n` tokens."""
    if depth and rng.random() < 0.6:
        first, second = random_mask(rng, n, depth - 1), random_mask(rng, n, depth - 1)
        return rng.choice([~first, first & second, first | second])
    ids, number = rng.choices(range(4), k=n), rng.randint(0, n)
    number_or_row = rng.choice([number, [number]])
    return rng.choice([
        masks.causal(),
        masks.bidirectional(),
        masks.sliding_window(rng.randint(1, n), causal=rng.random() < 0.5),
        masks.prefix(number_or_row),
        masks.hybrid(number_or_row),
        masks.segments(ids, rng.choice(["causal", "bidirectional"]), rng.choice([None, number])),
        masks.padding([number], side=rng.choice(["left", "right"])),
        masks.from_dense(np.reshape(rng.choices([False, True], k=n * n), (n, n))),
    ])  # fmt: skip


def painted_state(*cells):
    """What the page keeps of painted cells: the grid of those that were painted, and the grid of their values."""
    return {"n": len(cells[0]), "cells": packed(np.stack(cells))}


# ----------------------------------------------------------------------------------------------------- the state
@pytest.mark.parametrize("seed", range(30))
def test_a_mask_comes_back_from_its_tree_and_follows_its_sentence(seed):
    rng = random.Random(seed)
    mask, n = random_mask(rng, N), rng.randint(1, 9)
    tree = json.loads(json.dumps(tree_of(mask)))
    assert mask_of(tree) == mask and repr(mask_of(tree)) == repr(mask)
    assert fitted(tree, N, N) == tree
    assert dense_of(mask_of(fitted(tree, n, N)), n).shape == (n, n)


def test_padding_keeps_its_pads_and_the_last_segment_grows_with_the_sentence():
    assert mask_of(fitted(tree_of(masks.padding([4])), 9, 6)) == masks.padding([7])  # two pads before and after
    assert mask_of(fitted(tree_of(masks.segments([0, 0, 1])), 5, 3)) == masks.segments([0, 0, 1, 1, 1])
    grown = dense_of(mask_of(fitted(tree_of(masks.from_dense(np.ones((2, 2), dtype=bool))), 3, 2)), 3)
    assert grown.tolist() == [[True, True, False], [True, True, False], [False, False, False]]


@pytest.mark.parametrize("n", range(1, 13))
def test_painted_cells_survive_packing_and_stay_in_their_row_and_column(n):
    cells = np.random.default_rng(n).random((2, n, n)) < 0.5
    state = json.loads(json.dumps(painted_state(*cells)))
    assert np.array_equal(painted_cells(state, n), cells)
    assert np.array_equal(painted_cells(state, n + 3), np.pad(cells, [(0, 0), (0, 3), (0, 3)]))
    assert np.array_equal(painted_cells(state, 1), cells[:, :1, :1]) and not painted_cells({}, n).any()
    assert packed(np.array([1, 0, 0, 0, 0, 0, 0, 0, 1])) == "gIA="  # the format that the page reads


# ----------------------------------------------------------------------------------------------------- the widget
def test_the_mask_is_the_expression_until_painted_cells_change_it():
    expression = masks.prefix(2) & ~masks.padding([5])
    p = viz.playground("the cat sat on the mat", expression)
    assert p.mask == expression and p.tokens == "the cat sat on the mat".split()
    which = np.zeros((6, 6), dtype=bool)
    which[0, 5] = which[1, 1] = True
    p.painted = painted_state(which, which)
    cells = dense_of(expression, 6) | which
    assert p.mask == masks.from_dense(cells) and (p.cells == cells).all()
    p.mask = masks.causal()
    assert p.mask == masks.causal() and p.painted == {}
    p.painted = painted_state(*np.array([np.eye(6)] * 2, dtype=bool))  # the same cells as those of the expression
    assert p.mask == masks.causal()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mask", masks.prefix([1, 2]), "for one sentence"),
        ("mask", masks.segments([0, 1]), "defined for 2 positions"),
        ("mask", masks.padding([4]), "4 or more tokens"),
        ("mask", "causal", "a labkit Mask"),
        ("sentence", "   ", "no token"),
        ("sentence", "x " * 513, "513 tokens are too many"),
    ],
)
def test_what_cannot_be_shown_is_refused_and_the_old_mask_stays(name, value, message):
    p = viz.playground(["a", "b", "c"])
    with pytest.raises(MaskError, match=message):
        setattr(p, name, value)
    assert p.mask == masks.causal() and p.tokens == ["a", "b", "c"]


def test_a_new_sentence_takes_mask_paint_and_focus_along():
    p = viz.playground("a b c d", masks.causal() & masks.padding([3]))
    p.focus = 3
    which = np.zeros((4, 4), dtype=bool)
    which[0, 1] = which[3, 3] = True
    p.painted = painted_state(which, which)
    p.sentence = "a b c"
    assert p.tokens == ["a", "b", "c"] and p.focus == 2
    assert mask_of(p.expression) == masks.causal() & masks.padding([2])
    assert p.cells[0, 1] and not p.cells[0, 2]
    # The page has done the same by itself when a sentence is typed there, and sends all of it at once.
    p.set_state({"sentence": "a b c d", "tokens": list("abcd"), "expression": ["prefix", 4], "painted": {}})
    assert p.mask == masks.prefix(4) and p.cells.all() and p.cells.shape == (4, 4)


def test_a_notebook_stores_a_figure_and_little_else(monkeypatch):
    monkeypatch.setattr(plotly.io.renderers, "default", "plotly_mimetype")  # as labkit's notebooks set it
    p = viz.playground([f"w{i}" for i in range(64)])
    p.painted = painted_state(*(np.random.default_rng(0).random((2, 64, 64)) < 0.5))
    bundle, _ = p._repr_mimebundle_()
    assert len(json.dumps(p.get_state(), default=str)) + len(json.dumps(bundle)) < 300_000
    figure = bundle["application/vnd.plotly.v1+json"]
    assert figure["data"] == json.loads(viz.mask_figure(p.cells, p.tokens).to_json())["data"]


# ------------------------------------------------------------------------------------------------------ the model
@pytest.fixture
def lm(tiny):
    return tiny("tiny-gpt2")


def ids_of(lm, sentence: str = SENTENCE) -> tuple[int, ...]:
    return tuple(lm.tokenizer(sentence)["input_ids"])


def answers(lm, mask, ids=None, reads: str = "before", **question) -> dict[str, dict]:
    """{"answer", "attention", "verdict"} to a question about a sentence."""
    return dict(LiveModel(lm, lambda: None, reads).answers(ids or ids_of(lm), mask, **question))


def test_an_answer_is_what_the_model_predicts_under_the_mask(lm):
    ids = ids_of(lm)
    results = answers(lm, masks.bidirectional(), place=2, layer=1, head=3)
    with torch.no_grad():
        own = lm.model(torch.tensor([ids])).logits[0, 2].softmax(-1)
        with labkit.masked(lm.model, masks.bidirectional()):
            under = lm.model(torch.tensor([ids])).logits[0, 2].softmax(-1)
    for side, p in (("before", own), ("after", under)):
        answer = results["answer"][side]
        assert [token for token, _ in answer["top"]] == [lm.tokenizer.decode([i]) for i in p.topk(5).indices]
        assert answer["p"] == pytest.approx(float(p[ids[3]]), rel=1e-4)
        assert answer["rank"] == int((p > p[ids[3]]).sum()) + 1
    assert results["answer"]["truth"] == lm.tokenizer.decode([ids[3]])
    n, maps = len(ids), attention_maps(lm, list(ids), masks.bidirectional()).weights[1, 3]
    before, after = (np.frombuffer(b64decode(results["attention"][side]), np.uint8) for side in ("before", "after"))
    assert np.abs(after.reshape(n, n) / 255 - maps).max() < 1 / 255
    assert not np.triu(before.reshape(n, n), 1).any()
    assert results["verdict"]["agrees"] and "bidirectional" in results["verdict"]["text"]


def test_a_leak_is_named_exactly_where_the_next_token_has_influence(lm):
    """The oracle: change the token that must be predicted; where no leak is named, no answer may change."""
    ids, rng = ids_of(lm), np.random.default_rng(3)
    n, clean = len(ids), 0
    for _ in range(12):
        mask = masks.from_dense(np.tri(n, dtype=bool) | (rng.random((n, n)) < 0.04))
        answer = answers(lm, mask, place=2)["answer"]
        changed = answers(lm, mask, (*ids[:3], (ids[3] + 5) % 200, *ids[4:]), place=2)["answer"]
        if answer["leak"] is None:
            clean += 1
            assert [p for _, p in answer["after"]["top"]] == pytest.approx([p for _, p in changed["after"]["top"]])
    assert clean
    assert '"sat" attends to "on"' in answers(lm, masks.bidirectional(), place=2)["answer"]["leak"]
    detour = torch.ones(n, n).tril().bool()
    detour[2, 0] = detour[0, 3] = True  # 2 attends to 0, and 0 has attended to 3
    assert "through other tokens" in answers(lm, masks.from_dense(detour), place=2)["answer"]["leak"]
    last = answers(lm, masks.bidirectional(), place=n - 1)["answer"]
    assert last["leak"] is None and last["truth"] is None and last["after"]["rank"] is None


def test_the_verdict_measures_the_mask_that_arrives(lm, monkeypatch):
    results = answers(lm, masks.prefix(100), tuple(range(20, 220)) + tuple(range(20, 120)), place=5)
    assert "300" in results["attention"]["note"] and "24 keys" in results["verdict"]["text"]
    assert results["verdict"]["agrees"] and answers(lm, masks.hybrid(3))["verdict"]["agrees"]
    monkeypatch.setattr(live_model, "masked", lambda model, mask: labkit.masked(model, masks.causal()))
    verdict = answers(lm, masks.hybrid(3))["verdict"]
    assert not verdict["agrees"] and "not what the mask says in layers 0-1" in verdict["text"]


def test_every_mask_that_can_be_composed_is_really_in_force(tiny):
    composed = [~masks.bidirectional(), *(random_mask(random.Random(seed), N) for seed in range(8))]
    for mask in composed:  # under the first one, no query has a key
        results = answers(tiny("tiny-gemma3"), mask, tuple(range(20, 20 + N)), place=N - 1)
        assert results["verdict"]["agrees"], results
        assert all(np.isfinite(p) for _, p in results["answer"]["after"]["top"])


def test_a_hidden_token_is_replaced_and_needs_a_mask_token(lm):
    ids, hide, first = ids_of(lm), {"kind": "fill-in", "place": 2}, {"kind": "fill-in", "place": 0}
    with pytest.raises(DataError, match="no mask token"):
        answers(lm, masks.causal(), **hide)
    ensure_mask_token(lm.model, lm.tokenizer)
    answer = answers(lm, masks.bidirectional(), **hide)["answer"]
    hidden = lm.tokenizer.decode([*ids[:2], lm.tokenizer.mask_token_id, *ids[3:]])
    with labkit.masked(lm.model, masks.bidirectional()):
        same = fill_in(lm, hidden, reads="before")[0]
    assert answer["after"]["top"] == [[token, pytest.approx(p, rel=1e-4)] for token, p in same]
    assert answer["truth"] == lm.tokenizer.decode([ids[2]])
    with pytest.raises(DataError, match="first token cannot be hidden"):
        answers(lm, masks.causal(), **first)
    assert answers(lm, masks.causal(), reads="same", **first)["verdict"]["agrees"]


def test_attached_the_widget_follows_its_mask_and_sentence_and_the_model_is_left_alone(lm):
    before = lm.model(torch.tensor([[5, 6, 7]])).logits
    p = viz.playground("The cat", masks.causal()).attach(lm)
    assert "".join(p.tokens) == "The cat" and p.asked == 1 and p.model_name == lm.name
    assert p.answer["number"] == p.asked == p.received == p.verdict["number"]
    assert p.answer["before"] == p.answer["after"]  # its own mask is causal
    labkit.to_bidirectional(lm.model)  # the playground keeps the model as it was when it was attached
    p.mask = masks.bidirectional()
    p.place = 0
    assert p.wait(60) and p.answer["number"] == p.asked == 3 and p.answer["before"] != p.answer["after"]
    p.sentence = SENTENCE
    assert p.wait(60) and p.tokens[1] == " cat" and len(p.tokens) == len(ids_of(lm))
    assert p.place == len(p.tokens) - 1 and p.attention["n"] == len(p.tokens)
    assert p.answer["before"]["top"][0][0] in p.to_html()
    assert labkit.audit(lm.model, quick=True).verdict == "bidirectional"
    labkit.to_causal(lm.model)
    assert torch.equal(lm.model(torch.tensor([[5, 6, 7]])).logits, before)
    shared = zip(lm.model.parameters(), p._live.lm.model.parameters(), strict=True)
    assert all(a is b for a, b in shared) and not any(module._forward_pre_hooks for module in lm.model.modules())


def test_a_sentence_typed_in_the_page_that_is_no_sentence_is_a_notice(lm):
    p = viz.playground("The cat").attach(lm)
    tokens = list(p.tokens)
    for sentence, notice in (("   ", "no token"), ("the " * 600, "at most 512"), ("The cat sat", "")):
        p.set_state({"sentence": sentence, "asked": p.asked + 1})
        assert p.wait(60) and p.answer["number"] == p.asked
        assert (notice in p.notice and p.tokens == tokens) if notice else (p.notice == "" and len(p.tokens) == 3)


@pytest.fixture
def held(lm):
    """A playground whose model waits for `go` at its first layer, and sets `inside` when it does; what it answers."""
    results, inside, go = [], threading.Event(), threading.Event()
    p = viz.playground("The cat sat").attach(lm)
    p.observe(lambda change: results.append((change.name, change.new["number"])), ["answer", "attention", "verdict"])

    def hold(*_):
        inside.set()
        go.wait(20)

    p._live.decoder.layers[0].register_forward_pre_hook(hold, prepend=True)
    yield SimpleNamespace(p=p, results=results, inside=inside, go=go)
    p.close()


def test_only_the_latest_question_is_answered(held):
    held.p.mask = masks.bidirectional()
    assert held.inside.wait(20)
    for n in (1, 2, 3):
        held.p.mask = masks.prefix(n)
    held.go.set()
    assert held.p.wait(60) and held.p.asked == 5
    assert held.results == [("answer", 5), ("attention", 5), ("verdict", 5)]


def test_the_page_cancels_and_asks_again_without_waiting(held):
    p = held.p
    p.set_state({"expression": ["bidirectional"], "asked": p.asked + 1})
    assert held.inside.wait(20)
    began = time.perf_counter()
    p.set_state({"cancelled": p.asked})
    assert time.perf_counter() - began < 1
    assert not p.wait(0.01)
    held.go.set()
    assert p.wait(60) and held.results == []
    p.set_state({"asked": p.asked + 1})
    assert p.wait(60) and held.results == [(name, p.asked) for name in ("answer", "attention", "verdict")]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("place", 9, "There is no token 9"),
        ("layer", 5, "There is no layer 5"),
        ("_ids", (10**6, 1, 1), "could not answer (IndexError)"),
    ],
)
def test_whatever_goes_wrong_is_one_sentence_and_the_worker_lives_on(lm, name, value, message):
    p = viz.playground("The cat sat").attach(lm)
    before = getattr(p, name)
    setattr(p, name, value)
    p.head = 1
    assert p.wait(60)
    error = p.answer["error"]
    assert message in error and "\n" not in error and error.endswith(".")
    setattr(p, name, before)
    p.head = 0
    assert p.wait(60) and "error" not in p.answer and p.verdict["number"] == p.asked


@pytest.mark.parametrize(("tokenizer", "reads"), [(True, "after"), (False, "before")])
def test_attach_refuses_what_it_cannot_show(lm, tokenizer, reads):
    p = viz.playground("The cat sat")
    with pytest.raises(MaskError, match="before, same|needs a tokenizer"):
        p.attach(SimpleNamespace(model=lm.model, tokenizer=lm.tokenizer if tokenizer else None, name="m"), reads=reads)
    assert p.model_name == "" and p.tokens == ["The", "cat", "sat"]
