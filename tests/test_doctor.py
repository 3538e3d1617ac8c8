"""`labkit doctor`: each problem has the right status and a cure."""

from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

import labkit
from labkit import doctor
from labkit.decoder import limits
from labkit.doctor import Finding, diagnose


def find(name: str) -> Finding:
    return next(finding for finding in diagnose() if finding.name == name)


@pytest.fixture
def installed(monkeypatch):
    """installed(torch="2.1") pretends that version, installed(torch=None) that it is missing."""
    real = metadata.version

    def pretend(**versions):
        def version(name):
            if versions.get(name, "installed") is None:
                raise metadata.PackageNotFoundError(name)
            return versions.get(name) or real(name)

        monkeypatch.setattr(metadata, "version", version)

    return pretend


def test_this_machine_is_healthy_and_every_problem_of_another_comes_with_a_cure(own_cache, installed, monkeypatch):
    assert not [finding for finding in diagnose() if finding.status == "fail"]
    installed(torch="2.1", transformers=None, nbval=None, anywidget=None, gguf=None)
    monkeypatch.setenv("LABKIT_PROFILE", "supercomputer")
    findings = diagnose()
    assert sum(finding.status != "ok" for finding in findings) >= 6
    for finding in findings:
        assert finding.status in ("ok", "warn", "fail") and bool(finding.cure) == (finding.status != "ok"), finding


@pytest.mark.parametrize(
    ("package", "version", "status", "cure"),
    [
        ("torch", "2.10.1", "fail", "pip install 'torch>=2.11'"),
        ("torch", None, "fail", "pip install 'torch>=2.11'"),
        ("psutil", "1.0", "fail", "pip install 'psutil>=5.9'"),
        ("nbval", None, "warn", "pip install nbval"),
    ],
)
def test_a_missing_or_old_package_comes_with_the_pip_command(installed, package, version, status, cure):
    installed(**{package: version})
    finding = find(package)
    assert (finding.status, finding.cure) == (status, cure)
    assert ("fail" in {finding.status for finding in diagnose()}) == (status == "fail")


@pytest.mark.parametrize(("version", "status"), [((3, 10, 9), "fail"), ((3, 11, 0), "ok"), ((3, 15, 0), "warn")])
def test_python_is_compared_with_what_is_allowed(monkeypatch, version, status):
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(version_info=version, executable=sys.executable))
    assert find("python").status == status


def test_a_model_is_installed_converted_or_missing(small_card, own_cache, monkeypatch):
    assert find("model small").status == "ok"  # installed, and not yet converted
    with monkeypatch.context() as patch:
        patch.setattr("labkit.models.registry.find_spec", lambda name: None)
        finding = find("model small")
    assert (finding.status, finding.cure) == ("warn", "pip install small-gguf")
    labkit.load("small", device="cpu")
    assert (find("model small").status, find("model small").detail) == ("ok", "converted")


def test_too_little_memory_and_too_little_disk_are_warnings(own_cache, monkeypatch):
    monkeypatch.setattr(limits, "available_bytes", lambda device="cpu": 10**9)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    assert (find("memory").status, find("cache").status) == ("warn", "warn")


def test_a_missing_browser_extension_is_found(tmp_path, monkeypatch):
    paths = pytest.importorskip("jupyter_core.paths")
    monkeypatch.setattr(paths, "jupyter_path", lambda *sub: [str(tmp_path.joinpath(*sub))])
    assert find("browser extension").status == "warn"
    manager = tmp_path / "labextensions" / "@jupyter-widgets" / "jupyterlab-manager"
    manager.mkdir(parents=True)
    (manager / "package.json").write_text("{}")
    assert find("browser extension").status == "ok"


@pytest.mark.parametrize(
    ("gpu", "slower", "statuses"),
    [(False, 2.0, ("ok", "ok")), (False, 6.0, ("ok", "warn")), (True, 6.0, ("warn", "ok"))],
)
def test_bfloat16_that_is_only_emulated_is_a_warning(monkeypatch, gpu, slower, statuses):
    card = SimpleNamespace(name="Tesla T4", total_memory=15_828_320_256)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(doctor, "_linear_seconds", lambda dtype: 0.01 * (slower if dtype == torch.bfloat16 else 1))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert (find("gpu").status, find("processor").status) == statuses
