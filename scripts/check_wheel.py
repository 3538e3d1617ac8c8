"""Build the wheel; compare what it carries with the checkout: modules, data, notebooks, results, a working import.

The JavaScript libraries of the bertviz views must be in it too, where npm is there to fetch them.

Exits 1 with the names of the files that are missing.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

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
        imported = subprocess.run(
            [sys.executable, "-I", "-c", FIND_RESOURCES, f"{folder}/unpacked"],
            capture_output=True,
            text=True,
            cwd=folder,
        )
    if imported.returncode != 0:
        print(f"labkit: an installed wheel does not find its files:\n{imported.stderr}")
        return 1
    print(f"labkit: {wheel.name} carries {len(packed)} files")
    return 0


FIND_RESOURCES = """
import sys
sys.path.insert(0, sys.argv[1])
from labkit import files, notebooks
for name in files.PLACES:
    assert str(files.folder(name)).startswith(sys.argv[1]), files.folder(name)
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
