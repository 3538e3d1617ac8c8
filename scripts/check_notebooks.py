"""The rules for committed notebooks: executed in one go, without errors, short cells, no path of anybody's machine.

    python scripts/check_notebooks.py [--minutes] [NOTEBOOK ...]      (none: every notebook of the project)

Prints one line per fault and exits 1 if there is one. Also compares the cells that the tests skip with their ledger.
`--minutes` prints, for each lesson, its words, its code lines, and the minutes that it states and that it should state.
Of the assignments, which are built from their masters, only the solutions are checked: that they have been run.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import notebook_heads  # noqa: E402

from labkit.notebooks import SKIP_TAG, is_setup_cell  # noqa: E402  (light: loads no torch)

SOLUTIONS = ROOT / "notebooks" / "assignments" / "solution"
LEDGER = ROOT / "tests" / "notebooks" / "SKIPPED.md"
LONGEST_CELL = 25  # lines
LARGEST_NOTEBOOK = 2_000_000  # bytes
MOST_SKIPPED = 0.03  # of all code cells of the tour
PLOTLY = "application/vnd.plotly.v1+json"
UNREADABLE = "cannot be read as a notebook"
COMPARED_TAG = "nbval-check-output"
MACHINE_PATH = re.compile(r"/(?:home|Users)/[\w.-]+/|/(?:root|tmp)/[\w.~-]+|[A-Z]:\\+Users\\|" + re.escape(str(ROOT)))


# The rules for a lesson.
MOST_WORDS = 150  # of a Markdown cell
MOST_LINES, MOST_LINES_OF_CHECK = 15, 20  # of a code cell; of the setup cell, or one that checks an exercise
MOST_MINUTES, MOST_BOXES = 60, 3
NOT_ANSWERED = "Not answered yet"  # every check of an exercise prints it
BOX = re.compile(r"(?<![\w.])(?<!def )predict\(")
EXERCISE = re.compile(r"^(?:\*\*|#+ )(Exercise \d+)\b", re.M)
REFERENCES = re.compile(r"^(?:\*\*|#+ )(?:\d+\. )?References\b", re.M)
NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`|<pre>.*?</pre>|\]\([^)]*\)|^#.*?$", re.S | re.M)  # code, links, headings
THINGS = "cell curve figure head heading layer line mask model number output plot position row state table test token"
BANNED = [
    re.compile(pattern, re.I)
    for pattern in (
        rf"\b({'|'.join(THINGS.split())})(,? (above|below|itself))? (says|tells|sees|hears|notices|knows|speaks)\b",
        rf"\b({'|'.join(THINGS.split())})s( above| below)? (say|tell|see|hear|notice|know|speak)\b",
        r"\b(barely|anew|hears|notices|told apart|stands? for|whichever way|nothing that shows)\b",
        r"\bin the run (that is )?printed here\b",
        r"\b(in|into|with|without|its|other|whose) company\b",
        r"\d less \d",  # minus
        r"\b(a|one|each|another|whole) training[.,;:)]",  # a training run
        r"\bleaves? out (zero|0)\b",
    )
]


def main(arguments: list[str]) -> int:
    paths = [Path(a) for a in arguments if a != "--minutes"] or [*tour(), *solutions()]
    faults = []
    for path in paths:
        found = faults_of(path)
        if path.resolve().parent != SOLUTIONS and UNREADABLE not in "".join(found):
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            found += faults_of_lesson(path, cells)
            if "--minutes" in arguments:
                words, lines, stated, computed = minutes_of(cells)
                minutes = f"{stated} minutes stated, {computed} computed"
                print(f"{path.name[:2]}: {words:,} words, {lines} code lines, {minutes}")
        faults += [f"{shown(path)}: {fault}" for fault in found]
    if set(tour()) <= {p.resolve() for p in paths}:
        faults += faults_of_ledger(tour(), LEDGER)
    for fault in faults:
        print(fault)
    print(f"{len(paths)} notebooks checked, {len(faults)} faults")
    return bool(faults)


def tour() -> list[Path]:
    """Every committed notebook but the assignments, which are built from their masters and checked by tests/course."""
    paths = sorted((ROOT / "notebooks").rglob("*.ipynb"))
    return [p for p in paths if ".ipynb_checkpoints" not in p.parts and "assignments" not in p.parts]


def solutions() -> list[Path]:
    """The solutions of the assignments, which `labkit course build --execute` makes."""
    return sorted(SOLUTIONS.glob("*.ipynb"))


def faults_of(path: Path) -> list[str]:
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        code = [c for c in notebook["cells"] if c["cell_type"] == "code" and text(c["source"]).strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{UNREADABLE} ({error!r})"]
    if not code:
        return ["has no code cell"]
    faults = [f"cell {name(c)}: {fault}" for c in code for fault in faults_of_output(c)]
    if path.resolve().parent != SOLUTIONS:  # an exercise asks for its answer as one cell
        faults += [f"cell {name(c)}: {fault}" for c in code for fault in faults_of_length(c)]
        faults += faults_of_head(path, notebook, code)
    counts = [c["execution_count"] for c in code if c.get("execution_count") is not None]
    if counts != list(range(1, len(counts) + 1)):
        faults.append("was not executed top to bottom in a fresh kernel (execution counts are not 1, 2, 3, ...)")
    if notebook.get("metadata", {}).get("kernelspec", {}).get("name") != "python3":
        faults.append('its kernel must be "python3"')
    if not any(COMPARED_TAG in tags(c) for c in code):
        faults.append(f"no cell is tagged {COMPARED_TAG}: running it green would compare nothing")
    if path.stat().st_size > LARGEST_NOTEBOOK:
        faults.append(f"is larger than {LARGEST_NOTEBOOK / 1e6:g} MB")
    return faults


def faults_of_head(path: Path, notebook: dict, code: list[dict]) -> list[str]:
    if not is_setup_cell(text(code[0]["source"])):
        return ["its first code cell is not labkit.notebooks.FIRST_CELL"]
    if not path.resolve().is_relative_to(ROOT):
        return []
    head = notebook_heads.head_of(path, notebook_heads.install_from())
    if json.loads(notebook_heads.with_head(json.dumps(notebook), *head)) != notebook:
        return ["its setup cell or its Colab badge is stale: run scripts/notebook_heads.py"]
    return []


def faults_of_lesson(path: Path, cells: list[dict]) -> list[str]:
    sources = [text(cell["source"]) for cell in cells]
    prose = [source if cell["cell_type"] == "markdown" else "" for cell, source in zip(cells, sources, strict=True)]
    boxes = [0 if written else len(BOX.findall(source)) for source, written in zip(sources, prose, strict=True)]
    faults = []
    for i, (cell, source) in enumerate(zip(cells, sources, strict=True)):
        words, lines = len(prose[i].split()), len(source.strip().splitlines())
        most = MOST_LINES_OF_CHECK if NOT_ANSWERED in source or is_setup_cell(source) else MOST_LINES
        read = NOT_PROSE.sub(" ", prose[i]) if prose[i] else source if boxes[i] else ""
        found = [f'"{match[0]}": write it plainly' for pattern in BANNED for match in pattern.finditer(read)]
        if words > MOST_WORDS:
            found.append(f"{words} words, at most {MOST_WORDS} are allowed")
        if not prose[i] and lines > most:
            found.append(f"{lines} lines, at most {most} are allowed")
        if prose[i] and re.search(r"\bPredict\b", read) and not any(boxes[i + 1 : i + 3]):
            found.append('"Predict", but neither of the next two cells has a predict(...) box')
        if boxes[i] > source.count("answer="):
            found.append("a predict(...) box without answer=")
        faults += [f"cell {name(cell)}: {fault}" for fault in found]
    if sum(boxes) > MOST_BOXES:
        faults.append(f"{sum(boxes)} predict(...) boxes, at most {MOST_BOXES} are allowed")
    _, _, stated, computed = minutes_of(cells)
    if not 0.75 * computed <= stated <= min(1.25 * computed, MOST_MINUTES):
        faults.append(f"{stated} minutes stated, about {computed} computed; at most {MOST_MINUTES} are allowed")
    references = [source for source in prose if REFERENCES.search(source)]
    if not path.name.startswith("00_") and not any("](http" in source for source in references):
        faults.append("no References with a link")
    return faults + faults_of_exercises(sources, prose)


def faults_of_exercises(sources: list[str], prose: list[str]) -> list[str]:
    """Each exercise is a task, a cell that checks the answer, and after it a hint and a solution."""
    starts = [(i, match[1]) for i, source in enumerate(prose) if (match := EXERCISE.search(source))]
    faults = []
    for (start, title), (end, _) in zip(starts, [*starts, (len(sources), "")][1:], strict=True):
        order = [source for source in sources[start:end] if NOT_ANSWERED in source or "<summary>" in source]
        if not order or NOT_ANSWERED not in order[0]:
            faults.append(f'{title}: a cell that prints "{NOT_ANSWERED}" must come before hint and solution')
        faults += [f"{title}: no {word}" for word in ("Hint", "Solution") if f"<summary>{word}" not in "".join(order)]
    return faults


def minutes_of(cells: list[dict]) -> tuple[int, int, int, int]:
    """Words, lines of code, the minutes that the title states (0: none), and the minutes that they should be."""
    prose = "\n".join(text(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    code = "\n".join(text(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    lines = [line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")]
    time = re.search(r"\*\*Time\*\* \|.*", prose)
    stated = re.search(r"(\d+) to \d+ minutes", time[0] if time else "")
    run = re.search(r"\brun\b[^.|\d]*(\d+) minutes?\b", time[0] if time else "")
    exercises = sum(map(int, re.findall(r"\((?:easy|medium|hard)\b[^)\d]*(\d+) minutes?\)", prose)))
    words = len(prose.split())
    computed = words / 170 + len(lines) / 12 + exercises + (max(1, int(run[1])) if run else 1)
    return words, len(lines), int(stated[1]) if stated else 0, round(computed)


def faults_of_length(cell: dict) -> list[str]:
    lines = len(text(cell["source"]).strip().splitlines())
    return [f"{lines} lines, at most {LONGEST_CELL} are allowed"] if lines > LONGEST_CELL else []


def faults_of_output(cell: dict) -> list[str]:
    faults = []
    if cell.get("execution_count") is None and SKIP_TAG not in tags(cell):
        faults.append("was not executed")
    errors = [o for o in cell.get("outputs", []) if o["output_type"] == "error"]
    if errors and "raises-exception" not in tags(cell):
        faults.append(f"ends in {errors[0]['ename']} and is not tagged raises-exception")
    figures = [o["data"] for o in cell.get("outputs", []) if PLOTLY in o.get("data", {})]
    if any("image/png" not in figure for figure in figures):
        faults.append("has a figure without a PNG beside it: execute it with `make notebooks`")
    if path := MACHINE_PATH.search(readable_output(cell)):
        faults.append(f"its output shows a path of a machine: {path.group()}")
    return faults


def faults_of_ledger(paths: list[Path], ledger: Path) -> list[str]:
    """Cells that are skipped without a reason, reasons without a cell, and too many of either."""
    rows = re.findall(
        r"^\| *([^|\s]+\.ipynb) *\| *([^|\s]+) *\| *([^|]*?) *\|$", ledger.read_text(encoding="utf-8"), re.M
    )
    listed = {(notebook, cell) for notebook, cell, reason in rows if reason}
    skipped, total = set(), 0
    for path in paths:
        cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
        total += len(cells)
        skipped |= {(path.name, name(c)) for c in cells if SKIP_TAG in tags(c)}
    faults = [f"{n}: cell {c} is skipped, but {ledger.name} gives no reason" for n, c in sorted(skipped - listed)]
    faults += [f"{ledger.name}: {n}, cell {c} is listed, but not skipped" for n, c in sorted(listed - skipped)]
    if len(skipped) > MOST_SKIPPED * total:
        faults.append(f"{len(skipped)} of {total} code cells are skipped, at most {MOST_SKIPPED:.0%} are allowed")
    return faults


def readable_output(cell: dict) -> str:
    """All text a reader of the outputs can see; pictures are left out."""
    parts = []
    for output in cell.get("outputs", []):
        parts += [text(output.get("text", "")), *output.get("traceback", [])]
        parts += [text(v) for kind, v in output.get("data", {}).items() if not kind.startswith("image/")]
    return "\n".join(parts)


def tags(cell: dict) -> list[str]:
    return cell.get("metadata", {}).get("tags", [])


def name(cell: dict) -> str:
    return cell.get("id", "without an id")


def text(value: object) -> str:
    if isinstance(value, list):
        return "".join(value)
    return value if isinstance(value, str) else json.dumps(value)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
