"""A run leaves one file that explains itself; stopped anywhere, it goes on and ends the same."""

import hashlib
import json
import os
import sys
from dataclasses import replace

import pytest
import torch

import labkit
from labkit.datasets.paraphrases import ParaphrasedQuestion, read_known_facts, read_paraphrases
from labkit.errors import DataError, FusionError, ModelError
from labkit.fusion import answers, journal, runs, scores
from labkit.fusion.few_shot import CUE, Choice, asked, prefix_of, take_shots
from labkit.fusion.generation import generate
from labkit.fusion.runs import Settings, journal_of, plan, run

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
def dataset(tmp_path):
    return write_set(tmp_path / "set.jsonl", QUESTIONS)


def write_set(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def settings(dataset):
    return Settings(
        dataset, "tiny-llama", num_paraphrases=3, few_shot=2, batch_size=4, max_new_tokens=4, device="cpu", seed=3
    )


def but_seconds(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


class Stopped(Exception):
    pass


def stop_at_call(monkeypatch, number):
    """The function that writes answers breaks off at its call of this number, from 0; returns the calls it took."""
    calls = []

    def breaks_off(lm, questions, *args, **kwargs):
        calls.append(list(questions))
        if len(calls) > number:
            raise Stopped
        return generate(lm, questions, *args, **kwargs)

    monkeypatch.setattr(runs, "generate", breaks_off)
    return calls


# ---- a run and its file --------------------------------------------------------------------------------------------


def test_the_file_says_what_was_asked_of_what_and_how(settings, dataset, tmp_path):
    output = tmp_path / "new" / "out.feather"
    made = run(settings, output)
    found = answers.read_answers(output)
    assert found.rows == made.rows and found.about == made.about
    assert [row["id"] for row in found.rows] == [each.id for each in plan(settings).questions]
    by_id = {row["id"]: row for row in QUESTIONS}
    for row in found.rows:
        own = by_id[row["id"]]
        assert (row["paraphrases"], row["answers"]) == (own["paraphrases"], own["answers"])
        assert row["prompt"] == [f"Question: {text}\n" for text in own["paraphrases"]]
        assert (row["relation"], row["method"], row["engine"]) == (own["relation"], "fuse", "fast")
        assert row["prediction"] == scores.first_line(row["generation"])
        assert row["correct"] is scores.exact_match(row["prediction"], own["answers"])
        assert row["seconds"] > 0 and row["votes"] is None and row["correct_lemmatised"] is None
    about = found.about
    assert about["settings"]["seed"] == 3 and about["settings"]["model"] == "tiny-llama"
    assert about["dataset_sha256"] == hashlib.sha256(open(dataset, "rb").read()).hexdigest()
    assert about["versions"]["torch"] == torch.__version__ and about["versions"]["labkit"] == labkit.__version__
    assert about["prefix"] == plan(settings).prefix and about["model"]["dtype"] == "float32"
    assert [path.name for path in output.parent.iterdir()] == ["out.feather"]


def test_pandas_reads_the_file(settings, tmp_path):
    pandas = pytest.importorskip("pandas")
    run(settings, tmp_path / "out.feather")
    frame = pandas.read_feather(tmp_path / "out.feather")
    assert list(frame["id"]) == [each.id for each in plan(settings).questions]


def test_one_paraphrase_is_answered_as_transformers_answers_the_prompt_that_the_file_states(settings, tmp_path):
    made = run(replace(settings, num_paraphrases=1), tmp_path / "out.feather")
    lm = labkit.load("tiny-llama", device="cpu")

    def ids(text):
        return lm.tokenizer(text, add_special_tokens=False)["input_ids"]

    for row in made.rows:
        prompt = [*lm.tokenizer("")["input_ids"], *ids(made.about["prefix"]), *ids("".join(row["prompt"])), *ids(CUE)]
        written = lm.model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, len(prompt) :]
        whole = lm.tokenizer.decode(written, skip_special_tokens=True)
        assert row["prediction"] == scores.first_line(whole)


def test_votes_of_the_paraphrases_are_in_the_file(settings, tmp_path):
    run(replace(settings, method="majority-vote", max_questions=3), tmp_path / "out.feather")
    for row in answers.read_answers(tmp_path / "out.feather").rows:
        assert sum(row["votes"].values()) == 3
        assert scores.normalised(row["prediction"]) in row["votes"]


def test_a_single_method_reads_one_paraphrase_and_says_so(settings, tmp_path):
    made = run(replace(settings, method="single", max_questions=2), tmp_path / "out.feather")
    assert all(row["prompt"] == [asked(row["paraphrases"][0]) + "\n"] for row in made.rows)


def test_a_repeated_paraphrase_fused_is_answered_as_that_paraphrase_alone(settings, tmp_path):
    alone = run(replace(settings, num_paraphrases=None, indexes=(1,)), tmp_path / "alone.feather")
    often = run(replace(settings, num_paraphrases=None, indexes=(1,), repeat=4), tmp_path / "often.feather")
    assert [row["generation"] for row in often.rows] == [row["generation"] for row in alone.rows]
    assert all(row["paraphrases"] == QUESTIONS[int(row["id"][1:])]["paraphrases"][1:2] * 4 for row in often.rows)


# ---- where an answer ends ------------------------------------------------------------------------------------------


@pytest.fixture
def begins_with_a_line_end():
    """A model whose first token is always a line end: it adds to that logit wherever the cue was read last."""
    lm = labkit.load("tiny-llama", device="cpu")
    (line_end,) = lm.tokenizer("\n", add_special_tokens=False)["input_ids"]
    cue = lm.tokenizer(CUE, add_special_tokens=False)["input_ids"]

    def hook(module, args, kwargs, output):
        if kwargs["input_ids"][0].tolist()[-len(cue) :] == cue:
            output.logits[:, -1, line_end] += 1e4
        return output

    lm.model.register_forward_hook(hook, with_kwargs=True)
    return lm


@pytest.mark.parametrize("method", ["fuse", "majority-vote"])
def test_a_model_that_begins_with_a_line_end_is_read_on(
    settings, tmp_path, monkeypatch, method, begins_with_a_line_end
):
    monkeypatch.setattr(runs, "load", lambda *args, **kwargs: begins_with_a_line_end)
    made = run(replace(settings, method=method), tmp_path / "out.feather")
    for row in made.rows:
        texts = [asked(text) for text in row["paraphrases"]]
        (whole,) = generate(
            begins_with_a_line_end, [texts], method, prefix=made.about["prefix"], max_new_tokens=4
        ).texts
        assert row["generation"].startswith("\n") and row["prediction"] == scores.first_line(whole) != ""


def test_with_a_stop_of_ones_own_the_prediction_is_all_up_to_it(settings, tmp_path):
    free = run(replace(settings, few_shot=0), tmp_path / "free.feather")
    row = next(row for row in free.rows if len(row["generation"].strip()) > 2)
    letter = row["generation"].strip()[-1]
    made = run(replace(settings, few_shot=0, stop=(letter,)), tmp_path / "out.feather")
    assert all(letter not in row["prediction"] for row in made.rows)
    assert all(row["prediction"] == row["generation"].strip() for row in made.rows)


# ---- interrupted anywhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_a_run_that_was_stopped_goes_on_and_ends_as_if_it_had_not_been(settings, tmp_path, monkeypatch, finished):
    whole = run(settings, tmp_path / "whole.feather")
    output = tmp_path / "out.feather"
    stop_at_call(monkeypatch, finished)
    with pytest.raises(Stopped):
        run(settings, output)
    assert not output.exists()
    kept = journal.read_journal(journal_of(output))[1]
    assert len(kept) == min(4 * finished, 9) and journal_of(output).exists() == bool(finished)
    calls = stop_at_call(monkeypatch, 99)
    again = run(settings, output, resume=True)
    assert sum(map(len, calls)) == 9 - len(kept)  # no answered question is asked again
    assert but_seconds(again.rows) == but_seconds(whole.rows)
    assert all(row["seconds"] == kept[row["id"]]["seconds"] for row in again.rows if row["id"] in kept)
    assert [path.name for path in tmp_path.glob("out*")] == ["out.feather"]
    assert again.about == whole.about


def test_a_journal_torn_at_any_byte_is_gone_on_with(settings, tmp_path, monkeypatch):
    whole = run(settings, tmp_path / "whole.feather")
    output = tmp_path / "out.feather"
    stop_at_call(monkeypatch, 2)
    with pytest.raises(Stopped):
        run(settings, output)
    written = journal_of(output).read_bytes()
    lines = written.splitlines(keepends=True)
    assert len(lines) == 9
    last = len(written) - len(lines[-1])
    for cut in (0, 5, len(lines[0]) - 1, len(lines[0]), last - 1, last, last + 7, len(written) - 1):
        journal_of(output).write_bytes(written[:cut])
        whole_lines = max(0, written[:cut].count(b"\n") - 1)
        calls = stop_at_call(monkeypatch, 99)
        again = run(settings, output, resume=True)
        assert sum(map(len, calls)) == 9 - whole_lines
        assert but_seconds(again.rows) == but_seconds(whole.rows)
        output.unlink()


def test_a_damaged_line_within_a_journal_is_named(settings, tmp_path, monkeypatch):
    output = tmp_path / "out.feather"
    stop_at_call(monkeypatch, 1)
    with pytest.raises(Stopped):
        run(settings, output)
    lines = journal_of(output).read_text().splitlines(keepends=True)
    journal_of(output).write_text("".join([*lines[:2], "{}\n", *lines[3:]]))
    with pytest.raises(DataError, match=r"out.feather.jsonl, line 3 is damaged"):
        run(settings, output, resume=True)


def full(*_):
    raise OSError(28, "No space left on device")


def test_when_only_the_file_could_not_be_written_no_model_is_needed_again(settings, tmp_path, monkeypatch):
    output = tmp_path / "out.feather"
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left.*out.feather"):
            run(settings, output)
    assert [path.name for path in tmp_path.glob("*out*")] == ["out.feather.jsonl"]
    monkeypatch.setattr(runs, "load", lambda *args, **kwargs: pytest.fail("loaded a model"))
    assert len(run(settings, output, resume=True).rows) == 9


def test_a_finished_run_is_given_back_and_a_journal_left_beside_it_goes(settings, tmp_path, monkeypatch):
    output = tmp_path / "out.feather"
    made = run(settings, output)
    journal_of(output).write_text(json.dumps(made.about) + "\n")  # killed between the last two steps
    monkeypatch.setattr(runs, "load", lambda *args, **kwargs: pytest.fail("loaded a model"))
    assert run(settings, output, resume=True).rows == made.rows
    assert not journal_of(output).exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 4}, "seed was 3, now 4"),
        ({"method": "concat", "few_shot": 1}, "few_shot was 2, now 1; method was 'fuse', now 'concat'"),
        ({"dtype": "float64"}, "dtype was None, now 'float64'"),
        ({"num_paraphrases": None, "indexes": (0, 2)}, r"indexes was None, now \[0, 2\]"),
    ],
)
@pytest.mark.parametrize("state", ["begun", "finished"])
def test_a_run_of_other_settings_is_not_gone_on_with(settings, tmp_path, monkeypatch, changed, words, state):
    output = tmp_path / "out.feather"
    if state == "finished":
        run(settings, output)
    else:
        stop_at_call(monkeypatch, 1)
        with pytest.raises(Stopped):
            run(settings, output)
    (path,) = tmp_path.glob("out*")
    before = path.read_bytes()
    with pytest.raises(FusionError, match=f"begun with other settings: {words}"):
        run(replace(settings, **changed), output, resume=True)
    assert path.read_bytes() == before and list(tmp_path.glob("out*")) == [path]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.lm_head.weight.data.mul_(1.001), "weights was '"),
        (lambda model: model.double(), "dtype was 'float32', now 'float64'"),
        (lambda model: model.set_attn_implementation("eager"), "attention was 'sdpa', now 'eager'"),
    ],
    ids=["weights", "dtype", "attention"],
)
def test_a_model_of_the_same_name_that_is_another_one_does_not_go_on(settings, tmp_path, monkeypatch, change, words):
    output = tmp_path / "out.feather"
    stop_at_call(monkeypatch, 1)
    with pytest.raises(Stopped):
        run(settings, output)
    monkeypatch.undo()
    begun = journal_of(output).read_bytes()
    lm = labkit.load("tiny-llama", device="cpu")
    change(lm.model)
    with pytest.raises(FusionError, match=f"begun with another model of that name: .*{words}"):
        run(settings, output, resume=True, lm=lm)
    assert journal_of(output).read_bytes() == begun and not output.exists()
    assert len(run(settings, output, resume=True).rows) == 9


