"""A run leaves one file that describes itself; interrupted anywhere, it continues and ends the same."""

import json
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

import labkit
from labkit.datasets.paraphrases import ParaphrasedQuestion, read_known_facts, read_paraphrases
from labkit.errors import DataError, ModelError
from labkit.fusion import generation, scores
from labkit.fusion.methods import Settings
from labkit.fusion.runs import journal_of, plan, prefix_of, run, take_shots
from labkit.fusion.scores import read_answers
from tests.data_files import write

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
TEXTS = ("a", "b", "c", "d")


@pytest.fixture
def settings(tmp_path):
    return Settings(
        str(write(tmp_path / "set.jsonl", QUESTIONS)), None, "tiny-llama", num_paraphrases=3, few_shot=2,
        few_shot_from_data=True, batch_size=4, max_new_tokens=4, device="cpu", seed=3,
    )  # fmt: skip


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.feather"


def same_but_for_seconds(one, other):
    rows = [[row | {"seconds": 0} for row in answers.rows] for answers in (one, other)]
    return rows[0] == rows[1] and one.about == other.about


def interrupted_run(settings, output, batches=1, **more):
    """A run in which reading breaks off after so many batches; returns the sizes of the batches."""
    sizes, make = [], generation.make_engine

    def breaks_off(name, model, batch, *args):
        if len(sizes) == batches:
            raise KeyboardInterrupt
        sizes.append(len(batch.counts))
        return make(name, model, batch, *args)

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(generation, "make_engine", breaks_off)
        run(settings, output, **more)
    return sizes


# ---- a run and its file -------------------------------------------------------------------------------------------


def test_the_file_contains_the_answers_and_how_they_were_made(settings, tmp_path):
    output = tmp_path / "new" / "out.feather"
    made, (planned, rows) = run(settings, output), plan(settings)
    stored = read_answers(output)
    assert stored.rows == made.rows == scores.judged(stored).rows and stored.about == made.about
    assert [row["id"] for row in stored.rows] == [row["id"] for row in rows]
    by_id = {row["id"]: row for row in QUESTIONS}
    for row in stored.rows:
        own = by_id[row["id"]]
        assert {name: row[name] for name in own} == own
        assert row["prompt"] == [f"Question: {text}\n" for text in own["paraphrases"]]
        assert (row["method"], row["engine"]) == ("fuse", "fast") and row["seconds"] > 0
        assert row["prediction"] == scores.first_line(row["generation"])
        assert row["correct"] is scores.exact_match(row["prediction"], own["answers"])
    about = stored.about
    assert about["settings"]["seed"] == 3 and about["prefix"] == planned["prefix"]
    assert about["versions"]["torch"] == torch.__version__ and about["model"]["dtype"] == "float32"
    assert [path.name for path in output.parent.iterdir()] == ["out.feather"]


def test_methods_choices_and_stops_are_in_the_file(settings, tmp_path):
    def rows(name, **changed):
        return run(replace(settings, max_questions=3, **changed), tmp_path / f"{name}.feather").rows

    for row in rows("votes", method="majority-vote"):
        assert sum(json.loads(row["votes"]).values()) == 3
    for row in rows("single", method="single"):
        assert row["prompt"] == [f"Question: {row['paraphrases'][0]}\n"]
    second = {"num_paraphrases": None, "indexes": (1,)}
    alone, copies = rows("alone", **second), rows("copies", **second, repeat=4)
    assert [row["generation"] for row in copies] == [row["generation"] for row in alone]
    assert all(row["paraphrases"] == QUESTIONS[int(row["id"][1:])]["paraphrases"][1:2] * 4 for row in copies)
    fused, weighted = rows("fuse"), rows("weighted", method="weighted", weights=(1.0, 1.0, 1.0))
    assert [row["generation"] for row in fused] == [row["generation"] for row in weighted]
    letter = next(row["generation"].strip()[-1] for row in fused if len(row["generation"].strip()) > 2)
    assert all(letter not in row["prediction"] == row["generation"].strip() for row in rows("stop", stop=(letter,)))


