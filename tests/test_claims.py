"""docs/claims.md is held to its word: every cell it names, every path into a results file, every figure, every test.

A row of the page has three cells. `claim`: one sentence; its figures are the numbers outside of backticks, and what it
has in double quotes is a word of a file or of a cell. `shown in`: a heading of a notebook and a cell below it.
`measured by`: where the figures come from, a path into benchmarks/results or what the cell printed, and tests.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "claims.md"

HEAD = ["claim", "shown in", "measured by"]
SHOWN = re.compile(r'\[(\d\d), "([^"]+)"\]\(\.\./notebooks/(\w+)\.ipynb#([\w-]+)\), cell `([\w-]+)`')
NO_CELL = re.compile(r"no cell; \[[^]]+\]\(\.\./([\w/]+\.md)(?:#[\w-]+)?\)")
RESULT = re.compile(r"`([\w.]+\.json): (?:(min|max) of )?([^`]+)`")
TEST = re.compile(r"`(tests/[\w/]+\.py)`, \*([\w ]+)\*")  # its name in words, which a narrow column can break
THE_CELL = ("the cell", "the cell alone")
STEP = re.compile(r"([^\[\]]*)((?:\[[^\]]*\])*)")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w,.]?\d)(?!\w)(?:\s?%)?")
INTERVAL = re.compile(r"(\S+) [\[(](\S+)(?:, | to )(\S+)[\])]")
CENTRES, ENDS = ("mean", "median", "share"), (("low", "high"), ("min", "max"))
SINGLE = ("each", "these_templates")  # rounds one by one, and an interval of another kind: no claim is about these
WIDEST = 40  # numbers at a path: in more than these, a wrong figure would find a neighbour


# ---- the page ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    section: str
    number: int
    claim: str
    shown: str
    measured: str

    def __str__(self) -> str:
        return f"docs/claims.md, {self.section!r}, row {self.number} ({self.claim[:60]}...)"


def rows_of(text: str) -> list[Row]:
    """The rows of all tables; raises ValueError where a table is not one of claims."""
    rows: list[Row] = []
    section, number = "", 0
    for line in text.splitlines():
        if line.startswith("## "):
            section, number = line.removeprefix("## ").strip(), 0
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != len(HEAD):
            raise ValueError(f"{section!r}: a row has {len(cells)} cells and not claim, shown in, measured by: {line}")
        if cells != HEAD and set("".join(cells)) != {"-"}:
            number += 1
            rows.append(Row(section, number, *cells))
    return rows


@dataclass(frozen=True)
class Figure:
    """A number of a claim, as it was written: how far it was rounded can be seen in it."""

    text: str

    @property
    def decimals(self) -> int:
        return len(self.text.rstrip(" %").partition(".")[2])

    @property
    def is_telling(self) -> bool:
        """Not one of the small whole numbers that stand anywhere."""
        return self.decimals > 0 or len(re.sub(r"\D", "", self.text)) > 1

    @property
    def value(self) -> float:
        return float(self.text.rstrip(" %").replace(",", ""))

    def is_of(self, measured: float) -> bool:
        half = 0.5 * 10**-self.decimals * (1 + 1e-9) + 1e-12
        return any(abs(scale * measured - self.value) <= half for scale in ((1, 100) if "%" in self.text else (1,)))

    def is_among(self, measured: list[float]) -> bool:
        return any(self.is_of(each) for each in measured)


def prose_of(claim: str) -> str:
    """A claim without names and quotations, which hold no figures."""
    return re.sub(r'`[^`]*`|"[^"]*"', "_", claim.replace("\N{MINUS SIGN}", "-"))


def figures_of(text: str) -> list[Figure]:
    return [Figure(each) for each in NUMBER.findall(text)]


def intervals_of(text: str) -> list[list[Figure]]:
    """What is written as `3.2 [1.0, 5.4]` or `3.2 (1.0 to 5.4)`: these three belong together."""
    triples = [figures_of(" ".join(found)) for found in INTERVAL.findall(text)]
    return [triple for triple in triples if len(triple) == 3]


# ---- what a row is held against ------------------------------------------------------------------------------------


class Lab:
    """The notebooks, results and tests under a folder, each read once."""

    def __init__(self, root: Path) -> None:
        self.root, self._read = root, {}

    def read(self, path: str) -> Any:
        """Cells of a notebook, what is in a JSON file, or the names of all functions of a module."""
        if path not in self._read:
            text = (self.root / path).read_text(encoding="utf-8")
            if path.endswith(".py"):
                self._read[path] = {
                    each.name for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef)
                }
            else:
                self._read[path] = json.loads(text)["cells"] if path.endswith(".ipynb") else json.loads(text)
        return self._read[path]


def cell_and_heading(cells: list[dict], name: str) -> tuple[dict, str]:
    """The code cell of that id, and the heading that it stands under. Raises LookupError."""
    heading = ""
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for line in re.sub(r"```.*?```", "", source, flags=re.DOTALL).splitlines():
                heading = line.lstrip("#").strip() if re.match(r"#{1,3} ", line) else heading
        elif cell.get("id") == name:
            return cell, heading
    raise LookupError(f"there is no code cell `{name}`")


def anchor(heading: str) -> str:
    """What GitHub and MyST call a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def printed(cell: dict) -> str:
    """All that a cell said in words."""
    parts = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        parts += [output.get("text", ""), data.get("text/plain", ""), data.get("text/markdown", "")]
    return "\n".join("".join(part) for part in parts).replace("\N{MINUS SIGN}", "-")


