"""labkit's own exceptions: each message says what was given, what was expected and what to do.

Catch `LabkitError` to catch them all. The command line prints the message as one line and exits with 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from textwrap import shorten


class LabkitError(Exception):
    """Base of every error that labkit raises on purpose."""


class MaskError(LabkitError, ValueError):
    """A mask was described or used in a way that has no meaning (negative window, length beyond the sequence, ...)."""


class ConversionError(LabkitError, RuntimeError):
    """A conversion, a mask or packing cannot be put in force on this model or input, or did not take effect.

    Also: `generate()` was called on a bidirectional model, which was not trained to continue a text.
    """


class AuditError(LabkitError, AssertionError):
    """`assert_bidirectional` or `assert_causal` failed, or a model cannot be measured (no output per position, ...)."""


class ModelError(LabkitError):
    """A model, its head, its cached copy or a package that it needs is missing, unsuitable or damaged.

    `kind` is "encoder" for an encoder where a decoder is required, "not installed" where the package with the weights
    is missing, and "" otherwise.
    """

    def __init__(self, message: str, *, kind: str = ""):
        super().__init__(message)
        self.kind = kind


class DataError(LabkitError, ValueError):
    """A file, a text or a setting does not have the form it should have; the message names it, a file with its line."""


class TrainingError(LabkitError, RuntimeError):
    """A training run cannot begin, go on or resume; the message says what is in the way. Nothing was overwritten.

    `diverged`: the loss or a gradient became NaN or infinite.
    """

    diverged = False


class CourseError(LabkitError, ValueError):
    """An assignment, a submission or a variant that cannot be built, checked or graded; the message says why."""


def require_one_of(name: str, value: object, choices: Iterable[str], refusal: type[LabkitError] = DataError) -> None:
    """Raise `refusal`, which lists the choices, if `value` is none of them."""
    choices = list(choices)
    if value not in choices:
        raise refusal(f"{name} is {value!r}; choose one of {', '.join(choices)}")


@contextmanager
def needs_extra(extra: str = "train") -> Iterator[None]:
    """Turn a failed import in the block into a ModelError with the pip command of labkit's optional dependencies."""
    try:
        yield
    except ImportError as error:
        command = f'pip install "labkit-bidirectional[{extra}]"'
        raise ModelError(f"{error.name} is not installed: {command}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` reports too little memory, of a GPU or of the machine.

    torch has an error class for its own allocations on a GPU. CUDA and its libraries, and allocations on a CPU, only
    say so in the text of a RuntimeError.
    """
    texts = ("allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


@contextmanager
def reading(what: str, refusal: type[LabkitError] = ModelError) -> Iterator[None]:
    """Turn whatever libraries raise about damaged files in the block into a `refusal` that names `what`.

    transformers, tokenizers and safetensors check little of what they read, and raise any kind of exception.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, LabkitError) or is_out_of_memory(error):
            raise
        cause = f"{type(error).__name__}: {shorten(str(error), 300, placeholder=' ...')}"
        if "trust_remote_code" in str(error):
            cause = "it needs Python code of its own, which labkit never runs"
        raise refusal(f"{what} cannot be read ({cause}); is it damaged, or not of this form?") from error
