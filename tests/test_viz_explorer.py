"""The attention explorer without a browser: its weights, what it stores and sends, and its pages."""

import base64
import json
import re
import zlib

import numpy as np
import plotly.io
import pytest
import torch

pytest.importorskip("anywidget")

import labkit
from labkit import viz
from labkit.attention import measures
from labkit.attention.maps import AttentionMaps, attention_maps
from labkit.errors import MaskError
from labkit.viz.explorer import ALL_PICTURES, ONE_HEAD, PAGE_LIMIT
from labkit.viz.heat import pooled

SAVED_LIMIT = 300_000  # characters of a notebook


def random_maps(layers, heads, n, causal=False, seed=0):
    """Float16 (layers, heads, n, n), rows of sum 1: the worst case of what has to be kept."""
    scores = np.random.default_rng(seed).normal(size=(layers, heads, n, n), scale=2)
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf) if causal else scores
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float16)


def explorer(layers=2, heads=3, n=6, **options):
    return viz.attention_explorer(random_maps(layers, heads, n, causal=True), random_maps(layers, heads, n), **options)


def unpacked(packed, *shape):
    planes = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(2, -1)
    return np.ascontiguousarray(planes.T).view("<f2").reshape(shape)


def saved_size(widget):
    """Characters that a notebook needs for the widget's state and its figure."""
    state = json.dumps(
        widget.get_state(), default=lambda b: base64.b64encode(b).decode() if isinstance(b, bytes) else ""
    )
    bundle, _ = widget._repr_mimebundle_()
    return len(state) + len(json.dumps(bundle))


def test_the_head_on_show_is_kept_to_the_bit_and_follows_layer_and_head():
    widget = explorer()
    assert (widget.layer, widget.head, widget.view, widget.query) == (0, 0, "before", None)
    for layer, head in ((0, 0), (1, 2), (1, 0)):
        widget.layer, widget.head = layer, head
        assert [widget.shown[key] for key in ("layer", "head", "size")] == [layer, head, 6]
        assert np.array_equal(unpacked(widget.shown["bytes"], 2, 6, 6), widget.weights[:, layer, head])


def test_it_takes_maps_and_names_them_by_their_masks():
    tokens = ["the", "cat", '<b>&"', "down"]
    said = {"tokens": tokens, "layers": (3, 5), "name": "m"}
    before = AttentionMaps(random_maps(2, 3, 4, causal=True), mask="causal()", **said)
    after = AttentionMaps(random_maps(2, 3, 4), mask="prefix(2)", **said)
    widget = viz.attention_explorer(before, after)
    assert widget.tokens == tokens and widget.names == ["causal", "prefix(2)"]
    assert widget.layers == [3, 5] and widget.layer == 3
    widget.layer = 5
    assert np.array_equal(unpacked(widget.shown["bytes"], 2, 4, 4)[1], after.weights[1, 0])
    assert viz.attention_explorer(before, before).names == ["before", "after"]  # the same name would tell nothing
    assert viz.attention_explorer(before, after, names=["a", "b"]).names == ["a", "b"]
    alone = viz.attention_explorer(after)
    assert alone.names == ["prefix(2)"] and alone.weights.shape == (1, 2, 3, 4, 4)


def test_it_takes_arrays_tensors_and_a_single_map():
    weights = random_maps(2, 3, 5)
    plain = viz.attention_explorer(weights)
    assert plain.names == ["attention"] and plain.tokens == ["0", "1", "2", "3", "4"]
    tensor = torch.tensor(weights.astype(np.float32)).bfloat16()
    assert viz.attention_explorer(tensor).weights.shape == (1, 2, 3, 5, 5)
    assert viz.attention_explorer(weights[0]).layers == [0] and viz.attention_explorer(weights[0, 0]).heads == 1


