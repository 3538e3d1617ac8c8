"""Grading a class: what is run, kept, reported and exported; `labkit course` as a user types it."""

import csv
import json
import os
from contextlib import ExitStack
from dataclasses import replace

import pytest

from labkit import cli
from labkit.course import submissions
from labkit.course.build import build
from labkit.course.grade import grade, grade_all
from labkit.course.gradebook import gradebook_csv
from labkit.course.grades import read_grades
from labkit.course.mistakes import Mistake, NotBegun
from labkit.course.pages import class_page, student_page
from labkit.course.sandbox import Limits, Sandbox
from labkit.course.variant import Variant
from labkit.errors import CourseError
from tests.course.handed_in import RIGHT, TIGHT, UPPER, isolated, notebook

pytestmark = pytest.mark.end_to_end
NAME = "a1_masks_and_attention.ipynb"
BROKEN = "import torch\n\ndef causal_mask(n)\n    return 1"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build(folder, names=["a1"])
    return folder


# ------------------------------------------------------------------------------------------------- the process apart
@pytest.fixture(scope="module")
def sandbox():
    """One that was started with many files open: a pipe may have any number, also one that select() cannot wait for."""
    with ExitStack() as held:
        for _ in range(1100):
            held.enter_context(open(os.devnull))
        running = held.enter_context(Sandbox("a1", TIGHT, trusted=True))
        assert running.run(RIGHT) is None
        yield running


def asked(sandbox, source, *arguments):
    assert sandbox.run(source) is None
    return sandbox.answer("f")(*arguments)


def test_cells_share_their_names_and_a_stub_is_not_an_error(sandbox):
    assert asked(sandbox, "def f(x, *, y=1):\n    return causal_mask(x).sum() + y", 2).item() == 4
    assert sandbox.run("raise NotImplementedError('a1_causal_mask')") is None
    for nothing in ("def f():\n    raise NotImplementedError", "f = None"):
        with pytest.raises(NotBegun):
            asked(sandbox, nothing)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f():\n    while True:\n        try:\n            while 1: pass\n        except: pass", "within 3"),
        ("def f():\n    import os; os._exit(7)", "exit code 7"),
        ("def f():\n    import sys; sys.exit(0)", "SystemExit"),
        ("def f():\n    return [][1]", r"IndexError.*\[\]\[1\]"),
        ("def f():\n    return object()", "cannot be judged"),
        ("def f():\n    return input()", "EOFError"),
        ("f = 3", "to be a function"),
    ],
)
def test_whatever_an_answer_does_the_next_one_is_asked(sandbox, source, words):
    with pytest.raises(Mistake, match=words):
        asked(sandbox, source)
    assert sandbox.answer("causal_mask")(2).tolist() == [[True, False], [True, True]]


def test_a_cell_that_hangs_is_named_and_the_others_are_kept(sandbox):
    assert sandbox.run("kept = 41") is None
    assert "within 4 seconds" in sandbox.run("while True: pass")
    assert asked(sandbox, "def f():\n    return kept + 1") == 42


def test_a_module_of_the_student_replaces_nothing(sandbox):
    forged = "import os; os.environ['RAN'] = 'yes'"
    assert (
        sandbox.run(f"open('json.py', 'w').write({forged!r}); open('mine.py', 'w').write('x = 1'); import mine") is None
    )
    assert sandbox.run("import json, os; assert 'RAN' not in os.environ") is None


# ------------------------------------------------------------------------------------------------------------ a class
@pytest.fixture
def handed_in(tmp_path, built):
    folder = tmp_path / "in"
    (folder / "bea").mkdir(parents=True)
    (folder / "ada.ipynb").write_bytes((built / "solution" / NAME).read_bytes())
    (folder / "bea" / "whatever.ipynb").write_text(notebook(RIGHT, "1 / 0", "check.a1_causal_mask(causal_mask)"))
    (folder / "cem.ipynb").write_bytes((built / "student" / NAME).read_bytes())
    (folder / "dan.ipynb").write_text("this is no notebook")
    (folder / "eva.ipynb").write_text(notebook(BROKEN))
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "ada-checkpoint.ipynb").write_text("")
    return folder


