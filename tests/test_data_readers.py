"""Readers of labelled data: each form read, each bad line named by file and line, written files read back, the hub's
layouts read offline.
"""

from __future__ import annotations

import json
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.datasets.examples import Answer, Entity, Labelled, Pair, Question, Sentence
from labkit.datasets.readers import TASKS, read, scan
from labkit.datasets.tags import entities_of, scheme_of, to_bio
from labkit.datasets.tags import _JOINERS, entities_in, tags_over, words_of
from labkit.errors import DataError, LabkitError

PARIS = "Paris lies on the Seine. The Seine rises in Burgundy."
QUESTION = {"id": "q1", "question": "Where is Paris?", "context": PARIS}
QUESTION |= {"answers": [{"text": "the Seine", "start": 14}]}


def put(folder, name: str, content: str | bytes):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / name


def lines(*rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def refused(task: str, source) -> str:
    """The one line with which `read` refuses."""
    with pytest.raises(DataError) as caught:
        read(task, source)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def squad(*qas, context: object = PARIS, **article) -> str:
    return json.dumps({"data": [{"title": "Rivers", "paragraphs": [{"context": context, "qas": list(qas)}]} | article]})


def qa(id: object = "q1", text: object = "the Seine", start: object = 14, **more) -> dict:
    return {"id": id, "question": "Where is Paris?", "answers": [{"text": text, "answer_start": start}]} | more


# ---- SQuAD -----------------------------------------------------------------------------------------------------------


def test_squad_1_is_read_with_its_groups_and_each_answer_once(tmp_path):
    twice = qa(answers=[{"text": "Seine", "answer_start": at} for at in (18, 18, 29)])
    found = read("qa", put(tmp_path, "dev.json", squad(qa("a"), twice)))
    assert found[0] == Question("a", "Where is Paris?", PARIS, (Answer("the Seine", 14),), "Rivers")
    assert [(each.start, each.end) for each in found[1].answers] == [(18, 23), (29, 34)]
    assert all(PARIS[each.start : each.end] == each.text == "Seine" for each in found[1].answers)


def test_squad_2_without_an_answer_whatever_is_plausible(tmp_path):
    row = qa(is_impossible=True, answers=[], plausible_answers=[{"text": "Burgundy", "answer_start": 44}])
    assert read("qa", put(tmp_path, "dev.json", squad(row, qa("q2", is_impossible=False))))[0].answers == ()


def test_articles_without_a_title_are_groups_all_the_same(tmp_path):
    article = {"paragraphs": [{"context": PARIS, "qas": [qa("a")]}]}
    other = {"paragraphs": [{"context": PARIS, "qas": [qa("b")]}]}
    path = put(tmp_path, "dev.json", json.dumps({"data": [article, other]}))
    assert [each.group for each in read("qa", path)] == ["article 0", "article 1"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"data": [\n1,,]}', r"is not JSON \(.*line 2, column 3"),
        ("[" * 100_000, "not JSON that can be read"),
        ('{"data": ' + "9" * 5000 + "}", "not JSON that can be read"),
        ("[]", "holds no example"),
        ('"SQuAD"', "is not SQuAD"),
        ('{"version": "v2.0"}', "is not SQuAD"),
        ('{"data": 5}', "is not SQuAD"),
        ('{"data": [], "data": []}', "key 'data' twice"),
        ('{"data": ["a"]}', "row 1: holds 'a'"),
        ('{"data": [{"paragraphs": null}]}', "article 1: .*paragraphs"),
        ('{"data": [{"paragraphs": [null]}]}', "article 1, paragraph 1: .*qas"),
        ('{"data": [{"paragraphs": [{"qas": [7]}]}]}', "article 1, paragraph 1, question 1: holds 7"),
        ('{"data": []}', "holds no example"),
        (squad(), "holds no example"),
        (squad({"id": "q1", "question": "Where?"}), "question 'q1': has no answers"),
        (squad(qa(answers=None)), "question 'q1': answers is None"),
        (squad(qa(answers=5)), "question 'q1': answers is 5"),
        (squad(qa(question=None)), "question 'q1': question is None"),
        (squad(qa(is_impossible="no")), "question 'q1': is_impossible is 'no'; expected true or false"),
        (squad(qa(is_impossible=True)), "question 'q1': is_impossible is true, but there is the answer.*the Seine"),
        (squad(qa(answers=[], is_impossible=False)), "question 'q1': has no answer, but is_impossible is false"),
        (squad(qa(), context=["Paris"]), r"question 'q1': context is \['Paris'\]"),
        (squad(qa(start=15)), "question 'q1': answer_start is 15, but 'the Seine' is at 14"),
        (squad(qa(start=-9)), "question 'q1': answer_start is -9, but 'the Seine' is at 14"),
        (squad(qa(start=float("nan"))), "question 'q1': answer_start is nan"),
        (squad(qa(text="the Rhine")), "question 'q1': the answer 'the Rhine' is not in the context"),
        (squad(qa(text="")), r"question 'q1': answers\[0\].text is ''"),
        (squad(qa(text=14)), r"question 'q1': answers\[0\].text is 14"),
        (squad(qa(answers=["the Seine"])), r"question 'q1': answers\[0\] is 'the Seine'; expected an object"),
        (squad(qa()).replace('"context":', '"context": "", "context":'), "has the key 'context' twice"),
        (squad(qa()).replace('"question":', '"question": "", "question":'), "has the key 'question' twice"),
        (squad(qa()).replace('"text":', '"text": "x", "text":'), "has the key 'text' twice"),
        (squad(qa("a"), qa("b"), qa("a")), "question 'a': has the id 'a', as question 'a' has"),
    ],
)
def test_a_bad_squad_file_is_named_with_the_question(tmp_path, content, words):
    message = refused("qa", path := put(tmp_path, "dev.json", content))
    assert str(path) in message
    assert re.search(words, message), message


TEXTS = st.text(min_size=1, max_size=30).filter(str.strip)


