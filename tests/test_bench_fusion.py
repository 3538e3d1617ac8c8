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
from labkit.errors import DataError, FusionError, LabkitError, ModelError, TrainingError
from labkit.fusion import runs, scores
from labkit.fusion.answers import read_answers
from labkit.fusion.generation import generate
from labkit.fusion.journal import journal_of
from labkit.fusion.scores import Scored

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


CELLS = 3 + 2 * 3 + 2 + 2 * 2  # places; three methods, two on few questions, for N = 2 and 3; the control
ASKED = (3 + 2 * 3 + 2) * 9 + 2 * 2 * 4  # answers in all; two of the eleven questions are examples


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
        "logit-average_n3", "fuse_i0x3", "logit-average_i0x3", "isolate_n2", "majority-vote_n2", "isolate_n3",
        "majority-vote_n3",
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
        if cell.place is not None:
            assert all(each["paraphrases"][0].endswith(f"wording {cell.place}") for each in answers.rows)


def test_a_few_questions_are_part_of_the_many_and_all_n_have_the_same_ones(done):
    where = done[0] / "tiny-llama" / "eleven"
    ids = {path.stem: [each["id"] for each in read_answers(path).rows] for path in where.glob("*.feather")}
    many = ids["single_i0"]
    for name, own in ids.items():
        few = name.startswith(("isolate", "majority"))
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
    assert sum(map(len, calls)) == 9 * (1 + 3 + 2) + 4 * 2
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
    assert [(each["method"], each["times"], each["alike"], each["of"]) for each in found["control"]] == [
        ("fuse", 3, 9, 9), ("logit-average", 3, 9, 9),
    ]  # fmt: skip


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
    alone = {place: 100 * np.mean(list(right[f"single_i{place}"].values())) for place in range(3)}
    single = row(found, "single", 3)
    assert single["accuracy"]["mean"] == pytest.approx(np.mean(list(alone.values())))
    assert single["best"] == {"place": max(alone, key=alone.get), "accuracy": pytest.approx(max(alone.values()))}
    assert single["worst"] == {"place": min(alone, key=alone.get), "accuracy": pytest.approx(min(alone.values()))}
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
        assert gap["low"] < 0 < gap["high"] and gap["high"] - gap["low"] < 15
    assert row(up, "fuse", 3)["to_average"]["p"] > 0.05
    over, others, average, concat = found["words"][:4]
    assert re.search(r"fuse helps in 1 of 2 \(helps, tiny-llama, N = 3 \+\d", over)
    assert "shows no clear difference in 1 (harms, tiny-llama, N = 3" in over
    assert re.search(r"concat harms in 1 of 2, open in 1 \(from -\d[\d.]* to [+-][\d.]+\)", others)
    assert "fuse shows no clear difference in 2 of 2" in average
    assert "fuse is better in 2 of 2" in concat
    chance = next(text for text in found["words"] if text.startswith("**Chance:**"))
    gaps = 2 * (3 + 2 + 1)  # to single, to logit averaging, pairs; of two conditions
    assert chance.startswith(f"**Chance:** of {gaps} comparisons ") and f"about {0.05 * gaps:.1f} would" in chance


def test_a_control_that_copies_move_is_named_as_what_must_not_be(monkeypatch, tmp_path):
    sound = planted(monkeypatch, tmp_path, {"fuse": 0.6}, "sound")
    broken = planted(monkeypatch, tmp_path, {"fuse": 0.6}, "broken", broken_copies=("fuse",))
    (told,) = [text for text in report([sound])["words"] if text.startswith("**The repeat control**")]
    assert "fuse x 3: the same answer in 400 of 400" in told and "must not be" not in told
    assert "So at most 0.9 points of what fusion gains" in told  # 1 - 0.025^(1/400), though all are alike
    (told,) = [text for text in report([broken])["words"] if text.startswith("**The repeat control**")]
    assert "**This must not be:** copies change what is right in broken, tiny-llama, fuse x 3," in told


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


# ---- the intervals -------------------------------------------------------------------------------------------------


def three_methods(n=300, seed=0):
    """One method and two others on the same questions, some hard for all; five relations of unlike size."""
    rng = np.random.default_rng(seed)
    ids = tuple(f"q{number}" for number in range(n))
    relations = tuple(f"r{int(r)}" for r in np.minimum(rng.geometric(0.4, n), 5))
    hard = rng.random(n)
    return [
        Scored(ids, tuple(bool(x) for x in 0.5 * hard + 0.5 * rng.random(n) < share), relations)
        for share in (0.6, 0.45, 0.5)
    ]


def test_the_difference_to_a_mean_has_the_interval_of_paired_questions():
    one, *others = three_methods()
    values = np.array(one.correct, dtype=float) - np.mean([each.correct for each in others], axis=0)
    found = scores.difference_to_mean(one, others)
    assert found.value == pytest.approx(values.mean()) and found.n == 300
    half = 1.96 * values.std() / np.sqrt(len(values))  # of a normal mean; the bootstrap must come near
    assert found.low == pytest.approx(values.mean() - half, abs=0.01)
    assert found.high == pytest.approx(values.mean() + half, abs=0.01)
    assert scores.difference_to_mean(one, others[:1]) == scores.difference(one, others[0])
    assert scores.mean_accuracy([one]) == scores.accuracy(one)
    assert scores.mean_accuracy(others).value == pytest.approx(np.mean([each.correct for each in others]))


def test_the_interval_over_relations_is_that_of_a_bootstrap_written_out():
    one, *others = three_methods()
    values = np.array(one.correct, dtype=float) - np.mean([each.correct for each in others], axis=0)
    groups = [values[np.array(one.relations) == name] for name in sorted(set(one.relations))]
    rng, means = np.random.default_rng(1), []
    for _ in range(2000):
        drawn = [groups[g] for g in rng.integers(len(groups), size=len(groups))]
        means.append(np.mean([rng.choice(group, len(group)).mean() for group in drawn]))
    found = scores.macro_difference_to_mean(one, others)
    assert found.value == pytest.approx(np.mean([group.mean() for group in groups]))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.02)
    macro, mean = scores.macro_accuracy(one), scores.macro_mean_accuracy([one])
    assert (mean.value, mean.low, mean.high) == pytest.approx((macro.value, macro.low, macro.high), abs=0.02)


def test_scores_are_shared_by_the_questions_that_all_answered_in_one_order():
    one = Scored(("a", "b", "c"), (True, False, True), ("x", "y", "x"))
    other = Scored(("c", "d", "a"), (False, True, True), ("x", "z", "x"))
    first, second = scores.shared([one, other])
    assert (first.ids, first.correct, first.relations) == (("a", "c"), (True, True), ("x", "x"))
    assert (second.ids, second.correct) == (("a", "c"), (True, False))
    with pytest.raises(DataError, match="no question to score"):
        scores.shared([one, Scored(("z",), (True,))])
    with pytest.raises(DataError, match="needs a relation for each question"):
        scores.macro_mean_accuracy([Scored(("z",), (True,))])


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
    assert code == 0 and "8 cells, 0 of them done" in err
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
    assert err.splitlines() == ["8 cells, 8 of them done"]


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
