"""`labkit doctor`: is this machine ready for the lab? One finding for each thing that can be missing, with its cure."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import profile
from labkit.errors import LabkitError

if TYPE_CHECKING:
    import torch

PYTHONS = ("3.11", "3.13")  # oldest and newest that are tested
OLDEST = {"torch": "2.11", "transformers": "5.3"}  # as in pyproject.toml
OPTIONAL = {  # what does not work without the package
    "gguf": "embedded models cannot be converted",
    "ipywidgets": "sliders in notebooks do not work",
    "anywidget": "sliders in notebooks do not work",
    "jupyterlab": "notebooks open in other editors only",
    "nbval": "notebooks cannot be run as tests",
}
EMULATED = 3  # times float32: with AVX512 alone bfloat16 takes up to twice as long, emulated 4 times and more
GB = 10**9


@dataclass(frozen=True)
class Finding:
    """`status` is "ok", "warn" (part of the lab will not work) or "fail" (nothing will).

    `cure` says what to do, as a command where there is one; empty if nothing is wrong.
    """

    name: str
    status: str
    detail: str
    cure: str = ""


def diagnose() -> list[Finding]:
    """All findings, in the order in which to cure them. Changes nothing, needs no network, takes seconds."""
    findings = [_python(), *(_package(name, oldest) for name, oldest in OLDEST.items())]
    findings += [_gpu(), _processor(), _memory(), _profile(), _cache(), *_models()]
    for name, consequence in OPTIONAL.items():
        version = _version(name)
        missing = Finding(name, "warn", f"not installed: {consequence}", f"pip install {name}")
        findings.append(Finding(name, "ok", version) if version else missing)
    if _version("ipywidgets") and _version("jupyterlab"):
        findings.append(_browser_extension())
    return findings


def healthy(findings: list[Finding]) -> bool:
    """Whether nothing failed; warnings do not count."""
    return all(finding.status != "fail" for finding in findings)


def _python() -> Finding:
    oldest, newest = (tuple(map(int, version.split("."))) for version in PYTHONS)
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < oldest:
        problem = f"{detail}; labkit needs {PYTHONS[0]} or newer"
        return Finding("python", "fail", problem, f"install Python {PYTHONS[0]}")
    if sys.version_info[:2] > newest:
        return Finding("python", "warn", f"{detail}; labkit is tested up to {PYTHONS[1]}", f"use Python {PYTHONS[1]}")
    return Finding("python", "ok", detail)


def _package(name: str, oldest: str) -> Finding:
    from packaging.version import Version

    version, cure = _version(name), f"pip install '{name}>={oldest}'"
    if version is None:
        return Finding(name, "fail", "not installed", cure)
    if Version(version) < Version(oldest):
        return Finding(name, "fail", f"{version}; labkit needs {oldest} or newer", cure)
    if name == "torch":
        from torch.version import cuda, hip

        build = f"ROCm {hip} build" if hip else f"CUDA {cuda} build" if cuda else "CPU build"
        version = f"{version}, {build}"
    return Finding(name, "ok", version)


def _gpu() -> Finding:
    if _version("torch") is None:
        return Finding("gpu", "warn", "not looked for, as torch is missing", "install torch first")
    import torch

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        detail = ", ".join(f"{card.name} ({card.total_memory / GB:.0f} GB)" for card in cards)
        if not torch.cuda.is_bf16_supported(including_emulation=False):  # emulation is slow, and counts by default
            return Finding("gpu", "warn", f"{detail}, without bfloat16", "load models with dtype='float32'")
        return Finding("gpu", "ok", detail)
    if shutil.which("nvidia-smi"):
        cause = "this torch is a CPU build" if torch.version.cuda is None else "its driver does not fit this torch"
        cure = "install a CUDA build of torch (https://pytorch.org/get-started/locally)"
        return Finding("gpu", "warn", f"an NVIDIA GPU seems to be there, but torch cannot use it: {cause}", cure)
    return Finding("gpu", "ok", "none; everything in the lab also runs on the CPU")


def _processor() -> Finding:
    """Without bfloat16 in hardware torch emulates it, and a model stored in it takes several times as long."""
    cores = f"{os.cpu_count()} cores"
    if _version("torch") is not None:
        import torch

        if not torch.cuda.is_available():  # with a GPU, models are loaded there
            slower = _linear_seconds(torch.bfloat16) / _linear_seconds(torch.float32)
            if slower > EMULATED:
                detail = f"{cores}; bfloat16 takes {slower:.0f} times as long as float32 (measured)"
                return Finding("processor", "warn", detail, "on the CPU, load models with dtype='float32'")
    return Finding("processor", "ok", cores)


def _linear_seconds(dtype: torch.dtype, side: int = 512, tries: int = 5) -> float:
    """The shortest time of a linear layer of `side` x `side` for `side` rows, on one core: others may be busy."""
    import torch

    rows, weight = (torch.ones(side, side, dtype=dtype) for _ in range(2))
    threads, durations = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(tries + 1):  # the first also sets up the library
            start = time.perf_counter()
            torch.nn.functional.linear(rows, weight)
            durations.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return min(durations)


def _memory() -> Finding:
    from labkit.decoder.limits import available_bytes

    free = available_bytes()
    if free < 2 * GB:
        problem = f"{free / GB:.1f} GB free; real models need 2 GB"
        return Finding("memory", "warn", problem, "close other programs, or use the tiny models")
    return Finding("memory", "ok", f"{free / GB:.1f} GB free")


def _profile() -> Finding:
    try:
        active = profile.current()
    except LabkitError as error:
        return Finding("profile", "fail", str(error), f"unset {profile.VARIABLE}")
    how = "set by" if os.environ.get(profile.VARIABLE) else "detected; change it with"
    return Finding("profile", "ok", f"{active.name} ({how} {profile.VARIABLE}): {active.why}")


def _cache() -> Finding:
    from labkit.models.cache import cache_dir

    folder = cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    cure = "set LABKIT_CACHE to a folder on a disk with room that you may write to"
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Finding("cache", "warn", f"{folder} cannot be written: real models cannot be converted", cure)
    free = shutil.disk_usage(existing).free
    if free < 1.5 * GB:
        return Finding("cache", "warn", f"{folder}, {free / GB:.1f} GB free; converting needs 1.5 GB", cure)
    return Finding("cache", "ok", f"{folder}, {free / GB:.0f} GB free")


def _models() -> Iterator[Finding]:
    from labkit.models import cache
    from labkit.models.registry import REGISTRY, GgufPackage

    cached = {entry.name: entry for entry in cache.entries()}
    for card in REGISTRY.values():
        package, entry, name = card.origin, cached.get(card.name), f"model {card.name}"
        if not isinstance(package, GgufPackage):
            continue
        if entry and entry.state == "ready":
            yield Finding(name, "ok", f"ready, {entry.bytes / GB:.1f} GB in the cache")
        elif not package.is_installed():
            damage = f"the cached copy is {entry.state} and " if entry else ""
            problem = f"{damage}{package.distribution} or its reader is not installed"
            yield Finding(name, "warn", problem, package.pip_command)
        elif entry:
            cure = f"nothing to do: the next load builds it again (or: labkit cache clear {card.name})"
            yield Finding(name, "warn", f"the cached copy is {entry.state}: {entry.problem}", cure)
        else:
            yield Finding(name, "ok", "installed; the first load converts it")


def _browser_extension() -> Finding:
    """The half of ipywidgets that runs in the browser."""
    from jupyter_core.paths import jupyter_path

    name, extension = "browser extension", "@jupyter-widgets/jupyterlab-manager"
    folders = [Path(folder) / extension for folder in jupyter_path("labextensions")]
    for folder in folders:
        if (folder / "package.json").is_file():
            return Finding(name, "ok", f"{extension} at {folder}")
    cure = "pip install --force-reinstall jupyterlab_widgets"
    return Finding(name, "warn", f"{extension} is not where JupyterLab looks: widgets stay blank", cure)


def _version(distribution: str) -> str | None:
    """The installed version, or None; a package that is listed but cannot be imported counts as missing."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    return version if importlib.util.find_spec(distribution) else None
