"""`setup()` makes a notebook ready, prints what it runs on, and in Google Colab can keep files on Google Drive.

The lessons themselves need nothing else from here. `token()` finds the Hugging Face token for a gated model.
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
TOKEN = "HF_TOKEN"  # the name that huggingface_hub reads, as a variable and among Colab's secrets
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
            facts.append(f"files are kept in {work_on_drive()}")
    elif drive:
        facts.append("without Google Drive, as this is not Colab")
    # The figures go to the front end as data: drawn offline in JupyterLab, Notebook 7 and VS Code, without a 5 MB
    # script. PLOTLY_RENDERER wins where it is set (for a static HTML export: `plotly_mimetype+notebook`).
    renderer = os.environ.setdefault("PLOTLY_RENDERER", "colab" if in_colab() else "plotly_mimetype")
    if "plotly.io" in sys.modules:  # it was imported before this call and has read the variable already
        sys.modules["plotly.io"].renderers.default = renderer
    print(", ".join([f"labkit {__version__}", f"profile {current().name}", *facts]))


def work_on_drive() -> Path:
    """Mount Google Drive if it is not, and make its folder "labkit" the working folder of this session.

    Raises LabkitError if the reader does not allow it, or Drive does not answer.
    """
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


def token(model: str = "the model") -> str:
    """The Hugging Face token for a gated model; also put into HF_TOKEN, where `labkit.load` finds it.

    Searched in HF_TOKEN, and by huggingface_hub among Colab's secrets and in a login on this machine. Never printed.
    Raises LabkitError, with how to get one, if there is none.
    """
    import huggingface_hub

    value = os.environ.get(TOKEN) or huggingface_hub.get_token()
    if not value:
        place = f"set {TOKEN}, or run `hf auth login`"
        if in_colab():
            place = f"click the key on the left of Colab, add the secret {TOKEN}, and switch on its notebook access"
        raise LabkitError(
            f"{model} is gated and there is no token. Accept its licence at https://huggingface.co/{model}, make a "
            f"token that may read at https://huggingface.co/settings/tokens, then {place}; never write it into a cell"
        )
    os.environ[TOKEN] = value
    return value


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
