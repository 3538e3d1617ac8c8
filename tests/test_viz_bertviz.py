"""bertviz views: what the page holds is what the model computed, which output brings the libraries, what is refused."""

import importlib.util
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
from labkit.attention.maps import AttentionMaps, attention_maps
from labkit.attention.neurons import NeuronMaps, neuron_maps
from labkit.errors import LabkitError, MaskError, ModelError
from labkit.models.tiny import TINY_NAMES
from labkit.viz import bertviz, browser_libraries

pytest.importorskip("bertviz")

TEXT = "the cat sat by the river bank"
FETCH = Path(__file__).resolve().parent.parent / "scripts" / "fetch_browser_libraries.py"
NASTY = ["<b>", "</script>", '"quoted"', "<!--", "a & b", "it's", "\u2028", "\x07", "extraordinarily-long-token"]
BROUGHT = "stand-in for d3"


@pytest.fixture(autouse=True)
def libraries(tmp_path, monkeypatch):
    """Two short stand-ins for d3 and jQuery, which no cell has brought yet."""
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


def params_of(view, at: int = 0) -> dict:
    """The data that bertviz's script is given, read back from the page."""
    script = Scripts(view.html(libraries=False)).scripts[-1]
    start = [m.end() for m in re.finditer(r"(?:const params|window\.bertviz_params) = (?=\{)", script)][at]
    text = script[start:].replace('"root_div_id": root.id', '"root_div_id": 0').replace("\\x3c", "<")
    return json.JSONDecoder().raw_decode(text)[0]


def some_maps(tokens, layers=2, heads=2):
    weights = np.random.default_rng(0).dirichlet(np.ones(len(tokens)), size=(layers, heads, len(tokens)))
    return AttentionMaps(weights.astype(np.float16), list(tokens), tuple(range(layers)), "causal()", "<i>m</i>")


def neurons_of(maps, dim=4):
    vectors = np.ones((*maps.weights.shape[:3], dim), dtype=np.float32)
    return NeuronMaps(maps, vectors, vectors)


def views_of(tokens):
    maps = some_maps(tokens)
    return [bertviz.head_view(maps), bertviz.model_view(maps), bertviz.neuron_view(neurons_of(maps))]


# ------------------------------------------------------------------------------ what is drawn is what was computed
@pytest.mark.parametrize("mask", [masks.causal(), masks.bidirectional(), masks.prefix(3)], ids=repr)
def test_views_hold_the_attention_of_the_chosen_layers_and_heads(tiny, mask):
    lm = tiny("tiny-gemma3")
    maps = attention_maps(lm, TEXT, mask)
    params = params_of(viz.bertviz_head_view(lm, TEXT, mask, layers=[1], heads=[3, 0]))
    (attention,) = params["attention"]
    assert np.allclose(attention["attn"][0], maps.weights[1][[3, 0]], atol=1e-4)
    assert attention["left_text"] == attention["right_text"] == maps.tokens
    assert params["include_layers"] == [1] and params["layer"] == 1
    params = params_of(viz.bertviz_model_view(lm, TEXT, mask, layers=[1], heads=[2]))
    assert (params["include_layers"], params["include_heads"], params["total_heads"]) == ([1], [2], 4)
    assert np.allclose(params["attention"][0]["attn"], maps.weights[1:, 2:3], atol=1e-4)


@pytest.mark.parametrize(("mask", "future"), [(masks.causal(), False), (None, False), (masks.bidirectional(), True)])
def test_neuron_view_shows_the_future_exactly_where_the_mask_opens_it(tiny, mask, future):
    view = viz.bertviz_neuron_view(tiny("tiny-gpt2"), TEXT, mask, layers=[1], heads=[3, 2], layer=1, head=2)
    params = params_of(view)
    assert params["bidirectional"] is future and (params["layer"], params["head"]) == (0, 1)
    assert bool(np.triu(np.array(params["attention"]["all"]["attn"]), k=1).any()) is future
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


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
@pytest.mark.parametrize("draw", [viz.bertviz_head_view, viz.bertviz_neuron_view, viz.bertviz_compare])
def test_the_model_is_left_as_it_was(tiny, name, draw):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    lm = tiny(name)
    ids = torch.tensor([lm.tokenizer(TEXT)["input_ids"]])
    before, config, functions = lm.model(ids).logits, lm.model.config.to_dict(), set(ALL_ATTENTION_FUNCTIONS)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.model.modules()]
    draw(lm, TEXT)
    assert torch.equal(lm.model(ids).logits, before)
    assert lm.model.config.to_dict() == config and set(ALL_ATTENTION_FUNCTIONS) == functions
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


