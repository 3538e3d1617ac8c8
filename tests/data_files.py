"""Data files as tests write and read them, without labkit's readers."""

import json
from pathlib import Path
from typing import Any


def write(path: Path, content: bytes | str | list[Any]) -> Path:
    """Write a file, and its folder, and return its path. A list becomes JSON lines; a text in it is a line as it is."""
    if isinstance(content, list):
        content = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
