"""Where the files that come with labkit lie: in the checkout, or packed into the installed wheel.

folder("data")       -> <checkout>/data       or <site-packages>/labkit/_data
folder("notebooks")  -> <checkout>/notebooks  or <site-packages>/labkit/_notebooks
folder("results")    -> <checkout>/benchmarks/results  or <site-packages>/labkit/_results
"""

from importlib.resources import files
from pathlib import Path

from labkit.errors import LabkitError

PLACES = {"data": "data", "notebooks": "notebooks", "results": "benchmarks/results"}  # in the checkout


def folder(name: str) -> Path:
    """The folder called `name`, one of `PLACES`, of this installation. Raises LabkitError where it is missing."""
    if name not in PLACES:
        raise LabkitError(f"labkit ships no folder {name!r}; it ships: {', '.join(PLACES)}.")
    package = Path(str(files("labkit")))
    packed, checkout = package / f"_{name}", package.parent / PLACES[name]
    if packed.is_dir():
        return packed
    if (package.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    raise LabkitError(
        f"labkit's {name} were not found, neither at {packed} nor at {checkout}: the installation is incomplete. "
        "Reinstall labkit, or run it from a complete checkout."
    )
