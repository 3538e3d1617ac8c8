"""Figures of one number per head: how far each attends into the future, how widely it spreads its attention.

The numbers come as (layers, heads) arrays; `labkit.attention_measures` computes them from attention weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from labkit.errors import MaskError
from labkit.viz.grid import plain_array
from labkit.viz.panels import TOP_LEFT, text
from labkit.viz.themes import LINES, RULE, WEIGHTS, faint, finished
from labkit.viz.training_figures import DASHES, SYMBOLS

if TYPE_CHECKING:
    import plotly.graph_objects as go

LINE_WIDE, LETTERS = 300, 20  # pixels of the panel with the lines; narrowest cell that holds its number


def future_mass_figure(mass, title: str | None = None) -> go.Figure:
    """The share of attention on later tokens, from 0 to 1: (layers, heads), or `{name: (layers, heads)}` to compare.

    A map per model on one scale, and beside them the mean over the heads, layer by layer, with each head as a point. Of
    a causal model every number is 0.

    Raises:
        MaskError: another shape, shapes that differ, or a number that is no share.
    """
    maps = _checked(mass, "the future mass", 1.0)
    return _per_head(maps, "future mass", 1.0, title, "Share of attention on the future")


def entropy_figure(entropy, title: str | None = None, unit: str = "nats") -> go.Figure:
    """How widely each head spreads its attention: (layers, heads), or `{name: (layers, heads)}` to compare.

    0 is one key that gets everything; ln n nats is n keys alike. Maps and lines as in `future_mass_figure`.

    Raises:
        MaskError: another shape, shapes that differ, or a negative entropy.
    """
    maps = _checked(entropy, "entropy", None)
    top = max(float(grid.max()) for grid in maps.values()) or 1e-9
    return _per_head(maps, f"entropy, {unit}", top, title, f"Entropy of attention in {unit}")


def _checked(given, what: str, most: float | None) -> dict[str, np.ndarray]:
    pairs = given if isinstance(given, Mapping) else {"": given}
    if not pairs:
        raise MaskError(f"{what} is an array (layers, heads), or a dictionary of at least one such array")
    maps = {}
    for name, grid in pairs.items():
        array = plain_array(grid, what)
        if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "fiu":
            raise MaskError(f"{what} must be numbers of shape (layers, heads), not {array.shape} of {array.dtype}")
        if not np.isfinite(array).all() or (array < -1e-6).any() or (most and (array > most + 1e-3).any()):
            raise MaskError(f"{what} must be finite{f', from 0 to {most:g}' if most else ' and at least 0'}, per head")
        maps[str(name)] = array.astype(float).clip(0, most)
    shapes = {grid.shape for grid in maps.values()}
    if len(shapes) > 1:
        raise MaskError(f"{what} is compared over the same layers and heads, and got the shapes {sorted(shapes)}")
    return maps


def _per_head(maps: dict[str, np.ndarray], name: str, top: float, title: str | None, what: str) -> go.Figure:
    import plotly.graph_objects as go

    layers, heads = next(iter(maps.values())).shape
    cell = max(8, min(44, 640 // (heads * len(maps)), 640 // layers))
    wide, high, gap, bar = cell * heads, max(cell * layers, 160), 56, 90
    left, above = 60, 50 + 30 * (title is not None)
    inner = len(maps) * (wide + gap) + bar + LINE_WIDE
    figure, layout = go.Figure(), {}
    for i, (label, grid) in enumerate(maps.items()):
        axis = str(i + 1) if i else ""
        start = i * (wide + gap)
        hover = [[f"layer {a}, head {b}: {grid[a, b]:.3f}" for b in range(heads)] for a in range(layers)]
        numbers = {"text": [[_two(value) for value in row] for row in grid], "texttemplate": "%{text}"}
        figure.add_trace(
            go.Heatmap(
                z=grid.astype(np.float32),
                xaxis=f"x{axis}",
                yaxis=f"y{axis}",
                colorscale=WEIGHTS,
                zmin=0,
                zmax=top,
                xgap=1,
                ygap=1,
                hovertext=hover,
                hovertemplate="%{hovertext}<extra></extra>",
                showscale=i == 0,
                colorbar={
                    "title": text(name),
                    "thickness": 12,
                    "len": 0.9,
                    "x": (len(maps) * (wide + gap) - gap + 12) / inner,
                },
                **(numbers if cell >= LETTERS else {}),
                textfont={"size": 10},
            )
        )
        layout[f"xaxis{axis}"] = {
            **_counted(heads, cell),
            "range": [-0.5, heads - 0.5],
            "title": text(f"{label}: head" if label else "head"),
            "side": "top",
            "domain": [start / inner, (start + wide) / inner],
            "anchor": f"y{axis}",
        }
        layout[f"yaxis{axis}"] = {
            **_counted(layers, high / layers),
            "range": [layers - 0.5, -0.5],
            "anchor": f"x{axis}",
        }
    layout["yaxis"]["title"] = text("layer")
    last = str(len(maps) + 1)
    for i, (label, grid) in enumerate(maps.items()):
        colour, symbol = LINES[i % len(LINES)], SYMBOLS[i % len(SYMBOLS)]
        places = {"xaxis": f"x{last}", "yaxis": f"y{last}", "legendgroup": str(i)}
        spots = {"size": 5, "symbol": f"{symbol}-open", "color": faint(colour, 0.6)}
        rows = np.repeat(np.arange(layers), heads)
        each = {"x": grid.ravel(), "y": rows, "mode": "markers", "marker": spots, "hoverinfo": "skip"}
        figure.add_trace(go.Scatter(**each, **places, name=f"heads {i}", showlegend=False))
        mean = {"x": grid.mean(1), "y": np.arange(layers), "mode": "lines+markers"}
        figure.add_trace(
            go.Scatter(
                **mean,
                **places,
                name=escape(label or "mean over heads"),
                line={"color": colour, "width": 2.5, "dash": DASHES[i % len(DASHES)]},
                marker={"symbol": symbol, "size": 8, "color": colour},
                hovertemplate="layer %{y}, mean over the heads: %{x:.3f}<extra></extra>",
            )
        )
    layout[f"xaxis{last}"] = {
        "title": text(f"{name}, mean over the heads"),
        "range": [-0.03 * top, 1.05 * top],
        "domain": [1 - LINE_WIDE / inner, 1],
        "anchor": f"y{last}",
        "side": "top",
        "gridcolor": RULE,
        "zeroline": False,
    }
    layout[f"yaxis{last}"] = {**_counted(layers, high / layers), "range": [layers - 0.5, -0.5], "anchor": f"x{last}"}
    layout[f"yaxis{last}"] |= {"showgrid": True}
    figure.update_layout(
        **layout,
        width=left + inner + 30,
        height=above + 40 + high + 60,
        margin={"l": left, "r": 30, "t": above + 40, "b": 60},
        title={**text(title or ""), **TOP_LEFT},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": -0.02, "yanchor": "top"},
        showlegend=True,
    )
    return finished(figure, f"{title or what}: {layers} layers of {heads} heads. " + " ".join(_words(maps)))


def _words(maps: dict[str, np.ndarray]) -> list[str]:
    said = []
    for label, grid in maps.items():
        layer, head = np.unravel_index(grid.argmax(), grid.shape)
        start = f"{label}: mean" if label else "Mean"
        if grid.max() == 0:
            said.append(f"{label}: 0 in every head." if label else "0 in every head.")
            continue
        said.append(f"{start} {grid.mean():.2f}, most {grid.max():.2f} in layer {layer}, head {head};")
        said.append(f"by layer {', '.join(_two(value) for value in grid.mean(1))}.")
    return said


def _counted(n: int, pixels: float | int) -> dict:
    step = max(1, round(-(-16 // pixels)))
    return {"tickmode": "array", "tickvals": list(range(0, n, step)), "showgrid": False, "zeroline": False}


def _two(value: float) -> str:
    return "0" if value < 0.005 else f"{value:.2f}".removeprefix("0") if value < 0.995 else f"{value:.1f}"
