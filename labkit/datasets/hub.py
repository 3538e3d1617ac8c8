"""Hub data sets through `datasets`, in their parquet versions, so that no code of theirs is run: squad, squad_v2,
wnut_17, wikiann, CoNLL-2003 mirrors, and whatever has the same fields. A local folder laid out as the hub lays it out
is read by the same code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit.datasets.files import Record
from labkit.errors import DataError, ModelError

KNOWN = {  # short name -> repository on the hub, where the short name alone no longer loads
    "squad": "rajpurkar/squad",
    "squad_v2": "rajpurkar/squad_v2",
    "wnut_17": "leondz/wnut_17",
    "wikiann": "unimelb-nlp/wikiann",
    "conll2003": "eriktks/conll2003",
}
REVISIONS = {"leondz/wnut_17": "refs/convert/parquet", "eriktks/conll2003": "refs/convert/parquet"}


def records(name: str, split: str) -> Iterator[Record]:
    """The rows of one split of `name`: "owner/data", "owner/data/configuration", a folder, or "folder/configuration"
    where the folder's README.md lists it.

    Raises:
        ModelError: `datasets` is not installed.
        DataError: the data set cannot be reached, or has no such split.
    """
    rows = _load(name, split)
    for number, row in enumerate(_named(rows, _class_names(rows.features)), 1):
        yield Record(f"row {number}", str(number), row)


def is_folder(name: str) -> bool:
    """Whether `name` is a local folder, or "folder/configuration" as the card of that folder lists it."""
    place = Path(name).expanduser()
    card = place.parent / "README.md"
    listed = rf"^\s*-?\s*config_name:\s*[\"']?{re.escape(place.name)}[\"']?\s*$"
    return place.is_dir() or (card.is_file() and bool(re.search(listed, card.read_text("utf-8", "replace"), re.M)))


def split_names(name: str) -> list[str]:
    """The splits of a hub data set or of a folder laid out like one; raises as `records` does."""
    datasets = _package(name)
    place, configuration = _place_of(name)
    with _explained(place):
        return list(datasets.get_dataset_split_names(place, configuration or None, revision=REVISIONS.get(place)))


def _load(name: str, split: str) -> Any:
    datasets = _package(name)
    place, configuration = _place_of(name)
    with _explained(f"{place} (split {split})"):
        return datasets.load_dataset(place, configuration or None, split=split, revision=REVISIONS.get(place))


def _package(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ModelError(
            f'{name} is no file; reading it from the hub needs datasets: pip install "labkit-bidirectional[train]"'
        ) from None
    return datasets


def _place_of(name: str) -> tuple[str, str]:
    """The repository or folder that is meant by `name`, and the configuration in it, or ""."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder), ""
    if is_folder(name):
        return str(folder.parent), folder.name
    short, _, configuration = name.partition("/") if name.split("/")[0] in KNOWN else (name, "", "")
    if short.count("/") == 2:
        owner, data, configuration = short.split("/")
        short = f"{owner}/{data}"
    return KNOWN.get(short, short), configuration


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # datasets, huggingface_hub, fsspec and pyarrow each raise their own
        words = " ".join(str(error).split())
        cause = f"{type(error).__name__}: {words if len(words) <= 300 else words[:297] + '...'}"
        raise DataError(
            f"{what} could not be loaded: {cause}; connect to the network, or give a file or a folder"
        ) from error


def _class_names(features: Any) -> dict[str, list[str]]:
    """The names behind numbers, by field: tags and labels are stored as integers, -1 where there is none."""
    found = {}
    for name, feature in features.items():
        inner = getattr(feature, "feature", feature[0] if isinstance(feature, list) else feature)
        if hasattr(inner, "names"):
            found[name] = inner.names
    return found


def _named(rows: Any, kinds: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        for name, names in kinds.items():
            value, known = row[name], dict(enumerate(names))
            row[name] = [known.get(i) for i in value] if isinstance(value, list) else known.get(value)
        yield row
