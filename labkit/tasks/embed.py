"""Text embeddings: one vector per text, and two ways to train them.

    lm = labkit.load("gpt2-mini", task=Head("embedding", pooling="mean", backbone_dropout=0.1))
    rows = pair_features(lm.tokenizer, pairs)
    train(lm.model, shuffled(rows, seed), collate=Collator(pad_id(lm.tokenizer)), loss=loss, ...)
    encode(lm.model, lm.tokenizer, ["The ferry left.", "The boat has gone."])     # (2, width)

The data decide the loss: pairs with a score are regressed on it; each pair without a score is told apart from the other
pairs of its batch (Gao et al. 2021, SimCSE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.datasets.examples import Pair
from labkit.errors import DataError, ModelError
from labkit.tasks.classify import frame, padded, run_by_length
from labkit.tasks.embed_scores import all_scored, anisotropy, group_retrieval, nearest  # noqa: F401
from labkit.tasks.lm import pad_id


def encode(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int = 32,
    max_length: int = 256,
) -> Float[np.ndarray, "texts width"]:
    """The vector of every text, float32, in the order of the texts and independent of what else is in the batch.

    Args:
        max_length: in tokens, bos and eos included; a longer text is cut at its end.

    Raises:
        DataError: an empty text, or one longer than the model's positions. ModelError: the model has no embedding head.
    """
    rows = [ids for ids, _ in frame(tokenizer, texts, [f"text {i}" for i in range(len(texts))], max_length)]
    found = run_by_length(model, rows, _vectors, pad_id=pad_id(tokenizer), batch_size=batch_size, what="encode")
    if not found:
        return np.zeros((0, model.config.get_text_config().hidden_size), np.float32)
    return torch.stack(found).numpy()


def _vectors(output: Any) -> Float[Tensor, "batch width"]:
    vectors = getattr(output, "pooler_output", None)
    if vectors is None:
        raise ModelError('the model gives no vectors; load it with task="embedding"')
    return vectors.float()


@dataclass(frozen=True)
class Feature:
    """The texts that belong together, as the model reads them.

    Attributes:
        sides: token ids of the two texts.
        example: which of the examples it is.
        score: how alike the two are, 0 to 1, or None.
        cut: how many tokens were left out, at the ends of its texts.
    """

    sides: list[list[int]]
    example: int
    score: float | None = None
    cut: int = 0


def pair_features(tokenizer: Any, pairs: Sequence[Pair], *, max_length: int = 256) -> list[Feature]:
    """The rows of pairs: all with a score between 0 and 1, or all without one.

    Raises:
        DataError: an empty text, a score outside 0 to 1, or some pairs with a score and some without. It names the
            pair.
    """
    all_scored(pairs)
    for pair in pairs:
        if pair.score is not None and not 0 <= pair.score <= 1:
            raise DataError(f"pair {pair.id} has the score {pair.score:g}; rescale the scores to the range 0 to 1")
    columns = [[pair.first for pair in pairs], [pair.second for pair in pairs]]
    names = [f"pair {pair.id}" for pair in pairs]
    sides = [frame(tokenizer, column, names, max_length) for column in columns]
    return [
        Feature([row for row, _ in each], i, pairs[i].score, sum(cut for _, cut in each))
        for i, each in enumerate(zip(*sides, strict=True))
    ]


class Collator:
    """Features as the training hands them over, {"row": k, "ids": Feature}, to one batch for one forward pass.

    input_ids, attention_mask: (2 * batch, seq), padded on the right; first all anchors, then all positives.
    texts: (2, batch), equal numbers for equal texts. scores: (batch,), where the pairs have them.
    """

    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        found = [item["ids"] for item in items]
        rows = [each.sides[side] for side in (0, 1) for each in found]
        input_ids, attention_mask = padded(rows, self.pad_id)
        numbers: dict[tuple[int, ...], int] = {}
        texts = torch.tensor([numbers.setdefault(tuple(row), len(numbers)) for row in rows])
        batch = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "texts": texts.view(2, len(found)),
        }
        if found[0].score is not None:
            batch["scores"] = torch.tensor([each.score for each in found], dtype=torch.float32)
        return batch


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a batch of `Collator`: `cosine_regression` with scores, `in_batch_contrastive` without.

    With several processes, each has the negatives of its own batch only.

    Raises:
        DataError: a batch of one pair without a score, which has no other pair to be told apart from.
    """
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    first, second = _vectors(output).chunk(2)  # each (batch, width)
    if "scores" in batch:
        return cosine_regression(first, second, batch["scores"])
    return in_batch_contrastive(first, second, texts=batch["texts"])


def in_batch_contrastive(
    anchors: Float[Tensor, "batch width"],
    positives: Float[Tensor, "batch width"],
    temperature: float = 0.05,
    texts: Int[Tensor, "2 batch"] | None = None,
) -> Float[Tensor, ""]:
    """InfoNCE: every anchor is to choose its own positive among all positives of the batch.

    The mean of -log softmax(cosine / temperature) at the right one, in nats (Gao et al. 2021, equation 1).

    Args:
        texts: equal numbers for equal texts, as `Collator` gives them; a text equal to a row's own anchor or positive
            is then no negative of that row. Without it, every other column is one.
    """
    if temperature <= 0:
        raise DataError(f"the temperature is {temperature}; it must be positive")
    if len(anchors) < 2:
        raise DataError("a batch of one pair has no other to be told apart from: set the batch size to 2 or more")
    anchors, positives = (nn.functional.normalize(side.float(), dim=-1) for side in (anchors, positives))
    logits = anchors @ positives.T / temperature  # (batch, batch)
    own = torch.arange(len(logits), device=logits.device)
    if texts is not None:  # leave out other columns that hold the text of the row's anchor or positive
        same = (texts[1] == texts[0][:, None]) | (texts[1] == texts[1][:, None])
        logits = logits.masked_fill(same.fill_diagonal_(False), float("-inf"))
    return nn.functional.cross_entropy(logits, own)


def cosine_regression(
    first: Float[Tensor, "batch width"], second: Float[Tensor, "batch width"], scores: Float[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Mean squared difference between the cosine of each pair and its score."""
    return nn.functional.mse_loss(nn.functional.cosine_similarity(first.float(), second.float(), dim=-1), scores)
