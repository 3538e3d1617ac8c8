"""bertviz views: what the page holds is what the model did, whoever brings the libraries, and what is refused."""

import json
import re
import subprocess
import sys
import types
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from labkit import masks, viz
from labkit.attention.maps import attention_maps
from labkit.attention.neurons import neuron_maps
from labkit.errors import LabkitError, MaskError, ModelError
from labkit.models.tiny import TINY_NAMES
from labkit.viz import bertviz, browser_libraries
from labkit.viz.bertviz_page import BertvizView

pytest.importorskip("bertviz")

TEXT = "the cat sat by the river bank"
FETCH = Path(__file__).resolve().parent.parent / "scripts" / "fetch_browser_libraries.py"
NASTY = ["<b>", "</script>", '"quoted"', "<!--", "a & b", "it's", "\u2028", "\x07", "extraordinarily-long-token"]


@pytest.fixture(autouse=True)
def libraries(tmp_path, monkeypatch):
    """Two short stand-ins for d3 and jQuery, and nobody who has brought them yet."""
    folder = tmp_path / "browser"
    folder.mkdir()
    for name in browser_libraries.NAMES:
        (folder / name).write_text(f"/* stand-in for {name} */", encoding="utf-8")
    monkeypatch.setattr(browser_libraries, "FOLDER", folder)
    monkeypatch.setattr(browser_libraries, "CARRIER", browser_libraries.Carrier())
    return folder


class Scripts(HTMLParser):
    """The scripts of a page, and its visible text, as a browser's parser finds them."""

    def __init__(self, html):
        super().__init__()
        self.scripts, self.words, self.inside, self.elements = [], [], False, []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag == "script"
        self.scripts += [""] * self.inside

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "script"

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data
        else:
            self.words.append(data)


def params_of(view: BertvizView, at: int = 0) -> dict:
    """The data that bertviz's script is given, read back from the page."""
    script = Scripts(view.html(libraries=False)).scripts[-1]
    start = [m.end() for m in re.finditer(r"(?:const params|window\.bertviz_params) = (?=\{)", script)][at]
    text = script[start:].replace('"root_div_id": root.id', '"root_div_id": 0').replace("\\x3c", "<")
    return json.JSONDecoder().raw_decode(text)[0]


def rows(n, layers=2, heads=2):
    weights = np.random.default_rng(0).dirichlet(np.ones(n), size=(layers, heads, n))
    return np.tril(weights) / np.tril(weights).sum(-1, keepdims=True)


# ------------------------------------------------------------------------------------- what is drawn is what happened
@pytest.mark.parametrize("mask", [masks.causal(), masks.bidirectional(), masks.prefix(3)], ids=repr)
def test_head_view_holds_the_attention_of_the_chosen_layers_and_heads(tiny, mask):
    lm = tiny("tiny-gemma3")
    maps = attention_maps(lm, TEXT, mask)
    params = params_of(viz.bertviz_head_view(lm, TEXT, mask, layers=[1], heads=[3, 0]))
    (attention,) = params["attention"]
    assert np.allclose(attention["attn"][0], maps.weights[1][[3, 0]], atol=1e-4)
    assert attention["left_text"] == attention["right_text"] == maps.tokens
    assert params["include_layers"] == [1] and params["layer"] == 1


def test_model_view_names_the_layers_and_heads_it_shows(tiny):
    lm = tiny("tiny-llama")
    params = params_of(viz.bertviz_model_view(lm, TEXT, masks.bidirectional(), layers=[1], heads=[2]))
    assert (params["include_layers"], params["include_heads"], params["total_heads"]) == ([1], [2], 4)
    weights = attention_maps(lm, TEXT, masks.bidirectional()).weights
    assert np.allclose(params["attention"][0]["attn"], weights[1:, 2:3], atol=1e-4)


@pytest.mark.parametrize(("mask", "future"), [(masks.causal(), False), (None, False), (masks.bidirectional(), True)])
def test_neuron_view_of_gpt2_shows_the_future_exactly_where_the_mask_opens_it(tiny, mask, future):
    params = params_of(viz.bertviz_neuron_view(tiny("tiny-gpt2"), TEXT, mask, layers=[1]))
    assert params["bidirectional"] is future
    upper = np.triu(np.array(params["attention"]["all"]["attn"]), k=1)
    assert bool(upper.any()) is future


def test_neuron_views_layer_and_head_are_places_among_the_chosen_ones(tiny):
    view = viz.bertviz_neuron_view(tiny("tiny-gpt2"), TEXT, layers=[1], heads=[3, 2], layer=1, head=2)
    assert (params_of(view)["layer"], params_of(view)["head"]) == (0, 1)
    assert "layer 1, head 2" in view.alt


