"""The cache of converted models, through the real route: a small GGUF package, converted, cached, loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from itertools import product

import pytest
import torch

import labkit
from labkit.errors import CacheError, MissingPackageError, ModelError
from labkit.models import cache as model_cache
from labkit.models import gguf as gguf_models
from labkit.models.cache import DamagedCacheWarning


@pytest.fixture
def conversions(monkeypatch) -> list[str]:
    """Counts the conversions that really take place."""
    done, convert = [], gguf_models.convert_gguf

    def counted(gguf_file, folder, progress):
        done.append(gguf_file.name)
        return convert(gguf_file, folder, progress)

    monkeypatch.setattr(gguf_models, "convert_gguf", counted)
    return done


@pytest.fixture
def entry(small_card, own_cache, conversions):
    """The folder of a freshly converted model."""
    labkit.load("small", device="cpu")
    return own_cache / "models" / "small"


def logits(lm, ids=((3, 9, 27, 81, 243),)):
    with torch.no_grad():
        return lm.model(torch.tensor(ids)).logits


def test_the_second_load_converts_nothing_and_gives_the_same_model(small_card, conversions):
    first, second = labkit.load("small", device="cpu"), labkit.load("small", device="cpu")
    assert len(conversions) == 1
    assert torch.equal(logits(first), logits(second))


def test_the_loaded_model_computes_what_the_model_in_the_package_computes(small_card, small_gguf):
    _, original = small_gguf
    lm = labkit.load("small", device="cpu", dtype=torch.float32)
    with torch.no_grad():
        expected = original(torch.tensor([[3, 9, 27, 81, 243]])).logits
    torch.testing.assert_close(logits(lm), expected, rtol=1e-5, atol=1e-5)


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def remove(file):
    file.unlink()


def empty(file):
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        *product([truncate, flip_a_bit, remove, empty], ["model.safetensors", "config.json", "tokenizer.json"]),
        *product([truncate, remove, empty], ["manifest.json"]),
    ],
)
def test_a_damaged_file_is_named_and_the_model_built_anew(entry, conversions, damage, file):
    good = logits(labkit.load("small", device="cpu"))
    damage(entry / file)
    with pytest.warns(DamagedCacheWarning, match=f"small.*{file}.*built anew"):
        lm = labkit.load("small", device="cpu")
    assert len(conversions) == 2
    assert torch.equal(logits(lm), good)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        labkit.load("small", device="cpu")


def test_another_release_of_the_weights_is_converted_anew(small_card, entry, conversions, monkeypatch):
    from dataclasses import replace

    from labkit.models.registry import REGISTRY

    renamed = replace(small_card.package, distribution="small-gguf-2")
    monkeypatch.setitem(REGISTRY, "small", replace(small_card, package=renamed))
    with pytest.warns(DamagedCacheWarning, match="another release"):
        labkit.load("small", device="cpu")
    assert len(conversions) == 2


def test_a_conversion_that_breaks_off_leaves_nothing_and_the_next_one_works(small_card, own_cache, monkeypatch):
    convert = gguf_models.convert_gguf

    def breaks_off(gguf_file, folder, progress):
        convert(gguf_file, folder, progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_models, "convert_gguf", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        labkit.load("small", device="cpu")
    assert [path for path in (own_cache / "models").iterdir() if path.is_dir()] == []
    monkeypatch.setattr(gguf_models, "convert_gguf", convert)
    assert labkit.load("small", device="cpu").name == "small"


def test_a_full_disk_is_an_error_that_names_the_cache_and_leaves_nothing(small_card, own_cache, monkeypatch):
    def disk_full(gguf_file, folder, progress):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_models, "convert_gguf", disk_full)
    with pytest.raises(CacheError, match="No space left.*LABKIT_CACHE"):
        labkit.load("small", device="cpu")
    assert [path for path in (own_cache / "models").iterdir() if path.is_dir()] == []


def test_too_little_space_is_noticed_before_converting(own_cache, tmp_path):
    with pytest.raises(CacheError, match=r"big needs 1,?000,?000\.0 GB.*LABKIT_CACHE"):
        model_cache.obtain("big", {}, lambda folder: pytest.fail("it was built"), bytes_needed=10**15)


def test_a_cache_that_cannot_be_written_says_which_variable_to_set(small_card, tmp_path, monkeypatch):
    (tmp_path / "a_file").write_text("")
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "a_file"))
    with pytest.raises(CacheError, match="LABKIT_CACHE"):
        labkit.load("small", device="cpu")


def test_a_package_with_altered_weights_is_refused_and_nothing_is_cached(small_card, own_cache, tmp_path, monkeypatch):
    from dataclasses import replace

    from labkit.models.registry import REGISTRY

    wrong = replace(small_card.package, sha256="0" * 64)
    monkeypatch.setitem(REGISTRY, "small", replace(small_card, package=wrong))
    with pytest.raises(ModelError, match="small-gguf are damaged.*pip install small-gguf"):
        labkit.load("small", device="cpu")
    assert model_cache.entries() == []


def test_a_converted_model_still_loads_after_its_package_is_gone(entry, small_gguf, monkeypatch):
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(small_gguf[0].parent)])
    sys.path_importer_cache.clear()
    assert labkit.load("small", device="cpu").name == "small"


def test_without_package_or_cached_copy_the_error_holds_the_pip_command(small_card, small_gguf, monkeypatch):
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(small_gguf[0].parent)])
    with pytest.raises(MissingPackageError, match="pip install small-gguf"):
        labkit.load("small", device="cpu")


def test_a_gguf_in_parts_is_joined_in_order(small_card, small_gguf, own_cache, tmp_path, monkeypatch):
    from dataclasses import replace

    from labkit.models.registry import REGISTRY

    whole = (small_gguf[0] / "small.gguf").read_bytes()
    for i, part in enumerate((whole[:1000], whole[1000:])):
        package = tmp_path / f"small_part{i}"
        package.mkdir()
        (package / "piece").write_bytes(part)
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = replace(small_card.package, parts=(("small_part0", "piece"), ("small_part1", "piece")))
    monkeypatch.setitem(REGISTRY, "small", replace(small_card, package=parts))
    assert torch.isfinite(logits(labkit.load("small", device="cpu"))).all()
    assert not list((own_cache / "models").rglob("*.gguf"))


_LOADER = """
    import sys, time, pathlib
    import torch, labkit
    from labkit import gguf_models
    from labkit.models.registry import REGISTRY
    from tests.model_fixtures import card_of_small_gguf

    package, log, start = map(pathlib.Path, sys.argv[1:4])
    REGISTRY["small"] = card_of_small_gguf(package)
    convert = gguf_models.convert_gguf

    def slow(*arguments):
        with open(log, "a") as out:
            out.write("converted\\n")
        time.sleep(1)  # so that the other process surely arrives meanwhile
        return convert(*arguments)

    gguf_models.convert_gguf = slow
    print("ready", flush=True)
    while not start.exists():
        time.sleep(0.01)
    lm = labkit.load("small", device="cpu")
    print(lm.model(torch.tensor([[3, 9, 27]])).logits.sum().item())
