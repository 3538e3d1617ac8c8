"""Extractive question answering: rows for a model, and spans of the context out of its start and end logits.

    lm = labkit.load("gemma3-270m", task="question-answering")
    questions = labkit.datasets.readers.read("qa", "dev.json")
    rows = windows(lm.tokenizer, questions)                     # to train on, with `Collator`
    predictions = predict(lm, lm.tokenizer, questions)          # to score, with `labkit.tasks.qa_scores`

A context that is too long for one row is read in several overlapping windows. "No answer in here" is the pair
(null, null), where null is the row's last token: BERT points at its first token, but in a causal model only the last
one has seen the question and the context.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit.datasets.examples import Question
from labkit.errors import DataError, ModelError
from labkit.models import Loaded
from labkit.tasks.classify import run_by_length
from labkit.tasks.lm import pad_id
from labkit.tasks.qa_frames import frame


@dataclass(frozen=True)
class Window:
    """One row: a question and a piece of its context.

    Attributes:
        ids: token ids.
        example: which question it is of.
        offsets: one per token, (start, end) in the characters of the whole context; None for a token that is not of
            the context. A token may hold the space before its word, and several tokens may share one character.
        start, end: the target, the first and the last token of the answer; both `null` if it is not wholly in here.
        null: the position that stands for "no answer".
    """

    ids: tuple[int, ...]
    example: int
    offsets: tuple[tuple[int, int] | None, ...]
    start: int
    end: int
    null: int


@dataclass(frozen=True)
class Candidate:
    """A possible answer: text == context[start:end], "" (0, 0) for no answer; `probability` among the n best."""

    text: str
    start: int
    end: int
    score: float
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The answer to one question: text == context[start:end], and "" (0, 0) where there is none.

    Attributes:
        probability: of the answer given, by a softmax over the scores of `n_best`.
        n_best: the best spans and "no answer", by falling score.
        null_score_diff: score of "no answer" less that of the best span; an answer is given up to `null_threshold`.
    """

    id: str
    text: str
    start: int
    end: int
    probability: float
    n_best: tuple[Candidate, ...]
    null_score_diff: float

    @property
    def best_span(self) -> Candidate:
        """The best answer that is one, whether or not it was given."""
        return next(each for each in self.n_best if each.text)


