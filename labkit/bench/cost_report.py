"""What `labkit bench cost` measured, for people: a Markdown table, a line per row, a picture."""

from __future__ import annotations

from html import escape
from typing import Any

from labkit.viz.grid import ALLOWED
from labkit.viz.svg import INK, LETTER, Svg, _svg

PLAIN = "#E69F00"  # Okabe and Ito's orange
COLUMNS = (
    "model", "batch x length", "dtype", "attention", "method", "samples/s", "tokens/s", "s per step (min to max)",
    "peak GB", "MFU", "matmul GFLOP/s", "speed over plain (min to max)",
)  # fmt: skip
BAR, LONGEST = 14, 330  # pixels: the height of labkit's bar, the length of the longest


def in_words(row: dict[str, Any]) -> str:
    """One row in a line: what was measured, or why nothing was."""
    if row["reason"] is not None:
        return f"not measured: {row['reason']}"
    return (
        f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}, "
        f"peak {row['peak_memory_bytes'] / 1e9:.2f} GB, "
        f"{row['speed_over_plain']['median']:.2f} times the speed of plain transformers"
    )


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """The cells of `COLUMNS` of a row that was measured."""
    step, ratio = row["seconds_per_step"], row["speed_over_plain"]
    return (
        row["model"],
        f"{row['batch_size']} x {row['length']}",
        row["dtype"],
        row["backend"],
        row["method"],
        f"{row['samples_per_second']:,.2f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{step['median']:.3f} ({step['min']:.3f} to {step['max']:.3f})",
        f"{row['peak_memory_bytes'] / 1e9:.2f}",
        f"{row['mfu']:.1%}",
        f"{row['matmul_flops_per_second'] / 1e9:,.0f}",
        f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
    )


def table(found: dict[str, Any]) -> str:
    """The Markdown page: the machine, the rows that were measured, those that were not, and what the numbers mean."""
    machine, config = found["machine"], found["config"]
    place = ", ".join(machine["gpus"]) if config["device"] != "cpu" else f"{machine['cpu']}, {machine['cores']} cores"
    threads = f", {machine['torch_threads']} threads" if config["device"] == "cpu" else ""
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "transformers", "labkit"))
    lines = [f"# What a training step costs ({found['date']})", ""]
    lines += [f"{place}{threads}; {versions}; {config['mask']} mask; {config['steps']} steps for each row.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in found["rows"] if row["reason"] is None]
    if refused := [row for row in found["rows"] if row["reason"] is not None]:
        lines += ["", "Not measured:", ""]
        lines += [f"- {row['model']}, {_what(row, with_method=True)}: {row['reason']}" for row in refused]
    if notes := {f"{row['model']}: {row['note']}" for row in found["rows"] if row["note"]}:
        lines += ["", *(f"- {note}" for note in sorted(notes))]
    return "\n".join([*lines, "", found["notes"], ""])


def figure(rows: list[dict[str, Any]]) -> Svg:
    """Tokens per second of each row: labkit's bar over that of plain transformers; each model has its own scale."""
    left = max([LETTER * len(_what(row)) for row in rows] + [80]) + 16
    body, words, y = [], [], 30
    body += [_rect(left, 10, 12, 10, ALLOWED), f'<text x="{left + 18}" y="19">labkit</text>']
    body += [_rect(left + 80, 10, 12, 10, PLAIN), f'<text x="{left + 98}" y="19">plain transformers</text>']
    body += [f'<text x="{left + 240}" y="19">tokens per second, medians; each model has its own scale</text>']
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        top = max([_fastest(row) for row in own if _measured(row)] + [1.0])
        y += 18
        body.append(f'<text x="8" y="{y}" font-weight="bold">{escape(_cut(model, 60))}</text>')
        y += 10
        for row in own:
            body += _bars(row, left, y, top)
            words.append(f"{model}, {_what(row)}: {in_words(row)}.")
            y += 2 * BAR + 4
    width = left + LONGEST + 290
    body.append(f'<path d="M{left} 34V{y}" stroke="{INK}" fill="none"/>')
    return _svg(body, width, y + 12, "What a training step costs. " + " ".join(words))


def _bars(row: dict[str, Any], x: int, y: int, top: float) -> list[str]:
    """One row, its upper edge at `y`: labkit's bar with its numbers, a thinner one for plain transformers."""
    middle = y + BAR - 2
    body = [f'<text x="{x - 8}" y="{middle}" text-anchor="end">{escape(_what(row))}</text>']
    if not _measured(row):
        return [*body, f'<text x="{x + 6}" y="{middle}" font-style="italic">{escape(_cut(row["reason"], 72))}</text>']
    speed, ratio = row["tokens_per_second"], row["speed_over_plain"]
    length = max(1, round(speed / top * LONGEST))
    plain = max(1, round(row["plain_tokens_per_second"] / top * LONGEST))
    paired = f"{ratio['median']:.2f} x plain ({ratio['min']:.2f} to {ratio['max']:.2f})"
    said = f"{speed:,.0f}, MFU {row['mfu']:.0%}, {paired}"
    return [
        *body,
        _rect(x, y, length, BAR, ALLOWED),
        _rect(x, y + BAR, plain, BAR // 2, PLAIN),
        f'<text x="{x + max(length, plain) + 6}" y="{middle}">{said}</text>',
    ]


def _fastest(row: dict[str, Any]) -> float:
    return max(row["tokens_per_second"], row["plain_tokens_per_second"])


def _measured(row: dict[str, Any]) -> bool:
    return row["reason"] is None


def _what(row: dict[str, Any], with_method: bool = False) -> str:
    """8 x 512, bfloat16, eager"""
    backend = row.get("backend") or row["attn"] or "default attention"
    method = f", {row['method']}" if with_method else ""
    return f"{row['batch_size']} x {row['length']}, {row['dtype']}, {backend}{method}"


def _rect(x: int, y: int, width: int, height: int, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"/>'


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"
