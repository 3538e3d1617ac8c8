"""What text vectors are worth: correlation with scores given, retrieval, and how narrow a cone they lie in.

All here is on plain arrays, (texts, width); lengths play no part, only directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from labkit.datasets.examples import Pair
from labkit.errors import DataError, ModelError

CONSTANT = 1e-6  # cosines that differ by less differ by rounding only
WORDS = 4096  # hashed words of the baseline
CHUNK = 1024  # queries whose cosines with all texts are in memory at once


def pair_scores(pairs: Sequence[Pair], vectors: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """`similarity_scores` of pairs that have scores, `pair_retrieval` of pairs that have none, from their two vectors.

    With them `anisotropy`, over the different texts.
    """
    scored = all_scored(pairs)

    first, second = np.stack([one for one, _ in vectors]), np.stack([two for _, two in vectors])
    if scored:
        found = similarity_scores(first, second, [pair.score for pair in pairs])
    else:
        found = pair_retrieval(first, second, pairs)
    by_text = dict(zip([p.first for p in pairs] + [p.second for p in pairs], [*first, *second], strict=True))
    return found | {"anisotropy": anisotropy(np.stack(list(by_text.values())))}


def bag_of_words(pairs: Sequence[Pair]) -> dict[str, Any]:
    """`pair_scores` of vectors of words (TF-IDF over hashed words, scikit-learn): what shared words alone achieve.

    Raises:
        ModelError: scikit-learn is not installed.
    """
    try:
        from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
    except ImportError:
        raise ModelError('the words baseline needs scikit-learn: pip install "labkit-bidirectional[train]"') from None
    texts = [pair.first for pair in pairs] + [pair.second for pair in pairs]
    words = HashingVectorizer(n_features=WORDS, alternate_sign=False, token_pattern=r"\w+").transform(texts)
    vectors = TfidfTransformer().fit_transform(words).toarray()
    vectors = np.hstack([vectors, np.full((len(texts), 1), 1e-3)])  # a text without a word has a direction too
    return pair_scores(pairs, list(zip(vectors[: len(pairs)], vectors[len(pairs) :], strict=True)))


def similarity_scores(
    first: Float[np.ndarray, "pairs width"], second: Float[np.ndarray, "pairs width"], given: Sequence[float]
) -> dict[str, Any]:
    """Spearman and Pearson correlation of the cosines with the scores given, and n.

    Both are NaN where all cosines are one number: then the vectors say nothing, and a correlation is not defined.

    Raises:
        DataError: fewer than two pairs, or one score for all.
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

    `accuracy_at_1`; `mean_reciprocal_rank` of the first text of the same group among all others; `n`, the texts asked;
    `n_alone`, those that were not, for nothing else is of their group. A text of another group that is just as near
    counts as nearer, so a model that gives all texts one vector finds nothing.
    """
    numbers, everyone = np.unique(np.asarray(groups), return_inverse=True)[1], np.arange(len(groups))
    return _retrieval(
        vectors,
        vectors,
        right=lambda rows: numbers[rows, None] == numbers[None],
        allowed=lambda rows: everyone[rows, None] != everyone[None],
    )


def pair_retrieval(
    first: Float[np.ndarray, "pairs width"], second: Float[np.ndarray, "pairs width"], pairs: Sequence[Pair]
) -> dict[str, Any]:
    """Is the second text of each pair the nearest to its first among the second texts of all pairs?

    The same numbers as `group_retrieval`. Where one text is in several pairs all its partners are right, and a text is
    never compared with itself.
    """
    texts = {text: i for i, text in enumerate(dict.fromkeys(t for pair in pairs for t in (pair.first, pair.second)))}
    asks = np.array([texts[pair.first] for pair in pairs])
    answers = np.array([texts[pair.second] for pair in pairs])
    _, once = np.unique(answers, return_index=True)  # a text that stands twice is one candidate
    candidates = answers[once]
    partners = asks * len(texts) + answers  # one number for each pair of texts
    return _retrieval(
        first,
        second[once],
        right=lambda rows: np.isin(asks[rows, None] * len(texts) + candidates[None], partners),
        allowed=lambda rows: asks[rows, None] != candidates[None],
    )


def anisotropy(vectors: Float[np.ndarray, "texts width"]) -> float:
    """Mean cosine between different texts: 0 for directions spread evenly, near 1 for a narrow cone (Ethayarajh 2019).

    A diagnostic, not a score: a cone can still be well ordered inside.
    """
    n = len(vectors)
    if n < 2:
        raise DataError(f"{n} vectors: a cosine between different texts needs two")
    total = _unit(vectors).sum(0)  # |sum|^2 is the sum of all cosines, the n of texts with themselves among them
    return float((total @ total - n) / (n * (n - 1)))


def nearest(
    vectors: Float[np.ndarray, "texts width"], query_vector: Float[np.ndarray, " width"], k: int
) -> list[tuple[int, float]]:
    """The numbers of the `k` nearest vectors and their cosines, best first; of two equally near, the earlier first."""

    cosines = _unit(vectors) @ _unit(query_vector[None])[0]
    return [(int(i), float(cosines[i])) for i in np.argsort(-cosines, kind="stable")[:k]]


def _retrieval(
    queries: np.ndarray,
    candidates: np.ndarray,
    right: Callable[[slice], np.ndarray],
    allowed: Callable[[slice], np.ndarray],
) -> dict[str, Any]:
    """Ranks of the best right candidate; `right(rows)` and `allowed(rows)` are (rows, candidates), for some queries."""
    queries, candidates, ranks = _unit(queries), _unit(candidates), []
    for start in range(0, len(queries), CHUNK):
        rows = slice(start, start + CHUNK)
        cosines, possible = queries[rows] @ candidates.T, allowed(rows)
        good = right(rows) & possible
        best = np.where(good, cosines, -np.inf).max(-1, initial=-np.inf, keepdims=True)
        nearer = (possible & ~good & (cosines >= best - CONSTANT)).sum(-1)  # a tie counts against
        ranks += (nearer[good.any(-1)] + 1).tolist()
    if not ranks:
        raise DataError(f"{len(queries)} texts, and none has another that belongs to it: nothing to find")
    found = np.array(ranks)
    return {
        "accuracy_at_1": float((found == 1).mean()),
        "mean_reciprocal_rank": float((1 / found).mean()),
        "n": len(ranks),
        "n_alone": len(queries) - len(ranks),
    }


def _unit(vectors: np.ndarray) -> np.ndarray:
    """The vectors with length 1, in float64."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    if bad := np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0))).tolist():
        raise DataError(f"vector {bad[0]} is zero or no number: it has no direction")
    return vectors.astype(np.float64) / lengths


def all_scored(pairs: Sequence[Pair]) -> bool:
    """Whether the pairs have scores; some with and some without is an error."""
    for pair in pairs:
        if (pair.score is None) != (pairs[0].score is None):
            has, other = ("no score", "one") if pair.score is None else ("a score", "none")
            raise DataError(f"pair {pair.id} has {has}, and pair {pairs[0].id} has {other}: score all pairs, or none")
    return bool(pairs) and pairs[0].score is not None