def test_two_processes_do_not_answer_into_one_file(settings, tmp_path):
    output = tmp_path / "out.feather"
    with journal.alone(output), pytest.raises(FusionError, match="another process is answering into"):
        run(settings, output)
    run(settings, output)
    assert [file.name for file in tmp_path.iterdir() if "out" in file.name] == ["out.feather"]


def test_other_data_under_the_same_name_are_other_settings(settings, dataset, tmp_path):
    run(settings, tmp_path / "out.feather")
    write_set(tmp_path / "set.jsonl", [*QUESTIONS[:-1], QUESTIONS[-1] | {"answers": ["changed"]}])
    with pytest.raises(FusionError, match="dataset_sha256 was"):
        run(settings, tmp_path / "out.feather", resume=True)


def test_what_is_there_is_not_overwritten(settings, tmp_path, monkeypatch):
    (tmp_path / "out.feather").write_bytes(b"mine")
    with pytest.raises(FusionError, match="out.feather exists already"):
        run(settings, tmp_path / "out.feather")
    assert (tmp_path / "out.feather").read_bytes() == b"mine"
    stop_at_call(monkeypatch, 1)
    with pytest.raises(Stopped):
        run(settings, tmp_path / "other.feather")
    with pytest.raises(FusionError, match="holds a run that was interrupted: --resume goes on"):
        run(settings, tmp_path / "other.feather")
    with pytest.raises(FusionError, match="is a folder"):
        run(settings, tmp_path)


