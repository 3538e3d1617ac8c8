"""`generate`: answer questions from several paraphrases each, with any method and engine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from labkit.decoder.running import evaluating
from labkit.errors import DataError
from labkit.fusion.decoding import Answer, Decoding, decode
from labkit.fusion.engine import Engine, FastEngine, fusable_decoder, require_room
from labkit.fusion.layout import Prompts, Weights, prompts, token_ids
from labkit.fusion.methods import combine, method_named
from labkit.fusion.reference import ReferenceEngine
from labkit.fusion.scores import comparable, first_line
from labkit.models import Loaded

ENGINES = {
    "fast": "segments read as one batch, keys and values joined once, ordinary decoding over them",
    "reference": "each row in one piece under FlexAttention",
    "dense": "each row in one piece under a 4-D mask",
    "cacheless": "as dense, but everything is read again for each token, as in the public experiment",
}


@dataclass(frozen=True, eq=False)
class FusionResult:
    """Answers, one per question.

    Attributes:
        texts: up to a stop. tokens: as generated, including an end token. log_probs: of the tokens, summed.
        first_logits: (questions, vocab), the scores that chose the first generated token, on the CPU; for
            "majority-vote", their mean over the paraphrases.
        votes: for "majority-vote", how often each answer was given; otherwise None.
        seconds: of reading and generating, without loading and tokenising.
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
    on_batch: Callable[[FusionResult], None] | None = None,
) -> FusionResult:
    """Answer each question from its paraphrases. The model is not changed.

        fusion.generate(lm, [["Where is Paris?", "Paris is in which country?"]], prefix="...", cue="Answer:")

    Args:
        questions: for each question its paraphrases; their number may differ.
        method: a name of `METHODS`. engine: one of `ENGINES`; the result names the one that was used.
        prefix: examples or instructions; all paraphrases attend to it. cue: attends to all paraphrases and precedes the
            answer. separator: appended to each paraphrase.
        weights: for the method "weighted": positive numbers, one for each paraphrase.
        layer: for the method "hidden-average": from 0; by default the middle one.
        stop: texts that end an answer. first_line: so does the end of its first line that is not empty. The other
            settings are those of transformers' `generate`.
        batch_size: in questions. on_batch: called with the result of each batch.

    Raises:
        DataError: an unknown method or engine; a question without paraphrases, or an empty one; settings that exclude
            each other; a prompt beyond the model's positions or the memory; a model that cannot be fused.
    """
    if not isinstance(lm, Loaded):
        raise DataError(f"give the result of labkit.load, model and tokenizer together, not a {type(lm).__name__}")
    chosen = method_named(method)
    require_engine(engine)
    if batch_size < 1:
        raise DataError(f"batch_size is {batch_size} questions; it must be at least 1")
    layers = len(fusable_decoder(lm.model).layers)
    if layer is not None and not chosen.averages_states:
        raise DataError(f"the method {method!r} averages no layer: give layer with 'hidden-average' only")
    if layer is not None and not 0 <= layer < layers:
        raise DataError(f"there is no layer {layer}: the model has layers 0 to {layers - 1}")
    averaged_layer = (layers // 2 if layer is None else layer) if chosen.averages_states else None
    prefix_ids, segments, cue_ids = token_ids(lm.tokenizer, questions, prefix, cue, separator)
    ends, stops = _ends(lm, stop)
    decoding = Decoding(
        max_new_tokens, stops, first_line, do_sample, temperature, top_k, top_p, num_beams, length_penalty, seed
    )
    require_room(
        lm.model, prompts(chosen, prefix_ids, segments, cue_ids, weights), batch_size, max_new_tokens, num_beams
    )
    results = []
    with evaluating(lm.model):
        for begin in range(0, len(segments), batch_size):
            part = slice(begin, begin + batch_size)
            batch = prompts(chosen, prefix_ids, segments[part], cue_ids, None if weights is None else weights[part])
            counts, votes = batch.counts, None
            numbers = list(range(begin, begin + len(counts)))
            if chosen.votes:  # each paraphrase is answered as a question, with random numbers of its own
                numbers = [
                    number + 1_000_000_007 * row for number, n in zip(numbers, counts, strict=True) for row in range(n)
                ]
                batch = replace(batch, counts=(1,) * len(batch.rows))
            began = time.perf_counter()
            reader = make_engine(engine, lm.model, batch, averaged_layer)
            answers, scores = decode(reader, chosen.combine, lm.tokenizer, ends, decoding, numbers)
            seconds = time.perf_counter() - began
            if chosen.votes:
                rows = [answers[sum(counts[:n]) :][:count] for n, count in enumerate(counts)]
                answers, votes = map(list, zip(*(_elect(row, bool(stops)) for row in rows), strict=True))
                scores = combine("average", scores, counts)
            texts, tokens, log_probs = map(list, zip(*((a.text, a.tokens, a.log_prob) for a in answers), strict=True))
            results.append(FusionResult(texts, tokens, log_probs, scores.cpu(), method, reader.name, seconds, votes))
            if on_batch is not None:
                on_batch(results[-1])
    return FusionResult(
        [text for result in results for text in result.texts],
        [tokens for result in results for tokens in result.tokens],
        [log_prob for result in results for log_prob in result.log_probs],
        torch.cat([result.first_logits for result in results]),
        method,
        results[0].engine,
        sum(result.seconds for result in results),
        [tally for result in results for tally in result.votes] if chosen.votes else None,
    )


def require_engine(name: str) -> None:
    if name not in ENGINES:
        raise DataError(f"the fusion engine is {name!r}; choose one of {', '.join(ENGINES)}")


def make_engine(name: str, model: Any, batch: Prompts, averaged_layer: int | None = None) -> Engine:
    """The engine of this name of `ENGINES`, for the prompts of `batch`."""
    if name == "fast":
        return FastEngine(model, batch, averaged_layer)
    rendering = "flex" if name == "reference" else "dense"
    return ReferenceEngine(model, batch, averaged_layer, rendering=rendering, cached=name != "cacheless")


def _elect(answers: Sequence[Answer], whole: bool) -> tuple[Answer, dict[str, int]]:
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


def _ends(lm: Loaded, stop: str | Sequence[str]) -> tuple[set[int], tuple[str, ...]]:
    """The ids and the texts that end an answer. A stop that is a special token is an id, because it has no text."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    special = dict(zip(lm.tokenizer.all_special_tokens, lm.tokenizer.all_special_ids, strict=True))
    configured = getattr(lm.model.generation_config, "eos_token_id", None)
    ids = {*(configured if isinstance(configured, list) else [configured]), lm.tokenizer.eos_token_id}
    ids |= {special[text] for text in texts if text in special}
    return ids - {None}, tuple(text for text in texts if text not in special)
