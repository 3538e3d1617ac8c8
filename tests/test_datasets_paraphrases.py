"""Questions in several wordings: what each kind of file becomes, and how bad rows are named."""

import csv
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.datasets.paraphrases import ParaphrasedQuestion, filled, read_known_facts, read_paraphrases, sample
from labkit.errors import DataError
from labkit.files import folder
from tests.data_files import rows_of, write

FRANCE = {"id": "fr", "paraphrases": ["What is the capital of France?", "Paris or Lyon?"], "answers": ["Paris"]}
CHER = {"qId": "wqr40", "answers": ["Chaz Bono", "Chaz Bono", "Elijah"], "qText": "who is cher's son?"}


# ---- one's own rows, known facts, WebQuestions ---------------------------------------------------------------------


def test_own_rows_need_paraphrases_and_answers_only(tmp_path):
    rows = [FRANCE | {"relation": "capital"}, "", {"paraphrases": ["q"], "answers": ["a", "b", "a"]}]
    assert read_paraphrases(write(tmp_path / "own.jsonl", rows)) == [
        ParaphrasedQuestion("fr", tuple(FRANCE["paraphrases"]), ("Paris",), "capital"),
        ParaphrasedQuestion("3", ("q",), ("a", "b")),  # the number of its line, and each answer once
    ]
    table = 'id,paraphrases,answers,relation\nfr,"[""Where, then?"", ""At?""]","[""Paris""]",\n'
    question = ParaphrasedQuestion("fr", ("Where, then?", "At?"), ("Paris",))
    assert read_paraphrases(write(tmp_path / "own.csv", table)) == [question]


def test_own_rows_may_lack_answers_if_the_caller_says_so_but_sets_may_not(tmp_path):
    unanswered = [
        {"paraphrases": ["q"]},
        {"paraphrases": ["r"], "answers": []},
        {"paraphrases": ["s"], "answers": None},
    ]
    file = write(tmp_path / "own.jsonl", [FRANCE, *unanswered])
    assert [question.answers for question in read_paraphrases(file, unanswered=True)] == [("Paris",), (), (), ()]
    cher = write(tmp_path / "test.jsonl", [CHER | {"answers": []}])
    for name in (cher, f"webqa:{cher}"):
        with pytest.raises(DataError, match="test.jsonl, line 1: question 'wqr40' has no answers"):
            read_paraphrases(name, unanswered=True)


@pytest.mark.parametrize(("name", "split"), [("known-facts", "test"), ("known-facts:shots", "shots")])
def test_known_facts_come_by_split_in_the_order_of_the_file(name, split):
    facts = [row for row in rows_of(folder("data") / "known_facts" / "facts.jsonl") if row["split"] == split]
    questions = [
        ParaphrasedQuestion(row["id"], tuple(row["paraphrases"]), tuple(row["answers"]), row["relation"])
        for row in facts
    ]
    assert questions == read_paraphrases(name) == read_known_facts(split)


def test_webquestions_have_their_own_paraphrases_or_twenty_by_templates(tmp_path):
    (question,) = read_paraphrases(f"webqa:{write(tmp_path / 'test.json', json.dumps([CHER]))}")
    assert question.id == "wqr40" and question.answers == ("Chaz Bono", "Elijah") and not question.natural
    assert question.paraphrases[0] == "who is cher's son?" and len(set(question.paraphrases)) == 20
    assert all(text.count("who is cher's son?") == 1 for text in question.paraphrases)
    hub = {"url": "http://example.org/cher", "question": "who is cher?", "answers": ["a singer"]}
    hub |= {"paraphrases": ["Name Cher's job.", "who is cher?"]}
    first, second = read_paraphrases(write(tmp_path / "test.jsonl", [CHER, hub]))
    assert (first.id, second.id) == ("wqr40", "http://example.org/cher")
    assert second.paraphrases == ("who is cher?", "Name Cher's job.") and second.natural


