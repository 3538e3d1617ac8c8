"""The static picture of the attention explorer: the head on show under each mask, and the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from labkit.viz.svg import SHADES, Svg, _Panel, _picture, _shade
from labkit.viz.themes import DIFFERENCE
from labkit.viz.tokens import visible

MOST = 32  # cells on a side: beyond, neighbouring tokens share one


def still(
    maps: np.ndarray, tokens: Sequence[str], layer: int, head: int, said: Mapping[str, Mapping[str, float]]
) -> Svg:
    """Maps (sets, n, n) beside each other; `said` names the sets, with entropy, future and distance of each."""
    n, words = maps.shape[-1], []
    size = min(n, MOST)
    cells = pooled(maps, size).astype(float)
    ends = (np.arange(size + 1) * n // size).tolist()
    labels = [visible(token) for token in tokens]
    if size < n:
        labels = [f"{a}–{b - 1}" if b - a > 1 else str(a) for a, b in zip(ends, ends[1:], strict=False)]
    top, names = max(float(cells.max()), 1e-9), list(said)
    panels = [
        _weights_panel(grid, labels, _titled(name, i, layer, head), top, beside=len(names) + (len(names) > 1))
        for i, (name, grid) in enumerate(zip(names, cells, strict=True))
    ]
    for name, numbers in said.items():
        words.append(
            f"{name}: entropy {numbers['entropy']:.2f} nats, future mass {numbers['future']:.2f}, "
            f"mean distance {numbers['distance']:.1f} tokens."
        )
    if len(names) > 1:
        panels.append(_difference_panel(cells[1] - cells[0], labels))
        words.append(f"The largest change of a weight is {np.abs(maps[1] - maps[0]).max():.2f}.")
    if size < n:
        words.append(f"Each cell stands for about {n / size:.1f} x {n / size:.1f} tokens.")
    return _picture(panels, f"Attention explorer, layer {layer} head {head}, {n} tokens. {' '.join(words)}")


def pooled(maps: np.ndarray, size: int) -> np.ndarray:
    """Maps (..., n, n) in `size` x `size` cells: the share of attention on a cell's keys, averaged over its queries."""
    n = maps.shape[-1]
    if size == n:
        return maps.astype(np.float32)
    starts = np.arange(size) * n // size
    counts = np.diff(np.append(starts, n))
    summed = np.add.reduceat(np.add.reduceat(maps.astype(np.float32), starts, axis=-1), starts, axis=-2)
    return summed / counts[:, None]


def _titled(name: str, i: int, layer: int, head: int) -> str:
    return f"layer {layer} head {head}: {name}" if i == 0 else name


def _weights_panel(grid: np.ndarray, labels: list[str], title: str, top: float, beside: int) -> _Panel:
    shades = np.round(grid / top * SHADES).astype(int)
    colours = np.vectorize(_shade, otypes=[object])(shades)
    numbers = grid if len(labels) <= 8 else None
    return _Panel(
        colours,
        labels,
        labels,
        title,
        lambda i, j: f'"{labels[i]}" looks at "{labels[j]}": {grid[i, j]:.3f}',
        numbers,
        shades > SHADES // 2,
        beside,
    )


def _difference_panel(change: np.ndarray, labels: list[str]) -> _Panel:
    most = max(float(np.abs(change).max()), 1e-9)
    levels = np.round(change / most * SHADES / 2).astype(int)
    colours = np.vectorize(_diverging, otypes=[object])(levels)
    return _Panel(
        colours,
        labels,
        labels,
        "difference",
        lambda i, j: f'"{labels[i]}" looks at "{labels[j]}": {change[i, j]:+.3f}',
        beside=3,
    )


def _diverging(level: int) -> str:
    """The colour of a change: orange is less, nearly white is none, purple is more."""
    middle, end = DIFFERENCE[1][1], DIFFERENCE[2 if level > 0 else 0][1]
    share = abs(level) / (SHADES // 2)
    pairs = [(int(middle[i : i + 2], 16), int(end[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02X}" for a, b in pairs)
