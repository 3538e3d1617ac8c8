"""benchmarks/study/fusion.py: all methods on the same questions, resumable, and planted effects in the table."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.study import fusion
from benchmarks.study.fusion import ANSWERS, Study, cells, named, run_study, tables
from labkit.errors import DataError, TrainingError
from labkit.fusion import generation, runs
from labkit.fusion.generation import generate
from labkit.fusion.scores import read_answers

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.end_to_end

PLACES = 3
SETTINGS = {
    "methods": ("single", "concat", "fuse", "logit-average"), "num_paraphrases": (1, 2, 3), "few_shot": 2,
    "few_methods": ("isolate",), "few_questions": 4, "repeat_control": True, "batch_size": 4, "max_new_tokens": 3,
    "device": "cpu", "seed": 3,
}  # fmt: skip
CELLS = 3 + 2 * 3 + 2 + 4  # places; three methods, and one on few questions, for N = 2 and 3; the control
ASKED = (3 + 2 * 3 + 4) * 9 + 2 * 4  # answers in all; two of the eleven questions are examples


def quiet(text):
    pass


def study_of(path, **changed):
    return Study(("tiny-llama",), dict([named(str(path))]), **(SETTINGS | changed))


def write_set(path, count, relations=5):
    rows = [
        {
            "id": f"q{number:03}",
            "relation": f"r{number % relations}",
            "natural": True,
            "answers": [f"right {number}"],
            "paraphrases": [f"q{number:03} in wording {place}" for place in range(PLACES)],
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("sets") / "eleven.jsonl", 11)


@pytest.fixture(scope="module")
def done(tmp_path_factory, questions):
    folder, log = tmp_path_factory.mktemp("study") / "all", []
    assert run_study(study_of(questions), folder, say=log.append) == {}
    assert log[0] == f"{CELLS} runs, 0 of them done"
    return folder


def counting(monkeypatch, stop_at=None):
    """The batches that are read from now on; the process is killed at the batch with the number `stop_at`."""
    calls, make = [], generation.make_engine

    def counted(name, model, batch, *args):
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        calls.append(batch.counts)
        return make(name, model, batch, *args)

    monkeypatch.setattr(generation, "make_engine", counted)
    return calls


def planted(monkeypatch, tmp_path, shares):
    """A study of a model that is right on these shares of the questions; a hard question is hard for all methods."""

    def answers(lm, asked, method, *args, on_batch, **kwargs):
        texts = []
        for each in asked:
            name, places = each[0].split()[1], [text.split()[-1] for text in each]
            how = f"single {places[0]}" if method == "single" or len(set(places)) == 1 else method
            luck = random.Random(f"{name} {how}").random()
            right = 0.5 * random.Random(name).random() + 0.5 * luck < shares.get(how.split()[0], 0.4)
            texts.append(f"right {int(name[1:])}" if right else "wrong")
        on_batch(SimpleNamespace(texts=texts, engine="fast", seconds=0.01 * len(asked), votes=None))

    monkeypatch.setattr(runs, "generate", answers)
    data = write_set(tmp_path / "planted.jsonl", 402, relations=60)
    study = study_of(data, num_paraphrases=(1, 3), batch_size=64, few_questions=100)
    run_study(study, tmp_path / "planted", say=quiet)
    return tables(tmp_path / "planted")


def row(rows, arm, condition="planted", n=3):
    """The row with the most questions."""
    found = rows[(rows["arm"] == arm) & (rows["condition"] == condition) & (rows["paraphrases"] == n)]
    return max(found.itertuples(), key=lambda each: each.n)


def test_all_methods_read_the_same_questions_and_the_same_order_of_paraphrases(done, questions):
    order, ids = {}, {}
    study = study_of(questions)
    for each in read_answers(done / "tiny-llama" / "eleven" / "concat_n3" / ANSWERS).rows:
        order[each["id"]] = each["paraphrases"]
    assert len({texts[0].split()[-1] for texts in order.values()}) > 1
    for cell in cells(study):
        rows = read_answers(done / cell.folder / ANSWERS).rows
        for each in rows:
            whole = order[each["id"]]
            one = whole[cell.place or 0 : (cell.place or 0) + 1]
            assert each["paraphrases"] == (whole[: cell.first] if cell.first else one * (cell.repeat or 1)), cell
        ids.setdefault(cell.max_questions, set()).add(tuple(each["id"] for each in rows))
    assert len(ids[None]) == len(ids[4]) == 1 and set(*ids[4]) < set(*ids[None]) and len(*ids[4]) == 4


def test_a_study_that_is_killed_continues_to_the_question_and_ends_with_the_same_table(
    done, questions, tmp_path, monkeypatch
):
    study, asked = study_of(questions), 0
    for stop_at in (1, 4, 9, 20):
        with monkeypatch.context() as killed:
            calls = counting(killed, stop_at)
            with pytest.raises(KeyboardInterrupt):
                run_study(study, tmp_path / "s", say=quiet)
            asked += sum(map(len, calls))
    calls = counting(monkeypatch)
    run_study(study, tmp_path / "s", say=quiet)
    assert asked + sum(map(len, calls)) == ASKED
    assert tables(tmp_path / "s").drop(columns="seconds").equals(tables(done).drop(columns="seconds"))


def test_methods_and_numbers_can_be_added_and_nothing_else(questions, tmp_path, monkeypatch):
    first = study_of(
        questions, methods=("fuse",), few_methods=(), num_paraphrases=(2,), at_least=3, repeat_control=False
    )
    run_study(first, tmp_path / "s", say=quiet)
    before = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*.feather")}
    calls = counting(monkeypatch)
    run_study(replace(first, methods=("fuse", "concat"), num_paraphrases=(2, 3)), tmp_path / "s", say=quiet)
    assert len(before) == 3 and all(path.read_bytes() == content for path, content in before.items())
    assert sum(map(len, calls)) == 9 * (1 + 1 + 2)
    for change, message in (({"few_shot": 1}, "few_shot was 2, now 1"), ({"at_least": 2}, "at_least was 3, now 2")):
        with pytest.raises(TrainingError, match=message):
            run_study(replace(first, **change), tmp_path / "s", say=quiet)
    write_set(tmp_path / "eleven.jsonl", 9)
    with pytest.raises(TrainingError, match="data eleven was"):
        run_study(replace(first, data=dict([named(str(tmp_path / "eleven.jsonl"))])), tmp_path / "s", say=quiet)


def test_invalid_studies_are_refused_before_anything_is_written(questions, tmp_path):
    for change in ({"num_paraphrases": (1,)}, {"num_paraphrases": (0, 2)}):
        with pytest.raises(DataError, match="numbers of paraphrases"):
            study_of(questions, **change)
    for change in ({"num_paraphrases": (4,)}, {"methods": ("weighted",)}, {"methods": ("fusion",)}):
        with pytest.raises(DataError):
            run_study(study_of(questions, **change), tmp_path / "s", say=quiet)
    assert not (tmp_path / "s").exists()


def test_a_cell_that_fails_is_reported_and_the_others_go_on(questions, tmp_path, monkeypatch):
    def refused(lm, asked, method, *args, **kwargs):
        if method == "concat":
            raise DataError("too long")
        return generate(lm, asked, method, *args, **kwargs)

    study = study_of(questions, few_methods=(), num_paraphrases=(2,), repeat_control=False)
    with monkeypatch.context() as broken:
        broken.setattr(runs, "generate", refused)
        assert run_study(study, tmp_path / "s", say=quiet) == {"tiny-llama, eleven, concat_n2": "too long"}
    assert "concat" not in set(tables(tmp_path / "s")["arm"])
    assert run_study(study, tmp_path / "s", say=quiet) == {}


def test_planted_effects_are_found_and_planted_nulls_are_not(monkeypatch, tmp_path):
    rows = planted(monkeypatch, tmp_path, {"fuse": 0.6, "concat": 0.25})
    fuse, concat, average, single = (row(rows, arm) for arm in ("fuse", "concat", "logit-average", "single"))
    assert fuse.difference_low > 5 and concat.difference_high < -5
    assert average.difference_low < 0 < average.difference_high
    accuracies = []
    for place in range(3):
        right = read_answers(tmp_path / "planted" / "tiny-llama" / "planted" / f"single_place{place}" / ANSWERS).rows
        accuracies.append(sum(each["correct"] for each in right) / len(right))
    assert single.mean == pytest.approx(100 * sum(accuracies) / 3)  # the reference is the mean of the single prompts
    assert fuse.difference == pytest.approx(fuse.mean - single.mean) and fuse.seconds == pytest.approx(0.01)
    against = tables(tmp_path / "planted", "logit-average")
    assert row(against, "fuse").difference == pytest.approx(fuse.mean - average.mean)
    few = [each for each in rows.itertuples() if each.n == 100]
    assert [each.arm for each in few] == ["single", "isolate"]  # few questions are compared on the same few
    for arm in ("fuse", "logit-average"):
        assert row(rows, arm, "planted, copies").difference == 0  # copies of one paraphrase are that paraphrase


def test_questions_that_contain_an_answer_are_also_left_out(tmp_path, monkeypatch):
    data = tmp_path / "set.jsonl"
    write_set(data, 12)
    lines = data.read_text().splitlines()
    revealing = json.loads(lines[3]) | {"paraphrases": [f"{place} is it right 3 or not" for place in range(PLACES)]}
    data.write_text("\n".join([*lines[:3], json.dumps(revealing), *lines[4:]]))
    run_study(study_of(data, few_shot=0, few_methods=(), num_paraphrases=(2,)), tmp_path / "s", say=quiet)
    sizes = tables(tmp_path / "s").groupby("condition")["n"].max()
    assert sizes["set"] == 12 and sizes["set, answer not in the question"] == 11


def test_a_set_has_the_name_that_is_given_or_that_of_its_file():
    assert named("pararel=lama:a/b", "pairs") == ("pararel", ("lama:a/b", "pairs"))
    assert named("known-facts", "pairs") == ("known-facts", ("known-facts", None))
    assert named("webqa:main/test.json")[0] == "test" and fusion.slug("a/b:c") == "a--b-c"