@isolated
def test_a_class_is_graded_and_one_broken_submission_does_not_stop_it(handed_in, tmp_path):
    out, kept, roomy = tmp_path / "grades", {}, replace(TIGHT, cell_seconds=60.0)  # figures take long to import
    grades = {each.student: each for each in grade_all(handed_in, out, limits=roomy)}
    assert {name: each.points for name, each in grades.items()} == {
        "ada": 23,
        "bea": 2,
        "cem": 0,
        "dan": None,
        "eva": 0,
    }
    assert grades["ada"].trouble == grades["cem"].trouble == [] and grades["ada"].isolation == "bubblewrap"
    assert "ZeroDivisionError" in grades["bea"].trouble[0] and "cannot be read" in grades["dan"].failure
    assert {outcome.status for outcome in grades["cem"].outcomes} == {"not begun"}
    assert grades["eva"].outcomes[0].status == "wrong" and "line 3" in grades["eva"].outcomes[0].message
    rows = {row["student"]: row for row in csv.DictReader((out / "grades.csv").open(encoding="utf-8"))}
    assert rows["ada"]["percent"] == "100.0" and rows["bea"]["a1_causal_mask"] == "2" and rows["dan"]["points"] == ""
    assert [each.to_dict() for each in read_grades(out)] == [grades[name].to_dict() for name in sorted(grades)]

    (handed_in / "cem.ipynb").write_text(notebook(RIGHT))
    again = grade_all(handed_in, out, limits=roomy, on_grade=lambda each, was: kept.update({each.student: was}))
    assert kept == {"ada": True, "bea": True, "cem": False, "dan": False, "eva": True} and again[2].points == 2

    one = grade_all(handed_in / "cem.ipynb", out, limits=roomy)  # one file: the class keeps the others
    table = list(csv.DictReader((out / "grades.csv").open(encoding="utf-8")))
    assert [each.student for each in one] == ["cem"] and [row["student"] for row in table] == sorted(grades)


def test_odd_names_do_not_stop_the_class(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("class", "名" * 70, os.fsdecode(b"ren\xe9")):
        (folder / f"{name}.ipynb").write_text(notebook(RIGHT))
    grades = grade_all(folder, tmp_path / "out", limits=TIGHT, jobs=2, trusted=True)
    assert [each.points for each in grades] == [2, 2, 2]
    assert {f"{each.student}.json" for each in grades} == {path.name for path in (tmp_path / "out").glob("*.json")}


def test_other_limits_grade_again_and_the_same_do_not(tmp_path):
    path, kept = tmp_path / "slow.ipynb", []
    path.write_text(notebook(RIGHT.replace("return", "import time; time.sleep(1.5); return")))

    def points(limits):
        settings = {"limits": limits, "trusted": True, "on_grade": lambda _, was: kept.append(was)}
        return grade_all(path, tmp_path / "out", **settings)[0].points

    hasty = Limits(call_seconds=0.5, cell_seconds=4.0, total_seconds=120.0)
    assert [points(hasty), points(TIGHT), points(TIGHT)] == [0, 2, 2] and kept == [False, False, True]


def test_a_private_variant_has_its_own_notebooks_and_is_graded_by_its_secret_only(tmp_path, built):
    secret = Variant.of("one of the tests")
    build(tmp_path, secret, ["a1"])
    submission = submissions.read("ada", tmp_path / "solution" / NAME)
    assert grade(submission, secret, TIGHT, trusted=True).points == 23
    with pytest.raises(CourseError, match="another variant"):
        grade(submission, None, TIGHT, trusted=True)
    student = (tmp_path / "student" / NAME).read_text(encoding="utf-8")
    source = next((tmp_path / "nbgrader" / "source").rglob("*.ipynb")).read_text(encoding="utf-8")
    assert "<summary>Solution" not in student and secret.key in student
    assert secret.salt in source and secret.salt not in student and "one of the tests" not in student + source
    assert "<summary>Solution" in (built / "student" / NAME).read_text(encoding="utf-8")


def two_notebooks(folder):
    (folder / "ada").mkdir()
    for name in ("a.ipynb", "b.ipynb"):
        (folder / "ada" / name).write_text(notebook(RIGHT))
    return folder


def without_metadata(folder):
    (folder / "x.ipynb").write_text(notebook(RIGHT).replace('"labkit"', '"other"'))
    assert submissions.read("x", folder / "x.ipynb", "a1").assignment == "a1"
    return submissions.read("x", folder / "x.ipynb")


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        (lambda folder: submissions.find(folder / "missing"), "neither"),
        (lambda folder: submissions.find(folder), "holds no notebook"),
        (lambda folder: submissions.find(two_notebooks(folder)), "two notebooks"),
        (without_metadata, "--assignment"),
    ],
)
def test_what_is_no_submission_is_refused(tmp_path, refuse, words):
    with pytest.raises(CourseError, match=words):
        refuse(tmp_path)


