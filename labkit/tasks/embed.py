"""Text embeddings: one vector per text, two losses to train them, and scores of the vectors.

    task = get("embed", pooling="mean")
    lm = labkit.load("gpt2-mini", task=task.head((), backbone_dropout=0.1))
    encode(lm.model, lm.tokenizer, ["The ferry left.", "The boat has gone."])     # (2, width)
    task.score(pairs, task.predict(lm.model, lm.tokenizer, pairs, ()))

The data decide the loss. Pairs with a score are regressed on it. For pairs without a score, the model learns to tell
each pair from the others of its batch (Gao et al. 2021, SimCSE). Only the directions of vectors are scored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.datasets.examples import Pair
from labkit.errors import DataError, ModelError, TrainingError
from labkit.models.heads import Head
from labkit.tasks.base import Task, needs_train_extra, pad_id, padded, run_by_length
from labkit.tasks.classify import frame
from labkit.tasks.options import EmbedOptions

CONSTANT = 1e-6  # cosines that differ by less differ by rounding only
WORDS = 4096  # hashed words of the baseline
CHUNK = 1024  # queries whose cosines with all texts are in memory together


@dataclass(frozen=True)
class Row:
    """Two texts that belong together, for the model.

    Attributes:
        first, second: their token ids.
        example: the number of the pair.
        score: how alike the two are, 0 to 1, or None.
    """

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

    @property
    def similarity(self) -> float:
        """The cosine of the two vectors."""
        return float((_unit(self.first[None]) * _unit(self.second[None])).sum())


@dataclass(frozen=True)
class Embedding(EmbedOptions, Task):
    name, head_task, inputs, split_by_tokens = "embed", "embedding", ("first", "second"), False

    def length(self, row: Row) -> int:
        return max(len(row.first), len(row.second))

    def head(self, labels: Sequence[str], **changes: Any) -> Head:
        return super().head(labels, **{"pooling": self.pooling} | changes)

    def metric(self, examples: Sequence[Pair]) -> str:
        return "mean_reciprocal_rank" if examples[0].score is None else "spearman"

    def rows(
        self,
        tokenizer: Any,
        examples: Sequence[Pair],
        labels: Sequence[str],
        say: Callable[[str], None] = lambda text: None,
    ) -> list[Row]:
        for pair in examples:
            if (pair.score is None) != (examples[0].score is None):
                both = f"{examples[0].id} and {pair.id}"
                raise DataError(f"of the pairs {both} only one has a score; score all pairs, or none")
            if pair.score is not None and not 0 <= pair.score <= 1:
                raise DataError(f"pair {pair.id} has the score {pair.score:g}; rescale the scores to the range 0 to 1")
        texts, names = _sides(examples), [f"pair {pair.id}" for pair in examples]
        ids = [ids for ids, _ in frame(tokenizer, texts, names * 2, self.max_length, say)]
        n = len(examples)
        return [Row(ids[number], ids[n + number], number, pair.score) for number, pair in enumerate(examples)]

    def collate(self, rows: Sequence[Row], pad_id: int) -> dict[str, Tensor]:
        """input_ids, attention_mask: (2 * batch, seq), padded on the right, first all first texts, then all second.

        labels: (batch,) scores; or for pairs without a score (2, batch), equal numbers for equal texts.
        """
        texts = [row.first for row in rows] + [row.second for row in rows]
        if rows[0].score is not None:
            labels = torch.tensor([row.score for row in rows], dtype=torch.float32)
        else:
            numbers: dict[tuple[int, ...], int] = {}
            labels = torch.tensor([numbers.setdefault(tuple(ids), len(numbers)) for ids in texts]).view(2, -1)
        return padded(texts, pad_id) | {"labels": labels}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """`cosine_regression` with scores, `in_batch_contrastive` without.

        With several processes, the negatives of a pair are those of its own process.
        """
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        first, second = _vectors(output).chunk(2)  # each (batch, width)
        if batch["labels"].ndim == 1:
            return cosine_regression(first, second, batch["labels"])
        return in_batch_contrastive(first, second, texts=batch["labels"])

    def predict(
        self,
        model: nn.Module,
        tokenizer: Any,
        examples: Sequence[Pair],
        labels: Sequence[str],
        *,
        rows: Sequence[Row] | None = None,
        batch_size: int = 16,
    ) -> list[Embedded]:
        """As in `Task.predict`; the scores of the pairs are not used."""
        if rows is None:
            rows = self.rows(tokenizer, [replace(pair, score=None) for pair in examples], labels)
        ids = [row.first for row in rows] + [row.second for row in rows]
        vectors = run_by_length(model, ids, _vectors, pad_id=pad_id(tokenizer), batch_size=batch_size)
        n = len(rows)
        return [
            Embedded(examples[row.example].id, first.numpy(), second.numpy())
            for row, first, second in zip(rows, vectors[:n], vectors[n:], strict=True)
        ]

    def score(self, examples: Sequence[Pair], predictions: Sequence[Embedded]) -> dict[str, Any]:
        """`similarity_scores` of pairs with scores, `pair_retrieval` of pairs without; `anisotropy` of the texts."""
        first, second = (np.stack([getattr(pair, side) for pair in predictions]) for side in ("first", "second"))
        by_text = dict(zip(_sides(examples), [*first, *second], strict=True))
        if examples[0].score is None:
            scores = pair_retrieval(first, second, examples)
        else:
            scores = similarity_scores(first, second, [pair.score for pair in examples])
        return scores | {"anisotropy": anisotropy(np.stack(list(by_text.values())))}

    def baselines(self, train: Sequence[Pair], examples: Sequence[Pair]) -> dict[str, float]:
        """`bag_of_words`: vectors of TF-IDF over hashed words, which score what shared words alone achieve."""
        with needs_train_extra():
            from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer

        texts, n = _sides(examples), len(examples)
        counts = HashingVectorizer(n_features=WORDS, alternate_sign=False, token_pattern=r"\w+").transform(texts)
        vectors = TfidfTransformer().fit_transform(counts).toarray()
        vectors = np.hstack([vectors, np.full((2 * n, 1), 1e-3)])  # a text without a word has a direction too
        pairs = zip(examples, vectors[:n], vectors[n:], strict=True)
        predictions = [Embedded(pair.id, first, second) for pair, first, second in pairs]
        return {"bag_of_words": self.score(examples, predictions)[self.metric(examples)]}

    def record(self, prediction: Embedded) -> dict[str, Any]:
        return {"id": prediction.id, "similarity": prediction.similarity}

    def example(self, id: str, texts: dict[str, str], labels: Sequence[str]) -> Pair:
        return Pair(id, texts["first"], texts["second"])


def encode(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], *, batch_size: int = 32, max_length: int = 256
) -> Float[np.ndarray, "texts width"]:
    """The vector of every text, float32, in the order of the texts and independent of what else is in the batch.

    Args:
        max_length: in tokens, bos and eos included; a longer text is cut at its end.

    Raises:
        DataError: an empty text. ModelError: the model has no embedding head.
    """
    names = [f"text {number}" for number in range(len(texts))]
    ids = [ids for ids, _ in frame(tokenizer, texts, names, max_length)]
    vectors = run_by_length(model, ids, _vectors, pad_id=pad_id(tokenizer), batch_size=batch_size)
    return torch.stack(vectors).numpy()


def in_batch_contrastive(
    anchors: Float[Tensor, "batch width"],
    positives: Float[Tensor, "batch width"],
    temperature: float = 0.05,
    texts: Int[Tensor, "2 batch"] | None = None,
) -> Float[Tensor, ""]:
    """InfoNCE: every anchor is to choose its own positive among all positives of the batch.

    The mean of -log softmax(cosine / temperature) at the right one, in nats (Gao et al. 2021, equation 1).

    Args:
        texts: equal numbers for equal texts, anchors and positives. A text equal to a row's own anchor or positive is
            then not a negative of that row. Without it, every other column is one.

    Raises:
        TrainingError: a batch of one pair, which has no negatives.
    """
    if len(anchors) < 2:
        raise TrainingError("a batch of one pair has no other pair to compare with: set the batch size to 2 or more")
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


def similarity_scores(
    first: Float[np.ndarray, "pairs width"], second: Float[np.ndarray, "pairs width"], given: Sequence[float]
) -> dict[str, Any]:
    """`spearman` and `pearson` correlation of the cosines with the given scores, and `n`.

    Both are NaN if all cosines are equal, because then a correlation is not defined.

    Raises:
        DataError: fewer than two different scores.
    """
    from scipy.stats import pearsonr, spearmanr

    if len(set(given)) < 2:
        raise DataError(f"{len(given)} pairs with {len(set(given))} different scores: nothing to correlate with")
    cosines = (_unit(first) * _unit(second)).sum(-1)
    if np.ptp(cosines) < CONSTANT:
        return {"spearman": float("nan"), "pearson": float("nan"), "n": len(given)}
    spearman, pearson = spearmanr(cosines, given).statistic, pearsonr(cosines, given).statistic
    return {"spearman": float(spearman), "pearson": float(pearson), "n": len(given)}


def group_retrieval(vectors: Float[np.ndarray, "texts width"], groups: Sequence[str]) -> dict[str, Any]:
    """Is the nearest other text one of the same group?

    `accuracy_at_1`; `mean_reciprocal_rank` of the first text of the same group among all others; `n`, the texts that
    were queries; `n_alone`, those that were not, because no other text is in their group. A text of another group that
    is equally near counts as nearer, so that a model that gives all texts one vector scores 0.
    """
    members = defaultdict(set)
    for number, group in enumerate(groups):
        members[group].add(number)
    return _retrieval(vectors, vectors, [members[group] for group in groups], range(len(groups)))


def pair_retrieval(
    first: Float[np.ndarray, "pairs width"], second: Float[np.ndarray, "pairs width"], pairs: Sequence[Pair]
) -> dict[str, Any]:
    """Is the second text of each pair the nearest to its first among the second texts of all pairs?

    The same numbers as `group_retrieval`. If a text is in several pairs, all its partners are right. A text is never
    compared with itself.
    """
    candidates = {pair.second: vector for pair, vector in zip(pairs, second, strict=True)}  # each text once
    numbers = {text: number for number, text in enumerate(candidates)}
    partners = defaultdict(set)
    for pair in pairs:
        partners[pair.first].add(numbers[pair.second])
    texts = [pair.first for pair in pairs]
    return _retrieval(
        first, np.stack(list(candidates.values())), [partners[t] for t in texts], [numbers.get(t) for t in texts]
    )


def anisotropy(vectors: Float[np.ndarray, "texts width"]) -> float:
    """Mean cosine between different texts: 0 for directions spread evenly, near 1 for a narrow cone (Ethayarajh 2019).

    A diagnostic, not a score: the order within a narrow cone can still be good.
    """
    n = len(vectors)
    if n < 2:
        raise DataError(f"{n} vectors: a cosine between different texts needs two")
    total = _unit(vectors).sum(0)  # |sum|^2 is the sum of all cosines, those of the n texts with themselves included
    return float((total @ total - n) / (n * (n - 1)))


def nearest(
    vectors: Float[np.ndarray, "texts width"], query_vector: Float[np.ndarray, " width"], k: int
) -> list[tuple[int, float]]:
    """The numbers of the `k` nearest vectors and their cosines, best first; of two equally near, the earlier first."""
    cosines = _unit(vectors) @ _unit(query_vector[None])[0]
    return [(int(number), float(cosines[number])) for number in np.argsort(-cosines, kind="stable")[:k]]


def _retrieval(
    queries: np.ndarray, candidates: np.ndarray, partners: Sequence[set[int]], own: Sequence[int | None]
) -> dict[str, Any]:
    """Scores of the ranks of each query's nearest partner.

    Args:
        partners: for each query the numbers of the right candidates. own: the number of the query itself or None.
    """
    queries, candidates, ranks = _unit(queries), _unit(candidates), []
    for start in range(0, len(queries), CHUNK):
        for query, cosines in enumerate(queries[start : start + CHUNK] @ candidates.T, start):
            if right := list(partners[query] - {own[query]}):
                others = np.delete(cosines, right if own[query] is None else [*right, own[query]])
                nearer = others >= cosines[right].max() - CONSTANT  # a tie counts against
                ranks.append(1 + int(nearer.sum()))
    if not ranks:
        raise DataError(f"{len(queries)} texts, and none has another that belongs to it: nothing to retrieve")
    return {
        "accuracy_at_1": float((np.array(ranks) == 1).mean()),
        "mean_reciprocal_rank": float((1 / np.array(ranks)).mean()),
        "n": len(ranks),
        "n_alone": len(queries) - len(ranks),
    }


def _sides(pairs: Sequence[Pair]) -> list[str]:
    """All first texts, then all second texts."""
    return [pair.first for pair in pairs] + [pair.second for pair in pairs]


def _unit(vectors: np.ndarray) -> np.ndarray:
    """The vectors with length 1, in float64."""
    vectors = vectors.astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    if bad := np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0))).tolist():
        raise DataError(f"vector {bad[0]} is zero or not finite, so it has no direction")
    return vectors / lengths


def _vectors(output: Any) -> Float[Tensor, "batch width"]:
    vectors = getattr(output, "pooler_output", None)
    if vectors is None:
        raise ModelError('the model gives no vectors; load it with task="embedding"')
    return vectors.float()
