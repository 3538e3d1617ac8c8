"""The record as a reader of the lab would ask for it: how far in which notebook, and what was written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.learner.record import Record
from labkit.learner.watching import code_cells


@dataclass(frozen=True)
class Progress:
    """How far one notebook, or one assignment, has been worked through.

    Attributes:
        name: the notebook's file name without its ending, or the assignment's ("a1").
        cells_run, cells: of the code cells that the notebook has; 0 of 0 for an assignment.
        predicted, explained, boxes: of its boxes for predictions. points, out_of: of an assignment.
    """

    name: str
    title: str
    cells_run: int = 0
    cells: int = 0
    predicted: int = 0
    explained: int = 0
    boxes: int = 0
    points: int = 0
    out_of: int = 0

    @property
    def share(self) -> float:
        """Of the whole, from 0 to 1: cells in a notebook, points in an assignment."""
        done, all_of_it = (self.points, self.out_of) if self.out_of else (self.cells_run, self.cells)
        return done / all_of_it if all_of_it else 0.0


def notebooks(record: Record) -> list[Progress]:
    """Every notebook of the tour, in order. Cells of an older version of a notebook do not count."""
    from labkit.notebooks import list_notebooks, title_of

    titles = {path.stem: title_of(path) for path in list_notebooks()}
    made = []
    for name, cells in code_cells().items():
        boxes = questions().get(name, {})
        kept = [record.boxes.get(box, {}) for box in boxes]
        made.append(
            Progress(
                name,
                titles[name],
                cells_run=len(cells.keys() & {*record.cells.get(name, ())}),
                cells=len(cells),
                predicted=sum("prediction" in each for each in kept),
                explained=sum("explanation" in each for each in kept),
                boxes=len(boxes),
            )
        )
    return made


def assignments(record: Record) -> list[Progress]:
    """Every assignment of which an exercise has been checked."""
    from labkit.course.exercises import NAMES, assignment

    made = []
    for name in NAMES:
        points = {each: kept["points"] for each, kept in record.exercises.items() if each.startswith(f"{name}_")}
        if points:
            whole = assignment(name)
            made.append(Progress(name, whole.title, points=whole.best(points), out_of=whole.points))
    return made


def going_on(progress: list[Progress]) -> Progress | None:
    """The notebook to open next: the first that is begun and not done, else the first that is not begun."""
    open_ones = [each for each in progress if each.share < 1]
    return next((each for each in open_ones if each.cells_run), open_ones[0] if open_ones else None)


def questions() -> dict[str, dict[str, str]]:
    """Notebook -> name -> question of its boxes, in order."""
    found: dict[str, dict[str, str]] = {}
    for notebook, cells in code_cells().items():
        for source in cells.values():
            for which, name, question in boxes_in(source):
                if which == "predict":
                    found.setdefault(notebook, {})[name] = question
    return found


def boxes_in(source: str) -> list[tuple[str, str, str]]:
    """("predict" or "explain", name, question or "") of each box that a cell makes; its arguments are plain texts."""
    if "predict(" not in source and "explain(" not in source:
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        texts = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if isinstance(call.func, ast.Name) and call.func.id in ("predict", "explain") and texts:
            found.append((call.func.id, texts[0], " ".join(texts[1:2])))
    return found


def as_markdown(record: Record) -> str:
    """The learner's journal: every question with what was predicted and how it was explained."""
    return "\n".join(_journal(record)) + "\n"


def _journal(record: Record) -> Iterator[str]:
    yield "# What I predicted, and why it came out as it did"
    for each in notebooks(record):
        asked = questions().get(each.name, {})
        kept = {box: record.boxes[box] for box in asked if box in record.boxes}
        if not (each.cells_run or kept):
            continue
        yield f"\n## {each.title}\n\n{each.cells_run} of {each.cells} cells run."
        for box, texts in kept.items():
            yield f"\n**{asked[box]}**\n"
            yield f"- Predicted: {_line(texts.get('prediction', 'nothing'))}"
            yield f"- Explained: {_line(texts.get('explanation', 'nothing'))}"
    for each in assignments(record):
        yield f"\n## {each.name.upper()} · {each.title}\n\n{each.points} of {each.out_of} points."


def _line(text: str) -> str:
    return text.strip().replace("\n", "\n  ")
