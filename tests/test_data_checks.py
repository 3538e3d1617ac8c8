"""The check of users' labelled files, alone and as the splits of one data set, and `labkit data check FILE...`."""

from __future__ import annotations

import json
import re

import pytest

from labkit import cli
from labkit.datasets.checks import LONG, Report, check_files
from labkit.datasets.embedded import SPLITS
from labkit.errors import DataError
from labkit.files import folder

CONTEXT = "Paris lies on the Seine. The Seine rises in Burgundy."


def put(place, name: str, content: str):
    (place / name).write_text(content, encoding="utf-8")
    return place / name


def rows(place, name: str, *examples: dict):
    return put(place, name, "".join(json.dumps(row) + "\n" for row in examples))


def qa(id: str, question: str = "Where is Paris?", context: str = CONTEXT, start: int = 14, end: int = 23, **more):
    answers = [{"text": context[start:end], "start": start}] if end > start else []
    return {"id": id, "question": question, "context": context, "answers": answers} | more


def ner(words: str, tags: str, **more) -> dict:
    return {"words": words.split(" "), "tags": tags.split()} | more


def text(text: str, label: str = "good", **more) -> dict:
    return {"text": text, "label": label} | more


def pair(first: str, second: str, **more) -> dict:
    return {"first": first, "second": second} | more


CLEAN = {
    "qa": [qa("a"), qa("b", "What rises in Burgundy?", start=25, end=34), qa("c", "Where is Rome?", end=14)],
    "ner": [ner("Ann met Bo in Paris .", "B-PER O B-PER O B-LOC O"), ner("Rome called Cy", "B-LOC O B-PER")],
    "classify": [text("a fine book, read it twice"), text("no use to anybody", "poor")],
    "embed": [pair("a cat sleeps", "a cat is asleep", score=5), pair("it rains", "the sun is out", score=0)],
}
COUNTS = {
    "qa": {"answerable": 2, "unanswerable": 1, "contexts": 1},
    "ner": {"PER": 3, "LOC": 2},
    "classify": {"good": 1, "poor": 1},
    "embed": {"scored": 2, "without a score": 0},
}


@pytest.mark.parametrize("task", CLEAN)
def test_a_file_in_order_has_neither_faults_nor_warnings(tmp_path, task):
    path = rows(tmp_path, "a.jsonl", *CLEAN[task])
    assert check_files(task, [path]) == [Report(str(path), task, len(CLEAN[task]), COUNTS[task], (), ())]


@pytest.mark.parametrize(("task", "form"), [("qa", "questions.{}.json"), ("ner", "entities.{}.conll")])
def test_the_embedded_data_are_in_order(task, form):
    reports = check_files(task, [folder("data") / "field_notes" / form.format(split) for split in SPLITS])
    assert all(report.ok and report.n > 50 for report in reports)


# ---- one file --------------------------------------------------------------------------------------------------------


def check(place, task: str, *more: dict) -> Report:
    """The check of a clean file with `more` rows."""
    return check_files(task, [rows(place, "a.jsonl", *CLEAN[task], *more)])[0]


