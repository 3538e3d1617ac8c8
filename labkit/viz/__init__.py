"""Figures, text with marks, and interactive views of masks, attention and predictions.

* Plotly figures, from plain arrays: `labkit.viz.heat` (masks, attention, numbers per layer, verdicts),
  `labkit.viz.charts`, `labkit.viz.predictions`; `slider` puts several behind one slider.
* `labkit.viz.text`: answers, entities, generations and probes, as HTML.
* `labkit.viz.mask_playground`: a mask composed and painted in the browser, and what an attached model makes of it.
* `labkit.viz.explorer`: every layer and head of a text, causal and bidirectional (`labkit.explore_attention`).
* `labkit.viz.bertviz`: bertviz's head, model and neuron views, without a network.

Colours mean the same everywhere: see `labkit.viz.style`. The upper triangle, a token's future, is always shown.
"""

from importlib import import_module
from typing import Any

from labkit.errors import needs_extra

_PUBLIC = {  # module -> the public names that it defines
    "heat": ("attention_figure", "category_figure", "mask_figure", "values_figure"),
    "charts": ("curves_figure", "curves_slider", "forest_figure", "stacked_slider"),
    "predictions": ("fill_ins_figure", "objectives_figure", "walk_figure", "windows_figure"),
    "panels": ("slider",),
    "text": ("answer_figure", "ask", "entities_figure", "generation_figure", "probe_figure", "stacked", "words_figure"),
    "mask_playground": ("playground",),
    "bertviz": ("bertviz_compare", "bertviz_head_view", "bertviz_model_view", "bertviz_neuron_view"),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Import the module behind a public name the first time it is asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'labkit.viz' has no attribute {name!r}. Public names: {', '.join(__all__)}.")
    with needs_extra("lab"):
        return getattr(import_module(f"labkit.viz.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
