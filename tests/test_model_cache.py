"""Weights in packages: a small GGUF file, converted, cached, loaded, damaged, built again."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from dataclasses import replace

import pytest
import torch

import labkit
from labkit.errors import ModelError
from labkit.models import cache, gguf
from labkit.models.registry import REGISTRY


@pytest.fixture
def conversions(monkeypatch) -> list[str]:
    """The names of the files that were converted."""
    done, convert = [], gguf.convert_gguf

    def counted(gguf_file, folder):
        done.append(gguf_file.name)
        convert(gguf_file, folder)

    monkeypatch.setattr(gguf, "convert_gguf", counted)
    return done


@pytest.fixture
def entry(small_card, own_cache, conversions):
    """The folder of a freshly converted model."""
    labkit.load("small", device="cpu")
    return own_cache / "models" / "small"


def logits(model, ids=((3, 9, 27, 81, 243),)):
    with torch.no_grad():
        return model(torch.tensor(ids)).logits


def load(**options):
    return labkit.load("small", device="cpu", **options).model


def registered(monkeypatch, card, **changes):
    monkeypatch.setitem(REGISTRY, "small", replace(card, origin=replace(card.origin, **changes)))


def cached(own_cache):
    return [path.name for path in (own_cache / "models").iterdir() if path.is_dir()]


def test_the_model_is_that_of_the_package_and_is_converted_once(small_card, small_gguf, own_cache, conversions, capfd):
    first, second = (logits(load(dtype=torch.float32)) for _ in range(2))
    assert len(conversions) == 1 and torch.equal(first, second)
    torch.testing.assert_close(first, logits(small_gguf[1]), rtol=1e-5, atol=1e-5)
    out, err = capfd.readouterr()
    assert out == "" and "Its licence: Apache-2.0" in err and not list(own_cache.rglob("*.gguf"))


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (lambda file: os.truncate(file, file.stat().st_size // 2), "model.safetensors"),
        (flip_a_bit, "config.json"),
        (os.unlink, "tokenizer.json"),
        (lambda file: file.write_bytes(b""), "manifest.json"),
    ],
)
def test_a_damaged_file_is_named_and_the_model_built_again(entry, conversions, damage, file):
    good = logits(load())
    damage(entry / file)
    (listed,) = cache.entries()
    assert file in listed["problem"]
    with pytest.warns(UserWarning, match=f"small is built again: .*{file}"):
        assert torch.equal(logits(load()), good)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load()
    assert len(conversions) == 2 and [listed["problem"] for listed in cache.entries()] == [None]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (OSError(28, "No space left on device"), ModelError, "No space left.*LABKIT_CACHE"),
    ],
)
def test_a_conversion_that_fails_leaves_nothing_and_the_next_one_works(
    small_card, own_cache, monkeypatch, error, kind, message
):
    def fails(gguf_file, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch, pytest.raises(kind, match=message):
        patch.setattr(gguf, "convert_gguf", fails)
        load()
    assert not cached(own_cache)
    load()


def test_another_release_is_converted_again_and_refusals(small_card, entry, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="another release"):
        registered(patch, small_card, distribution="small-gguf-2")
        load()
    cache.clear()
    with monkeypatch.context() as patch, pytest.raises(ModelError, match="are damaged.*pip install small-gguf"):
        registered(patch, small_card, sha256="0" * 64)
        load()
    assert cache.entries() == []
    with monkeypatch.context() as patch, pytest.raises(ModelError, match="LABKIT_CACHE"):
        (tmp_path / "a_file").write_text("")
        patch.setenv("LABKIT_CACHE", str(tmp_path / "a_file"))
        load()


def test_without_its_package_only_a_converted_model_loads(small_card, monkeypatch):
    with monkeypatch.context() as patch:
        registered(patch, small_card, files=(("never_installed", "small.gguf"),))
        with pytest.raises(ModelError, match="not installed; run: pip install small-gguf") as refusal:
            load()
        assert refusal.value.kind == "not installed"
    load()
    registered(monkeypatch, small_card, files=(("never_installed", "small.gguf"),))
    load()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes inherit the registered model")
@pytest.mark.parametrize("killed", [False, True])
def test_two_processes_convert_once_and_one_that_is_killed_leaves_a_cache_that_works(
    small_card, own_cache, tmp_path, monkeypatch, killed
):
    log, convert = tmp_path / "log", gguf.convert_gguf

    def slow(gguf_file, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        with log.open("a") as file:
            file.write("converted\n")
        time.sleep(1)  # so that the other process certainly arrives in the meantime
        convert(gguf_file, folder)

    def load_in_one_thread():
        torch.set_num_threads(1)  # threads of the parent do not exist here
        load()

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert_gguf", slow)
        processes = [multiprocessing.get_context("fork").Process(target=load_in_one_thread) for _ in range(2)]
        for process in processes:
            process.start()
        while killed and not log.exists() and any(process.is_alive() for process in processes):
            time.sleep(0.01)
        for process in processes:
            if killed:
                process.kill()
            process.join(timeout=60)
    if not killed:
        assert [process.exitcode for process in processes] == [0, 0] and log.read_text() == "converted\n"
    assert labkit.load("small", device="cpu").name == "small"
    assert cached(own_cache) == ["small"]


@pytest.mark.skipif(os.name != "posix", reason="file modes exist on POSIX only")
def test_cached_files_can_be_read_by_others_and_clear_deletes_the_named_model_only(entry):
    assert all(file.stat().st_mode & 0o044 for file in entry.iterdir())
    size = sum(file.stat().st_size for file in entry.iterdir())
    assert cache.clear("another") == [] and entry.is_dir()
    (deleted,) = cache.clear()
    assert (deleted["name"], deleted["bytes"]) == ("small", size) and not entry.exists()
