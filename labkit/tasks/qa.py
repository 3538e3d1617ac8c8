"""Extractive question answering: rows for a model, and spans of the context from its start and end logits.

A context that is too long for one row is split into overlapping windows. The target "no answer" is (null, null), where
null is the row's last token. BERT uses the first token, but in a causal model only the last one attends to both the
question and the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit.datasets.evidence import INSTRUCTION, MARKS
from labkit.datasets.examples import Question
from labkit.errors import DataError, ModelError, require_one_of
from labkit.models.special_tokens import between, row_ends
from labkit.run_folder import Log, silent
from labkit.tasks import qa_scores
from labkit.tasks.base import Task, padded, tokens_of, tokens_over, window_starts
from labkit.tasks.options import QaOptions

ORDERS = ("question-first", "question-last")
PROMPTS = ("plain", "evidence")
ALWAYS_ANSWER = 1e9  # a threshold that no null score exceeds; finite, so that it can be stored as JSON
N_BEST = 20  # spans that share the probability


@dataclass(frozen=True)
class Window:
    """One row: a question and a part of its context.

    Attributes:
        offsets: for each token (start, end) in the characters of the whole context, None outside the context. A token
            may include the space before its word, and several tokens may share one character.
        start, end: the first and the last token of the answer; both `null` if the window does not contain all of it.
        null: the position that stands for "no answer".
    """

    ids: Sequence[int]
    example: int
    offsets: Sequence[tuple[int, int] | None]
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
    """The answer to one question, one of `n_best`: the best spans and "no answer", by descending score.

    `null_score_diff`: score of "no answer" minus that of the best span; above the threshold there is no answer.
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


