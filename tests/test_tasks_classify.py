"""Classification: rows counted by hand, predictions in their order, scores against counts by hand, honest baselines."""

import builtins
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import labkit
from labkit.datasets.examples import Labelled
from labkit.errors import DataError, ModelError
from labkit.models.heads import Head
from labkit.models.tiny import build_tiny_tokenizer
from labkit.run_folder import RunFolder
from labkit.tasks import classify
from labkit.tasks.classify import Classified, Collator, Feature, features, predict
from labkit.training import Settings, train

PAD, EOS, BOS = 0, 1, 2
THE, CAT, SAT, ON, THE_, MAT = 260, 423, 422, 282, 263, 424  # "The cat sat on the mat": six tokens
LABELS = ("animal", "money")
EXAMPLES = [
    Labelled("a", "The cat sat on the mat", "animal"),
    Labelled("b", "The bank", "money"),
    Labelled("c", "money in the bank for the city and the river", "money"),
    Labelled("d", "a cat", "animal"),
]


def classifier(name="tiny-gpt2", labels=LABELS, seed=0, **others):
    torch.manual_seed(seed)
    head = Head("sequence-classification", labels=labels, **{"dropout": 0.0, "init": "xavier"} | others)
    return labkit.load(name, task=head, device="cpu")


def said(labels, names=LABELS):
    """Predictions of these labels, all of them certain."""
    return [Classified(str(i), name, 1.0, {n: float(n == name) for n in names}) for i, name in enumerate(labels)]


def labelled(labels):
    return [Labelled(str(i), "text", name) for i, name in enumerate(labels)]


# --------------------------------------------------------------------------------------------------------- rows
def test_a_row_is_the_text_between_bos_and_eos():
    found = features(build_tiny_tokenizer(), EXAMPLES[:2], LABELS)
    assert found[0] == Feature([BOS, THE, CAT, SAT, ON, THE_, MAT, EOS], target=0, example=0, cut=0)
    assert (found[1].target, found[1].example, len(found[1].ids)) == (1, 1, 4)


@pytest.mark.parametrize("absent", [{"bos_token"}, {"eos_token"}, {"bos_token", "eos_token"}])
def test_bos_and_eos_are_added_only_where_the_tokenizer_has_them(absent):
    tokenizer = build_tiny_tokenizer()
    for name in absent:
        setattr(tokenizer, name, None)
    first, last = [BOS] * ("bos_token" not in absent), [EOS] * ("eos_token" not in absent)
    text = [THE, CAT, SAT, ON, THE_, MAT]
    assert features(tokenizer, EXAMPLES[:1], LABELS)[0].ids == first + text + last
    cut = features(tokenizer, EXAMPLES[:1], LABELS, max_length=5)[0]
    assert cut.ids == first + text[: 5 - len(first + last)] + last and cut.cut == 1 + len(first + last)


def test_a_long_text_is_cut_at_its_end_and_keeps_eos():
    found = features(build_tiny_tokenizer(), EXAMPLES[:2], LABELS, max_length=5)
    assert found[0].ids == [BOS, THE, CAT, SAT, EOS] and found[0].cut == 3
    assert found[1].cut == 0 and classify.cut_texts(found) == 1
    exact = features(build_tiny_tokenizer(), EXAMPLES[:1], LABELS, max_length=8)
    assert exact[0].cut == 0 and len(exact[0].ids) == 8


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=80), st.integers(min_value=3, max_value=40))
def test_no_row_is_longer_than_asked_and_no_token_is_lost_uncounted(text, max_length):
    tokenizer = build_tiny_tokenizer()
    example = [Labelled("x", text, "money")]
    if not text.strip():
        with pytest.raises(DataError, match="example x is empty"):
            features(tokenizer, example, LABELS, max_length=max_length)
        return
    [row] = features(tokenizer, example, LABELS, max_length=max_length)
    whole = tokenizer(text)["input_ids"]
    assert row.ids == [BOS, *whole[: len(row.ids) - 2], EOS]
    assert len(row.ids) <= max_length and len(row.ids) - 2 + row.cut == len(whole)
    assert row.cut == 0 or len(row.ids) == max_length


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        (Labelled("q7", "The cat", "plant"), {}, "example q7 has the label 'plant'; the labels are animal, money"),
        (Labelled("q8", " \n ", "money"), {}, r"example q8 is empty: ' \\n '"),
        (Labelled("q9", "The cat", "money"), {"max_length": 2}, "max_length is 2; a row needs 3 tokens"),
    ],
)
def test_what_cannot_be_a_row_is_refused_by_name(example, options, message):
    with pytest.raises(DataError, match=message):
        features(build_tiny_tokenizer(), [*EXAMPLES, example], LABELS, **options)


