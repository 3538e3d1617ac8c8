"""Answer questions from several paraphrases each: one function, one result, whatever the method and the engine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from labkit.decoder.running import evaluating
from labkit.errors import FusionError
from labkit.fusion.combine import combine
from labkit.fusion.decoding import Answer, Decoding, decode
from labkit.fusion.engine import Engine, fusable_decoder, require_room
from labkit.fusion.fast import FastEngine
from labkit.fusion.layout import Prompts, Weights, prompts, token_ids
from labkit.fusion.methods import Method, method_named
from labkit.fusion.reference import ReferenceEngine
from labkit.models import Loaded

ENGINES = {
    "fast": "segments read as one batch, keys and values joined once, ordinary decoding over them",
    "reference": "each row in one piece under FlexAttention",
    "dense": "each row in one piece under a 4-D mask",
    "cacheless": "as dense, and all is read again for each token, as the public experiment does",
}


@dataclass(frozen=True, eq=False)
class FusionResult:
    """Answers, one per question, and how they came about.

    Attributes:
        texts: up to a stop. tokens: as generated, an end token among them. log_probs: of the tokens, summed.
        first_logits: (questions, vocab), what the first generated token was chosen by, on the CPU; for "majority-vote",
            whose paraphrases answer apart, their mean.
        votes: for "majority-vote", how often each answer was given; otherwise None.
        seconds: of reading and writing, loading and tokenising not among them.
    """

    texts: list[str]
    tokens: list[list[int]]
    log_probs: list[float]
    first_logits: Tensor
    method: str
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
    separator: str = "\n",
    weights: Sequence[Weights] | None = None,
    layer: int | None = None,
    max_new_tokens: int = 20,
    stop: str | Sequence[str] = (),
    first_line: bool = False,
    do_sample: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    seed: int = 0,
    batch_size: int = 16,
) -> FusionResult:
    """Answer each question from its paraphrases; the model is as it was afterwards, also after an exception.

        fusion.generate(lm, [["Where is Paris?", "Paris is in which country?"]], prefix="...", cue="Answer:")

    Args:
        questions: for each its paraphrases; there may be more of one than of another.
        method: a name of `METHODS`. engine: one of `ENGINES`; the result names what was used.
        prefix: seen by all paraphrases and read once: examples, instructions. cue: sees all paraphrases; the answer
            follows it. separator: ends each paraphrase and belongs to it.
        weights: for the method "weighted": positive numbers, one for each paraphrase.
        layer: for the method "hidden-average": from 0; by default the middle one.
        stop: texts that end an answer. first_line: so does the end of its first line that is not empty. The other
            settings are those of transformers' `generate`.
        batch_size: questions at once.

    Raises:
        FusionError: an unknown method or engine; a question without paraphrases, or an empty one; settings that do not
            go together; a prompt beyond the model's positions or the memory; a model that cannot be fused.
    """
    if not isinstance(lm, Loaded):
        raise FusionError(f"give what labkit.load gives, model and tokenizer together, not a {type(lm).__name__}")
    chosen = method_named(method)
    if engine not in ENGINES:
        raise FusionError(f"the fusion engine is {engine!r}; choose one of {', '.join(ENGINES)}")
    if batch_size < 1:
        raise FusionError(f"batch_size is {batch_size} questions; it must be at least 1")
    decoder = fusable_decoder(lm.model)
    averaged_layer = _layer(chosen, layer, len(decoder.layers))
    begins, ids, cue_ids = token_ids(lm.tokenizer, questions, prefix, cue, separator)
    ends, stops = _ends(lm, stop)
    how = Decoding(
        max_new_tokens, stops, first_line, do_sample, temperature, top_k, top_p, num_beams, length_penalty, seed
    )
    whole = prompts(chosen, begins, ids, cue_ids, weights)
    require_room(lm.model, whole, batch_size, max_new_tokens, num_beams)
    answers, first, votes, name, seconds = [], [], [], "", 0.0
    with evaluating(lm.model):
        for begin in range(0, len(ids), batch_size):
            some = slice(begin, begin + batch_size)
            batch = prompts(chosen, begins, ids[some], cue_ids, None if weights is None else weights[some])
            began = time.perf_counter()
            with torch.no_grad():
                numbers = range(begin, begin + len(batch.counts))
                if chosen.votes:
                    places = [(n, row) for n, count in zip(numbers, batch.counts, strict=True) for row in range(count)]
                    numbers = [number + 1_000_000_007 * row for number, row in places]  # each draws for itself
                apart = replace(batch, counts=(1,) * len(batch.rows)) if chosen.votes else batch
                made = engine_named(engine, lm.model, apart, averaged_layer)
                said, scores = decode(made, chosen.combine, lm.tokenizer, ends, how, numbers)
            seconds += time.perf_counter() - began
            name = made.name
            if chosen.votes:
                said, tallies = _counted(said, batch.counts, how)
                scores, votes = combine("average", scores, batch.counts), votes + tallies
            answers += said
            first.append(scores.cpu())
    return FusionResult(
        [each.text for each in answers], [each.tokens for each in answers], [each.log_prob for each in answers],
        torch.cat(first), method, name, seconds, votes or None,
    )  # fmt: skip


def engine_named(name: str, model: Any, batch: Prompts, averaged_layer: int | None) -> Engine:
    if name == "fast":
        return FastEngine(model, batch, averaged_layer)
    rendering = "flex" if name == "reference" else "dense"
    return ReferenceEngine(model, batch, averaged_layer, rendering=rendering, cached=name != "cacheless")


def _counted(said: Sequence[Answer], counts: Sequence[int], how: Decoding) -> tuple[list[Answer], list[dict[str, int]]]:
    """The winner of each question, and how often each of its answers was given; question i has counts[i] of `said`."""
    elected, begin = [], 0
    for count in counts:
        elected.append(_elected(said[begin : begin + count], how))
        begin += count
    return [winner for winner, _ in elected], [tally for _, tally in elected]


def _elected(said: Sequence[Answer], how: Decoding) -> tuple[Answer, dict[str, int]]:
    """The likeliest of the answers that were given most often, compared as scores compare them.

    Where the caller says at which texts an answer ends, all of it counts, otherwise its first line.
    """
    from labkit.fusion.scores import comparable, first_line

    by_text: dict[str, list[Answer]] = defaultdict(list)
    for answer in said:
        by_text[comparable(answer.text if how.stop else first_line(answer.text))].append(answer)

    def likeliest(answers: Sequence[Answer]) -> Answer:
        return max(answers, key=lambda answer: answer.log_prob / len(answer.tokens))

    most = max(map(len, by_text.values()))
    winners = [likeliest(answers) for answers in by_text.values() if len(answers) == most]
    return likeliest(winners), {text: len(answers) for text, answers in by_text.items()}


def _ends(lm: Loaded, stop: str | Sequence[str]) -> tuple[set[int], tuple[str, ...]]:
    """The ids at which an answer ends, and the texts; a stop that is a special token is an id, as it has no text."""
    special = dict(zip(lm.tokenizer.all_special_tokens, lm.tokenizer.all_special_ids, strict=True))
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    named = getattr(lm.model.generation_config, "eos_token_id", None)
    ids = {*(named if isinstance(named, list) else [named]), lm.tokenizer.eos_token_id}
    ids |= {special[text] for text in texts if text in special}
    return {number for number in ids if number is not None}, tuple(text for text in texts if text not in special)


def _layer(method: Method, layer: int | None, layers: int) -> int | None:
    if not method.averages_states:
        if layer is not None:
            raise FusionError(f"the method {method.name!r} averages no layer: give layer with 'hidden-average' only")
        return None
    chosen = layers // 2 if layer is None else layer
    if not 0 <= chosen < layers:
        raise FusionError(f"there is no layer {layer}: the model has layers 0 to {layers - 1}")
    return chosen
