"""`labkit doctor`: is this machine ready for the lab? One finding for each thing that can be missing, with its cure."""

from __future__ import annotations

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
    return [*_required(), *_machine(), *_places(), *_models(), *_optional()]


def healthy(findings: list[Finding]) -> bool:
    """Whether nothing failed; warnings do not count."""
    return all(finding.status != "fail" for finding in findings)


def _finding(name: str, detail: str, cure: str = "", *, problem: str = "warn") -> Finding:
    return Finding(name, problem if cure else "ok", detail, cure)


def _required() -> Iterator[Finding]:
    from packaging.version import Version

    oldest, newest = (tuple(map(int, version.split("."))) for version in PYTHONS)
    this, cure = sys.version_info[:2], f"use Python {PYTHONS[0]} to {PYTHONS[1]}, which are tested"
    detail, problem = f"{platform.python_version()} at {sys.executable}", "fail" if this < oldest else "warn"
    yield _finding("python", detail, "" if oldest <= this <= newest else cure, problem=problem)
    for name, least in OLDEST.items():
        version = _version(name)
        cure = "" if version and Version(version) >= Version(least) else f"pip install '{name}>={least}'"
        yield _finding(name, version or "not installed", cure, problem="fail")


def _machine() -> Iterator[Finding]:
    if _version("torch") is None:
        return
    import torch

    from labkit.decoder.limits import available_bytes

    cores, cards = f"{os.cpu_count()} cores", torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cards:
        properties = [torch.cuda.get_device_properties(number) for number in range(cards)]
        detail = ", ".join(f"{card.name} ({card.total_memory / GB:.0f} GB)" for card in properties)
        without = not torch.cuda.is_bf16_supported(including_emulation=False)  # emulation is slow, counts by default
        detail += ", without bfloat16" if without else ""
        yield _finding("gpu", detail, "load models with dtype='float32'" if without else "")
        yield _finding("processor", cores)
    else:
        driver = shutil.which("nvidia-smi") is not None
        detail = "torch cannot use the NVIDIA GPU" if driver else "none; everything in the lab also runs on the CPU"
        install = "install a CUDA build of torch that fits the driver (https://pytorch.org/get-started/locally)"
        yield _finding("gpu", detail, install if driver else "")
        # Without bfloat16 in hardware torch emulates it, and a model stored in it takes several times as long.
        slower = _linear_seconds(torch.bfloat16) / _linear_seconds(torch.float32)
        detail = f"{cores}; bfloat16 takes {slower:.1f} times as long as float32 (measured)"
        yield _finding("processor", detail, "load models with dtype='float32'" if slower > EMULATED else "")
    free, cure = available_bytes(), "real models need 2 GB: close other programs, or use the tiny models"
    yield _finding("memory", f"{free / GB:.1f} GB free", cure if free < 2 * GB else "")


def _linear_seconds(dtype: torch.dtype) -> float:
    """The shortest time of a linear layer of 512 x 512 for 512 rows, on one core: others may be busy."""
    import torch

    rows, weight = (torch.ones(512, 512, dtype=dtype) for _ in range(2))
    threads, durations = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for _ in range(6):  # the first also sets up the library
        start = time.perf_counter()
        torch.nn.functional.linear(rows, weight)
        durations.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return min(durations)


def _places() -> Iterator[Finding]:
    from labkit.models.cache import cache_dir

    try:
        active = profile.current()
        how = "set by" if os.environ.get(profile.VARIABLE) else "detected; change it with"
        yield _finding("profile", f"{active.name} ({how} {profile.VARIABLE}): {active.why}")
    except LabkitError as error:
        yield _finding("profile", str(error), f"unset {profile.VARIABLE}", problem="fail")
    folder = cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    usable = existing.is_dir() and os.access(existing, os.W_OK) and free > 1.5 * GB
    cure = "set LABKIT_CACHE to a folder that you may write to, on a disk with 1.5 GB free"
    yield _finding("cache", f"{folder}, {free / GB:.1f} GB free", "" if usable else cure)


def _models() -> Iterator[Finding]:
    from labkit.models import cache
    from labkit.models.registry import REGISTRY, Package

    problems = {entry.name: entry.problem for entry in cache.entries()}
    for card in REGISTRY.values():
        if not isinstance(card.origin, Package) or not card.origin.quantisation:
            continue
        name, problem = f"model {card.name}", problems.get(card.name)
        if card.name in problems and problem is None:
            yield _finding(name, "converted")
        elif card.origin.paths() is None:
            yield _finding(name, f"{card.origin.distribution} is not installed", card.origin.pip_command)
        elif problem:
            yield _finding(name, f"the cached copy: {problem}", "nothing to do: the next load builds it again")
        else:
            yield _finding(name, "installed; the first load converts it")


def _optional() -> Iterator[Finding]:
    for name, consequence in OPTIONAL.items():
        version = _version(name)
        detail = version or f"not installed: {consequence}"
        yield _finding(name, detail, "" if version else f"pip install {name}")
    if _version("ipywidgets") and _version("jupyterlab"):
        from jupyter_core.paths import jupyter_path

        extension = "@jupyter-widgets/jupyterlab-manager"  # the half of ipywidgets that runs in the browser
        there = any(Path(folder, extension, "package.json").is_file() for folder in jupyter_path("labextensions"))
        cure = "without it widgets stay blank: pip install --force-reinstall jupyterlab_widgets"
        yield _finding("browser extension", extension, "" if there else cure)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