def test_prompts_that_do_not_fit_are_refused_before_the_first_is_answered(settings, tmp_path):
    long = QUESTIONS[0] | {"id": "zz", "paraphrases": ["word " * 1100, "short", "shorter"]}
    settings = replace(settings, dataset=write_set(tmp_path / "long.jsonl", [*QUESTIONS, long]), few_shot=0)
    with pytest.raises(FusionError, match="the model has 1,024"):
        run(settings, tmp_path / "out.feather")
    assert not list(tmp_path.glob("out*"))


def test_without_pyarrow_the_pip_command_is_given(settings, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModelError, match=r"pip install \"labkit-bidirectional\[fusion\]\""):
        run(settings, tmp_path / "out.feather")


# ---- scoring what is there -----------------------------------------------------------------------------------------


def test_scoring_anew_gives_what_the_run_gave_and_catches_what_was_changed(settings, tmp_path):
    made = run(settings, tmp_path / "out.feather")
    found = answers.read_answers(tmp_path / "out.feather")
    assert answers.judged(found).rows == made.rows
    assert answers.summary(answers.judged(found)) == answers.summary(made)
    found.rows[0]["correct"] = not found.rows[0]["correct"]
    assert answers.judged(found).rows == made.rows


def test_summary_and_comparison_are_those_of_the_scores():
    def file(name, right):
        rows = [
            {"id": str(n), "relation": "ab"[n % 2], "answers": ["cities"], "prediction": "city" if ok else "town"}
            for n, ok in enumerate(right)
        ]
        return answers.judged(answers.Answers(name, rows, {}), scores.load_lemmatizer())

    from pathlib import Path

    one, other = file(Path("one"), [1, 1, 1, 0, 1, 0, 1, 1]), file(Path("other"), [1, 0, 0, 1, 0, 0, 1, 0])
    assert answers.summary(one)["accuracy"]["value"] == 0.0  # "city" is not "cities" ...
    assert answers.summary(one, True)["accuracy"]["value"] == 6 / 8  # ... but a form of it
    assert answers.summary(one, True)["by_relation"]["b"]["value"] == 2 / 4
    assert answers.summary(one)["seconds_per_question"] is None
    found = answers.comparison(one, other, True)
    assert found["difference"]["value"] == 3 / 8
    assert (found["mcnemar"]["only_one"], found["mcnemar"]["only_other"]) == (4, 1)
    assert found["mcnemar"]["p"] == pytest.approx(2 * (1 + 5) / 2**5)
    other.rows[0]["answers"] = ["villages"]
    with pytest.raises(DataError, match="not of one set"):
        answers.comparison(one, other)


