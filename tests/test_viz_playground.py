"""The mask playground without a browser: its state, its sentence, its page, and the model behind it."""

import json
import threading
import time
from base64 import b64decode
from types import SimpleNamespace

import numpy as np
import plotly.io
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traitlets import TraitError

import labkit
from labkit import masks, viz
from labkit.errors import DataError, MaskError
from labkit.viz.live_model import LiveModel, Question, sharing_weights
from labkit.viz.mask_state import (
    bits,
    dense_of,
    fitted,
    mask_of,
    moved,
    packed,
    painted_cells,
    painted_state,
    split_words,
    tree_of,
)

N = 6
NUMBER = st.integers(0, N)
LEAVES = st.one_of(
    st.just(masks.causal()),
    st.just(masks.bidirectional()),
    st.builds(masks.sliding_window, st.integers(1, N), causal=st.booleans()),
    st.builds(masks.prefix, NUMBER | NUMBER.map(lambda n: [n])),
    st.builds(masks.hybrid, NUMBER | NUMBER.map(lambda n: [n])),
    st.builds(
        masks.segments,
        st.lists(st.integers(0, 3), min_size=N, max_size=N),
        inside=st.sampled_from(["causal", "bidirectional"]),
        fuse_from=st.none() | NUMBER,
    ),
    st.builds(masks.padding, NUMBER.map(lambda n: [n]), side=st.sampled_from(["left", "right"])),
    st.lists(st.booleans(), min_size=N * N, max_size=N * N).map(lambda c: masks.from_dense(np.reshape(c, (N, N)))),
)
MASKS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        inner.map(lambda m: ~m),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
    ),
    max_leaves=5,
)


# ----------------------------------------------------------------------------------------------------- the state
@given(MASKS)
@settings(max_examples=80, deadline=None)
def test_a_mask_comes_back_from_its_tree_as_the_same_expression(mask):
    tree = json.loads(json.dumps(tree_of(mask)))
    assert mask_of(tree) == mask and repr(mask_of(tree)) == repr(mask)


