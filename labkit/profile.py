"""One switch for what runs where: `LABKIT_PROFILE` = ci | laptop | colab | gpu.

Notebooks and commands ask `current()` for sizes and never look at the machine themselves. Without the variable the
profile is detected: in Colab `colab`, with a CUDA GPU that the installed torch can use `gpu`, otherwise `laptop`.
"""

import os
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from labkit.errors import LabkitError, require_one_of

VARIABLE = "LABKIT_PROFILE"


@dataclass(frozen=True)
class Profile:
    """The sizes of one kind of machine. Lessons scale by these numbers and by nothing else."""

    name: str
    dtype: str  # of real weights, as in `getattr(torch, dtype)`; tiny models stay in float32
    max_steps: int  # optimiser steps of one training run in a lesson
    batch_size: int  # sequences per step
    max_length: int  # tokens per sequence
    seeds: tuple[int, ...]  # one run each, where a lesson reports an interval
    max_examples: int  # of a data set, for training; evaluation takes at most as many
    why: str  # for `labkit doctor`


PROFILES = {
    p.name: p
    for p in (
        # float32: a CPU without AMX takes 1.5 times as long in bfloat16, and emulates it where it has no bf16 at all
        Profile("ci", "float32", 20, 4, 64, (0, 1), 64, "2 cores, no GPU: every notebook within 90 s"),
        Profile("laptop", "float32", 200, 8, 128, (0, 1, 2), 500, "a CPU, minutes per lesson"),
        # float32: Colab's T4 has no bf16, and Gemma overflows in fp16
        Profile("colab", "float32", 500, 16, 256, (0, 1, 2), 2_000, "one small GPU that may be taken away"),
        Profile("gpu", "bfloat16", 2_000, 32, 512, (0, 1, 2, 3, 4), 20_000, "a CUDA GPU of your own"),
    )
}


def current() -> Profile:
    """The profile named by `LABKIT_PROFILE`, else the detected one. Raises LabkitError on an unknown name."""
    return by_name(os.environ.get(VARIABLE) or detect(), VARIABLE)


def by_name(name: str, source: str = "the profile") -> Profile:
    """The profile called `name`, which comes from `source`. Raises LabkitError, with the choices, if there is none."""
    require_one_of(source, name, PROFILES, LabkitError)
    return PROFILES[name]


def detect() -> str:
    """The profile's name for this machine: "colab", "gpu" or "laptop". Does not import torch, which takes seconds."""
    if in_colab():
        return "colab"
    try:
        is_cpu_build = metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        is_cpu_build = True
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    if sys.platform == "linux" and not Path("/dev/dxg").exists():
        has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    else:  # Windows and WSL
        has_gpu = shutil.which("nvidia-smi") is not None
    return "gpu" if has_gpu and not hidden and not is_cpu_build else "laptop"


def in_colab() -> bool:
    """True in a Google Colab runtime."""
    return "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ
