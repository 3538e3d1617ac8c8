"""benchmarks/gpu/day.py: stages keep to the budget, a stopped one keeps its results, and a second day runs the rest."""

import json
import sys

import pytest

from benchmarks.gpu import day
from benchmarks.gpu.day import Stage

WRITES = "import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(float(sys.argv[2]))"


@pytest.fixture
def stage(tmp_path):
    """stage(name, takes, seconds): a program that writes one x into a file of its name, then takes its time."""

    def made(name, takes, seconds=30.0, processes=1):
        return Stage(name, seconds, ("-c", WRITES, str(tmp_path / name), str(takes)), processes)

    return made


def states(folder):
    return {name: state["state"] for name, state in json.loads((folder / "day.json").read_text()).items()}


def test_a_stage_is_stopped_at_its_limit_and_one_without_time_is_left_out(tmp_path, stage):
    broken = Stage("broken", 30.0, ("-c", "raise SystemExit(3)"))
    stages = [broken, stage("first", 0, processes=2), stage("long", 60, seconds=1.0), stage("late", 0)]
    day.run(stages, tmp_path / "day", budget=day.LEAST + 0.9)
    failed = "failed with exit code 3, see logs"
    assert states(tmp_path / "day") == {"broken": failed, "first": "done", "long": "stopped", "late": "left out"}
    assert (tmp_path / "first").read_text() == "xx" and (tmp_path / "long").read_text() == "x"
    assert not (tmp_path / "late").exists()


def test_a_second_day_runs_what_the_first_did_not_finish(tmp_path, stage):
    for budget, resume in ((0.0, False), (60.0, True), (60.0, True)):
        day.run([stage("one", 0), stage("two", 0)], tmp_path / "day", budget, resume)
    assert states(tmp_path / "day") == {"one": "done", "two": "done"}
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text() == "x"


def test_what_a_program_leaves_out_is_recorded_and_run_by_the_next_day(tmp_path):
    command = ("-c", "print('left out: seed 2'); print('done')")
    states = day.run([Stage("study", 30.0, command)], tmp_path / "day", 60.0)
    assert states["study"]["state"] == "done" and states["study"]["left_out"] == ["seed 2"]
    whole = Stage("study", 30.0, ("-c", "assert float('{within}') <= 30"))
    assert day.run([whole], tmp_path / "day", 60.0, resume=True)["study"]["left_out"] == []


@pytest.mark.slow
def test_all_stages_run_on_a_cpu_with_tiny_models(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["day.py", "--device", "cpu", "--budget", "9", "--output-dir", str(tmp_path / "d")]
    )
    assert day.main() == 0
    assert set(states(tmp_path / "d").values()) == {"done"}
    names = ("sanity", "cost_2b", "cost_9b", "packing", "fusion_latency", "future_speed")
    written = {name: json.loads((tmp_path / "d" / f"{name}.json").read_text()) for name in names}
    assert all("machine" in result for result in written.values())
    assert all((tmp_path / "d" / study / "report.csv").exists() for study in ("mask_effect", "future_attention"))
