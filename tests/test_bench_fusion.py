"""`labkit bench fusion`: all methods on the same questions, resumable, and a report that says what the numbers say."""

import json
import random
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from labkit.bench import fusion_report, fusion_words, stored
from labkit.bench.fusion_quality import Cell, Study, data_named, read_study, run_study
from labkit.bench.fusion_report import report, written
from labkit.datasets.paraphrases import ParaphrasedQuestion
from labkit.errors import FusionError, LabkitError, ModelError, TrainingError
from labkit.fusion import runs
from labkit.fusion.answers import read_answers
from labkit.fusion.generation import generate
from labkit.fusion.journal import journal_of

pytestmark = pytest.mark.end_to_end

pytest.importorskip("pyarrow")

PLACES = 3
METHODS = ("single", "concat", "fuse", "logit-average")


def quiet(text):
    pass


def write_set(path, count, natural=True):
    rows = [
        {
            "id": f"q{number:03}", "relation": f"r{number % 5}", "natural": natural, "answers": [f"right {number}"],
            "paraphrases": [f"q{number:03} in wording {place}" for place in range(PLACES)],
        }
        for number in range(count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def study_of(path, **changed):
    settings = {
        "methods": METHODS, "num_paraphrases": (1, 2, 3), "few_methods": ("isolate", "majority-vote"),
        "few_questions": 4, "repeat_control": True, "few_shot": 2, "batch_size": 4, "max_new_tokens": 3,
        "device": "cpu", "seed": 3,
    }  # fmt: skip
    return Study(("tiny-llama",), (data_named(str(path)),), **(settings | changed))


CELLS = 3 + 2 * 3 + 4 + 2 * 2  # places; three methods, two on few questions, for N = 2 and 3; the control
ASKED = (3 + 2 * 3 + 4) * 9 + 2 * 2 * 4  # answers in all; two of the eleven questions are examples


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("sets") / "eleven.jsonl", 11)


@pytest.fixture(scope="module")
def done(tmp_path_factory, questions):
    """A finished study of the real tiny model, and what it said."""
    folder, said = tmp_path_factory.mktemp("study") / "all", []
    assert run_study(study_of(questions), folder, say=said.append) == {}
    return folder, said


def without_time(found):
    found = json.loads(json.dumps(found))
    for each in found["conditions"]:
        for one in [*each["rows"], *each["places"]]:
            del one["seconds"]
    return found


def count_answers(monkeypatch, stop_at=None):
    """The lists of questions that are asked from now on; at the call of number `stop_at` the process is killed."""
    calls = []

    def counted(lm, asked, *args, **kwargs):
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        calls.append(list(asked))
        return generate(lm, asked, *args, **kwargs)

    monkeypatch.setattr(runs, "generate", counted)
    return calls


def plant(monkeypatch, shares, broken_copies=()):
    """A model that is right on a share of the questions by method; a question that is hard is hard for all methods.

    Copies of one paraphrase are answered as that paraphrase, but by the methods in `broken_copies`.
    """

    def answers(lm, asked, method, *args, **kwargs):
        texts = []
        for each in asked:
            id, places = each[0].split()[1], [text.split()[-1] for text in each]
            copies = method not in broken_copies and len(set(places)) == 1
            how = f"single {places[0]}" if method == "single" or copies else method
            luck = random.Random(f"{id} {how}").random()
            right = 0.5 * random.Random(id).random() + 0.5 * luck < shares[how.split()[0]]
            texts.append(f"right {int(id[1:])}" if right else "wrong")
        return SimpleNamespace(texts=texts, engine="fast", seconds=0.01 * len(asked), votes=None)

    monkeypatch.setattr(runs, "generate", answers)


def planted(
    monkeypatch, tmp_path, shares, name="planted", natural=True, count=402, broken_copies=(), few_methods=(), **changed
):
    """The folder of a study of a model with planted shares of right answers."""
    plant(monkeypatch, {"single": 0.4, "concat": 0.4, "fuse": 0.4, "logit-average": 0.4} | shares, broken_copies)
    data = write_set(tmp_path / f"{name}.jsonl", count, natural)
    study = study_of(data, few_methods=few_methods, num_paraphrases=(1, 3), batch_size=64, **changed)
    run_study(study, tmp_path / name, say=quiet)
    return tmp_path / name


def row(condition, method, n):
    (found,) = [each for each in condition["rows"] if (each["method"], each["paraphrases"]) == (method, n)]
    return found


# ---- a study and its folder ----------------------------------------------------------------------------------------


def test_every_cell_is_a_file_of_answers_under_the_settings_of_its_name(done):
    folder, said = done
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.feather")}
    where = "tiny-llama/eleven/"
    assert files == {where + name + ".feather" for name in (
        "single_i0", "single_i1", "single_i2", "concat_n2", "fuse_n2", "logit-average_n2", "concat_n3", "fuse_n3",
        "logit-average_n3", "concat_i0x3", "isolate-restart_i0x3", "fuse_i0x3", "logit-average_i0x3", "isolate_n2",
        "majority-vote_n2", "isolate_n3", "majority-vote_n3",
    )}  # fmt: skip
    assert said[0] == f"{CELLS} cells, 0 of them done" and len(said) == CELLS + 1
    assert said[1].startswith(f"1 of {CELLS}: tiny-llama, eleven, single, place 0: 0.0 % of 9 right (")
    assert not list(folder.rglob("*.jsonl")) and not (folder / "failures.json").exists()
    for cell in read_study(folder)[1]:
        answers = read_answers(folder / cell.file)
        settings = answers.about["settings"]
        assert (settings["method"], settings["num_paraphrases"]) == (cell.method, cell.first)
        assert settings["at_least"] == 3 and len(answers.rows) == (4 if cell.max_questions else 9)
        read = {len(each["paraphrases"]) for each in answers.rows}
        assert read == {cell.first or cell.repeat or 1}


def test_the_paraphrases_of_a_question_are_read_in_one_drawn_order_by_all_methods_n_and_places(done):
    folder = done[0]
    order, begins = {}, set()
    for each in read_answers(folder / "tiny-llama" / "eleven" / "concat_n3.feather").rows:
        order[each["id"]] = each["paraphrases"]
        begins.add(each["paraphrases"][0].split()[-1])
        assert sorted(each["paraphrases"]) == [f"{each['id']} in wording {place}" for place in range(PLACES)]
        again = runs.drawn_order(ParaphrasedQuestion(each["id"], tuple(sorted(each["paraphrases"])), ("a",)), seed=3)
        assert list(again.paraphrases) == each["paraphrases"]  # the seed and the id tell it
    assert len(begins) > 1
    for cell in read_study(folder)[1]:
        for each in read_answers(folder / cell.file).rows:
            whole = order[each["id"]]
            copies, one = whole[:1] * (cell.repeat or 0), whole[cell.place or 0 : (cell.place or 0) + 1]
            assert each["paraphrases"] == (whole[: cell.first] if cell.first else copies or one), cell


def test_another_seed_or_id_draws_another_order_and_every_place_comes_first_as_often():
    texts = tuple("abc")

    def first(seed, number):
        return runs.drawn_order(ParaphrasedQuestion(f"q{number}", texts, ("a",)), seed).paraphrases[0]

    for seed in (0, 1):
        firsts = [first(seed, number) for number in range(600)]
        assert all(abs(firsts.count(text) - 200) < 4 * (600 * 2 / 9) ** 0.5 for text in texts)
    assert [first(0, number) for number in range(20)] != [first(1, number) for number in range(20)]


def test_a_study_that_read_the_paraphrases_in_the_order_of_the_set_is_refused(done, questions, tmp_path):
    shutil.copytree(done[0], tmp_path / "s")
    study = json.loads((tmp_path / "s" / "study.json").read_text())
    del study["settings"]["order"]
    (tmp_path / "s" / "study.json").write_text(json.dumps(study))
    words = "read the paraphrases in the order of their set.* begin the study again in a new folder"
    with pytest.raises(TrainingError, match=words):
        run_study(study_of(questions), tmp_path / "s", resume=True, say=quiet)
    with pytest.raises(TrainingError, match=words):
        report([tmp_path / "s"])


def test_a_few_questions_are_part_of_the_many_and_all_n_have_the_same_ones(done):
    where = done[0] / "tiny-llama" / "eleven"
    ids = {path.stem: [each["id"] for each in read_answers(path).rows] for path in where.glob("*.feather")}
    many = ids["single_i0"]
    for name, own in ids.items():
        few = name.startswith(("isolate_", "majority"))
        assert own == (ids["isolate_n2"] if few else many), name
    assert len(ids["isolate_n2"]) == 4 and set(ids["isolate_n2"]) < set(many)


def test_a_model_is_loaded_once_however_many_cells_it_answers(questions, tmp_path, monkeypatch):
    loaded, load = [], runs.load

    def counted(name, **kwargs):
        loaded.append(name)
        return load(name, **kwargs)

    monkeypatch.setattr(runs, "load", counted)
    study = study_of(questions, methods=("fuse",), few_methods=(), num_paraphrases=(2,))
    run_study(study, tmp_path / "s", say=quiet)
    assert loaded == ["tiny-llama"]
    run_study(study, tmp_path / "s", resume=True, say=quiet)
    assert loaded == ["tiny-llama"]  # nothing was left to ask
    run_study(replace(study, models=("tiny-llama", "tiny-gpt2")), tmp_path / "s", resume=True, say=quiet)
    assert loaded == ["tiny-llama", "tiny-gpt2"]
    assert [each["model"] for each in report([tmp_path / "s"])["conditions"]] == ["tiny-llama", "tiny-gpt2"]


def test_killed_anywhere_a_study_goes_on_to_the_same_report_and_asks_nothing_twice(
    done, questions, tmp_path, monkeypatch
):
    study, asked = study_of(questions), 0
    for stop_at in (1, 4, 9, 20):
        with monkeypatch.context() as killed:
            calls = count_answers(killed, stop_at)
            with pytest.raises(KeyboardInterrupt):
                run_study(study, tmp_path / "s", resume=True, say=quiet)
            asked += sum(map(len, calls))
        half = report([tmp_path / "s"]) if stop_at > 1 else None
        assert half is None or 0 < len(half["unfinished"]) < CELLS
    calls = count_answers(monkeypatch)
    run_study(study, tmp_path / "s", resume=True, say=quiet)
    assert asked + sum(map(len, calls)) == ASKED
    assert without_time(report([tmp_path / "s"])) == without_time(report([done[0]]))


def test_methods_and_n_can_be_added_and_what_is_done_stays(questions, tmp_path, monkeypatch):
    first = study_of(questions, methods=("fuse",), few_methods=(), num_paraphrases=(2,), at_least=3)
    run_study(replace(first, repeat_control=False), tmp_path / "s", say=quiet)
    before = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*.feather")}
    assert len(before) == 3
    calls = count_answers(monkeypatch)
    more = study_of(questions, methods=("fuse", "concat"), few_methods=("isolate",), num_paraphrases=(2, 3))
    run_study(more, tmp_path / "s", resume=True, say=quiet)
    assert sum(map(len, calls)) == 9 * (1 + 3 + 4) + 4 * 2
    assert all(path.read_bytes() == content for path, content in before.items())
    (found,) = report([tmp_path / "s"])["conditions"]
    assert {(each["method"], each["paraphrases"]) for each in found["rows"]} == {
        ("single", 1), ("single", 2), ("single", 3), ("fuse", 2), ("fuse", 3), ("concat", 2), ("concat", 3),
        ("isolate", 2), ("isolate", 3),
    }  # fmt: skip
    run_study(replace(first, methods=("single",)), tmp_path / "s", resume=True, say=quiet)
    assert len(report([tmp_path / "s"])["conditions"][0]["rows"]) == 9  # nothing is forgotten


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"few_shot": 1}, "begun with other settings: few_shot was 2, now 1"),
        ({"seed": 4, "dtype": "float64"}, "dtype was None, now 'float64'; seed was 3, now 4"),
        ({"max_questions": 5}, "single, place 0 was begun with all questions.* is now to have 5"),
        ({"few_questions": 3}, "isolate, N = 2 was begun with 4 questions.* is now to have 3"),
        ({"few_methods": (), "methods": ("isolate",)}, "isolate, N = 2 was begun with 4 questions"),
        ({"num_paraphrases": (4,)}, "N = 4 needs questions with 4 paraphrases, and those with 3 are asked"),
    ],
)
def test_a_study_of_other_settings_is_not_gone_on_with(done, questions, tmp_path, changed, words):
    shutil.copytree(done[0], tmp_path / "s")
    before = (tmp_path / "s" / "study.json").read_bytes()
    with pytest.raises(LabkitError, match=words):
        run_study(study_of(questions, **changed), tmp_path / "s", resume=True, say=quiet)
    assert (tmp_path / "s" / "study.json").read_bytes() == before


