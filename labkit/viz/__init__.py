"""Pictures of masks, attention and influence: plain arrays in, a figure out; no model and no state.

* `labkit.viz.figures`: interactive plotly figures.
* `labkit.viz.svg`: small static pictures, which also show where a notebook is only rendered, as on GitHub.
* `labkit.viz.widgets`: ipywidgets controls that redraw such a picture.

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
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Import the module behind a public name the first time it is asked for (PEP 562)."""
    if name in ("figures", "grid", "svg", "widgets"):
        return import_module(f"labkit.viz.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'labkit.viz' has no attribute {name!r}. Public names: {', '.join(__all__)}.")
    return getattr(import_module(f"labkit.viz.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
