"""A widget that shows one of several pictures, chosen with a slider or with a row of buttons.

The pictures are drawn beforehand by the pure functions beside it and travel with the widget, so choosing needs no
kernel and no network; where widgets do not run at all, the picture chosen last is shown instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import anywidget
import traitlets

from labkit.errors import MaskError
from labkit.viz.svg import Svg


class Frames(anywidget.AnyWidget):
    """Several pictures, one of them on show: `.index` says which, `.picture` is the one, `.pictures` are all.

    Args:
        pictures: one for each place of the control; what is shown where widgets do not run.
        control: what is chosen, such as "training step"; the name of the slider, or of the row of buttons.
        labels: the name of each picture, on the slider's right or on its button.
        sentences: each picture in one sentence, read aloud when it is chosen.
        buttons: a row of buttons, of which the pressed one is hidden, in place of a slider.
        shown: pictures to draw under the control in place of `pictures`, where the control itself is a part of them.

    Raises:
        MaskError: an index without a picture.
    """

    _esm = files(__package__).joinpath("frames.js").read_text(encoding="utf-8")
    _css = files(__package__).joinpath("frames.css").read_text(encoding="utf-8")

    index = traitlets.Int(0).tag(sync=True)
    control = traitlets.Unicode().tag(sync=True)
    labels = traitlets.List(traitlets.Unicode()).tag(sync=True)
    sentences = traitlets.List(traitlets.Unicode()).tag(sync=True)
    buttons = traitlets.Bool(False).tag(sync=True)
    lines = traitlets.List(traitlets.Unicode()).tag(sync=True)  # every line of SVG, once
    frames = traitlets.List(traitlets.List(traitlets.Int())).tag(sync=True)  # each picture: which lines, in order

    def __init__(
        self,
        pictures: Sequence[Svg],
        control: str,
        labels: Sequence[str],
        sentences: Sequence[str],
        index: int = 0,
        buttons: bool = False,
        shown: Sequence[Svg] | None = None,
    ) -> None:
        self.pictures = list(pictures)
        drawn = [picture.split("\n") for picture in shown or pictures]
        number = {line: i for i, line in enumerate(dict.fromkeys(line for lines in drawn for line in lines))}
        super().__init__(
            control=control,
            labels=list(labels),
            sentences=list(sentences),
            buttons=buttons,
            lines=list(number),
            frames=[[number[line] for line in lines] for lines in drawn],
            index=index,
        )

    @property
    def picture(self) -> Svg:
        """The picture on show."""
        return self.pictures[self.index]

    @traitlets.validate("index")
    def _has_a_picture(self, proposal) -> int:
        if not 0 <= proposal.value < len(self.pictures):
            raise MaskError(f"there is no picture {proposal.value}: the index is from 0 to {len(self.pictures) - 1}")
        return proposal.value

    def _repr_mimebundle_(self, **options) -> tuple[dict[str, object], dict[str, object]]:
        """The widget, and beside it the picture for pages that only render the notebook."""
        bundle, metadata = super()._repr_mimebundle_(**options) or ({}, {})
        still = {"image/svg+xml": str(self.picture), "text/plain": f"Picture: {self.picture.alt}"}
        return {**bundle, **still}, metadata
