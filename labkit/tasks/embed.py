"""Text embeddings: one vector per text, two losses to train them, and scores of the vectors.

The data decide the loss. Pairs with a score are regressed on it. For pairs without a score, the model learns to tell
each pair from the others of its batch (Gao et al. 2021, SimCSE). Only the directions of vectors are scored.
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
from labkit.errors import DataError, ModelError, TrainingError, needs_extra
from labkit.run_folder import Log, silent
from labkit.tasks.base import Task, pad_id, padded, run_by_length
from labkit.tasks.classify import frame
from labkit.tasks.options import EmbedOptions

SAME = 1e-6  # cosines that differ by less differ by rounding only
WORDS = 4096  # hashed words of the baseline


@dataclass(frozen=True)
class Row:
    """The token ids of two texts that belong together, and how alike they are, 0 to 1, or None."""

    first: list[int]
    second: list[int]
    example: int
    score: float | None = None

    @property
    def ids(self) -> list[int]:
        """The tokens of both texts, which are what the row costs."""
        return self.first + self.second


@dataclass(frozen=True)
class Embedded:
    """The vectors of the two texts of a pair, each (width,)."""

    id: str
    first: np.ndarray
    second: np.ndarray


@dataclass(frozen=True)
class Embedding(EmbedOptions, Task):
    name, inputs, split_by_tokens = "embed", ("first", "second"), False

    def metric(self, examples: Sequence[Pair]) -> str:
        return "mean_reciprocal_rank" if examples[0].score is None else "spearman"

    def rows(self, tokenizer: Any, examples: Sequence[Pair], labels: Sequence[str], log: Log = silent) -> list[Row]:
        scored = examples[0].score is not None
        for pair in examples:
            if (pair.score is not None) != scored or (scored and not 0 <= pair.score <= 1):
                raise DataError(f"pair {pair.id} has the score {pair.score}: score all pairs from 0 to 1, or none")
        texts = [text for pair in examples for text in (pair.first, pair.second)]
        names = [f"pair {pair.id}" for pair in examples for _ in range(2)]
        ids = frame(tokenizer, texts, names, self.max_length, log)
        return [Row(*ids[2 * k : 2 * k + 2], example=k, score=pair.score) for k, pair in enumerate(examples)]

    def sequences(self, row: Row) -> Sequence[Sequence[int]]:
        return [row.first, row.second]

    def collate(self, rows: Sequence[Row], pad_id: int) -> dict[str, Tensor]:
        """input_ids, attention_mask: (2 * batch, seq), padded on the right, first all first texts, then all second.

        labels: (batch,) scores; or for pairs without a score (2, batch), equal numbers for equal texts.
        """
        texts = [row.first for row in rows] + [row.second for row in rows]
        if rows[0].score is not None:
            labels = torch.tensor([row.score for row in rows], dtype=torch.float32)
        else:
            labels = torch.tensor([texts.index(ids) for ids in texts]).view(2, -1)
        return padded(texts, pad_id) | {"labels": labels}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """With scores the mean squared difference of cosine and score, else `in_batch_contrastive`."""
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        first, second = self.read(output).chunk(2)  # each (batch, width)
        if batch["labels"].ndim == 1:
            return nn.functional.mse_loss(nn.functional.cosine_similarity(first, second), batch["labels"])
        return in_batch_contrastive(first, second, texts=batch["labels"])

    def read(self, output: Any) -> Float[Tensor, "batch width"]:
        """The vectors of the texts."""
        if getattr(output, "pooler_output", None) is None:
            raise ModelError('the model gives no vectors; load it with task="embedding"')
        return output.pooler_output.float()

    def decode(self, examples, rows, outputs, labels) -> list[Embedded]:
        pairs = zip(rows, outputs[::2], outputs[1::2], strict=True)
        return [Embedded(examples[row.example].id, first.numpy(), second.numpy()) for row, first, second in pairs]

    def score(self, examples: Sequence[Pair], predictions: Sequence[Embedded]) -> dict[str, Any]:
        """Pairs with scores: `spearman` and `pearson` correlation with the cosines, NaN if all cosines are equal.

        Pairs without: `pair_retrieval`. Both: `n`.
        """
        from scipy.stats import pearsonr, spearmanr

        first, second = (np.stack([getattr(pair, side) for pair in predictions]) for side in ("first", "second"))
        if examples[0].score is None:
            return pair_retrieval(first, second, examples)
        given = [pair.score for pair in examples]
        if len(set(given)) < 2:
            raise DataError(f"all {len(given)} pairs have the score {given[0]}: there is nothing to correlate with")
        cosines = (_unit(first) * _unit(second)).sum(-1)
        spearman = pearson = float("nan")
        if np.ptp(cosines) > SAME:
            spearman, pearson = (float(correlation(cosines, given)[0]) for correlation in (spearmanr, pearsonr))
        return {"spearman": spearman, "pearson": pearson, "n": len(given)}

    def baselines(self, train: Sequence[Pair], examples: Sequence[Pair]) -> dict[str, float]:
        """`bag_of_words`: vectors of TF-IDF over hashed words, which score what shared words alone achieve."""
        with needs_extra():
            from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
            from sklearn.pipeline import make_pipeline

        counter = HashingVectorizer(n_features=WORDS, alternate_sign=False, token_pattern=r"\w+")
        texts = [pair.first for pair in examples] + [pair.second for pair in examples]
        vectors = make_pipeline(counter, TfidfTransformer()).fit_transform(texts).toarray()
        vectors = np.pad(vectors, ((0, 0), (0, 1)), constant_values=1e-3)  # a text without a word has a direction too
        pairs = zip(examples, *np.split(vectors, 2), strict=True)
        predictions = [Embedded(pair.id, first, second) for pair, first, second in pairs]
        return {"bag_of_words": self.score(examples, predictions)[self.metric(examples)]}

    def record(self, prediction: Embedded) -> dict[str, Any]:
        """The cosine of the two vectors."""
        return {"id": prediction.id, "similarity": float(_unit(prediction.first) @ _unit(prediction.second))}

    def example(self, id: str, texts: dict[str, str], labels: Sequence[str]) -> Pair:
        return Pair(id, texts["first"], texts["second"])


def encode(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], *, batch_size: int = 32, max_length: int = 256
) -> Float[np.ndarray, "texts width"]:
    """The vector of every text, float32, in the order of the texts and independent of what else is in the batch.

    A text of more than `max_length` tokens, bos and eos included, is cut at its end.
    """
    ids = frame(tokenizer, texts, [f"text {number}" for number in range(len(texts))], max_length)
    vectors = run_by_length(model, ids, Embedding().read, pad_id=pad_id(tokenizer), batch_size=batch_size)
    return torch.stack(vectors).numpy()


def in_batch_contrastive(
    anchors: Float[Tensor, "batch width"],
    positives: Float[Tensor, "batch width"],
    temperature: float = 0.05,
    texts: Int[Tensor, "2 batch"] | None = None,
) -> Float[Tensor, ""]:
    """InfoNCE: every anchor is to choose its own positive among all positives of the batch.

    The mean of -log softmax(cosine / temperature) at the right one, in nats (Gao et al. 2021, equation 1).

    `texts`: equal numbers for equal texts, anchors and positives. A text equal to a row's own anchor or positive is
    then not a negative of that row. Without it, every other column is one.
    """
    if len(anchors) < 2:
        raise TrainingError("a batch of one pair has no other pair to compare with: set the batch size to 2 or more")
    anchors, positives = (nn.functional.normalize(side.float(), dim=-1) for side in (anchors, positives))
    logits = anchors @ positives.T / temperature  # (batch, batch)
    if texts is not None:  # leave out other columns that hold the text of the row's anchor or positive
        same = (texts[1] == texts[0][:, None]) | (texts[1] == texts[1][:, None])
        logits = logits.masked_fill(same.fill_diagonal_(False), float("-inf"))
    return nn.functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def pair_retrieval(
    first: Float[np.ndarray, "pairs width"], second: Float[np.ndarray, "pairs width"], pairs: Sequence[Pair]
) -> dict[str, Any]:
    """Is the second text of each pair the nearest to its first among the second texts of all pairs?

    `accuracy_at_1`; `mean_reciprocal_rank` of the nearest partner; `n`, the queries that have a partner other than
    themselves. If a text is in several pairs, all its partners are right. A text that is as near as a partner counts as
    nearer, so that a model that gives all texts one vector has an accuracy of 0.
    """
    number = {text: k for k, text in enumerate(dict.fromkeys([p.second for p in pairs] + [p.first for p in pairs]))}
    firsts, seconds = (np.array([number[getattr(pair, side)] for pair in pairs]) for side in ("first", "second"))
    candidates = np.empty((seconds.max() + 1, second.shape[1]), second.dtype)  # each second text once
    candidates[seconds] = second
    partners = np.zeros((len(number), len(candidates)), dtype=bool)
    partners[firsts, seconds] = True
    itself = firsts[:, None] == np.arange(len(candidates))
    right = partners[firsts] & ~itself
    cosines = _unit(first) @ _unit(candidates).T  # (pairs, candidates)
    nearest_right = np.where(right, cosines, -np.inf).max(1, keepdims=True)
    nearer = (cosines >= nearest_right - SAME) & ~right & ~itself  # a tie counts against
    ranks = 1 + nearer.sum(1)[right.any(1)]
    if not len(ranks):
        raise DataError(f"{len(pairs)} pairs, and no text has a partner other than itself: nothing to retrieve")
    return {
        "accuracy_at_1": float((ranks == 1).mean()),
        "mean_reciprocal_rank": float((1 / ranks).mean()),
        "n": len(ranks),
    }


def nearest(
    vectors: Float[np.ndarray, "texts width"], query_vector: Float[np.ndarray, " width"], k: int
) -> list[tuple[int, float]]:
    """The numbers of the `k` nearest vectors and their cosines, best first; of two equally near, the earlier first."""
    cosines = _unit(vectors) @ _unit(query_vector)
    return [(int(number), float(cosines[number])) for number in np.argsort(-cosines, kind="stable")[:k]]


def _unit(vectors: np.ndarray) -> np.ndarray:
    """The vectors with length 1, in float64."""
    return vectors / np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
