"""The check of users' labelled files, alone and as the splits of one data set, and `labkit data check FILE...`."""

from __future__ import annotations

import json

import pytest

from labkit.datasets.checks import check_files
from labkit.datasets.embedded import SPLITS
from labkit.errors import DataError
from labkit.files import folder
from tests.data_files import write

CONTEXT = "Paris lies on the Seine. The Seine rises in Burgundy."


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
    "classify": [text("good"), text("fine\tand\r\nwell"), text("no use at all", "poor"), text("bad\u00a0too", "poor")],
    "embed": [pair("a cat sleeps", "a cat is asleep", score=5), pair("it rains", "the sun is out", score=0)],
}
COUNTS = {
    "qa": {"answerable": 2, "unanswerable": 1},
    "ner": {"PER": 3, "LOC": 2},
    "classify": {"good": 2, "poor": 2},
    "embed": {"scored": 2},
}


@pytest.mark.parametrize("task", CLEAN)
def test_a_file_in_order_has_neither_faults_nor_warnings(tmp_path, task):
    path = write(tmp_path / "a.jsonl", CLEAN[task])
    report = {"path": str(path), "task": task, "n": len(CLEAN[task]), "counts": COUNTS[task]}
    assert check_files(task, [path]) == [report | {"faults": [], "warnings": [], "ok": True}]


@pytest.mark.parametrize(("task", "form"), [("qa", "questions.{}.json"), ("ner", "entities.{}.conll")])
def test_the_embedded_data_are_in_order(task, form):
    reports = check_files(task, [folder("data") / "field_notes" / form.format(split) for split in SPLITS])
    assert all(report["ok"] and report["n"] > 50 for report in reports)


FINDINGS = [  # (task, rows beside the clean ones, what is found)
    ("qa", [qa("x", "Which?", start=13), qa("y", "Who?", start=13), qa("z", "Why?", start=13)],
     "fault: an answer has white space around it, 3 times: x (' the Seine'), y (' the Seine'), ..."),
    ("qa", [qa("x", " where  is PARIS?")], "fault: the same example occurs twice: x (as a)"),
    ("qa", [qa("x", " where  is PARIS?", end=14)], "fault: the same text has different labels: x (as a)"),
    ("ner", [ner("Rome called Cy", "B-LOC O O", id="x")], "fault: the same text has different labels: x (as 2)"),
    ("classify", [text("No use  at all", "good", id="x")], "fault: the same text has different labels: x (as 3)"),
    ("embed", [pair("A cat is asleep", "a cat  sleeps", score=1, id="x")], "fault: the same text has different labels"),
    ("classify", [text("half \ud83d", id="x")], "line 5: holds half of a surrogate pair"),
    ("qa", [qa("x", "Which?", end=22)], "warning: an answer ends within a word: x ('the Sein')"),
    ("qa", [qa("x", "Wh\x07ich?")], "warning: there is an invisible or a lost character: x ('\\x07')"),
    ("ner", [ner("Rome called Cy", "B-LOC O B-PER", id="x")], "warning: the same example occurs twice: x (as 2)"),
    ("ner", [ner("New\u00a0York , Rome", "B-LOC O B-LOC", id="x")], "warning: a word contains white space"),
    ("ner", [ner("in May 1999", "O B-DATE I-DATE")], "warning: a label occurs only once: 'DATE'"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "more", "finding"), FINDINGS)
def test_a_finding_is_named_with_its_examples(tmp_path, task, more, finding):
    (report,) = check_files(task, [write(tmp_path / "a.jsonl", CLEAN[task] + more)])
    findings = [f"{kind}: {text}" for kind in ("fault", "warning") for text in report[f"{kind}s"]]
    assert len(findings) == 1 and finding in findings[0]
    assert report["ok"] == finding.startswith("warning") and report["n"] >= len(CLEAN[task])


@pytest.mark.parametrize(
    ("task", "train", "dev", "kind"),
    [
        ("qa", qa("t", "Anything?"), qa("d", "Something?", context=CONTEXT.upper().replace(" ", "\n")), "text"),
        ("ner", ner("the Rhine at Basel rises", "O O O O O"), ner("The RHINE at Basel rises", "O B-X O O O"), "text"),
        ("embed", pair("one text", "two texts"), pair("Two texts", "one text"), "pair"),
        ("classify", text("a", group="shop 7"), text("b", group="shop 7"), "group"),
    ],
)
def test_an_example_that_is_in_two_splits_is_a_fault_of_the_later(tmp_path, task, train, dev, kind):
    first = write(tmp_path / "train.jsonl", [*CLEAN[task], train])
    reports = check_files(task, [first, write(tmp_path / "dev.jsonl", [dev])])
    assert reports[0]["ok"] and len(reports[1]["faults"]) == 1
    assert reports[1]["faults"][0].startswith(f"the {kind} is also in {first}")