@pytest.mark.parametrize("name", [name for name in TINY_NAMES if name != "tiny-gemma2"])
@pytest.mark.parametrize("mask", [masks.causal(), masks.bidirectional(), masks.hybrid(2)], ids=repr)
def test_the_products_of_queries_and_keys_give_the_weights(tiny, name, mask):
    maps = neuron_maps(tiny(name), TEXT, mask)
    scores = np.einsum("lhqd,lhkd->lhqk", maps.queries, maps.keys) / maps.queries.shape[-1] ** 0.5
    closed = ~mask.dense(scores.shape[-1]).numpy()
    scores = np.where(closed & ~np.eye(len(closed), dtype=bool), -np.inf, scores)
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert np.abs(expected - maps.attention.weights).max() < 2e-3


def test_rotary_embedding_is_in_the_vectors():
    import labkit

    lm = labkit.load("tiny-llama", device="cpu")
    maps = neuron_maps(lm, [40, 40, 40, 40])
    layer = maps.queries[0]  # the same token everywhere: only its position tells its queries apart
    assert np.abs(layer[:, 0] - layer[:, 3]).max() > 0.1
    assert np.allclose((layer**2).sum(-1), (layer[:, :1] ** 2).sum(-1), rtol=1e-4)  # a rotation


def test_a_softcap_is_not_drawn_as_if_it_were_not_there(tiny):
    with pytest.raises(ModelError, match="softcap.*head view"):
        viz.bertviz_neuron_view(tiny("tiny-gemma2"), TEXT, masks.bidirectional())


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
@pytest.mark.parametrize("draw", [viz.bertviz_head_view, viz.bertviz_neuron_view, viz.bertviz_compare])
def test_the_model_is_left_as_it_was(tiny, name, draw):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    lm = tiny(name)
    ids = torch.tensor([lm.tokenizer(TEXT)["input_ids"]])
    before, config, doors = lm.model(ids).logits, lm.model.config.to_dict(), set(ALL_ATTENTION_FUNCTIONS)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.model.modules()]
    draw(lm, TEXT)
    assert torch.equal(lm.model(ids).logits, before)
    assert lm.model.config.to_dict() == config and set(ALL_ATTENTION_FUNCTIONS) == doors
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.model.modules()] == hooks


def test_comparison_holds_both_masks_under_their_headings(tiny):
    lm = tiny("tiny-gpt2")
    view = viz.bertviz_compare(lm, TEXT)
    assert [panel.heading for panel in view.panels] == ["causal", "bidirectional"]
    for at, mask in enumerate([masks.causal(), masks.bidirectional()]):
        drawn = np.array(params_of(view, at)["attention"][0]["attn"])
        assert np.allclose(drawn, attention_maps(lm, TEXT, mask).weights, atol=1e-4)
    assert "layer 0, causal and bidirectional" in view.alt
    own = viz.bertviz_compare(lm, TEXT, {"window": masks.sliding_window(2), "prefix": masks.prefix(2)})
    assert [panel.heading for panel in own.panels] == ["window", "prefix"]


# ----------------------------------------------------------------------------------------------------- the page
@pytest.mark.parametrize("kind", ["head", "model", "neuron"])
def test_tokens_break_neither_the_page_nor_the_data(kind):
    n = len(NASTY)
    vectors = np.ones((2, 2, n, 4))
    view = {
        "head": lambda: bertviz.head_view(rows(n), NASTY, note="<i>note</i>"),
        "model": lambda: bertviz.model_view(rows(n), NASTY, note="<i>note</i>"),
        "neuron": lambda: bertviz.neuron_view(rows(n), vectors, vectors, NASTY, note="<i>note</i>"),
    }[kind]()
    page = Scripts(view.html())
    assert len(page.scripts) == 2  # the libraries, and this view
    assert not any("requirejs" in word or "bertviz_params" in word for word in page.words)
    tags = {tag for tag, _ in page.elements}
    assert tags <= {"div", "p", "script"}
    data = params_of(view)["attention"]
    tokens = (data["all"] if kind == "neuron" else data[0])["left_text"]
    assert tokens[:6] == NASTY[:6] and tokens[7] == "␇" and tokens[8].endswith("…")


def test_a_view_asks_nothing_of_a_network():
    vectors = np.ones((2, 2, 5, 4))
    tokens = list("abcde")
    for view in (
        bertviz.head_view(rows(5), tokens),
        bertviz.model_view(rows(5), tokens),
        bertviz.neuron_view(rows(5), vectors, vectors, tokens),
    ):
        sources = [attrs.get("src", "") for _, attrs in Scripts(view.html()).elements]
        assert all(source.startswith("data:") for source in sources if source)


