"""The attention explorer: every layer and head of one text, under one mask or two, and the difference between them.

    before, after = attention_maps(lm, text, masks.causal()), attention_maps(lm, text, masks.bidirectional())
    e = labkit.viz.attention_explorer(before, after)        # in a notebook: the last line of a cell shows it
    e.layer, e.head, e.view = 3, 2, "difference"            # what is on show can be set from Python, too

A notebook keeps only a little of it: small pictures of all heads, and the head on show. The others' weights stay with
the kernel, which sends the ones that are asked for. Without a kernel (a page that was saved) those heads are shown as
coarse pictures, and the explorer says so. `to_html` makes a page that holds as many heads as its size allows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
import traitlets

from labkit.attention import measures
from labkit.errors import MaskError
from labkit.viz.heat import attention_figure, pooled
from labkit.viz.labels import plain_array, token_labels, visible
from labkit.viz.page import page

if TYPE_CHECKING:
    import plotly.graph_objects as go

VIEWS = ("before", "after", "difference")
SORTS = ("layer", "entropy", "future", "distance")
PARTS = ("explorer_data.js", "explorer_map.js", "explorer.js")
LARGEST_PICTURE = 32  # cells on a side of the small pictures, at most
ALL_PICTURES, ONE_HEAD = 60_000, 75_000  # bytes, packed, that a notebook keeps: the small pictures; the head on show
PAGE_LIMIT = 2_900_000  # characters of a page on its own


def attention_explorer(
    before, after=None, tokens: Sequence[str] | None = None, names: Sequence[str] | None = None
) -> Explorer:
    """A widget to look through the attention of every layer and head, and to compare it under two masks.

    Args:
        before: what `labkit.attention.maps.attention_maps` gives, or weights of shape (layers, heads, n, n),
            (heads, n, n) or (n, n). They are kept as float16.
        after: the same text under another mask; None: there is nothing to compare.
        tokens: one for each position; None: those of the maps, or the positions.
        names: what `before` and `after` are called; None: the masks of the maps, for arrays "causal" and
            "bidirectional", or "attention" where there is one.

    Raises:
        MaskError: no attention weights (scores, NaN, another shape), or two sets that are not of the same text, layers
            and heads.
    """
    return Explorer(before, after, tokens, names)


@cache
def _module() -> str:
    return "\n".join(files(__package__).joinpath(part).read_text(encoding="utf-8") for part in PARTS)


class Explorer(anywidget.AnyWidget):
    """What `attention_explorer` returns.

    Attributes:
        layer, head: which map is on show; `layer` is the number of the layer in the model.
        view: "before", "after" or "difference" (after - before).
        query: the position whose attention is followed, or None.
        sort: the order of the small pictures: "layer", "entropy", "future" or "distance"; `rising`: lowest first.
        lifted: whether small weights are lifted (shades follow the square root of the weight); at first, if there are
            more than 32 tokens, whose weights are small.
        weights: float16 (sets, layers, heads, n, n), the sets being before and after.
    """

    _esm = _module()
    _css = files(__package__).joinpath("explorer.css").read_text(encoding="utf-8")

    layer = traitlets.Int(0).tag(sync=True)
    head = traitlets.Int(0).tag(sync=True)
    view = traitlets.Enum(VIEWS, "before").tag(sync=True)
    query = traitlets.Int(None, allow_none=True).tag(sync=True)
    sort = traitlets.Enum(SORTS, "layer").tag(sync=True)
    rising = traitlets.Bool(False).tag(sync=True)
    lifted = traitlets.Bool(False).tag(sync=True)

    tokens = traitlets.List(traitlets.Unicode()).tag(sync=True)
    names = traitlets.List(traitlets.Unicode()).tag(sync=True)
    layers = traitlets.List(traitlets.Int()).tag(sync=True)
    heads = traitlets.Int(1).tag(sync=True)
    measures = traitlets.Dict().tag(sync=True)  # {sort: [[one number per map], one list per set]}
    pictures = traitlets.Dict().tag(
        sync=True
    )  # size, peaks [per set [per map]], bytes: packed uint8 (sets, maps, s, s)
    shown = traitlets.Dict().tag(sync=True)  # layer, head, size, bytes: packed float16 (sets, size, size); n = exact
    library = traitlets.List().tag(sync=True)  # the same of other heads, in a page on its own

    def __init__(self, before, after=None, tokens: Sequence[str] | None = None, names=None) -> None:
        given = [before] if after is None else [before, after]
        self.weights = _same_maps(given)
        n, found = self.weights.shape[-1], [each for each in given if hasattr(each, "tokens")]
        if tokens is None and found:
            tokens = found[0].tokens
        layers = list(found[0].layers) if found else list(range(self.weights.shape[1]))
        super().__init__(
            tokens=token_labels(tokens, n, n)[1],
            names=_checked_names(names, given),
            layers=layers,
            heads=self.weights.shape[2],
            measures=_measures_of(self.weights),
            pictures=_pictures_of(self.weights),
            layer=layers[0],
            lifted=n > LARGEST_PICTURE,
        )
        self._deliver()
        self.observe(self._deliver, ["layer", "head"])
        self.on_msg(self._answer)

    @property
    def figure(self) -> go.Figure:
        """The head on show under each mask; of a long text, neighbouring tokens share a cell."""
        maps = pooled(self._maps(self.layer, self.head).astype(float), LARGEST_PICTURE)  # (sets, s, s)
        n, size = len(self.tokens), maps.shape[-1]
        tokens = [visible(token) if size == n else str(i * n // size) for i, token in enumerate(self.tokens[:size])]
        title = f"Layer {self.layer}, head {self.head}"
        return attention_figure(dict(zip(self.names, maps, strict=True)), tokens, title)

    def to_html(self, path: str | Path | None = None, limit: int = PAGE_LIMIT) -> str:
        """One page that needs no kernel and no network, of about `limit` characters at most. If a `path` is given, the
        page is also written there.

        The page contains small pictures of all heads, and the exact weights of the head on show. The weights of the
        other heads follow in the order of the small pictures until the limit is reached; a note says for how many.
        """
        exact: list[dict[str, Any]] = []
        used = len(self._page(exact))
        for layer, head in sorted(self._in_order(), key=lambda place: place != (self.layer, self.head)):
            packed = self._packed(layer, head)
            used += len(packed) * 4 // 3 + 160  # base64, and its place in the state
            if exact and used > limit:
                break
            exact.append({"layer": layer, "head": head, "bytes": packed})
        return self._page(exact, path)

    # ------------------------------------------------------------------------------------------ what the page is given
    def _deliver(self, _change=None) -> None:
        """Give the page the head on show: exact if a notebook may keep that much, else as fine as it may."""
        if self.shown and (self.shown["layer"], self.shown["head"]) == (self.layer, self.head):
            return
        maps, n = self._maps(self.layer, self.head), len(self.tokens)
        packed, size = _packed(maps), n
        while len(packed) > ONE_HEAD:
            size = min(128, size - 1, int(size * (ONE_HEAD / len(packed)) ** 0.5))
            packed = _packed(pooled(maps, size).astype(np.float16))
        self.shown = {"layer": self.layer, "head": self.head, "size": size, "bytes": packed}

    def _answer(self, _widget, content: Any, _buffers) -> None:
        """The page asks for the exact weights of a head: {"ask": [layer, head]}."""
        if not isinstance(content, dict) or "ask" not in content:
            return  # a message of the widget machinery
        layer, head = content["ask"]
        if layer in self.layers and 0 <= head < self.heads:
            self.send({"layer": layer, "head": head}, [self._packed(layer, head, level=1)])

    def _maps(self, layer: int, head: int) -> np.ndarray:
        """(sets, n, n)"""
        return self.weights[:, self.layers.index(layer), head]

    def _packed(self, layer: int, head: int, level: int = 6) -> bytes:
        return _packed(self._maps(layer, head), level)

    def _in_order(self) -> list[tuple[int, int]]:
        """All heads as the page sorts their small pictures."""
        maps = [(layer, head) for layer in self.layers for head in range(self.heads)]
        if self.sort == "layer":
            return maps
        values = self.measures[self.sort]
        of = {"before": values[0], "after": values[-1]}.get(self.view) or np.subtract(values[-1], values[0])
        order = np.argsort(np.asarray(of) if self.rising else -np.asarray(of), kind="stable")
        return [maps[i] for i in order]

    def _page(self, exact: list[dict[str, Any]], path: str | Path | None = None) -> str:
        total = len(self.layers) * self.heads
        note = f"{len(self.tokens)} tokens, {len(self.layers)} layers of {self.heads} heads. "
        if len(exact) == total:
            note += "This page contains the weights of all heads."
        else:
            note += f"This page contains the weights of {len(exact)} of {total} heads; the other {total - len(exact)} "
            note += "are shown as coarse pictures, to limit its size."
        title = f"Attention: {' and '.join(self.names)}"
        return page(self, title, note, path, library=exact, shown={})

    # ----------------------------------------------------------------------------------------------- what may be set
    @traitlets.validate("layer")
    def _has_layer(self, proposal) -> int:
        if self.layers and proposal.value not in self.layers:
            raise MaskError(f"there is no layer {proposal.value} here, only {', '.join(map(str, self.layers))}")
        return proposal.value

    @traitlets.validate("head")
    def _has_head(self, proposal) -> int:
        if not 0 <= proposal.value < self.heads:
            raise MaskError(f"there is no head {proposal.value}: the heads are 0 to {self.heads - 1}")
        return proposal.value

    @traitlets.validate("query")
    def _has_query(self, proposal) -> int | None:
        if proposal.value is not None and not 0 <= proposal.value < len(self.tokens):
            raise MaskError(f"there is no position {proposal.value} in a text of {len(self.tokens)} tokens")
        return proposal.value

    @traitlets.validate("view")
    def _has_view(self, proposal) -> str:
        if proposal.value != "before" and len(self.names) == 1:
            raise MaskError(f"there is nothing to compare, so the view is 'before', not {proposal.value!r}")
        return proposal.value

    def _repr_mimebundle_(self, **options) -> tuple[dict[str, object], dict[str, object]]:
        """The widget, and beside it a figure for pages that only render the notebook."""
        bundle, metadata = super()._repr_mimebundle_(**options) or ({}, {})
        return {**bundle, **self.figure._repr_mimebundle_()}, metadata


# ------------------------------------------------------------------------------------------------------- what is given
def _same_maps(given: list) -> np.ndarray:
    """Float16 (sets, layers, heads, n, n)."""
    sets = [
        _maps_of(each, what) for each, what in zip(given, ("the weights before", "the weights after"), strict=False)
    ]
    shapes = [each.shape for each in sets]
    if len(set(shapes)) > 1:
        raise MaskError(f"the weights before have shape {shapes[0]}, those after {shapes[1]}: they must be equal")
    for name in ("tokens", "layers"):
        both = [list(getattr(each, name)) for each in given if hasattr(each, name)]
        if len(both) == 2 and both[0] != both[1]:
            raise MaskError(f"the {name} before and after differ: the explorer compares two masks on the same text")
    return np.stack(sets)


def _maps_of(given, what: str) -> np.ndarray:
    array = plain_array(getattr(given, "weights", given), what)
    if array.dtype.kind != "f":
        raise MaskError(f"{what} must be numbers with a point, and are {array.dtype}")
    if not 2 <= array.ndim <= 4 or 0 in array.shape or array.shape[-1] != array.shape[-2]:
        raise MaskError(f"{what} must have shape (layers, heads, n, n), (heads, n, n) or (n, n), not {array.shape}")
    with np.errstate(over="ignore"):
        array = array.astype(np.float16, copy=False)
    if np.isnan(array).any():
        raise MaskError(f"{what} hold NaN: did a mask leave a query without any key?")
    if (array < 0).any() or (array > 1.01).any():
        raise MaskError(f"{what} must lie between 0 and 1, like the output of a softmax: scores are not weights")
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _checked_names(names, given: list) -> list[str]:
    if names is None:
        plain = ["attention"] if len(given) == 1 else ["causal", "bidirectional"]
        names = [getattr(each, "mask", name).removesuffix("()") for each, name in zip(given, plain, strict=True)]
        names = names if len(set(names)) == len(names) else ["before", "after"]
    if isinstance(names, str) or len(names) != len(given):
        raise MaskError(f"names={names!r}: expected a list of {len(given)}, one for each set of weights")
    return [str(name) for name in names]


# ------------------------------------------------------------------------------------------------------ what is kept
def _measures_of(weights: np.ndarray) -> dict[str, list[list[float]]]:
    of = {"entropy": measures.entropy, "future": measures.future_mass, "distance": measures.mean_distance}
    return {name: [measure(each).round(4).ravel().tolist() for each in weights] for name, measure in of.items()}


def _pictures_of(weights: np.ndarray) -> dict[str, Any]:
    """Small pictures of all maps in 256 shades of each one's largest cell, as fine as ALL_PICTURES allows."""
    size = min(LARGEST_PICTURE, weights.shape[-1])
    while True:
        cells = np.stack([[pooled(layer, size) for layer in each] for each in weights])  # (sets, layers, heads, s, s)
        peaks = cells.max((-2, -1))
        shades = (cells / np.maximum(peaks, 1e-9)[..., None, None] * 255).round().astype(np.uint8)
        packed = zlib.compress(shades.tobytes())
        if len(packed) <= ALL_PICTURES or size <= 4:
            break
        size = max(4, min(size - 1, int(size * (ALL_PICTURES / len(packed)) ** 0.5)))
    kept = [[float(f"{peak:.4g}") for peak in each.ravel()] for each in peaks]
    return {"size": size, "peaks": kept, "bytes": packed}


def _packed(maps: np.ndarray, level: int = 6) -> bytes:
    """Float16 as deflated bytes: all lower bytes, then all upper ones, which resemble each other and so pack better."""
    planes = np.ascontiguousarray(maps.astype("<f2")).view(np.uint8).reshape(-1, 2).T
    return zlib.compress(np.ascontiguousarray(planes), level)
