"""Embeddings: encoding whatever the batches, losses against formulas by hand, retrieval counted by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import labkit
from labkit.datasets.examples import Pair
from labkit.errors import DataError, ModelError
from labkit.models.heads import POOLINGS, Head
from labkit.models.tiny import build_tiny_tokenizer
from labkit.run_folder import RunFolder
from labkit.tasks import embed, embed_scores
from labkit.tasks.embed import Collator, Feature, encode, in_batch_contrastive, pair_features
from labkit.training import Settings, train

PAD, EOS, BOS = 0, 1, 2
THE, CAT, SAT, ON, THE_, MAT = 260, 423, 422, 282, 263, 424  # "The cat sat on the mat": six tokens
TEXTS = ["The cat sat on the mat", "money", "The river in France, the bank of the river and a city", "The cat"]
PAIRS = [
    Pair("p", "The cat sat", "The cat on the mat"),
    Pair("q", "the river", "the bank of the river"),
    Pair("r", "Paris", "the capital of France"),
]


def embedder(name="tiny-gpt2", **others):
    torch.manual_seed(0)
    return labkit.load(name, task=Head("embedding", **{"dropout": 0.0, "pooling": "mean"} | others), device="cpu")


def items(rows):
    return [{"row": i, "ids": row} for i, row in enumerate(rows)]


def batch_of(pairs, **options):
    return Collator(PAD)(items(pair_features(build_tiny_tokenizer(), pairs)))


def scored(*numbers):
    return [Pair(p.id, p.first, p.second, score) for p, score in zip(PAIRS, numbers, strict=True)]


def at_angles(*degrees):
    """Vectors in the plane at these angles, of different lengths."""
    radians = np.deg2rad(degrees)
    lengths = np.arange(1, len(degrees) + 1)[:, None]
    return (lengths * np.stack([np.cos(radians), np.sin(radians)], -1)).astype(np.float32)


def cos(degrees):
    return math.cos(math.radians(degrees))


# ------------------------------------------------------------------------------------------------------ encoding
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
def test_a_vector_is_the_same_in_every_batch_and_in_the_place_of_its_text(name, pooling, attention):
    lm = embedder(name, pooling=pooling)
    if attention == "bidirectional":
        labkit.to_bidirectional(lm.model)
    together = encode(lm.model, lm.tokenizer, TEXTS, batch_size=3)
    assert together.shape == (4, 64) and together.dtype == np.float32
    for text, vector in zip(TEXTS, together, strict=True):
        ids = torch.tensor([[BOS, *lm.tokenizer(text)["input_ids"], EOS]])
        with torch.no_grad():
            alone = lm.model(ids).pooler_output[0].numpy()
        np.testing.assert_allclose(vector, alone, atol=1e-5)
    again = encode(lm.model, lm.tokenizer, TEXTS[::-1], batch_size=1)
    np.testing.assert_allclose(again[::-1], together, atol=1e-5)


def test_the_first_token_of_a_causal_model_has_seen_nothing_and_of_a_bidirectional_one_everything():
    lm = embedder("tiny-gpt2", pooling="first")
    causal = encode(lm.model, lm.tokenizer, TEXTS)
    np.testing.assert_allclose(causal, np.broadcast_to(causal[:1], causal.shape), atol=1e-6)
    assert embed_scores.anisotropy(causal) == pytest.approx(1, abs=1e-5)
    labkit.to_bidirectional(lm.model)
    both = encode(lm.model, lm.tokenizer, TEXTS)
    assert min(np.abs(both[i] - both[j]).max() for i in range(4) for j in range(i)) > 0.01
    lm.tokenizer.bos_token = None  # then it is the first token of the text that counts
    labkit.to_causal(lm.model)
    the_river, the_cat, money = encode(lm.model, lm.tokenizer, ["The river", "The cat", "money"])
    np.testing.assert_allclose(the_river, the_cat, atol=1e-6)
    assert np.abs(the_cat - money).max() > 0.01


def test_the_last_token_of_a_causal_model_has_seen_everything():
    lm = embedder("tiny-gpt2", pooling="last")
    vectors = encode(lm.model, lm.tokenizer, TEXTS)
    assert min(np.abs(vectors[i] - vectors[j]).max() for i in range(4) for j in range(i)) > 0.01


def test_the_end_of_a_long_text_is_cut_and_an_empty_one_is_refused():
    lm = embedder()
    cut = encode(lm.model, lm.tokenizer, ["The cat sat on the mat"], max_length=5)
    np.testing.assert_allclose(cut, encode(lm.model, lm.tokenizer, ["The cat sat"]), atol=1e-6)
    with pytest.raises(DataError, match="text 1 is empty"):
        encode(lm.model, lm.tokenizer, ["a cat", " "])


def test_encoding_leaves_the_model_as_it_was_and_no_text_gives_no_vector():
    lm = embedder(dropout=0.5)
    lm.model.train()
    first, second = (encode(lm.model, lm.tokenizer, TEXTS) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert lm.model.training and torch.is_grad_enabled()
    assert encode(lm.model, lm.tokenizer, []).shape == (0, 64)


def test_a_model_without_an_embedding_head_is_refused():
    lm = labkit.load("tiny-gpt2", task="base", device="cpu")
    with pytest.raises(ModelError, match='gives no vectors; load it with task="embedding"'):
        encode(lm.model, lm.tokenizer, TEXTS)
    with pytest.raises(DataError, match="2,002 tokens, and the model has 1,024 positions"):
        encode(lm.model, lm.tokenizer, ["x" * 2000], max_length=4000)


# ------------------------------------------------------------------------------------------------------ features
def test_a_feature_holds_every_side_between_bos_and_eos():
    tokenizer = build_tiny_tokenizer()
    pair = [Pair("p", "The cat", "The cat sat on the mat", 0.25)]
    [found] = pair_features(tokenizer, pair, max_length=5)
    assert found == Feature([[BOS, THE, CAT, EOS], [BOS, THE, CAT, SAT, EOS]], example=0, score=0.25, cut=3)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (scored(0.1, 4.2, 0.3), r"pair q has the score 4.2; rescale the scores"),
        (scored(0.1, float("nan"), 0.3), "pair q has the score nan"),
        (scored(0.1, 0.2, None), "pair r has no score, and pair p has one: score all pairs, or none"),
        (scored(None, 0.2, 0.3), "pair q has a score, and pair p has none"),
        ([*PAIRS, Pair("s", "The cat", " ")], "pair s is empty: ' '"),
    ],
)
def test_pairs_that_cannot_be_trained_on_are_refused_by_name(pairs, message):
    with pytest.raises(DataError, match=message):
        pair_features(build_tiny_tokenizer(), pairs)


def test_a_batch_is_one_stack_of_anchors_and_positives():
    pairs = [Pair("p", "The cat", "The"), Pair("q", "The", "The cat sat")]
    batch = batch_of(pairs)
    assert batch["input_ids"].tolist() == [
        [BOS, THE, CAT, EOS, PAD],
        [BOS, THE, EOS, PAD, PAD],
        [BOS, THE, EOS, PAD, PAD],
        [BOS, THE, CAT, SAT, EOS],
    ]
    assert batch["attention_mask"].sum(-1).tolist() == [4, 3, 3, 5]
    assert batch["texts"].tolist() == [[0, 1], [1, 2]] and "scores" not in batch
    assert batch_of(scored(0.0, 0.5, 1.0))["scores"].tolist() == [0, 0.5, 1]


# -------------------------------------------------------------------------------------------------------- losses
def info_nce(rows):
    """The mean over rows of -log(e^right / sum of e^all), the right one first; `rows` are cosines / temperature."""
    return sum(-math.log(math.exp(r[0]) / sum(math.exp(x) for x in r)) for r in rows) / len(rows)


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_the_contrastive_loss_against_cosines_by_hand(temperature):
    anchors, positives = torch.tensor(at_angles(0, 90)), torch.tensor(at_angles(20, 60))
    t = temperature
    # angles: anchor 1 to 20 and 60; anchor 2 (at 90) to 70 and 30
    forth = info_nce([[cos(20) / t, cos(60) / t], [cos(30) / t, cos(70) / t]])
    assert in_batch_contrastive(anchors, positives, t).item() == pytest.approx(forth, rel=1e-4)


def test_a_text_equal_to_the_anchor_or_the_positive_is_no_negative():
    anchors, positives = torch.tensor(at_angles(0, 90, 45)), torch.tensor(at_angles(20, 60, 20))
    texts = torch.tensor([[0, 1, 2], [3, 4, 3]])  # pairs 1 and 3 have one positive
    t = 0.5
    expected = info_nce(
        [
            [cos(20) / t, cos(60) / t],  # without positive 3
            [cos(30) / t, cos(70) / t, cos(70) / t],
            [cos(25) / t, cos(15) / t],  # without positive 1
        ]
    )
    assert in_batch_contrastive(anchors, positives, t, texts).item() == pytest.approx(expected, rel=1e-4)


@given(st.integers(min_value=2, max_value=9))
def test_vectors_that_are_all_one_cost_the_logarithm_of_the_choices(n):
    same = torch.ones(n, 4)
    assert in_batch_contrastive(same, same).item() == pytest.approx(math.log(n), rel=1e-5)
    apart = torch.eye(9)[:n]
    assert in_batch_contrastive(apart, apart).item() == pytest.approx(math.log(1 + (n - 1) * math.exp(-20)), abs=1e-6)


def test_the_regression_loss_against_cosines_by_hand():
    found = embed.cosine_regression(
        torch.tensor(at_angles(0, 10)), torch.tensor(at_angles(60, 10)), torch.tensor([1.0, 0.4])
    )
    assert found.item() == pytest.approx(((0.5 - 1) ** 2 + (1 - 0.4) ** 2) / 2, rel=1e-5)


def test_what_has_nothing_to_be_told_apart_from_is_refused():
    one = torch.ones(1, 4)
    with pytest.raises(DataError, match="set the batch size to 2 or more"):
        in_batch_contrastive(one, one)
    with pytest.raises(DataError, match="the temperature is 0.0"):
        in_batch_contrastive(torch.eye(2), torch.eye(2), 0.0)


def test_the_loss_of_a_batch_is_that_of_its_vectors():
    lm = embedder()
    first, second = (encode(lm.model, lm.tokenizer, [getattr(p, s) for p in PAIRS]) for s in ("first", "second"))
    cosines = first @ second.T / 0.05
    expected = info_nce([[row[i], *np.delete(row, i)] for i, row in enumerate(cosines.tolist())])
    assert embed.loss(lm.model, batch_of(PAIRS)).item() == pytest.approx(expected, rel=1e-4)
    expected = np.mean(((first * second).sum(-1) - [0.1, 0.5, 0.9]) ** 2)
    assert embed.loss(lm.model, batch_of(scored(0.1, 0.5, 0.9))).item() == pytest.approx(expected, rel=1e-4)
    again = batch_of([*PAIRS, PAIRS[0]])  # the first pair twice: neither is the other's negative
    assert torch.isfinite(embed.loss(lm.model, again))


@pytest.mark.end_to_end
@pytest.mark.parametrize("kind", ["pairs", "scored"])
def test_a_tiny_model_learns_through_the_training_loop(kind, tmp_path):
    pytest.importorskip("accelerate")
    lm = embedder(backbone_dropout=0.1)
    rows = {
        "pairs": lambda: pair_features(lm.tokenizer, PAIRS),
        "scored": lambda: pair_features(lm.tokenizer, scored(0.1, 0.9, 0.4)),
    }[kind]()
    outcome = train(
        lm.model,
        lambda k: rows[k % 3],
        collate=Collator(PAD),
        loss=embed.loss,
        settings=Settings(max_steps=10, batch_size=3, learning_rate=3e-3, log_every=1),
        run=RunFolder.open(tmp_path / "run", {"test": 1}, resume=False),
        say=lambda text: None,
    )
    losses = [entry["loss"] for entry in outcome["history"] if "loss" in entry]
    assert np.mean(losses[-3:]) < losses[0] / 2
    tokens = sum(len(side) for row in rows for side in row.sides) * 10
    assert outcome["tokens_per_second"] * outcome["seconds"] == pytest.approx(tokens)


# -------------------------------------------------------------------------------------------------------- scores
def test_correlations_with_the_scores_given():
    first, second = at_angles(0, 0, 0, 0), at_angles(90, 60, 45, 0)
    perfect = embed_scores.similarity_scores(first, second, [0.0, 0.5, cos(45), 1.0])
    assert perfect == {"spearman": pytest.approx(1), "pearson": pytest.approx(1), "n": 4}
    found = embed_scores.similarity_scores(first, second, [0.0, 0.1, 0.9, 0.2])  # ranks 1 2 3 4 against 1 2 4 3
    assert found["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15))
    x, y = np.array([0, 0.5, cos(45), 1]), np.array([0, 0.1, 0.9, 0.2])
    x, y = x - x.mean(), y - y.mean()
    assert found["pearson"] == pytest.approx((x @ y) / math.sqrt((x @ x) * (y @ y)), rel=1e-5)


def test_no_correlation_where_all_cosines_are_one_number(recwarn):
    vectors = np.ones((3, 4), np.float32) + np.float32(1e-8) * np.arange(12, dtype=np.float32).reshape(3, 4)
    found = embed_scores.similarity_scores(vectors, vectors[::-1], [0.0, 0.5, 1.0])
    assert math.isnan(found["spearman"]) and math.isnan(found["pearson"]) and not recwarn.list
    with pytest.raises(DataError, match="2 pairs with 1 different scores"):
        embed_scores.similarity_scores(vectors[:2], vectors[:2], [0.5, 0.5])


def test_retrieval_by_group_counted_by_hand():
    #                        a  b   a    b   c     the nearest others, nearest first
    vectors = at_angles(0, 10, 30, 110, 200)
    # a at 0: b 10, a 30 -> rank 2.  b at 10: a 0, a 30, b 110 -> 3.  a at 30: b 10, a 0 -> 2.
    # b at 110: a 30 (80), c 200 (90), b 10 (100) -> 3.  c: alone
    found = embed_scores.group_retrieval(vectors, ["a", "b", "a", "b", "c"])
    assert found["mean_reciprocal_rank"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 2 + 1 / 3) / 4)
    assert (found["accuracy_at_1"], found["n"], found["n_alone"]) == (0, 4, 1)
    found = embed_scores.group_retrieval(vectors, ["a", "a", "a", "b", "b"])
    assert found["accuracy_at_1"] == pytest.approx(4 / 5)  # b at 110 is nearest to a at 30; all others find their group
    assert found["mean_reciprocal_rank"] == pytest.approx((1 + 1 + 1 + 1 / 2 + 1) / 5)
    with pytest.raises(DataError, match="5 texts, and none has another"):
        embed_scores.group_retrieval(vectors, list("abcde"))


def test_one_vector_for_all_finds_nothing():
    found = embed_scores.group_retrieval(np.ones((6, 3), np.float32), list("aabbcc"))
    assert found["accuracy_at_1"] == 0 and found["mean_reciprocal_rank"] == pytest.approx(1 / 5)


def test_retrieval_in_several_chunks_is_that_of_one(monkeypatch):
    draw = np.random.default_rng(0)
    vectors, groups = draw.normal(size=(37, 5)), [str(g) for g in draw.integers(0, 6, 37)]
    pairs = [Pair(str(i), f"q{i}", f"a{i}") for i in range(37)]
    whole = (
        embed_scores.group_retrieval(vectors, groups),
        embed_scores.pair_retrieval(vectors, vectors[::-1].copy(), pairs),
    )
    monkeypatch.setattr(embed_scores, "CHUNK", 5)
    assert (
        embed_scores.group_retrieval(vectors, groups),
        embed_scores.pair_retrieval(vectors, vectors[::-1].copy(), pairs),
    ) == whole
    unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    ranks = []  # the plain way
    for i in range(37):
        order = sorted((j for j in range(37) if j != i), key=lambda j: -(unit[i] @ unit[j]))  # noqa: B023
        ranks.append(1 + next(k for k, j in enumerate(order) if groups[j] == groups[i]))
    assert whole[0]["mean_reciprocal_rank"] == pytest.approx(np.mean(1 / np.array(ranks)))
    assert whole[0]["accuracy_at_1"] == pytest.approx(np.mean(np.array(ranks) == 1))


def test_retrieval_of_partners_counted_by_hand():
    pairs = [Pair("1", "a", "x"), Pair("2", "b", "y"), Pair("3", "c", "z")]
    first, second = at_angles(0, 50, 90), at_angles(10, 20, 80)
    # a: x 10 -> 1.  b at 50: y 30, z 30, x 40: a tie with z counts against -> 2.  c: z 10 -> 1
    found = embed_scores.pair_retrieval(first, second, pairs)
    assert found == {
        "accuracy_at_1": pytest.approx(2 / 3),
        "mean_reciprocal_rank": pytest.approx((1 + 1 / 2 + 1) / 3),
        "n": 3,
        "n_alone": 0,
    }


def test_all_partners_of_a_text_are_right_and_it_is_not_its_own():
    # "a" has the partners x and y; "x" asks too, for z, and stands among the candidates itself
    pairs = [Pair("1", "a", "x"), Pair("2", "a", "y"), Pair("3", "x", "z"), Pair("4", "b", "x"), Pair("5", "d", "d")]
    where = {"a": 0, "x": 70, "y": 10, "z": 100, "b": 75, "d": 180}
    first, second = at_angles(*(where[p.first] for p in pairs)), at_angles(*(where[p.second] for p in pairs))
    # a: y 10 -> 1 (twice).  x at 70: z 30, before y 60 -> 1.  b at 75: x 5 -> 1.  d has itself only
    found = embed_scores.pair_retrieval(first, second, pairs)
    assert (found["accuracy_at_1"], found["n"], found["n_alone"]) == (1, 4, 1)


def test_anisotropy_is_the_mean_cosine_of_different_texts():
    assert embed_scores.anisotropy(at_angles(0, 60, 120)) == pytest.approx((cos(60) + cos(120) + cos(60)) / 3, abs=1e-6)
    assert embed_scores.anisotropy(at_angles(5, 5)) == pytest.approx(1)
    assert embed_scores.anisotropy(at_angles(0, 120, 240)) == pytest.approx(-0.5)
    for wrong, message in (
        (at_angles(0), "1 vectors"),
        (np.zeros((2, 3), np.float32), "vector 0 is zero or no number"),
    ):
        with pytest.raises(DataError, match=message):
            embed_scores.anisotropy(wrong)
    with pytest.raises(DataError, match="vector 1 is zero or no number"):
        embed_scores.anisotropy(np.array([[1.0, 0], [np.nan, 1]]))


def test_pairs_are_scored_from_their_vectors_and_a_text_that_recurs_counts_once_for_anisotropy():
    pairs = [Pair("1", "a", "b", 0.0), Pair("2", "a", "c", 1.0)]
    a, b, c = at_angles(0, 90, 60)
    found = embed_scores.pair_scores(pairs, [(a, b), (a, c)])
    assert found["spearman"] == pytest.approx(1)
    assert found["anisotropy"] == pytest.approx((cos(90) + cos(60) + cos(30)) / 3, abs=1e-6)
    unscored = [Pair("1", "a", "b"), Pair("2", "a", "c")]
    assert embed_scores.pair_scores(unscored, [(a, b), (a, c)])["accuracy_at_1"] == 1


def test_the_nearest_come_best_first_and_of_equals_the_earlier():
    found = embed_scores.nearest(at_angles(90, 30, -30, 0), at_angles(0)[0], 3)
    assert [i for i, _ in found] == [3, 1, 2]
    assert [c for _, c in found] == pytest.approx([1, cos(30), cos(30)])
    assert len(embed_scores.nearest(at_angles(90, 30), at_angles(0)[0], 9)) == 2


def test_the_words_baseline_finds_pairs_that_share_words_and_no_others():
    shared = [Pair(str(k), f"alpha{k} beta{k} of the town", f"the alpha{k} and beta{k}") for k in range(20)]
    apart = [Pair(str(k), f"alpha{k} beta{k}", f"gamma{k} delta{k}") for k in range(20)]
    assert embed_scores.bag_of_words(shared)["mean_reciprocal_rank"] > 0.95
    assert embed_scores.bag_of_words(apart)["mean_reciprocal_rank"] < 0.4
    scored = [Pair(str(k), "a b c d", " ".join("a b c d".split()[:k]) + " x y z"[: 6 - k], k / 4) for k in range(1, 5)]
    assert embed_scores.bag_of_words(scored)["spearman"] > 0.9
    assert embed_scores.bag_of_words([*shared, Pair("e", "!?", "...")])["n"] == 21