def test_one_question_in_each_form_of_json(tmp_path):
    row = {"id": "a", "title": "Rivers", "context": PARIS, "question": "Where is Paris?"}
    lists, one = {"text": ["the Seine"], "answer_start": [14]}, {"text": "the Seine", "answer_start": 14}
    forms = [squad(qa("a")), squad(qa("a", answers=lists)), json.dumps({"data": [row | {"answers": lists}]})]
    forms += [json.dumps([row | {"answers": answers}]) for answers in (lists, [one], one)]
    forms += [lines(row | {"answers": lists}, row | {"id": "b", "answers": {"text": [], "answer_start": []}})]
    for form in forms:
        found = read("qa", put(tmp_path, "dev.json", form))
        assert found[0] == Question("a", "Where is Paris?", PARIS, (Answer("the Seine", 14),), "Rivers")
    assert found[1].answers == () and read("qa", put(tmp_path, "dev.jsonl", forms[-1])) == found


@pytest.mark.parametrize("answers", [{}, {"answers": None}, {"answers": []}])
def test_marked_as_impossible_a_question_needs_no_answers(tmp_path, answers):
    row = {"id": "a", "question": "Where?", "is_impossible": True} | answers
    assert read("qa", put(tmp_path, "dev.json", squad(row)))[0].answers == ()


# ---- columns and tag schemes -----------------------------------------------------------------------------------------

# One sentence in each scheme: two people side by side, then one that is alone, then a place of two words.
BY_SCHEME = {
    "BIO": "B-PER I-PER B-PER O B-PER O B-LOC I-LOC",
    "IOB1": "I-PER I-PER B-PER O I-PER O I-LOC I-LOC",
    "BIOES": "B-PER E-PER S-PER O S-PER O B-LOC E-LOC",
    "BILOU": "B-PER L-PER U-PER O U-PER O B-LOC L-LOC",
    "IO": "I-PER I-PER I-PER O I-PER O I-LOC I-LOC",
}
IN_BIO = BY_SCHEME["BIO"].split()
MERGED = "B-PER I-PER I-PER O B-PER O B-LOC I-LOC".split()  # IO cannot tell neighbours of one kind apart


@pytest.mark.parametrize(("name", "tags"), BY_SCHEME.items())
def test_the_scheme_is_seen_and_rewritten_as_bio(tmp_path, name, tags):
    assert scheme_of([tags.split()]) == {"BILOU": "BIOES"}.get(name, name)
    path = put(tmp_path, "a.conll", "".join(f"w{i} {tag}\n" for i, tag in enumerate(tags.split())))
    assert list(read("ner", path)[0].tags) == (MERGED if name == "IO" else IN_BIO)
    row = {"words": [f"w{i}" for i in range(8)], "tags": tags.split()}
    assert list(read("ner", put(tmp_path, "a.jsonl", lines(row)))[0].tags) == (MERGED if name == "IO" else IN_BIO)


@pytest.mark.parametrize(
    ("tags", "scheme", "bio"),
    [
        ("O I-A I-B", "BIO", "O B-A B-B"),  # a slip: begun with B
        ("B-A I-B", "BIO", "B-A B-B"),
        ("E-A I-A", "BIOES", "B-A B-A"),  # after an end, something new
        ("I-A E-A S-A S-A", "BIOES", "B-A I-A B-A B-A"),
        ("L-A U-A B-A L-A", "BIOES", "B-A B-A B-A I-A"),
        ("I-A B-A I-A I-B", "IOB1", "B-A B-A I-A B-B"),
        ("B-work-of-art I-work-of-art", "BIO", "B-work-of-art I-work-of-art"),
    ],
)
def test_conversion_by_hand(tags, scheme, bio):
    assert to_bio(tags.split(), scheme) == bio.split()


def test_one_sentence_decides_the_scheme_of_the_whole_file():
    plain = ["I-PER", "O"]
    assert scheme_of([plain, ["O"]]) == "IO"
    assert scheme_of([plain, ["I-PER", "B-PER"]]) == "IOB1"
    assert scheme_of([plain, ["O", "B-PER"]]) == "BIO"  # B where IOB1 has I: the I above is a slip
    assert scheme_of([plain, ["S-PER"]]) == "BIOES"
    assert scheme_of([["O"], []]) == "BIO"


KINDS = st.sampled_from(["PER", "LOC", "work-of-art"])


@st.composite
def tagged_lengths(draw) -> tuple[list[tuple[int, int, str]], int]:
    length = draw(st.integers(1, 12))
    cuts = draw(st.lists(st.integers(0, length), unique=True, max_size=8).map(sorted))
    spans = [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if draw(st.booleans())]
    return [(a, b, draw(KINDS)) for a, b in spans], length


@given(tagged_lengths())
def test_tags_and_entities_are_each_others_inverse(drawn):
    entities, length = drawn
    tags = ["O"] * length
    for a, b, kind in entities:
        tags[a:b] = [f"B-{kind}"] + [f"I-{kind}"] * (b - a - 1)
    assert len(tags) == length and entities_of(tags) == entities
    assert scheme_of([tags]) == "BIO" and to_bio(tags, "BIO") == tags


@given(tagged_lengths(), st.booleans())
def test_bioes_and_bilou_say_what_bio_says(drawn, bilou):
    entities, length = drawn
    single, end = "UL" if bilou else "SE"
    tags = ["O"] * length
    for a, b, kind in entities:
        tags[a:b] = (
            [f"{single}-{kind}"] if b - a == 1 else [f"B-{kind}"] + [f"I-{kind}"] * (b - a - 2) + [f"{end}-{kind}"]
        )
    assert entities_of(to_bio(tags, "BIOES")) == entities


def test_columns_by_tabs_and_by_spaces_with_documents_comments_and_hashtags(tmp_path):
    content = (
        "-DOCSTART- -X- -X- O\n\nAnn NNP B-NP B-PER\nsmiles VBZ B-VP O\n\n# O\n#ann O\n#a=b O\n\n"
        "-DOCSTART- -X- O O\n\nNew\u00a0York\tB-LOC\n#\tO\n#x=y\tO\n"
    )
    for ending in ("\n", "\r\n"):
        for mark in ("", "\ufeff"):
            found = read("ner", put(tmp_path, "a.txt", mark + content.replace("\n", ending)))
            words = [("Ann", "smiles"), ("#", "#ann", "#a=b"), ("New\u00a0York", "#", "#x=y")]
            assert [each.words for each in found] == words
            assert [each.group for each in found] == ["document 1", "document 1", "document 2"]
            assert found[0].tags == ("B-PER", "O") and found[2].tags == ("B-LOC", "O", "O")
            assert [found[0].text[a:b] for a, b in found[0].spans] == ["Ann", "smiles"]
            assert len({each.id for each in found}) == 3