def test_files_that_are_no_answers_are_refused(tmp_path):
    import pyarrow
    from pyarrow import feather

    (tmp_path / "text.feather").write_text("hello")
    feather.write_feather(pyarrow.table({"id": ["a"], "answers": [["b"]]}), str(tmp_path / "few.feather"))
    feather.write_feather(
        pyarrow.table({"id": [1], "answers": [["b"]], "prediction": ["b"]}), str(tmp_path / "kinds.feather")
    )
    for name, words in [
        ("none.feather", "is no file"),
        ("text.feather", "text.feather cannot be read"),
        ("few.feather", "has no column 'prediction'"),
        ("kinds.feather", "row 0: id, prediction and relation must be texts"),
    ]:
        with pytest.raises(DataError, match=words):
            answers.read_answers(tmp_path / name)


# ---- which questions, which paraphrases, which examples ------------------------------------------------------------


QUESTION = ParaphrasedQuestion("x", ("a", "b", "c", "d"), ("y",))


@pytest.mark.parametrize(
    ("choice", "texts", "label"),
    [
        (Choice(), ("a", "b", "c", "d"), "all"),
        (Choice(2), ("a", "b"), "n2"),
        (Choice(9, at_least=2), ("a", "b", "c", "d"), "n9"),
        (Choice(places=(3, 0)), ("d", "a"), "i3-0"),
        (Choice(repeat=3), ("a", "a", "a"), "i0x3"),
        (Choice(places=(2, 1), repeat=2), ("c", "c"), "i2x2"),
    ],
)
def test_the_chosen_paraphrases(choice, texts, label):
    assert choice.able([QUESTION]) == [QUESTION]
    assert (choice.of(QUESTION), choice.label) == (texts, label)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"first": 2, "places": (0,)}, "not both"),
        ({"first": 2, "repeat": 2}, "not both"),
        ({"places": ()}, "give places from 0"),
        ({"places": (0, -1)}, "give places from 0"),
        ({"places": (1, 1)}, "name a place twice"),
        ({"places": (4,), "at_least": 2}, "index 4 needs 5 paraphrases"),
    ],
)
def test_a_choice_without_meaning_is_refused(numbers, words):
    with pytest.raises(FusionError, match=words):
        Choice(**numbers)


