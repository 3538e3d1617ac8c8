"""What a fusion run is made of: the twelve methods, the engines, and the settings of `labkit fuse`. Imports no torch.

Joined methods put the paraphrases of a question side by side in one row. They differ in the mask, the positions and the
weights of the paraphrases. The other methods give each paraphrase its own row and combine what the rows predict.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from labkit.errors import DataError, require_one_of

ENGINES = {
    "fast": "segments read as one batch, keys and values joined once, ordinary decoding over them",
    "reference": "each row in one piece under FlexAttention",
    "dense": "each row in one piece under a 4-D mask",
    "cacheless": "as dense, but everything is read again for each token, as in the public experiment",
}
VOTE = "vote"  # each row generates its own answer, and the answers are counted


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        isolated: no paraphrase attends to another. restart: each paraphrase begins at the position behind the prefix.
        has_weights: the logarithm of each paraphrase's weight is added to the attention scores of its keys, when the
            cue and the answer attend to them. The weights are 1 / N, or the caller's for "weighted".
        combine: None: the paraphrases are joined in one row. Otherwise each has its own row, and this is VOTE or the
            rule by which the rows agree on the next token (`labkit.fusion.decoding.combine`).
    """

    name: str
    isolated: bool = True
    restart: bool = True
    has_weights: bool = False
    combine: str | None = None

    def require_weights(self, are_given: bool) -> None:
        """Raise DataError if the method needs weights that are not given, or takes none."""
        if (self.name == "weighted") != are_given:
            problem = "takes no weights: use 'weighted'" if are_given else "needs a weight for each paraphrase"
            raise DataError(f"the method {self.name!r} {problem}")


METHODS = {
    method.name: method
    for method in (
        Method("single"),  # answers the first paraphrase alone
        Method("concat", isolated=False, restart=False),  # reads all paraphrases as one text
        Method("isolate", restart=False),  # positions continue from one paraphrase to the next
        Method("isolate+restart"),
        Method("fuse", has_weights=True),
        Method("weighted", has_weights=True),
        Method("logit-average", combine="average"),  # the mean of the logits
        Method("logit-max", combine="max"),  # the highest logit of each token
        # log-probabilities, weighted by the probability of each paraphrase's best token
        Method("confidence-average", combine="confidence-average"),
        # the highest probability of each token, times the probability of that paraphrase's best token
        Method("confidence-max", combine="confidence-max"),
        Method("majority-vote", combine=VOTE),  # answers each paraphrase and counts the answers
        Method("hidden-average", combine="average"),  # averages one layer's hidden states, then the logits
    )
}


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
