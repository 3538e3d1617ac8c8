"""bertviz's three views of a model's attention, drawn by bertviz's own JavaScript, without a network.

    bertviz_compare(lm, "the cat sat")                         # causal and bidirectional head views beside each other

They capture the maps and hand them to `head_view`, `model_view` and `neuron_view`, which draw. A view of more than
400,000 numbers is refused: it would take seconds to draw, and megabytes in the notebook.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec

import numpy as np
import torch

from labkit.attention.maps import AttentionMaps, attention_maps
from labkit.attention.neurons import NeuronMaps, neuron_maps
from labkit.attention.plain import visible
from labkit.errors import LabkitError, MaskError, ModelError
from labkit.masks import bidirectional, causal
from labkit.viz.bertviz_page import BertvizView, Panel, literal

MOST = 400_000  # numbers in one view: 3 MB in the notebook; headless Chromium draws some 80,000 lines in a second
DIGITS = 4  # of a weight
NEURON_HTML = """<div id="bertviz-root" style="padding:8px">
<span class="dropdown-label">Layer: </span><select id="layer"></select>
<span class="dropdown-label">Head: </span><select id="att_head"></select>
<div id="vis"></div></div>
"""


def bertviz_head_view(lm, text, mask=None, *, layers=None, heads=None, layer=None) -> BertvizView:
    """One layer's attention as lines between the tokens, a colour for each head; the layer can be chosen in the view.

    Args:
        lm, text, mask, layers: as `labkit.attention.maps.attention_maps` takes them; None for all layers.
        heads: indices of the heads to show, None for all.
        layer: the layer shown first, by default the first of `layers`.

    Raises:
        LabkitError: the view is too large. ModelError: bertviz is not installed. MaskError: as `attention_maps`, or a
            head that the model does not have.
    """
    return head_view(attention_maps(lm, text, mask, layers=layers), heads, layer)


def bertviz_model_view(lm, text, mask=None, *, layers=None, heads=None) -> BertvizView:
    """Every layer and head as a small drawing; a click opens one. Arguments and errors as `bertviz_head_view`."""
    return model_view(attention_maps(lm, text, mask, layers=layers), heads)


def bertviz_neuron_view(lm, text, mask=None, *, layers=None, heads=None, layer=None, head=None) -> BertvizView:
    """The queries and keys behind one head: rest the mouse on a token, press its plus sign, and see the products.

    The vectors are those that the model multiplies: after rotary embedding and norms, scaled so that the products the
    view sums up are the scores. The future is shown wherever the mask opens it, whatever the architecture.

    Arguments and errors as `bertviz_head_view`; `head` is the head shown first. ModelError: a model whose
    weights are not the softmax of these products alone (a softcap, attention sinks).
    """
    return neuron_view(neuron_maps(lm, text, mask, layers=layers), heads, layer, head)


def bertviz_compare(lm, text, masks=None, *, layers=None, heads=None, layer=None) -> BertvizView:
    """Head views of one text under several masks beside each other, `{heading: mask}`; they show the same layer.

    By default causal and bidirectional. The model is left as it was. Other arguments and errors as `bertviz_head_view`.
    """
    masks = {"causal": causal(), "bidirectional": bidirectional()} if masks is None else masks
    if not isinstance(masks, Mapping) or not masks:
        raise MaskError("bertviz_compare takes a dictionary {heading: mask} with at least one mask")
    maps = {str(heading): attention_maps(lm, text, mask, layers=layers) for heading, mask in masks.items()}
    return head_view(maps, heads, layer)


def head_view(maps: AttentionMaps | Mapping[str, AttentionMaps], heads=None, layer: int | None = None) -> BertvizView:
    """bertviz's head view of one text's maps, or of several beside each other, `{heading: maps}`."""
    sets = maps if isinstance(maps, Mapping) else {"": maps}
    first = next(iter(sets.values()))
    heads, at = _chosen_heads("head", first, heads, len(sets) * len(first.tokens)), _index("layer", first.layers, layer)
    squares = f"coloured squares: heads {', '.join(map(str, heads))}; a double click shows one head alone"
    panels = [
        _panel("head_view", shown, heads, heads, heading, squares, layer=first.layers[at])
        for heading, shown in sets.items()
    ]
    names = f", {' and '.join(sets)}" if len(sets) > 1 else ""
    return BertvizView(panels, f"attention of {len(first.tokens)} tokens, layer {first.layers[at]}{names}", fill=350)


def model_view(maps: AttentionMaps, heads=None) -> BertvizView:
    """bertviz's model view of one text's maps."""
    heads = _chosen_heads("model", maps, heads, len(maps.tokens))
    options = {"display_mode": "light", "include_heads": list(heads)}
    every = range(maps.weights.shape[1])  # bertviz leaves out those that are not included, and numbers the others
    panel = _panel("model_view", maps, every, heads, "", "a click on a drawing opens it", **options)
    alt = f"attention of {len(maps.tokens)} tokens in {len(maps.layers)} layers of {len(heads)} heads"
    return BertvizView([panel], alt, fill=1000)


def neuron_view(maps: NeuronMaps, heads=None, layer: int | None = None, head: int | None = None) -> BertvizView:
    """bertviz's neuron view of one text's maps.

    bertviz prepares this view only from models of its own; here its JavaScript is given the arrays directly. A query's
    products with keys of the future are hidden only if no weight is on the future at all.
    """
    _bertviz("neuron_view")
    shown = maps.attention
    n, dim = maps.queries.shape[2:]
    heads, tokens = _chosen_heads("neuron", shown, heads, n + 2 * dim), [visible(token) for token in shown.tokens]
    arrays = {"attn": shown.weights, "queries": maps.queries, "keys": maps.keys}
    lists = {name: array[:, list(heads)].astype(float).round(DIGITS).tolist() for name, array in arrays.items()}
    future = np.triu(shown.weights[:, list(heads)].astype(float).round(DIGITS), k=1)
    params = {
        "attention": {"all": {"left_text": tokens, "right_text": tokens, **lists}},
        "default_filter": "all",
        "root_div_id": "bertviz-root",
        "bidirectional": bool(future.any()),
        "display_mode": "light",
        "layer": _index("layer", shown.layers, layer),
        "head": _index("head", heads, head),
    }
    script = files("bertviz").joinpath("neuron_view.js").read_text(encoding="utf-8")
    script = f"window.bertviz_params = {literal(params)};\n{script}"
    note = f"{shown.name}, mask: {shown.mask}; rest the mouse on a token on the left, and press its plus sign"
    first = f"layer {shown.layers[params['layer']]}, head {heads[params['head']]}"
    panel = Panel(NEURON_HTML, script, "", note, shown.layers, heads)
    return BertvizView([panel], f"queries and keys of {n} tokens, {first}", fill=1020)


def _panel(view: str, maps: AttentionMaps, drawn, heads: tuple[int, ...], heading: str, use: str, **options) -> Panel:
    """bertviz's own drawing of the heads `drawn`; a list item for each layer, (1, heads, queries, keys)."""
    weights = torch.from_numpy(maps.weights[:, None, list(drawn)].astype(float).round(DIGITS))
    at = {layer: i for i, layer in enumerate(maps.layers)}
    per_layer = [weights[at.get(layer, 0)] for layer in range(max(maps.layers) + 1)]  # it skips layers left out
    options |= {"include_layers": list(maps.layers), "prettify_tokens": False, "html_action": "return"}
    page = getattr(_bertviz(view), view)(per_layer, [visible(token) for token in maps.tokens], **options).data
    # Tokens are in the script, so its end is searched from behind.
    html, _, rest = page.partition('<script type="text/javascript">\n')
    html, script = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL), rest.rsplit("</script>", 1)[0]
    return Panel(html, script, heading, f"{maps.name}, mask: {maps.mask}; {use}", maps.layers, heads)


