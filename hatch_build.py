"""Build hook: a built wheel carries data/ as labkit/_data and notebooks/ as labkit/_notebooks.

An editable install carries neither: it reads both folders where they stand (labkit/resources.py).
"""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKED = {"data": "labkit/_data", "notebooks": "labkit/_notebooks"}
LEFT_OUT = {"__pycache__", ".ipynb_checkpoints", ".DS_Store"}


class PackResources(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        if version == "editable":
            return
        for folder, target in PACKED.items():
            top = Path(self.root) / folder
            for file in sorted(top.rglob("*")):  # of a missing or empty folder: nothing
                if file.is_file() and not LEFT_OUT.intersection(file.parts):
                    build_data["force_include"][str(file)] = f"{target}/{file.relative_to(top).as_posix()}"