@pytest.mark.filterwarnings("ignore:.*comment lines")
@pytest.mark.parametrize(
    "content",
    [
        "1\tUni\tB-ORG\n2\tWien\tI-ORG\n3\t3\tO\n\n1\tAnn\tB-PER\n",
        "0 Uni NN B-ORG\n1 Wien NN I-ORG\n2 3 CD O\n\n0 Ann NE B-PER\n",
        "1\tUni\tB-ORG\n2\tWien\tI-ORG\n3\t3\tO\n\n4\tAnn\tB-PER\n",  # goes on counting
        "1\tUni\tB-ORG\n2\tWien\tI-ORG\n4\t3\tO\n\n1\tAnn\tB-PER\n",  # with a gap
        "# sent_id = 1\n# a comment\n1-2\tUniWien\t_\t_\n1\tUni\tNN\tB-ORG\n2\tWien\tNN\tI-ORG\n2.1\tx\t_\t_\n"
        "3\t3\tCD\tO\n\n1\tAnn\tNE\tB-PER\n",
    ],
)
def test_a_column_that_numbers_the_words_is_skipped_with_a_warning(tmp_path, content):
    with pytest.warns(UserWarning, match="column 1 numbers the words"):
        found = read("ner", put(tmp_path, "a.conll", content))
    assert [(each.words, each.tags) for each in found] == [
        (("Uni", "Wien", "3"), ("B-ORG", "I-ORG", "O")),
        (("Ann",), ("B-PER",)),
    ]


@pytest.mark.parametrize(
    ("content", "tags"),
    [
        ("EU NNP B-NP B-ORG\nsays VBZ B-VP O\n", "B-ORG O"),  # CoNLL-2003
        ("EU NNP I-NP I-ORG\nsays VBZ I-VP O\n", "B-ORG O"),  # as it was first published
        ("EU EU NE I-NC I-ORG\nsagt sagen VVFIN I-VC O\n", "B-ORG O"),  # in German
        ("EU NNP B-NP O\nsays VBZ B-VP O\n", "O O"),
        ("EU NNP B-NP\nsays VBZ B-VP\n", "B-NP B-VP"),  # CoNLL-2000
        ("EU\t\tB-ORG\nsays\tVBZ\tO\n", "B-ORG O"),
        ("1999 CD O\n2000 CD O\n", "O O"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_the_last_column_is_the_tag_beside_parts_of_speech_and_chunks(tmp_path, content, tags):
    (found,) = read("ner", put(tmp_path, "a.txt", content))
    assert found.tags == tuple(tags.split()) and found.words == tuple(re.findall(r"^\S+", content, re.M))


@pytest.mark.filterwarnings("ignore:.*numbers the words")
def test_tags_before_the_last_column_are_read_with_a_warning(tmp_path):
    path = put(tmp_path, "a.conll", "1\tEU\tB-ORG\tSpaceAfter=No\n2\tsays\tO\t_\n")
    with pytest.warns(UserWarning, match="column 2 of 4 is the word, column 3 its tag"):
        assert read("ner", path)[0].tags == ("B-ORG", "O")


NESTED = "#\tdispatch.example [2005]\n1\tUni\tB-ORG\tO\n2\tWien\tI-ORG\tB-LOC\n3\tliegt\tO\tO\n"


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        (NESTED, (3, 4)),
        (NESTED.replace("B-LOC", "O"), (3, 4)),
        (NESTED.replace("I-ORG", "I_ORG"), (3, 4)),  # a slip in one of them
        ("EU NNP B-NP B-ORG B-ORG\nsays VBZ B-VP O O\n", (4, 5)),  # true and predicted
    ],
)
@pytest.mark.filterwarnings("ignore:.*(numbers the words|comment lines)")
def test_two_columns_of_tags_are_an_error_until_one_is_chosen(tmp_path, content, columns):
    path = put(tmp_path, "a.tsv", content)
    message = refused("ner", path)
    assert all(f"column {column} (" in message for column in columns) and "--tag-column" in message
    if "_" not in content:
        for column in columns:
            rows = [line.split() for line in content.splitlines() if line[0] != "#"]
            assert read("ner", path, tag_column=column)[0].tags == tuple(row[column - 1] for row in rows)


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [("a.conll", NESTED, 2), ("a.conll", NESTED, 5), ("a.conll", "Ann O\n", 1), ("a.jsonl", "{}", 2)],
)
def test_a_tag_column_that_a_file_has_not_is_refused(tmp_path, name, content, column):
    with pytest.raises(DataError, match="tag"):
        read("ner", put(tmp_path, name, content), tag_column=column)


def test_comments_are_told_from_words_that_begin_with_a_hash(tmp_path):
    content = "#begin document (a); part 000\n# of 3 words\nAnn NNP B-NP B-PER\n# NN I-NP O\n#tag NN I-NP B-X\n\n"
    content += "# global.columns = FORM NER\n# NN B-NP O\nsays VBZ B-VP O\n\n#end document\n"
    with pytest.warns(UserWarning, match="skipped: 4, the first is line 1"):
        found = read("ner", put(tmp_path, "a.conll", content))
    assert [each.words for each in found] == [("Ann", "#", "#tag"), ("#", "says")]
    with pytest.warns(UserWarning, match="skipped: 1, "):
        found = read("ner", put(tmp_path, "b.conll", "# the first\nAnn\tB-PER\n\n#\tO\n#tag\tO\n"))
    assert [each.words for each in found] == [("Ann",), ("#", "#tag")]


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r\r\n", "\r"])
def test_any_line_end_ends_a_line(tmp_path, ending):
    found = read("ner", put(tmp_path, "a.conll", ending.join(["Ann B-PER\t", "met  O ", " \t", "Bo\tB-PER"])))
    assert [(each.words, each.tags) for each in found] == [(("Ann", "met"), ("B-PER", "O")), (("Bo",), ("B-PER",))]
    rows = ['{"text": "a", "label": "x"}', "", '{"text": "b", "label": "y"}']
    assert len(read("classify", put(tmp_path, "a.jsonl", ending.join(rows)))) == 2


def test_spaces_around_the_cells_of_a_column_file_are_no_part_of_them(tmp_path):
    found = read("ner", put(tmp_path, "a.txt", "Ann\tB-PER \nGray \tI-PER\n"))
    assert (found[0].words, found[0].tags) == (("Ann", "Gray"), ("B-PER", "I-PER"))


