"""LABKIT_PROFILE: one switch, one clear error, a detection that needs no torch."""

import dataclasses
import sys

import pytest

from labkit import profile
from labkit.errors import LabkitError


@pytest.fixture
def bare_machine(monkeypatch):
    """No variable set, not in Colab, no driver, a CUDA build of torch: every test switches on what it is about."""
    for name in ("LABKIT_PROFILE", "COLAB_RELEASE_TAG", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    monkeypatch.setattr(profile.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(profile.Path, "glob", lambda self, pattern: iter(()))
    monkeypatch.setattr(profile.shutil, "which", lambda name: None)
    profile._nvidia_smi_lists_a_gpu.cache_clear()
    yield monkeypatch
    profile._nvidia_smi_lists_a_gpu.cache_clear()


def plug_in_gpu(monkeypatch):
    monkeypatch.setattr(profile.Path, "glob", lambda self, pattern: iter([self / "nvidia0"]))


@pytest.mark.parametrize("name", ["ci", "laptop", "colab", "gpu"])
def test_variable_decides_whatever_the_machine_is(bare_machine, name):
    plug_in_gpu(bare_machine)
    bare_machine.setenv("LABKIT_PROFILE", name)
    assert profile.current() is profile.PROFILES[name]
    assert profile.current().name == name


def test_unknown_profile_is_one_line_that_lists_the_choices(bare_machine):
    bare_machine.setenv("LABKIT_PROFILE", "laptpo")
    with pytest.raises(LabkitError) as caught:
        profile.current()
    message = str(caught.value)
    assert "'laptpo'" in message and "\n" not in message
    assert all(name in message for name in ("ci", "laptop", "colab", "gpu"))


@pytest.mark.parametrize(
    ("environment", "torch", "expected"),
    [
        ({}, "2.13.0", "gpu"),
        ({"LABKIT_PROFILE": ""}, "2.13.0", "gpu"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "2.13.0", "laptop"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "2.13.0", "laptop"),
        ({}, "2.13.0+cpu", "laptop"),
        ({"COLAB_RELEASE_TAG": "release-colab"}, "2.13.0", "colab"),
    ],
)
def test_profile_is_detected(bare_machine, environment, torch, expected):
    in_colab = "COLAB_RELEASE_TAG" in environment
    for name, value in environment.items():
        bare_machine.setenv(name, value)
    bare_machine.setattr(profile.metadata, "version", lambda name: torch)
    assert profile.current().name == ("colab" if in_colab else "laptop")
    plug_in_gpu(bare_machine)
    assert profile.current().name == expected


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a shell script")
@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo 'GPU 0: NVIDIA T4'", "gpu"), ("echo 'No devices were found'", "laptop"), ("echo GPU; exit 9", "laptop")],
)
def test_driver_tool_is_asked_where_there_is_no_device_file(bare_machine, tmp_path, script, expected):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    bare_machine.setattr(profile.shutil, "which", lambda name: str(tool))
    assert profile.detect() == expected


def test_profiles_are_immutable_and_grow_with_the_machine():
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.PROFILES["ci"].max_steps = 10**6
    sizes = [
        (p.max_steps, p.batch_size, p.max_length, p.max_examples)
        for p in map(profile.by_name, ("ci", "laptop", "colab", "gpu"))
    ]
    for small, large in zip(sizes, sizes[1:], strict=False):
        assert all(a < b for a, b in zip(small, large, strict=True))


def test_every_profile_names_a_dtype_of_torch_and_distinct_seeds():
    import torch

    for p in profile.PROFILES.values():
        assert isinstance(getattr(torch, p.dtype), torch.dtype)
        assert len(set(p.seeds)) == len(p.seeds) >= 2
