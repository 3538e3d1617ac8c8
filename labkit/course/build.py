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

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit import resources
from labkit.course.exercises import NAMES, Assignment, assignment
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
    folder = resources.folder("notebooks") / "assignments" / "src"
    found = {path.name.partition("_")[0]: path for path in sorted(folder.glob("a[0-9]_*.py"))}
    return {name: path for name, path in found.items() if name in NAMES}


def build(
    output_dir: str | Path, variant: Variant | None = None, names: list[str] | None = None, *, execute: bool = False
) -> list[Path]:
    """Writes `student/`, `solution/` and `nbgrader/source/` of the assignments `names` (all) into `output_dir`.

    `execute`: the solutions are run too, and hold what their cells give (about a minute on two cores for all).

    Raises:
        CourseError: a master that does not fit its checks, an unknown assignment. Nothing is written then.
        NotebookError: a solution does not run to its end. It is then there without outputs.
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

    drawn = {name: draw(variant) for name, draw in of.drawn.items()}

    def value(name: str) -> Any:
        if name not in drawn:
            raise CourseError(
                f"{path.name}: nothing called {name!r} is drawn; {of.name} draws {', '.join(drawn) or 'nothing'}"
            )
        return drawn[name]

    cells = []
    for cell in jupytext.read(path, fmt="py:percent").cells:
        roles = [role for role in ROLES if role in cell.metadata]
        role = roles[0] if roles else None
        if cell.cell_type == "markdown":
            source = re.sub(r"\{\{(\w+)\}\}", lambda found: str(value(found[1])), cell.source)
        else:
            source = _DRAWN.sub(lambda found: f"{found['left']}{value(found['name'])!r}", cell.source)
        cells.append(MasterCell(cell.cell_type, source, role, cell.metadata.get(role) if role else None))
    _require_fit(path, cells, of)
    return cells


def notebook_text(cells: list[MasterCell], of: Assignment, variant: Variant, kind: str) -> str:
    """The notebook of that kind as the text of an .ipynb file."""
    made = [_code(FIRST_CELL, "setup"), _code(_use_checks(variant), "checks")]
    if kind == "nbgrader":  # read-only: put back as they were before a submission is graded
        for cell in made:
            cell["metadata"]["nbgrader"] = _nbgrader(f"{of.name}_{cell['id']}")
    open_solutions = variant.public  # a private variant is for a class that is graded
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
                if kind == "student" and open_solutions:
                    solution = f"```python\n{_solved(cell.source)}\n```"
                    made.append(_markdown(_folded("Solution", solution), f"{identity}-solution"))
                made.append(_answer(cell, kind, identity))
                made += _checks(exercise, variant, kind, identity)
            case "look":
                made.append(_code(_guarded(cell.source) if kind != "solution" else cell.source, identity))
            case _:
                made.append((_markdown if cell.kind == "markdown" else _code)(cell.source, identity))
    opening = made.pop(2)  # the title stands before the setup
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    metadata["labkit"] = {"assignment": of.name, "variant": variant.key, "kind": kind}
    notebook = {"cells": [opening, *made], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _require_fit(path: Path, cells: list[MasterCell], of: Assignment) -> None:
    """Each exercise of the checks has its task, a hint and one answer with a solution, in order; and no other has."""
    for role in ("exercise", "hint", "answer"):
        found = [cell.exercise for cell in cells if cell.role == role]
        if found != list(of.exercises):
            raise CourseError(
                f"{path.name}: the cells of role {role!r} are of {found}; the checks are of {list(of.exercises)}"
            )
    for cell in cells:
        if cell.role == "answer" and (cell.source.count(BEGIN) != 1 or cell.source.count(END) != 1):
            raise CourseError(f"{path.name}: the answer of {cell.exercise} needs one '{BEGIN}' and one '{END}'")
    for cell in cells:
        if cell.role == "look":
            try:
                ast.parse(f"({cell.source}\n)", mode="eval")
            except SyntaxError as error:
                raise CourseError(f"{path.name}: the look of {cell.exercise} is not one expression: {error}") from error
    if not cells or cells[0].kind != "markdown" or cells[0].role:
        raise CourseError(f"{path.name}: begins with a markdown cell that holds the title")


def _headed(cell: MasterCell, of: Assignment, number: int) -> str:
    exercise = of.exercises[cell.exercise]
    dots = "●" * exercise.difficulty + "○" * (5 - exercise.difficulty)
    points = sum(part.points for part in exercise.parts)
    track = f"*{exercise.track}* · " if exercise.track else ""
    return (
        f"## Exercise {number} · {exercise.title}\n\n"
        f"{track}*difficulty {dots} · about {exercise.minutes} minutes · {points} points · "
        f"you define* `{exercise.answer}`\n\n{cell.source}"
    )


def _answer(cell: MasterCell, kind: str, identity: str) -> dict[str, Any]:
    source = {"student": _stub(cell), "solution": _solved(cell.source), "nbgrader": cell.source}[kind]
    made = _code(source, identity, ["answer"], exercise=cell.exercise)
    if kind == "nbgrader":
        made["metadata"]["nbgrader"] = _nbgrader(cell.exercise, solution=True)
    return made


def _checks(exercise: Any, variant: Variant, kind: str, identity: str) -> list[dict[str, Any]]:
    call = f"check.{exercise.name}({exercise.answer})"
    if kind != "nbgrader":
        tags = ["check", COMPARED_TAG] if kind == "solution" else ["check"]
        return [_code(call, f"{identity}-check", tags, exercise=exercise.name)]
    asked = f'key="{variant.key}", salt="{variant.salt}"' if variant.salt else f'key="{variant.key}"'
    graded = f"check.{exercise.name}({exercise.answer}, hidden=True, {asked}).graded()"
    source = f"{call}\n### BEGIN HIDDEN TESTS\n{graded}\n### END HIDDEN TESTS"
    made = _code(source, f"{identity}-check", ["check"], exercise=exercise.name)
    made["metadata"]["nbgrader"] = _nbgrader(f"{exercise.name}_test", points=exercise.points)
    return [made]


def _nbgrader(grade_id: str, *, solution: bool = False, points: int | None = None) -> dict[str, Any]:
    """What nbgrader knows of a cell: an answer, a test with points, or one that is only read."""
    found = {"grade": points is not None, "grade_id": grade_id, "locked": not solution, "schema_version": 3}
    return found | {"solution": solution, "task": False} | ({} if points is None else {"points": points})


def _stub(cell: MasterCell) -> str:
    return _between(cell.source, lambda indent: f'{indent}raise NotImplementedError("{cell.exercise}")')


def _solved(source: str) -> str:
    return "\n".join(line for line in source.split("\n") if line.strip() not in (BEGIN, END))


def _between(source: str, replaced: Any) -> str:
    """The source with the solution, its two signs included, replaced."""
    lines = source.split("\n")
    first, last = (next(i for i, line in enumerate(lines) if line.strip() == sign) for sign in (BEGIN, END))
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    return "\n".join([*lines[:first], replaced(indent), *lines[last + 1 :]])


def _guarded(source: str) -> str:
    """The cell, one expression, shows something once the exercise has an answer: a stub does not stop anybody."""
    return (
        f"check.look(lambda: ({source}))" if "\n" not in source else f"check.look(\n    lambda: (\n{source}\n    )\n)"
    )


def _use_checks(variant: Variant) -> str:
    lines = ["from labkit.course import check"] + ([] if variant.public else ["", f'check.use("{variant.key}")'])
    return "\n".join(lines)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _markdown(source: str, identity: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": identity, "metadata": {}, "source": _lines(source)}


def _code(source: str, identity: str, tags: list[str] | None = None, exercise: str | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"tags": tags} if tags else {}
    if exercise:
        metadata["labkit"] = {"exercise": exercise}
    cell = {"cell_type": "code", "execution_count": None, "id": identity, "metadata": metadata, "outputs": []}
    return cell | {"source": _lines(source)}


def _lines(source: str) -> list[str]:
    return source.splitlines(keepends=True)


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