@dataclass(frozen=True)
class QuestionAnswering(QaOptions, Task):
    """Find the span of the context that answers the question, or predict that there is none.

    If `null_threshold` is None, `tuned` chooses it on the dev set: every question is answered if all questions of the
    dev set have an answer; otherwise it is the threshold with the best F1, which is an optimistic score there. Without
    a threshold, predictions use 0, or answer every question if all of them have an answer.
    """

    name, inputs = "qa", ("question", "context")

    def __post_init__(self) -> None:
        require_one_of("order", self.order, ORDERS)
        require_one_of("prompt", self.prompt, PROMPTS)
        if not np.isfinite(self.null_threshold or 0.0):
            raise DataError(f"null_threshold is {self.null_threshold}; give a finite number")

    def metric(self, examples: Sequence[Question]) -> str:
        choose = self.null_threshold is None and not all(question.answers for question in examples)
        return "best_f1" if choose else "f1"

    def rows(self, tokenizer: Any, examples: Sequence[Question], labels: Any, log: Log = silent) -> list[Window]:
        """All windows of the first question, then those of the second, ...; the target is a question's first answer.

        A question of more than half of `max_length` is cut at its end. Windows start `doc_stride` tokens apart.
        """
        opening, middle, closing = _frame(tokenizer, self.order, self.prompt)
        queries = tokens_of(tokenizer, [question.question for question in examples])
        contexts = tokens_of(tokenizer, [question.context for question in examples])
        limit, rows, lost = self.max_length // 2, [], 0
        texts = zip(examples, queries, contexts, strict=True)
        for number, (question, (query, _), (context, offsets)) in enumerate(texts):
            before, after = opening + query[:limit] + middle, closing
            if self.order == "question-last":
                before, after = opening, middle + query[:limit] + closing
            room = self.max_length - len(before) - len(after)
            if room < 1:
                raise DataError(
                    f"max_length is {self.max_length}: the row of question {question.id!r} has "
                    f"{len(before) + len(after)} tokens without its context; increase max_length"
                )
            if not any(question.context[start:end].strip() for start, end in offsets):
                raise DataError(f"the context of question {question.id!r} has no word for this tokenizer")
            answer, contained = range(0), False  # its tokens, without white space at its ends
            if question.answers:
                start, text = question.answers[0].start, question.answers[0].text
                answer = tokens_over(offsets, start + len(text) - len(text.lstrip()), start + len(text.rstrip()))
            for first in window_starts(len(context), room, self.doc_stride):
                ids = before + context[first : first + room] + after
                start = end = null = len(ids) - 1
                if answer and first <= answer[0] and answer[-1] < first + room:
                    start, end = (token + len(before) - first for token in (answer[0], answer[-1]))
                    contained = True
                in_context = [None] * len(before) + offsets[first : first + room] + [None] * len(after)
                rows.append(Window(ids, number, in_context, start, end, null))
            lost += bool(question.answers) and not contained
        if cut := sum(len(query) > limit for query, _ in queries):
            log(f"{cut:,} of {len(examples):,} questions were cut to {limit} tokens")
        if lost:
            log(f"{lost:,} answers are in no window whole; a larger max_length or a smaller doc_stride would keep more")
        return rows

    def collate(self, rows: Sequence[Window], pad_id: int) -> dict[str, Tensor]:
        """As in `Task.collate`; `labels` (batch, 2) are the first and the last token of each answer."""
        targets = torch.tensor([(row.start, row.end) for row in rows])
        return padded([row.ids for row in rows], pad_id) | {"labels": targets}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The mean of the cross-entropies of the start and of the end, in nats."""
        start, end = batch["labels"].unbind(1)  # (batch,) each
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return model(**inputs, start_positions=start, end_positions=end).loss

    def read(self, output: Any) -> Tensor:
        """The start and end logits, (batch, 2, seq)."""
        if "start_logits" not in output:
            raise ModelError("the model has no start and end logits; load it with task='question-answering'")
        return torch.stack([output.start_logits, output.end_logits], dim=1).float()

    def decode(self, examples, rows, outputs, labels) -> list[Prediction]:
        threshold = self.null_threshold
        if threshold is None:
            threshold = ALWAYS_ANSWER if all(question.answers for question in examples) else 0.0
        logits = zip(*(logits.numpy() for logits in outputs), strict=True)  # of the starts, of the ends
        return decode(rows, *logits, examples, max_answer_tokens=self.max_answer_tokens, null_threshold=threshold)

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
        golds = [[answer.text for answer in question.answers] for question in examples]
        overlap = [qa_scores.f1(qa_scores.lexical_overlap(q), gold) for q, gold in zip(examples, golds, strict=True)]
        no_answer = [qa_scores.f1("", gold) for gold in golds]
        return {"no_answer": float(np.mean(no_answer)), "lexical_overlap": float(np.mean(overlap))}

    def record(self, prediction: Prediction) -> dict[str, Any]:
        return asdict(replace(prediction, n_best=prediction.n_best[:5]))

    def judge(self, examples: Sequence[Question], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
        return qa_scores.judged(examples, predictions)

    def example(self, id: str, texts: dict[str, str], labels: Sequence[str]) -> Question:
        return Question(id, texts["question"], texts["context"])


def windows(tokenizer: Any, questions: Sequence[Question], log: Log = silent, **options: Any) -> list[Window]:
    """The rows of `QuestionAnswering(**options)`."""
    return QuestionAnswering(**options).rows(tokenizer, questions, (), log)


def decode(
    windows: Sequence[Window],
    start_logits: Sequence[np.ndarray],
    end_logits: Sequence[np.ndarray],
    questions: Sequence[Question],
    *,
    max_answer_tokens: int = 30,
    null_threshold: float = 0.0,
) -> list[Prediction]:
    """The best answer to each question over all its windows, in the order of the questions.

    All spans of at most `max_answer_tokens` tokens that start and end in the context are compared, not only those of
    the best starts and ends. The score of a span is start logit + end logit; of equal scores the first in the text
    wins, then the shortest. "No answer" has its lowest score over all windows, as in BERT's script; it is the answer if
    this exceeds the score of the best span by more than `null_threshold`. Logits beyond a window are padding.
    """
    spans: list[dict[tuple[int, int], float]] = [{} for _ in questions]
    null_scores = [np.inf] * len(questions)
    for window, *logits in zip(windows, start_logits, end_logits, strict=True):
        question, best = questions[window.example], spans[window.example]
        start, end = (side[: len(window.ids)] for side in logits)
        if not np.isfinite(start + end).all():
            raise DataError(f"the logits of question {question.id!r} are not all finite")
        null_scores[window.example] = min(null_scores[window.example], float(start[window.null] + end[window.null]))
        for span, score in _best_spans(window, start, end, question.context, max_answer_tokens).items():
            best[span] = max(score, best.get(span, score))
    predictions = []
    for question, best, null_score in zip(questions, spans, null_scores, strict=True):
        ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:N_BEST]
        null_score_diff = null_score - ranked[0][1]
        ranked = sorted([*ranked, ((0, 0), null_score)], key=lambda item: -item[1])  # stable: of equals a span is first
        weights = np.exp([score - ranked[0][1] for _, score in ranked])
        candidates = tuple(
            Candidate(question.context[start:end], start, end, score, float(probability))
            for ((start, end), score), probability in zip(ranked, weights / weights.sum(), strict=True)
        )
        has_answer = null_score_diff <= null_threshold
        answer = next(candidate for candidate in candidates if bool(candidate.text) == has_answer)
        chosen = (answer.text, answer.start, answer.end, answer.probability)
        predictions.append(Prediction(question.id, *chosen, candidates, null_score_diff))
    return predictions


def _best_spans(
    window: Window, start: np.ndarray, end: np.ndarray, context: str, longest: int
) -> dict[tuple[int, int], float]:
    """The scores of the window's best spans by (start, end) in characters, white space at their ends left out."""
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
        if len(best) == N_BEST:
            break
    return best


def _frame(tokenizer: Any, order: str, prompt: str) -> tuple[list[int], list[int], list[int]]:
    """The token ids before the first of question and context, between the two, and after the second.

    plain      [bos] question \\n context [eos]; for an encoder [CLS] question [SEP] context [SEP]
    evidence   [bos] [INST] .. [/INST] [CRITERION] question [/CRITERION] [POST] context [/POST] [eos]

    "question-last" exchanges question and context. A plain row ends with a second line break if the tokenizer has no
    eos. The marks of the evidence prompt are tokens of their own (`labkit.models.special_tokens.add_tokens`).
    """
    bos, eos = row_ends(tokenizer)
    if prompt == "plain":
        separator = between(tokenizer) or tokenizer("\n", add_special_tokens=False)["input_ids"]
        if not separator:
            raise DataError("the tokenizer has no token for a line break, which separates question and context")
        return bos, separator, eos or separator
    vocabulary = tokenizer.get_vocab()
    if missing := [mark for mark in MARKS if mark not in vocabulary]:
        raise DataError(f"the tokenizer does not know {', '.join(missing)}: add them with special_tokens.add_tokens")
    inst, inst_end, *marks = (vocabulary[mark] for mark in MARKS)  # two of the post, then two of the criterion
    first, first_end, second, second_end = marks if order == "question-last" else marks[2:] + marks[:2]
    instruction = tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
    return [*bos, inst, *instruction, inst_end, first], [first_end, second], [second_end, *eos]
