"""The assignments, built: from one master come the student's notebook, the solution, and nbgrader's source.

A master is a py:percent script. The metadata of its cells state their roles:

    # %% [markdown] exercise="a1_causal_mask"     the task; a heading with points and minutes is put over it
    # %% [markdown] hint="a1_causal_mask"         folded, below the check
    # %% answer="a1_causal_mask"                  code with ### BEGIN SOLUTION and ### END SOLUTION; its check follows
    # %% look="a1_causal_mask"                    optional: shows what the answer gives, once there is one

`{{name}}` in prose and `x = ...  # drawn: name` in code are what the assignment draws for the variant. The same master
and variant give the same files, byte for byte, apart from the outputs of executed solutions.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from labkit import files
from labkit.course.exercises import NAMES, Assignment, Exercise, assignment
from labkit.course.predictions import file_name
from labkit.course.variant import Variant
from labkit.errors import CourseError, needs_extra
from labkit.files import write_whole
from labkit.notebooks import FIRST_CELL, run

with needs_extra("course"):
    import jupytext
    import nbformat
    from nbformat import NotebookNode
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
NBGRADER_CONFIG = "nbgrader_config.py"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def masters() -> dict[str, Path]:
    """The master of each assignment that has one: {"a1": .../a1_masks_and_attention.py, ...}."""
    return {path.name[:2]: path for path in sorted(_folder().glob("a[0-9]_*.py")) if path.name[:2] in NAMES}


def build(
    output_dir: str | Path,
    variant: Variant | None = None,
    names: list[str] | None = None,
    *,
    execute: bool = False,
    with_solutions: bool = False,
) -> list[Path]:
    """Writes `student/`, `solution/` and `nbgrader/source/` of the assignments `names` (all) into `output_dir`.

    `execute`: the solutions are also run, to store their outputs (about a minute on two cores for all). If predictions
    lie beside the master, they are copied beside the solution, so that it trains nothing. Their seeds are those of the
    public variant, so the check of a private one refuses them.
    `with_solutions`: the students' notebooks have them folded below the hints, for self-study.

    Raises CourseError for an unknown assignment or a master that does not fit its checks; nothing is written then. If a
    solution does not run to its end, LabkitError is raised, and it is there without outputs.
    """
    variant, output_dir, paths = variant or Variant(), Path(output_dir).expanduser(), masters()
    if unknown := [name for name in names or () if name not in paths]:
        raise CourseError(f"there is no master of {', '.join(unknown)}; there is {', '.join(paths)}")
    texts = {Path("nbgrader", NBGRADER_CONFIG): (_folder() / NBGRADER_CONFIG).read_text(encoding="utf-8")}
    for name in names or paths:
        cells, file = read_master(paths[name], assignment(name), variant), f"{paths[name].stem}.ipynb"
        for kind, *folders in (("student",), ("solution",), ("nbgrader", "source", name)):
            texts[Path(kind, *folders, file)] = notebook_text(cells, assignment(name), variant, kind, with_solutions)
        if (predictions := paths[name].with_name(file_name(name))).is_file():
            texts[Path("solution", predictions.name)] = predictions.read_text(encoding="utf-8")
    for path, text in texts.items():
        write_whole(output_dir / path, text)
    if execute:
        solutions = [output_dir / path for path in texts if path.parent.name == "solution" and path.suffix == ".ipynb"]
        run(solutions, output_dir / "solution")
    return [output_dir / path for path in texts]


def read_master(path: Path, of: Assignment, variant: Variant) -> list[NotebookNode]:
    """The cells of a master, with what the variant draws. Raises CourseError where it does not fit its checks."""
    drawn, cells = {name: draw(variant) for name, draw in of.drawn.items()}, jupytext.read(path, fmt="py:percent").cells
    for cell in cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\{\{(\w+)\}\}", lambda match: str(drawn[match[1]]), cell.source)
        else:
            pattern = re.compile(r"^(\s*\w+ = ).*?  # drawn: (\w+)$", re.MULTILINE)
            cell.source = pattern.sub(lambda match: f"{match[1]}{drawn[match[2]]!r}", cell.source)
    for role in ("exercise", "hint", "answer"):
        names = [cell.metadata[role] for cell in cells if role in cell.metadata]
        if names != list(of.exercises):
            raise CourseError(f"{path.name} has the {role}s of {names}; the checks are of {list(of.exercises)}")
    return cells


def notebook_text(
    cells: list[NotebookNode], of: Assignment, variant: Variant, kind: str, with_solutions: bool = False
) -> str:
    """The notebook for `kind` (student, solution or nbgrader) as the text of an .ipynb file."""
    folded = {cell.metadata["hint"]: _folded("Hint", cell.source) for cell in cells if "hint" in cell.metadata}
    if with_solutions and kind == "student":
        for cell in cells:
            if "answer" in cell.metadata:
                code = f"```python\n{_solved(cell.source)}\n```"
                folded[cell.metadata["answer"]] += "\n\n" + _folded("Solution", code)
    use = "" if variant.public else f'\n\ncheck.use("{variant.key}")'
    title, *built = (
        new for i, cell in enumerate(cells) for new in _cells(cell, f"{of.name}-{i:02d}", of, variant, kind, folded)
    )
    setup = [
        new_code_cell(source, id=name, metadata=_nbgrader(f"{of.name}_{name}") if kind == "nbgrader" else {})
        for name, source in {"setup": FIRST_CELL, "checks": f"from labkit.course import check{use}"}.items()
    ]
    setup[0].metadata["jupyter"] = {"source_hidden": True}
    about = {"assignment": of.name, "variant": variant.key, "kind": kind}
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}, "labkit": about}
    return nbformat.writes(new_notebook(cells=[title, *setup, *built], metadata=metadata, nbformat_minor=5)) + "\n"


def _cells(
    cell: NotebookNode, identity: str, of: Assignment, variant: Variant, kind: str, folded: dict[str, str]
) -> list[NotebookNode]:
    """What a cell of the master becomes in a notebook; `folded`: what is below each check."""
    source = cell.source
    match dict(cell.metadata):
        case {"exercise": name}:
            source = _heading(name, of) + source
        case {"hint": _}:
            return []
        case {"answer": name}:
            below = new_markdown_cell(folded[name], id=f"{identity}-hint")
            return [*_answer_and_check(source, of.exercises[name], variant, kind, identity), below]
        case {"look": _} if kind != "solution":  # a stub does not stop the notebook
            lines = f"\n    lambda: (\n{source}\n    )\n" if "\n" in source else f"lambda: ({source})"
            source = f"check.look({lines})"
    return [(new_markdown_cell if cell.cell_type == "markdown" else new_code_cell)(source, id=identity)]


def _answer_and_check(
    source: str, exercise: Exercise, variant: Variant, kind: str, identity: str
) -> list[NotebookNode]:
    check = f"check.{exercise.name}({exercise.answer})"
    of_answer, of_check = ({"labkit": {"exercise": exercise.name}, "tags": [tag]} for tag in ("answer", "check"))
    if kind == "student":
        stub = rf'\1raise NotImplementedError("{exercise.name}")'
        source = re.sub(rf"^( *){BEGIN}$.*^ *{END}$", stub, source, flags=re.MULTILINE | re.DOTALL)
    elif kind == "solution":
        source = _solved(source)
        of_check["tags"].append("nbval-check-output")  # running it under nbval compares what its checks show
    else:
        asked = f'key="{variant.key}"' + (f', salt="{variant.salt}"' if variant.salt else "")
        graded = f"check.{exercise.name}({exercise.answer}, hidden=True, {asked}).graded()"
        check += f"\n### BEGIN HIDDEN TESTS\n{graded}\n### END HIDDEN TESTS"
        of_answer |= _nbgrader(exercise.name, solution=True, locked=False)
        of_check |= _nbgrader(f"{exercise.name}_test", grade=True, points=exercise.points)
    return [
        new_code_cell(source, id=identity, metadata=of_answer),
        new_code_cell(check, id=f"{identity}-check", metadata=of_check),
    ]


def _solved(source: str) -> str:
    return "\n".join(line for line in source.split("\n") if line.strip() not in (BEGIN, END))


def _heading(name: str, of: Assignment) -> str:
    exercise, number = of.exercises[name], list(of.exercises).index(name) + 1
    dots = "●" * exercise.difficulty + "○" * (5 - exercise.difficulty)
    track = f"*{exercise.track}* · " if exercise.track else ""
    return (
        f"## Exercise {number} · {exercise.title}\n\n"
        f"{track}*difficulty {dots} · about {exercise.minutes} minutes · {exercise.points} points · "
        f"you define* `{exercise.answer}`\n\n"
    )


def _nbgrader(grade_id: str, **settings: Any) -> dict[str, Any]:
    """The metadata of a cell that nbgrader puts back before it grades a submission, unless `settings` differ."""
    base = {"grade": False, "grade_id": grade_id, "locked": True, "schema_version": 3, "solution": False, "task": False}
    return {"nbgrader": base | settings}


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _folder() -> Path:
    return files.folder("notebooks") / "assignments" / "src"
