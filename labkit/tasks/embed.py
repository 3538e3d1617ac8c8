"""Text embeddings: one vector per text, three ways to train them, and what they are worth.

    lm = labkit.load("gpt2-mini", task=Head("embedding", pooling="mean", backbone_dropout=0.1))
    rows = pair_features(lm.tokenizer, pairs)            # or text_features(lm.tokenizer, texts): unsupervised SimCSE
    train(lm.model, shuffled(rows, seed), collate=Collator(pad_id(lm.tokenizer)), loss=loss, ...)
    encode(lm.model, lm.tokenizer, ["The ferry left.", "The boat has gone."])     # (2, width)
    scores(lm.model, lm.tokenizer, held_out)

What the data are decides the loss: pairs with a score are regressed on it; pairs without one, and plain texts, are told
apart from the other pairs of their batch (Gao et al. 2021, SimCSE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.datasets.examples import Labelled, Pair
from labkit.errors import DataError, HeadError, ObjectiveError
from labkit.tasks.classify import frame, padded, run_by_length
from labkit.tasks.embed_scores import (
    all_scored,
    anisotropy,
    group_retrieval,
    nearest,
    pair_retrieval,
    pair_scores,
    similarity_scores,
)
from labkit.tasks.lm import pad_id

__all__ = [
    "Collator", "Feature", "anisotropy", "cosine_regression", "encode", "group_retrieval", "in_batch_contrastive",
    "loss", "nearest", "pair_features", "pair_retrieval", "pair_scores", "rescaled", "scores", "similarity_scores",
    "text_features",
]  # fmt: skip


def encode(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int = 32,
    max_length: int = 256,
    instruction: str | None = None,
) -> Float[np.ndarray, "texts width"]:
    """The vector of every text, float32, in the order of the texts and independent of what else is in the batch.

    Args:
        instruction: put before every text as it stands ("query: "); the model is told what the vectors are for.
        max_length: in tokens, instruction, bos and eos included; what is longer is cut at the end of the text.

    Raises:
        DataError: an empty text, an instruction that fills `max_length`, or a text longer than the model's positions.
        HeadError: the model has no embedding head.
    """
    framed = _framed(tokenizer, texts, max_length)
    if instruction:
        [(alone, _)] = frame(tokenizer, [instruction], ["the instruction"], max_length)
        if len(alone) >= max_length:
            raise DataError(f"the instruction leaves no room for a text in a max_length of {max_length}")
        framed = _framed(tokenizer, [instruction + text for text in texts], max_length)
    rows = [ids for ids, _ in framed]
    found = run_by_length(model, rows, _vectors, pad_id=pad_id(tokenizer), batch_size=batch_size, what="encode")
    if not found:
        return np.zeros((0, model.config.get_text_config().hidden_size), np.float32)
    return torch.stack(found).numpy()


def _vectors(output: Any) -> Float[Tensor, "batch width"]:
    vectors = getattr(output, "pooler_output", None)
    if vectors is None:
        raise HeadError('the model gives no vectors; load it with task="embedding"')
    return vectors.float()


def _framed(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[tuple[list[int], int]]:
    return frame(tokenizer, texts, [f"text {i}" for i in range(len(texts))], max_length)


@dataclass(frozen=True)
class Feature:
    """The texts that belong together, as the model reads them.

    Attributes:
        sides: token ids of anchor and positive, perhaps of a hard negative; or of the two texts that have a score.
        example: which of the examples it is.
        score: how alike the two are, 0 to 1, or None.
        cut: how many tokens were left out, at the ends of its texts.
    """

    sides: list[list[int]]
    example: int
    score: float | None = None
    cut: int = 0


def pair_features(
    tokenizer: Any, pairs: Sequence[Pair], *, negatives: Sequence[str] | None = None, max_length: int = 256
) -> list[Feature]:
    """The rows of pairs: all with a score between 0 and 1, or all without one.

    Args:
        negatives: one text per pair that is near its first text in wording and not in meaning; only without scores.

    Raises:
        DataError: an empty text, a score outside 0 to 1 (`rescaled`), some pairs with a score and some without, or
            negatives that are not one per pair. Each names the pair.
    """
    scored = all_scored(pairs)
    for pair in pairs:
        if pair.score is not None and not 0 <= pair.score <= 1:
            raise DataError(f"pair {pair.id} has the score {pair.score:g}; scores go from 0 to 1, see rescaled()")
    columns = [[pair.first for pair in pairs], [pair.second for pair in pairs]]
    if negatives is not None:
        if scored:
            raise DataError("the pairs have scores, and a score is for two texts: give no negatives")
        if len(negatives) != len(pairs):
            raise DataError(f"{len(negatives)} negatives for {len(pairs)} pairs: give one for each")
        columns.append(list(negatives))
    names = [f"pair {pair.id}" for pair in pairs]
    sides = [frame(tokenizer, column, names, max_length) for column in columns]
    return [
        Feature([row for row, _ in each], i, pairs[i].score, sum(cut for _, cut in each))
        for i, each in enumerate(zip(*sides, strict=True))
    ]


def text_features(tokenizer: Any, texts: Sequence[str], *, max_length: int = 256) -> list[Feature]:
    """The rows of plain texts, each paired with itself: dropout makes the two vectors differ (unsupervised SimCSE)."""
    framed = _framed(tokenizer, texts, max_length)
    return [Feature([ids, ids], i, None, cut) for i, (ids, cut) in enumerate(framed)]


def rescaled(pairs: Sequence[Pair], low: float, high: float) -> list[Pair]:
    """The pairs with their scores brought from `low` to `high` to 0 to 1; STS-B's go from 0.0 to 5.0."""
    if not low < high:
        raise DataError(f"scores go from {low:g} to {high:g}: the first must be the lower")
    return [each if each.score is None else replace(each, score=(each.score - low) / (high - low)) for each in pairs]


