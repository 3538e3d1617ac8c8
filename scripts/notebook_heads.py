"""Write the heads of all lessons and assignments: the setup cell, and a Colab badge where GitHub has the repository.

    python scripts/notebook_heads.py

`install-from` in [tool.labkit] of pyproject.toml decides both: "https://github.com/OWNER/NAME", "index" (pip's index,
without a badge) or "" (labkit must be installed already). Outputs and all other cells stay as they are, and a second
run changes nothing. nbgrader's sources keep labkit.notebooks.FIRST_CELL: only an instructor opens them.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from labkit.notebooks import DISTRIBUTION, FIRST_CELL, first_cell, is_setup_cell  # noqa: E402  (loads no torch)

COLAB = "https://colab.research.google.com"
BADGE = f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]"


def main() -> None:
    for path in notebooks():
        before = path.read_text(encoding="utf-8")
        after = with_head(before, *head_of(path, install_from()))
        if after != before:
            path.write_text(after, encoding="utf-8", newline="\n")
            print(path.relative_to(ROOT))


def notebooks() -> list[Path]:
    """The lessons, and the assignments for students and with solutions."""
    paths = sorted((ROOT / "notebooks").rglob("*.ipynb"))
    return [path for path in paths if not {".ipynb_checkpoints", "nbgrader"}.intersection(path.parts)]


def install_from() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["labkit"]["install-from"]


def head_of(path: Path, source: str) -> tuple[str, str]:
    """The setup cell, and the line of the badge ("" for none), that `source` asks for in the notebook at `path`."""
    package = f"{DISTRIBUTION}[colab]"
    if source in ("", "index"):
        return first_cell(package) if source else FIRST_CELL, ""
    match = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", source)
    if not match:
        sys.exit(f'[tool.labkit] install-from is {source!r}; use "https://github.com/OWNER/NAME", "index" or ""')
    place = path.resolve().relative_to(ROOT).as_posix()
    badge = f"{BADGE}({COLAB}/github/{match[1]}/blob/main/{place})"
    return first_cell(f"{package} @ git+https://github.com/{match[1]}@main"), badge


def with_head(text: str, setup_cell: str, badge: str) -> str:
    """The text of an .ipynb file, with that setup cell (folded) and the badge as a paragraph under the title."""
    notebook = json.loads(text)
    code = next((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), None)
    title = next((cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"), None)
    if code and is_setup_cell("".join(code["source"])):
        code["source"] = setup_cell.splitlines(keepends=True)
        code["metadata"]["jupyter"] = {"source_hidden": True}
    if title and "".join(title["source"]).startswith("# "):
        bare = re.sub(rf"\n\n{re.escape(BADGE)}\([^)\n]*\)(?=\n|\Z)", "", "".join(title["source"]), count=1)
        heading, newline, rest = bare.partition("\n")
        source = f"{heading}\n\n{badge}{newline}{rest}" if badge else bare
        title["source"] = source.splitlines(keepends=True)
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + text[len(text.rstrip("\n")) :]


if __name__ == "__main__":
    main()
