"""The library of the adapters: without it one clear error, with it no warning that nobody can heed."""

import sys
import warnings

import pytest

import labkit
from labkit.errors import MissingPackageError
from labkit.models.heads import Head
from labkit.tasks.adapters import trained_part
from labkit.tasks.lm import with_lora

HEAD = Head("token-classification", labels=("O", "B-PER", "I-PER"))
WAYS = {
    "a language model": lambda: with_lora(labkit.load("tiny-gpt2").model, 0),
    "a task": lambda: trained_part(labkit.load("tiny-gpt2", task=HEAD).model, "lora", rank=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_who_trains_adapters_is_not_warned(way):
    pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted = WAYS[way]()
    assert any("lora" in name and weight.requires_grad for name, weight in adapted.named_parameters())


@pytest.mark.parametrize("way", WAYS)
def test_without_the_library_it_is_said_what_to_install(way, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingPackageError, match=r"LoRA needs peft: pip install .*\[train\]"):
        WAYS[way]()
