"""Named entities: words over tokens, windows, batches, decoding, prediction with a model, entity scores, baselines."""

import itertools
import sys
import types
import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

import labkit
from labkit.datasets.examples import Entity, Sentence
from labkit.datasets.tags import entities_of, to_bio, words_of
from labkit.errors import DataError, ModelError
from labkit.models.heads import Head
from labkit.models.tiny import build_tiny_tokenizer
from labkit.tasks import ner

LABELS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
TINY = build_tiny_tokenizer()
PAD, EOS, BOS = 0, 1, 2


def sentence(text: str, tags: list[str] | None = None, spans: list[tuple[int, int]] | None = None) -> Sentence:
    spans = words_of(text) if spans is None else spans
    tags = tags if tags is not None else ["O"] * len(spans)
    return Sentence("s-1", text, tuple(text[a:b] for a, b in spans), tuple(spans), tuple(tags))


def perfect(rows, labels=LABELS):
    """Logits that say what the targets say, and O where there is no target."""
    return [5.0 * torch.nn.functional.one_hot(torch.tensor(row.targets).clamp(min=0), len(labels)) for row in rows]


@pytest.fixture(scope="module")
def mini():
    return labkit.load("gpt2-mini", device="cpu").tokenizer


@pytest.fixture
def gpt2():
    return labkit.load("tiny-gpt2", task=Head("token-classification", labels=LABELS, dropout=0.0), device="cpu")


# -- words over tokens -------------------------------------------------------------------------------------------------

# place:   0     1   2   3  4     5 67 8 9 10 11 12
# token: <bos> The cat in Paris , _ G u r k  .  <eos>
GURK = sentence("The cat in Paris, Gurk.", ["O", "O", "O", "B-LOC", "O", "B-LOC", "O"])


@pytest.mark.parametrize(("label_on", "place_of_gurk"), [("first", 7), ("last", 10)])
def test_a_word_is_labelled_on_its_first_or_last_token_and_nowhere_else(label_on, place_of_gurk):
    (row,) = ner.features(TINY, [GURK], LABELS, label_on=label_on)
    assert row.ids[0] == BOS and row.ids[12] == EOS and len(row.ids) == 13
    assert TINY.decode(row.ids[1:-1]) == GURK.text
    assert row.words == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (place_of_gurk, 5), (11, 6)]
    expected = [-100] * 13
    for place, tag in ((1, 0), (2, 0), (3, 0), (4, 1), (5, 0), (place_of_gurk, 1), (11, 0)):
        expected[place] = tag
    assert row.targets == expected and row.lost == [] and row.example == 0


def test_the_last_token_is_the_default():
    assert ner.features(TINY, [GURK], LABELS) == ner.features(TINY, [GURK], LABELS, label_on="last")


def test_the_space_before_a_word_is_in_gpt2s_token_of_the_word_and_changes_nothing(mini):
    (row,) = ner.features(mini, [GURK], LABELS, label_on="first")
    said = [mini.decode([row.ids[place]]) for place, _ in row.words]
    assert said == ["The", " cat", " in", " Paris", ",", " G", "."]
    assert row.ids[0] == row.ids[-1] == mini.eos_token_id == mini.bos_token_id


def test_of_two_words_in_one_token_the_second_is_lost_and_listed(mini):
    text = 'in "Paris."'
    assert mini.tokenize(text)[-1] == '."'
    each = sentence(text, ["O", "O", "B-LOC", "O", "B-PER"])
    for label_on in ner.LABEL_ON:
        rows = ner.features(mini, [each], LABELS, label_on=label_on)
        assert [row.lost for row in rows] == [[4]]
        assert [word for _, word in rows[0].words] == [0, 1, 2, 3] and LABELS.index("B-PER") not in rows[0].targets
        (tagged,) = ner.decode([each], rows, perfect(rows), LABELS)
        assert tagged.tags == ("O", "O", "B-LOC", "O", "O")
        assert tagged.probabilities[4] is None and min(tagged.probabilities[:4]) > 0.9


