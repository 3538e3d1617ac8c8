"""The assignments, built: from one master come the student's notebook, the solution, and nbgrader's source.

A master is a py:percent script. Its cells say what they are for by metadata:

    # %% [markdown] exercise="a1_causal_mask"     the task; a heading with points and minutes is put over it
    # %% [markdown] hint="a1_causal_mask"         folded
    # %% answer="a1_causal_mask"                  code with ### BEGIN SOLUTION and ### END SOLUTION; its check follows
    # %% look="a1_causal_mask"                    optional: shows what the answer gives, once there is one

`{{name}}` in prose and `x = ...  # drawn: name` in code are what the assignment draws for the variant. The same master
and variant give the same files, byte for byte; solutions can be executed besides, and then hold outputs too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit import files
from labkit.course.exercises import NAMES, Assignment, Exercise, assignment
from labkit.course.variant import Variant
from labkit.errors import CourseError
from labkit.files import write_files
from labkit.notebooks import FIRST_CELL, run

KINDS = ("student", "solution", "nbgrader")
COMPARED_TAG = "nbval-check-output"  # running a solution again under nbval compares what its checks say
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
ROLES = ("exercise", "hint", "answer", "look")
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
_DRAWN = re.compile(r"^(?P<left>\s*\w+ = ).*?  # drawn: (?P<name>\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class MasterCell:
    """One cell of a master: its role is one of ROLES, with the exercise's name, or None."""

    kind: str  # "markdown" or "code"
    source: str
    role: str | None
    exercise: str | None


def masters() -> dict[str, Path]:
    """The master of each assignment that has one: {"a1": .../a1_masks_and_attention.py, ...}."""
    folder = files.folder("notebooks") / "assignments" / "src"
    return {path.name[:2]: path for path in sorted(folder.glob("a[0-9]_*.py")) if path.name[:2] in NAMES}


def build(
    output_dir: str | Path, variant: Variant | None = None, names: list[str] | None = None, *, execute: bool = False
) -> list[Path]:
    """Writes `student/`, `solution/` and `nbgrader/source/` of the assignments `names` (all) into `output_dir`.

    `execute`: the solutions are run too, and hold what their cells give (about a minute on two cores for all).

    Raises:
        CourseError: a master that does not fit its checks, an unknown assignment. Nothing is written then.
        LabkitError: a solution does not run to its end. It is then there without outputs.
    """
    variant, output_dir = variant or Variant(), Path(output_dir).expanduser()
    known = masters()
    if unknown := [name for name in names or () if name not in known]:
        raise CourseError(f"there is no master of {', '.join(unknown)}; there is {', '.join(known)}")
    texts: dict[Path, str] = {}
    for name in names or known:
        cells, path = read_master(known[name], assignment(name), variant), known[name]
        for kind in KINDS:
            inner = Path("nbgrader", "source", name, f"{path.stem}.ipynb") if kind == "nbgrader" else None
            target = output_dir / (inner or Path(kind, f"{path.stem}.ipynb"))
            texts[target] = notebook_text(cells, assignment(name), variant, kind)
    texts[output_dir / "nbgrader" / "nbgrader_config.py"] = NBGRADER_CONFIG
    write_files(output_dir, {path.relative_to(output_dir): text for path, text in texts.items()})
    if execute:
        run([path for path in texts if path.parent.name == "solution"], output_dir / "solution")
    return list(texts)


def read_master(path: Path, of: Assignment, variant: Variant) -> list[MasterCell]:
    """The cells of a master, with what the variant draws. Raises CourseError where it does not fit its checks."""
    import jupytext

    drawn, cells = {name: draw(variant) for name, draw in of.drawn.items()}, []
    for cell in jupytext.read(path, fmt="py:percent").cells:
        roles = [role for role in ROLES if role in cell.metadata]
        role = roles[0] if roles else None
        if cell.cell_type == "markdown":
            source = re.sub(r"\{\{(\w+)\}\}", lambda match: str(drawn[match[1]]), cell.source)
        else:
            source = _DRAWN.sub(lambda match: f"{match['left']}{drawn[match['name']]!r}", cell.source)
        cells.append(MasterCell(cell.cell_type, source, role, cell.metadata.get(role) if role else None))
    for role in ("exercise", "hint", "answer"):
        names = [cell.exercise for cell in cells if cell.role == role]
        if names != list(of.exercises):
            raise CourseError(f"{path.name} has the {role}s of {names}; the checks are of {list(of.exercises)}")
    return cells


