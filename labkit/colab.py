"""`setup()` makes a notebook ready, prints what it runs on, and in Google Colab can keep files on Google Drive.

A token for gated models needs nothing from here: huggingface_hub finds it among Colab's secrets, as HF_TOKEN.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

from labkit import __version__
from labkit.errors import LabkitError
from labkit.notebooks import DISTRIBUTION
from labkit.profile import VARIABLE, current, in_colab

DRIVE = Path("/content/drive")  # where Colab's own button mounts it, too
NO_GPU = "no GPU, so all runs on the CPU (Runtime > Change runtime type gives you one)"
_IMPORTED_EARLY = ("numpy", "plotly")  # what Colab may have loaded before the setup cell replaced it


def setup(drive: bool = False) -> None:
    """Make the running notebook ready and print one line: version, profile and device. Safe to call again.

    In Colab without a GPU everything runs on the CPU, with the sizes of a laptop, unless LABKIT_PROFILE is set.

    drive: in Colab, mount Google Drive and work in its folder "labkit". Files with a relative path, such as
        `--output-dir runs/ner`, are then still there after a disconnect, and `--resume` continues a run.

    Raises LabkitError where a package is too old, where the session must be restarted, or where Drive is refused.
    """
    _refuse_outdated_packages()
    facts = []
    if in_colab():
        import torch
        from google.colab import output  # type: ignore[import-not-found]  # exists in Colab only

        output.enable_custom_widget_manager()
        if torch.cuda.is_available():
            card = torch.cuda.get_device_properties(0)
            facts.append(f"{card.name} with {card.total_memory / 10**9:.0f} GB")
        else:
            os.environ[VARIABLE] = os.environ.get(VARIABLE) or "laptop"
            facts.append(NO_GPU)
        if drive:
            facts.append(f"files are kept in {_work_on_drive()}")
    elif drive:
        facts.append("without Google Drive, as this is not Colab")
    # The figures go to the front end as data: drawn offline in JupyterLab, Notebook 7 and VS Code, without a 5 MB
    # script. PLOTLY_RENDERER wins where it is set (for a static HTML export: `plotly_mimetype+notebook`).
    renderer = os.environ.setdefault("PLOTLY_RENDERER", "colab" if in_colab() else "plotly_mimetype")
    if "plotly.io" in sys.modules:  # it was imported before this call and has read the variable already
        sys.modules["plotly.io"].renderers.default = renderer
    print(", ".join([f"labkit {__version__}", f"profile {current().name}", *facts]))


def _work_on_drive() -> Path:
    """Mount Google Drive if it is not, and make its folder "labkit" the working folder of this session."""
    from google.colab import drive  # type: ignore[import-not-found]  # exists in Colab only

    if not (DRIVE / "MyDrive").is_dir():
        try:
            drive.mount(str(DRIVE))
        except Exception as error:  # Colab's own, which have no common class
            raise LabkitError(
                f"Google Drive was not mounted ({error}). Run the cell again and allow the access, or call setup() "
                "without drive=True: everything works, but its files are lost with the session."
            ) from error
    folder = DRIVE / "MyDrive" / "labkit"
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    return folder


def _refuse_outdated_packages() -> None:
    """Raise LabkitError for a package that is too old, or that pip replaced after this session had loaded it."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:  # a bare checkout on sys.path: its user chose the versions
        return
    problems, install = [], []
    for need in requirements:
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            version = metadata.version(need.name)
            if not need.specifier.contains(version, prereleases=True):
                problems.append(f"{need.name}: found {version}, needed {need.specifier}")
                install.append(f"'{need.name}{need.specifier}'")
    if problems:
        raise LabkitError(
            f"{'; '.join(problems)}. Run `%pip install {' '.join(install)}` in a cell, then restart the kernel."
        )
    for name in _IMPORTED_EARLY:
        loaded = getattr(sys.modules.get(name), "__version__", None)
        if loaded is not None and loaded != (installed := metadata.version(name)):
            raise LabkitError(
                f"{name} {installed} was installed, but this session had loaded {loaded} before. "
                "Restart it (in Colab: Runtime > Restart session), then run this cell again."
            )
