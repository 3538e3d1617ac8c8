"""Grading: submissions in processes of their own, whatever they do; grades that are kept, told and exported."""

import csv
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from labkit.course import submissions
from labkit.course.build import build
from labkit.course.grade import grade, grade_all, read_grades
from labkit.course.grade_pages import class_page, student_page
from labkit.course.gradebook import gradebook_csv
from labkit.course.mistakes import Mistake, NotBegun
from labkit.course.sandbox import Limits, Sandbox, SandboxAnswer
from labkit.course.variant import Variant
from labkit.errors import CourseError

pytestmark = pytest.mark.end_to_end

TIGHT = Limits(cell_seconds=4.0, call_seconds=3.0, total_seconds=120.0, memory_bytes=2 * 2**30)
RIGHT = "import torch\ndef causal_mask(n):\n    return torch.ones(n, n).tril().bool()"
FORGES = """
def f():
    import os
    for fd in range(3, 2048):
        try:
            os.write(fd, b"forged\\n")
        except OSError:
            pass
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and network are Linux's")


@pytest.fixture(scope="module")
def sandbox():
    """One that was begun with many files open: the number of a pipe says nothing of which it is."""
    with ExitStack() as held:
        for _ in range(64):
            held.enter_context(open(os.devnull))
        running = held.enter_context(Sandbox("a1", TIGHT))
        assert running.run(RIGHT) is None
        yield running


def asked(sandbox, source, name="f", *arguments):
    assert sandbox.run(source) is None
    return SandboxAnswer(sandbox, name)(*arguments)


# ------------------------------------------------------------------------------------------------ the process apart
def test_an_answer_is_called_and_the_cells_share_their_names(sandbox):
    assert SandboxAnswer(sandbox, "causal_mask")(3).tolist() == [[True, False, False], [True, True, False], [True] * 3]
    assert asked(sandbox, "def f(x, *, y=1):\n    return causal_mask(x).sum() + y", "f", 2).item() == 4


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f():\n    while True:\n        try:\n            while 1: pass\n        except: pass", "within 3"),
        ("def f():\n    import os; os._exit(7)", "exit code 7"),
        ("def f():\n    import sys; sys.exit(0)", "SystemExit"),
        ("def f():\n    return [][1]", "IndexError"),
        (FORGES, "pipe"),
        ("def f():\n    return object()", "cannot be judged"),
        ("def f():\n    return input()", "EOFError"),
        ("f = 3", "to be a function"),
    ],
)  # fmt: skip
def test_whatever_an_answer_does_the_next_one_is_asked(sandbox, source, words):
    with pytest.raises(Mistake, match=words):
        asked(sandbox, source)
    assert SandboxAnswer(sandbox, "causal_mask")(2).tolist() == [[True, False], [True, True]]


@linux
def test_memory_files_and_network_are_limited(sandbox):
    assert {"no network", "memory", "file size"} <= set(sandbox.in_force)
    with pytest.raises(Mistake, match="MemoryError|of memory"):
        asked(sandbox, "def f():\n    x = []\n    while True: x.append(bytes(10**8))")
    assert "unreachable" in sandbox.run("import socket; socket.create_connection(('192.0.2.1', 80), 2)").lower()
    assert "File too large" in sandbox.run(f"open('big', 'wb').write(bytes(2 * {TIGHT.file_bytes}))")


@linux
def test_other_processes_files_and_submissions_are_out_of_reach(tmp_path):
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "ada.ipynb").write_text("hers")
    with Sandbox("a1", TIGHT, (tmp_path / "others",)) as other:
        assert {"own processes", "other processes hidden", "other submissions hidden"} <= set(other.in_force)
        seen = asked(
            other, f"def f():\n    import os\n    return os.listdir({str(tmp_path / 'others')!r}), os.listdir('/proc')"
        )
        assert seen[0] == [] and str(os.getpid()) not in seen[1]
        assert "No such process" in other.run(f"import os; os.kill({os.getpid()}, 9)")
        assert "Read-only" in other.run(f"open({str(tmp_path / 'mark')!r}, 'w')")
        assert other.run("open('mine', 'w').write('x'); import tempfile; tempfile.TemporaryFile()") is None
    assert (tmp_path / "others" / "ada.ipynb").read_text() == "hers" and not (tmp_path / "mark").exists()
    with Sandbox("a1", TIGHT, (Path("/"),)) as other:  # Python itself lies there: it cannot be hidden
        assert "other submissions hidden" not in other.in_force and other.run("import torch") is None


def test_a_cell_that_hangs_is_named_and_the_others_are_kept(sandbox):
    assert sandbox.run("kept = 41") is None
    assert "within 4 seconds" in sandbox.run("while True: pass")
    assert asked(sandbox, "def f():\n    return kept + 1") == 42


def test_a_stub_is_no_trouble_and_its_answer_is_not_begun(sandbox):
    assert sandbox.run("raise NotImplementedError('a1_causal_mask')") is None
    with pytest.raises(NotBegun):
        asked(sandbox, "def f():\n    raise NotImplementedError")
    with pytest.raises(NotBegun):
        SandboxAnswer(sandbox, "never_defined")()


def test_our_environment_and_folder_stay_ours(sandbox, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "a token")
    monkeypatch.setenv("SOME_SECRET", "a secret")
    with Sandbox("a1", TIGHT) as other:
        found = asked(other, "def f():\n    import os\n    return dict(os.environ), os.getcwd(), os.listdir('.')")
    assert "HF_TOKEN" not in found[0] and "SOME_SECRET" not in found[0]
    assert found[1] != os.getcwd() and not os.path.exists(found[1])


def test_what_it_leaves_running_is_ended():
    import psutil

    mark = f"left running by {os.getpid()}"
    loop = f"import os, time; os.setsid(); {mark!r}\nif os.fork(): os._exit(0)\nwhile True: time.sleep(0.05)"

    def running():
        return [
            process for process in psutil.process_iter(["cmdline"]) if mark in " ".join(process.info["cmdline"] or [])
        ]

    with Sandbox("a1", TIGHT) as other:
        assert other.run(f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {loop!r}])") is None
        assert other.run("import time; time.sleep(1)") is None
        assert running()
    time.sleep(0.5)
    assert not running()


def test_a_module_of_the_students_runs_only_after_the_limits_hold():
    with Sandbox("a1", TIGHT) as other:
        forged = "import os\nos.environ['RAN_EARLY'] = str(os.getpid())"
        assert other.run(f"open('json.py', 'w').write({forged!r}); open('mine.py', 'w').write('x = 1')") is None
        assert other.run("import sys; sys.path[-1]; import mine") is None
        assert "exit code 5" in other.run("import os; os._exit(5)")  # the next cell is run by a new process
        assert (
            asked(other, "def f():\n    import os\n    return os.environ.get('RAN_EARLY'), os.listdir('.')")[0] is None
        )


def test_torch_s_own_not_implemented_error_is_a_mistake_and_no_stub(sandbox):
    with pytest.raises(Mistake, match="Bool"):
        asked(sandbox, "import torch\ndef f():\n    m = torch.eye(3).bool()\n    return m @ m")
    assert "Bool" in sandbox.run("torch.eye(3).bool() @ torch.eye(3).bool()")


def test_forged_replies_and_endless_prints_cost_that_call_only(sandbox):
    for reply in ('{"mistake": 5}\n', "[" * 60_000 + "\n", '{"error": 3}\n'):
        with pytest.raises(Mistake):
            asked(sandbox, FORGES.replace('b"forged\\n"', repr(reply.encode())))
        assert SandboxAnswer(sandbox, "causal_mask")(2).tolist() == [[True, False], [True, True]]


@linux
def test_a_sandbox_works_beside_more_than_a_thousand_open_files():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 1200  # select() cannot wait for a file whose number is above 1,023
    if hard != resource.RLIM_INFINITY and hard < many + 200:
        pytest.skip("this machine does not allow so many")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, many + 200), hard))
    try:
        with ExitStack() as held:
            for _ in range(many):
                held.enter_context(open(os.devnull))
            other = held.enter_context(Sandbox("a1", TIGHT))
            assert asked(other, "def f(x):\n    return x + 1", "f", 41) == 42
            assert "within 4 seconds" in other.run("while True: pass")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ------------------------------------------------------------------------------------------------------- submissions
def notebook(*cells, **about):
    made = [
        {"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for source in cells
    ]
    return json.dumps(
        {"cells": made, "metadata": {"labkit": {"assignment": "a1", **about}}, "nbformat": 4, "nbformat_minor": 5}
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build(folder, names=["a1"])
    return folder


@pytest.fixture
def handed_in(tmp_path, built):
    folder = tmp_path / "in"
    (folder / "bea").mkdir(parents=True)
    (folder / "ada.ipynb").write_bytes((built / "solution" / "a1_masks_and_attention.ipynb").read_bytes())
    (folder / "bea" / "whatever.ipynb").write_text(notebook(RIGHT, "1 / 0", "check.a1_causal_mask(causal_mask)"))
    (folder / "cem.ipynb").write_bytes((built / "student" / "a1_masks_and_attention.ipynb").read_bytes())
    (folder / "dan.ipynb").write_text("this is no notebook")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "ada-checkpoint.ipynb").write_text("")
    return folder


def test_a_class_is_graded_and_one_broken_submission_does_not_stop_it(handed_in, tmp_path):
    out = tmp_path / "grades"
    grades = {each.student: each for each in grade_all(handed_in, out, limits=TIGHT)}
    assert {name: each.points for name, each in grades.items()} == {
        "ada": grades["ada"].out_of,
        "bea": 2,
        "cem": 0,
        "dan": 0,
    }
    assert grades["ada"].trouble == [] and "ZeroDivisionError" in grades["bea"].trouble[0]
    assert {outcome.status for outcome in grades["cem"].outcomes} == {"not begun"} and grades["cem"].trouble == []
    assert "cannot be read" in grades["dan"].failure
    rows = {row["student"]: row for row in csv.DictReader((out / "grades.csv").open(encoding="utf-8"))}
    assert (
        rows["ada"]["percent"] == "100.0"
        and rows["bea"]["a1_causal_mask"] == "2"
        and "cannot be read" in rows["dan"]["failure"]
    )
    assert [each.to_dict() for each in read_grades(out)] == [grades[name].to_dict() for name in sorted(grades)]
    assert "a1_causal_mask" in (out / "bea.html").read_text(encoding="utf-8")

    kept = {}
    (handed_in / "cem.ipynb").write_text(notebook(RIGHT))
    again = grade_all(
        handed_in, out, limits=TIGHT, on_grade=lambda each, was_there: kept.update({each.student: was_there})
    )
    assert kept == {"ada": True, "bea": True, "cem": False, "dan": False}
    assert {each.student: each.points for each in again}["cem"] == 2


def test_odd_names_and_texts_do_not_stop_the_class(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "class.ipynb").write_text(notebook(RIGHT))
    (folder / f"{'名' * 70}.ipynb").write_text(notebook(RIGHT))
    (folder / os.fsdecode(b"ren\xe9.ipynb")).write_text(notebook(RIGHT, "raise ValueError('\\ud800')"))
    found = grade_all(folder, tmp_path / "out", limits=TIGHT, jobs=2)
    assert [each.points for each in found] == [2, 2, 2] and all(not each.failure for each in found)
    assert len(list((tmp_path / "out").glob("*.json"))) == 3 and (tmp_path / "out" / "class.html").is_file()
    assert "ren?" in (tmp_path / "out" / "grades.csv").read_text(encoding="utf-8")


def test_other_limits_grade_again_and_the_same_do_not(tmp_path):
    path = tmp_path / "slow.ipynb"
    path.write_text(notebook(RIGHT.replace("return", "import time; time.sleep(1.5); return")))
    kept = []

    def points(limits):
        return grade_all(path, tmp_path / "out", limits=limits, on_grade=lambda _, was: kept.append(was))[0].points

    hasty = Limits(call_seconds=0.5, cell_seconds=4.0, total_seconds=120.0)
    assert [points(hasty), points(TIGHT), points(TIGHT)] == [0, 2, 2] and kept == [False, False, True]


def test_altered_checks_and_a_patched_labkit_change_no_grade(tmp_path):
    forged = (
        "import labkit.course.check as check, labkit.course.judging as judging, labkit.course.mistakes as mistakes\n"
        "judging.judged = lambda *a, **k: 'right'\nmistakes.expect_tensor = lambda *a, **k: None\n"
        "from labkit import masks\nmasks.Mask.dense = lambda self, n, *a: __import__('torch').ones(n, n).bool()"
    )
    wrong = "import torch\ndef causal_mask(n):\n    return torch.ones(n, n).bool()"
    path = tmp_path / "eve.ipynb"
    path.write_text(notebook(forged, wrong))
    found = grade(submissions.read("eve", path), limits=TIGHT)
    assert found.points == 0 and found.outcomes[0].status == "wrong"


def test_a_private_variant_has_its_own_notebooks_and_is_graded_by_its_secret_only(tmp_path, built):
    secret = Variant.of("one of the tests")
    build(tmp_path / "course", secret, ["a1"])
    path = tmp_path / "course" / "solution" / "a1_masks_and_attention.ipynb"
    found = grade(submissions.read("ada", path), secret, TIGHT)
    assert found.points == found.out_of
    with pytest.raises(CourseError, match="another variant"):
        grade(submissions.read("ada", path), None, TIGHT)
    student = (tmp_path / "course" / "student" / "a1_masks_and_attention.ipynb").read_text(encoding="utf-8")
    assert "<summary>Solution" not in student and "one of the tests" not in student and secret.key in student
    source = next((tmp_path / "course" / "nbgrader" / "source").rglob("*.ipynb")).read_text(encoding="utf-8")
    assert secret.salt in source and secret.salt not in student
    assert "<summary>Solution" in (built / "student" / "a1_masks_and_attention.ipynb").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "missing", "neither"),
        (lambda folder: folder, "holds no notebook"),
    ],
)
def test_no_submissions_is_one_clear_error(tmp_path, make, words):
    with pytest.raises(CourseError, match=words):
        grade_all(make(tmp_path), tmp_path / "grades")


def test_two_notebooks_of_one_student_are_not_chosen_between(tmp_path):
    (tmp_path / "ada").mkdir()
    for name in ("a.ipynb", "b.ipynb"):
        (tmp_path / "ada" / name).write_text(notebook(RIGHT))
    with pytest.raises(CourseError, match="two notebooks"):
        submissions.find(tmp_path)


def test_a_notebook_without_its_metadata_needs_the_assignment(tmp_path):
    path = tmp_path / "x.ipynb"
    path.write_text(notebook(RIGHT).replace('"labkit"', '"other"'))
    with pytest.raises(CourseError, match="--assignment"):
        submissions.read("x", path)
    assert submissions.read("x", path, "a1").assignment == "a1"


# ----------------------------------------------------------------------------------------------- pages and gradebooks
@pytest.fixture(scope="module")
def grades(built, tmp_path_factory):
    folder = tmp_path_factory.mktemp("class")
    wrong = "import torch\ndef causal_mask(n):\n    return torch.ones(n, n).triu().bool()"
    (folder / "ada@x.org.ipynb").write_text(notebook(RIGHT))
    (folder / "=bea.ipynb").write_text(notebook(wrong))
    (folder / "cem.ipynb").write_text("no notebook")
    return grade_all(folder, folder / "grades", limits=TIGHT)


def test_the_pages_say_what_was_found_and_escape_it(grades):
    by_student = {each.student: each for each in grades}
    page = student_page(by_student["=bea"])
    assert "upper triangle" in page and "0 of 2" in page and "0 of 23 points" in page
    hostile = by_student["ada@x.org"].__class__.from_dict(
        by_student["ada@x.org"].to_dict() | {"student": "<script>", "trouble": ["<b>"]}
    )
    assert "<script>" not in student_page(hostile) + class_page([hostile]) and "&lt;b&gt;" in student_page(hostile)
    assert "upper triangle" in class_page(grades) and "could not be graded" in student_page(by_student["cem"])


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
    text, without = gradebook_csv(grades, "moodle", roster)
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["A1"] for row in rows] == ["2", ""] and [row["Grade"] for row in rows] == ["-", "-3.5"]
    roster.write_text("Full name\nada@x.org\nada@x.org\n")
    assert gradebook_csv(grades, "moodle", roster)[1] == ["=bea", "ada@x.org", "cem"]


def test_without_a_roster_the_names_identify_and_none_becomes_a_formula(grades):
    text, without = gradebook_csv(grades, "moodle")
    rows = list(csv.DictReader(text.splitlines()))
    assert rows[0] == {"Email address": "'=bea", "ID number": "'=bea", "A1": "0"} and without == []
    assert "Points Possible" in gradebook_csv(grades, "canvas")[0]


def test_a_roster_that_identifies_nobody_and_an_unknown_gradebook_are_refused(grades, tmp_path):
    (tmp_path / "r.csv").write_text("who,what\na,b\n")
    with pytest.raises(CourseError, match="none of the columns"):
        gradebook_csv(grades, "canvas", tmp_path / "r.csv")
    with pytest.raises(CourseError, match="moodle"):
        gradebook_csv(grades, "blackboard")
