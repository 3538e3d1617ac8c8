"""benchmarks/study/fusion.py: all methods on the same questions, resumable, and planted effects in the table."""

import random
from types import SimpleNamespace

import pytest

from benchmarks.study.fusion import ANSWERS, Study, cells, named, run_study, tables
from labkit.errors import DataError
from labkit.fusion import generation, runs
from labkit.fusion.scores import read_answers
from tests.data_files import rows_of, write

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.end_to_end

PLACES = 3
SETTINGS = {
    "methods": ("single", "concat", "fuse", "logit-average"), "num_paraphrases": (1, 2, 3), "few_shot": 2,
    "few_methods": ("isolate",), "few_questions": 4, "repeat_control": True, "batch_size": 4, "max_new_tokens": 3,
    "device": "cpu", "seed": 3,
}  # fmt: skip
# answers in all: places; three methods for N = 2 and 3; the control; one method on few questions. Two of the eleven
# questions are examples.
ASKED = (3 + 2 * 3 + 4) * 9 + 2 * 4


def study_of(path, **changed):
    return Study(("tiny-llama",), dict([named(str(path))]), **(SETTINGS | changed))


def write_set(path, count, relations=5):
    rows = [
        {"id": f"q{number:03}", "relation": f"r{number % relations}", "natural": True, "answers": [f"right {number}"]}
        | {"paraphrases": [f"q{number:03} in wording {place}" for place in range(PLACES)]}
        for number in range(count)
    ]
    return write(path, rows)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("sets") / "eleven.jsonl", 11)


@pytest.fixture(scope="module")
def done(tmp_path_factory, questions):
    folder = tmp_path_factory.mktemp("study") / "all"
    assert run_study(study_of(questions), folder) == {}
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
    rows = read_answers(done / "tiny-llama" / "eleven" / "concat_n3" / ANSWERS).rows
    order, ids = {row["id"]: row["paraphrases"] for row in rows}, {}
    assert len({texts[0].split()[-1] for texts in order.values()}) > 1
    for cell in cells(study_of(questions)):
        rows = read_answers(done / cell.folder / ANSWERS).rows
        for row in rows:
            texts, place = order[row["id"]], cell.place or 0
            expected = texts[: cell.first] if cell.first else [texts[place]] * (cell.repeat or 1)
            assert row["paraphrases"] == expected, cell
        ids.setdefault(cell.max_questions, set()).add(tuple(row["id"] for row in rows))
    assert len(ids[None]) == len(ids[4]) == 1 and set(*ids[4]) < set(*ids[None]) and len(*ids[4]) == 4


def test_a_study_that_is_killed_continues_to_the_question_and_ends_with_the_same_table(
    done, questions, tmp_path, monkeypatch
):
    study, asked = study_of(questions), 0
    for stop_at in (1, 9):
        with monkeypatch.context() as killed:
            calls = counting(killed, stop_at)
            with pytest.raises(KeyboardInterrupt):
                run_study(study, tmp_path / "s")
            asked += sum(map(len, calls))
    calls = counting(monkeypatch)
    run_study(study, tmp_path / "s")
    assert asked + sum(map(len, calls)) == ASKED
    assert tables(tmp_path / "s").drop(columns="seconds").equals(tables(done).drop(columns="seconds"))


def test_invalid_studies_are_refused_before_anything_is_written(questions, tmp_path):
    for change in ({"num_paraphrases": (1,)}, {"num_paraphrases": (0, 2)}):
        with pytest.raises(DataError, match="numbers of paraphrases"):
            study_of(questions, **change)
    for change in ({"num_paraphrases": (4,)}, {"methods": ("weighted",)}, {"methods": ("fusion",)}):
        with pytest.raises(DataError):
            run_study(study_of(questions, **change), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def planted(monkeypatch, tmp_path, shares):
    """A study of a model that is right on these shares of the questions; a hard question is hard for all methods."""

    def answers(lm, questions, method, *args, **kwargs):
        texts = []
        for wordings in questions:
            name, places = wordings[0].split()[1], [text.split()[-1] for text in wordings]
            how = f"single {places[0]}" if method == "single" or len(set(places)) == 1 else method
            luck = 0.5 * random.Random(name).random() + 0.5 * random.Random(f"{name} {how}").random()
            is_right = luck < shares.get(how.split()[0], 0.4)
            texts.append(f"right {int(name[1:])}" if is_right else "wrong")
        return SimpleNamespace(texts=texts, engine="fast", seconds=0.01 * len(questions), votes=None)

    monkeypatch.setattr(runs, "generate", answers)
    data = write_set(tmp_path / "planted.jsonl", 402, relations=60)
    run_study(study_of(data, num_paraphrases=(1, 3), batch_size=64, few_questions=100), tmp_path / "planted")
    return tables(tmp_path / "planted")


def row(rows, arm, condition="planted", n=3):
    """The row with the most questions."""
    chosen = rows[(rows["arm"] == arm) & (rows["condition"] == condition) & (rows["paraphrases"] == n)]
    return max(chosen.itertuples(), key=lambda row: row.n)


def test_planted_effects_are_significant_and_planted_nulls_are_not(monkeypatch, tmp_path):
    rows = planted(monkeypatch, tmp_path, {"fuse": 0.6, "concat": 0.25})
    fuse, concat, average, single = (row(rows, arm) for arm in ("fuse", "concat", "logit-average", "single"))
    assert fuse.difference_low > 5 and concat.difference_high < -5
    assert average.difference_low < 0 < average.difference_high
    accuracies = []
    for place in range(PLACES):
        answers = read_answers(tmp_path / "planted" / "tiny-llama" / "planted" / f"single_place{place}" / ANSWERS).rows
        accuracies.append(sum(answer["correct"] for answer in answers) / len(answers))
    assert single.mean == pytest.approx(100 * sum(accuracies) / 3)  # the reference is the mean of the single prompts
    assert fuse.difference == pytest.approx(fuse.mean - single.mean) and fuse.seconds == pytest.approx(0.01)
    against = tables(tmp_path / "planted", "logit-average")
    assert row(against, "fuse").difference == pytest.approx(fuse.mean - average.mean)
    assert list(rows[rows["n"] == 100]["arm"]) == ["single", "isolate"]  # few questions are compared on the same few
    for arm in ("fuse", "logit-average"):
        assert row(rows, arm, "planted, copies").difference == 0  # copies of one paraphrase are that paraphrase


def test_questions_that_contain_an_answer_are_also_left_out(tmp_path):
    data = write_set(tmp_path / "set.jsonl", 12)
    rows = rows_of(data)
    rows[3]["paraphrases"] = [f"{place} is it right 3 or not" for place in range(PLACES)]
    write(data, rows)
    run_study(study_of(data, few_shot=0, few_methods=(), num_paraphrases=(2,)), tmp_path / "s")
    sizes = tables(tmp_path / "s").groupby("condition")["n"].max()
    assert sizes["set"] == 12 and sizes["set, answer not in the question"] == 11


@pytest.mark.parametrize(
    ("text", "name"),
    [("pararel=lama:a/b", "pararel"), ("known-facts", "known-facts"), ("webqa:main/test.json", "test")],
)
def test_a_set_has_the_name_that_is_given_or_that_of_its_file(text, name):
    assert named(text, "pairs") == (name, (text.rpartition("=")[2], "pairs" if "lama" in text else None))
