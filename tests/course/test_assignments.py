"""Every assignment: its master fits its checks, solutions and other right answers pass, typical wrong ones do not."""

import importlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import nbformat
import pytest
import torch

from labkit.course import a2, check
from labkit.course.answers import local_answer
from labkit.course.build import build, masters, read_master
from labkit.course.exercises import NAMES, assignment
from labkit.course.variant import Variant
from scripts import notebook_heads

WRITTEN = [name for name in NAMES if name in masters()]
VARIANTS = {"public": Variant(), "private": Variant.of("a secret of the tests"), "other": Variant.of("another one")}
FOLDER = Path(__file__).parents[2] / "notebooks" / "assignments"


@pytest.fixture(autouse=True)
def predictions_of_the_solutions(monkeypatch):
    """Checks read them in the current folder, and the masters' cells train nothing if they are there."""
    monkeypatch.chdir(masters()["a4"].parent)


def answers(name):
    return importlib.import_module(f"tests.course.answers.{name}")


@cache
def cells(name, key="public"):
    """The code cells of the master, solutions in place; cells that only look are left out."""
    read = read_master(masters()[name], assignment(name), Variant(key))
    return [cell for cell in read if cell.cell_type == "code" and "look" not in cell.metadata]


@cache
def solved(name, key):
    space = {"__name__": "solution", "check": check}
    for cell in cells(name, key):
        exec(compile(cell.source, f"<{name}>", "exec"), space)
    return space


def changed(exercise, *changes):
    """The solution with each (old, new) put in; a single change is the whole answer."""
    if len(changes) == 1:
        return changes[0]
    source = next(cell.source for cell in cells(exercise[:2]) if cell.metadata.get("answer") == exercise)
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in source, f"{exercise}: {old!r} is not in the solution"
        source = source.replace(old, new)
    return source


def with_seeds_of(variant, predictions):
    """The solution's predictions, as if they had been made in this variant."""
    seeds, runs = assignment("a4").drawn["seeds"](variant), json.loads(predictions)
    return json.dumps([run | {"seed": seeds[run["seed"]]} for run in runs]).encode()


def outcome(name, source=None, variant=VARIANTS["public"]):
    of = name.partition("_")[0]
    exercise = assignment(of).exercises[name]
    space = dict(solved(of, variant.key))
    if name == "a2_audit" and source is not None:  # the solution's own influence reads one sentence at a time
        exec(answers("a2").RIGHT["a2_influence"], space)
    if source is not None:  # in a copy of the solution's names, which its functions go on using
        exec(compile(source.strip(), f"<answer to {name}>", "exec"), space)
    answer = local_answer(exercise.answer, space.get(exercise.answer), of, 30.0)
    if of == "a4":
        predictions = with_seeds_of(variant, answer.predictions())
        answer = replace(answer, predictions=lambda: predictions)
    return exercise.judge(answer, variant, hidden=True)


EXERCISES = [  # `make test-fast` has those of A1
    pytest.param(exercise, marks=[] if name == "a1" else [pytest.mark.end_to_end])
    for name in WRITTEN
    for exercise in assignment(name).exercises
]


@pytest.mark.parametrize("variant", ["public", "private", pytest.param("other", marks=pytest.mark.slow)])
@pytest.mark.parametrize("exercise", EXERCISES)
def test_right_answers_have_full_marks_in_every_variant_and_a_stub_is_not_begun(exercise, variant):
    for source in (None, answers(exercise[:2]).RIGHT.get(exercise)):
        result = outcome(exercise, source, VARIANTS[variant])
        assert result.status == "right" and result.points == result.out_of, f"{source}\n{result}"
    answer = assignment(exercise[:2]).exercises[exercise].answer
    stub = outcome(exercise, f"def {answer}(*_, **__):\n    raise NotImplementedError('{exercise}')", VARIANTS[variant])
    assert stub.status == "not begun" and stub.points == 0


@pytest.mark.parametrize("variant", ["public", pytest.param("private", marks=pytest.mark.slow)])
@pytest.mark.parametrize("exercise", EXERCISES)
def test_typical_wrong_answers_are_told_their_likely_causes(exercise, variant):
    likely = []
    for words, *changes in (wrong := answers(exercise[:2]).WRONG[exercise]):
        source = changed(exercise, *changes)
        result = outcome(exercise, source, VARIANTS[variant])
        assert result.status in ("wrong", "partly") and result.points < result.out_of, f"passed: {source}"
        assert words in result.message, f"{source}\n{result}"
        likely.append(result.likely or result.message)
    assert len(set(likely)) == len(wrong) >= 3


@pytest.mark.parametrize("name", WRITTEN)
def test_an_assignment_takes_one_or_two_hours_and_private_variants_differ_in_what_they_show(name):
    of = assignment(name)
    assert 60 <= of.minutes <= 110
    shown = [[draw(Variant.of(f"secret {i}")) for draw in of.drawn.values()] for i in range(12)]
    assert len(set(map(repr, shown))) > 1
    for track in {exercise.track for exercise in of.exercises.values()} - {None} or {None}:
        chosen = [exercise for exercise in of.exercises.values() if exercise.track in (None, track)]
        assert 5 <= len(chosen) <= 8
        assert sum(exercise.minutes for exercise in chosen) <= of.minutes
        assert sum(exercise.points for exercise in chosen) == of.points


def test_a2_finds_a_model_unchanged_whatever_the_number_of_threads():
    """A submission's process has one thread, the grader's has more."""
    threads = torch.get_num_threads()
    for seed in (10, 43, 78):  # their sums of floats differ
        states = []
        for number in (1, 2):
            torch.set_num_threads(number)
            states.append(a2.state(a2.model(kind="open", seed=seed)))
        assert states[0] == states[1]
    torch.set_num_threads(threads)


def test_what_is_committed_is_what_the_masters_make(tmp_path):
    """Solutions have been executed: their outputs are not compared. The heads follow `install-from` in pyproject."""

    def as_built(path):
        if path.suffix != ".ipynb":
            return path.read_text(encoding="utf-8")
        notebook = nbformat.read(path, as_version=4)
        cells = [(cell.id, cell.cell_type, cell.source, dict(cell.metadata)) for cell in notebook.cells]
        return cells, notebook.metadata["labkit"], notebook.metadata["kernelspec"]

    paths = build(tmp_path)
    for path in paths:
        if path.suffix == ".ipynb" and path.parent.name in ("student", "solution"):
            head = notebook_heads.head_of(FOLDER / path.relative_to(tmp_path), notebook_heads.install_from())
            path.write_text(notebook_heads.with_head(path.read_text(encoding="utf-8"), *head), encoding="utf-8")
    built = {path.relative_to(tmp_path): as_built(path) for path in paths}
    there = [path for path in FOLDER.rglob("*.ipynb") if path.parent.name != "capstone"]
    there += [*FOLDER.glob("solution/*.json"), FOLDER / "nbgrader" / "nbgrader_config.py"]
    committed = {path.relative_to(FOLDER): as_built(path) for path in there}
    command = "labkit course build --execute --output-dir notebooks/assignments"
    assert built == committed, f"run: {command}, then scripts/notebook_heads.py"


def test_every_committed_solution_says_that_all_its_answers_are_right():
    for name in WRITTEN:
        path = FOLDER / "solution" / masters()[name].with_suffix(".ipynb").name
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        checks = [cell for cell in cells if "check" in cell["metadata"].get("tags", [])]
        shown = ["".join(cell["outputs"][-1]["data"]["text/plain"]) for cell in checks]
        assert len(shown) == len(assignment(name).exercises)
        assert all(": right (" in text for text in shown), path.name
