"""Build hook: a built wheel carries data/, notebooks/ and benchmarks/results/ inside labkit, and labkit/_browser.

An editable install carries none of them: it reads the folders where they stand (labkit/files.py).
labkit/_browser, which git ignores, holds the JavaScript libraries of the bertviz views; it is filled first, if npm can.
plotly's bundle in it is for the site only, so a wheel does not carry it.
"""

import subprocess
import sys
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKED = {
    "data": "labkit/_data",
    "notebooks": "labkit/_notebooks",
    "benchmarks/results": "labkit/_results",
    "labkit/_browser": "labkit/_browser",
}
LEFT_OUT = {"__pycache__", ".ipynb_checkpoints", ".DS_Store"}
LEFT_OUT |= {"plotly-cartesian.min.js", "plotly-cartesian.LICENSE.txt"}


class PackResources(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        fetch = Path(self.root) / "scripts" / "fetch_browser_libraries.py"
        subprocess.run([sys.executable, str(fetch)], check=False)  # without them labkit works, and says what is missing
        if version == "editable":
            return
        for folder, target in PACKED.items():
            top = Path(self.root) / folder
            for file in sorted(top.rglob("*")):  # of a missing or empty folder: nothing
                if file.is_file() and not LEFT_OUT.intersection(file.parts):
                    build_data["force_include"][str(file)] = f"{target}/{file.relative_to(top).as_posix()}"
