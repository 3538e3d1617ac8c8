"""Progress bars: ours and those of the libraries, drawn on a terminal and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Yields progress(bytes done, bytes in all), which moves a bar if standard error is a terminal."""
    from tqdm import tqdm

    with tqdm(desc=name, unit="B", unit_scale=True, disable=None, leave=False) as bar:  # None: on a terminal only

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


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
