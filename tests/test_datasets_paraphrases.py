"""Questions in several wordings: what each kind of file becomes, and how bad rows are named."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.datasets.paraphrases import (
    ParaphrasedQuestion,
    filled,
    read_known_facts,
    read_paraphrases,
    sample,
)
from labkit.errors import DataError
from tests.cards import rows_of

FRANCE = {"id": "fr", "paraphrases": ["What is the capital of France?", "Paris or Lyon?"], "answers": ["Paris"]}
CHER = {"qId": "wqr40", "answers": ["Chaz Bono", "Chaz Bono", "Elijah"], "qText": "who is cher's son?"}


def lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


# ---- one's own rows ------------------------------------------------------------------------------------------------


def test_own_rows_need_paraphrases_and_answers_only(tmp_path):
    rows = FRANCE | {"relation": "capital"}, "", {"paraphrases": ["q"], "answers": ["a", "b", "a"]}
    assert read_paraphrases(lines(tmp_path / "own.jsonl", *rows)) == [
        ParaphrasedQuestion("fr", tuple(FRANCE["paraphrases"]), ("Paris",), "capital"),
        ParaphrasedQuestion("3", ("q",), ("a", "b")),  # the number of its line, and each answer once
    ]
    table = tmp_path / "own.csv"
    table.write_text('id,paraphrases,answers,relation,natural\nfr,"[""Where, then?"", ""At?""]","[""Paris""]",,False\n')
    assert read_paraphrases(table) == [ParaphrasedQuestion("fr", ("Where, then?", "At?"), ("Paris",), None, False)]


texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1).map(str.strip).filter(bool)
several = st.lists(texts, min_size=1, max_size=4, unique=True).map(tuple)
rows = st.tuples(texts, several, several, st.none() | texts, st.booleans())


@given(st.lists(rows, min_size=1, max_size=4, unique_by=lambda row: row[0]), st.booleans())
def test_questions_written_as_json_are_read_as_they_were(tmp_path_factory, rows, as_list):
    questions = [ParaphrasedQuestion(*row) for row in rows]
    written = [vars(question) for question in questions]
    file = lines(tmp_path_factory.mktemp("own") / "own.json", *([written] if as_list else written))
    assert read_paraphrases(file if as_list else file.rename(file.with_suffix(".jsonl"))) == questions


def test_own_rows_may_lack_answers_if_the_caller_says_so_but_sets_may_not(tmp_path):
    unanswered = [{"paraphrases": [text]} | more for text, more in (("q", {}), ("r", {"answers": []}))]
    file = lines(tmp_path / "own.jsonl", FRANCE, *unanswered, {"paraphrases": ["s"], "answers": None})
    assert [question.answers for question in read_paraphrases(file, unanswered=True)] == [("Paris",), (), (), ()]
    table = tmp_path / "own.csv"
    table.write_text('paraphrases,answers\n"[""Where?""]",\n')
    assert read_paraphrases(table, unanswered=True) == [ParaphrasedQuestion("2", ("Where?",), ())]
    cher = lines(tmp_path / "test.jsonl", CHER | {"answers": []})
    for name in (cher, f"webqa:{cher}"):
        with pytest.raises(DataError, match="test.jsonl, line 1: question 'wqr40' has no answer"):
            read_paraphrases(name, unanswered=True)


def test_known_facts_come_by_split_in_the_order_of_the_file():
    for name, split in (("known-facts", "test"), ("known-facts:test", "test"), ("known-facts:shots", "shots")):
        expected = [row for row in rows_of("known_facts/facts.jsonl") if row["split"] == split]
        questions = read_paraphrases(name)
        assert questions == read_known_facts(split) and all(question.natural for question in questions)
        assert [(q.id, list(q.paraphrases), list(q.answers), q.relation) for q in questions] == [
            (row["id"], row["paraphrases"], row["answers"], row["relation"]) for row in expected
        ]


# ---- WebQuestions --------------------------------------------------------------------------------------------------


def test_webquestions_without_paraphrases_have_twenty_by_templates_and_are_not_natural(tmp_path):
    (question,) = read_paraphrases(f"webqa:{lines(tmp_path / 'test.json', [CHER])}")
    assert question.id == "wqr40" and question.answers == ("Chaz Bono", "Elijah") and question.relation is None
    assert question.natural is False
    assert question.paraphrases[0] == "who is cher's son?" and len(set(question.paraphrases)) == 20
    assert all(text.count("who is cher's son?") == 1 for text in question.paraphrases)


def test_webquestions_are_recognised_by_their_fields_and_keep_their_own_paraphrases(tmp_path):
    hub = {"url": "http://example.org/cher", "question": "who is cher?", "answers": ["a singer"]}
    hub |= {"paraphrases": ["Name Cher's job.", "who is cher?"]}
    first, second = read_paraphrases(lines(tmp_path / "test.jsonl", CHER, hub))
    assert (first.id, second.id) == ("wqr40", "http://example.org/cher")
    assert second.paraphrases == ("who is cher?", "Name Cher's job.") and second.natural


# ---- ParaRel -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pararel(tmp_path):
    """Three relations in ParaRel's layout: two patterns, one, and none."""

    def pattern(text):
        return {"pattern": text, "lemma": "l", "extended_lemma": "l", "tense": "present"}

    def pair(subject, answer, uuid):
        return {"sub_label": subject, "obj_label": answer, "uuid": uuid}

    patterns, pairs = tmp_path / "graphs_json", tmp_path / "trex_lms_vocab"
    twice = [pattern("The capital of [X] is [Y] ."), pattern("The capital of [X] is [Y]."), pattern("[Y] rules [X].")]
    lines(patterns / "P36.jsonl", *twice)
    lines(patterns / "P1001.jsonl", pattern("[X] is a legal term in [Y] ."))
    bolivia = [pair("Bolivia", "Sucre", "u1"), pair("Peru", "Lima", "u2"), pair("Bolivia", "La Paz", "u3")]
    lines(pairs / "P36.jsonl", *bolivia, pair("Bolivia", "Sucre", "u4"))
    lines(pairs / "P1001.jsonl", pair("law", "France", "u5"))
    lines(pairs / "P31.jsonl", pair("Rex", "dog", "u6"))
    return tmp_path