class Collator:
    """Features as the training hands them over, {"row": k, "ids": Feature}, to one batch for one forward pass.

    input_ids, attention_mask: (sides * batch, seq), padded on the right; first all anchors, then all positives, then
    all negatives. sides: how many of those there are. texts: (sides, batch), equal numbers for equal texts.
    scores: (batch,), where the pairs have them.
    """

    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        found = [item["ids"] for item in items]
        kinds = {(len(each.sides), each.score is None) for each in found}
        if len(kinds) != 1:
            raise DataError("a batch mixes pairs with and without scores, or with and without negatives")
        [(sides, plain)] = kinds
        rows = [each.sides[side] for side in range(sides) for each in found]
        input_ids, attention_mask = padded(rows, self.pad_id)
        numbers: dict[tuple[int, ...], int] = {}
        texts = torch.tensor([numbers.setdefault(tuple(row), len(numbers)) for row in rows])
        batch = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "sides": torch.tensor(sides),
            "texts": texts.view(sides, len(found)),
        }
        return batch if plain else batch | {"scores": torch.tensor([each.score for each in found], dtype=torch.float32)}


def loss(model: nn.Module, batch: dict[str, Tensor], *, temperature: float = 0.05, symmetric: bool = False) -> Tensor:
    """The loss of a batch of `Collator`: `cosine_regression` with scores, `in_batch_contrastive` without.

    With several processes, each has the negatives of its own batch only.

    Raises:
        ObjectiveError: each text is paired with itself (plain texts) and no dropout makes the two differ; or a batch of
            one pair, which has nothing to be told apart from.
    """
    texts = batch["texts"]
    if "scores" not in batch and torch.equal(texts[0], texts[1]):
        _require_dropout(model)
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    first, second, *others = _vectors(output).unflatten(0, (int(batch["sides"]), -1))  # each (batch, width)
    if "scores" in batch:
        return cosine_regression(first, second, batch["scores"])
    negatives = others[0] if others else None
    return in_batch_contrastive(first, second, negatives, temperature, symmetric=symmetric, texts=texts)