def values_at(data: Any, path: str) -> list[Any]:
    """What stands at `key > key[selector] > ...`: one value, or one for each item that a selector with `*` finds.

    `[2]` is a place, `[name=fuse, paraphrases=5]` the one item with these fields, `[fuse]` the one with a field of
    that value, `[budget.max_steps=600]` the one with a field of a field, `[target~mixed]` the one whose field contains
    it, `[*, reason=None]` all such items. Raises LookupError where there is none, or several without a `*`.
    """
    found = [data]
    for step in path.split(" > "):
        key, picks = STEP.fullmatch(step).groups()
        if key:
            found = [_get(each, key) for each in found]
        for pick in re.findall(r"\[([^\]]*)\]", picks):
            found = [item for each in found for item in _picked(each, pick)]
    return found


def _get(data: Any, key: str) -> Any:
    if not isinstance(data, dict) or key not in data:
        has = ", ".join(data) if isinstance(data, dict) else type(data).__name__
        raise LookupError(f"no {key!r} in {has[:200]}")
    return data[key]


def _picked(items: Any, pick: str) -> list[Any]:
    if not isinstance(items, list):
        raise LookupError(f"[{pick}] needs a list, and this is a {type(items).__name__}")
    if pick.isdigit():
        return [items[int(pick)]]
    parts = [part.strip() for part in pick.split(",")]
    wanted = [re.fullmatch(r"(?:([^=~]+)([=~]))?(.+)", part).groups() for part in parts if part != "*"]
    fits = [item for item in items if all(_fits(item, *each) for each in wanted)]
    if len(fits) != 1 and not (fits and "*" in parts):
        raise LookupError(f"[{pick}] is to find one item and finds {len(fits)} of {len(items)}")
    return fits


def _fits(item: dict, key: str | None, how: str | None, value: str) -> bool:
    if key is None:
        return value in [str(each) for each in item.values() if not isinstance(each, dict | list)]
    for name in key.split("."):
        item = item.get(name) if isinstance(item, dict) else None
    return value in str(item) if how == "~" else str(item) == value


def numbers_in(data: Any) -> Iterator[float]:
    if isinstance(data, dict):
        for key, each in data.items():
            yield from numbers_in(each) if key not in SINGLE else ()
    elif isinstance(data, list):
        for each in data:
            yield from numbers_in(each)
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield float(data)


def intervals_in(data: Any) -> Iterator[list[float]]:
    """A middle and its two ends, wherever they stand together."""
    if isinstance(data, dict):
        ends = [[data[low], data[high]] for low, high in ENDS if low in data] + [data.get("interval", [])]
        for each in ends:
            yield from ([data[centre], *each] for centre in CENTRES if centre in data)
    for each in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from intervals_in(each)


# ---- the verdict ---------------------------------------------------------------------------------------------------


