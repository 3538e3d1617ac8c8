"""Grading a class: 200 submissions of A1, good, partly wrong, empty, and some that hang, crash or eat memory.

    python benchmarks/grading.py                    (about 4 minutes on 2 quiet cores)
    python benchmarks/grading.py --students 10 --jobs 1 --quick      (nothing is written)

The submissions are drawn, seeded, from the solution, from the right and the typical wrong answers of
tests/course/answers, and from stubs. 19 of 20 are ordinary; of the rest one kind each in turn: a loop without an end in
a cell, one in an answer, a process that ends itself, memory without an end, a file that is no notebook.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the checkout, installed or not

from benchmarks import machine  # noqa: E402

TROUBLES = {
    "a cell without an end": "while True:\n    pass",
    "an answer without an end": "def scores_of(q, k):\n    while True:\n        pass",
    "ends itself": "import os\nos._exit(1)",
    "memory without an end": "x = []\nwhile True:\n    x.append(bytes(10**8))",
    "no notebook": None,
}
NOTES = (
    "seconds: from the start of grading to the last page, all submissions; each: seconds of single submissions by what "
    "was put into them, processes side by side; points: of the class; failures: submissions that could not be graded."
)


def answers_of(name: str) -> Any:
    path = ROOT / "tests" / "course" / "answers" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"answers_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn_class(folder: Path, students: int) -> dict[str, str]:
    """Writes a class of submissions; {student: the trouble put in, or ""}."""
    from labkit.course.build import build

    build(folder / "built", names=["a1"])
    title = "a1_masks_and_attention.ipynb"
    stub, solved = (
        json.loads((folder / "built" / kind / title).read_text("utf-8")) for kind in ("student", "solution")
    )
    solutions = {cell["metadata"]["labkit"]["exercise"]: cell["source"] for cell in solved["cells"] if is_answer(cell)}
    answers, rng, put_in = answers_of("a1"), random.Random(0), {}
    (folder / "in").mkdir()
    for number in range(students):
        notebook = json.loads(json.dumps(stub))
        for cell in filter(is_answer, notebook["cells"]):
            name = cell["metadata"]["labkit"]["exercise"]
            kind = rng.choices(["solution", "right", "wrong", "stub"], [45, 15, 30, 10])[0]
            if kind != "stub":
                cell["source"] = solutions[name] if kind == "solution" else drawn_answer(answers, name, kind, rng)
        student, trouble = f"student-{number:03d}", ""
        if number % 20 == 19:
            trouble = list(TROUBLES)[number // 20 % len(TROUBLES)]
            if (source := TROUBLES[trouble]) is not None:
                cell = {"cell_type": "code", "id": "trouble", "metadata": {}, "outputs": [], "execution_count": None}
                last = max(i for i, each in enumerate(notebook["cells"]) if is_answer(each))
                notebook["cells"].insert(last + 1, cell | {"source": source})
        text = "no notebook" if trouble == "no notebook" else json.dumps(notebook)
        (folder / "in" / f"{student}.ipynb").write_text(text, "utf-8")
        put_in[student] = trouble
    return put_in


def is_answer(cell: dict) -> bool:
    return "answer" in cell["metadata"].get("tags", [])


def drawn_answer(answers: Any, name: str, kind: str, rng: random.Random) -> str:
    if kind == "right":
        return rng.choice(answers.RIGHT[name])
    return rng.choice(answers.WRONG[name])[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--students", type=int, default=200)
    parser.add_argument("--jobs", type=int, help="submissions at a time; the number of cores by default")
    parser.add_argument("--quick", action="store_true", help="write nothing")
    options = parser.parse_args()
    from tqdm import tqdm

    from labkit.course.grade import grade_all

    with tempfile.TemporaryDirectory(prefix="labkit-grading-") as temporary:
        folder = Path(temporary)
        put_in = drawn_class(folder, options.students)
        with tqdm(total=options.students, disable=None) as bar:
            began = time.perf_counter()
            grades = grade_all(folder / "in", folder / "out", jobs=options.jobs, on_grade=lambda *_: bar.update())
            seconds = time.perf_counter() - began
    by_kind: dict[str, list[float]] = {}
    for grade in grades:
        by_kind.setdefault(put_in[grade.student] or "ordinary", []).append(grade.seconds)
    results = {
        "students": options.students,
        "jobs": options.jobs or "cores",
        "seconds": round(seconds, 1),
        "points": machine.spread([grade.points for grade in grades]),
        "failures": sum(bool(grade.failure) for grade in grades),
        "each": {kind: machine.spread(each) for kind, each in by_kind.items()},
    }
    print(f"{options.students} submissions in {seconds / 60:.1f} minutes, {results['failures']} could not be graded")
    for kind, each in results["each"].items():
        print(f"{kind}: n = {each['n']}, median {each['median']:.1f} s, {each['min']:.1f} to {each['max']:.1f}")
    if not options.quick:
        print(machine.write("grading", results, NOTES))


if __name__ == "__main__":
    main()
