"""bertviz's three views of a model's attention, drawn by bertviz's own JavaScript, without a network.

    bertviz_head_view(lm, "the cat sat", masks.causal())      # one layer: lines from each query to the keys it looks at
    bertviz_model_view(lm, "the cat sat")                      # every layer and head, small
    bertviz_neuron_view(lm, "the cat sat")                     # queries, keys and their products behind one head
    bertviz_compare(lm, "the cat sat")                         # causal and bidirectional head views beside each other

The functions that take a model capture arrays and hand them to `head_view`, `model_view` and `neuron_view`, which
draw. The browser's work grows with the square of the number of tokens; a view that would keep it busy for long is
refused, with the smaller one to ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec

import numpy as np

from labkit.attention.plain import visible
from labkit.errors import LabkitError, MaskError, ModelError
from labkit.viz.bertviz_page import BertvizView, Carrying, Panel
from labkit.viz.labels import weight_grids

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
    from labkit.attention.maps import attention_maps

    maps = attention_maps(lm, text, mask, layers=layers)
    return head_view(
        maps.weights, maps.tokens, layers=maps.layers, heads=heads, layer=layer, note=_note(maps), force=force
    )


def bertviz_model_view(lm, text, mask=None, *, layers=None, heads=None, force: bool = False) -> BertvizView:
    """Every layer and head as a small drawing; a click opens one. Arguments and errors as `bertviz_head_view`."""
    from labkit.attention.maps import attention_maps

    maps = attention_maps(lm, text, mask, layers=layers)
    return model_view(maps.weights, maps.tokens, layers=maps.layers, heads=heads, note=_note(maps), force=force)


def bertviz_neuron_view(
    lm, text, mask=None, *, layers=None, heads=None, layer=None, head=None, force: bool = False
) -> BertvizView:
    """The queries and keys behind one head: rest the mouse on a token, press its plus sign, and see the products.

    The vectors are those that the model multiplies: after rotary embedding and norms, scaled so that the products the
    view sums up are the scores. The future is shown wherever the mask opens it, whatever the architecture.

    Arguments and errors as `bertviz_head_view`; `head` is the head shown first. ModelError: a model whose
    weights are not the softmax of these products alone (a softcap, attention sinks).
    """
    from labkit.attention.neurons import neuron_maps

    maps = neuron_maps(lm, text, mask, layers=layers)
    return neuron_view(
        maps.attention.weights, maps.queries, maps.keys, maps.attention.tokens, layers=maps.attention.layers,
        heads=heads, layer=layer, head=head, note=_note(maps.attention), force=force,
    )  # fmt: skip


def bertviz_compare(lm, text, masks=None, *, layers=None, heads=None, layer=None, force: bool = False) -> BertvizView:
    """Head views of one text under several masks beside each other, `{heading: mask}`; they show the same layer.

    By default causal and bidirectional. The model is left as it was. Other arguments and errors as `bertviz_head_view`.
    """
    from labkit.attention.maps import attention_maps
    from labkit.masks import bidirectional, causal

    if masks is None:
        masks = {"causal": causal(), "bidirectional": bidirectional()}
    if not isinstance(masks, Mapping) or not masks:
        raise MaskError("bertviz_compare takes a dictionary {heading: mask} with at least one mask")
    maps = {str(heading): attention_maps(lm, text, mask, layers=layers) for heading, mask in masks.items()}
    one = next(iter(maps.values()))
    weights, notes = {h: m.weights for h, m in maps.items()}, {h: _note(m) for h, m in maps.items()}
    return head_view(weights, one.tokens, layers=one.layers, heads=heads, layer=layer, note=notes, force=force)


def bertviz_setup() -> Carrying:
    """d3 and jQuery for the bertviz views of this notebook, as the output of a cell of its own.

    Not needed as a rule: the first view of a notebook brings them. Useful as the last line of a setup cell, so that any
    view can be deleted or run again on its own.
    """
    return Carrying()


# ------------------------------------------------------------------------------------------------- arrays to views
def head_view(
    weights, tokens: Sequence[str], *, layers=None, heads=None, layer=None, note="", force: bool = False
) -> BertvizView:
    """bertviz's head view of attention weights (layers, heads, queries, keys); `layers` are their numbers.

    `{heading: weights}`, and then `note` as `{heading: note}`, gives several beside each other.
    """
    maps = weights if isinstance(weights, Mapping) else {"": weights}
    notes = note if isinstance(note, Mapping) else dict.fromkeys(maps, note)
    checked = {heading: _checked(each, tokens, layers, heads) for heading, each in maps.items()}
    each, layers, heads = next(iter(checked.values()))
    _Size("head", *each.shape[:3], beside=len(maps)).require_small(force)
    at = _place(layers, layer, "layer")
    panels = []
    for heading, (each, _, _) in checked.items():
        data = _bertviz("head_view").head_view(
            _per_layer(each, layers), _drawn(tokens), prettify_tokens=False, layer=layers[at],
            include_layers=list(layers), html_action="return",
        ).data  # fmt: skip
        squares = f"coloured squares: {_run_of('head', heads)}; a double click shows one head alone"
        panels.append(Panel(data, heading, "; ".join(filter(None, [notes[heading], squares])), layers, heads))
    masks = f", {' and '.join(map(str, maps))}" if len(maps) > 1 else ""
    return BertvizView(panels, f"attention of {len(tokens)} tokens, layer {layers[at]}{masks}", fill=350)


def model_view(
    weights, tokens: Sequence[str], *, layers=None, heads=None, note: str = "", force: bool = False
) -> BertvizView:
    """bertviz's model view of attention weights (layers, heads, queries, keys); `layers` are their numbers."""
    chosen = heads
    every, layers, _ = _checked(weights, tokens, layers, None)
    weights, layers, heads = _checked(weights, tokens, layers, chosen)
    _Size("model", *weights.shape[:3]).require_small(force)
    data = _bertviz("model_view").model_view(
        _per_layer(every, layers), _drawn(tokens), prettify_tokens=False, display_mode="light",
        include_layers=list(layers), include_heads=list(heads), html_action="return",
    ).data  # fmt: skip
    panel = Panel(data, "", "; ".join(filter(None, [note, "a click on a drawing opens it"])), layers, heads)
    words = f"attention of {len(tokens)} tokens in {len(layers)} layers of {len(heads)} heads"
    return BertvizView([panel], words, fill=1000)


