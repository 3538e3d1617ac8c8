"""The check of users' labelled files, alone and as the splits of one data set, and `labkit data check FILE...`."""

from __future__ import annotations

import json
import re

import pytest

from labkit import cli
from labkit.datasets.checks import LONG, Report, check_files
from labkit.datasets.embedded import SPLITS
from labkit.errors import DataError
from labkit.resources import folder

CONTEXT = "Paris lies on the Seine. The Seine rises in Burgundy."


def put(place, name: str, content: str):
    (place / name).write_text(content, encoding="utf-8")
    return place / name


def rows(place, name: str, *given: dict):
    return put(place, name, "".join(json.dumps(row) + "\n" for row in given))


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
    report = check_files(task, [path])[0]
    assert report == Report(str(path), task, len(CLEAN[task]), COUNTS[task], (), ())
    assert report.ok


def test_the_embedded_data_are_in_order_as_a_users_own():
    place = folder("data") / "field_notes"
    for task, form in (("qa", "questions.{}.json"), ("ner", "entities.{}.conll")):
        reports = check_files(task, [place / form.format(split) for split in SPLITS])
        assert [report.faults for report in reports] == [(), (), ()]
        assert all(report.n > 50 for report in reports)


# ---- what the reader refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "name", "content", "fault"),
    [
        ("classify", "a.jsonl", '{"text": "a"}\n', "line 1: has no label"),
        ("classify", "a.csv", "text,label\n", "holds no example"),
        ("ner", "a.conll", "Ann B-PER\nBo\n", "line 2: has one column"),
        ("qa", "a.json", "{}", "is not SQuAD"),
        ("embed", "a.csv", "first,second\na\n", "line 2: has 1 cells"),
        ("classify", "a.jsonl", "", "is empty"),
        ("qa", "a.pdf", "x", "ends in .pdf"),
    ],
)
def test_a_file_that_cannot_be_read_has_that_as_its_fault(tmp_path, task, name, content, fault):
    path = put(tmp_path, name, content)
    report = check_files(task, [path])[0]
    assert (report.n, report.counts, report.warnings, report.ok) == (0, {}, (), False)
    (message,) = report.faults
    assert message.startswith(str(path)) and fault in message


def test_the_rows_that_can_be_read_are_checked_beside_those_that_cannot(tmp_path):
    good = CLEAN["classify"]
    report = check_files("classify", [rows(tmp_path, "a.jsonl", good[0], {"text": "a"}, *good, {"label": "good"})])[0]
    assert report.n == 3 and report.counts == {"good": 2, "poor": 1}
    assert [fault.partition("line ")[2][:1] for fault in report.faults] == ["2", "5", ""]
    assert report.faults[2].startswith("the same text occurs twice: 3 (as 1)")


def test_notes_say_which_columns_were_read(tmp_path):
    path = put(tmp_path, "a.conll", "# by hand\n1 Ann NNP B-PER\n2 saw VBD O\n")
    report = check_files("ner", [path])[0]
    assert report.ok and report.n == 1
    assert [re.findall(r"\d+", note) for note in report.notes] == [["2", "4", "4"], ["1"], ["1", "1"]]
    nested = put(tmp_path, "b.conll", "Uni B-ORG O\nWien I-ORG B-LOC\n")
    assert not check_files("ner", [nested])[0].ok
    assert [check_files("ner", [nested], tag_column=n)[0].counts for n in (2, 3)] == [{"ORG": 1}, {"LOC": 1}]


def test_one_file_that_cannot_be_read_leaves_the_others_compared(tmp_path):
    first, bad = rows(tmp_path, "a.jsonl", *CLEAN["classify"]), put(tmp_path, "b.jsonl", "{}\n")
    last = rows(tmp_path, "c.jsonl", *CLEAN["classify"])
    reports = check_files("classify", [first, bad, last])
    assert [report.n for report in reports] == [2, 0, 2]
    assert f"is also in {first}" in reports[2].faults[0] and str(bad) not in "".join(reports[2].faults)


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
def test_what_is_no_file_or_no_task_is_bad_input(tmp_path, task, names, words):
    (tmp_path / "sub").mkdir()
    rows(tmp_path, "a.jsonl", *CLEAN["qa"])
    with pytest.raises(DataError, match=words):
        check_files(task, [tmp_path / name for name in names])


