"""Figures, text with marks, and interactive views of masks, attention and predictions.

* Plotly figures, from plain arrays: `labkit.viz.heat` (masks, attention, numbers per layer, verdicts),
  `labkit.viz.curves`, `labkit.viz.forest`, `labkit.viz.predictions`; `slider` puts several behind one slider.
* `labkit.viz.text`: answers, entities and generations, as HTML.
* `labkit.viz.mask_playground`: a mask composed and painted in the browser, and what an attached model makes of it.
* `labkit.viz.explorer`: every layer and head of a text, causal and bidirectional (`labkit.explore_attention`).
* `labkit.viz.bertviz`: bertviz's head, model and neuron views, without a network.

Colours mean the same everywhere: see `labkit.viz.style`. The upper triangle, a token's future, is always shown.
"""

from importlib import import_module
from typing import Any

_HOME = {  # public name -> the module that defines it
    "attention_figure": "heat",
    "category_figure": "heat",
    "head_grid": "heat",
    "mask_figure": "heat",
    "values_figure": "heat",
    "curves_figure": "curves",
    "curves_slider": "curves",
    "forest_figure": "forest",
    "fill_ins_figure": "predictions",
    "objectives_figure": "predictions",
    "walk_figure": "predictions",
    "windows_figure": "predictions",
    "slider": "sliders",
    "answer_figure": "text",
    "entities_figure": "text",
    "generation_figure": "text",
    "stacked": "text",
    "words_figure": "text",
    "playground": "mask_playground",
    "attention_explorer": "explorer",
    "bertviz_compare": "bertviz",
    "bertviz_head_view": "bertviz",
    "bertviz_model_view": "bertviz",
    "bertviz_neuron_view": "bertviz",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Import the module behind a public name the first time it is asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'labkit.viz' has no attribute {name!r}. Public names: {', '.join(__all__)}.")
    return getattr(import_module(f"labkit.viz.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
