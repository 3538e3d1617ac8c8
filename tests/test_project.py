"""The promises of the project's own files: commands, environment, rules for notebooks."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from labkit.notebooks import DISTRIBUTION, FIRST_CELL

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def text_of(file):
    return (ROOT / file).read_text(encoding="utf-8")


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_lists_every_notebook_with_the_minutes_that_it_states():
    row = r"^\| \[\w+\]\((notebooks/\d\d_\w+\.ipynb)\) \| .+ \| (\d+ to \d+) \|$"
    listed = re.findall(row, text_of("README.md"), re.M)
    names = [f"notebooks/{path.name}" for path in NOTEBOOKS if path.name[:2].isdigit()]
    stated = [re.search(r"\*\*Time\*\* \| (\d+ to \d+) minutes", text_of(name))[1] for name in names]
    assert listed == list(zip(names, stated, strict=True))


# ---- environment ---------------------------------------------------------------------------------------------------


def test_every_requirement_has_one_exact_version_inside_its_range():
    lines = [line for line in text_of("constraints.txt").splitlines() if not line.startswith("#")]
    pins = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines]  # no path, no URL, no local build
    exact = {canonicalize_name(name): Version(version) for name, version in pins}
    assert len(exact) == len(pins)
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for need in [Requirement(line) for group in groups for line in group]:
        if canonicalize_name(need.name) != DISTRIBUTION:
            assert exact[canonicalize_name(need.name)] in need.specifier, need


def test_the_distribution_is_not_called_labkit_because_another_package_has_that_name():
    assert PROJECT["name"] == DISTRIBUTION != "labkit"
    for file in ("README.md", "Makefile", "environment.yml", "pyproject.toml"):
        assert not re.search(r"install (-\S+ )*[\"']?labkit[\[\"' \n]", text_of(file)), file


CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("index", "on_linux", "gpu", "attempts"),
    [
        ("", True, False, [["torch==2.13.0+cpu"], ["--index-url", CPU_INDEX, "torch==2.13.0+cpu"]]),
        ("", True, True, [["torch==2.13.0"]]),
        ("", False, False, [["torch==2.13.0"]]),
        ("default", True, False, [["torch==2.13.0"]]),
        ("https://example.org/whl", True, False, [["--index-url", "https://example.org/whl", "torch==2.13.0"]]),
    ],
)
def test_linux_without_a_gpu_takes_a_cpu_build_of_torch_and_never_the_default(index, on_linux, gpu, attempts):
    assert script("setup_env").torch_attempts("2.13.0", index, on_linux, gpu) == attempts


# ---- the rules for committed notebooks -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_notebook_keeps_the_rules(path):
    assert script("check_notebooks").faults_of(path) == []


def cell(source, number, tags=(), outputs=()):
    about = {"cell_type": "code", "id": f"c{number}", "source": source, "execution_count": number}
    return about | {"metadata": {"tags": list(tags)}, "outputs": list(outputs)}


def printed(text):
    return {"output_type": "stream", "name": "stdout", "text": [text]}


FAILED = {"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []}
GOOD = [cell(FIRST_CELL, 1), cell("print(1)", 2, ["nbval-check-output"], [printed("1")])]


def checked(folder, cells):
    path = folder / "00_x.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {"kernelspec": {"name": "python3"}}}))
    return "\n".join(script("check_notebooks").faults_of(path))


@pytest.mark.parametrize(
    ("cells", "fault"),
    [
        ([*GOOD, cell("1 / 0", 3, ["raises-exception"], [FAILED])], "^$"),
        ([cell("import labkit", 1), GOOD[1]], "FIRST_CELL"),
        ([GOOD[0], cell("print(1)", 2)], "compare nothing"),
        ([*GOOD, cell("x", None)], "c[^:]*: was not executed"),
        ([*GOOD, cell("x", 7)], "top to bottom"),
        ([*GOOD, cell("x", 3, outputs=[FAILED])], "ends in ValueError"),
        ([*GOOD, cell("x\n" * 26, 3)], "26 lines"),
        ([*GOOD, cell("x", 3, outputs=[{**FAILED, "traceback": ["/tmp/" + "ipykernel_1/1.py"]}])], "path of a machine"),
    ],
)
def test_each_broken_rule_is_named(tmp_path, cells, fault):
    assert re.search(fault, checked(tmp_path, cells))


@pytest.mark.parametrize(
    ("count", "ledger", "fault"),
    [
        (97, "| 00_x.ipynb | cNone | needs a GPU |\n", "^$"),
        (97, "| 00_x.ipynb | cNone |  |\n", "no reason"),
        (97, "| 00_x.ipynb | cNone | a GPU |\n| 00_x.ipynb | c9 | gone |\n", "c9 is listed, but not skipped"),
        (0, "| 00_x.ipynb | cNone | needs a GPU |\n", "1 of 3 code cells"),
    ],
)
def test_skipped_cells_and_their_ledger_must_agree(tmp_path, count, ledger, fault):
    cells = [*GOOD, *(cell("x", n) for n in range(3, 3 + count)), cell("needs a GPU", None, ["nbval-skip"])]
    assert checked(tmp_path, cells) == ""
    (tmp_path / "SKIPPED.md").write_text(ledger)
    faults = script("check_notebooks").faults_of_ledger([tmp_path / "00_x.ipynb"], tmp_path / "SKIPPED.md")
    assert re.search(fault, "\n".join(faults))
