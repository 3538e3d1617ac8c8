"""Static pictures of a model's depth: which of its layers are local, and one number per layer and token."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED, MASKED, short
from labkit.viz.svg import INK, LETTER, SHADES, Svg, _label, _shade, _svg, _weight

BESIDE = 24  # layers in one row of the strip


def layer_types_svg(types: Sequence[str]) -> Svg:
    """The layers of a model as a strip, from the input (left) to the output: local ones small, global ones tall.

    `types`: "sliding_attention" or "full_attention" for each layer, as in transformers' `config.layer_types`.
    """
    known = {"sliding_attention": "local", "full_attention": "global"}
    unknown = sorted({str(t) for t in types} - set(known))
    if unknown or not len(types):
        given = f"there is {', '.join(map(repr, unknown))}" if unknown else "the list is empty"
        raise MaskError(f"layer_types_svg takes a list of {' and '.join(map(repr, known))}, and {given}")
    names = [known[t] for t in types]
    step, tall, low = 34, 54, 22
    body = []
    for i, name in enumerate(names):
        x, y = 10 + i % BESIDE * step, 30 + i // BESIDE * (tall + 34)
        high, fill = (tall, ALLOWED) if name == "global" else (low, MASKED)
        tip = f"<title>layer {i}: {name}</title>"
        body.append(
            f'<rect x="{x}" y="{y + tall - high}" width="{step - 6}" height="{high}" rx="3" fill="{fill}" '
            f'stroke="#B0B0B0">{tip}</rect>'
        )
        body.append(f'<text x="{x + step // 2 - 3}" y="{y + tall + 16}" text-anchor="middle">{i}</text>')
    for x, fill, words in ((10, ALLOWED, "global: no window"), (150, MASKED, "local: a window")):
        body.append(f'<rect x="{x}" y="6" width="12" height="12" fill="{fill}" stroke="#B0B0B0"/>')
        body.append(f'<text x="{x + 18}" y="16">{words}</text>')
    rows = -(-len(names) // BESIDE)
    where = [f"{name} {_runs([i for i, n in enumerate(names) if n == name])}" for name in sorted(set(names))]
    alt = f"{len(names)} layers: {'; '.join(where)}."
    return _svg(body, max(280, 20 + min(len(names), BESIDE) * step), 40 + rows * (tall + 34), alt)


def layer_values_svg(values, tokens: Sequence[str], title: str, what: str, columns: str = "tokens") -> Svg:
    """One number >= 0 per layer and token, `values` (layers, tokens): darker is more, white is 0.

    `what` names the number ("change of the state"). Rows are layers, the first at the top; up to 12 tokens, each cell
    holds its number. `columns` names what the columns stand for ("heads").
    """
    array = values.detach().cpu().float().numpy() if hasattr(values, "detach") else np.asarray(values, dtype=float)
    if array.ndim != 2 or array.size == 0 or not np.isfinite(array).all() or array.min() < 0:
        raise MaskError(f"the values must be finite numbers >= 0 of shape (layers, tokens), not {array.shape}")
    if array.shape[1] != len(tokens):
        raise MaskError(f"there are {len(tokens)} tokens for {array.shape[1]} columns of values: give one for each")
    layers, n = array.shape
    cell, high, left, top = (46 if n <= 12 else 24), 20, 62, 26
    upright = max(len(short(str(t))) for t in tokens) * LETTER > cell - 2
    top += max(len(short(str(t))) for t in tokens) * LETTER + 8 if upright else 20
    most, body = max(float(array.max()), 1e-9), [f'<text x="8" y="18" font-weight="bold">{escape(title)}</text>']
    for j, token in enumerate(tokens):
        middle = left + j * cell + cell // 2
        anchor = "start" if upright else "middle"
        body.append(_label(str(token), middle + 4 * upright, top - 7, 12, anchor, turn=upright))
    for i in range(layers):
        name = "layer 0" if i == 0 else str(i)
        body.append(f'<text x="{left - 8}" y="{top + i * high + 14}" text-anchor="end">{name}</text>')
        for j in range(n):
            level = round(float(array[i, j]) / most * SHADES)
            x, y = left + j * cell, top + i * high
            tip = escape(f'layer {i}, "{tokens[j]}": {what} {array[i, j]:.3f}')
            body.append(
                f'<path d="M{x} {y}h{cell - 2}v{high - 2}h-{cell - 2}z" fill="{_shade(level)}" stroke="#D0D0D0">'
                f"<title>{tip}</title></path>"
            )
            if n <= 12:
                ink = "#FFFFFF" if level > SHADES // 2 else INK
                body.append(
                    f'<text x="{x + cell // 2 - 1}" y="{y + 13}" font-size="11" text-anchor="middle" fill="{ink}" '
                    f'pointer-events="none">{_weight(float(array[i, j]))}</text>'
                )
    row, column = np.unravel_index(array.argmax(), array.shape)
    alt = (
        f"{title}: {layers} layers, {n} {columns}. The largest {what} is {array.max():.2f}, in layer {row} at "
        f'"{tokens[column]}".'
    )
    return _svg(body, max(left + n * cell + 8, len(title) * LETTER + 16), top + layers * high + 6, alt)


def _runs(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for i in numbers:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
