"""What a check says when an answer is wrong: what was expected, what came, and the likely cause. Never the solution.

    expect_tensor(actual, expected, "causal_mask(4)", {"Rows are queries ...": expected.T})

The suspects name misconceptions: each message with the wrong value that it leads to, or with a function that recognises
a wrong value. One message alone is the likely cause of any mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Suspects = Mapping[str, Any] | str | None


class Mistake(Exception):
    """An answer is wrong. `expected` and `came` complete their words; `likely`: the probable cause, or None."""

    def __init__(self, expected: str, came: str, likely: str | None = None):
        super().__init__(expected, came, likely)
        self.expected, self.came, self.likely = expected, came, likely

    def __str__(self) -> str:
        text = f"Expected: {self.expected}\nGot:      {self.came}"
        return f"{text}\nLikely:   {self.likely}" if self.likely else text


class NotBegun(Exception):
    """The answer still raises NotImplementedError, or is missing."""


def clean(text: object, most: int = 600, lines: int = 20) -> str:
    """The text as a page, a table and a terminal can show it: cut, and without control characters and surrogates.

    What a submission raises, prints or names may be 20 MB long, or clear a terminal.
    """
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in str(text)[: most + 1])
    cut = "\n".join(text.split("\n")[:lines])[:most]
    return cut if cut == text else f"{cut} ..."


def expect(condition: bool, expected: str, came: str, likely: str | None = None) -> None:
    """Raises Mistake unless the condition holds."""
    if not condition:
        raise Mistake(expected, came, likely)


def expect_equal(actual: Any, expected: Any, what: str, suspects: Suspects = None) -> None:
    """Plain values, compared with ==; tensors and tuples count as lists, and a number is not a boolean."""
    actual, expected = _plain(actual), _plain(expected)
    if actual != expected or isinstance(actual, bool) != isinstance(expected, bool):
        likely = _likely(actual, suspects, lambda wrong: _plain(wrong) == actual)
        raise Mistake(f"{what} to be {expected!r:.200}", _described(actual), likely)


def expect_tensor(
    actual: Any, expected: Tensor | float, what: str, suspects: Suspects = None, tolerance: float = 1e-5
) -> None:
    """A number or a tensor: shape, kind of numbers, and values to `tolerance`; names the first wrong cell."""
    expected = torch.as_tensor(expected)
    try:
        values = torch.as_tensor(actual)
    except (TypeError, ValueError, RuntimeError):
        raise Mistake(f"{what} to be a tensor of shape {tuple(expected.shape)}", _described(actual)) from None

    def close(other: Tensor) -> Tensor:
        return torch.isclose(values.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)

    def same(wrong: Any) -> bool:
        wrong = torch.as_tensor(wrong)
        return wrong.shape == values.shape and bool(close(wrong).all())

    likely = _likely(values, suspects, same)
    if values.shape != expected.shape:
        raise Mistake(f"{what} of shape {tuple(expected.shape)}", f"shape {tuple(values.shape)}", likely)
    kinds = _kind(values), _kind(expected)
    if kinds[0] != kinds[1] and kinds != ("whole numbers", "real numbers"):
        raise Mistake(f"{what} to hold {kinds[1]}", kinds[0], likely)
    wrong = ~close(expected)
    if wrong.any():
        cell = tuple(wrong.nonzero()[0].tolist())
        where = f" at {list(cell)}" if cell else ""
        count = f"; {int(wrong.sum())} of {wrong.numel()} cells differ" if cell else ""
        raise Mistake(f"{what} to be {_number(expected[cell])}{where}", f"{_number(values[cell])}{count}", likely)


def not_finite(actual: Tensor) -> bool:
    """Recognises values with a nan or an infinity."""
    return not bool(actual.isfinite().all())


def lacks_cells(expected: Tensor) -> Callable[[Tensor], bool]:
    """Recognises a table in which nothing is wrong but that some True cells of `expected` are False."""

    def recognises(actual: Tensor) -> bool:
        return actual.shape == expected.shape and not bool((actual.bool() & ~expected).any())

    return recognises


def _likely(actual: Any, suspects: Suspects, same: Callable[[Any], bool]) -> str | None:
    if suspects is None or isinstance(suspects, str):
        return suspects
    for message, wrong in suspects.items():
        if wrong(actual) if callable(wrong) else same(wrong):
            return message
    return None


def _plain(value: Any) -> Any:
    """Tensors and tuples, also inside of lists, as lists; a tensor of one number as the number."""
    value = value.tolist() if isinstance(value, Tensor) else value
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "True and False"
    return "real numbers" if tensor.is_floating_point() else "whole numbers"


def _number(cell: Tensor) -> str:
    value = cell.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _described(value: Any) -> str:
    return "None (is there a return?)" if value is None else f"{value!r:.200}"
