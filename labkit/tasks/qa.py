"""Extractive question answering: rows for a model, and spans of the context from its start and end logits.

    task = QuestionAnswering(max_length=256)
    questions = labkit.datasets.readers.read("qa", "dev.json")
    lm = labkit.load("gemma3-270m", task=task.head(()))
    rows = task.rows(lm.tokenizer, questions, ())
    predictions = task.predict(lm.model, lm.tokenizer, questions, (), rows=rows)
    task.score(questions, predictions)                          # exact match and F1, in percent

A context that is too long for one row is split into overlapping windows. The target "no answer" is (null, null), where
null is the row's last token. BERT uses the first token, but in a causal model only the last one attends to both the
question and the context.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit.datasets.evidence import INSTRUCTION, MARKS
from labkit.datasets.examples import Question
from labkit.errors import DataError, ModelError
from labkit.models.special_tokens import between, row_ends
from labkit.tasks import qa_scores
from labkit.tasks.base import Task, pad_id, padded, run_by_length
from labkit.tasks.options import QaOptions

ORDERS = ("question-first", "question-last")
PROMPTS = ("plain", "evidence")
ALWAYS_ANSWER = 1e9  # a threshold that no null score exceeds; finite, so that it can be stored as JSON


@dataclass(frozen=True)
class QuestionAnswering(QaOptions, Task):
    """Find the span of the context that answers the question, or predict that there is none.

    If `null_threshold` is None, `tuned` chooses it on the dev set: every question is answered if all questions of the
    dev set have an answer; otherwise it is the threshold with the best F1, which is an optimistic score there.
    """

    name = "qa"
    head_task = "question-answering"
    inputs = ("question", "context")

    def metric(self, examples: Sequence[Question]) -> str:
        choose = self.null_threshold is None and not all(question.answers for question in examples)
        return "best_f1" if choose else "f1"

    def rows(
        self,
        tokenizer: Any,
        examples: Sequence[Question],
        labels: Sequence[str],
        say: Callable[[str], None] = lambda text: None,
    ) -> list[Window]:
        layout = {name: getattr(self, name) for name in ("max_length", "doc_stride", "order", "prompt")}
        return windows(tokenizer, examples, **layout, say=say)

    def collate(self, rows: Sequence[Window], pad_id: int) -> dict[str, Tensor]:
        """The labels are the first and the last token of each answer, (batch, 2)."""
        targets = torch.tensor([(row.start, row.end) for row in rows])
        return padded([row.ids for row in rows], pad_id) | {"labels": targets}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The mean of the cross-entropies of the start and of the end, in nats."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        start, end = batch["labels"].unbind(1)  # (batch,) each
        return model(**inputs, start_positions=start, end_positions=end).loss

    def predict(
        self,
        model: nn.Module,
        tokenizer: Any,
        examples: Sequence[Question],
        labels: Sequence[str],
        *,
        rows: Sequence[Window] | None = None,
        batch_size: int = 16,
    ) -> list[Prediction]:
        """As `decode`. If no threshold is set, it is 0, or `ALWAYS_ANSWER` if every question has an answer.

        Raises:
            DataError: as `windows`. ModelError: the model has no head for question answering.
        """

        def start_and_end(output: Any) -> Tensor:  # (batch, 2, seq)
            if "start_logits" not in output:
                raise ModelError(f"{type(model).__name__} has no such head; load it with task='question-answering'")
            return torch.stack([output.start_logits, output.end_logits], dim=1).float()

        rows = self.rows(tokenizer, examples, labels) if rows is None else rows
        ids = [row.ids for row in rows]
        logits = run_by_length(model, ids, start_and_end, pad_id=pad_id(tokenizer), batch_size=batch_size)
        starts, ends = [start.numpy() for start, _ in logits], [end.numpy() for _, end in logits]
        threshold = self.null_threshold
        if threshold is None:
            threshold = ALWAYS_ANSWER if all(question.answers for question in examples) else 0.0
        return decode(rows, starts, ends, examples, max_answer_tokens=self.max_answer_tokens, null_threshold=threshold)

    def score(self, examples: Sequence[Question], predictions: Sequence[Prediction]) -> dict[str, Any]:
        """The official scores, and the best F1 with its threshold if a threshold is to be chosen."""
        scores = qa_scores.scores(examples, predictions)
        if self.metric(examples) == "best_f1":
            threshold, best = qa_scores.best_threshold(examples, predictions)
            scores |= {"best_f1": best, "best_f1_threshold": threshold}
        return scores

    def tuned(self, scores: dict[str, Any]) -> QuestionAnswering:
        if self.null_threshold is not None:
            return self
        return replace(self, null_threshold=scores.get("best_f1_threshold", ALWAYS_ANSWER))

    def baselines(self, train: Sequence[Question], examples: Sequence[Question]) -> dict[str, float]:
        """F1 of never answering, and of the sentence that shares the most words with the question."""

        def mean_f1(answer: Callable[[Question], str]) -> float:
            return float(np.mean([qa_scores.f1(answer(q), [gold.text for gold in q.answers]) for q in examples]))

        return {"no_answer": mean_f1(lambda question: ""), "lexical_overlap": mean_f1(qa_scores.lexical_overlap)}

    def record(self, prediction: Prediction) -> dict[str, Any]:
        return asdict(replace(prediction, n_best=prediction.n_best[:5]))

    def judge(self, examples: Sequence[Question], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
        return qa_scores.judged(examples, predictions)

    def example(self, id: str, texts: dict[str, str], labels: Sequence[str]) -> Question:
        return Question(id, texts["question"], texts["context"])


@dataclass(frozen=True)
class Window:
    """One row: a question and a part of its context.

    Attributes:
        ids: token ids.
        example: the number of the question.
        offsets: for each token (start, end) in the characters of the whole context, None outside the context. A token
            may include the space before its word, and several tokens may share one character.
        start, end: the target, the first and the last token of the answer; both `null` if the window does not contain
            the whole answer.
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
    """A possible answer: text == context[start:end], "" (0, 0) for no answer; `probability` is among the n best."""

    text: str
    start: int
    end: int
    score: float
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The answer to one question: text == context[start:end], and "" (0, 0) for no answer.

    Attributes:
        probability: of this answer, from a softmax over the scores of `n_best`.
        n_best: the best spans and "no answer", by descending score.
        null_score_diff: score of "no answer" minus that of the best span; above the threshold there is no answer.
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
        """The best span, whether or not it is the answer."""
        return next(candidate for candidate in self.n_best if candidate.text)


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
    """Rows of at most `max_length` tokens: all windows of the first question, then those of the second, ...

    The target is the first answer of the question. A question of more than half of `max_length` is cut at its end;
    `say` receives the number of such questions, and the number of answers that no window contains whole.

    Args:
        doc_stride: tokens from the start of one window to the start of the next, as in BERT's script (Devlin et al.
            2019). In transformers' tokenizers, `stride` is the number of tokens that two windows share.
        order, prompt: "question-first" or "question-last", "plain" or "evidence"; see `_frame`.

    Raises:
        DataError: a slow tokenizer, which has no offsets; no room for the context; a context without a word.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{type(tokenizer).__name__} is a slow tokenizer, which has no offsets; use a fast one")
    if doc_stride < 1:
        raise DataError(f"doc_stride is {doc_stride}: the next window must start at least 1 token after this one")
    opening, middle, closing = _frame(tokenizer, order, prompt)
    tokens = _tokenized(tokenizer, [text for question in questions for text in (question.question, question.context)])
    limit = max_length // 2
    rows, cut, lost = [], 0, 0
    for number, question in enumerate(questions):
        query, (context, offsets) = tokens[question.question][0][:limit], tokens[question.context]
        cut += len(tokens[question.question][0]) > limit
        if order == "question-first":
            before, after = opening + query + middle, closing
        else:
            before, after = opening, middle + query + closing
        if (room := max_length - len(before) - len(after)) < 1:
            raise DataError(
                f"max_length is {max_length}: the row of question {question.id!r} has {len(before) + len(after)} "
                "tokens without its context; increase max_length"
            )
        if not any(question.context[start:end].strip() for start, end in offsets):
            raise DataError(f"the context of question {question.id!r} has no word for this tokenizer")
        answer, contained = _answer_tokens(question, offsets), False
        step = min(doc_stride, room)
        for first in range(0, max(len(context) - room, 0) + step, step):  # the last window reaches the context's end
            ids = before + context[first : first + room] + after
            null, shift = len(ids) - 1, len(before) - first
            start = end = null
            if answer is not None and first <= answer[0] and answer[1] < first + room:
                start, end, contained = answer[0] + shift, answer[1] + shift, True
            in_context = (None,) * len(before) + offsets[first : first + room] + (None,) * len(after)
            rows.append(Window(ids, number, in_context, start, end, null))
        lost += bool(question.answers) and not contained
    if cut:
        say(f"{cut:,} of {len(questions):,} questions have more than {limit} tokens and were cut at their end")
    if lost:
        say(f"{lost:,} answers are in no window whole; a larger max_length or a smaller doc_stride would keep more")
    return rows


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

    An answer starts and ends in the context, not at white space, and has at most `max_answer_tokens` tokens. All such
    spans are compared, not only those of the best starts and ends. The score of a span is start logit + end logit; of
    equal scores the first in the text wins, then the shortest. "No answer" has its lowest score over all windows, as
    in BERT's script.

    Args:
        start_logits, end_logits: one row per window, each at least as long as the window. The rest is padding.
        null_threshold: the answer is "" if the score of "no answer" exceeds that of the best span by more than this.
            `labkit.tasks.qa_scores.best_threshold` finds the best one for a data set.

    Raises:
        DataError: logits that are not finite.
    """
    spans: list[dict[tuple[int, int], float]] = [{} for _ in questions]
    null_scores = [np.inf] * len(questions)
    for row, window in enumerate(windows):
        question, best = questions[window.example], spans[window.example]
        # float64, in which the sum of two masked logits, each the lowest float32, is still finite
        start, end = (np.asarray(side[row], np.float64)[: len(window.ids)] for side in (start_logits, end_logits))
        if not (np.isfinite(start).all() and np.isfinite(end).all()):
            raise DataError(f"the logits of question {question.id!r} are not all finite")
        null_scores[window.example] = min(null_scores[window.example], start[window.null] + end[window.null])
        for span, score in _best_spans(window, start, end, question.context, n_best, max_answer_tokens).items():
            best[span] = max(score, best.get(span, score))
    predictions = []
    for question, best, null_score in zip(questions, spans, map(float, null_scores), strict=True):
        ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:n_best]
        null_score_diff = null_score - ranked[0][1]
        ranked = sorted([*ranked, ((0, 0), null_score)], key=lambda item: -item[1])  # stable: of equals a span is first
        weights = np.exp(np.array([score for _, score in ranked]) - ranked[0][1])
        candidates = tuple(
            Candidate(question.context[start:end], start, end, score, float(weight))
            for ((start, end), score), weight in zip(ranked, weights / weights.sum(), strict=True)
        )
        has_answer = null_score_diff <= null_threshold
        given = next(candidate for candidate in candidates if bool(candidate.text) == has_answer)
        answer = (given.text, given.start, given.end, given.probability)
        predictions.append(Prediction(question.id, *answer, candidates, null_score_diff))
    return predictions