def neuron_view(
    weights, queries, keys, tokens: Sequence[str], *, layers=None, heads=None, layer=None, head=None, note: str = "",
    force: bool = False,
) -> BertvizView:  # fmt: skip
    """bertviz's neuron view: weights (layers, heads, queries, keys), queries and keys (layers, heads, seq, dim).

    bertviz prepares this view only from models of its own; here its JavaScript is given the arrays directly. A query's
    products with keys of the future are hidden only if no weight lies on the future at all.
    """
    chosen = heads
    weights, layers, heads = _checked(weights, tokens, layers, chosen)
    queries, keys = (np.asarray(array, dtype=float)[:, list(heads)] for array in (queries, keys))
    if queries.shape[:3] != weights.shape[:3] or keys.shape != queries.shape:
        raise MaskError(f"queries {queries.shape} and keys {keys.shape} do not belong to weights {weights.shape}")
    n = queries.shape[2]
    _Size("neuron", *queries.shape).require_small(force)
    future = np.triu(np.ones((n, n), dtype=bool), k=1)
    attention = {
        "left_text": _drawn(tokens), "right_text": _drawn(tokens), "attn": weights.tolist(),
        "queries": queries.round(3).tolist(), "keys": keys.round(3).tolist(),
    }  # fmt: skip
    params = {
        "attention": {"all": attention}, "default_filter": "all", "root_div_id": Panel.ROOT,
        "bidirectional": bool(weights[..., future].any()), "display_mode": "light",
        "layer": _place(layers, layer, "layer"), "head": _place(heads, head, "head"),
    }  # fmt: skip
    _bertviz("neuron_view")
    hint = "rest the mouse on a token on the left, and press its plus sign"
    panel = Panel.neuron(params, "; ".join(filter(None, [note, hint])), layers, heads)
    shown = f"layer {layers[params['layer']]}, head {heads[params['head']]}"
    return BertvizView([panel], f"queries and keys of {len(tokens)} tokens, {shown}", fill=1020)


# --------------------------------------------------------------------------------------------------- what is given
def _checked(weights, tokens, layers, heads) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:
    """Weights rounded, of the chosen heads; the numbers of their layers and heads."""
    weights = np.asarray(weights, dtype=float)
    if weights.ndim != 4 or 0 in weights.shape or weights.shape[2:] != (len(tokens), len(tokens)):
        raise MaskError(
            f"a bertviz view takes weights of shape (layers, heads, {len(tokens)}, {len(tokens)}) for "
            f"{len(tokens)} tokens, not {weights.shape}"
        )
    weight_grids(weights.reshape(-1, *weights.shape[2:]))  # NaN, negative numbers
    layers = tuple(range(len(weights))) if layers is None else tuple(int(i) for i in layers)
    heads = tuple(range(weights.shape[1])) if heads is None else tuple(heads)
    for head in heads:
        if isinstance(head, bool) or not hasattr(head, "__index__") or not 0 <= head < weights.shape[1]:
            raise MaskError(f"there is no head {head!r}: the model has heads 0 to {weights.shape[1] - 1}")
    if not heads:
        raise MaskError("heads=[]: expected at least one head, or None for all")
    return weights[:, list(heads)].round(DIGITS), layers, tuple(int(head) for head in heads)


