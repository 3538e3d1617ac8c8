"""The JSON in which arguments and answers travel between a check and the process of an answer; never pickle.

Plain values, lists, tuples, sets, dictionaries and tensors keep their type; an array becomes a tensor. `Given` names
what cannot travel, such as a model: the assignment's function of that name makes it where the answer is.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.errors import CourseError

TYPE = "$"  # the key that marks what JSON has no notation for
MOST_BYTES = 4 * 2**20
MOST_DEEP = 40
MOST_ITEMS = 10_000  # of a set or a dictionary: hashes that collide would keep the grader busy for hours
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Given:
    """What the assignment's `given` function `name` makes of `arguments`, in the process of the answer."""

    assignment: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def dumps(value: Any) -> str:
    """The JSON text of a value. Raises CourseError, naming the type, for what cannot travel or is too large."""
    text = json.dumps(_encoded(value))
    if len(text) > MOST_BYTES:
        raise CourseError(f"a value of {len(text) / 2**20:.0f} MB is too large to be judged")
    return text


def loads(text: str) -> Any:
    """The value of a text that `dumps` wrote. Raises CourseError for any other text."""
    try:
        return _decoded(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise CourseError(f"not a value as labkit writes it: {error}") from error


def _encoded(value: Any, depth: int = 0) -> Any:
    if depth > MOST_DEEP:
        raise CourseError(f"a value nested more than {MOST_DEEP} deep cannot be judged")
    if isinstance(value, set | frozenset | dict) and len(value) > MOST_ITEMS:
        raise CourseError(f"a {type(value).__name__} of {len(value):,} items is too large to be judged")
    match value:
        case None | bool() | str():
            return value
        case float():
            return float(value)  # of a subclass, such as numpy's
        case int():
            return int(value)
        case list():
            return [_encoded(item, depth + 1) for item in value]
        case tuple() | range():
            return {TYPE: "tuple", "items": [_encoded(item, depth + 1) for item in value]}
        case set() | frozenset():
            return {TYPE: "set", "items": [_encoded(item, depth + 1) for item in value]}
        case dict():
            items = [[_encoded(key, depth + 1), _encoded(item, depth + 1)] for key, item in value.items()]
            return {TYPE: "dict", "items": items}
        case Tensor():
            return _encoded_tensor(value)
        case np.ndarray() | np.generic() if value.dtype.kind in "biuf":
            return _encoded_tensor(torch.from_numpy(np.array(value)))
        case Given():
            return {TYPE: "given", "of": [value.assignment, value.name], "arguments": _encoded(value.arguments)}
    raise CourseError(f"a {type(value).__name__} cannot be judged; give plain values or tensors")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value[TYPE] in ("set", "dict") and len(value["items"]) > MOST_ITEMS:
        raise ValueError("too many items")
    match value[TYPE]:
        case "tuple":
            return tuple(_decoded(item) for item in value["items"])
        case "set":
            return {_decoded(item) for item in value["items"]}
        case "dict":
            return {_decoded(key): _decoded(item) for key, item in value["items"]}
        case "tensor":
            data, dtype = bytearray(base64.b64decode(value["data"])), DTYPES[value["dtype"]]
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            return flat.reshape(value["shape"]).clone()
        case "given":
            return Given(*value["of"], _decoded(value["arguments"]))
    raise ValueError(f"unknown kind {value[TYPE]!r}")


def _encoded_tensor(tensor: Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CourseError(f"a tensor of {dtype} cannot be judged; give numbers or booleans")
    if tensor.numel() * tensor.element_size() > MOST_BYTES:
        raise CourseError(f"a tensor of shape {tuple(tensor.shape)} is too large to be judged")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    text = base64.b64encode(data).decode()
    return {TYPE: "tensor", "dtype": dtype, "shape": list(tensor.shape), "data": text}
