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
SMALL = {"few_methods": (), "num_paraphrases": (2,), "repeat_control": False}


def study_of(path, **changed):
    return Study(("tiny-llama",), dict([named(str(path))]), **(SETTINGS | changed))


def write_set(path, count, relations=5, first=None):
    """Questions by number; `first`: paraphrases of the first one."""
    rows = [
        {
            "id": f"q{number:03}",
            "relation": f"r{number % relations}",
            "answers": [f"right {number}"],
            "paraphrases": [f"q{number:03} in wording {place}" for place in range(PLACES)],
        }
        for number in range(count)
    ]
    rows[0] |= {"paraphrases": first} if first else {}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def ran(tmp_path):
    """ran(study) -> {cell: reason} of the cells that failed; the study is in tmp_path / "s"."""
    return lambda study: run_study(study, tmp_path / "s", say=lambda text: None)


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


def test_all_methods_read_the_same_questions_and_the_same_order_of_paraphrases(done, questions):
    ids = {}
    rows = read_answers(done / "tiny-llama" / "eleven" / "concat_n3" / ANSWERS).rows
    order = {row["id"]: row["paraphrases"] for row in rows}
    assert len({texts[0].split()[-1] for texts in order.values()}) > 1
    for cell in cells(study_of(questions)):
        rows = read_answers(done / cell.folder / ANSWERS).rows
        for row in rows:
            whole = order[row["id"]]
            one = whole[cell.place or 0 : (cell.place or 0) + 1]
            assert row["paraphrases"] == (whole[: cell.first] if cell.first else one * (cell.repeat or 1)), cell
        ids.setdefault(cell.max_questions, set()).add(tuple(row["id"] for row in rows))
    assert len(ids[None]) == len(ids[4]) == 1 and set(*ids[4]) < set(*ids[None]) and len(*ids[4]) == 4


def test_a_study_that_is_killed_continues_to_the_question_and_ends_with_the_same_table(
    done, questions, tmp_path, monkeypatch, ran
):
    study, asked = study_of(questions), 0
    for stop_at in (1, 4, 9, 20):
        with monkeypatch.context() as killed:
            calls = counting(killed, stop_at)
            with pytest.raises(KeyboardInterrupt):
                ran(study)
            asked += sum(map(len, calls))
    calls = counting(monkeypatch)
    ran(study)
    assert asked + sum(map(len, calls)) == ASKED
    assert tables(tmp_path / "s").drop(columns="seconds").equals(tables(done).drop(columns="seconds"))


def test_methods_and_numbers_can_be_added_and_nothing_else(questions, tmp_path, monkeypatch, ran):
    first = study_of(questions, methods=("fuse",), at_least=3, **SMALL)
    ran(first)
    before = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*.feather")}
    calls = counting(monkeypatch)
    ran(replace(first, methods=("fuse", "concat"), num_paraphrases=(2, 3)))
    assert len(before) == 3 and all(path.read_bytes() == content for path, content in before.items())
    assert sum(map(len, calls)) == 9 * (1 + 1 + 2)
    other_data = dict([named(str(write_set(tmp_path / "eleven.jsonl", 9)))])
    for change, message in (
        ({"few_shot": 1}, "few_shot was 2, now 1"),
        ({"at_least": 2}, "at_least was 3, now 2"),
        ({"data": other_data}, "data eleven was"),
    ):
        with pytest.raises(TrainingError, match=message):
            ran(replace(first, **change))


@pytest.mark.parametrize(
    "change", [{"num_paraphrases": (1,)}, {"num_paraphrases": (4,)}, {"methods": ("weighted",)}, {"methods": ("x",)}]
)
def test_invalid_studies_are_refused_before_anything_is_written(questions, tmp_path, change, ran):
    with pytest.raises(DataError):
        ran(study_of(questions, **change))
    assert not (tmp_path / "s").exists()