def _best_spans(
    window: Window, start: np.ndarray, end: np.ndarray, context: str, n: int, longest: int
) -> dict[tuple[int, int], float]:
    """The scores of the window's n best spans by (start, end) in characters, white space at their ends left out."""
    inside = [position for position, offset in enumerate(window.offsets) if offset is not None]
    longest = min(longest, len(inside))
    first, length = np.divmod(np.arange(len(inside) * longest), longest)  # all spans: by first token, then by length
    fits = first + length < len(inside)
    first, last = first[fits], (first + length)[fits]
    scores = start[inside][first] + end[inside][last]
    best: dict[tuple[int, int], float] = {}
    for span in np.argsort(-scores, kind="stable"):
        begin, finish = window.offsets[inside[first[span]]][0], window.offsets[inside[last[span]]][1]
        text = context[begin:finish]
        begin += len(text) - len(text.lstrip())
        if text.strip():  # several spans may share a text: tokens share characters, and some are white space
            best.setdefault((begin, begin + len(text.strip())), float(scores[span]))
        if len(best) == n:
            break
    return best


def _frame(tokenizer: Any, order: str, prompt: str) -> tuple[tuple[int, ...], ...]:
    """The token ids before the first of question and context, between the two, and after the second.

    plain      [bos] question \\n context [eos]; for an encoder [CLS] question [SEP] context [SEP]
    evidence   [bos] [INST] .. [/INST] [CRITERION] question [/CRITERION] [POST] context [/POST] [eos]

    "question-last" exchanges question and context. A plain row ends with a second line break if the tokenizer has no
    eos. The marks of the evidence prompt are tokens of their own (`labkit.models.special_tokens.add_tokens`).
    """
    for name, value, choices in (("order", order, ORDERS), ("prompt", prompt, PROMPTS)):
        if value not in choices:
            raise DataError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
    bos, eos = map(tuple, row_ends(tokenizer))
    if prompt == "plain":
        separator = tuple(between(tokenizer) or tokenizer("\n", add_special_tokens=False)["input_ids"])
        if not separator:
            raise DataError("the tokenizer has no token for a line break, which separates question and context")
        return bos, separator, eos or separator
    vocabulary = tokenizer.get_vocab()
    if missing := [mark for mark in MARKS if mark not in vocabulary]:
        raise DataError(f"the tokenizer does not know {', '.join(missing)}: add them with special_tokens.add_tokens")
    inst, inst_end, *marks = (vocabulary[mark] for mark in MARKS)  # two of the post, then two of the criterion
    first, first_end, second, second_end = marks if order == "question-last" else marks[2:] + marks[:2]
    instruction = tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
    return (*bos, inst, *instruction, inst_end, first), (first_end, second), (second_end, *eos)


def _tokenized(tokenizer: Any, texts: Sequence[str]) -> dict[str, tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]:
    """The ids and offsets of each text, tokenized once even if many questions share it.

    "<eos>" in a text is text, so it cannot end a row.
    """
    distinct = list(dict.fromkeys(texts))
    encoded = tokenizer(
        distinct, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True,
        truncation=False, padding=False, verbose=False,
    )  # fmt: skip
    pairs = zip(map(tuple, encoded["input_ids"]), map(tuple, encoded["offset_mapping"]), strict=True)
    return dict(zip(distinct, pairs, strict=True))


def _answer_tokens(question: Question, offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The first and the last token of the context with a character of the first answer; white space does not count."""
    if not question.answers:
        return None
    answer = question.answers[0]
    start, end = answer.end - len(answer.text.lstrip()), answer.start + len(answer.text.rstrip())
    inside = [token for token, (begin, finish) in enumerate(offsets) if begin < end and finish > start]
    return (inside[0], inside[-1]) if inside else None
