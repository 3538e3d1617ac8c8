"""What a report says in words is no more than its numbers carry: the opening, the controls, and the limits."""

import copy
import json
import re

import pytest

from labkit.bench import effect_words, folders
from labkit.bench.effect_gaps import points
from labkit.bench.effect_report import report, written
from tests.made_up_studies import made_up

pytestmark = [pytest.mark.end_to_end, pytest.mark.usefixtures("few_draws")]
ADAPTED = {"causal": 50.0, "bidirectional": 60.0, "repeated": 70.0, "mntp:10": 68.0, "mntp:20": 72.0, "next:20": 50.0}


def metrics_of(folder):
    return sorted(folder.glob("runs/*/*/*/*/metrics.json"))


def with_baseline(folder, score):
    for file in metrics_of(folder):
        file.write_text(
            file.read_text().replace('"baselines": {}', f'"baselines": {{"test": {{"majority": {score}}}}}')
        )
    return folder


def test_an_arm_that_loses_so_much_that_it_falls_to_a_baseline_has_lost(tmp_path):
    chances = {"causal": 80.0, "bidirectional": 45.0, "repeated": 79.0}
    found = report([with_baseline(made_up(tmp_path / "s", chances), 0.5)])
    opening = found["words"][0]
    gap = found["conditions"][0]["arms"][1]["difference"]["mean"]
    lost = f"lost to it in none, fell as far as a baseline that needs no model in 1 (by {-gap:.1f} points)."
    assert f"beat the causal one in none of 1 conditions, {lost}" in opening


def test_where_neither_has_learned_nothing_has_fallen(tmp_path):
    chances = {"causal": 50.0, "bidirectional": 30.0}
    opening = report([with_baseline(made_up(tmp_path / "s", chances), 0.5)])["words"][0]
    assert "fell" not in opening and "was not shown to have learned the task in 1." in opening


def test_what_is_better_than_a_causal_model_that_has_not_learned_is_said_to_be(tmp_path):
    chances = {"causal": 45.0, "bidirectional": 44.0, "repeated": 80.0}
    words = report([with_baseline(made_up(tmp_path / "s", chances), 0.5)])["words"]
    said = re.compile(
        r"beat the causal one in 1 of 1 \(by \S+ points; in 1 of them from one that has not learned the task\)"
    )
    assert said.search(words[0])
    (control,) = [text for text in words if text.startswith("**The control")]
    assert re.search(r"It helps in 1 of 1 \(invented/classify \+\S+ \[.*?\], to one that has not learned\)", control)
    sound = report([with_baseline(made_up(tmp_path / "t", {**chances, "causal": 60.0}), 0.5)])["words"]
    assert "not learned the task)" not in sound[0] and not any("to one that has" in text for text in sound)


def test_a_set_that_was_made_for_it_is_told_apart_from_ordinary_text(tmp_path):
    found = report([made_up(tmp_path / "s", {"causal": 50.0, "bidirectional": 80.0, "repeated": 80.0})])
    made = copy.deepcopy(found["conditions"][0]) | {"name": "ways/ner", "diagnostic": {}}
    found["conditions"][0]["arms"][1]["difference"] |= {"mean": 0.5, "low": -1.0, "high": 2.0}
    told = effect_words.paragraphs({**found, "conditions": [*found["conditions"], made]})
    first, second = told[0], next(text for text in told if text.startswith("**Counted apart, as it was made for it:**"))
    assert "beat the causal one in none of 1 conditions, " in first
    assert "beat the causal one in 1 of 1 conditions (by " in second
    (claim,) = [text for text in told if text.startswith("**The common claim")]
    assert "of 1 conditions with an interval it is ruled out at this budget in 1, borne out in 0" in claim
    assert "made so that the mask has to cost: ways/ner." in claim


def test_adaptation_is_counted_once_a_condition_and_set_against_reading_twice(tmp_path):
    opening, filled = report([made_up(tmp_path / "s", ADAPTED)])["words"][:2]
    assert opening.startswith("**In short.**") and "gaps" not in opening
    begins = (
        "**Filling gaps first, in short.** An unmasked model that filled gaps before the task was better for it in 1"
    )
    assert filled.startswith(f"{begins} of 1 (by 1")
    assert "; set against reading twice, it was better in none of 1, was worse in none, made no clear" in filled


def test_two_objectives_are_compared_with_each_other_after_as_many_steps(tmp_path):
    chances = {"causal": 60.0, "bidirectional": 50.0, "repeated": 62.0, "mntp:20": 55.0, "mlm:20": 75.0, "mlm:40": 70.0}
    found = report([made_up(tmp_path / "s", chances, seeds=5, n=200)])
    pairs = {(pair["one"], pair["other"]): pair["difference"] for pair in found["conditions"][0]["pairs"]}
    assert {other for one, other in pairs if one == "mlm:20"} == {"mntp:20", "repeated", "bidirectional"}
    assert {other for one, other in pairs if one == "mlm:40"} == {"repeated", "bidirectional"}
    assert pairs["mlm:20", "mntp:20"]["low"] > 5.0  # planted: 20 points
    (after,) = re.findall(r"\*\*After 20 steps of MLM\*\*[^*]*", "\n".join(found["words"]))
    assert "\n- against as many steps of MNTP it is better in 1 of 1 (invented/classify +" in after