def test_a_text_in_two_earlier_files_is_counted_by_file_beside_a_file_that_cannot_be_read(tmp_path):
    texts = [text(f"this is the text of number {i}") for i in range(4)]
    contents = {"train": texts[:3], "bad": ["{}"], "dev": texts[3:], "test": texts}
    train, bad, dev, test = (write(tmp_path / f"{name}.jsonl", rows) for name, rows in contents.items())
    first, second, _, last = (repr(row["text"]) for row in texts)
    assert check_files("classify", [train, bad, dev, test])[3]["faults"] == [
        f"the text is also in {train}, 3 times: {first}, {second}, ...", f"the text is also in {dev}: {last}"
    ]  # fmt: skip


def test_short_texts_and_halves_of_pairs_are_only_warnings(tmp_path):
    question = "how do I sleep better?"
    for task, train, dev in (
        ("classify", text("Thanks!"), text("thanks!")),
        ("embed", pair(question, "go to bed early"), pair(question, "no coffee")),
    ):
        first = write(tmp_path / "train.jsonl", [train])
        report = check_files(task, [first, write(tmp_path / "dev.jsonl", [dev])])[1]
        assert report["ok"] and f"the text is also in {first}: " in " ".join(report["warnings"])


@pytest.mark.parametrize("start", ["-DOCSTART- O\n\n", ""])
def test_documents_that_are_only_numbered_are_no_leak(tmp_path, start):
    paths = [write(tmp_path / f"{name}.conll", f"{start}{name} B-PER\nsays O\n") for name in ("Ann", "Bo")]
    assert all(report["ok"] for report in check_files("ner", paths))


# ---- bad input, and the command --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "name", "content", "fault"),
    [
        ("qa", "a.json", "{}", "is not SQuAD"),
        ("classify", "a.jsonl", "", "is empty"),
        ("classify", "a.csv", "text\none\ntwo\n", "all 2 rows: label is None"),
        ("classify", "a.csv", "text,label\none,good\ntwo,good\n", "at least 2 different labels, and there are 1"),
        ("ner", "a.conll", "Ann O\nsleeps O\n\nBo O\n", "at least 1 different labels, and there are 0"),
    ],
)
def test_a_file_that_cannot_be_trained_on_has_that_as_its_only_fault(tmp_path, task, name, content, fault):
    path = write(tmp_path / name, content)
    reports = check_files(task, [path])
    assert [fault in text for text in reports[0]["faults"]] == [True]
    if reports[0]["n"]:  # a dev or test file may have one label only
        assert check_files(task, [write(tmp_path / "train.jsonl", CLEAN[task]), path])[1]["ok"]


@pytest.mark.parametrize("name", ["none.jsonl", "a" * 300, "."])
def test_what_is_no_file_is_refused(tmp_path, name):
    with pytest.raises(DataError, match="does not exist|is a folder|cannot be opened"):
        check_files("qa", [tmp_path / name])


def test_the_command_prints_counts_and_findings_and_many_only_as_json(tmp_path, labkit_command):
    path = write(tmp_path / "a.jsonl", CLEAN["classify"])
    code, out, err = labkit_command("data", "check", path, "--task", "classify")
    assert (code, out, err) == (0, f"{path}: 4 examples (good 2, poor 2)\n", "")
    again = write(tmp_path / "again.jsonl", [{"text": f"text {i}"} for i in range(30)] + CLEAN["classify"][:2])
    code, out, _ = labkit_command("data", "check", "--task", "classify", path, again)
    assert code == 1 and f"fault: {again}, line 1: label is None" in out
    assert out.count("label is None") == 20 and "fault: and 10 more" in out and "warning: the text is also in" in out
    code, out, _ = labkit_command("data", "check", path, again, "--task", "classify", "--json")
    reports = check_files("classify", [path, again])
    assert code == 1 and json.loads(out) == reports and len(reports[1]["faults"]) == 30


def test_the_tag_column_is_an_option(tmp_path, labkit_command):
    path = write(tmp_path / "a.conll", "Uni B-ORG O\nWien I-ORG B-LOC\n")
    assert "--tag-column" in labkit_command("data", "check", path, "--task", "ner")[1]
    code, out, _ = labkit_command("data", "check", path, "--task", "ner", "--tag-column", "2")
    assert code == 0 and f"{path}: 1 examples (ORG 1)\n" in out


def test_findings_of_awkward_text_can_be_printed(tmp_path, labkit_command):
    rows = [{"text": 1, "label": "\x1b[1m", "id": "\ud83d"}, text("[bold]x\x1b[31m", "p\nq", id="\x1b[31m")]
    code, out, _ = labkit_command("data", "check", write(tmp_path / "a.jsonl", rows), "--task", "classify")
    assert code == 1 and out.encode("utf-8")
    assert "surrogate" in out and r"\x1b[31m" in out and "\x1b" not in out and "(p\\nq 1)\n" in out


@pytest.mark.parametrize(
    "arguments", ["{file}", "--task qa", "--tag-column 3", "{file} --task speech", "none.jsonl --task qa"]
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, labkit_command, arguments):
    path = write(tmp_path / "a.jsonl", CLEAN["qa"])
    code, out, err = labkit_command("data", "check", *(text.format(file=path) for text in arguments.split()))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
