"""The attention explorer: every layer and head of one text, under one mask or two, and the difference between them.

    before, after = attention_maps(lm, text, masks.causal()), attention_maps(lm, text, masks.bidirectional())
    e = labkit.viz.attention_explorer(before, after)        # in a notebook: the last line of a cell shows it
    e.layer, e.head, e.view = 3, 2, "difference"            # what is shown can be set from Python, too

A notebook keeps only a little of it: small pictures of all heads, and the head that is shown. The others' weights stay
in the kernel, which sends those that the page asks for. Without a kernel (a saved page) those heads are shown as coarse
pictures, and the explorer says so. `to_html` makes a page that holds as many heads as its size allows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
import traitlets

from labkit.attention import measures
from labkit.attention.maps import attention_maps
from labkit.attention.plain import plain_array, visible
from labkit.convert import conversion_of
from labkit.decoder.anatomy import SLIDING, find_decoder
from labkit.errors import MaskError
from labkit.masks import bidirectional, causal, sliding_window
from labkit.viz.heat import attention_figure, pooled
from labkit.viz.labels import token_labels
from labkit.viz.page import joined, page, with_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

VIEWS = ("before", "after", "difference")
MEASURES = {"entropy": measures.entropy, "future": measures.future_mass, "distance": measures.mean_distance}
LARGEST_PICTURE = 32  # cells on a side of the small pictures, at most
ALL_PICTURES, ONE_HEAD = 60_000, 75_000  # bytes, packed, that a notebook keeps: the small pictures; the head shown
PAGE_LIMIT = 2_900_000  # characters of a page on its own


def explore_attention(lm, text, *, layers=None) -> Explorer:
    """The attention explorer on one text, causal against bidirectional: two captures, whatever state the model is in.

    The local layers of a model keep their window: W tokens back, and in the bidirectional maps W - 1 on either side, as
    `to_bidirectional(window="keep")` leaves them. Arguments and errors as `labkit.attention.maps.attention_maps`.
    """
    decoder = find_decoder(lm.model)
    conversion = conversion_of(lm.model)
    window = conversion["sliding_window"] if conversion else getattr(decoder.config, "sliding_window", None)
    local = [kind == SLIDING and window is not None for kind in decoder.layer_types]
    before = [causal() & sliding_window(window) if is_local else causal() for is_local in local]
    after = [sliding_window(window, causal=False) if is_local else bidirectional() for is_local in local]
    maps = [attention_maps(lm, text, masks, layers=layers) for masks in (before, after)]
    return attention_explorer(*maps, names=("causal", "bidirectional"))


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
    given = [before] if after is None else [before, after]
    sets = [_weights_of(maps) for maps in given]
    if len({weights.shape for weights in sets}) > 1:
        raise MaskError(f"the weights before have shape {sets[0].shape}, those after {sets[1].shape}: must be equal")
    for name in ("tokens", "layers"):
        both = [list(getattr(maps, name)) for maps in given if hasattr(maps, name)]
        if len(both) == 2 and both[0] != both[1]:
            raise MaskError(f"the {name} before and after differ: the explorer compares two masks on the same text")
    if names is None:
        plain = ["attention"] if after is None else ["causal", "bidirectional"]
        names = [getattr(maps, "mask", name).removesuffix("()") for maps, name in zip(given, plain, strict=True)]
        names = names if len(set(names)) == len(names) else VIEWS[: len(names)]
    if isinstance(names, str) or len(names) != len(given):
        raise MaskError(f"names={names!r}: expected a list of {len(given)}, one for each set of weights")
    described = next((maps for maps in given if hasattr(maps, "tokens")), None)
    if tokens is None and described is not None:
        tokens = described.tokens
    n_layers, _, n, _ = sets[0].shape
    layers = range(n_layers) if described is None else described.layers
    return Explorer(np.stack(sets), token_labels(tokens, n, n)[1], list(map(str, names)), list(layers))


def _weights_of(maps) -> np.ndarray:
    """Float16 (layers, heads, n, n), checked."""
    array = plain_array(getattr(maps, "weights", maps), "attention weights")
    if array.dtype.kind != "f":
        raise MaskError(f"attention weights must be floating-point numbers, and are {array.dtype}")
    if not 2 <= array.ndim <= 4 or 0 in array.shape or array.shape[-1] != array.shape[-2]:
        raise MaskError(
            f"attention weights must have shape (layers, heads, n, n), (heads, n, n) or (n, n), not {array.shape}"
        )
    if np.isnan(array).any():
        raise MaskError("the attention weights hold NaN: did a mask leave a query without any key?")
    if (array < 0).any() or (array > 1.01).any():
        raise MaskError("attention weights must be between 0 and 1, the output of a softmax: scores are not weights")
    return array.astype(np.float16, copy=False).reshape((1,) * (4 - array.ndim) + array.shape)


class Explorer(anywidget.AnyWidget):
    """What `attention_explorer` returns.

    Attributes:
        layer, head: which map is shown; `layer` is the number of the layer in the model.
        view: "before", "after" or "difference" (after - before).
        query: the position whose attention is followed, or None.
        sort: the order of the small pictures: "layer", "entropy", "future" or "distance"; `rising`: lowest first.
        lifted: whether small weights are lifted (shades follow the square root of the weight); at first, if there are
            more than 32 tokens, whose weights are small.
        weights: float16 (sets, layers, heads, n, n), the sets being before and after.
    """

    _esm = joined("explorer_data.js", "explorer_map.js", "explorer.js")
    _css = joined("explorer.css")

    layer = traitlets.Int(0).tag(sync=True)
    head = traitlets.Int(0).tag(sync=True)
    view = traitlets.Enum(VIEWS, "before").tag(sync=True)
    query = traitlets.Int(None, allow_none=True).tag(sync=True)
    sort = traitlets.Enum(("layer", *MEASURES), "layer").tag(sync=True)
    rising = traitlets.Bool(False).tag(sync=True)
    lifted = traitlets.Bool(False).tag(sync=True)

    tokens = traitlets.List(traitlets.Unicode()).tag(sync=True)
    names = traitlets.List(traitlets.Unicode()).tag(sync=True)
    layers = traitlets.List(traitlets.Int()).tag(sync=True)
    heads = traitlets.Int(1).tag(sync=True)
    measures = traitlets.Dict().tag(sync=True)  # {sort: [[one number per map], one list per set]}
    # pictures: size, peaks [per set [per map]], bytes: packed uint8 (sets, maps, size, size)
    pictures = traitlets.Dict().tag(sync=True)
    # shown: layer, head, size, bytes: packed float16 (sets, size, size); exact where size is the number of tokens
    shown = traitlets.Dict().tag(sync=True)
    library = traitlets.List().tag(sync=True)  # the same of other heads, in a page on its own

    def __init__(self, weights: np.ndarray, tokens: list[str], names: list[str], layers: list[int]) -> None:
        self.weights = weights
        super().__init__(
            tokens=tokens,
            names=names,
            layers=layers,
            heads=weights.shape[2],
            measures={
                name: [measure(maps).round(4).ravel().tolist() for maps in weights]
                for name, measure in MEASURES.items()
            },
            pictures=_pictures_of(weights),
            layer=layers[0],
            lifted=len(tokens) > LARGEST_PICTURE,
        )
        self._show_head()
        self.observe(self._show_head, ["layer", "head"])
        self.on_msg(self._answer)

    @property
    def figure(self) -> go.Figure:
        """The head that is shown, under each mask; of a long text, neighbouring tokens share a cell."""
        maps = pooled(self._maps(self.layer, self.head).astype(float), LARGEST_PICTURE)  # (sets, s, s)
        n, size = len(self.tokens), maps.shape[-1]
        tokens = [visible(token) if size == n else str(i * n // size) for i, token in enumerate(self.tokens[:size])]
        title = f"Layer {self.layer}, head {self.head}"
        return attention_figure(dict(zip(self.names, maps, strict=True)), tokens, title)

    def to_html(self, path: str | Path | None = None, limit: int = PAGE_LIMIT) -> str:
        """One page that needs no kernel and no network, of about `limit` characters at most. If a `path` is given, the
        page is also written there.

        The page contains small pictures of all heads, and the exact weights of the head that is shown. The weights of
        the other heads follow in the order of the small pictures until the limit is reached; a note says for how many.
        """
        exact: list[dict[str, Any]] = []
        used = len(page(self, "", shown={}))
        for layer, head in sorted(self._in_order(), key=lambda place: place != (self.layer, self.head)):
            packed = _packed(self._maps(layer, head))
            used += len(packed) * 4 // 3 + 160  # base64, and its place in the state
            if exact and used > limit:
                break
            exact.append({"layer": layer, "head": head, "bytes": packed})
        total = len(self.layers) * self.heads
        note = f"{len(self.tokens)} tokens, {len(self.layers)} layers of {self.heads} heads. "
        if len(exact) == total:
            note += "This page contains the weights of all heads."
        else:
            note += f"This page contains the weights of {len(exact)} of {total} heads; the other {total - len(exact)} "
            note += "are shown as coarse pictures, to limit its size."
        return page(self, f"Attention: {' and '.join(self.names)}", note, path, library=exact, shown={})

    # ------------------------------------------------------------------------------------- what the page is given
    def _show_head(self, _change=None) -> None:
        """Give the page the head that is shown: exact if a notebook may keep that much, else as fine as it may."""
        if self.shown and (self.shown["layer"], self.shown["head"]) == (self.layer, self.head):
            return
        maps = self._maps(self.layer, self.head)
        size, packed = _within(ONE_HEAD, len(self.tokens), lambda size: _packed(pooled(maps, size)))
        self.shown = {"layer": self.layer, "head": self.head, "size": size, "bytes": packed}

    def _answer(self, _widget, content: Any, _buffers) -> None:
        """The page asks for the exact weights of a head: {"ask": [layer, head]}."""
        if not isinstance(content, dict) or "ask" not in content:
            return  # a message of the widget machinery
        layer, head = content["ask"]
        if layer in self.layers and 0 <= head < self.heads:
            self.send({"layer": layer, "head": head}, [_packed(self._maps(layer, head), level=1)])

    def _maps(self, layer: int, head: int) -> np.ndarray:
        """(sets, n, n)"""
        return self.weights[:, self.layers.index(layer), head]

    def _in_order(self) -> list[tuple[int, int]]:
        """(layer, head) of all maps, as the page sorts their small pictures."""
        maps = [(layer, head) for layer in self.layers for head in range(self.heads)]
        if self.sort == "layer":
            return maps
        before, after = np.array(self.measures[self.sort])[[0, -1]]
        values = {"before": before, "after": after, "difference": after - before}[self.view]
        return [maps[i] for i in np.argsort(values if self.rising else -values, kind="stable")]

    @traitlets.validate("layer", "head", "query", "view")
    def _exists(self, proposal) -> Any:
        choices: Sequence = {
            "layer": self.layers,
            "head": range(self.heads),
            "query": [None, *range(len(self.tokens))],
            "view": VIEWS if len(self.names) == 2 else VIEWS[:1],
        }[proposal.trait.name]
        if proposal.value not in choices:
            text = ", ".join(map(str, choices)) if len(choices) < 50 else f"{choices[0]} to {choices[-1]}"
            raise MaskError(f"there is no {proposal.trait.name} {proposal.value!r} here: choose one of {text}")
        return proposal.value

    def _repr_mimebundle_(self, **options) -> tuple[dict[str, object], dict[str, object]]:
        return with_figure(super()._repr_mimebundle_(**options), self.figure)


# ------------------------------------------------------------------------------------------------------ what is kept
def _pictures_of(weights: np.ndarray) -> dict[str, Any]:
    """Small pictures of all maps in 256 shades of each one's largest cell, as fine as ALL_PICTURES allows."""

    def cells(size: int) -> np.ndarray:  # (sets, layers, heads, size, size)
        return np.stack([[pooled(layer, size) for layer in layers] for layers in weights])

    def shades(size: int) -> bytes:
        maps = cells(size)
        return zlib.compress((maps / np.maximum(maps.max((-2, -1), keepdims=True), 1e-9) * 255).round().astype("u1"))

    size, packed = _within(ALL_PICTURES, min(LARGEST_PICTURE, weights.shape[-1]), shades)
    peaks = cells(size).max((-2, -1)).reshape(len(weights), -1)
    return {"size": size, "peaks": [[float(f"{peak:.4g}") for peak in maps] for maps in peaks], "bytes": packed}


def _within(limit: int, size: int, pack: Callable[[int], bytes]) -> tuple[int, bytes]:
    """The size, `size` or less, at which `pack(size)` has at most `limit` bytes, and these bytes."""
    while len(packed := pack(size)) > limit and size > 4:
        size = max(4, min(128, size - 1, int(size * (limit / len(packed)) ** 0.5)))
    return size, packed


def _packed(maps: np.ndarray, level: int = 6) -> bytes:
    """Float16 as deflated bytes: all lower bytes, then all upper ones, which resemble each other and so pack better."""
    planes = np.ascontiguousarray(maps.astype("<f2")).view(np.uint8).reshape(-1, 2).T
    return zlib.compress(np.ascontiguousarray(planes), level)