def test_a_model_that_was_made_bidirectional_is_a_mark_that_the_others_are_set_against(tmp_path):
    chances = {"causal": 60.0, "bidirectional": 50.0, "repeated": 78.0, "encoder:some-bert": 80.0}
    found = report([made_up(tmp_path / "s", chances, seeds=5, n=400)])
    pairs = {(pair["one"], pair["other"]): pair["difference"] for pair in found["conditions"][0]["pairs"]}
    assert pairs["encoder:some-bert", "bidirectional"]["low"] > 15.0  # planted: 30 points
    told = "\n".join(found["words"])
    (paragraph,) = re.findall(r"\*\*A model that was made bidirectional, some-bert,\*\*[^*]*", told)
    assert "no control for the mask. Against the causal one it is better in 1 of 1 (invented/classify +" in paragraph
    assert "\n- against the unmasked model it is better in 1 of 1 (invented/classify +" in paragraph
    assert "\n- against the one that reads twice it shows no clear difference in 1 of 1" in paragraph
    assert "**Other arms.**" not in told and "Not measured here at all: adaptation by MLM, adaptation by MNTP," in told


def test_what_an_adaptation_gives_beyond_the_mask_alone_is_told_beside_its_control(tmp_path):
    found = report([made_up(tmp_path / "s", ADAPTED)])
    means = {one["name"]: one["mean"] for one in found["conditions"][0]["arms"]}
    (pair,) = [each for each in found["conditions"][0]["pairs"] if each["other"] == "next:20"]
    beyond = means["mntp:20"] - means["bidirectional"] - (means["next:20"] - means["causal"])
    assert pair["beyond"]["mean"] == pytest.approx(beyond) and pair["beyond"]["low"] < 12.0 < pair["beyond"]["high"]
    assert pair["beyond"]["mean"] + means["bidirectional"] - means["causal"] == pytest.approx(
        pair["difference"]["mean"]
    )
    assert f"add to the causal one): invented/classify {beyond:+.1f} [" in "\n".join(found["words"])
    without = {name: chance for name, chance in ADAPTED.items() if name != "bidirectional"}
    (pair,) = [
        p for p in report([made_up(tmp_path / "t", without)])["conditions"][0]["pairs"] if p["other"] == "next:20"
    ]
    assert "beyond" not in pair


def test_numbers_of_steps_with_other_numbers_of_seeds_turn_no_sign(tmp_path):
    folder = made_up(tmp_path / "s", {"causal": 50.0, "bidirectional": 30.0, "mntp:50": 50.0, "mntp:400": 70.0})
    for seed in (3, 4):
        run = folders.run_folder(folder, "invented/classify", "mntp:50", None, seed)
        (run / "metrics.json").unlink()
    words = "\n".join(report([folder])["words"])
    assert "of 5, 3, 5 seeds, so it is not said from which number of steps on it is better" in words
    assert "from 400 on" not in words
    assert (
        "Seeds differ in number on invented/classify (5 for causal, bidirectional, mntp:400 and 3 for mntp:50)" in words
    )


