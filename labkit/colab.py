"""The lab in Google Colab: `setup()` makes a notebook ready, says what it runs on, and can keep files on Google Drive.

Outside Colab `setup()` prints one line only. The lessons themselves need nothing from here.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

from labkit import notebooks
from labkit.errors import LabkitError
from labkit.profile import VARIABLE, in_colab

DRIVE = Path("/content/drive")  # where Colab's own button mounts it, too
FOLDER = "labkit"  # in the reader's Drive
TOKEN = "HF_TOKEN"  # the name that huggingface_hub reads, as a variable and among Colab's secrets
NO_GPU = "no GPU, so all runs on the CPU (Runtime > Change runtime type gives you one)"
ON_A_CPU = "laptop"  # the profile of a Colab without a GPU
_IMPORTED_EARLY = ("numpy", "plotly")  # what Colab may have loaded before the setup cell replaced it


def setup(drive: bool = False) -> None:
    """Make the running notebook ready and print one line: version, profile and device. Safe to call again.

    Without a GPU everything runs on the CPU, with the sizes of a laptop, unless LABKIT_PROFILE says otherwise.

    drive: mount Google Drive and work in its folder "labkit". Files with a relative path, such as
        `--output-dir runs/ner`, are then still there after a disconnect, and `--resume` goes on with a run.

    Raises LabkitError where a package is too old, where the session must be restarted, or where Drive is refused.
    """
    if not in_colab():
        print(notebooks.make_ready() + (", without Google Drive, as this is not Colab" if drive else ""))
        return
    _refuse_outdated_imports()
    gpu = gpu_name()
    if gpu is None and not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = ON_A_CPU
    said = [notebooks.make_ready(), gpu or NO_GPU]
    if drive:
        said.append(f"files are kept in {work_on_drive()}")
    print(", ".join(said))


def gpu_name() -> str | None:
    """The GPU that torch will use, such as "Tesla T4 with 16 GB", or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    card = torch.cuda.get_device_properties(0)
    return f"{card.name} with {card.total_memory / 10**9:.0f} GB"


def work_on_drive() -> Path:
    """Mount Google Drive if it is not, and make its folder "labkit" the working folder of this session.

    Raises LabkitError if the reader does not allow it, or Drive does not answer.
    """
    from google.colab import drive  # type: ignore[import-not-found]  # exists in Colab only

    mine = DRIVE / "MyDrive"
    if not mine.is_dir():
        try:
            drive.mount(str(DRIVE))
        except Exception as error:  # Colab's own, which have no common class
            raise LabkitError(
                f"Google Drive was not mounted ({error}). Run the cell again and allow the access, or call setup() "
                "without drive=True: everything works, but its files are lost with the session."
            ) from error
    folder = mine / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    return folder


def token(model: str = "the model") -> str:
    """The Hugging Face token for a gated model; also put into HF_TOKEN, where `labkit.load` finds it.

    No notebook of the tour needs one. Looked for in HF_TOKEN, among Colab's secrets, and in a login on this machine.
    Raises LabkitError, saying how to get one, if there is none. Never printed.
    """
    import huggingface_hub

    found = os.environ.get(TOKEN) or _colab_secret() or huggingface_hub.get_token()
    if not found:
        place = (
            f"click the key on the left of Colab, add the secret {TOKEN}, and switch on its notebook access"
            if in_colab()
            else f"set {TOKEN}, or run `hf auth login`"
        )
        where = f"https://huggingface.co/{model}" if "/" in model else "its page on https://huggingface.co"
        raise LabkitError(
            f"{model} is gated and there is no token. Accept its licence at {where}, make a token that may read at "
            f"https://huggingface.co/settings/tokens, then {place}; never write it into a cell"
        )
    os.environ[TOKEN] = found
    return found


def _colab_secret() -> str | None:
    if not in_colab():
        return None
    from google.colab import userdata  # type: ignore[import-not-found]

    try:
        return userdata.get(TOKEN)
    except (userdata.SecretNotFoundError, userdata.NotebookAccessError):
        return None


def _refuse_outdated_imports() -> None:
    """pip can replace a package, but not what the session has loaded of it."""
    from packaging.version import Version

    for name in _IMPORTED_EARLY:
        loaded = getattr(sys.modules.get(name), "__version__", None)
        if loaded is not None and Version(loaded).public != Version(installed := metadata.version(name)).public:
            raise LabkitError(
                f"{name} {installed} was installed, but this session had loaded {loaded} before. "
                "Choose Runtime > Restart session, then run this cell again."
            )