def _bertviz(view: str):
    if find_spec("bertviz") is None:
        raise ModelError("bertviz is not installed: pip install 'labkit-bidirectional[viz]', or bertviz itself")
    return import_module(f"bertviz.{view}")


def _chosen_heads(view: str, maps: AttentionMaps, heads, numbers: int) -> tuple[int, ...]:
    """The heads of a view that holds `numbers` for each token in each head."""
    count = maps.weights.shape[1]
    chosen = tuple(range(count)) if heads is None else tuple(map(int, heads))
    if not chosen or not set(chosen) <= set(range(count)):
        raise MaskError(f"heads={heads!r}: expected a list of heads from 0 to {count - 1}, or None for all")
    if (total := len(maps.layers) * len(chosen) * len(maps.tokens) * numbers) > MOST:
        raise LabkitError(
            f"a bertviz {view} view of {len(maps.tokens)} tokens, {len(maps.layers)} layers and {len(chosen)} heads "
            f"holds {total:,} numbers, and more than {MOST:,} keep the browser busy: ask for fewer, such as layers=[0] "
            "or heads=[0, 1]; labkit.viz.attention_figure shows one layer at any length"
        )
    return chosen


def _index(what: str, numbers: tuple[int, ...], chosen: int | None) -> int:
    if chosen is not None and chosen not in numbers:
        raise MaskError(f"{what}={chosen!r} is not among those of this view: {', '.join(map(str, numbers))}")
    return 0 if chosen is None else numbers.index(chosen)