def test_a_word_makes_room_in_a_shared_token_for_a_word_that_has_no_other(mini):
    text = 'Paris."'
    assert mini.tokenize(text)[-1] == '."'
    each = sentence(text, spans=[(0, 6), (6, 7)])  # "Paris." and the quotation mark
    (row,) = ner.features(mini, [each], LABELS)
    last = len(row.ids) - 2
    assert row.words == [(last - 1, 0), (last, 1)] and row.lost == []


def test_a_lost_word_of_a_long_sentence_is_listed_once(mini):
    each = sentence('He sat in "Paris." ' * 4)
    rows = ner.features(mini, [each, GURK], LABELS, max_length=12, stride=2)
    by_example = [[row.lost for row in rows if row.example == k] for k in (0, 1)]
    assert len(by_example[0]) > 1 and by_example == [[[6, 13, 20, 27]] + [[]] * (len(by_example[0]) - 1), [[]]]


def dropping_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words that leaves out what has no width, and has no bos, no eos and no pad."""
    pieces = Tokenizer(models.WordLevel({"[UNK]": 0, "Paris": 1}, unk_token="[UNK]"))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.Replace("\u200b", ""), pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]")


def test_a_word_that_the_tokenizer_drops_or_without_width_is_lost(gpt2):
    tokenizer = dropping_tokenizer()
    each = sentence("\u200b Paris x", spans=[(0, 1), (2, 7), (7, 7), (8, 9)])
    (row,) = ner.features(tokenizer, [each], LABELS)
    assert row.ids == [1, 0] and row.words == [(0, 1), (1, 3)] and row.lost == [0, 2]  # no bos, no eos: none is added
    no_token = sentence("\u200b", spans=[(0, 1)])
    assert ner.features(tokenizer, [no_token], LABELS) == [ner.Feature([], [], 0, [], [0])]
    tagged = ner.predict(gpt2.model, tokenizer, [no_token, each], LABELS, batch_size=1)
    assert tagged[0] == ner.Tagged("s-1", ("O",), ("O",), (None,), (), ())
    assert [p is None for p in tagged[1].probabilities] == [True, False, True, False]


def test_a_word_without_width_has_no_part_in_the_token_around_it():
    (row,) = ner.features(TINY, [sentence("in Paris", spans=[(0, 2), (3, 3), (3, 8)])], LABELS)
    assert TINY.convert_ids_to_tokens(row.ids[1:-1]) == ["i", "n", "ĠParis"]
    assert row.words == [(2, 0), (3, 2)] and row.lost == [1]


def test_a_text_that_spells_out_a_special_token_is_text():
    each = sentence("The <eos> cat <bos>")
    (row,) = ner.features(TINY, [each], LABELS)
    assert row.ids.count(EOS) == row.ids.count(BOS) == 1
    assert TINY.decode(row.ids[1:-1]) == each.text and len(row.words) == len(each.words)


@st.composite
def word_tokens(draw):
    """Tokens of up to five words in order: both ends never go back, neighbours may share tokens, some have none."""
    starts, stops = (sorted(draw(st.lists(st.integers(0, 6), min_size=5, max_size=5))) for _ in range(2))
    return [range(a, b) for a, b in zip(starts, stops, strict=True)]


@given(word_tokens())
def test_no_more_words_are_lost_than_must_be_and_the_same_for_first_and_last(ranges):
    most = max(
        (
            len(set(words))
            for size in range(6)
            for words in itertools.combinations(range(5), size)
            if any(len(set(p)) == size for p in itertools.product(*(ranges[w] for w in words)))
        ),
        default=0,
    )
    first, last = (ner._places(ranges, label_on) for label_on in ("first", "last"))
    assert set(first) == set(last) and len(first) == most
    for places in (first, last):
        in_order = [places[word] for word in sorted(places)]
        assert in_order == sorted(set(in_order)) and all(places[word] in ranges[word] for word in places)
    assert all(first[word] <= last[word] for word in first)
    if not any(set(a) & set(b) for a, b in itertools.combinations(ranges, 2)):
        assert first == {word: each[0] for word, each in enumerate(ranges) if each}
        assert last == {word: each[-1] for word, each in enumerate(ranges) if each}


# -- windows -----------------------------------------------------------------------------------------------------------


def test_windows_of_a_long_sentence_counted_by_hand():
    each = sentence("The cat sat on the mat in the city of Paris")  # 11 words of one token each
    rows = ner.features(TINY, [each], LABELS, max_length=8, stride=2)  # windows of 6: tokens 0-5, 4-9, 8-10
    assert [TINY.decode(row.ids[1:-1]) for row in rows] == [
        "The cat sat on the mat", " the mat in the city of", " city of Paris",
    ]  # fmt: skip
    assert [[word for _, word in row.words] for row in rows] == [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert [[place for place, _ in row.words] for row in rows] == [[1, 2, 3, 4, 5], [2, 3, 4, 5], [2, 3]]
    assert [row.ids[0] for row in rows] == [BOS] * 3 and [row.ids[-1] for row in rows] == [EOS] * 3


@pytest.mark.parametrize(("words", "n_rows"), [(6, 1), (7, 2), (10, 2), (11, 3)])
def test_a_window_more_begins_with_the_first_token_that_does_not_fit(words, n_rows):
    each = sentence("The" + " cat" * (words - 1))
    assert len(ner.features(TINY, [each], LABELS, max_length=8, stride=2)) == n_rows


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(3, 14), st.data())
def test_each_word_is_labelled_once_where_the_shorter_side_of_its_context_is_longest(lengths, max_length, data):
    room = max_length - 2
    stride = data.draw(st.integers(0, room - 1))
    spans, at = [], 0
    for length in lengths:  # words of single-byte tokens, with a one-token space between them
        spans.append((at, at + length))
        at += length + 1
    each = sentence(" ".join("x" * n for n in lengths), spans=spans)
    rows = ner.features(TINY, [each], LABELS, max_length=max_length, stride=stride)
    n = len(each.text)  # of tokens too
    windows, start = [], 0
    while True:
        windows.append(range(start, min(start + room, n)))
        if windows[-1].stop == n:
            break
        start += room - stride
    expected = {}
    for word, (a, b) in enumerate(spans):
        holding = [w for w in windows if b - 1 in w]
        best = max(min(a - w.start, w.stop - b) for w in holding)
        window = next(w for w in holding if min(a - w.start, w.stop - b) == best)
        expected.setdefault(window.start, []).append((1 + b - 1 - window.start, word))
    assert [row.words for row in rows] == [expected[start] for start in sorted(expected)]
    assert sum(t != -100 for row in rows for t in row.targets) == len(spans)
    assert max(len(row.ids) for row in rows) <= max_length


def test_a_word_of_ten_thousand_characters_is_labelled_once_and_windows_without_a_label_are_left_out():
    text = f"The cat {'x' * 10_000} in Paris"
    tags = ["O", "O", "B-PER", "O", "B-LOC"]
    for label_on, n_rows in (("last", 2), ("first", 2)):
        rows = ner.features(TINY, [sentence(text, tags)], LABELS, max_length=64, stride=16, label_on=label_on)
        assert len(rows) == n_rows and [word for row in rows for _, word in row.words] == [0, 1, 2, 3, 4]
        (tagged,) = ner.decode([sentence(text, tags)], rows, perfect(rows), LABELS)
        assert tagged.tags == tuple(tags) and [len(t) for t in tagged.texts] == [10_000, 5]


def test_a_sentence_without_words_has_one_row_and_no_entities():
    each = sentence("The cat " * 50, spans=[])
    rows = ner.features(TINY, [each, GURK], LABELS, max_length=20, stride=4)
    assert rows[0].words == [] and set(rows[0].targets) == {-100} and [row.example for row in rows] == [0, 1]
    assert ner.decode([each], rows[:1], perfect(rows[:1]), LABELS) == [ner.Tagged("s-1", (), (), (), (), ())]


# -- decoding ----------------------------------------------------------------------------------------------------------

EMOJI = ["👩\u200d🚀", "🇫🇮", "❤\ufe0f", "e\u0301", "\u200b", "\u200d", "\ufeff"]
SIGNS = st.sampled_from([*"aB3.,'’\"-_ \n\t", "the", " Paris", *EMOJI]) | st.characters(exclude_categories=["Cs"])
TEXTS = st.lists(SIGNS, min_size=1, max_size=40).map("".join)
STEPS = st.lists(st.sampled_from(["O", "LOC", "PER", "on"]), min_size=1, max_size=30)


def tagged_words(text: str, steps: list[str]) -> tuple[Sentence, list[Entity]]:
    """A sentence and its entities, made together: at each word none goes on, one begins, or the last goes "on"."""
    spans, tags, entities = words_of(text), [], []
    for (start, end), step in zip(spans, itertools.cycle(steps), strict=False):
        if step == "on" and tags and tags[-1] != "O":
            tags.append("I-" + tags[-1][2:])
            entities[-1] = Entity(entities[-1].start, end, entities[-1].label)
        elif step in ("O", "on"):
            tags.append("O")
        else:
            tags.append("B-" + step)
            entities.append(Entity(start, end, step))
    return sentence(text, tags, spans), entities


@settings(deadline=None, max_examples=150)
@given(TEXTS, STEPS, st.sampled_from(ner.LABEL_ON), st.integers(4, 30), st.integers(0, 1))
@example("Oslo 👩\u200d🚀 sat\u200b", ["LOC", "PER", "on"], "last", 9, 1)
def test_perfect_logits_give_back_the_tags_and_the_spans_of_any_text(text, steps, label_on, max_length, stride):
    each, entities = tagged_words(text, steps)

    rows = ner.features(TINY, [each], LABELS, max_length=max_length, stride=stride, label_on=label_on)
    assert [row.lost for row in rows] == [[]] * len(rows)  # bytes: every word has one of its own
    (tagged,) = ner.decode([each], rows, perfect(rows), LABELS)
    assert tagged.tags == tagged.raw_tags == each.tags
    assert list(tagged.entities) == entities
    assert list(tagged.texts) == [each.text[e.start : e.end] for e in entities]


@settings(deadline=None, max_examples=100)
@given(text=TEXTS, steps=STEPS, label_on=st.sampled_from(ner.LABEL_ON))
@example(text='no." (So), he', steps=["PER", "on", "LOC"], label_on="last")
def test_with_gpt2s_tokens_only_the_words_said_to_be_lost_are_lost(mini, text, steps, label_on):
    each, _ = tagged_words(text, steps)
    if not each.text.strip():
        return
    rows = ner.features(mini, [each], LABELS, max_length=12, stride=3, label_on=label_on)
    lost = [word for row in rows for word in row.lost]
    assert sorted([word for row in rows for _, word in row.words] + lost) == list(range(len(each.words)))
    (tagged,) = ner.decode([each], rows, perfect(rows), LABELS)
    assert tagged.raw_tags == tuple("O" if i in lost else tag for i, tag in enumerate(each.tags))
    assert [i for i, p in enumerate(tagged.probabilities) if p is None] == lost


def test_illegal_tags_are_repaired_and_kept_as_they_were_said():
    each = sentence("The cat in Paris")
    (row,) = ner.features(TINY, [each], LABELS)
    logits = torch.zeros(len(row.ids), len(LABELS))
    for place, tag in zip(range(1, 5), ["I-PER", "I-PER", "I-LOC", "B-LOC"], strict=True):
        logits[place, LABELS.index(tag)] = 2.0
    (tagged,) = ner.decode([each], [row], [logits], LABELS)
    assert tagged.raw_tags == ("I-PER", "I-PER", "I-LOC", "B-LOC")
    assert tagged.tags == ("B-PER", "I-PER", "B-LOC", "B-LOC")
    assert tagged.entities == (Entity(0, 7, "PER"), Entity(8, 10, "LOC"), Entity(11, 16, "LOC"))
    assert tagged.texts == ("The cat", "in", "Paris")
    e2 = torch.tensor(2.0).exp()
    assert tagged.probabilities == pytest.approx([float(e2 / (e2 + 4))] * 4)


# -- batches, training, prediction -------------------------------------------------------------------------------------


def test_a_batch_is_padded_on_the_right():
    rows = ner.features(TINY, [GURK, sentence("The cat", ["O", "B-PER"])], LABELS)
    batch = ner.Collator(7)([{"row": k, "ids": row} for k, row in enumerate(rows)])
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].tolist() == [rows[0].ids, rows[1].ids + [7] * 9]
    assert batch["attention_mask"].tolist() == [[1] * 13, [1] * 4 + [0] * 9]
    assert batch["labels"].tolist() == [rows[0].targets, [-100, 0, 3] + [-100] * 10]
    assert {each.dtype for each in batch.values()} == {torch.int64}


FOUR = [
    sentence("The cat in Paris, Gurk.", ["O", "O", "O", "B-LOC", "O", "B-PER", "O"]),
    sentence("Ann Lee sat by the river.", ["B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O"]),
    sentence("Money of the bank 👩\u200d🚀", ["O", "O", "O", "B-LOC", "B-PER"]),
    sentence("no one there", ["O", "O", "O"]),
]


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_a_model_learns_four_sentences_and_then_tags_them(gpt2, attention):
    if attention == "bidirectional":
        labkit.to_bidirectional(gpt2.model)
    rows = ner.features(gpt2.tokenizer, FOUR, LABELS)
    batch = ner.Collator(PAD)([{"row": k, "ids": row} for k, row in enumerate(rows)])
    by_hand = [
        -gpt2.model(torch.tensor([row.ids])).logits[0, place].log_softmax(-1)[LABELS.index(each.tags[word])]
        for row, each in zip(rows, FOUR, strict=True)
        for place, word in row.words
    ]
    losses = [gpt2.model(**batch).loss]
    assert len(by_hand) == 22
    assert_close(losses[0], sum(by_hand) / 22, atol=1e-4, rtol=0)
    slow = torch.optim.SGD(gpt2.model.parameters(), lr=0.02)
    for _ in range(5):
        losses[-1].backward()
        slow.step()
        slow.zero_grad()
        losses.append(gpt2.model(**batch).loss)
    assert all(after < before for before, after in itertools.pairwise(losses))
    fast = torch.optim.AdamW(gpt2.model.parameters(), lr=1e-2)
    for _ in range(40):
        gpt2.model(**batch).loss.backward()
        fast.step()
        fast.zero_grad()
    tagged = ner.predict(gpt2.model, gpt2.tokenizer, FOUR, LABELS)
    assert [each.tags for each in tagged] == [each.tags for each in FOUR]
    assert tagged[1].texts == ("Ann Lee", "the river") and tagged[2].texts == ("bank", "👩\u200d🚀")


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3", "gpt2-mini"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_prediction_in_batches_is_what_each_row_says_alone(name, batch_size, capsys):
    lm = labkit.load(name, task=Head("token-classification", labels=LABELS), device="cpu")
    lm.model.train()
    long = sentence("The cat in Paris sat on the mat. " * 6)
    sentences = [long, *FOUR, sentence("none", spans=[])]
    how = {"max_length": 24, "stride": 6}
    tagged = ner.predict(lm.model, lm.tokenizer, sentences, LABELS, batch_size=batch_size, **how)
    assert lm.model.training and capsys.readouterr().err == ""
    rows = ner.features(lm.tokenizer, sentences, LABELS, **how)
    assert len(rows) > len(sentences)
    lm.model.eval()
    with torch.no_grad():
        logits = [lm.model(torch.tensor([row.ids])).logits[0] for row in rows]
    alone = ner.decode(sentences, rows, logits, LABELS)
    for ours, theirs, each in zip(tagged, alone, sentences, strict=True):
        assert (ours.tags, ours.entities) == (theirs.tags, theirs.entities)
        assert ours.probabilities == pytest.approx(theirs.probabilities, abs=1e-5)
        assert len(ours.tags) == len(each.words) and ours.id == each.id
        assert ours.texts == tuple(each.text[e.start : e.end] for e in ours.entities)


def test_a_causal_model_sees_the_whole_word_only_on_its_last_token(gpt2):
    one, other = sentence("in Gurk"), sentence("in Gurm")
    said = {
        label_on: [ner.predict(gpt2.model, gpt2.tokenizer, [s], LABELS, label_on=label_on)[0] for s in (one, other)]
        for label_on in ner.LABEL_ON
    }
    assert said["first"][0].probabilities[1] == pytest.approx(said["first"][1].probabilities[1], abs=1e-6)
    assert said["last"][0].probabilities[1] != pytest.approx(said["last"][1].probabilities[1], abs=1e-3)


def test_prediction_does_not_look_at_the_tags(gpt2):
    foreign = [sentence(each.text, ["B-SHIP"] * len(each.words)) for each in FOUR]
    tagged = ner.predict(gpt2.model, gpt2.tokenizer, foreign, LABELS)
    assert tagged == ner.predict(gpt2.model, gpt2.tokenizer, FOUR, LABELS)
    assert ner.predict(gpt2.model, gpt2.tokenizer, [], LABELS) == []


def test_labels_in_another_order_and_rows_that_are_too_long_for_the_model_are_refused(gpt2):
    with pytest.raises(DataError, match="the model has O, B-LOC"):
        ner.predict(gpt2.model, gpt2.tokenizer, FOUR, ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"))
    with pytest.raises(DataError, match="1,502 tokens, and the model has 1,024"):
        ner.predict(gpt2.model, gpt2.tokenizer, [sentence("x" * 1500)], LABELS, max_length=4000)


# -- labels and bad input ----------------------------------------------------------------------------------------------


def test_labels_hold_both_letters_of_every_kind_in_one_order():
    one, other = sentence("The cat sat", ["B-PER", "O", "I-LOC"]), sentence("in Paris", ["O", "B-DATE"])
    expected = ("O", "B-DATE", "I-DATE", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert ner.labels_of([one, other]) == ner.labels_of([other, one]) == expected


def test_without_an_entity_there_is_nothing_to_learn():
    with pytest.raises(DataError, match="nothing to learn"):
        ner.labels_of([sentence("The cat", ["O", "O"])])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sentences": [sentence("The cat", ["O", "B-SHIP"])]}, "sentence s-1 has the tag 'B-SHIP'; the labels are O"),
        ({"label_on": "middle"}, "'middle'; choose one of last, first"),
        ({"stride": 6, "max_length": 8}, "smaller than the 6 tokens"),
        ({"stride": -1}, "stride is -1"),
        ({"tokenizer": types.SimpleNamespace(is_fast=False)}, "no character offsets"),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_over_tokens_is_refused(changes, message):
    arguments = {"tokenizer": TINY, "sentences": [GURK], "labels": LABELS, **changes}
    with pytest.raises(DataError, match=message):
        ner.features(**arguments)


# -- scores ------------------------------------------------------------------------------------------------------------


def gold(*tags: str) -> list[Sentence]:
    """Sentences of the words w0, w1, ... with tags such as "B-PER I-PER O"."""
    made = [each.split() for each in tags]
    return [Sentence.of_words(f"s-{i}", [f"w{k}" for k in range(len(t))], t) for i, t in enumerate(made)]


def test_scores_counted_by_hand():
    there = gold("B-PER I-PER O B-LOC", "O B-LOC O", "B-PER O")
    # right: PER of the first; one word too many; missed, and a LOC that is none; right
    said = ["B-PER I-PER B-LOC I-LOC".split(), "B-LOC O O".split(), "B-PER O".split()]
    found = ner.scores(there, said)
    assert found["precision"] == found["f1"] == found["f1_lenient"] == pytest.approx(2 / 4)  # 4 said, 2 right
    assert found["recall"] == pytest.approx(2 / 4)  # 4 there
    assert found["token_accuracy"] == pytest.approx(5 / 9)
    assert found["by_kind"] == {
        "LOC": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 2},
        "PER": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 2},
    }
    assert (found["n_sentences"], found["n_words"], found["n_entities"]) == (3, 9, 4)


def test_strict_and_lenient_differ_where_an_entity_begins_with_i():
    there, said = gold("B-PER I-PER O B-LOC"), [["I-PER", "I-PER", "O", "B-LOC"]]
    found = ner.scores(there, said)
    assert found["precision"] == 1.0 and found["recall"] == 0.5 and found["f1"] == pytest.approx(2 / 3)
    assert found["f1_lenient"] == 1.0
    assert found["by_kind"]["PER"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1}
    repaired = ner.scores(there, [to_bio(said[0], "BIO")])
    assert repaired["f1"] == repaired["f1_lenient"] == 1.0


def of_length(n: int, tags):
    return st.lists(tags, min_size=n, max_size=n)


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any), st.data())
def test_scores_are_those_of_seqeval_and_of_an_independent_count(lengths, data):
    from seqeval.metrics import f1_score, precision_score, recall_score
    from seqeval.scheme import IOB2

    tag = st.sampled_from(LABELS)
    there = [to_bio(data.draw(of_length(n, tag)), "BIO") for n in lengths]
    said = [data.draw(of_length(n, tag)) for n in lengths]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ner.scores(gold(*(" ".join(tags) for tags in there)), said)
    public = {"mode": "strict", "scheme": IOB2, "zero_division": 0}
    for name, score in (("f1", f1_score), ("precision", precision_score), ("recall", recall_score)):
        assert found[name] == pytest.approx(float(score(there, said, **public)))
    assert found["f1_lenient"] == pytest.approx(float(f1_score(there, said, zero_division=0)))
    entities = [{(i, *e) for i, tags in enumerate(each) for e in entities_of(tags)} for each in (there, said)]
    n_right, n_all = len(entities[0] & entities[1]), len(entities[0]) + len(entities[1])
    assert found["f1_lenient"] == pytest.approx(2 * n_right / n_all if n_all else 0.0)
    assert found["n_entities"] == len(entities[0]) == sum(each["support"] for each in found["by_kind"].values())
    legal = ner.scores(gold(*(" ".join(tags) for tags in there)), [to_bio(tags, "BIO") for tags in said])
    assert legal["f1"] == pytest.approx(legal["f1_lenient"])


def test_no_entity_anywhere_scores_zero_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ner.scores(gold("O O", "O"), [["O", "O"], ["O"]])
    assert (found["f1"], found["precision"], found["recall"], found["f1_lenient"]) == (0.0, 0.0, 0.0, 0.0)
    assert found["token_accuracy"] == 1.0 and found["by_kind"] == {} and found["n_entities"] == 0


def test_without_seqeval_the_error_holds_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "seqeval.metrics", None)
    with pytest.raises(ModelError, match=r'pip install "labkit-bidirectional\[train\]"'):
        ner.scores(gold("O"), [["O"]])


def test_the_baselines_know_the_usual_tag_of_a_word_and_no_more():
    train = [
        Sentence.of_words("a", ["May", "Day", "May", "may"], ["B-DATE", "I-DATE", "B-PER", "O"]),
        Sentence.of_words("d", ["x", "x"], ["B-PER", "O"]),
        Sentence.of_words("b", ["May"], ["B-PER"]),
    ]
    test = [Sentence.of_words("c", ["May", "Day", "new", "may", "x"], ["O"] * 5)]
    tags = ner.majority_baseline(train, test)
    assert tags["outside"] == [["O"] * 5]
    assert tags["most_frequent"] == [["B-PER", "B-DATE", "O", "O", "O"]]  # I-DATE made legal; of a tie, O
    assert ner.scores(train, ner.majority_baseline(train, train)["outside"])["recall"] == 0.0