def test_a_cell_that_fails_is_reported_and_the_others_go_on(questions, tmp_path, monkeypatch, ran):
    def refused(lm, asked, method, *args, **kwargs):
        if method == "concat":
            raise DataError("too long")
        return generate(lm, asked, method, *args, **kwargs)

    study = study_of(questions, **SMALL)
    with monkeypatch.context() as broken:
        broken.setattr(runs, "generate", refused)
        assert ran(study) == {"tiny-llama, eleven, concat_n2": "too long"}
    assert "concat" not in set(tables(tmp_path / "s")["arm"])
    assert ran(study) == {}


def test_planted_effects_are_found_and_planted_nulls_are_not(monkeypatch, tmp_path, ran):
    shares = {"fuse": 0.6, "concat": 0.25}  # of right answers; a hard question is hard for all methods

    def answers(lm, asked, method, *args, **kwargs):
        texts = []
        for paraphrases in asked:
            name, places = paraphrases[0].split()[1], [text.split()[-1] for text in paraphrases]
            how = f"single {places[0]}" if method == "single" or len(set(places)) == 1 else method
            luck = random.Random(f"{name} {how}").random()
            right = 0.5 * random.Random(name).random() + 0.5 * luck < shares.get(how.split()[0], 0.4)
            texts.append(f"right {int(name[1:])}" if right else "wrong")
        return SimpleNamespace(texts=texts, engine="fast", seconds=0.01 * len(asked), votes=None)

    def row(rows, arm, condition="planted"):
        """The row with the most questions."""
        chosen = rows[(rows["arm"] == arm) & (rows["condition"] == condition) & (rows["paraphrases"] == 3)]
        return chosen.loc[chosen["n"].idxmax()]

    monkeypatch.setattr(runs, "generate", answers)
    data = write_set(tmp_path / "planted.jsonl", 402, relations=60)
    ran(study_of(data, num_paraphrases=(1, 3), batch_size=64, few_questions=100))
    rows = tables(tmp_path / "s")
    fuse, concat, average, single = (row(rows, arm) for arm in ("fuse", "concat", "logit-average", "single"))
    assert fuse.difference_low > 5 and concat.difference_high < -5
    assert average.difference_low < 0 < average.difference_high
    files = (tmp_path / "s" / "tiny-llama" / "planted").glob(f"single_place*/{ANSWERS}")
    accuracies = [sum(row["correct"] for row in read_answers(file).rows) / fuse.n for file in files]
    assert single["mean"] == pytest.approx(100 * sum(accuracies) / 3)  # the reference is the mean of single prompts
    assert fuse.difference == pytest.approx(fuse["mean"] - single["mean"]) and fuse.seconds == pytest.approx(0.01)
    against = tables(tmp_path / "s", "logit-average")
    assert row(against, "fuse").difference == pytest.approx(fuse["mean"] - average["mean"])
    assert list(rows[rows["n"] == 100]["arm"]) == ["single", "isolate"]  # compared on the same few
    for arm in ("fuse", "logit-average"):
        assert row(rows, arm, "planted, copies").difference == 0  # copies of one paraphrase are that paraphrase


def test_questions_that_contain_an_answer_are_also_left_out(tmp_path, ran):
    data = write_set(tmp_path / "set.jsonl", 12, first=[f"{place} is it right 0 or not" for place in range(PLACES)])
    ran(study_of(data, few_shot=0, **SMALL))
    sizes = tables(tmp_path / "s").groupby("condition")["n"].max()
    assert sizes["set"] == 12 and sizes["set, answer not in the question"] == 11


def test_a_set_has_the_name_that_is_given_or_that_of_its_file():
    assert named("pararel=lama:a/b", "pairs") == ("pararel", ("lama:a/b", "pairs"))
    assert named("known-facts", "pairs") == ("known-facts", ("known-facts", None))
    assert named("webqa:main/test.json")[0] == "test" and fusion.slug("a/b:c") == "a--b-c"