def notebook_text(cells: list[MasterCell], of: Assignment, variant: Variant, kind: str) -> str:
    """The notebook of that kind as the text of an .ipynb file."""
    use = "" if variant.public else f'\n\ncheck.use("{variant.key}")'
    made = [_code(FIRST_CELL, "setup"), _code(f"from labkit.course import check{use}", "checks")]
    if kind == "nbgrader":  # read-only: put back as they were before a submission is graded
        for cell in made:
            cell["metadata"]["nbgrader"] = _nbgrader(f"{of.name}_{cell['id']}")
    numbers = {name: i for i, name in enumerate(of.exercises, 1)}
    for i, cell in enumerate(cells):
        exercise = of.exercises.get(cell.exercise or "")
        identity = f"{of.name}-{i:02d}"
        match cell.role:
            case "exercise":
                made.append(_markdown(_headed(cell, of, numbers[exercise.name]), identity))
            case "hint":
                made.append(_markdown(_folded("Hint", cell.source), identity))
            case "answer":
                if kind == "student" and variant.public:  # a private variant is for a class that is graded
                    solution = f"```python\n{_solved(cell.source)}\n```"
                    made.append(_markdown(_folded("Solution", solution), f"{identity}-solution"))
                made.append(_answer(cell, kind, identity))
                made.append(_check(exercise, variant, kind, identity))
            case "look":
                made.append(_code(_guarded(cell.source) if kind != "solution" else cell.source, identity))
            case _:
                made.append((_markdown if cell.kind == "markdown" else _code)(cell.source, identity))
    opening = made.pop(2)  # the title stands before the setup
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    metadata["labkit"] = {"assignment": of.name, "variant": variant.key, "kind": kind}
    notebook = {"cells": [opening, *made], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _headed(cell: MasterCell, of: Assignment, number: int) -> str:
    exercise = of.exercises[cell.exercise]
    dots = "●" * exercise.difficulty + "○" * (5 - exercise.difficulty)
    track = f"*{exercise.track}* · " if exercise.track else ""
    return (
        f"## Exercise {number} · {exercise.title}\n\n"
        f"{track}*difficulty {dots} · about {exercise.minutes} minutes · {exercise.points} points · "
        f"you define* `{exercise.answer}`\n\n{cell.source}"
    )


def _answer(cell: MasterCell, kind: str, identity: str) -> dict[str, Any]:
    source = {"student": _stub(cell), "solution": _solved(cell.source), "nbgrader": cell.source}[kind]
    made = _code(source, identity, ["answer"], exercise=cell.exercise)
    if kind == "nbgrader":
        made["metadata"]["nbgrader"] = _nbgrader(cell.exercise, solution=True)
    return made


def _check(exercise: Exercise, variant: Variant, kind: str, identity: str) -> dict[str, Any]:
    call = f"check.{exercise.name}({exercise.answer})"
    if kind != "nbgrader":
        tags = ["check", COMPARED_TAG] if kind == "solution" else ["check"]
        return _code(call, f"{identity}-check", tags, exercise=exercise.name)
    asked = f'key="{variant.key}", salt="{variant.salt}"' if variant.salt else f'key="{variant.key}"'
    graded = f"check.{exercise.name}({exercise.answer}, hidden=True, {asked}).graded()"
    source = f"{call}\n### BEGIN HIDDEN TESTS\n{graded}\n### END HIDDEN TESTS"
    made = _code(source, f"{identity}-check", ["check"], exercise=exercise.name)
    made["metadata"]["nbgrader"] = _nbgrader(f"{exercise.name}_test", points=exercise.points)
    return made


def _nbgrader(grade_id: str, *, solution: bool = False, points: int | None = None) -> dict[str, Any]:
    """What nbgrader knows of a cell: an answer, a test with points, or one that is only read."""
    found = {"grade": points is not None, "grade_id": grade_id, "locked": not solution, "schema_version": 3}
    return found | {"solution": solution, "task": False} | ({} if points is None else {"points": points})


def _stub(cell: MasterCell) -> str:
    """The answer with NotImplementedError in place of the solution."""
    stub = rf'\1raise NotImplementedError("{cell.exercise}")'
    return re.sub(rf"^( *){BEGIN}$.*^ *{END}$", stub, cell.source, flags=re.MULTILINE | re.DOTALL)


def _solved(source: str) -> str:
    return "\n".join(line for line in source.split("\n") if line.strip() not in (BEGIN, END))


def _guarded(source: str) -> str:
    """A cell that shows something once the exercise has an answer: a stub does not stop the notebook."""
    if "\n" in source:
        return f"check.look(\n    lambda: (\n{source}\n    )\n)"
    return f"check.look(lambda: ({source}))"


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _markdown(source: str, identity: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": identity, "metadata": {}, "source": source.splitlines(keepends=True)}


def _code(source: str, identity: str, tags: list[str] | None = None, exercise: str | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"tags": tags} if tags else {}
    if exercise:
        metadata["labkit"] = {"exercise": exercise}
    cell = {"cell_type": "code", "execution_count": None, "id": identity, "metadata": metadata, "outputs": []}
    return cell | {"source": source.splitlines(keepends=True)}


NBGRADER_CONFIG = '''"""nbgrader's settings for this course: run nbgrader in this folder. See docs/instructors.md."""

c = get_config()  # noqa: F821  (nbgrader defines it)
c.CourseDirectory.course_id = "labkit"
c.ClearSolutions.code_stub = {"python": 'raise NotImplementedError("the exercise above")'}
c.Execute.timeout = 120  # seconds for a cell; the checks end a call that does not come back long before
# A test cell says its points itself. A warning on stderr, which nbgrader takes for a failed test, costs none.
c.IgnorePattern.enabled = True
c.IgnorePattern.pattern = ".*"
c.OverwriteCells.add_missing_cells = True  # a test that a student has deleted is asked all the same
'''
