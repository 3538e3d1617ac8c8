"""What makes a run the same: its settings, the versions, the data, and the model that answers, down to its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from labkit import __version__
from labkit.errors import FusionError


def versions() -> dict[str, str]:
    """Of the programs whose arithmetic an answer depends on."""
    import torch
    import transformers

    return {"labkit": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def fingerprint(model: Any) -> str:
    """Of the weights: a model of the same name that was trained on has another one. A thousand numbers of each."""
    together = hashlib.sha256()
    for name, weight in model.state_dict().items():
        numbers = weight.detach().flatten()[:: max(1, weight.numel() // 1000)]
        together.update(f"{name} {tuple(weight.shape)} ".encode() + numbers.double().cpu().numpy().tobytes())
    return together.hexdigest()


def require_same(path: Path, about: dict[str, Any], asked_for: dict[str, Any], what: str = "other settings") -> None:
    """Raise FusionError, naming every difference, if what `about` says is not what `asked_for` asks."""
    if "settings" not in about:
        raise FusionError(f"{path} does not say how it was made, so it cannot be resumed; give another output")
    was, now = _flat(about, asked_for), _flat(asked_for, asked_for)
    if changed := sorted(name for name in was | now if was.get(name) != now.get(name)):
        found = "; ".join(f"{name} was {was.get(name)!r}, now {now.get(name)!r}" for name in changed)
        raise FusionError(f"{path} was begun with {what}: {found}")


def _flat(about: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """The parts of `about` that `like` has too, names without the part's: {"settings": {"seed": 0}} as {"seed": 0}."""
    flat: dict[str, Any] = {}
    for part in like:
        value = about.get(part)
        flat |= value if isinstance(value, dict) else {part: value}
    return flat