# ------------------------------------------------------------------------------------------------------- the page
def test_tokens_break_neither_the_page_nor_the_data_and_nothing_is_requested():
    for view in views_of(NASTY):
        page = Scripts(view.html())
        assert len(page.scripts) == 2  # the libraries, and this view
        assert not any("requirejs" in word or "bertviz_params" in word for word in page.words)
        assert {tag for tag, _ in page.elements} <= {"div", "p", "script"}
        assert not any("src" in attributes for _, attributes in page.elements)
        data = params_of(view)["attention"]
        tokens = (data["all"] if "all" in data else data[0])["left_text"]
        assert tokens[:6] == NASTY[:6] and tokens[7] == "␇" and tokens[8].endswith("…")


def test_a_notebook_stores_the_view_and_a_sentence_and_a_saved_view_is_a_page(tmp_path):
    view = bertviz.head_view(some_maps("äbc"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bundle = view._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"} and view.alt == "attention of 3 tokens, layer 0"
    assert view.alt in bundle["text/plain"] and view.alt in " ".join(Scripts(bundle["text/html"]).words)
    view.save(tmp_path / "view.html")
    page = (tmp_path / "view.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and BROUGHT in page and r"\u00e4" in page


class Kernel:
    """A stand-in for the kernel of a notebook: runs "cells" that show something, as JupyterLab asks for them."""

    def __init__(self, monkeypatch):
        self.before, self.parent = [], {}
        self.events = types.SimpleNamespace(register=lambda event, call: self.before.append(call))
        monkeypatch.setattr(browser_libraries, "_shell", lambda: self)

    def get_parent(self):
        return self.parent

    def run(self, cell, *outputs, deleted=()):
        """Which of the outputs of a cell bring the libraries; each output is made by a function."""
        self.parent = {"metadata": {**({"cellId": cell} if cell else {}), "deletedCells": list(deleted)}}
        for call in self.before:
            call(None)
        return [BROUGHT in output() for output in outputs]


def test_a_notebook_holds_one_copy_of_the_libraries_wherever_it_is_run_again(monkeypatch):
    shown = bertviz.head_view(some_maps("abc"))
    view, setup = lambda: shown._repr_mimebundle_()["text/html"], lambda: viz.bertviz_setup().data
    assert view().count(BROUGHT) == view().count(BROUGHT) == 1  # outside a notebook each view brings its own
    kernel = Kernel(monkeypatch)
    assert kernel.run("one", view, view) == [True, False]
    assert kernel.run("two", view) == kernel.run(None, view) == [False]
    assert kernel.run("one", view) == [True]  # the cell that brought them is run again
    assert kernel.run("one") == [] and kernel.run("two", view) == [True]  # it shows nothing now
    assert kernel.run("three", view, deleted=["zero"]) == [False]
    assert kernel.run("three", view, deleted=["two"]) == [True]
    assert kernel.run("four", setup, view) == [True, False] and kernel.run("five", setup) == [True]
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    assert kernel.run("six", view, view) == [True, True]  # every output of Colab is a page of its own


def test_a_front_end_that_does_not_name_its_cells_gets_one_copy(monkeypatch):
    view, kernel = bertviz.head_view(some_maps("abc")), Kernel(monkeypatch)
    shown = [kernel.run(None, lambda: view._repr_mimebundle_()["text/html"]) for _ in range(3)]
    assert shown == [[True], [False], [False]]


def test_without_the_libraries_a_view_warns_and_is_bertvizs_online_page(libraries):
    views = [bertviz.head_view(some_maps("abc")), bertviz.neuron_view(neurons_of(some_maps(["</script>", "b", "c"])))]
    (libraries / "d3.min.js").unlink()
    for view in views:
        with pytest.warns(UserWarning, match="fetch_browser_libraries.py.*needs a network"):
            page = Scripts(view._repr_mimebundle_()["text/html"])
        assert "require.min.js" in next(attributes["src"] for tag, attributes in page.elements if tag == "script")
        assert any("fetches d3 and jQuery from cdnjs" in word for word in page.words)
        assert "requirejs(" in page.scripts[-1] and len(page.scripts) == 2
    with pytest.warns(UserWarning, match="fetch_browser_libraries.py"):
        assert "<script" not in viz.bertviz_setup().data


# ------------------------------------------------------------------------------------------------------ what is refused
SMALLER = {"layers": r"layers=range\((\d+)\)", "heads": r"heads=range\((\d+)\)", "n": r"at most (\d+) tokens"}


@pytest.mark.parametrize(
    ("view", "layers", "heads", "n", "dim", "beside"),
    [
        ("head", 12, 12, 512, 0, 1), ("head", 1, 4, 256, 0, 1), ("head", 48, 12, 100, 0, 1), ("head", 2, 12, 100, 0, 2),
        ("model", 12, 12, 64, 0, 1), ("model", 18, 4, 256, 0, 1), ("neuron", 12, 12, 64, 64, 1),
        ("neuron", 1, 1, 512, 64, 1),
    ],
)  # fmt: skip
def test_a_view_that_is_too_large_names_the_largest_one_that_is_not(view, layers, heads, n, dim, beside):
    size = {"layers": layers, "heads": heads, "n": n, "dim": dim, "beside": beside}
    with pytest.raises(LabkitError, match="Ask for .*attention_figure.*force=True") as refused:
        bertviz._require_small(view, **size)
    bertviz._require_small(view, **size, force=True)
    smaller = re.search(r"Ask for (.*?);", str(refused.value))[1]
    one = {"layers": 1, "heads": 1} if "heads=[0]" in smaller else {"layers": 1} if "layers=[0]" in smaller else {}
    ((name, count),) = [(name, int(m[1])) for name, pattern in SMALLER.items() if (m := re.search(pattern, smaller))]
    bertviz._require_small(view, **size | one | {name: count})
    with pytest.raises(LabkitError):
        bertviz._require_small(view, **size | one | {name: count + 1})


def test_a_large_view_is_refused_by_every_function(tiny):
    lm, ids = tiny("tiny-gpt2"), [7] * 250
    for draw in (viz.bertviz_head_view, viz.bertviz_model_view, viz.bertviz_neuron_view, viz.bertviz_compare):
        with pytest.raises(LabkitError, match="keep the browser busy"):
            draw(lm, ids)
    assert viz.bertviz_head_view(lm, ids, heads=range(2), layers=[0]).panels


@pytest.mark.parametrize(
    ("draw", "given", "message"),
    [
        (viz.bertviz_head_view, {"heads": [4]}, "heads from 0 to 3"),
        (viz.bertviz_model_view, {"heads": [-1]}, "heads from 0 to 3"),
        (viz.bertviz_head_view, {"heads": []}, "heads from 0 to 3"),
        (viz.bertviz_head_view, {"layer": 5}, "layer=5.*0, 1"),
        (viz.bertviz_neuron_view, {"heads": [1], "head": 2}, "head=2.* 1"),
        (viz.bertviz_compare, {"masks": {}}, "heading: mask"),
        (viz.bertviz_compare, {"masks": masks.causal()}, "heading: mask"),
    ],
)
def test_a_view_that_cannot_be_shown_is_refused(tiny, draw, given, message):
    with pytest.raises(MaskError, match=message):
        draw(tiny("tiny-gpt2"), TEXT, **given)


def test_what_bertviz_cannot_draw_is_refused_with_the_cure(tiny, monkeypatch):
    with pytest.raises(ModelError, match="softcap.*head view"):
        viz.bertviz_neuron_view(tiny("tiny-gemma2"), TEXT, masks.bidirectional())
    monkeypatch.setattr(bertviz, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install"):
        bertviz.head_view(some_maps("abc"))


# ---------------------------------------------------------------------------------------------- fetching the libraries
def fetch(folder, **env):
    return subprocess.run([sys.executable, str(FETCH), str(folder)], env=env, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="a stand-in for npm is a shell script")
@pytest.mark.parametrize(
    ("npm", "message"),
    [
        (None, "npm was not found"),
        ("echo 'npm error code ENOTFOUND' >&2; exit 1", "npm error code ENOTFOUND"),
        ("for name in $2 $3 $4; do echo other > ${name%@*}-${name#*@}.tgz; done", "not the file expected"),
    ],
)
def test_a_failed_fetch_is_one_line_and_leaves_nothing_behind(tmp_path, npm, message):
    if npm:
        (tmp_path / "npm").write_text(f"#!/bin/sh\n{npm}\n", encoding="utf-8")
        (tmp_path / "npm").chmod(0o755)
    done = fetch(tmp_path / "out", PATH=str(tmp_path))
    assert done.returncode == 1 and message in done.stdout and not (tmp_path / "out").exists()


def test_a_complete_folder_is_left_alone_and_an_incomplete_one_is_not(tmp_path):
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