def test_patterns_of_a_relation_are_paraphrases_and_all_objects_of_a_subject_are_answers(pararel):
    wordings = [(f"The capital of {country} is ____.", f"____ rules {country}.") for country in ("Bolivia", "Peru")]
    expected = [
        ParaphrasedQuestion("P36-u1", wordings[0], ("Sucre", "La Paz"), "P36"),
        ParaphrasedQuestion("P36-u2", wordings[1], ("Lima",), "P36"),
    ]
    assert read_paraphrases(f"lama:{pararel}") == expected == read_paraphrases(pararel)
    assert read_paraphrases(f"lama:{pararel / 'graphs_json'}", pararel / "trex_lms_vocab") == expected


@pytest.mark.parametrize(
    ("file", "row", "message"),
    [
        ("graphs_json/P36.jsonl", {"lemma": "l"}, "has no pattern"),
        ("graphs_json/P36.jsonl", {"pattern": "The capital of [X]."}, r"has the template 'The .*' without \[Y\]"),
        ("trex_lms_vocab/P36.jsonl", {"sub_label": "Chile", "uuid": "u7"}, "has no obj_label"),
        ("trex_lms_vocab/P36.jsonl", {"sub_label": "Chile", "obj_label": "S", "uuid": "u1"}, ".*, as line 1 has"),
    ],
)
def test_a_bad_line_of_pararel_is_named(pararel, file, row, message):
    line = len((pararel / file).read_text().splitlines()) + 1
    with (pararel / file).open("a") as out:
        out.write(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"{(pararel / file).name}, line {line}: {message}"):
        read_paraphrases(pararel)


def test_a_pararel_folder_that_is_not_complete_is_refused(pararel):
    with pytest.raises(DataError, match="graphs_json.graphs_json is no folder; the patterns of ParaRel were expected"):
        read_paraphrases(f"lama:{pararel / 'graphs_json'}")
    (pararel / "trex_lms_vocab" / "P36.jsonl").unlink()
    with pytest.raises(DataError, match="trex_lms_vocab.P36.jsonl could not be read"):
        read_paraphrases(pararel)
    (pararel / "graphs_json" / "P36.jsonl").unlink()
    with pytest.raises(DataError, match="holds no relation with 2 patterns"):
        read_paraphrases(pararel)


