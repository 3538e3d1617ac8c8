"""bertviz's three views of a model's attention, drawn by bertviz's own JavaScript, without a network.

    bertviz_compare(lm, "the cat sat")                         # causal and bidirectional head views beside each other

A view carries d3 and jQuery with it. A view of more than 400,000 numbers is refused: it would take seconds to draw, and
megabytes in the notebook.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from labkit.attention.maps import AttentionMaps, attention_maps
from labkit.attention.neurons import neuron_maps
from labkit.attention.plain import clean, visible
from labkit.errors import LabkitError, MaskError, needs_extra
from labkit.masks import bidirectional, causal
from labkit.viz.page import joined
from labkit.viz.text import TextFigure

MOST = 400_000  # numbers in one view: 3 MB in the notebook; headless Chromium draws some 80,000 lines in a second
DIGITS = 4  # of a weight
NEURON_HTML = """<div id="bertviz-root" style="padding:8px">
<span class="dropdown-label">Layer: </span><select id="layer"></select>
<span class="dropdown-label">Head: </span><select id="att_head"></select>
<div id="vis"></div></div>
"""

FOLDER = Path(str(files("labkit"))) / "_browser"  # filled by scripts/fetch_browser_libraries.py, packed into the wheel
NAMES = ("d3.min.js", "jquery.min.js")
CURE = (
    "d3 and jQuery were not fetched when labkit was set up (is npm, of Node.js, installed?). Run `python "
    "scripts/fetch_browser_libraries.py` in the checkout, or install labkit again with npm at hand. Until then a "
    "bertviz view needs a network"
)
# bertviz draws black on nothing: in a dark notebook, too, it needs a light ground.
CARD = (
    "background:#FFFFFF;color:#222222;color-scheme:light;padding:8px;overflow-x:auto;"
    "font-family:sans-serif;font-size:13px"
)
NOT_DRAWN = "The interactive view needs a notebook that was run here or is trusted: run this cell again."
ONLINE = "This view fetches d3 and jQuery from cdnjs.cloudflare.com, because labkit was set up without them."
REQUIRE = '<script src="https://cdnjs.cloudflare.com/ajax/libs/require.js/2.3.6/require.min.js"></script>'


def bertviz_head_view(lm, text, mask=None, *, layers=None) -> TextFigure:
    """One layer's attention as lines between the tokens, a colour for each head; the layer is chosen in the view.

    Args:
        lm, text, mask, layers: as `labkit.attention.maps.attention_maps` takes them; None for all layers.

    Raises:
        LabkitError: the view is too large. ModelError: bertviz is not installed. MaskError: as `attention_maps`.
    """
    return bertviz_compare(lm, text, {"": mask}, layers=layers)


def bertviz_compare(lm, text, masks=None, *, layers=None) -> TextFigure:
    """Head views of one text under several masks beside each other, `{heading: mask}`; they show the same layer.

    By default causal and bidirectional. The model is left as it was. Other arguments and errors as `bertviz_head_view`.
    """
    masks = {"causal": causal(), "bidirectional": bidirectional()} if masks is None else masks
    if not isinstance(masks, Mapping) or not masks:
        raise MaskError("bertviz_compare takes a dictionary {heading: mask} with at least one mask")
    sets = {str(heading): attention_maps(lm, text, mask, layers=layers) for heading, mask in masks.items()}
    first = next(iter(sets.values()))
    _require_drawable("head", first, len(sets) * len(first.tokens))
    heads = ", ".join(map(str, range(first.weights.shape[1])))
    use = f"coloured squares: heads {heads}; a double click shows one head alone"
    panels = [_panel("head_view", maps, heading, use, layer=first.layers[0]) for heading, maps in sets.items()]
    names = f", {' and '.join(sets)}" if len(sets) > 1 else ""
    return _view(panels, f"attention of {len(first.tokens)} tokens, layer {first.layers[0]}{names}", width=350)


def bertviz_model_view(lm, text, mask=None, *, layers=None) -> TextFigure:
    """Every layer and head as a small drawing; a click opens one. Arguments and errors as `bertviz_head_view`."""
    maps = attention_maps(lm, text, mask, layers=layers)
    _require_drawable("model", maps, len(maps.tokens))
    panel = _panel("model_view", maps, "", "a click on a drawing opens it", display_mode="light")
    alt = f"attention of {len(maps.tokens)} tokens in {len(maps.layers)} layers of {maps.weights.shape[1]} heads"
    return _view([panel], alt, width=1000)


def bertviz_neuron_view(lm, text, mask=None, *, layers=None) -> TextFigure:
    """The queries and keys behind one head: rest the mouse on a token and press its plus sign to show the products.

    The vectors are those that the model multiplies: after rotary embedding and norms, scaled so that the products the
    view sums up are the scores. The future is shown wherever the mask opens it, whatever the architecture.

    Arguments and errors as `bertviz_head_view`. ModelError: a model whose weights are not the softmax of these products
    alone (a softcap, attention sinks).
    """
    with needs_extra("lab"):
        script = files("bertviz").joinpath("neuron_view.js").read_text(encoding="utf-8")
    maps, queries, keys = neuron_maps(lm, text, mask, layers=layers)
    n, dim = queries.shape[2:]
    _require_drawable("neuron", maps, n + 2 * dim)
    tokens = [visible(token) for token in maps.tokens]
    arrays = {"attn": maps.weights, "queries": queries, "keys": keys}
    lists = {name: array.astype(float).round(DIGITS).tolist() for name, array in arrays.items()}
    # bertviz prepares this view only from models of its own; here its JavaScript is given the arrays directly. It hides
    # the products with keys of the future if "bidirectional" is false.
    params = {
        "attention": {"all": {"left_text": tokens, "right_text": tokens, **lists}},
        "default_filter": "all",
        "root_div_id": "bertviz-root",
        "bidirectional": bool(np.triu(maps.weights, k=1).any()),
        "display_mode": "light",
        "layer": 0,
        "head": 0,
    }
    panel = {
        "heading": "",
        "note": f"{maps.name}, mask: {maps.mask}; rest the mouse on a token on the left, and press its plus sign",
        "html": NEURON_HTML,
        "javascript": f"window.bertviz_params = {literal(params)};\n{script}",
        "layers": maps.layers,
    }
    return _view([panel], f"queries and keys of {n} tokens, layer {maps.layers[0]}, head 0", width=1020)


def _view(panels: Sequence[dict[str, Any]], alt: str, width: int) -> TextFigure:
    """A view as HTML that brings d3 and jQuery along.

    Args:
        panels: its drawings, beside each other: dictionaries with bertviz's own "html" and "javascript", the "heading"
            and the "note" above it, and the "layers" that it shows, as the model numbers them.
        alt: what the view shows, in words.
        width: pixels that a drawing needs.
    """
    plain = f"bertviz view: {clean(alt)}"
    if not all((FOLDER / name).is_file() for name in NAMES):  # bertviz's ordinary page, which fetches them
        warnings.warn(CURE, stacklevel=3)
        views = [
            f"<b>{escape(panel['heading'])}</b> {escape(panel['note'])}\n{REQUIRE}{panel['html']}"
            f"{element(panel['javascript'])}"
            for panel in panels
        ]
        return TextFigure(f'<div style="{CARD}"><p>{ONLINE}</p>{"".join(views)}</div>', plain)
    name, alt = uuid4().hex, escape(clean(alt))
    script = joined("bertviz.js")
    for mark, library in zip(("/*D3*/", "/*JQUERY*/"), NAMES, strict=True):
        script = script.replace(mark, (FOLDER / library).read_text(encoding="utf-8"))
    drawings = ",\n".join(map(_drawing, panels))
    script = element(f"(() => {{\n{script}\nlabkitView({literal(name)}, [{drawings}], {width});\n}})();")
    still = f"<div data-labkit-still><p data-labkit-why>{NOT_DRAWN}</p><p>{alt}</p></div>"
    opened = f'<div data-labkit-view="{name}" role="group" aria-label="{alt}" style="{CARD}">'
    return TextFigure(f"{opened}{still}</div>\n{script}", plain)


def _panel(view: str, maps: AttentionMaps, heading: str, use: str, **options) -> dict:
    """The panel of bertviz's own drawing of the maps."""
    weights = torch.from_numpy(maps.weights[:, None].astype(float).round(DIGITS))
    at = {layer: i for i, layer in enumerate(maps.layers)}
    per_layer = [weights[at.get(layer, 0)] for layer in range(max(maps.layers) + 1)]  # it skips layers left out
    options |= {"include_layers": list(maps.layers), "prettify_tokens": False, "html_action": "return"}
    with needs_extra("lab"):
        draw = getattr(import_module(f"bertviz.{view}"), view)
    page = draw(per_layer, [visible(token) for token in maps.tokens], **options).data
    # Tokens are in the script, so its end is searched from behind.
    html, _, rest = page.partition('<script type="text/javascript">\n')
    return {
        "heading": heading,
        "note": f"{maps.name}, mask: {maps.mask}; {use}",
        "html": re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL),
        "javascript": rest.rsplit("</script>", 1)[0],
        "layers": maps.layers,
    }


