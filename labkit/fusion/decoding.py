"""From next-token scores to answers: greedy, sampled or beam search, the same for every engine and method.

The scores of a question do not depend on the other questions of its batch. Each question draws its own random numbers,
seeded by its number in the call, so sampled answers do not depend on the batch size either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.errors import DataError
from labkit.fusion.engine import Engine
from labkit.fusion.methods import combine


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen, and where an answer ends.

    Attributes:
        max_new_tokens: limit of the length. stop: texts at which an answer ends; they are not part of it.
        first_line: an answer also ends with its first line that is not empty.
        do_sample: draw tokens, with a generator seeded by `seed` and the question's number; otherwise take the best.
        temperature, top_k, top_p: of sampling, as in transformers; None: not used.
        num_beams: above 1: beam search, without sampling. length_penalty: its exponent of the length.

    Raises:
        DataError: an invalid value, or settings that exclude each other.
    """

    max_new_tokens: int = 20
    stop: tuple[str, ...] = ()
    first_line: bool = False
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**31:
            raise DataError(f"the seed is {self.seed}; it must be from 0 to {2**31 - 1:,}")
        for name in ("max_new_tokens", "num_beams"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if "" in self.stop:
            raise DataError("one of the stop texts is empty: every answer would be empty")
        if self.do_sample and self.num_beams > 1:
            raise DataError("beam search does not sample: give do_sample=True or num_beams, not both")
        for name in ("temperature", "top_k", "top_p"):
            value = getattr(self, name)
            if value is not None and not self.do_sample:
                raise DataError(f"{name}={value} only applies to sampling: give do_sample=True too")
            if value is not None and not 0 < value <= (1 if name == "top_p" else float("inf")):
                raise DataError(f"{name} is {value}; it must be above 0{' and at most 1' * (name == 'top_p')}")


@dataclass
class Answer:
    """Tokens of one answer, its text up to a stop, and the sum of the log-probabilities of its tokens."""

    tokens: list[int]
    text: str
    log_prob: float


def decode(
    engine: Engine, rule: str | None, tokenizer: Any, ends: set[int], settings: Decoding, numbers: Sequence[int]
) -> tuple[list[Answer], Tensor]:
    """Answers to the prompts of `engine`, and the scores of the first token, (questions, vocab).

    Args:
        rule: by which the rows of a question agree (`labkit.fusion.methods.combine`). ends: ids that end an answer.
        numbers: of the questions, for their random numbers.
    """
    first = combine(rule, engine.start(), engine.counts)
    text = AnswerText(tokenizer, ends, settings)
    if settings.num_beams > 1:
        return _beam_search(engine, rule, first, text, settings), first
    choose = _sampler(settings, numbers) if settings.do_sample else lambda scores: scores.argmax(-1)
    answers = [Answer([], "", 0.0) for _ in engine.counts]
    unfinished, scores = set(range(len(answers))), first
    for length in range(1, settings.max_new_tokens + 1):
        chosen = choose(scores)  # (questions,)
        log_probs = scores.log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()
        for number, token in enumerate(chosen.tolist()):
            if number in unfinished:
                answers[number].tokens.append(token)
                answers[number].log_prob += log_probs[number]
                if text.ends(answers[number].tokens):
                    unfinished.discard(number)
        if not unfinished or length == settings.max_new_tokens:
            break
        scores = _next_scores(engine, rule, chosen)
    return [Answer(answer.tokens, text.of(answer.tokens), answer.log_prob) for answer in answers], first


def _next_scores(engine: Engine, rule: str | None, tokens: Tensor) -> Tensor:
    """(questions,) -> (questions, vocab): all rows of a question read its token."""
    rows = torch.tensor(engine.counts, device=tokens.device)
    return combine(rule, engine.step(tokens.repeat_interleave(rows)), engine.counts)


def _sampler(settings: Decoding, numbers: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """A function (questions, vocab) -> (questions,)."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = [TemperatureLogitsWarper(float(settings.temperature))] if settings.temperature is not None else []
    warpers += [TopKLogitsWarper(settings.top_k)] if settings.top_k is not None else []
    warpers += [TopPLogitsWarper(settings.top_p)] if settings.top_p is not None else []
    generators = [torch.Generator().manual_seed(settings.seed * 1_000_003 + number) for number in numbers]

    def draw(scores: Tensor) -> Tensor:
        for warper in warpers:
            scores = warper(None, scores)
        probs = scores.softmax(-1).double().cpu()
        drawn = [torch.multinomial(row, 1, generator=own) for row, own in zip(probs, generators, strict=True)]
        return torch.cat(drawn).to(scores.device)

    return draw


class AnswerText:
    """The text of an answer's tokens, and whether it has ended."""

    def __init__(self, tokenizer: Any, ends: set[int], settings: Decoding):
        self.tokenizer, self.end_ids, self.settings = tokenizer, ends, settings

    def of(self, tokens: Sequence[int]) -> str:
        text = self.tokenizer.decode([t for t in tokens if t not in self.end_ids], skip_special_tokens=True)
        return text[: self._end_of(text)]

    def ends(self, tokens: Sequence[int]) -> bool:
        if tokens[-1] in self.end_ids:
            return True
        if not self.settings.stop and not self.settings.first_line:
            return False
        return self._end_of(self.tokenizer.decode(list(tokens), skip_special_tokens=True)) is not None

    def _end_of(self, text: str) -> int | None:
        """Where the answer ends in `text`; None if it goes on."""
        places = [text.find(stop) for stop in self.settings.stop if stop in text]
        if self.settings.first_line and (line := re.search(r"\S.*?(?=\n)", text)):
            places.append(line.end())
        return min(places, default=None)


def _beam_search(engine: Engine, rule: str | None, first: Tensor, text: AnswerText, settings: Decoding) -> list[Answer]:
    """For each question the best answer by log-probability / length ** length_penalty.

    A question is done when as many answers have ended as there are beams, and no open beam has a higher score than the
    worst of them (transformers' `early_stopping=False`).
    """
    width, questions = settings.num_beams, len(engine.counts)
    engine.select([question for question in range(questions) for _ in range(width)])
    beams = [[Answer([], "", 0.0)] for _ in range(questions)]
    ended: list[list[Answer]] = [[] for _ in range(questions)]
    done = [False] * questions

    def score(answer: Answer) -> float:
        return answer.log_prob / len(answer.tokens) ** settings.length_penalty

    log_probs = first.log_softmax(-1).repeat_interleave(width, 0)  # (questions * beams, vocab)
    for length in range(1, settings.max_new_tokens + 1):
        parents, tokens = [], []  # of the rows of the next step
        for question in range(questions):
            chosen = [(0, 0)]  # (beam, token); the rows of a question that is done are read and ignored
            if not done[question]:
                own = log_probs[question * width :][: len(beams[question])]
                totals = own + own.new_tensor([beam.log_prob for beam in beams[question]])[:, None]  # (beams, vocab)
                best = totals.flatten().topk(min(2 * width, totals.numel()))
                extended: list[tuple[int, Answer]] = []
                for rank, (total, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
                    beam, token = divmod(place, own.shape[1])
                    answer = Answer([*beams[question][beam].tokens, token], "", total)
                    if text.ends(answer.tokens):
                        ended[question] += [answer] if rank < width else []
                    elif len(extended) < width:
                        extended.append((beam, answer))
                ended[question] = sorted(ended[question], key=score, reverse=True)[:width]
                beams[question] = [answer for _, answer in extended]
                full = len(ended[question]) == width
                done[question] = not extended or (full and score(extended[0][1]) <= score(ended[question][-1]))
                chosen = [(beam, answer.tokens[-1]) for beam, answer in extended] or chosen
            chosen += chosen[:1] * (width - len(chosen))
            parents += [question * width + beam for beam, _ in chosen]
            tokens += [token for _, token in chosen]
        if all(done) or length == settings.max_new_tokens:
            break
        engine.select(parents)
        log_probs = _next_scores(engine, rule, torch.tensor(tokens)).log_softmax(-1)
    candidates = [ends + ([] if over else open_) for ends, open_, over in zip(ended, beams, done, strict=True)]
    best_of = [max(answers, key=score) for answers in candidates]
    return [Answer(answer.tokens, text.of(answer.tokens), answer.log_prob) for answer in best_of]
