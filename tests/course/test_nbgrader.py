"""The route through nbgrader, with the files that `labkit course build` writes: from the release to the feedback.

Three students hand in: one the solution, one two typical mistakes, one the notebook as it was released.
"""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbgrader")

from labkit.course.build import BEGIN, build, masters
from labkit.course.exercises import assignment
from tests.course.handed_in import UPPER

pytestmark = pytest.mark.end_to_end

NAME = f"{masters()['a1'].stem}.ipynb"
EXERCISES = assignment("a1").exercises
UNGUARDED = "def masked_weights(scores, mask):\n    return scores.masked_fill(~mask, float('-inf')).softmax(-1)"
MISTAKES = {"a1_causal_mask": (UPPER, "upper triangle"), "a1_weights": (UNGUARDED, "divides zero by zero")}
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

scores = {}
with Gradebook("sqlite:///gradebook.db", "labkit") as book:
    for student in book.students:
        grades = book.find_submission("a1", student.id).notebooks[0].grades
        scores[student.id] = {grade.name.removesuffix("_test"): [grade.score, grade.max_score] for grade in grades}
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


def answers(notebook):
    """{exercise: cell} of a notebook's answers."""
    cells = [cell for cell in notebook["cells"] if "answer" in cell["metadata"].get("tags", [])]
    return {cell["metadata"]["labkit"]["exercise"]: cell for cell in cells}


def test_a_class_is_released_graded_and_gets_feedback(tmp_path):
    build(tmp_path, names=["a1"])
    course = tmp_path / "nbgrader"
    run(course, "-c", COMMANDS, "generate_assignment a1")
    source, release = ((course / kind / "a1" / NAME).read_text(encoding="utf-8") for kind in ("source", "release"))
    for words in (BEGIN, "BEGIN HIDDEN TESTS", "hidden=True", ".graded()", "torch.ones(n, n).tril()"):
        assert words in source and words not in release
    marks = [cell["metadata"].get("nbgrader", {}) for cell in json.loads(release)["cells"]]
    locked = {mark["grade_id"] for mark in marks if mark.get("locked")}
    assert locked == {"a1_setup", "a1_checks", *(f"{name}_test" for name in EXERCISES)}

    solution = answers(json.loads((tmp_path / "solution" / NAME).read_text(encoding="utf-8")))
    solved = {exercise: cell["source"] for exercise, cell in solution.items()}
    wrong = solved | {exercise: answer for exercise, (answer, _) in MISTAKES.items()}
    for student, sources in (("good", solved), ("wrong", wrong), ("empty", {})):
        notebook = json.loads(release)
        for exercise, cell in answers(notebook).items():
            cell["source"] = sources.get(exercise, cell["source"])
        path = course / "submitted" / student / "a1" / NAME
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(notebook), encoding="utf-8")
    route = ["autograde a1", "generate_feedback a1", f"validate release/a1/{NAME}"]
    printed = run(course, "-c", COMMANDS + SCORES, *route)

    scores = json.loads((course / "scores.json").read_text(encoding="utf-8"))
    full = {name: [exercise.points] * 2 for name, exercise in EXERCISES.items()}
    assert scores["good"] == full and all(points == 0 for points, _ in scores["empty"].values())
    lost = {name for name in full if scores["wrong"][name] != full[name]}
    assert lost == {*MISTAKES, "a1_prefix_mask"}  # which calls causal_mask
    page = (course / "feedback" / "wrong" / "a1" / NAME).with_suffix(".html").read_text(encoding="utf-8")
    feedback = html.unescape(re.sub(r"<[^>]+>", "", page[page.index("<body") :]))
    for name, (_, words) in MISTAKES.items():
        assert words in feedback[feedback.index(f" {name}: ") :]
    assert f"VALIDATION FAILED ON {len(EXERCISES)} CELL(S)" in printed.rpartition("## validate")[2]
