"""`setup()` makes a notebook ready, prints what it runs on, and in Google Colab can keep files on Google Drive.

A token for gated models needs nothing from here: huggingface_hub finds it among Colab's secrets, as HF_TOKEN.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from labkit import __version__
from labkit.errors import LabkitError
from labkit.notebooks import DISTRIBUTION
from labkit.profile import VARIABLE, current, in_colab

DRIVE = Path("/content/drive")  # where Colab's own button mounts it, too
NO_GPU = "no GPU, so all runs on the CPU (Runtime > Change runtime type gives you one)"


def setup(drive: bool = False) -> None:
    """Make the running notebook ready and print one line: version, profile and device. Safe to call again.

    In Colab without a GPU the sizes are those of a laptop, unless LABKIT_PROFILE is set. `drive`: in Colab, mount
    Google Drive and work in its folder "labkit". Files with a relative path, such as `--output-dir runs/ner`, are then
    still there after a disconnect, and `--resume` continues a run. Raises LabkitError where a package is too old, or
    where Drive is refused.
    """
    if unmet := unmet_requirements():
        problems = "; ".join(f"{need.name}: found {version_of(need.name)}, needed {need.specifier}" for need in unmet)
        install = " ".join(f"'{need.name}{need.specifier}'" for need in unmet)
        raise LabkitError(f"{problems}. Run `%pip install {install}` in a cell, then restart the kernel.")
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


def unmet_requirements() -> list[Any]:
    """The `Requirement`s of labkit that this Python does not meet: a missing package, or one that is too old."""
    from packaging.requirements import Requirement

    try:
        needs = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:  # a bare checkout on sys.path: its user chose the versions
        return []
    needs = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return [need for need in needs if not need.specifier.contains(version_of(need.name) or "0", prereleases=True)]


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _work_on_drive() -> Path:
    """Mount Google Drive if it is not, and make its folder "labkit" the working folder of this session."""
    from google.colab import drive  # type: ignore[import-not-found]  # exists in Colab only

    folder = DRIVE / "MyDrive" / "labkit"
    if not folder.parent.is_dir():
        try:
            drive.mount(str(DRIVE))
        except Exception as error:  # Colab's own, which have no common class
            advice = "Run the cell again and allow the access, or call setup() without drive=True and keep no files"
            raise LabkitError(f"Google Drive was not mounted ({error}). {advice}.") from error
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    return folder