def _drawing(panel: dict[str, Any]) -> str:
    """A panel as bertviz.js takes it. bertviz's script asks a module loader for d3 and jQuery: here, this one."""
    fields = dict(panel)
    script = re.sub(r'"root_div_id":\s*"[^"]+"', '"root_div_id": root.id', fields.pop("javascript"), count=1)
    return (
        f"{{...{literal(fields)}, draw(root, d3, jquery) {{\n"
        "const require = { config() {} }, requirejs = (names, use) => use(jquery, d3);\n"
        f"{script}\n}}}}"
    )


def _require_drawable(view: str, maps: AttentionMaps, numbers: int) -> None:
    """Refuse a view of more than MOST numbers; it holds `numbers` for each token in each head."""
    heads = maps.weights.shape[1]
    if (total := len(maps.layers) * heads * len(maps.tokens) * numbers) > MOST:
        raise LabkitError(
            f"a bertviz {view} view of {len(maps.tokens)} tokens, {len(maps.layers)} layers and {heads} heads "
            f"holds {total:,} numbers, and more than {MOST:,} keep the browser busy: ask for fewer layers, such as "
            "layers=[0], or tokens; labkit.viz.attention_figure shows one layer at any length"
        )


def element(javascript: str) -> str:
    """A script element with this JavaScript; nothing in its strings can end the element early."""
    safe = re.sub(r"<(?=!--|/script)", lambda _: "\\x3c", javascript, flags=re.IGNORECASE)
    return f"<script>\n{safe}\n</script>"


def literal(value: Any) -> str:
    """`value` as JavaScript."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
