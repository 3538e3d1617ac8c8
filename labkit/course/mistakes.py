"""What a check says when an answer is wrong: what was expected, what came, and the likely cause. Never the solution.

    expect_tensor(found, wanted, "causal_mask(4)", suspects={"Rows are queries ...": wanted.T})

compares, and where `found` equals a suspect, the value that a typical misconception gives, says its text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

ABOUT = 1e-5


class Mistake(Exception):
    """An answer is wrong. `expected` and `came` complete their words; `likely`: the probable cause, or None."""

    def __init__(self, expected: str, came: str, likely: str | None = None):
        super().__init__(expected, came, likely)
        self.expected, self.came, self.likely = expected, came, likely

    def __str__(self) -> str:
        lines = [f"Expected: {self.expected}", f"Came:     {self.came}"]
        return "\n".join(lines + ([f"Likely:   {self.likely}"] if self.likely else []))


def clean(text: object, most: int = 600, lines: int = 20) -> str:
    """The text as a page, a table and a terminal can show it: cut, and without control characters and half characters.

    What a submission raises, prints or calls itself is written by a stranger: it may be 20 MB, or clear a terminal.
    """
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in str(text)[: most + 1])
    cut = "\n".join(text.split("\n")[:lines])[:most]
    return cut if cut == text else f"{cut} ..."


class NotBegun(Exception):
    """The answer raises NotImplementedError still, or is missing."""


def expect(held: bool, expected: str, came: str, likely: str | None = None) -> None:
    """Raises Mistake unless it holds."""
    if not held:
        raise Mistake(expected, came, likely)


def expect_equal(found: Any, wanted: Any, what: str, suspects: Mapping[str, Any] | None = None) -> None:
    """Plain values, compared with ==; the type counts only between numbers, booleans and the rest."""
    if isinstance(found, Tensor | np.ndarray) and found.ndim == 0:
        found = found.item()
    if isinstance(found, bool) != isinstance(wanted, bool) or found != wanted:
        raise Mistake(f"{what} to be {_repr(wanted)}", _shown(found), _likely(found, suspects, _same_plain))


def expect_number(
    found: Any, wanted: float, what: str, suspects: Mapping[str, Any] | None = None, about: float = ABOUT
) -> None:
    """A number, or a tensor of one, to `about` (relative above 1, absolute below)."""
    number = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise Mistake(f"{what} to be a number", _kind(found))

    def near(a: Any, b: Any) -> bool:
        a, b = float(a), float(b)
        return a == b or abs(a - b) <= about * max(1.0, abs(b))

    if not near(number, wanted):
        raise Mistake(f"{what} to be {wanted:.6g}", f"{number:.6g}", _likely(number, suspects, near))


def expect_tensor(
    found: Any,
    wanted: Tensor,
    what: str,
    suspects: Mapping[str, Tensor] | None = None,
    about: float = ABOUT,
    names: tuple[str, ...] | None = None,
) -> None:
    """A tensor of the same shape and kind (bool, whole, real) and, to `about`, the same values; names the first cell.

    `names`: what the dimensions are called, such as ("query", "key").
    """
    tensor = _as_tensor(found)
    if tensor is None:
        raise Mistake(f"{what} to be a tensor of shape {tuple(wanted.shape)}", _kind(found))
    likely = _likely(tensor, suspects, lambda a, b: _same(a, b, about))
    if tensor.shape != wanted.shape:
        raise Mistake(f"{what} of shape {tuple(wanted.shape)}", f"shape {tuple(tensor.shape)}", likely)
    if _number_kind(tensor) != _number_kind(wanted):
        came = f"{_number_kind(tensor)} ({str(tensor.dtype).removeprefix('torch.')})"
        raise Mistake(f"{what} to hold {_number_kind(wanted)}", came, likely)
    wrong = ~_near(tensor, wanted, about)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        cell = ", ".join(f"{name} {i}" for name, i in zip(names, at, strict=True)) if names else str(list(at))
        count = int(wrong.sum())
        raise Mistake(
            f"{what} to be {_cell(wanted[at])} at {cell}",
            f"{_cell(tensor[at])} there" + (f"; {count} of {wrong.numel()} cells differ" if count > 1 else ""),
            likely,
        )


def expect_all(names: Iterable[str], ask: Callable[[str], None], rng: random.Random) -> None:
    """Asks each case, in a drawn order, so that no answer can count along; the first mistake is the first as given."""
    names = list(names)
    found: dict[str, Mistake] = {}
    for name in rng.sample(names, len(names)):
        try:
            ask(name)
        except Mistake as mistake:
            found[name] = mistake
    for name in names:
        if name in found:
            raise found[name]


def _same(a: Tensor, b: Any, about: float) -> bool:
    b = _as_tensor(b)
    return b is not None and a.shape == b.shape and bool(_near(a, b, about).all())


def _near(a: Tensor, b: Tensor, about: float) -> Tensor:
    a, b = a.detach().to(torch.float64), b.detach().to(torch.float64)
    return torch.isclose(a, b, rtol=about, atol=about, equal_nan=True)


def _likely(found: Any, suspects: Mapping[str, Any] | None, same: Any) -> str | None:
    return next((text for text, value in (suspects or {}).items() if same(found, value)), None)


def _same_plain(a: Any, b: Any) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        return torch.as_tensor(value) if not isinstance(value, str | bytes) and value is not None else None
    except (TypeError, ValueError, RuntimeError):
        return None


def _number_kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "True and False"
    return "real numbers" if tensor.is_floating_point() else "whole numbers"


def _kind(value: Any) -> str:
    if value is None:
        return "None (is there a return?)"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _cell(value: Tensor) -> str:
    item = value.item()
    return f"{item:.6g}" if isinstance(item, float) else str(item)


def _shown(value: Any) -> str:
    return "None (is there a return?)" if value is None else _repr(value)


def _repr(value: Any, most: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 4] + " ..."