# ----------------------------------------------------------------------------------------------- pages and gradebooks
@pytest.fixture(scope="module")
def grades(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class")
    (folder / "ada@x.org.ipynb").write_text(notebook(RIGHT))
    (folder / "=bea.ipynb").write_text(notebook(UPPER))
    (folder / "cem.ipynb").write_text("no notebook")
    return grade_all(folder, folder / "grades", limits=TIGHT, trusted=True)


def test_the_pages_name_the_mistake_and_what_was_not_graded(grades):
    by_student = {each.student: each for each in grades}
    assert "upper triangle" in student_page(by_student["=bea"]) and "upper triangle" in class_page(grades)
    assert "could not be graded" in student_page(by_student["cem"]) and "not graded" in class_page(grades)


def test_a_canvas_file_keeps_the_roster_and_leaves_what_could_not_be_graded_empty(grades, tmp_path):
    roster = tmp_path / "export.csv"
    roster.write_text(
        "Student,ID,SIS User ID,SIS Login ID,Section,A1 (77)\n"
        "    Points Possible,,,,,23\n"
        '"Lovelace, Ada",1,u1,ada@x.org,s,\n"Cem",2,u2,cem,s,9\n"Eve",3,u3,eve,s,5\n'
    )
    text, without = gradebook_csv(grades, "canvas", roster)
    rows = {row["Student"].strip(): row["A1 (77)"] for row in csv.DictReader(text.splitlines())}
    assert rows == {"Points Possible": "23", "Lovelace, Ada": "2", "Cem": "", "Eve": "5"} and without == ["=bea"]


def test_two_of_one_name_are_not_guessed_between_and_one_column_identifies_all(grades, tmp_path):
    roster = tmp_path / "export.csv"
    roster.write_text("Full name,Email address,Grade\nAda,ada@x.org,-\nAda,other@x.org,-3.5\n")
    rows = list(csv.DictReader(gradebook_csv(grades, "moodle", roster)[0].splitlines()))
    assert [row["A1"] for row in rows] == ["2", ""] and [row["Grade"] for row in rows] == ["-", "-3.5"]
    roster.write_text("Full name\nada@x.org\nada@x.org\n")
    assert gradebook_csv(grades, "moodle", roster)[1] == ["=bea", "ada@x.org", "cem"]
    (tmp_path / "r.csv").write_text("who,what\na,b\n")
    for kind, file, words in (("canvas", tmp_path / "r.csv", "none of the columns"), ("blackboard", None, "moodle")):
        with pytest.raises(CourseError, match=words):
            gradebook_csv(grades, kind, file)


# --------------------------------------------------------------------------------------------------- the command line
def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["course", *map(str, arguments)])
    out = capsys.readouterr()
    return stopped.value.code, out.out, out.err


def test_list_build_and_check(capsys, tmp_path, built):
    code, out, _ = run(capsys, "list", "--json")
    first = json.loads(out)[0]
    assert code == 0 and first["name"] == "a1" and first["points"] == sum(e["points"] for e in first["exercises"])
    (tmp_path / "secret").write_text("s\n")
    code, out, _ = run(
        capsys, "build", "A1", "--output-dir", tmp_path / "one", "--variant", tmp_path / "secret", "--json"
    )
    assert code == 0 and len(json.loads(out)) == 4
    build(tmp_path / "two", Variant.of("s"), ["a1"])
    for path in (tmp_path / "one").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()
    code, out, _ = run(capsys, "check", built / "student" / NAME)
    assert code == 1 and "not begun" in out
    code, out, _ = run(capsys, "check", built / "solution" / NAME, "--json")
    assert code == 0 and json.loads(out)["points"] == json.loads(out)["out_of"] and json.loads(out)["trouble"] == []


def test_build_executes_the_solution_and_nothing_else(capsys, tmp_path):
    assert run(capsys, "build", "a1", "--execute", "--output-dir", tmp_path)[0] == 0
    for kind in ("student", "solution"):
        cells = json.loads((tmp_path / kind / NAME).read_text(encoding="utf-8"))["cells"]
        counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
        assert counts == (list(range(1, len(counts) + 1)) if kind == "solution" else [None] * len(counts))


def test_grade_and_gradebook(capsys, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "ada.ipynb").write_text(notebook(RIGHT))
    command = ("grade", tmp_path / "in", "--output-dir", tmp_path / "grades", "--trust-submissions")
    code, out, _ = run(capsys, *command, "--jobs", 1)
    assert code == 0 and "2 of 23" in out
    assert "1 of them kept" in run(capsys, *command)[1]
    (tmp_path / "in" / "bea.ipynb").write_text("nothing")
    code, out, _ = run(capsys, *command)
    assert code == 1 and "not graded" in out
    code, out, _ = run(capsys, *command, "--json")
    assert code == 1 and [each["points"] for each in json.loads(out)] == [2, None]
    code, out, error = run(capsys, "gradebook", tmp_path / "grades", "--kind", "canvas", "--output", "-")
    rows = list(csv.DictReader(out.splitlines()))
    assert code == 0 and "2 grades" in error and [row["A1"] for row in rows] == ["23", "2", ""]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "a9"], "no master of a9"),
        (["build", "--variant", "spring"], "a file that holds the secret"),
        (["grade", "nowhere"], "neither a notebook nor a folder"),
        (["check", "nowhere.ipynb"], "could not be read"),
        (["gradebook", "nowhere", "--kind", "canvas", "--output", "x.csv"], "holds no grades"),
        (["pages", "nowhere"], "holds no grades"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, _, error = run(capsys, *arguments)
    assert code == 2 and words in error and len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