@pytest.mark.parametrize("task", TASKS)
def test_a_group_may_be_called_0(tmp_path, task):
    rows = [GOOD[task] | {"id": f"x{n}", "document_id": k} for n, k in enumerate((0, 0, 1))]
    assert [each.group for each in read(task, put(tmp_path, "a.jsonl", lines(*rows)))] == ["0", "0", "1"]


def test_comments_name_documents_as_conll_u_has_them(tmp_path):
    content = "# document = one\n# text = Ann\nAnn\tB-PER\n\n# newdoc id = two\nBo\tB-PER\n# id = 7\nCy\tO\n"
    found = read("ner", put(tmp_path, "a.conll", content))
    assert [(each.words, each.group) for each in found] == [(("Ann",), "one"), (("Bo",), "two"), (("Cy",), "two")]


def test_without_documents_each_sentence_is_its_own_group(tmp_path):
    found = read("ner", put(tmp_path, "a.conll", "\n\nAnn B-PER\n\n\n\nBo B-PER\n\n"))
    assert [each.group for each in found] == ["sentence 0", "sentence 1"]


@pytest.mark.filterwarnings("ignore:.*numbers the words")
@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("Ann B-PER\nBo\n", 2, r"has one column \('Bo'\)"),
        ("Ann B-PER\n\nBo PER\n", 3, "has the tag 'PER'; expected O, or B-"),
        ("Ann\tB-\n", 1, "has the tag 'B-'"),
        ("Ann b-PER\n", 1, "has the tag 'b-PER'"),
        ("Ann Q-PER\n", 1, "has the tag 'Q-PER'"),
        ("\ufeffAnn B_PER\r\n", 1, "has the tag 'B_PER'"),
        ("Ann 3\n", 1, "has the tag '3'"),
        ("Ann NNP X\n", 1, "has the tag 'X' in column 3"),
        ("New York B-LOC\nis O\nfar O\n", 1, "has 3 columns, and the other lines have 2"),
        ("#photo B_X\nAnn O\n", 1, "has the tag 'B_X'"),
        ("\tO\nAnn\tO\n", 1, "column 1 is empty"),
        ("1 Ann O\n2 met O\nx Bo O\n", 3, "has 'x' in column 1, which numbers the words"),
        (b"Ann B-PER\nJos\xe9 I-PER\n", 2, "is not UTF-8"),
    ],
)
def test_a_bad_column_line_is_named(tmp_path, content, line, words):
    message = refused("ner", path := put(tmp_path, "a.conll", content))
    assert message.startswith(f"{path}, line {line}: ")
    assert re.search(words, message)


def test_a_column_file_of_documents_alone_holds_no_sentence(tmp_path):
    assert "holds no example" in refused("ner", put(tmp_path, "a.conll", "-DOCSTART- O\n\n# id = 3\n"))


# ---- words and spans of a raw text -----------------------------------------------------------------------------------

ODD = st.sampled_from(
    ["\u200b", "\u200d", "\ufe0f", "\ufeff", "\u00ad", "\u0301", "\u093f", "\u00a0", "\u2028", "’s", "U.S.", "3.5", "'"]
    + ["👩‍👩‍👧", "👍🏽", "🇩🇪", "1️⃣", "e\u0301", "हिन्दी", "東京", "O'Neil-Smith", "_", "\x00", "\x85", "#tag"]
)
ANY_TEXT = st.lists(st.one_of(ODD, st.text(max_size=6), st.sampled_from(" \n\ta.")), max_size=12).map("".join)


@settings(max_examples=100, deadline=None)
@given(ANY_TEXT)
def test_words_are_in_order_and_leave_out_only_white_space_and_joiners(text):
    spans, at = words_of(text), 0
    for start, end in spans:
        assert at <= start < end <= len(text)
        assert not re.search(r"\s", text[start:end])
        assert re.fullmatch(rf"[\s{_JOINERS}]*", text[at:start])
        at = end
    assert re.fullmatch(rf"[\s{_JOINERS}]*", text[at:])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_entities_come_back_from_the_tags_over_their_words(data):
    text = data.draw(ANY_TEXT)
    words = words_of(text)
    cuts = data.draw(st.lists(st.integers(0, len(words)), unique=True, max_size=6).map(sorted))
    wanted = [
        Entity(words[a][0], words[b - 1][1], data.draw(KINDS))
        for a, b in zip(cuts, cuts[1:], strict=False)
        if data.draw(st.booleans())
    ]
    shuffled = data.draw(st.permutations(wanted))
    tags = tags_over(words, shuffled, text)
    assert entities_in(words, tags) == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Brill's U.S. office, 14:30.", ["Brill", "'s", "U.S.", "office", ",", "14:30", "."]),
        ("Ann O’Neil-Smith’s 1,200", ["Ann", "O’Neil-Smith", "’s", "1,200"]),
        ("Jose\u0301’s cafe\u0301", ["Jose\u0301", "’s", "cafe\u0301"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("ok 👍🏽👩‍👩‍👧 🇩🇪🇫🇷 1️⃣ ❤️!", ["ok", "👍🏽", "👩‍👩‍👧", "🇩🇪", "🇫🇷", "1️⃣", "❤️", "!"]),
        ("#tag @you", ["#", "tag", "@", "you"]),
        (" \u200b\n", []),
    ],
)
def test_words_of(text, words):
    assert [text[a:b] for a, b in words_of(text)] == words


@given(st.text(alphabet=st.characters(min_codepoint=0xC0, max_codepoint=0x24F, categories=("L",)), min_size=1))
def test_a_decomposed_word_is_as_whole_as_a_composed_one(word):
    assert len(words_of(unicodedata.normalize("NFD", word))) == len(words_of(word)) == 1


@pytest.mark.parametrize(
    ("entities", "words"),
    [
        ([(0, 3)], "'Par' at 0, which cuts through 'Paris'"),
        ([(0, 5), (0, 10)], "overlaps another"),
        ([(5, 6)], "' ' at 5, which contains no word"),
        ([(-3, 2)], "from -3 to 2 in a text of 53 characters"),
        ([(44, 99)], "from 44 to 99 in a text of 53"),
        ([(5, 5)], "from 5 to 5"),
    ],
)
def test_an_entity_that_fits_no_words_is_refused(tmp_path, entities, words):
    row = {"text": PARIS, "entities": [{"start": a, "end": b, "label": "LOC"} for a, b in entities]}
    message = refused("ner", put(tmp_path, "a.jsonl", lines({"text": "x", "entities": []}, row)))
    assert "a.jsonl, line 2: has an entity" in message or "a.jsonl, line 2: has the entity" in message
    assert words in message