def test_other_questions_under_the_same_name_are_refused(tmp_path):
    data = write_set(tmp_path / "set.jsonl", 8)
    study = study_of(data, methods=("fuse",), few_methods=(), num_paraphrases=(2,))
    run_study(study, tmp_path / "s", say=quiet)
    write_set(data, 9)
    with pytest.raises(TrainingError, match="set is not the set that the study .* was begun with: sha256 was"):
        run_study(study, tmp_path / "s", resume=True, say=quiet)


def test_what_holds_something_else_is_left_alone(done, questions, tmp_path):
    with pytest.raises(TrainingError, match="holds a study already: --resume goes on with it"):
        run_study(study_of(questions), done[0], say=quiet)
    (tmp_path / "study.json").write_text('{"study": {"model": "m"}, "conditions": []}')
    with pytest.raises(TrainingError, match="holds a study of another kind"):
        run_study(study_of(questions), tmp_path, resume=True, say=quiet)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["study.json"]
    with pytest.raises(TrainingError, match="holds no study of fusion methods"):
        report([tmp_path])


def test_a_wrong_name_is_an_error_before_anything_is_asked_or_written(questions, tmp_path, monkeypatch):
    calls = count_answers(monkeypatch)
    with pytest.raises(ModelError, match="no model is called 'tiny-lama'"):
        run_study(replace(study_of(questions), models=("tiny-llama", "tiny-lama")), tmp_path / "s", say=quiet)
    with pytest.raises(FusionError, match="the most that one has is 3"):
        run_study(study_of(questions, num_paraphrases=(4,)), tmp_path / "s", say=quiet)
    assert not calls and not (tmp_path / "s").exists()