def test_the_measures_are_those_of_the_maps():
    widget = explorer()
    by_name = {"entropy": measures.entropy, "future": measures.future_mass, "distance": measures.mean_distance}
    for name, measure in by_name.items():
        assert np.allclose(widget.measures[name], measure(widget.weights).reshape(2, -1), atol=1e-4)
    assert widget.measures["future"][0] == [0] * 6


def test_the_small_pictures_show_every_head_in_256_shades():
    widget = explorer(n=5)
    size, kept = widget.pictures["size"], widget.pictures
    shades = np.frombuffer(zlib.decompress(kept["bytes"]), np.uint8).reshape(2, 2, 3, size, size)
    assert size == 5 and (shades.max((-1, -2)) == 255).all()
    shown = shades / 255 * np.array(kept["peaks"]).reshape(2, 2, 3, 1, 1)
    assert np.abs(shown - widget.weights).max() < 1 / 255


@pytest.mark.parametrize(("layers", "heads", "n"), [(12, 12, 128), (2, 2, 512), (28, 16, 24), (1, 1, 1)])
def test_a_saved_explorer_stays_small(layers, heads, n):
    widget = explorer(layers, heads, n)
    assert len(widget.pictures["bytes"]) <= ALL_PICTURES and len(widget.shown["bytes"]) <= ONE_HEAD
    assert saved_size(widget) < SAVED_LIMIT
    assert widget.shown["size"] == (n if n <= 128 else 128)


def test_python_sends_the_exact_weights_that_are_asked_for(monkeypatch):
    widget, sent = explorer(2, 2, 200), []
    monkeypatch.setattr(widget, "send", lambda content, buffers=None: sent.append((content, buffers)))
    assert widget.shown["size"] < 200
    widget._handle_custom_msg({"ask": [1, 1]}, [])
    widget._handle_custom_msg({"ask": [7, 0]}, [])  # there is no such head: no answer
    ((content, (packed,)),) = sent
    assert content == {"layer": 1, "head": 1}
    assert np.array_equal(unpacked(packed, 2, 200, 200), widget.weights[:, 1, 1])


def test_a_page_on_its_own_holds_what_its_limit_allows_in_the_chosen_order():
    widget = explorer(4, 4, 32)
    whole = widget.to_html()
    assert "This page contains the weights of all heads." in whole and "http" not in whole.replace("http-equiv", "")
    assert len(library(whole)) == 16
    assert len(library(widget.to_html(limit=0))) == 1  # the head that is shown is always in the page
    limit = len(whole) - 20_000
    widget.head, widget.sort, widget.view = 2, "entropy", "after"
    entropy = np.array(widget.measures["entropy"][1])
    for rising in (False, True):
        widget.rising = rising
        page = widget.to_html(limit=limit)
        heads = [head["layer"] * 4 + head["head"] for head in library(page)]
        order = [i for i in np.argsort(entropy if rising else -entropy, kind="stable") if i != 2]
        assert heads == [2, *order[: len(heads) - 1]] and 1 < len(heads) < 16
        assert len(page) <= limit + 1000 and f"contains the weights of {len(heads)} of 16 heads" in page
        for head in library(page):
            assert np.array_equal(unpacked(head["bytes"], 2, 32, 32), widget.weights[:, head["layer"], head["head"]])


def test_a_page_of_a_long_text_keeps_to_the_limit_and_escapes_tokens():
    page = explorer(12, 12, 128, tokens=["</script><b>&\"'"] * 128).to_html()
    assert len(page) <= PAGE_LIMIT + 1000
    assert page.count("</script>") == 2 and "{" not in re.search("<h1>.*</h1>", page).group()