"""


def _two_loaders(small_gguf, cache, tmp_path):
    folder, log, start = small_gguf[0], tmp_path / "log", tmp_path / "start"
    path = os.pathsep.join([os.getcwd(), str(folder.parent)])
    environment = {**os.environ, "LABKIT_CACHE": str(cache), "PYTHONPATH": path}
    command = [sys.executable, "-c", textwrap.dedent(_LOADER), str(folder), str(log), str(start)]
    return [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ], log, start  # fmt: skip


@pytest.mark.end_to_end
def test_two_processes_loading_at_once_convert_once_and_get_the_same_model(small_gguf, own_cache, tmp_path):
    processes, log, start = _two_loaders(small_gguf, own_cache, tmp_path)
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    start.touch()
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert log.read_text() == "converted\n"
    assert outputs[0][0] == outputs[1][0] != ""


@pytest.mark.end_to_end
def test_a_process_killed_while_converting_leaves_a_cache_that_works(small_gguf, small_card, own_cache, tmp_path):
    import time

    processes, log, start = _two_loaders(small_gguf, own_cache, tmp_path)
    processes[1].kill()
    processes[1].communicate()
    start.touch()
    while not log.exists() and processes[0].poll() is None:
        time.sleep(0.01)
    processes[0].kill()
    processes[0].communicate()
    assert labkit.load("small", device="cpu").name == "small"
    assert [path.name for path in (own_cache / "models").iterdir() if path.is_dir()] == ["small"]


def test_entries_tell_ready_from_damaged(entry):
    assert [(each.name, each.state) for each in model_cache.entries()] == [("small", "ready")]
    flip_a_bit(entry / "model.safetensors")
    (found,) = model_cache.entries()
    assert found.state == "damaged"
    assert "model.safetensors" in found.problem


def test_clear_deletes_what_it_is_told_and_says_how_much(entry):
    size = sum(file.stat().st_size for file in entry.iterdir())
    assert model_cache.clear("another") == []
    assert entry.is_dir()
    (gone,) = model_cache.clear()
    assert (gone.name, gone.bytes) == ("small", size)
    assert not entry.exists()


def test_cached_files_can_be_read_by_others_who_share_the_cache(entry):
    if os.name != "posix":
        pytest.skip("file modes are a POSIX matter")
    assert all(file.stat().st_mode & 0o044 for file in entry.iterdir())


def test_only_a_terminal_sees_a_progress_bar_and_the_licence_is_shown_at_conversion(small_card, capfd):
    labkit.load("small", device="cpu")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["labkit: converting small, once. Its licence: Apache-2.0"]
    labkit.load("small", device="cpu")
    assert capfd.readouterr() == ("", "")