def test_a_cell_that_fails_is_noted_and_the_others_go_on(questions, tmp_path, monkeypatch):
    def refused(lm, asked, method, *args, **kwargs):
        if method == "concat":
            raise FusionError("too long")
        return generate(lm, asked, method, *args, **kwargs)

    study = study_of(questions, few_methods=(), num_paraphrases=(2,), repeat_control=False)
    with monkeypatch.context() as broken:
        broken.setattr(runs, "generate", refused)
        failed = run_study(study, tmp_path / "s", say=quiet)
    assert failed == {"tiny-llama/eleven/concat_n2.feather": "too long"}
    found = report([tmp_path / "s"])
    assert [each["reason"] for each in found["unfinished"]] == ["too long"]
    assert found["words"][-1] == (
        "**Unfinished:** 1 cells, which enter no number: eleven, tiny-llama, concat, N = 2 (failed: too long)."
    )
    assert row(found["conditions"][0], "fuse", 2)["to_average"]["n"] == 9
    assert run_study(study, tmp_path / "s", resume=True, say=quiet) == {}
    assert report([tmp_path / "s"])["unfinished"] == []


# ---- the report ----------------------------------------------------------------------------------------------------


def test_the_report_is_rebuilt_from_the_folder_alone_wherever_it_lies(done, tmp_path):
    live = report([done[0]])
    shutil.copytree(done[0], tmp_path / "moved")
    assert report([tmp_path / "moved"]) == live
    files = written(live, tmp_path / "out", "fusion_quality")
    assert [path.name for path in files] == [
        "fusion_quality.md", "fusion_quality.json", "fusion_quality.svg", "fusion_quality-curve-1.svg",
        "fusion_quality-curve-2.svg",
    ]  # fmt: skip
    assert json.loads(files[1].read_text()) == json.loads(json.dumps(live))
    text = files[0].read_text()
    for each in live["conditions"][0]["rows"]:
        name = "single, mean" if each["method"] == "single" and each["paraphrases"] > 1 else each["method"]
        assert f"| {name} | {each['paraphrases']} | {each['n']} | {each['accuracy']['mean']:.1f} [" in text
    for file in files[2:]:
        assert f"]({file.name})" in text
        ElementTree.parse(file)


