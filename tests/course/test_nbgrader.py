"""The route through nbgrader, with the files that `labkit course build` writes: released, graded, told, exported.

Three students hand in: one the solution, one two typical mistakes, one the notebook as it was released.
"""

import csv
import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbgrader")

from labkit.course.answers import LocalAnswer
from labkit.course.build import BEGIN, build, masters, read_master
from labkit.course.exercises import assignment
from labkit.course.judging import judged
from labkit.course.variant import Variant

pytestmark = pytest.mark.end_to_end

NAME = f"{masters()['a1'].stem}.ipynb"
EXERCISES = assignment("a1").exercises
ANSWERS = Path(__file__).parent / "answers" / "a1.py"
MISTAKES = {"a1_causal_mask": "upper triangle", "a1_weights": "divides zero by zero"}
# nbgrader's own command line, several commands in one process: most of the time is the import of JupyterLab.
COMMANDS = """
import sys
from jupyter_core.application import NoStart
from nbgrader.apps.nbgraderapp import NbGraderApp

for command in sys.argv[1:]:
    print("##", command, flush=True)
    app = NbGraderApp.instance()
    try:
        app.initialize(command.split())
        app.start()
    except NoStart:  # a subcommand has done it
        pass
    except SystemExit as stop:
        if stop.code:
            sys.exit(f"nbgrader {command}: exit code {stop.code}")
    NbGraderApp.clear_instance()
"""
SCORES = """
import json
from pathlib import Path
from nbgrader.api import Gradebook

with Gradebook("sqlite:///gradebook.db", "labkit") as book:
    scores = {
        student.id: {grade.name.removesuffix("_test"): [grade.score, grade.max_score] for notebook in
                     book.find_submission("a1", student.id).notebooks for grade in notebook.grades}
        for student in book.students
    }
Path("scores.json").write_text(json.dumps(scores))
"""


