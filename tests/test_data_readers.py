"""Readers of labelled data: every form is read, and every bad row is named by file and place."""

from __future__ import annotations

import json
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.datasets.examples import (
    Answer,
    Entity,
    Labelled,
    Pair,
    Question,
    Sentence,
    entities_in,
    entities_of,
    tags_over,
    to_bio,
    words_of,
)
from labkit.datasets.files import csv_rows, json_lines
from labkit.datasets.readers import TASKS, read, scan
from labkit.errors import DataError, LabkitError
from tests.data_files import write

PARIS = "Paris lies on the Seine. The Seine rises in Burgundy."
ROW = {"id": "a", "title": "Rivers", "context": PARIS, "question": "Where is Paris?"}
ANSWERS = [{"text": "the Seine", "answer_start": 14}]
QUESTION = Question("a", "Where is Paris?", PARIS, (Answer("the Seine", 14),), "Rivers")


def refused(task: str, source, **options) -> str:
    """The one-line message of the error."""
    with pytest.raises(DataError) as caught:
        read(task, source, **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def qa(id: object = "a", start: int = 14, **more) -> dict:
    return {"id": id, "question": "Where is Paris?", "answers": [{"text": "the Seine", "answer_start": start}]} | more


def squad(*questions: object) -> str:
    return json.dumps({"data": [{"title": "Rivers", "paragraphs": [{"context": PARIS, "qas": questions}]}]})


# ---- questions -------------------------------------------------------------------------------------------------------


def test_squad_1_and_2(tmp_path):
    thrice = qa("b", answers=[{"text": "Seine", "answer_start": start} for start in (18, 18, 29)])
    without = qa("c", is_impossible=True, answers=[], plausible_answers=[{"text": "Burgundy", "answer_start": 44}])
    first, second, unanswerable = read("qa", write(tmp_path / "dev.json", squad(qa(), thrice, without)))
    assert first == QUESTION and unanswerable.answers == ()
    assert second.answers == (Answer("Seine", 18), Answer("Seine", 29))
    articles = [{"paragraphs": [{"context": PARIS, "qas": [qa(id)]}]} for id in "ab"]
    untitled = read("qa", write(tmp_path / "dev.json", json.dumps({"data": articles})))
    assert len({question.group for question in untitled}) == 2


@pytest.mark.parametrize("answers", [ANSWERS, {"text": ["the Seine"], "answer_start": [14]}], ids=["objects", "lists"])
def test_one_question_in_each_form_of_json(tmp_path, answers):
    rows = [ROW | {"answers": answers}, ROW | {"id": "b", "answers": {"text": [], "answer_start": []}}]
    for form in (json.dumps({"data": rows}), json.dumps(rows), rows):  # JSON lines may be called .json
        first, second = read("qa", write(tmp_path / "dev.json", form))
        assert first == QUESTION and second.answers == ()
    assert read("qa", write(tmp_path / "dev.jsonl", rows)) == [first, second]


# ---- columns and tag schemes -----------------------------------------------------------------------------------------

# One sentence in each scheme: two people side by side, then one that is alone, then a place of two words.
BY_SCHEME = {
    "BIO": "B-PER I-PER B-PER O B-PER O B-LOC I-LOC",
    "IOB1": "I-PER I-PER B-PER O I-PER O I-LOC I-LOC",
    "BIOES": "B-PER E-PER S-PER O S-PER O B-LOC E-LOC",
    "BILOU": "B-PER L-PER U-PER O U-PER O B-LOC L-LOC",
    "IO": "I-PER I-PER I-PER O I-PER O I-LOC I-LOC",
}
MERGED = "B-PER I-PER I-PER O B-PER O B-LOC I-LOC"  # IO cannot separate neighbours of one kind
KINDS = st.sampled_from(["PER", "LOC", "work-of-art"])


@pytest.mark.parametrize(("name", "tags"), BY_SCHEME.items())
def test_a_tag_scheme_is_rewritten_as_bio(tmp_path, name, tags):
    expected = (MERGED if name == "IO" else BY_SCHEME["BIO"]).split()
    column_file = write(tmp_path / "a.conll", "".join(f"w {tag}\n" for tag in tags.split()))
    row_file = write(tmp_path / "a.jsonl", [{"words": ["w"] * 8, "tags": tags.split()}])
    assert [list(read("ner", path)[0].tags) for path in (column_file, row_file)] == [expected] * 2


def spans_within(data, length: int) -> list[tuple[int, int]]:
    cuts = data.draw(st.lists(st.integers(0, length), unique=True, max_size=8).map(sorted))
    return [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if data.draw(st.booleans())]


@given(st.data(), st.integers(1, 12), st.sampled_from(["BI", "SE", "UL"]))
def test_entities_survive_each_scheme_that_can_express_them(data, length, letters):
    entities, tags = [(a, b, data.draw(KINDS)) for a, b in spans_within(data, length)], ["O"] * length
    for a, b, kind in entities:
        tags[a:b] = [f"B-{kind}"] + [f"I-{kind}"] * (b - a - 1)
        tags[b - 1] = f"{letters[b - a > 1]}-{kind}"
    assert entities_of(to_bio(tags)) == entities


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r\r\n", "\r"])
def test_columns_with_documents_comments_hashtags_and_any_line_end(tmp_path, ending):
    content = (
        "\ufeff-DOCSTART- -X- -X- O\n\nAnn NNP B-NP B-PER\nsmiles VBZ B-VP O\n\n# x y O\n#ann x y O\n\n# a comment\n"
        "-DOCSTART- -X- O O\n\n\nNew\u00a0York\tNNP\tB-NP\tB-LOC \n# document = two\n#\tcomment\n#x=y\tNN\tO\tO\n"
    )
    sentences = read("ner", write(tmp_path / "a.txt", content.replace("\n", ending)))
    assert [(sentence.words, sentence.tags, sentence.group) for sentence in sentences] == [
        (("Ann", "smiles"), ("B-PER", "O"), "document 1"),
        (("#", "#ann"), ("O", "O"), "document 1"),
        (("New\u00a0York",), ("B-LOC",), "document 2"),
        (("#x=y",), ("O",), "two"),
    ]
    assert [sentences[0].text[a:b] for a, b in sentences[0].spans] == ["Ann", "smiles"]
    sentences = read("ner", write(tmp_path / "a.conll", "\nAnn B-PER\n\n\nBo B-PER\n"))
    assert len({sentence.group for sentence in sentences}) == len(sentences) == 2


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ("#\tdispatch.example [2005]\n1\tUni\tB-ORG\tO\n2\tWien\tI-ORG\tB-LOC\n3\tliegt\tO\tO\n", (3, 4)),
        ("EU NNP B-NP B-ORG B-ORG\nsays VBZ B-VP O O\n", (4, 5)),  # true and predicted
    ],
)
@pytest.mark.filterwarnings("ignore:.*numbers the words")
def test_two_columns_of_tags_are_an_error_until_one_is_chosen(tmp_path, content, columns):
    path = write(tmp_path / "a.tsv", content)
    message, rows = refused("ner", path), [line.split() for line in content.splitlines() if line[0] != "#"]
    assert "--tag-column" in message
    for column in columns:
        assert f"column {column}" in message
        assert read("ner", path, tag_column=column)[0].tags == tuple(row[column - 1] for row in rows)
    for column in (1, 6):
        assert "the column of the tags is" in refused("ner", path, tag_column=column)


