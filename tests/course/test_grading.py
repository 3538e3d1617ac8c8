"""Grading a class: what is run, kept, reported and exported; `labkit course` as a user types it."""

import csv
import json
import os
import re
from dataclasses import asdict, replace

import pytest

from labkit.course import check
from labkit.course.build import build
from labkit.course.grade import grade, grade_all
from labkit.course.grades import gradebook_csv, read_grades, write_pages
from labkit.course.mistakes import Mistake, NotBegun
from labkit.course.sandbox import Sandbox
from labkit.course.variant import Variant
from labkit.errors import CourseError
from tests.course.handed_in import RIGHT, TIGHT, UPPER, hand_in, isolated, notebook

pytestmark = pytest.mark.end_to_end
NAME = "a1_masks_and_attention.ipynb"
A4 = "a4_fine_tune_and_report.ipynb"
ROOMY = replace(TIGHT, cell_seconds=60.0)  # figures take long to import
PUBLIC = Variant()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build(folder, names=["a1"])
    return folder


# ------------------------------------------------------------------------------------------------- the process apart
def asked(trusted, source, *arguments):
    assert trusted.run(source) is None
    return trusted.answer("f")(*arguments)


def test_cells_share_their_names_and_a_stub_is_not_an_error(trusted):
    assert asked(trusted, "def f(x):\n    return causal_mask(x).sum()", 2).item() == 3
    assert trusted.run("raise NotImplementedError('a1_causal_mask')") is None
    for nothing in ("def f():\n    raise NotImplementedError", "f = None"):
        with pytest.raises(NotBegun):
            asked(trusted, nothing)


DEAF = "while True:\n        try:\n            while 1: pass\n        except: pass"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (DEAF, "within the time limit"),
        ("import os; os._exit(7)", "the process ended"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("return [][1]", r"IndexError.*\[\]\[1\]"),
        ("return object()", "cannot be judged"),
        ("import torch; return torch.zeros(2**33, 0)", "MemoryError"),  # many empty lists
        ("return input()", "EOFError"),
    ],
)
def test_whatever_an_answer_does_the_next_one_is_asked(trusted, body, words):
    with pytest.raises(Mistake, match=words):
        asked(trusted, f"def f():\n    {body}")
    assert trusted.answer("causal_mask")(2).tolist() == [[True, False], [True, True]]


def test_a_cell_that_hangs_is_named_and_the_others_are_kept(trusted):
    assert trusted.run("kept = 41") is None
    assert "within the time limit" in trusted.run("while True: pass")
    assert asked(trusted, "def f():\n    return kept + 1") == 42


def test_a_module_of_the_student_replaces_nothing(trusted):
    forged = "import os; os.environ['RAN'] = 'yes'"
    write = f"open('json.py', 'w').write({forged!r}); open('mine.py', 'w').write('x = 1'); import mine"
    assert trusted.run(write) is None
    assert trusted.run("import json, os; assert 'RAN' not in os.environ") is None


def test_the_time_of_a_submission_is_limited():
    with Sandbox("a1", replace(TIGHT, total_seconds=-1.0), trusted=True) as late:
        assert "time limit of the submission" in late.run("1")


# ------------------------------------------------------------------------------------------------------------ a class
def listed(folder):
    return {row["student"]: row for row in csv.DictReader((folder / "grades.csv").open(encoding="utf-8"))}


