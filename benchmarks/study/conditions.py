"""What the arms of `mask_effect` are compared on: a data set with its three sides, and the position of the question.

qa:field-notes                      an embedded data set, or a hub name, with its own sides
ner:train.conll,dev.conll,test.conll      files for the three sides
qa:xquad.en.json                    one file: its groups (articles) are split 60 : 15 : 25, always in the same way
news=ner:news.conll                 with a name of your own
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.datasets import readers, splits
from labkit.datasets.splits import drawn, require_apart, sides
from labkit.errors import DataError
from labkit.tasks.base import Task, get
from labkit.tasks.finetune import digest
from labkit.tasks.qa import ORDERS

TEST_SHARE, DEV_SHARE = 0.25, 0.2  # of all examples, and of the rest
SPLIT_SEED = 0  # the split belongs to the condition, not to a run


@dataclass(frozen=True)
class Condition:
    """A task on a data set; the name is for folders and tables, such as "xquad/question-last"."""

    name: str
    task: str
    options: dict[str, Any]
    train: list[Any] = field(repr=False)
    dev: list[Any] = field(repr=False)
    test: list[Any] = field(repr=False)

    @property
    def facts(self) -> dict[str, Any]:
        """What study.json records: enough to recognise the examples."""
        of_sides = {side: digest(getattr(self, side)) for side in ("train", "dev", "test")}
        return {"task": self.task, "options": self.options, "n_train": len(self.train)} | of_sides

    def smaller(self, size: int | None) -> list[Any]:
        """`size` training examples; a smaller set is part of every larger one. None: all."""
        if size is None:
            return self.train
        order = list(range(len(self.train)))
        random.Random(SPLIT_SEED).shuffle(order)
        return [self.train[number] for number in sorted(order[:size])]

    def texts(self) -> list[str]:
        """The training texts without labels and questions, each once."""
        name = "context" if self.task == "qa" else "text"
        return list(dict.fromkeys(getattr(example, name) for example in self.train))


def conditions(
    sources: Sequence[str], *, orders: Sequence[str] = ORDERS, max_train: int | None = None, max_eval: int | None = None
) -> list[Condition]:
    """The conditions of these sources; question answering has one for each order of question and context."""
    if not orders or any(order not in ORDERS for order in orders):
        raise DataError(f"the orders are {', '.join(orders) or 'none'}; choose from {', '.join(ORDERS)}")
    made: list[Condition] = []
    for source in sources:
        given, _, rest = source.partition("=") if "=" in source.split(":")[0] else ("", "", source)
        task, _, data = rest.partition(":")
        if type(get(task)).judge is Task.judge:
            raise DataError(f"{task} has no score for single examples, so it cannot be compared")
        if not data or "/" in given:
            raise DataError(f"{source!r}: give [NAME=]TASK:DATA, such as ner:field-notes; NAME without /")
        examples = _sides(task, data, max_train, max_eval)
        require_apart(*examples)
        first = Path(data.split(",")[0])
        name = given or (first.stem.split(".")[0] if first.is_file() else data.replace("/", "-"))
        variants = [(order, {"order": order}) for order in orders] if task == "qa" else [(task, {})]
        made += [Condition(f"{name}/{variant}", task, options, *examples) for variant, options in variants]
    names = [condition.name for condition in made]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"two data sets are called {twice[0]}; give one another name: NAME={sources[-1]}")
    return made


def _sides(task: str, data: str, max_train: int | None, max_eval: int | None) -> tuple[list, list, list]:
    limits = {"max_train": max_train, "max_eval": max_eval}
    files = data.split(",")
    if len(files) == 3:
        return sides(task, **dict(zip(("train_file", "dev_file", "test_file"), files, strict=True)), **limits)
    if len(files) != 1:
        raise DataError(f"{data!r} names {len(files)} files; give one, or three: train, dev and test")
    if Path(data).expanduser().is_file():
        rest, test = splits.held_out(readers.read(task, data), TEST_SHARE, SPLIT_SEED)
        train, dev = splits.held_out(rest, DEV_SHARE, SPLIT_SEED)
        return drawn(train, max_train, SPLIT_SEED), drawn(dev, max_eval, SPLIT_SEED), drawn(test, max_eval, SPLIT_SEED)
    parts = sides(task, data, **limits)
    for side, examples in zip(("train", "dev", "test"), parts, strict=True):
        if not examples:
            raise DataError(f"{data} has no {side} side, and a comparison needs all three")
    return parts
