"""Pack what the report of a study is made of: settings, scores, predictions by example, learning curves. No weights.

    python scripts/keep_study.py runs/fx benchmarks/studies/mini-classify.tar.xz

Unpacked, the folder gives the same report (`labkit bench report`, `fusion-report`, `future-report`), and `--resume`
goes on with it. The same folder packs to the same bytes.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
from pathlib import Path

KEPT = (
    "study.json", "frozen.json", "failures.json", "config.json", "metrics.json", "trainer_state.json", "losses.json",
    "judged.test.jsonl",
)  # fmt: skip
ANSWERS = (".feather",)
BASELINES = "baselines"  # the folder
NEVER = ("checkpoints", "model", "tokenizer")


def chosen(folder: Path) -> list[Path]:
    """The files that are packed, sorted."""
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and (file.name in KEPT or file.suffix in ANSWERS or BASELINES in file.relative_to(folder).parts)
        and not set(file.relative_to(folder).parts) & set(NEVER)
    )


def pack(folder: Path, target: Path) -> int:
    """Write `target` whole or not at all; returns how many files are in it."""
    files = chosen(folder)
    if not (folder / "study.json").is_file():
        sys.exit(f"{folder} holds no study")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent)
    os.close(handle)
    with tarfile.open(temporary, "w:xz") as out:
        for file in files:
            info = out.gettarinfo(
                file, arcname=f"{target.name.partition('.')[0]}/{file.relative_to(folder).as_posix()}"
            )
            info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode = 0, 0, 0, "", "", 0o644
            with file.open("rb") as content:
                out.addfile(info, content)
    Path(temporary).chmod(0o644)
    os.replace(temporary, target)
    return len(files)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    count = pack(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{sys.argv[2]}: {count} files, {Path(sys.argv[2]).stat().st_size / 1e3:,.0f} kB")
