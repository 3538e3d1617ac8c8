"""Questions in several wordings: what each kind of file becomes, and what is said of a file that is not well."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st


from labkit.datasets.paraphrases import BLANK, list_in, filled, TEMPLATES
from labkit.datasets.paraphrases import (
    ParaphrasedQuestion,
    read_known_facts,
    read_paraphrases,
    sample,
)


from labkit.errors import DataError
from tests.cards import rows_of

FRANCE = {"id": "fr", "paraphrases": ["What is the capital of France?", "Paris or Lyon?"], "answers": ["Paris"]}


def lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def asked(id, relation=None):
    return ParaphrasedQuestion(id, (f"What is {id}?",), ("so",), relation)


# ---- the question --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paraphrases", "answers", "what"),
    [
        ((), ("a",), "has no paraphrase"),
        (("q", " "), ("a",), "has an empty paraphrase"),
        (("q", "r", "q"), ("a",), "has the paraphrase 'q' twice"),
        (("q",), ("a", ""), "has an empty answer"),
    ],
)
def test_question_that_is_not_well_is_refused_by_name(paraphrases, answers, what):
    with pytest.raises(DataError, match=f"question 'x' {what}"):
        ParaphrasedQuestion("x", paraphrases, answers)


# ---- rows of one's own ---------------------------------------------------------------------------------------------


def test_own_rows_need_paraphrases_and_answers_only(tmp_path):
    file = lines(
        tmp_path / "own.jsonl", FRANCE | {"relation": "capital"}, "", {"paraphrases": ["q"], "answers": ["a", "b", "a"]}
    )
    assert read_paraphrases(file) == [
        ParaphrasedQuestion("fr", tuple(FRANCE["paraphrases"]), ("Paris",), "capital"),
        ParaphrasedQuestion("3", ("q",), ("a", "b")),  # the number of its line, and each answer once
    ]


texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1).map(str.strip).filter(bool)
several = st.lists(texts, min_size=1, max_size=4, unique=True).map(tuple)


rows = st.tuples(texts, several, several, st.none() | texts, st.booleans())


@given(st.lists(rows, min_size=1, max_size=4, unique_by=lambda row: row[0]))
def test_questions_written_one_a_line_are_read_as_they_were(tmp_path_factory, rows):
    questions = [ParaphrasedQuestion(*row) for row in rows]
    file = lines(tmp_path_factory.mktemp("own") / "own.jsonl", *(vars(question) for question in questions))
    assert read_paraphrases(file) == questions


def test_table_holds_its_lists_as_json(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text('id,paraphrases,answers,relation,natural\nfr,"[""Where, then?"", ""At?""]","[""Paris""]",,False\n')
    assert read_paraphrases(file) == [ParaphrasedQuestion("fr", ("Where, then?", "At?"), ("Paris",), None, False)]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"id": "fr", "answers": ["Paris"]}, "has no paraphrases"),
        (FRANCE | {"paraphrases": "Where?"}, "has the cell 'Where\\?' where a list was expected"),
        (FRANCE | {"paraphrases": []}, "question 'fr' has no paraphrase"),
        (FRANCE | {"paraphrases": ["q", "q "]}, "has the paraphrase 'q' twice; take one of them out"),
        (FRANCE | {"answers": []}, "question 'fr' has no answer"),
        ({"id": "it", "paraphrases": ["q"]}, "question 'it' has no answer"),
        ({"id": "it", "paraphrases": ["q"], "answer": "a"}, r"has the field answer; write answers.*\['a'\]"),
        (FRANCE | {"answers": [1984]}, "has 1984 among its answers, which is no text; write it in quotes"),
        (FRANCE | {"answers": {"Paris": 1}}, "as its answers; write a list of texts"),
        (FRANCE | {"relation": 3}, "has 3 as its relation"),
        (FRANCE | {"id": ["fr"]}, r"has \['fr'\] as its id"),
        (FRANCE | {"natural": "perhaps"}, "has 'perhaps' as natural; write true or false"),
        (FRANCE | {"natural": []}, r"has \[\] as natural; write true or false"),
        (FRANCE, "has the id 'fr', as line 1 has"),
        ('{"id": "fr",', "is not JSON"),
        ("[1]", "holds \\[1\\]; expected an object"),
    ],
)
def test_faulty_row_is_named_by_file_and_line(tmp_path, row, what):
    file = lines(tmp_path / "own.jsonl", FRANCE, row)
    with pytest.raises(DataError, match=f"own.jsonl, line 2: .*{what}"):
        read_paraphrases(file)


def test_rows_of_your_own_may_be_without_answers_where_the_reader_says_so(tmp_path):
    rows = [
        FRANCE,
        {"paraphrases": ["q"]},
        {"paraphrases": ["r"], "answers": []},
        {"paraphrases": ["s"], "answers": None},
    ]
    file = lines(tmp_path / "own.jsonl", *rows)
    assert [each.answers for each in read_paraphrases(file, unanswered=True)] == [("Paris",), (), (), ()]
    table = tmp_path / "own.csv"
    table.write_text('paraphrases,answers\n"[""Where?""]",\n')
    assert read_paraphrases(table, unanswered=True) == [ParaphrasedQuestion("2", ("Where?",), ())]
    for row, what in (
        ({"answers": ["a", ""]}, "has an empty answer"),
        ({"answers": "a"}, "where a list"),
        ({"answer": "a"}, "write answers"),
    ):
        with pytest.raises(DataError, match=f"own.jsonl, line 1: .*{what}"):
            read_paraphrases(lines(file, {"paraphrases": ["q"]} | row), unanswered=True)


def test_sets_are_never_without_answers_whatever_the_reader_says(tmp_path):
    cher = lines(tmp_path / "test.jsonl", {"qId": "a", "qText": "who is cher?", "answers": []})
    for name in (cher, f"webqa:{cher}"):
        with pytest.raises(DataError, match="test.jsonl, line 1: question 'a' has no answer"):
            read_paraphrases(name, unanswered=True)


@given(st.lists(st.text()))
def test_list_in_a_cell_is_read_as_json_and_as_python_writes_it(values):
    assert list_in(json.dumps(values)) == values == list_in(repr(values))


@pytest.mark.parametrize("cell", ["['Paris' 'Lutetia']", "['Paris'\n 'Lutetia']"])
def test_list_as_numpy_prints_it_is_refused_as_python_would_join_its_texts(cell):
    assert eval(cell) == ["ParisLutetia"]
    with pytest.raises(ValueError, match="without commas"):
        list_in(cell)


# ---- known facts ---------------------------------------------------------------------------------------------------


def test_known_facts_come_by_split_as_they_stand_in_the_file():
    rows = rows_of("known_facts/facts.jsonl")
    for name, split in (("known-facts", "test"), ("known-facts:test", "test"), ("known-facts:shots", "shots")):
        expected = [row for row in rows if row["split"] == split]
        found = read_paraphrases(name)
        assert found == read_known_facts(split) and all(question.natural for question in found)
        assert [(q.id, list(q.paraphrases), list(q.answers), q.relation) for q in found] == [
            (row["id"], row["paraphrases"], row["answers"], row["relation"]) for row in expected
        ]
    with pytest.raises(DataError, match="no split 'dev'; choose one of shots, test"):
        read_known_facts("dev")


# ---- WebQuestions --------------------------------------------------------------------------------------------------

CHER = {"qId": "wqr40", "answers": ["Chaz Bono", "Chaz Bono", "Elijah"], "qText": "who is cher's son?"}


def test_webquestions_get_twenty_different_wordings_by_templates_and_say_so(tmp_path):
    (question,) = read_paraphrases(f"webqa:{lines(tmp_path / 'test.json', [CHER])}")
    assert question.id == "wqr40" and question.answers == ("Chaz Bono", "Elijah") and question.relation is None
    assert question.natural is False
    assert question.paraphrases[0] == "who is cher's son?" and len(set(question.paraphrases)) == 20 == len(TEMPLATES)
    assert all(text.count("who is cher's son?") == 1 for text in question.paraphrases)


def test_webquestions_with_paraphrases_of_their_own_use_those_after_the_question(tmp_path):
    row = CHER | {"paraphrases": ["Whom did Cher bear?", "who is cher's son?"]}
    (question,) = read_paraphrases(lines(tmp_path / "test.json", [row]))
    assert question.paraphrases == ("who is cher's son?", "Whom did Cher bear?") and question.natural
    with pytest.raises(DataError, match="line 1: has an empty list of paraphrases"):
        read_paraphrases(lines(tmp_path / "test.json", [CHER | {"paraphrases": []}]))


def test_webquestions_are_known_by_their_fields_one_a_line_too(tmp_path):
    hub = {"url": "http://example.org/cher", "question": "who is cher?", "answers": ["a singer"]}
    file = lines(tmp_path / "test.jsonl", CHER, hub)
    assert [question.id for question in read_paraphrases(file)] == ["wqr40", "http://example.org/cher"]


def test_fault_in_a_json_list_is_named_by_the_line_where_its_entry_begins(tmp_path):
    file = tmp_path / "test.json"
    file.write_text(json.dumps([CHER, CHER | {"qId": "b", "answers": "Chaz"}], indent=1))
    assert file.read_text().splitlines()[10].strip() == "{"  # where the second begins
    with pytest.raises(DataError, match="test.json, line 11: has 'Chaz' as its answers; write a list of texts"):
        read_paraphrases(file)
    file.write_text(file.read_text()[:-1])
    with pytest.raises(DataError, match=f"test.json, line {file.read_text().count(chr(10)) + 1}: is not JSON"):
        read_paraphrases(file)
    with pytest.raises(DataError, match="line 1: holds a int in its list"):
        read_paraphrases(lines(file, [1]))
    with pytest.raises(DataError, match="holds no question"):
        read_paraphrases(lines(file, []))


@given(
    st.lists(st.tuples(st.text("\n \t", max_size=3), st.dictionaries(st.text(), st.text()), st.booleans()), max_size=5)
)
def test_entries_of_a_json_list_have_their_lines_however_it_is_laid_out(tmp_path_factory, entries):
    text, expected = "[", []
    for number, (space, entry, spread) in enumerate(entries):
        text += ("," if number else "") + space
        expected.append((text.count("\n") + 1, entry))
        text += json.dumps(entry, indent=2 if spread else None)
    file = tmp_path_factory.mktemp("json") / "list.json"
    file.write_text(text + "\n]\n")
    assert list(json_entries(file)) == expected


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
    expected = [
        ParaphrasedQuestion(
            "P36-u1", ("The capital of Bolivia is ____.", "____ rules Bolivia."), ("Sucre", "La Paz"), "P36"
        ),
        ParaphrasedQuestion("P36-u2", ("The capital of Peru is ____.", "____ rules Peru."), ("Lima",), "P36"),
    ]
    assert read_paraphrases(f"lama:{pararel}") == expected == read_paraphrases(pararel)
    assert read_paraphrases(f"lama:{pararel / 'graphs_json'}", pararel / "trex_lms_vocab") == expected


def test_pararel_folder_that_is_not_whole_is_refused(pararel):
    with pytest.raises(DataError, match="graphs_json.graphs_json is no folder; the patterns of ParaRel were expected"):
        read_paraphrases(pararel / "graphs_json")
    (pararel / "trex_lms_vocab" / "P36.jsonl").unlink()
    with pytest.raises(DataError, match="P36.jsonl has patterns, and there are no pairs for them"):
        read_paraphrases(pararel)
    (pararel / "graphs_json" / "P36.jsonl").unlink()
    with pytest.raises(DataError, match="holds no relation with 2 patterns"):
        read_paraphrases(pararel)


@pytest.mark.parametrize(
    ("file", "row", "what"),
    [
        ("graphs_json/P36.jsonl", {"lemma": "l"}, "has no pattern"),
        ("graphs_json/P36.jsonl", {"pattern": "The capital of [X]."}, r"has the template 'The .*' without \[Y\]"),
        ("trex_lms_vocab/P36.jsonl", {"sub_label": "Chile", "uuid": "u7"}, "has no obj_label"),
        ("trex_lms_vocab/P36.jsonl", {"sub_label": "Chile", "obj_label": "", "uuid": "u7"}, "has '' as its obj_label"),
        (
            "trex_lms_vocab/P36.jsonl",
            {"sub_label": "Chile", "obj_label": "S", "uuid": "u1"},
            "has the uuid 'u1', as line 1 has",
        ),
    ],
)
def test_faulty_line_of_pararel_is_named(pararel, file, row, what):
    line = len((pararel / file).read_text().splitlines()) + 1
    with (pararel / file).open("a") as out:
        out.write(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"{(pararel / file).name}, line {line}: {what}"):
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
def test_template_keeps_its_grammar_and_loses_stray_spaces(template, subject, text):
    assert filled(template, subject) == text


# ---- MyriadLAMA ----------------------------------------------------------------------------------------------------


def fact(uuid, template, manual, subject="Peru", **more):
    objects = {"obj_ents": ["Lima"], "obj_aliases": ["Lima", "City of Kings"]}
    return (
        {"uuid": uuid, "rel_uri": "P36", "sub_ent": subject, "template": template, "is_manual": manual} | objects | more
    )


MYRIAD = [
    fact("u1", "[Y], [X]'s capital.", False),
    fact(
        "u2",
        "[X] is ruled from [Y].",
        True,
        "Chile",
        obj_ents=["Santiago"],
        obj_aliases=[["Santiago", "Santiago de Chile"]],
    ),
    fact("u1", "The capital of [X] is [Y].", True),
    fact("u1", "The capital of [X] is [Y] .", False),
]
MYRIAD_READ = [
    ParaphrasedQuestion(
        "P36-u1", ("The capital of Peru is ____.", "____, Peru's capital."), ("Lima", "City of Kings"), "P36"
    ),
    ParaphrasedQuestion("P36-u2", ("Chile is ruled from ____.",), ("Santiago", "Santiago de Chile"), "P36"),
]


def test_rows_of_one_fact_become_one_question_with_the_templates_by_people_first(tmp_path):
    assert read_paraphrases(lines(tmp_path / "myriad.jsonl", *MYRIAD)) == MYRIAD_READ


def test_myriad_lama_as_a_table_is_the_same(tmp_path):
    pandas = pytest.importorskip("pandas")
    file = tmp_path / "myriad.csv"
    pandas.DataFrame(MYRIAD).to_csv(file, index=False)
    assert read_paraphrases(file) == MYRIAD_READ
    arrays = [row | {"obj_aliases": pandas.array(row["obj_aliases"]).to_numpy()} for row in MYRIAD[:1]]
    pandas.DataFrame(arrays).to_csv(file, index=False)  # as the hub's library does it
    with pytest.raises(DataError, match="myriad.csv, line 2: has a list without commas"):
        read_paraphrases(file)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (fact("u1", "[X] [Y]", True, "Chile"), "differs from line 1, which has the same uuid"),
        (fact("u1", "[X] [Y]", True, obj_aliases=["Cuzco"]), "differs from line 1"),
        (fact("u1", "[X]", True), r"has the template '.X.' without \[Y\]"),
        (fact("u1", "[X] [Y]", "perhaps"), "has 'perhaps' as is_manual"),
        (fact("u3", "[X] [Y]", True, obj_ents=[], obj_aliases=None), "has neither obj_ents nor obj_aliases"),
        (fact("u3", "[X] [Y]", True, obj_ents=[3]), "has 3 among its obj_ents"),
        (fact("u3", "[X] [Y]", True, obj_ents=3), "has 3 as its obj_ents"),
    ],
)
def test_faulty_row_of_myriad_lama_is_named(tmp_path, row, what):
    with pytest.raises(DataError, match=f"m.jsonl, line 2: {what}"):
        read_paraphrases(lines(tmp_path / "m.jsonl", MYRIAD[0], row))


def test_myriad_lama_without_rows_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no question"):
        read_paraphrases(tmp_path / "m.jsonl", [])


# ---- by name -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nothing-of-this-name", "is no file and no known set; give one of: known-facts, webqa:FILE"),
        ("webqa", "webqa names no data, and labkit does not ship any: give webqa:FILE, with .* of github.com/brmson/"),
        ("lama", "lama names no data.*: give lama:FOLDER, with .*graphs_json of github.com/yanaiela/pararel.*pairs"),
        ("lama:", "lama names no data"),
        ("lama:nowhere", "nowhere.graphs_json is no folder"),
        ("webqa:nowhere.json", "nowhere.json could not be read"),
        ("known-facts:dev", "no split 'dev'"),
    ],
)
def test_name_that_leads_nowhere_is_told_what_would(name, what):
    with pytest.raises(DataError, match=what):
        read_paraphrases(name)


def test_file_of_another_kind_and_pairs_where_none_belong_are_refused(tmp_path):
    with pytest.raises(DataError, match="ends in .txt; the file must be .jsonl, .csv or .json"):
        read_paraphrases(lines(tmp_path / "own.txt", FRANCE))
    with pytest.raises(DataError, match="known-facts needs no folder of pairs"):
        read_paraphrases("known-facts", tmp_path)
    with pytest.raises(DataError, match="own.jsonl is empty"):
        read_paraphrases(lines(tmp_path / "own.jsonl"))


# ---- drawing some --------------------------------------------------------------------------------------------------

sizes = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@given(sizes, st.integers(1, 70), st.integers(0, 5))
def test_sample_takes_as_many_of_each_relation_as_there_are_or_one_less_than_of_the_others(sizes, n, seed):
    questions = [asked(f"{relation}-{i}", f"r{relation}") for relation, size in enumerate(sizes) for i in range(size)]
    drawn = sample(questions, n, seed)
    assert len(drawn) == min(n, len(questions))
    assert drawn == [question for question in questions if question in drawn]  # in their order, none twice
    counts = Counter(question.relation for question in drawn)
    most = max(counts.values())
    assert all(counts[f"r{relation}"] >= min(size, most - 1) for relation, size in enumerate(sizes))


@given(sizes, st.integers(1, 30), st.integers(0, 30), st.randoms(use_true_random=False))
def test_smaller_sample_is_part_of_a_larger_one_whatever_the_order_of_the_questions(sizes, n, more, rng):
    questions = [asked(f"{relation}-{i}", f"r{relation}") for relation, size in enumerate(sizes) for i in range(size)]
    small = set(sample(questions, n, seed=3))
    rng.shuffle(questions)
    assert small <= set(sample(questions, n + more, seed=3))
    assert small == set(sample(questions, n, seed=3))


def test_sample_differs_by_seed_and_takes_at_least_one():
    questions = [asked(str(number)) for number in range(100)]
    assert sample(questions, 10, seed=0) != sample(questions, 10, seed=1)
    with pytest.raises(DataError, match="0 questions were asked for"):
        sample(questions, 0)


def test_blank_is_four_underscores():
    assert BLANK == "____" and BLANK in filled("[X]: [Y]", "France")
