"""`labkit fuse`, as a user types it."""

from __future__ import annotations

import json
import os
import re
import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest

from labkit.datasets.paraphrases import read_known_facts
from labkit.fusion import ENGINES, METHODS, generation
from labkit.fusion.scores import read_answers

pytest.importorskip("pyarrow")

SMALL = ["--model", "tiny-llama", "--num-paraphrases", "2", "--max-questions", "6", "--few-shot", "2"]
SMALL += ["--max-new-tokens", "3", "--batch-size", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    """Commands run in a folder that contains only a small data set; the last three of its six rows have no answer."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": str(n), "paraphrases": [f"Is it {n}?", "b"][: 1 + (n > 1)]} for n in range(6)]
    rows = [row | ({"answers": ["yes"]} if number < 3 else {}) for number, row in enumerate(rows)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_help_names_all_methods_and_engines_and_its_example_runs(labkit_command, tmp_path):
    code, out, err = labkit_command("fuse", "--help")
    assert (code, err) == (0, "") and all(name in out for name in [*METHODS, *ENGINES, "--json"])
    (example,) = re.findall(r"Example: (labkit fuse .*)", out)
    arguments = shlex.split(example)[1:]
    arguments[arguments.index("--model") + 1] = "tiny-llama"
    code, out, err = labkit_command(*arguments, "--max-questions", "7", "--max-new-tokens", "2")
    assert code == 0, err
    (file,) = (tmp_path / "runs" / "fuse").iterdir()
    assert file.name.startswith("known-facts_tiny-llama_") and len(read_answers(file).rows) == 7


def test_a_run_prints_its_scores_and_rescoring_reproduces_them(labkit_command, tmp_path):
    code, out, err = labkit_command("fuse", *SMALL, "--output", "out.feather", "--lemmatize")
    assert (code, err) == (0, "")  # no bar, no remark: this is no terminal
    lines = out.splitlines()
    assert lines[0] == "out.feather: fuse (fast), tiny-llama on known-facts"
    assert re.match(r"all +6 +0\.000 +0\.000 to 0\.459", lines[2]) and "s per question" in lines[-1]
    rows = read_answers("out.feather").rows
    tested = {row.id: row.relation for row in read_known_facts("test")}
    assert {row["id"]: row["relation"] for row in rows}.items() <= tested.items()
    assert all(any(line.startswith(row["relation"]) for line in lines) for row in rows)
    assert {path.name for path in tmp_path.iterdir()} == {"out.feather", "own.jsonl"}
    assert labkit_command("fuse", "--rescore", "out.feather", "--lemmatize") == (0, out, "")
    code, out, _ = labkit_command("fuse", "--rescore", "out.feather", "--output", "copy.feather", "--json")
    scores = json.loads(out)
    assert scores["scores"]["exact"]["n"] == 6 and scores["settings"]["lemmatizer"] == "simplemma"
    assert "lemmatised" not in scores["scores"]
    assert all(row["correct_lemmatised"] is None for row in read_answers("copy.feather").rows)


def test_two_files_are_compared(labkit_command):
    for name, more in {"fuse": [], "concat": ["--method", "concat"], "other": ["--seed", "1"]}.items():
        assert labkit_command("fuse", *SMALL, *more, "--output", f"{name}.feather")[0] == 0
    compare = ["fuse", "--rescore", "fuse.feather", "--compare"]
    out, err = labkit_command(*compare, "concat.feather")[1:]
    assert err == "" and re.search(r"^accuracy minus .*: \+0.000 \(95 % interval -0.*p = 1$", out, re.M)
    assert json.loads(labkit_command(*compare, "concat.feather", "--json")[1])["mcnemar"]["neither"] == 6
    code, _, err = labkit_command(*compare, "other.feather")
    assert code == 2 and "did not answer the same questions" in err


def interrupted(*_):
    raise KeyboardInterrupt


def test_an_interrupted_run_is_continued_with_resume(labkit_command, monkeypatch):
    run = ["fuse", *SMALL, "--output", "out.feather"]
    with monkeypatch.context() as patch:
        engines = iter([generation.make_engine] * 2)  # the third batch finds none
        patch.setattr(generation, "make_engine", lambda *arguments: next(engines, interrupted)(*arguments))
        code, out, err = labkit_command(*run)
    assert (code, out) == (130, "") and "the same command with --resume continues" in err
    assert labkit_command(*run)[0] == 2
    code, _, err = labkit_command(*run, "--resume")
    assert (code, err) == (0, "") and len(read_answers("out.feather").rows) == 6


def test_a_pipe_gets_the_whole_file(labkit_command, tmp_path):
    os.mkfifo("pipe")
    reader = ThreadPoolExecutor(1).submit((tmp_path / "pipe").read_bytes)
    assert labkit_command("fuse", *SMALL, "--output", "pipe")[0] == 0
    (tmp_path / "copy.feather").write_bytes(reader.result(60))
    assert len(read_answers("copy.feather").rows) == 6


def test_questions_that_are_left_out_or_taken_out_and_templates_are_counted(labkit_command, tmp_path):
    code, _, err = labkit_command("fuse", "--dataset", "own.jsonl", *SMALL)
    assert code == 0 and err == "labkit: 2 questions have too few paraphrases and were left out\n"
    asked = [{"qId": f"q{n}", "qText": f"where is it {n}?", "answers": ["here"]} for n in range(3)]
    (tmp_path / "web.json").write_text(json.dumps(asked))
    code, out, err = labkit_command("fuse", "--dataset", "webqa:web.json", *SMALL, "--few-shot", "1")
    assert code == 0 and "made by templates" in err and "1 questions were taken out" in err


def test_rows_without_answers_are_answered_and_in_no_score(labkit_command):
    ask = ["fuse", "--dataset", "own.jsonl", "--model", "tiny-llama", "--max-new-tokens", "2", "--device", "cpu"]
    code, out, err = labkit_command(*ask, "--lemmatize", "--output", "out.feather")
    assert (code, err) == (0, "") and "3 of 6 questions have no accepted answer" in out
    rows = read_answers("out.feather").rows
    assert all(row["generation"] for row in rows)
    assert [(row["correct"], row["correct_lemmatised"]) for row in rows] == [(False, False)] * 3 + [(None, None)] * 3
    code, out, _ = labkit_command("fuse", "--rescore", "out.feather", "--compare", "out.feather", "--json")
    assert json.loads(out)["scores"]["exact"]["n"] == json.loads(out)["mcnemar"]["neither"] == 3
    few = ["--few-shot", "2", "--few-shot-from-data", "--output", "some.feather"]
    code, out, err = labkit_command(*ask, *few)
    assert code == 0 and "2 questions were taken out" in err
    assert "Is it" in read_answers("some.feather").about["prefix"] not in read_answers("out.feather").about["prefix"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model is missing"),
        (["--model", "no-such-model"], "no model is called 'no-such-model'"),
        ([*SMALL, "--dataset", "no-such-set"], "no-such-set is no file and no known set"),
        ([*SMALL, "--num-paraphrases", "0"], "Invalid value for '--num-paraphrases'.*1"),
        (["--model", "tiny-llama", "--indexes", "0,x"], "--indexes is '0,x'"),
        ([*SMALL, "--method", "weighted", "--weights", "1,x"], "--weights is '1,x'"),
        ([*SMALL, "--output", "own.jsonl"], "own.jsonl exists already"),
        (["--rescore", "own.jsonl"], "the Feather file own.jsonl cannot be read"),
        (["--rescore", "own.jsonl", "--model", "tiny-llama"], "--model does not apply with --rescore"),
        (["--compare", "own.jsonl"], "--compare has an effect only with --rescore"),
        (["--rescore", "none.feather"], "none.feather does not exist"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(labkit_command, tmp_path, arguments, words):
    code, out, err = labkit_command("fuse", *arguments)
    assert (code, out) == (2, "")
    assert re.search(words, err) and err.startswith("labkit: ") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["own.jsonl"]