@pytest.mark.parametrize(
    ("content", "tags"),
    [
        ("EU NNP B-NP B-ORG\nsays VBZ B-VP O\n", "B-ORG O"),  # CoNLL-2003
        ("EU EU NE I-NC I-ORG\nsagt sagen VVFIN I-VC O\n", "B-ORG O"),  # in German
        ("EU NNP B-NP\nsays VBZ B-VP\n", "B-NP B-VP"),  # CoNLL-2000
        ("EU B-ORG _\nsays O _\n", "B-ORG O"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_the_tag_column_is_found_beside_parts_of_speech_and_chunks(tmp_path, content, tags):
    (sentence,) = read("ner", write(tmp_path / "a.txt", content))
    assert sentence.tags == tuple(tags.split()) and sentence.words == tuple(re.findall(r"^\S+", content, re.M))


@pytest.mark.parametrize(
    "content", ["1\tUni\tB-ORG\n2\t3\tO\n\n1\tAnn\tB-PER\n", "0 Uni NN B-ORG\n1 3 CD O\n\n2 Ann NE B-PER\n"]
)
def test_a_column_that_numbers_the_words_is_skipped_with_a_warning(tmp_path, content):
    with pytest.warns(UserWarning, match="column 1 numbers the words"):
        sentences = read("ner", write(tmp_path / "a.conll", content))
    assert [sentence.words for sentence in sentences] == [("Uni", "3"), ("Ann",)]
    assert [sentence.tags for sentence in sentences] == [("B-ORG", "O"), ("B-PER",)]


# ---- words and spans of a raw text -----------------------------------------------------------------------------------

ODD = st.sampled_from(
    ["\u200b", "\u200d", "\ufe0f", "\ufeff", "\u00ad", "\u0301", "\u093f", "\u00a0", "\u2028", "’s", "U.S.", "3.5", "'"]
    + ["👩‍👩‍👧", "👍🏽", "🇩🇪", "1️⃣", "e\u0301", "हिन्दी", "東京", "O'Neil-Smith", "_", "\x00", "\x85", "#tag"]
)
ANY_TEXT = st.lists(st.one_of(ODD, st.text(max_size=6), st.sampled_from(" \n\ta.")), max_size=12).map("".join)


@settings(max_examples=100)
@given(st.data(), ANY_TEXT)
def test_words_leave_out_only_white_space_and_joiners_and_entities_come_back_from_their_tags(data, text):
    words = words_of(text)
    gap, at = r"[\s\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff\u00ad]*", 0
    for start, end in [*words, (len(text), len(text))]:
        assert at <= start <= end and re.fullmatch(gap, text[at:start]) and not re.search(r"\s", text[start:end])
        at = end
    spans = spans_within(data, len(words))
    entities = [Entity(words[a][0], words[b - 1][1], data.draw(KINDS)) for a, b in spans]
    assert entities_in(words, tags_over(words, data.draw(st.permutations(entities)), text)) == entities


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Brill's U.S. office, 14:30.", ["Brill", "'s", "U.S.", "office", ",", "14:30", "."]),
        ("ok 👍🏽👩‍👩‍👧 🇩🇪🇫🇷 1️⃣ ❤️!", ["ok", "👍🏽", "👩‍👩‍👧", "🇩🇪", "🇫🇷", "1️⃣", "❤️", "!"]),
        ("#tag हिन्दी Cafe\u0301 Zu\u0308rich", ["#", "tag", "हिन्दी", "Cafe\u0301", "Zu\u0308rich"]),
    ],
)
def test_words_of(text, words):
    assert [text[a:b] for a, b in words_of(text)] == words


# ---- JSONL, CSV, TSV -------------------------------------------------------------------------------------------------

CELLS = [  # rows that a table can hold too
    (
        "qa",
        {"id": "a", "question": "Where?", "context": PARIS, "answer": "the Seine", "answer_start": "14", "title": "g"},
        Question("a", "Where?", PARIS, (Answer("the Seine", 14),), "g"),
    ),
    ("qa", {"id": "a", "query": "q", "passage": "a b", "answer": ""}, Question("a", "q", "a b")),
    (
        "ner",
        {"id": "a", "tokens": "Ann saw", "ner_tags": "B-X O"},
        Sentence.of_words("a", ["Ann", "saw"], ["B-X", "O"]),
    ),
    ("classify", {"guid": "a", "sentence": "fine, really", "category": "good"}, Labelled("a", "fine, really", "good")),
    ("embed", {"id": "a", "sentence1": "a", "sentence2": "b", "similarity_score": "0.5"}, Pair("a", "a", "b", 0.5)),
    ("embed", {"id": "a", "first": "c", "second": "d", "score": ""}, Pair("a", "c", "d")),
]


@pytest.mark.parametrize(("task", "row", "example"), CELLS)
def test_a_row_of_each_task_as_a_table_and_as_json(tmp_path, task, row, example):
    for suffix, separator in (("csv", ","), ("tsv", "\t")):
        names, cells = (separator.join(f'"{cell}"' for cell in line) for line in (row, row.values()))
        for header in (names, names.replace('"', "")):
            assert read(task, write(tmp_path / f"a.{suffix}", f"{header}\n{cells}\n")) == [example]
    assert read(task, write(tmp_path / "a.jsonl", [row])) == [example]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_a_table_is_read_whatever_separates_its_cells(tmp_path, separator):
    table = f'Text{separator} LABEL\r\n"a, b; ""c""\nd"{separator} x\r\n'
    table += f"{separator}\r\n{'word ' * 60_000}{separator} y\r\n"
    example, long = read("classify", write(tmp_path / "a.csv", "\ufeff" + table))
    assert (example.text, example.label, long.label, len(long.text)) == ('a, b; "c"\nd', "x", "y", 300_000)


ANN = Sentence("1", "Ann's dog", ("Ann", "'s", "dog"), ((0, 3), (3, 5), (6, 9)), ("B-PER", "O", "O"))
DOCCANO = {"id": 7, "start_offset": 0, "end_offset": 3, "label": "PER"}


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("qa", {"query": "q", "post": "p", "answers": [], "document_id": 0}, Question("1", "q", "p", (), "0")),
        ("qa", {"question": "q", "context": "a b", "answer": "b"}, Question("1", "q", "a b", (Answer("b", 2),))),
        ("ner", {"words": ["a"], "labels": ["O"], "group": "g"}, Sentence.of_words("1", ["a"], ["O"], "g")),
        ("ner", {"text": "Ann's dog", "entities": [{"start": 0, "end": 3, "label": "PER"}]}, ANN),
        ("ner", {"text": "Ann's dog", "entities": [DOCCANO], "relations": []}, ANN),
        ("ner", {"text": "Ann's dog", "label": [[0, 3, "PER"]]}, ANN),  # doccano, and spaCy's triples
        ("classify", {" Text": "t", "LABEL ": " l "}, Labelled("1", "t", "l")),
        ("classify", {"content": "a\u2028b\x85c", "class": 0}, Labelled("1", "a\u2028b\x85c", "0")),
        ("embed", {"anchor": "a", "positive": "b", "score": 4}, Pair("1", "a", "b", 4.0)),
    ],
)
def test_jsonl_with_other_names_of_the_fields(tmp_path, task, row, expected):
    assert read(task, write(tmp_path / "a.jsonl", [json.dumps(row, ensure_ascii=False), "", " "])) == [expected]


