"""A run's folder: whole files or none, nothing overwritten unasked, one command at a time, only whole checkpoints."""

from __future__ import annotations

import hashlib
import os

import pytest

from labkit.errors import TrainingError
from labkit.run_folder import RunFolder, read_json

CONFIG = {"command": "pretrain", "settings": {"max_steps": 20, "tf32": False}, "texts": {"a.txt": "12ab"}}


def contents(folder) -> dict[str, str]:
    """Every file below `folder` with its sha256, and every folder; without the lock."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
        if path.name != ".lock"
    }


def begin(folder, config=CONFIG, resume=False) -> RunFolder:
    with RunFolder.alone(folder, config, resume=resume) as run:
        return run


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return begin(tmp_path / "run")


def checkpoint(run: RunFolder, step: int, state: str):
    folder = run.checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(state)


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_run_has_its_configuration_and_nothing_else(tmp_path, resume):
    RunFolder.check(tmp_path / "run", CONFIG, resume=resume)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".writing-x1").write_text('{"comm')  # a command was killed while it wrote its first file
    run = begin(tmp_path / "run", resume=resume)
    assert list(contents(run.path)) == ["config.json"] and read_json(run.path / "config.json") == CONFIG
    assert run.metrics is None


def test_a_resumed_run_keeps_its_files_except_half_written_ones(run):
    run.write_json("metrics.json", {"seconds": 3.5})
    checkpoint(run, 5, '{"global_step": 5}')
    before = contents(run.path)
    checkpoint(run, 10, '{"global_step": 10, "log_hist')
    (run.path / ".writing-x1" / "new").mkdir(parents=True)
    assert begin(run.path, resume=True).metrics == {"seconds": 3.5}
    assert contents(run.path) == before


def test_a_configuration_is_compared_as_json_except_for_what_changes_no_result(tmp_path):
    config = {"path": tmp_path, "sizes": (1, 2), "shares": {0.5: None}, "settings": {"gradient_checkpointing": False}}
    begin(tmp_path / "run", config)
    cheaper = config | {"settings": {"gradient_checkpointing": True}}
    begin(tmp_path / "run", cheaper, resume=True)
    assert read_json(tmp_path / "run" / "config.json")["settings"] == cheaper["settings"]


def foreign(folder):
    (folder / "config.json").unlink()
    (folder / "thesis.tex").write_text("years of work")


@pytest.mark.parametrize(
    ("prepare", "change", "resume", "complaint"),
    [
        (None, {}, False, "contains a run already: .*--resume"),
        (foreign, {}, True, "contains no run"),
        (lambda folder: os.truncate(folder / "config.json", 7), {}, True, "config.json is damaged"),
        (None, {"settings": {"max_steps": 30}}, True, "settings.max_steps was 20, now 30;"),
        (None, {"texts": {"b.txt": "12ab"}}, True, "a.txt was '12ab', now None; texts.b.txt was None, now '12ab'"),
    ],
)
def test_a_folder_that_is_not_this_run_is_refused_and_not_touched(run, prepare, change, resume, complaint):
    checkpoint(run, 20, state="")
    (run.path / ".writing-x1").mkdir()
    if prepare:
        prepare(run.path)
    before = contents(run.path)
    for act in (RunFolder.check, begin):
        with pytest.raises(TrainingError, match=complaint):
            act(run.path, CONFIG | change, resume=resume)
        assert contents(run.path) == before


def test_a_second_command_is_refused_and_touches_nothing_while_the_first_one_works(run):
    """The lock belongs to the open file, so a second command in this process is refused like one in another."""
    with RunFolder.alone(run.path, CONFIG, resume=True):
        checkpoint(run, 10, state="")  # being written
        before = contents(run.path)
        with pytest.raises(TrainingError, match="another process works in .*run; wait"):
            begin(run.path, resume=True)
        assert contents(run.path) == before
    assert "checkpoints/checkpoint-10" not in contents(begin(run.path, resume=True).path)


def test_json_is_written_whole_or_not_at_all(run, full_disk):
    run.write_json("metrics.json", {"Ärger.txt": 1})
    before = contents(run.path)
    for name in ("metrics.json", "trainer_state.json"):
        with full_disk(after=1000), pytest.raises(TrainingError, match=f"{name} could not be written: .*--resume"):
            run.write_json(name, {"seconds": "2" * 2000})
    assert contents(run.path) == before and run.metrics == {"Ärger.txt": 1}
