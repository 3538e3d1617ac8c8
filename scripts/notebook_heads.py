"""Write the heads of the notebooks: the setup cell, and the Colab badge where the repository's address is known.

    python scripts/notebook_heads.py [--check]      (--check: change nothing, name what is stale, exit 1 if anything is)

Both follow [tool.labkit] in pyproject.toml. Outputs and all other cells stay as they are, and a second run changes
nothing. The assignments keep labkit.notebooks.FIRST_CELL, as `labkit course build` makes them, and carry no badge.
"""

import json
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from labkit.notebooks import DISTRIBUTION, first_cell, is_setup_cell  # noqa: E402  (light: loads no torch)

BRANCH = "main"
COLAB = "https://colab.research.google.com"
BADGE = f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]"
SOURCES = ("wheel", "index", "repository")


@dataclass(frozen=True)
class Heads:
    """The settings: `repository` is "owner/name" on GitHub, or "" while nobody has set its address."""

    repository: str = ""
    source: str = "wheel"

    @classmethod
    def of(cls, table: dict[str, str]) -> "Heads":
        """From the table [tool.labkit]. Exits with a sentence where it makes no sense."""
        address, source = table.get("repository", ""), table.get("colab-source", "wheel")
        match = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", address)
        if address and not match:
            sys.exit(f"[tool.labkit] repository is {address!r}; Colab opens https://github.com/OWNER/NAME only")
        if source not in SOURCES:
            sys.exit(f"[tool.labkit] colab-source is {source!r}; choose one of {', '.join(SOURCES)}")
        if source == "repository" and not match:
            sys.exit('[tool.labkit] colab-source is "repository", but repository is empty')
        return cls(match[1] if match else "", source)

    def setup_cell(self) -> str:
        package = f"{DISTRIBUTION}[colab]"
        return first_cell(
            {
                "wheel": None,
                "index": package,
                "repository": f"{package} @ git+https://github.com/{self.repository}@{BRANCH}",
            }[self.source]
        )

    def badge(self, place: str) -> str:
        """The line under the title of the notebook at `place` in the repository, or ""."""
        return f"{BADGE}({COLAB}/github/{self.repository}/blob/{BRANCH}/{place})" if self.repository else ""


def settings() -> Heads:
    return Heads.of(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"].get("labkit", {}))


def main(arguments: list[str]) -> int:
    check, heads = arguments == ["--check"], settings()
    if arguments and not check:
        sys.exit(__doc__.strip())
    stale = 0
    for path in sorted((ROOT / "notebooks").rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        now = path.read_text(encoding="utf-8")
        current = with_head(now, *head_of(path, heads))
        if current == now:
            continue
        stale += 1
        print(f"{path.relative_to(ROOT)}: {'stale' if check else 'written'}")
        if not check:
            path.write_text(current, encoding="utf-8", newline="\n")
    return int(check and stale > 0)


def head_of(path: Path, heads: Heads) -> tuple[str, str]:
    """The setup cell and the badge line ("" for none) that belong to the notebook."""
    folder = ROOT / "notebooks"
    if path.is_relative_to(folder) and path.parent != folder:
        return first_cell(), ""  # an assignment
    return heads.setup_cell(), heads.badge(f"notebooks/{path.name}")


def with_head(text: str, setup_cell: str, badge: str) -> str:
    """The text of an .ipynb file with that setup cell and badge; the same text where it has them."""
    notebook = json.loads(text)
    title = next((c for c in notebook["cells"] if c["cell_type"] == "markdown"), None)
    code = next((c for c in notebook["cells"] if c["cell_type"] == "code"), None)
    changed = False
    if code is not None and is_setup_cell(_source(code)):
        changed |= _set(code, setup_cell)
    if title is not None:
        changed |= _set(title, with_badge(_source(title), badge))
    if not changed:
        return text
    end = text[len(text.rstrip("\n")) :]
    if _written(json.loads(text)) + end != text:
        raise ValueError("this notebook is not written as nbformat writes it: other lines would change, too")
    return _written(notebook) + end


def with_badge(source: str, badge: str) -> str:
    """Prose that begins with a title: the badge as a paragraph under it; a badge that was there is gone."""
    bare = re.sub(rf"\n\n{re.escape(BADGE)}\([^)\n]*\)(?=\n|\Z)", "", source, count=1)
    if not badge or not bare.startswith("# "):
        return bare
    title, newline, rest = bare.partition("\n")
    return f"{title}\n\n{badge}{newline}{rest}"


def _source(cell: dict) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def _set(cell: dict, source: str) -> bool:
    """Give the cell this source, as text or as lines, whichever it has; whether that changed it."""
    if source == _source(cell):
        return False
    cell["source"] = source if isinstance(cell["source"], str) else source.splitlines(keepends=True)
    return True


def _written(notebook: dict) -> str:
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