def test_a_notebook_stores_the_view_and_a_sentence():
    view = bertviz.head_view(rows(5), list("abcde"))
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"} and view.alt in bundle["text/plain"]
    assert any(view.alt in word for word in Scripts(bundle["text/html"]).words)
    assert view.alt == "attention of 5 tokens, layer 0"


def test_a_saved_view_is_a_page_of_its_own(tmp_path):
    bertviz.head_view(rows(3), ["ä", "b", "c"]).save(tmp_path / "view.html")
    page = (tmp_path / "view.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "stand-in for d3" in page and r"\u00e4" in page


# -------------------------------------------------------------------------------------------- who brings the libraries
class Kernel:
    """A stand-in for the kernel of a notebook: runs "cells" that show something, as JupyterLab asks for them."""

    def __init__(self, monkeypatch):
        self.before, self.parent = [], {}
        self.events = types.SimpleNamespace(register=lambda event, call: self.before.append(call))
        monkeypatch.setattr(browser_libraries, "_shell", lambda: self)

    def get_parent(self):
        return self.parent

    def run(self, cell, shown, deleted=()):
        said = {"cellId": cell} if cell else {}
        self.parent = {"metadata": {**said, "deletedCells": list(deleted)}}
        for call in self.before:
            call(None)
        return [BROUGHT in each._repr_mimebundle_()["text/html"] for each in shown]


BROUGHT = "stand-in for d3"


@pytest.fixture
def view():
    return bertviz.head_view(rows(3), list("abc"))


def test_one_copy_per_notebook(monkeypatch, view):
    kernel = Kernel(monkeypatch)
    assert kernel.run("one", [view, view]) == [True, False]
    assert kernel.run("two", [view]) == [False]
    assert kernel.run(None, [view]) == [False]


def test_the_cell_that_carries_the_libraries_carries_them_again(monkeypatch, view):
    kernel = Kernel(monkeypatch)
    kernel.run("one", [view])
    assert kernel.run("two", [view]) == [False]
    assert kernel.run("one", [view]) == [True]
    assert kernel.run("one", []) == []  # it shows something else now
    assert kernel.run("two", [view]) == [True]


def test_after_the_carrying_cell_was_deleted_the_next_view_carries(monkeypatch, view):
    kernel = Kernel(monkeypatch)
    kernel.run("one", [view])
    assert kernel.run("two", [view], deleted=["zero"]) == [False]
    assert kernel.run("two", [view], deleted=["one"]) == [True]


def test_a_setup_cell_carries_in_place_of_the_views(monkeypatch, view):
    kernel = Kernel(monkeypatch)
    assert kernel.run("one", [viz.bertviz_setup(), view]) == [True, False]
    assert kernel.run("two", [viz.bertviz_setup()]) == [True]


def test_in_colab_and_outside_a_notebook_each_view_brings_its_own(monkeypatch, view):
    assert all(BROUGHT in view._repr_mimebundle_()["text/html"] for _ in range(2))
    kernel = Kernel(monkeypatch)
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    assert kernel.run("one", [view, view]) == [True, True]


def test_without_the_libraries_a_view_says_so_and_is_bertvizs_online_page(libraries, view):
    (libraries / "d3.min.js").unlink()
    vectors = np.ones((2, 2, 3, 4))
    for each in (view, bertviz.neuron_view(rows(3), vectors, vectors, ["</script>", "b", "c"])):
        with pytest.warns(UserWarning, match="fetch_browser_libraries.py.*needs a network"):
            html = each._repr_mimebundle_()["text/html"]
        page = Scripts(html)
        assert "require.min.js" in page.elements[[tag for tag, _ in page.elements].index("script")][1]["src"]
        assert any("fetches d3 and jQuery from cdnjs" in word for word in page.words)
        assert "requirejs(" in page.scripts[-1] and len(page.scripts) == 2
    with pytest.warns(UserWarning, match="fetch_browser_libraries.py"):
        assert "text/html" not in viz.bertviz_setup()._repr_mimebundle_()


def test_with_the_libraries_nothing_is_warned_of(view):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "text/html" in view._repr_mimebundle_()


def test_missing_bertviz_is_an_error_with_the_command(monkeypatch):
    from labkit.errors import ModelError

    monkeypatch.setattr(bertviz, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install"):
        bertviz.head_view(rows(3), list("abc"))


# ------------------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    "size",
    [
        ("head", 12, 12, 512), ("head", 1, 4, 256), ("head", 48, 12, 100), ("head", 2, 12, 100, 0, 2),
        ("model", 12, 12, 64), ("model", 18, 4, 256), ("neuron", 12, 12, 64, 64), ("neuron", 1, 1, 512, 64),
    ],
)  # fmt: skip
def test_a_view_that_is_too_large_names_one_that_is_not(size):
    size = bertviz._Size(*size)
    with pytest.raises(LabkitError, match="Ask for .*attention_figure.*force=True") as refused:
        size.require_small(force=False)
    size.require_small(force=True)
    smaller = re.search(r"Ask for (.*?);", str(refused.value))[1]
    count = {what: int(found[1]) for what, pattern in SMALLER.items() if (found := re.search(pattern, smaller))}
    if "[0]" in smaller:
        count.setdefault("layers", 1)
        count.setdefault("heads", 1)
    assert bertviz.replace(size, **count).fits
    (grown,) = [what for what, pattern in SMALLER.items() if re.search(pattern, smaller)]
    assert not bertviz.replace(size, **{**count, grown: count[grown] + 1}).fits


SMALLER = {"layers": r"layers=range\((\d+)\)", "heads": r"heads=range\((\d+)\)", "tokens": r"at most (\d+) tokens"}


def test_the_refusal_reaches_whoever_asks_for_a_view(tiny):
    lm, ids = tiny("tiny-gpt2"), [7] * 250
    for draw in (viz.bertviz_head_view, viz.bertviz_model_view, viz.bertviz_neuron_view, viz.bertviz_compare):
        with pytest.raises(LabkitError, match="keep the browser busy"):
            draw(lm, ids)
    assert viz.bertviz_head_view(lm, ids, heads=range(2), layers=[0]).panels


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bertviz.head_view(rows(3)[0], list("abc")), "shape"),
        (lambda: bertviz.head_view(rows(3), list("ab")), "shape .layers, heads, 2, 2."),
        (lambda: bertviz.head_view(rows(3) * np.nan, list("abc")), "NaN"),
        (lambda: bertviz.head_view(rows(3), list("abc"), heads=[2]), "no head 2.*0 to 1"),
        (lambda: bertviz.head_view(rows(3), list("abc"), heads=[]), "at least one head"),
        (lambda: bertviz.head_view(rows(3), list("abc"), layer=5), "layer=5.*0, 1"),
        (lambda: bertviz.model_view(rows(3), list("abc"), heads=[-1]), "no head -1"),
        (lambda: bertviz.neuron_view(rows(3), np.ones((2, 2, 4, 8)), np.ones((2, 2, 3, 8)), list("abc")), "belong"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_words(call, message):
    with pytest.raises(MaskError, match=message):
        call()


@pytest.mark.parametrize("given", [{}, [masks.causal()], "causal"])
def test_comparison_takes_a_dictionary_of_masks(tiny, given):
    with pytest.raises(MaskError, match="heading: mask"):
        viz.bertviz_compare(tiny("tiny-gpt2"), TEXT, given)


# ---------------------------------------------------------------------------------------------- fetching the libraries
def fetch(folder, **env):
    return subprocess.run([sys.executable, str(FETCH), str(folder)], env=env, capture_output=True, text=True)


def a_client(folder, script):
    """A program `npm` in `folder` that runs these lines of sh."""
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / "npm").chmod(0o755)
    return str(folder)


