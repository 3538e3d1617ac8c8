"""Pictures of masks, attention and influence: plain arrays in, a figure out; no model and no state.

* `labkit.viz.figures`: interactive plotly figures.
* `labkit.viz.svg`: small static pictures, which also show where a notebook is only rendered, as on GitHub.
* `labkit.viz.curves`, `fill_ins`, `objectives`, `generation`: such pictures of what a model learns, names and writes.
* `labkit.viz.widgets`: ipywidgets controls that redraw a picture; `labkit.viz.frames`: one that chooses among pictures.

Every picture shows the upper triangle (the future), in colours that colour-blind readers can tell apart, and carries
its text equivalent.
"""

from importlib import import_module
from typing import Any

_HOME = {  # public name -> the module that defines it
    "alt_text": "figures",
    "attention_figure": "figures",
    "attention_pair": "figures",
    "influence_figure": "figures",
    "mask_figure": "figures",
    "masks_side_by_side": "figures",
    "attention_svg": "svg",
    "mask_svg": "svg",
    "masks_svg": "svg",
    "road_svg": "svg",
    "mask_slider": "widgets",
    "leak_curves_slider": "curves",
    "leak_curves_svg": "curves",
    "fill_ins_clicks": "fill_ins",
    "fill_ins_svg": "fill_ins",
    "objectives_svg": "objectives",
    "generation_svg": "generation",
    "walk_slider": "generation",
    "walk_svg": "generation",
}

_MODULES = {*_HOME.values(), "frames", "grid"}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Import the module behind a public name the first time it is asked for (PEP 562)."""
    if name in _MODULES:
        return import_module(f"labkit.viz.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'labkit.viz' has no attribute {name!r}. Public names: {', '.join(__all__)}.")
    return getattr(import_module(f"labkit.viz.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
