"""benchmarks/study/runner.py: what is missing is run, a study continues and may grow, and another one is refused."""

import json
from dataclasses import dataclass
from pathlib import Path

import filelock
import pytest
import torch

from benchmarks.study import runner
from labkit.errors import TrainingError


@dataclass(frozen=True)
class Run:
    name: str

    @property
    def folder(self):
        return Path("runs", self.name)

    def __str__(self):
        return f"run {self.name}"


RUNS = [Run(name) for name in "abcd"]


@pytest.fixture
def study(tmp_path):
    """A function that runs the study; `errors`: what each run raises, once, and otherwise it is done."""
    folder = runner.begun(tmp_path / "study", {}, ())

    def run_all(**errors):
        order = []

        def train(run):
            order.append(run.name)
            if run.name in errors:
                raise errors.pop(run.name)
            runner.write_json(folder / run.folder / "metrics.json", {})
            return {}

        try:
            return order, runner.run_all(RUNS, train, folder, score=lambda run, metrics: "")
        except KeyboardInterrupt:
            return order, None

    run_all.folder = folder
    return run_all


def test_a_study_that_is_killed_continues_with_the_run_that_was_not_done(study):
    assert study(c=KeyboardInterrupt()) == (list("abc"), None)
    assert study() == (list("cd"), {})
    assert study() == ([], {})


def test_a_run_that_fails_is_reported_and_the_others_go_on(study):
    order, failures = study(a=TrainingError("it went wrong"), c=torch.OutOfMemoryError("CUDA out of memory"))
    assert order == list("abcd") and list(failures) == ["run a", "run c"]
    assert failures["run a"] == "it went wrong" and "out of memory" in failures["run c"]
    assert study() == (list("ac"), {})
    (study.folder / "runs" / "b" / "metrics.json").unlink()
    with pytest.raises(RuntimeError, match="a fault of the program"):
        study(b=RuntimeError("a fault of the program"))


def test_a_run_that_waits_for_another_process_comes_last(study, monkeypatch):
    held = runner.alone(RUNS[1].folder, study.folder)
    held.acquire()
    monkeypatch.setattr(runner.time, "sleep", lambda seconds: held.release())
    assert study(a=filelock.Timeout("a part that it needs")) == (list("acdab"), {})


SETTINGS = {"model": "m", "steps": 4, "seeds": [0, 1], "data": {"a": {"sha256": "1"}}}


def test_a_study_may_grow_and_keeps_what_it_had(tmp_path):
    for more in ({"seeds": [2, 0]}, {"seeds": [0], "data": {"b": {"sha256": "2"}}}):
        folder = runner.begun(tmp_path / "s", SETTINGS, ("seeds", "data"))
        runner.begun(folder, SETTINGS | more, ("seeds", "data"))
    data = {"a": {"sha256": "1"}, "b": {"sha256": "2"}}
    assert runner.read_study(folder) == SETTINGS | {"seeds": [0, 1, 2], "data": data}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 5}, "steps was 4, now 5"),
        ({"seeds": [0, 1, 2]}, "seeds was"),  # not among those that may grow here
        ({"data": {"a": {"sha256": "other"}}}, "data a was"),
    ],
)
def test_another_study_in_the_same_folder_is_refused(tmp_path, change, message):
    folder = runner.begun(tmp_path / "s", SETTINGS, ("data",))
    with pytest.raises(TrainingError, match=message):
        runner.begun(folder, SETTINGS | change, ("data",))
    assert json.loads((folder / "study.json").read_text()) == SETTINGS


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match="contains no study"):
        runner.begun(tmp_path, SETTINGS, ())
    with pytest.raises(TrainingError, match="contains no study"):
        runner.read_study(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_that_would_end_too_late_is_left_out(study):
    lines = []
    done = {"seconds": 1e6}
    train = lambda run: runner.write_json(study.folder / run.folder / "metrics.json", done) or done  # noqa: E731
    until = runner.time.perf_counter() + 1000
    runner.run_all(RUNS, train, study.folder, score=lambda run, metrics: "", until=until, log=lines.append)
    assert [line for line in lines if line.startswith("left out")] == [f"left out: {run}" for run in RUNS[1:]]