def test_without_npm_one_line_says_what_is_missing(tmp_path):
    done = fetch(tmp_path / "out", PATH=str(tmp_path))
    assert done.returncode == 1 and done.stdout.count("\n") == 1 and not done.stderr
    assert "npm was not found" in done.stdout and not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="a stand-in for npm is a shell script")
def test_a_failing_npm_and_an_altered_archive_leave_nothing_behind(tmp_path):
    failing = a_client(tmp_path / "failing", "echo 'npm error code ENOTFOUND' >&2; exit 1")
    done = fetch(tmp_path / "out", PATH=failing)
    assert done.returncode == 1 and "npm error code ENOTFOUND" in done.stdout and not (tmp_path / "out").exists()
    altered = a_client(tmp_path / "altered", "for name in $2 $3 $4; do echo other > ${name%@*}-${name#*@}.tgz; done")
    done = fetch(tmp_path / "out", PATH=altered)
    assert done.returncode == 1 and "not the file expected" in done.stdout and not (tmp_path / "out").exists()


def test_a_complete_folder_is_left_alone_and_an_incomplete_one_is_not(tmp_path):
    import importlib.util

    spec = importlib.util.spec_from_file_location("fetch_browser_libraries", FETCH)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert set(browser_libraries.NAMES) <= set(script.FILES)
    for name in script.FILES:
        (tmp_path / name).write_text("x", encoding="utf-8")
    assert not script.is_complete(tmp_path)
    (tmp_path / script.CONTENTS).write_text(script.contents(), encoding="utf-8")
    assert script.is_complete(tmp_path)
    done = fetch(tmp_path, PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "d3.min.js").unlink()
    assert not script.is_complete(tmp_path)
