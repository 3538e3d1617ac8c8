"""What stands around question and context in a row: nothing but a line break, or the marks of a prompt.

plain      [bos] question \\n context [eos]   (an encoder: as its tokenizer pairs, [CLS] question [SEP] context [SEP])
evidence   [bos] [INST] .. [/INST] [CRITERION] question [/CRITERION] [POST] context [/POST] [eos]

and each with the two in the other order. The prompt's marks are tokens of their own once they have been added to the
tokenizer (`labkit.tasks.special_tokens.add_tokens`); the last token of a row, which stands for "no answer", is the eos,
or the last of the frame where the tokenizer has none. [bos] and [eos] are [CLS] and [SEP] where it has those instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.datasets.evidence import INSTRUCTION, MARKS
from labkit.errors import DataError
from labkit.tasks.special_tokens import between, row_ends

ORDERS = ("question-first", "question-last")
PROMPTS = ("plain", "evidence")
SEPARATOR = "\n"  # between question and context


@dataclass(frozen=True)
class Frame:
    """The tokens of a row before, between and after question and context, and which of the two comes first."""

    opening: tuple[int, ...]
    middle: tuple[int, ...]
    closing: tuple[int, ...]
    question_first: bool

    def __len__(self) -> int:
        return len(self.opening) + len(self.middle) + len(self.closing)

    def around_context(self, question: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before the context, and what after it."""
        if self.question_first:
            return self.opening + question + self.middle, self.closing
        return self.opening, self.middle + question + self.closing


def frame(tokenizer: Any, order: str, prompt: str) -> Frame:
    """The frame of `prompt`, "plain" or "evidence", with the question first or last.

    Raises:
        DataError: no such order or prompt, no token for a line break, or marks that the tokenizer does not know.
    """
    for name, value, known in (("order", order, ORDERS), ("prompt", prompt, PROMPTS)):
        if value not in known:
            raise DataError(f"{name} is {value!r}; choose one of {', '.join(known)}")
    bos, eos = map(tuple, row_ends(tokenizer))
    if prompt == "plain":
        separator = tuple(between(tokenizer)) or _ids(tokenizer, SEPARATOR)
        if not separator:
            raise DataError("the tokenizer has no token for a line break, which stands between question and context")
        return Frame(bos, separator, eos or separator, order == "question-first")
    vocabulary = tokenizer.get_vocab()
    if missing := [mark for mark in MARKS if mark not in vocabulary]:
        raise DataError(f"the tokenizer does not know {', '.join(missing)}: add them with special_tokens.add_tokens")
    mark = {name: (vocabulary[name],) for name in MARKS}
    parts = [(mark["[POST]"], mark["[/POST]"]), (mark["[CRITERION]"], mark["[/CRITERION]"])]
    (first, first_end), (second, second_end) = parts[::-1] if order == "question-first" else parts
    opening = bos + mark["[INST]"] + _ids(tokenizer, INSTRUCTION) + mark["[/INST]"] + first
    return Frame(opening, first_end + second, second_end + eos, order == "question-first")


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
