"""Classification: rows counted by hand, predictions in their order, scores against counts by hand, baselines."""

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
from labkit.models.tiny import build_tiny_tokenizer
from labkit.tasks import classify
from labkit.tasks.base import get
from labkit.tasks.classify import Classified, Row

TASK = get("classify")
PAD, EOS, BOS = 0, 1, 2
TEXT = THE, CAT, SAT, ON, THE_, MAT = [260, 423, 422, 282, 263, 424]  # "The cat sat on the mat": six tokens
LABELS = ("animal", "money")
EXAMPLES = [
    Labelled("a", "The cat sat on the mat", "animal"),
    Labelled("b", "The bank", "money"),
    Labelled("c", "money in the bank for the city and the river", "money"),
    Labelled("d", "a cat", "animal"),
]


def classifier(name="tiny-gpt2", **head):
    torch.manual_seed(0)
    return labkit.load(name, task=TASK.head(LABELS, **{"dropout": 0.0, "init": "xavier"} | head), device="cpu")


def predicted_as(labels, names=LABELS):
    """Predictions of these labels, all of them certain."""
    return [Classified(str(i), label, 1.0, {n: float(n == label) for n in names}) for i, label in enumerate(labels)]


def labelled(*labels):
    return [Labelled(str(i), "text", name) for i, name in enumerate(labels)]


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [set(), {"bos_token"}, {"eos_token"}, {"bos_token", "eos_token"}])
def test_a_row_is_the_text_between_bos_and_eos_if_the_tokenizer_has_them(absent):
    tokenizer = build_tiny_tokenizer()
    for name in absent:
        setattr(tokenizer, name, None)
    first, last = [BOS] * ("bos_token" not in absent), [EOS] * ("eos_token" not in absent)
    rows = TASK.rows(tokenizer, EXAMPLES[:2], LABELS)
    assert rows[0] == Row([*first, *TEXT, *last], target=0, example=0, cut=0)
    assert (rows[1].target, rows[1].example) == (1, 1)
    messages = []
    cut = get("classify", max_length=5).rows(tokenizer, EXAMPLES[:2], LABELS, messages.append)[0]
    assert cut.ids == first + TEXT[: 5 - len(first + last)] + last and cut.cut == 1 + len(first + last)
    assert len(messages) == 1 and messages[0].startswith("1 of 2 texts have more than 5 tokens")


@settings(max_examples=60)
@given(st.text(max_size=80).filter(str.strip), st.integers(min_value=3, max_value=40))
def test_a_row_is_as_long_as_allowed_and_counts_the_tokens_that_it_cuts(text, max_length):
    tokenizer = build_tiny_tokenizer()
    [(ids, cut)] = classify.frame(tokenizer, [text], ["x"], max_length)
    whole = tokenizer(text)["input_ids"]
    assert ids == [BOS, *whole[: len(ids) - 2], EOS] and len(ids) - 2 + cut == len(whole)
    assert len(ids) == max_length if cut else len(ids) <= max_length


