"""What the arms are compared on: a data set with its three sides, and for questions also where the question stands.

qa:field-notes                      an embedded data set, or a hub name, with its own sides
ner:train.conll,dev.conll,test.conll      files for the three sides
qa:xquad.en.json                    one file: its groups (articles) are dealt 60 : 15 : 25, always in the same way
news=ner:news.conll                 with a name of your own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.datasets import readers, splits
from labkit.datasets.sources import drawn, sides
from labkit.errors import DataError
from labkit.tasks.finetune import digest, require_apart
from labkit.tasks.qa_frames import ORDERS
from labkit.tasks.recipes import by_name

TEST_SHARE, DEV_SHARE = 0.25, 0.2  # of all, and of what is left
SPLIT_SEED = 0  # the split is part of the condition, not of a run


@dataclass(frozen=True)
class Condition:
    """A task on a data set.

    Attributes:
        name: for folders and tables, such as "xquad/question-last". task: "qa", "ner" or "classify".
        source: as it was given. options: of the task (`labkit.tasks.recipes.Options`).
        train, dev, test: examples.
    """

    name: str
    task: str
    source: str
    options: dict[str, Any]
    train: list[Any] = field(repr=False)
    dev: list[Any] = field(repr=False)
    test: list[Any] = field(repr=False)

    @property
    def facts(self) -> dict[str, Any]:
        """What a study writes down of it: enough to know it again, and nothing of this machine."""
        named = {"name": self.name, "task": self.task, "options": self.options}
        sizes = {"n_train": len(self.train), "n_dev": len(self.dev), "n_test": len(self.test)}
        return named | sizes | {side: digest(getattr(self, side)) for side in ("train", "dev", "test")}

    def smaller(self, size: int | None) -> list[Any]:
        """The first `size` training examples in an order that is the condition's own: small sets lie in larger ones."""
        if size is None or size >= len(self.train):
            return self.train
        import random

        order = list(range(len(self.train)))
        random.Random(SPLIT_SEED).shuffle(order)
        chosen = set(order[:size])
        return [each for number, each in enumerate(self.train) if number in chosen]


def conditions(
    sources: Sequence[str], *, orders: Sequence[str] = ORDERS, max_train: int | None = None, max_eval: int | None = None
) -> list[Condition]:
    """The conditions of these sources; one with questions makes one per order of question and context.

    Args:
        max_train, max_eval: at most so many examples, always the same ones.

    Raises:
        DataError: a source that cannot be read, a missing side, two of one name, a task that cannot be compared.
    """
    if not orders or any(order not in ORDERS for order in orders):
        raise DataError(f"the orders are {', '.join(orders) or 'none'}; choose of {', '.join(ORDERS)}")
    found = []
    for source in sources:
        given, _, rest = source.partition("=") if "=" in source.split(":")[0] else ("", "", source)
        if "/" in given:
            raise DataError(f"{given!r} cannot be a name: leave out the /")
        task, _, data = rest.partition(":")
        if by_name(task).judge is None:
            raise DataError(f"{task} has no score that is made of single examples: it cannot be compared")
        if not data:
            raise DataError(f"{source!r} names no data; give TASK:DATA, such as ner:field-notes")
        train, dev, test = _sides(task, data, max_train, max_eval)
        require_apart(train, dev, test)
        name = given or _name(data)
        if task == "qa":
            for order in orders:
                found.append(Condition(f"{name}/{order}", task, source, {"order": order}, train, dev, test))
        else:
            found.append(Condition(f"{name}/{task}", task, source, {}, train, dev, test))
    names = [each.name for each in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"two data sets are called {twice[0]}; give one another name: NAME={sources[0]}")
    return found


def _sides(task: str, data: str, max_train: int | None, max_eval: int | None) -> tuple[list, list, list]:
    limits = {"max_train": max_train, "max_eval": max_eval}
    files = data.split(",")
    if len(files) == 3:
        names = dict(zip(("train_file", "dev_file", "test_file"), files, strict=True))
        return sides(task, **names, **limits)
    if len(files) != 1:
        raise DataError(f"{data!r} names {len(files)} files; give one, or three: train, dev and test")
    if Path(data).expanduser().is_file():
        rest, test = splits.held_out(readers.read(task, data), TEST_SHARE, SPLIT_SEED)
        train, dev = splits.held_out(rest, DEV_SHARE, SPLIT_SEED)
        return drawn(train, max_train, SPLIT_SEED), drawn(dev, max_eval, SPLIT_SEED), drawn(test, max_eval, SPLIT_SEED)
    found = sides(task, data, **limits)
    for side, examples in zip(("train", "dev", "test"), found, strict=True):
        if not examples:
            raise DataError(f"{data} has no {side} side, and a comparison needs all three")
    return found


def _name(data: str) -> str:
    """The file's name without its endings, or the data set's as it was given."""
    path = Path(data.split(",")[0])
    return path.stem.split(".")[0] if path.is_file() else data.replace("/", "-")