def windows(
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    max_length: int = 384,
    doc_stride: int = 128,
    order: str = "question-first",
    prompt: str = "plain",
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> list[Window]:
    """Rows of at most `max_length` tokens, all windows of the first question, then those of the second, ...

    "question-first" is [bos] question, newline, piece of the context, end; "question-last" is [bos] piece, newline,
    question, end. The end is the eos token, or another newline where the tokenizer has none; the prompt "evidence" has
    marks instead (`labkit.tasks.qa_frames`). The first answer is the target. A question of more than half of
    `max_length` loses its end; `say` is told how many do, and how many answers no window holds whole.

    Args:
        doc_stride: how many tokens the next window starts after this one, as in BERT's script (Devlin et al. 2019);
            two windows share the rest. (transformers' tokenizers call the shared part `stride`.)

    Raises:
        DataError: a slow tokenizer, which has no offsets; no room for the context.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{type(tokenizer).__name__} is a slow tokenizer, which gives no offsets; take a fast one")
    if doc_stride < 1:
        raise DataError(f"doc_stride is {doc_stride}: the next window must start at least 1 token after this one")
    if max_length > tokenizer.model_max_length:
        raise DataError(f"max_length is {max_length:,}, and the model takes {tokenizer.model_max_length:,} tokens")
    around = frame(tokenizer, order, prompt)
    others, half = len(around), max_length // 2
    asked = _tokenised(tokenizer, [each.question for each in questions])
    contexts = _tokenised(tokenizer, [each.context for each in questions])
    found, cut, lost = [], 0, 0
    for number, question in enumerate(questions):
        asks, context = asked[question.question].ids[:half], contexts[question.context]
        cut += len(asked[question.question].ids) > half
        room = max_length - len(asks) - others
        if room < 1:
            raise DataError(
                f"max_length is {max_length}: beside the {len(asks)} tokens of question {question.id!r} and {others} "
                "others there is no room for its context"
            )
        if not context.ids:
            raise DataError(f"the context of question {question.id!r} has no token")
        before, after = around.around_context(asks)
        answer, held = _answer_tokens(question, context), False
        step = min(doc_stride, room)
        for first in range(0, max(len(context.ids) - room, 0) + step, step):  # the last one reaches the context's end
            ids = before + context.ids[first : first + room] + after
            null, shift = len(ids) - 1, len(before) - first
            here = answer is not None and first <= answer[0] and answer[1] < first + room
            held = held or here
            offsets = (None,) * len(before) + context.offsets[first : first + room] + (None,) * len(after)
            target = (answer[0] + shift, answer[1] + shift) if here else (null, null)
            found.append(Window(ids, number, offsets, *target, null))
        lost += bool(question.answers) and not held
    if cut:
        say(f"{cut:,} of {len(questions):,} questions have more than {half} tokens and were cut at their end")
    if lost:
        say(f"{lost:,} answers are in no window whole; a larger max_length or a smaller doc_stride would keep more")
    return found


@dataclass(frozen=True)
class Collator:
    """A batch of windows, padded on the right: input_ids and attention_mask (batch, seq), targets (batch,) each."""

    pad_id: int

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """`items` as `labkit.training.Rows` makes them: {"row": k, "ids": a Window}."""
        rows = [item["ids"] for item in items]
        ids = [torch.tensor(row.ids, dtype=torch.long) for row in rows]
        return {
            "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self.pad_id),
            "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            "start_positions": torch.tensor([row.start for row in rows]),
            "end_positions": torch.tensor([row.end for row in rows]),
        }


def decode(
    windows: Sequence[Window],
    start_logits: Sequence[np.ndarray] | np.ndarray,
    end_logits: Sequence[np.ndarray] | np.ndarray,
    questions: Sequence[Question],
    *,
    n_best: int = 20,
    max_answer_tokens: int = 30,
    null_threshold: float = 0.0,
) -> list[Prediction]:
    """The best answer to each question over all its windows, in the order of the questions.

    An answer begins and ends in the context, at a character that is no white space, and has at most
    `max_answer_tokens` tokens. All such spans are weighed, not only the pairs of the best starts and ends. Its score is
    start logit + end logit; "no answer" has the lowest that it has in any window, as in BERT's script.

    Args:
        start_logits, end_logits: one row per window, each at least as long as the window. The rest is padding.
        null_threshold: the answer is "" where "no answer" scores higher than the best span by more than this. The one
            that is best for a data set: `labkit.tasks.qa_scores.best_threshold`.

    Raises:
        DataError: logits that are not finite.
    """
    rows_of: dict[int, list[int]] = {}
    for row, window in enumerate(windows):
        rows_of.setdefault(window.example, []).append(row)
    found = []
    for number, question in enumerate(questions):
        edges = _edges(question.context)
        spans, nulls = [], []
        for row in rows_of[number]:
            start, end = (_row(logits[row], windows[row], question) for logits in (start_logits, end_logits))
            spans.append(_spans(windows[row], start, end, edges, max_answer_tokens))
            nulls.append(float(start[windows[row].null] + end[windows[row].null]))
        best = _best(*(np.concatenate(column) for column in zip(*spans, strict=True)), n_best)
        found.append(_prediction(question, best, min(nulls), null_threshold))
    return found


def predict(
    lm: Loaded | nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    max_length: int = 384,
    doc_stride: int = 128,
    order: str = "question-first",
    prompt: str = "plain",
    n_best: int = 20,
    max_answer_tokens: int = 30,
    null_threshold: float = 0.0,
    batch_size: int = 16,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> list[Prediction]:
    """Ask a model with a question-answering head; the arguments are those of `windows` and `decode`.

    Raises:
        ModelError: the model has no such head. DataError: as `windows`.
    """
    model = lm.model if isinstance(lm, Loaded) else lm
    rows = windows(
        tokenizer, questions, max_length=max_length, doc_stride=doc_stride, order=order, prompt=prompt, say=say
    )

    def start_and_end(output: Any) -> Tensor:  # (batch, 2, seq)
        if "start_logits" not in output:
            raise ModelError(f"{type(model).__name__} has no head for it; load it with task='question-answering'")
        return torch.stack([output.start_logits, output.end_logits], dim=1).float()

    logits = run_by_length(
        model, [list(row.ids) for row in rows], start_and_end,
        pad_id=pad_id(tokenizer), batch_size=batch_size, what="answer",
    )  # fmt: skip
    return decode(
        rows, [start.numpy() for start, _ in logits], [end.numpy() for _, end in logits], questions,
        n_best=n_best, max_answer_tokens=max_answer_tokens, null_threshold=null_threshold,
    )  # fmt: skip


@dataclass(frozen=True)
class _Tokens:
    """A text's tokens: ids, and where each stands, as pairs and as an array (tokens, 2)."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    places: np.ndarray


def _tokenised(tokenizer: Any, texts: Sequence[str]) -> dict[str, _Tokens]:
    """Each text once, however often it is asked about. "<eos>" in a text is text: it cannot end a row."""
    distinct = list(dict.fromkeys(texts))
    made = tokenizer(
        distinct, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True,
        truncation=False, padding=False, verbose=False,
    )  # fmt: skip
    return {
        text: _Tokens(tuple(ids), tuple(map(tuple, offsets)), np.array(offsets, dtype=np.int64).reshape(-1, 2))
        for text, ids, offsets in zip(distinct, made["input_ids"], made["offset_mapping"], strict=True)
    }


def _answer_tokens(question: Question, context: _Tokens) -> tuple[int, int] | None:
    """The first and the last token of the context that hold a character of the first answer; white space apart."""
    if not question.answers:
        return None
    answer = question.answers[0]
    start = answer.end - len(answer.text.lstrip())
    end = answer.start + len(answer.text.rstrip())
    inside = np.flatnonzero((context.places[:, 0] < end) & (context.places[:, 1] > start))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def _edges(context: str) -> tuple[np.ndarray, np.ndarray]:
    """For every place between two characters: the next one at which a word can start, and the last at which one ends.

    Both (len(context) + 1,): context[a:b].strip() is context[starts[a]:ends[b]], or nothing if these cross.
    """
    n = len(context)
    blank = np.fromiter((sign.isspace() for sign in context), dtype=bool, count=n)
    places = np.arange(n)
    starts = np.minimum.accumulate(np.append(np.where(blank, n, places), n)[::-1])[::-1]
    ends = np.maximum.accumulate(np.append(0, np.where(blank, 0, places + 1)))
    return starts, ends


def _row(logits: np.ndarray, window: Window, question: Question) -> np.ndarray:
    """(tokens,) in float64, where the sum of two masked logits is still a number."""
    row = np.asarray(logits, dtype=np.float64)[: len(window.ids)]

    if not np.isfinite(row).all():
        raise DataError(f"the logits of question {question.id!r} are not all finite")
    return row


def _spans(
    window: Window, start: np.ndarray, end: np.ndarray, edges: tuple[np.ndarray, np.ndarray], longest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, starts and ends (characters) of all spans of the context's tokens; each (spans,)."""
    inside = [position for position, offset in enumerate(window.offsets) if offset is not None]
    places = np.array([window.offsets[position] for position in inside])  # (tokens, 2)
    starts, ends = edges[0][places[:, 0]], edges[1][places[:, 1]]
    longest = min(longest, len(inside))

    def following(values: np.ndarray) -> np.ndarray:
        """(tokens, longest): what stands at a token and at the ones after it, zeros beyond the last."""
        padded = np.concatenate([values, np.zeros(longest - 1, dtype=values.dtype)])
        return np.lib.stride_tricks.sliding_window_view(padded, longest)

    scores, to = start[inside][:, None] + following(end[inside]), following(ends)
    real = starts[:, None] < to
    return scores[real], np.broadcast_to(starts[:, None], to.shape)[real], to[real]


def _best(scores: np.ndarray, starts: np.ndarray, ends: np.ndarray, n: int) -> list[tuple[int, int, float]]:
    """The n best (start, end, score), each (start, end) once; of equals the first in the text, then the shortest."""
    found: dict[tuple[int, int], float] = {}
    looked_at = 4 * n  # some of them say the same: windows overlap, and tokens share characters
    while scores.size:
        chosen = np.arange(scores.size)
        if looked_at < scores.size:
            chosen = np.flatnonzero(scores >= np.partition(scores, -looked_at)[-looked_at])
        for i in chosen[np.lexsort((ends[chosen], starts[chosen], -scores[chosen]))]:
            found.setdefault((int(starts[i]), int(ends[i])), float(scores[i]))
            if len(found) == n:
                break
        if len(found) == n or chosen.size == scores.size:
            break
        looked_at *= 4
    return [(start, end, score) for (start, end), score in found.items()]


def _prediction(
    question: Question, best: list[tuple[int, int, float]], null_score: float, null_threshold: float
) -> Prediction:
    if not best:
        raise DataError(f"no window of question {question.id!r} holds a word of its context")
    options = sorted([*best, (0, 0, null_score)], key=lambda option: -option[2])  # stable: of equals a span is first
    weights = np.exp(np.array([score for _, _, score in options]) - options[0][2])
    ranked = tuple(
        Candidate(question.context[start:end], start, end, score, float(weight / weights.sum()))
        for (start, end, score), weight in zip(options, weights, strict=True)
    )
    diff = null_score - best[0][2]
    given = next(each for each in ranked if bool(each.text) != (diff > null_threshold))
    return Prediction(question.id, given.text, given.start, given.end, given.probability, ranked, diff)