# ---- ParaRel -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pararel(tmp_path):
    """Three relations in ParaRel's layout: two patterns, one, and none."""
    patterns = {
        "P36": ["The capital of [X] is [Y] .", "The capital of [X] is [Y].", "[Y] rules [X]."],
        "P1001": ["[X] is a legal term in [Y] ."],
    }
    facts = {
        "P36": ["Bolivia Sucre u1", "Peru Lima u2", "Bolivia Potosi u3", "Bolivia Sucre u4"],
        "P1001": ["law France u5"],
        "P31": ["Rex dog u6"],
    }
    for name, texts in patterns.items():
        write(tmp_path / "graphs_json" / f"{name}.jsonl", [{"pattern": text, "lemma": "l"} for text in texts])
    for name, pairs in facts.items():
        rows = [dict(zip(("sub_label", "obj_label", "uuid"), pair.split(), strict=True)) for pair in pairs]
        write(tmp_path / "trex_lms_vocab" / f"{name}.jsonl", rows)
    return tmp_path


def test_patterns_of_a_relation_are_paraphrases_and_all_objects_of_a_subject_are_answers(pararel):
    wordings = [(f"The capital of {country} is ____.", f"____ rules {country}.") for country in ("Bolivia", "Peru")]
    expected = [
        ParaphrasedQuestion("P36-u1", wordings[0], ("Sucre", "Potosi"), "P36"),
        ParaphrasedQuestion("P36-u2", wordings[1], ("Lima",), "P36"),
    ]
    assert read_paraphrases(f"lama:{pararel}") == expected == read_paraphrases(pararel)
    assert read_paraphrases(f"lama:{pararel / 'graphs_json'}", pararel / "trex_lms_vocab") == expected


@pytest.mark.parametrize(
    ("file", "row", "message"),
    [
        ("graphs_json/P36.jsonl", {"lemma": "l"}, "P36.jsonl, line 4: has no pattern"),
        ("trex_lms_vocab/P36.jsonl", {"sub_label": "Chile", "uuid": "u7"}, "P36.jsonl, line 5: has no obj_label"),
        ("trex_lms_vocab/P36.jsonl", None, "trex_lms_vocab.P36.jsonl could not be read"),
        ("graphs_json/P36.jsonl", None, "holds no relation with 2 patterns"),
    ],
)
def test_a_bad_line_or_a_missing_file_of_pararel_is_named(pararel, file, row, message):
    path = pararel / file
    if row is None:
        path.unlink()
    else:
        write(path, [*rows_of(path), row])
    with pytest.raises(DataError, match=message):
        read_paraphrases(pararel)


@pytest.mark.parametrize(
    ("template", "subject", "text"),
    [
        ("[X],  a type of [Y].", "a  ket", "a ket, a type of ____."),
        ("[X] was made in [Y] .", "Dil Se..", "Dil Se.. was made in ____."),
        ("[Y] owns [X] .", "Warner Bros.", "____ owns Warner Bros."),  # not two stops
        ("[X] met [Y], [X] said.", "Jo [Y]", "Jo [Y] met ____, Jo [Y] said."),  # a subject is no template
    ],
)
def test_a_template_keeps_its_grammar_and_loses_stray_spaces(template, subject, text):
    assert filled(template, subject) == text


# ---- MyriadLAMA ----------------------------------------------------------------------------------------------------


def fact(uuid, template, manual, subject="Peru", **more):
    row = {"uuid": uuid, "rel_uri": "P36", "sub_ent": subject, "template": template, "is_manual": manual}
    return row | {"obj_ents": ["Lima"], "obj_aliases": ["Lima", "City of Kings"]} | more


