"""The route through nbgrader, with the files that `labkit course build` writes: released, graded, told, exported.

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

pytestmark = pytest.mark.end_to_end

NAME = f"{masters()['a1'].stem}.ipynb"
EXERCISES = assignment("a1").exercises
UPPER = "def causal_mask(n):\n    return torch.ones(n, n).triu().bool()"
UNGUARDED = "def weights_of(scores, mask):\n    return scores.masked_fill(~mask, float('-inf')).softmax(-1)"
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


def answered(notebook, sources):
    """The notebook with the answers of these exercises written into it."""
    filled = json.loads(json.dumps(notebook))
    for cell in filled["cells"]:
        if "answer" in cell["metadata"].get("tags", []):
            cell["source"] = sources.get(cell["metadata"]["labkit"]["exercise"], cell["source"])
    return filled


def feedback(course, student):
    """The text of the page that the student gets."""
    page = (course / "feedback" / student / "a1" / NAME.replace(".ipynb", ".html")).read_text(encoding="utf-8")
    return html.unescape(re.sub(r"<[^>]+>", "", page[page.index("<body") :]))


def test_a_class_is_released_graded_and_told(tmp_path):
    build(tmp_path, names=["a1"])
    course = tmp_path / "nbgrader"
    run(course, "-c", COMMANDS, "generate_assignment a1")
    source, release = ((course / kind / "a1" / NAME).read_text(encoding="utf-8") for kind in ("source", "release"))
    for words in (BEGIN, "BEGIN HIDDEN TESTS", "hidden=True", ".graded()", "torch.ones(n, n).tril()"):
        assert words in source and words not in release
    released = json.loads(release)
    marks = {
        cell["metadata"]["nbgrader"]["grade_id"]: cell for cell in released["cells"] if "nbgrader" in cell["metadata"]
    }
    locked = {name for name, cell in marks.items() if cell["metadata"]["nbgrader"]["locked"]}
    assert locked == {"a1_setup", "a1_checks", *(f"{name}_test" for name in EXERCISES)}
    assert set(marks) - locked == set(EXERCISES)

    solution = json.loads((tmp_path / "solution" / NAME).read_text(encoding="utf-8"))["cells"]
    answers = [cell for cell in solution if "answer" in cell["metadata"].get("tags", [])]
    solved = {cell["metadata"]["labkit"]["exercise"]: cell["source"] for cell in answers}
    wrong = solved | {name: answer for name, (answer, _) in MISTAKES.items()}
    for student, sources in (("good", solved), ("wrong", wrong), ("empty", {})):
        path = course / "submitted" / student / "a1" / NAME
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(answered(released, sources)), encoding="utf-8")
    route = ["autograde a1", "generate_feedback a1", f"validate release/a1/{NAME}"]
    printed = run(course, "-c", COMMANDS + SCORES, *route)

    scores = json.loads((course / "scores.json").read_text(encoding="utf-8"))
    full = {name: [exercise.points] * 2 for name, exercise in EXERCISES.items()}
    assert scores["good"] == full and all(points == 0 for points, _ in scores["empty"].values())
    lost = {name for name in full if scores["wrong"][name] != full[name]}
    assert lost == {*MISTAKES, "a1_padded_mask"}  # which calls causal_mask
    assert scores["wrong"]["a1_causal_mask"][0] == 0 < scores["wrong"]["a1_weights"][0]
    told = feedback(course, "wrong")
    for name, (_, words) in MISTAKES.items():
        assert words in told[told.index(f" {name}: ") :]
    assert "Likely" not in feedback(course, "good") and feedback(course, "empty").count("not begun") == len(EXERCISES)
    assert f"VALIDATION FAILED ON {len(EXERCISES)} CELL(S)" in printed.rpartition("## validate")[2]
