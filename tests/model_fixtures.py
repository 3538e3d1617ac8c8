"""Fixtures that other tests share, a plugin of conftest.py: real and tiny models, a small GGUF package, no network."""

from __future__ import annotations

import hashlib
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

    return lambda name, attn=None: labkit.load(name, attn=attn, device="cpu")


@pytest.fixture
def multimodal():
    """A tiny Gemma 3 that reads images too; its first text layer is local, with a window of 8 tokens."""
    import torch
    import transformers

    text = {
        "vocab_size": 400, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "initializer_range": 0.2,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    special = {"mm_tokens_per_image": 4, "image_token_index": 399}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **special)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


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
    whole = (folder / "small.gguf").read_bytes()
    for name, part in (("part0", whole[:1000]), ("part1", whole[1000:])):  # as Gemma's weights are in four packages
        (folder / name).write_bytes(part)
    return folder, model


@pytest.fixture
def small_card(small_gguf, own_cache, monkeypatch) -> ModelCard:
    """The small GGUF model, registered as "small", with an empty cache: the whole embedded route in a second."""
    from labkit.models.registry import REGISTRY, Package

    folder, _ = small_gguf
    monkeypatch.syspath_prepend(str(folder.parent))
    package = Package(
        distribution="small-gguf", pip_command="pip install small-gguf", original="nobody/small", quantisation="F32",
        files=(("small_gguf", "part0"), ("small_gguf", "part1")),
        sha256=hashlib.sha256((folder / "small.gguf").read_bytes()).hexdigest(),
    )  # fmt: skip
    card = replace(REGISTRY["smollm2-135m"], name="small", parameters=100_000, layers=2, origin=package)
    monkeypatch.setitem(REGISTRY, "small", card)
    return card


def load_or_skip(name: str, **options: str) -> Loaded:
    """The named model on the CPU; the test is skipped, with how to get it, where its package is not installed."""
    import labkit

    try:
        return labkit.load(name, device="cpu", **options)
    except labkit.errors.ModelError as error:
        if error.kind != "not installed":
            raise
        pytest.skip(str(error))