def faults(row: Row, lab: Lab) -> list[str]:
    """What is wrong with a row, each in a sentence that says what to do. An empty list: it is backed."""
    found: list[str] = []
    cells = _cells(row, lab, found)
    said = "\n".join(printed(cell) for cell in cells)
    pools, triples, words, by_cell = _measured(row, lab, found)
    figures = figures_of(prose_of(row.claim))
    everywhere = [number for pool in pools.values() for number in pool]
    from_cells = [each.value for each in figures_of(said)]
    if by_cell:
        everywhere += from_cells
        triples += [from_cells[i : i + 3] for i in range(len(from_cells) - 2)]
    if by_cell and not cells:
        found.append("says `the cell`, and names none")
    for figure in figures:
        if not figure.is_among(everywhere):
            near = ", ".join(f"{each:g}" for each in sorted(everywhere, key=lambda v: abs(v - figure.value))[:3])
            found.append(f"the figure {figure.text} is not what was measured (nearest: {near or 'nothing'})")
    for three in intervals_of(prose_of(row.claim)):
        if not any(
            all(said.is_of(x) for said, x in zip(three, each, strict=True)) for each in triples if len(each) == 3
        ):
            found.append(f"{' '.join(each.text for each in three)} do not stand together in what was measured")
    for path, pool in pools.items():
        if len(pool) > WIDEST:
            found.append(f"{path} holds {len(pool)} numbers, at most {WIDEST} are a proof: name a part of it")
        elif pool and not any(figure.is_among(pool) for figure in figures):
            found.append(f"{path} is named, and no figure of the claim is from there: take it out, or the figure in")
    if cells and pools and not any(figure.is_telling and figure.is_among(from_cells) for figure in figures):
        found.append("the cell shows none of the figures: run the notebook again, or name the cell that does")
    quoted = re.findall(r'"([^"]*)"', row.claim)
    if words and quoted != words:
        found.append(f"the words of the file are {words}, and the claim has {quoted} in quotes")
    found += [f'"{each}" is in no cell that is named' for each in quoted if not words and each not in said]
    return [f"{row}: {each}" for each in found]


def _cells(row: Row, lab: Lab, found: list[str]) -> list[dict]:
    """The cells that a row is shown in; what is wrong with them goes to `found`."""
    if without := NO_CELL.fullmatch(row.shown):
        if not (lab.root / without[1]).is_file():
            found.append(f"there is no {without[1]}")
        return []
    cells = []
    for number, heading, notebook, fragment, name in SHOWN.findall(row.shown):
        try:
            cell, above = cell_and_heading(lab.read(f"notebooks/{notebook}.ipynb"), name)
        except (LookupError, OSError) as error:
            found.append(f"notebook {notebook}: {error}")
            continue
        if not notebook.startswith(f"{number}_"):
            found.append(f"the link says {number} and leads to {notebook}")
        if above != heading or fragment != anchor(above):
            found.append(f'cell `{name}` stands under "{above}" (#{anchor(above)}), not "{heading}" (#{fragment})')
        if cell["execution_count"] is None or not printed(cell).strip():
            found.append(f"cell `{name}` of {notebook} was not executed, or says nothing: run the notebook")
        cells.append(cell)
    if re.sub(r"[;\s]", "", SHOWN.sub("", row.shown)) or not SHOWN.search(row.shown):
        found.append(f"cannot be read as a cell of a notebook: {row.shown}")
    return cells


def _measured(row: Row, lab: Lab, found: list[str]) -> tuple[dict[str, list[float]], list, list[str], bool]:
    """The numbers at each path, the intervals among them, the words at paths to words, and is the cell a measure?"""
    pools: dict[str, list[float]] = {}
    triples: list[list[float]] = []
    words: list[str] = []
    parts = [part.strip() for part in row.measured.split("; ")]
    for part in parts:
        if result := RESULT.fullmatch(part):
            try:
                values = values_at(lab.read(f"benchmarks/results/{result[1]}"), result[3])
            except (LookupError, OSError) as error:
                found.append(f"{part}: {error}")
                continue
            pool = list(numbers_in(values))
            triples += intervals_in(values)
            if result[2]:
                pool = [{"min": min, "max": max}[result[2]](pool)]
            chosen = re.findall(r"=(\d+)\b", result[3])  # [paraphrases=5] is a fact of the file, too
            words += [value for value in values if isinstance(value, str)]
            pools[part] = pool + [float(each) for each in chosen] if pool else []
            if not pool and not any(isinstance(value, str) for value in values):
                found.append(f"{part} holds neither a number nor a word")
        elif test := TEST.fullmatch(part):
            name = f"test_{test[2].replace(' ', '_')}"
            if not (lab.root / test[1]).is_file() or name not in lab.read(test[1]):
                found.append(f"there is no test {test[1]}::{name}")
        elif part not in THE_CELL:
            found.append(f"cannot be read as a path, a test or the cell: {part}")
    if "the cell alone" in parts and len(parts) > 1:
        found.append("says `the cell alone`, and names more")
    return pools, triples, words, any(part in THE_CELL for part in parts)


