"""Progress bars and remarks of the libraries: shown on a terminal, and only if they require an action."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Keep the progress bars of transformers and of the hub client out of logs, pipes and notebooks."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    loading, fetching = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    if sys.stderr.isatty() or not (loading or fetching):
        yield
        return
    logging.disable_progress_bar()
    disable_progress_bars()
    try:
        yield
    finally:
        if loading:
            logging.enable_progress_bar()
        if fetching:
            enable_progress_bars()


@contextmanager
def transformers_errors_only() -> Iterator[None]:
    """Keep remarks of transformers that need no action (a default loss, tied weights) off the terminal."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