# ---- JSONL, CSV, TSV -------------------------------------------------------------------------------------------------

ROWS = {
    "qa": ("question,context,answer,answer_start,title", [["Where?", PARIS, "the Seine", "14", "Rivers"]]),
    "ner": ("id,tokens,ner_tags", [["s7", "Ann saw Bo", "B-PER O B-PER"]]),
    "classify": ("sentence,category", [["fine, really", "good"], ["bad", "poor"]]),
    "embed": ("sentence1,sentence2,similarity_score", [["a", "b", "0.5"], ["c", "d", ""]]),
}
EXPECTED = {
    "qa": [Question("2", "Where?", PARIS, (Answer("the Seine", 14),), "Rivers")],
    "ner": [Sentence.of_words("s7", ["Ann", "saw", "Bo"], ["B-PER", "O", "B-PER"])],
    "classify": [Labelled("2", "fine, really", "good"), Labelled("3", "bad", "poor")],
    "embed": [Pair("2", "a", "b", 0.5), Pair("3", "c", "d")],
}


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".csv", ";"), (".tsv", "\t")])
@pytest.mark.parametrize("task", TASKS)
def test_tables_of_each_task(tmp_path, task, suffix, separator, ending):
    header, rows = ROWS[task]
    table = [header.replace(",", separator)] + [separator.join(f'"{cell}"' for cell in row) for row in rows]
    path = put(tmp_path, f"a{suffix}", "\ufeff" + ending.join(table) + ending)
    assert read(task, path) == EXPECTED[task]


def test_a_cell_may_hold_lines_and_quotes(tmp_path):
    path = put(tmp_path, "a.csv", 'text,label\n"one ""two""\nthree",x\n"four",y\n')
    assert read("classify", path) == [Labelled("3", 'one "two"\nthree', "x"), Labelled("4", "four", "y")]


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("qa", QUESTION, Question("q1", "Where is Paris?", PARIS, (Answer("the Seine", 14),))),
        ("qa", {"query": "q", "post": "p", "answers": [], "document_id": 7}, Question("1", "q", "p", (), "7")),
        (
            "qa",
            {"question": "q", "passage": "p q p", "answers": {"text": ["p", "p"], "answer_start": [0, 4]}},
            Question("1", "q", "p q p", (Answer("p", 0), Answer("p", 4))),
        ),
        ("qa", {"question": "q", "context": "a b", "answer": "b"}, Question("1", "q", "a b", (Answer("b", 2),))),
        ("qa", {"question": "q", "context": "a b", "answer": ""}, Question("1", "q", "a b")),
        (
            "ner",
            {"guid": "s", "text": "Ann's dog", "entities": [{"start": 0, "end": 3, "label": "PER"}]},
            Sentence("s", "Ann's dog", ("Ann", "'s", "dog"), ((0, 3), (3, 5), (6, 9)), ("B-PER", "O", "O")),
        ),
        ("ner", {"words": ["a"], "labels": ["O"], "group": "g"}, Sentence.of_words("1", ["a"], ["O"], "g")),
        ("classify", {" Text": "t", "LABEL ": " l "}, Labelled("1", "t", "l")),
        ("classify", {"content": "t", "class": 0}, Labelled("1", "t", "0")),
        ("embed", {"anchor": "a", "positive": "b"}, Pair("1", "a", "b")),
        ("embed", {"query": "a", "text_b": "b", "score": 4}, Pair("1", "a", "b", 4.0)),
        ("classify", {"text": "a\u2028b\x85c", "label": "x"}, Labelled("1", "a\u2028b\x85c", "x")),
    ],
)
def test_jsonl_under_the_names_that_files_have(tmp_path, task, row, expected):
    assert read(task, put(tmp_path, "a.jsonl", lines(row) + "\n \n")) == [expected]


@pytest.mark.parametrize(
    "row",
    [
        {"entities": [{"start": 0, "end": 3, "label": "PER"}]},
        {"entities": [{"id": 7, "start_offset": 0, "end_offset": 3, "label": "PER"}], "relations": []},  # doccano
        {"entities": [[0, 3, "PER"]]},  # spaCy
        {"label": [[0, 3, "PER"]]},  # doccano
        {"labels": [[0, 3, " PER"]]},
        {"tokens": [{"text": "Ann", "start": 0}], "spans": [{"start": 0, "end": 3, "label": "PER"}]},  # Prodigy
    ],
)
def test_entities_in_the_forms_of_other_tools(tmp_path, row):
    (found,) = read("ner", put(tmp_path, "a.jsonl", lines({"text": "Ann's dog"} | row)))
    assert (found.words, found.tags) == (("Ann", "'s", "dog"), ("B-PER", "O", "O"))


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("first", ["", "sep={}\r\n"])
def test_a_table_is_read_whatever_separates_its_cells(tmp_path, separator, first):
    table = f'{first.format(separator)}Text{separator}LABEL\r\n"a, b; c"{separator}x\r\n{separator}\r\n'
    (found,) = read("classify", put(tmp_path, "a.csv", "\ufeff" + table))
    assert (found.text, found.label) == ("a, b; c", "x")


def test_white_space_around_names_and_labels_of_a_table(tmp_path):
    path = put(tmp_path, "a.csv", ' text , Label ,\ngood film, pos,\n"a, b", "neg",\n')
    assert [(each.text, each.label) for each in read("classify", path)] == [("good film", "pos"), ("a, b", "neg")]


