"""Named entities: words over tokens, windows, batches, decoding, prediction with a model, entity scores, baselines."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import labkit
from labkit.datasets.examples import Entity, Sentence, to_bio, words_of
from labkit.errors import DataError
from labkit.models.tiny import build_tiny_tokenizer
from labkit.tasks import ner
from labkit.tasks.base import get

TASK = get("ner")
LABELS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
TINY = build_tiny_tokenizer()
MINI = labkit.load("gpt2-mini", device="cpu").tokenizer
PAD, EOS, BOS = 0, 1, 2


def sentence(text: str, tags: list[str] | None = None, spans: list[tuple[int, int]] | None = None) -> Sentence:
    spans = words_of(text) if spans is None else spans
    tags = tags if tags is not None else ["O"] * len(spans)
    return Sentence("s-1", text, tuple(text[a:b] for a, b in spans), tuple(spans), tuple(tags))


def decoded(sentences, rows):
    """The predictions from logits whose most probable tag is the target, and O where there is no target."""
    targets = [torch.tensor(row.targets).clamp(min=0) for row in rows]
    return TASK.decode(sentences, rows, [5.0 * torch.nn.functional.one_hot(t, len(LABELS)) for t in targets], LABELS)


def lost_words(rows, sentence):
    return sorted({*range(len(sentence.words))} - {word for row in rows for _, word in row.words})


@pytest.fixture
def gpt2():
    torch.manual_seed(0)
    return labkit.load("tiny-gpt2", task=TASK.head(LABELS, dropout=0.0), device="cpu")


# place:   0     1   2   3  4     5 67 8 9 10 11 12
# token: <bos> The cat in Paris , _ G u r k  .  <eos>
GURK = sentence("The cat in Paris, Gurk.", ["O", "O", "O", "B-LOC", "O", "B-LOC", "O"])


@pytest.mark.parametrize(("label_on", "place_of_gurk"), [("first", 7), ("last", 10)])
def test_a_word_is_labelled_on_its_first_or_last_token_and_nowhere_else(label_on, place_of_gurk):
    (row,) = get("ner", label_on=label_on).rows(TINY, [GURK], LABELS)
    assert (row.ids[0], TINY.decode(row.ids[1:-1]), row.ids[-1]) == (BOS, GURK.text, EOS)
    assert row.words == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (place_of_gurk, 5), (11, 6)]
    tags = {1: 0, 2: 0, 3: 0, 4: 1, 5: 0, place_of_gurk: 1, 11: 0}
    assert row.targets == [tags.get(place, -100) for place in range(13)] and row.example == 0


def test_a_tag_that_the_model_does_not_have_is_not_trained_on():
    (row,) = TASK.rows(TINY, [sentence("A cat", ["O", "B-SHIP"])], LABELS)
    assert len(row.words) == 2 and set(row.targets) == {-100, 0}


def test_of_two_words_in_one_token_one_is_lost_unless_the_other_has_another():
    quoted = sentence('in "Paris."', ["O", "O", "B-LOC", "O", "B-PER"])
    assert MINI.tokenize(quoted.text)[-1] == '."'
    messages = []
    rows = TASK.rows(MINI, [quoted], LABELS, messages.append)
    assert len(lost_words(rows, quoted)) == 1 and len(messages) == 1 and messages[0].startswith("1 words")
    moved = sentence('Paris."', spans=[(0, 6), (6, 7)])  # "Paris." and the quotation mark
    assert lost_words(TASK.rows(MINI, [moved], LABELS), moved) == []


def test_a_sentence_without_a_labelled_word_is_in_no_row_and_has_no_entities(gpt2):
    empty = sentence("The cat", spans=[])
    assert [row.example for row in TASK.rows(TINY, [empty, GURK, empty], LABELS)] == [1]
    tagged = TASK.predict(gpt2.model, TINY, [empty, GURK, empty], LABELS)
    assert tagged[0] == tagged[2] == ner.Tagged("s-1", [], [], [])
    assert len(tagged[1].tags) == 7 and TASK.predict(gpt2.model, TINY, [empty], LABELS) == [tagged[0]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(3, 14), st.data())
def test_each_word_is_labelled_once_with_half_of_the_overlap_on_either_side(lengths, max_length, data):
    stride = data.draw(st.integers(1, max_length - 2))
    shared = max_length - 2 - stride
    ends = list(itertools.accumulate(n + 1 for n in lengths))  # words of single-byte tokens, one-token spaces between
    spans = [(end - 1 - n, end - 1) for end, n in zip(ends, lengths, strict=True)]
    text = " ".join("x" * n for n in lengths)
    rows = get("ner", max_length=max_length, doc_stride=stride).rows(TINY, [sentence(text, spans=spans)], LABELS)
    assert sorted(word for row in rows for _, word in row.words) == list(range(len(spans)))
    for row in rows:
        assert len(row.ids) <= max_length and sum(target != -100 for target in row.targets) == len(row.words)
        for place, word in row.words:
            first = spans[word][1] - place  # of the window, in tokens of the text
            assert text[first : first + len(row.ids) - 2] == TINY.decode(row.ids[1:-1])
            assert place > shared // 2 or first == 0
            assert len(row.ids) - 1 - place >= shared - shared // 2 or first + len(row.ids) - 2 == len(text)


EMOJI = ["👩\u200d🚀", "🇫🇮", "❤\ufe0f", "e\u0301", "\u200b", "\u200d", "\ufeff"]
SIGNS = st.sampled_from([*"aB3.,'’\"-_ \n\t", "the", " Paris", *EMOJI]) | st.characters(exclude_categories=["Cs"])
TEXTS = st.lists(SIGNS, min_size=1, max_size=40).map("".join)
STEPS = st.lists(st.sampled_from(["O", "LOC", "PER", "on"]), min_size=1, max_size=30)


def tagged_words(text: str, steps: list[str]) -> tuple[Sentence, list[Entity]]:
    """A sentence and its entities, made together: each word is outside, begins an entity, or continues one ("on")."""
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


@pytest.mark.parametrize("tokenizer", [TINY, MINI], ids=["bytes", "gpt2-mini"])
@settings(max_examples=80)
@given(TEXTS, STEPS, st.sampled_from(ner.LABEL_ON), st.integers(4, 30), st.integers(2, 30))
@example("Oslo 👩\u200d🚀 sat\u200b", ["LOC", "PER", "on"], "last", 9, 6)
@example('no." (So), he', ["PER", "on", "LOC"], "last", 12, 7)
def test_perfect_logits_give_back_the_tags_and_the_spans_of_any_text(
    tokenizer, text, steps, label_on, max_length, stride
):
    gold, entities = tagged_words(text, steps)
    task = get("ner", max_length=max_length, doc_stride=stride, label_on=label_on)
    rows = task.rows(tokenizer, [gold], LABELS)
    (tagged,) = decoded([gold], rows)
    lost = lost_words(rows, gold)
    assert tagged.tags == to_bio(["O" if word in lost else tag for word, tag in enumerate(gold.tags)])
    assert [word for word, p in enumerate(tagged.probabilities) if p is None] == lost
    assert tokenizer is MINI or not lost  # where tokens are bytes, every word has its own
    if not lost:
        expected = [(e.start, e.end, e.label, text[e.start : e.end]) for e in entities]
        assert [tuple(entity.values()) for entity in TASK.record(tagged)["entities"]] == expected


def test_illegal_tags_are_repaired():
    (row,) = TASK.rows(TINY, [sentence("The cat in Paris")], LABELS)
    logits = torch.zeros(len(row.ids), len(LABELS))
    for place, tag in zip(range(1, 5), ["I-PER", "I-PER", "I-LOC", "B-LOC"], strict=True):
        logits[place, LABELS.index(tag)] = 2.0
    (tagged,) = TASK.decode([sentence("The cat in Paris")], [row], [logits], LABELS)
    assert tagged.tags == ["B-PER", "I-PER", "B-LOC", "B-LOC"]
    entities = [(0, 7, "PER", "The cat"), (8, 10, "LOC", "in"), (11, 16, "LOC", "Paris")]
    assert [tuple(entity.values()) for entity in tagged.entities] == entities
    e2 = torch.tensor(2.0).exp()
    assert tagged.probabilities == pytest.approx([float(e2 / (e2 + 4))] * 4)


def test_the_loss_and_the_predictions_are_those_of_one_row_at_a_time(gpt2):
    labkit.to_bidirectional(gpt2.model)
    sentences = [GURK, sentence("Ann Lee sat by the river.", ["B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O"])]
    task = get("ner", max_length=10, doc_stride=4)
    rows = task.rows(gpt2.tokenizer, sentences, LABELS)
    assert len(rows) > 2  # some sentences have several windows
    with torch.no_grad():
        logits = [gpt2.model(torch.tensor([row.ids])).logits[0] for row in rows]
    by_hand = [
        -logits[k][place].log_softmax(-1)[LABELS.index(sentences[row.example].tags[word])]
        for k, row in enumerate(rows)
        for place, word in row.words
    ]
    assert_close(task.loss(gpt2.model, task.collate(rows, PAD)), sum(by_hand) / 14, atol=1e-4, rtol=0)
    expected = task.decode(sentences, rows, logits, LABELS)
    for one, other in zip(task.predict(gpt2.model, gpt2.tokenizer, sentences, LABELS), expected, strict=True):
        assert one.tags == other.tags and one.entities == other.entities
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_labels_hold_both_letters_of_every_kind_in_one_order():
    one, other = sentence("The cat sat", ["B-PER", "O", "I-LOC"]), sentence("in Paris", ["O", "B-DATE"])
    expected = ("O", "B-DATE", "I-DATE", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert TASK.labels([one, other]) == TASK.labels([other, one]) == expected


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: get("ner", label_on="middle").rows(TINY, [GURK], LABELS), "choose one of last, first"),
        (lambda: get("ner", max_length=2).rows(TINY, [GURK], LABELS), "a row needs at least 3 tokens"),
        (lambda: TASK.labels([sentence("The cat", ["O", "O"])]), "nothing to learn"),
    ],
)
def test_invalid_input_is_refused(act, message):
    with pytest.raises(DataError, match=message):
        act()


def gold_of(*tags: str) -> list[Sentence]:
    """Sentences of the words w0, w1, ... with tags such as "B-PER I-PER O"."""
    return [
        Sentence.of_words(f"s-{i}", [f"w{k}" for k in range(len(line.split()))], line.split())
        for i, line in enumerate(tags)
    ]


def test_scores_counted_by_hand():
    gold = gold_of("B-PER I-PER O B-LOC", "O B-LOC O", "B-PER O")
    # correct: PER of the first. Not: a LOC with one word too many, a LOC elsewhere. Correct: the last PER
    predicted = ["B-PER I-PER B-LOC I-LOC".split(), "B-LOC O O".split(), "B-PER O".split()]
    scores = ner.scores(gold, predicted)
    assert scores["precision"] == scores["recall"] == scores["f1"] == pytest.approx(2 / 4)
    assert scores["token_accuracy"] == pytest.approx(5 / 9)
    assert scores["by_kind"] == {
        "LOC": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 2},
        "PER": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 2},
    }
    assert (scores["n_sentences"], scores["n_words"], scores["n_entities"]) == (3, 9, 4)
    lines = TASK.judge(gold, [ner.Tagged(s.id, [], tags, []) for s, tags in zip(gold, predicted, strict=True)])
    counts = {"correct": {"PER": 1}, "predicted": {"LOC": 1, "PER": 1}, "gold": {"LOC": 1, "PER": 1}}
    assert lines[0] == {"id": "s-0", "group": ""} | counts
    totals = {name: sum(sum(line[name].values()) for line in lines) for name in counts}
    assert totals == {"correct": 2, "predicted": 4, "gold": 4}


def test_the_baselines_are_the_usual_tag_of_a_word_and_o():
    train = [
        Sentence.of_words("a", ["May", "Day", "May", "may"], ["B-DATE", "I-DATE", "B-PER", "O"]),
        Sentence.of_words("d", ["x", "x"], ["B-PER", "O"]),
        Sentence.of_words("b", ["May"], ["B-PER"]),
    ]
    test = [Sentence.of_words("c", ["May", "Day", "new", "may", "x"], ["B-PER", *["O"] * 4])]
    assert ner.majority_baseline(train, test) == {
        "outside": [["O"] * 5],
        "most_frequent": [["B-PER", "B-DATE", "O", "O", "O"]],  # I-DATE made legal; of a tie, O
    }
    assert TASK.baselines(train, test) == {"outside": 0.0, "most_frequent": pytest.approx(2 / 3)}
