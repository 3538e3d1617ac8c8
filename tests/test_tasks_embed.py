"""Embeddings: encoding whatever the batches, losses against formulas by hand, retrieval counted by hand."""

import math

import numpy as np
import pytest
import torch

import labkit
from labkit.datasets.examples import Pair
from labkit.errors import DataError, ModelError, TrainingError
from labkit.models.heads import head_in
from labkit.models.tiny import build_tiny_tokenizer
from labkit.tasks import embed
from labkit.tasks.base import get
from labkit.tasks.embed import Embedded, Row, encode, in_batch_contrastive

TASK = get("embed")
TINY = build_tiny_tokenizer()
PAD, EOS, BOS = 0, 1, 2
THE, CAT, SAT = 260, 423, 422
PAIRS = [
    Pair("p", "The cat sat", "The cat sat on the mat"),
    Pair("q", "the river", "the bank of the river in France"),
    Pair("r", "Paris", "the capital of France"),
]


def embedder(name="tiny-gpt2", pooling="mean", dropout=0.0):
    torch.manual_seed(0)
    return labkit.load(name, task=get("embed", pooling=pooling).head((), dropout=dropout), device="cpu")


def scored(*numbers):
    return [Pair(p.id, p.first, p.second, score) for p, score in zip(PAIRS, numbers, strict=True)]


def batch_of(pairs):
    return TASK.collate(TASK.rows(TINY, pairs, ()), PAD)


def at_angles(*degrees):
    """Vectors in the plane at these angles, of different lengths."""
    radians = np.deg2rad(degrees)
    lengths = np.arange(1, len(degrees) + 1)[:, None]
    return (lengths * np.stack([np.cos(radians), np.sin(radians)], -1)).astype(np.float32)


def cos(degrees):
    return math.cos(math.radians(degrees))


def test_predictions_are_the_vectors_of_both_texts_alone_and_their_cosine():
    lm, task = embedder("tiny-gemma3", pooling="attention_kv", dropout=0.5), get("embed", max_length=6)
    assert head_in(lm.model.config).pooling == "attention_kv"
    labkit.to_bidirectional(lm.model)
    lm.model.train()  # dropout is off in predictions
    rows = task.rows(lm.tokenizer, PAIRS, ())
    predictions = task.predict(lm.model, lm.tokenizer, PAIRS, (), batch_size=4)
    encoded = encode(lm.model, lm.tokenizer, [pair.first for pair in PAIRS], batch_size=2, max_length=6)
    assert encoded.dtype == np.float32 and lm.model.training
    lm.model.eval()
    for row, prediction, vector in zip(rows, predictions, encoded, strict=True):
        with torch.no_grad():
            alone = [lm.model(torch.tensor([ids])).pooler_output[0].numpy() for ids in (row.first, row.second)]
        np.testing.assert_allclose([prediction.first, prediction.second], alone, atol=1e-5)
        np.testing.assert_allclose(vector, alone[0], atol=1e-5)
        cosine = float(alone[0] @ alone[1])  # they have length 1
        assert task.record(prediction) == {"id": prediction.id, "similarity": pytest.approx(cosine, abs=1e-5)}


def test_a_row_holds_both_texts_between_bos_and_eos():
    [row] = get("embed", max_length=5).rows(TINY, [Pair("p", "The cat", "The cat sat on the mat", 0.25)], ())
    assert row == Row([BOS, THE, CAT, EOS], [BOS, THE, CAT, SAT, EOS], example=0, score=0.25)
    assert len(row.ids) == 9


def info_nce(rows):
    """The mean over rows of -log(e^right / sum of e^all), the right one first; `rows` are cosines / temperature."""
    return sum(-math.log(math.exp(r[0]) / sum(math.exp(x) for x in r)) for r in rows) / len(rows)


def test_the_contrastive_loss_against_cosines_by_hand():
    anchors, positives = torch.tensor(at_angles(0, 90, 45)), torch.tensor(at_angles(20, 60, 20))
    t = 0.5
    texts = torch.tensor([[0, 1, 2], [3, 4, 3]])  # pairs 1 and 3 have one positive, which is then not a negative
    rows = [[cos(20) / t, cos(60) / t], [cos(30) / t, cos(70) / t, cos(70) / t], [cos(25) / t, cos(15) / t]]
    assert in_batch_contrastive(anchors, positives, t, texts).item() == pytest.approx(info_nce(rows), rel=1e-4)


def test_the_loss_of_a_batch_is_that_of_its_vectors():
    lm = embedder()
    predictions = TASK.predict(lm.model, lm.tokenizer, PAIRS, ())
    cosines = np.array([[one.first @ other.second for other in predictions] for one in predictions])
    expected = info_nce([[row[i], *np.delete(row, i)] for i, row in enumerate(cosines / 0.05)])
    assert TASK.loss(lm.model, batch_of(PAIRS)).item() == pytest.approx(expected, rel=1e-4)
    expected = np.mean((cosines.diagonal() - [0.1, 0.5, 0.9]) ** 2)
    assert TASK.loss(lm.model, batch_of(scored(0.1, 0.5, 0.9))).item() == pytest.approx(expected, rel=1e-4)
    twice = batch_of([*PAIRS, PAIRS[0]])  # neither copy is a negative of the other
    assert torch.isfinite(TASK.loss(lm.model, twice))


