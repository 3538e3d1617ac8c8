"""Pictures of masks, attention and influence: plain arrays in, a figure out; no model and no state.

* `labkit.viz.figures`: interactive plotly figures; beside it `attention_figures` (all heads, all layers, rollout),
  `head_figures` (a number per head), `fusion_figures`, `training_figures`, and `text_figures` (spans over a text).
* `labkit.viz.themes`: light and dark; `labkit.viz.saving`: figures as .html, .svg and .png files.
* `labkit.viz.svg`: small static pictures, which also show where a notebook is only rendered, as on GitHub.
* `labkit.viz.curves`, `fill_ins`, `objectives`, `generation`: such pictures of what a model learns, names and writes.
* `labkit.viz.widgets`: ipywidgets controls that redraw a picture; `labkit.viz.frames`: one that chooses among pictures.
* `labkit.viz.mask_playground`: a mask composed and painted in the browser, and what an attached model makes of it.
* `labkit.viz.explorer`: every layer and head of a text, causal against bidirectional (`labkit.explore_attention`).
* `labkit.viz.bertviz`: bertviz's head, model and neuron views, with no network.

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
    "said_and_measured": "figures",
    "head_grid": "attention_figures",
    "layer_strip": "attention_figures",
    "rollout_figure": "attention_figures",
    "entropy_figure": "head_figures",
    "future_mass_figure": "head_figures",
    "fusion_figure": "fusion_figures",
    "leak_curves_figure": "training_figures",
    "runs_figure": "training_figures",
    "scores_figure": "training_figures",
    "answer_figure": "text_figures",
    "entities_figure": "text_figures",
    "in_theme": "themes",
    "use_theme": "themes",
    "save": "saving",
    "attention_svg": "svg",
    "mask_svg": "svg",
    "masks_svg": "svg",
    "road_svg": "svg",
    "mask_slider": "widgets",
    "playground": "mask_playground",
    "attention_explorer": "explorer",
    "leak_curves_slider": "curves",
    "effect_curves_svg": "effects",
    "effects_svg": "effects",
    "leak_curves_svg": "curves",
    "fill_ins_clicks": "fill_ins",
    "fill_ins_svg": "fill_ins",
    "objectives_svg": "objectives",
    "bertviz_compare": "bertviz",
    "bertviz_head_view": "bertviz",
    "bertviz_model_view": "bertviz",
    "bertviz_neuron_view": "bertviz",
    "bertviz_setup": "bertviz",
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
