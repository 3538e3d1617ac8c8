"""LABKIT_PROFILE: one switch, one clear error, a detection that needs no torch."""

import sys

import pytest
import torch

from labkit import profile
from labkit.errors import LabkitError


@pytest.fixture
def bare_machine(monkeypatch):
    """No variable set, not in Colab, no driver, a CUDA build of torch: every test switches on what it is about."""
    for name in ("LABKIT_PROFILE", "COLAB_RELEASE_TAG", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(profile.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(profile.Path, "glob", lambda self, pattern: iter(()))
    monkeypatch.setattr(profile.Path, "exists", lambda self: False)
    return monkeypatch


def plug_in_gpu(monkeypatch):
    monkeypatch.setattr(profile.Path, "glob", lambda self, pattern: iter([self / "nvidia0"]))


@pytest.mark.parametrize("name", ["ci", "laptop", "colab", "gpu"])
def test_the_variable_decides_whatever_the_machine_is(bare_machine, name):
    plug_in_gpu(bare_machine)
    bare_machine.setenv("LABKIT_PROFILE", name)
    assert profile.current() is profile.PROFILES[name]


def test_an_unknown_profile_is_one_line_that_lists_the_choices_and_names_what_was_given(bare_machine):
    bare_machine.setenv("LABKIT_PROFILE", "laptpo")
    with pytest.raises(LabkitError, match=r"^LABKIT_PROFILE is 'laptpo'; [^\n]*ci, laptop, colab, gpu$"):
        profile.current()
    with pytest.raises(LabkitError, match="^--profile is 'zz'"):
        profile.by_name("zz", "--profile")


@pytest.mark.parametrize(
    ("environment", "build", "platform", "expected"),
    [
        ({}, "2.13.0", "linux", "gpu"),
        ({"LABKIT_PROFILE": ""}, "2.13.0", "linux", "gpu"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "2.13.0", "linux", "laptop"),
        ({}, "2.13.0+cpu", "linux", "laptop"),
        ({}, "2.13.0", "win32", "gpu"),
        ({"COLAB_RELEASE_TAG": "release-colab"}, "2.13.0", "linux", "colab"),
    ],
)
def test_the_profile_is_detected(bare_machine, environment, build, platform, expected):
    for name, value in environment.items():
        bare_machine.setenv(name, value)
    bare_machine.setattr(profile.metadata, "version", lambda name: build)
    assert profile.current().name == ("colab" if expected == "colab" else "laptop")
    plug_in_gpu(bare_machine)
    bare_machine.setattr(sys, "platform", platform)
    bare_machine.setattr(profile.shutil, "which", lambda name: name)
    assert profile.current().name == expected


def test_profiles_grow_with_the_machine_and_name_a_dtype_of_torch_and_distinct_seeds():
    profiles = [profile.by_name(name) for name in ("ci", "laptop", "colab", "gpu")]
    sizes = [(p.max_steps, p.batch_size, p.max_length, p.max_examples) for p in profiles]
    for small, large in zip(sizes, sizes[1:], strict=False):
        assert all(a < b for a, b in zip(small, large, strict=True))
    for p in profiles:
        assert isinstance(getattr(torch, p.dtype), torch.dtype) and len(set(p.seeds)) == len(p.seeds) >= 2