def test_rows_with_their_numbers_come_from_lists_lines_and_tables(tmp_path):
    rows = [{"a": "1"}, {"a": "2"}]
    assert json_lines(write(tmp_path / "a.json", json.dumps(rows))) == [(1, rows[0]), (2, rows[1])]
    assert json_lines(write(tmp_path / "a.jsonl", [rows[0], "", rows[1]])) == [(1, rows[0]), (3, rows[1])]
    assert csv_rows(write(tmp_path / "a.csv", "a\n1\n2\n")) == [(2, rows[0]), (3, rows[1])]


# ---- bad input -------------------------------------------------------------------------------------------------------

GOOD = {
    "qa": ROW | {"answers": ANSWERS}, "ner": {"words": ["a"], "tags": ["O"]}, "classify": {"text": "t", "label": "l"},
    "embed": {"first": "a", "second": "b"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "name", "content", "faults"),  # two rows of each file are good
    [
        ("classify", "a.jsonl", [GOOD["classify"] | {"id": 7}, "{bad", [1], {}, GOOD["classify"] | {"id": 7},
                                 GOOD["classify"]],
         {"line 2": "cannot be read as JSON", "line 3": "holds [1]", "line 4": "label is None",
          "line 5": "has the id '7', which another row has (1)"}),
        ("classify", "a.csv", 'text,label\n"a\nb",l\nx\n"a" b,c\nt,\nt,l\n',
         {"line 4": "has 1 cells", "line 5": "is not CSV", "line 6": "label is ''"}),
        ("ner", "a.conll", "w B-X\n\nx\n\nv O\nx Y\n\nx y O\ny O\n\nw B-X\nv O\n",
         {"line 3": "has the columns ['x']", "line 6": "has the tag 'Y'", "line 8": "has the columns"}),
        ("qa", "a.json", squad(qa("a"), qa("b", start=3), None, qa("a"), qa("c")),
         {"question 'b'": "answer_start is 3", "article 1, paragraph 1, question 3": "holds None",
          "question 'a'": "has the id 'a', which another row has"}),
    ],
)  # fmt: skip
def test_a_bad_row_hides_no_other(tmp_path, task, name, content, faults):
    result = scan(task, path := write(tmp_path / name, content))
    starts = [f"{path}, {place}: {what}" for place, what in faults.items()]
    assert all(fault.startswith(start) for fault, start in zip(result.faults, starts, strict=True)), result.faults
    message = refused(task, path)
    assert message.startswith(result.faults[0]) and "--skip-bad-rows" in message
    with pytest.warns(UserWarning, match=f"{len(faults)} of {len(faults) + 2} rows cannot be read and are skipped"):
        assert read(task, path, skip_bad_rows=True) == result.examples