@pytest.mark.parametrize(("best", "told"), [(5, "In 15 of 15 runs"), (2, "In 0 of 15 runs")])
def test_how_many_runs_were_still_learning_is_said(tmp_path, best, told):
    folder = made_up(tmp_path / "s", {"causal": 50.0, "bidirectional": 60.0, "right-to-left": 60.0})
    for file in metrics_of(folder):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"best_step": best}))
        history = [{"step": step, "accuracy": 0.5} for step in (2, 5)]
        (file.parent / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    found = report([folder])
    assert (
        f" {told} with several evaluations (all training examples) the best on dev was the last" in found["words"][-1]
    )
    counted = 10 if best == 5 else 0  # of the arms that the paragraph tells of
    assert f"alone, and in {counted} of these 10 runs dev was at its best at the end: whether" in found["words"][0]


def test_what_was_not_measured_is_named_by_task(tmp_path):
    found = report([made_up(tmp_path / "s", ADAPTED)])
    made = copy.deepcopy(found["conditions"][0]) | {"name": "other/qa", "task": "qa"}
    made["arms"] = [one for one in made["arms"] if not one["name"].startswith("mntp")]
    made["pairs"] = [pair for pair in made["pairs"] if not pair["one"].startswith("mntp")]
    told = effect_words.paragraphs({**found, "conditions": [*found["conditions"], made]})[-1]
    assert "Not measured here at all: adaptation by MLM, adaptation by MNTP on questions, a model that" in told


def test_a_table_after_the_opening_has_a_line_for_each_condition_and_size(tmp_path):
    few = {"causal": 50.0, "bidirectional": 30.0}
    found = report([made_up(tmp_path / "s", ADAPTED, smaller={5: few})])
    gaps = {one["name"]: one.get("difference") for one in found["conditions"][0]["arms"]}
    gaps["few"] = found["conditions"][0]["sizes"][0]["arms"]["bidirectional"]["difference"]
    told = {name: f"**{points(gap)}**" for name, gap in gaps.items() if gap}
    lines = written(found, tmp_path / "out")[0].read_text().splitlines()
    assert lines[2] == found["words"][0] and lines[4].startswith("| | causal | mask removed |")
    causal = found["conditions"][0]["arms"][0]["mean"]
    assert lines[6] == (
        f"| invented/classify, none, full | {causal:.1f} | {told['bidirectional']} | {told['repeated']} "
        f"| {told['mntp:20']} (mntp:20) |"
    )
    assert lines[7].startswith("| - with 5 of 10 training examples | ") and f" | {told['few']} |  |  |" in lines[7]


def test_a_model_that_is_over_its_baseline_on_a_few_texts_alone_has_not_learned(tmp_path):
    """All seeds are right on the same texts, so their interval is narrow; on other texts the baseline may be better."""
    folder = made_up(tmp_path / "s", {"causal": 50.0, "bidirectional": 50.0}, n=40)
    right = {"causal": range(24), "bidirectional": range(30), "baseline": range(14, 36)}
    lines = {
        name: [{"id": str(n), "group": "", "correct": int(n in which)} for n in range(40)]
        for name, which in right.items()
    }
    for file in folder.glob("runs/*/*/*/*/judged.test.jsonl"):
        arm = file.parents[2].name
        file.write_text("".join(json.dumps(line) + "\n" for line in lines[arm]))
    with_baseline(folder, 22 / 40)
    arms = {one["name"]: one for one in report([folder])["conditions"][0]["arms"]}
    assert arms["causal"]["learned"] and arms["bidirectional"]["learned"]  # as of older studies

    file = folders.baselines_file(folder, "invented/classify", None)
    folders.write_json(
        file, {"majority": lines["baseline"], "nothing": [line | {"correct": 0} for line in lines["causal"]]}
    )
    found = report([folder])
    arms = {one["name"]: one for one in found["conditions"][0]["arms"]}
    gap = arms["causal"]["over_baseline"]
    assert gap["baseline"] == "majority" and gap["mean"] == pytest.approx(5.0) and gap["low"] < 0 < gap["high"]
    assert not arms["causal"]["learned"] and "baselines' answers were not kept" not in found["words"][-1]
    assert report([folder])["conditions"] == report([written(found, tmp_path / "out")[1]])["conditions"]


def test_a_model_has_learned_if_it_is_over_each_baseline_and_not_only_over_the_best_on_average(tmp_path):
    """The baseline that is better on average answers the very texts that the model does, the other one others."""
    folder = made_up(tmp_path / "s", {"causal": 50.0, "bidirectional": 50.0}, n=40)
    right = {"run": range(20, 40), "near": range(20, 34), "far": range(13)}
    lines = {
        name: [{"id": str(n), "group": "", "correct": int(n in which)} for n in range(40)]
        for name, which in right.items()
    }
    for file in folder.glob("runs/*/*/*/*/judged.test.jsonl"):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines["run"]))
    file = folders.baselines_file(folder, "invented/classify", None)
    folders.write_json(file, {name: lines[name] for name in ("near", "far")})
    with_baseline(folder, 14 / 40)
    causal = report([folder])["conditions"][0]["arms"][0]
    assert causal["over_baseline"]["baseline"] == "far" and causal["over_baseline"]["low"] < 0
    assert not causal["learned"]
    folders.write_json(file, {"near": lines["near"]})
    assert report([folder])["conditions"][0]["arms"][0]["learned"]


def test_runs_that_share_no_seed_are_not_said_to_be_missing(tmp_path):
    folder = made_up(tmp_path / "s", {"causal": 50.0, "bidirectional": 60.0, "repeated": 60.0}, seeds=4)
    for name, seeds in (("causal", (0, 1)), ("bidirectional", (2, 3)), ("repeated", (2, 3))):
        for seed in seeds:
            (folders.run_folder(folder, "invented/classify", name, None, seed) / "metrics.json").unlink()
    words = " ".join(report([folder])["words"])
    assert "no finished run" not in words
    assert "bidirectional has no run to compare: none on all examples with a seed that the other arm has, too" in (
        " ".join(report([made_up(tmp_path / "t", {"causal": 50.0})])["words"])
    )


def test_a_set_without_an_interval_is_neither_counted_nor_among_the_differences(tmp_path):
    found = report([made_up(tmp_path / "s", {"causal": 50.0, "bidirectional": 80.0})])
    alone = report([made_up(tmp_path / "one", {"causal": 50.0, "bidirectional": 80.0}, seeds=1)])["conditions"][0]
    made = found["conditions"][0] | {"name": "ways/ner", "diagnostic": {}}
    words = effect_words.paragraphs({**found, "conditions": [alone | {"name": "one/classify"}, made]})
    assert "beat the causal one in 1 of 1 conditions" in words[0] and "none of 0" not in " ".join(words)
    assert "1 differences" in words[-1] or "1 difference" in words[-1]