LAB = Lab(ROOT)
ROWS = rows_of(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.section.split()[0].strip(',')}-{row.number}" for row in ROWS])
def test_claim_is_backed_by_what_it_names(row):
    assert faults(row, LAB) == []


def test_every_link_of_the_page_leads_to_a_file_and_to_a_heading_of_it():
    links = re.findall(r"\]\(([^)#]*)(?:#([\w-]+))?\)", PAGE.read_text(encoding="utf-8"))
    assert len(links) > len(ROWS) // 2
    for target, fragment in set(links):
        there = (PAGE.parent / target).resolve()
        assert there.is_file(), f"docs/claims.md leads to {target}, which is not there"
        if fragment:
            assert fragment in {anchor(each) for each in headings(there)}, f"{target} has no heading #{fragment}"


def headings(path: Path) -> list[str]:
    cells = LAB.read(str(path.relative_to(ROOT))) if path.suffix == ".ipynb" else []
    prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    return re.findall(r"^#{1,3} (.+)$", "\n".join(prose or [path.read_text(encoding="utf-8")]), re.MULTILINE)


def test_the_page_is_read_as_a_whole():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert len(ROWS) == len(lines) - 2 * len({row.section for row in ROWS})
    assert len(ROWS) >= 35 and len({row.claim for row in ROWS}) == len(ROWS)


def test_a_figure_changed_in_its_last_digit_is_noticed_nearly_everywhere():
    """What is left are whole numbers that stand in the same output for something else."""
    tried = noticed = 0
    for row in ROWS:
        for place in re.finditer(r"\d(?![\d.]*\d)", row.claim):
            other = row.claim[: place.start()] + str((int(place[0]) + 3) % 10) + row.claim[place.end() :]
            if figures_of(prose_of(other)) != figures_of(prose_of(row.claim)):
                tried += 1
                noticed += bool(faults(replace(row, claim=other), LAB))
    assert tried > 150 and noticed >= 0.95 * tried, f"{noticed} of {tried}"


# ---- negative controls ---------------------------------------------------------------------------------------------

GOOD = Row(
    "Masks",
    1,
    'With `recipe 9`, 3 seeds, the mask costs -38.71 [-43.9, -34.4] points, 12.5 % of what it was: "missed".',
    '[03, "2. A *mask*, or none?"](../notebooks/03_some.ipynb#2-a-mask-or-none), cell `f002`',
    "`study.json: arms[bidirectional] > difference`; `study.json: min of arms[*] > n_seeds`; "
    "`study.json: share`; `study.json: verdicts[target~twice] > verdict`; `tests/test_some.py`, *it holds*",
)