def test_questions_with_too_few_paraphrases_are_left_out_and_counted(settings, tmp_path):
    short = [QUESTIONS[n] | {"id": f"s{n}", "paraphrases": [f"short {n}"]} for n in range(4)]
    settings = replace(settings, dataset=write_set(tmp_path / "some.jsonl", QUESTIONS + short), few_shot=0)
    assert (plan(settings).left_out, len(plan(settings).questions)) == (4, 11)
    fewer = plan(replace(settings, at_least=1))
    assert (fewer.left_out, {len(texts) for texts in fewer.texts}) == (0, {1, 3})
    assert plan(replace(settings, num_paraphrases=1, at_least=3)).questions == plan(settings).questions
    for unknown in ({"num_paraphrases": 4}, {"num_paraphrases": None, "indexes": (0, 3)}):
        with pytest.raises(FusionError, match=r"(4 paraphrases|index 3): none of the 15 questions"):
            plan(replace(settings, **unknown))


@pytest.mark.parametrize("seed", range(5))
def test_no_example_is_asked_and_examples_do_not_depend_on_the_choice(settings, dataset, seed):
    twin = QUESTIONS[0] | {"id": "twin", "paraphrases": ["where is  IT 0?", "of course", "and so"]}
    settings = replace(settings, seed=seed, dataset=write_set(settings_path(dataset), [*QUESTIONS, twin]))
    made = plan(settings)
    assert len(made.shots) == 2 and len({each.relation for each in made.shots}) == 2
    seen = {" ".join(text.casefold().split()) for each in made.shots for text in each.paraphrases}
    asked_texts = {" ".join(text.casefold().split()) for texts in made.texts for text in texts}
    assert not seen & asked_texts
    assert made.taken_out + len(made.questions) == 12
    assert plan(replace(settings, num_paraphrases=1, max_questions=3)).shots == made.shots