def test_copies_of_a_paraphrase_are_answered_as_that_paraphrase(done):
    (found,) = report([done[0]])["conditions"]
    checks = [each for each in found["control"] if each["check"]]
    assert [(each["method"], each["times"], each["alike"], each["of"]) for each in checks] == [
        ("fuse", 3, 9, 9), ("logit-average", 3, 9, 9),
    ]  # fmt: skip
    assert [each["method"] for each in found["control"] if not each["check"]] == ["concat", "isolate+restart"]


def test_unfinished_cells_are_named_with_what_is_kept_and_enter_no_number(questions, tmp_path, monkeypatch):
    study = study_of(questions, few_methods=(), num_paraphrases=(3,), repeat_control=False)
    with monkeypatch.context() as killed:
        count_answers(killed, stop_at=2)
        with pytest.raises(KeyboardInterrupt):
            run_study(study, tmp_path / "s", say=quiet)
    with pytest.raises(TrainingError, match="no cell is finished yet"):
        report([tmp_path / "s"])
    count_answers(monkeypatch, stop_at=1 + 3 + 2)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path / "s", resume=True, say=quiet)
    found = report([tmp_path / "s"])
    assert [(each["reads"], each["kept"]) for each in found["unfinished"]] == [
        ("place 2", 8), ("N = 3", 0), ("N = 3", 0), ("N = 3", 0)
    ]  # fmt: skip
    assert "eleven, tiny-llama, single, place 2 (8 answers kept)" in found["words"][-1]
    (condition,) = found["conditions"]
    assert [(each["method"], each["paraphrases"]) for each in condition["rows"]] == [("single", 1)]
    assert "fuse is not finished, or not all of its single prompts" in found["words"][0]
    assert "cannot be judged" in " ".join(found["words"])
    assert written(found, tmp_path / "out")[0].exists()


def test_what_is_compared_is_the_mean_of_the_single_prompts_on_the_questions_of_both(monkeypatch, tmp_path):
    folder = planted(monkeypatch, tmp_path, {"fuse": 0.6}, max_questions=200)
    more = study_of(
        tmp_path / "planted.jsonl", methods=("single",), few_methods=("concat",), few_questions=50,
        num_paraphrases=(3,), max_questions=200, batch_size=64,
    )  # fmt: skip
    (folder / "tiny-llama" / "planted" / "concat_n3.feather").unlink()
    study = json.loads((folder / "study.json").read_text())
    study["cells"] = [each for each in study["cells"] if each["method"] != "concat"]
    (folder / "study.json").write_text(json.dumps(study))
    run_study(more, folder, resume=True, say=quiet)
    right = {
        path.stem: {each["id"]: each["correct"] for each in read_answers(path).rows}
        for path in (folder / "tiny-llama" / "planted").glob("*.feather")
    }
    (found,) = report([folder])["conditions"]
    for method, n in (("fuse", 200), ("concat", 50)):
        own = right[f"{method}_n3"]
        alone = [np.mean([right[f"single_i{place}"][id] for id in own]) for place in range(3)]
        each = row(found, method, 3)
        assert each["n"] == each["to_single"]["n"] == each["to_average"]["n"] == len(own) == n
        assert each["to_single"]["mean"] == pytest.approx(100 * (np.mean(list(own.values())) - np.mean(alone)))
        average = np.mean([right["logit-average_n3"][id] for id in own])
        assert each["to_average"]["mean"] == pytest.approx(100 * (np.mean(list(own.values())) - average))
    alone = np.array([list(right[f"single_i{place}"].values()) for place in range(3)])
    single = row(found, "single", 3)
    assert single["accuracy"]["mean"] == pytest.approx(100 * alone.mean())
    assert single["in_all"]["mean"] == pytest.approx(100 * alone.all(0).mean())
    assert single["in_any"]["mean"] == pytest.approx(100 * alone.any(0).mean())
    (pair,) = found["pairs"]
    assert (pair["one"], pair["other"], pair["difference"]["n"]) == ("fuse", "concat", 50)


def test_a_planted_effect_is_found_and_a_planted_null_is_not(monkeypatch, tmp_path):
    helps = planted(monkeypatch, tmp_path, {"fuse": 0.6, "logit-average": 0.6}, "helps")
    harms = planted(monkeypatch, tmp_path, {"concat": 0.2}, "harms")
    found = report([helps, harms])
    up, down = found["conditions"]
    assert row(up, "fuse", 3)["to_single"]["low"] > 10 and row(up, "fuse", 3)["macro_to_single"]["low"] > 10
    assert row(down, "concat", 3)["to_single"]["high"] < -10
    for each, method, key in ((up, "fuse", "to_average"), (up, "concat", "to_single"), (down, "fuse", "to_single")):
        gap = row(each, method, 3)[key]
        assert gap["low"] < 0 < gap["high"] and gap["high"] - gap["low"] < 20
    assert row(up, "fuse", 3)["to_average"]["p"] > 0.05
    over, others, average, concat = found["words"][:4]
    assert re.search(r"fuse helps in 1 of 2 \(helps, tiny-llama, N = 3 \+\d", over)
    assert "shows no clear difference in 1 (harms, tiny-llama, N = 3" in over
    assert re.search(r"concat harms in 1 of 2, open in 1 \(from -\d[\d.]* to [+-][\d.]+\)", others)
    assert "fuse shows no clear difference in 2 of 2" in average
    assert "fuse is better in 2 of 2" in concat
    chance = next(text for text in found["words"] if text.startswith("**Chance:**"))
    gaps = 2 * (3 + 2 + 1 + 2)  # to single, to logit averaging, pairs, more text; of two conditions
    assert chance.startswith(f"**Chance:** of {gaps} comparisons ") and f"about {0.05 * gaps:.1f} would" in chance


