"""Reports of comparisons that are not as one would like them: combined, cut short, with odd names, sizes and rates."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from labkit import cli
from labkit.bench import effect_words, folders, mask_effect
from labkit.bench.arms import arm
from labkit.bench.conditions import Condition, conditions
from labkit.bench.effect_report import report, written
from labkit.bench.mask_effect import NOT_TUNED, Study, run_study
from labkit.bench.stored import differences
from labkit.cli_effect import _arms
from labkit.errors import DataError, TrainingError
from tests.made_up_studies import made_up

pytestmark = pytest.mark.usefixtures("few_draws")

NAME = "invented/classify"
CHANCES = {"causal": 60.0, "bidirectional": 70.0}


def invented(name=NAME, n_train=10):
    """As much of a condition as the runner asks for before it trains."""
    return Condition(name, "classify", "", {}, [None] * n_train, [None], [None])


def with_budget(folder, **plan):
    """The report of the study in `folder`, as if its budget had been another."""
    found = json.loads(json.dumps(report([folder])))
    for each in found["conditions"] + found["curves"]:
        each["budget"] |= plan
    return found


def kept(path, found):
    path.write_text(json.dumps(found))
    return path


def test_a_condition_with_another_budget_is_another_condition(tmp_path):
    folder = made_up(tmp_path / "s", CHANCES, seeds=2, n=20)
    other = kept(tmp_path / "r.json", with_budget(folder, max_steps=7))
    found = report([other, folder])
    assert [each["budget"]["max_steps"] for each in found["conditions"]] == [7, None]
    assert len(found["curves"]) == 2


def test_a_condition_that_two_reports_hold_counts_once(tmp_path):
    folder = made_up(tmp_path / "s", CHANCES, seeds=2, n=20)
    one = kept(tmp_path / "r1.json", with_budget(folder, max_steps=7))
    both = kept(tmp_path / "r2.json", json.loads(json.dumps(report([one, folder]))))
    found = report([one, both])
    assert len(found["conditions"]) == 2 and len(found["curves"]) == 2


def test_a_condition_that_two_folders_hold_is_refused_unless_their_settings_differ(tmp_path):
    folder, other = (made_up(tmp_path / name, CHANCES, seeds=2, n=20) for name in "st")
    with pytest.raises(TrainingError, match=r"invented/classify \(none, full\) is in two of these folders"):
        report([folder, other])
    study = json.loads((other / "study.json").read_text())
    study["study"]["window"] = "halve"
    (other / "study.json").write_text(json.dumps(study))
    found = report([folder, other])
    assert len(found["conditions"]) == 2 and "invented/classify, window halve " in " ".join(found["words"])
    kept_one = kept(tmp_path / "r.json", report([folder]))
    assert len(report([kept_one, other])["conditions"]) == 2 and len(report([kept_one, folder])["conditions"]) == 1


def test_of_triples_that_were_cut_the_sentences_that_are_there_count(tmp_path):
    folder = made_up(tmp_path / "s", CHANCES, seeds=2, n=5)
    places = [
        ("after-0-PER", "0"),
        ("after-1-LOC", "0"),
        ("after-2-ORG", "0"),
        ("after-3-PER", "1"),
        ("before-0-PER", "2"),
    ]
    kinds = {"there": {"PER": 1}, "found": {"PER": 1}, "said": {"PER": 1}}
    lines = [{"id": id, "group": group} | kinds for id, group in places]
    study = json.loads((folder / "study.json").read_text())
    study["conditions"][0]["task"] = "ner"
    (folder / "study.json").write_text(json.dumps(study))
    for file in folder.glob("runs/*/*/*/*/judged.test.jsonl"):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    halves = report([folder])["conditions"][0]["diagnostic"]["causal"]
    assert halves["after"] == {"right": [4, 4], "of": 4, "ceiling": 2, "triples_over": 2}
    assert halves["before"]["of"] == 1


def test_what_one_model_has_not_run_is_not_done_because_another_has(tmp_path):
    begun = made_up(tmp_path / "begun", CHANCES, seeds=2, n=20)
    shutil.rmtree(begun / "runs" / "invented--classify" / "bidirectional")
    earlier = json.loads(json.dumps(report([begun])))
    for each in [*earlier["conditions"], *earlier["curves"], *earlier["unfinished"]]:
        each["model"] = "another"
    found = report([kept(tmp_path / "r.json", earlier), made_up(tmp_path / "s", CHANCES, seeds=2, n=20)])
    assert [each["model"] for each in found["unfinished"]] == ["another"]
    assert "**Unfinished:** invented/classify (another, full), 2 of 4 runs" in found["words"][-1]


def test_a_report_is_not_written_over_the_one_it_is_made_of(tmp_path, capsys):
    file = kept(tmp_path / "report.json", with_budget(made_up(tmp_path / "s", CHANCES, seeds=2, n=20), max_steps=7))
    before = file.read_bytes()
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "report", str(file), str(tmp_path / "s")])
    assert stopped.value.code == 2 and "--output-dir" in capsys.readouterr().err
    assert file.read_bytes() == before and not (tmp_path / "s" / "report.json").exists()


def test_the_report_goes_where_the_tilde_points(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    made_up(tmp_path / "s.json", CHANCES, seeds=2, n=20)  # a folder may be called like a file
    with pytest.raises(SystemExit):
        cli.main(["bench", "report", "~/s.json"])
    assert (tmp_path / "s.json" / "report.md").exists() and not (tmp_path / "~").exists()


def test_sizes_whose_seeds_are_not_those_of_the_full_set_are_told_without_a_comparison(tmp_path):
    folder = made_up(tmp_path / "s", CHANCES, seeds=4, n=20, smaller={5: CHANCES})
    for name in CHANCES:
        runs = folder / "runs" / "invented--classify" / name
        for gone in ("size-5/seed-0", "size-5/seed-1", "size-all/seed-2", "size-all/seed-3"):
            shutil.rmtree(runs / gone)
    small, full = report([folder])["conditions"][0]["sizes"]
    assert "difference" in small["arms"]["bidirectional"] and "growth" not in small["arms"]["bidirectional"]
    assert full["arms"]["bidirectional"]["n_seeds"] == 2


def test_a_size_that_the_training_set_does_not_have_is_left_out(tmp_path):
    study = Study("tiny-gpt2", arms=tuple(CHANCES), sizes=(5, 10, 1000, None), seeds=(0,))
    planned = list(mask_effect._reported(study, [invented(n_train=10)]))
    assert sorted({run.size or 0 for run in planned}) == [0, 5]
    folder = made_up(tmp_path / "s", CHANCES, seeds=2, n=20, smaller={10: CHANCES, 1000: CHANCES})
    found = report([folder])
    assert found["conditions"][0]["sizes"] == [] and found["unfinished"] == []
    for size in (0, -5):
        with pytest.raises(DataError, match=f"a training set of {size} examples"):
            replace(study, sizes=(size, None))


@pytest.mark.end_to_end
def test_pairs_and_smaller_sizes_are_corrected_for_their_number_too(tmp_path):
    chances = {"causal": 60.0, "bidirectional": 66.5, "repeated": 60.0}
    chances |= {f"{kind}:{steps}": 60.0 for kind in ("mntp", "next") for steps in (50, 100, 200)}
    found = report([made_up(tmp_path / "s", chances, smaller={5: chances})])
    (condition,) = found["conditions"]
    few = condition["sizes"][0]
    kinds = [
        [pair["difference"] for pair in condition["pairs"]],
        [pair["difference"] for pair in few["pairs"]],
        [pair["beyond"] for pair in condition["pairs"] if "beyond" in pair],
        [pair["beyond"] for pair in few["pairs"] if "beyond" in pair],
        [one["difference"] for name, one in few["arms"].items() if name != "causal"],
        [one["growth"] for name, one in few["arms"].items() if name != "causal"],
    ]
    assert [len(each) for each in kinds] == [10, 10, 3, 3, 8, 8]
    for each in kinds:
        assert {gap["together"] for gap in each} == {len(each)}
        assert all(gap["low_together"] < gap["low"] < gap["high"] < gap["high_together"] for gap in each)
    told = [*(one["difference"] for one in condition["arms"][1:]), *sum(kinds, [])]
    alone = [gap for gap in told if gap["low"] * gap["high"] > 0]
    barely = [gap for gap in alone if gap["low_together"] * gap["high_together"] < 0]
    assert alone and barely and len(barely) < len(alone)  # or there is nothing to mark, or all is
    words = "\n".join(found["words"])
    assert f"Of 50 differences that are told here, {len(alone)} leave out zero" in words
    assert f" {len(barely)} of the {len(alone)} no longer leave it out where all of a kind are taken" in words
    assert "is not known: their runs were not kept" not in words and "3 seeds or fewer" not in words
    for gap in barely:
        assert f"{gap['mean']:+.1f} [{gap['low']:.1f}, {gap['high']:.1f}], barely" in words

    for pair in condition["pairs"]:  # as an earlier report has them
        del pair["difference"]["together"]
    older = "\n".join(effect_words.paragraphs(found))
    gone = sum(gap["low"] * gap["high"] > 0 for gap in kinds[0])
    assert gone and f"For {gone} of the {len(alone)} that is not known: their runs were not kept." in older


@pytest.mark.end_to_end
def test_few_seeds_are_said_to_be_why_nothing_holds_in_company(tmp_path):
    chances = {"causal": 60.0, "bidirectional": 75.0} | {f"unmask:{n}": 60.0 for n in range(8)}
    found = report([made_up(tmp_path / "s", chances, seeds=3, n=200)])
    gap = found["conditions"][0]["arms"][1]["difference"]
    assert gap["low"] > 0 > gap["low_together"]  # planted: 15 points
    times = re.search(r" (\d+) of these have 3 seeds or fewer, where .* is (\d\.\d) times", "\n".join(found["words"]))
    assert int(times[1]) >= 1 and 1.3 < float(times[2]) < 5.0


def test_one_arm_alone_on_a_set_of_two_halves_has_no_row_of_differences():
    part = {"name": "what follows decides", "n": 6, "arms": {"causal": {"mean": 3.0}}}
    one = {"name": "a/ner", "n_test": 12, "model": "m", "arms": [{"name": "causal"}], "parts": [part]}
    assert differences([one]) == {}


def test_the_same_task_by_two_methods_or_by_models_of_like_names_is_told_apart():
    arms = [{"name": "causal"}, {"name": "bidirectional", "difference": {"mean": 1.0, "low": 0.5, "high": 1.5}}]
    one = {"name": "a/ner", "n_test": 12, "model": "gpt2-mini", "method": "full", "arms": arms}
    rows = list(differences([one, one | {"model": "gpt2"}, one | {"method": "lora"}]))
    assert rows == ["a/ner (n = 12), gpt2-mini, full", "a/ner (n = 12), gpt2, full", "a/ner (n = 12), gpt2-mini, lora"]


def test_a_rate_of_many_digits_has_a_folder_and_a_column_of_its_own(tmp_path):
    rates = (0.00021544346900318823, 0.00021544346900318867)
    assert folders.tuning_folder(NAME, "causal", rates[0]) != folders.tuning_folder(NAME, "causal", rates[1])
    folder = made_up(tmp_path / "s", CHANCES, seeds=2, n=20)
    study = json.loads((folder / "study.json").read_text())
    study["study"]["learning_rates"] = list(rates)
    (folder / "study.json").write_text(json.dumps(study))
    chosen = {"learning_rate": rates[1], "dev": {repr(rates[0]): 0.25, repr(rates[1]): 0.75}}
    (folder / "frozen.json").write_text(json.dumps({NAME: dict.fromkeys(CHANCES, chosen)}))
    assert "| causal | 2 | 25.0, **75.0** |" in written(report([folder]), tmp_path / "out")[0].read_text()


def tuned(path, name, scores):
    """Tuning runs of an arm that came to these dev scores, {rate: score}."""
    for rate, score in scores.items():
        run = path / folders.tuning_folder(NAME, name, rate)
        run.mkdir(parents=True)
        (run / "metrics.json").write_text(json.dumps({"metric": "accuracy", "dev": {"accuracy": score}}))


@pytest.mark.parametrize("diverged", [True, False])
def test_only_a_rate_that_diverged_makes_the_grid_of_an_arm_smaller(tmp_path, diverged):
    """Memory that was short for an hour is no reason to choose among fewer rates for ever."""
    study = Study("tiny-gpt2", arms=("causal", "bidirectional"), learning_rates=(1e-3, 3e-3))
    tuned(tmp_path, "causal", {1e-3: 0.5, 3e-3: 0.6})
    tuned(tmp_path, "bidirectional", {1e-3: 0.5})
    lost = str(folders.tuning_folder(NAME, "bidirectional", 3e-3))
    found = folders.freeze(tmp_path, study, [invented()], {lost: "no number any more"} if diverged else {})[NAME]
    assert found["causal"]["learning_rate"] == 3e-3
    assert found.get("bidirectional", {}).get("failed") == ({"0.003": "no number any more"} if diverged else None)
    left = [run.arm.name for run in mask_effect._tuning(study, [invented()], tmp_path)]
    assert left == ([] if diverged else ["bidirectional"] * 2)  # the one that is done is not done again


@pytest.mark.end_to_end
def test_a_run_that_found_no_memory_while_tuning_keeps_its_arm_for_the_next_time(tmp_path, monkeypatch):
    tried = []

    def finetune(*arguments, plan, **options):
        tried.append((options["mask"], plan.learning_rate, plan.seed))
        if options["mask"] == "bidirectional" and plan.learning_rate == 3e-3 and len(tried) < 5:
            raise TrainingError("this training needs about 11 GB, 9 GB are free")
        folder = arguments[3]
        folder.mkdir(parents=True, exist_ok=True)
        metrics = {"metric": "best_accuracy", "dev": {"best_accuracy": 0.5}, "test": {"accuracy": 0.5}}
        (folder / "metrics.json").write_text(json.dumps(metrics))
        return metrics

    monkeypatch.setattr(mask_effect, "finetune", finetune)
    (condition,) = conditions(["classify:which-way-round"], max_train=3, max_eval=3)
    study = Study("tiny-gpt2", arms=("causal", "bidirectional"), learning_rates=(1e-3, 3e-3), seeds=(0,))
    failures = run_study(study, [condition], tmp_path / "s", say=lambda text: None)
    assert "11 GB" in failures["tuning/which-way-round--classify/bidirectional/rate-0.003"]
    assert failures["runs/which-way-round--classify/bidirectional/size-all/seed-0"] == NOT_TUNED
    assert [each[0] for each in tried if each[2] == 0] == ["causal"]  # no test set was read by an arm half tuned
    assert run_study(study, [condition], tmp_path / "s", resume=True, say=lambda text: None) == {}
    assert not (tmp_path / "s" / "failures.json").exists()


def test_names_that_would_share_a_folder_are_refused_before_anything_is_written(tmp_path):
    study = Study("tiny-gpt2", arms=("causal",))
    for names in (("news 1/classify", "news-1/classify"), ("News/classify", "news/classify")):
        with pytest.raises(DataError, match="would share a folder"):
            run_study(study, [invented(name) for name in names], tmp_path / "s", say=lambda text: None)
    with pytest.raises(DataError, match="leave out the /"):
        conditions(["a/b=classify:which-way-round"])
    assert not (tmp_path / "s").exists()


def test_a_folder_whose_first_file_was_cut_short_can_be_begun_again(tmp_path):
    (tmp_path / ".writing-study.json-abc").write_text("{")
    with folders.claimed(tmp_path, resume=False) as (_, begun):
        assert begun is None


def test_the_lock_of_a_run_has_a_name_that_every_disk_takes(tmp_path):
    with folders.alone(tmp_path, folders.run_folder(tmp_path, NAME, "encoder:" + "/scratch" * 60, None, 0)):
        assert all(len(path.name) < 100 for path in (tmp_path / ".locks").iterdir())


def test_checkpoints_of_a_run_that_was_killed_after_its_scores_are_cleared(tmp_path, monkeypatch):
    (condition,) = conditions(["classify:which-way-round"], max_train=3, max_eval=3)
    assert isinstance(condition, Condition)
    study = Study("tiny-gpt2", arms=("causal",), learning_rates=(1e-3,), seeds=(0,))

    def finetune(*arguments, **options):
        (arguments[3] / "checkpoints").mkdir(parents=True)
        metrics = {"metric": "best_accuracy", "dev": {"best_accuracy": 0.5}, "test": {"accuracy": 0.5}}
        (arguments[3] / "metrics.json").write_text(json.dumps(metrics))
        raise KeyboardInterrupt

    monkeypatch.setattr(mask_effect, "finetune", finetune)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, [condition], tmp_path / "s", say=lambda text: None)
    assert list((tmp_path / "s").rglob("checkpoints"))
    assert run_study(study, [condition], tmp_path / "s", resume=True, say=lambda text: None) == {}
    assert not list((tmp_path / "s").rglob("checkpoints"))


def test_layers_by_number_are_one_arm_on_the_command_line():
    assert _arms("causal,unmask:0,1,2,repeated:2") == ["causal", "unmask:0,1,2", "repeated:2"]
    assert arm("repeated:2").name == "repeated" and arm("repeated:3").name == "repeated:3"
    with pytest.raises(DataError, match="one is there twice"):
        Study("tiny-gpt2", arms=("causal", "repeated", "repeated:2"))


@pytest.mark.parametrize("name", ["repeated:3", "next:20", "unmask:0,1"])
def test_every_arm_has_its_place_in_the_words(tmp_path, name):
    found = report([made_up(tmp_path / "s", CHANCES | {name: 75.0}, seeds=2, n=20)])
    assert any(text.startswith("**Other arms.**") and f"{name} " in text for text in found["words"])


def test_a_seed_that_numpy_does_not_take_is_refused_at_once():
    with pytest.raises(DataError, match="the seed -1 cannot be used"):
        Study("tiny-gpt2", seeds=(-1,))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"conditions": [{}], "curves": [], "unfinished": []}', "it holds a condition without name, model"),
        ('{"conditions": [3], "curves": [], "unfinished": []}', "it holds a condition that is none"),
        ('{"conditions": []}', "it has no conditions, curves, unfinished"),
    ],
)
def test_a_file_that_is_no_report_is_named(tmp_path, content, complaint):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(TrainingError, match=f"r.json is no report of labkit bench report: {complaint}"):
        report([tmp_path / "r.json"])


def test_a_report_goes_into_no_file_and_leaves_no_curve_of_an_earlier_one(tmp_path):
    found = report([made_up(tmp_path / "s", CHANCES, seeds=2, n=20)])
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot be written to"):
        written(found, tmp_path / "file" / "out")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("report-curve-7.svg", "report-curve-of-mine.svg"):
        (out / name).write_text("")
    written(found, out)
    assert not (out / "report-curve-7.svg").exists() and (out / "report-curve-of-mine.svg").exists()


def test_orders_that_are_none_are_refused():
    for orders in ((), ("question-frist",)):
        with pytest.raises(DataError, match="the orders are"):
            conditions(["ner:which-way-round"], orders=orders)
