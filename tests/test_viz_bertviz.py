"""bertviz views: what the page holds is what the model computed, nothing is requested, and what is refused."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bs4 import BeautifulSoup  # of nbconvert

from labkit import masks, viz
from labkit.attention.maps import AttentionMaps, attention_maps
from labkit.errors import LabkitError, MaskError, ModelError
from labkit.viz import bertviz

pytest.importorskip("bertviz")

TEXT = "the cat sat by the river bank"
FETCH = Path(__file__).resolve().parent.parent / "scripts" / "fetch_browser_libraries.py"
NASTY = ["<b>", "</script>", '"quoted"', "<!--", "a & b", "it's", "\u2028", "\x07", "extraordinarily-long-token"]
VIEWS = [viz.bertviz_head_view, viz.bertviz_model_view, viz.bertviz_neuron_view, viz.bertviz_compare]


@pytest.fixture(autouse=True)
def libraries(tmp_path, monkeypatch):
    """Two short stand-ins for d3 and jQuery."""
    for name in bertviz.NAMES:
        (tmp_path / name).write_text(f"/* stand-in for {name} */", encoding="utf-8")
    monkeypatch.setattr(bertviz, "FOLDER", tmp_path)
    return tmp_path


def scripts_of(html: str) -> str:
    return "".join(script.get_text() for script in BeautifulSoup(html, "html.parser")("script"))


def params_of(view, at: int = 0) -> dict:
    """The data that bertviz's script is given, read back from the page."""
    script = scripts_of(view)
    start = [m.end() for m in re.finditer(r"(?:const params|window\.bertviz_params) = (?=\{)", script)][at]
    text = script[start:].replace('"root_div_id": root.id', '"root_div_id": 0').replace("\\x3c", "<")
    return json.JSONDecoder().raw_decode(text)[0]


@pytest.fixture(params=VIEWS[:3])
def draw_nasty(request, monkeypatch):
    """Draws a view of random maps on tokens that could break a page."""
    n = len(NASTY)
    weights = np.random.default_rng(0).dirichlet(np.ones(n), size=(2, 2, n)).astype(np.float16)
    maps, vectors = AttentionMaps(weights, NASTY, (0, 1), "causal()", "<i>m</i>"), np.ones((2, 2, n, 4), np.float32)
    monkeypatch.setattr(bertviz, "attention_maps", lambda *args, **options: maps)
    monkeypatch.setattr(bertviz, "neuron_maps", lambda *args, **options: (maps, vectors, vectors))
    return partial(request.param, None, TEXT)


@pytest.mark.parametrize("mask", [masks.causal(), masks.prefix(3)], ids=repr)
def test_views_hold_the_attention_of_the_chosen_layers(tiny, mask):
    lm = tiny("tiny-gemma3")
    maps = attention_maps(lm, TEXT, mask)
    params = params_of(viz.bertviz_head_view(lm, TEXT, mask, layers=[1]))
    (attention,) = params["attention"]
    assert np.allclose(attention["attn"][0], maps.weights[1], atol=1e-4)
    assert attention["left_text"] == attention["right_text"] == maps.tokens
    assert params["include_layers"] == [1] and params["layer"] == 1
    params = params_of(viz.bertviz_model_view(lm, TEXT, mask, layers=[1]))
    assert (params["include_layers"], params["total_heads"]) == ([1], 4)
    assert np.allclose(params["attention"][0]["attn"], maps.weights[1:], atol=1e-4)


@pytest.mark.parametrize(("mask", "future"), [(None, False), (masks.bidirectional(), True)])
def test_neuron_view_shows_the_future_exactly_where_the_mask_opens_it(tiny, mask, future):
    view = viz.bertviz_neuron_view(tiny("tiny-gpt2"), TEXT, mask, layers=[1])
    params = params_of(view)
    assert params["bidirectional"] is future and "layer 1, head 0" in view.alt
    assert bool(np.triu(np.array(params["attention"]["all"]["attn"]), k=1).any()) is future


def test_comparison_holds_both_masks_under_their_headings(tiny):
    lm = tiny("tiny-gpt2")
    view = viz.bertviz_compare(lm, TEXT)
    assert re.findall(r'"heading":"(\w+)"', view) == ["causal", "bidirectional"]
    for at, mask in enumerate([masks.causal(), masks.bidirectional()]):
        drawn = np.array(params_of(view, at)["attention"][0]["attn"])
        assert np.allclose(drawn, attention_maps(lm, TEXT, mask).weights, atol=1e-4)


def test_tokens_break_neither_the_page_nor_the_data_and_nothing_is_requested(draw_nasty):
    view = draw_nasty()
    page = BeautifulSoup(view, "html.parser")
    assert {tag.name for tag in page(True)} <= {"div", "p", "script"} and not page(src=True)
    assert all(f"stand-in for {name}" in scripts_of(view) for name in bertviz.NAMES)
    for script in page("script"):
        script.decompose()
    words = page.get_text()
    assert view.alt.partition(": ")[2] in words and "requirejs" not in words and "bertviz_params" not in words
    data = params_of(view)["attention"]
    tokens = (data["all"] if "all" in data else data[0])["left_text"]
    assert tokens[:6] == NASTY[:6] and tokens[7] == "␇" and tokens[8].endswith("…")


def test_without_the_libraries_a_view_warns_and_is_bertvizs_online_page(libraries, draw_nasty):
    (libraries / "d3.min.js").unlink()
    with pytest.warns(UserWarning, match="fetch_browser_libraries.py"):
        view = draw_nasty()
    assert "require.min.js" in BeautifulSoup(view, "html.parser").find(src=True)["src"]
    assert "requirejs(" in scripts_of(view) and "fetches d3 and jQuery" in view


@pytest.mark.parametrize("draw", VIEWS)
def test_a_large_view_is_refused_and_a_part_of_it_is_not(tiny, draw):
    lm, ids = tiny("tiny-gpt2"), [7] * 250
    with pytest.raises(LabkitError, match="layers=.0.*attention_figure"):
        draw(lm, ids)
    assert "150 tokens" in draw(lm, ids[:150], layers=[0])


@pytest.mark.parametrize("invalid", [{}, masks.causal()])
def test_a_view_that_cannot_be_shown_is_refused(tiny, monkeypatch, invalid):
    with pytest.raises(MaskError, match="heading: mask"):
        viz.bertviz_compare(tiny("tiny-gpt2"), TEXT, invalid)
    monkeypatch.setitem(sys.modules, "bertviz.head_view", None)
    with pytest.raises(ModelError, match="pip install"):
        viz.bertviz_compare(tiny("tiny-gpt2"), TEXT)


@pytest.mark.skipif(sys.platform == "win32", reason="a stand-in for npm is a shell script")
def test_a_failed_fetch_of_the_libraries_is_one_line_and_leaves_nothing_behind(tmp_path):
    script = "for name in $2 $3 $4; do echo other > ${name%@*}-${name#*@}.tgz; done"
    for npm, message in ((None, "npm was not found"), (script, "not the file expected")):
        if npm:
            (tmp_path / "npm").write_text(f"#!/bin/sh\n{npm}\n", encoding="utf-8")
            (tmp_path / "npm").chmod(0o755)
        command = [sys.executable, str(FETCH), str(tmp_path / "out")]
        done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stdout and not (tmp_path / "out").exists()