def _place(numbers: tuple[int, ...], wanted: int | None, what: str) -> int:
    if wanted is not None and wanted not in numbers:
        raise MaskError(f"{what}={wanted!r} is not among those of this view: {', '.join(map(str, numbers))}")
    return 0 if wanted is None else numbers.index(wanted)


def _per_layer(weights: np.ndarray, layers: tuple[int, ...]) -> list:
    """A list as bertviz takes it: place i holds layer i, (1, heads, queries, keys); it passes over layers left out."""
    import torch

    filled = [torch.from_numpy(weights[:1])] * (max(layers) + 1)
    for i, layer in zip(layers, weights, strict=True):
        filled[i] = torch.from_numpy(layer[None])
    return filled


@dataclass(frozen=True)
class _Size:
    """How much a view asks of the browser and of the notebook file."""

    view: str
    layers: int
    heads: int
    tokens: int
    dim: int = 0  # length of a query, in a neuron view
    beside: int = 1

    @property
    def elements(self) -> int:
        """Lines and boxes drawn at once."""
        n = self.tokens
        if self.view == "neuron":  # one head
            return 7 * n * n + 3 * n * self.dim
        return self.beside * (self.layers if self.view == "model" else 1) * self.heads * n * n

    @property
    def megabytes(self) -> float:
        numbers = self.tokens * self.tokens + 2 * self.tokens * self.dim
        return 7e-6 * self.beside * self.layers * self.heads * numbers  # a number is 6 characters and a comma

    @property
    def fits(self) -> bool:
        return self.elements <= ELEMENTS and self.megabytes <= MEGABYTES

    def require_small(self, force: bool) -> None:
        """Raises LabkitError, naming a view that fits, unless this one does or is forced."""
        if force or self.fits:
            return
        if self.elements > ELEMENTS:
            cause = (
                f"{self.elements:,} lines and boxes at once, and more than {ELEMENTS:,} keep the browser busy for long"
            )
        else:
            cause = f"{self.megabytes:.0f} MB of numbers in the notebook, and more than {MEGABYTES} make it unwieldy"
        views = f"{self.beside} bertviz {self.view} views" if self.beside > 1 else f"a bertviz {self.view} view"
        raise LabkitError(
            f"{views} of {self.tokens} tokens, {self.layers} layer(s) and {self.heads} head(s): {cause}. Ask for "
            f"{self.smaller()}; for one layer at any length there is labkit.viz.attention_figure. force=True draws it "
            "all the same"
        )

    def smaller(self) -> str:
        """The largest view that fits: with fewer layers if that helps, else fewer heads, else fewer tokens."""
        fewer: list[tuple[str, Iterable[_Size]]] = [
            ("layers=range({0.layers})", (replace(self, layers=k) for k in range(self.layers - 1, 0, -1))),
            ("heads=range({0.heads})", (replace(self, heads=k) for k in range(self.heads - 1, 0, -1))),
            (
                "layers=[0], heads=range({0.heads})",
                (replace(self, layers=1, heads=k) for k in range(self.heads - 1, 0, -1)),
            ),
            (
                "a text of at most {0.tokens} tokens, with layers=[0] and heads=[0]",
                (replace(self, layers=1, heads=1, tokens=n) for n in range(self.tokens - 1, 0, -1)),
            ),
        ]
        return next(words.format(size) for words, sizes in fewer for size in sizes if size.fits)


def _drawn(tokens: Sequence[str]) -> list[str]:
    """Tokens as bertviz has room for them; in the text equivalent they are whole."""
    return [visible(token) for token in tokens]


def _run_of(what: str, numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{what}s {numbers[0]} to {numbers[-1]}"
    return f"{what}s {', '.join(map(str, numbers))}"


def _note(maps) -> str:
    return f"{maps.name}, mask: {maps.mask}"


def _bertviz(module: str):
    if find_spec("bertviz") is None:
        raise ModelError("bertviz is not installed: pip install 'labkit-bidirectional[viz]', or bertviz itself")
    return import_module(f"bertviz.{module}")