# ---- one file --------------------------------------------------------------------------------------------------------


def found(place, task: str, *more: dict) -> Report:
    """The check of a clean file with `more` rows."""
    return check_files(task, [rows(place, "a.jsonl", *CLEAN[task], *more)])[0]


@pytest.mark.parametrize(
    ("task", "more", "fault"),
    [
        ("qa", [qa("x", "Which?", start=13), qa("y", "Who?", start=13), qa("z", "Why?", start=13)],
         "an answer has white space around it, 3 times: x (' the Seine'), y (' the Seine'), ..."),
        ("qa", [qa("x", " where  is PARIS?", end=14)], "the same question is asked twice about one context: x (as a)"),
        ("ner", [ner("Rome called Cy", "B-LOC O O", id="x")],
         "the same words have different tags: x (as 2: 'Rome called Cy')"),
        ("ner", [ner("a  b", "O O O", id="x"), ner("", "O", id="y")], "there is no word, or a blank one, twice: x, y"),
        ("classify", [text("No use  to anybody", "good", id="x")],
         "the same text has different labels: x 'good' (2 'poor')"),
        ("classify", [text("no use to anybody", "poor", id="x")], "the same text occurs twice: x (as 2)"),
        ("embed", [pair("A cat is asleep", "a cat  sleeps", score=1, id="x")],
         "the same pair has different scores: x 1.0 (1 5.0)"),
        ("embed", [pair("it rains", "the sun is out", score=0, id="x")], "the same pair occurs twice: x (as 2)"),
        ("classify", [text("half \ud83d", id="x")],
         "half of a surrogate pair, which is not a character (\\ud800 to \\udfff): x"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_examples(tmp_path, task, more, fault):
    report = found(tmp_path, task, *more)
    assert fault in report.faults and len(report.faults) == 1
    assert report.n == len(CLEAN[task]) + len(more) and not report.ok


@pytest.mark.parametrize(
    ("task", "more", "warning"),
    [
        ("qa", [qa("x", "Which?", start=15)], "an answer begins or ends within a word: x ('he Seine')"),
        ("qa", [qa("x", "Wh\x07ich?")], "there is a control character: x ('\\x07')"),
        ("qa", [qa("x", "Which caf\ufffd?")],
         "U+FFFD replaces a character that was lost in decoding: x ('Which caf\ufffd?')"),
        ("ner", [ner("Rome called Cy", "B-LOC O B-PER", id="x")],
         "the same sentence occurs twice: x (as 2: 'Rome called Cy')"),
        ("ner", [ner("as K said", "O B-PER O", id="x")], "an entity is one character: x ('K', PER)"),
        ("ner", [ner("in May 1999", "O B-DATE I-DATE", id="x")], "the label DATE has only one entity: x ('May 1999')"),
        ("ner", [ner("as Di said", "O I-PER O", id="x"), ner("Di said", "I-LOC O", id="y")],
         "an entity begins with I- and was read as if it began with B-, twice: x (I-PER after O), "
         "y (I-LOC after the beginning)"),
        ("classify", [text("a cafe\u0301", id="x")], "the text is not in Unicode's normal form NFC: x"),
        ("classify", [text("a" * (LONG + 1), id="x")], "the text is longer than 100,000 characters: x (100,001)"),
        ("classify", [text(f"text number {i}") for i in range(19)],
         "one label is 20 times as frequent as another, or more: 'good' 20, 'poor' 1"),
        ("embed", [pair("so it goes", "So it  goes", score=5, id="x")], "both texts are the same: x"),
        ("embed", [pair("one more", "another", id="x")], "the score is missing, but other pairs have one: x"),
    ],
)  # fmt: skip
def test_a_warning_is_no_fault(tmp_path, task, more, warning):
    report = found(tmp_path, task, *more)
    assert report.warnings == (warning,)
    assert report.ok


def test_one_label_only_is_a_warning(tmp_path):
    report = check_files("classify", [rows(tmp_path, "a.jsonl", text("one"), text("two"))])[0]
    assert report.warnings == ("there is only one label: 'good'",) and report.ok


def test_repaired_tags_are_counted_in_a_column_file_and_another_scheme_is_none(tmp_path):
    slip = put(tmp_path, "a.conll", "Ann B-PER\nmet O\nBo I-PER\n\nCy B-PER\nLu I-LOC\n")
    assert check_files("ner", [slip])[0].warnings[-1] == (
        "an entity begins with I- and was read as if it began with B-, twice: "
        "a-0 (I-PER after O), a-1 (I-LOC after B-PER)"
    )
    for tags in ("I-PER I-PER O I-PER", "I-PER B-PER O I-PER", "S-PER S-PER O S-PER"):
        content = "".join(f"{word} {tag}\n" for word, tag in zip("Ann Bo met Cy".split(), tags.split(), strict=True))
        assert "I-" not in " ".join(check_files("ner", [put(tmp_path, "b.conll", content)])[0].warnings)


def test_white_space_and_line_ends_of_a_text_are_no_control_characters(tmp_path):
    assert found(tmp_path, "classify", text("one\ttwo\r\nthree\u00a0four")).warnings == ()


# ---- several files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "train", "dev", "fault"),
    [
        ("qa", qa("t", "Anything?"), qa("d", "Something?", context=CONTEXT.upper().replace(" ", "\n")),
         f"the context is also in {{train}}: {CONTEXT.upper().replace(' ', chr(10))!r}"),
        ("ner", ner("the Rhine at Basel rises", "O B-LOC O B-LOC O"), ner("The RHINE at Basel rises", "O " * 5),
         "the sentence is also in {train}: 'The RHINE at Basel rises'"),
        ("classify", text("it came late, and broken"), text(" It came late,  and BROKEN"),
         "the text is also in {train}: ' It came late,  and BROKEN'"),
        ("embed", pair("one text", "two texts"), pair("Two texts", "one text"),
         "the pair is also in {train}: 'one text' / 'two texts'"),
        ("classify", text("a", group="shop 7"), text("b", group="shop 7"),
         "the group is also in {train}: 'shop 7'"),
        ("qa", qa("t", title="Rivers"), qa("d", context="another text", end=0, title="Rivers"),
         "the group is also in {train}: 'Rivers'"),
    ],
)  # fmt: skip
def test_what_stands_in_two_splits_is_a_fault_of_the_later(tmp_path, task, train, dev, fault):
    first, second = rows(tmp_path, "train.jsonl", train), rows(tmp_path, "dev.jsonl", dev)
    reports = check_files(task, [first, second])
    assert reports[0].ok and reports[1].faults == (fault.format(train=first),)
    assert check_files(task, [second])[0].ok


def test_a_leak_is_counted_once_per_text_with_two_examples_and_by_file(tmp_path):
    texts = [text(f"this is the text of number {i}") for i in range(6)]
    train, dev = rows(tmp_path, "train.jsonl", *texts[:4]), rows(tmp_path, "dev.jsonl", *texts[1:])
    test = rows(tmp_path, "test.jsonl", texts[5], texts[0])
    reports = check_files("classify", [train, dev, test])
    first, second = (repr(texts[i]["text"]) for i in (1, 2))
    assert reports[1].faults == (f"the text is also in {train}, 3 times: {first}, {second}, ...",)
    assert reports[2].faults == (
        f"the text is also in {train}: {texts[0]['text']!r}",
        f"the text is also in {dev}: {texts[5]['text']!r}",
    )


def test_what_recurs_by_chance_is_a_warning(tmp_path):
    train, dev = rows(tmp_path, "train.jsonl", text("Thanks!")), rows(tmp_path, "dev.jsonl", text("thanks!"))
    report = check_files("classify", [train, dev])[1]
    assert report.ok and f"the text is also in {train}: 'thanks!'" in report.warnings
    train = rows(tmp_path, "a.jsonl", pair("how do I sleep better?", "go to bed early"))
    dev = rows(tmp_path, "b.jsonl", pair("how do I sleep better?", "drink no coffee"))
    report = check_files("embed", [train, dev])[1]
    assert report.ok and report.warnings == (f"the text is also in {train}: 'how do I sleep better?'",)


def test_groups_that_a_reader_counts_are_not_compared(tmp_path):
    for content in ("-DOCSTART- O\n\n{} B-PER\nsays O\n", "{} B-PER\nsays O\n"):
        train = put(tmp_path, "train.conll", content.format("Ann"))
        dev = put(tmp_path, "dev.conll", content.format("Bo"))
        assert [report.faults for report in check_files("ner", [train, dev])] == [(), ()]


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def data_check(capfd):
    """data_check("a.jsonl", "--task", "qa") -> (exit code, standard output, standard error)"""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main(["data", "check", *map(str, arguments)])
        return exit_.value.code, *capfd.readouterr()

    return run


def test_files_in_order_exit_with_0_and_are_counted(tmp_path, data_check):
    paths = [rows(tmp_path, f"{task}.jsonl", *CLEAN["classify"][i : i + 1]) for i, task in enumerate(("a", "b"))]
    code, out, err = data_check(*paths, "--task", "classify")
    assert (code, err) == (0, "")
    table = [line.split() for line in out.splitlines()]
    assert table[:3] == [["file", "examples", "faults", "warnings"], *([str(p), "1", "0", "1"] for p in paths)]
    assert f"{paths[0]}: good 1\nwarning: there is only one label: 'good'\n" in out


def test_a_leak_is_printed_and_exits_with_1(tmp_path, data_check):
    train, dev = (rows(tmp_path, f"{name}.jsonl", *CLEAN["qa"]) for name in ("train", "dev"))
    code, out, err = data_check("--task", "qa", train, dev)
    assert (code, err) == (1, "")
    assert f"{dev}: answerable 2, unanswerable 1, contexts 1\nfault: the context is also in {train}" in out


def test_json_holds_the_reports(tmp_path, data_check):
    path, bad = rows(tmp_path, "a.jsonl", *CLEAN["ner"]), put(tmp_path, "b.jsonl", "{}")
    code, out, err = data_check(path, bad, "--task", "ner", "--json")
    assert (code, err) == (1, "")
    first, second = json.loads(out)
    expected = {"task": "ner", "n": 2, "counts": COUNTS["ner"], "faults": [], "warnings": [], "notes": [], "ok": True}
    assert first == {"path": str(path)} | expected
    assert len(second["faults"]) == 1 and f"{bad}, line 1: " in second["faults"][0]
    assert second["ok"] is False


def test_many_faults_are_cut_on_the_screen_and_whole_as_json(tmp_path, data_check):
    path = rows(tmp_path, "a.jsonl", *[{"text": f"text {i}"} for i in range(30)], *CLEAN["classify"])
    code, out, err = data_check(path, "--task", "classify")
    assert (code, err) == (1, "")
    assert out.count("has no label") == 20 and "fault: and 10 more" in out
    code, out, _ = data_check(path, "--task", "classify", "--json")
    assert code == 1 and len(json.loads(out)[0]["faults"]) == 30 and json.loads(out)[0]["n"] == 2


def test_the_tag_column_is_an_option(tmp_path, data_check):
    path = put(tmp_path, "a.conll", "1 Uni B-ORG O\n2 Wien I-ORG B-LOC\n")
    assert "--tag-column" in data_check(path, "--task", "ner")[1]
    code, out, err = data_check(path, "--task", "ner", "--tag-column", "3")
    assert (code, err) == (0, "") and f"{path}: ORG 1\nnote: " in out
    assert data_check("--tag-column", "3")[0] == 2


def test_the_findings_of_awkward_text_can_be_printed(tmp_path, data_check):
    given = [text("half \ud83d", id="\ud83d"), text("[bold]x\x1b[31m", "p\nq", id="\x1b[31m")]
    path = rows(tmp_path, "a.jsonl", *given)
    code, out, err = data_check(path, "--task", "classify")
    assert (code, err) == (1, "")
    out.encode("utf-8")
    assert re.search(r"^fault: half of a surrogate pair.*: \\ud83d$", out, re.M)
    assert re.search(r"^warning: there is a control character: \\x1b\[31m \('\\x1b'\)$", out, re.M)
    assert "\x1b" not in out and "good 1, p\\nq 1\n" in out
    assert json.loads(data_check(path, "--task", "classify", "--json")[1])[0]["counts"] == {"good": 1, "p\nq": 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{file}"], "FILE and --task go together"),
        (["--task", "qa"], "FILE and --task go together"),
        (["{file}", "--task", "speech"], "the task is 'speech'; choose one of qa, ner, classify, embed"),
        (["{file}", "none.jsonl", "--task", "qa"], "none.jsonl does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, data_check, arguments, words):
    path = rows(tmp_path, "a.jsonl", *CLEAN["qa"])
    code, out, err = data_check(*(each.format(file=path) for each in arguments))
    assert (code, out) == (2, "")
    assert words in err and len(err.splitlines()) == 1
