"""`generate`: answer questions from several paraphrases each, with any method and engine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from labkit.decoder.limits import require_positions
from labkit.decoder.running import evaluating
from labkit.errors import DataError, require_one_of
from labkit.fusion.decoding import Answer, combine, decode
from labkit.fusion.engine import Engine, FastEngine, ReferenceEngine, fusable_decoder
from labkit.fusion.layout import Prompts, prompts, token_ids
from labkit.fusion.methods import ENGINES, METHODS, VOTE
from labkit.fusion.scores import comparable, first_line
from labkit.models import Loaded


@dataclass(frozen=True, eq=False)
class FusionResult:
    """Answers, one per question.

    Attributes:
        texts: up to a stop. tokens: as generated, including an end token.
        first_logits: (questions, vocab), the scores that chose the first generated token, on the CPU; for
            "majority-vote", their mean over the paraphrases.
        engine: the path that ran, such as "reference (flex, compiled)".
        seconds: of reading and generating, without loading and tokenising.
        votes: for "majority-vote", how often each answer was given; otherwise None.
    """

    texts: list[str]
    tokens: list[list[int]]
    first_logits: Tensor
    engine: str
    seconds: float
    votes: list[dict[str, int]] | None = None


def generate(
    lm: Loaded,
    questions: Sequence[Sequence[str]],
    method: str = "fuse",
    engine: str = "fast",
    *,
    prefix: str = "",
    cue: str = "Answer:",
    weights: Sequence[Sequence[float]] | None = None,
    layer: int | None = None,
    stop: str | Sequence[str] = (),
    max_new_tokens: int = 20,
    batch_size: int = 16,
    **decoding: Any,
) -> FusionResult:
    """Answer each question from its paraphrases. The model is not changed.

        fusion.generate(lm, [["Where is Paris?", "Paris is in which country?"]], prefix="...", cue="Answer:")

    Args:
        questions: for each question its paraphrases. method: a name of `METHODS`. engine: one of `ENGINES`.
        prefix: examples or instructions; all paraphrases attend to it. cue: attends to all paraphrases and precedes the
            answer.
        weights: for the method "weighted": positive numbers, one for each paraphrase.
        layer: for the method "hidden-average": from 0; by default the middle one.
        stop: texts that end an answer, or special tokens.
        batch_size: in questions; for "majority-vote" in paraphrases.
        decoding: first_line, num_beams and length_penalty (`labkit.fusion.decoding.decode`).

    Raises DataError or ModelError for invalid arguments, prompts beyond the model's positions, or a model that cannot
    be fused.
    """
    if not isinstance(lm, Loaded):
        raise DataError(f"give the result of labkit.load, model and tokenizer together, not a {type(lm).__name__}")
    require_one_of("the method", method, METHODS)
    require_one_of("the engine", engine, ENGINES)
    chosen, decoder = METHODS[method], fusable_decoder(lm.model)
    layers, averages_states = len(decoder.layers), method == "hidden-average"
    if batch_size < 1:
        raise DataError(f"batch_size is {batch_size} questions; it must be at least 1")
    if layer is not None and not (averages_states and 0 <= layer < layers):
        raise DataError(f"layer is {layer}; give it with 'hidden-average' only, from 0 to {layers - 1}")
    averaged_layer = (layers // 2 if layer is None else layer) if averages_states else None
    everything = prompts(chosen, *token_ids(lm.tokenizer, questions, prefix, cue), weights)
    special = dict(zip(lm.tokenizer.all_special_tokens, lm.tokenizer.all_special_ids, strict=True))
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    decoding |= {"stop": [text for text in stops if text not in special], "max_new_tokens": max_new_tokens}
    ends = {special[text] for text in stops if text in special}  # a special token has no text
    configured = getattr(lm.model.generation_config, "eos_token_id", None)
    ends |= {*(configured if isinstance(configured, list) else [configured]), lm.tokenizer.eos_token_id} - {None}
    last = max(int(row.positions.max()) for row in everything.rows) + len(everything.cue) + max_new_tokens
    cure = "use fewer or shorter paraphrases, fewer examples or new tokens, or a method that restarts positions"
    require_positions(last, decoder.config, refusal=DataError, cure=cure)
    counts, rule, votes = everything.counts, chosen.combine, None
    if chosen.combine == VOTE:  # each paraphrase is answered as a question
        everything, rule = replace(everything, questions=tuple((row,) for row in everything.rows)), None
    answers: list[Answer] = []
    first_scores, seconds = [], 0.0
    with evaluating(lm.model):
        for begin in range(0, len(everything.questions), batch_size):
            batch = replace(everything, questions=everything.questions[begin : begin + batch_size])
            began = time.perf_counter()
            reader = make_engine(engine, lm.model, batch, averaged_layer)
            written, scores = decode(reader, rule, lm.tokenizer, ends, **decoding)
            seconds += time.perf_counter() - began
            answers += written
            first_scores.append(scores.cpu())
    first_logits = torch.cat(first_scores)
    if chosen.combine == VOTE:
        rows = iter(answers)
        elections = [elect(list(islice(rows, count)), bool(decoding["stop"])) for count in counts]
        answers, votes = [winner for winner, _ in elections], [tally for _, tally in elections]
        first_logits = combine("average", first_logits, counts)
    texts, tokens = [answer.text for answer in answers], [list(answer.tokens) for answer in answers]
    return FusionResult(texts, tokens, first_logits, reader.name, seconds, votes)


def make_engine(name: str, model: Any, batch: Prompts, averaged_layer: int | None = None) -> Engine:
    """The engine of this name of `ENGINES`, for the prompts of `batch`."""
    return (FastEngine if name == "fast" else ReferenceEngine)(name, model, batch, averaged_layer)


def elect(answers: Sequence[Answer], whole: bool) -> tuple[Answer, dict[str, int]]:
    """The most probable of the most frequent answers, and how often each was given.

    Answers are compared as `labkit.fusion.scores` compares them: all of their text if `whole`, else the first line.
    """
    by_text: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_text[comparable(answer.text if whole else first_line(answer.text))].append(answer)
    most = max(map(len, by_text.values()))
    candidates = [answer for same in by_text.values() if len(same) == most for answer in same]
    winner = max(candidates, key=lambda answer: answer.log_prob / len(answer.tokens))
    return winner, {text: len(same) for text, same in by_text.items()}