# ---- interrupted anywhere -----------------------------------------------------------------------------------------


def test_an_interrupted_run_reads_what_is_left_and_a_finished_one_nothing(settings, tmp_path, output):
    whole = run(settings, tmp_path / "whole.feather")
    interrupted_run(settings, output, batches=2)
    journal, kept = journal_of(output).read_bytes(), read_answers(journal_of(output)).rows
    assert interrupted_run(settings, output, batches=99, resume=True) == [1]  # of 9 questions in batches of 4
    again = read_answers(output)
    assert same_but_for_seconds(again, whole)
    assert [row["seconds"] for row in again.rows[:8]] == [row["seconds"] for row in kept]
    journal_of(output).write_bytes(journal)  # the process was killed before the journal was removed
    assert interrupted_run(settings, output, resume=True) == []
    assert [path.name for path in tmp_path.glob("out*")] == ["out.feather"]


@pytest.mark.parametrize(
    ("finished", "change"), [(False, "settings"), (True, "settings"), (False, "data"), (True, "data"), (False, "model")]
)
def test_a_run_of_other_settings_data_or_weights_is_not_continued(settings, tmp_path, output, finished, change):
    interrupted_run(settings, output, batches=99 if finished else 1)
    (path,) = tmp_path.glob("out*")
    before, lm = path.read_bytes(), labkit.load("tiny-llama", device="cpu")
    if change == "data":
        write(tmp_path / "set.jsonl", [*QUESTIONS[:-1], QUESTIONS[-1] | {"answers": ["changed"]}])
    elif change == "model":
        lm.model.lm_head.weight.data.mul_(1.001)
    else:
        settings = replace(settings, method="concat")
    with pytest.raises(DataError, match=rf"begun with other settings: {change}\."):
        run(settings, output, resume=True, lm=lm)
    assert path.read_bytes() == before and list(tmp_path.glob("out*")) == [path]


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"engine": "slow"}, "the engine is 'slow'; choose one of fast"),
        ({"repeat": 2}, "not both"),
        ({"num_paraphrases": None, "indexes": (1, 1)}, "give different places from 0"),
        ({"num_paraphrases": 4}, "none of the 9 questions has 4 paraphrases"),
        ({"num_paraphrases": None, "indexes": (4,), "at_least": 2}, "none of the 9 questions has 5 paraphrases"),
        ({"few_shot": 11}, "no question is left"),
        ({"max_new_tokens": 1100}, "the model has 1,024"),
        ({"device": "tpu9"}, "the device is 'tpu9'"),
    ],
)
def test_invalid_settings_are_refused_and_nothing_is_written(settings, tmp_path, output, changed, message):
    with pytest.raises(DataError, match=message):
        run(replace(settings, **changed), output)
    assert not list(tmp_path.glob("out*"))


def test_files_that_exist_are_damaged_or_contain_no_answers_are_refused(settings, tmp_path, output, monkeypatch):
    import pyarrow
    from pyarrow import feather

    interrupted_run(settings, output)
    (tmp_path / "text.feather").write_text("hello")
    feather.write_feather(pyarrow.table({"id": ["a"], "answers": [["b"]]}), str(tmp_path / "few.feather"))
    for name in ("text.feather", "out.feather", "."):
        with pytest.raises(DataError, match="exists already"):
            run(settings, tmp_path / name)
    for name, message in {"none": "does not exist", "text": "cannot be read", "few": "has the columns"}.items():
        with pytest.raises(DataError, match=f"{name}.feather {message}"):
            read_answers(tmp_path / f"{name}.feather")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModelError, match=r"pip install \"labkit-bidirectional\[lab\]\""):
        run(settings, output)


