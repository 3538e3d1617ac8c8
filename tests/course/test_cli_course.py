"""`labkit course`: build, list, check, grade, gradebook as a user types them."""

import json

import pytest

from labkit import cli
from labkit.course.build import build

pytestmark = pytest.mark.end_to_end
NAME = "a1_masks_and_attention.ipynb"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build(folder, names=["a1"])
    return folder


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["course", *map(str, arguments)])
    out = capsys.readouterr()
    return stopped.value.code, out.out, out.err


def test_the_list_names_every_assignment_with_its_points(capsys):
    code, out, _ = run(capsys, "list", "--json")
    first = json.loads(out)[0]
    assert code == 0 and first["name"] == "a1" and first["points"] == sum(e["points"] for e in first["exercises"])
    assert "Masks and attention" in run(capsys, "list")[1]


def test_build_writes_the_three_kinds_and_twice_the_same(capsys, tmp_path):
    code, out, _ = run(capsys, "build", "A1", "--output-dir", tmp_path / "one", "--variant", "s", "--json")
    assert code == 0 and len(json.loads(out)) == 4
    run(capsys, "build", "a1", "--output-dir", tmp_path / "two", "--variant", "s")
    for path in (tmp_path / "one").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()


def test_build_executes_the_solution_and_nothing_else(capsys, tmp_path):
    code, out, _ = run(capsys, "build", "a1", "--execute", "--output-dir", tmp_path)
    assert code == 0 and "4 files" in out
    for kind in ("student", "solution"):
        notebook = json.loads((tmp_path / kind / NAME).read_text(encoding="utf-8"))
        counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert counts == (list(range(1, len(counts) + 1)) if kind == "solution" else [None] * len(counts))


def test_check_says_how_far_one_is(capsys, built):
    code, out, _ = run(capsys, "check", built / "student" / NAME)
    assert code == 1 and "not begun" in out
    code, out, _ = run(capsys, "check", built / "solution" / NAME, "--json")
    found = json.loads(out)
    assert code == 0 and found["points"] == found["out_of"] and found["trouble"] == []


def test_grade_and_gradebook(capsys, built, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "ada.ipynb").write_bytes((built / "solution" / NAME).read_bytes())
    code, out, _ = run(capsys, "grade", tmp_path / "in", "--output-dir", tmp_path / "grades", "--jobs", 1)
    assert code == 0 and "23 of 23" in out
    code, out, _ = run(capsys, "grade", tmp_path / "in", "--output-dir", tmp_path / "grades")
    assert code == 0 and "1 of them kept" in out
    code, out, _ = run(capsys, "gradebook", tmp_path / "grades", "--kind", "canvas", "--output", tmp_path / "c.csv")
    assert code == 0 and "ada,,,ada,,23" in (tmp_path / "c.csv").read_text(encoding="utf-8")
    code, out, error = run(capsys, "gradebook", tmp_path / "grades", "--kind", "canvas", "--output", "-")
    assert code == 0 and out == (tmp_path / "c.csv").read_bytes().decode() and "1 grades" in error
    (tmp_path / "in" / "bea.ipynb").write_text("nothing")
    code, out, _ = run(capsys, "grade", tmp_path / "in", "--output-dir", tmp_path / "grades", "--json")
    assert code == 1 and [each["failure"] == "" for each in json.loads(out)] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "a9"], "no master of a9"),
        (["build", "--variant", " "], "empty"),
        (["grade", "nowhere"], "neither a notebook nor a folder"),
        (["check", "nowhere.ipynb"], "could not be read"),
        (["gradebook", "nowhere", "--kind", "canvas", "--output", "x.csv"], "holds no grades"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, _, error = run(capsys, *arguments)
    assert code == 2 and words in error and len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
