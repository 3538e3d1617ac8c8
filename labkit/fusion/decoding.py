"""From next-token scores to answers: greedy, sampled, beams; the same for every engine and method.

The scores of a question do not depend on the other questions of its batch. Drawn answers have random numbers of their
own for each question, by its number in the call, so they do not depend on the batch size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.errors import FusionError
from labkit.fusion.combine import combine
from labkit.fusion.engine import Engine


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen, and when an answer ends.

    Attributes:
        max_new_tokens: at most so many. stop: texts at which an answer ends; they are not part of it.
        first_line: an answer ends with the first of its lines that is not empty, too.
        do_sample: draw tokens, from a generator seeded with `seed` and the question's number; otherwise the best one.
        temperature, top_k, top_p: of drawing, as transformers means them; None: not used.
        num_beams: more than one: beam search, without drawing. length_penalty: its exponent of the length.

    Raises:
        FusionError: settings that have no meaning, alone or together.
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
            raise FusionError(f"the seed is {self.seed}; it must be from 0 to {2**31 - 1:,}")
        if self.max_new_tokens < 1:
            raise FusionError(f"max_new_tokens is {self.max_new_tokens}; an answer needs at least one token")
        if self.num_beams < 1:
            raise FusionError(f"num_beams is {self.num_beams}; it must be at least 1")
        if "" in self.stop:
            raise FusionError("an empty text was given as a stop: every answer would be empty")
        if self.do_sample and self.num_beams > 1:
            raise FusionError("beam search draws no tokens: give do_sample=True or num_beams, not both")
        drawn = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        for name, value in drawn.items():
            if value is not None and not self.do_sample:
                raise FusionError(f"{name}={value} has no effect unless tokens are drawn: give do_sample=True too")
            if value is not None and not (0 < value <= 1 if name == "top_p" else value > 0):
                raise FusionError(
                    f"{name} is {value}; it must be above 0" + (" and at most 1" if name == "top_p" else "")
                )


@dataclass
class Answer:
    """Tokens of one answer, its text up to a stop, and the sum of the log-probabilities of its tokens."""

    tokens: list[int]
    text: str
    log_prob: float


def decode(
    engine: Engine, rule: str | None, tokenizer: Any, ends: set[int], how: Decoding, numbers: Sequence[int]
) -> tuple[list[Answer], Tensor]:
    """Answers to the prompts of `engine`, and the scores of the first token, (questions, vocab).

    Args:
        rule: by which the rows of a question agree (`labkit.fusion.combine`). ends: ids at which an answer ends.
        numbers: of the questions, for their random numbers.
    """
    first = combine(rule, engine.start(), engine.counts)
    text = _Text(tokenizer, ends, how)
    if how.num_beams > 1:
        return _beams(engine, rule, first, text, how), first
    choose = _sampler(how, numbers) if how.do_sample else lambda scores: scores.argmax(-1)
    answers: list[Answer] = [Answer([], "", 0.0) for _ in engine.counts]
    going, scores = set(range(len(answers))), first
    for length in range(1, how.max_new_tokens + 1):
        chosen = choose(scores)
        log_probs = scores.log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()
        for number, token in enumerate(chosen.tolist()):
            if number in going:
                answers[number].tokens.append(token)
                answers[number].log_prob += log_probs[number]
                if text.ends(answers[number].tokens):
                    going.discard(number)
        if not going or length == how.max_new_tokens:
            break
        rows = torch.tensor(engine.counts, device=chosen.device)
        scores = combine(rule, engine.step(chosen.repeat_interleave(rows)), engine.counts)
    return [Answer(each.tokens, text.of(each.tokens), each.log_prob) for each in answers], first


def _sampler(how: Decoding, numbers: Sequence[int]) -> Callable[[Tensor], Tensor]:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = [TemperatureLogitsWarper(float(how.temperature))] if how.temperature is not None else []
    warpers += [TopKLogitsWarper(how.top_k)] if how.top_k is not None else []
    warpers += [TopPLogitsWarper(how.top_p)] if how.top_p is not None else []
    generators = [torch.Generator().manual_seed(how.seed * 1_000_003 + number) for number in numbers]

    def draw(scores: Tensor) -> Tensor:
        for warper in warpers:
            scores = warper(None, scores)
        probs = scores.softmax(-1).double().cpu()
        drawn = [torch.multinomial(row, 1, generator=own) for row, own in zip(probs, generators, strict=True)]
        return torch.cat(drawn).to(scores.device)

    return draw


class _Text:
    """The text of tokens, cut at a stop; tokens that a text is made of are never made from it."""

    def __init__(self, tokenizer: Any, ends: set[int], how: Decoding):
        self.tokenizer, self.end_ids, self.how = tokenizer, ends, how

    def of(self, tokens: Sequence[int]) -> str:
        text = self.tokenizer.decode([t for t in tokens if t not in self.end_ids], skip_special_tokens=True)
        return text[: self._cut(text)]

    def ends(self, tokens: Sequence[int]) -> bool:
        if tokens[-1] in self.end_ids:
            return True
        if not self.how.stop and not self.how.first_line:
            return False
        return self._cut(self.tokenizer.decode(list(tokens), skip_special_tokens=True)) is not None

    def _cut(self, text: str) -> int | None:
        """Where the answer ends in `text`; None if it goes on."""
        places = [text.find(stop) for stop in self.how.stop if stop in text]
        if self.how.first_line and (line := re.search(r"\S.*?(?=\n)", text)):
            places.append(line.end())
        return min(places, default=None)


def _beams(engine: Engine, rule: str | None, first: Tensor, text: _Text, how: Decoding) -> list[Answer]:
    """Beam search, question by question, over log-probability / length ** length_penalty.

    A question is done when as many answers have ended as there are beams and none that goes on could score higher
    than the worst of them by its present sum (transformers' `early_stopping=False`).
    """
    width, questions = how.num_beams, len(engine.counts)
    engine.select([question for question in range(questions) for _ in range(width)])
    going: list[list[Answer]] = [[Answer([], "", 0.0)] for _ in range(questions)]
    ended: list[list[Answer]] = [[] for _ in range(questions)]
    done = [False] * questions

    def worth(answer: Answer) -> float:
        return answer.log_prob / len(answer.tokens) ** how.length_penalty

    log_probs = first.log_softmax(-1).repeat_interleave(width, 0)
    for length in range(1, how.max_new_tokens + 1):
        last, parents, tokens = length == how.max_new_tokens, [], []
        for question in range(questions):
            if done[question]:  # its rows go along, and nobody reads them
                parents += [question * width] * width
                tokens += [0] * width
                continue
            beams = going[question]
            own = log_probs[question * width : question * width + len(beams)]
            sums = own + own.new_tensor([beam.log_prob for beam in beams])[:, None]
            best = sums.flatten().topk(min(2 * width, sums.numel()))
            kept: list[tuple[int, Answer]] = []
            for rank, (total, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
                beam, token = divmod(place, own.shape[1])
                answer = Answer([*beams[beam].tokens, token], "", total)
                if text.ends(answer.tokens):
                    if rank < width:
                        ended[question].append(answer)
                elif len(kept) < width:
                    kept.append((beam, answer))
            ended[question] = sorted(ended[question], key=worth, reverse=True)[:width]
            going[question] = [answer for _, answer in kept]
            full = len(ended[question]) >= width
            done[question] = not kept or (full and worth(kept[0][1]) <= worth(ended[question][-1]))
            if last and not done[question]:
                ended[question] += going[question]
            chosen = [(beam, answer.tokens[-1]) for beam, answer in kept] or [(0, 0)]
            chosen += chosen[:1] * (width - len(chosen))
            parents += [question * width + beam for beam, _ in chosen]
            tokens += [token for _, token in chosen]
        if last or all(done):
            break
        engine.select(parents)
        rows = torch.tensor(engine.counts)
        step = torch.tensor(tokens).repeat_interleave(rows)
        log_probs = combine(rule, engine.step(step), engine.counts).log_softmax(-1)
    best_of = [max(answers, key=worth) for answers in ended]
    return [Answer(each.tokens, text.of(each.tokens), each.log_prob) for each in best_of]
