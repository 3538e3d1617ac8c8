"""`labkit fuse`, as a user types it."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from labkit import models
from labkit.datasets.paraphrases import read_known_facts
from labkit.fusion import ENGINES, METHODS, generation
from labkit.fusion.answers import read_answers
from labkit.fusion.proofs import FAULTS

pytest.importorskip("pyarrow")

SMALL = ["--model", "tiny-llama", "--num-paraphrases", "2", "--max-questions", "6", "--few-shot", "2"]
SMALL += ["--max-new-tokens", "3", "--batch-size", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Commands run in an empty folder, where their default output goes."""
    monkeypatch.chdir(tmp_path)


def test_help_names_all_methods_and_engines_and_its_example_runs(labkit_command, tmp_path):
    code, out, err = labkit_command("fuse", "--help")
    assert (code, err) == (0, "") and "--json" in out
    assert all(name in out for name in [*METHODS, *ENGINES])
    (example,) = re.findall(r"Example: (labkit fuse .*)", out)
    arguments = shlex.split(example)[1:]
    arguments[arguments.index("--model") + 1] = "tiny-llama"
    code, out, err = labkit_command(*arguments, "--max-questions", "7", "--max-new-tokens", "2")
    assert code == 0, err
    (file,) = (tmp_path / "runs" / "fuse").iterdir()
    assert file.name == "known-facts_tiny-llama_fuse_n5_5-shot.feather"
    assert len(read_answers(file).rows) == 7