def told_of(found, begin):
    (text,) = [text for text in found["words"] if text.startswith(f"**{begin}")]
    return text


def test_what_more_text_gives_is_told_of_the_methods_that_copies_can_move(monkeypatch, tmp_path):
    shares = {"fuse": 0.6, "concat": 0.7, "isolate+restart": 0.4}
    moved = ("concat", "isolate+restart")
    found = report([planted(monkeypatch, tmp_path, shares, "more", broken_copies=moved)])
    right = {
        path.stem: {each["id"]: each["correct"] for each in read_answers(path).rows}
        for path in (tmp_path / "more" / "tiny-llama" / "more").glob("*_i0*.feather")
    }
    gap = 100 * np.mean([right["concat_i0x3"][id] - right["single_i0"][id] for id in right["single_i0"]])
    told = told_of(found, "What more text gives**")
    assert f"concat helps in 1 of 1 (more, tiny-llama, concat x 3 {gap:+.1f} [" in told
    assert "isolate+restart shows no clear difference in 1 of 1 (more, tiny-llama, isolate+restart x 3" in told
    assert "fuse" not in told and "logit-average" not in told
    control = found["conditions"][0]["control"][0]
    assert control["to_first"]["mean"] == pytest.approx(gap) and 0 < control["to_first"]["low"] < gap
    nothing = planted(monkeypatch, tmp_path, shares, "nothing", repeat_control=False, count=20)
    assert "was not measured" in told_of(report([nothing]), "What more text gives**")


def test_an_implementation_that_copies_move_is_named_as_what_must_not_be(monkeypatch, tmp_path):
    sound = planted(monkeypatch, tmp_path, {"fuse": 0.6}, "sound")
    broken = planted(monkeypatch, tmp_path, {"fuse": 0.6}, "broken", broken_copies=("fuse",))
    found = report([sound])
    told = told_of(found, "An implementation check**")
    assert (
        "fuse x 3: the same answer in 400 of 400, +0.0 [-0.9, 0.9]" in told
    )  # 1 - 0.025^(1/400), though all are alike
    assert "must not be" not in told and "concat" not in told
    assert not any("of what fusion gains" in text for text in found["words"])
    told = told_of(report([broken]), "An implementation check**")
    assert "**This must not be:** copies change what is right in broken, tiny-llama, fuse x 3," in told