@given(MASKS, st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_a_mask_that_follows_its_sentence_is_always_defined_and_unchanged_at_the_old_length(mask, n):
    tree = tree_of(mask)
    assert fitted(tree, N, N) == tree
    assert dense_of(mask_of(fitted(tree, n, N)), n).shape == (n, n)


def test_padding_keeps_its_pads_and_the_last_segment_grows_with_the_sentence():
    assert mask_of(fitted(tree_of(masks.padding([4])), 9, 6)) == masks.padding([7])  # two pads before and after
    assert mask_of(fitted(tree_of(masks.padding([1])), 2, 6)) == masks.padding([0])
    assert mask_of(fitted(tree_of(masks.segments([0, 0, 1])), 5, 3)) == masks.segments([0, 0, 1, 1, 1])
    grown = dense_of(mask_of(fitted(tree_of(masks.from_dense(np.ones((2, 2), dtype=bool))), 3, 2)), 3)
    assert grown.tolist() == [[True, True, False], [True, True, False], [False, False, False]]


@given(st.integers(1, 16), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_painted_cells_survive_packing_and_moving(n, random):
    which, value = (np.array([random.random() < 0.5 for _ in range(n * n)]).reshape(n, n) for _ in range(2))
    state = json.loads(json.dumps(painted_state(which, value)))
    back, drawn = painted_cells(state, n)
    assert (back == which).all() and (drawn == (value & which)).all()
    longer = moved(state, n + 3)
    assert moved(longer, n) == state  # each cell stayed in its row and column


@pytest.mark.parametrize(
    "tree, says",
    [
        (["upside_down"], "describes no mask"),
        (["prefix"], "describes no mask"),
        (["&", ["causal"]], "describes no mask"),
        (["prefix", -1], "at least 0"),
        (["from_dense", 3, "AAAA"], "9 cells were expected"),
        (["from_dense", 3, "<>"], "not base64"),
        ([], "describes no mask"),
    ],
)
def test_a_tree_that_is_none_is_refused_in_words(tree, says):
    with pytest.raises(MaskError, match=says):
        mask_of(tree)


def test_bits_are_numpys_packed_bits():
    assert packed(np.array([1, 0, 0, 0, 0, 0, 0, 0, 1])) == "gIA="
    assert bits("gIA=", 9).tolist() == [True, *[False] * 7, True]


def test_a_sentence_without_a_tokenizer_is_split_at_words_and_signs():
    assert split_words("Don't  stop, O’Neil — naïve_x 3.5%") == [
        "Don't", "stop", ",", "O’Neil", "—", "naïve_x", "3", ".", "5", "%",
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------- the widget
def test_the_mask_is_the_expression_until_painted_cells_change_it():
    said = masks.prefix(2) & ~masks.padding([5])
    p = viz.playground("the cat sat on the mat", said)
    assert p.mask == said and p.tokens == "the cat sat on the mat".split()

    which = np.zeros((6, 6), dtype=bool)
    which[0, 5] = which[1, 1] = True
    p.painted = painted_state(which, which)
    cells = dense_of(said, 6) | which
    assert p.mask == masks.from_dense(cells) and (p.cells == cells).all()

    p.mask = masks.causal()
    assert p.mask == masks.causal() and p.painted == {}
    which[:] = False
    which[3, 0] = True
    p.painted = painted_state(which, which)  # painted as it was: the cells are still those of the expression
    assert p.mask == masks.causal()


def test_a_mask_that_cannot_be_shown_is_refused_and_the_old_one_stays():
    p = viz.playground(["a", "b", "c"])
    for mask, says in [
        (masks.prefix([1, 2]), "batch of 2 rows"),
        (masks.segments([0, 1]), "defined for 2 positions"),
        (masks.padding([4]), "speaks of 4 tokens"),
        ("causal", "expected a labkit Mask"),
    ]:
        with pytest.raises(MaskError, match=says):
            p.mask = mask
    assert p.mask == masks.causal()


def test_no_tokens_and_too_many_are_refused():
    for tokens, says in [
        ("", "no token"),
        ([], "no token"),
        (["x"] * 513, "513 tokens are too many"),
        ("  ", "no token"),
    ]:
        with pytest.raises(MaskError, match=says):
            viz.playground(tokens)
    p = viz.playground("a b")
    with pytest.raises(MaskError, match="no token"):
        p.sentence = "   "
    assert p.tokens == ["a", "b"]


def test_a_new_sentence_takes_mask_paint_and_focus_along():
    p = viz.playground("a b c d", masks.causal() & masks.padding([3]))
    p.focus = 3
    which = np.zeros((4, 4), dtype=bool)
    which[0, 1] = which[3, 3] = True
    p.painted = painted_state(which, which)
    p.sentence = "a b c"
    assert p.tokens == ["a", "b", "c"] and p.focus == 2
    assert mask_of(p.expression) == masks.causal() & masks.padding([2])
    assert painted_cells(p.painted, 3)[0].sum() == 1
    p.tokens = ["x", "y"]
    assert p.sentence == "x y" and p.cells.shape == (2, 2)


def test_what_the_page_sends_is_taken_together_and_checked():
    p = viz.playground("a b c")
    p.set_state({"sentence": "a b c d", "tokens": list("abcd"), "expression": ["prefix", 4], "painted": {}})
    assert p.mask == masks.prefix(4) and p.cells.all()
    with pytest.raises(TraitError, match="describes no mask"):
        p.set_state({"expression": ["nonsense"]})
    assert p.mask == masks.prefix(4)


def test_the_notebook_stores_a_figure_and_little_else(monkeypatch):
    monkeypatch.setattr(plotly.io.renderers, "default", "plotly_mimetype")  # as labkit's notebooks set it
    p = viz.playground([f"w{i}" for i in range(64)], masks.hybrid(20))
    p.painted = painted_state(*(np.random.default_rng(0).random((2, 64, 64)) < 0.5))
    bundle, _ = p._repr_mimebundle_()
    figure = bundle["application/vnd.plotly.v1+json"]
    assert figure["data"] == json.loads(viz.mask_figure(p.cells, p.tokens).to_json())["data"]
    saved = len(json.dumps(p.get_state(), default=str)) + len(json.dumps(bundle))
    assert saved < 300_000, f"{saved:,} characters"
    p = viz.playground([f"w{i}" for i in range(512)])
    p.painted = painted_state(*(np.random.default_rng(0).random((2, 512, 512)) < 0.5))
    assert len(json.dumps(p.get_state(), default=str)) < 300_000
    assert len(json.dumps(p._repr_mimebundle_()[0])) < 700_000


def test_the_page_holds_everything_and_is_written_whole(tmp_path):
    p = viz.playground(["</script>", "<!--", "&amp;"], masks.prefix(1))
    page = p.to_html(tmp_path / "page.html", title="A <mask>")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert page.count("</script>") == 2 and "A &lt;mask&gt;" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    assert '"tokens": ["\\u003c/script>"' in page


# ------------------------------------------------------------------------------------------------------ the model
@pytest.fixture
def lm():
    return labkit.load("tiny-gpt2", device="cpu")


def heard_from(lm, question: Question, reads: str = "before") -> dict[str, dict]:
    told = {}
    LiveModel(lm, told.__setitem__, reads).answer(question)
    return told


def ids_of(lm, sentence: str) -> tuple[int, ...]:
    return tuple(lm.tokenizer(sentence)["input_ids"])


def test_an_answer_is_what_the_model_says_under_the_mask(lm):
    ids = ids_of(lm, "The cat sat on the mat")
    told = heard_from(lm, Question(7, ids, masks.bidirectional(), place=2, layer=1, head=3))
    with torch.no_grad():
        own = lm.model(torch.tensor([ids])).logits[0, 2].softmax(-1)
        with labkit.masked(lm.model, masks.bidirectional()):
            under = lm.model(torch.tensor([ids])).logits[0, 2].softmax(-1)
    for side, p in (("before", own), ("after", under)):
        said = told["answer"][side]
        assert [token for token, _ in said["top"]] == [lm.tokenizer.decode([i]) for i in p.topk(5).indices]
        assert said["p"] == pytest.approx(float(p[ids[3]]), rel=1e-4)
        assert said["rank"] == int((p > p[ids[3]]).sum()) + 1
    assert told["answer"]["truth"] == lm.tokenizer.decode([ids[3]]) and told["answer"]["number"] == 7
    maps = {side: np.frombuffer(b64decode(told["attention"][side]), np.uint8) for side in ("before", "after")}
    n = len(ids)
    future = np.triu(np.ones((n, n), dtype=bool), 1)
    assert maps["before"].reshape(n, n)[future].sum() == 0 and maps["after"].reshape(n, n)[future].sum() > 0
    assert maps["after"].reshape(n, n).astype(float).sum(1) == pytest.approx(255, abs=n)
    assert told["verdict"]["agrees"] and told["verdict"]["text"].endswith("The audit's verdict: bidirectional.")


def test_a_leak_is_named_directly_through_depth_and_not_where_there_is_none(lm):
    ids = ids_of(lm, "The cat sat on the mat")
    n = len(ids)
    direct = heard_from(lm, Question(1, ids, masks.bidirectional(), place=2))["answer"]["leak"]
    assert direct.startswith('Leak: under this mask "sat" sees "on", and')
    detour = torch.ones(n, n).tril().bool()
    detour[2, 0] = detour[0, 3] = True  # 2 looks at 0, and 0 has looked at 3
    through = heard_from(lm, Question(1, ids, masks.from_dense(detour), place=2))["answer"]["leak"]
    assert "through other tokens" in through
    assert heard_from(lm, Question(1, ids, masks.causal(), place=2))["answer"]["leak"] is None
    last = heard_from(lm, Question(1, ids, masks.bidirectional(), place=n - 1))["answer"]
    assert last["leak"] is None and last["truth"] is None and last["after"]["rank"] is None


def test_a_leak_that_is_denied_really_cannot_be_seen(lm):
    """The oracle: change the token that is asked for; where no leak is named, no answer may change."""
    ids = ids_of(lm, "The cat sat on the mat")
    rng = np.random.default_rng(3)
    denied = 0
    for _ in range(12):
        cells = np.tril(np.ones((len(ids), len(ids)), dtype=bool)) | (rng.random((len(ids), len(ids))) < 0.04)
        mask = masks.from_dense(cells)
        answer = heard_from(lm, Question(1, ids, mask, place=2))["answer"]
        other = (*ids[:3], (ids[3] + 5) % 200, *ids[4:])
        changed = heard_from(lm, Question(1, other, mask, place=2))["answer"]
        if answer["leak"] is None:
            denied += 1
            assert [p for _, p in answer["after"]["top"]] == pytest.approx([p for _, p in changed["after"]["top"]])
    assert denied


def test_the_verdict_measures_the_mask_and_not_what_was_said(lm, monkeypatch):
    ids = ids_of(lm, "The cat sat on the mat")
    live = LiveModel(lm, lambda *_: None)
    assert live._measured(Question(1, ids, masks.hybrid(3)), ids)["agrees"]
    from labkit.viz import live_model

    # a mask that does not arrive: the model is run under another one
    monkeypatch.setattr(live_model, "masked", lambda model, mask: labkit.masked(model, masks.causal()))
    verdict = live._measured(Question(1, ids, masks.hybrid(3)), ids)
    assert not verdict["agrees"] and "not what the mask says in layers 0-1" in verdict["text"]


def test_a_row_without_a_key_is_measured_as_looking_at_itself(lm):
    ids = ids_of(lm, "The cat sat on the mat")
    told = heard_from(lm, Question(1, ids, masks.from_dense(torch.zeros(len(ids), len(ids)).bool())))
    assert told["verdict"]["agrees"] and "error" not in told["answer"]
    assert all(np.isfinite(p) for _, p in told["answer"]["after"]["top"])


def test_a_hidden_token_is_replaced_and_needs_a_mask_token(lm):
    from labkit.tasks.lm import ensure_mask_token, fill_in

    ids = ids_of(lm, "The cat sat on the mat")
    refused = heard_from(lm, Question(1, ids, masks.causal(), kind="fill-in", place=2))
    assert list(refused) == ["answer"] and "no mask token" in refused["answer"]["error"]
    ensure_mask_token(lm.model, lm.tokenizer)
    told = heard_from(lm, Question(1, ids, masks.bidirectional(), kind="fill-in", place=2))["answer"]
    hidden = lm.tokenizer.decode([*ids[:2], lm.tokenizer.mask_token_id, *ids[3:]])
    assert tuple(lm.tokenizer(hidden)["input_ids"][2:3]) == (lm.tokenizer.mask_token_id,)
    with labkit.masked(lm.model, masks.bidirectional()):
        same = fill_in(lm, hidden, reads="before")[0]
    assert told["after"]["top"] == [[token, pytest.approx(p, rel=1e-4)] for token, p in same]
    assert told["truth"] == lm.tokenizer.decode([ids[2]]) and "read at" in told["how"]
    first = heard_from(lm, Question(1, ids, masks.causal(), kind="fill-in", place=0))["answer"]
    assert "first token cannot be hidden" in first["error"]
    assert "error" not in heard_from(lm, Question(1, ids, masks.causal(), kind="fill-in", place=0), "same")["answer"]


def test_the_model_that_was_handed_in_is_left_alone_and_shares_its_weights(lm):
    before = lm.model(torch.tensor([[5, 6, 7]])).logits
    p = viz.playground("The cat sat on").attach(lm)
    copy = p._live.lm.model
    assert copy is not lm.model and all(a is b for a, b in zip(lm.model.parameters(), copy.parameters(), strict=True))
    assert torch.equal(lm.model(torch.tensor([[5, 6, 7]])).logits, before)
    assert not any(module._forward_pre_hooks for module in lm.model.modules())
    labkit.to_bidirectional(lm.model)
    p.mask = masks.prefix(2)
    assert p.wait(60.0) and p.verdict["agrees"]
    assert labkit.audit(lm.model, quick=True).verdict == "bidirectional"
    assert labkit.audit(sharing_weights(lm.model), quick=True).verdict == "bidirectional"


def test_attached_the_widget_follows_its_mask_and_its_sentence(lm):
    p = viz.playground("The cat", masks.causal()).attach(lm, layer=1)
    assert p.model_name == lm.name and p.answer["number"] == p.asked == p.heard == p.verdict["number"]
    assert p.answer["before"] == p.answer["after"]  # its own mask is causal
    p.mask = masks.bidirectional()
    p.place = 0
    assert p.wait(60.0) and p.answer["number"] == p.asked
    assert p.answer["before"] != p.answer["after"]
    p.sentence = "The cat sat on the mat"
    assert p.wait(60.0) and p.tokens[1] == " cat" and len(p.tokens) == len(ids_of(lm, p.sentence))
    assert p.place == len(p.tokens) - 1 and p.attention["n"] == len(p.tokens)
    assert p.answer["before"]["top"][0][0] in p.to_html()
    live, worker = p._live, p._live._thread
    p.detach()
    assert not worker.is_alive() and live._thread is None
    assert p.model_name == "" and p.answer == {} and p.tokens == "The cat sat on the mat".split()
    assert p.wait()  # nothing to wait for


def test_attaching_and_detaching_leave_the_sentence_as_it_was(lm):
    sentence = "Zebras see  the bank!"
    p = viz.playground(sentence).attach(lm)
    assert p.sentence == sentence and "".join(p.tokens) == sentence and p.asked == 1
    assert p.detach().sentence == sentence and p.tokens == ["Zebras", "see", "the", "bank", "!"]


def test_a_sentence_typed_in_the_page_that_is_no_sentence_is_a_notice(lm):
    p = viz.playground("The cat").attach(lm)
    tokens = list(p.tokens)
    p.set_state({"sentence": "   ", "asked": p.asked + 1})
    assert p.wait(60.0) and "no token" in p.notice and p.tokens == tokens and p.answer["number"] == p.asked
    p.set_state({"sentence": "the " * 600, "asked": p.asked + 1})
    assert "at most 512" in p.notice and p.tokens == tokens
    p.set_state({"sentence": "The cat sat", "asked": p.asked + 1})
    assert p.wait(60.0) and p.notice == "" and len(p.tokens) == 3 and p.answer["number"] == p.asked
    with pytest.raises(MaskError, match="no token"):
        p.sentence = ""


def test_only_the_latest_question_is_answered(lm):
    """The worker is held inside its first question while more arrive; of those only the last one is answered."""
    live, told, held, go = _held(lm)
    ids = ids_of(lm, "The cat sat")
    live.ask(Question(1, ids, masks.causal()))
    assert held.wait(20)
    for number in (2, 3, 4):
        live.ask(Question(number, ids, masks.prefix(number - 1)))
    go.set()
    assert live.wait(60.0)
    assert {number for _, number in told} == {4}
    live.close()


def test_cancel_stops_what_is_being_answered_and_the_next_question_is_answered(lm):
    live, told, held, go = _held(lm)
    ids = ids_of(lm, "The cat sat")
    live.ask(Question(1, ids, masks.causal()))
    assert held.wait(20)
    live.cancel()
    go.set()
    assert live.wait(60.0) and told == []
    live.ask(Question(2, ids, masks.causal()))
    assert live.wait(60.0) and told == [("answer", 2), ("attention", 2), ("verdict", 2)]
    live.close()


def test_the_widget_hears_cancel_and_ask_again(lm):
    p = viz.playground("The cat sat").attach(lm)
    live, told, held, go = _held(lm)
    p._live = live
    p.set_state({"expression": ["bidirectional"], "asked": p.asked + 1})
    assert held.wait(20)
    began = time.perf_counter()
    p.set_state({"cancelled": p.asked})
    assert time.perf_counter() - began < 1  # the page is never kept waiting
    go.set()
    assert p.wait(60.0) and told == []
    p.set_state({"asked": p.asked + 1})
    assert p.wait(60.0) and told[-1] == ("verdict", p.asked)
    p.detach()


def _held(lm):
    """A LiveModel whose first pass through a layer waits for `go`; (live, what it told, held, go)."""
    told, held, go = [], threading.Event(), threading.Event()
    live = LiveModel(lm, lambda name, value: told.append((name, value["number"])))

    def hold(*_):
        held.set()
        go.wait(20)

    live.decoder.layers[0].register_forward_pre_hook(hold, prepend=True)
    return live, told, held, go


def test_an_idle_worker_ends_and_the_next_question_starts_another(lm, monkeypatch):
    from labkit.viz import live_model

    monkeypatch.setattr(live_model, "IDLE", 0.05)
    told = []
    live = LiveModel(lm, lambda name, value: told.append((name, value["number"])))
    ids = ids_of(lm, "The cat sat")
    for number in (1, 2):
        live.ask(Question(number, ids, masks.causal()))
        worker = live._thread
        worker.join(60)
        assert not worker.is_alive() and live._thread is None and told[-1] == ("verdict", number)


def test_whatever_goes_wrong_is_one_sentence_in_the_panel(lm):
    ids = ids_of(lm, "The cat sat")
    told = {}
    live = LiveModel(lm, told.__setitem__)
    for question, says in [
        (Question(1, ids, masks.causal(), place=9), "There is no token 9"),
        (Question(1, ids, masks.causal(), layer=5), "There is no layer 5"),
        (Question(1, ids, masks.causal(), kind="why"), "'next' or 'fill-in'"),
        (Question(1, ids, masks.segments([0, 1])), "defined for 2 positions"),
        (Question(1, (10**6, 1), masks.causal()), "could not answer (IndexError)"),
    ]:
        live.answer(question)
        error = told["answer"]["error"]
        assert says in error and "\n" not in error and error.endswith(".") and "Traceback" not in error
    live.ask(Question(2, (10**6, 1), masks.causal()))
    live.ask(Question(3, ids, masks.causal()))  # and the worker lives on
    assert live.wait(60.0) and told["answer"]["number"] == 3 and "error" not in told["answer"]
    live.close()


def test_attach_refuses_what_it_cannot_show(lm):
    p = viz.playground("The cat sat")
    for options, says in [
        ({"question": "why"}, "'next' or 'fill-in'"),
        ({"reads": "after"}, "'same'"),
        ({"layer": 2}, "layers 0 to 1"),
        ({"head": 4}, "heads 0 to 3"),
        ({"place": 3}, "tokens 0 to 2"),
    ]:
        with pytest.raises((MaskError, DataError), match=says):
            p.attach(lm, **options)
    with pytest.raises(MaskError, match="needs a tokenizer"):
        p.attach(SimpleNamespace(model=lm.model, tokenizer=None, name="bare"))
    assert p.model_name == "" and p.tokens == ["The", "cat", "sat"]


def test_long_sentences_travel_without_maps_and_are_measured_in_part(lm):
    ids = tuple(range(20, 220)) + tuple(range(20, 120))
    told = heard_from(lm, Question(1, ids, masks.prefix(100), place=5))
    assert told["attention"] == {"number": 1, "note": "Attention is drawn for up to 256 tokens; this sentence has 300."}
    assert told["verdict"]["agrees"] and "24 keys spread over the sentence" in told["verdict"]["text"]


@given(MASKS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_mask_that_can_be_composed_is_really_in_force(shared_lm, mask):
    ids = tuple(range(20, 20 + N))
    told = heard_from(shared_lm, Question(1, ids, mask, place=N - 1))
    assert "error" not in told["answer"] and told["verdict"]["agrees"], told


@pytest.fixture(scope="module")
def shared_lm():
    return labkit.load("tiny-gemma3", device="cpu")
