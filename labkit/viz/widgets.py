"""ipywidgets that redraw a picture: a widget wires controls to the pure functions beside it, holding no other state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import ipywidgets

from labkit import masks
from labkit.errors import MaskError
from labkit.viz.svg import Svg, mask_svg

# kind -> (the factory, what its number is called, the least such number); no number: (factory, None, None)
KINDS: dict[str, tuple[Callable[..., masks.Mask], str | None, int | None]] = {
    "causal": (masks.causal, None, None),
    "bidirectional": (masks.bidirectional, None, None),
    "sliding window": (masks.sliding_window, "window", 1),
    "prefix": (masks.prefix, "prefix", 0),
    "hybrid": (masks.hybrid, "hybrid from", 0),
}


def mask_slider(tokens: Sequence[str], kind: str = "causal", number: int = 3) -> MaskSlider:
    """A mask over `tokens`, redrawn by a menu (which kind) and a slider (its number), with its meaning in words below.

    `.mask` is the Mask on show. Where widgets cannot run, the first picture is shown instead.

    Raises:
        MaskError: no tokens, one text instead of a list, or an unknown kind.
    """
    return MaskSlider(tokens, kind, number)


class MaskSlider(ipywidgets.VBox):
    """What `mask_slider` returns: `.kind` and `.number` are the controls, `.mask` is the Mask on show."""

    def __init__(self, tokens: Sequence[str], kind: str, number: int) -> None:
        if isinstance(tokens, str) or not len(tokens):
            raise MaskError(f"mask_slider takes a list of tokens, such as ['the', 'cat'], and got {tokens!r}")
        if kind not in KINDS:
            raise MaskError(f"unknown kind of mask {kind!r}: one of {', '.join(map(repr, KINDS))}")
        self.tokens = [str(token) for token in tokens]
        wide = ipywidgets.Layout(width="420px")
        self.kind = ipywidgets.Dropdown(options=list(KINDS), value=kind, description="mask", layout=wide)
        self.number = ipywidgets.IntSlider(min=0, max=len(self.tokens), value=number, layout=wide)
        self.picture, self.words = ipywidgets.HTML(), ipywidgets.HTML()
        super().__init__([self.kind, self.number, self.picture, self.words])
        self.kind.observe(self._redraw, "value")
        self.number.observe(self._redraw, "value")
        self._redraw()

    @property
    def mask(self) -> masks.Mask:
        factory, name, _ = KINDS[self.kind.value]
        return factory() if name is None else factory(self.number.value)

    def draw(self) -> Svg:
        """The picture of the mask on show."""
        return mask_svg(self.mask.dense(len(self.tokens)), self.tokens, repr(self.mask))

    def _redraw(self, _change=None) -> None:
        _, name, least = KINDS[self.kind.value]
        self.number.disabled = name is None
        self.number.description = name or "(no number)"
        self.number.min = least or 0
        self.picture.value = str(self.draw())
        self.words.value = f'<p aria-live="polite">{escape(self.mask.explain())}</p>'

    def _repr_mimebundle_(self, **options) -> dict[str, object]:
        """The widget, and beside it the picture for pages that only render the notebook."""
        bundle = super()._repr_mimebundle_(**options)
        picture = self.draw()
        return {**bundle, "image/svg+xml": str(picture), "text/plain": f"Picture: {picture.alt}"}