# ---- which questions, which paraphrases, which examples -----------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "texts", "label"),
    [
        ({}, "abcd", ""),
        ({"num_paraphrases": 2}, "ab", "_num_paraphrases-2"),
        ({"num_paraphrases": 9, "at_least": 2}, "abcd", "_num_paraphrases-9_at_least-2"),
        ({"indexes": (3, 0)}, "da", "_indexes-3-0"),
        ({"repeat": 3}, "aaa", "_repeat-3"),
        ({"indexes": (2, 1), "repeat": 2}, "cc", "_indexes-2-1_repeat-2"),
    ],
)
def test_the_chosen_paraphrases_and_the_name_of_their_file(choice, texts, label):
    settings = Settings("webqa:data/web questions.json", model="org/Some-Model", engine="dense", **choice)
    assert "".join(settings.chosen(TEXTS)) == texts
    assert str(settings.default_output) == f"runs/fuse/web-questions_Some-Model_engine-dense{label}.feather"


def test_questions_with_too_few_paraphrases_are_left_out_and_counted(settings, tmp_path):
    short = [QUESTIONS[n] | {"id": f"s{n}", "paraphrases": [f"short {n}"]} for n in range(4)]
    settings = replace(settings, dataset=str(write(tmp_path / "some.jsonl", QUESTIONS + short)), few_shot=0)
    about, rows = plan(settings)
    assert (about["left_out"], len(rows)) == (4, 11)
    about, all_rows = plan(replace(settings, at_least=1))
    assert (about["left_out"], {len(row["paraphrases"]) for row in all_rows}) == (0, {1, 3})
    ordered = [[row["paraphrases"] for row in plan(replace(settings, order_seed=seed))[1]] for seed in (None, 1)]
    assert ordered[0] != ordered[1] and list(map(sorted, ordered[0])) == list(map(sorted, ordered[1]))


@pytest.mark.parametrize("seed", range(3))
def test_no_example_is_asked_and_examples_do_not_depend_on_the_choice(settings, tmp_path, seed):
    twin = QUESTIONS[0] | {"id": "twin", "paraphrases": ["where is  IT 0?", "of course", "and so"]}
    settings = replace(settings, seed=seed, dataset=str(write(tmp_path / "twin.jsonl", [*QUESTIONS, twin])))
    shots, rest = take_shots(read_paraphrases(settings.dataset), settings)
    assert len(shots) == 2 == len({shot.relation for shot in shots})
    examples, left = ({" ".join(t.casefold().split()) for q in part for t in q.paraphrases} for part in (shots, rest))
    assert not examples & left
    about, _ = plan(replace(settings, num_paraphrases=1, max_questions=3))
    assert about["few_shot_ids"] == [shot.id for shot in shots] and about["taken_out"] == 12 - len(rest)


def test_examples_are_facts_that_are_set_apart_for_the_facts_and_for_a_users_file(settings, tmp_path):
    facts, apart = read_paraphrases("known-facts"), set(read_known_facts("shots"))
    shots, rest = take_shots(facts, Settings())
    assert rest == facts and set(shots) <= apart and len({shot.relation for shot in shots}) == 5
    unanswered = [{"paraphrases": [f"What is {n}?"], "answers": ["it"] if n else []} for n in range(4)]
    file = str(write(tmp_path / "own.jsonl", unanswered))
    questions = read_paraphrases(file, unanswered=True)
    shots, rest = take_shots(questions, Settings(file))
    assert set(shots) <= apart and rest == questions
    drawn, rest = take_shots(questions, Settings(file, few_shot=3, few_shot_from_data=True))
    assert all(shot.answers for shot in drawn) and rest == questions[:1]


def test_the_prefix_contains_each_example_once_with_its_first_answer():
    statement = ParaphrasedQuestion("z", ("____ is it.",), ("Oslo", "Kristiania"))
    shots = [ParaphrasedQuestion("x", TEXTS, ("y",)), statement]
    assert {prefix_of(shots, seed) for seed in range(40)} == {
        f"Question: {one}\nAnswer: y\n\nQuestion: ____ is it.\nAnswer: Oslo\n\n" for one in TEXTS
    }