def test_a_batch_is_padded_on_the_right():
    rows = [Feature([BOS, THE, EOS], 1, 0), Feature([BOS, THE, CAT, SAT, EOS], 0, 1)]
    batch = Collator(PAD)([{"row": 4, "ids": rows[0]}, {"row": 5, "ids": rows[1]}])
    assert batch["input_ids"].tolist() == [[BOS, THE, EOS, PAD, PAD], [BOS, THE, CAT, SAT, EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["labels"].tolist() == [1, 0]


# --------------------------------------------------------------------------------------------------- prediction
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
def test_predictions_keep_the_order_and_are_those_of_each_text_alone(name, attention):
    lm = classifier(name, dropout=0.5)  # which is to play no part
    if attention == "bidirectional":
        labkit.to_bidirectional(lm.model)
    lm.model.train()
    together = predict(lm.model, lm.tokenizer, EXAMPLES, LABELS, batch_size=3)
    assert lm.model.training and [each.id for each in together] == list("abcd")
    for example, found in zip(EXAMPLES, together, strict=True):
        ids = torch.tensor([[BOS, *lm.tokenizer(example.text)["input_ids"], EOS]])
        with torch.no_grad():
            alone = lm.model.eval()(ids).logits[0].softmax(-1)
        assert_close(torch.tensor(list(found.probabilities.values())), alone, atol=1e-5, rtol=0)
        assert list(found.probabilities) == list(LABELS) and found.label == LABELS[int(alone.argmax())]
        assert found.probability == max(found.probabilities.values())
    assert len({each.probability for each in together}) == 4  # the texts are told apart


def test_a_prediction_needs_no_known_label_and_says_what_was_cut():
    lm = classifier()
    asked = [Labelled("x", "The cat sat on the mat", "")]
    [short], [whole] = (predict(lm.model, lm.tokenizer, asked, LABELS, max_length=n) for n in (5, 256))
    assert (short.cut, whole.cut) == (3, 0)
    assert short.probability != whole.probability
    assert predict(lm.model, lm.tokenizer, [], LABELS) == []


def test_labels_in_another_order_than_the_models_are_refused():
    lm = classifier()
    with pytest.raises(DataError, match="the labels are money, animal, but the model has animal, money"):
        predict(lm.model, lm.tokenizer, EXAMPLES, LABELS[::-1])
    nameless = classifier(labels=())
    with pytest.raises(DataError, match="the model knows 2 classes, and 3 labels are given"):
        predict(nameless.model, nameless.tokenizer, EXAMPLES, ["a", "b", "c"])


def test_a_text_beyond_the_positions_of_the_model_is_refused_with_the_way_out():
    lm = classifier()
    long = [Labelled("x", "cat " * 2000, "animal")]
    with pytest.raises(DataError, match="1,100 tokens, and the model has 1,024 positions: set max_length to 1024"):
        predict(lm.model, lm.tokenizer, long, LABELS, max_length=1100)
    with pytest.raises(DataError, match="batch size is 0"):
        predict(lm.model, lm.tokenizer, EXAMPLES, LABELS, batch_size=0)


# ------------------------------------------------------------------------------------------------------ learning
def test_the_loss_is_the_cross_entropy_of_the_right_class():
    lm = classifier()
    batch = Collator(PAD)([{"row": i, "ids": row} for i, row in enumerate(features(lm.tokenizer, EXAMPLES, LABELS))])
    found = predict(lm.model, lm.tokenizer, EXAMPLES, LABELS)
    by_hand = -sum(math.log(f.probabilities[e.label]) for f, e in zip(found, EXAMPLES, strict=True)) / 4
    assert classify.loss(lm.model, batch).item() == pytest.approx(by_hand, abs=1e-5)


@pytest.mark.end_to_end
def test_a_tiny_model_learns_four_texts_through_the_training_loop(tmp_path):
    pytest.importorskip("accelerate")
    lm = classifier()
    before = classify.scores(EXAMPLES, predict(lm.model, lm.tokenizer, EXAMPLES, LABELS))
    rows = features(lm.tokenizer, EXAMPLES, LABELS)
    outcome = train(
        lm.model,
        lambda k: rows[k % len(rows)],
        collate=Collator(PAD),
        loss=classify.loss,
        settings=Settings(max_steps=12, batch_size=4, learning_rate=3e-3, log_every=1),
        run=RunFolder.open(tmp_path / "run", {"test": 1}, resume=False),
        say=lambda text: None,
    )
    losses = [entry["loss"] for entry in outcome["history"] if "loss" in entry]
    assert losses[-1] < losses[0] / 3 and before["accuracy"] < 1
    assert classify.scores(EXAMPLES, predict(lm.model, lm.tokenizer, EXAMPLES, LABELS))["accuracy"] == 1


# -------------------------------------------------------------------------------------------------------- scores
def test_scores_against_counts_by_hand():
    true = labelled(["animal", "animal", "animal", "money", "money", "money", "money", "money"])
    found = classify.scores(
        true, said(["animal", "animal", "money", "money", "money", "money", "animal", "animal"])
    )  # right: 2 of 3 animals, 3 of 5 moneys; "animal" was said 4 times, "money" 4 times
    animal, money = (2 / 4, 2 / 3), (3 / 4, 3 / 5)  # precision, recall
    f1 = [2 * p * r / (p + r) for p, r in (animal, money)]
    assert found["accuracy"] == pytest.approx(5 / 8) and found["f1"] == pytest.approx(sum(f1) / 2)
    for name, (p, r), f, n in zip(LABELS, (animal, money), f1, (3, 5), strict=True):
        expected = {"precision": p, "recall": r, "f1": f, "support": n}
        assert found["by_label"][name] == pytest.approx(expected)
    assert found["confusion"] == [[2, 1], [2, 3]] and found["labels"] == list(LABELS) and found["n"] == 8


def test_scores_of_labels_that_are_never_said_or_not_known_to_the_model(recwarn):
    found = classify.scores(labelled(["animal", "plant"]), said(["animal", "animal"], ["money", "animal"]))
    assert found["labels"] == ["money", "animal", "plant"]
    assert found["confusion"] == [[0, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert found["by_label"]["plant"] == {"precision": 0, "recall": 0, "f1": 0, "support": 1}
    assert found["f1"] == pytest.approx((2 / 3 + 0) / 2)  # money occurs nowhere, and does not count
    assert not recwarn.list


def test_scores_of_other_examples_are_refused():
    for examples, predictions in (([], []), (labelled(["animal"]), []), (labelled(["animal"] * 2), said(["animal"]))):
        with pytest.raises(DataError, match="give one for each, in one order"):
            classify.scores(examples, predictions)
    with pytest.raises(DataError, match="in one order"):
        classify.scores(labelled(["animal", "money"])[::-1], said(["animal", "money"]))


# ----------------------------------------------------------------------------------------------------- baselines
def test_the_majority_is_taken_from_the_training_texts():
    training = labelled(["money", "money", "animal"])
    assert classify.majority_baseline(training, labelled(["money", "animal", "animal", "animal"])) == 0.25
    assert classify.majority_baseline(labelled(["money", "animal"]), labelled(["animal"])) == 1.0  # a tie: by name


def test_a_bag_of_words_learns_words_and_not_their_order():
    draw = random.Random(0)
    filler = "stone paper ferry north seven".split()

    def made(n, word_for):
        rows = []
        for i in range(n):
            label = draw.choice(LABELS)
            words = [*draw.sample(filler, 3), *word_for(label)]
            if word_for is by_word:
                draw.shuffle(words)
            rows.append(Labelled(str(i), " ".join(words), label))
        return rows

    def by_word(label):
        return ["paw" if label == "animal" else "coin"]

    def by_order(label):
        return ["paw", "coin"] if label == "animal" else ["coin", "paw"]

    def accuracy(word_for):
        training, held = made(100, word_for), made(100, word_for)
        found = classify.bag_of_words(training, held)
        assert all(sum(each.probabilities.values()) == pytest.approx(1) for each in found)
        return classify.scores(held, found)["accuracy"]

    assert accuracy(by_word) == 1.0
    assert accuracy(by_order) < 0.7


def test_a_bag_of_words_without_words_or_classes_says_so():
    with pytest.raises(DataError, match="fewer than two classes"):
        classify.bag_of_words(labelled(["money"] * 3), labelled(["money"]))
    wordless = [Labelled("a", "...", "animal"), Labelled("b", "!", "money")]
    with pytest.raises(DataError, match="hold no word"):
        classify.bag_of_words(wordless, wordless)
    one_letter = [Labelled("a", "x", "animal"), Labelled("b", "y", "money")]
    assert [each.label for each in classify.bag_of_words(one_letter, one_letter)] == ["animal", "money"]
    assert classify.bag_of_words(one_letter, []) == []


def test_without_scikit_learn_the_pip_command_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "sklearn":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match=r'scores need scikit-learn: pip install "labkit-bidirectional\[train'):
        classify.scores(labelled(["money"]), said(["money"]))
    with pytest.raises(ModelError, match="the bag of words needs scikit-learn"):
        classify.bag_of_words(EXAMPLES, EXAMPLES)