def _entities(*spans: tuple[int, int]) -> dict:
    return {"text": PARIS, "entities": [{"start": a, "end": b, "label": "LOC"} for a, b in spans]}


def _answer(**answer: object) -> dict:
    return ROW | {"id": "x", "answers": [{"text": "the Seine"} | answer]}


BAD_ROWS = [  # (task, row, what the message says of it)
    ("qa", _answer(start=15), "answer_start is 15, but 'the Seine' is at 14"),
    ("qa", _answer(text="Seine"), "answer_start is missing, and the context holds 'Seine' 2 times"),
    ("qa", _answer(text="the Rhine"), "the answer 'the Rhine' is not in the context"),
    *(("qa", _answer(start=start), f"answer_start is {start!r}") for start in ("x", 14.5, True)),
    ("qa", _answer(text=""), "expected an object"),
    ("qa", ROW | {"id": "x", "answers": {"text": ["a", "b"], "answer_start": [1]}}, "two lists of one length"),
    ("qa", {"question": "q", "context": "c"}, "(fields: question, context)"),
    ("qa", {"context": "c", "answers": []}, "has no question"),
    ("qa", _answer(start=14) | {"is_impossible": True}, "is_impossible is true, but there is the answer"),
    ("ner", {"words": ["a", "b"], "tags": ["O"]}, "has 2 words and 1 tags"),
    ("ner", {"words": ["a"], "tags": [3]}, "the tag 3; expected"),
    ("ner", {"text": "Ann", "entities": [[0, 3]]}, "has the entity [0, 3]; expected start, end and label"),
    ("ner", _entities((0, 3)), "from 0 to 3 of the text, which cuts through 'Paris'"),
    ("ner", _entities((0, 5), (0, 10)), "overlaps another"),
    ("ner", _entities((44, 99)), "lies outside of its 53 characters"),
    ("classify", {"text": "t", "label": float("nan")}, "label is nan"),
    ("embed", GOOD["embed"] | {"score": 10**400}, "score is "),
]