def settings_path(dataset):
    from pathlib import Path

    return Path(dataset).with_name("twin.jsonl")


def test_examples_of_the_embedded_facts_are_those_set_apart():
    facts = read_paraphrases("known-facts")
    shots, rest = take_shots("known-facts", facts, 5, 0)
    assert rest == facts and set(shots) <= set(read_known_facts("shots"))
    assert len({each.relation for each in shots}) == 5
    drawn, left = take_shots("known-facts:shots", read_known_facts("shots"), 5, 0)
    assert not {each.id for each in drawn} & {each.id for each in left}


def test_the_prefix_holds_each_example_once_with_its_usual_answer():
    shots = [QUESTION, ParaphrasedQuestion("z", ("____ is it.", "It is ____."), ("Oslo", "Kristiania"))]
    texts = {prefix_of(shots, seed) for seed in range(40)}
    assert texts == {
        f"Question: {one}\nAnswer: y\n\nQuestion: {two}\nAnswer: Oslo\n\n"
        for one in QUESTION.paraphrases
        for two in shots[1].paraphrases
    }
    assert prefix_of([], 0) == ""


@pytest.mark.parametrize(("k", "words"), [(12, "there are 11 to take"), (11, "no question is left")])
def test_examples_that_cannot_be_had_are_refused(settings, k, words):
    with pytest.raises(DataError, match=words):
        plan(replace(settings, few_shot=k))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"method": "mean"}, "the fusion method is 'mean'; choose one of single"),
        ({"engine": "slow"}, "the fusion engine is 'slow'; choose one of fast"),
        ({"method": "weighted"}, "needs a weight for each paraphrase"),
        ({"weights": (1.0, 2.0)}, "takes no weights"),
    ],
)
def test_settings_without_meaning_are_refused(settings, changed, words):
    with pytest.raises(FusionError, match=words):
        replace(settings, **changed)


def test_weights_are_one_for_each_chosen_paraphrase(settings, tmp_path):
    with pytest.raises(FusionError, match="question 0 has 3 paraphrases and 2 weights"):
        run(replace(settings, method="weighted", weights=(1.0, 2.0)), tmp_path / "out.feather")
    alike = replace(settings, method="weighted", weights=(1.0, 1.0, 1.0), max_questions=2)
    fused = run(replace(settings, max_questions=2), tmp_path / "fused.feather")
    weighted = run(alike, tmp_path / "weighted.feather")
    assert [row["generation"] for row in weighted.rows] == [row["generation"] for row in fused.rows]


def test_the_default_file_is_named_by_what_was_asked():
    settings = Settings("webqa:data/web questions.json", "org/Some-Model", indexes=(0, 2), method="isolate+restart")
    assert str(runs.default_output(settings)) == (
        "runs/fuse/web-questions_Some-Model_isolate+restart_i0-2_5-shot.feather"
    )
    settings = Settings("known-facts", "tiny-llama", engine="dense", num_paraphrases=5)
    assert runs.default_output(settings).name == "known-facts_tiny-llama_fuse-dense_n5_5-shot.feather"