def run(folder, *arguments):
    """A Python in the course folder, and what it prints; its environment is active, as nbgrader calls `alembic`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = os.environ | {"HOME": str(folder), "JUPYTER_CONFIG_DIR": str(folder / "no-config"), "PATH": path}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def mistakes():
    spec = importlib.util.spec_from_file_location("answers_of_nbgrader", ANSWERS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: next(s for words, s in module.WRONG[name] if words == MISTAKES[name]) for name in MISTAKES}


def judged_here(sources):
    """The points of each exercise, hidden parts included, with these answers in place of the solutions."""
    space = {}
    for cell in read_master(masters()["a1"], assignment("a1"), Variant()):
        if cell.kind == "code" and cell.role != "look":
            exec(sources.get(cell.exercise, cell.source), space)
    found = {
        name: LocalAnswer(exercise.answer, space[exercise.answer], "a1", 30.0) for name, exercise in EXERCISES.items()
    }
    return {name: judged(EXERCISES[name], answer, Variant(), hidden=True).points for name, answer in found.items()}


def answered(notebook, sources):
    """The notebook with the answers of these exercises written into it."""
    filled = json.loads(json.dumps(notebook))
    for cell in filled["cells"]:
        if "answer" in cell["metadata"].get("tags", []):
            name = cell["metadata"]["labkit"]["exercise"]
            cell["source"] = sources.get(name, cell["source"])
    return filled


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The nbgrader folder after the whole route."""
    built = tmp_path_factory.mktemp("course")
    build(built, names=["a1"])
    folder = built / "nbgrader"
    run(folder, "-c", COMMANDS, "generate_assignment a1")

    released = json.loads((folder / "release" / "a1" / NAME).read_text(encoding="utf-8"))
    solution = json.loads((built / "solution" / NAME).read_text(encoding="utf-8"))
    solved = {
        cell["metadata"]["labkit"]["exercise"]: cell["source"]
        for cell in solution["cells"]
        if "answer" in cell["metadata"].get("tags", [])
    }
    submitted = {
        "good": answered(released, solved),
        "wrong": answered(released, solved | mistakes()),
        "empty": released,
    }
    for student, notebook in submitted.items():
        path = folder / "submitted" / student / "a1" / NAME
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(notebook), encoding="utf-8")
    route = ["autograde a1", "generate_feedback a1", "export", f"validate release/a1/{NAME}"]
    said = run(folder, "-c", COMMANDS + SCORES, *route)
    (folder / "validation.txt").write_text(said.rpartition("## validate")[2], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def scores(course):
    """{student: {exercise: [points, points at most]}}, from nbgrader's gradebook"""
    return json.loads((course / "scores.json").read_text(encoding="utf-8"))


def exported(course):
    with (course / "grades.csv").open(encoding="utf-8", newline="") as file:
        return {row["student_id"]: (float(row["score"]), float(row["max_score"])) for row in csv.DictReader(file)}


def feedback(course, student):
    """The text of the page that the student gets."""
    page = (course / "feedback" / student / "a1" / NAME.replace(".ipynb", ".html")).read_text(encoding="utf-8")
    return html.unescape(re.sub(r"<[^>]+>", "", page[page.index("<body") :]))


def test_the_released_notebook_holds_no_solution_and_no_hidden_test(course):
    source = (course / "source" / "a1" / NAME).read_text(encoding="utf-8")
    released = (course / "release" / "a1" / NAME).read_text(encoding="utf-8")
    for words in (BEGIN, "BEGIN HIDDEN TESTS", "hidden=True", ".graded()", "torch.ones(n, n).tril()"):
        assert words in source and words not in released
    for name, exercise in EXERCISES.items():
        assert f"check.{name}({exercise.answer})" in released


def test_what_students_must_not_change_is_locked_and_checked_by_nbgrader(course):
    cells = json.loads((course / "release" / "a1" / NAME).read_text(encoding="utf-8"))["cells"]
    marks = {cell["metadata"]["nbgrader"]["grade_id"]: cell for cell in cells if "nbgrader" in cell["metadata"]}
    locked = {name for name, cell in marks.items() if cell["metadata"]["nbgrader"]["locked"]}
    assert locked == {"a1_setup", "a1_checks", *(f"{name}_test" for name in EXERCISES)}
    assert all(marks[name]["metadata"]["editable"] is False for name in locked)
    assert set(marks) - locked == set(EXERCISES)


def test_the_solution_has_all_points_and_the_released_notebook_none(course, scores):
    assert all(got == most == EXERCISES[name].points for name, (got, most) in scores["good"].items())
    assert all(got == 0 for got, _ in scores["empty"].values())
    points = assignment("a1").points
    assert exported(course)["good"] == (points, points) and exported(course)["empty"] == (0, points)


def test_wrong_answers_lose_their_own_points_and_a_part_that_is_right_keeps_its(course, scores):
    assert {name: got for name, (got, _) in scores["wrong"].items()} == judged_here(mistakes())
    assert scores["wrong"]["a1_causal_mask"][0] == 0
    assert 0 < scores["wrong"]["a1_weights"][0] < EXERCISES["a1_weights"].points
    assert exported(course)["wrong"][0] == sum(got for got, _ in scores["wrong"].values())


def test_the_feedback_names_the_likely_cause_of_what_is_wrong_and_of_nothing_else(course):
    told = feedback(course, "wrong")
    for name, words in MISTAKES.items():
        after = told[told.index(f"✘ {name}") :]
        assert words in after[: after.index("Out[")]
    assert "Likely" not in feedback(course, "good") and "✔ a1_who_hears: right" in feedback(course, "good")
    assert feedback(course, "empty").count("not begun") == len(EXERCISES)


def test_validating_counts_what_is_not_right_yet(course):
    said = (course / "validation.txt").read_text(encoding="utf-8")
    assert f"VALIDATION FAILED ON {len(EXERCISES)} CELL(S)" in said
