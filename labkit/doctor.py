"""`labkit doctor`: is this machine ready for the lab? One finding for each thing that can be missing, with its cure."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit import profile
from labkit.colab import unmet_requirements, version_of
from labkit.errors import LabkitError

PYTHONS = ((3, 11), (3, 14))  # oldest and newest that pyproject allows
OPTIONAL = {  # what does not work without the package
    "gguf": "embedded models cannot be converted",
    "ipywidgets": "sliders in notebooks do not work",
    "anywidget": "sliders in notebooks do not work",
    "jupyterlab": "notebooks open in other editors only",
    "nbval": "notebooks cannot be run as tests",
}
EXTENSION = "@jupyter-widgets/jupyterlab-manager"  # the half of ipywidgets that runs in the browser
FLOAT32 = "load models with dtype='float32'"
EMULATED = 3  # times float32: with AVX512 alone bfloat16 takes up to twice as long, emulated 4 times and more
GB = 10**9


@dataclass(frozen=True)
class Finding:
    """`status`: "ok", "warn" (part of the lab will not work) or "fail" (nothing will). `cure`: what to do, or empty."""

    name: str
    status: str
    detail: str
    cure: str = ""


def diagnose() -> list[Finding]:
    """All findings, in the order in which to cure them. Changes nothing, needs no network, takes seconds."""
    return [*_required(), *_machine(), *_places(), *_models(), *_optional()]


def _finding(name: str, detail: str, cure: str = "", *, problem: str = "warn") -> Finding:
    return Finding(name, problem if cure else "ok", detail, cure)


def _required() -> Iterator[Finding]:
    (oldest, newest), this = PYTHONS, sys.version_info[:2]
    cure = "" if oldest <= this <= newest else f"use Python 3.{oldest[1]} to 3.{newest[1]}"
    detail = f"{platform.python_version()} at {sys.executable}"
    yield _finding("python", detail, cure, problem="fail" if this < oldest else "warn")
    cures = {need.name: f"pip install '{need.name}{need.specifier}'" for need in unmet_requirements()}
    for name in dict.fromkeys(("torch", "transformers", *cures)):
        yield _finding(name, version_of(name) or "not installed", cures.get(name, ""), problem="fail")


def _machine() -> Iterator[Finding]:
    if version_of("torch") is None:
        return
    import torch

    from labkit.decoder.limits import available_bytes

    cores = f"{os.cpu_count()} cores"
    if torch.cuda.is_available():
        cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        detail = ", ".join(f"{card.name} ({card.total_memory / GB:.0f} GB)" for card in cards)
        bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)  # emulation is slow, counts by default
        yield _finding("gpu", detail if bfloat16 else f"{detail}, without bfloat16", "" if bfloat16 else FLOAT32)
        yield _finding("processor", cores)
    else:
        driver = shutil.which("nvidia-smi") is not None
        detail = "torch cannot use the NVIDIA GPU" if driver else "none; everything in the lab also runs on the CPU"
        cure = "install a CUDA build of torch that fits the driver (https://pytorch.org/get-started/locally)"
        yield _finding("gpu", detail, cure if driver else "")
        # Without bfloat16 in hardware torch emulates it, and a model stored in it takes several times as long.
        slower = _linear_seconds(torch.bfloat16) / _linear_seconds(torch.float32)
        detail = f"{cores}; bfloat16 takes {slower:.1f} times as long as float32 (measured)"
        yield _finding("processor", detail, FLOAT32 if slower > EMULATED else "")
    free, cure = available_bytes(), "real models need 2 GB: close other programs, or use the tiny models"
    yield _finding("memory", f"{free / GB:.1f} GB free", cure if free < 2 * GB else "")


def _linear_seconds(dtype: Any) -> float:
    """The time of a linear layer of 512 x 512 for 512 rows, on one core: others may be busy."""
    import torch
    from torch.utils.benchmark import Timer

    rows, layer = torch.ones(512, 512, dtype=dtype), torch.nn.Linear(512, 512, dtype=dtype)
    timer = Timer("layer(rows)", globals={"layer": layer, "rows": rows})  # on one thread
    return timer.blocked_autorange(min_run_time=0.05).median


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
    from labkit.models import available
    from labkit.models.registry import REGISTRY

    for row in available():
        if getattr(REGISTRY[row["name"]].origin, "quantisation", None):  # the encoder is for comparisons only
            detail = row["note"] if row["ready"] else f"the {row['origin']} is not installed"
            yield _finding(f"model {row['name']}", detail, "" if row["ready"] else row["note"].removeprefix("run: "))


def _optional() -> Iterator[Finding]:
    for name, consequence in OPTIONAL.items():
        version = version_of(name)
        yield _finding(name, version or f"not installed: {consequence}", "" if version else f"pip install {name}")
    if version_of("ipywidgets") and version_of("jupyterlab"):
        from jupyter_core.paths import jupyter_path

        there = any(Path(folder, EXTENSION, "package.json").is_file() for folder in jupyter_path("labextensions"))
        cure = "without it widgets stay blank: pip install --force-reinstall jupyterlab_widgets"
        yield _finding("browser extension", EXTENSION, "" if there else cure)
