"""From next-token scores to answers, by greedy or beam search, the same for every engine and method.

The scores of a question do not depend on the other questions of its batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.errors import DataError
from labkit.fusion.engine import Engine


@dataclass(frozen=True)
class Answer:
    """Tokens of one answer, its text up to a stop, the sum of their log-probabilities, and whether it has ended."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    log_prob: float = 0.0
    ended: bool = False


def decode(
    engine: Engine,
    rule: str | None,
    tokenizer: Any,
    ends: set[int],
    max_new_tokens: int = 20,
    stop: Sequence[str] = (),
    first_line: bool = False,
    num_beams: int = 1,
    length_penalty: float = 1.0,
) -> tuple[list[Answer], Tensor]:
    """Answers to the prompts of `engine`, and the scores of the first token, (questions, vocab).

    Greedy decoding is a search with one beam. The answer to a question is the one with the highest log-probability /
    length ** length_penalty. A question is done when as many answers have ended as there are beams, and no open beam
    has a higher score than the worst of them (transformers' `early_stopping=False`).

    Args:
        rule: how the rows of a question agree (`combine`). ends: ids that end an answer.
        stop: texts at which an answer ends; they are not part of it. first_line: an answer also ends with its first
            line that is not empty.

    Raises DataError for a number below 1 or an empty stop.
    """
    if max_new_tokens < 1 or num_beams < 1 or "" in stop:
        raise DataError("max_new_tokens and num_beams must be at least 1, and no stop text may be empty")

    def extended(answer: Answer, token: int, log_prob: float) -> Answer:
        tokens = (*answer.tokens, token)
        text = tokenizer.decode([token for token in tokens if token not in ends], skip_special_tokens=True)
        stops = [text.find(end) for end in stop if end in text]
        if first_line and (line := re.search(r"\S.*?(?=\n)", text)):
            stops.append(line.end())
        return Answer(tokens, text[: min(stops, default=None)], log_prob, bool(stops) or token in ends)

    def score(answer: Answer) -> float:
        return answer.log_prob / len(answer.tokens) ** length_penalty

    def extensions_of(question: int, log_probs: Tensor) -> list[tuple[int, Answer]]:
        """(beam, answer) that go on, the best first, from log_probs (beams, vocab); updates `ended`."""
        totals = log_probs + log_probs.new_tensor([answer.log_prob for answer in beams[question]])[:, None]
        best = totals.flatten().topk(min(2 * num_beams, totals.numel()))
        extensions: list[tuple[int, Answer]] = []
        for rank, (total, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            beam, token = divmod(place, totals.shape[1])
            answer = extended(beams[question][beam], token, total)
            if not answer.ended:
                extensions.append((beam, answer))
            elif rank < num_beams:
                ended[question].append(answer)
            if len(extensions) == num_beams:
                break
        done = ended[question] = sorted(ended[question], key=score, reverse=True)[:num_beams]
        is_done = len(done) == num_beams and bool(extensions) and score(extensions[0][1]) <= score(done[-1])
        return [] if is_done else extensions

    first = scores = combine(rule, engine.start(), engine.counts)
    beams = [[Answer()] for _ in engine.counts]  # of each question those that go on; none once it is done
    ended: list[list[Answer]] = [[] for _ in beams]
    rows = 1  # of each question in `scores`
    for length in range(1, max_new_tokens + 1):
        log_probs = scores.log_softmax(-1)  # (questions * rows, vocab)
        parents, tokens = [], []  # of the rows of the next step
        for question, answers in enumerate(beams):
            begin = question * rows
            extensions = extensions_of(question, log_probs[begin : begin + len(answers)]) if answers else []
            beams[question] = [answer for _, answer in extensions]
            going_on = [(begin + beam, answer.tokens[-1]) for beam, answer in extensions] or [(begin, 0)]  # 0: ignored
            going_on += going_on[:1] * (num_beams - len(going_on))
            parents += [row for row, _ in going_on]
            tokens += [token for _, token in going_on]
        if length == max_new_tokens or not any(beams):
            break
        if parents != list(range(len(scores))):
            engine.select(parents)
        rows = num_beams
        new = torch.tensor(tokens).repeat_interleave(torch.tensor(engine.counts))  # all rows of a question read it
        scores = combine(rule, engine.step(new), engine.counts)
    return [max(done + open_beams, key=score) for done, open_beams in zip(ended, beams, strict=True)], first


def combine(rule: str | None, logits: Tensor, counts: Sequence[int]) -> Tensor:
    """Logits (rows, vocab) -> scores (questions, vocab); question i has counts[i] rows. None: one row per question."""

    def combined(logits: Tensor) -> Tensor:
        """(rows, vocab) -> (vocab,)"""
        if rule == "average":
            return logits.mean(0)
        if rule == "max":
            return logits.amax(0)
        log_probs = logits.log_softmax(-1)
        confidence = log_probs.amax(-1, keepdim=True)  # (rows, 1), of the best token
        if rule == "confidence-average":
            return (confidence.softmax(0) * log_probs).sum(0)
        return (log_probs + confidence).amax(0)

    return logits if rule is None else torch.stack([combined(rows) for rows in logits.split(list(counts))])