@pytest.mark.parametrize(
    ("template", "subject", "text"),
    [
        ("[Y] player [X] ", "Jo", "____ player Jo"),
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
    file = lines(tmp_path / f"myriad{suffix}", *MYRIAD)
    if suffix == ".csv":
        pandas = pytest.importorskip("pandas")
        table = pandas.DataFrame(MYRIAD)
        for column in CHILE:
            table[column] = table[column].map(json.dumps)
        table.to_csv(file, index=False)
    wordings = ("The capital of Peru is ____.", "____, Peru's capital.")
    assert read_paraphrases(file) == [
        ParaphrasedQuestion("P36-u1", wordings, ("Lima", "City of Kings"), "P36"),
        ParaphrasedQuestion("P36-u2", ("Chile is ruled from ____.",), ("Santiago", "Santiago de Chile"), "P36"),
    ]


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "row", "message"),
    [
        (FRANCE, {"id": "it", "answers": ["Rome"]}, "has no paraphrases"),
        (FRANCE, FRANCE | {"paraphrases": "Where?"}, "has the cell 'Where\\?' where a JSON list was expected"),
        (FRANCE, FRANCE | {"paraphrases": []}, "question 'fr' has no paraphrase"),
        (FRANCE, FRANCE | {"paraphrases": ["q", " "]}, "question 'fr' has an empty paraphrase"),
        (FRANCE, FRANCE | {"paraphrases": ["q", "q "]}, "has the paraphrase 'q' twice; take one of them out"),
        (FRANCE, FRANCE | {"answers": ["a", ""]}, "question 'fr' has an empty answer"),
        (FRANCE, FRANCE | {"answers": []}, "question 'fr' has no answer"),
        (FRANCE, {"id": "it", "paraphrases": ["q"], "answer": "a"}, r"has the field answer; write answers.*\['a'\]"),
        (FRANCE, FRANCE | {"answers": [1984]}, r"has \[1984\] as its answers; write a list of texts"),
        (FRANCE, FRANCE | {"answers": {"Paris": 1}}, "as its answers; write a list of texts"),
        (FRANCE, FRANCE | {"relation": 3}, "relation is 3; expected a text"),
        (FRANCE, FRANCE | {"id": ["fr"]}, r"id is \['fr'\]; expected a text"),
        (FRANCE, FRANCE | {"natural": "perhaps"}, "has 'perhaps' as natural; write true or false"),
        (FRANCE, FRANCE, "has the id 'fr', as line 1 has"),
        (FRANCE, '{"id": "fr",', "cannot be read as JSON"),
        (FRANCE, "[1]", "holds \\[1\\]; expected an object"),
        (CHER, CHER | {"qId": "b", "paraphrases": []}, "has an empty list of paraphrases"),
        (MYRIAD[0], fact("u1", "[X] [Y]", True, "Chile"), "differs from an earlier row with the same uuid"),
        (MYRIAD[0], fact("u1", "[X] [Y]", True, obj_aliases=["Cuzco"]), "differs from an earlier row"),
        (MYRIAD[0], fact("u1", "[X]", True), r"has the template '.X.' without \[Y\]"),
        (MYRIAD[0], fact("u1", "[X] [Y]", "perhaps"), "has 'perhaps' as is_manual"),
        (MYRIAD[0], fact("u3", "[X] [Y]", True, obj_ents=[], obj_aliases=None), "has neither obj_ents nor obj_aliases"),
        (MYRIAD[0], fact("u3", "[X] [Y]", True, obj_ents=[3]), "has 3 among its obj_ents"),
        (MYRIAD[0], fact("u3", "[X] [Y]", True, obj_ents=3), "has 3 as its obj_ents"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, first, row, message):
    with pytest.raises(DataError, match=f"q.jsonl, line 2: .*{message}"):
        read_paraphrases(lines(tmp_path / "q.jsonl", first, row))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing-of-this-name", "is no file and no known set; give one of: known-facts, webqa:FILE"),
        ("webqa", "webqa names no data, and labkit does not ship any: give webqa:FILE, with .* of github.com/brmson/"),
        ("lama:", "lama names no data.*: give lama:FOLDER, with .*graphs_json of github.com/yanaiela/pararel.*pairs"),
        ("lama:nowhere", "nowhere.graphs_json is no folder"),
        ("webqa:nowhere.json", "nowhere.json is no file"),
        ("known-facts:dev", "no split 'dev'; choose one of shots, test"),
        ("own.txt", "ends in .txt; the file must be .jsonl, .csv or .json"),
        ("own.jsonl", "own.jsonl is empty"),
        ("own.json", "holds no question"),
        ("webqa:list.json", "list.json, row 1: holds 1; expected an object"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    for file, rows in (("own.txt", [FRANCE]), ("own.jsonl", []), ("own.json", [[]]), ("list.json", [[1]])):
        lines(tmp_path / file, *rows)
    with pytest.raises(DataError, match=message):
        read_paraphrases(name)


def test_a_folder_of_pairs_is_for_pararel_only(tmp_path):
    with pytest.raises(DataError, match="known-facts needs no folder of pairs"):
        read_paraphrases("known-facts", tmp_path)


# ---- samples -------------------------------------------------------------------------------------------------------


def questions_by_relation(sizes):
    return [
        ParaphrasedQuestion(f"{relation}-{i}", (f"What is {i}?",), ("so",), f"r{relation}")
        for relation, size in enumerate(sizes)
        for i in range(size)
    ]


sizes = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@given(sizes, st.integers(1, 70), st.integers(0, 5))
def test_a_sample_takes_equally_many_of_each_relation_where_possible(sizes, n, seed):
    questions = questions_by_relation(sizes)
    drawn = sample(questions, n, seed)
    assert len(drawn) == min(n, len(questions))
    assert drawn == [question for question in questions if question in drawn]  # in their order, none twice
    counts = Counter(question.relation for question in drawn)
    most = max(counts.values())
    assert all(counts[f"r{relation}"] >= min(size, most - 1) for relation, size in enumerate(sizes))


@given(sizes, st.integers(1, 30), st.integers(0, 30), st.randoms(use_true_random=False))
def test_a_smaller_sample_is_part_of_a_larger_one_whatever_the_order_of_the_questions(sizes, n, more, rng):
    questions = questions_by_relation(sizes)
    small = set(sample(questions, n, seed=3))
    rng.shuffle(questions)
    assert small <= set(sample(questions, n + more, seed=3))
    assert small == set(sample(questions, n, seed=3))


def test_a_sample_depends_on_the_seed_and_has_at_least_one_question():
    questions = questions_by_relation([100])
    assert sample(questions, 10, seed=0) != sample(questions, 10, seed=1)
    with pytest.raises(DataError, match="0 questions were asked for"):
        sample(questions, 0)
