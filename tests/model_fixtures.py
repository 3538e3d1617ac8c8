"""Fixtures that other tests share: real and tiny models, a cache of one's own, a small GGUF package, no network.

Registered as a plugin in conftest.py (`pytest_plugins = ["tests.model_fixtures"]`).
"""

from __future__ import annotations

import hashlib
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # imported where it is used: a plugin that loads labkit would forestall the run-time type checks
    from labkit import Loaded
    from labkit.models.registry import ModelCard


@pytest.fixture(scope="session")
def gemma() -> Loaded:
    """The real Gemma 3 270M in bfloat16 on the CPU, one for the whole session: leave it as you found it."""
    return load_or_skip("gemma3-270m")


@pytest.fixture(scope="session")
def smollm() -> Loaded:
    """The real SmolLM2-135M in bfloat16 on the CPU, one for the whole session: leave it as you found it."""
    return load_or_skip("smollm2-135m")


@pytest.fixture
def tiny():
    """Factory: tiny("tiny-gemma3", "eager") is a fresh model, yours to change."""

    import labkit

    def load(name: str, attn: str | None = None) -> Loaded:
        return labkit.load(name, attn=attn, device="cpu")

    return load


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of converted models, for this test only."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory) -> tuple[Path, object]:
    """A package `small_gguf` holding small.gguf, a llama of random weights, and the model it was written from."""
    pytest.importorskip("gguf")
    from tests.gguf_files import random_llama, write_llama

    folder = tmp_path_factory.mktemp("site") / "small_gguf"
    folder.mkdir()
    model = random_llama()
    write_llama(folder / "small.gguf", model)
    return folder, model


@pytest.fixture
def small_card(small_gguf, own_cache, monkeypatch) -> ModelCard:
    """The small GGUF model, registered as "small", with an empty cache: the whole embedded route in a second."""
    from labkit.models.registry import REGISTRY

    folder, _ = small_gguf
    monkeypatch.syspath_prepend(str(folder.parent))
    card = card_of_small_gguf(folder)
    monkeypatch.setitem(REGISTRY, "small", card)
    return card


@pytest.fixture
def dead_network(tmp_path, monkeypatch) -> list[str]:
    """A machine without a network that does not know it: every connection fails, and is noted in the list."""
    import huggingface_hub.constants  # a name of huggingface_hub only once it has been imported

    attempts: list[str] = []

    def refuse(*args, **_):
        attempts.append(repr(args))
        raise OSError("there is no network in this test")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty hub cache"))

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    return attempts


def load_or_skip(name: str, **wanted: str) -> Loaded:
    """The named model on the CPU; the test is skipped, saying how to get it, where its package is not installed."""
    import labkit

    try:
        return labkit.load(name, device="cpu", **wanted)
    except labkit.errors.ModelError as error:
        if error.kind != "not installed":
            raise
        pytest.skip(str(error))


def card_of_small_gguf(folder: Path) -> ModelCard:
    """The registry entry of the package in `folder`."""
    from labkit.models.registry import REGISTRY, Package

    digest = hashlib.sha256((folder / "small.gguf").read_bytes()).hexdigest()
    package = Package(
        distribution="small-gguf",
        pip_command="pip install small-gguf",
        files=(("small_gguf", "small.gguf"),),
        sha256=digest,
        quantisation="F32",
        original="nobody/small",
    )
    return replace(REGISTRY["smollm2-135m"], name="small", parameters=100_000, layers=2, origin=package)