@pytest.mark.parametrize(
    ("task", "more", "fault"),
    [
        ("qa", [qa("x", "Which?", start=13), qa("y", "Who?", start=13), qa("z", "Why?", start=13)],
         "white space around it, 3 times: x (' the Seine'), y (' the Seine'), ..."),
        ("qa", [qa("x", " where  is PARIS?", end=14)], "x (as a)"),
        ("ner", [ner("Rome called Cy", "B-LOC O O", id="x")], "different tags: x (as 2: 'Rome called Cy')"),
        ("ner", [ner("a  b", "O O O", id="x"), ner("", "O", id="y")], "a blank one, twice: x, y"),
        ("classify", [text("No use  to anybody", "good", id="x")], "different labels: x 'good' (2 'poor')"),
        ("classify", [text("no use to anybody", "poor", id="x")], "x (as 2)"),
        ("embed", [pair("A cat is asleep", "a cat  sleeps", score=1, id="x")], "different scores: x 1.0 (1 5.0)"),
        ("embed", [pair("it rains", "the sun is out", score=0, id="x")], "x (as 2)"),
        ("classify", [text("half \ud83d", id="x")], "half of a surrogate pair"),
        ("classify", [{"text": "no label"}], "line 3: has no label"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_examples(tmp_path, task, more, fault):
    report = check(tmp_path, task, *more)
    assert len(report.faults) == 1 and fault in report.faults[0] and not report.ok
    assert report.n >= len(CLEAN[task])


@pytest.mark.parametrize(
    ("task", "more", "warning"),
    [
        ("qa", [qa("x", "Which?", start=15)], "begins or ends within a word: x ('he Seine')"),
        ("qa", [qa("x", "Wh\x07ich?")], "control character: x ('\\x07')"),
        ("qa", [qa("x", "Which caf\ufffd?")], "lost in decoding: x ('Which caf\ufffd?')"),
        ("ner", [ner("Rome called Cy", "B-LOC O B-PER", id="x")], "occurs twice: x (as 2: 'Rome called Cy')"),
        ("ner", [ner("as K said", "O B-PER O", id="x")], "one character: x ('K', PER)"),
        ("ner", [ner("in May 1999", "O B-DATE I-DATE", id="x")], "DATE has only one entity: x ('May 1999')"),
        ("ner", [ner("as Di said", "O I-PER O", id="x"), ner("Di said", "I-LOC O", id="y")],
         "begins with I- and was read as if it began with B-, twice: x (I-PER after O), y (I-LOC after the beginning)"),
        ("classify", [text("a cafe\u0301", id="x")], "normal form NFC: x"),
        ("classify", [text("a" * (LONG + 1), id="x")], "longer than 100,000 characters: x (100,001)"),
        ("classify", [text(f"text number {i}") for i in range(19)], "20 times as frequent"),
        ("embed", [pair("so it goes", "So it  goes", score=5, id="x")], "both texts are the same: x"),
        ("embed", [pair("one more", "another", id="x")], "the score is missing, but other pairs have one: x"),
    ],
)  # fmt: skip
def test_a_warning_is_not_a_fault(tmp_path, task, more, warning):
    report = check(tmp_path, task, *more)
    assert len(report.warnings) == 1 and warning in report.warnings[0] and report.ok


def test_one_label_is_a_warning_and_white_space_is_no_control_character(tmp_path):
    path = rows(tmp_path, "a.jsonl", text("one\ttwo\r\nthree\u00a0four"), text("two"))
    assert check_files("classify", [path])[0].warnings == ("there is only one label: 'good'",)


def test_a_tag_scheme_other_than_bio_is_not_a_repair(tmp_path):
    for tags in ("I-PER I-PER O I-PER", "I-PER B-PER O I-PER", "S-PER S-PER O S-PER"):
        content = "".join(f"{word} {tag}\n" for word, tag in zip("Ann Bo met Cy".split(), tags.split(), strict=True))
        assert "I-" not in " ".join(check_files("ner", [put(tmp_path, "b.conll", content)])[0].warnings)


def test_notes_say_which_columns_were_read(tmp_path):
    (report,) = check_files("ner", [put(tmp_path, "a.conll", "# by hand\n1 Ann NNP B-PER\n2 saw VBD O\n")])
    assert report.ok and [re.findall(r"\d+", note) for note in report.notes] == [["2", "4", "4"], ["1"], ["1", "1"]]
    nested = put(tmp_path, "b.conll", "Uni B-ORG O\nWien I-ORG B-LOC\n")
    assert not check_files("ner", [nested])[0].ok
    assert [check_files("ner", [nested], tag_column=n)[0].counts for n in (2, 3)] == [{"ORG": 1}, {"LOC": 1}]


# ---- several files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "train", "dev", "kind"),
    [
        ("qa", qa("t", "Anything?"), qa("d", "Something?", context=CONTEXT.upper().replace(" ", "\n")), "context"),
        ("ner", ner("the Rhine at Basel rises", "O B-LOC O B-LOC O"), ner("The RHINE at Basel rises", "O " * 5),
         "sentence"),
        ("classify", text("it came late, and broken"), text(" It came late,  and BROKEN"), "text"),
        ("embed", pair("one text", "two texts"), pair("Two texts", "one text"), "pair"),
        ("classify", text("a", group="shop 7"), text("b", group="shop 7"), "group"),
        ("qa", qa("t", title="Rivers"), qa("d", context="another text", end=0, title="Rivers"), "group"),
    ],
)  # fmt: skip
def test_an_example_that_is_in_two_splits_is_a_fault_of_the_later(tmp_path, task, train, dev, kind):
    first, second = rows(tmp_path, "train.jsonl", train), rows(tmp_path, "dev.jsonl", dev)
    reports = check_files(task, [first, second])
    assert reports[0].ok and len(reports[1].faults) == 1
    assert reports[1].faults[0].startswith(f"the {kind} is also in {first}: ")
    assert check_files(task, [second])[0].ok


def test_a_leak_is_counted_once_per_text_and_by_file_beside_a_file_that_cannot_be_read(tmp_path):
    texts = [text(f"this is the text of number {i}") for i in range(6)]
    train, dev = rows(tmp_path, "train.jsonl", *texts[:4]), rows(tmp_path, "dev.jsonl", *texts[1:])
    bad, test = put(tmp_path, "bad.jsonl", "{}\n"), rows(tmp_path, "test.jsonl", texts[5], texts[0])
    reports = check_files("classify", [train, bad, dev, test])
    first, second = (repr(texts[i]["text"]) for i in (1, 2))
    assert reports[2].faults == (f"the text is also in {train}, 3 times: {first}, {second}, ...",)
    assert [str(path) in fault for fault, path in zip(reports[3].faults, (train, dev), strict=True)] == [True, True]


def test_a_short_text_or_half_of_a_pair_in_two_splits_is_a_warning(tmp_path):
    for task, first, second in (
        ("classify", text("Thanks!"), text("thanks!")),
        ("embed", pair("how do I sleep better?", "go to bed early"), pair("how do I sleep better?", "no coffee")),
    ):
        train, dev = rows(tmp_path, "train.jsonl", first), rows(tmp_path, "dev.jsonl", second)
        report = check_files(task, [train, dev])[1]
        assert report.ok and f"the text is also in {train}: " in " ".join(report.warnings)


def test_groups_that_a_reader_numbers_are_not_compared(tmp_path):
    for content in ("-DOCSTART- O\n\n{} B-PER\nsays O\n", "{} B-PER\nsays O\n"):
        paths = [put(tmp_path, f"{name}.conll", content.format(name)) for name in ("Ann", "Bo")]
        assert all(report.ok for report in check_files("ner", paths))


# ---- bad input, and the command --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "name", "content"),
    [("classify", "a.csv", "text,label\n"), ("qa", "a.json", "{}"), ("classify", "a.jsonl", ""), ("qa", "a.pdf", "x")],
)
def test_a_file_that_cannot_be_read_has_that_as_its_fault(tmp_path, task, name, content):
    (report,) = check_files(task, [path := put(tmp_path, name, content)])
    assert (report.n, report.counts, report.warnings, report.ok) == (0, {}, (), False)
    assert len(report.faults) == 1 and report.faults[0].startswith(str(path))


@pytest.mark.parametrize(
    ("task", "names", "words"),
    [
        ("qa", ["none.jsonl"], "none.jsonl does not exist"),
        ("qa", ["a" * 300], "cannot be opened"),
        ("qa", ["."], "is a folder"),
        ("speech", ["a.jsonl"], "the task is 'speech'; choose one of qa, ner, classify, embed"),
        ("qa", ["a.jsonl", "sub/../a.jsonl"], "is given twice"),
    ],
)
def test_bad_input_is_refused(tmp_path, task, names, words):
    (tmp_path / "sub").mkdir()
    rows(tmp_path, "a.jsonl", *CLEAN["qa"])
    with pytest.raises(DataError, match=words):
        check_files(task, [tmp_path / name for name in names])


@pytest.fixture
def data_check(capfd):
    """data_check("a.jsonl", "--task", "qa") -> (exit code, standard output, standard error)"""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main(["data", "check", *map(str, arguments)])
        return exit_.value.code, *capfd.readouterr()

    return run


def test_the_command_prints_counts_and_findings(tmp_path, data_check):
    paths = [rows(tmp_path, f"{i}.jsonl", row) for i, row in enumerate(CLEAN["classify"])]
    code, out, err = data_check(*paths, "--task", "classify")
    assert (code, err) == (0, "")
    table = [line.split() for line in out.splitlines()]
    assert table[:3] == [["file", "examples", "faults", "warnings"], *([str(p), "1", "0", "1"] for p in paths)]
    assert f"{paths[0]}: good 1\nwarning: there is only one label: 'good'\n" in out
    code, out, err = data_check("--task", "classify", paths[0], rows(tmp_path, "again.jsonl", CLEAN["classify"][0]))
    assert (code, err) == (1, "") and f"fault: the text is also in {paths[0]}" in out


def test_json_holds_the_reports(tmp_path, data_check):
    path, bad = rows(tmp_path, "a.jsonl", *CLEAN["ner"]), put(tmp_path, "b.jsonl", "{}")
    code, out, err = data_check(path, bad, "--task", "ner", "--json")
    assert (code, err) == (1, "")
    assert json.loads(out) == [json.loads(json.dumps(report.to_dict())) for report in check_files("ner", [path, bad])]


def test_many_faults_are_cut_on_the_screen_and_whole_as_json(tmp_path, data_check):
    path = rows(tmp_path, "a.jsonl", *[{"text": f"text {i}"} for i in range(30)], *CLEAN["classify"])
    code, out, _ = data_check(path, "--task", "classify")
    assert code == 1 and out.count("has no label") == 20 and "fault: and 10 more" in out
    code, out, _ = data_check(path, "--task", "classify", "--json")
    assert code == 1 and len(json.loads(out)[0]["faults"]) == 30 and json.loads(out)[0]["n"] == 2


def test_the_tag_column_is_an_option(tmp_path, data_check):
    path = put(tmp_path, "a.conll", "1 Uni B-ORG O\n2 Wien I-ORG B-LOC\n")
    assert "--tag-column" in data_check(path, "--task", "ner")[1]
    code, out, err = data_check(path, "--task", "ner", "--tag-column", "3")
    assert (code, err) == (0, "") and f"{path}: ORG 1\nnote: " in out


def test_findings_of_awkward_text_can_be_printed(tmp_path, data_check):
    examples = [text("half \ud83d", id="\ud83d"), text("[bold]x\x1b[31m", "p\nq", id="\x1b[31m")]
    code, out, err = data_check(rows(tmp_path, "a.jsonl", *examples), "--task", "classify")
    assert (code, err) == (1, "") and out.encode("utf-8")
    assert r"\ud83d" in out and r"\x1b[31m" in out and "\x1b" not in out and "good 1, p\\nq 1\n" in out


@pytest.mark.parametrize(
    "arguments",
    ["{file}", "--task qa", "--tag-column 3", "{file} --task speech", "{file} none.jsonl --task qa"],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, data_check, arguments):
    path = rows(tmp_path, "a.jsonl", *CLEAN["qa"])
    code, out, err = data_check(*(argument.format(file=path) for argument in arguments.split()))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