@pytest.mark.parametrize("n", [1, 5, 64])
def test_beside_the_widget_is_a_figure_of_the_head_on_show(n, monkeypatch):
    widget = explorer(n=n)
    widget.layer, widget.head = 1, 2
    maps = widget.weights[:, 1, 2].astype(float)
    drawn = widget.figure
    assert np.allclose([heat.z for heat in drawn.data], pooled(maps, 32), atol=6e-5)
    assert drawn.layout.title.text == "Layer 1, head 2"
    headings = " ".join(note.text for note in drawn.layout.annotations)
    assert "causal" in headings and "bidirectional" in headings
    monkeypatch.setattr(plotly.io.renderers, "default", "plotly_mimetype")  # as labkit's notebooks set it
    bundle, _ = widget._repr_mimebundle_()
    assert bundle["application/vnd.plotly.v1+json"]["data"] == json.loads(drawn.to_json())["data"]
    assert "application/vnd.jupyter.widget-view+json" in bundle


@pytest.mark.parametrize(("name", "value"), [("layer", 2), ("head", 3), ("head", -1), ("query", 6), ("query", -1)])
def test_what_does_not_exist_cannot_be_shown(name, value):
    widget = explorer()
    with pytest.raises(MaskError, match=f"no {name} {value}"):
        setattr(widget, name, value)
    widget.query, widget.view = 5, "difference"
    with pytest.raises(MaskError, match="no view 'difference' here: choose one of before"):
        viz.attention_explorer(random_maps(1, 1, 4)).view = "difference"


GOOD = random_maps(2, 3, 4)
MAPS = [
    AttentionMaps(GOOD, list(tokens), layers, "causal()", "m")
    for tokens, layers in (("abcd", (0, 1)), ("abce", (0, 1)), ("abcd", (0, 2)))
]


@pytest.mark.parametrize(
    ("before", "after", "options", "words"),
    [
        (np.full((2, 2), np.nan), None, {}, "NaN"),
        (-GOOD, None, {}, "between 0 and 1"),
        (GOOD.astype(np.float32) * 70_000, None, {}, "between 0 and 1"),
        (GOOD[..., :3, :], None, {}, "shape"),
        (GOOD[None], None, {}, "shape"),
        (np.ones(3), None, {}, "shape"),
        (np.ones((3, 3), dtype=bool), None, {}, "floating-point"),
        (GOOD, GOOD[:1], {}, "those after"),
        (GOOD, None, {"tokens": ["a"]}, "1 tokens were given for 4 keys"),
        (GOOD, None, {"tokens": "a b c d"}, "list of tokens"),
        (GOOD, GOOD, {"names": ["one"]}, "expected a list of 2"),
        (GOOD, None, {"names": "x"}, "expected a list of 1"),
        (MAPS[0], MAPS[1], {}, "the tokens before and after differ"),
        (MAPS[0], MAPS[2], {}, "the layers before and after differ"),
    ],
)
def test_what_is_no_attention_or_not_comparable_is_refused(before, after, options, words):
    with pytest.raises(MaskError, match=words):
        viz.attention_explorer(before, after, **options)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
def test_the_explorer_compares_causal_with_bidirectional_whatever_the_model_is(tiny, name, converted):
    lm, ids = tiny(name), list(range(40, 60))
    own = attention_maps(lm, ids).weights
    labkit.to_bidirectional(lm.model)
    both_ways = attention_maps(lm, ids).weights
    if not converted:
        labkit.to_causal(lm.model)
    explorer = labkit.explore_attention(lm, ids)
    assert explorer.names == ["causal", "bidirectional"] and explorer.layers == [0, 1]
    assert np.abs(explorer.weights.astype(np.float32) - np.stack([own, both_ways])).max() < 2e-3
    assert labkit.explore_attention(lm, ids, layers=[1]).layers == [1]


def library(page):
    """The exact heads that a page on its own holds."""
    model = json.loads(re.search(r'widget-state\+json">(.*)</script>', page).group(1))["state"]["widget"]
    heads = model["state"]["library"]
    for buffer in model["buffers"]:
        if buffer["path"][0] == "library":
            heads[buffer["path"][1]]["bytes"] = base64.b64decode(buffer["data"])
    return heads
