"""The library of the low-rank adapters, imported where one is made or read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from labkit.errors import MissingPackageError


@contextmanager
def peft_for(what: str) -> Iterator[ModuleType]:
    """The package `peft`, for `what` ("LoRA needs", "an adapter needs"), and its one warning about itself unsaid.

    It asks transformers for gradient checkpointing by a deprecated name, which nobody who trains can change.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import peft
    except ImportError:
        raise MissingPackageError(f'{what} peft: pip install "labkit-bidirectional[train]"') from None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        yield peft
