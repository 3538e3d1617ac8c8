"""How arguments and answers travel between a check and the process of an answer: as JSON, never as pickle.

Plain values, lists, tuples, sets, dictionaries, tensors, arrays and masks keep their type. `Given` names what cannot
travel, such as a model: it is made where the answer is, by the assignment's function of that name.
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
from labkit.masks import Mask

SIGN = "$"  # the key that marks what JSON has no word for
MOST_BYTES = 32 * 2**20
MOST_DEEP = 40
MOST_ITEMS = 10_000  # of a set or a dictionary: hashes that collide would keep the grader busy for hours
_DTYPES = {
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
    text = json.dumps(encoded(value))
    if len(text) > MOST_BYTES:
        raise CourseError(f"a value of {len(text) / 2**20:.0f} MB is too large to be judged")
    return text


def loads(text: str) -> Any:
    """The value of a text that `dumps` wrote. Raises CourseError for anything else."""
    try:
        return decoded(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise CourseError(f"not a value as labkit writes it: {error}") from error


def encoded(value: Any, deep: int = 0) -> Any:
    """The value in what JSON has words for."""
    if deep > MOST_DEEP:
        raise CourseError(f"a value nested more than {MOST_DEEP} deep cannot be judged")

    if isinstance(value, set | frozenset | dict) and len(value) > MOST_ITEMS:
        raise CourseError(f"a {type(value).__name__} of {len(value):,} items is too large to be judged")
    match value:
        case None | bool() | str():
            return value
        case int() | float():
            return float(value) if isinstance(value, float) else int(value)
        case list():
            return [encoded(each, deep + 1) for each in value]
        case tuple() | set() | frozenset() | range():
            kind = "set" if isinstance(value, set | frozenset) else "tuple"
            return {SIGN: kind, "items": [encoded(each, deep + 1) for each in value]}
        case dict():
            return {
                SIGN: "dict",
                "items": [[encoded(key, deep + 1), encoded(each, deep + 1)] for key, each in value.items()],
            }
        case Tensor():
            return _tensor(value)
        case np.ndarray() | np.generic():
            array = np.asarray(value)
            if array.dtype.kind not in "biuf":
                raise CourseError(f"an array of {array.dtype} cannot be judged; give numbers or booleans")
            return {SIGN: "array", "of": _tensor(torch.from_numpy(np.array(array)))}
        case Mask():
            from labkit.viz.mask_state import tree_of

            return {SIGN: "mask", "tree": tree_of(value)}
        case Given():
            return {
                SIGN: "given",
                "from": [value.assignment, value.name],
                "arguments": encoded(value.arguments, deep + 1),
            }
    raise CourseError(f"a {type(value).__name__} cannot be judged; give plain values, tensors or masks")


def decoded(value: Any) -> Any:
    """What was encoded; a Given stays one until `labkit.course.answers.made` makes it."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value[SIGN] in ("set", "dict") and len(value["items"]) > MOST_ITEMS:
        raise ValueError("too many items")
    match value[SIGN]:
        case "tuple":
            return tuple(decoded(each) for each in value["items"])
        case "set":
            return {decoded(each) for each in value["items"]}
        case "dict":
            return {decoded(key): decoded(each) for key, each in value["items"]}
        case "tensor":
            return _tensor_of(value)
        case "array":
            return _tensor_of(value["of"]).numpy()
        case "mask":
            from labkit.viz.mask_state import mask_of

            return mask_of(value["tree"])
        case "given":
            return Given(*value["from"], decoded(value["arguments"]))
    raise ValueError(f"unknown kind {value[SIGN]!r}")


def _tensor(tensor: Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise CourseError(f"a tensor of {dtype} cannot be judged; give numbers or booleans")
    tensor = tensor.detach().cpu().contiguous()
    if tensor.numel() * tensor.element_size() > MOST_BYTES:
        raise CourseError(f"a tensor of shape {tuple(tensor.shape)} is too large to be judged")
    data = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    shape = list(tensor.shape)
    return {SIGN: "tensor", "dtype": dtype, "shape": shape, "data": base64.b64encode(data.numpy().tobytes()).decode()}


def _tensor_of(value: dict[str, Any]) -> Tensor:
    data, dtype = bytearray(base64.b64decode(value["data"])), _DTYPES[value["dtype"]]
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"]).clone()