@isolated
def test_a_class_is_graded_and_one_broken_submission_does_not_stop_it(tmp_path, built):
    folder, out = tmp_path / "in", tmp_path / "grades"
    hand_in(folder, eva="import torch\n\ndef causal_mask(n)\n    return 1")
    hand_in(folder / ".ipynb_checkpoints", ada="1")
    (folder / "ada.ipynb").write_bytes((built / "solution" / NAME).read_bytes())
    (folder / "bea").mkdir()
    (folder / "bea" / "any.ipynb").write_text(notebook(RIGHT, "1 / 0", "check.a1_causal_mask(causal_mask)"))
    (folder / "cem.ipynb").write_bytes((built / "student" / NAME).read_bytes())
    (folder / "dan.ipynb").write_text("this is no notebook")

    def graded(path, limits=ROOMY):
        return {grade.student: grade for grade in grade_all(path, out, PUBLIC, limits)}

    first = graded(folder)
    points = {student: grade.points for student, grade in first.items()}
    assert points == {"ada": 23, "bea": 2, "cem": 0, "dan": None, "eva": 0}
    assert first["ada"].trouble == first["cem"].trouble == [] and not first["ada"].basis["trusted"]
    assert len(first["bea"].trouble) == 1 and "ZeroDivisionError" in first["bea"].trouble[0]
    assert "cannot be read" in first["dan"].failure and first["eva"].outcomes[0].status == "wrong"
    assert {outcome.status for outcome in first["cem"].outcomes} == {"not begun"}
    rows = listed(out)
    assert rows["ada"]["percent"] == "100.0" and rows["bea"]["a1_causal_mask"] == "2" and rows["dan"]["points"] == ""
    assert read_grades(out) == [first[student] for student in sorted(first)]

    hand_in(folder, cem=RIGHT)
    second = graded(folder)
    assert {student for student in first if second[student] == first[student]} == {"ada", "bea", "dan", "eva"}
    assert second["cem"].points == 2
    # One file: the class keeps the others. Other limits: it is graded again.
    third = graded(folder / "cem.ipynb", replace(ROOMY, call_seconds=2.5))
    assert list(third) == ["cem"] and third["cem"] != second["cem"] and third["cem"].points == 2
    assert list(listed(out)) == sorted(first)


def test_a_grade_is_kept_until_the_checks_change_and_not_after_a_time_limit(tmp_path, monkeypatch):
    hand_in(tmp_path, ada=RIGHT, eve="while True: pass")

    def graded(student, earlier=None):
        limits = replace(TIGHT, cell_seconds=1.0)
        return grade(student, tmp_path / f"{student}.ipynb", limits, PUBLIC, trusted=True, earlier=earlier)

    ada, eve = graded("ada"), graded("eve")
    assert graded("ada", ada) is ada and not ada.timed_out
    assert graded("eve", eve) is not eve and eve.timed_out
    write_pages([ada, eve], tmp_path)
    assert (tmp_path / "class.html").read_text().count("time limit") == 1
    monkeypatch.setattr("labkit.course.grade._labkit", lambda: "updated")
    assert graded("ada", ada) is not ada


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        (RIGHT.replace("(n):", "(n)"), "code", r"SyntaxError: line 2: expected ':'"),
        (RIGHT.replace("return ", "return \u201cx\u201d + "), "code", r"SyntaxError: .*\u201c.*U\+201C"),
        (RIGHT, "markdown", "not a code cell: change its type to Code"),
    ],
)
def test_an_answer_that_cannot_run_is_wrong_and_its_exercise_says_why(tmp_path, answer, kind, why):
    handed_in = json.loads(notebook("import torch", answer))
    handed_in["cells"][1]["cell_type"] = kind
    (tmp_path / "ada.ipynb").write_text(json.dumps(handed_in))
    first, *others = grade("ada", tmp_path / "ada.ipynb", TIGHT, PUBLIC, trusted=True).outcomes
    assert first.status == "wrong" and first.points == 0 and re.search(f"The cell does not run: .*{why}", first.message)
    assert {other.status for other in others} == {"not begun"}


def test_solutions_are_in_student_notebooks_only_for_self_study_and_are_no_answers(tmp_path, built):
    build(tmp_path, names=["a1"], with_solutions=True)
    student = tmp_path / "student" / NAME
    texts = {path: path.read_text(encoding="utf-8") for path in (student, built / "student" / NAME)}
    exercises = texts[student].count("<summary>Hint")
    assert [text.count("<summary>Solution") for text in texts.values()] == [exercises, 0]
    graded = grade("ada", student, ROOMY, PUBLIC, trusted=True)
    assert {outcome.status for outcome in graded.outcomes} == {"not begun"}


NEEDS_FILE = "import pathlib\nheld = pathlib.Path('a1_predictions.json').read_text()"
TRAINS = "from labkit.course import check\ncheck.predictions('a1', lambda: pathlib.Path('trained').touch())"


