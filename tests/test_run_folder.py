"""A run's folder: whole files or none, nothing overwritten unasked, one command at a time, only whole checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from labkit.errors import TrainingError
from labkit.run_folder import RunFolder, read_json

CONFIG = {"command": "pretrain", "settings": {"max_steps": 20, "dtype": "float32"}, "texts": {"a.txt": "12ab"}}


def contents(folder) -> dict[str, str]:
    """Every file below `folder` with its sha256, and every folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


def begin(folder, config=CONFIG, resume=False) -> RunFolder:
    with RunFolder.alone(folder, config, resume=resume) as run:
        return run


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return begin(tmp_path / "run")


def checkpoint(run: RunFolder, step: int, state: str | None = None):
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(f"weights of step {step}".encode())
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}) if state is None else state)
    return folder


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_run_has_its_configuration_and_nothing_else(tmp_path, resume):
    RunFolder.check(tmp_path / "run", CONFIG, resume=resume)
    assert not (tmp_path / "run").exists()
    run = begin(tmp_path / "run", resume=resume)
    assert list(contents(run.path)) == ["config.json"] and read_json(run.path / "config.json") == CONFIG
    assert run.metrics is None and run.latest_checkpoint() is None


def test_a_resumed_run_keeps_its_files_except_half_written_ones(run):
    run.write_json("metrics.json", {"seconds": 3.5})
    before = contents(run.path)
    left = run.path / ".writing-x1" / "new"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    (run.path / ".writing-x2").write_text('{"sec')
    assert begin(run.path, resume=True).metrics == {"seconds": 3.5}
    assert contents(run.path) == before


def test_a_run_killed_while_it_wrote_its_first_file_begins_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".writing-x1").write_text('{"comm')
    assert list(contents(begin(tmp_path / "run").path)) == ["config.json"]


def test_a_configuration_is_compared_as_json(tmp_path):
    config = {"path": tmp_path, "sizes": (1, 2), "shares": {0.5: None}}
    begin(tmp_path / "run", config)
    begin(tmp_path / "run", config, resume=True)
    with pytest.raises(TrainingError, match="sizes was .1, 2., now .1, 3."):
        begin(tmp_path / "run", config | {"sizes": (1, 3)}, resume=True)


def test_gradient_checkpointing_may_change_and_is_recorded(tmp_path):
    config, cheaper = ({"settings": {"gradient_checkpointing": value, "seed": 0}} for value in (False, True))
    begin(tmp_path / "run", config)
    begin(tmp_path / "run", cheaper, resume=True)
    assert read_json(tmp_path / "run" / "config.json") == cheaper


def foreign(folder):
    (folder / "config.json").unlink()
    (folder / "thesis.tex").write_text("years of work")


def damaged(folder):
    os.truncate(folder / "config.json", 7)


@pytest.mark.parametrize(
    ("prepare", "change", "resume", "complaint"),
    [
        (None, {}, False, "contains a run already: .*--resume"),
        (foreign, {}, False, "contains no run"),
        (foreign, {}, True, "contains no run"),
        (damaged, {}, True, "config.json is damaged"),
        (
            None,
            {"settings": {"max_steps": 30, "dtype": "float32"}},
            True,
            "settings: settings.max_steps was 20, now 30;",
        ),
        (None, {"texts": {"b.txt": "12ab"}}, True, "a.txt was '12ab', now None; texts.b.txt was None, now '12ab'"),
        (None, {"texts": {}}, True, "texts was None, now {}"),
        (None, {"repeats": 0.5}, True, "repeats was None, now 0.5"),
    ],
)
def test_a_folder_that_is_not_this_run_is_refused_and_not_touched(run, prepare, change, resume, complaint):
    checkpoint(run, 10)
    checkpoint(run, 20, state="")
    (run.path / ".writing-x1").mkdir()
    if prepare:
        prepare(run.path)
    before = contents(run.path)
    for act in (RunFolder.check, begin):
        with pytest.raises(TrainingError, match=complaint):
            act(run.path, CONFIG | change, resume=resume)
        assert contents(run.path) == before


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(NotADirectoryError, match="run"):
        RunFolder.check(tmp_path / "run", CONFIG, resume=False)


def test_a_second_command_is_refused_and_touches_nothing(tmp_path):
    folder = tmp_path / "run"
    with RunFolder.alone(folder, CONFIG, resume=False) as run:
        checkpoint(run, 10, state="")  # being written
        (folder / ".writing-x1").mkdir()
        before = contents(folder)
        for resume, complaint in ((True, "another process works in .*run; wait"), (False, "contains a run")):
            with pytest.raises(TrainingError, match=complaint):
                begin(folder, resume=resume)
        assert contents(folder) == before
    begin(folder, resume=True)


def test_a_run_that_failed_or_was_killed_does_not_block_its_folder(tmp_path):
    with pytest.raises(KeyboardInterrupt), RunFolder.alone(tmp_path / "run", CONFIG, resume=False):
        raise KeyboardInterrupt
    program = (
        "import json, sys, time\nfrom labkit.run_folder import RunFolder\n"
        "with RunFolder.alone(sys.argv[1], json.loads(sys.argv[2]), resume=True):\n"
        "    print('in', flush=True)\n    time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run"), json.dumps(CONFIG)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "in\n"
            with pytest.raises(TrainingError, match="another process"):
                begin(tmp_path / "run", resume=True)
        finally:
            other.kill()
    begin(tmp_path / "run", resume=True)


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def acquire(*args, **kwargs):
        raise NotImplementedError("no flock")

    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    assert list(contents(begin(tmp_path / "run").path)) == ["config.json"]


def test_json_is_written_whole_or_not_at_all(run, full_disk):
    run.write_json("metrics.json", {"Ärger.txt": 1})
    before = contents(run.path)
    for name in ("metrics.json", "trainer_state.json"):
        with full_disk(after=1000), pytest.raises(TrainingError, match=f"{name} could not be written: .*--resume"):
            run.write_json(name, {"seconds": "2" * 2000})
    with pytest.raises(TypeError):
        run.write_json("metrics.json", {(1, 2): "a key that is not a string"})
    assert contents(run.path) == before and run.metrics == {"Ärger.txt": 1}


@pytest.mark.skipif(os.name != "posix", reason="file modes are a POSIX matter")
def test_the_files_of_a_run_can_be_read_by_others(run):
    run.write_folder("model", lambda folder: (folder / "weights").write_bytes(b"w"))
    assert all((run.path / name).stat().st_mode & 0o044 for name in ("config.json", "model/weights"))


def test_the_latest_checkpoint_is_the_newest_whole_one_and_half_written_ones_are_removed(run):
    for step in (5, 100, 20):  # checkpoint-5 is the last by name, 20 the last in time
        checkpoint(run, step)
    (checkpoint(run, 110) / "trainer_state.json").unlink()
    checkpoint(run, 120, state='{"global_step": 120, "log_hist')
    assert run.latest_checkpoint() == (run.checkpoint(100), {"global_step": 100})
    assert {path.name for path in run.checkpoints.iterdir()} == {"checkpoint-5", "checkpoint-20", "checkpoint-100"}
