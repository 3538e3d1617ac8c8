"""Real weights that come inside Python packages: found, checked, converted once into the cache, and described."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.errors import MissingPackageError, ModelError
from labkit.models import cache as model_cache
from labkit.models.registry import FolderPackage, GgufPackage, ModelCard
from labkit.progress import byte_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def cached_folder(card: ModelCard) -> Path:
    """The verified model folder of an embedded model; the first call converts its GGUF file (a minute or less).

    Raises MissingPackageError with the pip command if the weights, or the reader they need, are not installed and no
    converted copy is in the cache.
    """
    package = _package_of(card)

    def build(folder: Path) -> dict:
        return _convert(card, package, folder)

    # bfloat16 weights, a tokenizer, and for a while the joined file
    return model_cache.obtain(card.name, origin(package), build, bytes_needed=2 * card.parameters + 500_000_000)


def origin(package: GgufPackage) -> dict:
    """What a cached copy must have been made from to be used."""
    return {"distribution": package.distribution, "sha256": package.sha256}


def is_cached(card: ModelCard) -> bool:
    """Whether a converted copy seems to be in the cache (names and sizes; the content is checked when it is loaded)."""
    return model_cache.looks_ready(card.name, origin(_package_of(card)))


def missing(card: ModelCard) -> str | None:
    """What has to be installed before this model can be converted, as a pip command, or None."""
    package = _package_of(card)
    return None if package.part_paths() and find_spec("gguf") else package.pip_command


def packaged_folder(card: ModelCard) -> Path:
    """The model folder inside a package, its files checked against the card.

    Raises MissingPackageError with the pip command if the package is not installed, ModelError if a file is another.
    """
    package = card.folder_package
    if package is None:
        raise ValueError(f"{card.name} is no folder in a package")
    if (folder := package.path()) is None:
        raise MissingPackageError(f"the weights of {card.name} are not installed; run: {package.pip_command}")
    for name, wanted in package.sha256.items():
        _require_sha256(folder / name, wanted, package)
    return folder


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that the conversion wrote; the same as AutoTokenizer makes of the folder, in half the time.

    AutoTokenizer parses the 14 MB of Gemma's vocabulary once more than needed.
    """
    from transformers import PreTrainedTokenizerFast

    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings = {key: value for key, value in settings.items() if key not in ("backend", "tokenizer_class")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)
    template = folder / "chat_template.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8") if template.is_file() else None
    return tokenizer


def source_sentence(card: ModelCard, folder: Path) -> str:
    """Where the weights come from, and what a dequantised checkpoint is and is not."""
    package = _package_of(card)
    stored_as = model_cache.read_manifest(folder)["facts"].get("stored_as", {})
    total = sum(stored_as.values()) or 1
    shares = ", ".join(
        f"{n / total:.0%} {kind}"
        for kind, n in sorted(stored_as.items(), key=lambda item: -item[1])
        if n / total >= 0.01
    )
    return (
        f"{package.original}, rebuilt in bfloat16 from the {package.quantisation} quantised weights in the package "
        f"{package.distribution} (parameters stored as {shares}): close to the original release but not bit-equal to "
        "it, so do not quote its scores as those of the original"
    )


def licence_text(card: ModelCard) -> str:
    """The licence's name, and where its text lies on this machine."""
    terms = card.package.terms_path() if card.package else None
    return f"{card.licence}; full text in {terms}" if terms else card.licence


def _package_of(card: ModelCard) -> GgufPackage:
    if card.package is None:
        raise ValueError(f"{card.name} is not embedded in a package")
    return card.package


def _convert(card: ModelCard, package: GgufPackage, folder: Path) -> dict:
    from labkit.models.gguf import convert_gguf

    parts = package.part_paths()
    if command := missing(card):
        lacking = "the weights of" if not parts else "the package that reads the weights of"
        raise MissingPackageError(f"{lacking} {card.name} are not installed; run: {command}")
    assert parts is not None
    _say(f"labkit: converting {card.name}, once. Its licence: {licence_text(card)}")
    with _joined(parts, folder) as gguf_file:
        _require_sha256(gguf_file, package.sha256, package)
        with byte_bar(card.name) as progress:
            return {"stored_as": convert_gguf(gguf_file, folder, progress)}


@contextmanager
def _joined(parts: list[Path], folder: Path):
    """The GGUF file in one piece; a joined copy lies in `folder` only as long as it is needed."""
    if len(parts) == 1:
        yield parts[0]
        return
    whole = folder / "joined.gguf"
    try:
        with open(whole, "wb") as out:
            for part in parts:
                with open(part, "rb") as piece:
                    shutil.copyfileobj(piece, out, 16 << 20)
        yield whole
    finally:
        whole.unlink(missing_ok=True)


def _require_sha256(file: Path, wanted: str, package: GgufPackage | FolderPackage) -> None:
    if not file.is_file():
        found = f"{file.name} is missing"
    else:
        with open(file, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        found = f"{file.name}: sha256 {digest[:12]}... instead of {wanted[:12]}..." if digest != wanted else None
    if found:
        raise ModelError(
            f"the weights in {package.distribution} are damaged ({found}); reinstall them: "
            f"{package.pip_command} --force-reinstall"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