# Each form of file: good rows, and bad rows with the place and the start of their fault.
FORMS = {
    "a.jsonl": ("classify", [f'{{"id": "{i}", "text": "t{i}", "label": "l"}}' for i in range(4)],
                {"{bad": "is not JSON", "[1]": "holds [1]", "{}": "has no label", '{"label": 1}': "has no text",
                 '{"id": "0", "text": "t", "label": "l"}': "has the id '0', as line "}),
    "a.csv": ("classify", [f"{i},t{i},l" for i in range(4)],
              {"x": "has 1 cells", '"a" b,c,d': "is not CSV", ",t,": "label is ''", '"a,b,c': "is not CSV"}),
    "a.conll": ("ner", [f"w{i} B-X\nv{i} O\n" for i in range(4)],
                {"x\n": "has one column", "x Y\n": "has the tag 'Y'", "x y O\ny O\nz O\n": "has 3 columns"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_bad_row_hides_no_other(tmp_path, name):
    task, good, bad = FORMS[name]
    rows = [row for pair in zip(good, list(bad)[:4], strict=False) for row in pair] + good[len(bad) :] + list(bad)[4:]
    header = ["id,text,label"] if name == "a.csv" else []
    starts = [sum(row.count("\n") + 1 for row in (header + rows)[: i + len(header)]) + 1 for i in range(len(rows))]
    places = {row: f"line {start}: {bad[row]}" for row, start in zip(rows, starts, strict=True) if row in bad}
    expected = read(task, put(tmp_path, name, "\n".join([*header, *good])))
    path = put(tmp_path, name, "\n".join([*header, *rows]))
    found = scan(task, path)
    assert found.skipped == len(found.faults) == len(bad)
    for place in places.values():
        assert any(fault.startswith(f"{path}, {place}") for fault in found.faults), (place, found.faults)
    message = refused(task, path)
    assert message.startswith(found.faults[0]) and "--skip-bad-rows" in message
    assert f"{len(bad)} of {len(rows)} rows cannot be read" in message
    with pytest.warns(UserWarning, match=f"{len(bad)} of {len(rows)} rows are skipped: "):
        kept = read(task, path, skip_bad_rows=True)
    assert [each.text for each in kept] == [each.text for each in expected]


def test_a_quote_that_is_not_closed_takes_no_other_row_with_it(tmp_path):
    rows = [f"text {i},l" for i in range(9)] + ['"text 9","l"']
    for at in (0, 5, 10):
        content = "\n".join(["text,label", *rows[:at], '"open,l', *rows[at:]])
        found = scan("classify", put(tmp_path, "a.csv", content))
        assert [each.text for each in found.examples] == [f"text {i}" for i in range(10)]
        assert len(found.faults) == 1 and f"line {at + 2}: is not CSV" in found.faults[0]


def test_every_fault_of_a_squad_file_is_found(tmp_path):
    asked = [qa(f"q{i}", start=14 if i % 3 else i) for i in range(9)] + [None, qa("q1")]
    found = scan("qa", path := put(tmp_path, "dev.json", squad(*asked)))
    assert [each.id for each in found.examples] == ["q1", "q2", "q4", "q5", "q7", "q8"]
    places = ["question 'q0'", "question 'q3'", "question 'q6'", "article 1, paragraph 1, question 10", "question 'q1'"]
    assert [fault.removeprefix(f"{path}, ").split(": ")[0] for fault in found.faults] == places


def test_without_a_good_row_there_is_nothing_to_skip_to(tmp_path):
    with pytest.raises(DataError, match="1 of 1 rows cannot be read"):
        read("classify", put(tmp_path, "a.jsonl", "{}"), skip_bad_rows=True)


GOOD = {"qa": QUESTION, "ner": {"words": ["a"], "tags": ["O"]}, "classify": {"text": "t", "label": "l"}}
GOOD["embed"] = {"first": "a", "second": "b"}


@pytest.mark.parametrize(
    ("task", "row", "words"),
    [
        ("qa", QUESTION | {"answers": [{"text": "the Seine", "start": 15}]}, "is 15, but 'the Seine' is at 14"),
        ("qa", QUESTION | {"answers": [{"text": "Seine"}]}, "answer_start is missing, and the context holds 'Seine' 2"),
        ("qa", QUESTION | {"answers": [{"text": "Rhine"}]}, "'Rhine' 0 times"),
        ("qa", QUESTION | {"answers": [{"text": "the Seine", "start": "x"}]}, "answer_start is 'x'"),
        ("qa", QUESTION | {"answers": [{"text": "the Seine", "start": 14.5}]}, "answer_start is 14.5"),
        ("qa", QUESTION | {"answers": [{"text": "the Seine", "start": float("inf")}]}, "answer_start is inf"),
        ("qa", QUESTION | {"answers": [{"text": "the Seine", "start": True}]}, "answer_start is True"),
        ("qa", QUESTION | {"answers": {"text": ["a", "b"], "answer_start": [1]}}, "two lists of one length"),
        ("qa", QUESTION | {"answers": {"text": ["a"]}}, "two lists of one length"),
        ("qa", {"question": "q", "context": "c"}, "has no answers (fields: question, context)"),
        ("qa", QUESTION | {"context": " \n"}, "context is ' \\n'"),
        ("qa", QUESTION | {"id": ["q"]}, "id is ['q']"),
        ("qa", {"context": "c", "answers": []}, "has no question (fields: context, answers)"),
        ("ner", {"words": ["a", "b"], "tags": ["O"]}, "has 2 words and 1 tags"),
        ("ner", {"words": ["a"], "tags": ["PER"]}, "has the tag 'PER'"),
        ("ner", {"words": ["a"], "tags": [3]}, "has the tag 3; expected its name"),
        ("ner", {"words": [], "tags": []}, "has no words"),
        ("classify", {"text": "t", "label": ["x", "y"]}, "label is ['x', 'y']"),
        ("classify", {"text": "t", "label": float("nan")}, "label is nan"),
        ("ner", {"words": "ab", "tags": ["O", "O"]}, "has neither words and tags, nor text and entities"),
        ("ner", {"words": [None], "tags": ["O"]}, "has the word None"),
        ("ner", {"text": "Ann"}, "has neither words and tags, nor text and entities"),
        ("ner", {"text": "Ann", "entities": [{"start": 0, "end": "x", "label": "PER"}]}, "entities[0]: the end is 'x'"),
        ("ner", {"text": "Ann", "entities": [{"start": 0, "end": 3}]}, "entities[0]: the label is None"),
        ("ner", {"text": "Ann", "entities": [{"start": 0, "end": 3, "label": ""}]}, "entities[0]: the label is ''"),
        ("ner", {"text": "Ann", "entities": [[0, 3]]}, "entities[0] is [0, 3]; expected start, end and label"),
        ("ner", {"text": "Ann", "entities": None}, "entities is None"),
        ("ner", {"text": "Ann", "label": "PER"}, "label is 'PER'"),
        ("classify", {"text": "t"}, "has no label (fields: text)"),
        ("classify", {"text": "t", "label": None}, "label is None"),
        ("classify", {"text": "t", "label": ""}, "label is ''"),
        ("classify", {"text": "t", "Text": "u", "label": "l"}, "one name but for case and white space: text, Text"),
        ("classify", {"body": "t", "label": "l"}, "has no text (fields: body, label)"),
        ("classify", {"text": ["t"], "label": "l"}, "text is ['t']"),
        ("classify", {"a\nb": "t", "label": "l"}, "has no text"),
        ("embed", {"first": "a"}, "has no second"),
        ("embed", {"first": "a", "second": "b", "score": "high"}, "score is 'high'"),
        ("embed", {"first": "a", "second": "b", "score": float("nan")}, "score is nan"),
        ("embed", {"first": "a", "second": "b", "score": 10**400}, "score is 1000"),
        ("embed", [1, 2], "holds [1, 2]; expected an object"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, task, row, words):
    content = lines(GOOD[task] | {"id": "first"}) + "\n" + lines(row)  # the empty line counts
    message = refused(task, path := put(tmp_path, "a.jsonl", content))
    assert message.startswith(f"{path}, line 3: ")
    assert words in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "t", "label": "l"}\n{"text": \n', "line 2: is not JSON (Expecting value, column 10)"),
        ("[" * 100_000, "line 1: is not JSON that can be read"),
        ('{"a": ' + "9" * 5000 + "}", "line 1: is not JSON that can be read"),
        ('{"id": "x", "text": "t", "label": "l"}\n' * 2, "line 2: has the id 'x', as line 1 has"),
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("\ufeff", "is empty"),
        (b'{"text": "t", "label": "l"}\n{"text": "\xe9"}', "line 2: is not UTF-8"),
        ("{}".encode("utf-16"), "line 1: is not UTF-8 but UTF-16"),
        ('{"text": "t", "label": "a", "label": "b"}', "line 1: has the key 'label' twice"),
        ('{"text": "t", "label": "a", "meta": [{"x": 1, "x": 2}]}', "line 1: has the key 'x' twice"),
    ],
)
def test_a_bad_jsonl_file_is_named(tmp_path, content, words):
    message = refused("classify", path := put(tmp_path, "a.jsonl", content))
    assert message.startswith(str(path)) and words in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text,label\na,x\nb,y,z\n", "line 3: has 3 cells, and the header has 2"),
        ("text,label\na,x\nb\n", "line 3: has 1 cells"),
        ('text,label\n"a\nb",x\n"c" d,y\n', "line 4: is not CSV"),
        ('text,label\n"a,x\n', "line 2: is not CSV"),
        ("text,label\n", "holds no example"),
        ("text,label\na,\n", "line 2: label is ''"),
        ("Review,Sentiment\na,x\n", "header has no text (called text, sentence, content); it has 'Review', 'S"),
        ("text/label\na/x\n", "it has 'text/label'"),
        ("text,Text ,label\na,b,x\n", "line 1: has the column 'text' twice"),
        (b"text,label\n\xe4,x\n", "line 2: is not UTF-8"),
        ("text,text,label\na,b,x\n", "line 1: has the column 'text' twice"),
        ("id,text,label\n1,a,x\n1,b,x\n", "line 3: has the id '1', as line 2 has"),
    ],
)
def test_a_bad_table_is_named(tmp_path, content, words):
    message = refused("classify", path := put(tmp_path, "a.csv", content))
    assert message.startswith(str(path)) and words in message


def test_a_cell_may_be_as_long_as_a_text_is(tmp_path):
    path = put(tmp_path, "a.csv", f"text,label\n{'word ' * 60_000},x\n")
    assert len(read("classify", path)[0].text) == 300_000


@pytest.mark.parametrize(
    ("task", "name", "words"),
    [
        ("qa", "a.xml", "ends in .xml; for qa give SQuAD as .json, rows as .json, .jsonl or .csv"),
        ("ner", "a.md", "ends in .md; for ner give columns as .conll, rows as .json, .jsonl or .csv"),
        ("classify", "a", "ends in nothing"),
        ("qa", "a.conll", "ends in .conll"),
        ("speech", "a.jsonl", "the task is 'speech'; choose one of qa, ner, classify, embed"),
    ],
)
def test_a_foreign_form_or_task_is_refused(tmp_path, task, name, words):
    assert words in refused(task, put(tmp_path, name, "x"))


def test_a_missing_file_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, no_network):
    long = "a" * 300 + ".csv"
    put(tmp_path, "README.md", "---\nconfigs:\n- config_name: en\n---\n")
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path / "none.jsonl", "none.jsonl", "deep/none.json:train", tmp_path / "none", "../none"):
        assert "does not exist" in refused("qa", name)
    for name in (long, "~nobody-by-this-name/a.csv"):
        assert "cannot be opened" in refused("qa", name)
    assert no_network == []


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
FIELDS = ["question", "context", "answers", "answer", "words", "tags", "text", "entities", "label", "first", "second"]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TASKS), st.dictionaries(st.sampled_from([*FIELDS, "score", "id", "group"]), JSON_VALUES))
def test_any_object_is_read_or_refused_in_one_line(tmp_path_factory, task, row):
    path = put(tmp_path_factory.getbasetemp(), "any.jsonl", json.dumps(row))
    try:
        assert len(read(task, path)) == 1
    except DataError as error:
        assert str(path) in str(error) and len(str(error).splitlines()) == 1


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([*((t, ".jsonl") for t in TASKS), ("classify", ".csv"), ("ner", ".conll"), ("qa", ".json")]),
       st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode)))  # fmt: skip
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path_factory, form, content):
    path = put(tmp_path_factory.getbasetemp(), f"any{form[1]}", content)
    try:
        read(form[0], path)
    except DataError as error:
        assert str(path) in str(error) and len(str(error).splitlines()) == 1


