"""Build the wheel; compare what it carries with the checkout: modules, data, notebooks, results.

The JavaScript libraries of the bertviz views must be in it too, where npm is there to fetch them. Then an empty
environment gets the wheel and what it requires without extras, and must audit a model.

Exits 1 with the names of the files that are missing.
"""

import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKED = {
    "labkit": "labkit",
    "data": "labkit/_data",
    "notebooks": "labkit/_notebooks",
    "benchmarks/results": "labkit/_results",
}
LEFT_OUT = {"__pycache__", ".ipynb_checkpoints", ".DS_Store"}
LEFT_OUT |= {"plotly-cartesian.min.js", "plotly-cartesian.LICENSE.txt"}  # for the site only
BROWSER = {f"labkit/_browser/{name}" for name in ("d3.min.js", "d3.LICENSE.txt", "jquery.min.js", "jquery.LICENSE.txt")}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            packed = set(archive.namelist())
            archive.extractall(f"{folder}/unpacked")
        missing = sorted(expected_files() - packed)
        for name in missing:
            print(f"labkit: the wheel lacks {name}")
        if missing:
            return 1
        used = subprocess.run(
            [core_environment(Path(folder)), "-I", "-c", USE], capture_output=True, text=True, cwd=folder
        )
    if used.returncode != 0:
        print(f"labkit: the wheel does not work with its required packages alone:\n{used.stderr}")
        return 1
    print(f"labkit: {wheel.name} carries {len(packed)} files, and its core works alone")
    return 0


def core_environment(folder: Path) -> Path:
    """The Python of a new environment with the unpacked wheel, and links to the installed packages that it requires."""
    venv.create(folder / "core", symlinks=True)
    (packages,) = (folder / "core").glob("lib/python*/site-packages")
    (folder / "unpacked" / "labkit").rename(packages / "labkit")
    wanted, seen = list((folder / "unpacked").glob("*.dist-info/METADATA")), set()
    lines = metadata.PathDistribution(wanted[0].parent).requires
    while lines:
        need = Requirement(lines.pop())
        if need.name in seen or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        seen.add(need.name)
        distribution = metadata.distribution(need.name)
        lines += distribution.requires or []
        for top in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    return folder / "core" / "bin" / "python"


USE = """
import sys
import labkit
from labkit import files, masks, pitfalls
from labkit.course.exercises import assignment
for name in files.PLACES:
    assert str(files.folder(name)).startswith(sys.prefix), files.folder(name)
model = labkit.load("tiny-gpt2", device="cpu").model
assert labkit.audit(model, quick=True).verdict == "causal"
assert labkit.audit(labkit.to_bidirectional(model)).verdict == "bidirectional"
assert masks.causal().dense(3).sum() == 6 and pitfalls.ALL and assignment("a1").points
try:
    labkit.viz.mask_figure
except labkit.LabkitError as error:
    assert "labkit-bidirectional[lab]" in str(error)
assert not {"pandas", "plotly", "scipy", "ipywidgets"} & set(sys.modules)
"""


def expected_files() -> set[str]:
    return (BROWSER if shutil.which("npm") else set()) | {
        f"{target}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, target in PACKED.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and not LEFT_OUT.intersection(file.parts)
    }


if __name__ == "__main__":
    sys.exit(main())
