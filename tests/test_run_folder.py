"""A run's folder: whole files or none, nothing overwritten unasked, and only checkpoints that are what was saved."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from labkit import run_folder
from labkit.errors import TrainingError
from labkit.files import sha256
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


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder.open(tmp_path / "run", CONFIG, resume=False)


def checkpoint(run: RunFolder, step: int, sealed: bool = True):
    folder = run.checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(f"weights of step {step}".encode())
    (folder / "optimizer.pt").write_bytes(b"moments")
    if sealed:
        run.seal(step, seconds=1.5, tokens=64 * step)
    return folder


def test_a_new_run_holds_its_configuration_and_nothing_else(run):
    assert list(contents(run.path)) == ["config.json"]
    assert read_json(run.path / "config.json") == CONFIG
    assert run.metrics is None
    assert run.latest_checkpoint() is None


def test_resuming_what_was_never_begun_begins_it(tmp_path):
    assert read_json(RunFolder.open(tmp_path / "run", CONFIG, resume=True).path / "config.json") == CONFIG


def test_to_check_a_run_writes_nothing(tmp_path):
    RunFolder.check(tmp_path / "run", CONFIG, resume=False)
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_is_the_same_run(run):
    run.write_json("metrics.json", {"seconds": 3.5})
    before = contents(run.path)
    again = RunFolder.open(run.path, CONFIG, resume=True)
    assert again.path == run.path
    assert again.metrics == {"seconds": 3.5}
    assert contents(run.path) == before


def test_a_configuration_is_compared_as_json_reads_it_back(tmp_path):
    config = {"path": tmp_path, "sizes": (1, 2), "shares": {0.5: None}}
    RunFolder.open(tmp_path / "run", config, resume=False)
    again = RunFolder.open(tmp_path / "run", config, resume=True)
    assert read_json(again.path / "config.json") == {"path": str(tmp_path), "sizes": [1, 2], "shares": {"0.5": None}}
    with pytest.raises(TrainingError, match="sizes was .1, 2., now .1, 3."):
        RunFolder.open(tmp_path / "run", config | {"sizes": (1, 3)}, resume=True)


def test_what_changes_only_the_cost_may_change_and_is_written_down(tmp_path):
    config = CONFIG | {"plan": {"gradient_checkpointing": False, "seed": 0}}
    RunFolder.open(tmp_path / "run", config, resume=False)
    cheaper = config | {"plan": {"gradient_checkpointing": True, "seed": 0}}
    again = RunFolder.open(tmp_path / "run", cheaper, resume=True)
    assert read_json(again.path / "config.json") == cheaper
    with pytest.raises(TrainingError, match=r"another configuration: plan\.seed was 0, now 1$"):
        RunFolder.open(tmp_path / "run", config | {"plan": {"gradient_checkpointing": False, "seed": 1}}, resume=True)


def refused(run, config, resume) -> str:
    """The error; nothing in the folder has changed."""
    before = contents(run.path)
    for act in (RunFolder.open, RunFolder.check):
        with pytest.raises(TrainingError) as error:
            act(run.path, config, resume=resume)
        assert contents(run.path) == before
    return str(error.value)


def test_a_run_in_use_is_refused_without_resume_and_says_how_to_go_on(run):
    checkpoint(run, 10)
    checkpoint(run, 20, sealed=False)
    (run.path / ".writing-model-abc").mkdir()
    assert "holds a run already: --resume" in refused(run, CONFIG, resume=False)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"settings": {"max_steps": 30, "dtype": "float32"}}, "settings.max_steps was 20, now 30"),
        ({"texts": {"a.txt": "99ff"}}, "texts.a.txt was '12ab', now '99ff'"),
        ({"texts": {"b.txt": "12ab"}}, "texts.a.txt was '12ab', now None; texts.b.txt was None, now '12ab'"),
        ({"texts": {}}, "texts was None, now {}"),
        ({"command": "train lm"}, "command was 'pretrain', now 'train lm'"),
        ({"repeats": 0.5}, "repeats was None, now 0.5"),
    ],
)
def test_another_configuration_is_refused_and_every_difference_named(run, change, difference):
    message = refused(run, CONFIG | change, resume=True)
    assert "begun with another configuration" in message
    assert difference in message
    assert "dtype" not in message  # what did not change is not in the way


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(TrainingError, match="not empty and holds no run of labkit"):
            RunFolder.open(tmp_path, CONFIG, resume=resume)
    assert list(contents(tmp_path)) == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(NotADirectoryError, match="run"):
        RunFolder.check(tmp_path / "run", CONFIG, resume=False)


def test_a_damaged_configuration_is_named(run):
    os.truncate(run.path / "config.json", 7)
    assert "config.json is damaged" in refused(run, CONFIG, resume=True)


def test_a_run_killed_while_it_wrote_its_first_file_begins_anew(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".writing-config.json-x1").write_text('{"comm')
    run = RunFolder.open(tmp_path / "run", CONFIG, resume=False)
    assert list(contents(run.path)) == ["config.json"]


def test_what_a_killed_run_left_half_written_is_gone_after_a_resume(run):
    left = run.path / ".writing-model-x1"
    (left / "new").mkdir(parents=True)
    (left / "new" / "model.safetensors").write_bytes(b"half")
    RunFolder.open(run.path, CONFIG, resume=True)
    assert list(contents(run.path)) == ["config.json"]


# -- one command at a time ---------------------------------------------------------------------------------------------


def test_a_second_command_at_the_same_run_is_refused_and_touches_nothing(tmp_path):
    where = tmp_path / "run"
    with RunFolder.alone(where, CONFIG, resume=False) as run:
        checkpoint(run, 10, sealed=False)  # being written
        (run.path / ".writing-model-x1").mkdir()
        before = contents(where)
        for resume, complaint in ((True, "another process is at work in .*run; wait for it"), (False, "holds a run")):
            with pytest.raises(TrainingError, match=complaint), RunFolder.alone(where, CONFIG, resume=resume):
                raise AssertionError("let in")
        assert contents(where) == before
    with RunFolder.alone(where, CONFIG, resume=True) as run:  # the first one is done
        assert not (run.path / ".writing-model-x1").exists()
    assert contents(where).keys() == {"config.json", *(name for name in before if name.startswith("checkpoints"))}


def test_a_run_that_failed_or_was_killed_is_held_no_longer(tmp_path):
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
                RunFolder.alone(tmp_path / "run", CONFIG, resume=True).__enter__()
        finally:
            other.kill()
    with RunFolder.alone(tmp_path / "run", CONFIG, resume=True) as run:
        assert read_json(run.path / "config.json") == CONFIG


def test_a_file_system_without_locks_lets_a_run_be_made(tmp_path, monkeypatch):
    def acquire(*args, **kwargs):
        raise NotImplementedError("no flock")

    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    with RunFolder.alone(tmp_path / "run", CONFIG, resume=False) as run:
        assert contents(run.path).keys() == {"config.json"}


def fails(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_json_is_written_whole_or_not_at_all(run, full_disk):
    run.write_json("metrics.json", {"seconds": 1})
    before = contents(run.path)
    for name in ("metrics.json", "trainer_state.json"):
        with full_disk(after=1000), pytest.raises(TrainingError, match=f"{name} could not be written: .*--resume"):
            run.write_json(name, {"seconds": "2" * 2000})
    assert contents(run.path) == before


def test_what_json_cannot_hold_leaves_the_old_file(run):
    run.write_json("metrics.json", {"seconds": 1})
    with pytest.raises(TypeError):
        run.write_json("metrics.json", {(1, 2): "a key that is no string"})
    assert run.metrics == {"seconds": 1}


@pytest.mark.skipif(os.name != "posix", reason="file modes are a POSIX matter")
def test_the_files_of_a_run_can_be_read_by_others(run):
    run.write_folder("model", lambda folder: (folder / "weights").write_bytes(b"w"))
    assert all((run.path / name).stat().st_mode & 0o044 for name in ("config.json", "model/weights"))


def test_the_latest_checkpoint_is_the_newest_by_step_with_the_facts_of_its_seal(run):
    for step in (5, 100, 20):  # "checkpoint-5" comes last in the alphabet, 20 last in time
        checkpoint(run, step)
    folder, seal = run.latest_checkpoint()
    assert folder.name == "checkpoint-100"
    assert (seal["step"], seal["seconds"], seal["tokens"]) == (100, 1.5, 6400)
    assert seal["files"] == {
        "model.safetensors": hashlib.sha256(b"weights of step 100").hexdigest(),
        "optimizer.pt": hashlib.sha256(b"moments").hexdigest(),
    }


def test_a_checkpoint_without_a_seal_is_passed_over_and_removed(run):
    checkpoint(run, 10)
    checkpoint(run, 20, sealed=False)
    assert run.latest_checkpoint()[0].name == "checkpoint-10"
    assert [path.name for path in run.checkpoints.iterdir()] == ["checkpoint-10"]


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


def remove(file):
    file.unlink()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, remove])
def test_an_altered_checkpoint_is_refused_and_named_and_nothing_is_touched(run, damage, file):
    checkpoint(run, 10)
    checkpoint(run, 20, sealed=False)
    newest = checkpoint(run, 30)
    damage(newest / file)
    before = contents(run.path)
    with pytest.raises(TrainingError, match=rf"checkpoint-30: {file} is not what was saved \(sha256 differs\)"):
        run.latest_checkpoint()
    assert contents(run.path) == before
    shutil.rmtree(newest)  # as the message says
    assert run.latest_checkpoint()[0].name == "checkpoint-10"


@pytest.mark.parametrize("content", ['{"step": 1', "[" * 10_000])
def test_a_damaged_seal_is_refused_and_named(run, content):
    (checkpoint(run, 10) / "sealed.json").write_text(content)
    with pytest.raises(TrainingError, match="sealed.json"):
        run.latest_checkpoint()


def test_the_newest_whole_checkpoints_are_kept_whatever_else_lies_there(run):
    for step in (90, 100, 110):
        checkpoint(run, step)
    checkpoint(run, 120, sealed=False)
    run.remove_checkpoints_but(2)
    assert {path.name for path in run.checkpoints.iterdir()} == {"checkpoint-100", "checkpoint-110", "checkpoint-120"}


def test_a_removal_that_is_killed_half_way_leaves_no_seal_on_what_is_left(run, monkeypatch):
    for step in (10, 20, 30):
        checkpoint(run, step)
    monkeypatch.setattr(run_folder.shutil, "rmtree", fails)
    with pytest.raises(OSError):
        run.remove_checkpoints_but(2)
    monkeypatch.undo()
    assert run.latest_checkpoint()[0].name == "checkpoint-30"
    assert {path.name for path in run.checkpoints.iterdir()} == {"checkpoint-20", "checkpoint-30"}


def test_sha256_is_that_of_the_content(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")  # FIPS 180-2, appendix B.1
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256(tmp_path / "abc") == digest


def test_no_name_in_a_run_is_one_that_windows_refuses(run, monkeypatch):
    names = {"config.json", "metrics.json", "trainer_state.json", "sealed.json"}
    replace = os.replace

    def noted(temporary, target):
        names.add(os.path.basename(temporary))
        replace(temporary, target)

    monkeypatch.setattr(os, "replace", noted)
    run.write_json("metrics.json", {})
    run.write_folder("model", lambda folder: names.update(folder.relative_to(run.path).parts))
    names.update(part for path in [checkpoint(run, 10)] for part in path.relative_to(run.path).parts)
    assert len(names) >= 8
    for name in names:
        assert not set(name) & set('<>:"/\\|?*') and name.isprintable(), name
        assert name[-1] not in ". ", name
        assert name.split(".")[0].upper() not in {"CON", "PRN", "AUX", "NUL", "COM1", "LPT1"}, name


def test_json_in_the_folder_is_plain_utf8_with_a_last_line_end(run):
    run.write_json("metrics.json", {"bits_per_byte": {"Ärger.txt": 2.5}})
    content = (run.path / "metrics.json").read_bytes()
    assert content.endswith(b"}\n") and b"\r" not in content
    assert json.loads(content.decode("utf-8"))["bits_per_byte"] == {"Ärger.txt": 2.5}


def test_processes_wait_for_one_another_as_long_as_an_evaluation_may_take(monkeypatch):
    import accelerate

    from labkit import run_folder

    asked = {}

    def opened(**options):
        asked.update(options)
        return accelerate.state.PartialState.__new__(accelerate.state.PartialState)

    monkeypatch.setattr(accelerate, "PartialState", opened)
    assert run_folder._processes() is not None
    assert asked["timeout"].total_seconds() >= 3600  # the default of NCCL is ten minutes
