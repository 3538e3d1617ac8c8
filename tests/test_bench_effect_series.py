"""Steps of adaptation that turn the sign of what removing the mask does are found, with all examples and with fewer."""

import json

import pytest

from labkit.bench.effect_report import report
from labkit.bench.effect_series import picture
from tests.made_up_studies import made_up

pytestmark = [pytest.mark.end_to_end, pytest.mark.usefixtures("few_draws")]
TURNS = {"causal": 50.0, "bidirectional": 30.0, "mntp:50": 50.0, "mntp:400": 70.0}
NEVER = {"causal": 50.0, "bidirectional": 20.0, "mntp:50": 22.0, "mntp:400": 20.0}


def of_steps(made):
    (text,) = [text for text in made["words"] if text.startswith("**Over the steps of adaptation**")]
    return text


def test_the_number_of_steps_that_turns_the_sign_is_told_for_every_size(tmp_path):
    made = report([made_up(tmp_path / "s", NEVER, smaller={5: TURNS})])
    few, whole = of_steps(made).split("invented/classify")[1:]
    assert few.startswith(" with 5 examples, MNTP: none -")
    assert "no longer shown to be worse than causal from 50 steps on and shown to be better from 400 on" in few
    assert "still shown to be worse than causal after the most steps and not shown to be better" in whole
    pairs = {pair["one"]: pair["difference"] for pair in made["conditions"][0]["sizes"][0]["pairs"]}
    assert f"400 steps {gap(made, 'mntp:400')} ({spelt(pairs['mntp:400'])})" in few


def gap(made, name):
    return spelt(made["conditions"][0]["sizes"][0]["arms"][name]["difference"])


def spelt(found):
    return f"{found['mean']:+.1f} [{found['low']:.1f}, {found['high']:.1f}]"


def test_the_curve_of_every_size_runs_from_no_step_to_the_most_beside_the_causal_model(tmp_path):
    made = report([made_up(tmp_path / "s", NEVER, smaller={5: TURNS})])
    few, whole = [curve for curve in made["curves"] if curve["kind"] == "adaptation"]
    assert few["title"] == "invented/classify, none: how many steps of adaptation (5 examples)"
    assert whole["title"] == "invented/classify, none: how many steps of adaptation"
    for curve in (few, whole):
        assert [steps for steps, _ in curve["lines"]["bidirectional after mntp"]] == [0, 50, 400]
        assert [steps for steps, _ in curve["lines"]["causal"]] == [0, 400]
        assert len({tuple(scores) for _, scores in curve["lines"]["causal"]}) == 1
        assert "bidirectional after mntp" in picture(curve).alt
    assert few["lines"] != whole["lines"]


def test_adaptations_that_came_to_a_study_one_by_one_stand_in_the_order_of_their_steps(tmp_path):
    asked = ["causal", "mntp:200", "unmask:above-1/3", "mntp:1000", "unmask:0,1", "mntp:50"]
    found = report([made_up(tmp_path / "s", dict.fromkeys(asked, 60.0), n=20, smaller={5: dict.fromkeys(asked, 60.0)})])
    in_order = ["causal", "mntp:50", "mntp:200", "mntp:1000", "unmask:above-1/3", "unmask:0,1"]
    (condition,) = found["conditions"]
    assert [one["name"] for one in condition["arms"]] == in_order
    assert list(condition["sizes"][0]["arms"]) == in_order


def test_one_number_of_steps_is_no_series(tmp_path):
    one = {name: chance for name, chance in TURNS.items() if name != "mntp:50"}
    made = report([made_up(tmp_path / "s", one)])
    assert not any("Over the steps of adaptation" in text for text in made["words"])
    assert not any(curve["kind"] == "adaptation" for curve in made["curves"])


def test_a_sign_that_turns_back_is_not_told_as_turned(tmp_path):
    back = {"causal": 50.0, "bidirectional": 30.0, "mntp:50": 70.0, "mntp:400": 30.0}
    made = report([made_up(tmp_path / "s", back)])
    assert "still shown to be worse than causal after the most steps and not shown to be better" in of_steps(made)


def test_the_curve_of_an_earlier_report_gets_the_causal_model_too(tmp_path):
    made = report([made_up(tmp_path / "s", TURNS)])
    (curve,) = [curve for curve in made["curves"] if curve["kind"] == "adaptation"]
    before = curve | {"lines": {name: line for name, line in curve["lines"].items() if name != "causal"}}
    earlier = made | {"curves": [before if each is curve else each for each in made["curves"]]}
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    again = report([tmp_path / "earlier.json"])
    assert json.loads(json.dumps(curve)) in json.loads(json.dumps(again["curves"]))


def test_of_several_numbers_of_steps_one_is_drawn_over_the_sizes(tmp_path):
    fewer = {name: chance for name, chance in TURNS.items() if name != "mntp:400"}
    made = report([made_up(tmp_path / "s", NEVER, smaller={5: fewer, 7: TURNS})])
    (curve,) = [curve for curve in made["curves"] if curve["kind"] == "size"]
    assert list(curve["lines"]) == ["causal", "bidirectional", "mntp:50"]
    assert [size for size, _ in curve["lines"]["mntp:50"]] == [5, 7, 10]
    alike = report([made_up(tmp_path / "t", NEVER, smaller={5: TURNS})])
    (curve,) = [curve for curve in alike["curves"] if curve["kind"] == "size"]
    assert list(curve["lines"]) == ["causal", "bidirectional", "mntp:400"]


def test_without_the_unadapted_arm_no_sign_is_said_to_have_turned(tmp_path):
    made = report([made_up(tmp_path / "s", {"causal": 50.0, "mntp:50": 50.0, "mntp:400": 70.0})])
    assert "never shown to be worse and shown to be better from 400 on" in of_steps(made)
