"""The rules for committed notebooks: executed in one go, without errors, short cells, no path of anybody's machine.

    python scripts/check_notebooks.py [NOTEBOOK ...]      (none: every notebook of the project)

Prints one line per fault and exits 1 if there is one. Also compares the cells that the tests skip with their ledger.
Of the assignments, which are built from their masters, only the solutions are looked at: that they have been run.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import notebook_heads  # noqa: E402

from labkit.notebooks import SKIP_TAG  # noqa: E402  (light: loads no torch)

SOLUTIONS = ROOT / "notebooks" / "assignments" / "solution"
LEDGER = ROOT / "tests" / "notebooks" / "SKIPPED.md"
LONGEST_CELL = 25  # lines
LARGEST_NOTEBOOK = 2_000_000  # bytes
MOST_SKIPPED = 0.03  # of all code cells of the tour
PLOTLY = "application/vnd.plotly.v1+json"
COMPARED_TAG = "nbval-check-output"
MACHINE_PATH = re.compile(r"/(?:home|Users)/[\w.-]+/|/(?:root|tmp)/[\w.~-]+|[A-Z]:\\+Users\\|" + re.escape(str(ROOT)))


def main(arguments: list[str]) -> int:
    paths = [Path(a) for a in arguments] or [*tour(), *solutions()]
    faults = [f"{shown(path)}: {fault}" for path in paths for fault in faults_of(path)]
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
        return [f"cannot be read as a notebook ({error!r})"]
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
    faults = []
    setup_cell, badge = notebook_heads.head_of(path.resolve(), notebook_heads.settings())
    if text(code[0]["source"]).strip() != setup_cell:
        faults.append("its first code cell is not labkit.notebooks.FIRST_CELL as scripts/notebook_heads.py writes it")
    prose = next((text(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown"), "")
    if prose != notebook_heads.with_badge(prose, badge):
        faults.append("its Colab badge is not the one that scripts/notebook_heads.py writes")
    return faults


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
