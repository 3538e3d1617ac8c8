"""bertviz's three views of a model's attention, drawn by bertviz's own JavaScript, without a network.

    bertviz_head_view(lm, "the cat sat", masks.causal())      # one layer: lines from each query to its keys
    bertviz_model_view(lm, "the cat sat")                      # every layer and head, small
    bertviz_neuron_view(lm, "the cat sat")                     # queries, keys and their products behind one head
    bertviz_compare(lm, "the cat sat")                         # causal and bidirectional head views beside each other

They capture the maps and hand them to `head_view`, `model_view` and `neuron_view`, which draw. The browser's work grows
with the square of the number of tokens; a view that would keep it busy for long is refused, with the smaller one to ask
for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from labkit.attention.maps import AttentionMaps, attention_maps
from labkit.attention.neurons import NeuronMaps, neuron_maps
from labkit.attention.plain import visible
from labkit.errors import LabkitError, MaskError, ModelError
from labkit.masks import bidirectional, causal
from labkit.viz import browser_libraries
from labkit.viz.bertviz_page import BertvizView, Panel, split

ELEMENTS = 150_000  # two seconds: headless Chromium, on one core, draws some 80,000 of any of the three views in one
MEGABYTES = 6  # of numbers in one view: they are saved in the notebook
DIGITS = 4  # of a weight


def bertviz_head_view(lm, text, mask=None, *, layers=None, heads=None, layer=None, force: bool = False) -> BertvizView:
    """One layer's attention as lines between the tokens, a colour for each head; the layer can be chosen in the view.

    Args:
        lm, text, mask, layers: as `labkit.attention.maps.attention_maps` takes them; None for all layers.
        heads: indices of the heads to show, None for all.
        layer: the layer shown first, by default the first of `layers`.
        force: draw it even if the browser will be busy for long.

    Raises:
        LabkitError: the view would keep the browser busy; the message names a smaller one. ModelError: bertviz
            is not installed. MaskError: as `attention_maps`, or a head that the model does not have.
    """
    return head_view(attention_maps(lm, text, mask, layers=layers), heads, layer, force)


def bertviz_model_view(lm, text, mask=None, *, layers=None, heads=None, force: bool = False) -> BertvizView:
    """Every layer and head as a small drawing; a click opens one. Arguments and errors as `bertviz_head_view`."""
    return model_view(attention_maps(lm, text, mask, layers=layers), heads, force)


def bertviz_neuron_view(
    lm, text, mask=None, *, layers=None, heads=None, layer=None, head=None, force: bool = False
) -> BertvizView:
    """The queries and keys behind one head: rest the mouse on a token, press its plus sign, and see the products.

    The vectors are those that the model multiplies: after rotary embedding and norms, scaled so that the products the
    view sums up are the scores. The future is shown wherever the mask opens it, whatever the architecture.

    Arguments and errors as `bertviz_head_view`; `head` is the head shown first. ModelError: a model whose
    weights are not the softmax of these products alone (a softcap, attention sinks).
    """
    return neuron_view(neuron_maps(lm, text, mask, layers=layers), heads, layer, head, force)


def bertviz_compare(lm, text, masks=None, *, layers=None, heads=None, layer=None, force: bool = False) -> BertvizView:
    """Head views of one text under several masks beside each other, `{heading: mask}`; they show the same layer.

    By default causal and bidirectional. The model is left as it was. Other arguments and errors as `bertviz_head_view`.
    """
    masks = {"causal": causal(), "bidirectional": bidirectional()} if masks is None else masks
    if not isinstance(masks, Mapping) or not masks:
        raise MaskError("bertviz_compare takes a dictionary {heading: mask} with at least one mask")
    maps = {str(heading): attention_maps(lm, text, mask, layers=layers) for heading, mask in masks.items()}
    return head_view(maps, heads, layer, force)


def bertviz_setup() -> Any:
    """d3 and jQuery for the bertviz views of this notebook, as the output of a cell of its own.

    Not needed as a rule: the first view of a notebook brings them. Useful as the last line of a setup cell, so that any
    view can be deleted or run again on its own.
    """
    from IPython.display import HTML

    if not browser_libraries.are_installed():
        warnings.warn(browser_libraries.CURE, stacklevel=2)
        return HTML(f"No libraries for bertviz views: {browser_libraries.CURE}.")
    browser_libraries.CARRIER.must_bring(always=True)
    return HTML(f"<small>d3 and jQuery for the bertviz views of this notebook</small>\n{browser_libraries.script()}")


# --------------------------------------------------------------------------------------------------- maps to views
def head_view(
    maps: AttentionMaps | Mapping[str, AttentionMaps], heads=None, layer: int | None = None, force: bool = False
) -> BertvizView:
    """bertviz's head view of one text's maps, or of several beside each other, `{heading: maps}`."""
    sets = maps if isinstance(maps, Mapping) else {"": maps}
    first = next(iter(sets.values()))
    heads, at = _chosen_heads(first, heads), _index("layer", first.layers, layer)
    _require_small("head", len(first.layers), len(heads), len(first.tokens), beside=len(sets), force=force)
    squares = f"coloured squares: heads {', '.join(map(str, heads))}; a double click shows one head alone"
    panels = []
    for heading, shown in sets.items():
        drawing = _bertviz("head_view").head_view(
            _per_layer(shown, heads), _labels(shown), prettify_tokens=False, layer=first.layers[at],
            include_layers=list(first.layers), html_action="return",
        )  # fmt: skip
        note = f"{shown.name}, mask: {shown.mask}; {squares}"
        panels.append(Panel(*split(drawing.data), heading, note, first.layers, heads))
    names = f", {' and '.join(sets)}" if len(sets) > 1 else ""
    return BertvizView(panels, f"attention of {len(first.tokens)} tokens, layer {first.layers[at]}{names}", fill=350)


def model_view(maps: AttentionMaps, heads=None, force: bool = False) -> BertvizView:
    """bertviz's model view of one text's maps."""
    heads = _chosen_heads(maps, heads)
    _require_small("model", len(maps.layers), len(heads), len(maps.tokens), force=force)
    drawing = _bertviz("model_view").model_view(
        _per_layer(maps, range(maps.weights.shape[1])), _labels(maps), prettify_tokens=False, display_mode="light",
        include_layers=list(maps.layers), include_heads=list(heads), html_action="return",
    )  # fmt: skip
    note = f"{maps.name}, mask: {maps.mask}; a click on a drawing opens it"
    alt = f"attention of {len(maps.tokens)} tokens in {len(maps.layers)} layers of {len(heads)} heads"
    return BertvizView([Panel(*split(drawing.data), "", note, maps.layers, heads)], alt, fill=1000)


def neuron_view(
    maps: NeuronMaps, heads=None, layer: int | None = None, head: int | None = None, force: bool = False
) -> BertvizView:
    """bertviz's neuron view of one text's maps.

    bertviz prepares this view only from models of its own; here its JavaScript is given the arrays directly. A query's
    products with keys of the future are hidden only if no weight is on the future at all.
    """
    shown = maps.attention
    heads, tokens = _chosen_heads(shown, heads), _labels(shown)
    n, dim = maps.queries.shape[2:]
    _require_small("neuron", len(shown.layers), len(heads), n, dim, force=force)
    weights, queries, keys = (array[:, list(heads)].astype(float) for array in (shown.weights, maps.queries, maps.keys))
    attention = {
        "left_text": tokens, "right_text": tokens, "attn": weights.round(DIGITS).tolist(),
        "queries": queries.round(3).tolist(), "keys": keys.round(3).tolist(),
    }  # fmt: skip
    params = {
        "attention": {"all": attention}, "default_filter": "all", "root_div_id": "bertviz-root",
        "bidirectional": bool(weights[..., np.triu(np.ones((n, n), dtype=bool), k=1)].any()), "display_mode": "light",
        "layer": _index("layer", shown.layers, layer), "head": _index("head", heads, head),
    }  # fmt: skip
    _bertviz("neuron_view")
    script = files("bertviz").joinpath("neuron_view.js").read_text(encoding="utf-8")
    script = f"window.bertviz_params = {browser_libraries.literal(params)};\n{script}"
    note = f"{shown.name}, mask: {shown.mask}; rest the mouse on a token on the left, and press its plus sign"
    first = f"layer {shown.layers[params['layer']]}, head {heads[params['head']]}"
    panel = Panel(NEURON_HTML, script, "", note, shown.layers, heads)
    return BertvizView([panel], f"queries and keys of {n} tokens, {first}", fill=1020)


NEURON_HTML = """<div id="bertviz-root" style="padding:8px">
<span class="dropdown-label">Layer: </span><select id="layer"></select>
<span class="dropdown-label">Head: </span><select id="att_head"></select>
<div id="vis"></div></div>
"""


def _chosen_heads(maps: AttentionMaps, heads) -> tuple[int, ...]:
    count = maps.weights.shape[1]
    chosen = tuple(range(count)) if heads is None else tuple(map(int, heads))
    if not chosen or not set(chosen) <= set(range(count)):
        raise MaskError(f"heads={heads!r}: expected a list of heads from 0 to {count - 1}, or None for all")
    return chosen


def _index(what: str, numbers: tuple[int, ...], chosen: int | None) -> int:
    if chosen is not None and chosen not in numbers:
        raise MaskError(f"{what}={chosen!r} is not among those of this view: {', '.join(map(str, numbers))}")
    return 0 if chosen is None else numbers.index(chosen)


def _per_layer(maps: AttentionMaps, heads: Sequence[int]) -> list:
    """A list as bertviz takes it: item i is layer i, (1, heads, queries, keys); it skips layers that are left out."""
    weights = torch.from_numpy(maps.weights[:, None, list(heads)].astype(float).round(DIGITS))
    at = {layer: i for i, layer in enumerate(maps.layers)}
    return [weights[at.get(layer, 0)] for layer in range(max(maps.layers) + 1)]


def _labels(maps: AttentionMaps) -> list[str]:
    """Tokens as bertviz has room for them; in the text equivalent they are whole."""
    return [visible(token) for token in maps.tokens]


def _bertviz(module: str):
    if find_spec("bertviz") is None:
        raise ModelError("bertviz is not installed: pip install 'labkit-bidirectional[viz]', or bertviz itself")
    return import_module(f"bertviz.{module}")


# ------------------------------------------------------------------------------------------------------------ size
def elements(view: str, layers: int, heads: int, n: int, dim: int = 0, beside: int = 1) -> int:
    """The lines and boxes that a view draws at once: `n` tokens, queries of length `dim` in a neuron view."""
    if view == "neuron":  # one head
        return 7 * n * n + 3 * n * dim
    return beside * (layers if view == "model" else 1) * heads * n * n


def megabytes(layers: int, heads: int, n: int, dim: int = 0, beside: int = 1) -> float:
    """The numbers of a view, each 6 characters and a comma."""
    return 7e-6 * beside * layers * heads * (n * n + 2 * n * dim)


def _require_small(
    view: str, layers: int, heads: int, n: int, dim: int = 0, beside: int = 1, force: bool = False
) -> None:
    """Raises LabkitError, naming a view that fits, if this one is too large for a browser or for a notebook."""

    def fits(layers: int, heads: int, n: int) -> bool:
        size = (layers, heads, n, dim, beside)
        return elements(view, *size) <= ELEMENTS and megabytes(*size) <= MEGABYTES

    if force or fits(layers, heads, n):
        return
    # The largest view that fits: with fewer layers if that is enough, else with fewer heads, else with fewer tokens.
    smaller = [(f"layers=range({k})", (k, heads, n)) for k in range(layers - 1, 0, -1)]
    smaller += [(f"heads=range({k})", (layers, k, n)) for k in range(heads - 1, 0, -1)]
    smaller += [(f"layers=[0], heads=range({k})", (1, k, n)) for k in range(heads - 1, 0, -1)]
    smaller += [
        (f"a text of at most {k} tokens, with layers=[0] and heads=[0]", (1, 1, k)) for k in range(n - 1, 0, -1)
    ]
    fitting = next(words for words, size in smaller if fits(*size))
    count, size = elements(view, layers, heads, n, dim, beside), megabytes(layers, heads, n, dim, beside)
    cause = f"{count:,} lines and boxes at once, and more than {ELEMENTS:,} keep the browser busy for long"
    if count <= ELEMENTS:
        cause = f"{size:.0f} MB of numbers in the notebook, and more than {MEGABYTES} make it unwieldy"
    views = f"{beside} bertviz {view} views" if beside > 1 else f"a bertviz {view} view"
    raise LabkitError(
        f"{views} of {n} tokens, {layers} layer(s) and {heads} head(s): {cause}. Ask for {fitting}; for one layer at "
        "any length there is labkit.viz.attention_figure. force=True draws it all the same"
    )
