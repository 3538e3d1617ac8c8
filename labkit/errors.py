"""labkit's own exceptions: each message says what was given, what was expected and what to do.

Catch `LabkitError` to catch them all. The command line prints the message as one line and exits with 2.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class FusionError(LabkitError, ValueError):
    """Paraphrases, weights, a method or a model that cannot be fused; the message says what would work."""


class ModelError(LabkitError):
    """A model could not be loaded or built. The subclasses say why."""


class UnknownModelError(ModelError, KeyError):
    """No model of this name; the message offers the closest ones."""

    def __str__(self) -> str:  # KeyError would print the repr, quotes and all
        return str(self.args[0]) if self.args else ""


class MissingPackageError(ModelError, ImportError):
    """The package that carries the weights, or reads them, is not installed; the message holds the pip command."""


class HubUnreachableError(ModelError, ConnectionError):
    """The model lives on a hub that does not answer, and no local copy was found."""


class GatedModelError(ModelError, PermissionError):
    """The model's licence must be accepted on the hub first; the message says where."""


class UnsupportedModelError(ModelError, NotImplementedError):
    """The architecture is not a decoder that labkit knows how to convert."""


class EncoderError(UnsupportedModelError):
    """The model is an encoder, bidirectional as it comes: it can be measured and compared with, not converted."""


class NotEnoughMemoryError(ModelError, MemoryError):
    """The weights, in the dtype asked for, would not fit into this machine's memory."""


class CacheError(ModelError, OSError):
    """The cached copy of a model is damaged and could not be rebuilt."""


class HeadError(ModelError, ValueError):
    """A task head was described in a way that has no meaning: unknown pooling, one label, dropout of 1, ..."""


class DataError(LabkitError, ValueError):
    """A file, a text or a setting does not have the form it should have; the message names it, a file with its line."""


class NotebookError(LabkitError, RuntimeError):
    """A notebook could not be found, copied or executed; the message names the notebook, the cell and the cause."""


class TrainingError(LabkitError, RuntimeError):
    """A training run cannot begin, go on or resume; the message says what is in the way. Nothing was overwritten."""


class DivergedError(TrainingError):
    """A loss or a gradient that is no number any more: the learning rate or the dtype, and not the machine."""


class LearnerError(LabkitError, ValueError):
    """A box for a prediction whose answer is not one of its choices."""


class CourseError(LabkitError, ValueError):
    """An assignment, a submission or a variant that cannot be built, checked or graded; the message says why."""


@contextmanager
def reading(what: str, refusal: type[LabkitError] = ModelError) -> Iterator[None]:
    """Turn all that libraries raise about damaged files in the block into a `refusal` that names `what`.

    transformers, tokenizers and safetensors check little of what they read, and raise any kind of exception.
    """
    try:
        yield
    except Exception as error:
        from labkit.decoder.limits import is_out_of_memory

        if isinstance(error, LabkitError) or is_out_of_memory(error):
            raise
        cause = f"{type(error).__name__}: {shorten(str(error), 300, placeholder=' ...')}"
        if "trust_remote_code" in str(error):
            cause = "it needs Python code of its own, which labkit never runs"
        raise refusal(f"{what} cannot be read ({cause}); is it damaged, or not of this form?") from error