def in_relations(monkeypatch, tmp_path, relations, name):
    """The report of 400 questions in 20 relations, or in none.

    In 3 of the 20 fuse alone is right; in the others all methods are right on every second question.
    """

    def answers(lm, asked, method, *args, **kwargs):
        numbers = [int(each[0].split()[1][1:]) for each in asked]
        right = [method == "fuse" if number % 20 < 3 else number // 20 % 2 == 0 for number in numbers]
        texts = [f"right {number}" if good else "wrong" for number, good in zip(numbers, right, strict=True)]
        return SimpleNamespace(texts=texts, engine="fast", seconds=0.01 * len(asked), votes=None)

    monkeypatch.setattr(runs, "generate", answers)
    data = write_set(tmp_path / f"{name}.jsonl", 400)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for number, each in enumerate(rows):
        each.pop("relation")
        each |= {"relation": f"r{number % 20:02}"} if relations else {}
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    methods = ("concat", "isolate+restart", "fuse", "logit-average")
    study = study_of(data, methods=methods, few_methods=(), num_paraphrases=(3,), batch_size=64, few_shot=0)
    run_study(study, tmp_path / name, say=quiet)
    return report([tmp_path / name])


def test_a_gain_in_a_few_relations_is_clear_for_these_templates_and_not_for_others(monkeypatch, tmp_path):
    """15 % of the questions, all of them in 3 of 20 relations: a share of relations of 0.15 +- 0.16."""
    found = in_relations(monkeypatch, tmp_path, True, "related")
    (condition,) = found["conditions"]
    fuse = row(condition, "fuse", 3)
    pair = next(each for each in condition["pairs"] if (each["one"], each["other"]) == ("fuse", "isolate+restart"))
    for gap in (fuse["to_single"], fuse["to_average"], pair["difference"]):
        assert gap["mean"] == pytest.approx(15) and gap["low"] < 2 and gap["high"] > 25
        assert 10 < gap["these_templates"]["low"] < 15 < gap["these_templates"]["high"] < 20
    assert fuse["to_average"]["p"] < 1e-9
    text = fusion_words.markdown(found, {}, [["curve.svg"]])
    header = next(line for line in text.splitlines() if line.startswith("| method |"))
    for column in ("minus single", "minus logit-average"):
        assert f"| {column} | {column}, these templates only |" in header
    assert "| p (these templates) |" in header
    gap = fuse["to_single"]["these_templates"]
    assert f"| [{gap['low']:.1f}, {gap['high']:.1f}] |" in text
    assert re.search(r"fuse less concat, N = 3: \+15.0 \[.*; for these templates only \[1\d\.\d, 1\d\.\d\], p = ", text)


def test_verdicts_draw_relations_where_there_are_any_and_questions_alone_where_there_are_none(monkeypatch, tmp_path):
    related = in_relations(monkeypatch, tmp_path, True, "related")
    without = in_relations(monkeypatch, tmp_path, False, "without")
    wide, narrow = (row(found["conditions"][0], "fuse", 3)["to_single"] for found in (related, without))
    assert {"low": narrow["low"], "high": narrow["high"]} == wide["these_templates"]
    assert wide["high"] - wide["low"] > 2 * (narrow["high"] - narrow["low"])
    assert "these_templates" not in json.dumps(without)
    text = fusion_words.markdown(without, {}, [["curve.svg"]])
    assert "| p |" in text and "these templates only |" not in text
    assert "fuse helps in 1 of 1" in without["words"][0]


def test_questions_that_hold_an_accepted_answer_are_counted_and_left_out_beside_the_table(monkeypatch, tmp_path):
    """Fuse copies the answer out of the 40 questions that hold it, and is as good as one prompt on the others."""

    def answers(lm, asked, method, *args, **kwargs):
        texts = []
        for each in asked:
            number = int(each[0].split()[1][1:])
            texts.append(f"right {number}" if number % 2 == 0 or (method == "fuse" and number < 80) else "wrong")
        return SimpleNamespace(texts=texts, engine="fast", seconds=0.01 * len(asked), votes=None)

    monkeypatch.setattr(runs, "generate", answers)
    data = write_set(tmp_path / "held.jsonl", 200)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for number, each in enumerate(rows):
        if number < 80 and number % 2:
            each["paraphrases"][number % 3] += f", of Right {number}?"  # in one wording of three
        elif number == 81:
            each["paraphrases"][0] += " of Right 810"  # no whole word
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    study = study_of(data, few_methods=(), num_paraphrases=(3,), batch_size=64, few_shot=0)
    run_study(study, tmp_path / "held", say=quiet)
    found = report([tmp_path / "held"])
    (condition,) = found["conditions"]
    held = condition["answer_in_wording"]
    assert held["ids"] == [f"q{number:03}" for number in range(1, 80, 2)] and held["of"] == 200
    assert row(condition, "fuse", 3)["to_single"]["mean"] == pytest.approx(20)
    for name, n in (("fuse", 160), ("concat", 160), ("single", 160)):
        assert row(held, name, 3)["n"] == n and row(held, name, 3)["accuracy"]["mean"] == pytest.approx(100 * 100 / 160)
    for key in ("to_single", "to_average"):
        assert row(held, "fuse", 3)[key]["mean"] == 0
    assert [pair["difference"]["mean"] for pair in held["pairs"]] == [0]
    told = told_of(found, "An accepted answer within a wording")
    assert "held, tiny-llama: 40 of 200 questions; fuse less single, N = 3, +0.0 [" in told
    assert re.search(r"without them, \+20\.0 \[[^]]*\] with them", told)
    text = fusion_words.markdown(found, {}, [["curve.svg"]])
    beside = text.partition("40 of 200 questions have an accepted answer within a wording that is read. Without them:")[
        2
    ]
    assert "| fuse | 3 | 160 | 62.5 [" in beside


def test_a_set_without_answers_in_its_questions_has_one_table(done):
    (found,) = report([done[0]])["conditions"]
    assert found["answer_in_wording"] == {"ids": [], "of": 9}
    text = fusion_words.markdown(report([done[0]]), {}, [["a.svg", "b.svg"]])
    assert text.count("| method |") == 1 and "Without them" not in text
    assert told_of(report([done[0]]), "An accepted answer within a wording").endswith("in no question.")


def test_seconds_are_the_median_over_questions_with_quartiles(done):
    (found,) = report([done[0]])["conditions"]
    each = [one["seconds"] for one in read_answers(done[0] / "tiny-llama" / "eleven" / "fuse_n3.feather").rows]
    seconds = row(found, "fuse", 3)["seconds"]
    assert seconds["median"] == pytest.approx(sorted(each)[4]) and min(each) <= seconds["low"] <= seconds["median"]
    assert seconds["median"] <= seconds["high"] <= max(each)
    text = fusion_words.markdown(report([done[0]]), {}, [["a.svg", "b.svg"]])
    assert f"| {seconds['median']:.3g} [{seconds['low']:.3g}, {seconds['high']:.3g}] |" in text
    assert "the median of a run that may have shared the machine" in text


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"concat": 0.2, "isolate+restart": 0.4, "fuse": 0.6}, "is found, both steps leaving out zero, in 1 of 1"),
        ({"concat": 0.6, "isolate+restart": 0.4, "fuse": 0.6}, "is contradicted in 1 of 1"),
        ({"concat": 0.2, "isolate+restart": 0.4, "fuse": 0.4}, "is neither found nor contradicted in 1 of 1"),
    ],
)
def test_the_published_order_is_found_only_where_both_steps_are(monkeypatch, tmp_path, shares, words):
    folder = planted(monkeypatch, tmp_path, shares, methods=("concat", "isolate+restart", "fuse"), repeat_control=False)
    (told,) = [text for text in report([folder])["words"] if text.startswith("**The published order")]
    assert words in told


def test_paraphrases_made_by_templates_have_a_section_of_their_own(monkeypatch, tmp_path):
    natural = planted(monkeypatch, tmp_path, {}, "natural", count=60)
    made = planted(monkeypatch, tmp_path, {"fuse": 0.9}, "made", natural=False, count=60)
    found = report([made, natural])
    assert [each["name"] for each in found["conditions"]] == ["natural", "made"]
    gaps = [text for text in found["words"] if not text.startswith("**Not known")]
    assert not any("made" in text.replace("made of", "") for text in gaps)
    assert "fuse helps in 1 of 1 (made, tiny-llama, N = 3" in found["template_words"][1]
    files = written(found, tmp_path / "out")
    text = files[0].read_text()
    head, _, section = text.partition("# Made by templates")
    assert "## natural: tiny-llama" in head and "## made: tiny-llama" not in head
    assert "## made: tiny-llama" in section and "report-templates.svg" in section
    assert "made, tiny-llama" not in (tmp_path / "out" / "report.svg").read_text()
    assert "natural" not in (tmp_path / "out" / "report-templates.svg").read_text()
    alone = report([made])
    assert alone["words"][0] == "**Natural paraphrases** were not measured; see below."


