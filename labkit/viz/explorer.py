"""The attention explorer: every layer and head of one text, under one mask or two, and the difference between them.

    e = labkit.explore_attention(lm, text)                  # in a notebook: the last line of a cell shows it
    e.layer, e.head, e.view = 3, 2, "difference"            # what is shown can be set from Python, too

A notebook keeps small pictures of all heads, and the head that is shown. The others' weights stay in the kernel, which
sends those that the page asks for. Without a kernel (a saved page) those heads are shown as coarse pictures, and the
explorer says so. `to_html` makes a page that holds all of them.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
import traitlets

from labkit.attention import measures
from labkit.attention.maps import AttentionMaps, attention_maps
from labkit.attention.plain import visible
from labkit.decoder.anatomy import find_decoder
from labkit.errors import MaskError
from labkit.masks import bidirectional, causal, sliding_window
from labkit.viz.heat import attention_figure, pooled
from labkit.viz.page import joined, page, with_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

VIEWS = ("before", "after", "difference")
NAMES = ("causal", "bidirectional")
MEASURES = {"entropy": measures.entropy, "future": measures.future_mass, "distance": measures.mean_distance}
HEAD_SIDE, PICTURE_SIDE = 128, 32  # cells on a side, at most, of the head that is shown and of the small pictures
ALL_PICTURES = 100_000  # cells of all small pictures together, at most


def explore_attention(lm, text) -> Explorer:
    """The attention explorer on one text, causal against bidirectional: two captures, whatever state the model is in.

    The local layers of a model keep their window: W tokens back, and in the bidirectional maps W - 1 on either side, as
    `to_bidirectional(window="keep")` leaves them. Arguments and errors as `labkit.attention.maps.attention_maps`.
    """
    decoder = find_decoder(lm.model)
    windows = [decoder.causal_window(i) for i in range(len(decoder.layers))]
    before = [sliding_window(window) if window else causal() for window in windows]
    after = [sliding_window(window, causal=False) if window else bidirectional() for window in windows]
    return Explorer(*(attention_maps(lm, text, masks) for masks in (before, after)))


class Explorer(anywidget.AnyWidget):
    """What `explore_attention` returns.

    Attributes:
        layer, head: which map is shown.
        view: "before", "after" or "difference" (after - before).
        query: the position whose attention is followed, or None.
        sort: the order of the small pictures: "layer", "entropy", "future" or "distance"; `rising`: lowest first.
        lifted: whether small weights are lifted (shades follow the square root of the weight); at first, if there are
            more than 32 tokens, whose weights are small.
        weights: float16 (sets, layers, heads, n, n), the sets being before and after.
    """

    _esm = joined("widget.js", "explorer_data.js", "explorer_map.js", "explorer.js")
    _css = joined("widget.css", "explorer.css")

    layer = traitlets.Int(0).tag(sync=True)
    head = traitlets.Int(0).tag(sync=True)
    view = traitlets.Enum(VIEWS, "before").tag(sync=True)
    query = traitlets.Int(None, allow_none=True).tag(sync=True)
    sort = traitlets.Enum(("layer", *MEASURES), "layer").tag(sync=True)
    rising = traitlets.Bool(False).tag(sync=True)
    lifted = traitlets.Bool(False).tag(sync=True)

    tokens = traitlets.List(traitlets.Unicode()).tag(sync=True)
    layers = traitlets.Int(1).tag(sync=True)
    heads = traitlets.Int(1).tag(sync=True)
    measures = traitlets.Dict().tag(sync=True)  # {sort: [[one number per map], one list per set]}
    # pictures: size, peaks [per set [per map]], bytes: packed uint8 (sets, maps, size, size)
    pictures = traitlets.Dict().tag(sync=True)
    # The heads that the page holds, in a notebook the one that is shown: layer, head, size, bytes: packed float32
    # (sets, size, size); exact where size is the number of tokens.
    held = traitlets.List().tag(sync=True)

    def __init__(self, before: AttentionMaps, after: AttentionMaps) -> None:
        self.weights = weights = np.stack([before.weights, after.weights])
        side = min(PICTURE_SIDE, max(4, int((ALL_PICTURES / weights[..., 0, 0].size) ** 0.5)))
        maps = np.stack([[pooled(layer, side) for layer in layers] for layers in weights]).astype(np.float32)
        peaks = maps.max((-2, -1), keepdims=True)  # a picture is in 256 shades of its largest cell
        shades = (maps / np.maximum(peaks, 1e-9) * 255).round().astype("u1")
        peaks = peaks.reshape(len(weights), -1).astype(float).round(6).tolist()
        super().__init__(
            tokens=before.tokens,
            layers=weights.shape[1],
            heads=weights.shape[2],
            measures={name: measure(weights).reshape(len(weights), -1).tolist() for name, measure in MEASURES.items()},
            pictures={"size": maps.shape[-1], "peaks": peaks, "bytes": zlib.compress(shades.tobytes())},
            lifted=len(before.tokens) > PICTURE_SIDE,
        )
        self._show_head()
        self.observe(self._show_head, ["layer", "head"])
        self.on_msg(self._answer)

    @property
    def figure(self) -> go.Figure:
        """The head that is shown, under each mask; of a long text, neighbouring tokens share a cell."""
        maps = self._maps(self.layer, self.head, PICTURE_SIDE)
        n, size = len(self.tokens), maps.shape[-1]
        tokens = [visible(token) if size == n else str(i * n // size) for i, token in enumerate(self.tokens[:size])]
        title = f"Layer {self.layer}, head {self.head}"
        return attention_figure(dict(zip(NAMES, maps, strict=True)), tokens, title)

    def to_html(self, path: str | Path | None = None) -> str:
        """One page that needs no kernel and no network, with the exact weights of all heads. If a `path` is given, the
        page is also written there."""
        heads = [(layer, head) for layer in range(self.layers) for head in range(self.heads)]
        held = [self._head(*place, len(self.tokens)) for place in heads]
        return page(self, f"Attention: {' and '.join(NAMES)}", path, held=held)

    def _show_head(self, _change=None) -> None:
        """Give the page the head that is shown: exact, or of a long text as fine as a notebook may keep."""
        self.held = [self._head(self.layer, self.head, HEAD_SIDE)]

    def _answer(self, _widget, content: Any, _buffers) -> None:
        """The page asks for the exact weights of a head: {"ask": [layer, head]}."""
        if "ask" in content:
            head = self._head(*content["ask"], len(self.tokens))
            packed = head.pop("bytes")
            self.send(head, [packed])

    def _maps(self, layer: int, head: int, size: int) -> np.ndarray:
        """(sets, s, s), where s is the number of tokens, but at most `size`."""
        return pooled(self.weights[:, layer, head], size)

    def _head(self, layer: int, head: int, size: int) -> dict[str, Any]:
        """An entry of `held`, with at most `size` cells on a side."""
        maps = self._maps(layer, head, size).astype(np.float16)  # with its zeros, float32 packs nearly as well
        packed = zlib.compress(maps.astype("<f4").tobytes())
        return {"layer": layer, "head": head, "size": maps.shape[-1], "bytes": packed}

    @traitlets.validate("layer", "head", "query")
    def _exists(self, proposal) -> Any:
        choices = {"layer": range(self.layers), "head": range(self.heads), "query": [None, *range(len(self.tokens))]}
        choices = choices[proposal.trait.name]
        if proposal.value not in choices:
            text = f"choose one of {', '.join(map(str, choices[:50]))}"
            raise MaskError(f"there is no {proposal.trait.name} {proposal.value!r} here: {text}")
        return proposal.value

    def _repr_mimebundle_(self, **options) -> tuple[dict[str, object], dict[str, object]]:
        return with_figure(super()._repr_mimebundle_(**options), self.figure)