@pytest.mark.parametrize(("task", "row", "words"), BAD_ROWS)
def test_a_bad_row_is_named_by_its_line(tmp_path, task, row, words):
    message = refused(task, path := write(tmp_path / "a.jsonl", [GOOD[task], "", row]))  # the empty line counts
    assert message.startswith(f"{path}, line 3: ") and words in message


@pytest.mark.parametrize(
    ("task", "name", "content", "words"),
    [
        ("qa", "a.json", '{"data": [\n1,,]}', ": line 2 column 3"),
        ("qa", "a.json", '{"data": [{"paragraphs": [null]}]}', "article 1, paragraph 1: is None; expected an object"),
        ("qa", "a.json", '{"data": []}', "holds no row"),
        ("classify", "a.jsonl", b'{"text": "t", "label": "l"}\n{"text": "\xe9"}', "line 2: is not UTF-8"),
        ("classify", "a.csv", 'text,label\n"a,x\n', "line 2: is not CSV (a quote is opened and never closed)"),
        ("classify", "a.csv", "text,Text ,label\na,b,x\n", "line 1: has a column twice"),
        ("qa", "a.xml", "x", "ends in .xml; for qa give SQuAD as .json, rows as .json, .jsonl or .csv"),
    ],
)
def test_a_bad_file_is_named_with_the_place(tmp_path, task, name, content, words):
    message = refused(task, path := write(tmp_path / name, content))
    assert message.startswith(str(path)) and words in message