def in_batch_contrastive(
    anchors: Float[Tensor, "batch width"],
    positives: Float[Tensor, "batch width"],
    negatives: Float[Tensor, "batch width"] | None = None,
    temperature: float = 0.05,
    *,
    symmetric: bool = False,
    texts: Int[Tensor, "sides batch"] | None = None,
) -> Float[Tensor, ""]:
    """InfoNCE: every anchor is to choose its own positive among all positives, and all negatives, of the batch.

    The mean of -log softmax(cosine / temperature) at the right one, in nats (Gao et al. 2021, equations 1 and 5).

    Args:
        symmetric: the mean of this and of its mirror image, where every positive chooses among the anchors.
        texts: equal numbers for equal texts, as `Collator` gives them; a text equal to a row's own anchor or positive
            is then no negative of that row. Without it, every other column is one.
    """
    if temperature <= 0:
        raise ObjectiveError(f"the temperature is {temperature}; it must be positive")
    if len(anchors) < 2 and negatives is None:
        raise ObjectiveError("a batch of one pair has no other to be told apart from: set the batch size to 2 or more")
    sides = [nn.functional.normalize(s.float(), dim=-1) for s in (anchors, positives, negatives) if s is not None]
    if texts is None:  # all different
        texts = torch.arange(len(sides) * len(anchors), device=anchors.device).view(len(sides), -1)
    found = _info_nce(sides[0] @ torch.cat(sides[1:]).T / temperature, texts, texts[1:].flatten())
    if not symmetric:
        return found
    return (found + _info_nce(sides[1] @ sides[0].T / temperature, texts, texts[0])) / 2


def cosine_regression(
    first: Float[Tensor, "batch width"], second: Float[Tensor, "batch width"], scores: Float[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Mean squared difference between the cosine of each pair and its score."""
    return nn.functional.mse_loss(nn.functional.cosine_similarity(first.float(), second.float(), dim=-1), scores)


def _info_nce(
    logits: Float[Tensor, "batch columns"], texts: Int[Tensor, "sides batch"], of_columns: Int[Tensor, " columns"]
) -> Float[Tensor, ""]:
    """Cross-entropy of column i in row i, without other columns that hold the text of the row's anchor or positive."""
    same = (of_columns == texts[0][:, None]) | (of_columns == texts[1][:, None])
    logits = logits.masked_fill(same.fill_diagonal_(False), float("-inf"))
    return nn.functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def _require_dropout(model: nn.Module) -> None:
    for module in model.modules():
        share = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", None)
        if module.training and isinstance(share, float) and share > 0:
            return
    raise ObjectiveError(
        "plain texts are told apart by dropout alone (unsupervised SimCSE), and this model has none at work: load it "
        'with Head("embedding", backbone_dropout=0.1), and put it in training mode'
    )


def scores(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Pair] | Sequence[Labelled],
    *,
    batch_size: int = 32,
    max_length: int = 256,
    instruction: str | None = None,
) -> dict[str, Any]:
    """How good the model's vectors are: `pair_scores` for pairs, `group_retrieval` by label for labelled texts.

    Both with `anisotropy`.
    """
    if not examples:
        raise DataError("there are no examples to score")
    options = {"batch_size": batch_size, "max_length": max_length, "instruction": instruction}
    if isinstance(examples[0], Pair):
        all_scored(examples)  # an error, if it is one, before the work
        texts = [each.first for each in examples] + [each.second for each in examples]
        vectors = encode(model, tokenizer, texts, **options)
        half = len(examples)
        return pair_scores(examples, list(zip(vectors[:half], vectors[half:], strict=True)))
    texts = [each.text for each in examples]
    vectors = encode(model, tokenizer, texts, **options)
    different = np.unique(np.asarray(texts, dtype=object), return_index=True)[1]
    found = group_retrieval(vectors, [each.label for each in examples])
    return found | {"anisotropy": anisotropy(vectors[different])}