CHILE = {"obj_ents": ["Santiago"], "obj_aliases": [["Santiago", "Santiago de Chile"]]}
MYRIAD = [
    fact("u1", "[Y], [X]'s capital.", False),
    fact("u2", "[X] is ruled from [Y].", True, "Chile", **CHILE),
    fact("u1", "The capital of [X] is [Y].", True),
    fact("u1", "The capital of [X] is [Y] .", False),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_rows_of_one_fact_become_one_question_with_the_templates_by_people_first(tmp_path, suffix):
    file = write(tmp_path / f"myriad{suffix}", MYRIAD)
    if suffix == ".csv":
        rows = [row | {name: json.dumps(row[name]) for name in CHILE} for row in MYRIAD]
        with file.open("w", newline="", encoding="utf-8") as table:
            writer = csv.DictWriter(table, MYRIAD[0])
            writer.writeheader()
            writer.writerows(rows)
    wordings = ("The capital of Peru is ____.", "____, Peru's capital.")
    assert read_paraphrases(file) == [
        ParaphrasedQuestion("P36-u1", wordings, ("Lima", "City of Kings"), "P36"),
        ParaphrasedQuestion("P36-u2", ("Chile is ruled from ____.",), ("Santiago", "Santiago de Chile"), "P36"),
    ]


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "row", "message"),
    [
        (FRANCE, {"id": "it", "answers": ["Rome"]}, "has None as its paraphrases; write a list of texts"),
        *((FRANCE, FRANCE | {"paraphrases": texts}, "write a list of texts") for texts in ("Where?", [3])),
        (FRANCE, FRANCE | {"paraphrases": []}, "question 'fr' has no paraphrase"),
        (FRANCE, FRANCE | {"paraphrases": ["q", "q "]}, "has a paraphrase twice; take one of them out"),
        (FRANCE, FRANCE | {"answers": ["a", ""]}, "question 'fr' has .* or answer"),
        (FRANCE, FRANCE, "has the id 'fr', which another row has"),
        (MYRIAD[0], fact("u1", "[X] [Y]", True, obj_aliases=["Cuzco"]), "others than an earlier row"),
        (MYRIAD[0], fact("u1", "[X]", True), r"has the template '.X.' without \[Y\]"),
        (MYRIAD[0], fact("u3", "[X] [Y]", True, obj_ents=[], obj_aliases=None), "has no obj_ents or obj_aliases"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, first, row, message):
    with pytest.raises(DataError, match=f"q.jsonl, line 2: .*{message}"):
        read_paraphrases(write(tmp_path / "q.jsonl", [first, row]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing-of-this-name", "is no file and no known set that can be read; give one of: known-facts, webqa:FILE"),
        ("known-facts pairs", "only lama:FOLDER takes one"),
        ("webqa", "webqa names no data, and labkit does not ship any: give webqa:FILE, with .* of github.com/brmson/"),
        ("lama:nowhere", "holds no relation with 2 patterns.*; give lama:FOLDER, with .* github.com/yanaiela/pararel"),
        ("known-facts:dev", "is 'dev'; choose one of shots, test"),
        ("own.json", "holds no row"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "own.json", "[]")
    with pytest.raises(DataError, match=message):
        read_paraphrases(*name.split(" "))


# ---- samples -------------------------------------------------------------------------------------------------------


def questions_by_relation(sizes):
    names = [(relation, i) for relation, size in enumerate(sizes) for i in range(size)]
    return [ParaphrasedQuestion(f"{name}-{i}", (f"What is {i}?",), ("so",), f"r{name}") for name, i in names]


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@given(SIZES, st.integers(1, 40), st.integers(0, 30), st.integers(0, 5), st.randoms(use_true_random=False))
def test_a_sample_takes_equally_many_of_each_relation_and_is_part_of_a_larger_one(sizes, n, more, seed, rng):
    questions = questions_by_relation(sizes)
    drawn = sample(questions, n, seed)
    assert len(drawn) == min(n, len(questions))
    assert drawn == [question for question in questions if question in drawn]  # in their order, none twice
    counts = Counter(question.relation for question in drawn)
    assert all(counts[f"r{relation}"] >= min(size, max(counts.values()) - 1) for relation, size in enumerate(sizes))
    rng.shuffle(questions)
    assert set(drawn) == set(sample(questions, n, seed)) <= set(sample(questions, n + more, seed))


def test_a_sample_depends_on_the_seed():
    questions = questions_by_relation([100])
    assert sample(questions, 10, seed=0) != sample(questions, 10, seed=1)