def test_a_missing_file_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(tmp_path)
    for name in ("none.jsonl", "deep/none.json:train", tmp_path / "none", "../none"):
        assert "does not exist" in refused("qa", name)
    assert "cannot be opened" in refused("qa", "a" * 300 + ".csv")
    assert "the task is 'speech'; choose one of" in refused("speech", "a.jsonl")
    assert "leave the tag column out" in refused("ner", write(tmp_path / "a.jsonl", "{}"), tag_column=2)
    assert "1 of 1 rows cannot be read" in refused("classify", tmp_path / "a.jsonl", skip_bad_rows=True)
    assert no_network == []


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
FIELDS = ["question", "context", "answers", "answer", "words", "tags", "text", "entities", "label", "first", "second"]
ANY_ROW = st.dictionaries(st.sampled_from([*FIELDS, "score", "id", "group"]), JSON_VALUES).map(json.dumps)
ANY_CONTENT = st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode), ANY_ROW.map(str.encode))
SUFFIXES = [*((task, ".jsonl") for task in TASKS), ("classify", ".csv"), ("ner", ".conll"), ("qa", ".json")]


@settings(max_examples=200)
@given(st.sampled_from(SUFFIXES), ANY_CONTENT)
def test_any_content_is_read_or_refused_in_one_line(tmp_path_factory, form, content):
    path = write(tmp_path_factory.getbasetemp() / f"any{form[1]}", content)
    try:
        read(form[0], path)
    except DataError as error:
        assert str(path) in str(error) and len(str(error).splitlines()) == 1


# ---- the hub's layouts -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Folders with the layouts of these data sets on the hub, a row or two in each."""
    datasets = pytest.importorskip("datasets")
    place = tmp_path_factory.mktemp("hub")
    datasets.disable_progress_bars()
    text, integer, label = (datasets.Value("string"), datasets.Value("int32"), datasets.ClassLabel)

    def write_split(path: str, features: dict, *rows: dict) -> None:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        table = datasets.Dataset.from_list(list(rows), features=datasets.Features(features))
        table.to_parquet(place / path)

    answers = datasets.Sequence({"text": text, "answer_start": integer})
    features = dict.fromkeys(ROW, text) | {"answers": answers}
    rows = [ROW | {"answers": {"text": ["the Seine"], "answer_start": [14]}}]
    rows.append(ROW | {"id": "b", "answers": {"text": [], "answer_start": []}})
    write_split("squad_v2/squad_v2/validation-00000-of-00001.parquet", features, *rows)
    tags = datasets.Sequence(label(names=["O", "B-PER", "I-PER", "B-ORG", "I-ORG"]))
    write_split(  # as in the branch refs/convert/parquet: no card
        "wnut_17/wnut_17/test/0000.parquet", {"id": text, "tokens": datasets.Sequence(text), "ner_tags": tags},
        {"id": "0", "tokens": ["Ann", "joins", "Acme"], "ner_tags": [1, 0, 3]},
    )  # fmt: skip
    features = {"text": text, "label": label(names=["poor", "good"])}
    write_split("reviews/train.parquet", features, {"text": "fine", "label": 1}, {"text": "bad", "label": 0})
    write_split("reviews/test.parquet", features, {"text": "fine", "label": -1})  # the hub's -1: not given
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
        yield place


def test_data_with_the_hubs_layout_are_read_offline(hub, no_network):
    first, second = read("qa", f"{hub}/squad_v2:validation")
    assert first == QUESTION and second.answers == ()
    (sentence,) = read("ner", f"{hub}/wnut_17:test")
    assert (sentence.words, sentence.tags) == (("Ann", "joins", "Acme"), ("B-PER", "O", "B-ORG"))
    assert [(e.text, e.label) for e in read("classify", f"{hub}/reviews:train")] == [("fine", "good"), ("bad", "poor")]
    assert no_network == []


@pytest.mark.parametrize(
    ("task", "name", "words"),
    [
        ("ner", "{hub}/wnut_17:dev", "wnut_17 (split dev) cannot be read"),
        ("qa", "{hub}/wnut_17:test", "wnut_17:test, row 1: has no context"),
        ("classify", "{hub}/reviews:test", "reviews:test, row 1: label is None"),
        ("ner", "no-such-data", "no-such-data is not a file or a folder, nor one of labkit's data sets (field-notes"),
        ("ner", "wikiann/en:dev", "the hub has no unimelb-nlp/wikiann, or cannot"),
    ],
)
def test_what_the_hub_does_not_have_is_one_error(hub, monkeypatch, tmp_path, no_network, task, name, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused(task, name.format(hub=hub))


def test_the_hub_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LabkitError, match="pip install"):
        read("qa", "squad_v2:validation")