# ---- the hub's layouts -----------------------------------------------------------------------------------------------

KINDS_OF_WNUT = ["O", "B-corporation", "I-corporation", "B-person", "I-person"]
KINDS_OF_CONLL = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Folders laid out as the hub lays these data sets out, a row or two in each; the cache of `datasets` beside."""
    datasets = pytest.importorskip("datasets")
    place = tmp_path_factory.mktemp("hub")
    datasets.disable_progress_bars()
    text, integer = datasets.Value("string"), datasets.Value("int32")

    def write(path: str, features: dict, *rows: dict) -> None:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        columns = {name: [row[name] for row in rows] for name in features}
        datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(place / path)

    def card(name: str, configurations: dict[str, str]) -> None:
        listed = "".join(
            f'- config_name: {each}\n  data_files:\n  - split: train\n    path: "{folder}/train-*"\n'
            f'  - split: validation\n    path: "{folder}/validation-*"\n'
            for each, folder in configurations.items()
        )
        (place / name / "README.md").write_text(f"---\nlanguage: en\nconfigs:\n{listed}---\n# {name}\n")

    answers = datasets.Sequence({"text": text, "answer_start": integer})
    asked = {"id": text, "title": text, "context": text, "question": text, "answers": answers}
    row = {"id": "a", "title": "Rivers", "context": PARIS, "question": "Where?"}
    some, none = {"text": ["the Seine"], "answer_start": [14]}, {"text": [], "answer_start": []}
    for name, folder in (("squad", "plain_text"), ("squad_v2", "squad_v2")):
        write(f"{name}/{folder}/train-00000-of-00001.parquet", asked, row | {"answers": some})
        rows = [row | {"answers": some}] + ([row | {"id": "b", "answers": none}] if name == "squad_v2" else [])
        write(f"{name}/{folder}/validation-00000-of-00001.parquet", asked, *rows)
        card(name, {folder: folder})

    def tagged(*kinds: str):
        return datasets.Sequence(datasets.ClassLabel(names=list(kinds)))

    words = {"tokens": ["Ann", "joins", "Acme"]}
    for split in ("train", "validation", "test"):  # as in the branch refs/convert/parquet: no card
        features = {"id": text, "tokens": datasets.Sequence(text), "ner_tags": tagged(*KINDS_OF_WNUT)}
        write(f"wnut_17/wnut_17/{split}/0000.parquet", features, words | {"id": "0", "ner_tags": [3, 0, 1]})
        features |= {"pos_tags": tagged("NN", "VB"), "chunk_tags": tagged("O", "B-NP")}
        features |= {"ner_tags": tagged(*KINDS_OF_CONLL)}
        given = {"id": "0", "pos_tags": [0, 1, 0], "chunk_tags": [1, 0, 1], "ner_tags": [1, 0, 3]}
        write(f"conll2003/conll2003/{split}/0000.parquet", features, words | given)
    for language, name in (("en", "Ann"), ("de", "Anne")):
        features = {"tokens": datasets.Sequence(text), "ner_tags": tagged(*KINDS_OF_CONLL)}
        features |= {"langs": datasets.Sequence(text), "spans": datasets.Sequence(text)}
        given = {"tokens": [name], "ner_tags": [1], "langs": [language], "spans": [f"PER: {name}"]}
        for split in ("train", "validation"):
            write(f"wikiann/{language}/{split}-00000-of-00001.parquet", features, given)
            write(f"by_card/data-{language}/{split}-00000-of-00001.parquet", features, given)
    card("wikiann", {"en": "en", "de": "de"})
    card("by_card", {"en": "data-en", "de": "data-de"})
    label = {"text": text, "label": datasets.ClassLabel(names=["poor", "good"])}
    write("reviews/train.parquet", label, {"text": "fine", "label": 1}, {"text": "bad", "label": 0})
    write("reviews/test.parquet", label, {"text": "fine", "label": -1})  # the hub's -1: not given
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
        yield place


@pytest.mark.parametrize(("name", "ids"), [("squad:validation", ["a"]), ("squad_v2:validation", ["a", "b"])])
def test_squad_as_the_hub_has_it(hub, no_network, name, ids):
    found = read("qa", f"{hub}/{name}")
    assert [each.id for each in found] == ids and no_network == []
    assert found[0] == Question("a", "Where?", PARIS, (Answer("the Seine", 14),), "Rivers")
    assert all(each.answers == () for each in found[1:])


@pytest.mark.parametrize(
    ("name", "words", "tags"),
    [
        ("wnut_17:test", ("Ann", "joins", "Acme"), ("B-person", "O", "B-corporation")),
        ("conll2003", ("Ann", "joins", "Acme"), ("B-PER", "O", "B-ORG")),
        ("wikiann/en:validation", ("Ann",), ("B-PER",)),
        ("wikiann/de:validation", ("Anne",), ("B-PER",)),
        ("by_card/de:validation", ("Anne",), ("B-PER",)),
    ],
)
def test_entities_as_the_hub_has_them(hub, no_network, name, words, tags):
    assert [(each.words, each.tags) for each in read("ner", f"{hub}/{name}")] == [(words, tags)]
    assert no_network == []


def test_labels_as_the_hub_has_them(hub):
    assert read("classify", f"{hub}/reviews:train") == [Labelled("1", "fine", "good"), Labelled("2", "bad", "poor")]
    assert "reviews:test, row 1: label is None" in refused("classify", f"{hub}/reviews:test")


@pytest.mark.parametrize(
    ("task", "name", "words"),
    [
        ("ner", "wnut_17:dev", r"wnut_17 \(split dev\) could not be loaded: .*dev"),
        ("qa", "wnut_17:train", r"wnut_17:train, row 1: has no context \(fields: id, tokens, ner_tags\)"),
        ("embed", "squad:train", "squad:train, row 1: has no first"),
        ("ner", "wikiann:train", "wikiann .split train. could not be loaded: .*en.*de"),
        ("ner", "wikiann/fr:train", "does not exist"),
    ],
)
def test_what_a_data_set_has_not_is_one_data_error(hub, task, name, words):
    message = refused(task, f"{hub}/{name}")
    assert re.search(words, message), message


@pytest.mark.parametrize(
    "name",
    [
        "no-such-data",
        "nobody/nothing:dev",
        "nobody/nothing/en:dev",
        "wikiann/en:dev",
        "nobody/data-2.5-x",
        "nobody/v1.0:dev",
    ],
)
def test_a_name_that_cannot_be_reached_is_one_data_error(hub, monkeypatch, tmp_path, no_network, name):
    monkeypatch.chdir(tmp_path)
    message = refused("ner", name)
    assert "could not be loaded" in message and "connect to the network, or give a file" in message


def test_an_empty_folder_is_a_data_error(hub, tmp_path):
    assert "could not be loaded" in refused("qa", tmp_path)


def test_the_hub_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(LabkitError, match="pip install"):
        read("qa", "squad_v2:validation")
