"""The attention explorer without a browser: its weights, what it stores and sends, and its pages."""

import base64
import json
import re
import zlib

import numpy as np
import plotly.io
import pytest

pytest.importorskip("anywidget")

import labkit
from labkit.attention import measures
from labkit.attention.maps import AttentionMaps, attention_maps
from labkit.errors import MaskError
from labkit.viz.explorer import Explorer
from labkit.viz.heat import pooled

SAVED_LIMIT = 400_000  # characters of a notebook


def random_maps(layers, heads, n, causal=False, tokens=None):
    """Maps with rows of sum 1: the worst case of what has to be kept."""
    scores = np.random.default_rng(int(causal)).normal(size=(layers, heads, n, n), scale=2)
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf) if causal else scores
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float16)
    mask = "causal()" if causal else "bidirectional()"
    return AttentionMaps(weights, tokens or [f"t{i}" for i in range(n)], tuple(range(layers)), mask, "m")


def explorer(layers=2, heads=3, n=6, **options):
    return Explorer(random_maps(layers, heads, n, causal=True, **options), random_maps(layers, heads, n, **options))


def unpacked(packed, *shape):
    return np.frombuffer(zlib.decompress(packed), "<f4").reshape(shape)


def held_by(page):
    """The heads that a page on its own holds."""
    model = json.loads(re.search(r'widget-state\+json">(.*)</script>', page).group(1))["state"]["widget"]
    heads = model["state"]["held"]
    for buffer in model["buffers"]:
        if buffer["path"][0] == "held":
            heads[buffer["path"][1]]["bytes"] = base64.b64decode(buffer["data"])
    return heads


def test_the_head_on_show_is_kept_to_the_bit_and_follows_layer_and_head():
    widget = explorer()
    assert (widget.layer, widget.head, widget.view, widget.query) == (0, 0, "before", None)
    for layer, head in ((0, 0), (1, 2), (1, 0)):
        widget.layer, widget.head = layer, head
        (held,) = widget.held
        assert [held[key] for key in ("layer", "head", "size")] == [layer, head, 6]
        assert np.array_equal(unpacked(held["bytes"], 2, 6, 6), widget.weights[:, layer, head])


def test_measures_and_small_pictures_are_those_of_the_maps():
    widget = explorer(n=5)
    by_name = {"entropy": measures.entropy, "future": measures.future_mass, "distance": measures.mean_distance}
    for name, measure in by_name.items():
        assert np.allclose(widget.measures[name], measure(widget.weights).reshape(2, -1), atol=1e-4)
    shades = np.frombuffer(zlib.decompress(widget.pictures["bytes"]), np.uint8).reshape(2, 2, 3, 5, 5)
    shown = shades / 255 * np.array(widget.pictures["peaks"]).reshape(2, 2, 3, 1, 1)
    assert np.abs(shown - widget.weights).max() < 1 / 255


@pytest.mark.parametrize(("layers", "heads", "n"), [(12, 12, 128), (2, 2, 512), (28, 16, 24), (1, 1, 1)])
def test_a_saved_explorer_stays_small_and_has_a_figure_of_the_head_on_show(layers, heads, n, monkeypatch):
    monkeypatch.setattr(plotly.io.renderers, "default", "plotly_mimetype")  # as labkit's notebooks set it
    widget = explorer(layers, heads, n)
    widget.layer = layers - 1
    state = json.dumps(widget.get_state(), default=lambda b: base64.b64encode(b).decode() if type(b) is bytes else "")
    bundle, _ = widget._repr_mimebundle_()
    assert len(state) + len(json.dumps(bundle)) < SAVED_LIMIT
    assert widget.held[0]["size"] == min(n, 128) and "application/vnd.jupyter.widget-view+json" in bundle
    figure = widget.figure
    assert bundle["application/vnd.plotly.v1+json"]["data"] == json.loads(figure.to_json())["data"]
    assert np.allclose([heat.z for heat in figure.data], pooled(widget.weights[:, -1, 0].astype(float), 32), atol=6e-5)
    assert figure.layout.title.text == f"Layer {layers - 1}, head 0"


def test_python_sends_the_exact_weights_that_are_asked_for(monkeypatch):
    widget, sent = explorer(2, 2, 200), []
    monkeypatch.setattr(widget, "send", lambda content, buffers=None: sent.append((content, buffers)))
    widget._handle_custom_msg({"ask": [1, 1]}, [])
    ((content, (packed,)),) = sent
    assert content == {"layer": 1, "head": 1, "size": 200}
    assert np.array_equal(unpacked(packed, 2, 200, 200), widget.weights[:, 1, 1])


def test_a_page_on_its_own_holds_the_exact_weights_of_all_heads():
    widget = explorer(4, 4, 32, tokens=["</script><b>&\"'"] * 32)
    page = widget.to_html()
    assert page.count("</script>") == 2 and "http" not in page.replace("http-equiv", "")
    assert len(heads := held_by(page)) == 16
    for head in heads:
        assert np.array_equal(unpacked(head["bytes"], 2, 32, 32), widget.weights[:, head["layer"], head["head"]])


def test_what_does_not_exist_is_refused():
    widget = explorer()
    for name, value in {"layer": 2, "head": 3, "query": -1}.items():
        with pytest.raises(MaskError, match=f"no {name} {value!r} here: choose one of"):
            setattr(widget, name, value)


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
    assert (explorer.layers, explorer.heads) == (2, 4)
    assert np.abs(explorer.weights.astype(np.float32) - np.stack([own, both_ways])).max() < 2e-3