def test_predictions_beside_the_notebook_are_read_and_a_change_in_them_is_graded_again(tmp_path):
    path, file = tmp_path / "ada" / "a1.ipynb", tmp_path / "ada" / "a1_predictions.json"
    path.parent.mkdir()
    path.write_text(notebook(NEEDS_FILE, TRAINS, RIGHT))

    def graded(earlier=None):
        return grade("ada", path, ROOMY, PUBLIC, trusted=True, earlier=earlier)

    file.write_text("[1]")
    first = graded()
    assert first.trouble == [] and first.points == 2 and graded(first) is first
    file.write_text("[2]")
    assert graded(first) is not first
    file.unlink()
    missing = graded(first)
    assert "a1_predictions.json is missing: hand it in beside the notebook" in missing.trouble[1]
    file.write_bytes(bytes(2 * 2**20 + 1))
    with pytest.raises(CourseError, match="more than 2 MB"):
        graded()
    file.unlink()
    file.symlink_to(path)
    with pytest.raises(CourseError, match="as a regular file: it is a link"):
        graded()


def test_predictions_are_made_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check.predictions("a1", lambda: [1]) == check.predictions("a1", lambda: [2]) == [1]
    assert (tmp_path / "a1_predictions.json").read_text() == "[1]"
    (tmp_path / "a1_predictions.json").unlink()
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    with pytest.raises(CourseError, match="hand it in beside the notebook"):
        check.predictions("a1", lambda: [3])


def hand_in_a4(folder, notebook_from, predictions):
    folder.mkdir(parents=True)
    (folder / A4).write_bytes(notebook_from.read_bytes())
    if predictions is not None:
        (folder / "a4_predictions.json").write_text(predictions)


@isolated
def test_a4_is_graded_with_the_predictions_of_the_student(tmp_path):
    build(tmp_path, names=["a4"])
    solution, runs = tmp_path / "solution" / A4, json.loads((tmp_path / "solution" / "a4_predictions.json").read_text())
    assert not list(tmp_path.glob("student/*.json")) and not list(tmp_path.glob("nbgrader/**/*.json"))
    forms = {
        "right": json.dumps(runs), "one-seed": json.dumps(runs[:2]), "none": None,
        "other-seeds": json.dumps([run | {"seed": run["seed"] + 3} for run in runs]),
        "deep": "[" * 10**5, "number": "1e999", "tags": json.dumps([run | {"tags": {"fn-003": [1]}} for run in runs]),
    }  # fmt: skip
    for student, predictions in forms.items():
        hand_in_a4(tmp_path / "in" / student, solution, predictions)
    hand_in_a4(tmp_path / "in" / "empty", tmp_path / "student" / A4, forms["right"])
    grades = {grade.student: grade for grade in grade_all(tmp_path / "in", tmp_path / "out", PUBLIC, ROOMY)}
    full = grades["right"].out_of
    assert grades["right"].points == full and grades["right"].trouble == [] and grades.pop("empty").points == 0
    lost = {student: full - grade.points for student, grade in grades.items()}
    assert lost == dict.fromkeys(forms, 2) | {"right": 0}
    messages = {student: grade.outcomes[3].message for student, grade in grades.items()}
    assert "Run the training cell" in messages["none"]
    assert all("as the training cell writes it" in messages[form] for form in ("deep", "number", "tags"))
    assert "two seeds for each mask" in messages["one-seed"] and "your own SEEDS" not in messages["one-seed"]
    assert "made in another version of this assignment" in messages["other-seeds"]


def test_odd_names_do_not_stop_the_class(tmp_path):
    hand_in(tmp_path / "in", **dict.fromkeys(("class", "名" * 70, os.fsdecode(b"ren\xe9")), RIGHT))
    grades = grade_all(tmp_path / "in", tmp_path / "out", PUBLIC, TIGHT, jobs=2, trusted=True)
    assert [grade.points for grade in grades] == [2, 2, 2]
    assert {f"{grade.student}.json" for grade in grades} == {path.name for path in (tmp_path / "out").glob("*.json")}


