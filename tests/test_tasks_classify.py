"""Classification: rows by hand, predictions in their order, the loss and the scores by hand, and the baselines."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import labkit
from labkit.datasets.examples import Labelled
from labkit.errors import DataError
from labkit.models.tiny import build_tiny_tokenizer
from labkit.tasks import classify
from labkit.tasks.base import get
from labkit.tasks.classify import Classified, Row

TASK = get("classify")
TINY = build_tiny_tokenizer()
PAD, EOS, BOS = 0, 1, 2
TEXT = [260, 423, 422, 282, 263, 424]  # "The cat sat on the mat": six tokens
LABELS = ("animal", "money")
EXAMPLES = [
    Labelled("a", "The cat sat on the mat", "animal"),
    Labelled("b", "The bank", "money"),
    Labelled("c", "money in the bank for the city and the river", "money"),
    Labelled("d", "a cat", "animal"),
]


def labelled(*labels):
    return [Labelled(str(i), "text", name) for i, name in enumerate(labels)]


def test_a_row_is_the_text_between_bos_and_eos_if_the_tokenizer_has_them():
    rows = TASK.rows(TINY, [*EXAMPLES[:2], Labelled("p", "a cat", "plant")], LABELS)
    assert rows[0] == Row([BOS, *TEXT, EOS], target=0, example=0)
    assert [row.target for row in rows] == [0, 1, -100] and rows[2].example == 2
    bare = build_tiny_tokenizer()
    bare.bos_token = bare.eos_token = None
    assert TASK.rows(bare, EXAMPLES[:1], LABELS)[0].ids == TEXT


@settings(max_examples=30)
@given(st.text(max_size=80).filter(str.strip), st.integers(min_value=3, max_value=40))
def test_a_row_is_as_long_as_allowed_and_a_cut_is_reported(text, max_length):
    messages = []
    [ids] = classify.frame(TINY, [text], ["x"], max_length, messages.append)
    whole = TINY(text)["input_ids"]
    assert ids == [BOS, *whole[: max_length - 2], EOS] and len(messages) == (len(whole) > max_length - 2)


def test_predictions_are_those_of_each_text_alone_and_the_loss_is_the_cross_entropy_of_the_right_class():
    torch.manual_seed(0)
    lm = labkit.load("tiny-gemma3", task=TASK.head(LABELS, dropout=0.5), device="cpu")  # off in predictions
    labkit.to_bidirectional(lm.model)
    lm.model.train()
    unlabelled = [Labelled(example.id, example.text, "") for example in EXAMPLES]  # labels are not used
    together = TASK.predict(lm.model, lm.tokenizer, unlabelled, LABELS, batch_size=3)
    assert lm.model.training and [prediction.id for prediction in together] == list("abcd")
    rows = TASK.rows(lm.tokenizer, EXAMPLES, LABELS)
    lm.model.eval()
    for row, prediction in zip(rows, together, strict=True):
        with torch.no_grad():
            alone = lm.model(torch.tensor([row.ids])).logits[0].softmax(-1)
        assert_close(torch.tensor(list(prediction.probabilities.values())), alone, atol=1e-5, rtol=0)
        record = TASK.record(prediction)
        assert list(record["probabilities"]) == list(LABELS) and record["label"] == LABELS[int(alone.argmax())]
        assert record["probability"] == max(record["probabilities"].values())
    by_hand = -sum(math.log(p.probabilities[e.label]) for p, e in zip(together, EXAMPLES, strict=True)) / 4
    assert TASK.loss(lm.model, TASK.collate(rows, PAD)).item() == pytest.approx(by_hand, abs=1e-5)
    [short] = get("classify", max_length=5).predict(lm.model, lm.tokenizer, EXAMPLES[:1], LABELS)
    assert short.probabilities != together[0].probabilities


def test_scores_against_counts_by_hand():
    true = labelled(*["animal"] * 3, *["money"] * 5, "plant")
    predicted = ["animal", "animal", "money", "money", "money", "money", "animal", "animal", "money"]
    predictions = [Classified(str(i), {n: float(n == label) for n in LABELS}) for i, label in enumerate(predicted)]
    scores = TASK.score(true, predictions)  # correct: 2 of 3 animals, 3 of 5 moneys; "plant" is never predicted
    counts = {"animal": (2 / 4, 2 / 3, 3), "money": (3 / 5, 3 / 5, 5), "plant": (0, 0, 1)}  # precision, recall, support
    f1 = {name: 2 * p * r / (p + r) if p else 0 for name, (p, r, _) in counts.items()}
    assert scores["accuracy"] == pytest.approx(5 / 9) and scores["f1"] == pytest.approx(sum(f1.values()) / 3)
    assert scores["by_label"].keys() == counts.keys() and scores["n"] == 9
    for name, (p, r, n) in counts.items():
        expected = {"precision": p, "recall": r, "f1": f1[name], "support": n}
        assert scores["by_label"][name] == pytest.approx(expected)
    judged = TASK.judge(true, predictions)
    assert [line["correct"] for line in judged] == [1, 1, 0, 1, 1, 1, 0, 0, 0]
    assert judged[2] == {"id": "2", "group": "", "label": "animal", "correct": 0}


def test_the_majority_is_that_of_the_training_texts():
    wordless = [Labelled("1", "...", "money"), Labelled("2", "!", "money"), Labelled("3", "?", "animal")]
    assert TASK.baselines(wordless, labelled("money", *["animal"] * 3))["majority"] == 0.25
    words = [Labelled("a", "x", "animal"), Labelled("b", "y", "money")]  # of two equals the first by name
    assert TASK.baselines(words, words) == {"majority": 0.5, "bag_of_words": 1.0}  # words of one letter count


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: TASK.rows(TINY, [*EXAMPLES, Labelled("q", " \n ", "money")], LABELS), r"example q is empty: ' \\n '"),
        (lambda: classify.frame(TINY, ["The cat"], ["x"], 2), "max_length is 2; a row needs at least 3 tokens"),
    ],
)
def test_invalid_input_is_refused(act, message):
    with pytest.raises(DataError, match=message):
        act()
