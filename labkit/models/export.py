"""Write a converted model as a folder that others can load, with a card that describes the conversion.

Plain transformers loads the folder. Where it cannot express the conversion (a mask for some layers only), the card
refers to `labkit.load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.errors import LabkitError
from labkit.files import quiet_libraries, require_writable, write_folder


def export(lm: Any, output_dir: str | Path, *, window: str, layers: list[int] | None) -> Path:
    """Save the converted model `lm` (a `labkit.Loaded`), its tokenizer and a card into `output_dir`, or nothing.

    `window` and `layers` (None: all) are those of the conversion, for the card. Raises LabkitError if `output_dir` is a
    file or a folder that is not empty, and OSError if it cannot be written.
    """
    from labkit.models import cards

    target = Path(output_dir).expanduser().absolute()
    require_free(target)

    def write(folder: Path) -> None:
        with quiet_libraries():
            lm.model.save_pretrained(folder)
        if lm.tokenizer is not None:
            lm.tokenizer.save_pretrained(folder)
        for name, content in cards.of_converted(lm, window, layers).items():
            (folder / name).write_bytes(content)

    write_folder(target, write)
    return target


def require_free(target: str | Path) -> None:
    """Raise LabkitError unless `target` does not exist or is an empty folder, and OSError if it cannot be written."""
    target = Path(target).expanduser()
    require_writable(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise LabkitError(f"{target} exists and is not empty; give --output-dir a new or an empty folder")
