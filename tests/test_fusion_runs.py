"""A run leaves one file that describes itself; interrupted anywhere, it continues and ends the same."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import labkit
from labkit.datasets.paraphrases import ParaphrasedQuestion, read_known_facts, read_paraphrases
from labkit.errors import DataError, ModelError
from labkit.fusion import answers, generation, runs, scores
from labkit.fusion.few_shot import CUE, asked, examples_for, prefix_of, take_shots
from labkit.fusion.generation import generate
from labkit.fusion.runs import Settings, journal_of, plan, read_journal, run

pytest.importorskip("pyarrow")

QUESTIONS = [
    {
        "id": f"q{number:02}",
        "relation": ("river", "money")[number % 2],
        "paraphrases": [f"Where is it {number}?", f"In what place is {number} ____", f"the {number} river"],
        "answers": [f"bank {number}", "mat"],
    }
    for number in range(11)
]


@pytest.fixture
def settings(tmp_path):
    dataset = write_set(tmp_path / "set.jsonl", QUESTIONS)
    return Settings(
        dataset, "tiny-llama", num_paraphrases=3, few_shot=2, batch_size=4, max_new_tokens=4, device="cpu", seed=3
    )


def write_set(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def without_seconds(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


class Stopped(Exception):
    pass


def stop_at_batch(monkeypatch, number):
    """Reading breaks off at the batch of this number, from 0; returns the sizes of the batches until then."""
    sizes, make = [], generation.make_engine

    def breaks_off(name, model, batch, *args):
        sizes.append(len(batch.counts))
        if len(sizes) > number:
            raise Stopped
        return make(name, model, batch, *args)

    monkeypatch.setattr(generation, "make_engine", breaks_off)
    return sizes


def interrupted_run(settings, output, batches=1):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_at_batch(patch, batches)
        run(settings, output)


# ---- a run and its file --------------------------------------------------------------------------------------------


def test_the_file_contains_the_answers_and_how_they_were_made(settings, tmp_path):
    output = tmp_path / "new" / "out.feather"
    made = run(settings, output)
    stored = answers.read_answers(output)
    assert stored.rows == made.rows and stored.about == made.about
    assert answers.judged(stored).rows == made.rows
    assert [row["id"] for row in stored.rows] == [question.id for question in plan(settings).questions]
    by_id = {row["id"]: row for row in QUESTIONS}
    for row in stored.rows:
        own = by_id[row["id"]]
        assert (row["paraphrases"], row["answers"]) == (own["paraphrases"], own["answers"])
        assert row["prompt"] == [f"Question: {text}\n" for text in own["paraphrases"]]
        assert (row["relation"], row["method"], row["engine"]) == (own["relation"], "fuse", "fast")
        assert row["prediction"] == scores.first_line(row["generation"])
        assert row["correct"] is scores.exact_match(row["prediction"], own["answers"])
        assert row["seconds"] > 0 and row["votes"] is None and row["correct_lemmatised"] is None
    about = stored.about
    assert about["settings"]["seed"] == 3 and about["settings"]["model"] == "tiny-llama"
    assert about["versions"]["torch"] == torch.__version__ and about["versions"]["labkit"] == labkit.__version__
    assert about["prefix"] == plan(settings).prefix and about["model"]["dtype"] == "float32"
    assert [path.name for path in output.parent.iterdir()] == ["out.feather"]


def test_one_paraphrase_is_answered_as_transformers_answers_the_prompt_in_the_file(settings, tmp_path):
    made = run(replace(settings, num_paraphrases=1), tmp_path / "out.feather")
    lm = labkit.load("tiny-llama", device="cpu")

    def ids(text):
        return lm.tokenizer(text, add_special_tokens=False)["input_ids"]

    for row in made.rows:
        prompt = [*lm.tokenizer("")["input_ids"], *ids(made.about["prefix"]), *ids("".join(row["prompt"])), *ids(CUE)]
        output = lm.model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, len(prompt) :]
        assert row["prediction"] == scores.first_line(lm.tokenizer.decode(output, skip_special_tokens=True))


def test_methods_and_choices_are_in_the_file(settings, tmp_path):
    few = replace(settings, max_questions=3)
    for row in run(replace(few, method="majority-vote"), tmp_path / "votes.feather").rows:
        assert sum(row["votes"].values()) == 3 and scores.normalised(row["prediction"]) in row["votes"]
    for row in run(replace(few, method="single"), tmp_path / "single.feather").rows:
        assert row["prompt"] == [asked(row["paraphrases"][0]) + "\n"]
    second = replace(few, num_paraphrases=None, indexes=(1,))
    alone, copies = run(second, tmp_path / "alone.feather"), run(replace(second, repeat=4), tmp_path / "copies.feather")
    assert [row["generation"] for row in copies.rows] == [row["generation"] for row in alone.rows]
    assert all(row["paraphrases"] == QUESTIONS[int(row["id"][1:])]["paraphrases"][1:2] * 4 for row in copies.rows)
    weighted = replace(few, method="weighted", weights=(1.0, 1.0, 1.0))
    texts = [[row["generation"] for row in run(s, tmp_path / f"{s.method}.feather").rows] for s in (few, weighted)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("method", ["fuse", "majority-vote"])
def test_an_answer_that_begins_with_a_line_end_is_continued(settings, tmp_path, method):
    lm = labkit.load("tiny-llama", device="cpu")
    (line_end,) = lm.tokenizer("\n", add_special_tokens=False)["input_ids"]
    cue = lm.tokenizer(CUE, add_special_tokens=False)["input_ids"]

    def begin_with_a_line_end(module, args, kwargs, output):
        if kwargs["input_ids"][0].tolist()[-len(cue) :] == cue:
            output.logits[:, -1, line_end] += 1e4
        return output

    lm.model.register_forward_hook(begin_with_a_line_end, with_kwargs=True)
    made = run(replace(settings, method=method), tmp_path / "out.feather", lm=lm)
    for row in made.rows:
        texts = [asked(text) for text in row["paraphrases"]]
        (whole,) = generate(lm, [texts], method, prefix=made.about["prefix"], max_new_tokens=4).texts
        assert row["generation"].startswith("\n") and row["prediction"] == scores.first_line(whole) != ""


def test_with_a_stop_the_prediction_is_all_up_to_it(settings, tmp_path):
    free = run(replace(settings, few_shot=0), tmp_path / "free.feather")
    row = next(row for row in free.rows if len(row["generation"].strip()) > 2)
    letter = row["generation"].strip()[-1]
    made = run(replace(settings, few_shot=0, stop=(letter,)), tmp_path / "out.feather")
    assert all(letter not in row["prediction"] == row["generation"].strip() for row in made.rows)


# ---- interrupted anywhere ------------------------------------------------------------------------------------------


def test_a_killed_process_continues_and_ends_with_the_same_file(tmp_path):
    command = [sys.executable, "-m", "labkit", "fuse", "--model", "tiny-llama", "--num-paraphrases", "2"]
    command += ["--max-questions", "40", "--max-new-tokens", "4", "--batch-size", "1", "--device", "cpu"]
    output = tmp_path / "out.feather"
    process = subprocess.Popen([*command, "--output", str(output)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(read_journal(journal_of(output))[1]) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = read_journal(journal_of(output))[1]
    assert 3 <= len(kept) < 40 and not output.exists()
    for path in (output, tmp_path / "whole.feather"):
        resume = ["--resume"] if path == output else []
        subprocess.run([*command, "--output", str(path), *resume], check=True, stdout=subprocess.DEVNULL)
    again, whole = answers.read_answers(output), answers.read_answers(tmp_path / "whole.feather")
    assert without_seconds(again.rows) == without_seconds(whole.rows) and again.about == whole.about
    assert [row["seconds"] for row in again.rows][: len(kept)] == [line["seconds"] for line in kept]
    assert {path.name for path in tmp_path.iterdir()} == {"out.feather", "whole.feather"}


def test_a_journal_torn_at_any_byte_is_continued(settings, tmp_path, monkeypatch):
    whole = run(settings, tmp_path / "whole.feather")
    output = tmp_path / "out.feather"
    interrupted_run(settings, output, batches=2)
    content = journal_of(output).read_bytes()
    lines = content.splitlines(keepends=True)
    assert len(lines) == 9
    last = len(content) - len(lines[-1])
    for cut in (0, 5, len(lines[0]) - 1, len(lines[0]), last - 1, last, last + 7, len(content) - 1, len(content)):
        journal_of(output).write_bytes(content[:cut])
        batches_kept = max(0, content[:cut].count(b"\n") - 1) // 4
        with monkeypatch.context() as patch:
            sizes = stop_at_batch(patch, 99)
            again = run(settings, output, resume=True)
        assert sum(sizes) == 9 - 4 * batches_kept
        assert without_seconds(again.rows) == without_seconds(whole.rows) and again.about == whole.about
        assert [path.name for path in tmp_path.glob("out*")] == ["out.feather"]
        output.unlink()


def test_a_failure_to_write_keeps_the_journal_and_a_finished_run_is_not_repeated(settings, tmp_path, monkeypatch):
    output = tmp_path / "out.feather"

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        with pytest.raises(OSError, match=r"No space left.*out.feather"):
            run(settings, output)
    assert [path.name for path in tmp_path.glob("*out*")] == ["out.feather.jsonl"]
    made = run(settings, output, resume=True)
    journal_of(output).write_text(json.dumps(made.about) + "\n")  # killed before the journal was removed
    monkeypatch.setattr(runs, "load", lambda *args, **kwargs: pytest.fail("loaded a model"))
    assert run(settings, output, resume=True).rows == made.rows
    assert not journal_of(output).exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "concat", "few_shot": 1}, "method was 'fuse', now 'concat'; few_shot was 2, now 1"),
        ({"num_paraphrases": None, "indexes": (0, 2)}, r"indexes was None, now \[0, 2\]"),
        ({"answers": ["changed"]}, "questions_sha256 was"),
    ],
)
@pytest.mark.parametrize("state", ["begun", "finished"])
def test_a_run_of_other_settings_or_data_is_not_continued(settings, tmp_path, changed, message, state):
    output = tmp_path / "out.feather"
    if state == "finished":
        run(settings, output)
    else:
        interrupted_run(settings, output)
    (path,) = tmp_path.glob("out*")
    before = path.read_bytes()
    if "answers" in changed:
        write_set(tmp_path / "set.jsonl", [*QUESTIONS[:-1], QUESTIONS[-1] | changed])
        changed = {}
    with pytest.raises(DataError, match=f"begun with other settings: .*{message}"):
        run(replace(settings, **changed), output, resume=True)
    assert path.read_bytes() == before and list(tmp_path.glob("out*")) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.lm_head.weight.data.mul_(1.001), "weights was '"),
        (lambda model: model.double(), "dtype was 'float32', now 'float64'"),
        (lambda model: model.set_attn_implementation("eager"), "attention was 'sdpa', now 'eager'"),
    ],
    ids=["weights", "dtype", "attention"],
)
def test_another_model_of_the_same_name_does_not_continue(settings, tmp_path, change, message):
    output = tmp_path / "out.feather"
    interrupted_run(settings, output)
    before = journal_of(output).read_bytes()
    lm = labkit.load("tiny-llama", device="cpu")
    change(lm.model)
    with pytest.raises(DataError, match=message):
        run(settings, output, resume=True, lm=lm)
    assert journal_of(output).read_bytes() == before and not output.exists()


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_existing_files_are_not_overwritten_and_damaged_journals_are_named(settings, tmp_path):
    output = tmp_path / "out.feather"
    interrupted_run(settings, output)
    (tmp_path / "mine.feather").write_bytes(b"mine")
    for path, message in {
        "mine.feather": "mine.feather exists already",
        "out.feather": "contains an interrupted run: continue it with --resume",
        ".": "is a folder",
    }.items():
        with pytest.raises(DataError, match=message):
            run(settings, tmp_path / path)
    lines = journal_of(output).read_text().splitlines(keepends=True)
    journal_of(output).write_text("".join([*lines[:2], "{}\n", *lines[3:]]))
    with pytest.raises(DataError, match=r"out.feather.jsonl, line 3 is damaged"):
        run(settings, output, resume=True)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"method": "mean"}, DataError, "the fusion method is 'mean'; choose one of single"),
        ({"engine": "slow"}, DataError, "the fusion engine is 'slow'; choose one of fast"),
        ({"method": "weighted"}, DataError, "needs a weight for each paraphrase"),
        ({"weights": (1.0, 2.0)}, DataError, "takes no weights"),
        ({"method": "weighted", "weights": (1.0, 2.0)}, DataError, "question 0 has 3 paraphrases and 2 weights"),
        ({"indexes": (0,)}, DataError, "not both"),
        ({"repeat": 2}, DataError, "not both"),
        ({"num_paraphrases": None, "indexes": ()}, DataError, "give places from 0"),
        ({"num_paraphrases": None, "indexes": (1, 1)}, DataError, "contain a place twice"),
        ({"num_paraphrases": None, "indexes": (4,), "at_least": 2}, DataError, "index 4 needs 5"),
        ({"num_paraphrases": 4}, DataError, "4 paraphrases: none of the 9 questions"),
        ({"num_paraphrases": None, "indexes": (0, 3)}, DataError, "index 3: none of the 9 questions"),
        ({"few_shot": 12}, DataError, "12 few-shot examples were requested, but there are 11"),
        ({"few_shot": 11}, DataError, "no question is left"),
        ({"max_new_tokens": 1100}, DataError, "the model has 1,024"),
    ],
)
def test_invalid_settings_are_refused_and_nothing_is_written(settings, tmp_path, changed, error, message):
    with pytest.raises(error, match=message):
        run(replace(settings, **changed), tmp_path / "out.feather")
    assert not list(tmp_path.glob("out*"))


def test_files_that_contain_no_answers_are_refused(settings, tmp_path, monkeypatch):
    import pyarrow
    from pyarrow import feather

    (tmp_path / "text.feather").write_text("hello")
    for name, columns in {
        "few.feather": {"id": ["a"], "answers": [["b"]]},
        "types.feather": {"id": [1], "answers": [["b"]], "prediction": ["b"]},
    }.items():
        feather.write_feather(pyarrow.table(columns), str(tmp_path / name))
    for name, message in {
        "none.feather": "is not a file",
        "text.feather": "text.feather cannot be read",
        "few.feather": "has no column 'prediction'",
        "types.feather": "types.feather cannot be read",
    }.items():
        with pytest.raises(DataError, match=message):
            answers.read_answers(tmp_path / name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModelError, match=r"pip install \"labkit-bidirectional\[fusion\]\""):
        run(settings, tmp_path / "out.feather")


# ---- scores of files -----------------------------------------------------------------------------------------------


def test_summary_and_comparison_by_hand():
    def file(name, correct):
        rows = [
            {"id": str(n), "relation": "ab"[n % 2], "answers": ["cities"], "prediction": "city" if ok else "town"}
            for n, ok in enumerate(correct)
        ]
        return answers.judged(answers.Answers(Path(name), rows, {}), scores.load_lemmatizer())

    one, other = file("one", [1, 1, 1, 0, 1, 0, 1, 1]), file("other", [1, 0, 0, 1, 0, 0, 1, 0])
    assert answers.summary(one)["accuracy"]["value"] == 0.0  # "city" is not "cities" ...
    assert answers.summary(one, True)["accuracy"]["value"] == 6 / 8  # ... but a form of it
    assert answers.summary(one, True)["by_relation"]["b"]["value"] == 2 / 4
    result = answers.comparison(one, other, True)
    assert result["difference"]["value"] == 3 / 8
    assert (result["mcnemar"]["only_one"], result["mcnemar"]["only_other"]) == (4, 1)
    assert result["mcnemar"]["p"] == pytest.approx(2 * (1 + 5) / 2**5)
    other.rows[0]["answers"] = ["villages"]
    with pytest.raises(DataError, match="has different accepted answers"):
        answers.comparison(one, other)


# ---- which questions, which paraphrases, which examples ------------------------------------------------------------

QUESTION = ParaphrasedQuestion("x", ("a", "b", "c", "d"), ("y",))


@pytest.mark.parametrize(
    ("choice", "texts", "label"),
    [
        ({}, "abcd", "all"),
        ({"num_paraphrases": 2}, "ab", "n2"),
        ({"num_paraphrases": 9, "at_least": 2}, "abcd", "n9"),
        ({"indexes": (3, 0)}, "da", "i3-0"),
        ({"repeat": 3}, "aaa", "i0x3"),
        ({"indexes": (2, 1), "repeat": 2}, "cc", "i2x2"),
    ],
)
def test_the_chosen_paraphrases_and_the_name_of_their_file(choice, texts, label):
    settings = Settings("webqa:data/web questions.json", "org/Some-Model", engine="dense", **choice)
    assert "".join(settings.chosen(QUESTION)) == texts
    assert str(runs.default_output(settings)) == f"runs/fuse/web-questions_Some-Model_fuse-dense_{label}_5-shot.feather"


def test_questions_with_too_few_paraphrases_are_left_out_and_counted(settings, tmp_path):
    short = [QUESTIONS[n] | {"id": f"s{n}", "paraphrases": [f"short {n}"]} for n in range(4)]
    settings = replace(settings, dataset=write_set(tmp_path / "some.jsonl", QUESTIONS + short), few_shot=0)
    assert (plan(settings).left_out, len(plan(settings).questions)) == (4, 11)
    fewer = plan(replace(settings, at_least=1))
    assert (fewer.left_out, {len(texts) for texts in fewer.texts}) == (0, {1, 3})
    assert plan(replace(settings, num_paraphrases=1, at_least=3)).questions == plan(settings).questions


@pytest.mark.parametrize("seed", range(3))
def test_no_example_is_asked_and_examples_do_not_depend_on_the_choice(settings, tmp_path, seed):
    twin = QUESTIONS[0] | {"id": "twin", "paraphrases": ["where is  IT 0?", "of course", "and so"]}
    settings = replace(settings, seed=seed, dataset=write_set(tmp_path / "twin.jsonl", [*QUESTIONS, twin]))
    planned = plan(settings)
    assert len(planned.shots) == 2 and len({shot.relation for shot in planned.shots}) == 2
    examples = {" ".join(text.casefold().split()) for shot in planned.shots for text in shot.paraphrases}
    questions = {" ".join(text.casefold().split()) for texts in planned.texts for text in texts}
    assert not examples & questions
    assert planned.taken_out + len(planned.questions) == 12
    assert plan(replace(settings, num_paraphrases=1, max_questions=3)).shots == planned.shots


def test_examples_of_the_embedded_facts_are_their_own_split():
    facts = read_paraphrases("known-facts")
    shots, rest = take_shots("known-facts", facts, 5, 0)
    assert rest == facts and set(shots) <= set(read_known_facts("shots"))
    assert len({shot.relation for shot in shots}) == 5
    drawn, left = take_shots("known-facts:shots", read_known_facts("shots"), 5, 0)
    assert not {shot.id for shot in drawn} & {question.id for question in left}


def test_examples_for_a_users_file_are_known_facts_unless_it_gives_them(tmp_path):
    fact = read_known_facts("shots")[0]
    rows = [{"paraphrases": [f"What is {n}?"], "answers": ["it"] if n else []} for n in range(4)]
    file = write_set(tmp_path / "own.jsonl", [*rows, {"id": fact.id, "paraphrases": ["Else?"], "answers": ["that"]}])
    questions = read_paraphrases(file, unanswered=True)
    assert examples_for(file) == "known-facts"
    assert {examples_for(name) for name in ("known-facts", f"webqa:{file}", f"lama:{tmp_path}", "none.jsonl")} == {None}
    shots, rest = take_shots(file, questions, 32, 0, examples_for(file))
    assert set(shots) == set(read_known_facts("shots")) and rest == questions
    same = ParaphrasedQuestion("own", (fact.paraphrases[0].upper(),), ())
    assert take_shots(file, [*questions, same], 32, 0, "known-facts")[1] == questions, "its answer is in the prefix"
    drawn, rest = take_shots(file, questions, 4, 0)
    assert all(shot.answers for shot in drawn) and rest == questions[:1]


def test_the_prefix_contains_each_example_once_with_its_first_answer():
    shots = [QUESTION, ParaphrasedQuestion("z", ("____ is it.", "It is ____."), ("Oslo", "Kristiania"))]
    assert {prefix_of(shots, seed) for seed in range(40)} == {
        f"Question: {one}\nAnswer: y\n\nQuestion: {two}\nAnswer: Oslo\n\n"
        for one in QUESTION.paraphrases
        for two in shots[1].paraphrases
    }
    assert prefix_of([], 0) == ""
