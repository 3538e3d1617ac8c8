"""Figures of a whole model's attention: all heads, all layers, and what the layers do together.

Plain arrays in, a plotly `Figure` out, as in `labkit.viz.figures`: rows are queries, columns keys, the future is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.errors import MaskError
from labkit.viz.grid import attention_in_words, bool_grid, mask_in_words, plain_array, token_labels, weight_grids
from labkit.viz.mosaic import Tile, mosaic
from labkit.viz.panels import mask_heatmap, panels, same_shape, weight_heatmap
from labkit.viz.themes import finished

if TYPE_CHECKING:
    import plotly.graph_objects as go


def head_grid(weights, tokens: Sequence[str] | None = None, title: str | None = None) -> go.Figure:
    """Every head of every layer, weights (layers, heads, q_len, kv_len): layers are rows, heads columns, one scale.

    Hovering names the head, both tokens and the weight. Where tokens are more than there are pixels, neighbouring ones
    share a cell, and the figure says how many.

    Raises:
        MaskError: another shape, NaN, or numbers that are no weights.
    """
    maps = _layers_of_maps(weights, 4, "(layers, heads, queries, keys)")
    layers, heads = maps.shape[:2]
    queries, keys = token_labels(tokens, *maps.shape[2:])
    tiles = [
        Tile(maps[i, j], f"head {j}" if i == 0 else "", f"layer {i}, head {j}", f"layer {i}")
        for i in range(layers)
        for j in range(heads)
    ]
    figure = mosaic(tiles, heads, queries, keys, title)
    shares = _future_share(maps)  # (layers, heads)
    layer, head = np.unravel_index(shares.argmax(), shares.shape)
    alt = (
        f"{title or 'Attention weights'}: {layers} layers of {heads} heads, {len(queries)} queries and "
        f"{len(keys)} keys. Share of attention on the future: {shares.mean():.0%} on average, most in layer {layer}, "
        f"head {head} ({shares.max():.0%}). {_by_layer(shares.mean(1))}"
    )
    return finished(figure, alt)


def layer_strip(weights, tokens: Sequence[str] | None = None, title: str | None = None) -> go.Figure:
    """One map for each layer, from the first to the last: weights (layers, q_len, kv_len), on one scale.

    Of weights (layers, heads, q_len, kv_len) it shows the mean over the heads.

    Raises:
        MaskError: another shape, NaN, or numbers that are no weights.
    """
    array = plain_array(weights, "weights")
    maps = _layers_of_maps(array, 4 if array.ndim == 4 else 3, "(layers, queries, keys), with or without heads")
    maps = maps.mean(1) if maps.ndim == 4 else maps
    queries, keys = token_labels(tokens, *maps.shape[1:])
    tiles = [Tile(grid, f"layer {i}", f"layer {i}") for i, grid in enumerate(maps)]
    figure = mosaic(tiles, _in_a_row(len(tiles), len(keys)), queries, keys, title)
    mean = ", mean over the heads" if array.ndim == 4 else ""
    alt = f"{title or 'Attention by layer'}: {len(maps)} layers{mean}, {len(queries)} queries and {len(keys)} keys. "
    return finished(figure, alt + f"Share of attention on the future. {_by_layer(_future_share(maps))}")


def rollout_figure(rollout, tokens: Sequence[str] | None = None, influence=None, title: str | None = None) -> go.Figure:
    """Attention rollout, what the layers up to one attend to together: (q_len, kv_len), or one for each layer.

    With the measured `influence`, bool (q_len, kv_len), that map stands beside it (behind the last layer): rollout
    estimates how much reaches a position, influence says whether anything does.

    Raises:
        MaskError: another shape, NaN, or numbers that are no weights.
    """
    maps = weight_grids(rollout, "rollout")
    queries, keys = token_labels(tokens, *maps.shape[1:])
    reached = None if influence is None else bool_grid(influence, "influence")
    if reached is not None:
        same_shape(reached, maps[0], "influence")
    if len(maps) == 1:
        cells = maps.size * (2 if reached is not None else 1)
        top = max(float(maps.max()), 1e-9)
        shown = [weight_heatmap(maps[0], queries, keys, top, True, cells, "rollout", "draws on")]
        shown += (
            []
            if reached is None
            else [mask_heatmap(reached, queries, keys, ("is reached by", "is not reached by"), cells)]
        )
        names = [None] if reached is None else ["rollout", "measured influence"]
        figure = panels(shown, names, queries, keys, title, scale=True)
    else:
        tiles = [Tile(grid, f"up to layer {i}", f"rollout up to layer {i}") for i, grid in enumerate(maps)]
        if reached is not None:
            tiles.append(Tile(reached.astype(float), "influence", "measured influence (1 = reached)", influence=True))
        figure = mosaic(tiles, _in_a_row(len(tiles), len(keys)), queries, keys, title, "rollout")
    alt = attention_in_words(maps[-1:], queries, keys, title or "Attention rollout")
    alt = alt.replace("1 head,", f"{len(maps)} layers," if len(maps) > 1 else "all layers together,")
    if reached is not None:
        alt += " " + mask_in_words(reached, queries, keys, "Measured influence", every_row=False)
        agree = np.corrcoef(maps[-1].ravel(), reached.ravel())[0, 1] if 0 < reached.mean() < 1 < maps.size else None
        alt += f" Their correlation over the cells is {agree:.2f}." if agree is not None and np.isfinite(agree) else ""
    return finished(figure, alt)


def _in_a_row(maps: int, kv_len: int) -> int:
    """How many maps stand beside each other: fewer of long sentences, whose maps would lose too much otherwise."""
    return min(maps, 6 if kv_len <= 128 else 4)


def _layers_of_maps(weights, dimensions: int, shape: str) -> np.ndarray:
    array = plain_array(weights, "weights")
    if array.ndim != dimensions or 0 in array.shape:
        raise MaskError(f"weights must have shape {shape}, not {array.shape}: of a batch pick one sentence first")
    flat = weight_grids(array.reshape(-1, *array.shape[-2:]))
    return flat.reshape(array.shape)


def _future_share(maps: np.ndarray) -> np.ndarray:
    """Of maps (..., q_len, kv_len), the share of each on keys after the query."""
    q_len, kv_len = maps.shape[-2:]
    future = np.triu(np.ones((q_len, kv_len), dtype=bool), k=kv_len - q_len + 1)
    return (maps * future).sum((-2, -1)) / np.maximum(maps.sum((-2, -1)), 1e-12)


def _by_layer(shares: np.ndarray) -> str:
    shares = [f"{share:.0%}" for share in shares]
    return f"By layer: {', '.join(shares)}." if len(shares) > 1 else f"{shares[0]}."