def test_every_line_over_n_begins_with_the_first_prompt_on_its_own_questions(monkeypatch, tmp_path):
    folder = planted(monkeypatch, tmp_path, {"fuse": 0.6}, max_questions=200)
    (found,) = report([folder])["conditions"]
    first = found["places"][0]["accuracy"]["mean"]
    (curve,) = found["curves"]
    assert curve["n"] == 200 and set(curve["lines"]) == {"mean of single", "concat", "fuse", "logit-average"}
    for name, points in curve["lines"].items():
        assert [point[0] for point in points] == [1, 3]
        assert points[0][1] == pytest.approx(first)
        assert points[1][1] == row(found, name.replace("mean of ", ""), 3)["accuracy"]["mean"]
        assert all(low <= mean <= high for _, mean, low, high in points)


def test_methods_on_few_questions_are_drawn_beside_the_others_on_the_same_ones(monkeypatch, tmp_path):
    few = {"methods": ("concat", "fuse"), "few_questions": 50}
    folder = planted(monkeypatch, tmp_path, {"isolate": 0.5}, count=150, few_methods=("isolate",), **few)
    (found,) = report([folder])["conditions"]
    many, fewer = found["curves"]
    assert (many["n"], set(many["lines"])) == (148, {"mean of single", "concat", "fuse"})
    assert (fewer["n"], set(fewer["lines"])) == (50, {"mean of single", "fuse", "isolate"})
    where = folder / "tiny-llama" / "planted"
    ids = {each["id"] for each in read_answers(where / "isolate_n3.feather").rows}
    right = [each["correct"] for each in read_answers(where / "fuse_n3.feather").rows if each["id"] in ids]
    assert fewer["lines"]["fuse"][-1][:2] == [3, pytest.approx(100 * np.mean(right))]
    assert list(stored.fusion_differences([found])) == ["planted, tiny-llama (n = 50 to 148)"]


def test_lemmatised_accuracy_is_there_where_it_was_scored(monkeypatch, tmp_path):
    pytest.importorskip("simplemma")
    folder = planted(monkeypatch, tmp_path, {}, count=40, lemmatizer="simplemma")
    (found,) = report([folder])["conditions"]
    assert all(each["lemmatised"]["mean"] >= each["accuracy"]["mean"] for each in found["rows"])
    assert "| lemmatised |" in fusion_words.markdown(report([folder]), {}, [["curve.svg"]])


def test_files_of_unlike_versions_are_said_to_be_unlike(done, monkeypatch):
    def other(path):
        answers = read_answers(path)
        if path.stem == "fuse_n3":
            answers.about["versions"]["torch"] = "0.1"
        return answers

    assert not any("Versions or devices differ" in text for text in report([done[0]])["words"])
    monkeypatch.setattr(fusion_report, "read_answers", other)
    assert any("Versions or devices differ among the files of eleven" in text for text in report([done[0]])["words"])


# ---- a model that is there already ---------------------------------------------------------------------------------


def test_a_run_with_a_model_that_is_there_is_the_run_that_loads_it(questions, tmp_path, monkeypatch):
    settings = runs.Settings(str(questions), "tiny-llama", few_shot=2, max_new_tokens=3, device="cpu", dtype="float32")
    alone = runs.run(settings, tmp_path / "alone.feather")
    lm = runs.load_model(settings)
    monkeypatch.setattr(runs, "load", lambda *args, **kwargs: pytest.fail("loaded a model"))
    given = runs.run(settings, tmp_path / "given.feather", lm=lm)
    assert given.about == alone.about
    assert [each["generation"] for each in given.rows] == [each["generation"] for each in alone.rows]
    for changed, words in (
        ({"model": "tiny-gpt2"}, "name the model 'tiny-gpt2', and .* has 'tiny-llama'"),
        ({"dtype": "float64"}, "name the dtype 'float64', and .* has 'float32'"),
    ):
        with pytest.raises(FusionError, match=words):
            runs.run(replace(settings, **changed), tmp_path / "other.feather", lm=lm)
    assert not (tmp_path / "other.feather").exists() and not journal_of(tmp_path / "other.feather").exists()


# ---- stored results ------------------------------------------------------------------------------------------------


def test_stored_comparisons_of_fusion_are_found_by_their_name(done, tmp_path, monkeypatch):
    found = report([done[0]])
    written(found, tmp_path, "fusion_quality_tiny")
    written(found, tmp_path, "another_result")
    monkeypatch.setattr(stored, "folder", lambda name: tmp_path)
    assert stored.fusion_qualities() == json.loads(json.dumps(found["conditions"]))
    assert stored.fusion_qualities("tiny-llama") == stored.fusion_qualities() and stored.fusion_qualities("x") == []
    rows = stored.fusion_differences(stored.fusion_qualities())
    assert list(rows) == ["eleven, tiny-llama (n = 4 to 9)"]
    assert list(rows["eleven, tiny-llama (n = 4 to 9)"]) == [
        f"{method}, N = {n}"
        for method in ("concat", "fuse", "isolate", "logit-average", "majority-vote")
        for n in (2, 3)
    ]
    twice = stored.fusion_differences(found["conditions"] * 2)
    assert list(twice) == ["eleven, tiny-llama (n = 4 to 9)", "eleven, tiny-llama (n = 4 to 9), study 2"]