def score_of(first, second, scores):
    pairs = [Pair(str(k), f"first {k}", f"second {k}", score) for k, score in enumerate(scores)]
    return TASK.score(pairs, [Embedded(pair.id, *vectors) for pair, *vectors in zip(pairs, first, second, strict=True)])


def test_correlations_with_the_given_scores(recwarn):
    first, second = at_angles(0, 0, 0, 0), at_angles(90, 60, 45, 0)
    y = [0, 0.1, 0.9, 0.2]  # ranks 1 2 3 4 against 1 2 4 3
    scores = score_of(first, second, y)
    assert scores["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15)) and scores["n"] == 4
    assert scores["pearson"] == pytest.approx(np.corrcoef([0, 0.5, cos(45), 1], y)[0, 1], rel=1e-5)
    equal = np.ones((3, 4), np.float32) + np.float32(1e-8) * np.arange(12, dtype=np.float32).reshape(3, 4)
    undefined = score_of(equal, equal[::-1], [0.0, 0.5, 1.0])
    assert math.isnan(undefined["spearman"]) and math.isnan(undefined["pearson"]) and not recwarn.list


def test_retrieval_of_partners_counted_by_hand():
    pairs = [Pair("1", "a", "x"), Pair("2", "b", "y"), Pair("3", "c", "z")]
    # a: x 10 -> 1.  b at 50: y 30, z 30, x 40: a tie with z counts against -> 2.  c: z 10 -> 1
    scores = embed.pair_retrieval(at_angles(0, 50, 90), at_angles(10, 20, 80), pairs)
    assert scores["mean_reciprocal_rank"] == pytest.approx((1 + 1 / 2 + 1) / 3)
    # "a" has the partners x and y; "x" is a query too, for z, and itself one of the candidates
    pairs = [Pair("1", "a", "x"), Pair("2", "a", "y"), Pair("3", "x", "z"), Pair("4", "b", "x"), Pair("5", "d", "d")]
    where = {"a": 0, "x": 70, "y": 10, "z": 100, "b": 75, "d": 180}
    first, second = at_angles(*(where[p.first] for p in pairs)), at_angles(*(where[p.second] for p in pairs))
    # a: y 10 -> 1 (twice).  x at 70: z 30, before y 60 -> 1.  b at 75: x 5 -> 1.  d has only itself
    scores = embed.pair_retrieval(first, second, pairs)
    assert (scores["accuracy_at_1"], scores["n"]) == (1, 4)
    pairs = [Pair(str(k), f"a{k}", f"b{k}") for k in range(5)]
    one_vector = embed.pair_retrieval(*np.ones((2, 5, 3), np.float32), pairs)
    assert one_vector["accuracy_at_1"] == 0 and one_vector["mean_reciprocal_rank"] == pytest.approx(1 / 5)


def test_the_nearest_come_best_first_and_of_equals_the_earlier():
    neighbours = embed.nearest(at_angles(90, 30, -30, 0), at_angles(0)[0], 3)
    assert [number for number, _ in neighbours] == [3, 1, 2]
    assert [cosine for _, cosine in neighbours] == pytest.approx([1, cos(30), cos(30)])


def test_the_words_baseline_scores_shared_words():
    shared = [Pair(str(k), f"alpha{k} beta{k} of the town", f"the alpha{k} and beta{k}") for k in range(20)]
    apart = [Pair(str(k), f"alpha{k} beta{k}", f"gamma{k} delta{k}") for k in range(20)]
    assert TASK.baselines([], [*shared, Pair("e", "!?", "...")])["bag_of_words"] > 0.9  # the last has no words
    assert TASK.baselines([], apart)["bag_of_words"] < 0.4
    graded = [Pair("1", "a b", "x y", 0.1), Pair("2", "a b", "a x", 0.5), Pair("3", "a b", "a b", 1.0)]
    assert TASK.baselines([], graded)["bag_of_words"] == pytest.approx(1)  # the Spearman correlation


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (lambda: TASK.rows(TINY, scored(0.1, 4.2, 0.3), ()), DataError, "pair q has the score 4.2"),
        (lambda: TASK.rows(TINY, scored(0.1, 0.2, None), ()), DataError, "pair r has the score None"),
        (lambda: TASK.rows(TINY, [*PAIRS, Pair("s", "The cat", " ")], ()), DataError, "pair s is empty: ' '"),
        (lambda: in_batch_contrastive(*[torch.ones(1, 4)] * 2), TrainingError, "set the batch size to 2 or more"),
        (lambda: score_of(*[at_angles(0, 9)] * 2, [0.5, 0.5]), DataError, "all 2 pairs have the score 0.5"),
        (lambda: embed.pair_retrieval(*[at_angles(0)] * 2, [Pair("d", "d", "d")]), DataError, "1 pairs, and no text"),
        (lambda: encode(labkit.load("tiny-gpt2", device="cpu").model, TINY, ["money"]), ModelError, "task=.embedding"),
    ],
)
def test_invalid_input_is_refused(act, kind, message):
    with pytest.raises(kind, match=message):
        act()