def test_a_run_prints_its_scores_and_leaves_one_file(labkit_command, tmp_path):
    code, out, err = labkit_command("fuse", *SMALL, "--output", "out.feather")
    assert (code, err) == (0, "")  # no bar, no remark: this is no terminal
    lines = out.splitlines()
    assert lines[0] == "out.feather: fuse (fast), tiny-llama on known-facts"
    assert re.match(r"all +6 +0\.000 +0\.000 to 0\.459", lines[2])
    assert "s per question" in lines[-1]
    rows = read_answers("out.feather").rows
    tested = {row.id: row.relation for row in read_known_facts("test")}
    assert {row["id"]: row["relation"] for row in rows}.items() <= tested.items()
    assert all(any(line.startswith(row["relation"]) for line in lines) for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["out.feather"]


def test_json_is_the_same_for_programs_and_rescoring_reproduces_it(labkit_command):
    code, out, err = labkit_command("fuse", *SMALL, "--output", "out.feather", "--lemmatize", "--json")
    assert (code, err) == (0, "")
    made = json.loads(out)
    assert made["scores"]["exact"]["n"] == 6 and made["settings"]["lemmatizer"] == "simplemma"
    before = open("out.feather", "rb").read()
    code, out, err = labkit_command("fuse", "--rescore", "out.feather", "--lemmatize", "--json")
    assert (code, err) == (0, "") and json.loads(out) == made
    assert open("out.feather", "rb").read() == before
    code, out, _ = labkit_command("fuse", "--rescore", "out.feather", "--output", "copy.feather")
    assert code == 0 and "lemmatised" not in out
    assert all(row["correct_lemmatised"] is None for row in read_answers("copy.feather").rows)
    code, _, err = labkit_command("fuse", "--rescore", "out.feather", "--output", "copy.feather")
    assert code == 2 and "copy.feather exists already" in err


def test_two_files_are_compared(labkit_command):
    for method in ("fuse", "concat"):
        assert labkit_command("fuse", *SMALL, "--method", method, "--output", f"{method}.feather")[0] == 0
    code, out, err = labkit_command("fuse", "--rescore", "fuse.feather", "--compare", "concat.feather")
    assert (code, err) == (0, "")
    assert re.search(
        r"^accuracy minus that of concat.feather: \+0.000 \(95 % interval -0\.\d+ to \+0\.\d+\); McNemar: .*p = 1$",
        out,
        re.M,
    )
    code, out, _ = labkit_command("fuse", "--rescore", "fuse.feather", "--compare", "concat.feather", "--json")
    assert code == 0 and json.loads(out)["mcnemar"]["neither"] == 6
    assert labkit_command("fuse", *SMALL, "--seed", "1", "--output", "other.feather")[0] == 0
    code, _, err = labkit_command("fuse", "--rescore", "fuse.feather", "--compare", "other.feather")
    assert code == 2 and "did not answer the same questions" in err


def test_an_interrupted_run_is_continued_with_resume(labkit_command, monkeypatch, tmp_path):
    batches, make = [], generation.make_engine

    def interrupted(name, model, batch, *args):
        batches.append(len(batch.counts))
        if len(batches) in (1, 4):
            raise KeyboardInterrupt
        return make(name, model, batch, *args)

    monkeypatch.setattr(generation, "make_engine", interrupted)
    code, out, err = labkit_command("fuse", *SMALL, "--output", "out.feather")
    assert (code, out) == (130, "") and "nothing was written" in err and not list(tmp_path.iterdir())
    code, out, err = labkit_command("fuse", *SMALL, "--output", "out.feather")
    assert (code, out) == (130, "") and "4 answers are in out.feather.jsonl: continue with --resume" in err
    code, _, err = labkit_command("fuse", *SMALL, "--output", "out.feather")
    assert code == 2 and "continue it with --resume" in err
    code, out, err = labkit_command("fuse", *SMALL, "--output", "out.feather", "--resume")
    assert (code, err) == (0, "") and batches[4:] == [2]


def test_questions_that_were_left_out_and_templates_are_said(labkit_command, tmp_path):
    rows = [{"id": str(n), "paraphrases": ["a", "b"][: 1 + (n > 1)], "answers": ["c"]} for n in range(6)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = labkit_command("fuse", "--dataset", "own.jsonl", *SMALL, "--few-shot", "0")
    assert code == 0 and "2 questions have too few paraphrases and were left out" in err
    asked = [{"qId": f"q{n}", "qText": f"where is it {n}?", "answers": ["here"]} for n in range(3)]
    (tmp_path / "web.json").write_text(json.dumps(asked))
    code, out, err = labkit_command("fuse", "--dataset", "webqa:web.json", *SMALL, "--few-shot", "1")
    assert code == 0 and "made by templates" in err and "mean of relations" not in out
    assert "1 questions were taken out, because they are few-shot examples from webqa:web.json" in err


def test_a_file_keeps_all_its_questions_unless_examples_are_wanted_from_it(labkit_command, tmp_path):
    rows = [{"id": str(n), "paraphrases": [f"Is it {n}?", f"It is {n}?"], "answers": ["yes"]} for n in range(8)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ask = ["fuse", "--dataset", "own.jsonl", "--model", "tiny-llama", "--max-new-tokens", "2", "--device", "cpu"]
    code, out, err = labkit_command(*ask, "--output", "all.feather")
    assert code == 0 and len(read_answers("all.feather").rows) == 8
    assert err == ""
    code, out, err = labkit_command(*ask, "--few-shot-from-data", "--output", "some.feather")
    assert code == 0 and len(read_answers("some.feather").rows) == 3
    assert "5 questions were taken out, because they are few-shot examples from own.jsonl" in err
    assert "Is it" in read_answers("some.feather").about["prefix"]
    assert "Is it" not in read_answers("all.feather").about["prefix"]
    code, out, err = labkit_command(*ask, "--few-shot", "0", "--output", "none.feather")
    assert (code, err) == (0, "") and len(read_answers("none.feather").rows) == 8


def test_rows_without_answers_are_answered_and_in_no_score(labkit_command, tmp_path):
    asked = [{"id": str(n), "paraphrases": [f"Is it {n}?"]} | ({"answers": ["yes"]} if n < 2 else {}) for n in range(5)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    ask = ["fuse", "--model", "tiny-llama", "--max-new-tokens", "2", "--device", "cpu", "--lemmatize"]
    code, out, err = labkit_command(*ask, "--dataset", "own.jsonl", "--output", "out.feather")
    assert code == 0 and "3 of 5 questions have no accepted answer and are not scored" in out
    assert re.search(r"^all +2 ", out, re.M)
    rows = read_answers("out.feather").rows
    assert all(row["generation"] for row in rows)
    assert [(row["correct"], row["correct_lemmatised"]) for row in rows] == [(False, False)] * 2 + [(None, None)] * 3
    code, out, _ = labkit_command("fuse", "--rescore", "out.feather", "--compare", "out.feather", "--json")
    found = json.loads(out)
    assert (
        found["scores"]["exact"]["n"],
        found["scores"]["exact"]["without_answers"],
        found["mcnemar"]["neither"],
    ) == (2, 3, 2)
    (tmp_path / "open.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked[2:]))
    code, out, err = labkit_command(*ask, "--dataset", "open.jsonl", "--output", "open.feather")
    assert code == 0 and "3 of 3 questions have no accepted answer" in out and "accuracy" not in out
    code, out, _ = labkit_command("fuse", "--rescore", "open.feather", "--json")
    assert code == 0 and json.loads(out)["scores"]["exact"]["accuracy"] is None
    code, _, err = labkit_command("fuse", "--rescore", "open.feather", "--compare", "open.feather")
    assert code == 2 and err == "labkit: there is no question to score\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model is missing"),
        (["--model", "no-such-model"], "no model is called 'no-such-model'"),
        ([*SMALL, "--method", "mean"], "fusion method is 'mean'; choose one of single"),
        ([*SMALL, "--engine", "slow"], "fusion engine is 'slow'; choose one of fast"),
        ([*SMALL, "--dataset", "no-such-set"], "no-such-set is no file and no known set"),
        ([*SMALL, "--dataset", "webqa:none.json"], "none.json"),
        ([*SMALL, "--dataset", "webqa"], "does not ship any: give webqa:FILE, .* of github.com/"),
        ([*SMALL, "--dataset", "lama"], "does not ship any: give lama:FOLDER, .* of github.com/"),
        ([*SMALL, "--num-paraphrases", "0"], "Invalid value for '--num-paraphrases'.*1"),
        ([*SMALL, "--num-paraphrases", "9"], "9 paraphrases: none of the 160 questions has enough"),
        (["--model", "tiny-llama", "--indexes", "0,5"], "index 5: none of the 160 questions.*the maximum is 5"),
        (["--model", "tiny-llama", "--indexes", "0,x"], "--indexes is '0,x'"),
        (["--model", "tiny-llama", "--indexes", "-1"], "give places from 0"),
        ([*SMALL, "--indexes", "0"], "give num_paraphrases, or indexes and repeat, not both"),
        ([*SMALL, "--few-shot", "99"], "99 few-shot examples were requested, but there are 32"),
        (
            ["--model", "tiny-llama", "--dataset", "own.jsonl", "--few-shot", "2", "--few-shot-from-data"],
            "no question is left",
        ),
        ([*SMALL, "--method", "weighted", "--weights", "1,x"], "--weights is '1,x'"),
        ([*SMALL, "--method", "weighted", "--weights", "1,2,3"], "2 paraphrases and 3 weights"),
        ([*SMALL, "--layer", "1"], "averages no layer"),
        ([*SMALL, "--lemmatizer", "porter"], "the lemmatiser is 'porter'"),
        ([*SMALL, "--device", "tpu9"], "the device is 'tpu9'"),
        ([*SMALL, "--output", "own.jsonl"], "own.jsonl exists already"),
        ([*SMALL, "--output", "."], "is a folder"),
        (["--rescore", "none.feather"], "none.feather is not a file"),
        (["--rescore", "own.jsonl"], "the Feather file own.jsonl cannot be read"),
        (["--rescore", "own.jsonl", "--model", "tiny-llama"], "--model does not apply with --rescore"),
        (["--compare", "own.jsonl"], "--compare needs --rescore"),
        (["--prove"], "--model is missing"),
        (["--prove", "--model", "tiny-llama", "--few-shot", "3"], "--few-shot does not apply with --prove"),
        (["--prove", "--model", "tiny-llama", "--engine", "slow"], "fusion engine is 'slow'"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(labkit_command, tmp_path, arguments, words):
    rows = [{"id": str(n), "paraphrases": ["a", "b"], "answers": ["c"]} for n in range(2)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = labkit_command("fuse", *arguments)
    assert (code, out) == (2, "")
    assert re.search(words, err) and err.startswith("labkit: ") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["own.jsonl"]


@pytest.mark.parametrize(
    ("engine", "code", "failed"),
    [("fast", 0, []), ("dense", 0, []), ("cacheless", 1, ["what has been read is not read again"])],
)
def test_proofs_exit_with_0_if_all_hold_and_with_1_otherwise(labkit_command, engine, code, failed):
    arguments = ("fuse", "--prove", "--model", "tiny-llama", "--engine", engine)
    got, out, err = labkit_command(*arguments, "--json")
    result = json.loads(out)
    assert (got, err, result["holds"]) == (code, "", not failed)
    assert [proof["name"] for proof in result["proofs"] if not proof["holds"]] == failed
    got, out, _ = labkit_command(*arguments)
    assert got == code and out.count("FAILS") == len(failed)


@pytest.mark.parametrize(("given", "used"), [((), "float32"), (("--dtype", "bfloat16"), "bfloat16")])
def test_proofs_are_in_float32_by_default_because_half_precision_proves_nothing(
    labkit_command, monkeypatch, given, used
):
    dtypes, load = [], models.load
    monkeypatch.setattr(models, "load", lambda *args, **kwargs: dtypes.append(kwargs["dtype"]) or load(*args, **kwargs))
    _, _, err = labkit_command("fuse", "--prove", "--model", "tiny-llama", "--json", *given)
    assert dtypes == [used] and ("this is no proof" in err) == bool(given)


def test_a_faulty_engine_exits_with_1(labkit_command, monkeypatch):
    fault = FAULTS[-1]
    monkeypatch.setattr(generation, "make_engine", lambda _, *read: fault.engine(*read))
    code, out, _ = labkit_command("fuse", "--prove", "--model", "tiny-llama")
    assert code == 1 and re.search(f"FAILS +{fault.caught_by}", out)