def test_a_batch_is_padded_on_the_right():
    batch = TASK.collate([Row([BOS, THE, EOS], 1, 0), Row([BOS, THE, CAT, SAT, EOS], 0, 1)], PAD)
    assert batch["input_ids"].tolist() == [[BOS, THE, EOS, PAD, PAD], [BOS, THE, CAT, SAT, EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["labels"].tolist() == [1, 0]


# -- prediction --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
def test_predictions_keep_the_order_and_equal_those_of_each_text_alone(name, attention):
    lm = classifier(name, dropout=0.5)  # dropout is off in predictions
    if attention == "bidirectional":
        labkit.to_bidirectional(lm.model)
    lm.model.train()
    unlabelled = [Labelled(example.id, example.text, "") for example in EXAMPLES]  # labels are not used
    together = TASK.predict(lm.model, lm.tokenizer, unlabelled, LABELS, batch_size=3)
    rows = TASK.rows(lm.tokenizer, EXAMPLES, LABELS)
    assert TASK.predict(lm.model, lm.tokenizer, unlabelled, LABELS, rows=rows, batch_size=3) == together
    assert lm.model.training and [prediction.id for prediction in together] == list("abcd")
    for row, prediction in zip(rows, together, strict=True):
        with torch.no_grad():
            alone = lm.model.eval()(torch.tensor([row.ids])).logits[0].softmax(-1)
        assert_close(torch.tensor(list(prediction.probabilities.values())), alone, atol=1e-5, rtol=0)
        assert list(prediction.probabilities) == list(LABELS) and prediction.label == LABELS[int(alone.argmax())]
        assert prediction.probability == max(prediction.probabilities.values())
    assert len({prediction.probability for prediction in together}) == 4
    [short] = get("classify", max_length=5).predict(lm.model, lm.tokenizer, EXAMPLES[:1], LABELS)
    assert short.cut == TASK.record(short)["cut"] == 3 and short.probability != together[0].probability


def test_a_tiny_model_learns_four_texts_by_the_cross_entropy_of_the_right_class():
    lm = classifier()
    batch = TASK.collate(TASK.rows(lm.tokenizer, EXAMPLES, LABELS), PAD)
    before = TASK.predict(lm.model, lm.tokenizer, EXAMPLES, LABELS)
    by_hand = -sum(math.log(p.probabilities[e.label]) for p, e in zip(before, EXAMPLES, strict=True)) / 4
    assert TASK.loss(lm.model, batch).item() == pytest.approx(by_hand, abs=1e-5)
    assert TASK.score(EXAMPLES, before)["accuracy"] < 1
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=3e-3)
    for _ in range(12):
        TASK.loss(lm.model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert TASK.score(EXAMPLES, TASK.predict(lm.model, lm.tokenizer, EXAMPLES, LABELS))["accuracy"] == 1


# -- scores and baselines ----------------------------------------------------------------------------------------------


def test_scores_against_counts_by_hand():
    true = labelled(*["animal"] * 3, *["money"] * 5)
    predictions = predicted_as(["animal", "animal", "money", "money", "money", "money", "animal", "animal"])
    scores = TASK.score(true, predictions)  # correct: 2 of 3 animals, 3 of 5 moneys; each is predicted 4 times
    animal, money = (2 / 4, 2 / 3), (3 / 4, 3 / 5)  # precision, recall
    f1 = [2 * p * r / (p + r) for p, r in (animal, money)]
    assert scores["accuracy"] == pytest.approx(5 / 8) and scores["f1"] == pytest.approx(sum(f1) / 2)
    for name, (p, r), f, n in zip(LABELS, (animal, money), f1, (3, 5), strict=True):
        assert scores["by_label"][name] == pytest.approx({"precision": p, "recall": r, "f1": f, "support": n})
    assert scores["confusion"] == [[2, 1], [2, 3]] and scores["labels"] == list(LABELS) and scores["n"] == 8
    judged = TASK.judge(true, predictions)
    assert [line["correct"] for line in judged] == [1, 1, 0, 1, 1, 1, 0, 0]
    assert judged[2] == {"id": "2", "group": "", "label": "animal", "correct": 0}


def test_scores_of_labels_that_are_never_predicted_or_not_among_the_models(recwarn):
    scores = TASK.score(labelled("animal", "plant"), predicted_as(["animal", "animal"], ["money", "animal"]))
    assert scores["labels"] == ["money", "animal", "plant"]
    assert scores["confusion"] == [[0, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert scores["by_label"]["plant"] == {"precision": 0, "recall": 0, "f1": 0, "support": 1}
    assert scores["f1"] == pytest.approx((2 / 3 + 0) / 2)  # money occurs nowhere and does not count
    assert not recwarn.list


def test_the_majority_is_that_of_the_training_texts():
    wordless = [Labelled("1", "...", "money"), Labelled("2", "!", "money"), Labelled("3", "?", "animal")]
    assert TASK.baselines(wordless, labelled("money", *["animal"] * 3)) == {"majority": 0.25}
    assert TASK.baselines(wordless[1:], labelled("animal")) == {"majority": 1.0}  # of two equals the first by name
    words = [Labelled("a", "x", "animal"), Labelled("b", "y", "money")]
    assert TASK.baselines(words, words) == {"majority": 0.5, "bag_of_words": 1.0}  # words of one letter count


@pytest.mark.parametrize("told_by", ["word", "order"])
def test_a_bag_of_words_learns_words_and_not_their_order(told_by):
    draw = random.Random(0)

    def texts():
        for number in range(100):
            label = draw.choice(LABELS)
            if told_by == "word":
                words = ["paw" if label == "animal" else "coin"]
            else:
                words = ["paw", "coin"] if label == "animal" else ["coin", "paw"]
            filler = draw.sample("stone paper ferry north seven".split(), 3)
            yield Labelled(str(number), " ".join(filler + words), label)

    train, test = list(texts()), list(texts())
    predictions = classify.bag_of_words(train, test)
    assert all(sum(prediction.probabilities.values()) == pytest.approx(1) for prediction in predictions)
    accuracy = TASK.score(test, predictions)["accuracy"]
    assert accuracy == 1 if told_by == "word" else accuracy < 0.7


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda t: TASK.rows(t, [Labelled("q", "The cat", "plant")], LABELS), "example q has the label 'plant'"),
        (lambda t: TASK.rows(t, [*EXAMPLES, Labelled("q", " \n ", "money")], LABELS), r"example q is empty: ' \\n '"),
        (lambda t: classify.frame(t, ["The cat"], ["x"], 2), "max_length is 2; a row needs at least 3 tokens"),
        (lambda t: TASK.predict(classifier().model, t, EXAMPLES, LABELS[::-1]), "the model has animal, money"),
        (lambda t: classify.bag_of_words(labelled("money", "money"), EXAMPLES), "from these 2 texts.*one class"),
        (lambda t: classify.bag_of_words([Labelled("a", "..", "animal")] * 2, EXAMPLES), "from these 2 texts"),
    ],
)
def test_invalid_input_is_refused(act, message):
    with pytest.raises(DataError, match=message):
        act(build_tiny_tokenizer())


def test_a_missing_package_is_named_with_its_pip_command():
    with pytest.raises(ModelError, match=r'no_such_scores is not installed: pip install "labkit-bidirectional\[train'):
        with classify.needs_train_extra():
            import no_such_scores  # noqa: F401
