"""The settings of `labkit fuse`, declared once: the fields of `Settings` are its options. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from labkit.errors import DataError, require_one_of
from labkit.fusion.methods import ENGINES, METHODS


def _setting(default: Any, text: str, **limits: int) -> Any:
    """A field that is an option with this help; `limits` are those of `typer.Option`."""
    return field(default=default, metadata={"text": text} | limits)


@dataclass(frozen=True)
class Settings:
    """All that decides what a run writes; DataError for settings that exclude each other.

    A run can only be resumed with the same settings.
    """

    dataset: str = _setting("known-facts", "known-facts, webqa:FILE, lama:FOLDER, or a .jsonl, .json or .csv file.")
    pairs: str | None = _setting(None, "Folder of subject-object pairs, if lama:FOLDER contains none.")
    model: str | None = _setting(None, "A registered name, a hub id or a local folder.")
    method: str = _setting("fuse", "One of the methods above.")
    engine: str = _setting("fast", "fast, reference, dense or cacheless: they give the same answers.")
    num_paraphrases: int | None = _setting(None, "Use the first N paraphrases of each question. Default: all.", min=1)
    indexes: tuple[int, ...] | None = _setting(None, "Use the paraphrases at these positions, from 0, instead: 0,2,4.")
    repeat: int | None = _setting(None, "Control: read the first chosen paraphrase this many times.", min=1)
    at_least: int | None = _setting(
        None, "Leave out questions with fewer paraphrases. Default: as many as are used.", min=1
    )
    weights: tuple[float, ...] | None = _setting(
        None, "For --method weighted: one weight per paraphrase, such as 2,1,1."
    )
    layer: int | None = _setting(None, "For --method hidden-average: layer number, from 0. Default: the middle layer.")
    few_shot: int = _setting(5, "Number of answered examples in the prompt.", min=0)
    few_shot_from_data: bool = _setting(
        False, "Draw the examples from the data set itself, and leave them out of the questions."
    )
    max_questions: int | None = _setting(None, "Size of a random sample of the questions. Default: all.", min=1)
    max_new_tokens: int = _setting(12, "Maximum number of tokens of an answer.", min=1)
    stop: tuple[str, ...] | None = _setting(
        None, "Text that ends an answer, \\n for a line break; may be repeated. Default: the end of the first line."
    )
    lemmatizer: str | None = _setting(None, "simplemma or spacy:MODEL; implies --lemmatize.")
    device: str = _setting("auto", "auto (the GPU if there is one), cpu or cuda.")
    dtype: str | None = _setting(None, "float32, bfloat16 or float16. Default: as stored.")
    batch_size: int = _setting(16, "Questions per batch.", min=1)
    seed: int = _setting(0, "Seed for drawing examples and questions.")
    order_seed: int | None = None  # shuffles the paraphrases of each question; None: keep their order

    def __post_init__(self) -> None:
        require_one_of("the method", self.method, METHODS)
        require_one_of("the engine", self.engine, ENGINES)
        METHODS[self.method].require_weights(self.weights is not None)
        if self.num_paraphrases is not None and (self.indexes is not None or self.repeat is not None):
            raise DataError("give num_paraphrases, or indexes and repeat, not both")
        places = self.indexes
        if places is not None and (not places or min(places) < 0 or len(set(places)) < len(places)):
            raise DataError(f"the indexes are {list(places)}; give different places from 0, such as 0,2,4")

    @property
    def least(self) -> int:
        """How many paraphrases a question needs."""
        if self.indexes is None:
            return self.at_least or self.num_paraphrases or 1
        return max(self.at_least or 0, max(self.indexes) + 1)

    def chosen(self, paraphrases: Sequence[str]) -> list[str]:
        """Those of a question's paraphrases that are read."""
        if self.repeat:
            return [paraphrases[self.indexes[0] if self.indexes else 0]] * self.repeat
        if self.indexes is None:
            return list(paraphrases[: self.num_paraphrases])
        return [paraphrases[index] for index in self.indexes]

    @property
    def default_output(self) -> Path:
        """runs/fuse/known-facts_gemma3-270m_num_paraphrases-5.feather: names all settings that are not the default."""
        kind, _, rest = self.dataset.partition(":")
        parts = [Path(rest if kind in ("webqa", "lama") else self.dataset).stem, Path(self.model).name]
        for setting in fields(self)[2:]:
            value = getattr(self, setting.name)
            if setting.name != "model" and value != setting.default:
                parts.append(f"{setting.name}-{'-'.join(map(str, value)) if isinstance(value, tuple) else value}")
        return Path("runs", "fuse", re.sub(r"[^\w.+-]+", "-", "_".join(parts)) + ".feather")