def test_a_private_variant_has_its_own_notebooks_and_is_graded_by_its_secret_only(tmp_path):
    secret = Variant.of("one of the tests")
    build(tmp_path, secret, ["a1"])
    solution = tmp_path / "solution" / NAME
    assert grade("ada", solution, ROOMY, secret, trusted=True).points == 23
    with pytest.raises(CourseError, match="another variant"):
        grade("ada", solution, TIGHT, PUBLIC, trusted=True)
    lost = json.loads(notebook(RIGHT)) | {"metadata": None}
    (tmp_path / "lost.ipynb").write_text(json.dumps(lost))
    assert grade("eve", tmp_path / "lost.ipynb", TIGHT, secret, assignment_name="a1", trusted=True).points == 2
    student = (tmp_path / "student" / NAME).read_text(encoding="utf-8")
    source = next((tmp_path / "nbgrader" / "source").rglob("*.ipynb")).read_text(encoding="utf-8")
    assert "<summary>Solution" not in student and secret.key in student
    assert secret.salt in source and secret.salt not in student and "one of the tests" not in student + source


# ----------------------------------------------------------------------------------------------- pages and gradebooks
@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The grades of a class and their folder."""
    folder = hand_in(tmp_path_factory.mktemp("class"), **{"ada@x.org": RIGHT, "=bea": UPPER})
    (folder / "cem.ipynb").write_text("no notebook")
    return grade_all(folder, folder / "grades", PUBLIC, TIGHT, trusted=True), folder / "grades"


def test_the_pages_name_the_mistake_and_what_was_not_graded(graded):
    pages = {path.stem: path.read_text(encoding="utf-8") for path in graded[1].glob("*.html")}
    assert "upper triangle" in pages["=bea"] and "upper triangle" in pages["class"]
    assert any(line.startswith("Likely: ") for line in pages["=bea"].splitlines())
    assert "cells that did not run" not in pages["ada@x.org"]
    assert "could not be graded" in pages["cem"] and "not graded" in pages["class"]
    assert 'href="%3Dbea.html"' in pages["class"]


def test_a_canvas_file_keeps_the_roster_and_leaves_what_could_not_be_graded_empty(graded, tmp_path):
    roster = tmp_path / "export.csv"
    roster.write_text(
        "Student,ID,SIS User ID,SIS Login ID,Section,A1 (77)\n"
        "    Points Possible,,,,,23\n"
        '"Lovelace, Ada",1,u1,ada@x.org,s,\n"Cem",2,u2,cem,s,9\n"Eve",3,u3,eve,s,5\n'
    )
    text, without, ungraded = gradebook_csv(graded[0], "canvas", roster)
    rows = {row["Student"].strip(): row["A1 (77)"] for row in csv.DictReader(text.splitlines())}
    assert rows == {"Points Possible": "23", "Lovelace, Ada": "2", "Cem": "", "Eve": "5"} and without == ["=bea"]
    assert ungraded == ["eve"]


def test_two_of_one_name_are_not_guessed_between_and_one_column_identifies_all(graded, tmp_path):
    roster = tmp_path / "export.csv"
    roster.write_text("Full name,Email address,Grade\nAda,ada@x.org,-\nAda,other@x.org,-3.5\n")
    rows = list(csv.DictReader(gradebook_csv(graded[0], "moodle", roster)[0].splitlines()))
    assert [row["A1"] for row in rows] == ["2", ""] and [row["Grade"] for row in rows] == ["-", "-3.5"]
    roster.write_text("Full name\nada@x.org\nada@x.org\n")
    assert gradebook_csv(graded[0], "moodle", roster)[1] == ["=bea", "ada@x.org", "cem"]


@pytest.mark.parametrize(("kind", "column", "first"), [("canvas", "SIS Login ID", ["23"]), ("moodle", "ID number", [])])
def test_without_a_roster_the_names_identify(graded, kind, column, first):
    rows = list(csv.DictReader(gradebook_csv(graded[0], kind)[0].splitlines()))
    assert [row["A1"] for row in rows] == [*first, "0", "2", ""]
    assert [row[column] for row in rows][-3:] == ["'=bea", "ada@x.org", "cem"]


# --------------------------------------------------------------------------------------------------- the command line
def test_list_build_and_check(labkit_command, tmp_path, built):
    first = json.loads(labkit_command("course", "list", "--json")[1])[0]
    assert first["name"] == "a1" and first["points"] == sum(task["points"] for task in first["exercises"])
    (tmp_path / "secret").write_text("s\n")
    one, two = tmp_path / "one", tmp_path / "two"
    private = ("--variant", tmp_path / "secret", "--json", "--execute")
    code, out, _ = labkit_command("course", "build", "A1", "--output-dir", one, *private)
    assert code == 0 and len(json.loads(out)) == 4
    build(two, Variant.of("s"), ["a1"])
    for path in one.rglob("*.*"):
        notebook, other = path.read_text(encoding="utf-8"), (two / path.relative_to(one)).read_text(encoding="utf-8")
        if path.parent.name == "solution":  # nothing else has been executed
            cells, others = ([c for c in json.loads(n)["cells"] if c["cell_type"] == "code"] for n in (notebook, other))
            assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
            notebook, other = ([cell["source"] for cell in code] for code in (cells, others))
        assert notebook == other
    code, out, _ = labkit_command("course", "check", built / "student" / NAME)
    assert code == 1 and "not begun" in out and "more when it is graded" in out
    code, out, _ = labkit_command("course", "check", built / "solution" / NAME, "--json")
    assert code == 0 and json.loads(out)["points"] == json.loads(out)["out_of"] and json.loads(out)["trouble"] == []


def test_grade_and_gradebook(labkit_command, tmp_path):
    folder, out = hand_in(tmp_path / "in", ada=RIGHT), tmp_path / "grades"
    command = ("course", "grade", folder, "--output-dir", out, "--trust-submissions")
    code, printed, _ = labkit_command(*command, "--jobs", 1)
    assert code == 0 and "2 of 23" in printed
    (folder / "bea.ipynb").write_text("nothing")
    code, printed, _ = labkit_command(*command, "--json")
    assert code == 1 and json.loads(printed) == json.loads(json.dumps([asdict(grade) for grade in read_grades(out)]))
    code, printed, error = labkit_command("course", "gradebook", out, "--kind", "canvas", "--output", "-")
    assert code == 0 and "2 grades\n" in error and printed == gradebook_csv(read_grades(out), "canvas")[0]
    (out / "ada.json").write_text((out / "ada.json").read_text().replace('"timed_out": false', '"timed_out": true'))
    roster = tmp_path / "roster.csv"
    roster.write_text("Username\nada\neve\n")
    moodle = ("course", "gradebook", out, "--kind", "moodle", "--output", "-", "--roster", roster)
    notes = "1 grades; not in the roster: bea; without a grade: eve; provisional (time limit): ada\n"
    assert notes in labkit_command(*moodle)[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "a9"], "no master of a9"),
        (["build", "--variant", "spring"], "a file that holds the secret"),  # never the secret: `ps` shows arguments
        (["grade", "nowhere"], "neither a notebook nor a folder"),
        (["grade", "empty"], "holds no notebook"),
        (["grade", "twice"], "two notebooks"),
        (["check", "nowhere.ipynb"], "could not be read"),
        (["check", "lost.ipynb"], "--assignment"),
        (["gradebook", "nowhere", "--kind", "canvas", "--output", "x.csv"], "holds no grades"),
        (["gradebook", "graded", "--kind", "blackboard", "--output", "x.csv"], "moodle"),
        (["gradebook", "graded", "--kind", "canvas", "--output", "x.csv", "--roster", "r.csv"], "none of the columns"),
        (["pages", "nowhere"], "holds no grades"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(labkit_command, tmp_path, monkeypatch, graded, arguments, words):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "graded"):
        (tmp_path / folder).mkdir()
    hand_in(tmp_path / "twice" / "ada\x1b[2J", a=RIGHT, b=RIGHT)
    (tmp_path / "lost.ipynb").write_text(notebook(RIGHT).replace('"labkit"', '"other"'))
    (tmp_path / "r.csv").write_text("who,what\na,b\n")
    (tmp_path / "graded" / "ada.json").write_text(json.dumps(asdict(graded[0][1])))
    before = sorted(tmp_path.rglob("*"))
    code, _, error = labkit_command("course", *arguments)
    assert code == 2 and words in error and len(error.strip().splitlines()) == 1 and "\x1b" not in error
    assert sorted(tmp_path.rglob("*")) == before
