"""What a model reads and predicts, token by token: objectives, a walk over positions, answers in a gap, windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.attention.plain import visible
from labkit.viz import style
from labkit.viz.panels import LETTER, Panel, drawn, slider, steps
from labkit.viz.style import bool_grid, escape, percent, titled

BOXES = (style.MASKED, style.LIGHT_OPEN, style.LIGHT_WRONG, style.PAPER, style.INK)
NOT_ATTENDED, RIGHT, WRONG, PLAIN, HIDDEN = range(len(BOXES))
TOP = 5  # predictions of a model that are shown
PALE = "#B8C0C8"  # predictions that are not the hidden token


def objectives_figure(tokens: Sequence[str], examples: Sequence[Mapping]) -> go.Figure:
    """What each training objective makes of one sentence: what is read, and what must be predicted where.

    Hidden tokens are black. An arrow leads from a prediction to the token that is meant; a position without one does
    not count.

    Args:
        examples: `{"name": ..., "inputs": one token per position, "targets": the token to predict, or None}` each.
    """
    panels, arrows, n = [], [], len(tokens)
    for number, example in enumerate(examples):
        inputs, targets = list(map(str, example["inputs"])), list(example["targets"])
        counted = [i for i, target in enumerate(targets) if target is not None]
        later = bool(counted) and all(i + 1 < n and targets[i] == tokens[i + 1] for i in counted)
        arrows += [("" if number == 0 else str(number + 1), i, i + later) for i in counted]
        codes = np.full((3, n), np.nan)
        codes[0] = [PLAIN if read == token else HIDDEN for read, token in zip(inputs, tokens, strict=True)]
        codes[2, counted] = RIGHT
        texts = [inputs, [""] * n, [target or "" for target in targets]]
        heading = f"{example['name']}: {len(counted)} of {n} positions must predict"
        panels.append(_boxes(heading, codes, texts, ["reads", "", "must predict"]))
    figure = _drawn(panels, None, "", high=24)
    for axis, i, meant in arrows:
        place = {"x": meant, "y": 0, "ax": i, "ay": 2, "xref": f"x{axis}", "axref": f"x{axis}", "yref": f"y{axis}"}
        look = {"arrowhead": 2, "arrowcolor": style.OPEN, "standoff": 12, "startstandoff": 12, "showarrow": True}
        figure.add_annotation(text="", ayref=f"y{axis}", **place, **look)
    return figure


def walk_figure(tokens: Sequence[str], mask, predicts: Sequence, truth: Sequence, start: int = 0) -> go.Figure:
    """A slider over the positions of a sentence: what each attends to, must predict, and does predict.

    Attended tokens are blue up to the position and red in its future.

    Args:
        mask: bool (tokens, tokens): row attends to column.
        predicts: what each position predicts, `(token, probability)`.
        truth: what each position must predict; None: not counted.
        start: the position that is shown first.
    """
    cells, n = bool_grid(mask, "the mask"), len(tokens)
    figures = {}
    for here in range(n):
        codes, texts = np.full((3, n), PLAIN, dtype=float), [list(tokens), [""] * n, [""] * n]
        codes[0] = np.where(cells[here], np.where(np.arange(n) > here, WRONG, RIGHT), NOT_ATTENDED)
        for i in range(here + 1):
            if truth[i] is not None:
                token, share = predicts[i]
                is_right = token == truth[i]
                codes[2, i] = RIGHT if is_right else WRONG
                texts[1][i], texts[2][i] = truth[i], f"{token}\n{percent(share)} {'✓' if is_right else '✗'}"
        ahead = int(cells[here, here + 1 :].sum()) or "none"
        words = f"Position {here} attends to {cells[here].sum()} of {n} tokens, {ahead} of them in its future"
        if here + 1 < n and truth[here] == tokens[here + 1] and cells[here, here + 1]:
            words += ": the answer is among them"
        label = f"{here}: {visible(tokens[here])}"
        panel = _boxes("", codes, texts, ["reads", "must predict", "predicts"])
        figure = _drawn([panel], f"Position {label}", words + ".", high=38)
        box = {"x0": here - 0.5, "x1": here + 0.5, "y0": -0.5, "y1": 2.5, "line": {"color": style.INK, "width": 2}}
        figures[label] = figure.add_shape(type="rect", **box)
    return slider(figures, "position", start)


def fill_ins_figure(tokens: Sequence[str], position: int, answers: Mapping[str, Sequence], truth: str) -> go.Figure:
    """A sentence with the token at `position` hidden, and each model's 5 best predictions; the hidden token is blue.

    `answers`: `{model: [(token, probability), ...]}`; an empty list: the model cannot predict this token.
    """
    answers = {model: [(token, float(share)) for token, share in best] for model, best in answers.items()}
    figure = make_subplots(1, len(answers), subplot_titles=list(map(escape, answers)), horizontal_spacing=0.06)
    for column, best in enumerate(answers.values(), 1):
        best = best[:TOP]
        texts = [f"<b>{escape(visible(token))}</b> {percent(share)}" for token, share in best] or ["no prediction"]
        figure.add_bar(
            x=[share for _, share in best] or [0.0],
            y=list(range(1, len(texts) + 1)),
            orientation="h",
            marker_color=[style.OPEN if token == truth else PALE for token, _ in best],
            text=texts,
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{text}<extra></extra>",
            row=1,
            col=column,
        )
    most = max((share for best in answers.values() for _, share in best), default=1.0)
    figure.update_xaxes(range=[0, 1.7 * most], tickvals=[0, most], tickformat=".0%", zeroline=False)
    figure.update_yaxes(range=[TOP + 0.6, 0.4], showticklabels=False, showgrid=False, ticks="", zeroline=False)
    figure.update_annotations(font_size=13)
    figure.update_layout(showlegend=False, bargap=0.3)
    sentence = " ".join("____" if i == position else visible(token) for i, token in enumerate(tokens))
    right = [model for model, best in answers.items() if best and best[0][0] == truth]
    words = f"Hidden: “{visible(truth)}”. Right as first choice: {', '.join(right) or 'no model'}."
    return titled(figure, sentence, words, 820, 28 * TOP + 60, l=24, r=10, t=24, b=30)


def windows_figure(windows: Sequence[tuple[int, int]], answer: tuple[int, int], n: int) -> go.Figure:
    """Overlapping windows over a text of `n` tokens: those that hold the whole answer are blue.

    `windows` and `answer` are (first, last) tokens.
    """
    whole = {f"window {i}": first <= answer[0] and answer[1] <= last for i, (first, last) in enumerate(windows)}
    figure = go.Figure(
        go.Bar(
            base=[first for first, _ in windows],
            x=[last - first + 1 for first, last in windows],
            y=list(whole),
            orientation="h",
            marker_color=[style.OPEN if is_whole else style.MASKED for is_whole in whole.values()],
            customdata=[f"tokens {first} to {last}" for first, last in windows],
            hovertemplate="%{y}: %{customdata}<extra></extra>",
        )
    )
    look = {"fillcolor": style.OTHERS[0], "opacity": 0.5, "line_width": 0}
    figure.add_vrect(answer[0], answer[1] + 1, annotation_text="answer", **look)
    figure.update_layout(yaxis={"autorange": "reversed", "ticks": ""}, xaxis={"title": "token", "range": [0, n]})
    words = ", ".join(name for name, is_whole in whole.items() if is_whole) or "none"
    title = f"{len(windows)} windows over {n} tokens"
    return titled(figure, title, f"Whole answer in: {words}.", 800, 26 * len(windows) + 80, l=80, t=16)


def _boxes(heading: str, codes: np.ndarray, texts: list[list[str]], rows: list[str]) -> Panel:
    """A panel of tokens in boxes, with the positions as labels."""
    lines = [[text.split("\n") if text else [] for text in row] for row in texts]
    shown = np.array([["<br>".join(escape(visible(line)) for line in cell) for cell in row] for row in lines])
    columns = [str(i) for i in range(codes.shape[1])]
    return Panel(heading, codes, rows, columns, steps(*BOXES), -0.5, len(BOXES) - 0.5, shown, shown, tokens=False)


def _drawn(panels: Sequence[Panel], title: str | None, words: str, high: int) -> go.Figure:
    """Boxes in which their texts fit; an escaped character counts as several letters."""
    longest = max(len(line) for panel in panels for text in panel.texts.flat for line in text.split("<br>"))
    return drawn(panels, title, words, wide=max(44, (longest + 1) * LETTER + 6), high=high)