@pytest.fixture
def lab(tmp_path):
    """A small lab in which GOOD is backed."""
    for folder in ("notebooks", "benchmarks/results", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    write_results(tmp_path)
    write_notebook(tmp_path, "a gap of −38.71 points\n")
    (tmp_path / "tests" / "test_some.py").write_text("class TestAll:\n    def test_it_holds(self): ...\n")
    return Lab(tmp_path)


def write_results(root, mean=-38.7149, verdict="missed"):
    arms = [{"name": "causal", "n_seeds": 5}, {"name": "bidirectional", "n_seeds": 3}]
    arms[1]["difference"] = {"mean": mean, "low": -43.92, "high": -34.41}
    verdicts = [{"target": "once", "verdict": "met"}, {"target": "twice", "verdict": verdict}]
    study = {"arms": arms, "share": 0.125, "verdicts": verdicts}
    (root / "benchmarks" / "results" / "study.json").write_text(json.dumps(study))


def write_notebook(root, text, count=1):
    def code(name, outputs, count):
        return {"cell_type": "code", "id": name, "source": "run()", "outputs": outputs, "execution_count": count}

    def prose(source):
        return {"cell_type": "markdown", "id": "m", "source": source.splitlines(keepends=True)}

    stream = [{"output_type": "stream", "text": [text]}] if text else []
    cells = [prose("# A notebook\n\n## 1. First"), code("f001", stream, 1)]
    cells += [prose("## 2. A *mask*, or none?\n\n```sh\n# no heading\n```"), code("f002", stream, count)]
    (root / "notebooks" / "03_some.ipynb").write_text(json.dumps({"cells": cells}))


def test_the_good_row_has_no_fault(lab):
    assert faults(GOOD, lab) == []
    bare = replace(GOOD, claim="A gap of -38.7 points.", measured="the cell alone")
    assert faults(bare, lab) == []


@pytest.mark.parametrize(
    ("field", "old", "new", "complaint"),
    [
        ("claim", "-38.71", "-38.72", "figure -38.72"),
        ("claim", "-38.71", "38.71", "figure 38.71"),
        ("claim", "[-43.9, -34.4]", "[-34.4, -43.9]", "do not stand together"),
        ("claim", "12.5 %", "12.5", "figure 12.5"),
        ("claim", "3 seeds", "4 seeds", "figure 4"),
        ("claim", "points", "points (n = 301)", "figure 301"),
        ("claim", '"missed"', '"met"', "the words of the file are ['missed']"),
        ("claim", ': "missed"', "", "the words of the file are ['missed']"),
        ("claim", "-38.71 [-43.9, -34.4] points, ", "", "no figure of the claim is from there"),
        ("shown", "f002", "f009", "no code cell `f009`"),
        ("shown", "f002", "f001", 'stands under "1. First"'),
        ("shown", "or none?", "or both?", "stands under"),
        ("shown", "#2-a-mask-or-none", "#2-a-mask", "stands under"),
        ("shown", "[03,", "[04,", "says 04 and leads to 03_some"),
        ("shown", "notebooks/03_some", "notebooks/03_other", "03_other"),
        ("shown", "cell `f002`", "somewhere", "cannot be read as a cell"),
        ("measured", "study.json: share", "other.json: share", "other.json"),
        ("measured", "> difference", "> distance", "no 'distance' in name, n_seeds, difference"),
        ("measured", "[bidirectional]", "[both]", "finds 0 of 2"),
        ("measured", "[target~twice]", "[target~e]", "finds 2 of 2"),
        ("measured", "min of arms", "max of arms", "figure 3"),
        ("measured", "it holds", "it held", "no test tests/test_some.py::test_it_held"),
        ("measured", "test_some.py", "test_none.py", "no test tests/test_none.py"),
        ("measured", "`study.json: share`", "somehow", "cannot be read as a path"),
        ("measured", "`study.json: share`", "the cell alone", "and names more"),
    ],
)
def test_a_wrong_row_is_named_with_what_is_wrong(lab, field, old, new, complaint):
    assert old in getattr(GOOD, field)
    found = faults(replace(GOOD, **{field: getattr(GOOD, field).replace(old, new)}), lab)
    assert any(complaint in each for each in found), found
    assert all(each.startswith("docs/claims.md, 'Masks', row 1 (") for each in found)


def test_a_benchmark_that_was_measured_anew_fails_the_page_until_it_follows(lab):
    write_results(lab.root, mean=-38.6)
    assert any("figure -38.71" in each for each in faults(GOOD, Lab(lab.root)))
    write_results(lab.root, verdict="met")
    assert any("words of the file" in each for each in faults(GOOD, Lab(lab.root)))


@pytest.mark.parametrize(("text", "count"), [("", 1), ("a gap of −38.71 points", None), ("a gap of -37.1 points", 1)])
def test_a_cell_that_does_not_show_it_fails_the_page(lab, text, count):
    write_notebook(lab.root, text, count)
    assert any("run the notebook" in each for each in faults(GOOD, Lab(lab.root)))


def test_a_path_to_everything_proves_nothing(lab):
    study = {"all": list(range(WIDEST + 1)), "one": [1]}
    (lab.root / "benchmarks" / "results" / "wide.json").write_text(json.dumps(study))
    row = replace(GOOD, claim="It took 17 steps.", shown="no cell; [none](../notebooks/none.md)")
    told = faults(replace(row, measured="`wide.json: all`"), lab)
    assert any("name a part of it" in each for each in told) and any("no notebooks/none.md" in each for each in told)


def test_a_table_that_is_none_of_claims_is_refused():
    head = "## Masks\n\n| claim | shown in | measured by |\n|---|---|---|\n"
    assert rows_of(head + "| a | b | c |") == [Row("Masks", 1, "a", "b", "c")]
    with pytest.raises(ValueError, match="2 cells"):
        rows_of(head + "| a | b |")


def test_figures_are_the_numbers_outside_of_names():
    claim = 'The F1 of `gpt2-mini` at 1,287 tokens, "5 of 6": −2.7 [-4.8, +0.7], 15.6 % and 3.'
    assert [each.text for each in figures_of(prose_of(claim))] == ["1,287", "-2.7", "-4.8", "+0.7", "15.6 %", "3"]