def test_the_stored_comparisons_of_this_project_say_what_was_asked():
    for each in stored.fusion_qualities():
        assert each["questions"] > 0 and each["settings"]["few_shot"] >= 0
        for one in each["rows"]:
            assert 0 <= one["accuracy"]["low"] <= one["accuracy"]["mean"] <= one["accuracy"]["high"] <= 100


# ---- what is given -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "dataset"),
    [
        ("known-facts", "known-facts", "known-facts"),
        ("pararel=lama:data/x", "pararel", "lama:data/x"),
        ("webqa:data/web questions.json", "web questions", "webqa:data/web questions.json"),
        ("a/b=c/set.jsonl", "set", "a/b=c/set.jsonl"),
    ],
)
def test_a_set_has_the_name_that_is_given_or_that_of_its_file(text, name, dataset):
    found = data_named(text, "pairs")
    assert (found.name, found.dataset) == (name, dataset)
    assert found.pairs == ("pairs" if dataset.startswith("lama:") else None)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_paraphrases": (1,)}, "one of at least 2"),
        ({"num_paraphrases": (0, 2)}, "give numbers from 1"),
        ({"num_paraphrases": (2, 2)}, "none twice"),
        ({"methods": ("fuse", "isolate")}, "methods are fuse, isolate, isolate, majority-vote; .* none twice"),
        ({"methods": ("mean",)}, "the fusion method is 'mean'; choose one of"),
        ({"methods": ("weighted",)}, "'weighted' needs weights"),
        ({"at_least": 2}, "N = 3 needs questions with 3 paraphrases, and those with 2"),
        ({"max_questions": 3}, "4 questions for the few methods are more than the 3"),
        ({"engine": "slow"}, "the fusion engine is 'slow'"),
    ],
)
def test_a_study_without_meaning_is_refused(questions, changed, words):
    with pytest.raises(LabkitError, match=words):
        study_of(questions, **changed)


def test_cells_of_unlike_models_and_methods_never_share_a_file():
    cells = [
        Cell(model, "d", method, **what)
        for model in ("m", "org/m")
        for method in ("fuse", "isolate", "isolate+restart")
        for what in ({"first": 2}, {"place": 2}, {"repeat": 2}, {"first": 22})
    ]
    assert len({cell.file for cell in cells}) == len(cells)


@pytest.fixture
def bench_command(labkit_command, tmp_path, monkeypatch):
    """bench_command("fusion", ...) in an empty folder -> (exit code, standard output, standard error)"""
    monkeypatch.chdir(tmp_path)
    return partial(labkit_command, "bench")


SMALL = ["fusion", "--model", "tiny-llama", "--num-paraphrases", "1,2", "--max-questions", "4", "--few-shot", "2"]
SMALL += ["--max-new-tokens", "2", "--device", "cpu", "--output-dir", "s"]


def test_the_command_asks_and_its_report_comes_again_from_the_folder(bench_command):
    code, out, err = bench_command(*SMALL, "--repeat-control", "--few-methods", "isolate", "--few-questions", "2")
    assert code == 0 and "10 cells, 0 of them done" in err
    assert out.startswith("# What fusing paraphrases gives") and "| isolate | 2 | 2 |" in out
    assert all(Path("s", name).exists() for name in ("report.md", "report.json", "report.svg", "report-curve-1.svg"))
    code, again, err = bench_command("fusion-report", "s", "--output-dir", "out", "--name", "fusion_quality")
    assert (code, err) == (0, "") and Path("out/fusion_quality.md").exists()
    assert again.splitlines()[:20] == out.splitlines()[:4] + [
        line.replace("report.svg", "fusion_quality.svg") for line in out.splitlines()[4:20]
    ]
    code, out, err = bench_command(
        *SMALL, "--repeat-control", "--few-methods", "isolate", "--few-questions", "2", "--resume", "--json"
    )
    assert code == 0 and json.loads(out) == json.loads(Path("s/report.json").read_text())
    assert err.splitlines() == ["10 cells, 10 of them done"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*SMALL, "--methods", "fuse,frob"], "the fusion method is 'frob'; choose one of"),
        ([*SMALL, "--num-paraphrases", "two"], "--num-paraphrases is 'two'.*no whole number"),
        ([*SMALL, "--num-paraphrases", "2,9"], "9 paraphrases: none of the .* questions has as many"),
        ([*SMALL, "--dataset", "no-such-file.jsonl"], "no-such-file.jsonl is no file and no known set"),
        ([*SMALL, "--dataset", "=x.jsonl"], r"--dataset is '=x.jsonl'; give \[NAME=\]DATASET"),
        ([*SMALL, "--dataset", "known-facts", "--dataset", "known-facts"], "none twice"),
        ([*SMALL, "--model", ""], "the models are none"),
        ([*SMALL, "--model", "tiny-lama"], "no model is called 'tiny-lama'"),
        ([*SMALL, "--device", "abacus"], "the device is 'abacus'"),
        ([*SMALL, "--output-dir", "file"], "is a file; give --output-dir a folder"),
        (["fusion-report", "nothing"], "nothing holds no study of fusion methods"),
        (["fusion-report"], "Missing argument"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_writes_nothing(bench_command, tmp_path, arguments, words):
    (tmp_path / "file").write_text("mine")
    code, out, err = bench_command(*arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert re.search(words, err)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
